"""The norm that runs on the CPU, against its formula in float64."""

from __future__ import annotations

import pytest
import torch

from infer.kernels.elementwise.rms_norm import add_rms_norm, rms_norm


def by_the_formula(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    x64 = x.double()
    return x64 / (x64.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (weight.double() + offset)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(1, 576), (4, 7), (3, 5, 64)])
def test_the_norm_follows_its_formula(shape: tuple[int, ...], offset: float) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape), torch.randn(shape[-1])
    y = rms_norm(x, weight, eps=1e-5, offset=offset)
    torch.testing.assert_close(y.double(), by_the_formula(x, weight, 1e-5, offset), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_low_precision_result_is_the_exact_one_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(64, 128).to(dtype), torch.randn(128).to(dtype)
    y = rms_norm(x, weight, eps=1e-6)
    exact = by_the_formula(x, weight, 1e-6, 0.0)
    assert y.dtype == dtype
    assert ((y.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps / 2 * 1.001 + 1e-7).all()


def test_squares_that_overflow_float16_do_no_harm() -> None:
    x = torch.full((1, 8), 3000.0, dtype=torch.float16)  # 3000^2 is beyond float16, mean and all
    torch.testing.assert_close(rms_norm(x, torch.ones(8).half(), eps=1e-5), torch.ones(1, 8).half())


def test_eps_keeps_a_row_of_zeros_finite() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 4), torch.ones(4), eps=1e-6), torch.zeros(2, 4))


def test_a_slice_of_a_wider_tensor_is_normalised_like_its_copy() -> None:
    torch.manual_seed(0)
    qkv, weight = torch.randn(5, 8, 16), torch.randn(16)
    k = qkv[:, 4:6]
    assert torch.equal(rms_norm(k, weight, eps=1e-5), rms_norm(k.contiguous(), weight, eps=1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adding_first_equals_adding_by_hand(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual, weight = (
        torch.randn(3, 96).to(dtype),
        torch.randn(3, 96).to(dtype),
        torch.randn(96).to(dtype),
    )
    y, new_residual = add_rms_norm(x, residual, weight, eps=1e-5, offset=1.0)
    assert torch.equal(new_residual, x + residual)
    assert torch.equal(y, rms_norm(x + residual, weight, eps=1e-5, offset=1.0))
