"""Attention of a ragged batch over a paged cache in C, against one query at a time in float64.

A reference in float32 would be off by as much as what is tested, and by how much depends on the order in
which a processor's BLAS adds.
"""

from __future__ import annotations

import random

import pytest
import torch

from infer.execution.cpu_step import MAX_PARTS, CpuInputs
from infer.kernels.cpu import operations
from infer.kernels.cpu.library import Library
from tests.kernels.c_builds import BUILDS, c_library


@pytest.fixture(params=BUILDS)
def c(request: pytest.FixtureRequest) -> Library:
    return c_library(request.param)


class Cache:
    """Sequences of given lengths in shuffled blocks; what was not written is NaN."""

    def __init__(self, lengths: list[int], *, block_size: int, num_kv_heads: int, head_dim: int) -> None:
        self.block_size, blocks_each = block_size, max(lengths) // block_size + 1
        num_blocks = len(lengths) * blocks_each
        self.table = torch.randperm(num_blocks).view(len(lengths), blocks_each)
        shape = (num_blocks * block_size, num_kv_heads, head_dim)
        self.keys, self.values = torch.full(shape, float("nan")), torch.full(shape, float("nan"))
        self.slots = []
        for row, length in enumerate(lengths):
            positions = torch.arange(length)
            slots = self.table[row, positions // block_size] * block_size + positions % block_size
            self.keys[slots] = torch.randn(length, num_kv_heads, head_dim)
            self.values[slots] = torch.randn(length, num_kv_heads, head_dim)
            self.slots.append(slots)


def run(
    c: Library,
    cache: Cache,
    chunks: list[tuple[int, int]],
    q: torch.Tensor,
    window: int | None,
    tokens: int = 16,
    softcap: float | None = None,
    sinks_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend the last `count` tokens of each row, (row, count), in items of at most so many tokens.

    With 0 tokens, an item is one segment of one token.
    """
    items: list[tuple[int, ...]] = []
    place = 0
    for row, count in chunks:
        start = len(cache.slots[row]) - count
        for first in range(0, count, tokens or 1):
            item = (place + first, min(tokens or 1, count - first), row, start + first)
            if tokens:
                items.append((*item, -1, 0))
            else:
                segments = range((start + first) // operations.SEGMENT + 1)
                items += [(*item, segment, len(items) + segment) for segment in segments]
        place += count
    if not tokens:
        random.shuffle(items)  # threads finish in any order
    (_, N, H), G = q.shape, cache.keys.shape[1]
    parts = torch.zeros(operations.parts_shape(len(items), N, G, H))
    out = operations.attend(
        c, q, cache.keys, cache.values, cache.table, torch.tensor(items), block_size=cache.block_size,
        scale=0.3, window=window, parts=parts, softcap=softcap, sinks_N=sinks_N,
    )  # fmt: skip
    assert not parts[:, -G:].any()  # the counters are ready for the next step
    return out


def attend_exactly(
    q_QNH: torch.Tensor,
    k_KGH: torch.Tensor,
    v_KGH: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the last Q of K positions; [Q, N, H]."""
    num_queries, num_heads, _ = q_QNH.shape
    num_positions, num_kv_heads, _ = k_KGH.shape
    k_KNH, v_KNH = (x.double().repeat_interleave(num_heads // num_kv_heads, dim=1) for x in (k_KGH, v_KGH))
    scores_NQK = scale * torch.einsum("qnh,knh->nqk", q_QNH.double(), k_KNH)
    of_query = torch.arange(num_positions - num_queries, num_positions).unsqueeze(1)
    distance = of_query - torch.arange(num_positions)
    is_seen = (distance >= 0) & (distance < (window or num_positions))
    if softcap is not None:
        scores_NQK = softcap * torch.tanh(scores_NQK / softcap)
    scores_NQK = scores_NQK.masked_fill(~is_seen, -torch.inf)
    if sinks_N is not None:
        sinks_NQ1 = sinks_N.double()[:, None, None].expand(-1, num_queries, 1)
        scores_NQK = torch.cat((scores_NQK, sinks_NQ1), dim=-1)
    weights_NQK = scores_NQK.softmax(dim=-1)[..., :num_positions]
    return torch.einsum("nqk,knh->qnh", weights_NQK, v_KNH).float()


@pytest.mark.parametrize("head_dim", [1, 20, 64, 80, 256, 512])
@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize("block_size", [1, 16])
def test_equals_one_query_at_a_time(c: Library, head_dim: int, window: int | None, block_size: int) -> None:
    lengths, counts = [1, 17, 50, 33], [1, 1, 37, 33]
    cache = Cache(lengths, block_size=block_size, num_kv_heads=2, head_dim=head_dim)
    q = torch.randn(sum(counts), 6, head_dim)
    ours = run(c, cache, list(enumerate(counts)), q, window)
    for row, part in enumerate(torch.split(q, counts)):
        keys, values = cache.keys[cache.slots[row]], cache.values[cache.slots[row]]
        expected = attend_exactly(part, keys, values, scale=0.3, window=window)
        first = sum(counts[:row])
        torch.testing.assert_close(ours[first : first + counts[row]], expected, rtol=5e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("length", [50, 1100])
def test_scores_may_be_capped_and_heads_have_sinks(c: Library, length: int, window: int | None) -> None:
    cache = Cache([length], block_size=16, num_kv_heads=2, head_dim=20)
    q, sinks = 3 * torch.randn(37, 6, 20), torch.tensor([0.3, -200.0, 200.0, -1.0, 4.0, 0.0])
    for how in ({"softcap": 1.5}, {"sinks_N": sinks}, {"softcap": 50.0, "sinks_N": sinks}):
        ours = run(c, cache, [(0, 37)], q, window, **how)
        keys, values = cache.keys[cache.slots[0]], cache.values[cache.slots[0]]
        expected = attend_exactly(q, keys, values, scale=0.3, window=window, **how)
        torch.testing.assert_close(ours, expected, rtol=5e-5, atol=1e-5)
        assert torch.equal(run(c, cache, [(0, 37)], q, window, tokens=0, **how), ours)


@pytest.mark.parametrize("window", [None, 7])
def test_no_cut_changes_a_bit(c: Library, window: int | None) -> None:
    cache = Cache([45], block_size=4, num_kv_heads=3, head_dim=64)
    q = torch.randn(45, 9, 64)
    whole = run(c, cache, [(0, 45)], q, window)
    assert torch.equal(run(c, cache, [(0, 45)], q, window, tokens=1), whole)
    assert torch.equal(run(c, cache, [(0, 45)], q, window, tokens=5), whole)


@pytest.mark.parametrize("window", [None, 7, 600])
@pytest.mark.parametrize("length", [511, 512, 513, 1100])
def test_no_cut_of_a_long_context_changes_a_bit(c: Library, length: int, window: int | None) -> None:
    cache = Cache([length, 40], block_size=16, num_kv_heads=3, head_dim=64)
    count = 21
    q = torch.randn(count + 2, 9, 64)
    chunks = [(0, count), (1, 2)]
    whole = run(c, cache, chunks, q, window)
    keys, values = cache.keys[cache.slots[0]], cache.values[cache.slots[0]]
    expected = attend_exactly(q[:count], keys, values, scale=0.3, window=window)
    torch.testing.assert_close(whole[:count], expected, rtol=5e-5, atol=1e-5)
    for tokens in (1, 5, 0):
        assert torch.equal(run(c, cache, chunks, q, window, tokens=tokens), whole), tokens
    c.set_threads(3)
    assert torch.equal(run(c, cache, chunks, q, window, tokens=0), whole)
    c.set_threads(1)


def test_a_step_of_few_tokens_is_split_into_segments(c: Library) -> None:
    lengths = [1100, 30, 600]
    cache = Cache(lengths, block_size=16, num_kv_heads=2, head_dim=32)
    q = torch.randn(3, 4, 32)
    inputs = CpuInputs(3, 1, max_split=3)
    inputs.items[:3] = [(row, 1, row, length - 1, -1, 0) for row, length in enumerate(lengths)]
    inputs.num_items = 3
    inputs._split()
    items = torch.from_numpy(inputs.items)[: inputs.num_items]
    assert items[:, 4].tolist() == [0, 1, 2, 0, 0, 1] and items[:, 5].tolist() == [*range(6)]
    assert items[:, 0].tolist() == [0, 0, 0, 1, 2, 2]
    parts = torch.zeros(operations.parts_shape(MAX_PARTS, 4, 2, 32))
    ours = operations.attend(
        c, q, cache.keys, cache.values, cache.table, items, block_size=16, scale=0.3, window=None, parts=parts
    )
    assert torch.equal(ours, run(c, cache, [(0, 1), (1, 1), (2, 1)], q, None))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("heads", [1, 3, 4, 8])
def test_group_sizes(c: Library, head_dim: int, heads: int) -> None:
    lengths = [*range(1, 34, 4), 530]
    counts = [min(length, 20) for length in lengths]
    cache = Cache(lengths, block_size=16, num_kv_heads=2, head_dim=head_dim)
    q = torch.randn(sum(counts), 2 * heads, head_dim)
    ours = run(c, cache, list(enumerate(counts)), q, None)
    first = 0
    for row, part in enumerate(torch.split(q, counts)):
        keys, values = cache.keys[cache.slots[row]], cache.values[cache.slots[row]]
        expected = attend_exactly(part, keys, values, scale=0.3, window=None)
        torch.testing.assert_close(ours[first : first + len(part)], expected, rtol=5e-5, atol=1e-5)
        first += len(part)


def test_many_heads_of_one_kv_head_fit(c: Library) -> None:
    cache = Cache([30], block_size=16, num_kv_heads=1, head_dim=256)
    q = torch.randn(30, 9, 256)
    expected = attend_exactly(
        q, cache.keys[cache.slots[0]], cache.values[cache.slots[0]], scale=0.3, window=None
    )
    torch.testing.assert_close(run(c, cache, [(0, 30)], q, None), expected, rtol=5e-5, atol=1e-5)


@pytest.mark.parametrize("place", [20, 600])
def test_a_broken_key_of_a_segment_breaks_the_joined_result(c: Library, place: int) -> None:
    cache = Cache([1030], block_size=16, num_kv_heads=1, head_dim=16)
    cache.keys[cache.slots[0][place]] = float("nan")
    q = torch.randn(1, 2, 16)
    assert run(c, cache, [(0, 1)], q, None, tokens=0).isnan().all()
    assert run(c, cache, [(0, 1)], q, None).isnan().all()
    assert run(c, cache, [(0, 1)], q, 100, tokens=0).isfinite().all()


def test_a_broken_key_breaks_only_those_who_see_it(c: Library) -> None:
    cache = Cache([40], block_size=16, num_kv_heads=1, head_dim=16)
    cache.keys[cache.slots[0][20]] = float("nan")
    out = run(c, cache, [(0, 40)], torch.randn(40, 2, 16), None)
    assert out[:20].isfinite().all() and out[20:].isnan().all()
