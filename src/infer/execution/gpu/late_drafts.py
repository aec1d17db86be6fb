"""Drafts that a device has drawn and the host has not read: they go from one step to the next on the device.

    draft      turn 0: ids of rows A B C      turn 1: A B C      turn 2: A C
    verify     tokens   a9 . . .   b4 . .   c7 . . .                  places of an order that has drafts

The host launches the step that verifies before it knows what it verifies, and the device does not wait.
"""

from __future__ import annotations

import numpy as np
import torch

from infer.execution.gpu.sending import send
from infer.execution.order import StepOrder


class LateDrafts:
    """The ids of each turn of drafting, and the rows that took part, counted among those with drafts."""

    def __init__(self) -> None:
        self._numbers: list[np.ndarray] = []
        self._ids: list[torch.Tensor] = []

    def add(self, numbers: np.ndarray, ids: torch.Tensor) -> None:
        """Add the ids of one more turn."""
        self._numbers.append(numbers)
        self._ids.append(ids)

    def write(self, order: StepOrder, tokens_T: torch.Tensor) -> None:
        """Write them over the places of drafts among an order's tokens on the device."""
        places = send(torch.from_numpy(self._places(order)), tokens_T.device)
        tokens_T.index_copy_(0, places, torch.cat(self._ids))

    def read(self, order: StepOrder) -> None:
        """Wait for them and write them into the order, without memory on the device."""
        ids = np.concatenate([each.cpu().numpy() for each in self._ids])
        order.tokens[self._places(order)] = np.maximum(ids, 0)  # a place without a token gets id 0

    def _places(self, order: StepOrder) -> np.ndarray:
        """The places of each turn's drafts among the tokens of an order in which no row decodes."""
        first = (order.counts.cumsum() - order.counts)[order.num_sampled > 1]
        return np.concatenate([first[each] + 1 + turn for turn, each in enumerate(self._numbers)]).astype(
            np.int64
        )
