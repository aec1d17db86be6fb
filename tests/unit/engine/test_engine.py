"""The engine step by step: whatever happens to a request, at whatever stage, the books balance.

`reach(stage)` brings a request "t" to a stage of its life, beside an older one that decodes. Then
something happens to it, and in the end every request must have got the tokens of the oracle.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from infer.cache.layout import TransferKind
from infer.engine.engine import MAX_EMPTY_STEPS
from infer.errors import EngineError, QueueFull, RequestError
from infer.execution.device import PendingStep, StepResult
from infer.execution.order import StepMasks, StepOrder
from infer.sampling.params import NO_TOKEN, SamplingParams
from infer.scheduling.request import Request
from tests.support.oracle import OracleWorld, expected_output, prompt_of

THIEF = -1  # a sequence of no request: it takes the blocks that a test wants to be gone

# (sampling parameters of "t", when it is there)
STAGES: dict[str, tuple[dict[str, Any], Callable[[OracleWorld], bool]]] = {
    "waiting": ({}, lambda world: True),
    "mid-chunk": ({}, lambda world: 0 < world.seq("t").num_computed < 10),
    "prompt done": ({}, lambda world: world.seq("t").num_output == 1),
    "decoding": ({}, lambda world: world.seq("t").num_output == 3),
    "before its last token": ({}, lambda world: world.seq("t").num_output == 7),
    "n, before the fork": ({"n": 3}, lambda world: world.seq("t").num_computed > 0),
    "just forked": ({"n": 3}, lambda world: len(world.seqs("t")) == 3),
    "forks apart": ({"n": 3}, lambda world: world.seqs("t")[-1].num_output == 3),
    "beams, before the first": ({"beams": 3}, lambda world: world.seq("t").num_computed > 0),
    "beams midway": ({"beams": 3}, lambda world: world.seqs("t")[-1].num_output == 3),
    "beams before the last token": ({"beams": 3}, lambda world: world.seqs("t")[-1].num_output == 7),
}
all_stages = pytest.mark.parametrize("stage", STAGES)
modes = pytest.mark.parametrize("preemption", ["recompute", "swap"])
block_sizes = pytest.mark.parametrize("block_size", [1, 4])


def make_world(*, block_size: int = 4, **knobs: Any) -> OracleWorld:
    defaults: dict[str, Any] = {"num_host_blocks": 80, "prefill_chunk_size": 4, "preemption": "recompute"}
    return OracleWorld(block_size=block_size, num_blocks=240 // block_size, **(defaults | knobs))


def reach(stage: str, **knobs: Any) -> OracleWorld:
    """A world whose request "t" has come to a stage, beside an older one that decodes."""
    world = make_world(**knobs)
    world.add("old", prompt_of(5), max_tokens=40)
    step_until(world, lambda world: world.seq("old").num_output == 2)
    params, has_come = STAGES[stage]
    add_target(world, params)
    step_until(world, has_come)
    return world


def step_until(world: OracleWorld, has_come: Callable[[OracleWorld], bool]) -> None:
    for _ in range(100):
        if has_come(world):
            return
        world.step()
    raise AssertionError(f"it never came: {world.scheduler.sequences()}")


def add_target(world: OracleWorld, params: dict[str, Any], request_id: str = "t") -> None:
    params = dict(params)
    if width := params.pop("beams", None):
        params |= {"use_beam_search": True, "temperature": 0.0, "n": width}
    world.add(request_id, prompt_of(10, start=2), seed=5, **params)


@contextmanager
def stolen_blocks(world: OracleWorld) -> Iterator[None]:
    """While this lasts no block is free."""
    world.pool.match_prefix(THIEF, ())
    world.pool.reserve(THIEF, world.pool.num_free_blocks * world.pool.block_size, 0)
    assert world.pool.num_free_blocks == 0
    try:
        yield
    finally:
        world.pool.release(THIEF)


def preempt_target(world: OracleWorld) -> None:
    """Step in want of blocks until every sequence of "t" is preempted."""
    with stolen_blocks(world):
        step_until(world, lambda world: not any(seq.is_running for seq in world.seqs("t")))


@all_stages
def test_abort_gives_everything_back_at_any_stage(stage: str) -> None:
    world = reach(stage)
    outputs = world.engine.abort("t")

    world.check_books()
    width = STAGES[stage][0].get("n") or STAGES[stage][0].get("beams") or 1
    assert sorted(output.index for output in outputs) == list(range(width))
    assert {output.finish_reason for output in outputs} == {"abort"}
    assert world.seqs("t") == []
    assert world.engine.abort("t") == []
    world.aborted.add("t")
    add_target(world, STAGES[stage][0], "again")
    world.run()
    assert world.verify() == 2


@all_stages
@modes
@block_sizes
def test_preemption_changes_no_token_at_any_stage(stage: str, preemption: str, block_size: int) -> None:
    world = reach(stage, preemption=preemption, block_size=block_size)
    computed = {seq.seq_id: seq.num_computed for seq in world.seqs("t")}

    preempt_target(world)

    for seq in world.seqs("t"):
        assert seq.state == "WAITING"
        assert seq.is_swapped == (preemption == "swap" and stage != "waiting")
        assert seq.num_computed >= computed[seq.seq_id] if seq.is_swapped else seq.num_computed == 0
    world.run()
    assert world.verify() == 2


@modes
@pytest.mark.parametrize("stage", ["mid-chunk", "decoding", "forks apart", "beams midway"])
def test_abort_while_preempted_gives_everything_back(stage: str, preemption: str) -> None:
    world = reach(stage, preemption=preemption)
    preempt_target(world)

    world.abort("t")

    assert world.pool.usage().num_free_host_blocks == len(world.runner.host)
    world.run()
    assert world.verify() == 1


@modes
def test_a_sequence_may_be_preempted_again_and_again(preemption: str) -> None:
    world = reach("just forked", preemption=preemption, block_size=1)
    for _ in range(3):
        preempt_target(world)
        step_until(world, lambda world: any(seq.is_running for seq in world.seqs("t")))
    world.run()
    assert world.scheduler.num_preemptions >= 6
    assert world.verify() == 2


def test_what_does_not_fit_into_host_memory_is_recomputed() -> None:
    world = reach("forks apart", preemption="swap", num_host_blocks=4)
    preempt_target(world)
    assert {seq.is_swapped for seq in world.seqs("t")} == {True, False}
    world.run()
    assert world.verify() == 2


@all_stages
def test_a_second_request_with_the_same_prompt_may_come_at_any_stage(stage: str) -> None:
    world = reach(stage, block_size=2)
    add_target(world, {}, "twin")
    world.run()
    assert world.verify() == 3


@pytest.mark.parametrize("stage", ["just forked", "decoding", "beams midway"])
def test_what_a_request_has_computed_serves_the_next_with_the_same_start(stage: str) -> None:
    world = reach(stage)
    add_target(world, {}, "twin")
    world.run()
    assert world.finished["twin", 0].num_cached == 8, "two whole blocks of the ten tokens"
    assert world.verify() == 3


def test_a_request_aborted_halfway_leaves_what_it_computed_in_the_cache() -> None:
    world = reach("mid-chunk")
    num_computed = world.seq("t").num_computed
    world.abort("t")
    add_target(world, {}, "next")
    world.run()
    assert world.finished["next", 0].num_cached == num_computed == 4


def test_only_requests_with_the_same_salt_share_what_is_cached() -> None:
    world = make_world()
    num_cached = []
    for number, salt in enumerate(("", "tenant a", "tenant b", "tenant a", "")):
        world.add(str(number), prompt_of(10), request={"cache_salt": salt})
        world.run()
        num_cached.append(world.finished[str(number), 0].num_cached)
    assert num_cached == [0, 0, 0, 8, 8]


@pytest.mark.parametrize("block_size", [1, 2, 8])
def test_a_prompt_of_whole_blocks_that_is_fully_cached_computes_one_token(block_size: int) -> None:
    world = make_world(block_size=block_size)
    for name in ("first", "second"):
        world.add(name, prompt_of(8))
        world.run()
    assert world.finished["second", 0].num_cached == 7
    first_chunk = world.plans[-8].chunks[0]
    assert (first_chunk.start, first_chunk.stop) == (7, 8)
    assert world.verify() == 2


@pytest.mark.parametrize("max_tokens", [1, 2])
@pytest.mark.parametrize("params", [{}, {"n": 3}, {"beams": 3}], ids=["one", "forks", "beams"])
def test_a_request_may_finish_with_its_first_tokens(params: dict[str, Any], max_tokens: int) -> None:
    world = make_world()
    add_target(world, params | {"max_tokens": max_tokens})
    world.run()
    assert world.verify() == 1


def test_one_fork_may_stop_with_its_first_token_while_the_others_go_on() -> None:
    world = make_world()
    stop = expected_output(prompt_of(10, start=2), 1, seed=5, index=1)
    add_target(world, {"n": 3, "stop_token_ids": stop})
    step_until(world, lambda world: len(world.seqs("t")) == 2)
    assert [seq.index for seq in world.seqs("t")] == [0, 2]
    assert world.finished["t", 1].stop_reason == stop[0]
    world.run()
    assert world.verify() == 1


def test_the_models_own_end_is_no_stop_reason() -> None:
    prompt = prompt_of(10, start=2)
    eos = expected_output(prompt, 3, seed=5)[-1]
    world = make_world(eos_ids=(eos,))
    add_target(world, {})
    add_target(world, {"ignore_eos": True}, "ignoring")
    world.run()
    assert world.finished["t", 0].finish_reason == "stop"
    assert world.finished["t", 0].stop_reason is None
    assert world.finished["ignoring", 0].finish_reason == "length"
    assert world.verify() == 2


def test_one_of_n_may_be_aborted() -> None:
    world = reach("forks apart")
    (output,) = world.engine.abort("t", 1)
    assert (output.index, output.finish_reason) == (1, "abort")
    world.check_books()
    world.run()
    for index in (0, 2):
        assert world.tokens["t", index] == expected_output(prompt_of(10, start=2), 8, seed=5, index=index)
    assert ("t", 1) not in world.finished


@pytest.mark.parametrize("stage", ["n, before the fork", "beams midway"])
def test_a_sequence_that_does_not_exist_by_itself_cannot_be_aborted(stage: str) -> None:
    world = reach(stage)
    with pytest.raises(EngineError, match="abort the whole request"):
        world.engine.abort("t", 1)
    world.run()
    assert world.verify() == 2


@all_stages
@pytest.mark.parametrize("fails_early", [False, True])
def test_a_step_that_raises_ends_every_output_of_its_requests(stage: str, fails_early: bool) -> None:
    world = reach(stage)
    world.add("late", prompt_of(6, start=9))  # still waiting when the step is planned, or in it with 4 tokens
    world.runner.fail_at = world.runner.num_steps + 1
    world.runner.fails_early = fails_early

    outputs = world.step()

    failed = {output.request_id for output in outputs}
    assert failed == {"old", "t", "late"}
    assert {output.finish_reason for output in outputs} == {"error"}
    assert {output.error for output in outputs} == {f"RuntimeError in step {world.scheduler.step}"}
    params = world.requests["t"].params
    assert sorted(o.index for o in outputs if o.request_id == "t") == list(range(params.num_sequences))
    assert not world.engine.has_work
    add_target(world, STAGES[stage][0], "again")
    world.run()
    world.aborted |= failed
    assert world.verify() == 1


@pytest.mark.parametrize("stage", ["decoding", "beams midway"])
def test_who_was_just_swapped_out_survives_a_failed_step(stage: str) -> None:
    """Its blocks may never have reached host memory, so it must not trust them."""
    world = reach(stage, preemption="swap", block_size=1)
    world.runner.fails_early = True
    world.runner.fail_at = world.runner.num_steps + 1  # in which "old" takes the blocks of "t"
    preempt_target(world)
    assert ("old", 0) in world.finished
    assert not any(seq.is_swapped for seq in world.seqs("t"))
    assert not world.scheduler.running, "those who lost their blocks wait, and have no row"
    world.run()
    world.aborted.add("old")
    assert world.verify() == 1


def test_an_interrupt_ends_the_requests_of_its_step_and_no_others() -> None:
    """Ctrl-C may come before a block was moved; sequences without one in the plan go on as before."""
    world = reach("decoding", preemption="swap", block_size=1)
    run = world.runner.run

    def interrupted(order: StepOrder) -> PendingStep:
        if any(kind == "swap_out" for kind, _, _ in order.moves()):
            world.runner.run = run  # type: ignore[method-assign]
            raise KeyboardInterrupt
        return run(order)

    world.runner.run = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        preempt_target(world)
    world.check_books()
    assert world.seqs("old") == []
    assert not world.seq("t").is_swapped
    assert ("old", 0) not in world.finished
    world.step()
    assert world.finished["old", 0].finish_reason == "error", "the next step reports what the last could not"
    world.run()
    world.aborted.add("old")
    assert world.verify() == 1


def test_beams_that_were_just_swapped_in_survive_a_failed_step() -> None:
    world = reach("beams midway", preemption="swap", block_size=1)
    preempt_target(world)
    world.runner.fails_early = True
    world.runner.fail_at = world.runner.num_steps + 1
    world.step()  # "old" computes a token; the beams come in and wait for the next step
    assert ("old", 0) in world.finished
    assert len(world.seqs("t")) == 3
    world.run()
    world.aborted.add("old")
    assert world.verify() == 1


def test_a_failed_step_counts_nothing_as_computed() -> None:
    world = make_world()
    world.add("a", prompt_of(10))
    world.runner.fail_at = 1
    world.step()
    assert world.pool.usage().num_cached == 0
    assert world.plans == []


def test_logits_without_a_token_end_their_own_request_only() -> None:
    world = reach("forks apart")
    compute = world.runner.compute

    def compute_with_a_broken_row(order: StepOrder, masks: StepMasks) -> StepResult:
        result = compute(order, masks)
        for place, seq in enumerate(map(world.runner._sequence, order.rows)):
            if seq.group.request.request_id == "t" and seq.index == 1:
                result.ids[place] = (NO_TOKEN,)
                result.logprobs[place] = (None,)
        return result

    world.runner.compute = compute_with_a_broken_row  # type: ignore[method-assign]
    outputs = world.step()

    failed = [output for output in outputs if output.request_id == "t"]
    assert sorted(output.index for output in failed) == [0, 1, 2]
    start = "the logits of this request are not finite: the weights are probably damaged"
    assert all((output.error or "").startswith(start) for output in failed)
    world.run()
    world.aborted.add("t")
    assert world.verify() == 1


def test_a_scheduler_that_finds_no_room_is_a_fault_and_not_an_endless_wait(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = make_world(use_chunked_prefill=False, max_num_batched_tokens=8)  # build.py refuses this
    world.add("long", prompt_of(9), n=2)
    outputs = [output for _ in range(MAX_EMPTY_STEPS) for output in world.step()]
    assert [(output.index, output.finish_reason) for output in outputs] == [(0, "error"), (1, "error")]
    assert "no progress" in caplog.text
    world.add("short", prompt_of(5))
    world.run()
    world.aborted.add("long")
    assert world.verify() == 1


def test_prompt_logprobs_come_once_however_the_prompt_was_computed() -> None:
    world = reach("mid-chunk")
    world.add("p", prompt_of(18, start=2), prompt_logprobs=0)
    step_until(world, lambda world: world.seq("p").num_computed > 0)
    with stolen_blocks(world):
        step_until(world, lambda world: not world.seq("p").is_running)
    outputs = [output for _ in range(8) for output in world.step()]
    first = next(output for output in outputs if output.request_id == "p")
    assert first.num_cached == 0, "the prefix cache has no logits"
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    assert [row.logprob for row in first.prompt_logprobs[1:] if row] == [-float(p) for p in range(1, 18)]
    world.run()
    assert world.verify() == 3


def test_n_sequences_share_the_blocks_of_their_prompt() -> None:
    world = make_world(block_size=4, prefill_chunk_size=64)
    world.add("t", prompt_of(18), n=4, max_tokens=3)
    world.step()
    assert world.pool.usage().num_used == 5, "18 tokens in five blocks, for all four"
    world.step()
    assert world.pool.usage().num_used == 4 + 4, "each has its own copy of the block it writes into"
    assert world.runner.num_transfers[TransferKind.COPY] == 3
    world.run()
    assert world.verify() == 1


def test_beams_share_the_blocks_of_their_prompt() -> None:
    world = make_world(block_size=4, prefill_chunk_size=64)
    world.add("t", prompt_of(18), n=4, max_tokens=6, use_beam_search=True, temperature=0.0)
    most = 0
    while world.engine.has_work:
        world.step()
        most = max(most, world.pool.usage().num_used)
    assert most <= 4 + 4 * 2, "four whole blocks of the prompt once, two more for each beam"
    assert world.verify() == 1


def test_a_request_that_can_never_fit_is_refused_and_the_queue_goes_on() -> None:
    world = OracleWorld(num_blocks=8, block_size=4, context_len=200)
    world.add("a", prompt_of(10))
    with pytest.raises(RequestError, match="the whole cache holds 32"):
        world.add("whale", prompt_of(40))
    world.add("b", prompt_of(12, start=3))
    world.run()
    assert world.verify() == 2


@pytest.mark.parametrize("policy", ["priority", "deadline"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"priority": 10**400}, "priority"),
        ({"priority": -(2**63) - 1}, "priority"),
        ({"deadline": float("nan")}, "deadline"),
        ({"deadline": float("inf")}, "deadline"),
    ],
)
def test_what_no_order_can_hold_is_refused_and_leaves_nothing(
    policy: str, fields: dict[str, Any], param: str
) -> None:
    world = make_world(scheduler_policy=policy)
    with pytest.raises(RequestError, match=f"{param} must be") as caught:
        world.add("x", prompt_of(5), request=fields)
    assert caught.value.param == param
    assert world.engine.num_requests == 0
    world.add("x", prompt_of(5), request={"priority": 2**63 - 1, "deadline": 1e300})
    world.run()
    assert world.verify() == 1


def test_an_id_can_be_used_again_once_its_request_is_done() -> None:
    world = make_world()
    world.add("a", prompt_of(5))
    with pytest.raises(RequestError, match="already being served"):
        world.add("a", prompt_of(5))
    assert world.engine.is_serving("a")
    world.run()
    assert not world.engine.is_serving("a")
    world.engine.add(Request(request_id="a", prompt=(1, 2), params=SamplingParams(max_tokens=1)))
    assert world.engine.num_requests == 1


def test_a_full_queue_refuses_and_takes_again_later() -> None:
    world = make_world(max_queue=2, max_batch_size=1)
    for name in "abc":  # the first will have the one place, two wait
        world.add(name, prompt_of(5))
    with pytest.raises(QueueFull, match="^2 sequences are waiting and max_queue is 2; try again later, or "):
        world.add("d", prompt_of(5))
    world.step()
    with pytest.raises(QueueFull, match="max_queue is 2"):
        world.add("d", prompt_of(5))
    while "a" not in {name for name, _ in world.finished}:
        world.step()
    world.add("d", prompt_of(5))
    world.run()
    assert world.verify() == 4


def test_beams_need_a_cache() -> None:
    world = make_world(kv_cache_backend="naive")
    with pytest.raises(RequestError, match="naive keeps none"):
        world.add("a", prompt_of(5), use_beam_search=True, temperature=0.0, n=2)


def test_requests_without_a_seed_differ_and_repeat_with_the_engines_seed() -> None:
    def outputs(seed: int) -> list[list[int]]:
        world = make_world(seed=seed)
        for name in "ab":
            world.engine.add(Request(request_id=name, prompt=(1, 2, 3), params=SamplingParams(max_tokens=6)))
        world.run()
        return [world.tokens[name, 0] for name in "ab"]

    first = outputs(1)
    assert first[0] != first[1]
    assert outputs(1) == first
    assert outputs(2) != first


def test_a_search_counts_what_it_read_and_what_it_gave() -> None:
    world = make_world()
    world.add("b", prompt_of(6), use_beam_search=True, temperature=0.0, n=2, best_of=3, max_tokens=4)
    world.run()
    stats = world.engine.stats()
    assert stats.num_prompt_tokens == 6
    assert stats.num_output_tokens == sum(map(len, world.tokens.values()))


def test_an_idle_engine_steps_in_vain_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    world = make_world()
    with caplog.at_level(logging.DEBUG):
        assert [world.step() for _ in range(5)] == [[]] * 5
    assert caplog.text == ""


@pytest.mark.parametrize("steps_ahead", [1, 3])
def test_an_interrupt_while_waiting_loses_no_step(steps_ahead: int) -> None:
    """Ctrl-C arrives where the time is spent: in the wait for a step, with the next one already launched."""
    world = make_world(steps_ahead=steps_ahead)
    for name in "ab":
        world.add(name, prompt_of(5, start=ord(name)), max_tokens=12)
    for _ in range(4):
        world.step()
    flight = world.engine._flights[0]
    interrupts = [KeyboardInterrupt()]

    def wait() -> Any:
        if interrupts:
            raise interrupts.pop()
        return flight.step.wait()

    step: Any = SimpleNamespace(wait=wait)
    world.engine._flights[0] = flight._replace(step=step)
    with pytest.raises(KeyboardInterrupt):
        world.step()
    world.run()

    assert world.verify() == 2
    world.check_idle()


def test_a_static_batch_stays_closed_while_its_last_tokens_are_on_their_way() -> None:
    def most_running(steps_ahead: int) -> list[int]:
        world = make_world(batching_mode="static", max_batch_size=4, steps_ahead=steps_ahead)
        for number in range(8):
            world.add(str(number), prompt_of(4, start=number), max_tokens=(3, 4, 5, 8)[number % 4])
        world.run()
        assert world.verify() == 8
        first_steps = [plan for plan in world.plans if any(chunk.start == 0 for chunk in plan.chunks)]
        return [len(plan.chunks) for plan in first_steps]

    assert [most_running(steps_ahead) for steps_ahead in (0, 1, 3)] == [[4, 4]] * 3


def test_the_first_output_and_the_last_tell_how_a_sequence_began() -> None:
    world = make_world()
    world.add("before", prompt_of(10))
    world.run()
    world.add("again", prompt_of(10))
    outputs = []
    while world.engine.has_work:
        outputs += world.step()
    first, *between, last = outputs
    assert first.num_cached == last.num_cached == 8
    assert first.queue_s == last.queue_s > 0
    assert len(between) == 6
    assert {(output.num_cached, output.queue_s) for output in between} == {(0, 0.0)}


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_error_after_a_step_was_launched_repeats_no_token(error: type[BaseException]) -> None:
    """The device is a token on, so its requests end and the others go on as they were."""
    world = make_world()
    for name in "ab":
        world.add(name, prompt_of(5, start=ord(name)), max_tokens=12)
    for _ in range(3):
        world.step()
    observer: Any = world.observer
    on_order, calls = observer.on_order, itertools.count()

    def fail_once(order: StepOrder) -> None:
        if next(calls) == 0:
            raise error
        on_order(order)

    observer.on_order = fail_once
    with contextlib.suppress(error):
        world.step()
    world.add("c", prompt_of(5, start=9), max_tokens=12)
    world.run()
    for name in "ab":
        assert world.finished[name, 0].finish_reason == "error"
        world.aborted.add(name)
    assert world.verify() == 1
    world.check_idle()
