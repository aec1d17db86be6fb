"""Fresh prompts as dense batches: against the reference, through PyTorch's own mathematics."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from infer.kernels import attention_dense
from infer.kernels.attention import attend_naive
from infer.kernels.attention_dense import attend_fresh_dense, can_attend_dense
from infer.kernels.attention_prefill import Chunk, PrefillChunks

NO_TILES = torch.zeros((0, 4), dtype=torch.int32)


def make_chunks(nums: Sequence[int], first: int = 0, gap: int = 0) -> PrefillChunks:
    chunks = []
    for row, num in enumerate(nums):
        chunks.append(Chunk(first, num, row, 0))
        first += num + gap
    return PrefillChunks.from_arrays(NO_TILES, chunks)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, ...]]:
    """The q, k and v of each dense call."""
    seen: list[tuple[torch.Tensor, ...]] = []
    attend = F.scaled_dot_product_attention

    def watch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
        seen.append((q, k, v))
        return attend(q, k, v, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(F, "scaled_dot_product_attention", watch)
    return seen


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], ids=str)
@pytest.mark.parametrize(
    ("nums", "first", "gap", "shapes"),
    [
        ([5], 0, 0, [(1, 8)]),
        ([8, 8], 3, 0, [(2, 8)]),
        ([8, 8], 0, 2, [(2, 8)]),
        ([7, 16, 1, 9, 8, 8], 2, 1, [(4, 8), (2, 16)]),
        ([3, 4, 5], 0, 0, [(2, 8), (1, 8)]),
    ],
)
def test_every_token_sees_its_own_prompt_up_to_itself(
    nums: list[int],
    first: int,
    gap: int,
    shapes: list[tuple[int, int]],
    backend: SDPBackend,
    calls: list[tuple[torch.Tensor, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_dense, "PAD_LEN", 8)
    torch.manual_seed(0)
    chunks = make_chunks(nums, first, gap)
    num_tokens = first + sum(nums) + gap * len(nums) + 1
    q, k, v = (torch.randn(num_tokens, heads, 64).bfloat16() for heads in (4, 2, 2))
    is_token = torch.zeros(num_tokens, dtype=torch.bool)
    for chunk in chunks.chunks:
        is_token[chunk.first : chunk.first + chunk.num] = True
    for x in (q, k, v):
        x[~is_token] = torch.nan
    out = torch.full_like(q, 7.0)

    assert attend_fresh_dense(q, k, v, chunks, scale=0.1, out=out, backend=backend) is out

    for chunk in chunks.chunks:
        own = slice(chunk.first, chunk.first + chunk.num)
        expected = attend_naive(q[own], k[own], v[own], scale=0.1, window=None)
        torch.testing.assert_close(out[own], expected, rtol=2e-2, atol=2e-2)
    assert (out[~is_token] == 7.0).all()
    assert [(q.shape[0], q.shape[2]) for q, _, _ in calls] == shapes


def test_prompts_that_need_no_padding_are_not_copied(
    calls: list[tuple[torch.Tensor, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_dense, "PAD_LEN", 8)
    qkv = torch.randn(35, 8, 64).bfloat16()
    q, k, v = qkv[:, :4], qkv[:, 4:6], qkv[:, 6:]
    out = torch.empty(35, 4, 64, dtype=torch.bfloat16)
    attend_fresh_dense(q, k, v, make_chunks([16, 16], 3), scale=0.1, out=out, backend=SDPBackend.MATH)
    (given,) = calls
    for whole, part in zip((q, k, v), given, strict=True):
        assert part.data_ptr() == whole[3].data_ptr()


@pytest.mark.parametrize(
    ("dtype", "head_dim", "chunks", "window", "can"),
    [
        (torch.bfloat16, 64, make_chunks([5, 3]), None, True),
        (torch.float16, 128, make_chunks([5]), None, True),
        (torch.float32, 64, make_chunks([5]), None, False),
        (torch.bfloat16, 96, make_chunks([5]), None, False),
        (torch.bfloat16, 64, make_chunks([5]), 4, False),
        (torch.bfloat16, 64, make_chunks([]), None, False),
        (torch.bfloat16, 64, PrefillChunks.from_arrays(NO_TILES, [Chunk(0, 5, 0, 16)]), None, False),
    ],
)
def test_what_it_is_for(
    dtype: torch.dtype, head_dim: int, chunks: PrefillChunks, window: int | None, can: bool
) -> None:
    assert can_attend_dense(dtype, head_dim, chunks, window) is can


def test_chunks_behind_a_cached_prefix_are_refused() -> None:
    x = torch.zeros(5, 2, 64, dtype=torch.bfloat16)
    chunks = PrefillChunks.from_arrays(NO_TILES, [Chunk(0, 5, 0, 16)])
    with pytest.raises(AssertionError, match="start=16"):
        attend_fresh_dense(x, x, x, chunks, scale=0.1, out=x.clone())
