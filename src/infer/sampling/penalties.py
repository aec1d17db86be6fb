"""Make tokens that were already used less (or more) likely.

    repetition   logit / r where positive, logit * r where negative, for every token seen (Keskar 2019)
    presence     logit - p        for every token of the output, once
    frequency    logit - f * n    for every token of the output, n = how often it came

Repetition looks at prompt and output, the other two at the output alone, as OpenAI's API counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infer.sampling.params import SamplingParams


def apply_penalties(
    logits_V: torch.Tensor, params: SamplingParams, tokens: Sequence[int], num_prompt: int
) -> None:
    """Change one row of logits in place; `tokens` are the prompt followed by the output so far."""
    if params.repetition_penalty != 1.0 and tokens:
        seen = torch.tensor(tokens, device=logits_V.device)  # a token seen twice gets the same value twice
        seen = seen[seen < logits_V.shape[0]]  # an id may have an embedding and no logit
        values = logits_V[seen]
        factor = params.repetition_penalty
        logits_V[seen] = torch.where(values > 0, values / factor, values * factor)
    if (params.presence_penalty or params.frequency_penalty) and len(tokens) > num_prompt:
        output = torch.tensor(tokens[num_prompt:], device=logits_V.device)
        used, counts = torch.unique(output, return_counts=True)
        logits_V[used] -= params.presence_penalty + params.frequency_penalty * counts.to(logits_V.dtype)
