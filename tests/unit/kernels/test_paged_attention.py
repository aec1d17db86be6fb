"""The paged decode attention against its specification, which reads one sequence at a time."""

from __future__ import annotations

import pytest
import torch

from infer.kernels.attention.paged import attend_paged, attend_paged_reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def inputs(
    shape: tuple[int, int, int, int], dtype: torch.dtype, lens: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys, values, slots and mask; rows are padded by repeating their last slot."""
    num_rows, num_heads, num_kv_heads, head_dim = shape
    generator = torch.Generator().manual_seed(sum(shape))
    num_slots = sum(lens) + 5
    q_SNH = torch.randn(num_rows, num_heads, head_dim, generator=generator).to(dtype)
    keys_PGH = torch.randn(num_slots, num_kv_heads, head_dim, generator=generator).to(dtype)
    values_PGH = torch.randn(num_slots, num_kv_heads, head_dim, generator=generator).to(dtype)
    scattered = iter(torch.randperm(num_slots, generator=generator).tolist())
    slots_SL = torch.zeros(num_rows, max(lens), dtype=torch.int64)
    for row, length in enumerate(lens):
        own = [next(scattered) for _ in range(length)]
        slots_SL[row] = torch.tensor(own + own[-1:] * (max(lens) - length))
    is_seen_SL = torch.arange(max(lens)) < torch.tensor(lens)[:, None]
    return q_SNH, keys_PGH, values_PGH, slots_SL, is_seen_SL


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("shape", "lens"),
    [
        ((1, 1, 1, 1), [1]),
        ((3, 4, 4, 8), [1, 7, 13]),
        ((4, 6, 2, 5), [33, 2, 17, 33]),
        ((2, 7, 1, 24), [65, 64]),
        ((5, 9, 3, 80), [3, 1, 1, 2, 3]),
    ],
)
def test_rows_attend_as_the_specification_says(
    shape: tuple[int, int, int, int], lens: list[int], dtype: torch.dtype
) -> None:
    q, keys, values, slots, is_seen = inputs(shape, dtype, lens)
    expected = attend_paged_reference(q, keys, values, slots, is_seen, scale=0.37)
    got = attend_paged(q, keys, values, slots, is_seen, scale=0.37)
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_without_a_mask_every_slot_counts() -> None:
    q, keys, values, slots, is_seen = inputs((3, 6, 2, 16), torch.float32, [9, 9, 9])
    assert is_seen.all()
    expected = attend_paged_reference(q, keys, values, slots, is_seen, scale=0.25)
    torch.testing.assert_close(attend_paged(q, keys, values, slots, None, scale=0.25), expected)


def test_a_mask_may_have_holes() -> None:
    q, keys, values, slots, _ = inputs((3, 4, 2, 8), torch.float32, [11, 11, 11])
    is_seen = torch.rand(3, 11, generator=torch.Generator().manual_seed(4)) < 0.5
    is_seen[:, 3] = True
    expected = attend_paged_reference(q, keys, values, slots, is_seen, scale=0.3)
    torch.testing.assert_close(attend_paged(q, keys, values, slots, is_seen, scale=0.3), expected)


def test_slots_that_no_row_lists_may_hold_anything() -> None:
    q, keys, values, slots, is_seen = inputs((3, 4, 2, 8), torch.float32, [1, 7, 13])
    expected = attend_paged(q, keys, values, slots, is_seen, scale=0.3)
    unlisted = torch.ones(len(keys), dtype=torch.bool)
    unlisted[slots.flatten()] = False
    assert unlisted.any()
    keys[unlisted] = values[unlisted] = float("nan")
    assert torch.equal(attend_paged(q, keys, values, slots, is_seen, scale=0.3), expected)


def test_a_broken_row_breaks_no_other() -> None:
    q, keys, values, slots, is_seen = inputs((3, 4, 2, 8), torch.float32, [5, 7, 13])
    expected = attend_paged(q, keys, values, slots, is_seen, scale=0.3)
    keys[slots[1]] = values[slots[1]] = float("nan")
    got = attend_paged(q, keys, values, slots, is_seen, scale=0.3)
    assert torch.equal(got[[0, 2]], expected[[0, 2]])
    assert got[1].isnan().all()
