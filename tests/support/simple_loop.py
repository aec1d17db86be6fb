"""The simplest generation there is: one sequence, its keys and values in a list, no scheduler, no blocks.

Everything the engine does must come out as if each request had been served like this, alone. The beam
search follows the statement of scheduling/beam.py word by word, on plain tuples and without forks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from infer.models.model import Model
from infer.sampling.params import SamplingParams
from infer.sampling.sampler import SampleRow, sample
from tests.support.step import ListCache, generate_greedy, run_step

__all__ = ["Hypothesis", "all_logprobs", "beam_search", "generate_greedy", "generate_sampled", "model_offers"]

Offers = Sequence[tuple[int, float]]


def generate_sampled(
    model: Model, prompt: Sequence[int], params: SamplingParams, *, seed: int, stop_ids: Collection[int] = ()
) -> list[int]:
    """Draw one token after the other, each with the sampler's law for its seed and position."""
    assert params.max_tokens is not None
    cache, chunk, tokens = ListCache(), list(prompt), list(prompt)
    while len(tokens) - len(prompt) < params.max_tokens:
        logits_V = run_step(model, [chunk], [cache])[0][-1]
        is_short = len(tokens) - len(prompt) < params.min_tokens
        row = SampleRow(params, seed, len(tokens), len(prompt), tokens, tuple(stop_ids) if is_short else ())
        chunk = sample(logits_V[None], [row]).ids
        tokens += chunk
        if chunk[0] in stop_ids:
            break
    return tokens[len(prompt) :]


def all_logprobs(model: Model, tokens: Sequence[int]) -> torch.Tensor:
    """Logprobs [T, V] of what follows each token, computed at once and without any cache."""
    return torch.log_softmax(run_step(model, [list(tokens)])[0].float(), dim=-1)


def model_offers(model: Model) -> Callable[[Sequence[int]], Offers]:
    """What a model offers a beam search: every token, likeliest first."""

    def offer(tokens: Sequence[int]) -> Offers:
        values, ids = torch.sort(all_logprobs(model, tokens)[-1], descending=True)
        return list(zip(ids.tolist(), values.tolist(), strict=True))

    return offer


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
