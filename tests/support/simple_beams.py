"""The simplest beam search there is: the statement of scheduling/beam.py word by word, without forks.

On plain tuples, and without PyTorch: an engine process of a test starts in a fraction of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

Offers = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One outcome of a beam search."""

    output: tuple[int, ...]
    total: float  # logprob of the whole output
    finish_reason: str

    @property
    def mean(self) -> float:
        """What hypotheses are ranked by."""
        return self.total / len(self.output)


def beam_search(
    offers: Callable[[Sequence[int]], Offers],
    prompt: Sequence[int],
    *,
    width: int,
    max_tokens: int,
    stop_ids: Collection[int] = (),
    min_tokens: int = 0,
) -> list[Hypothesis]:
    """The hypotheses of a search, best first; every step looks at every continuation of every beam."""
    live: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    done: list[Hypothesis] = []
    for length in range(1, max_tokens + 1):
        continuations = [
            ((*output, token), total + logprob)
            for output, total in live
            for token, logprob in offers([*prompt, *output])
            if length > min_tokens or token not in stop_ids
        ]
        continuations.sort(key=lambda offer: -offer[1])
        stopped = [(rank, *offer) for rank, offer in enumerate(continuations) if offer[0][-1] in stop_ids]
        done += [Hypothesis(output, total, "stop") for rank, output, total in stopped if rank < width]
        live = [offer for offer in continuations if offer[0][-1] not in stop_ids][:width]
        if length == max_tokens:
            done += [Hypothesis(output, total, "length") for output, total in live]
        done = sorted(done, key=lambda hypothesis: -hypothesis.mean)[:width]
        if len(done) == width and (not live or live[0][1] / length <= done[-1].mean):
            break
    return done
