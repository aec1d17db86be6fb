"""No sequence that decodes starves, and no prompt, whatever the policy, the budget and the load."""

from __future__ import annotations

import random
from typing import Any

import pytest

from infer.scheduling.policies import POLICIES
from tests.support.oracle import OracleWorld, prompt_of
from tests.support.thinned import thinned


class GapWatch:
    """Follows a world and holds every sequence to the bounds that the documents promise.

    A sequence that could decode is left out of at most max(max_decode_gap, ceil((R + P) / S) - 1) steps in a
    row, with R the most sequences that could decode in one of these steps and S = budget // E, where E is the
    most tokens that one of them computes in a step: 1, and more with drafts or for a search of that many
    beams. P is 0 where no prompt was there, 1 where one was, and the turns that `turn_len` tokens take if
    prompts are not cut. Prompts that have a place are left out of at most max_wait_steps steps in a row, or
    of ceil((R + P) / S) - 1 if that is more.
    """

    def __init__(self, world: OracleWorld, longest: int, turn_len: int = 1) -> None:
        self.world, self.num_served = world, world.scheduler.config.max_num_batched_tokens // longest
        self.turns_of_prompt = -(-turn_len // longest)
        self.left_out: dict[int, tuple[int, int]] = {}  # by sequence: steps in a row, the most that decode
        self.worst = self.without_prompts = self.worst_for_prompts = self.most_turns = 0

    def step(self) -> None:
        """Run one step of the world and look at who was left out of it."""
        scheduler = self.world.scheduler
        ready = {seq.seq_id for seq in scheduler.running if seq.num_pending == 1 + len(seq.drafts)}
        begun = {seq.seq_id for seq in scheduler.running if seq.num_pending > 1 + len(seq.drafts)}
        waits = scheduler.num_waiting > 0 and self._has_place()
        num_plans = len(self.world.plans)
        self.world.step()
        for plan in self.world.plans[num_plans:]:
            planned = {chunk.seq_id for chunk in plan.chunks}
            before, self.left_out = self.left_out, {}
            num_turns = len(ready) + (self.turns_of_prompt if begun or scheduler.num_waiting else 0)
            for seq_id in ready - planned - set(plan.preempted):
                steps, most = before.get(seq_id, (0, 0))
                steps, most = steps + 1, max(most, num_turns)
                gap = scheduler.config.max_decode_gap
                assert steps <= max(gap, -(-most // self.num_served) - 1), (
                    f"{seq_id} is left out {steps} times"
                )
                self.left_out[seq_id] = steps, most
                self.worst = max(self.worst, steps)
            self.without_prompts += 1
            if planned - ready or not (begun or waits):
                self.without_prompts = 0
            self.worst_for_prompts = max(self.worst_for_prompts, self.without_prompts)
            round_len = -(-max(self.most_turns, num_turns) // self.num_served)
            self.most_turns = max(self.most_turns, num_turns) if self.without_prompts else 0
            assert self.without_prompts <= max(scheduler.config.max_wait_steps, round_len - 1), "left out"

    def _has_place(self) -> bool:
        """Whether the next in the queue could be let in, with all that it will fork into."""
        scheduler = self.world.scheduler
        seq = scheduler._waiting.first(scheduler.step)
        group = seq.group.unfinished if seq.is_beam else [seq]
        return sum(member.num_slots for member in group) <= scheduler.num_free_places


@pytest.mark.parametrize("policy", POLICIES)
def test_forks_in_a_small_budget_take_turns_under_every_policy(policy: str) -> None:
    world = OracleWorld(
        max_num_batched_tokens=4, max_decode_gap=1, scheduler_policy=policy, num_blocks=600, context_len=120
    )
    world.add("a", prompt_of(3), n=8, max_tokens=70)
    watch = GapWatch(world, longest=1)
    for _ in range(120):
        watch.step()
    assert watch.worst == 1
    world.run()
    assert world.verify() == 1


@pytest.mark.parametrize(("policy", "chunked"), thinned(POLICIES, (True, False), keep=2))
def test_a_prompt_has_its_turn_while_forks_fill_every_step(policy: str, chunked: bool) -> None:
    world = OracleWorld(
        max_num_batched_tokens=4, max_decode_gap=1, max_wait_steps=10, scheduler_policy=policy,
        use_chunked_prefill=chunked, num_blocks=900, context_len=320, max_batch_size=12,
    )  # fmt: skip
    world.add("a", prompt_of(3), n=8, max_tokens=80)
    watch = GapWatch(world, longest=1, turn_len=1 if chunked else 4)
    for _ in range(20):
        watch.step()
    world.add("b", prompt_of(4, 1), max_tokens=5)
    for _ in range(60):
        watch.step()
    assert all(seq.request_id == "a" for seq in world.scheduler.sequences()), "b is done"
    assert watch.worst_for_prompts == 10
    assert watch.worst == 2
    world.run()
    assert world.verify() == 2


@pytest.mark.parametrize(("policy", "seed"), thinned(POLICIES, range(9), keep=5))
def test_a_sequence_that_decodes_is_left_out_no_longer_than_the_bound(policy: str, seed: int) -> None:
    """Random budgets, gaps, forks, searches, drafts, priorities and floods of prompts; enough memory."""
    draw = random.Random(seed)
    kind = ("plain", "drafts", "beams")[seed % 3]
    budget = draw.choice((2, 3, 4, 5, 8, 13))
    chunked = draw.random() < 0.7
    longest = {"plain": 1, "drafts": min(4, budget), "beams": min(3, budget)}[kind]
    world = OracleWorld(
        scheduler_policy=policy,
        max_num_batched_tokens=budget,
        max_decode_gap=draw.choice((1, 2, 3, 8)),
        max_wait_steps=draw.choice((3, 10, 30)),
        max_batch_size=draw.choice((4, 9, 16)),
        use_chunked_prefill=chunked,
        prefill_chunk_size=draw.choice((2, 5, 64)),
        num_blocks=1500,
        audit_every=5,
    )
    watch = GapWatch(world, longest, turn_len=1 if chunked else budget)
    num_requests = 0
    for _ in range(80):
        if num_requests < 16 and draw.random() < 0.3:
            length = draw.randint(1, 24 if chunked else budget)
            fields: dict[str, Any] = {
                "priority": draw.randint(-3, 3),
                "deadline": draw.choice((None, draw.random())),
            }
            n, max_tokens = draw.choice((1, 1, 2, 4)), draw.randint(1, 30)
            params: dict[str, Any] = {"n": n}
            if kind == "beams" and draw.random() < 0.3:
                params = {"n": longest, "use_beam_search": True, "temperature": 0.0}
            world.add(
                str(num_requests),
                prompt_of(length, num_requests),
                request=fields,
                max_tokens=max_tokens,
                **params,
            )
            num_requests += 1
        if kind == "drafts":
            for seq in list(world.scheduler.running):
                is_forked = seq.num_tokens > seq.num_prompt
                if is_forked and seq.num_pending == 1 and not seq.drafts and draw.random() < 0.3:
                    world.scheduler.propose(seq, [draw.randrange(900) for _ in range(longest - 1)])
        watch.step()
    world.run()
    assert world.verify() == num_requests
