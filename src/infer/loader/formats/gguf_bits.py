"""Unpack small numbers from bytes: the building blocks of every GGUF block format.

    half      two bytes             -> a float16 scale, as float32
    fields    bytes of 4 x 2 bits   -> numbers 0..3, in the order the format packs them
    look_up   numbers 0..3          -> their values in a table of 4

The packing suits SIMD registers: a run of bytes is loaded at once, and one shift and one mask extract a
number from each byte. So the numbers of a run are ordered by shift, not by byte:

    fields(bytes, bits=2, run=3)    bytes  │ a3 a2 a1 a0 │ b3 b2 b1 b0 │ c3 c2 c1 c0 │   (a0: the lowest bits)
                                    result   a0 b0 c0  a1 b1 c1  a2 b2 c2  a3 b3 c3

With run=1 they are ordered by byte, lowest bits first.
"""

from __future__ import annotations

import torch


def half(pairs_B2: torch.Tensor) -> torch.Tensor:
    """Return float16 scales as float32."""
    return pairs_B2.contiguous().view(torch.float16).float()


def fields(packed_B: torch.Tensor, bits: int, run: int) -> torch.Tensor:
    """Split bytes into numbers of `bits`; in each run of `run` bytes all the lowest numbers come first."""
    runs = packed_B.contiguous().view(packed_B.shape[0], -1, run)  # strided input takes twice the time
    mask = (1 << bits) - 1
    return torch.stack([(runs >> shift) & mask for shift in range(0, 8, bits)], dim=2).flatten(1)


def look_up(table: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return table[numbers], in a third of the time."""
    return table.index_select(0, numbers.flatten().int()).view(numbers.shape)
