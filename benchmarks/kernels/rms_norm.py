"""Time the norms: hidden states of a small and a large model, and the heads of a QK-norm.

python -m benchmarks.kernels.rms_norm [--out FILE] [--device cpu|cuda]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from benchmarks.kernels.report import run_benchmark
from benchmarks.kernels.timing import Case, Implementation
from infer.kernels.elementwise.rms_norm import (
    add_rms_norm,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)

EPS = 1e-5


def by_hand(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The formula operation by operation: five passes over memory instead of one."""
    x32 = x.float()
    y = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + EPS)
    return (y * weight.float()).to(x.dtype)


def rms_norm_cases(device: torch.device) -> Iterator[Case]:
    """[T, D] and [T, N, D], for decode and prefill."""
    on_gpu = device.type == "cuda"
    token_counts = (1, 32, 4096) if on_gpu else (1, 128)
    for dtype in (torch.bfloat16,) if on_gpu else (torch.float32, torch.bfloat16):
        for num_tokens in token_counts:
            for row in ((576,), (4096,), (32, 128)):
                yield _case((num_tokens, *row), dtype, device)
            for hidden_size in (576, 4096):
                yield _add_case((num_tokens, hidden_size), dtype, device)


def _case(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Case:
    implementations: dict[str, Implementation] = {
        "infer": lambda x, weight: rms_norm(x, weight, eps=EPS),
        "by hand": by_hand,
    }
    if device.type == "cuda":  # on the CPU it is what we call
        implementations["F.rms_norm"] = lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS)
    element = torch.empty((), dtype=dtype).element_size()
    return Case(
        kernel="rms_norm",
        shape=str(list(shape)),
        dtype=dtype,
        num_bytes=2 * torch.Size(shape).numel() * element,
        make_inputs=lambda: (
            torch.randn(shape, device=device).to(dtype),
            torch.randn(shape[-1], device=device).to(dtype),
        ),
        reference=lambda x, weight: rms_norm_reference(x, weight, EPS, 0.0),
        implementations=implementations,
    )


def _add_case(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Case:
    def in_two_steps(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        total = x + residual
        return rms_norm(total, weight, eps=EPS), total

    element = torch.empty((), dtype=dtype).element_size()
    return Case(
        kernel="add_rms_norm",
        shape=str(list(shape)),
        dtype=dtype,
        num_bytes=4 * torch.Size(shape).numel() * element,
        make_inputs=lambda: (
            torch.randn(shape, device=device).to(dtype),
            torch.randn(shape, device=device).to(dtype),
            torch.randn(shape[-1], device=device).to(dtype),
        ),
        reference=lambda x, residual, weight: add_rms_norm_reference(x, residual, weight, EPS, 0.0),
        implementations={
            "infer": lambda x, residual, weight: add_rms_norm(x, residual, weight, eps=EPS),
            "add, then rms_norm": in_two_steps,
        },
    )


if __name__ == "__main__":
    sys.exit(run_benchmark("time rms_norm and add_rms_norm", [rms_norm_cases]))
