"""Several steps under way: when there may be how many, and what happens to those who leave meanwhile.

That no token, block or position changes by it is tested with random traffic in tests/stress.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from infer.errors import DeviceLost
from infer.execution.device import Pending, PendingStep, StepResult
from infer.execution.gpu.device import GpuDevice
from infer.execution.gpu.readback import PendingIds, Readback
from infer.execution.order import AWAITS_MASKS, NO_MASKS, StepMasks, StepOrder
from infer.sampling.params import NO_TOKEN
from infer.scheduling.plan import StepPlan
from infer.scheduling.sequence import Sequence as TokenSequence
from tests.support.oracle import OracleWorld, prompt_of

CPU = torch.device("cpu")


def make_world(steps_ahead: int = 3, **knobs: Any) -> OracleWorld:
    return OracleWorld(**({"block_size": 4, "num_blocks": 60, "steps_ahead": steps_ahead} | knobs))


def pending_step(launch: Callable[[StepMasks], Pending]) -> PendingStep:
    """A step without masks."""
    return PendingStep(0, launch, lambda count: NO_MASKS.lines_KW)


def num_ahead(world: OracleWorld, count: int) -> list[int]:
    """How many steps are under way after each of the next calls."""
    return [len(world.engine._flights) for _ in range(count) if world.step() is not None]


# -- how many -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps_ahead", "expected"), [(0, [0] * 5), (1, [1] * 5), (2, [1, 2, 2, 2, 2]), (3, [1, 2, 3, 3, 3])]
)
def test_the_queue_grows_while_all_decode_and_none_waits(steps_ahead: int, expected: list[int]) -> None:
    world = make_world(steps_ahead)
    world.add("a", prompt_of(5), max_tokens=20)
    assert num_ahead(world, 5) == expected
    world.run()
    assert world.verify() == 1
    assert world.most_late == steps_ahead


def test_who_comes_stands_behind_one_step_that_others_may_still_join() -> None:
    """Each call reads one step, so that its tokens are not kept back, until one is left."""
    world = make_world()
    world.add("a", prompt_of(5), max_tokens=30)
    num_ahead(world, 6)
    step = world.scheduler.step
    world.add("b", prompt_of(5, start=2), max_tokens=30)
    assert [(len(world.step()), len(world.engine._flights)) for _ in range(2)] == [(1, 2), (1, 1)]
    assert world.scheduler.step == step, "nothing was launched meanwhile"
    world.add("c", prompt_of(5, start=3), max_tokens=30)
    assert num_ahead(world, 1) == [1]
    assert [world.seq(name).is_running for name in "abc"] == [True] * 3
    assert num_ahead(world, 3) == [2, 3, 3]
    world.run()
    assert world.verify() == 3


def test_while_a_prompt_is_computed_one_step_is_ahead() -> None:
    world = make_world(prefill_chunk_size=4, max_num_batched_tokens=8)
    world.add("a", prompt_of(5), max_tokens=40)
    num_ahead(world, 5)
    world.add("long", prompt_of(30, start=2))
    depths = []
    while world.seq("long").num_output < 2:
        depths += num_ahead(world, 1)
    assert depths[:2] == [2, 1]
    assert set(depths[2:-1]) == {1}
    assert depths[-1] == 2, "its prompt is computed: all decode again"
    world.run()
    assert world.verify() == 2


@pytest.mark.parametrize("params", [{"n": 2}, {"use_beam_search": True, "temperature": 0.0}])
def test_a_request_whose_ids_decide_what_runs_next_is_waited_for(params: dict[str, Any]) -> None:
    world = make_world()
    world.add("a", prompt_of(5), max_tokens=30)
    num_ahead(world, 5)
    world.add("b", prompt_of(5, start=2), max_tokens=4, **params)
    num_ahead(world, 2)
    assert num_ahead(world, 1) == [0], "read at once, and all before it"
    world.run()
    assert world.verify() == 2


@pytest.mark.parametrize("params", [{"logprobs": 1}, {"prompt_logprobs": 1}, {"repetition_penalty": 1.5}])
def test_a_request_that_asks_more_of_the_sampler_is_not_waited_for(params: dict[str, Any]) -> None:
    world = make_world()
    world.add("a", prompt_of(5), max_tokens=30)
    num_ahead(world, 5)
    world.add("b", prompt_of(5, start=2), max_tokens=12, **params)
    num_ahead(world, 3)
    assert num_ahead(world, 3) == [2, 3, 3]
    world.run()
    assert world.verify() == 2


def test_the_last_tokens_come_one_by_one() -> None:
    """Nothing is left to launch once all of a sequence's tokens have their places."""
    world = make_world()
    world.add("a", prompt_of(5), max_tokens=8)
    made = []
    while world.engine.has_work:
        made.append(sum(len(output.token_ids) for output in world.step()))
    assert made == [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]
    assert max(chunk.stop for plan in world.plans for chunk in plan.chunks) == 12, "5 + 8, less the last"


