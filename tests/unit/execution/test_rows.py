"""Rows of state: after an order the device has what the batch state says, and nothing is sent twice."""

from __future__ import annotations

import random
from unittest import mock

import numpy as np
import pytest
import torch

from infer.cache.paged_pool import PagedKVCachePool
from infer.execution.gpu import rows as device_rows
from infer.execution.gpu import sending
from infer.execution.gpu.rows import DeviceRows
from infer.execution.gpu.sending import send_together
from infer.execution.order import ON_HOST, StepOrder
from infer.kernels.elementwise.step_state import apply_table_diffs
from infer.kernels.sampling.sample_state import IN_PROMPT, IS_BANNED
from infer.sampling.params import SamplingParams
from infer.scheduling.plan import Chunk
from infer.scheduling.request import Request
from infer.scheduling.sequence import Sequence, SequenceGroup
from tests.support.running import Running

CPU = torch.device("cpu")
BLOCK_SIZE = 2
VOCAB_SIZE = 1001


class World:
    """Sequences that run, and the rows of a device that follows them."""

    def __init__(self, max_rows: int = 4) -> None:
        self.running = Running(PagedKVCachePool(200, BLOCK_SIZE, placement_seed=1), max_rows)
        self.rows = DeviceRows(max_rows, 100, VOCAB_SIZE, CPU)
        self.seqs = self.running.sequences

    def add(
        self, seq_id: int, num_tokens: int = 5, params: SamplingParams | None = None, seed: int = 0,
        stop_ids: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        request = Request(request_id=str(seq_id), prompt=(1, 2), params=params or SamplingParams())
        group = SequenceGroup(request, max_total=99, stop_ids=stop_ids, seed=seed)
        tokens = [seq_id * 100 + place for place in range(num_tokens)]
        self.running.enter(Sequence(seq_id, group, 0, tokens), num_tokens)

    def grow(self, seq_id: int, tokens: list[int]) -> None:
        """Give a sequence more tokens, and room for them."""
        seq = self.seqs[seq_id]
        seq.num_computed = len(seq.tokens)
        seq.tokens.extend(tokens)
        self.running.enter(seq, len(seq.tokens))

    def apply(self, *chunks: Chunk) -> list[list[int]]:
        """Give the device the order of these chunks; what was sent about tables."""
        return self.send(self.running.order(*chunks))

    def send(self, order: StepOrder) -> list[list[int]]:
        """Give the device an order; what was sent about tables."""
        sent: list[list[int]] = []

        def spy(tables_RB: torch.Tensor, diffs_K3: torch.Tensor) -> None:
            assert len(diffs_K3).bit_count() == 1, "any number of programs, and every launch is a new one"
            sent.extend(diffs_K3[diffs_K3[:, 0] >= 0].tolist())
            apply_table_diffs(tables_RB, diffs_K3)

        with mock.patch.object(device_rows, "apply_table_diffs", spy):
            self.rows.apply(order)
        return sent

    def check(self) -> None:
        """Raise unless the device has every table."""
        for seq in self.seqs.values():
            blocks = self.running.pool.block_tables(seq.seq_id)[0]
            assert self.rows.tables_KRB[0, seq.row, : len(blocks)].tolist() == blocks


def test_a_table_is_sent_once_and_then_only_where_it_changes() -> None:
    world = World()
    world.add(1)
    world.add(2, num_tokens=1)
    first = [Chunk(1, 0, 5, 1), Chunk(2, 0, 1, 1)]
    one, two = world.seqs[1].row, world.seqs[2].row
    table = world.running.pool.block_tables(1)[0]
    assert world.apply(*first) == [
        *([one, place, block] for place, block in enumerate(table)),
        [two, 0, world.running.pool.block_tables(2)[0][0]],
    ]
    assert world.apply(*first) == []
    world.grow(1, [7] * 4)
    blocks = world.running.pool.block_tables(1)[0]
    assert world.apply(Chunk(1, 5, 9, 1)) == [[one, place, blocks[place]] for place in (3, 4)]
    world.check()


def test_a_row_that_is_used_again_gets_the_whole_table_of_the_next_sequence() -> None:
    world = World(max_rows=1)
    world.add(1)
    world.apply(Chunk(1, 0, 5, 1))
    world.running.leave(world.seqs[1])
    world.add(2, num_tokens=3)
    assert world.apply(Chunk(2, 0, 3, 1)) == [
        [0, place, block] for place, block in enumerate(world.running.pool.block_tables(2)[0])
    ]
    world.check()


@pytest.mark.parametrize("seed", range(5))
def test_tables_follow_whatever_happens_to_them(seed: int) -> None:
    """Sequences come, grow and go, and rows are used again."""
    source, world = random.Random(seed), World()
    for _ in range(200):
        seq_id = source.randrange(4)
        seq = world.seqs.get(seq_id)
        if seq is None:
            world.add(seq_id, source.randrange(1, 30))
        elif source.random() < 0.2:
            world.running.leave(seq)
            continue
        elif len(seq.tokens) < 60:
            world.grow(seq_id, [7] * source.randrange(1, 9))
        world.apply(Chunk(seq_id, 0, len(world.seqs[seq_id].tokens), 1))
        world.check()


def test_rows_are_sampled_as_their_sequences_ask() -> None:
    asked = [
        SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.1),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.1, top_p=1e-9),
    ]
    world = World()
    for number, params in enumerate(asked):
        world.add(number, params=params, seed=2**63 + number)
        assert world.seqs[number].row == number
        if number == 0:
            world.apply(Chunk(0, 0, 5, 1))
    world.apply(*(Chunk(number, 0, 5, 1) for number in range(3)))
    lines = [world.rows.sampling.line(row) for row in range(4)]
    assert [line.temperature for line in lines] == [0.7, 0.0, 1.1, 0.0]
    assert [line.top_k for line in lines] == [40, 0, 0, 0]
    assert [line.top_p for line in lines] == [0.9, 1.0, 1e-9, 1.0]
    assert [line.min_p for line in lines] == [0.1, 0.0, 0.0, 0.0]
    assert [line.seed for line in lines] == [-(2**63), 1 - 2**63, 2 - 2**63, 0]
    assert not any(line.has_uses or line.num_biased for line in lines)


