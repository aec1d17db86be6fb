"""Beam search: keep the W most likely continuations instead of sampling one.

After each step every live beam offers its most likely next tokens: W of them, plus one for each stop id.
All offers are sorted by the logprob of the whole output, and the best W become the next beams. An offer whose
token is a stop becomes a *finished* hypothesis instead, if it is among the first W. Finished hypotheses are
ranked by their mean logprob per token. The search ends when W hypotheses are finished and no live beam can
do better.

    beams        A -1.2   B -1.9           offers, best first        next beams (W = 2)
    A offers     x -0.3   y -1.0    ->     Ax -1.5   By -2.1   ...   Ax, By:  A and B continue
    B offers     y -0.2   x -4.0           Ay -2.2   Bx -5.9         had both come from A, A would fork

A beam continued twice forks: its blocks are shared, and copied when one of the two writes.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from infer.finish_reason import FinishReason
from infer.sampling.params import RowLogprobs
from infer.scheduling.request import StepOutput
from infer.scheduling.sequence import FinishedBeam, Sequence, SequenceGroup


@dataclass(frozen=True, slots=True)
class Continuation:
    """A beam of the next step: the beam it continues, and the next token."""

    parent: Sequence
    token_id: int
    score: float  # logprob of the whole output


def num_offers(group: SequenceGroup) -> int:
    """Return the number of next tokens each beam must offer, so that stops never displace continuations."""
    return group.request.params.num_sequences + len(group.stop_ids)


def num_logprobs(group: SequenceGroup) -> int | None:
    """Return the number of top logprobs that the engine needs for each token; None: no logprobs."""
    params = group.request.params
    if params.use_beam_search:
        return num_offers(group)
    if params.logprobs is None and params.num_sequences > params.n:
        return 0  # ranking needs the chosen token's logprob
    return params.logprobs


def advance_beams(
    group: SequenceGroup,
    offers: Seq[tuple[Sequence, RowLogprobs]],
    *,
    fork: Callable[[Sequence], Sequence],
    drop: Callable[[Sequence], None],
) -> bool:
    """Replace the beams of a search by the next ones; False: it has ended, see `finished_beams`.

    `fork` copies a beam that is continued more than once; `drop` ends a beam that is not continued.
    """
    chosen = next_beams(group, offers)
    if not chosen:
        return False
    heirs: list[tuple[Sequence, Continuation]] = []
    continued: set[int] = set()
    for pick in chosen:  # the first continuation of a parent reuses its sequence
        heir = fork(pick.parent) if pick.parent.seq_id in continued else pick.parent
        heirs.append((heir, pick))
        continued.add(pick.parent.seq_id)
    for beam, _ in offers:
        if beam.seq_id not in continued:
            drop(beam)
    for heir, pick in heirs:
        heir.tokens.append(pick.token_id)
        heir.cumulative_logprob = pick.score
    group.sequences = group.unfinished
    return True


def next_beams(group: SequenceGroup, offers: Seq[tuple[Sequence, RowLogprobs]]) -> list[Continuation]:
    """Choose the next beams; hypotheses that reach a stop are added to `group.finished_beams`."""
    params = group.request.params
    width = params.num_sequences
    # all beams have the same length; none may stop before min_tokens
    banned = group.stop_ids if offers[0][0].num_output <= params.min_tokens else ()
    ranked = sorted(
        (
            Continuation(beam, token_id, beam.cumulative_logprob + logprob)
            for beam, row in offers
            for token_id, logprob in row.top
            if token_id not in banned
        ),
        key=lambda offer: -offer.score,
    )
    chosen: list[Continuation] = []
    for rank, offer in enumerate(ranked):
        if offer.token_id in group.stop_ids:
            if rank < width:
                _finish(group, offer, FinishReason.STOP)
        elif len(chosen) < width:
            chosen.append(offer)
        elif rank >= width:
            break
    if chosen and chosen[0].parent.num_tokens >= group.max_total:  # the length limit is reached
        for offer in chosen:
            _finish(group, offer, FinishReason.LENGTH)
        chosen = []
    group.finished_beams.sort(key=lambda beam: -beam.score)
    del group.finished_beams[width:]
    is_full = len(group.finished_beams) == width
    if chosen and is_full and _mean(group, chosen[0]) <= group.finished_beams[-1].score:
        return []
    return chosen


def best_outputs(group: SequenceGroup) -> list[StepOutput]:
    """Return the n best hypotheses of a search that has ended."""
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
            prompt_logprobs=group.asked_prompt_logprobs,
        )
        for index, beam in enumerate(group.finished_beams[: group.request.params.n])
    ]


def _finish(group: SequenceGroup, offer: Continuation, reason: FinishReason) -> None:
    output = [*offer.parent.tokens[offer.parent.num_prompt :], offer.token_id]
    own_stop = offer.token_id if offer.token_id in group.request.params.stop_token_ids else None
    group.finished_beams.append(FinishedBeam(output, _mean(group, offer), offer.score, reason, own_stop))


def _mean(group: SequenceGroup, offer: Continuation) -> float:
    """Return the mean logprob per output token, including the offered one."""
    return offer.score / (len(offer.parent.tokens) - offer.parent.num_prompt + 1)
