"""The embedding of a prompt: its hidden states, pooled, computed beside the cache.

Shapes:  T tokens of a piece of the prompt, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infer.kernels.attention.reference import attend_sdpa
from infer.layers.whole_sequence import WholeSequence
from infer.models.model import Model

CHUNK_LEN = 512  # tokens of a prompt that are computed at once


@torch.inference_mode()
def embed_prompt(model: Model, device: torch.device, prompt: Sequence[int], pooling: str) -> list[float]:
    """The hidden state of a prompt's last token, or the mean over all of them; nothing is cached."""
    step = WholeSequence(attend_sdpa, device)
    sum_D = last_D = torch.zeros(model.config.hidden_size, device=device)
    for first in range(0, len(prompt), CHUNK_LEN):
        tokens_T = torch.tensor(prompt[first : first + CHUNK_LEN], device=device)
        step.advance(len(tokens_T))
        hidden_TD = model(tokens_T, step).float()
        sum_D, last_D = sum_D + hidden_TD.sum(dim=0), hidden_TD[-1]
    pooled_D = last_D if pooling == "last" else sum_D / len(prompt)
    embedding: list[float] = pooled_D.tolist()
    return embedding
