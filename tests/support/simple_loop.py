"""The simplest generation there is: one sequence, its keys and values in a list, no scheduler, no blocks.

Everything the engine does must come out as if each request had been served like this, alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from infer.models.model import Model
from infer.sampling.params import SamplingParams
from infer.sampling.sampler import SampleRow, sample
from tests.support.simple_beams import Hypothesis, Offers, beam_search
from tests.support.step import ListCache, generate_greedy, run_step

__all__ = ["Hypothesis", "all_logprobs", "beam_search", "generate_greedy", "generate_sampled", "model_offers"]


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
