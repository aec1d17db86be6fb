"""Time the heads of a decode step: norm, rotation and cache write in one launch, and one after the other.

python -m benchmarks.kernels.heads [--out FILE] [--device cpu|cuda]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from benchmarks.kernels.report import run_benchmark
from benchmarks.kernels.timing import Case
from infer.kernels.elementwise.heads import (
    CacheSlots,
    HeadTransform,
    norm_rope_write,
    norm_rope_write_reference,
    split_heads,
)
from infer.kernels.elementwise.rms_norm import rms_norm
from infer.kernels.elementwise.rope import rope

EPS = 1e-6
NUM_POSITIONS = 8192
Inputs = tuple[torch.Tensor, ...]


def heads_cases(device: torch.device) -> Iterator[Case]:
    """The heads of a small and of a large model, for decode and prefill."""
    on_gpu = device.type == "cuda"
    for dtype in (torch.bfloat16,) if on_gpu else (torch.float32,):
        for num_tokens in (1, 32, 256, 4096) if on_gpu else (1, 128):
            for heads in ((16, 8, 128), (32, 8, 128)):
                yield _case(num_tokens, heads, dtype, device)


def _case(num_tokens: int, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Case:
    num_heads, num_kv_heads, head_dim = heads
    width = (num_heads + 2 * num_kv_heads) * head_dim

    def make_inputs() -> Inputs:
        angles = torch.rand(NUM_POSITIONS, head_dim // 2, device=device)
        return (
            torch.randn(num_tokens, width, device=device).to(dtype),
            torch.randn(head_dim, device=device).to(dtype),
            torch.randn(head_dim, device=device).to(dtype),
            angles.cos(),
            angles.sin(),
            torch.randint(NUM_POSITIONS, (num_tokens,), device=device),
            torch.zeros(num_tokens, num_kv_heads, head_dim, dtype=dtype, device=device),
            torch.zeros(num_tokens, num_kv_heads, head_dim, dtype=dtype, device=device),
            torch.randperm(num_tokens, device=device),
        )

    def in_one(*inputs: torch.Tensor) -> Inputs:
        qkv, q_weight, k_weight, cos, sin, positions, keys, values, slots = inputs
        transform = HeadTransform((q_weight, k_weight), cos, sin, num_heads, num_kv_heads, EPS)
        q, _, _ = norm_rope_write(qkv, transform, positions, CacheSlots(keys, values, slots))
        return q, keys, values

    def reference(*inputs: torch.Tensor) -> Inputs:
        qkv, q_weight, k_weight, cos, sin, positions, keys, values, slots = inputs
        keys, values = keys.clone(), values.clone()
        transform = HeadTransform((q_weight, k_weight), cos, sin, num_heads, num_kv_heads, EPS)
        q, _, _ = norm_rope_write_reference(qkv, transform, positions, CacheSlots(keys, values, slots))
        return q, keys, values

    def one_after_the_other(*inputs: torch.Tensor) -> Inputs:
        qkv, q_weight, k_weight, cos, sin, positions, keys, values, slots = inputs
        q, k, v = split_heads(qkv, num_heads, num_kv_heads)
        q, k = rms_norm(q, q_weight, eps=EPS), rms_norm(k, k_weight, eps=EPS)
        q, k = rope(q, k, cos, sin, positions)
        keys[slots], values[slots] = k, v
        return q, keys, values

    element = torch.empty((), dtype=dtype).element_size()
    return Case(
        kernel="norm_rope_write",
        shape=f"[{num_tokens}, {num_heads}+2x{num_kv_heads}, {head_dim}]",
        dtype=dtype,
        num_bytes=2 * num_tokens * width * element + num_tokens * head_dim * 4,
        make_inputs=make_inputs,
        reference=reference,
        implementations={"infer": in_one, "norm, rope, write": one_after_the_other},
    )


if __name__ == "__main__":
    sys.exit(run_benchmark("time norm_rope_write", [heads_cases]))
