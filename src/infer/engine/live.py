"""The live view of a running engine for the server's pages: recent steps, blocks, queue and prefix tree.

    page polls  ──► LiveView.look()   turns the view on for WATCH_S more seconds; returns a LiveSnapshot
    step ends   ──► LiveView.note()   writes one row of integers into a ring; called only while the view is on

While no page polls, a step only checks a flag. A snapshot is made between two steps, at most every
MIN_INTERVAL_S, and so rarely that all snapshots together take at most MAX_SHARE of the time. A page that
polls earlier gets the last snapshot again, so any number of pages costs as much as one.

**Blocks** are drawn as a row of cells, one per block, in the order of their numbers:

    code     0 free   1 cached: only the prefix tree holds it   2 shared: two or more sequences hold it
             3 held by a sequence of a request that is not listed   4 + i: held by one of `requests[i]`
    cells    [4, 3, 2, 1, 0, 252]    run lengths: 3 blocks of request 0, 1 shared, 252 free

With more than MAX_CELLS blocks, a cell stands for `blocks_per_cell` blocks and shows their most frequent kind
(in a tie the first of held, shared, cached, free). If that is held, it shows the owner of the first held
block. `counts` are exact.

A snapshot contains ids and counts, but no tokens and no text.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Seq
from heapq import nsmallest
from typing import Final

import msgspec
import numpy as np

from infer.cache.host_bytes import free_host_bytes, host_memory
from infer.cache.prefix_tree import Branch
from infer.scheduling.plan import StepPlan
from infer.scheduling.scheduler import Scheduler
from infer.scheduling.sequence import SequenceGroup
from infer.scheduling.watch import BATCH_FULL

WAITS: Final = "step", "place", "budget", "blocks", "batch"  # words for pages: one for each of HOLDS
WATCH_S: Final = 3.0  # seconds after the last poll in which steps are still recorded
MIN_INTERVAL_S: Final = 0.1  # least seconds between two snapshots
MAX_SHARE: Final = 0.005  # largest share of the time that snapshots may take
SLOW_INTERVAL_S: Final = 1.0  # seconds between two updates of prefix tree and host memory
MAX_STEPS: Final = 512  # rows of the ring
MAX_CELLS: Final = 4096
MAX_RUNNING: Final = 256  # running requests that are listed
MAX_WAITING: Final = 100  # waiting requests that are listed
MAX_BRANCHES: Final = 24

FREE, CACHED, SHARED, UNLISTED, FIRST_LISTED = range(5)  # codes of blocks
HELD: Final = UNLISTED  # the kind of every block that one sequence holds
NUM_KINDS: Final = HELD + 1

Held = tuple[int, list[int], list[int]]  # the code of a sequence's request, its blocks, its host blocks

STEP_COLUMNS: Final = (
    "step",
    "decode_rows",  # sequences that computed their last token, and drafts after it
    "prompt_rows",  # chunks of prompts, and of tokens that a preempted sequence computes again
    "prompt_tokens",  # tokens of these chunks
    "drafts",  # drafts verified by the step
    "accepted",  # drafts that were accepted
    "forks",  # sequences forked since the previous row
    "preemptions",
    "transfers",  # blocks copied or swapped before the step
    "in_graph",  # 1: the model ran in a captured graph
    "microseconds",  # time from the launch, or from the end of the previous step if later, to the step's end
)
NUM_COLUMNS: Final = len(STEP_COLUMNS)


class LiveRequest(msgspec.Struct, frozen=True, array_like=True):
    """The state of one request; counts are summed over its sequences."""

    request_id: str
    state: str  # "decode", "prefill" or "waiting"
    waits_for: str  # see `waits_for`; empty: it runs
    num_sequences: int
    num_prompt: int  # tokens
    num_output: int  # tokens
    num_computed: int  # tokens whose keys and values are in the cache
    num_cached: int  # prompt tokens found in the prefix cache on admission
    num_blocks: int  # references to device blocks
    num_host_blocks: int


class LiveSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """An engine between two steps."""

    number: int  # number of the snapshot, from 1
    made_at: float  # seconds since 1970
    interval_s: float  # seconds until the next one is made
    step: int  # number of the scheduler's step
    num_running: int  # sequences
    num_waiting: int  # sequences, with those whose constraint is being compiled
    max_batch_size: int
    token_budget: int
    block_size: int
    num_blocks: int
    blocks_per_cell: int
    counts: tuple[int, int, int, int]  # blocks that are free, cached, shared, held by one sequence
    cells: list[int]  # run lengths: a code and its number of cells, alternating
    num_host_blocks: int
    host_blocks_per_cell: int
    host_cells: list[int]
    requests: list[LiveRequest]  # running ones by urgency, then waiting ones in the order of their turns
    num_unlisted: int  # sequences of requests that are not listed
    branches: list[Branch]  # branches of the prefix tree, in blocks
    host_bytes: tuple[int, int, int]  # the machine's memory: total, used by this process, free
    steps: bytes  # rows of int64, see STEP_COLUMNS, the oldest first


class LiveView:
    """The ring of steps and the last snapshot of one engine; the engine's thread owns it."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self.is_on = False
        self.clock = clock
        self._scheduler = scheduler
        self._until = 0.0
        self._rows = array("q")  # rows, concatenated; writing is much faster than with numpy
        self._num_rows = 0  # rows written since the view was turned on
        self._num_forks = 0  # forks counted up to the last row
        self._last: LiveSnapshot | None = None
        self._num_made = 0
        self._next_at = 0.0
        self._slow: tuple[float, list[Branch], tuple[int, int, int]] = (-np.inf, [], (0, 0, 0))

    # -- steps ------------------------------------------------------------------------------------

    def note(self, plan: StepPlan, ids: Seq[Seq[int]], seconds: float, *, in_graph: bool) -> None:
        """Record a step that has ended, before its drafts are retracted; turns the view off if unused."""
        now = self.clock()
        if now > self._until:
            self.is_on, self._last = False, None
            return
        chunks = plan.chunks
        num_rows = num_decoding = len(chunks)
        num_tokens = num_accepted = 0
        if not chunks.is_repeated:
            lengths = chunks.stops - chunks.starts
            prompts = np.fromiter((seq.num_prompt for seq in chunks.sequences), np.int64, num_rows)
            decodes = chunks.draws & (chunks.starts >= prompts)
            if chunks.num_drafts:
                pairs = zip(chunks.sequences, ids, strict=True)
                num_accepted = sum(max(len(drawn) - 1, 0) for seq, drawn in pairs if seq.drafts)
            else:
                decodes &= lengths == 1
            num_decoding = int(np.count_nonzero(decodes))
            num_tokens = int(lengths[~decodes].sum())
        row = (
            plan.step,
            num_decoding,
            num_rows - num_decoding,
            num_tokens,
            chunks.num_drafts,
            num_accepted,
            self._scheduler.num_forks - self._num_forks,
            len(plan.preempted),
            len(plan.transfers),
            in_graph,
            round(1e6 * seconds),
        )
        start = self._num_rows % MAX_STEPS * NUM_COLUMNS
        self._rows[start : start + NUM_COLUMNS] = array("q", row)
        self._num_rows += 1
        self._num_forks = self._scheduler.num_forks

    # -- snapshots --------------------------------------------------------------------------------

    def look(self, compiling: Iterable[SequenceGroup] = ()) -> LiveSnapshot:
        """Return a new snapshot, or the last one if it is recent; `compiling`: requests not yet queued."""
        now = self.clock()
        if not self.is_on or now > self._until:
            self.is_on, self._num_rows = True, 0
            self._num_forks = self._scheduler.num_forks
            self._rows = array("q", bytes(8 * NUM_COLUMNS * MAX_STEPS))
        self._until = now + WATCH_S
        if self._last is None or now >= self._next_at:
            self._last = self._make(now, list(compiling))
        return self._last

    def _make(self, now: float, compiling: list[SequenceGroup]) -> LiveSnapshot:
        scheduler, pool = self._scheduler, self._scheduler.pool
        running, waiting = scheduler.running, [seq for seq in scheduler.sequences() if not seq.is_running]
        groups = {id(seq.group): seq.group for seq in running[: 4 * MAX_RUNNING]}
        listed = dict(list(groups.items())[:MAX_RUNNING])
        turns = nsmallest(MAX_WAITING, waiting, key=lambda seq: seq.sort_key)
        listed |= {id(seq.group): seq.group for seq in turns}
        codes = {group: FIRST_LISTED + place for place, group in enumerate(listed)}
        holders = (*running, *turns, *(seq for seq in waiting if seq.is_swapped))
        owners = {seq.seq_id: codes.get(id(seq.group), UNLISTED) for seq in holders}
        held = [
            (owners.get(seq_id, UNLISTED), blocks, swapped)
            for seq_id, blocks, swapped in pool.tables_of_all()
        ]
        own = [row[:2] for row in held]
        codes_of_blocks = _codes(own, pool.num_blocks, *pool.spare_blocks)
        swapped = [(code, blocks) for code, _, blocks in held]
        host = _codes(swapped, pool.num_host_blocks, *pool.spare_host_blocks)
        per_cell, cells = _cells(codes_of_blocks)
        host_per_cell, host_cells = _cells(host)
        first = turns[0].group if turns else None
        requests = [
            _describe(group, scheduler, *num_held, is_first=group is first)
            for group, num_held in zip(listed.values(), _tally(held, len(listed)), strict=True)
        ]
        room = MAX_WAITING - len(turns)
        requests += [_compiling(group) for group in compiling[:room]]
        num_listed = sum(id(seq.group) in listed for seq in running) + len(turns) + min(len(compiling), room)
        branches, host_bytes = self._look_slowly(now)
        self._num_made += 1
        free, cached, shared, owned = np.bincount(
            np.minimum(codes_of_blocks, HELD), minlength=NUM_KINDS
        ).tolist()
        interval_s = max(MIN_INTERVAL_S, (self.clock() - now) / MAX_SHARE)
        self._next_at = now + interval_s
        return LiveSnapshot(
            number=self._num_made,
            made_at=time.time(),
            interval_s=interval_s,
            step=scheduler.step,
            num_running=len(running),
            num_waiting=len(waiting) + len(compiling),
            max_batch_size=scheduler.config.max_batch_size,
            token_budget=scheduler.config.max_num_batched_tokens,
            block_size=pool.block_size,
            num_blocks=pool.num_blocks,
            blocks_per_cell=per_cell,
            counts=(free, cached, shared, owned),
            cells=cells,
            num_host_blocks=pool.num_host_blocks,
            host_blocks_per_cell=host_per_cell,
            host_cells=host_cells,
            requests=requests,
            num_unlisted=len(running) + len(waiting) + len(compiling) - num_listed,
            branches=branches,
            host_bytes=host_bytes,
            steps=self._last_rows(),
        )

    def _last_rows(self) -> bytes:
        if self._num_rows <= MAX_STEPS:
            return self._rows[: self._num_rows * NUM_COLUMNS].tobytes()
        first = self._num_rows % MAX_STEPS * NUM_COLUMNS
        return self._rows[first:].tobytes() + self._rows[:first].tobytes()

    def _look_slowly(self, now: float) -> tuple[list[Branch], tuple[int, int, int]]:
        looked_at, branches, host_bytes = self._slow
        if now - looked_at >= SLOW_INTERVAL_S:
            branches = self._scheduler.pool.tree.hottest(MAX_BRANCHES)
            host_bytes = (*host_memory(), free_host_bytes())
            self._slow = now, branches, host_bytes
        return branches, host_bytes


