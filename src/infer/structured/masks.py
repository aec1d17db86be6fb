"""Masks of several rows at once: some 20 to 40 microseconds each, now and then a millisecond.

Threads pay for themselves where masks take long, as those of texts with a length do. Those of plain JSON are
filled sooner than threads wake up (one H200's host, 32 rows: 0.55 ms in one thread, 1.3 in eight). Which of
both is quicker depends on the constraints that are there, so both are timed and the quicker one is used;
now and then the other is tried again. The masks are the same.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from infer.structured.guide import Guide

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

MAX_THREADS = 8
TRY_AGAIN = 64  # fills, before the slower way is timed again
NEWEST = 0.25  # the weight of the last fill in what a row is expected to take


def num_threads() -> int:
    """How many threads fill masks: as many as this process has cores, but for the engine's own."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_THREADS, num_cores - 1))


class MaskFiller:
    """Fills the masks of a step; its threads begin with the second step that has two."""

    def __init__(self) -> None:
        self._executor: LLExecutor | None = None
        self._row_s = [0.0, 0.0]  # what a row takes in this thread, and in several; 0: not known
        self._num_fills = 0

    def fill(self, guides: Collection[Guide], masks_KW: np.ndarray) -> list[Guide]:
        """Write the mask of each guide, in order; returns those that have reached a limit.

        Their rows allow everything: what they draw is not wanted.
        """
        assert masks_KW.flags.c_contiguous
        matched: list[tuple[LLMatcher, int]] = []
        for row, guide in enumerate(guides):
            if guide.known or guide.matcher is None:
                guide.fill(masks_KW[row])
            else:
                matched.append((guide.matcher, row))
        in_threads = len(matched) > 1 and self._prefers_threads()
        first, num_bytes = masks_KW.ctypes.data, masks_KW.strides[0]  # once: of each row it takes 2 us
        start = perf_counter()
        if in_threads:
            self._threads().unsafe_compute_mask_ptr(matched, first, num_bytes, len(masks_KW))
        else:
            for matcher, row in matched:
                matcher.unsafe_compute_mask_ptr(first + row * num_bytes, num_bytes)
        if len(matched) > 1:
            row_s, old_s = (perf_counter() - start) / len(matched), self._row_s[in_threads]
            self._row_s[in_threads] = old_s + NEWEST * (row_s - old_s) if old_s else row_s
        broken: list[Guide] = []
        for row, guide in enumerate(guides):
            guide.check()
            if guide.error is not None:
                masks_KW[row] = -1
                broken.append(guide)
        return broken

    def _prefers_threads(self) -> bool:
        here_s, threads_s = self._row_s
        self._num_fills += 1
        return (threads_s < here_s) != (self._num_fills % TRY_AGAIN == 0)

    def _threads(self) -> LLExecutor:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(num_threads())
        return self._executor
