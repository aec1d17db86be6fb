"""The embedding of a prompt: the hidden states of its tokens, pooled chunk by chunk.

An embedding is computed like any prompt: its chunks share steps with decoding rows. Instead of sampling a
token, the final hidden states are pooled:

    last   the state of the prompt's last token, from its last chunk
    mean   the sum over the tokens of each chunk; the engine adds up the sums of all chunks

The result of a chunk depends only on the chunk, so a device keeps nothing between two steps. Sums are
computed in float64 and rounded to float32 once, by the engine: so the way in which a prompt is cut into
chunks only affects digits that the rounding drops.

Shapes:  T tokens of a step, E chunks that are pooled, D hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from infer.execution.order import StepOrder
from infer.execution.row_book import RowBook


class Pooled(NamedTuple):
    """The pooled states of some rows of an order."""

    numbers: list[int]
    states_ED: torch.Tensor

    def by_number(self) -> dict[int, np.ndarray]:
        """Return the states by row number; a copy to the host must have finished."""
        return dict(zip(self.numbers, self.states_ED.cpu().numpy(), strict=True))


def pool_hidden(order: StepOrder, book: RowBook, last_rows: list[int], hidden_TD: torch.Tensor) -> Pooled:
    """Pool the rows of embeddings, given all hidden states and the index of each row's last token."""
    numbers: list[int] = []
    states: list[torch.Tensor] = []
    columns = book.entries(order.rows), order.counts.tolist(), order.stops.tolist(), last_rows
    for number, (entry, count, stop, last) in enumerate(zip(*columns, strict=True)):
        if entry.pooling == "mean":
            states.append(hidden_TD[last + 1 - count : last + 1].double().sum(dim=0))
        elif entry.pooling == "last" and stop == entry.facts.num_prompt:
            states.append(hidden_TD[last].double())
        else:
            continue
        numbers.append(number)
    return Pooled(numbers, torch.stack(states) if states else hidden_TD[:0].double())