def test_what_a_row_has_used_is_counted_when_it_arrives_and_when_the_host_has_sampled() -> None:
    """The prompt is 1, 2 or so the request says; what follows it is output."""
    asked = SamplingParams(presence_penalty=0.5, logit_bias={7: -1.5, 0: 2.0}, min_tokens=4)
    world = World()
    world.add(1, params=asked, stop_ids=(9, 101))
    seq, sampling = world.seqs[1], world.rows.sampling
    world.apply(Chunk(1, 0, 5, 1))
    line = sampling.line(seq.row)
    assert (line.has_uses, line.num_biased, line.ban_end, line.presence) == (1, 2, 2 + 4, 0.5)
    expected = {100: IN_PROMPT, 101: IN_PROMPT | IS_BANNED, 102: 1, 103: 1, 104: 1, 9: IS_BANNED}

    def uses() -> dict[int, int]:
        uses_V = sampling.uses_RV[seq.row]
        return {int(token_id): int(uses_V[token_id]) for token_id in uses_V.nonzero()}

    assert uses() == expected
    ids, amounts = sampling.biases_R2E[seq.row, :, :2].unbind()
    assert (ids.tolist(), amounts.view(torch.float32).tolist()) == ([7, 0], [-1.5, 2.0])
    seq.tokens.extend([104, 8])  # two more that the device has not seen
    world.apply(Chunk(1, 0, 7, 1))
    assert uses() == expected, "the row is known"
    order = world.running.order(Chunk(1, 0, 7, 2))  # drawn on the host, which says all that the row has
    assert order.flags & ON_HOST and order.has_begun
    world.send(order)
    assert uses() == expected | {104: 2, 8: 1}
    seq.tokens.append(8)  # which came of it
    world.apply(Chunk(1, 7, 8, 1))
    assert uses() == expected | {104: 2, 8: 2}
    order = world.running.order(Chunk(1, 7, 8, 1))
    assert not order.has_begun, "the device counts again"


