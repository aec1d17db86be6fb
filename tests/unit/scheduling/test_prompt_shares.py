"""A long prompt shares its steps: newcomers much shorter go beside it, and it keeps half of every step."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.policies import SLOW_MACHINE
from infer.bench.metrics import percentile
from infer.bench.simulated import run_simulated
from infer.bench.traces import draw_trace, to_workload
from infer.config.profiles.generic import GENERIC
from infer.config.profiles.profile import SchedulingProfile
from infer.config.settings import EngineConfig
from infer.scheduling.policies import POLICIES
from tests.support.oracle import OracleWorld, prompt_of

Lengths = dict[str, int]


def make_world(**knobs: Any) -> OracleWorld:
    defaults: dict[str, Any] = {"num_blocks": 400, "context_len": 400, "max_num_batched_tokens": 16}
    return OracleWorld(**(defaults | knobs))


def step(world: OracleWorld) -> Lengths:
    """One step; how many tokens it computed of each request."""
    names = {seq.seq_id: seq.group.request.request_id for seq in world.scheduler.sequences()}
    world.step()
    return {names[chunk.seq_id]: chunk.stop - chunk.start for chunk in world.plans[-1].chunks}


def test_a_newcomer_has_its_first_token_in_the_next_step() -> None:
    world = make_world()
    world.add("long", prompt_of(200), max_tokens=1)
    assert step(world) == {"long": 16}
    world.add("short", prompt_of(1, start=2), max_tokens=1)
    assert step(world) == {"short": 1, "long": 15}, "what the newcomer does not need is the long one's"
    world.run()
    assert world.verify() == 2


def test_the_long_prompt_keeps_half_of_every_step_however_many_come() -> None:
    world = make_world()
    world.add("long", prompt_of(200), max_tokens=1)
    shares = [step(world)["long"]]
    for number in range(60):
        for which in range(3):  # more than half a step in each step
            world.add(f"{number}.{which}", prompt_of(6, start=3 + number * 3 + which), max_tokens=1)
        if ("long", 0) in world.finished:
            break
        shares.append(step(world).get("long", 0))
    assert sum(shares) == 200 and min(shares[:-1]) >= 8
    assert len(shares) <= 2 * 200 / 16 + 1, "at most twice as long as alone"
    world.run()
    world.verify()


def test_the_shortest_of_those_begun_goes_on_first() -> None:
    world = make_world()
    world.add("long", prompt_of(200), max_tokens=1)
    step(world)
    world.add("middle", prompt_of(40, start=2), max_tokens=1)
    assert step(world) == {"middle": 8, "long": 8}
    world.add("short", prompt_of(5, start=3), max_tokens=1)
    assert step(world) == {"short": 5, "middle": 3, "long": 8}
    world.run()
    assert world.verify() == 3


def test_prompts_of_about_one_length_are_computed_one_after_the_other() -> None:
    """To share among equals would only make the first ones late, and lose what they have in common."""
    world = make_world()
    for name in "abc":
        world.add(name, [*prompt_of(40), ord(name)], max_tokens=1)
    steps = [step(world) for _ in range(3)]
    assert steps == [{"a": 16}, {"a": 16}, {"a": 9, "b": 7}]
    world.run()
    hits = {name: world.finished[name, 0].num_cached for name in "abc"}
    assert hits == {"a": 0, "b": 32, "c": 40}


def test_newcomers_come_in_strictly_in_order() -> None:
    world = make_world()
    world.add("a", prompt_of(200), max_tokens=1)
    step(world)
    for number, (name, length) in enumerate({"b": 190, "c": 180, "d": 1}.items()):
        world.add(name, prompt_of(length, start=2 + number), max_tokens=1)
    begun = [list(step(world)) for _ in range(3)]
    assert begun == [["b", "a"], ["c", "a"], ["d", "a"]], "a step for each that the short one is behind"
    world.run()
    assert world.verify() == 4


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_admits_in_its_own_order(policy: str) -> None:
    rng, world = random.Random(policy), make_world(scheduler_policy=policy)
    world.add("first", prompt_of(390), max_tokens=1, request={"priority": 1, "deadline": 50.0})
    step(world)
    for number in range(30):
        fields = {"priority": rng.randrange(3), "deadline": float(rng.randrange(100))}
        world.add(str(number), prompt_of(rng.choice((1, 5, 60)), start=number), max_tokens=1, request=fields)
    waiting = [seq for seq in world.scheduler.sequences() if not seq.is_running]
    wanted = [seq.request_id for seq in sorted(waiting, key=lambda seq: seq.sort_key)]
    admitted: list[str] = []
    for _ in range(400):
        if not world.engine.has_work:
            break
        new = [name for name in step(world) if name != "first" and name not in admitted]
        admitted += sorted(new, key=wanted.index)
    assert admitted == wanted
    assert world.verify() == 31


def test_less_urgent_ones_do_not_share_and_more_urgent_ones_do() -> None:
    world = make_world(scheduler_policy="priority")
    world.add("long", prompt_of(200), max_tokens=1, request={"priority": 1})
    step(world)
    world.add("later", prompt_of(1, start=2), max_tokens=1, request={"priority": 2})
    assert step(world) == {"long": 16}
    world.add("urgent", prompt_of(150, start=3), max_tokens=1, request={"priority": 0})
    assert step(world) == {"urgent": 8, "long": 8}, "long as it is"
    assert step(world) == {"urgent": 16}, "now it is the first"
    world.run()
    assert world.verify() == 3


@pytest.mark.parametrize("knobs", [{"max_prefill_chunks_per_step": 1}, {"max_num_batched_tokens": 1}])
def test_where_a_step_has_one_chunk_or_one_token_steps_take_turns(knobs: dict[str, int]) -> None:
    world = make_world(**(knobs | {"max_batch_size": 8}))
    world.add("long", prompt_of(60), max_tokens=1)
    step(world)
    for name in range(4):
        world.add(str(name), prompt_of(1, start=2 + name), max_tokens=1)
    served = [list(step(world)) for _ in range(4)]
    assert all(len(names) == 1 for names in served)
    assert [names == ["long"] for names in served] in ([True, False] * 2, [False, True] * 2)
    world.run()
    assert world.verify() == 5


def test_two_chunks_a_step_are_the_first_ones_and_the_shortest_ones() -> None:
    world = make_world(max_prefill_chunks_per_step=2)
    world.add("long", prompt_of(200), max_tokens=1)
    step(world)
    for name in "ab":
        world.add(name, prompt_of(2, start=ord(name)), max_tokens=1)
    assert step(world) == {"a": 2, "long": 14}
    assert step(world) == {"b": 2, "long": 14}


def test_a_simulation_shows_what_newcomers_gain() -> None:
    workload = to_workload("newcomers", draw_trace("newcomers", num_requests=50, seed=0))
    config = EngineConfig.from_knobs(num_blocks=256, max_num_batched_tokens=512)

    def ttft(is_long: bool, profile: SchedulingProfile) -> float:
        traces = run_simulated(workload, config, SLOW_MACHINE, profile).traces
        kept = [
            trace.ttft
            for trace, session in zip(traces, workload.sessions, strict=True)
            if (session.turns[0].prompt_len > 1) == is_long
        ]
        return percentile(kept, 95)

    shared, shared_long = (ttft(is_long, GENERIC.scheduling) for is_long in (False, True))
    whole = replace(GENERIC.scheduling, first_share=1)  # the first prompt takes whole steps
    alone, alone_long = (ttft(is_long, whole) for is_long in (False, True))
    assert shared < 0.5 * alone
    assert shared_long < 1.05 * alone_long
