"""Compile the kernels of steps that have not run yet, many at a time.

A kernel is compiled when it is first launched, and the launch waits for it: half a second for a small one,
two for the sampler's. A server that compiled one after the other would not be ready for half a minute. Here a
step is gone through as if it ran, and every launch only says which variant of which kernel it would need:

    with compiling_ahead(device):
        step(size) for all sizes          launches begin to compile and do nothing else
    ...                                   at the end of the block all of them are compiled
    step(size)                            runs

Triton keeps what it has compiled on disk, so the next start reads it from there, and need not ask again what
to compile (`compile_once`). Kernels in CUDA C++ are compiled elsewhere (cuda_build.py); here they are not
launched. PyTorch's own operations run, on numbers that no kernel has computed: a step must take its indices
from its inputs.
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
    """Let launches of this thread compile and not run; what was asked for is compiled when this ends.

    A kernel that does not compile is not an error here: the launch that needs it will raise.
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
    """Threads that compile kernels, and the C code with which Triton launches each list of types, once."""

    def __init__(self, num_threads: int, name: str) -> None:
        super().__init__(num_threads, name)
        self._known: set[str] = set()

    def submit(self, compile_one: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        """Begin to compile."""
        return super().submit(self._compile, compile_one)

    def _compile(self, compile_one: Callable[[], Any]) -> Any:
        kernel = compile_one()
        if (types := repr(list(kernel.src.signature.values()))) not in self._known:
            self._known.add(types)
            with suppress(Exception):  # the launch that needs it will say so
                triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
        return kernel


def compile_once(compile_all: Callable[[], bool], *facts: object) -> None:
    """Call `compile_all`, unless it has returned True before: for these facts, on this GPU.

    `facts` decide which kernels there are, in words (`repr`); a tensor stands for its type and its
    device. Sources and versions are always among them.
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

    with suppress(_NotAll):  # then nothing is kept
        cached([*(part.encode() for part in key), *_sources()], compile_now)


class _NotAll(Exception):
    """Something could not be compiled ahead of time."""


@lru_cache(maxsize=1)
def _sources() -> list[bytes]:
    """The sources of every kernel, and of every choice of a kernel."""
    package = Path(__file__).parents[2]
    files = [
        path
        for folder in ("kernels", "quant", "layers", "models", "execution")
        for path in (package / folder).rglob("*.py")
    ]
    return [path.read_bytes() for path in sorted(files)]
