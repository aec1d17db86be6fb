"""Products in parts: into how many they are cut, and what goes through a layer in their place."""

from __future__ import annotations

import pytest
import torch

from infer.kernels.linear.split import multiply_in_parts, num_parts

H200 = 132


@pytest.mark.parametrize(
    ("M", "N", "K", "expected"),
    [
        (128, 4096, 12288, 2), (192, 4096, 12288, 2), (256, 4096, 12288, 2),  # 8B: down
        (128, 4096, 4096, 2), (256, 4096, 4096, 2),  # and the output projection
        (128, 1024, 3072, 4), (192, 1024, 3072, 4), (256, 1024, 3072, 2),  # 0.6B
        (128, 2048, 8192, 4), (256, 2048, 8192, 4),  # 1B
        (512, 4096, 12288, 1), (4096, 1024, 3072, 1), (16384, 4096, 12288, 1),  # tiles enough
        (256, 24576, 4096, 1),  # a gate
        (256, 1024, 1000, 1),  # not whole pieces
    ],
)  # fmt: skip
def test_into_how_many_parts(M: int, N: int, K: int, expected: int) -> None:
    assert num_parts(M, N, K, H200) == expected


def test_a_small_gpu_is_full_with_fewer() -> None:
    assert [num_parts(128, 1024, 8192, sms) for sms in (132, 40, 20)] == [4, 2, 1]


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_the_parts_are_the_product(parts: int) -> None:
    x, w = torch.randn(7, 512).bfloat16(), torch.randn(5, 512).bfloat16()
    y = multiply_in_parts(x, w, parts)
    assert y.shape == (parts, 7, 5) and y.dtype == torch.float32
    torch.testing.assert_close(y.sum(0).double(), x.double() @ w.double().T, rtol=1e-4, atol=1e-4)
