"""Masks of several rows at once: most take some 8 microseconds each, those of other states 25.

Threads pay for themselves where masks take long. Those of plain texts are filled sooner than threads wake up
and fetch the matchers into the caches of their cores (one H200's host, 32 rows, ms: 0.29 in one thread where
most are in a text, 0.88 where most are not; 0.46 in eight threads). A mask in the middle of a text allows
any letter and is quick; so is, as a rule, the one after it. What a row took here is kept for those whose last
mask was *wide* and for the others, and what rows took in threads. The way that should be quicker now is used,
and now and then, ever more rarely, the other one. The masks are the same.
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
TRY_AGAIN, TRY_AT_LEAST = 64, 4096  # fills before the slower way is timed again: at first, and at last
NEWEST = 0.25  # the weight of the last fill in what a row is expected to take


def num_threads() -> int:
    """How many threads fill masks: as many as this process has cores, but for the engine's own."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_THREADS, num_cores - 1))


class MaskFiller:
    """Fills the masks of a step; its threads begin with the second step that has two."""

    def __init__(self) -> None:
        self._executor: LLExecutor | None = None
        # what a row takes in this thread after a mask that was narrow, or wide, and in several; 0: not known
        self._narrow_s = self._wide_s = self._threads_s = 0.0
        self._num_fills, self._try_at = 0, TRY_AGAIN
        self._last: tuple[list[Guide], np.ndarray] = [], np.empty((0, 1), dtype=np.int32)

    def fill(self, guides: Collection[Guide], masks_KW: np.ndarray) -> list[Guide]:
        """Write the mask of each guide, in order; returns those that have reached a limit.

        Their rows allow everything: what they draw is not wanted.
        """
        assert masks_KW.flags.c_contiguous
        members, broken = list(guides), list[Guide]()
        wide: list[tuple[LLMatcher, int]] = []
        narrow: list[tuple[LLMatcher, int]] = []
        for row, guide in enumerate(members):
            if guide.matcher is None or (guide.known if guide.is_wide else guide.forced()):
                guide.fill(masks_KW[row])  # to ask what must come takes half as long as such a mask
            else:
                (wide if guide.is_wide else narrow).append((guide.matcher, row))
        first, num_bytes = masks_KW.ctypes.data, masks_KW.strides[0]  # once: of each row it takes 2 us
        if self._prefers_threads(len(narrow), len(wide)):
            executor, start = self._threads(), perf_counter()
            executor.unsafe_compute_mask_ptr(narrow + wide, first, num_bytes, len(masks_KW))
            self._threads_s = _newer(self._threads_s, start, len(narrow) + len(wide))
        else:
            start = perf_counter()
            for matcher, row in narrow:
                matcher.unsafe_compute_mask_ptr(first + row * num_bytes, num_bytes)
            self._narrow_s = _newer(self._narrow_s, start, len(narrow))
            start = perf_counter()
            for matcher, row in wide:
                matcher.unsafe_compute_mask_ptr(first + row * num_bytes, num_bytes)
            self._wide_s = _newer(self._wide_s, start, len(wide))
        for matcher, row in narrow + wide:
            if matcher.is_error() and not members[row].refill(masks_KW[row]):
                masks_KW[row] = -1
                broken.append(members[row])
        self._last = members, masks_KW
        return broken

    def look_back(self) -> None:
        """Tell the guides what the last masks allow; to be called when the step is on its way."""
        guides, masks_KW = self._last
        self._last = [], masks_KW[:0]
        probes = next((guide.grammar.probes for guide in guides if guide.grammar is not None), ())
        if not probes:
            return
        first, second = (masks_KW[:, token_id // 32] >> token_id % 32 for token_id in probes)
        for guide, is_wide in zip(guides, (first & second & 1).tolist(), strict=True):
            guide.note_mask(is_wide=bool(is_wide))

    def _prefers_threads(self, num_narrow: int, num_wide: int) -> bool:
        count = num_narrow + num_wide
        if count < 2:
            return False
        is_quicker = self._threads_s * count < num_narrow * self._narrow_s + num_wide * self._wide_s
        self._num_fills += 1
        if self._num_fills < self._try_at:
            return is_quicker
        self._num_fills, self._try_at = 0, min(2 * self._try_at, TRY_AT_LEAST)
        return not is_quicker

    def _threads(self) -> LLExecutor:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(num_threads())
        return self._executor


def _newer(old_s: float, start: float, count: int) -> float:
    """What a row is expected to take, after so many have taken the time since `start`."""
    if not count:
        return old_s
    row_s = (perf_counter() - start) / count
    return old_s + NEWEST * (row_s - old_s) if old_s else row_s
