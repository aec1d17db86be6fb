"""`linear/pdl.cu` on a CPU: a block's threads take turns."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from infer.kernels.linear import pdl as linear_pdl
from infer.kernels.linear.cuda import Defines, Variant
from infer.kernels.runtime.cuda_build import as_pointers
from tests.kernels.emulated import compile_library


@functools.cache
def compile_linear(defines: Defines) -> ctypes.CDLL:
    return compile_library("emulated_linear.cpp", linear_pdl.SOURCE, defines, "-O1")


class EmulatedLaunch:
    """Launches like `PreparedLaunch`, and returns when every block has run."""

    def __init__(self, variant: Variant, *_: Any) -> None:
        self.library, self.variant = compile_linear(variant.defines), variant

    def __call__(self, num_blocks: int, *arguments: Any) -> None:
        values = [of_type(value) for of_type, value in zip(self.variant.types, arguments, strict=True)]
        num_threads = self.variant.num_threads
        assert self.library.emulate(num_blocks, num_threads, as_pointers(values)), "a rule was broken"
