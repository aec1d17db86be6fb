"""Rows of state: after a sync the device has what the batch state says, and nothing is sent twice."""

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
from infer.kernels.elementwise.step_state import apply_table_diffs
from infer.kernels.sampling.sample_state import IN_PROMPT, IS_BANNED
from infer.sampling.params import SamplingParams
from infer.scheduling.plan import Chunk, StepPlan
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
        self.rows = DeviceRows(self.running.state, 100, VOCAB_SIZE, CPU)
        self.seqs = self.running.sequences

    def add(
        self, seq_id: int, num_tokens: int = 5, params: SamplingParams | None = None, seed: int = 0,
        stop_ids: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        request = Request(request_id=str(seq_id), prompt=(1, 2), params=params or SamplingParams())
        group = SequenceGroup(request, max_total=99, stop_ids=stop_ids, seed=seed)
        tokens = [seq_id * 100 + place for place in range(num_tokens)]
        self.running.enter(Sequence(seq_id, group, 0, tokens), num_tokens)

    def leave(self, seq_id: int) -> None:
        self.running.state.leave(self.seqs[seq_id])
        self.running.pool.release(seq_id)
        del self.seqs[seq_id]

    def plan(self, *chunks: Chunk, changes: list[int] | None = None) -> StepPlan:
        plan = self.running.plan(*chunks)
        plan.table_changes = changes or []
        return plan

    def sync(self, plan: StepPlan) -> list[list[int]]:
        """Bring the rows of a plan up to date; what was sent about tables."""
        sent: list[list[int]] = []

        def spy(tables_RB: torch.Tensor, diffs_K3: torch.Tensor) -> None:
            assert len(diffs_K3).bit_count() == 1, "any number of programs, and every launch is a new one"
            sent.extend(diffs_K3[diffs_K3[:, 0] >= 0].tolist())
            apply_table_diffs(tables_RB, diffs_K3)

        with mock.patch.object(device_rows, "apply_table_diffs", spy):
            self.rows.sync(plan)
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
    assert world.sync(world.plan(*first)) == [
        *([one, place, block] for place, block in enumerate(table)),
        [two, 0, world.running.pool.block_tables(2)[0][0]],
    ]
    assert world.sync(world.plan(*first)) == []
    pool, state = world.running.pool, world.running.state
    pool.reserve(1, 9, 5)
    changes: list[int] = []
    state.write_tables(world.seqs[1], pool.block_tables(1), changes)
    assert len(changes) == 6
    assert world.sync(world.plan(Chunk(1, 5, 9, 1), changes=changes)) == [changes[:3], changes[3:]]
    world.check()


@pytest.mark.parametrize("seed", range(5))
def test_tables_follow_whatever_happens_to_them(seed: int) -> None:
    """Sequences come, grow and go, and rows are used again."""
    source, world = random.Random(seed), World()
    for _ in range(200):
        seq_id = source.randrange(4)
        seq = world.seqs.get(seq_id)
        changes: list[int] = []
        if seq is None:
            world.add(seq_id, source.randrange(1, 30))
            seq = world.seqs[seq_id]
        elif source.random() < 0.2:
            world.leave(seq_id)
            continue
        elif len(seq.tokens) < 60:
            num_before = len(seq.tokens)
            seq.tokens.extend([7] * source.randrange(1, 9))
            assert world.running.pool.reserve(seq_id, len(seq.tokens), num_before) == []
            blocks = world.running.pool.block_tables(seq_id)[0]
            world.running.state.write_tables(seq, [blocks], changes)
        world.sync(world.plan(Chunk(seq_id, 0, len(seq.tokens), 1), changes=changes))
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
            world.sync(world.plan(Chunk(0, 0, 5, 1)))
    world.sync(world.plan(*(Chunk(number, 0, 5, 1) for number in range(3))))
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
    plan = world.plan(Chunk(1, 0, 5, 1))
    world.sync(plan)
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
    world.sync(plan)
    assert uses() == expected, "the row is known"
    world.rows.sampled_on_host(plan.chunks.rows)
    world.sync(plan)
    assert uses() == expected | {104: 2, 8: 1}


def test_rows_that_ask_for_logprobs_say_how_many() -> None:
    world = World()
    world.add(1, params=SamplingParams(logprobs=3))
    world.add(2)
    world.add(3, params=SamplingParams(n=1, best_of=2))
    world.sync(world.plan(*(Chunk(number, 0, 5, 1) for number in (1, 2, 3))))
    assert world.rows.num_logprobs[[world.seqs[number].row for number in (1, 2, 3)]].tolist() == [3, -1, 0]


def test_only_tokens_that_the_device_has_not_sampled_are_sent() -> None:
    world = World()
    for number in range(3):
        world.add(number)
    world.rows.has_newest[world.seqs[1].row] = True  # until the row is entered anew
    decode = world.plan(*(Chunk(number, 4, 5, 1) for number in range(3)))
    world.sync(decode)
    assert world.rows.last_token_R.tolist() == [4, 104, 204, 0]
    assert world.rows.position_R.tolist() == [4, 4, 4, 0]
    world.rows.has_newest[[0, 1]] = True
    world.rows.last_token_R.zero_()
    world.sync(decode)
    assert world.rows.last_token_R.tolist() == [0, 0, 204, 0]


def test_all_that_an_arriving_row_needs_travels_as_one() -> None:
    world = World()
    world.add(1)
    plan = world.plan(Chunk(1, 4, 5, 1))
    with mock.patch.object(sending, "send", wraps=sending.send) as send:
        world.sync(plan)
        world.rows.has_newest[world.seqs[1].row] = True
        world.sync(plan)
    assert send.call_count == 1
    world.check()
    assert world.rows.last_token_R[world.seqs[1].row] == 104


def test_arrays_that_travel_together_begin_at_multiples_of_16_bytes() -> None:
    arrays: list[np.ndarray] = [
        np.arange(9, dtype=np.int32).reshape(3, 3), np.arange(6).reshape(1, 6), np.arange(7, 8)
    ]  # fmt: skip
    sent = send_together(arrays, CPU)
    for array, tensor in zip(arrays, sent, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array)) and tensor.is_contiguous()
        assert tensor.data_ptr() % 16 == sent[0].data_ptr() % 16
