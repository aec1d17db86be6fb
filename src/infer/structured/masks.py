"""Masks of several rows at once: most take some 5 microseconds each, those of other states 20 and more.

Threads pay for themselves where masks take long. Those of plain texts are filled sooner than threads wake up
and fetch the matchers into the caches of their cores. Which ones a step has cannot be told before it: masks
of different constraints, and of different states of one, differ a hundredfold. So a step is begun in the
engine's own thread, and if that has taken `PATIENCE_S` and rows are left, threads fill these.
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
PATIENCE_S = 2e-4  # in one thread: about what the masks of 32 plain texts take


def num_threads() -> int:
    """How many threads fill masks: as many as this process has cores, but for the engine's own."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_THREADS, num_cores - 1))


class MaskFiller:
    """Fills the masks of a step; its threads begin with the first step that takes long."""

    def __init__(self) -> None:
        self._executor: LLExecutor | None = None
        self._has_cores = num_threads() > 1  # beside the engine's own
        self._last: tuple[list[Guide], np.ndarray] = [], np.empty((0, 1), dtype=np.int32)

    def fill(self, guides: Collection[Guide], masks_KW: np.ndarray) -> list[Guide]:
        """Write the mask of each guide, in order; returns those that have reached a limit.

        Their rows allow everything: what they draw is not wanted.
        """
        assert masks_KW.flags.c_contiguous
        members, broken = list(guides), list[Guide]()
        rows: list[tuple[LLMatcher, int]] = []
        for row, guide in enumerate(members):
            if guide.matcher is None or (guide.known if guide.is_wide else guide.forced()):
                guide.fill(masks_KW[row])  # to ask what must come takes half as long as such a mask
            else:
                rows.append((guide.matcher, row))
        self._fill_rows(rows, masks_KW)
        for matcher, row in rows:
            if matcher.is_error() and not members[row].refill(masks_KW[row]):
                masks_KW[row] = -1
                broken.append(members[row])
        self._last = members, masks_KW
        return broken

    def _fill_rows(self, rows: list[tuple[LLMatcher, int]], masks_KW: np.ndarray) -> None:
        first, num_bytes = masks_KW.ctypes.data, masks_KW.strides[0]  # once: of each row it takes 2 us
        end = perf_counter() + PATIENCE_S
        for number, (matcher, row) in enumerate(rows):
            if self._has_cores and number < len(rows) - 1 and perf_counter() > end:
                self._threads().unsafe_compute_mask_ptr(rows[number:], first, num_bytes, len(masks_KW))
                return
            matcher.unsafe_compute_mask_ptr(first + row * num_bytes, num_bytes)

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

    def _threads(self) -> LLExecutor:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(num_threads())
        return self._executor
