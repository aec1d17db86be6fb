"""Sends the ids of a step to the host, and to the ranks and stages that go on from them.

    the rank that samples   ──► the other ranks of its stage    in the graph that samples (launcher.py)
                            ──► the host                        with logprobs for rows that ask (readback.py)
                            ──► earlier stages                  step by step, without the host

A step of stages is split into parts, so several steps are under way. An earlier stage receives the ids of a
part only when its rows need them, in the next step.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import torch

from infer.execution.device import Pending, no_rows
from infer.execution.gpu.launcher import StepLauncher
from infer.execution.gpu.readback import Asked, PendingIds, Readback
from infer.execution.gpu.rows import padded_tokens
from infer.execution.gpu.sending import send
from infer.execution.order import NONE, VERIFY, StepOrder
from infer.kernels.elementwise.step_state import advance_rows


class AwaitedIds(NamedTuple):
    """The ids of a step that a later stage draws, and the rows that go on from them."""

    rows: np.ndarray
    positions: np.ndarray  # positions of the ids in their sequences
    places: np.ndarray  # places of the rows' ids among the ids that arrive
    num_ids: int  # ids that arrive, including padding


class StepIds:
    """The ids of the last few steps on their way."""

    def __init__(self, launcher: StepLauncher, readback: Readback, num_parts: int) -> None:
        """`num_parts`: the most parts of a step, which stages compute at the same time."""
        self.readback, self.num_parts = readback, num_parts
        self._rows, self._scratch, self._samples = launcher.rows, launcher.scratch, launcher.samples
        self._communicator = launcher.communicator
        self.awaited: deque[AwaitedIds] = deque()  # ids on their way from the last stage

    def read_back(
        self, order: StepOrder, ids_S: torch.Tensor, logits_SV: torch.Tensor, rows: np.ndarray,
        where: np.ndarray | None = None,
    ) -> PendingIds:  # fmt: skip
        """Start to copy the ids of a step to the host, and to the stages that await them.

        The ids of `rows` are at their own places or at `where`.
        """
        asked = self.asked(logits_SV, rows, where)
        if self._communicator is not None:
            self._communicator.pass_ids(self._scratch.ids_S)
        return self.readback.take(order.step, ids_S, order.num_rows, asked)

    def asked(
        self, logits_SV: torch.Tensor, rows: np.ndarray, where: np.ndarray | None = None
    ) -> Asked | None:
        """Return the rows that ask for logprobs; their logits are at their own places or at `where`."""
        counts = self._rows.num_logprobs[rows]
        if not (len(rows) and self._samples) or counts.max() == NONE:
            return None
        (asking,) = (counts != NONE).nonzero()
        places = asking if where is None else where[asking]
        return Asked(places.tolist(), counts[asking].tolist(), logits_SV)

    def await_ids(self, rows: np.ndarray, positions: np.ndarray, places: np.ndarray, num_ids: int) -> Pending:
        """Remember rows that go on from ids of a later stage, which are received when a row needs them."""
        assert self._communicator is not None
        self.awaited.append(AwaitedIds(rows, positions, places, num_ids))
        self._communicator.pass_ids(self._scratch.ids_S)
        return no_rows

    @torch.inference_mode()
    def go_on(self, order: StepOrder) -> None:
        """Receive the awaited ids that the rows of an order go on from, and all earlier ones."""
        takes_all = order.has_begun or order.known.size or VERIFY in order.kinds
        num_due = len(self.awaited) - self.num_parts + 1
        for number, each in enumerate(self.awaited, 1):
            if takes_all or np.isin(each.rows, order.rows).any():
                num_due = max(num_due, number)
        for _ in range(num_due):
            rows, positions, places, num_ids = self.awaited.popleft()
            packed = padded_tokens(np.stack([rows, places, positions]))  # sent before the wait
            rows_N, places_N, positions_N = send(torch.from_numpy(packed), self._rows.device).unbind()
            assert self._communicator is not None
            self._communicator.first(ids_S := self._scratch.ids_S[:num_ids])
            if len(rows):
                state = self._rows
                advance_rows(rows_N, ids_S[places_N], positions_N, state.last_token_R, state.position_R)
