"""`linear/wgmma.cu` on a CPU, and the driver that tells its TMA of matrices."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

from infer.kernels.linear import wgmma as linear_wgmma
from infer.kernels.linear.cuda import Defines, Variant
from infer.kernels.runtime.cuda_build import as_pointers
from tests.kernels.emulated import compile_library

INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE


@functools.cache
def compile_linear(defines: Defines, source: Path = linear_wgmma.SOURCE) -> ctypes.CDLL:
    library = compile_library("emulated_wgmma.cpp", source, defines, "-O1")
    library.emulate.restype = ctypes.c_char_p
    return library


class EmulatedLaunch:
    """Launches like `PreparedLaunch`, and returns when every block has run."""

    def __init__(self, variant: Variant, *_: Any) -> None:
        self.library, self.variant = compile_linear(variant.defines, variant.source), variant

    def __call__(self, num_blocks: int, *arguments: Any) -> None:
        values = [of_type() for of_type in self.variant.types]
        for value, argument in zip(values, arguments, strict=True):
            value.value = argument
        _, _, _, _, num_threads, _, shared_bytes = self.variant
        broken = self.library.emulate(num_blocks, num_threads, shared_bytes, as_pointers(values))
        assert broken is None, broken.decode()


def encode_tiled(
    to: Any, dtype: int, rank: int, address: Any, sizes: Any, strides: Any, box: Any, steps: Any, *how: int
) -> int:
    """cuTensorMapEncodeTiled: it refuses what TMA cannot, and writes what the emulator reads."""
    whole_pieces = address.value % 16 == 0 and strides[0] % 16 == 0
    fits_the_pattern = 0 < box[0] * 2 <= 128 and 0 < box[1] <= 256 and how == (0, 3, 3, 0)
    if to.value % 64 or dtype not in (6, 9) or rank != 2 or list(steps) != [1, 1]:
        return INVALID_VALUE
    if not whole_pieces or not fits_the_pattern or 0 in sizes:
        return INVALID_VALUE
    known = (ctypes.c_longlong * 5)(address.value, sizes[1], sizes[0], strides[0], box[1])
    ctypes.memmove(to.value, known, ctypes.sizeof(known))
    return 0
