"""The masks of a step: ids that were drawn go to matchers, which say what may follow.

A matcher takes 3 microseconds for an id and 3 for a mask in the middle of a text, elsewhere 20 and more. So
32 rows keep a core busy for half of a fast model's step, and leave nothing of the engine's own in its caches.
Many rows are therefore handed to threads:

    engine     ids ──┬──► thread 1: rows  0..7 ──► native thread 1: consume, fill ──┬──► sample
    (waits)          └──► thread 2: rows 8..15 ──► native thread 2: consume, fill ──┘

Each has a native thread of its own (an `LLExecutor` with one), which works without the interpreter's lock and
sees the same matchers in every step, so that they stay in its core's caches. One pool for all rows moves
matchers between cores, which takes as long as it saves (docs/log.md).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple
from weakref import finalize

import numpy as np

from infer.constraints.guide import Guide

if TYPE_CHECKING:
    from llguidance import LLMatcher

    _Row = tuple[int, Guide, LLMatcher, int | None]  # its number, and the id that its matcher has not seen

MAX_THREADS = 8
ROWS_PER_THREAD = 6  # fewer are not worth a thread


# a guide whose next id is drawn under a mask; the id before it, if its matcher has not seen that (it stops
# nothing); ids proposed to follow, each with another mask after it
Turn = tuple[Guide, int | None, Sequence[int]]


class _Job(NamedTuple):
    pairs: list[tuple[LLMatcher, int]]  # ids to consume
    rows: list[tuple[LLMatcher, int]]  # masks to fill
    place: tuple[int, int, int]  # address of the first mask, bytes of each, number of them
    number: int  # place among the jobs of a step
    answers: SimpleQueue[tuple[int, list[bool] | Exception]]  # which ids were allowed


def num_threads() -> int:
    """The number of threads that fill masks: one for each core of this process, but for the engine's own."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_THREADS, num_cores - 1))


class MaskFiller:
    """Fills the masks of a step; its threads begin with the first step that has many."""

    def __init__(self) -> None:
        self._num_threads = num_threads()
        self._threads: list[SimpleQueue[_Job | None]] = []
        self._last: tuple[list[Guide | None], np.ndarray] = [], np.empty((0, 1), dtype=np.int32)

    def fill(self, turns: Iterable[Turn], masks_KW: np.ndarray) -> list[Guide]:
        """Write the masks of guides and their drafts, in order; returns guides that have reached a limit.

        A guide has a row for its next id, and one for the id after each draft. The row of a guide that has
        reached a limit, or whose constraint has ended with its last id, allows everything.
        """
        assert masks_KW.flags.c_contiguous
        guides: list[Guide | None] = []  # None: a row of a guide with drafts
        rows: list[_Row] = []
        for guide, token_id, drafts in turns:
            number = len(guides)
            if token_id is not None and (drafts or guide.due):
                guide.advance_one(token_id)
                token_id = None
            if drafts:
                guide.fill_window(drafts, masks_KW[number : number + 1 + len(drafts)])
                guides += [None] * (1 + len(drafts))
                continue
            guides.append(guide)
            if guide.matcher is None or guide.due:
                guide.fill(masks_KW[number])
            else:
                rows.append((number, guide, guide.matcher, token_id))
        self._fill_rows(rows, masks_KW)
        for number, guide, matcher, _ in rows:
            if guide.matcher is not matcher or matcher.is_error():
                guide.fill(masks_KW[number])
        self._last = guides, masks_KW
        return [guide for _, guide, _, _ in rows if guide.error is not None]

    def _fill_rows(self, rows: list[_Row], masks_KW: np.ndarray) -> None:
        """Let matchers consume ids and fill masks, here or in threads."""
        first, num_bytes = masks_KW.ctypes.data, masks_KW.strides[0]  # once: of each row it takes 2 us
        num_jobs = min(self._num_threads, len(rows) // ROWS_PER_THREAD)
        if num_jobs < 2:
            for number, guide, matcher, token_id in rows:
                if token_id is not None:
                    guide.advance_one(token_id)
                matcher.unsafe_compute_mask_ptr(first + number * num_bytes, num_bytes)
            return
        if not self._threads:
            self._threads = [SimpleQueue() for _ in range(self._num_threads)]
            for jobs in self._threads:
                Thread(target=_work, args=(jobs,), name="infer-masks", daemon=True).start()
                finalize(self, jobs.put, None)
        parts = [rows[len(rows) * i // num_jobs : len(rows) * (i + 1) // num_jobs] for i in range(num_jobs)]
        answers: SimpleQueue[tuple[int, list[bool] | Exception]] = SimpleQueue()
        for i, part in enumerate(parts):
            pairs = [(matcher, token_id) for _, _, matcher, token_id in part if token_id is not None]
            masks = [(matcher, number) for number, _, matcher, _ in part]
            self._threads[i].put(_Job(pairs, masks, (first, num_bytes, len(masks_KW)), i, answers))
        for _ in parts:
            i, allowed = answers.get()
            if isinstance(allowed, Exception):
                raise allowed
            drawn = [(guide, token_id) for _, guide, _, token_id in parts[i] if token_id is not None]
            for (guide, token_id), is_allowed in zip(drawn, allowed, strict=True):
                guide.advance_one(token_id, is_matched=is_allowed)

    def look_back(self) -> int:
        """Tell the guides what the last masks allow, when the step is on its way.

        Returns how many draws would be saved if the ids were appended that must come next.
        """
        (guides, masks_KW), num_saved = self._last, 0
        self._last = [], masks_KW[:0]
        probes = next((each.grammar.probes for each in guides if each is not None and each.grammar), ())
        are_wide = np.full(len(guides), len(probes) > 0, dtype=np.int32)
        for token_id in probes:
            are_wide &= masks_KW[:, token_id // 32] >> token_id % 32
        for row, (guide, is_wide) in enumerate(zip(guides, are_wide.tolist(), strict=True)):
            if guide is None:
                continue
            if guide.due is None and (is_wide or not _allows_one(masks_KW[row])):
                guide.due = ()  # there is a choice, and the grammar need not be asked
            if ids := guide.forced():
                num_saved += len(ids) - 1
        return num_saved


def _allows_one(mask_W: np.ndarray) -> bool:
    return np.count_nonzero(mask_W) == 1 and int(mask_W.view(np.uint32).max()).bit_count() == 1


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    """Do jobs until None comes; their matchers are used by one native thread, which holds no lock."""
    from llguidance import LLExecutor

    executor = LLExecutor(1)
    while (job := jobs.get()) is not None:
        try:
            allowed: list[bool] | Exception = executor.consume_token_par(job.pairs) if job.pairs else []
            executor.unsafe_compute_mask_ptr(job.rows, *job.place)
        except Exception as error:  # for the engine's thread, which waits
            allowed = error
        job.answers.put((job.number, allowed))
        del job  # a matcher may be large
