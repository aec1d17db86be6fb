"""Token masks, on their way from the host to the sampler of their step.

    steps    ── rows ── forward ──────────────────────── sampler, fetches ──
    host                reads the last ids, fills, launches

The host fills lines of pinned memory, one for each row with a mask. The sampler is launched after that and
fetches the lines of its rows (kernels/sampling/sample_state.py). The host sends only the line number of each
row, when it changes. A step without masks does none of this.

A line has 32 ids to a word, the lowest id in the lowest bit; 1: allowed.

Shapes:  R rows of state, W words of a mask, K masks of a step.
"""

from __future__ import annotations

import numpy as np
import torch

from infer.execution.gpu.sending import send_into
from infer.kernels.sampling.sample_state import SampleState

_NONE = -1  # line of a row without a mask


class DeviceMasks:
    """The masks of rows of state, as last sent to the device."""

    def __init__(self, sampling: SampleState) -> None:
        self._sampling, num_rows = sampling, len(sampling.masks_RW)
        self._masks_RW: np.ndarray = sampling.masks_RW.numpy()
        self._lines_R = np.full(num_rows, _NONE, dtype=np.int32)  # line of each row, as the device knows it
        self.num_words = self._masks_RW.shape[1]  # words of a mask
        self.has_any = False  # True: some rows have masks on the device

    def forget(self, row: int) -> None:
        """Note that a row begins anew, without a mask."""
        self._lines_R[row] = _NONE

    def clear(self) -> None:
        """Remove all masks, for the steps launched from now on."""
        self._put_lines(np.full_like(self._lines_R, _NONE))

    def take(self, count: int) -> np.ndarray:
        """Return the lines for `count` masks of one step, all of which must be overwritten.

        The steps before it must have been sampled: their samplers fetch the same lines.
        """
        assert count <= len(self._masks_RW), f"{count} masks for {len(self._masks_RW)} rows"
        return self._masks_RW[:count]

    def send(self, rows: np.ndarray) -> None:
        """Assign the lines to these rows, in order, for the current step; other rows get no mask."""
        lines_R = np.full_like(self._lines_R, _NONE)
        lines_R[rows] = np.arange(len(rows))
        if not np.array_equal(lines_R, self._lines_R):
            self._put_lines(lines_R)

    def _put_lines(self, lines_R: np.ndarray) -> None:
        send_into(self._sampling.mask_row_R, torch.from_numpy(lines_R))
        self._lines_R, self.has_any = lines_R.copy(), bool((lines_R != _NONE).any())
