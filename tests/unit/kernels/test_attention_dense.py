"""Long fresh prompts as dense batches: against the reference, through PyTorch's own mathematics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from infer.config.profiles.hopper_h200 import H200
from infer.kernels.attention.choice import least_for_cudnn
from infer.kernels.attention.dense import Batch, DenseAttention, Shape, dense_shapes, padded_len
from infer.kernels.attention.prefill import PrefillChunk
from infer.kernels.attention.reference import attend_naive


def make_chunks(nums: Sequence[int], first: int = 0, start: int = 0) -> list[PrefillChunk]:
    chunks = []
    for row, num in enumerate(nums):
        chunks.append(PrefillChunk(first, num, row, start))
        first += num
    return chunks


def by_pytorch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


SHORT = replace(H200.attention, cudnn_pad_len=4, cudnn_min_lens={64: 8})


@pytest.fixture
def blank() -> DenseAttention:
    """Prompts of 8 to 32 tokens, padded to multiples of 4; no plan is made yet."""
    return DenseAttention(
        num_heads=4, num_kv_heads=2, head_dim=64, scale=0.1, dtype=torch.bfloat16, device=torch.device("cpu"),
        max_tokens=32, max_len=32, attend=by_pytorch, profile=SHORT,
    )  # fmt: skip


@pytest.fixture
def dense(blank: DenseAttention) -> DenseAttention:
    """The same, all plans made."""
    while blank.prepare():
        pass
    return blank


def test_plans_are_made_for_few_shapes_those_of_one_prompt_first(dense: DenseAttention) -> None:
    shapes = list(dense_shapes(SHORT, 8, 32, 32))
    assert shapes[:7] == [Shape(1, length) for length in range(8, 33, 4)]
    assert set(shapes[7:]) == {Shape(4, 8), Shape(2, 8), Shape(2, 16)}
    assert dense.ready == set(shapes) and not dense.prepare()


@pytest.mark.parametrize(("num_heads", "least"), [(8, 3072), (16, 3072), (32, 2048)])
def test_few_heads_of_a_prompt_are_not_worth_a_call(num_heads: int, least: int) -> None:
    assert least_for_cudnn(H200.attention, num_heads, 128, torch.bfloat16) == least
    shapes = dense_shapes(H200.attention, least, 8192, 8192)
    assert min(shape.length for shape in shapes) == least


@pytest.mark.parametrize(
    ("chunks", "batches", "rest"),
    [
        (make_chunks([16, 16], 3), [Batch(3, 16, Shape(2, 16))], []),
        (make_chunks([9, 30]), [Batch(0, 9, Shape(1, 12)), Batch(9, 30, Shape(1, 32))], []),
        (make_chunks([8] * 5), [Batch(0, 8, Shape(4, 8)), Batch(32, 8, Shape(1, 8))], []),
        (make_chunks([9, 9]), [Batch(0, 9, Shape(1, 12)), Batch(9, 9, Shape(1, 12))], []),  # not whole
        (make_chunks([7, 4]), [Batch(0, 7, Shape(1, 8))], [PrefillChunk(7, 4, 1, 0)]),
        (make_chunks([12], start=16), [], make_chunks([12], start=16)),  # behind a prefix
        (make_chunks([36]), [], make_chunks([36])),  # longer than any plan
        ([PrefillChunk(0, 16, 0, 0), PrefillChunk(17, 16, 1, 0)],
         [Batch(0, 16, Shape(1, 16)), Batch(17, 16, Shape(1, 16))], []),  # not end to end
        ([], [], []),
    ],
)  # fmt: skip
def test_chunks_become_batches_that_there_are_plans_for(
    dense: DenseAttention, chunks: list[PrefillChunk], batches: list[Batch], rest: list[PrefillChunk]
) -> None:
    assert dense.split(chunks) == (batches, rest)


def test_nothing_is_used_before_its_plan_is_made(blank: DenseAttention) -> None:
    chunks = make_chunks([8, 12])
    assert blank.split(chunks) == ([], chunks)
    assert blank.prepare() and blank.ready == {Shape(1, 8)}
    assert blank.split(chunks) == ([Batch(0, 8, Shape(1, 8))], chunks[1:])


@pytest.mark.parametrize(("nums", "first"), [([16, 16], 3), ([9, 31, 8], 0), ([8] * 4, 0), ([11], 0)])
def test_every_token_sees_its_own_prompt_up_to_itself(
    dense: DenseAttention, nums: list[int], first: int
) -> None:
    torch.manual_seed(0)
    chunks = make_chunks(nums, first)
    num_tokens = first + sum(nums) + (1 if first else 0)
    q, k, v = (torch.randn(num_tokens, heads, 64).bfloat16() for heads in (4, 2, 2))
    is_token = torch.zeros(num_tokens, dtype=torch.bool)
    for chunk in chunks:
        is_token[chunk.first : chunk.first + chunk.num] = True
    for x in (q, k, v):
        x[~is_token] = torch.nan
    out = torch.full_like(q, 7.0)
    batches, rest = dense.split(chunks)
    assert not rest
    result = dense.attend(q, k, v, batches, out=out)
    for chunk in chunks:
        own = slice(chunk.first, chunk.first + chunk.num)
        expected = attend_naive(q[own], k[own], v[own], scale=0.1, window=None)
        torch.testing.assert_close(result[own], expected, rtol=2e-2, atol=2e-2)
    assert (result[~is_token] == 7.0).all()
    if is_token.all():
        assert torch.equal(dense.attend(q, k, v, batches), result)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_prompts_do_not_see_what_is_not_finite_in_the_next_one(dense: DenseAttention, value: float) -> None:
    torch.manual_seed(0)
    chunks = make_chunks([9, 16])
    q, k, v = (torch.randn(25, heads, 64).bfloat16() for heads in (4, 2, 2))
    for x in (q, v):  # a masked score is replaced, whatever its key is; a masked value is multiplied by zero
        x[9:] = value
    result = dense.attend(q, k, v, dense.split(chunks)[0], out=torch.empty_like(q))
    expected = attend_naive(q[:9], k[:9], v[:9], scale=0.1, window=None)
    torch.testing.assert_close(result[:9], expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("num_tokens", "length"), [(9, 12), (64, 64), (65, 72), (129, 144), (200, 208)])
def test_longer_prompts_are_padded_further(num_tokens: int, length: int) -> None:
    assert padded_len(num_tokens, pad_len=4) == length


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 64), (torch.bfloat16, 96)])
def test_what_was_not_measured_to_be_faster_makes_no_plans(dtype: torch.dtype, head_dim: int) -> None:
    made = DenseAttention(
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        scale=0.1,
        dtype=dtype,
        device=torch.device("cpu"),
        max_tokens=8192,
        max_len=8192,
        profile=H200.attention,
    )
    assert not made.prepare() and made.split(make_chunks([4096]))[0] == []


def test_a_library_that_is_missing_is_done_without() -> None:
    made = DenseAttention(  # cuDNN does not run on a CPU
        num_heads=4, num_kv_heads=2, head_dim=128, scale=0.1, dtype=torch.bfloat16,
        device=torch.device("cpu"), max_tokens=2048, max_len=2048, profile=H200.attention,
    )  # fmt: skip
    assert not made.prepare() and not made.ready
    assert made.split(make_chunks([2048])) == ([], make_chunks([2048]))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RuntimeError("no plan")])
def test_plans_that_cannot_be_made_leave_those_that_could(
    blank: DenseAttention, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert blank.prepare()

    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise error

    monkeypatch.setattr(torch, "zeros", refuse)
    assert not blank.prepare() and not blank.prepare()
    assert blank.ready == {Shape(1, 8)}
