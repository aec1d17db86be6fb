"""Which of the implementations runs: the PyTorch reference, the Triton kernel or the C kernel.

    tensor on a GPU, Triton installed         -> Triton kernel
    TRITON_INTERPRET=1 (kernel tests on CPU)  -> Triton kernel, executed by Triton's interpreter
    float32 on a CPU with a C compiler        -> C kernel (kernels/cpu)
    anything else                             -> reference

This is the only file that asks. Kernel files import `jit`, `tl` and `use_triton` from here, so that
they can be imported where Triton is missing or useless: on a CPU-only build of PyTorch it is not even
looked for, because importing it costs about as much as starting the rest of the program.

Triton reads TRITON_INTERPRET when a function is decorated, which is when a kernel file is imported.
It is read here at the same moment, so that both always agree; set it before the first import.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch

from infer.kernels.cpu.library import Library, library

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def _import_triton() -> tuple[Any, Any]:
    """`triton` and `triton.language`, or two Nones where no kernel could ever run."""
    if not INTERPRETED and torch.version.cuda is None and torch.version.hip is None:
        return None, None
    try:
        return importlib.import_module("triton"), importlib.import_module("triton.language")
    except ImportError:
        return None, None


triton, tl = _import_triton()


def jit(kernel: Callable[..., Any]) -> Any:
    """Compile with `triton.jit`; without Triton the function stays as it is and is never called."""
    return kernel if triton is None else triton.jit(kernel)


def use_triton(x: torch.Tensor) -> bool:
    """Whether the kernel, not the reference, should compute a function of `x`."""
    return triton is not None and (x.is_cuda or INTERPRETED)


def use_c(x: torch.Tensor) -> Library | None:
    """The C library, if it should compute a function of `x`: float32 on the CPU, elements in a row."""
    if x.dtype is not torch.float32 or x.device.type != "cpu" or x.stride(-1) != 1 or x.requires_grad:
        return None
    return library()


def next_power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`: the block that covers a whole row."""
    return 1 << (size - 1).bit_length() if size > 1 else 1
