"""Masks of several rows at once, filled in threads: some 30 microseconds each, now and then a millisecond."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from infer.structured.guide import Guide

if TYPE_CHECKING:
    from llguidance import LLExecutor

MAX_THREADS = 8


class MaskFiller:
    """Fills the masks of a step; its threads begin with the first step that has two."""

    def __init__(self) -> None:
        self._executor: LLExecutor | None = None

    def fill(self, guides: Collection[Guide], masks_KW: np.ndarray) -> list[Guide]:
        """Write the mask of each guide, in order; returns those that have reached a limit.

        Their rows allow everything: what they draw is not wanted.
        """
        matched = [
            (guide.matcher, row)
            for row, guide in enumerate(guides)
            if guide.matcher is not None and not guide.forced()
        ]
        if len(matched) > 1:
            from llguidance import LLExecutor
            from llguidance.numpy import fill_next_token_bitmask_par

            if self._executor is None:
                self._executor = LLExecutor(max(1, min(MAX_THREADS, (os.cpu_count() or 1) - 1)))
            fill_next_token_bitmask_par(self._executor, matched, masks_KW)
        broken: list[Guide] = []
        for row, guide in enumerate(guides):
            if len(matched) <= 1 or guide.forced():
                guide.fill(masks_KW[row])
            else:
                guide.check()
            if guide.error is not None:
                masks_KW[row] = -1
                broken.append(guide)
        return broken
