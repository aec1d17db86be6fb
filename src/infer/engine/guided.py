"""Guided sequences, whose constraint allows only some next ids: fills their masks, appends forced ids.

    ids of step N ──► `fill`: each guide consumes its ids and writes the mask of its row in step N + 1
                      step N + 1 samples under the masks
                  ──► `may_jump`, `jump`: forced ids are appended without running the model

The engine owns the steps and calls this module; the request table makes outputs and ends sequences. The
guides themselves are in constraints/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from operator import ge
from time import perf_counter
from typing import Protocol

import msgspec
import numpy as np

from infer.constraints.bans import Bans
from infer.constraints.compiler import Grammar
from infer.constraints.guide import ENDED, Guide
from infer.constraints.masks import MaskFiller
from infer.engine.stories import Stories
from infer.execution.device import StepResult
from infer.finish_reason import FinishReason
from infer.sampling.params import NO_TOKEN, RowLogprobs
from infer.scheduling.beam import num_logprobs
from infer.scheduling.plan import StepPlan
from infer.scheduling.request import StepOutput
from infer.scheduling.scheduler import Scheduler
from infer.scheduling.sequence import Sequence, SequenceGroup

Read = tuple[StepPlan, StepResult]  # a step and its result
Sampled = tuple[Sequence, tuple[int, ...], tuple[RowLogprobs | None, ...]]  # sampled ids and their logprobs


class Outputs(Protocol):
    """The part of the request table that guided sequences use."""

    num_output_tokens: int
    stories: Stories | None

    def describe(
        self,
        seq: Sequence,
        ids: tuple[int, ...],
        logprobs: Seq[RowLogprobs | None],
        *,
        has_ended: bool = False,
    ) -> StepOutput:
        """Return an output with more than ids."""

    def end(
        self, group: SequenceGroup, ended: Seq[Sequence], reason: FinishReason, *, error: str | None = None
    ) -> list[StepOutput]:
        """End sequences of a request early."""


class GuidedRequests:
    """The guides of all sequences that have one. One engine thread owns it."""

    def __init__(self, requests: Outputs, scheduler: Scheduler) -> None:
        self.guides: dict[int, Guide] = {}  # guides by seq_id
        self.jumps = True  # True: forced ids are appended without a step for each
        self.is_worth_it: Callable[[int, int], bool] = ge  # arguments: saved draws, sequences of the batch
        self._requests, self._scheduler = requests, scheduler
        self._masks = MaskFiller()
        self._broken: list[Guide] = []  # guides that reached a limit when masks were last filled

    def add(self, leader: Sequence, grammar: Grammar | None) -> None:
        """Guide a sequence from its first sampled id on."""
        params = leader.group.request.params
        bans = Bans(params.allowed_token_ids, params.banned_ids) if params.has_bans else None
        self.guides[leader.seq_id] = Guide(grammar, params.reasoning, bans)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Give a child a copy of its parent's guide."""
        if (guide := self.guides.get(parent.seq_id)) is not None:
            self.guides[child.seq_id] = guide.copy()

    def drop(self, seq: Sequence) -> None:
        """Forget a sequence that has ended."""
        self.guides.pop(seq.seq_id, None)

    # -- before a step samples --------------------------------------------------------------------

    def are_in(self, plan: StepPlan) -> bool:
        """True if any sequence of a plan is guided."""
        guides = self.guides
        return bool(guides) and any(seq.seq_id in guides for seq in plan.chunks.sequences)

    def fill(
        self, plan: StepPlan, last: Read | None, memory: Callable[[int], np.ndarray]
    ) -> tuple[list[int], list[int]]:
        """Write the masks of a plan into `memory(number of masks)`; returns the chunk and position of each.

        `last`: the previous step, if its ids are read but not reported; guides consume them first. A chunk
        has a mask for its next id, and one for the id after each draft of its sequence.
        """
        stories = self._requests.stories
        begun = perf_counter() if stories is not None else 0.0
        if last is not None:
            self._show(*last)
        windows, numbers, positions = list[tuple[Guide, Seq[int]]](), list[int](), list[int]()
        sequences, stops = plan.chunks.sequences, plan.chunks.stops.tolist()
        for number in plan.chunks.draws.nonzero()[0].tolist():
            seq, stop = sequences[number], stops[number]
            guide, num_drafts = self.guides.get(seq.seq_id), len(seq.drafts)
            if guide is not None and guide.error is None and (guide.has_mask or num_drafts):
                windows.append((guide, seq.drafts))
                numbers += [number] * (1 + num_drafts)
                positions += range(stop - num_drafts, stop + 1)
        self._broken = self._masks.fill(windows, memory(len(numbers)))
        if stories is not None:
            stories.mask_s += perf_counter() - begun
        return numbers, positions

    def _show(self, plan: StepPlan, result: StepResult) -> None:
        """Let guides consume the sampled ids of a step before it is reported, to fill masks sooner."""
        guides = self.guides
        for seq, ids in zip(plan.chunks.sequences, result.ids, strict=True):
            guide = guides.get(seq.seq_id)
            if guide is None or not ids or seq.finish_reason is not None or seq.num_samples != 1:
                continue
            if result.is_whole or NO_TOKEN not in ids:
                guide.advance(ids, seq.stop_ids)

    # -- append ids -------------------------------------------------------------------------------

    def report(self, sampled: Iterable[Sampled], outputs: list[StepOutput]) -> Iterator[Sampled]:
        """Append the ids of guided sequences and add their outputs; yield all other sequences unchanged."""
        for seq, ids, logprobs in sampled:
            guide = self.guides.get(seq.seq_id)
            if guide is None or seq.is_beam:
                yield seq, ids, logprobs
            elif ids and seq.finish_reason is None:
                outputs += self._follow(seq, guide, ids, logprobs)

    def _follow(
        self, seq: Sequence, guide: Guide, ids: tuple[int, ...], logprobs: Seq[RowLogprobs | None]
    ) -> list[StepOutput]:
        """Append ids to a guided sequence, up to the id that ends it or its request."""
        num_taken, has_ended = guide.take(ids, seq.stop_ids)
        seq.tokens.extend(ids[:num_taken])
        if guide.error is not None:
            return self._fail(seq, guide)
        if guide.state == ENDED and guide.bans is None:
            del self.guides[seq.seq_id]
        if not has_ended and len(seq.tokens) < seq.bare_until and seq.tokens[-1] not in seq.stop_ids:
            return [StepOutput(seq.request_id, seq.index, ids)]
        return [self._requests.describe(seq, ids[:num_taken], logprobs[:num_taken], has_ended=has_ended)]

    def _fail(self, seq: Sequence, guide: Guide) -> list[StepOutput]:
        """End the request of a sequence whose constraint has reached a limit."""
        group, structured = seq.group, seq.group.request.params.structured
        own = "allowed_token_ids" if group.request.params.allowed_token_ids else "bad_words"
        param = own if structured is None else structured.param
        ended = self._requests.end(
            group, group.unfinished, FinishReason.ERROR, error=f"{param}: {guide.error}"
        )
        return [msgspec.structs.replace(output, param=param) for output in ended]

    # -- forced ids -------------------------------------------------------------------------------

    def may_jump(self, plan: StepPlan) -> bool:
        """True if it may pay to append forced ids to the sequences whose masks were just filled.

        Every guide with a mask is asked, because asking fixes its forced ids: the output must not depend on
        whether they are appended or sampled. A guide that has reached a limit then ends its request.
        """
        num_saved = self._masks.look_back()
        return bool(self._broken) or self.is_worth_it(num_saved, len(plan.chunks.sequences))

    def jump(self, plan: StepPlan | None, dropped: set[int]) -> list[StepOutput]:
        """Append forced ids to the sequences of `plan`, a step in flight; None: to all running sequences.

        Appended ids make the next step longer for every sequence, so nothing is appended unless at least as
        many draws are saved as the batch has sequences. Otherwise forced ids are sampled one by one, under
        masks that allow no other id. `dropped` receives the chunks whose sampled ids are discarded, because
        a forced id takes their place.
        """
        outputs: list[StepOutput] = []
        sequences: Seq[Sequence] = self._scheduler.running if plan is None else plan.chunks.sequences
        numbers = range(len(sequences)) if plan is None else plan.chunks.draws.nonzero()[0].tolist()
        for seq in sequences if self._broken and plan is not None else ():
            if seq.finish_reason is None and (broken := self.guides.get(seq.seq_id)) in self._broken:
                outputs += self._fail(seq, broken)
        guided = ((number, sequences[number]) for number in numbers)
        due = [(number, seq, *self._due(seq)) for number, seq in guided if seq.seq_id in self.guides]
        num_saved = sum(len(ids) - num_drawn for _, _, ids, num_drawn in due)
        for number, seq, ids, num_drawn in due if self.is_worth_it(num_saved, len(sequences)) else ():
            if ids and (guide := self.guides.get(seq.seq_id)) is not None:  # None: another ended its request
                made = self._follow(seq, guide, ids, (None,) * len(ids))
                self._requests.num_output_tokens += sum(len(output.token_ids) for output in made)
                if seq.finish_reason is None:
                    self._scheduler.state.grow(seq, len(ids) - num_drawn)
                if (stories := self._requests.stories) is not None:
                    stories.jump(seq.request_id, len(ids) - num_drawn)
                outputs += made
                dropped.add(number)
        return outputs

    def _due(self, seq: Sequence) -> tuple[tuple[int, ...], int]:
        """Return the forced ids that may be appended, and how many of them the step in flight samples.

        A request with logprobs gets all its tokens from steps, which compute the logprobs; its guide is asked
        all the same (see `may_jump`).
        """
        guide, params = self.guides[seq.seq_id], seq.group.request.params
        ids = guide.forced() if guide.has_mask else ()
        if not ids or seq.drafts or not (self.jumps and seq.is_running and seq.num_samples == 1):
            return (), 0
        if num_logprobs(seq.group) is not None or params.prompt_logprobs is not None:
            return (), 0
        num_drawn = seq.num_tokens - len(seq.tokens)  # ids in flight: one or none
        ids = ids[: seq.max_total - len(seq.tokens)]
        return (ids, num_drawn) if len(ids) > num_drawn else ((), 0)
