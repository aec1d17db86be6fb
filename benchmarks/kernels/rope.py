"""Time the rotation of queries and keys, as views of the fused projection they come from.

python -m benchmarks.kernels.rope [--out FILE] [--device cpu|cuda]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from benchmarks.kernels.report import run_benchmark
from benchmarks.kernels.timing import Case
from infer.kernels.elementwise.rope import rope, rope_reference

NUM_POSITIONS = 8192


def in_place(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Fewer temporaries: quicker than the reference at prefill, slower at decode."""
    cos, sin = cos[positions].repeat(1, 2).unsqueeze(1), sin[positions].unsqueeze(1)
    rotated = []
    for x in (q, k):
        half = x.shape[-1] // 2
        x32 = x.float()
        y = x32 * cos
        y[..., :half].addcmul_(x32[..., half:], sin, value=-1)
        y[..., half:].addcmul_(x32[..., :half], sin)
        rotated.append(y.to(x.dtype))
    return tuple(rotated)


def rope_cases(device: torch.device) -> Iterator[Case]:
    """The heads of a small and of a large model, for decode and prefill; a GPU rotates in heads.py."""
    for dtype in () if device.type == "cuda" else (torch.float32, torch.bfloat16):
        for num_tokens in (1, 128):
            for heads in ((9, 3, 64), (32, 8, 128)):
                yield _case(num_tokens, heads, dtype, device)


def _case(num_tokens: int, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Case:
    num_heads, num_kv_heads, head_dim = heads

    def make_inputs() -> tuple[torch.Tensor, ...]:
        qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, device=device).to(dtype)
        q, k, _ = torch.split(qkv, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        angles = torch.rand(NUM_POSITIONS, head_dim // 2, device=device)
        positions = torch.randint(NUM_POSITIONS, (num_tokens,), device=device)
        return q, k, angles.cos(), angles.sin(), positions

    element = torch.empty((), dtype=dtype).element_size()
    table_bytes = num_tokens * head_dim * 4  # one row of each table per token, float32
    return Case(
        kernel="rope",
        shape=f"[{num_tokens}, {num_heads}+{num_kv_heads}, {head_dim}]",
        dtype=dtype,
        num_bytes=2 * num_tokens * (num_heads + num_kv_heads) * head_dim * element + table_bytes,
        make_inputs=make_inputs,
        reference=rope_reference,
        implementations={"infer": rope, "in place": in_place},
    )


if __name__ == "__main__":
    sys.exit(run_benchmark("time rope", [rope_cases]))
