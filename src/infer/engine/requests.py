"""The requests being served, and what a sampled id means for them.

A request begins as one sequence, its *leader*, which computes the prompt for all that the client waits for:

    n = 1     leader ──id──id──id── stop
    n = 3     leader ──id──id──id── stop            the prompt's last chunk samples three ids at once,
                   ├───id──id── length              and the leader forks: the children share its blocks
                   └───id──id──id──id── stop
    beams     leader, then W sequences that advance together and replace each other     (beam.py)

Every id that arrives is appended, and it is the last if it is a stop or if no more tokens fit. A sequence
that ends leaves the scheduler and the runner at once; a request is served until its last one has ended.
Whatever happens, each sequence the client waits for gets exactly one output with a finish reason.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from time import perf_counter

import msgspec

from infer.execution.runner import Runner, StepResult
from infer.sampling.params import RowLogprobs
from infer.scheduling.beam import advance_beams, best_outputs
from infer.scheduling.plan import StepPlan
from infer.scheduling.request import StepOutput
from infer.scheduling.scheduler import Scheduler
from infer.scheduling.sequence import Sequence, SequenceGroup

ARRIVALS_PER_GROUP = 1 << 20  # arrival numbers leave room for the forks of a group beside each other


class LiveRequests:
    """Makes, advances and ends the sequences of every request. One engine thread owns it."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.groups: dict[str, SequenceGroup] = {}  # by request id
        self.need_the_host: set[str] = set()  # requests whose next step depends on ids: they allow no overlap
        self.num_added = 0
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self._scheduler = scheduler
        self._runner = runner
        self._next_seq_id = 0

    # -- to begin ---------------------------------------------------------------------------------

    def add(self, group: SequenceGroup, tokens: array[int]) -> None:
        """Make the leader of an admitted request with its prompt's ids, and let it wait for its turn."""
        params = group.request.params
        group.added_at = perf_counter()
        leader = self._new_sequence(group, 0, tokens)
        leader.arrival = self.num_added * ARRIVALS_PER_GROUP
        leader.num_slots = params.num_sequences
        leader.num_samples = 1 if group.is_beam else params.num_sequences
        self.num_added += 1
        self._scheduler.add(leader)
        self.groups[group.request.request_id] = group

    def begin(self, leader: Sequence) -> None:
        """A request leaves the queue; from this step on, one that needs the host allows no overlap."""
        group = leader.group
        group.queue_s = perf_counter() - group.added_at
        if leader.num_samples > 1 or group.samples_on_host:
            self.need_the_host.add(group.request.request_id)

    def _new_sequence(self, group: SequenceGroup, index: int, tokens: array[int]) -> Sequence:
        seq = Sequence(self._next_seq_id, group, index, tokens)
        self._next_seq_id += 1
        group.sequences.append(seq)
        group.num_made += 1
        return seq

    def _fork(self, parent: Sequence, index: int) -> Sequence:
        """Let a child continue beside its parent; its next token already has its place."""
        child = self._new_sequence(parent.group, index, parent.tokens)
        child.num_tokens = parent.num_tokens
        child.num_cached = parent.num_cached
        child.arrival = parent.arrival - parent.arrival % ARRIVALS_PER_GROUP + parent.group.num_made
        self._scheduler.fork(parent, child)
        return child

    def _fork_leader(self, leader: Sequence, count: int) -> list[Sequence]:
        """All sequences of a request, once its prompt is computed."""
        leader.num_samples = 1
        if not leader.group.samples_on_host:
            self.need_the_host.discard(leader.group.request.request_id)
        return [leader, *(self._fork(leader, index) for index in range(1, count))]

    # -- to go on ---------------------------------------------------------------------------------

    def report(self, plan: StepPlan, sequences: Seq[Sequence], result: StepResult) -> list[StepOutput]:
        """Give every sequence of a plan its ids; what came of it, in the order of the plan, beams last."""
        outputs: list[StepOutput] = []
        offers: dict[int, tuple[SequenceGroup, list[tuple[Sequence, RowLogprobs]]]] = {}
        if result.prompt_logprobs:
            for chunk, seq in zip(plan.chunks, sequences, strict=True):
                # from its own position on: a prompt that was preempted half way is computed again
                seq.group.prompt_logprobs[chunk.start :] = result.prompt_logprobs.get(seq.seq_id, ())
        num_others = 0
        for seq, ids, logprobs in zip(sequences, result.ids, result.logprobs, strict=True):
            if not ids:
                continue
            tokens = seq.tokens
            if len(tokens) < seq.goes_on_until and ids[0] not in seq.stop_ids:
                # by far the most tokens: what `_advance` does, in a fifth of the time
                tokens.append(ids[0])
                outputs.append(StepOutput(seq.request_id, seq.index, ids))
                continue
            if seq.finish_reason is not None:
                continue
            if seq.is_beam:
                row = logprobs[0]
                assert row is not None, "beams always ask for logprobs"
                offers.setdefault(id(seq.group), (seq.group, []))[1].append((seq, row))
                continue
            members = self._fork_leader(seq, len(ids)) if len(ids) > 1 else [seq]
            num_others += len(members)
            for member, token_id, row in zip(members, ids, logprobs, strict=True):
                outputs.append(self._advance(member, token_id, row))
            if any(member.is_finished for member in members):
                self._forget_if_done(seq.group)
        self.num_output_tokens += len(outputs) - num_others
        for group, beams in offers.values():
            if not group.is_finished:
                outputs.extend(self._advance_beams(group, beams))
        return outputs

    def _advance(self, seq: Sequence, token_id: int, row: RowLogprobs | None) -> StepOutput:
        """Append a sampled token and see whether it was the last."""
        group = seq.group
        is_first = len(seq.tokens) == seq.num_prompt
        seq.tokens.append(token_id)
        self.num_output_tokens += 1
        if is_first and seq.index == 0:
            self.num_prompt_tokens += seq.num_prompt
        if row is not None:
            seq.cumulative_logprob += row.logprob
        if token_id in group.stop_ids:
            seq.stop_reason = token_id if token_id in group.request.params.stop_token_ids else None
            self._finish(seq, "stop")
        elif len(seq.tokens) >= seq.max_total:
            self._finish(seq, "length")
        elif row is None:  # nor will the next have one
            seq.goes_on_until = seq.max_total - 1
        asks = group.request.params.logprobs is not None
        return _output(
            seq,
            token_ids=(token_id,),
            logprobs=(row,) if asks and row is not None else (),
            prompt_logprobs=group.asked_prompt_logprobs if is_first else None,
        )

    def _advance_beams(
        self, group: SequenceGroup, offers: list[tuple[Sequence, RowLogprobs]]
    ) -> list[StepOutput]:
        """Let a beam search make its step; the n best hypotheses when it has ended."""
        first, n = offers[0][0], group.request.params.n
        if first.num_output == 1:
            self.num_prompt_tokens += first.num_prompt
        goes_on = advance_beams(
            group,
            offers,
            fork=lambda beam: self._fork(beam, beam.index),
            drop=lambda beam: self._finish(beam, "dropped"),
        )
        if goes_on:
            return []
        num_found = len(group.finished_beams)
        if num_found < n:
            reason = f"beam search found {num_found} outputs, {n} were asked for"
            return self.end(group, group.sequences, "error", error=reason)
        self.end(group, group.sequences, "stop")
        outputs = best_outputs(group)
        self.num_output_tokens += sum(len(output.token_ids) for output in outputs)
        return outputs

    # -- to end -----------------------------------------------------------------------------------

    def end(
        self, group: SequenceGroup, ended: Seq[Sequence], reason: str, *, error: str | None = None
    ) -> list[StepOutput]:
        """Finish sequences of a request before their time; one last output for each the client waits for."""
        for seq in ended:
            self._finish(seq, reason)
        self._forget_if_done(group)
        outputs = [_output(seq, error=error) for seq in ended]
        if not outputs or not group.is_one_for_all:
            return outputs
        params = group.request.params
        num_awaited = params.n if group.is_beam else params.num_sequences
        return [msgspec.structs.replace(outputs[0], index=index) for index in range(num_awaited)]

    def _finish(self, seq: Sequence, reason: str) -> None:
        seq.finish_reason = reason
        seq.goes_on_until = 0
        self._scheduler.remove(seq)
        self._runner.forget(seq.seq_id)

    def _forget_if_done(self, group: SequenceGroup) -> None:
        request_id = group.request.request_id
        if group.is_finished and self.groups.get(request_id) is group:  # else the id is another's by now
            del self.groups[request_id]
            self.need_the_host.discard(request_id)


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
        queue_s=group.queue_s or 0.0,
        num_cached=seq.num_cached,
        prompt_logprobs=prompt_logprobs,
        error=error,
    )
