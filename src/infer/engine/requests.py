"""The table of running requests: appends sampled ids, forks sequences, and ends them.

A request begins as one sequence, its *leader*, which computes the prompt for all outputs:

    n = 1     leader ──id──id──id── stop
    n = 3     leader ──id──id──id── stop            the prompt's last chunk samples three ids at once,
                   ├───id──id── length              and the leader forks: the children share its blocks
                   └───id──id──id──id── stop
    beams     leader, then W sequences that advance together and replace each other     (beam.py)
    pooling   leader alone, which samples nothing: it ends with its prompt and returns an embedding

Every sampled id is appended. A sequence ends at a stop id or at its length limit and is then removed from the
scheduler at once; a request ends with its last sequence. For guided sequences, engine/guided.py appends ids.
In every case, each sequence that the client waits for gets exactly one output with a finish reason.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from time import perf_counter

import msgspec
import numpy as np

from infer.constraints.compiler import Grammar
from infer.engine.guided import GuidedRequests, Sampled
from infer.engine.observer import EngineObserver
from infer.engine.speculation import Speculation
from infer.engine.stories import Stories
from infer.errors import RequestError
from infer.execution.device import StepResult
from infer.finish_reason import FinishReason
from infer.sampling.params import RowLogprobs
from infer.scheduling.beam import advance_beams, best_outputs
from infer.scheduling.plan import StepPlan
from infer.scheduling.request import Request, StepOutput
from infer.scheduling.scheduler import Scheduler
from infer.scheduling.sequence import Sequence, SequenceGroup

ARRIVALS_PER_GROUP = 1 << 20  # gap between the arrival numbers of requests, filled by their forks


class RequestTable:
    """Creates, advances and ends the sequences of every request. One engine thread owns it."""

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Callable[[], float],
        observer: EngineObserver | None,
        speculation: Speculation | None,
    ) -> None:
        self._clock = clock  # clock for metrics only
        self._observer, self._speculation = observer, speculation
        self.groups: dict[str, SequenceGroup] = {}  # groups by request id
        self.waiting_for_ids: set[str] = set()  # running requests whose next step depends on ids: no overlap
        self.queued_joint: set[str] = set()  # queued requests that join `waiting_for_ids` when they begin
        self.guided = GuidedRequests(self, scheduler)
        self.stories: Stories | None = None  # None: no stories are recorded
        self.num_added = 0
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self._scheduler = scheduler
        self._next_seq_id = 0

    # -- begin ------------------------------------------------------------------------------------

    def add(self, group: SequenceGroup, tokens: array[int], grammar: Grammar | None = None) -> None:
        """Create the leader of an admitted request from its prompt's ids, and queue it."""
        params = group.request.params
        group.added_at = group.added_at or self._clock()  # earlier, if a constraint was compiled first
        leader = self._new_sequence(group, 0, tokens)
        leader.arrival = self.num_added * ARRIVALS_PER_GROUP
        leader.num_slots = params.num_sequences
        leader.num_samples = 1 if group.is_beam else params.num_sequences
        if group.request.pooling is not None:
            leader.num_samples = 0  # it samples nothing: its chunks are pooled
        self._scheduler.add(leader)  # first, because a user's own policy may raise
        self.num_added += 1
        if params.is_guided:
            self.guided.add(leader, grammar)
        if group.has_joint_sequence:
            self.queued_joint.add(group.request.request_id)
        self.groups[group.request.request_id] = group

    def begin(self, leader: Sequence) -> None:
        """Note that a request has left the queue; while its steps depend on ids, no steps overlap."""
        group = leader.group
        group.queue_s = self._clock() - group.added_at
        if group.has_joint_sequence:
            self.queued_joint.discard(group.request.request_id)
            self.waiting_for_ids.add(group.request.request_id)

    def _new_sequence(self, group: SequenceGroup, index: int, tokens: array[int]) -> Sequence:
        seq = Sequence(self._next_seq_id, group, index, tokens)
        self._next_seq_id += 1
        group.sequences.append(seq)
        group.num_made += 1
        return seq

    def _fork(self, parent: Sequence, index: int) -> Sequence:
        """Fork a child from its parent; the place of its next token is already counted."""
        child = self._new_sequence(parent.group, index, parent.tokens)
        child.num_cached = parent.num_cached
        child.arrival = parent.arrival - parent.arrival % ARRIVALS_PER_GROUP + parent.group.num_made
        self._scheduler.fork(parent, child)
        self.guided.fork(parent, child)
        return child

    # -- advance ----------------------------------------------------------------------------------

    def report(self, plan: StepPlan, result: StepResult) -> list[StepOutput]:
        """Append a step's ids to its sequences; returns outputs in the plan's order, beams last."""
        sequences = plan.chunks.sequences
        if result.prompt_logprobs:
            for number, (chunk, seq) in enumerate(zip(plan.chunks, sequences, strict=True)):
                # a preempted prompt is computed again, so its earlier logprobs are overwritten
                seq.group.prompt_logprobs[chunk.start :] = result.prompt_logprobs.get(number, ())
        outputs: list[StepOutput] = []
        offers: dict[int, tuple[SequenceGroup, list[tuple[Sequence, RowLogprobs]]]] = {}
        sampled: Iterable[Sampled] = zip(sequences, result.ids, result.logprobs, strict=True)
        if self.waiting_for_ids:
            sampled = self._fork_leaders(sampled, offers)
        is_guided, has_drafts = bool(self.guided.guides), plan.chunks.num_drafts > 0
        if is_guided:
            sampled = self.guided.report(sampled, outputs)
        for seq, ids, logprobs in sampled:
            if not ids or seq.finish_reason is not None:
                continue
            tokens = seq.tokens
            for token_id in ids:
                tokens.append(token_id)
                if token_id in seq.stop_ids:  # ids after a stop id are not part of the output
                    break
            else:
                if len(tokens) < seq.bare_until:
                    counts = seq.draft_counts if has_drafts else None
                    outputs.append(StepOutput(seq.request_id, seq.index, ids, drafts=counts))
                    continue
            outputs.append(self.describe(seq, ids, logprobs))
        self.num_output_tokens += (
            sum(len(output.token_ids) for output in outputs)
            if has_drafts or is_guided  # a constraint that fails gives outputs without ids
            else len(outputs)
        )
        for group, beams in offers.values():
            if not group.is_finished:
                outputs.extend(self._advance_beams(group, beams))
        if result.pooled:
            outputs += self._report_pooled(plan, result.pooled)
        return outputs

    def _report_pooled(self, plan: StepPlan, pooled: Mapping[int, np.ndarray]) -> list[StepOutput]:
        """Add up the pooled states of a step's chunks; returns an output for each complete embedding."""
        outputs: list[StepOutput] = []
        for number, (chunk, seq) in enumerate(zip(plan.chunks, plan.chunks.sequences, strict=True)):
            group, states_D = seq.group, pooled.get(number)
            if states_D is None or seq.finish_reason is not None:
                continue
            if group.pooled_D is not None and chunk.start:  # a chunk at 0 starts over, after a preemption
                states_D = group.pooled_D + states_D
            group.pooled_D = states_D
            if chunk.stop < seq.num_prompt:
                continue
            if group.request.pooling == "mean":
                group.pooled_D = (group.pooled_D / seq.num_prompt).astype(np.float32)
            if not np.isfinite(group.pooled_D).all():
                outputs += self.end(
                    group, [seq], FinishReason.ERROR, error="the model's hidden states are not finite"
                )
                continue
            self.num_prompt_tokens += seq.num_prompt
            (output,) = self.end(group, [seq], FinishReason.STOP)
            outputs.append(msgspec.structs.replace(output, embedding=tuple(group.pooled_D.tolist())))
        return outputs

    def _fork_leaders(
        self,
        sampled: Iterable[Sampled],
        offers: dict[int, tuple[SequenceGroup, list[tuple[Sequence, RowLogprobs]]]],
    ) -> Iterator[Sampled]:
        """Yield each sequence's ids; a leader's ids are split among its forks, beams go into `offers`."""
        for seq, ids, logprobs in sampled:
            if seq.is_beam and ids and seq.finish_reason is None:
                row = logprobs[0]
                assert row is not None, "beams always ask for logprobs"
                offers.setdefault(id(seq.group), (seq.group, []))[1].append((seq, row))
            elif seq.num_samples > 1 and ids and seq.finish_reason is None:
                seq.num_samples = 1
                self.waiting_for_ids.discard(seq.request_id)
                members = [seq, *(self._fork(seq, index) for index in range(1, len(ids)))]
                for member, token_id, row in zip(members, ids, logprobs, strict=True):
                    yield member, (token_id,), (row,)
            elif not seq.is_beam:
                yield seq, ids, logprobs

    # -- outputs ----------------------------------------------------------------------------------

    def describe(
        self,
        seq: Sequence,
        ids: tuple[int, ...],
        logprobs: Seq[RowLogprobs | None],
        *,
        has_ended: bool = False,
    ) -> StepOutput:
        """Return an output with more than ids: a sequence's first or last one, or one with logprobs.

        `has_ended`: the constrained text is complete; only an end of text could follow.
        """
        group, last = seq.group, seq.tokens[-1]
        token_ids = ids[: ids.index(last) + 1] if last in seq.stop_ids else ids
        if last in group.request.params.stop_token_ids:
            seq.stop_reason = last
        if has_ended or last in seq.stop_ids:
            self._finish(seq, FinishReason.STOP)
        elif len(seq.tokens) >= seq.max_total:
            self._finish(seq, FinishReason.LENGTH)
        rows = tuple(row for row in logprobs[: len(token_ids)] if row is not None)
        is_first = len(seq.tokens) - len(token_ids) == seq.num_prompt
        if is_first and seq.index == 0:
            self.num_prompt_tokens += seq.num_prompt
            if self.stories is not None:
                self.stories.first(seq.request_id)
        for row in rows:
            seq.cumulative_logprob += row.logprob
        seq.bare_until = 0 if rows else seq.max_total  # outputs with logprobs are all described
        if seq.finish_reason is not None:
            self._forget_if_done(group)
        return _output(
            seq,
            token_ids=token_ids,
            logprobs=rows,
            prompt_logprobs=group.asked_prompt_logprobs if is_first else None,
        )

    def _advance_beams(
        self, group: SequenceGroup, offers: list[tuple[Sequence, RowLogprobs]]
    ) -> list[StepOutput]:
        """Advance a beam search by one step; returns the n best hypotheses when it has ended."""
        first, n = offers[0][0], group.request.params.n
        if first.num_output == 1:
            self.num_prompt_tokens += first.num_prompt
            if self.stories is not None:
                self.stories.first(first.request_id)
        goes_on = advance_beams(
            group,
            offers,
            fork=lambda beam: self._fork(beam, beam.index),
            drop=lambda beam: self._finish(beam, FinishReason.DROPPED),
        )
        if goes_on:
            return []
        num_found = len(group.finished_beams)
        if num_found < n:
            reason = f"beam search found {num_found} outputs, {n} were asked for"
            return self.end(group, group.sequences, FinishReason.ERROR, error=reason)
        self.end(group, group.sequences, FinishReason.STOP)
        outputs = best_outputs(group)
        self.num_output_tokens += sum(len(output.token_ids) for output in outputs)
        return outputs

    # -- end --------------------------------------------------------------------------------------

    def end(
        self, group: SequenceGroup, ended: Seq[Sequence], reason: FinishReason, *, error: str | None = None
    ) -> list[StepOutput]:
        """End sequences of a request early; returns a last output for each that the client waits for."""
        for seq in ended:
            self._finish(seq, reason)
        self._forget_if_done(group, error)
        outputs = [_output(seq, error=error) for seq in ended]
        if not outputs or not group.has_joint_sequence:
            return outputs
        params = group.request.params
        num_awaited = params.n if group.is_beam else params.num_sequences
        return [msgspec.structs.replace(outputs[0], index=index) for index in range(num_awaited)]

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        seq.finish_reason = reason
        self.guided.drop(seq)
        if self._speculation is not None:
            self._speculation.finish(seq)
        self._scheduler.remove(seq)

    def _forget_if_done(self, group: SequenceGroup, error: str | None = None) -> None:
        request_id = group.request.request_id
        if group.is_finished and self.groups.get(request_id) is group:  # the id may have been used again
            del self.groups[request_id]
            if self._observer is not None:
                self._observer.on_end(group)
            if self.stories is not None:
                ends = [seq.finish_reason for seq in group.sequences]
                reasons = [reason for reason in ends if reason != FinishReason.DROPPED]
                last = reasons[-1] if reasons and reasons[-1] else FinishReason.STOP
                self.stories.end(request_id, last, error)
            self.waiting_for_ids.discard(request_id)
            self.queued_joint.discard(request_id)


def _output(
    seq: Sequence,
    *,
    token_ids: tuple[int, ...] = (),
    logprobs: tuple[RowLogprobs, ...] = (),
    prompt_logprobs: tuple[RowLogprobs | None, ...] | None = None,
    error: str | None = None,
) -> StepOutput:
    group = seq.group
    return StepOutput(
        request_id=group.request.request_id,
        index=seq.index,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=seq.finish_reason,
        stop_reason=seq.stop_reason,
        cumulative_logprob=seq.cumulative_logprob,
        added_at=group.added_at,
        queue_s=group.queue_s or 0.0,
        made_at=perf_counter(),
        num_cached=seq.num_cached,
        prompt_logprobs=prompt_logprobs,
        error=error,
        drafts=seq.draft_counts,
    )


def unserved(request: Request, reason: FinishReason, error: RequestError | None = None) -> list[StepOutput]:
    """Return the outputs of a request that ends before it is queued: one for each awaited sequence."""
    said = None if error is None else str(error)
    param = None if error is None else error.param or "structured"
    return [
        StepOutput(request.request_id, index, (), finish_reason=reason, error=said, param=param)
        for index in range(request.params.num_sequences)
    ]
