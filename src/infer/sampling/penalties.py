"""Make tokens that were already used less (or more) likely.

    repetition   logit / r where positive, logit * r where negative, for every token seen (Keskar 2019)
    presence     logit - p        for every token of the output, once
    frequency    logit - f * n    for every token of the output, n = how often it came

Repetition looks at prompt and output, the other two at the output alone, as OpenAI's API counts.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from infer.sampling.params import SamplingParams


def apply_penalties(
    logits_V: torch.Tensor, params: SamplingParams, tokens: Sequence[int], num_prompt: int
) -> None:
    """Change one row of logits in place; `tokens` are the prompt followed by the output so far."""
    if not tokens or not params.has_penalties:
        return
    # through an array: torch.tensor takes ten times as long to read a list of ints
    tokens_T = torch.frombuffer(array("q", tokens), dtype=torch.int64).to(logits_V.device)
    if params.repetition_penalty != 1.0:
        seen = tokens_T[tokens_T < logits_V.shape[0]]  # an id may have an embedding and no logit
        values = logits_V[seen]
        # a tensor: a GPU divides by a number by multiplying with its inverse, which rounds once more
        factor = torch.tensor(params.repetition_penalty, device=values.device)
        # a token seen twice is written twice, with the same value
        logits_V[seen] = torch.where(values > 0, values / factor, values * factor)
    if (params.presence_penalty or params.frequency_penalty) and len(tokens) > num_prompt:
        used, counts = torch.unique(tokens_T[num_prompt:], return_counts=True)
        logits_V[used] -= params.presence_penalty + params.frequency_penalty * counts.to(logits_V.dtype)
