"""The same step again, one token on: when it is, when it is not any more, and what others see of it.

That plans, tokens and books are the same with and without is tested with random traffic in tests/stress.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infer import LLM, SamplingParams
from infer.scheduling.lockstep import ALIKE_PLANS, LaterChunks, Lockstep
from infer.scheduling.plan import Chunk, StepPlan
from scripts.make_checkpoint import make_checkpoint
from tests.support.oracle import OracleWorld, prompt_of

CHUNKS = (Chunk(3, 8, 9, 1), Chunk(5, 20, 21, 1))


def make_world(**knobs: Any) -> OracleWorld:
    world = OracleWorld(**({"block_size": 4, "num_blocks": 60} | knobs))
    for number, name in enumerate("abc"):
        world.add(name, prompt_of(3 + number, start=number), max_tokens=30)
    return world


def is_later(plan: StepPlan) -> bool:
    return isinstance(plan.chunks, LaterChunks)


def test_chunks_some_tokens_on_are_like_any_others() -> None:
    later, written = LaterChunks(CHUNKS, 4), (Chunk(3, 12, 13, 1), Chunk(5, 24, 25, 1))
    assert later[1] == written[1]
    assert later._made is None, "to look at one is no reason to write out all"
    assert later == written
    assert written == later
    assert later == LaterChunks(CHUNKS, 4) != LaterChunks(CHUNKS, 5)
    assert StepPlan(7, later) == StepPlan(7, written)
    assert (len(later), list(later), later[1:], hash(later)) == (2, list(written), written[1:], hash(written))
    assert repr(later) == repr(written)
    assert StepPlan(7, later).num_tokens == 2


def test_a_plan_that_comes_again_and_again_is_said_by_the_first() -> None:
    world = make_world()
    world.run()
    assert [is_later(plan) for plan in world.plans[: ALIKE_PLANS + 4]] == [False] * (ALIKE_PLANS + 2) + [
        True
    ] * 2
    firsts = {id(plan.chunks.first) for plan in world.plans if isinstance(plan.chunks, LaterChunks)}
    assert len(firsts) == 1, "all three end together"
    assert world.verify() == 3


def test_the_counts_of_every_step_are_there_at_once() -> None:
    world = make_world()
    for _ in range(ALIKE_PLANS + 6):
        world.engine.step()
        counts = [(seq.num_tokens, seq.num_computed) for seq in world.scheduler.running]
        assert counts == [(len(seq.tokens), len(seq.tokens) - 1) for seq in world.scheduler.running]
    assert is_later(world.plans[-1])


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.9, "seed": 11},
        {"temperature": 0.9, "top_p": 0.9, "seed": 11},
        {"temperature": 0.0, "min_tokens": 12, "stop_token_ids": tuple(range(0, 400, 2))},
        {"temperature": 0.9, "seed": 3, "repetition_penalty": 1.3, "logprobs": 2},
    ],
    ids=["drawn", "top-p", "at least", "penalised"],
)
def test_a_model_draws_the_same_tokens_without_it(
    params: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is drawn depends on a token's place: whoever computes it reads the counts of this very step."""
    make_checkpoint("llama", tmp_path)
    asked = SamplingParams(max_tokens=24, ignore_eos=True, **params)
    prompts = [[(7 * i + j) % 200 + 10 for j in range(3 + 5 * i)] for i in range(3)]

    def tokens() -> list[list[int]]:
        llm = LLM(str(tmp_path), device="cpu", dtype="float32")
        return [answer.token_ids for answer in llm.generate(prompts, asked)]

    together = tokens()
    monkeypatch.setattr("infer.scheduling.lockstep.ALIKE_PLANS", 1000)
    assert together == tokens()


@pytest.mark.parametrize("steps_ahead", [0, 3])
@pytest.mark.parametrize("what", ["comes", "leaves", "ends", "is preempted", "fails"])
def test_it_ends_when_somebody_begins_or_ceases_to_run(what: str, steps_ahead: int) -> None:
    world = make_world(steps_ahead=steps_ahead, num_blocks=12 if what == "is preempted" else 60)
    if what == "ends":
        world.add("short", prompt_of(4, start=9), max_tokens=ALIKE_PLANS + 8)
    for _ in range(ALIKE_PLANS + 6):
        world.step()
    assert any(map(is_later, world.plans))
    if what == "comes":
        world.add("new", prompt_of(4, start=9), max_tokens=3)
    elif what == "leaves":
        world.abort("b")
    elif what == "fails":
        world.runner.fail_at = world.runner.num_steps + 2
    changes = len(world.plans) + steps_ahead
    world.run()
    if what == "fails":  # all of them end with it, and nothing is left of their lockstep
        world.aborted |= set("abc")
        for name in "de":
            world.add(name, prompt_of(5, start=ord(name)), max_tokens=20)
        world.run()
    kinds = [is_later(plan) for plan in world.plans[changes:]]
    assert False in kinds
    assert True in kinds[kinds.index(False) :], "who is there decodes on in one of their own"
    assert world.verify() >= 2
    assert bool(world.scheduler.num_preemptions) is (what == "is preempted")
    world.check_idle()


@pytest.mark.parametrize("knobs", [{"scheduler_policy": "decode_round_robin"}, {"kv_cache_backend": "naive"}])
def test_where_the_next_plan_differs_there_is_none(knobs: dict[str, Any]) -> None:
    world = make_world(**knobs)
    world.run()
    assert not any(map(is_later, world.plans))
    assert world.verify() == 3


def test_who_waits_for_a_place_does_not_end_it() -> None:
    """All places are taken: nobody can come before somebody goes."""
    world = make_world(max_batch_size=3)
    world.add("waits", prompt_of(4, start=9), max_tokens=3)
    for _ in range(ALIKE_PLANS + 6):
        world.step()
    assert not world.seq("waits").is_running
    assert is_later(world.plans[-1])
    world.run()
    assert world.verify() == 4


def test_without_one_there_is_nothing_to_repeat() -> None:
    lockstep = Lockstep()
    assert lockstep.next_chunks(lambda seq, num_tokens: True) is None
    assert not lockstep.advance(CHUNKS)
    lockstep.end()


def test_plans_in_between_that_were_not_alike_begin_the_count_anew() -> None:
    """And nobody is kept alive by a count, once all are gone."""
    world = make_world()
    for _ in range(ALIKE_PLANS):
        world.step()
    assert world.scheduler._lockstep._num_alike
    world.add("new", prompt_of(9, start=9), max_tokens=3)
    world.step()
    assert not world.scheduler._lockstep._num_alike
    world.run()
    assert not world.scheduler._lockstep._last
