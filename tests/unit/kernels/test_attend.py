"""Both attention functions against two loops over positions and heads, in Python floats."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from infer.kernels.attention.reference import attend_naive, attend_sdpa
from tests.support.thinned import thinned

ATTEND = [attend_naive, attend_sdpa]
HEAD_DIM = 8
HEADS = {"mha": (4, 4), "gqa": (6, 2), "mqa": (4, 1)}
SHAPES = ((1, 1), (1, 8), (8, 8), (3, 8), (2, 7))  # queries, positions


def by_brute_force(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    out = torch.zeros(q.shape, dtype=torch.float64)
    heads_per_kv_head = q.shape[1] // k.shape[1]
    for i in range(q.shape[0]):
        position = k.shape[0] - q.shape[0] + i
        seen = [j for j in range(position + 1) if window is None or j > position - window]
        for head in range(q.shape[1]):
            kv_head = head // heads_per_kv_head
            weights = [math.exp(scale * float(q[i, head].double() @ k[j, kv_head].double())) for j in seen]
            for weight, j in zip(weights, seen, strict=True):
                out[i, head] += weight / sum(weights) * v[j, kv_head].double()
    return out


def random_qkv(
    num_queries: int, num_positions: int, heads: tuple[int, int], dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    num_heads, num_kv_heads = heads
    q = torch.randn(num_queries, num_heads, HEAD_DIM).to(dtype)
    k, v = torch.randn(2, num_positions, num_kv_heads, HEAD_DIM).to(dtype)
    return q, k, v


@pytest.mark.parametrize("attend", ATTEND)
@pytest.mark.parametrize(
    ("heads", "shape", "window"), thinned(HEADS, SHAPES, (None, 1, 3, 7, 8, 100), keep=3)
)
def test_attention_equals_two_loops(
    attend: Callable[..., torch.Tensor], heads: str, shape: tuple[int, int], window: int | None
) -> None:
    num_queries, num_positions = shape
    q, k, v = random_qkv(num_queries, num_positions, HEADS[heads])
    out = attend(q, k, v, scale=0.3, window=window)
    assert out.shape == q.shape
    torch.testing.assert_close(out.double(), by_brute_force(q, k, v, 0.3, window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attend", ATTEND)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("num_queries", [1, 4, 9])
def test_low_precision_stays_close(
    attend: Callable[..., torch.Tensor], dtype: torch.dtype, tolerance: float, num_queries: int
) -> None:
    q, k, v = random_qkv(num_queries, 9, (4, 2), dtype)
    out = attend(q, k, v, scale=0.3, window=5)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), by_brute_force(q, k, v, 0.3, 5), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("attend", ATTEND)
def test_scores_beyond_the_range_of_exp_do_not_overflow(attend: Callable[..., torch.Tensor]) -> None:
    q, k, v = random_qkv(3, 6, (2, 2))
    out = attend(q * 1000, k, v, scale=1.0, window=None)
    assert out.isfinite().all()
    best = torch.einsum("nh,knh->nk", q[-1], k).argmax(dim=-1)  # softmax has become argmax
    torch.testing.assert_close(out[-1], v[best, torch.arange(2)])


@pytest.mark.parametrize("attend", ATTEND)
def test_chunks_give_what_the_whole_prompt_gives(attend: Callable[..., torch.Tensor]) -> None:
    q, k, v = random_qkv(9, 9, (4, 2))
    whole = attend(q, k, v, scale=0.3, window=4)
    chunks = [attend(q[i:j], k[:j], v[:j], scale=0.3, window=4) for i, j in [(0, 5), (5, 6), (6, 9)]]
    torch.testing.assert_close(torch.cat(chunks), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attend", ATTEND)
@pytest.mark.parametrize("num_queries", [1, 2, 3])
def test_nan_in_slots_before_the_window_does_not_leak(
    attend: Callable[..., torch.Tensor], num_queries: int
) -> None:
    q, k, v = random_qkv(num_queries, 9, (4, 2))
    expected = attend(q, k, v, scale=0.3, window=3)
    first_seen = 9 - num_queries - 3 + 1
    k[:first_seen], v[:first_seen] = torch.nan, torch.nan
    assert torch.equal(attend(q, k, v, scale=0.3, window=3), expected)


def test_the_naive_form_lets_no_query_see_a_nan_of_the_future() -> None:
    q, k, v = random_qkv(4, 6, (2, 1))
    expected = attend_naive(q, k, v, scale=0.3, window=None)
    k[-1], v[-1] = torch.nan, torch.nan
    out = attend_naive(q, k, v, scale=0.3, window=None)
    assert torch.equal(out[:-1], expected[:-1])
    assert out[-1].isnan().all()


@pytest.mark.parametrize("attend", ATTEND)
@pytest.mark.parametrize("num_queries", [1, 5])
def test_strided_views_are_accepted(attend: Callable[..., torch.Tensor], num_queries: int) -> None:
    torch.manual_seed(0)
    q, k, v = torch.split(torch.randn(5, 8, HEAD_DIM), [4, 2, 2], dim=1)  # views of a fused qkv
    out = attend(q[-num_queries:], k, v, scale=0.3, window=None)
    copies = q[-num_queries:].contiguous(), k.contiguous(), v.contiguous()
    torch.testing.assert_close(out, attend(*copies, scale=0.3, window=None))


@pytest.mark.parametrize("attend", ATTEND)
@pytest.mark.parametrize("window", [None, 4])
def test_a_sink_takes_its_share_and_a_cap_bounds_scores(
    attend: Callable[..., torch.Tensor], window: int | None
) -> None:
    """Each query by itself, with the sink as one more score whose value is zero."""
    q, k, v, sinks = torch.randn(150, 4, 8), torch.randn(170, 2, 8), torch.randn(170, 2, 8), torch.randn(4)
    out = attend(q, k, v, scale=2.0, window=window, softcap=3.0, sinks_N=sinks)
    for query in (0, 1, 127, 128, 149):
        for head in range(4):
            last = 20 + query
            seen = slice(0 if window is None else last - window + 1, last + 1)
            scores = 2.0 * k[seen, head // 2] @ q[query, head]
            weights = torch.cat((3.0 * torch.tanh(scores / 3.0), sinks[head : head + 1])).softmax(0)
            torch.testing.assert_close(out[query, head], weights[:-1] @ v[seen, head // 2])
