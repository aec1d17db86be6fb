"""The rotation that runs on the CPU, against complex multiplication and its own reason to exist."""

from __future__ import annotations

import pytest
import torch

from infer.kernels.elementwise.rope import rope

HEAD_DIM, NUM_POSITIONS = 16, 64


def make_angles() -> torch.Tensor:
    inv_freq = 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    return torch.outer(torch.arange(NUM_POSITIONS).float(), inv_freq)


def as_complex_multiplication(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Element i of the first half is a real part, of the second half an imaginary one."""
    first, second = x.double().chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.exp(1j * make_angles().double()[positions].unsqueeze(1))
    return torch.cat((turned.real, turned.imag), dim=-1)


def rotate(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    angles = make_angles()
    return rope(q, k, angles.cos(), angles.sin(), positions)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_rotation_is_multiplication_by_a_complex_number(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(5, 6, HEAD_DIM).to(dtype), torch.randn(5, 2, HEAD_DIM).to(dtype)
    positions = torch.tensor([0, 63, 7, 7, 1])  # the tokens of a ragged batch, in any order
    for before, after in zip((q, k), rotate(q, k, positions), strict=True):
        assert after.dtype == dtype and after.shape == before.shape
        expected = as_complex_multiplication(before, positions)
        torch.testing.assert_close(after.double(), expected, rtol=tolerance, atol=tolerance)


def test_position_zero_changes_nothing() -> None:
    q, k = torch.randn(1, 4, HEAD_DIM), torch.randn(1, 2, HEAD_DIM)
    rotated_q, rotated_k = rotate(q, k, torch.tensor([0]))
    assert torch.equal(rotated_q, q) and torch.equal(rotated_k, k)


def test_scores_depend_only_on_the_distance() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, HEAD_DIM).expand(2, 1, -1), torch.randn(1, 1, HEAD_DIM).expand(2, 1, -1)
    near_q, _ = rotate(q, k, torch.tensor([9, 50]))
    _, far_k = rotate(q, k, torch.tensor([4, 45]))  # both five positions earlier
    near, far = (near_q * far_k).sum(-1)
    torch.testing.assert_close(near, far, rtol=1e-4, atol=1e-4)


def test_views_of_a_fused_qkv_are_rotated_and_the_original_is_kept() -> None:
    torch.manual_seed(0)
    qkv = torch.randn(3, 8, HEAD_DIM)
    before = qkv.clone()
    q, k, _ = torch.split(qkv, [4, 2, 2], dim=1)
    positions = torch.tensor([3, 4, 5])
    rotated_q, rotated_k = rotate(q, k, positions)
    assert torch.equal(qkv, before)
    expected_q, expected_k = rotate(q.clone(), k.clone(), positions)
    assert torch.equal(rotated_q, expected_q) and torch.equal(rotated_k, expected_k)


def test_a_position_beyond_the_tables_is_an_error_on_the_cpu() -> None:
    x = torch.randn(1, 1, HEAD_DIM)
    with pytest.raises(IndexError):
        rotate(x, x, torch.tensor([NUM_POSITIONS]))