def waits_for(scheduler: Scheduler, *, is_first: bool) -> str:
    """Return the reason why a sequence waits (scheduling/watch.py); "turn": it is not the first in the queue.

    "place": the batch is full, for all of them. "blocks": too few are free. "budget": other sequences use up
    the tokens of a step. "batch": a static batch runs to its end. "step": it waits for the next plan.
    """
    if scheduler.hold == BATCH_FULL or is_first:
        return WAITS[scheduler.hold]
    return "turn"


def _describe(
    group: SequenceGroup, scheduler: Scheduler, num_blocks: int, num_host_blocks: int, *, is_first: bool
) -> LiveRequest:
    """Return the counts of a request; it runs if one of its sequences runs."""
    sequences = group.unfinished
    states = {seq.state for seq in sequences}
    state = next((name for name in ("DECODE", "PREFILL") if name in states), "WAITING").lower()
    reason = waits_for(scheduler, is_first=is_first) if states == {"WAITING"} else ""
    return LiveRequest(
        group.request.request_id,
        state,
        reason,
        len(sequences),
        len(group.request.prompt),
        sum(seq.num_output for seq in sequences),
        sum(seq.num_computed for seq in sequences),
        sequences[0].num_cached if sequences else 0,
        num_blocks,
        num_host_blocks,
    )


