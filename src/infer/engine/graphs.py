"""Decode steps as CUDA graphs: hundreds of kernel launches become one.

Launching a kernel costs the CPU several microseconds and a small model's layer computes for hardly more;
a *graph* is the recorded list of all launches of a step, and replaying it is a single call. What was
recorded is frozen: addresses, grid sizes, Python's branches. So a step is captured once per *bucket*, a
number of rows; it reads everything that changes from device memory (engine/device_rows.py), and rows
that a batch does not fill are padding (-1), for which every kernel does nothing.

    37 rows ──► bucket 40: rows [12, 3, 7, ..., -1, -1, -1] ──► replay

A bucket is captured when it is first needed, or before that in idle time (`prepare`): the first answer
never waits for graphs it does not use. All graphs share one memory pool, because only one runs at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_SMALL = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128)
_STEP = 32  # between the buckets above


def make_buckets(max_rows: int) -> list[int]:
    """The numbers of rows that steps are captured for; the last one holds the largest batch."""
    buckets = [size for size in _SMALL if size < max_rows]
    buckets += range(_SMALL[-1] + _STEP, max_rows, _STEP)
    return [*buckets, max_rows]


class DecodeGraphs:
    """One captured step per bucket. `decode(n)` launches a step over the first n of `rows`."""

    def __init__(
        self, decode: Callable[[int], None], rows: torch.Tensor, max_rows: int, *, is_enabled: bool
    ) -> None:
        self.buckets = make_buckets(max_rows)
        self._decode = decode
        self._rows = rows
        self._is_enabled = is_enabled and rows.is_cuda
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None  # a handle

    def bucket(self, num_rows: int) -> int:
        """The smallest bucket with room for `num_rows`."""
        return next(size for size in self.buckets if size >= num_rows)

    def run(self, bucket: int) -> None:
        """Launch a step over the first `bucket` rows."""
        if not self._is_enabled:
            self._decode(bucket)
            return
        if bucket not in self._graphs:
            self._capture(bucket)
        self._graphs[bucket].replay()

    def prepare(self) -> bool:
        """Capture one more bucket, the smallest that is missing; False: there is none."""
        missing = [size for size in self.buckets if size not in self._graphs] if self._is_enabled else []
        if missing:
            self._capture(missing[0])
        return bool(missing)

    def _capture(self, bucket: int) -> None:
        """Run a step of padding, which compiles its kernels and changes nothing; then record the same."""
        rows = self._rows.clone()
        self._rows.fill_(-1)
        self._decode(bucket)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._decode(bucket)
        self._rows.copy_(rows)
        self._graphs[bucket] = graph