# -- who leaves meanwhile -----------------------------------------------------------------------------


def test_who_stops_at_an_id_has_some_computed_in_vain_and_none_reported() -> None:
    world = make_world()
    world.add("first", prompt_of(5), max_tokens=20)
    world.run()
    tokens = world.tokens["first", 0]
    again = make_world(eos_ids=(tokens[6],))
    again.add("a", prompt_of(5), max_tokens=20)
    again.run()
    assert again.tokens["a", 0] == tokens[: tokens.index(tokens[6]) + 1]
    num_steps = again.runner.num_steps
    assert num_steps == len(again.tokens["a", 0]) + 3


def test_a_sequence_may_be_preempted_for_one_that_is_nearly_done() -> None:
    """That step has nothing to run: the last tokens of the other are under way."""
    world = make_world(num_blocks=5, context_len=20)
    world.add("a", prompt_of(7), max_tokens=5)
    world.add("b", prompt_of(4, start=2), max_tokens=12)
    while not world.scheduler.num_preemptions:
        world.step()
    assert len(world.engine._flights) > 1
    assert world.scheduler.running == [world.seq("a")]
    world.run()
    assert world.verify() == 2


def test_an_interrupt_in_a_launch_that_preempts_sends_no_token_that_is_not_known() -> None:
    world = make_world(num_blocks=6, context_len=24, prefill_chunk_size=16)
    for number, name in enumerate("abc"):
        world.add(name, prompt_of(4, start=number), max_tokens=12)
    run, order_of, preempted = world.runner.run, world.engine._host.order, list[int]()

    def note(plan: StepPlan, **facts: bool) -> StepOrder:
        preempted[:] = plan.preempted
        return order_of(plan, **facts)

    def interrupt(order: StepOrder) -> PendingStep:
        if preempted:
            world.runner.run = run  # type: ignore[method-assign]
            raise KeyboardInterrupt
        return run(order)

    world.engine._host.order = note  # type: ignore[method-assign]
    world.runner.run = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        world.run()
    assert world.engine._flights
    world.run()
    ended = [name for (name, _), output in world.finished.items() if output.finish_reason == "error"]
    assert 0 < len(ended) < 3
    world.aborted |= set(ended)
    assert world.verify() == 3 - len(ended)
    world.check_idle()


def test_a_late_failure_of_one_that_left_does_not_end_who_has_its_id_now() -> None:
    """A broken token arrives after its request was aborted, and its id was given to another."""
    world = make_world()
    world.add("a", prompt_of(5), max_tokens=30)
    world.add("b", prompt_of(5, start=2), max_tokens=30)
    num_ahead(world, 6)
    flights = world.engine._flights
    broken = flights[0].step.wait()._replace(ids=[(NO_TOKEN,), (7,)])
    flights[0] = flights[0]._replace(step=pending_step(lambda masks: lambda: broken))
    world.engine.abort("a")
    world.tokens.clear()
    world.add("a", prompt_of(9, start=3), max_tokens=10)
    world.step()
    assert world.engine.is_serving("a")
    world.run()
    assert world.finished["a", 0].finish_reason == "length"
    world.aborted.add("b")  # its token of that step was ours
    assert world.verify() == 1


# -- memory that several steps share --------------------------------------------------------------------


