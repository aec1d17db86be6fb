"""Each policy is an order and two answers; the unknown one is refused by name."""

from __future__ import annotations

import random

import pytest

from infer.config.settings import knob_table
from infer.scheduling.policies import POLICIES
from infer.scheduling.request import Request
from infer.scheduling.sequence import Sequence, SequenceGroup
from tests.support.oracle import OracleWorld, prompt_of


def make_seq(arrival: int, *, priority: int = 0, deadline: float | None = None) -> Sequence:
    request = Request(request_id=str(arrival), prompt=(1,), priority=priority, deadline=deadline)
    seq = Sequence(arrival, SequenceGroup(request, max_total=9, stop_ids=(), seed=0), 0, [1])
    seq.arrival = arrival
    return seq


def order(policy: str, seqs: list[Sequence]) -> list[int]:
    return [seq.seq_id for seq in sorted(seqs, key=POLICIES[policy].key)]


@pytest.mark.parametrize("policy", ["fcfs", "prefill_first", "decode_round_robin"])
def test_arrival_decides_whatever_the_request_says(policy: str) -> None:
    seqs = [make_seq(2, priority=-5, deadline=0.1), make_seq(1), make_seq(3, priority=-9)]
    assert order(policy, seqs) == [1, 2, 3]


def test_the_smaller_priority_goes_first_and_then_the_older() -> None:
    seqs = [make_seq(1, priority=2), make_seq(2, priority=-1), make_seq(3, priority=2), make_seq(4)]
    assert order("priority", seqs) == [2, 4, 1, 3]


def test_the_nearest_deadline_goes_first_and_none_goes_last() -> None:
    seqs = [make_seq(1), make_seq(2, deadline=9.5), make_seq(3, deadline=0.5), make_seq(4, deadline=9.5)]
    assert order("deadline", seqs) == [3, 2, 4, 1]


@pytest.mark.parametrize("policy", POLICIES)
def test_no_two_sequences_are_equal(policy: str) -> None:
    seqs = [make_seq(arrival) for arrival in range(20)]
    assert len({POLICIES[policy].key(seq) for seq in seqs}) == 20
    shuffled = random.Random(1).sample(seqs, 20)
    assert order(policy, shuffled) == order(policy, seqs)


def test_one_policy_puts_prompts_first_and_one_goes_round() -> None:
    assert [name for name in POLICIES if POLICIES[name].prompts_first] == ["prefill_first"]
    assert [name for name in POLICIES if POLICIES[name].rotates] == ["decode_round_robin"]


def test_the_knob_knows_every_policy() -> None:
    assert set(knob_table()["scheduler_policy"].choices) == set(POLICIES)


def served(policy: str, num_steps: int) -> list[list[int]]:
    """Which sequences of a request that has forked decode, where a step has tokens for two of three."""
    world = OracleWorld(max_num_batched_tokens=2, max_batch_size=3, scheduler_policy=policy)
    world.add("a", prompt_of(1), n=3, max_tokens=30)
    world.step()
    first = world.scheduler.running[0].seq_id
    for _ in range(num_steps):
        world.step()
    steps = [[chunk.seq_id - first for chunk in plan.chunks] for plan in world.plans[-num_steps:]]
    world.run()
    assert world.verify() == 1, "all are served in the end"
    return steps


def test_without_room_for_all_the_oldest_decode_or_the_turn_goes_round() -> None:
    assert served("fcfs", 4) == [[0, 1]] * 4
    assert served("decode_round_robin", 4) == [[0, 1], [2, 0], [1, 2], [0, 1]]
