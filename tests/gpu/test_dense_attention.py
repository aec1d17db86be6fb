"""cuDNN's attention for long fresh prompts, on a GPU: against the reference in float32."""

from __future__ import annotations

import pytest
import torch

from infer.kernels.attention.dense import DenseAttention, Shape
from infer.kernels.attention.prefill import PrefillChunk
from infer.kernels.attention.reference import attend_naive

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(16, 8, 128), (32, 8, 128), (32, 8, 64)])
def test_long_prompts_equal_the_reference(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    dense = DenseAttention(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=head_dim**-0.5,
        dtype=torch.bfloat16, device=torch.device("cuda"), max_tokens=8192, max_len=8192,
    )  # fmt: skip
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("measured on Hopper alone")
    while dense.prepare():
        pass
    assert Shape(2, 4096) in dense.ready
    for nums in ([4096, 4096], [5000], [4100, 50]):
        chunks, first = [], 0
        for row, num in enumerate(nums):
            chunks.append(PrefillChunk(first, num, row, 0))
            first += num
        q, k, v = (
            torch.randn(first, heads, head_dim, device="cuda").bfloat16()
            for heads in (num_heads, num_kv_heads, num_kv_heads)
        )
        batches, rest = dense.split(chunks)
        assert batches and len(rest) == sum(num < 2048 for num in nums)
        out = dense.attend(q, k, v, batches, out=torch.full_like(q, torch.nan))
        for chunk in chunks[: len(chunks) - len(rest)]:
            own = slice(chunk.first, chunk.first + chunk.num)
            expected = attend_naive(
                q[own].float(), k[own].float(), v[own].float(), scale=head_dim**-0.5, window=None
            )
            error = (out[own].float() - expected).norm() / expected.norm()
            assert error < 1e-2, f"{nums}: {error:.1e}"
