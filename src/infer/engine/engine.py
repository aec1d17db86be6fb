"""The loop: every `step()` makes the same four moves.

    plan     the scheduler picks chunks and reserves blocks            (integers)
    launch   the runner moves blocks, runs the model, samples          (tensors)
    commit   full blocks enter the prefix tree                         (integers)
    report   stop conditions are checked, the finished let go          (integers)

A device works by itself once a step is launched. With *overlap* the last two moves come one step late,
so that the CPU plans step N + 1 while the device computes step N:

    CPU      plan 1  launch 1  plan 2  launch 2  retire 1  plan 3  launch 3  retire 2 ...
    device           [ step 1           ][ step 2                   ][ step 3

A sampled token then has its place (`num_tokens`) before its id is known; only the device needs the id.
Whoever stops at an id that came late has one more token computed, which nobody sees. Requests whose
next step depends on ids (forks, beams, whatever is sampled on the host) switch the overlap off while
they are there.

A step is atomic: nothing is counted as computed until the launch has succeeded. If it raises, the
requests of that plan end with an error, everybody else goes on, and the books balance. An interrupt
is raised again after that, and the next step reports who it ended.

The engine speaks token ids. Stop *strings* are found by whoever turns ids into text; it then calls
`abort` for the sequence it has seen enough of.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from time import perf_counter
from typing import NamedTuple

import msgspec

from infer.engine.admission import check_order, check_token_ids, check_width, longest_total
from infer.engine.beam import next_beams
from infer.engine.facts import RunFacts
from infer.engine.plan import StepPlan
from infer.engine.request import Request, StepOutput
from infer.engine.runner import POOLINGS, Runner, StepResult
from infer.engine.scheduler import Scheduler
from infer.engine.sequence import Sequence, SequenceGroup
from infer.engine.stats import STEP_TOKENS, EngineStats, Histogram
from infer.errors import ContextOverflow, DeviceLost, EngineError, QueueFull, RequestError
from infer.sampling.params import RowLogprobs
from infer.sampling.sampler import NO_TOKEN

logger = logging.getLogger(__name__)

Embedder = Callable[[Seq[int], str], list[float]]  # (prompt, pooling) -> embedding

ARRIVALS_PER_GROUP = 1 << 20  # arrival numbers leave room for the forks of a group beside each other
MAX_EMPTY_STEPS = 3


class EngineObserver:
    """Sees everything that happens, in order; the recorder is one. The default looks away."""

    def on_start(self, facts: RunFacts) -> None:
        """The engine was built; together with the requests this decides all that follows."""

    def on_add(self, step: int, request: Request) -> None:
        """A request was accepted after this step."""

    def on_abort(self, step: int, request_id: str, index: int | None) -> None:
        """A request, or one sequence of it, was aborted after this step."""

    def on_reset(self, step: int) -> None:
        """All cached prefixes were forgotten after this step."""

    def on_step(self, plan: StepPlan, ids: Seq[tuple[int, ...]]) -> None:
        """A plan ran and these ids were sampled, chunk by chunk."""

    def on_failure(self, step: int, reason: str) -> None:
        """The plan of this step could not run, and its requests ended with an error."""


class _Flight(NamedTuple):
    """A step the device is working on."""

    plan: StepPlan
    sequences: list[Sequence]
    wait: Callable[[], StepResult]


class Engine:
    """Requests in, `StepOutput`s out, one step at a time. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        context_len: int,
        vocab_size: int,
        eos_ids: tuple[int, ...] = (),
        observer: EngineObserver | None = None,
        embedder: Embedder | None = None,
        overlap: bool = False,
        prepare: Callable[[], bool] = lambda: False,
    ) -> None:
        self.scheduler = scheduler
        self.context_len = context_len
        self._runner = runner
        self._embedder = embedder
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._observer = observer or EngineObserver()
        self._groups: dict[str, SequenceGroup] = {}
        self._num_requests = 0
        self._next_seq_id = 0
        self._empty_steps = 0
        self._unreported: list[StepOutput] = []  # of a step that was interrupted; the next one brings them
        self._overlap = overlap
        self.prepare = prepare  # for idle time: makes later steps quicker; False: all is done
        self._flights: deque[_Flight] = deque()  # one step that the device works on; two after an interrupt
        self._blocking: set[str] = set()  # requests that allow no overlap
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._step_tokens = Histogram(STEP_TOKENS)

    # -- requests ---------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Accept a request, or raise a `RequestError` that says why it can never be served."""
        group = self._make_group(request)
        self._observer.on_add(self.scheduler.step, request)
        group.added_at = perf_counter()
        leader = self._new_sequence(group, 0, list(request.prompt))
        leader.arrival = self._num_requests * ARRIVALS_PER_GROUP
        leader.num_slots = request.params.num_sequences
        leader.num_samples = 1 if group.is_beam else request.params.num_sequences
        self._num_requests += 1
        self.scheduler.add(leader)
        self._groups[request.request_id] = group

    def abort(self, request_id: str, index: int | None = None) -> list[StepOutput]:
        """End a request, or one sequence of it, at any stage; returns the last output of each it ended."""
        group = self._groups.get(request_id)
        if group is None:
            return []
        if index is not None and (group.is_beam or group.sequences[0].num_samples > 1):
            raise EngineError(f"request {request_id!r} has no sequence {index} (yet); abort the whole of it")
        self._observer.on_abort(self.scheduler.step, request_id, index)
        ended = [seq for seq in group.sequences if not seq.is_finished and index in (None, seq.index)]
        return self._end(group, ended, "abort")

    def is_serving(self, request_id: str) -> bool:
        """Whether a request is waiting or running."""
        return request_id in self._groups

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running, or a step still under way."""
        return self.scheduler.has_work or bool(self._flights)

    @property
    def has_step_in_flight(self) -> bool:
        """Whether the device is still working on a step: the next `step()` will report it."""
        return bool(self._flights)

    @property
    def num_requests(self) -> int:
        """Requests waiting or running."""
        return len(self._groups)

    def stats(self) -> EngineStats:
        """Counts for metrics, health and the router, as of now."""
        usage = self.scheduler.pool.usage(counts_slots=False)
        return EngineStats(
            num_steps=self.scheduler.step,
            num_running=len(self.scheduler.running),
            num_waiting=self.scheduler.num_waiting,
            num_preemptions=self.scheduler.num_preemptions,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_step_tokens=int(self._step_tokens.total),
            step_sizes=tuple(self._step_tokens.counts),
            num_queried_tokens=usage.num_queried_tokens,
            num_hit_tokens=usage.num_hit_tokens,
            block_size=self.scheduler.pool.block_size,
            num_blocks=usage.num_blocks,
            num_used_blocks=usage.num_used,
            num_cached_blocks=usage.num_cached,
        )

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes; returns how many blocks were forgotten."""
        self._observer.on_reset(self.scheduler.step)
        return self.scheduler.pool.reset_prefix_cache()

    def embed(self, prompt: tuple[int, ...], pooling: str) -> list[float]:
        """The final hidden state of a prompt's last token, or the mean over its tokens; nothing is cached."""
        check_token_ids(Request(request_id="", prompt=prompt), self._vocab_size)
        if len(prompt) > self.context_len:
            raise ContextOverflow(len(prompt), 0, self.context_len)
        if pooling not in POOLINGS:
            raise RequestError(
                f"pooling must be one of {', '.join(POOLINGS)}, got {pooling!r}", param="pooling"
            )
        if self._embedder is None:
            raise RequestError("this engine has no model to embed with")
        return self._embedder(prompt, pooling)

    # -- the loop ---------------------------------------------------------------------------------

    def step(self) -> list[StepOutput]:
        """Plan, run, commit, report; returns what the step made, in the order of the plan."""
        outputs = self._step()
        if self._unreported:
            outputs = self._unreported + outputs
            self._unreported = []
        return outputs

    def _step(self) -> list[StepOutput]:
        outputs = self._retire(all_but=int(self._can_overlap))
        plan = self.scheduler.plan()
        sequences = [self.scheduler.get(chunk.seq_id) for chunk in plan.chunks]
        if not plan.chunks and not plan.transfers:
            return outputs + (self._retire() if self._flights else self._step_without_work())
        self._empty_steps = 0
        for seq in sequences:
            if seq.group.queue_s is None:
                self._note_first_step(seq)
        try:
            wait = self._runner.launch(plan, sequences)
        except DeviceLost:  # every further step would fail as well: whoever supervises must start anew
            raise
        except Exception as error:  # whatever the model raised, its requests end and the engine lives on
            names = [seq.group.request.request_id for seq in sequences]
            logger.exception("step %d failed for %s", plan.step, ", ".join(dict.fromkeys(names)))
            return outputs + self._retire() + self._give_up(plan, sequences, error)
        except BaseException as error:  # Ctrl-C: whoever catches it finds the books balanced
            self._unreported += outputs + self._give_up(plan, sequences, error)
            raise
        self.scheduler.advance(plan)
        self._flights.append(_Flight(plan, sequences, wait))
        return outputs + self._retire(all_but=int(self._can_overlap))

    @property
    def _can_overlap(self) -> bool:
        """Whether the next step may be planned before the last one is known."""
        return self._overlap and not self._blocking

    def _note_first_step(self, leader: Sequence) -> None:
        """A request leaves the queue; from this step on, one that needs the host allows no overlap."""
        group = leader.group
        group.queue_s = perf_counter() - group.added_at
        if leader.num_samples > 1 or group.samples_on_host:
            self._blocking.add(group.request.request_id)

    def _retire(self, *, all_but: int = 0) -> list[StepOutput]:
        """Wait for the steps under way, but for the last ones, and conclude them in order."""
        outputs: list[StepOutput] = []
        while len(self._flights) > all_but:
            plan, sequences, wait = self._flights[0]
            try:
                result = wait()
            except BaseException:
                self._unreported += outputs
                raise
            self._flights.popleft()
            outputs += self._conclude(plan, sequences, result)
        return outputs

    def _conclude(self, plan: StepPlan, sequences: Seq[Sequence], result: StepResult) -> list[StepOutput]:
        self.scheduler.commit(plan)
        self._step_tokens.observe(plan.num_tokens)
        self._observer.on_step(plan, result.ids)
        return self._report(plan, sequences, result)

    def _give_up(self, plan: StepPlan, sequences: Seq[Sequence], error: BaseException) -> list[StepOutput]:
        """End the requests of a plan that did not run; whoever else it touched starts over."""
        outputs = self._fail(sequences, f"{type(error).__name__} in step {plan.step}")
        for seq_id in plan.preempted:  # the runner may not have come so far
            self._runner.forget(seq_id)
        self.scheduler.abandon(plan)
        return outputs

    def _step_without_work(self) -> list[StepOutput]:
        """An empty plan is normal when idle; several in a row with work waiting are a bug, not a wait."""
        if not self.has_work:
            return []
        self._empty_steps += 1
        if self._empty_steps < MAX_EMPTY_STEPS:
            return []
        self._empty_steps = 0
        stuck = self.scheduler.sequences()
        logger.error("no progress: %s; usage %s", stuck[:8], self.scheduler.pool.usage())
        return self._fail(stuck, "the scheduler could not find room for it")

    def _fail(self, sequences: Seq[Sequence], reason: str) -> list[StepOutput]:
        """End the requests of these sequences with an error."""
        self._observer.on_failure(self.scheduler.step, reason)
        outputs = []
        for group in {id(seq.group): seq.group for seq in sequences}.values():
            unfinished = [seq for seq in group.sequences if not seq.is_finished]
            outputs += self._end(group, unfinished, "error", error=reason)
        return outputs

    def _end(
        self, group: SequenceGroup, ended: Seq[Sequence], reason: str, *, error: str | None = None
    ) -> list[StepOutput]:
        """Finish sequences of a request before their time; one last output for each the client waits for."""
        for seq in ended:
            self._finish(seq, reason)
        self._forget_if_done(group)
        outputs = [self._output(seq, (), (), error=error) for seq in ended]
        if not group.is_beam and group.sequences[0].num_samples == 1:
            return outputs
        # one sequence stood for all that the client waits for
        params = group.request.params
        return [
            msgspec.structs.replace(outputs[0], index=i)
            for i in range(params.n if group.is_beam else params.num_sequences)
        ]

    def _report(self, plan: StepPlan, sequences: Seq[Sequence], result: StepResult) -> list[StepOutput]:
        outputs: list[StepOutput] = []
        offers: dict[int, tuple[SequenceGroup, list[tuple[Sequence, RowLogprobs]]]] = {}
        if result.prompt_logprobs:
            for chunk, seq in zip(plan.chunks, sequences, strict=True):
                # from its own position on: a prompt that was preempted half way is computed again
                seq.group.prompt_logprobs[chunk.start :] = result.prompt_logprobs.get(seq.seq_id, ())
        broken = [seq for seq, ids in zip(sequences, result.ids, strict=True) if NO_TOKEN in ids]
        if broken:
            outputs += self._fail(
                broken, "the model's logits for it are not finite, or every token is forbidden"
            )
        for seq, ids, logprobs in zip(sequences, result.ids, result.logprobs, strict=True):
            if not ids or seq.finish_reason is not None:
                continue
            if len(ids) == 1 and logprobs[0] is None and self._goes_on(seq, ids[0]):
                outputs.append(self._continue(seq, ids))
                continue
            if seq.is_beam:
                row = logprobs[0]
                assert row is not None, "beams always ask for logprobs"
                offers.setdefault(id(seq.group), (seq.group, []))[1].append((seq, row))
                continue
            members = [seq, *self._fork(seq, len(ids) - 1)] if len(ids) > 1 else [seq]
            for member, token_id, row in zip(members, ids, logprobs, strict=True):
                outputs.append(self._advance(member, token_id, row))
            if any(member.is_finished for member in members):
                self._forget_if_done(seq.group)
        for group, beams in offers.values():
            if not group.is_finished:
                outputs.extend(self._advance_beams(group, beams))
        return outputs

    # -- one sequence -----------------------------------------------------------------------------

    @staticmethod
    def _goes_on(seq: Sequence, token_id: int) -> bool:
        """Whether a token is neither the first nor the last of its sequence: by far the most are neither."""
        num_known = len(seq.tokens)
        return seq.num_prompt < num_known < seq.max_total - 1 and token_id not in seq.group.stop_ids

    def _continue(self, seq: Sequence, ids: tuple[int, ...]) -> StepOutput:
        """What `_advance` does for such a token, in a quarter of the time."""
        seq.tokens.append(ids[0])
        self._num_output_tokens += 1
        group = seq.group
        return StepOutput(
            request_id=group.request.request_id,
            index=seq.index,
            token_ids=ids,
            cumulative_logprob=seq.cumulative_logprob,
            queue_s=group.queue_s or 0.0,
            num_cached=seq.num_cached,
        )

    def _advance(self, seq: Sequence, token_id: int, row: RowLogprobs | None) -> StepOutput:
        """Append a sampled token and see whether it was the last."""
        group = seq.group
        is_first = len(seq.tokens) == seq.num_prompt
        seq.tokens.append(token_id)
        self._num_output_tokens += 1
        if is_first and seq.index == 0:
            self._num_prompt_tokens += seq.num_prompt
        if row is not None:
            seq.cumulative_logprob += row.logprob
        if token_id in group.stop_ids:
            seq.stop_reason = token_id if token_id in group.request.params.stop_token_ids else None
            self._finish(seq, "stop")
        elif len(seq.tokens) >= seq.max_total:
            self._finish(seq, "length")
        asks = group.request.params.logprobs is not None
        return self._output(seq, (token_id,), (row,) if asks and row is not None else (), is_first=is_first)

    def _output(
        self,
        seq: Sequence,
        token_ids: tuple[int, ...],
        logprobs: tuple[RowLogprobs, ...],
        *,
        is_first: bool = False,
        error: str | None = None,
    ) -> StepOutput:
        group = seq.group
        wants_prompt = is_first and group.request.params.prompt_logprobs is not None
        return StepOutput(
            request_id=group.request.request_id,
            index=seq.index,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
            cumulative_logprob=seq.cumulative_logprob,
            queue_s=group.queue_s or 0.0,
            num_cached=seq.num_cached,
            prompt_logprobs=(None, *group.prompt_logprobs) if wants_prompt else None,
            error=error,
        )

    def _fork(self, leader: Sequence, count: int) -> list[Sequence]:
        """Make the other sequences of a request, once its prompt is computed."""
        leader.num_samples = 1
        if not leader.group.samples_on_host:
            self._blocking.discard(leader.group.request.request_id)
        children = []
        for index in range(1, count + 1):
            child = self._new_sequence(leader.group, index, list(leader.tokens))
            self._join(leader, child)
            children.append(child)
        return children

    def _join(self, parent: Sequence, child: Sequence) -> None:
        """Let a child continue beside its parent; its next token already has its place."""
        child.num_tokens = parent.num_tokens
        child.num_cached = parent.num_cached
        child.arrival = parent.arrival - parent.arrival % ARRIVALS_PER_GROUP + parent.group.num_made
        self.scheduler.fork(parent, child)

    def _advance_beams(
        self, group: SequenceGroup, offers: list[tuple[Sequence, RowLogprobs]]
    ) -> list[StepOutput]:
        """Replace the beams of a search by the next ones, or end it."""
        first = offers[0][0]
        if first.num_output == 1:
            self._num_prompt_tokens += first.num_prompt
        chosen = next_beams(group, offers)
        if not chosen:
            return self._finish_beams(group)
        taken: set[int] = set()
        forks = []
        for pick in chosen:
            if pick.parent.seq_id in taken:
                child = self._new_sequence(group, pick.parent.index, list(pick.parent.tokens))
                self._join(pick.parent, child)
                forks.append((child, pick))
            taken.add(pick.parent.seq_id)
        for beam, _ in offers:
            if beam.seq_id not in taken:
                self._finish(beam, "dropped")
        for child, pick in forks:
            child.tokens.append(pick.token_id)
            child.cumulative_logprob = pick.score
        for pick in chosen:
            if pick.parent.seq_id in taken:  # the first pick of a parent goes on in its place
                taken.remove(pick.parent.seq_id)
                pick.parent.tokens.append(pick.token_id)
                pick.parent.cumulative_logprob = pick.score
        group.sequences = [seq for seq in group.sequences if not seq.is_finished]
        return []

    def _finish_beams(self, group: SequenceGroup) -> list[StepOutput]:
        """Report the n best hypotheses of a search that has ended."""
        num_found, params = len(group.finished_beams), group.request.params
        if num_found < params.n:
            reason = f"beam search found {num_found} outputs, {params.n} were asked for"
            return self._end(group, group.sequences, "error", error=reason)
        for seq in group.sequences:
            self._finish(seq, "stop")
        self._forget_if_done(group)
        wants_prompt = params.prompt_logprobs is not None
        best = group.finished_beams[: params.n]
        self._num_output_tokens += sum(len(beam.output) for beam in best)
        return [
            StepOutput(
                request_id=group.request.request_id,
                index=index,
                token_ids=tuple(beam.output),
                finish_reason=beam.finish_reason,
                stop_reason=beam.stop_reason,
                cumulative_logprob=beam.cumulative_logprob,
                queue_s=group.queue_s or 0.0,
                num_cached=group.sequences[0].num_cached,
                prompt_logprobs=(None, *group.prompt_logprobs) if wants_prompt else None,
            )
            for index, beam in enumerate(best)
        ]

    def _finish(self, seq: Sequence, reason: str) -> None:
        seq.finish_reason = reason
        self.scheduler.remove(seq)
        self._runner.forget(seq.seq_id)

    def _forget_if_done(self, group: SequenceGroup) -> None:
        if group.is_finished:
            self._groups.pop(group.request.request_id, None)
            self._blocking.discard(group.request.request_id)

    def _new_sequence(self, group: SequenceGroup, index: int, tokens: list[int]) -> Sequence:
        seq = Sequence(self._next_seq_id, group, index, tokens)
        self._next_seq_id += 1
        group.sequences.append(seq)
        group.num_made += 1
        return seq

    def _make_group(self, request: Request) -> SequenceGroup:
        """Check a request against this model, this cache and this queue."""
        params, scheduler = request.params, self.scheduler
        if request.request_id in self._groups:
            raise RequestError(
                f"request id {request.request_id!r} is already being served", param="request_id"
            )
        limit = scheduler.config.max_waiting
        if limit is not None and scheduler.num_waiting >= limit:
            raise QueueFull(f"{scheduler.num_waiting} sequences are waiting and max_waiting is {limit}")
        if params.use_beam_search and not scheduler.keeps_cache:
            raise RequestError("beam search needs a KV cache, and kv_cache_backend=naive keeps none")
        check_token_ids(request, self._vocab_size)
        check_order(request)
        check_width(request, scheduler.config.width)
        max_total = longest_total(request, self.context_len, scheduler.pool)
        stop_ids = params.stop_token_ids if params.ignore_eos else (*self._eos_ids, *params.stop_token_ids)
        seed = params.seed
        if seed is None:
            seed = scheduler.config.seed * 0x9E3779B97F4A7C15 + self._num_requests
        return SequenceGroup(request, max_total=max_total, stop_ids=tuple(dict.fromkeys(stop_ids)), seed=seed)
