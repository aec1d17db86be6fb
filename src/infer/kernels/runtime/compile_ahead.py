"""Compile the kernels of steps that have not run yet, in parallel.

A kernel is compiled when it is first launched, and the launch waits for it: half a second for a small kernel,
two for the sampler's. Compiling them one after the other would delay the start of a server by half a minute.
Here a step is traced as if it ran, and every launch only records which variant of which kernel it needs:

    with compiling_ahead(device):
        step(size) for all sizes          launches start to compile and do nothing else
    ...                                   at the end of the block, all of them are compiled
    step(size)                            runs

Triton caches compiled kernels on disk, so the next start reads them from there and skips the tracing
(`compile_once`). Kernels in CUDA C++ are compiled elsewhere (cuda_build.py) and are not launched here.
PyTorch's own operations do run, on values that no kernel has computed, so a step must take its indices from
its inputs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from infer.kernels.runtime.cubin_cache import cached
from infer.kernels.runtime.dispatch import async_compile_mode, compiling_only, gpu_capability, triton

_MAX_THREADS = 16


@contextmanager
def compiling_ahead(device: torch.device) -> Iterator[None]:
    """Make launches of this thread compile instead of run; all compilations are done when the block ends.

    A kernel that fails to compile is not an error here: the launch that needs it will raise.
    """
    num_threads = min(os.cpu_count() or 1, _MAX_THREADS)
    with (
        torch.cuda.device(device),
        _Compilers(num_threads, "compile-ahead") as pool,
        async_compile_mode(pool, ignore_errors=True),
        compiling_only(),
    ):
        yield


class _Compilers(ThreadPoolExecutor):
    """Threads that compile kernels and, once per list of argument types, Triton's launcher in C."""

    def __init__(self, num_threads: int, name: str) -> None:
        super().__init__(num_threads, name)
        self._known: set[str] = set()

    def submit(self, compile_one: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        """Start to compile a kernel."""
        return super().submit(self._compile, compile_one)

    def _compile(self, compile_one: Callable[[], Any]) -> Any:
        kernel = compile_one()
        if (types := repr(list(kernel.src.signature.values()))) not in self._known:
            self._known.add(types)
            with suppress(Exception):  # the launch that needs it will raise
                triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
        return kernel


def compile_once(compile_all: Callable[[], bool], *facts: object) -> None:
    """Call `compile_all`, unless it has returned True before for these facts on this GPU.

    `facts` are the values that decide which kernels there are, compared by their `repr`; a tensor stands for
    its type and its device. Sources and versions are always included.
    """
    if async_compile_mode is None:
        return
    described = [
        f"{fact.dtype} {fact.shape[1:]}" if isinstance(fact, torch.Tensor) else repr(fact) for fact in facts
    ]
    device = next(fact.device for fact in facts if isinstance(fact, torch.Tensor))
    machine = (
        torch.cuda.get_device_name(device),
        gpu_capability(device),
        torch.__version__,
        triton.__version__,
    )
    key = [*described, repr(machine), str(triton.knobs.cache.dir)]

    def compile_now() -> bytes:
        if not compile_all():
            raise _NotAll
        return b"compiled"

    with suppress(_NotAll):  # nothing is stored in this case
        cached([*(part.encode() for part in key), *_sources()], compile_now)


class _NotAll(Exception):
    """Something could not be compiled ahead of time."""


@lru_cache(maxsize=1)
def _sources() -> list[bytes]:
    """The source files of all kernels and of the code that selects kernels."""
    package = Path(__file__).parents[2]
    files = [
        path
        for folder in ("kernels", "quant", "layers", "models", "execution")
        for path in (package / folder).rglob("*.py")
    ]
    return [path.read_bytes() for path in sorted(files)]
