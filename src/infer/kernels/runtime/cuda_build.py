"""Compile a CUDA C++ file at run time, load it into the GPU and launch its kernels.

    source, defines ──► NVRTC, a library that ships with PyTorch for CUDA ──► cubin ──► driver ──► launch

A *cubin* is machine code for one kind of GPU. Shapes are defines, not arguments: a loop over a constant
number of heads is unrolled and its array lives in registers, which accounts for most of a kernel's speed. So
each model has its own cubin, which takes about a second to compile, once: `runtime/cubin_cache.py` stores it.

Both C libraries, NVRTC and the driver, are called through ctypes. These are a dozen functions that have not
changed in ten years, and they save a separate build for every version of PyTorch.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from infer.errors import ConfigError, DeviceLost
from infer.kernels.runtime.cubin_cache import cached
from infer.kernels.runtime.dispatch import compiles_only, gpu_capability

_MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_NOT_FOR_THIS_DRIVER = (200, 209, 222, 223)  # invalid image, no binary for this GPU, unsupported or no PTX


class BuildError(Exception):
    """NVRTC or the driver failed to build a kernel; the message is one line."""


def options(arch: str, defines: Mapping[str, int]) -> list[str]:
    """Compiler flags: the architecture, and a define for each constant."""
    return [
        f"--gpu-architecture={arch}",
        "--std=c++17",
        *(f"-D{name}={value}" for name, value in defines.items()),
    ]


def compile_source(source: Path, arch: str, defines: Mapping[str, int]) -> bytes:
    """`make_cubin` for a backend requested by name: raises ConfigError if NVRTC fails."""
    try:
        return make_cubin(source, arch, defines)
    except BuildError as error:
        raise ConfigError(
            f"attention_backend=cuda compiles {source.name} for {arch} and {error}; "
            "install the CUDA toolkit, or use attention_backend=triton"
        ) from None


def make_cubin(source: Path, arch: str, defines: Mapping[str, int]) -> bytes:
    """The cubin of a file, from the cache or compiled now; raises BuildError if that fails."""
    flags = options(arch, defines)
    text = [path.read_bytes() for path in (source, *sorted(source.parent.glob("*.cuh")))]
    key = [nvrtc_version().encode(), *(flag.encode() for flag in flags), *text]
    return cached(key, functools.partial(compile_with_nvrtc, source, flags))


# -- NVRTC ----------------------------------------------------------------------------------------


def nvrtc_paths() -> Iterator[str]:
    """Candidate paths of NVRTC: the system's library, then next to PyTorch, then the toolkit's folders."""
    major = (torch.version.cuda or "").split(".")[0]
    yield f"libnvrtc.so.{major}" if major else "libnvrtc.so"
    folders = [*(Path(entry) / "nvidia" for entry in sys.path if entry), Path("/usr/local")]
    for folder in folders:
        for pattern in ("*/lib/libnvrtc.so.*", "*/lib64/libnvrtc.so.*"):
            yield from sorted(str(path) for path in folder.glob(pattern) if "builtins" not in path.name)


def load_nvrtc() -> Any:
    """Load NVRTC; raises BuildError if it is not installed."""
    for path in nvrtc_paths():
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise BuildError("NVRTC (libnvrtc) is not installed")


def nvrtc_version() -> str:
    """Version of the NVRTC that would compile; raises BuildError if it is not installed."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    load_nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"NVRTC {major.value}.{minor.value}"


