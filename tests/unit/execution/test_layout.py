"""An order's integers as tensors, and attention through block tables against attention over plain lists."""

from __future__ import annotations

import random

import pytest
import torch

from infer.cache.kv_store import KVStore
from infer.cache.layout import KVLayout
from infer.cache.paged_pool import PagedKVCachePool
from infer.execution.layout import HostRows, PagedStep
from infer.kernels.attention.reference import attend_naive
from infer.layers.attention import AttentionLayer
from infer.scheduling.plan import Chunk
from infer.scheduling.request import Request
from infer.scheduling.sequence import Sequence, SequenceGroup
from tests.support.kv_store import fill_store
from tests.support.running import Running
from tests.support.thinned import thinned

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8
CPU = torch.device("cpu")


class World:
    """A pool, a store full of NaN, and the plain lists of keys and values that attention must equal."""

    def __init__(self, block_size: int = 4, num_blocks: int = 64, seed: int = 3) -> None:
        self.pool = PagedKVCachePool(num_blocks, block_size, use_prefix_caching=False, placement_seed=seed)
        self.store = KVStore(
            layout=KVLayout.whole(1),
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            dtype=torch.float32,
            device=CPU,
        )
        fill_store(self.store, float("nan"))
        self.running = Running(self.pool)
        self.rows = HostRows(self.running.shape)
        self.sequences: dict[int, Sequence] = {}
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.computed: dict[int, int] = {}
        self._step = 0

    def add(self, seq_id: int) -> None:
        self.keys[seq_id] = self.values[seq_id] = torch.empty(0, NUM_KV_HEADS, HEAD_DIM)
        self.computed[seq_id] = 0

    def step(self, lengths: dict[int, int], *, use_reference: bool = False) -> PagedStep:
        """A step that computes so many tokens of each sequence."""
        chunks = []
        for seq_id, length in lengths.items():
            start = self.computed[seq_id]
            chunks.append(Chunk(seq_id, start, start + length, 1))
            tokens = [seq_id * 100 + place for place in range(start + length)]
            group = SequenceGroup(
                Request(request_id=str(seq_id), prompt=(1,)), max_total=999, stop_ids=(), seed=0
            )
            seq = self.sequences.setdefault(seq_id, Sequence(seq_id, group, 0, ()))
            seq.tokens.extend(tokens[len(seq.tokens) :])
            self.running.enter(seq, start + length)
        self._step += 1
        order = self.running.order(*chunks, step=self._step)
        self.rows.apply(order)
        step = PagedStep(order, self.rows, self.store, use_reference=use_reference)
        for chunk, row in zip(chunks, order.rows, strict=True):  # as if it had been drawn
            self.rows.last_token[row] = chunk.seq_id * 100 + chunk.stop
        return step

    def attend(
        self, lengths: dict[int, int], *, use_reference: bool, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a step through the store and over plain lists; both results."""
        step = self.step(lengths, use_reference=use_reference)
        num_tokens = sum(lengths.values())
        q = torch.randn(num_tokens, NUM_HEADS, HEAD_DIM)
        k, v = torch.randn(2, num_tokens, NUM_KV_HEADS, HEAD_DIM)
        ours = step.attend(AttentionLayer(0, 0.3, window), q, k, v)
        expected, first = [], 0
        for seq_id, length in lengths.items():
            last = first + length
            self.keys[seq_id] = torch.cat([self.keys[seq_id], k[first:last]])
            self.values[seq_id] = torch.cat([self.values[seq_id], v[first:last]])
            expected.append(
                attend_naive(q[first:last], self.keys[seq_id], self.values[seq_id], scale=0.3, window=window)
            )
            self.computed[seq_id] += length
            self.pool.commit(seq_id, [], self.computed[seq_id])
            first = last
        return ours, torch.cat(expected)


def test_rows_are_laid_end_to_end() -> None:
    world = World()
    for seq_id, length in ((1, 5), (2, 17), (3, 0)):
        world.add(seq_id)
        if length:
            world.attend({seq_id: length}, use_reference=False, window=None)
    step = world.step({1: 1, 2: 1, 3: 4})
    assert step.tokens_T.tolist() == [105, 217, 300, 301, 302, 303]
    assert step.positions.tolist() == [5, 17, 0, 1, 2, 3]
    assert step.last_places == [0, 1, 5]
    table = {seq_id: world.pool.block_tables(seq_id)[0] for seq_id in (1, 2, 3)}
    places = [(1, 5), (2, 17), (3, 0), (3, 1), (3, 2), (3, 3)]
    assert step.slots_KT.tolist() == [[table[seq][p // 4] * 4 + p % 4 for seq, p in places]]
    assert [(group.num_new, group.stops_S.tolist()) for group in step.groups] == [(4, [4]), (1, [6, 18])]


@pytest.mark.parametrize(
    ("block_size", "window", "use_reference"), thinned((1, 2, 4, 16), (None, 1, 5), (True, False), keep=2)
)
def test_attention_through_tables_is_attention_over_lists(
    block_size: int, window: int | None, use_reference: bool
) -> None:
    """Random steps of many lengths at once; what was not written is NaN and would show."""
    torch.manual_seed(0)
    rng = random.Random(block_size)
    world = World(block_size, num_blocks=512 // block_size)
    for seq_id in range(5):
        world.add(seq_id)
    for _ in range(25):
        chosen = rng.sample(range(5), rng.randrange(1, 6))
        lengths = {seq_id: rng.choice((1, 1, 1, 2, 7)) for seq_id in chosen}
        ours, expected = world.attend(lengths, use_reference=use_reference, window=window)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_very_different_lengths_attend_in_separate_groups() -> None:
    world = World(block_size=16, num_blocks=200)
    lengths = {1: 3, 2: 60, 3: 100, 4: 300, 5: 310, 6: 900}
    for seq_id, length in lengths.items():
        world.add(seq_id)
        world.attend({seq_id: length}, use_reference=False, window=None)
    groups = world.step(dict.fromkeys(lengths, 1)).groups
    assert [group.stops_S.tolist() for group in groups] == [[4, 61, 101], [301, 311], [901]]
    for group in groups:
        assert group.stops_S.max() <= 2 * max(group.stops_S.min(), 64)
