"""Memory that runs out in the middle of a step: for every allocation that can fail, no token differs.

The allocator of a GPU is played by a dispatch mode: each operation that makes a tensor of its own counts, and
so does a copy with gaps from one memory to another, which is gathered on the way. The runner of a GPU runs on
the CPU over the kernels' references.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from infer.engine import machine
from infer.engine.engine import Engine
from infer.execution import halves
from infer.execution.gpu import readback
from infer.execution.gpu.runner import DeviceRunner
from infer.execution.halves import split_numbers
from infer.execution.model_runner import ModelRunner
from infer.sampling.params import SamplingParams
from infer.scheduling.plan import Chunk, Chunks
from infer.scheduling.request import Request, StepOutput
from tests.support.books import check_books
from tests.support.masked import Allow, mask_steps
from tests.support.tiny import drain, greedy, make_engine, random_prompts

PROMPTS = [prompt[:9] for prompt in random_prompts(4)]
PARAMS = [
    greedy(2, logprobs=2),
    SamplingParams(temperature=1.0, seed=1, max_tokens=3, ignore_eos=True),
    greedy(4, repetition_penalty=1.3, logit_bias={5: 1.0}),
    SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=2, ignore_eos=True, logprobs=1),
]
ON_HOST = [
    greedy(2, repetition_penalty=1.3),
    SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=2, ignore_eos=True),
    SamplingParams(temperature=0.0, use_beam_search=True, n=2, best_of=2, max_tokens=2),
    greedy(2, prompt_logprobs=1),
]
NUM_TRIED = int(os.environ.get("ALLOCATIONS_TRIED", "9"))  # of the hundreds that a run makes, in each test


class FailingAllocator(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises OutOfMemoryError at the allocations with these numbers, counted while it is on."""

    def __init__(self, fails: Callable[[int], bool] = lambda number: False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fails = fails
        self.count = self.num_failed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        allocates = any(value.alias_info is None for value in func._schema.returns)
        if func._schema.name == "aten::copy_":
            is_within = args[0].untyped_storage().data_ptr() == args[1].untyped_storage().data_ptr()
            allocates = not (is_within or args[0].is_contiguous() and args[1].is_contiguous())
        if allocates:
            self.count += 1
            if self._fails(self.count):
                self.num_failed += 1
                raise torch.OutOfMemoryError(f"allocation {self.count}")
        return func(*args, **(kwargs or {}))


class FailingEngine:
    """An engine whose launches, and nothing else, run under the allocator."""

    def __init__(self, engine: Engine, allocator: FailingAllocator) -> None:
        self.engine = engine
        launch, engine._runner.launch = engine._runner.launch, self._launch  # type: ignore[method-assign]
        self._inner, self._allocator = launch, allocator

    def _launch(self, plan: Any) -> Any:
        with self._allocator:
            return self._inner(plan)


def serve(
    allocator: FailingAllocator, params: list[SamplingParams], allow: Allow | None = None, **knobs: Any
) -> list[Any]:
    """What each request gets: its ids, logprobs and reasons, by index; the books balance after every step."""
    engine = make_engine(**knobs)
    if allow is not None:
        mask_steps(engine, allow)
    FailingEngine(engine, allocator)
    made: dict[tuple[str, int], list[Any]] = {}

    def take(outputs: list[StepOutput]) -> None:
        for output in outputs:
            assert output.finish_reason != "error", output
            told = made.setdefault((output.request_id, output.index), [])
            told += output.token_ids
            for row in (*output.logprobs, *(output.prompt_logprobs or ())):
                told.append(None if row is None else (row.token_id, row.rank))
        check_books(engine.scheduler)
        assert engine.scheduler.pool.audit_blocks() == []

    for number, (prompt, wanted) in enumerate(zip(PROMPTS, params, strict=True)):
        engine.add(Request(request_id=str(number), prompt=tuple(prompt), params=wanted))
        take(engine.step())
    while engine.has_work:
        take(engine.step())
    take(drain(engine))
    return sorted(made.items())


@pytest.fixture(params=["device", "plain"])
def on_runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Knobs for an engine with the runner of a GPU, or with plain PyTorch."""
    if request.param == "device":
        monkeypatch.setattr(machine, "has_gpu_kernels", lambda device: True)
        return {"max_num_batched_tokens": 8}
    return {"max_num_batched_tokens": 8, "attention_backend": "sdpa"}


def spread(count: int) -> Iterator[int]:
    """Some of the numbers from 1 to `count`, both ends among them."""
    return iter(sorted({*range(1, count + 1, max(count // NUM_TRIED, 1)), count}))


@pytest.mark.parametrize("params", [PARAMS, ON_HOST], ids=["device", "host"])
def test_whichever_allocation_fails_no_token_differs(
    on_runner: dict[str, Any], params: list[SamplingParams]
) -> None:
    counting = FailingAllocator()
    expected = serve(counting, params, **on_runner)
    assert counting.count > 100
    for number in spread(counting.count):
        failing = FailingAllocator(number.__eq__)
        assert serve(failing, params, **on_runner) == expected, number
        assert failing.num_failed == 1, number


@pytest.mark.parametrize("name", ["send", "logprob_table"])
@pytest.mark.parametrize("failing", range(1, 6))
def test_logprobs_without_memory_are_made_again_and_their_step_is_not(
    monkeypatch: pytest.MonkeyPatch, name: str, failing: int
) -> None:
    monkeypatch.setattr(machine, "has_gpu_kernels", lambda device: True)
    expected = serve(FailingAllocator(), PARAMS)
    inner, num_calls = getattr(readback, name), 0

    def fail_once(*args: Any) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        if num_calls == failing:
            raise torch.OutOfMemoryError("no room")
        made: torch.Tensor = inner(*args)
        return made

    monkeypatch.setattr(readback, name, fail_once)
    assert serve(FailingAllocator(), PARAMS) == expected
    assert num_calls > 2, "of some steps"


@pytest.mark.parametrize("params", [PARAMS, ON_HOST[:2] + ON_HOST[3:] + PARAMS[1:2]], ids=["device", "host"])
def test_masks_go_with_the_halves_of_their_step(
    on_runner: dict[str, Any], params: list[SamplingParams]
) -> None:
    """Three of four requests are under masks, which differ; each keeps its own, whatever is halved."""

    def allow(request_id: str, position: int) -> set[int] | None:
        number = int(request_id)
        return None if number == 2 else {*range(number + position, 300, 9)}

    counting = FailingAllocator()
    expected = serve(counting, params, allow, **on_runner)
    assert expected != serve(FailingAllocator(), params, **on_runner)
    for number in spread(counting.count):
        assert serve(FailingAllocator(number.__eq__), params, allow, **on_runner) == expected, number


@pytest.mark.parametrize("period", [7, 31, 97])
def test_memory_that_fails_again_and_again_costs_no_request_a_token(
    on_runner: dict[str, Any], period: int
) -> None:
    """Some launches fail many times in a row: they are halved down to a token, and then run by themselves."""
    expected = serve(FailingAllocator(), PARAMS, **on_runner)
    worst = FailingAllocator(lambda number: number % period == 0 and number % 2000 < 1000)
    try:
        found = serve(worst, PARAMS, **on_runner)
    except AssertionError as error:  # a single token may find no memory: then its request ends, and says so
        assert "OutOfMemoryError" in str(error)
        return
    assert found == expected
    assert worst.num_failed > 3


def test_blocks_that_swap_are_moved_once(on_runner: dict[str, Any]) -> None:
    """A cache too small for all of them: sequences leave for host memory and come back."""
    knobs = on_runner | {"num_blocks": 7, "block_size": 4, "swap_blocks": 32, "preemption": "swap"}
    counting = FailingAllocator()
    expected = serve(counting, PARAMS, **knobs)
    for number in spread(counting.count):
        assert serve(FailingAllocator(number.__eq__), PARAMS, **knobs) == expected, number


def test_a_step_of_one_token_that_finds_no_memory_ends_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "has_gpu_kernels", lambda device: True)
    allocator = FailingAllocator(lambda number: True)
    engine = FailingEngine(make_engine(), allocator).engine
    engine.add(Request(request_id="a", prompt=(1, 2, 3), params=greedy(3)))
    outputs = engine.step()
    assert [output.finish_reason for output in outputs] == ["error"]
    assert "OutOfMemoryError" in str(outputs[0].error)
    assert drain(engine) == []


def test_the_log_says_it_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(machine, "has_gpu_kernels", lambda device: True)
    with caplog.at_level(logging.WARNING, "infer"):
        serve(FailingAllocator(lambda number: number in (20, 400, 800)), PARAMS)
    said = [record for record in caplog.records if record.name == halves.__name__]
    assert len(said) == 1
    assert "device_memory" in said[0].getMessage()


class Seq:
    drafts, row = (), 0


@pytest.mark.parametrize(
    ("lens", "at"),
    [
        ([1], None),
        ([2], (0, 1)),
        ([1, 1], (1, 0)),
        ([1, 1, 8], (2, 3)),
        ([8, 1, 1], (0, 5)),
        ([1] * 5, (2, 0)),
    ],
)
def test_a_step_is_halved_by_its_tokens(lens: list[int], at: tuple[int, int] | None) -> None:
    chunks = [Chunk(number, 3, 3 + length, 1) for number, length in enumerate(lens)]
    assert split_numbers(Chunks.of(chunks, [Seq()] * len(lens))) == at  # type: ignore[list-item]


def test_drafts_are_not_cut() -> None:
    first, second = Seq(), Seq()
    second.drafts = (1, 2, 3, 4)  # type: ignore[assignment]
    chunks = Chunks.of([Chunk(0, 3, 4, 1), Chunk(1, 3, 8, 1)], [first, second])  # type: ignore[list-item]
    assert split_numbers(chunks) == (1, 0)
    assert split_numbers(Chunks.of([Chunk(1, 3, 8, 1)], [second])) is None  # type: ignore[list-item]
    assert np.array(chunks.stops).tolist() == [4, 8]


def test_both_runners_are_under_test(on_runner: dict[str, Any]) -> None:
    runner = make_engine(**on_runner)._runner
    assert isinstance(runner, ModelRunner if "attention_backend" in on_runner else DeviceRunner)
