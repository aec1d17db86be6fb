"""A report on this machine: its parts that matter for running a model, and advice to make it faster.

Nothing is loaded or measured. The C kernels are compiled if they are not yet, because much depends on
whether that succeeds.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from infer.cache.host_bytes import free_host_bytes
from infer.config.backends import OPERATIONS, available
from infer.config.knobs import format_bytes
from infer.config.machine_rules import Machine
from infer.config.resolve import choose_backends
from infer.config.settings import FAST_PRODUCTS_COST, FAST_PRODUCTS_GAIN, EngineConfig
from infer.engine.device_memory import look
from infer.kernels.cpu.build import CBuildError, compiler_version, cpu_flags, cpu_name, find_compiler
from infer.kernels.cpu.library import library, why_not
from infer.kernels.linear.cuda import is_for
from infer.kernels.runtime.dispatch import nvidia_capability
from infer.kernels.runtime.profiles import device_profile, explained_profile, gpu_of
from infer.loader.dtype import cpu_has_amx
from infer.loader.find.default_model import models_dir
from infer.models.transformers_model import INSTALL

# The CPU features that kernels can use, as named in /proc/cpuinfo, from old to new.
_FEATURES = (
    "avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16",
    "asimddp", "i8mm", "bf16",
)  # fmt: skip


_PRODUCTS = (
    "exact, activations in 15 bits (knob cpu_products: fast, 8 bits as in llama.cpp, "
    f"{FAST_PRODUCTS_GAIN}, {FAST_PRODUCTS_COST})"
)


@dataclass(frozen=True, slots=True)
class MachineReport:
    """Facts as (name, value) rows, and advice as sentences."""

    rows: tuple[tuple[str, str], ...]
    advice: tuple[str, ...]


def examine_machine() -> MachineReport:
    """Examine processor, compiler, kernels, GPU, memory and cached models."""
    flags = set(cpu_flags().split())
    compiler = find_compiler()
    c = library()
    num_threads = torch.get_num_threads()
    num_gpus = torch.cuda.device_count()
    rows = [
        ("processor", f"{cpu_name()}, {platform.machine()}, {os.cpu_count()} processors"),
        ("features", " ".join(name for name in _FEATURES if name in flags) or "none that the kernels use"),
        ("threads", f"{num_threads} of {os.cpu_count()} (knob num_threads)"),
        ("compiler", _compiler(compiler)),
        ("C kernels", f"{c.variant}, {c.path}" if c else f"none: {why_not()}"),
        ("weights", _weights(c is not None, num_gpus)),
        ("products", _PRODUCTS if c else "of floats, by PyTorch"),
        *([("quantized", _quantized_products())] if num_gpus else []),
        *_backends(c is not None, num_gpus),
        ("GPU", torch.cuda.get_device_name(0) if num_gpus else "none that PyTorch can use"),
        *([("GPU memory", _gpu_memory())] if num_gpus else []),
        ("profile", _profile(num_gpus)),
        ("memory", f"{format_bytes(free_host_bytes())} available"),
        ("models", _cached_models()),
        ("transformers", _transformers()),
        ("PyTorch", f"{torch.__version__}, Python {platform.python_version()}"),
    ]
    return MachineReport(tuple(rows), tuple(_advice(flags, compiler, c is not None, num_threads, num_gpus)))


def _advice(
    flags: set[str], compiler: str | None, has_kernels: bool, num_threads: int, num_gpus: int
) -> list[str]:
    advice = []
    if compiler is None:
        advice.append(
            "install a C compiler (Debian: apt install gcc): int8 and int4 weights are several times faster"
        )
    elif not has_kernels:
        advice.append(
            f"the C kernels could not be built ({why_not()}); until then everything runs on PyTorch"
        )
    if num_threads < (os.cpu_count() or 1) // 2:
        advice.append(
            f"only {num_threads} of {os.cpu_count()} processors are used; see OMP_NUM_THREADS, num_threads"
        )
    is_arm = platform.machine() in ("aarch64", "arm64")
    wanted = {"asimddp"} if is_arm else {"avx2"}
    if flags and not wanted & flags:
        advice.append("this processor has no instructions for 8-bit products, so the portable kernels run")
    if not num_gpus and has_kernels:
        advice.append(
            "a model of fewer parameters or bits: a GGUF file in Q4_0, Q4_1 (the default model's) or Q4_K "
            "keeps its 4 bits; --quantization int4 rounds any other file to them, which costs accuracy"
        )
    return advice


def _transformers() -> str:
    """Describe the package that runs families without an implementation here (transformers_model.py)."""
    try:
        return f"{version('transformers')}: runs decoders of other families (knob model_impl)"
    except PackageNotFoundError:
        return f"none, so only families with a file here are served ({INSTALL})"


def _profile(num_gpus: int) -> str:
    """Describe the device profile that engines use on this machine, and why (config/profiles)."""
    profile, why = explained_profile(torch.device("cuda" if num_gpus else "cpu"))
    return f"{profile.name}: {why}"


def _gpu_memory() -> str:
    """Describe the memory that an engine would find on the first GPU, as `infer plan` counts it."""
    found = look(torch.device("cuda", 0), None)
    return (
        f"{format_bytes(found.free)} of {format_bytes(found.total)} free, other processes hold "
        f"{format_bytes(found.others)}, an engine takes up to {format_bytes(max(found.room, 0))} "
        "(knob device_memory)"
    )


def _weights(has_kernels: bool, num_gpus: int) -> str:
    """Describe the forms that `auto` chooses for weights (loader/quantization.py)."""
    if has_kernels:
        kept = "int4 where a file has 4 bits, int8 elsewhere, fp32 for files in float32"
    else:
        kept = "fp32, bf16 for files in bfloat16" if cpu_has_amx() else "fp32"
    on_gpu = (
        "on the GPU as in the file, codes of 8 and 4 bits packed (--quantization fp8, int8, int4: rounded)"
    )
    return f"on the CPU {kept}; {on_gpu}" if num_gpus else kept


def _quantized_products() -> str:
    """Describe the kernels that multiply codes on the first GPU (kernels/linear/coded.py)."""
    device = torch.device("cuda", 0)
    tuned = device_profile(device).linear
    few = f"up to {tuned.few_coded_tokens} tokens Triton, tile by tile"
    if is_for(gpu_of(device)):
        fp8 = f"fp8: {tuned.fp8_tokens:,}, in blocks {tuned.fp8_group_tokens}"
        few = f"up to {tuned.coded_tokens} tokens ({fp8}) CUDA C++, norm and gate fused; experts in Triton"
    cores = "fp8 on" if nvidia_capability(device) >= (8, 9) else "no"
    return f"fp8, int8, int4; {few}; above unpacked to the dtype, {cores} fp8 tensor cores"


def _backends(has_kernels: bool, num_gpus: int) -> list[tuple[str, str]]:
    """List each operation's backend for a float32 model here, and its alternatives (config/backends.py)."""
    machine = Machine(
        device="cuda" if num_gpus else "cpu", has_gpu_kernels=num_gpus > 0, has_c_attention=has_kernels
    )
    chosen = choose_backends(EngineConfig(), machine)
    names = dict(zip(OPERATIONS, ("attention", "decoding", "MLP"), strict=True))
    rows = []
    for operation, value in chosen._asdict().items():
        values = available(operation, "gpu" if num_gpus else "cpu")
        others = [name for name in values if name != value and (name != "c" or has_kernels)]
        rows.append((names[operation], f"{value} (knob {operation}_backend: {', '.join(others)})"))
    return rows


def _compiler(compiler: str | None) -> str:
    if compiler is None:
        return "none"
    try:
        return f"{compiler} ({compiler_version(compiler)})"
    except CBuildError as error:
        return str(error)


def _cached_models() -> str:
    directory = models_dir()
    files = sorted(path for path in directory.glob("*") if path.is_file()) if directory.is_dir() else []
    total = sum(path.stat().st_size for path in files)
    names = ", ".join(path.name for path in files if path.suffix == ".gguf") or "nothing yet"
    return f"{directory}: {names}" + (f" ({format_bytes(total)})" if files else "")
