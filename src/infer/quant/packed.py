"""Weights in groups of 32 that share a scale, as int8 or int4, in the layout of kernels/cpu.

    int8   w = d * q,      q in -127 .. 127      8.5 bits per weight
    int4   w = d * q + m,  q in 0 .. 15          5 bits per weight; files in 4 bits keep their numbers

The minimum m of a group costs half a bit per weight and very little time: sixteen steps are too few to spend
any of them on a range that holds no weight, and the formats of 4-bit files have minima, too.

Activations are quantised on the way, 32 at a time, so the products are integer arithmetic. A few channels are
much louder than the rest, and with 8 bits that would cost more accuracy than the weights do; so they have 15
(csrc/linear.h).

A matrix is filled row by row in any order, so a fused matrix takes its parts as they come from the disk, and
nothing the size of the model in float32 ever exists.

`bits` of the head is 8 even in an int4 model: its errors would go straight into the logits. A tied
embedding reads its rows from the packed head.
"""

from __future__ import annotations

import contextlib
import mmap

import torch

from infer.kernels.cpu import operations
from infer.kernels.cpu.library import Library

# Of a packed matrix, by its bits: the integer and its share of what a group has.
BYTES_PER_WEIGHT = {bits: bits / 8 + size / operations.GROUP for bits, size in operations.SCALE_BYTES.items()}
_LARGE_PAGE = 2 << 20


class PackedMatrix:
    """One [out, in] matrix of small integers; a scheme of layers/linear.py."""

    def __init__(
        self,
        library: Library,
        num_rows: int,
        size: int,
        bits: int,
        memory: WeightMemory | None = None,
    ) -> None:
        assert bits in (4, 8), bits
        self.num_rows, self.size, self.bits = num_rows, size, bits
        self._library = library
        data_bytes, scale_bytes = operations.packed_bytes(num_rows, size, bits)
        # Fresh memory is zero, also where the last tile has no row: those lanes are computed and thrown away.
        memory = memory or WeightMemory(data_bytes + scale_bytes + 64)
        self.data = memory.take(data_bytes)
        self.scales = memory.take(scale_bytes).view(torch.float16)
        self.num_bytes = data_bytes + scale_bytes

    def fill(self, rows: torch.Tensor, first: int) -> None:
        """Quantise float32 rows into place."""
        assert rows.shape[1] == self.size and first + len(rows) <= self.num_rows, (rows.shape, first)
        operations.pack(self._library, rows, self.data, self.scales, first=first, bits=self.bits)

    def fill_integers(
        self, integers: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None, first: int
    ) -> None:
        """Put rows into place that are quantised already, in groups of 32; there are minima in int4 only."""
        assert integers.shape[1] == self.size and first + len(integers) <= self.num_rows, integers.shape
        operations.pack_integers(
            self._library, integers, scales, minima, self.data, self.scales, first=first, bits=self.bits
        )

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x Wᵀ + b; `weight` is an empty shell."""
        rows = x if x.dim() == 2 else x.reshape(-1, self.size)
        y = operations.linear(
            self._library, rows, self.data, self.scales, bias, num_rows=self.num_rows, bits=self.bits
        )
        return y if x.dim() == 2 else y.view(*x.shape[:-1], self.num_rows)

    def lookup(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Rows as float32: the matrix as an embedding."""
        return operations.embed_packed(
            self._library, ids_T, self.data, self.scales,
            num_rows=self.num_rows, size=self.size, bits=self.bits,
        )  # fmt: skip

    def dequantized(self) -> torch.Tensor:
        """The whole matrix as float32: what it stands for."""
        return self.lookup(torch.arange(self.num_rows))


class WeightMemory:
    """Zeroed memory for many matrices, side by side in large pages.

    Decoding walks through all weights once per token. With pages of 4 KB the processor loses a fifth of its
    bandwidth to looking up where the next page lies; asked nicely, Linux gives pages of 2 MB.
    """

    def __init__(self, slab_bytes: int = 64 << 20) -> None:
        self._slab_bytes = slab_bytes
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """The next `num_bytes`, starting on a cache line as the kernels' widest loads want."""
        start = -(-self._used // 64) * 64
        if start + num_bytes > len(self._slab):
            self._slab = _pages(max(self._slab_bytes, num_bytes))
            start = 0
        self._used = start + num_bytes
        return self._slab[start : start + num_bytes]


def _pages(num_bytes: int) -> torch.Tensor:
    """Whole pages from the system, large ones if it has them; untouched pages cost nothing."""
    pages = mmap.mmap(-1, -(-num_bytes // _LARGE_PAGE) * _LARGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE") and num_bytes >= _LARGE_PAGE:
        with contextlib.suppress(OSError):  # a kernel built without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
