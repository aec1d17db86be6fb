"""Fills the masks of several rows at once, in one thread or in several, whichever should be faster.

A mask takes 5 microseconds in most states, and 20 or more in others. Threads help only with slow masks: quick
masks are filled before threads have woken up and fetched the matchers into the caches of their cores (host of
one H200, 32 rows, median and 99th percentile of a step, ms: 0.31 and 0.86 in one thread, 0.35 and 1.1 in
eight, 0.33 and 0.75 with the choice made here). A mask in the middle of a string allows any letter (it is
*wide*) and is quick, and so, usually, is the next one. Constraints differ a hundredfold in cost, so each
keeps the time of a row in one thread (`MaskCost`), separately for rows whose last mask was wide. The sum over
the rows is the time of a step in one thread; the time in several threads is measured for steps of that size.
The faster way is used, and the other one is tried again ever more rarely. Both fill the same masks.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from infer.constraints.compiler import MaskCost
from infer.constraints.guide import Guide

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

    Groups = defaultdict[MaskCost, list[tuple[LLMatcher, int]]]  # matchers and rows that should take as long

MAX_THREADS = 8
TRY_AGAIN, TRY_AT_LEAST = 64, 4096  # fills before the slower way is timed again: at first, and at most


def num_threads() -> int:
    """Return the number of threads that fill masks: the cores of this process but one, for the engine."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_THREADS, num_cores - 1))


class MaskFiller:
    """Fills the masks of a step; its threads start when they are first needed."""

    def __init__(self) -> None:
        self._executor: LLExecutor | None = None
        self._has_cores = num_threads() > 1  # several cores, not counting the engine's
        self._in_threads = defaultdict[int, MaskCost](MaskCost)  # costs of steps, by their size (`_size_of`)
        self._num_fills, self._try_at = 0, TRY_AGAIN
        self._last: tuple[list[Guide | None], np.ndarray] = [], np.empty((0, 1), dtype=np.int32)

    def fill(self, windows: Iterable[tuple[Guide, Sequence[int]]], masks_KW: np.ndarray) -> list[Guide]:
        """Write the masks of guides and their drafts, in order; return the guides that have reached a limit.

        A guide has a row for its next id, and one for the id after each draft. The row of a guide that has
        reached a limit allows everything: the id that it draws is discarded.
        """
        rows, broken = list[Guide | None](), list[Guide]()  # None: a row of a guide with drafts
        groups: Groups = defaultdict(list)
        narrowed = list[tuple[Guide, int]]()
        for guide, drafts in windows:
            row, matcher = len(rows), guide.matcher
            if drafts:
                guide.fill_window(drafts, masks_KW[row : row + 1 + len(drafts)])
                rows += [None] * (1 + len(drafts))
                continue
            rows.append(guide)
            if matcher is None or (guide.known if guide.is_wide else guide.forced()):
                guide.fill(masks_KW[row])  # asking for forced ids takes half as long as filling this mask
                broken += [guide] if guide.error is not None else []
            else:
                groups[guide.mask_cost].append((matcher, row))
                if guide.narrows:
                    narrowed.append((guide, row))
        self._fill_groups(groups, masks_KW)
        for row in [row for group in groups.values() for matcher, row in group if matcher.is_error()]:
            filled = rows[row]
            if filled is not None and not filled.refill(masks_KW[row]):
                masks_KW[row] = -1
                broken.append(filled)
        for guide, row in narrowed:
            guide.narrow(masks_KW[row])
            broken += [guide] if guide.error is not None and guide not in broken else []
        self._last = rows, masks_KW
        return broken

    def _fill_groups(self, groups: Groups, masks_KW: np.ndarray) -> None:
        assert masks_KW.flags.c_contiguous
        first, num_bytes = masks_KW.ctypes.data, masks_KW.strides[0]  # read once, as it takes 2 us
        num_rows = sum(map(len, groups.values()))
        expected_s = sum(cost.seconds * len(rows) for cost, rows in groups.items())
        if self._prefers_threads(num_rows, expected_s):
            if self._executor is None:
                from llguidance import LLExecutor

                self._executor = LLExecutor(num_threads())
            start = perf_counter()
            self._executor.unsafe_compute_mask_ptr(sum(groups.values(), []), first, num_bytes, len(masks_KW))
            self._in_threads[_size_of(expected_s)].note(perf_counter() - start)
            return
        for cost, rows in groups.items():
            start = perf_counter()
            for matcher, row in rows:
                matcher.unsafe_compute_mask_ptr(first + row * num_bytes, num_bytes)
            cost.note((perf_counter() - start) / len(rows))

    def look_back(self) -> int:
        """Tell the guides which of their last masks were wide, while the step runs.

        Return the number of draws that appending the forced ids would save.
        """
        (guides, masks_KW), num_saved = self._last, 0
        self._last = [], masks_KW[:0]
        probes = next((each.grammar.probes for each in guides if each is not None and each.grammar), ())
        are_wide = np.full(len(guides), len(probes) > 0, dtype=np.int32)
        for token_id in probes:
            are_wide &= masks_KW[:, token_id // 32] >> token_id % 32
        for guide, is_wide in zip(guides, are_wide.tolist(), strict=True):
            if guide is not None and (ids := guide.note_mask(is_wide=bool(is_wide))):
                num_saved += len(ids) - 1
        return num_saved

    def _prefers_threads(self, num_rows: int, expected_s: float) -> bool:
        """True if several threads should be faster than one thread, which should take `expected_s`."""
        if num_rows < 2 or not expected_s or not self._has_cores:
            return False
        is_quicker = self._in_threads[_size_of(expected_s)].seconds < expected_s  # 0 seconds: not tried yet
        self._num_fills += 1
        if self._num_fills < self._try_at:
            return is_quicker
        self._num_fills, self._try_at = 0, min(2 * self._try_at, TRY_AT_LEAST)
        return not is_quicker


def _size_of(seconds: float) -> int:
    """Return the number of bits of a time in microseconds, by which steps of similar size are grouped."""
    return int(seconds * 1e6).bit_length()
