"""Describe a step of the engine as text: its plan, samples and reasons, the queue, the owners of each block.

`StepFrames` is an observer. The engine notifies it within a step; the rest is read from public state between
steps, so observing a run does not change its plans and ids.

    engine ──on_add──►    the request gets a letter: A, B, C ...
           ──on_order──►  waiting sequences and why they wait, drafts: the state after scheduling
           ──on_masks──►  the masks of constraints
           ──on_step──►   the plan that ran and its ids
    take(outputs)         the frame: all of that, with the candidates of each draw

A frame is final text: to show an earlier step again, show its frame again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Final, NamedTuple

from infer.cache.block_allocator import PREFIX_TREE
from infer.cache.layout import TransferKind
from infer.engine.engine import Engine
from infer.engine.observer import EngineObserver
from infer.execution.order import StepMasks, StepOrder
from infer.sampling.params import MAX_LOGPROBS, SamplingParams
from infer.scheduling.plan import Chunk, StepPlan
from infer.scheduling.request import Request, StepOutput
from infer.scheduling.sequence import Sequence
from infer.scheduling.watch import BATCH_CLOSED, BATCH_FULL, CACHE_FULL, NEXT_STEP, NO_TOKENS
from infer.tools.candidates import KEPT, UNKNOWN, Candidate, DrawContext, weigh
from infer.tools.replay import Stepper

SHOWN_TOKENS: Final = 12  # last tokens of a sequence that are shown
BLOCKS_PER_LINE: Final = 16
SHOWN_BLOCKS: Final = 8 * BLOCKS_PER_LINE
LEGEND: Final = "AB: shared by A and B   A+: by more   *: in the prefix tree   o: only there   .: free"


class Frame(NamedTuple):
    """One step, as text."""

    step: int
    text: str


@dataclass(slots=True)
class _Planned:
    """The facts about a step that are known when the device gets its order."""

    path: str = ""
    waits: list[str] = field(default_factory=list)
    drafts: dict[int, tuple[int, ...]] = field(default_factory=dict)  # drafts by seq_id
    masks: StepMasks | None = None


def with_candidates(request: Request) -> Request:
    """Return the request, with candidates of each draw requested if that changes no plan.

    With logprobs, a constraint would not append forced tokens; beam search reports no candidates.
    """
    params = request.params
    if params.use_beam_search or params.is_guided or request.pooling is not None:
        return request
    return replace(request, params=replace(params, logprobs=MAX_LOGPROBS))


class StepFrames(EngineObserver):
    """Makes a frame of each step; `spell` is the text of a token, `num_shown` the candidates of a draw."""

    def __init__(self, spell: Callable[[int], str] = str, *, num_shown: int) -> None:
        self.spell, self._num_shown = spell, num_shown
        self.engine: Engine | None = None  # set when the engine is built
        self._letters: dict[str, str] = {}  # letters by request id
        self._names: dict[int, str] = {}  # names by seq_id
        self._planned: dict[int, _Planned] = {}  # planned steps by number
        self._ran: list[tuple[StepPlan, Seq[tuple[int, ...]]]] = []
        self._failures: list[str] = []

    # -- events of the engine -----------------------------------------------------------------------

    def on_add(self, step: int, request: Request) -> None:
        """Give the request the next letter."""
        self._letters[request.request_id] = _letter(len(self._letters))

    def on_order(self, order: StepOrder) -> None:
        """Store the state after scheduling."""
        engine = self._engine
        self._planned[order.step] = _Planned(
            engine.device.path_of(order),
            [*self._waits()],
            {seq.seq_id: seq.drafts for seq in engine.scheduler.running if seq.drafts},
        )

    def on_masks(self, step: int, masks: StepMasks) -> None:
        """Copy the masks, whose memory will be reused."""
        self._planned[step].masks = masks._replace(lines_KW=masks.lines_KW.copy())

    def on_step(self, plan: StepPlan, ids: Seq[tuple[int, ...]]) -> None:
        """Store the plan that ran, and its ids."""
        self._ran.append((plan, ids))

    def on_failure(self, step: int, reason: str) -> None:
        """Store the failure."""
        self._failures.append(f"step {step} failed: {reason}")

    # -- frames -------------------------------------------------------------------------------------

    def take(self, outputs: Seq[StepOutput], seconds: float) -> list[Frame]:
        """Return the frames of the steps that ended in one call of `Engine.step`; none if none ran."""
        ran, self._ran = self._ran, []
        failures, self._failures = self._failures, []
        frames = []
        for plan, ids in ran:
            planned = self._planned.pop(plan.step, _Planned())
            told = outputs if len(ran) == 1 else [o for o in outputs if self._is_of(o, plan)]
            lines = [*self._heading(plan, planned, seconds), *self._plan(plan, ids, planned)]
            lines += _titled("failed", failures) + _titled("waits", planned.waits)
            lines += _titled("sampled", [*self._draws(plan, told, planned)])
            lines += _titled("ended", [*self._ended(told)])
            lines += [*self._texts(plan), *self._blocks()]
            frames.append(Frame(plan.step, "\n".join(lines) + "\n"))
        if failures and not ran:
            step = self._engine.scheduler.step
            lines = [f"step {step}", *_titled("failed", failures), *self._blocks()]
            frames.append(Frame(step, "\n".join(lines) + "\n"))
        return frames

    @property
    def _engine(self) -> Engine:
        assert self.engine is not None, "frames are of an engine: set it once it is built"
        return self.engine

    def _is_of(self, output: StepOutput, plan: StepPlan) -> bool:
        return any(seq.request_id == output.request_id for seq in plan.chunks.sequences)

    def _name(self, seq: Sequence) -> str:
        letter = self._letters.get(seq.request_id, "?")
        self._names[seq.seq_id] = name = letter if not seq.index else f"{letter}{seq.index + 1}"
        return name

    def _heading(self, plan: StepPlan, planned: _Planned, seconds: float) -> Iterator[str]:
        budget = self._engine.scheduler.config.max_num_batched_tokens
        parts = [f"{plan.chunks.num_tokens} of {budget} tokens", _count(len(plan.chunks), "sequence")]
        parts += [planned.path] if planned.path else []
        yield f"step {plan.step}: {', '.join(parts)}, {1000 * seconds:.1f} ms"

    def _plan(self, plan: StepPlan, ids: Seq[tuple[int, ...]], planned: _Planned) -> list[str]:
        chunks = zip(plan.chunks, plan.chunks.sequences, ids, strict=True)
        lines = [self._chunk(chunk, seq, kept, planned) for chunk, seq, kept in chunks]
        for seq_id in plan.preempted:
            lines.append(f"{self._names.get(seq_id, '?'):3} preempted  its blocks are needed by others")
        for kind, why in (
            (TransferKind.COPY, "shared, and about to be written"),
            (TransferKind.SWAP_OUT, "to host memory"),
            (TransferKind.SWAP_IN, "from host memory"),
        ):
            moved = [f"{t.source}>{t.destination}" for t in plan.transfers if t.kind == kind]
            if moved:
                lines.append(f"    {kind:10} blocks {' '.join(moved)} ({why})")
        return _titled("plan", lines)

    def _chunk(self, chunk: Chunk, seq: Sequence, ids: tuple[int, ...], planned: _Planned) -> str:
        count, drafts = chunk.stop - chunk.start, planned.drafts.get(seq.seq_id, ())
        if drafts:
            kind, spelled = "verify", " ".join(map(self._quote, drafts))
            told = f"position {chunk.start}, and drafts {spelled}: {max(len(ids) - 1, 0)} kept"
        elif chunk.start >= seq.num_prompt and count == 1:
            kind, told = "decode", f"position {chunk.start}"
        else:
            is_new = chunk.start < seq.num_prompt and (
                not ids or len(seq.tokens) <= seq.num_prompt + len(ids)
            )
            kind = "prompt" if is_new else "recompute"
            end = seq.num_prompt if is_new else len(seq.tokens) - len(ids)
            left = end - chunk.stop
            told = f"positions {chunk.start} to {chunk.stop - 1}" + (f", {left} left" if left > 0 else "")
            if chunk.start == seq.num_cached > 0:
                told += f"; {seq.num_cached} were in the prefix tree"
        if chunk.num_samples > 1:
            told += f"; forks into {chunk.num_samples}"
        return f"{self._name(seq):3} {kind:10} {_count(count, 'token'):10} {told}"

    # -- waiting ------------------------------------------------------------------------------------

    def _waits(self) -> Iterator[str]:
        scheduler = self._engine.scheduler
        for seq in scheduler.running:
            if not seq.num_planned:
                yield f"{self._name(seq):3} runs, but has no turn: others have the step's tokens"
        waiting = sorted((seq for seq in scheduler.sequences() if not seq.is_running), key=_by_key)
        for place, seq in enumerate(waiting):
            past = ""
            if seq.was_admitted:
                past = "swapped out to host memory; " if seq.is_swapped else "preempted, will recompute; "
            why = self._why_first(seq) if not place else f"behind {self._name(waiting[0])}: strictly in order"
            yield f"{self._name(seq):3} {_count(seq.num_tokens, 'token')}: {past}{why}"

    def _why_first(self, seq: Sequence) -> str:
        """Return the reason why the next waiting sequence was not admitted."""
        scheduler = self._engine.scheduler
        config, pool = scheduler.config, scheduler.pool
        return {
            NEXT_STEP: "comes in with the next step",
            BATCH_FULL: f"no place in the batch of {config.max_batch_size}",
            NO_TOKENS: f"no tokens left of the step's {config.max_num_batched_tokens}",
            CACHE_FULL: f"needs {_count(pool.blocks_of(seq.num_tokens), 'block')}, "
            f"{pool.num_free_blocks} can be had",
            BATCH_CLOSED: "the batch is closed until its last sequence ends",
        }[scheduler.hold]

    # -- sampling -----------------------------------------------------------------------------------

    def _draws(self, plan: StepPlan, outputs: Seq[StepOutput], planned: _Planned) -> Iterator[str]:
        groups = {seq.request_id: seq.group for seq in plan.chunks.sequences}
        numbers = {seq.seq_id: number for number, seq in enumerate(plan.chunks.sequences)}
        masks = {} if planned.masks is None else planned.masks.by_place()
        for output in outputs:
            group = groups.get(output.request_id)
            seq = (
                None if group is None else next((s for s in group.sequences if s.index == output.index), None)
            )
            if group is None or seq is None or not output.token_ids:
                continue
            params, name = group.request.params, self._name(seq)
            first = len(seq.tokens) - len(output.token_ids)
            number = numbers.get(seq.seq_id, numbers.get(group.sequences[0].seq_id, -1))
            for place, token_id in enumerate(output.token_ids):
                position = first + place
                how = _how(params, group.seed, seq.index)
                yield f"{name:3} {self._quote(token_id)} (id {token_id}) {how} at position {position}"
                if place >= len(output.logprobs):
                    continue
                is_early = position - seq.num_prompt < params.min_tokens
                context = DrawContext(
                    seq.tokens[:position].tolist(),
                    seq.num_prompt,
                    self._engine.vocab_size,
                    seq.stop_ids if is_early else (),
                    masks.get((number, position)),
                )
                row = output.logprobs[place]
                candidates = weigh(row, params, context)
                yield "      model     left"
                yield from self._candidates(candidates, token_id, is_greedy=params.is_greedy)
                if all(each.token_id != token_id for each in candidates):
                    share = _percent(math.exp(row.logprob))
                    yield f"    {share:>8} {'':>8} <- {self._quote(token_id):16} number {row.rank} of all"

    def _candidates(self, candidates: Seq[Candidate], chosen: int, *, is_greedy: bool) -> Iterator[str]:
        shown = [c for place, c in enumerate(candidates) if place < self._num_shown or c.token_id == chosen]
        for each in shown:
            left = "?" if each.fate == UNKNOWN else "-" if each.fate else "" if is_greedy else "kept"
            left = left if each.share is None else _percent(each.share)
            fate = "" if each.fate in (KEPT, UNKNOWN) else each.fate
            notes = "; ".join(note for note in (fate, each.note) if note)
            mark = "<-" if each.token_id == chosen else "  "
            token = self._quote(each.token_id)
            yield f"    {_percent(each.probability):>8} {left:>8} {mark} {token:16} {notes}".rstrip()

    def _ended(self, outputs: Seq[StepOutput]) -> Iterator[str]:
        for output in outputs:
            if output.finish_reason is not None:
                letter = self._letters.get(output.request_id, "?")
                name = letter if not output.index else f"{letter}{output.index + 1}"
                yield f"{name:3} {output.finish_reason}" + (f": {output.error}" if output.error else "")

    # -- state --------------------------------------------------------------------------------------

    def _texts(self, plan: StepPlan) -> list[str]:
        ran = [seq for each in plan.chunks.sequences for seq in each.group.sequences]
        alive = {seq.seq_id: seq for seq in (*ran, *self._engine.scheduler.running)}
        lines = []
        for seq in sorted(alive.values(), key=self._name):
            output = len(seq.tokens) - seq.num_prompt
            pieces = [self._quote(token_id)[1:-1] for token_id in seq.tokens[-SHOWN_TOKENS:]]
            shown = "..." * (len(seq.tokens) > SHOWN_TOKENS) + "|".join(pieces)
            lines.append(f"{self._name(seq):3} {seq.num_prompt} + {output} tokens   {shown}")
        return _titled("text", lines)

    def _blocks(self) -> list[str]:
        """Return the map of the cache: a cell for each block."""
        pool = self._engine.scheduler.pool
        usage, holdings = pool.usage(), pool.holdings()
        owners: dict[int, list[str]] = {}
        for owner, blocks in holdings.items():
            name = "" if owner == PREFIX_TREE else self._names.get(owner, "?")  # type: ignore[call-overload]
            for block in blocks:
                owners.setdefault(block, []).append(name)
        heading = (
            f"blocks of {_count(pool.block_size, 'token')}: {usage.num_used} of {usage.num_blocks} held by "
            f"sequences, {usage.num_idle} only cached, {usage.num_free} free"
        )
        last = max(owners, default=-1)
        lines = [heading]
        for first in range(0, min(last + 1, SHOWN_BLOCKS), BLOCKS_PER_LINE):
            cells = [_cell(owners.get(b, [])) for b in range(first, min(first + BLOCKS_PER_LINE, last + 1))]
            lines.append(f"  {first:5} " + " ".join(f"{cell:3}" for cell in cells).rstrip())
        if last >= SHOWN_BLOCKS:
            lines.append(f"        and blocks up to {last}")
        return [*lines, f"  {LEGEND}"] if owners else lines

    def _quote(self, token_id: int) -> str:
        return repr(self.spell(token_id))


def _cell(owners: Seq[str]) -> str:
    """Return the mark of a block with these owners; the prefix tree is the empty name."""
    names = sorted(name for name in owners if name)
    mark = "*" if "" in owners else ""
    if not names:
        return "o" if mark else "."
    letters = sorted({name.rstrip("0123456789") for name in names})
    if len(names) == 1:
        return letters[0] + mark
    return ("".join(letters) if len(names) == len(letters) == 2 else letters[0] + "+") + mark


def _how(params: SamplingParams, seed: int, index: int) -> str:
    """Describe how a token was chosen."""
    asked = []
    if params.structured is not None:
        asked.append(f"under a constraint ({params.structured.kind})")
    if params.has_penalties:
        asked.append("after penalties")
    if params.is_greedy:
        return " ".join(["is the largest logit", *asked])
    filters = [f"temperature {params.temperature:g}"]
    filters += [f"top_k {params.top_k}"] if params.top_k > 0 else []
    filters += [f"top_p {params.top_p:g}"] if params.top_p < 1.0 else []
    filters += [f"min_p {params.min_p:g}"] if params.min_p > 0.0 else []
    draw = f"by seed {seed}" + (f", answer {index + 1}," if index else "")
    return " ".join(["drawn with", ", ".join(filters), *asked, draw])


def _titled(title: str, lines: Seq[str]) -> list[str]:
    return [title, *(f"  {line}" for line in lines)] if lines else []


def _by_key(seq: Sequence) -> tuple[float, int]:
    return seq.sort_key


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _letter(number: int) -> str:
    """Return A to Z, then AA, AB and so on."""
    letters = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        letters = chr(65 + rest) + letters
    return letters


class FrameStepper(Stepper):
    """Shows the frame of each step of a replay."""

    def __init__(self, frames: StepFrames, show: Callable[[Frame], None]) -> None:
        self.observer: EngineObserver = frames
        self._frames, self._show = frames, show

    def ask(self, request: Request) -> Request:
        """Return the request, with candidates requested."""
        return with_candidates(request)

    def step(self, engine: Engine) -> None:
        """Run one step and show it."""
        self._frames.engine = engine
        started = perf_counter()
        outputs = engine.step()
        for frame in self._frames.take(outputs, perf_counter() - started):
            self._show(frame)