def compile_with_nvrtc(source: Path, flags: Sequence[str]) -> bytes:
    """Compile a file to a cubin with NVRTC, in memory; headers are found next to the file."""
    nvrtc = load_nvrtc()
    # NVRTC of CUDA 13.0 mistakes a lambda with an `auto` parameter for a host function
    flags = [*flags, f"--include-path={source.parent}", "--device-as-default-execution-space"]
    program = ctypes.c_void_p()

    def check(code: int) -> None:
        if code:
            nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise BuildError(f"NVRTC failed: {nvrtc.nvrtcGetErrorString(code).decode()}")

    check(
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None
        )
    )
    try:
        as_bytes = [flag.encode() for flag in flags]
        code = nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*as_bytes))
        size = ctypes.c_size_t()
        if code:
            check(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
            log = ctypes.create_string_buffer(size.value)
            check(nvrtc.nvrtcGetProgramLog(program, log))
            raise BuildError(f"NVRTC failed: {first_error(log.value.decode(errors='replace'))}")
        check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        cubin = ctypes.create_string_buffer(size.value)
        check(nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def first_error(log: str) -> str:
    """The line of a compiler's output that names the error."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next(
        (line for line in lines if "error" in line or "fatal" in line), (lines or ["no reason given"])[-1]
    )


# -- the driver -----------------------------------------------------------------------------------


@functools.cache
def driver() -> Any:
    """The CUDA driver's library, which PyTorch itself calls."""
    return ctypes.CDLL("libcuda.so.1")


def _reason(code: int) -> str:
    reason = ctypes.c_char_p()
    driver().cuGetErrorString(code, ctypes.byref(reason))
    return (reason.value or b"unknown error").decode()


def _check(code: int, what: str) -> None:
    """Raise DeviceLost for a failed driver call, from which no caller can recover."""
    if code:
        raise DeviceLost(f"{what}: {_reason(code)}")


def index_of(device: torch.device) -> int:
    """Index of the GPU; PyTorch's current device if `device` has no index."""
    return torch.cuda.current_device() if device.index is None else device.index


class LoadedKernels:
    """The functions of a cubin, loaded on the current GPU."""

    def __init__(self, cubin: bytes) -> None:
        torch.cuda.synchronize()  # a thread's first call binds it to PyTorch's context, where modules live
        self._module = ctypes.c_void_p()
        code = driver().cuModuleLoadData(ctypes.byref(self._module), cubin)
        if code in _NOT_FOR_THIS_DRIVER:
            raise BuildError(f"the driver refused the compiled kernels: {_reason(code)}")
        _check(code, "loading kernels")

    def prepare(
        self, name: str, num_threads: int, types: Sequence[Any], *, pdl: bool, shared_bytes: int = 0
    ) -> PreparedLaunch:
        """Prepare a launch with arguments of these types and this much dynamic shared memory."""
        function = ctypes.c_void_p()
        code = driver().cuModuleGetFunction(ctypes.byref(function), self._module, name.encode())
        _check(code, f"finding {name}")
        if shared_bytes:
            code = driver().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes)
            _check(code, f"giving {name} {shared_bytes} bytes of shared memory")
        return PreparedLaunch(function, num_threads, types, pdl=pdl, shared_bytes=shared_bytes)


class _LaunchAttribute(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_int),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_int * 15),
    )


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


class PreparedLaunch:
    """A launch to be repeated with different arguments: everything that stays the same is set up once.

    With `pdl`, it is a programmatic dependent launch (dispatch.py): the kernel itself waits.
    """

    _PDL = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

    def __init__(
        self, function: ctypes.c_void_p, num_threads: int, types: Sequence[Any], *, pdl: bool,
        shared_bytes: int = 0,
    ) -> None:  # fmt: skip
        self._function = function
        self._lock = threading.Lock()  # several engines in a process, one thread each, share this launch
        self._values = [of_type() for of_type in types]
        self._pointers = as_pointers(self._values)
        self._attribute = _LaunchAttribute(id=self._PDL, value=1)
        self._config = _LaunchConfig(
            grid=(1, 1, 1),
            block=(num_threads, 1, 1),
            shared_bytes=shared_bytes,
            attributes=ctypes.pointer(self._attribute),
            num_attributes=1 if pdl else 0,
        )

    def __call__(self, num_blocks: int, *arguments: Any) -> None:
        """Launch that many blocks on PyTorch's current stream; the driver copies the arguments."""
        if compiles_only():
            return
        stream = torch.cuda.current_stream().cuda_stream
        with self._lock:
            for value, argument in zip(self._values, arguments, strict=True):
                value.value = argument
            self._config.grid[0] = num_blocks
            self._config.stream = stream
            code = driver().cuLaunchKernelEx(ctypes.byref(self._config), self._function, self._pointers, None)
        _check(code, "launching a kernel")


def as_pointers(arguments: Sequence[Any]) -> Any:
    """Addresses of ctypes values, in the form that a launch takes; the caller keeps the values alive."""
    addresses = [ctypes.addressof(argument) for argument in arguments]
    return (ctypes.c_void_p * len(arguments))(*addresses)


@functools.cache
def load_kernels(source: Path, defines: tuple[tuple[str, int], ...], device: int) -> LoadedKernels:
    """Load the functions of a file for one GPU and one set of defines, compiled on the first call."""
    major, minor = gpu_capability(torch.device("cuda", device))
    cubin = compile_source(source, f"sm_{major}{minor}", dict(defines))
    try:
        with torch.cuda.device(device):
            return LoadedKernels(cubin)
    except BuildError as error:
        raise ConfigError(
            f"attention_backend=cuda compiled {source.name} and {error}; "
            "update the GPU's driver, or use attention_backend=triton"
        ) from None
