"""Chooses the implementation that runs: the PyTorch reference, the Triton kernel or the C kernel.

    tensor on a GPU, Triton installed         -> Triton kernel
    TRITON_INTERPRET=1 (kernel tests on CPU)  -> Triton kernel, executed by Triton's interpreter
    float32 on a CPU with a C compiler        -> C kernel (kernels/cpu)
    anything else                             -> reference

This is the only file of the package that queries the device; other files call its functions (`device_kind`,
`is_gpu`, `has_pdl`), and tests/unit/test_device_questions.py enforces this. Kernel files import `jit`, `tl`
and `use_triton` from here, so that they can be imported where Triton is missing or useless. On a CPU-only
build of PyTorch, Triton is not even looked up, because importing it takes about as long as starting the rest
of the program.

Triton reads TRITON_INTERPRET when a function is decorated, that is, when a kernel file is imported. This file
reads it at the same moment, so that both always agree; set it before the first import.

Programmatic dependent launch (PDL) lets a kernel start while the previous one still runs. On Hopper and later
GPUs, all kernels of a decode step are launched this way, and each is written in this order:

    prologue: read data older than the previous kernel    weights, positions, block tables: hides latency
    gdc_launch_dependents                                 once all programs reach it, the next kernel starts
    gdc_wait                                              the previous kernel is done; its writes are visible
    main loop and epilogue: read and write the rest       activations, the cache, scratch memory, counters

Three rules prevent races. First, every kernel with PDL waits, whether it needs to or not, so the end of one
implies the end of all earlier ones, although several may have started. Second, nothing is written before the
wait, because an earlier kernel may still read it. Third, between a write and a read that does not wait for
it, some kernel must have been launched without PDL: it started after the end of all earlier kernels, and all
later kernels started after it. Kernels without PDL are allowed anywhere: without a `gdc_launch_dependents`,
the next kernel starts at the end, and a kernel launched without PDL starts when all earlier ones are done.

If more than two ranks share a GPU, PDL is off (`have_room`): kernels that have started and wait for one that
waits for another rank would occupy the SMs that the other rank's kernels need.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from infer.kernels.cpu.library import Library, library
from infer.kernels.runtime import triton_cache
from infer.kernels.runtime.cubin_cache import one_at_a_time

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")

_INTERPRETED_SMS = 4  # few, so that a program processes several pieces of work

PDL = True  # use programmatic dependent launch where the GPU has it: `launch_options`


_this_thread = threading.local()  # `compiles_only`: launches compile and do not run


def compiles_only() -> bool:
    """True if launches of this thread compile their kernels without running them (compile_ahead.py)."""
    return getattr(_this_thread, "compiles_only", False)


@contextmanager
def compiling_only() -> Iterator[None]:
    """Make launches of this thread compile their kernels without running them."""
    _this_thread.compiles_only = True
    try:
        yield
    finally:
        _this_thread.compiles_only = False


def _import_triton() -> tuple[Any, Any]:
    """Import `triton` and `triton.language`; two Nones if no kernel could ever run."""
    if not INTERPRETED and torch.version.cuda is None and torch.version.hip is None:
        return None, None
    try:
        return importlib.import_module("triton"), importlib.import_module("triton.language")
    except ImportError:
        return None, None


triton, tl = _import_triton()
if triton is not None and not INTERPRETED:
    triton_cache.install(triton)


def _make_kernel_type() -> Any:
    """Make the type of a kernel: Triton's, but a launch may compile without running (compile_ahead.py).

    If several processes need the same variant, one compiles it; the others find it in Triton's cache.
    """
    if triton is None or INTERPRETED:
        return None

    class Kernel(triton.JITFunction):  # type: ignore[misc, name-defined]
        def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            return super().run(*args, grid=grid, warmup=warmup or compiles_only(), **kwargs)

        @property
        def compile(self) -> Callable[..., Any]:
            return self._compile_alone

        @compile.setter
        def compile(self, by_triton: Callable[..., Any]) -> None:
            self._by_triton = by_triton

        def _compile_alone(self, src: Any, **how: Any) -> Any:
            with one_at_a_time((b"triton", src.hash().encode(), repr(how.get("options")).encode())):
                return self._by_triton(src, **how)

    return Kernel


_Kernel = _make_kernel_type()
async_compile_mode: Any = getattr(triton, "AsyncCompileMode", None) if _Kernel else None  # compile_ahead.py


def jit(kernel: Callable[..., Any]) -> Any:
    """Compile with `triton.jit`; without Triton, return the function unchanged: it is never called."""
    return jit_for_any()(kernel)


def jit_for_any(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """`jit`, but compiled once for all values of these integers, including 1 and multiples of 16."""
    if triton is None:
        return lambda kernel: kernel
    made_by = _Kernel or triton.jit
    return lambda kernel: made_by(kernel, do_not_specialize=list(names))


def use_triton(x: torch.Tensor) -> bool:
    """Return True if the Triton kernel, not the reference, should process `x`."""
    return triton is not None and (x.is_cuda or INTERPRETED)


def on_cpu(x: torch.Tensor) -> bool:
    """True if PyTorch processes `x` on the CPU, where cache-sized blocks beat passes over everything."""
    return device_kind(x.device) == "cpu"


def use_c(x: torch.Tensor) -> Library | None:
    """The C library, if it should process `x`: float32 on the CPU, contiguous in the last dimension."""
    if x.dtype is not torch.float32 or not on_cpu(x) or x.stride(-1) != 1 or x.requires_grad:
        return None
    return library()


def device_kind(device: torch.device) -> str:
    """The kind of a device: cpu, cuda for every GPU, or meta, whose tensors have a shape but no memory."""
    return device.type


def is_gpu(device: torch.device) -> bool:
    """Return True if the device is a GPU, NVIDIA's or AMD's: PyTorch calls both `cuda`."""
    return device_kind(device) == "cuda"


def is_amd() -> bool:
    """Return True if this build of PyTorch is for AMD's GPUs (HIP)."""
    return torch.version.hip is not None