@pytest.mark.parametrize("steps_ahead", [0, 1, 3])
def test_ids_stay_where_they_are_until_they_are_read(
    steps_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device copies as early as it can, the host reads as late as it may."""
    readback = Readback(4, CPU, steps_ahead=steps_ahead)

    class Event:
        def record(self) -> None: ...

        def synchronize(self) -> None: ...

    monkeypatch.setattr(readback, "_events", [Event() for _ in readback._buffers])
    taken: deque[PendingIds] = deque()
    for step in range(20):
        taken.append(readback.take(step, torch.tensor([step, -step]), 2))
        if len(taken) > steps_ahead:
            assert taken.popleft().wait().ids == [(step - steps_ahead,), (steps_ahead - step,)]


def break_tokens(
    world: OracleWorld, is_broken: Callable[[TokenSequence, int, tuple[int, ...]], bool]
) -> list[str]:
    """Let the model have no token where `is_broken` says so; returns the list that failures are added to.

    It is told the sequence, the position of the token and what the ids would have been.
    """
    failures: list[str] = []
    observer: Any = world.observer
    observer.on_failure = lambda _, reason: failures.append(reason)
    compute = world.runner.compute

    def compute_and_break(order: StepOrder, masks: StepMasks) -> StepResult:
        result = compute(order, masks)
        sequences = map(world.runner._sequence, order.rows)
        rows = zip(sequences, order.stops.tolist(), result.ids, strict=True)
        ids = [(NO_TOKEN,) if is_broken(seq, stop, ids) else ids for seq, stop, ids in rows]
        return result._replace(ids=ids, is_whole=False)

    world.runner.compute = compute_and_break  # type: ignore[method-assign]
    return failures


@pytest.mark.parametrize("steps_ahead", [0, 1, 3])
def test_a_broken_token_in_vain_ends_no_request(steps_ahead: int) -> None:
    """One of two answers has stopped when a step that was launched before brings it no token."""
    world = make_world(steps_ahead)
    world.add("a", prompt_of(5), max_tokens=20, n=2)
    world.run()
    stop = world.tokens["a", 0][4]
    assert stop not in world.tokens["a", 1]
    world = make_world(steps_ahead, eos_ids=(stop,))
    failures = break_tokens(world, lambda seq, stop, ids: seq.index == 0 and len(ids) == 1 and stop > 9)
    world.add("a", prompt_of(5), max_tokens=20, n=2)
    world.run()
    assert [world.finished["a", index].finish_reason for index in range(2)] == ["stop", "length"]
    assert not failures


@pytest.mark.parametrize("steps_ahead", [0, 1, 3])
def test_a_broken_request_fails_once(steps_ahead: int) -> None:
    world = make_world(steps_ahead)
    failures = break_tokens(world, lambda seq, stop, ids: stop > 12)
    world.add("a", prompt_of(5), max_tokens=20)
    world.run()
    assert len(failures) == 1


def test_chunks_of_one_token_are_prompts_all_the_same() -> None:
    world = make_world(prefill_chunk_size=1)
    world.add("a", prompt_of(9), max_tokens=9)
    assert num_ahead(world, 8) == [1] * 8
    assert num_ahead(world, 3) == [2, 3, 3]  # from the one on that samples


def test_where_nothing_is_kept_of_a_step_none_is_ahead() -> None:
    world = make_world(kv_cache_backend="naive")
    world.add("a", prompt_of(5), max_tokens=9)
    assert set(num_ahead(world, 6)) == {0}
    world.run()
    assert world.verify() == 1


def test_masks_are_given_out_when_the_steps_before_have_been_sampled() -> None:
    """What samples them fetches the lines that are about to be overwritten."""
    readback, events = Readback(4, CPU, steps_ahead=2), [mock.MagicMock() for _ in range(4)]
    readback.arrive()
    readback._events = list(events)
    for step in range(2):
        readback.take(step, torch.tensor([1]), 1)
    readback.arrive()
    assert [event.synchronize.call_count for event in events] == [0, 1, 0, 0], "the last one is behind all"


def unsampled_step(device: Any) -> PendingStep:
    """A step that awaits masks, of a GPU's device half."""
    return PendingStep(AWAITS_MASKS, mock.MagicMock(), partial(GpuDevice._mask_memory, device))


def test_the_device_half_waits_before_it_gives_out_lines_for_masks() -> None:
    calls: list[str] = []
    device = mock.MagicMock()
    device._readback.arrive.side_effect = lambda: calls.append("arrive")
    device.rows.masks.take.side_effect = lambda count: calls.append(f"take {count}")
    unsampled_step(device).masks(3)
    assert calls == ["arrive", "take 3"]


def test_a_device_that_fails_before_masks_are_filled_is_lost() -> None:
    """As in every other call: the supervisor must start anew, and not only these requests fail."""
    device = mock.MagicMock()
    device._readback.arrive.side_effect = torch.AcceleratorError("misaligned address")
    with pytest.raises(DeviceLost, match="before masks were filled"):
        unsampled_step(device).masks(3)


def test_a_step_that_awaits_masks_is_sampled_once_they_are_there() -> None:
    launch = mock.MagicMock()
    step = PendingStep(AWAITS_MASKS, launch, lambda count: np.zeros((count, 2), np.int32))
    with pytest.raises(AssertionError, match="call sample before wait"):
        step.wait()
    lines_KW = step.masks(2)
    assert not launch.called
    given = step.sample([0, 4], [7, 9])
    (masks,) = launch.call_args.args
    assert masks is given and masks.lines_KW is lines_KW and set(masks.by_place()) == {(0, 7), (4, 9)}
    assert step.wait() is launch.return_value.return_value


def test_a_step_without_masks_is_sampled_at_once() -> None:
    launch = mock.MagicMock()
    step = pending_step(launch)
    launch.assert_called_once_with(NO_MASKS)
    assert step.wait() is launch.return_value.return_value
