"""Time the gate of a gated MLP.

python -m benchmarks.kernels.gated_activation [--out FILE] [--device cpu|cuda]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from benchmarks.kernels.report import run_benchmark
from benchmarks.kernels.timing import Case
from infer.kernels.elementwise.gated_activation import activate, gated_activation, gated_activation_reference


def gated_activation_cases(device: torch.device) -> Iterator[Case]:
    """The MLPs of a small and of a large model with SwiGLU, and one with GeGLU."""
    on_gpu = device.type == "cuda"
    for dtype in (torch.bfloat16,) if on_gpu else (torch.float32, torch.bfloat16):
        for num_tokens in (1, 32, 4096) if on_gpu else (1, 128):
            for size, activation in ((1536, "silu"), (14336, "silu"), (6912, "gelu_tanh")):
                yield _case(num_tokens, size, activation, dtype, device)


def _case(num_tokens: int, size: int, activation: str, dtype: torch.dtype, device: torch.device) -> Case:
    def in_float32(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (activate(gate, activation) * up).to(dtype)

    def step_by_step(gate_up: torch.Tensor) -> torch.Tensor:
        return gated_activation_reference(gate_up, activation)

    return Case(
        kernel=f"gated {activation}",
        shape=f"[{num_tokens}, 2*{size}]",
        dtype=dtype,
        num_bytes=3 * num_tokens * size * torch.empty((), dtype=dtype).element_size(),
        make_inputs=lambda: (torch.randn(num_tokens, 2 * size, device=device).to(dtype),),
        reference=step_by_step,
        implementations={
            "infer": lambda gate_up: gated_activation(gate_up, activation=activation),
            **({"step by step": step_by_step} if device.type == "cuda" else {}),
            "in float32": in_float32,
        },
    )


if __name__ == "__main__":
    sys.exit(run_benchmark("time gated_activation", [gated_activation_cases]))
