"""The embedding of a prompt: the hidden states of its tokens, pooled chunk by chunk.

An embedding is a request like any other up to its last prompt token: its chunks share steps with what
decodes. Where a token would be drawn, the final hidden states are pooled instead:

    last   the state of the prompt's last token, from its last chunk
    mean   the sum over the tokens of each chunk; the engine adds the sums of all chunks up

What a chunk gives depends on nothing but the chunk, so a runner keeps nothing between two steps.

Shapes:  T tokens of a step, E chunks that are pooled, D hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from infer.scheduling.plan import StepPlan


class Pooled(NamedTuple):
    """The pooled states of some chunks of a step."""

    seq_ids: list[int]
    states_ED: torch.Tensor

    def by_sequence(self) -> dict[int, np.ndarray]:
        """The states by seq_id; what is on its way to the host must have arrived."""
        return dict(zip(self.seq_ids, self.states_ED.cpu().numpy(), strict=True))


def pool_hidden(plan: StepPlan, last_rows: list[int], hidden_TD: torch.Tensor) -> Pooled:
    """Pool the chunks of embeddings, given the hidden states of all tokens and each chunk's last row."""
    seq_ids: list[int] = []
    states: list[torch.Tensor] = []
    for chunk, seq, last in zip(plan.chunks, plan.chunks.sequences, last_rows, strict=True):
        pooling = seq.group.request.pooling
        if pooling == "mean":
            states.append(hidden_TD[last + 1 - (chunk.stop - chunk.start) : last + 1].float().sum(dim=0))
        elif pooling == "last" and chunk.stop == seq.num_prompt:
            states.append(hidden_TD[last].float())
        else:
            continue
        seq_ids.append(seq.seq_id)
    return Pooled(seq_ids, torch.stack(states) if states else hidden_TD[:0].float())
