"""Memory that runs out in the middle of a step: for every allocation that can fail, no token differs.

The allocator of a GPU is played by a dispatch mode (tests/support/failing_allocator.py). The device half of a
GPU runs on the CPU over the kernels' references; tests/gpu/test_faults_on_gpu.py has the same on a GPU.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from infer.engine import machine
from infer.execution import halves, torch_device
from infer.execution.embedding import Pooled, pool_hidden
from infer.execution.gpu import ragged_steps, readback
from infer.execution.gpu.device import GpuDevice
from infer.execution.gpu.graphs import StepSize
from infer.execution.halves import MIN_PIECE, parts_of, where_to_cut
from infer.execution.order import DECODE, EMPTY, PROMPT, VERIFY, StepOrder
from infer.execution.torch_device import TorchDevice
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request, StepOutput
from tests.support.books import check_books
from tests.support.failing_allocator import FailingAllocator, FailingEngine
from tests.support.masked import Allow, mask_steps
from tests.support.thinned import thinned
from tests.support.tiny import drain, greedy, make_engine, random_prompts, run_engine

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
def on_half(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Knobs for an engine with the device half of a GPU, or with plain PyTorch."""
    if request.param == "device":
        monkeypatch.setattr(machine, "has_gpu_kernels", lambda device: True)
        return {"max_num_batched_tokens": 8}
    return {"max_num_batched_tokens": 8, "attention_backend": "sdpa"}