def gpu_capability(device: torch.device) -> tuple[int, int]:
    """Version of the GPU's instruction set: NVIDIA's compute capability, or its counterpart on AMD."""
    return torch.cuda.get_device_capability(device)


def gpu_model(device: torch.device) -> str:
    """Name of the GPU as its driver reports it; "" for any other device."""
    return torch.cuda.get_device_name(device) if is_gpu(device) else ""


def nvidia_capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of an NVIDIA GPU; (0, 0) for any other device."""
    return gpu_capability(device) if is_gpu(device) and not is_amd() else (0, 0)


@lru_cache(maxsize=16)
def has_pdl(device: torch.device) -> bool:
    """Return True if the GPU has programmatic dependent launch: Hopper and later."""
    return nvidia_capability(device)[0] >= 9


def launch_options(device: torch.device, *, starts_early: bool = True) -> dict[str, Any]:
    """Launch options of a kernel that waits for its input (`PDL`), and may start before it (`launch_pdl`)."""
    waits = PDL and has_pdl(device)
    return {"PDL": True, "launch_pdl": True} if waits and starts_early else {"PDL": waits}


@lru_cache(maxsize=16)
def num_sms(device: torch.device) -> int:
    """Number of SMs (streaming multiprocessors) of the GPU; a small number under the interpreter."""
    if not is_gpu(device):
        return _INTERPRETED_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def gpu_memory(device: torch.device) -> int | None:
    """Total memory of a GPU in bytes; None without a GPU."""
    if not is_gpu(device) or not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


@lru_cache(maxsize=16)
def shared_bytes(device: torch.device) -> int:
    """Bytes of shared memory that a thread block may request."""
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished all its work; do nothing on other devices."""
    if is_gpu(device):
        torch.cuda.synchronize(device)


def moment(device: torch.device) -> float | torch.cuda.Event:
    """Record the moment when a device has finished all earlier work; this call does not wait."""
    if not is_gpu(device):
        return time.monotonic()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(first: float | torch.cuda.Event, last: float | torch.cuda.Event) -> float:
    """The seconds from one moment of a device to a later one; waits for the later one."""
    if isinstance(first, torch.cuda.Event) and isinstance(last, torch.cuda.Event):
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3
    assert isinstance(first, float) and isinstance(last, float), (first, last)
    return last - first


def next_power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`: the block that covers a whole row."""
    return 1 << (size - 1).bit_length() if size > 1 else 1
