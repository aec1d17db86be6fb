"""Replay a record, and report where the two runs differ.

The engine has no clock and no randomness of its own: with the facts of a run and its requests, each
added or aborted after the same step, every plan and every sampled id must be the same, bit for bit.

    record   add a   step 1   step 2   abort a   ...
               │        │        │        │
    engine     add      step()   step()   abort        each plan and its ids are compared with the line

The first difference ends the comparison, because all later ones would only follow from it. A step in
which nothing could run leaves no line; the replaying engine makes these steps too, so the step numbers
agree.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from infer.config.knobs import own_names
from infer.config.settings import EngineConfig, knob_table
from infer.engine.engine import Engine
from infer.engine.observer import EngineObserver, Observers
from infer.engine.run_manifest import PLACES, RunFacts, fingerprint
from infer.errors import ConfigError, InferError
from infer.scheduling.plan import StepPlan
from infer.scheduling.request import Request
from infer.scheduling.sequence import Sequence
from infer.tools.record import Aborted, Added, Failed, Masked, Ordered, Ran, Record, Reset

if TYPE_CHECKING:
    from infer.engine.speculation_build import HeadHeaders
    from infer.loader.headers import ModelHeaders

MAX_SHOWN_BLOCKS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """The result of a replay: its counts, and the first difference if there was one."""

    step: int  # number of the last step
    num_steps: int  # plans that ran
    num_tokens: int  # sampled tokens
    difference: str | None  # "step 12: ..." or None
    is_whole: bool = True  # False: the record ends while requests are running


@dataclass(frozen=True, slots=True)
class _Seen:
    """One step as the engine made it: a plan that ran, or a failure."""

    step: int
    plan: StepPlan | None = None
    ids: tuple[tuple[int, ...], ...] = ()
    error: str | None = None


class _Witness(EngineObserver):
    """Stores, in order, the steps of the engine that are not compared yet.

    With overlap a step is observed some calls of `step()` later, so calls and steps do not match one to one.
    """

    def __init__(self) -> None:
        self.seen: deque[_Seen] = deque()
        self.num_steps = 0
        self.num_tokens = 0

    def on_step(self, plan: StepPlan, ids: Seq[tuple[int, ...]]) -> None:
        self.seen.append(_Seen(plan.step, plan, tuple(ids)))
        self.num_steps += 1
        self.num_tokens += sum(map(len, ids))

    def on_failure(self, step: int, reason: str) -> None:
        self.seen.append(_Seen(step, error=reason))


class Stepper:
    """Runs the steps of a replay; a subclass may observe each of them."""

    observer: EngineObserver = EngineObserver()

    def ask(self, request: Request) -> Request:
        """Return the request to add; changes must not affect plans or ids."""
        return request

    def step(self, engine: Engine) -> None:
        """Run one step."""
        engine.step()


class Replay:
    """A record and an engine that repeats it; `build` makes the engine with a given observer."""

    def __init__(
        self, record: Record, build: Callable[[EngineObserver], Engine], stepper: Stepper | None = None
    ) -> None:
        self.record = record
        self._witness = _Witness()
        self._stepper = Stepper() if stepper is None else stepper
        self.engine = build(Observers((self._witness, self._stepper.observer)))

    def run(self, *, until: int | None = None, check: bool = True) -> ReplayReport:
        """Follow the record to its end, or through step `until`; without `check`, nothing is compared."""
        for event in self.record.events():
            if until is not None and event.step + isinstance(event, Added | Aborted | Reset) > until:
                break
            if isinstance(event, Failed) and event.error.startswith(KeyboardInterrupt.__name__):
                return self._report(None)  # Ctrl-C: the run ends here, and there is nothing to compare
            if isinstance(event, Ordered | Masked):
                continue
            difference = self._follow(event, until)
            if difference is not None and check:
                return self._report(f"step {event.step}: {difference}")
        if until is not None:
            self._step_to(until)
        return self._report(None, is_whole=until is not None or not self.engine.num_requests)

    @property
    def num_steps(self) -> int:
        """The number of steps that were run."""
        return self._witness.num_steps

    def _report(self, difference: str | None, *, is_whole: bool = True) -> ReplayReport:
        return ReplayReport(
            step=self.engine.scheduler.step,
            num_steps=self._witness.num_steps,
            num_tokens=self._witness.num_tokens,
            difference=difference,
            is_whole=is_whole,
        )

    def _follow(self, event: Added | Aborted | Reset | Ran | Failed, until: int | None) -> str | None:
        """Repeat a recorded event; return the difference, if there is one."""
        if isinstance(event, Added | Aborted | Reset):
            self._step_to(event.step)
            try:
                if isinstance(event, Added):
                    self.engine.add(self._stepper.ask(event.request))
                elif isinstance(event, Reset):
                    self.engine.reset_prefix_cache()
                else:
                    self.engine.abort(event.request_id, event.index)
            except InferError as error:
                return f"the record has it accepted, now it is refused: {error}"
            return None
        self._step_to(event.step)
        while not self._witness.seen and self.engine.has_step_in_flight:
            if self.engine.scheduler.step == until:
                return None  # a later step would complete this one, but no step may follow `until`
            self._stepper.step(self.engine)
        seen = self._witness.seen.popleft() if self._witness.seen else _Seen(event.step)
        if seen.step < event.step:
            return f"in the record nothing ran in step {seen.step}, now something did"
        if isinstance(event, Ran):
            return self._compare(event, seen)
        if seen.error is None:
            return f"in the record it failed ({event.error}), now it did not"
        if seen.error != event.error:
            return f"in the record it failed ({event.error}), now: {seen.error}"
        return None

    def _step_to(self, step: int) -> None:
        """Run steps up to this one, including steps that left no line in the record."""
        while self.engine.scheduler.step < step:
            self._stepper.step(self.engine)

    def _compare(self, event: Ran, seen: _Seen) -> str | None:
        recorded = event.plan
        if seen.plan is None:
            now = seen.error or "nothing ran"
            return f"in the record it computed {len(recorded.chunks)} chunks, now: {now}"
        for name in ("chunks", "preempted", "transfers"):
            before, after = getattr(recorded, name), getattr(seen.plan, name)
            if before != after:
                return _first_difference(name, before, after)
        if event.ids != seen.ids:
            return _first_difference("sampled ids", event.ids, seen.ids)
        return None


def _first_difference(what: str, before: Seq[Any], after: Seq[Any]) -> str:
    place = next(
        (i for i, (old, new) in enumerate(zip(before, after, strict=False)) if old != new),
        min(len(before), len(after)),
    )

    def shown(items: Seq[Any]) -> str:
        item = items[place] if place < len(items) else None
        return "none" if item is None else str(list(item) if isinstance(item, tuple) else item)

    return f"{what}, number {place}: in the record {shown(before)}, now {shown(after)}"


def replay_model(
    record: Record,
    model: str | None,
    *,
    draft_model: str | None = None,
    device: str | None,
    show_progress: bool,
    stepper: Stepper | None = None,
) -> Replay:
    """Load the model of a record and prepare its engine; raises an error if it is not the same model."""
    import torch

    from infer.engine.build import build_engine
    from infer.engine.speculation_build import read_draft
    from infer.loader.find.source import resolve_model
    from infer.loader.headers import read_headers
    from infer.loader.load import load_model

    facts = record.facts
    config = replay_config(facts, model, draft_model=draft_model, device=device)
    check_threads(facts.num_threads)
    torch.set_num_threads(facts.num_threads)
    headers = read_headers(resolve_model(model, show_progress=show_progress))
    _check_model(headers, facts.model, facts.fingerprint, "--model")
    if draft_model is not None:
        draft = read_draft(config.speculation, headers.config, headers.source.name)
        assert draft is not None, "replay_config has seen to it"
        _check_model(draft, facts.draft_model, facts.draft_fingerprint, "--draft-model")
    loaded = load_model(
        headers.source,
        dtype=facts.dtype,
        device=config.load.device,
        quantization=config.load.quantization,
        max_seq_len=facts.context_len,
        show_progress=show_progress,
        headers=headers,
    )

    def build(witness: EngineObserver) -> Engine:
        engine = build_engine(
            config,
            loaded,
            observer=witness,
            cost=facts.cost,
            step_costs=facts.step_costs,
            steps_ahead=facts.steps_ahead,
        )
        stages = facts.knobs.get("pipeline_parallel_size", 1)
        if stages != 1 and len(engine.scheduler.state.tables) != facts.cache.num_tables:
            raise ConfigError(
                f"the record was made with pipeline_parallel_size={stages}, with which the layers of this "
                "model have other block tables than in one process; it cannot be replayed here"
            )
        return engine

    return Replay(record, build, stepper)


def _check_model(headers: ModelHeaders | HeadHeaders, name: str, recorded: str, flag: str) -> None:
    """Refuse a model that is not the recorded one."""
    if (found := fingerprint(headers.config, headers.eos_ids)) != recorded:
        raise ConfigError(
            f"the record was made with {name} (fingerprint {recorded}), but {headers.source.name} has "
            f"fingerprint {found}; give the recorded model with {flag}"
        )


def check_threads(num_threads: int) -> None:
    """Refuse a record with more threads than this machine can run, because records are not trusted."""
    num_cores = os.cpu_count() or 1
    if not 1 <= num_threads <= num_cores:
        raise ConfigError(
            f"the record was made with {num_threads} CPU threads, but this machine runs 1 to {num_cores}; "
            "replay it where there are enough, or correct num_threads in its first line"
        )


def replay_config(
    facts: RunFacts, model: str | None, *, draft_model: str | None = None, device: str | None = None
) -> EngineConfig:
    """Return the config of the recorded engine, with all values that were chosen at its start."""
    if facts.draft_model and draft_model is None:
        raise ConfigError(
            f"the record was made with the draft model {facts.draft_model}; give it with --draft-model"
        )
    if draft_model is not None and not facts.draft_model:
        raise ConfigError("the record was made without a draft model; leave --draft-model out")
    table = knob_table()
    known = {name for row in table.values() for name in (row.name, *row.spellings)}
    unknown = set(facts.knobs) - known
    if unknown:
        raise ConfigError(f"the record has knobs that this release lacks: {', '.join(sorted(unknown))}")
    knobs = {name: value for name, value in facts.knobs.items() if name not in PLACES}
    knobs["draft_model"] = draft_model
    if draft_model is None and knobs.get("speculative_decoding") is False:
        knobs["speculative_method"] = "auto"  # the method needs a draft model, so it was off
    config = EngineConfig.from_knobs(**own_names(knobs, table, says_own_name=False))  # older records
    if named := config.own_code():  # records are not trusted
        raise ConfigError(
            f"the record was made with the user's own code ({', '.join(named)}); a replay does not load it"
        )
    # The cache size is given in blocks of block_size tokens for any layout; with one token per block, the
    # size of a contiguous cache is exact.
    is_contiguous = config.cache.kv_cache_backend == "contiguous"
    cache = replace(
        config.cache,
        kv_cache_memory=None,
        num_blocks=facts.cache.num_tokens // (1 if is_contiguous else facts.cache.block_size),
        block_size=1 if is_contiguous else facts.cache.block_size,
    )
    if cache.swap_space is not None:  # given in bytes of one rank, whose blocks are smaller
        num_blocks = facts.cache.num_host_blocks // facts.cache.num_tables
        cache = replace(cache, swap_space=None, swap_blocks=num_blocks)
    load = replace(
        config.load,
        model=model,
        tensor_parallel_size=1,  # orders and plans are the same for any number of ranks
        pipeline_parallel_size=1,
        nnodes=1,
        dtype=facts.dtype,
        device=device or facts.device,
        max_seq_len=facts.context_len,
        num_threads=facts.num_threads,
    )
    return replace(config, cache=cache, load=load)


def describe_state(engine: Engine) -> str:
    """Return the queues, every sequence's counts and blocks, and the cache, as text."""
    scheduler = engine.scheduler
    waiting = sorted((s for s in scheduler.sequences() if not s.is_running), key=lambda seq: seq.sort_key)
    lines = [f"after step {scheduler.step}: {len(scheduler.running)} running, {len(waiting)} waiting"]
    lines += [_describe(seq, scheduler.pool.block_tables(seq.seq_id)) for seq in scheduler.running]
    lines += [_describe(seq, []) for seq in waiting]
    lines.append("cache: " + ", ".join(f"{k} {v:g}" for k, v in asdict(scheduler.usage()).items()))
    return "\n".join(lines)


def _describe(seq: Sequence, tables: list[list[int]]) -> str:
    blocks = [block for table in tables for block in table if block >= 0]
    shown = " ".join(map(str, blocks[:MAX_SHOWN_BLOCKS])) + (" ..." if len(blocks) > MAX_SHOWN_BLOCKS else "")
    where = f"blocks {shown}" if blocks else "in host memory" if seq.is_swapped else "no blocks"
    return (
        f"  {seq.state:8} sequence {seq.seq_id} of {seq.group.request.request_id!r}[{seq.index}]: "
        f"prompt {seq.num_prompt}, output {seq.num_output}, computed {seq.num_computed} of {seq.num_tokens}, "
        f"cached {seq.num_cached}, {where}"
    )