@pytest.fixture(params=[5, pytest.param(40, marks=pytest.mark.slow)], ids="{} tried".format)
def spread(request: pytest.FixtureRequest) -> Callable[[int], list[int]]:
    """A function that returns about this many of the numbers from 1 to a count, both ends among them."""
    return lambda count: sorted({*range(1, count + 1, max(count // request.param, 1)), count})


@pytest.mark.parametrize("params", [PARAMS, ON_HOST], ids=["device", "host"])
def test_whichever_allocation_fails_no_token_differs(
    on_half: dict[str, Any], params: list[SamplingParams], spread: Callable[[int], list[int]]
) -> None:
    counting = FailingAllocator()
    expected = serve(counting, params, **on_half)
    assert counting.count > 100
    for number in spread(counting.count):
        failing = FailingAllocator(number.__eq__)
        assert serve(failing, params, **on_half) == expected, number
        assert failing.num_failed == 1, number


@pytest.mark.parametrize(("failing", "name"), thinned(range(1, 6), ("send", "logprob_table"), keep=2))
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
    on_half: dict[str, Any], params: list[SamplingParams], spread: Callable[[int], list[int]]
) -> None:
    """Three of four requests are under masks, which differ; each keeps its own, whatever is halved."""

    def allow(request_id: str, position: int) -> set[int] | None:
        number = int(request_id)
        return None if number == 2 else {*range(number + position, 300, 9)}

    counting = FailingAllocator()
    expected = serve(counting, params, allow, **on_half)
    assert expected != serve(FailingAllocator(), params, **on_half)
    for number in spread(counting.count):
        assert serve(FailingAllocator(number.__eq__), params, allow, **on_half) == expected, number


@pytest.mark.parametrize("period", [7, 31, 97])
def test_memory_that_fails_again_and_again_costs_no_request_a_token(
    on_half: dict[str, Any], period: int
) -> None:
    """Some steps fail many times in a row: they are halved down to a token, and then run by themselves."""
    expected = serve(FailingAllocator(), PARAMS, **on_half)
    worst = FailingAllocator(lambda number: number % period == 0 and number % 2000 < 1000)
    try:
        found = serve(worst, PARAMS, **on_half)
    except AssertionError as error:  # a single token may find no memory: then its request ends, and says so
        assert "OutOfMemoryError" in str(error)
        return
    assert found == expected
    assert worst.num_failed > 3


def test_blocks_that_swap_are_moved_once(on_half: dict[str, Any], spread: Callable[[int], list[int]]) -> None:
    """A cache too small for all of them: sequences leave for host memory and come back."""
    knobs = on_half | {"num_blocks": 7, "block_size": 4, "swap_blocks": 32, "preemption": "swap"}
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


def serve_beside_an_embedding(
    allocator: FailingAllocator, knobs: dict[str, Any]
) -> tuple[list[int], tuple[float, ...]]:
    """Its chunks share steps with a row that decodes, whose penalties count each id that was drawn once."""
    engine = FailingEngine(make_engine(**knobs, prefill_tokens_while_decoding=4), allocator).engine
    engine.add(Request(request_id="a", prompt=(5, 6), params=greedy(8, frequency_penalty=0.5)))
    outputs = engine.step()
    engine.add(Request(request_id="e", prompt=tuple(PROMPTS[1] * 2), pooling="mean"))
    outputs += drain(engine)
    assert all(output.finish_reason != "error" for output in outputs)
    (embedding,) = [output.embedding for output in outputs if output.embedding]
    return [id_ for output in outputs for id_ in output.token_ids], embedding


def test_whichever_allocation_fails_beside_an_embedding_no_token_differs(
    on_half: dict[str, Any], spread: Callable[[int], list[int]]
) -> None:
    counting = FailingAllocator()
    tokens, embedding = serve_beside_an_embedding(counting, on_half)
    assert len(tokens) == 8
    for number in spread(counting.count):
        found, states = serve_beside_an_embedding(FailingAllocator(number.__eq__), on_half)
        assert found == tokens, number
        assert states == pytest.approx(embedding, abs=1e-4), number


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_states_that_find_no_memory_to_be_pooled_in_change_no_token(
    on_half: dict[str, Any], failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is run again, so nothing of it may have been drawn: rows would go on from the wrong token."""
    tokens, embedding = serve_beside_an_embedding(FailingAllocator(), on_half)
    module, calls = torch_device if "attention_backend" in on_half else ragged_steps, itertools.count(1)

    def fail_once(*given: Any) -> Pooled:
        if next(calls) == failing:
            raise torch.OutOfMemoryError("no room")
        return pool_hidden(*given)

    monkeypatch.setattr(module, "pool_hidden", fail_once)
    found, states = serve_beside_an_embedding(FailingAllocator(), on_half)
    assert found == tokens and next(calls) > failing + 1
    assert states == pytest.approx(embedding, abs=1e-4)


@pytest.mark.parametrize(("part", "num_rows"), thinned(("forward", "sample"), (1, 2, 3, 5), keep=2))
def test_a_batch_goes_on_as_before_after_a_step_in_halves(
    monkeypatch: pytest.MonkeyPatch, part: str, num_rows: int
) -> None:
    """The steps after it repeat the rows of the whole step, not those of its second half."""
    monkeypatch.setattr(machine, "has_gpu_kernels", lambda device: True)
    requests = [([7 * number + 1, 3, 5], greedy(12)) for number in range(num_rows)]
    expected = run_engine(make_engine(), requests)
    engine = make_engine()
    device: Any = engine._device
    inner, calls, num_failed = getattr(device.graphs, part), itertools.count(1), 0

    def fail_twice(size: StepSize) -> Any:
        nonlocal num_failed
        if next(calls) in (6, 11):
            num_failed += 1
            raise torch.OutOfMemoryError("none left")
        return inner(size)

    monkeypatch.setattr(device.graphs, part, fail_twice)
    assert run_engine(engine, requests) == expected
    assert num_failed == 2


def test_the_log_says_it_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(machine, "has_gpu_kernels", lambda device: True)
    with caplog.at_level(logging.WARNING, "infer"):
        serve(FailingAllocator(lambda number: number in (20, 400, 800)), PARAMS)
    said = [record for record in caplog.records if record.name == halves.__name__]
    assert len(said) == 1
    assert "device_memory" in said[0].getMessage()


def order_of(lens: list[int], kinds: list[int] | None = None) -> StepOrder:
    """Rows of so many tokens; those of one decode, others are prompts, unless `kinds` says so."""
    made = [DECODE if length == 1 else PROMPT for length in lens] if kinds is None else kinds
    return EMPTY._replace(
        counts=np.array(lens, dtype=np.int32),
        kinds=np.array(made, dtype=np.int8),
        rows=np.arange(len(lens), dtype=np.int32),
    )


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
    assert where_to_cut(order_of(lens)) == at


def test_drafts_are_not_cut() -> None:
    assert where_to_cut(order_of([1, 5], [DECODE, VERIFY])) == (1, 0)
    assert where_to_cut(order_of([5], [VERIFY])) is None
    assert where_to_cut(order_of([5, 1], [VERIFY, DECODE])) == (1, 0)


def test_both_device_halves_are_under_test(on_half: dict[str, Any]) -> None:
    device = make_engine(**on_half)._device
    assert isinstance(device, TorchDevice if "attention_backend" in on_half else GpuDevice)


@pytest.mark.parametrize("cuts_rows", [True, False])
@pytest.mark.parametrize("lens", [[1], [1, 1, 1, 1, 1], [3, 3, 90], [100, 1, 1], [5 * MIN_PIECE], [7, 8]])
def test_parts_of_an_order_compute_the_whole(lens: list[int], cuts_rows: bool) -> None:
    num_given, column = sum(count for count in lens if count > 1), np.arange(len(lens), dtype=np.int32)
    order = order_of(lens)._replace(
        starts=column.copy(),
        num_sampled=column.copy(),
        num_draws=column,
        adapters=np.zeros(len(lens), dtype=np.int16),
        tokens=np.arange(num_given, dtype=np.uint32),
        slots=np.zeros((1, num_given), dtype=np.int32),
    )
    parts = parts_of(order, 3, cuts_rows=cuts_rows)
    computed = [
        (first + place, position)
        for first, part in parts
        for place, (start, stop) in enumerate(zip(part.starts, part.stops, strict=True))
        for position in range(start, stop)
    ]
    assert computed == [(row, order.starts[row] + n) for row, count in enumerate(lens) for n in range(count)]
    assert len(parts) <= 3 and (cuts_rows or sum(part.num_rows for _, part in parts) == len(lens))
    pieces = [count for _, part in parts for count in part.counts.tolist()]
    assert all(piece in lens or piece >= MIN_PIECE for piece in pieces)
