"""Drafts that the host has not read: they go from the drafter to the verifying step on the device.

    drafts     turn 0: A B C      turn 1: A B C      turn 2: A B C       as a graph leaves them
    verify     a9 0 3 6 | b4 1 | c7 2 5 8                                tokens and the numbers of drafts

The host launches the step that verifies before it knows what it verifies, and the device does not wait.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from infer.execution.gpu.readback import PendingTensor
from infer.execution.order import StepOrder
from infer.kernels.elementwise.windows import FIRST_CODE


class LateDrafts:
    """The drafts of an order, all of which were made in the same turns."""

    def __init__(self, ids_KS: PendingTensor, width: int, columns: Sequence[int]) -> None:
        """`ids_KS` are on their way to the host; each turn has `width` columns, on the host and the device.

        `columns`: the column of each row of the order that has drafts.
        """
        self.ids_KS, self._width, self._columns = ids_KS, width, np.array(columns, dtype=np.int64)

    def codes(self, order: StepOrder) -> np.ndarray:
        """Return the tokens of an order in which no row decodes, drafts as codes (kernels' windows.py)."""
        tokens = order.tokens.astype(np.int64)
        places, turns, columns = self._places(order)
        tokens[places] = FIRST_CODE - (turns * self._width + columns)
        return tokens

    @property
    def are_all(self) -> bool:
        """True if the rows with drafts are the rows that were drafted for, in their order."""
        return bool((self._columns == np.arange(len(self._columns))).all())

    def read(self, order: StepOrder) -> None:
        """Wait for the drafts and write them into the order."""
        places, turns, columns = self._places(order)
        order.tokens[places] = self.ids_KS.wait().numpy()[turns, columns]

    def collect(self, counts: Sequence[int]) -> list[list[int]]:
        """Wait for the drafts; return `counts` of them, row by row."""
        ids: list[list[int]] = self.ids_KS.wait().numpy().T[self._columns].tolist()
        return [drafts[:count] for drafts, count in zip(ids, counts, strict=True)]

    def _places(self, order: StepOrder) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the place of each draft among the order's tokens, its turn and its column."""
        is_judged = order.num_sampled > 1
        counts = order.num_sampled[is_judged].astype(np.int64) - 1
        firsts = (order.counts.cumsum() - order.counts)[is_judged] + 1
        turns = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
        return firsts.repeat(counts) + turns, turns, self._columns.repeat(counts)