def _compiling(group: SequenceGroup) -> LiveRequest:
    """Return the counts of a request that waits until its constraint is compiled."""
    request = group.request
    return LiveRequest(request.request_id, "waiting", "compile", 1, len(request.prompt), 0, 0, 0, 0, 0)


def _tally(held: Iterable[Held], num_requests: int) -> list[tuple[int, int]]:
    """Return the number of blocks that each listed request holds on the device and on the host."""
    totals = [(0, 0)] * (FIRST_LISTED + num_requests)
    for code, blocks, host_blocks in held:
        num_blocks, num_host_blocks = totals[code]
        totals[code] = num_blocks + len(blocks), num_host_blocks + len(host_blocks)
    return totals[FIRST_LISTED:]


def _codes(
    held: Iterable[tuple[int, list[int]]], num_blocks: int, free: Collection[int], idle: Collection[int]
) -> np.ndarray:
    """Return a code for each block, from the blocks of sequences and the shorter of `free` and `idle`."""
    is_idle_few = len(idle) <= len(free)
    few = idle if is_idle_few else free
    codes = np.full(num_blocks, FREE if is_idle_few else CACHED, dtype=np.int64)
    codes[_numbers(few)] = CACHED if is_idle_few else FREE
    blocks: list[int] = []
    owners: list[int] = []
    counts: list[int] = []
    for code, held_blocks in held:
        blocks += held_blocks
        owners.append(code)
        counts.append(len(held_blocks))
    if blocks:
        taken = _numbers(blocks)
        codes[taken] = np.repeat(owners, counts)
        codes[np.bincount(taken, minlength=num_blocks) > 1] = SHARED
    return codes


