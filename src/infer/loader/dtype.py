"""The dtype to compute in on this device.

    device                          checkpoint     auto chooses
    GPU                             any            the checkpoint's; bfloat16 for GGUF and quantized files
    GPU without bfloat16            bfloat16       float16
    CPU with AMX                    bfloat16       bfloat16
    CPU                             any other      float32

On a CPU a 16-bit format halves the memory but pays only where the CPU multiplies it natively.
Measured with F.linear on one core of a Sapphire Rapids (times relative to float32, above 1 is faster;
narrower instruction sets by ONEDNN_MAX_CPU_ISA), for matrices of 576x1536 .. 2048x8192:

                              1 row (decode)     32 rows (prefill)
    bfloat16, AMX             0.9 .. 1.1         2.2 .. 2.7
    bfloat16, AVX512_BF16     1.0 .. 1.2         0.8 .. 0.9
    bfloat16, AVX512          1.0 .. 2.0         0.3

So auto chooses bfloat16 only with AMX. float16 is never chosen on a CPU; a slow dtype that is requested is
used, with a warning. The choice depends on the machine alone, never on a timing made at start: the same
command must give the same numbers twice.

On ARM without bfloat16, PyTorch would ask oneDNN for a bfloat16 product, be refused and warn. So oneDNN is
switched off when a bfloat16 model is loaded, and PyTorch's own loops multiply.
"""

from __future__ import annotations

import logging
import platform
from pathlib import Path

import torch

from infer.errors import ConfigError
from infer.kernels.cpu.build import cpu_flags
from infer.kernels.runtime.dispatch import device_kind

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

log = logging.getLogger(__name__)


def choose_dtype(name: str, device: torch.device, stored: torch.dtype | None) -> torch.dtype:
    """Return the dtype to compute in; `stored` is the checkpoint's dtype, None if it is quantized."""
    if name == "auto":
        return _auto(device, stored)
    if name not in DTYPES:
        raise ConfigError(f"dtype must be one of auto, {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def settle_products(dtype: torch.dtype, device: torch.device) -> None:
    """Prepare this process for products in `dtype`, once per loaded model, and warn if they are slow here."""
    avoid_refused_products(dtype, device)
    warn_if_slow(dtype, device)


def avoid_refused_products(dtype: torch.dtype, device: torch.device) -> None:
    """Switch oneDNN off in this process if it refuses bfloat16 products on this CPU.

    PyTorch does the same by itself, but only after its first product and a warning about its internals.
    """
    if device_kind(device) == "cpu" and dtype is torch.bfloat16 and onednn_refuses_bfloat16():
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]


def onednn_refuses_bfloat16() -> bool:
    """Return True if PyTorch asks oneDNN for bfloat16 products that oneDNN refuses on this CPU.

    On x86 PyTorch checks the CPU's features before it asks for a product; on ARM it does not.
    """
    if platform.machine() not in ("aarch64", "arm64"):
        return False
    has_bfloat16 = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)  # None: built without oneDNN
    return has_bfloat16 is not None and not has_bfloat16()


def warn_if_slow(dtype: torch.dtype, device: torch.device) -> None:
    """Warn if this CPU computes in `dtype` more slowly than it could."""
    if device_kind(device) == "cpu" and (
        dtype is torch.float16 or dtype is torch.bfloat16 and not cpu_has_amx()
    ):
        log.warning(
            "%s is slow on this CPU, which has no matrix instructions for it; without dtype and "
            "quantization the weights are kept in int8 or int4, which is several times faster; "
            "dtype=float32 is faster too, and exact",
            str(dtype).removeprefix("torch."),
        )


def _auto(device: torch.device, stored: torch.dtype | None) -> torch.dtype:
    if device_kind(device) == "cpu":
        return torch.bfloat16 if stored is torch.bfloat16 and cpu_has_amx() else torch.float32
    dtype = stored if stored in DTYPES.values() and stored is not None else torch.bfloat16
    if dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return dtype


def cpu_has_amx(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return True if this CPU multiplies bfloat16 matrices in hardware (Intel AMX)."""
    flags = (line for line in cpu_flags(cpuinfo).splitlines() if line.startswith("flags"))
    return any("amx_bf16" in line.split() for line in flags)
