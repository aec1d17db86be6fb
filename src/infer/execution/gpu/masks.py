"""Token masks on their way from the host to the sampler, beside the forward of the step they belong to.

    steps    ── rows ──●── forward ──────────────────────●── sampler ──
    host               │   reads the last ids, fills     │
    aside              └──────────────────────── copy ───┘

The host fills pinned lines, one for each row that has a mask; there are two sets of them, used in turn, and
neither is written again before it has been copied. The copy runs in a stream of its own, behind the sampler
of the step before, which reads the same memory, and beside the forward. A step without masks has none of it.

A line has 32 ids to a word, the lowest in the lowest bit, 1: allowed.

Shapes:  R rows of state, W words of a mask, K masks of a step.
"""

from __future__ import annotations

import numpy as np
import torch

from infer.execution.gpu.sending import send_into
from infer.kernels.runtime.dispatch import is_gpu
from infer.kernels.sampling.sample_state import SampleState

_NUM_SETS = 2
_NONE = -1  # in place of a line


class DeviceMasks:
    """The masks that rows of state are sampled under, as of the last step that was sent any."""

    def __init__(self, sampling: SampleState) -> None:
        num_rows, num_words = sampling.masks_RW.shape
        self._sampling, self._device = sampling, sampling.masks_RW.device
        self._is_cuda = is_gpu(self._device)
        self._sets = [
            torch.zeros((num_rows, num_words), dtype=torch.int32, pin_memory=self._is_cuda)
            for _ in range(_NUM_SETS)
        ]
        self._arrays = [lines_RW.numpy() for lines_RW in self._sets]
        self._last = 0  # of the sets, the one that was filled last
        self._rows: np.ndarray | None = None  # of the last step, while the device knows their lines
        self._lines_R = np.full(num_rows, _NONE, dtype=np.int32)  # of each row, as the device will know it
        self.has_any = False  # a row may be under a mask
        if self._is_cuda:
            self._aside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._marked = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied = [torch.cuda.Event() for _ in self._sets]  # type: ignore[no-untyped-call]

    def forget(self, row: int) -> None:
        """Note that a row was entered anew, and has no mask."""
        self._lines_R[row], self._rows = _NONE, None

    def clear(self) -> None:
        """Let the steps launched from now on sample no row under a mask."""
        self._put_lines(np.full_like(self._lines_R, _NONE))

    def mark(self) -> None:
        """Note in the stream of the steps that rows are as the next step finds them: its masks may come."""
        if self._is_cuda:
            self._steps = torch.cuda.current_stream(self._device)  # not of another GPU that is current
            self._marked.record(self._steps)

    def take(self, count: int) -> np.ndarray:
        """So many lines of pinned memory, all to be overwritten, for the masks of one step."""
        self._last = (self._last + 1) % _NUM_SETS
        if self._is_cuda:
            self._copied[self._last].synchronize()
        lines_KW: np.ndarray = self._arrays[self._last][:count]
        return lines_KW

    def send(self, rows: np.ndarray) -> None:
        """Let the marked step sample each of these rows under its line, in order, and no other under any."""
        if not self._is_cuda:
            self._put(rows)
            return
        copied = self._copied[self._last]
        self._aside.wait_event(self._marked)
        with torch.cuda.stream(self._aside):
            self._put(rows)
            copied.record(self._aside)
        copied.wait(self._steps)

    def _put(self, rows: np.ndarray) -> None:
        if len(rows):
            masks_KW = self._sampling.masks_RW[: len(rows)]
            masks_KW.copy_(self._sets[self._last][: len(rows)], non_blocking=True)
        if rows is self._rows:  # all that were under masks last
            return
        lines_R = np.full_like(self._lines_R, _NONE)
        lines_R[rows] = np.arange(len(rows))
        if not np.array_equal(lines_R, self._lines_R):
            self._put_lines(lines_R)
        self._rows = rows

    def _put_lines(self, lines_R: np.ndarray) -> None:
        send_into(self._sampling.mask_row_R, torch.from_numpy(lines_R))
        self._lines_R, self.has_any = lines_R.copy(), bool((lines_R != _NONE).any())
        self._rows = None