def _numbers(blocks: Collection[int]) -> np.ndarray:
    return np.fromiter(blocks, np.int64, len(blocks))


def _cells(codes: np.ndarray) -> tuple[int, list[int]]:
    """Return the number of blocks per cell, and the cells as run lengths."""
    per_cell = max(-(-len(codes) // MAX_CELLS), 1)
    if per_cell > 1:
        codes = _summarise(codes, per_cell)
    if not len(codes):
        return per_cell, []
    begins = np.concatenate(([0], np.flatnonzero(np.diff(codes)) + 1))
    lengths = np.diff(np.append(begins, len(codes)))
    return per_cell, np.stack((codes[begins], lengths), axis=1).ravel().tolist()


def _summarise(codes: np.ndarray, per_cell: int) -> np.ndarray:
    """Return the most frequent kind of each cell; if that is held, the owner of its first held block."""
    cells, kinds = np.arange(len(codes)) // per_cell, np.minimum(codes, HELD)
    num_cells = int(cells[-1]) + 1
    counts = np.bincount(cells * NUM_KINDS + kinds, minlength=num_cells * NUM_KINDS).reshape(-1, NUM_KINDS)
    most = HELD - np.argmax(counts[:, ::-1], axis=1)  # the highest kind if counts are equal
    held = np.flatnonzero(kinds == HELD)[::-1]
    first_held = np.zeros(num_cells, dtype=np.int64)
    first_held[cells[held]] = codes[held]  # the first block of a cell is written last
    summary: np.ndarray = np.where(most == HELD, first_held, most)
    return summary