def test_a_row_without_penalties_is_not_told_again_when_the_host_has_sampled() -> None:
    world = World()
    world.add(1)
    for _ in range(2):
        order = world.running.order(Chunk(1, 0, 5, 2))
    assert order.flags & ON_HOST and not order.has_begun


def test_rows_that_ask_for_logprobs_say_how_many() -> None:
    world = World()
    world.add(1, params=SamplingParams(logprobs=3))
    world.add(2)
    world.add(3, params=SamplingParams(n=1, best_of=2))
    world.apply(*(Chunk(number, 0, 5, 1) for number in (1, 2, 3)))
    assert world.rows.num_logprobs[[world.seqs[number].row for number in (1, 2, 3)]].tolist() == [3, -1, 0]


def test_only_tokens_that_the_device_has_not_sampled_are_sent() -> None:
    world = World()
    for number in range(3):
        world.add(number)
    decode = [Chunk(number, 4, 5, 1) for number in range(3)]
    world.apply(*decode)
    assert world.rows.last_token_R.tolist() == [4, 104, 204, 0]
    assert world.rows.position_R.tolist() == [4, 4, 4, 0]
    world.rows.last_token_R.zero_()  # in place of what it drew
    world.running.state.leave(world.seqs[2])
    world.running.state.enter(world.seqs[2])  # its row begins anew
    world.apply(*decode)
    assert world.rows.last_token_R.tolist() == [0, 0, 204, 0]
    world.rows.last_token_R.zero_()
    world.apply(Chunk(1, 0, 4, 0))  # nothing is drawn: its last token is not known any more
    world.apply(*decode)
    assert world.rows.last_token_R.tolist() == [0, 104, 0, 0]


def test_tokens_that_the_host_has_drawn_are_sent() -> None:
    """A row that forks draws several ids: the host says which of them it goes on with, and so of all rows."""
    world = World()
    for number in range(2):
        world.add(number)
    decode = [Chunk(number, 4, 5, 1) for number in range(2)]
    world.apply(*decode)
    assert world.running.order(Chunk(0, 0, 5, 2), Chunk(1, 4, 5, 1)).flags & ON_HOST
    world.rows.last_token_R.zero_()
    world.apply(*decode)
    assert world.rows.last_token_R.tolist() == [4, 104, 0, 0]


def test_all_that_an_arriving_row_needs_travels_as_one() -> None:
    world = World()
    world.add(1)
    with mock.patch.object(sending, "send", wraps=sending.send) as send:
        world.apply(Chunk(1, 4, 5, 1))
        world.apply(Chunk(1, 4, 5, 1))
    assert send.call_count == 1
    world.check()
    assert world.rows.last_token_R[world.seqs[1].row] == 104


def test_of_an_order_that_repeats_the_last_one_tables_alone_are_sent() -> None:
    world = World()
    world.add(1)
    world.apply(Chunk(1, 4, 5, 1))
    world.rows.last_token_R[:] = 9
    world.grow(1, [9, 9, 9])
    order = world.running.order(Chunk(1, 5, 6, 1))
    blocks = world.running.pool.block_tables(1)[0]
    assert order.table_changes.tolist() == [[0, 3, blocks[3]]]
    with mock.patch.object(device_rows, "send", wraps=sending.send) as send:
        world.rows.apply_tables(order)
        world.rows.apply_tables(order._replace(table_changes=order.table_changes[:0]))
    assert send.call_count == 1
    world.check()
    assert world.rows.last_token_R.tolist() == [9] * 4


def test_arrays_that_travel_together_begin_at_multiples_of_16_bytes() -> None:
    arrays: list[np.ndarray] = [
        np.arange(9, dtype=np.int32).reshape(3, 3), np.arange(6).reshape(1, 6), np.arange(7, 8)
    ]  # fmt: skip
    sent = send_together(arrays, CPU)
    for array, tensor in zip(arrays, sent, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array)) and tensor.is_contiguous()
        assert tensor.data_ptr() % 16 == sent[0].data_ptr() % 16
