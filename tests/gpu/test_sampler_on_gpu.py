"""What a request asks of the sampler, on a GPU: the answers of the CPU, in graphs and with steps ahead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from infer import LLM, SamplingParams
from infer.execution.gpu.graphs import borrow
from infer.kernels.runtime.profiles import device_profile, using_profile
from infer.scheduling.request import Request
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.gpu.graphs import FEW_SIZES

pytestmark = pytest.mark.gpu

VOCAB_SIZE = 5003  # no multiple of 32, and of more than one tile
PROMPTS = [[(7 * i + j) % 200 + 10 for j in range(3 + 5 * i)] for i in range(9)]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"temperature": 0.0, "logit_bias": {i: 3.0 + i / 2000 for i in range(0, VOCAB_SIZE, 5)}},
    {"min_tokens": 9, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 6))},
    {"logprobs": 20},
    {"temperature": 0.0, "prompt_logprobs": 3, "logprobs": 0},
    {
        "repetition_penalty": 0.8, "frequency_penalty": -0.3, "logit_bias": {5: 4.0, 99: -100.0},
        "logprobs": 5, "prompt_logprobs": 1, "temperature": 0.8, "top_p": 0.9, "min_tokens": 3,
        "stop_token_ids": (1, 2, 3, 5),
    },
    {"n": 3, "frequency_penalty": 1.1, "logprobs": 2},
]  # fmt: skip
FEW: dict[str, Any] = FEW_SIZES | {"max_batch_size": 12}  # all of these and their forks run together
PARAMS = [
    SamplingParams(**({"seed": number, "max_tokens": 24, "ignore_eos": True} | kind))
    for number, kind in enumerate(KINDS)
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory: Path = tmp_path_factory.mktemp("tiny") / "qwen3"
    make_checkpoint("qwen3", directory, sizes=Sizes(vocab_size=VOCAB_SIZE))
    return str(directory)


def answers_of(llm: LLM) -> list[Any]:
    return [
        (answer.prompt_logprobs, [(output.token_ids, output.logprobs) for output in answer.outputs])
        for answer in llm.generate(PROMPTS, PARAMS)
    ]


@pytest.fixture(scope="module")
def known(checkpoint: str) -> list[Any]:
    """The answers of the CPU."""
    return answers_of(LLM(checkpoint, device="cpu", dtype="float32"))


def rows_of(answer: Any) -> list[Any]:
    prompt, outputs = answer
    return [row for rows in (prompt, *(rows for _, rows in outputs)) for row in rows or () if row is not None]


def assert_same(answers: list[Any], known: list[Any]) -> None:
    """The same tokens; logprobs as near as two orders of summation are."""
    for number, (answer, wanted) in enumerate(zip(answers, known, strict=True)):
        assert [ids for ids, _ in answer[1]] == [ids for ids, _ in wanted[1]], KINDS[number]
        rows, wanted_rows = rows_of(answer), rows_of(wanted)
        assert len(rows) == len(wanted_rows)
        for row, other in zip(rows, wanted_rows, strict=True):
            assert (row.token_id, row.rank, len(row.top)) == (other.token_id, other.rank, len(other.top))
            assert row.logprob == pytest.approx(other.logprob, abs=1e-3)
            assert [value for _, value in row.top] == pytest.approx([v for _, v in other.top], abs=1e-3)


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"use_cuda_graphs": False},
        {"use_overlap": False},
        {"max_batch_size": 4},
        {"block_size": 4, "num_blocks": 48, "preemption": "recompute"},
        {"block_size": 4, "num_blocks": 48, "preemption": "swap", "swap_blocks": 60},
        {"deterministic": True},
    ],
    ids=str,
)
def test_all_that_can_be_asked_of_the_sampler_is_the_same_on_both(
    checkpoint: str, known: list[Any], knobs: dict[str, Any]
) -> None:
    llm = LLM(checkpoint, device="cuda", dtype="float32", **(FEW | knobs))
    for _ in range(2):  # the first captures its graphs on the way
        assert_same(answers_of(llm), known)
    assert llm.engine.scheduler.pool.audit_blocks() == []


def test_steps_ahead_change_nothing(checkpoint: str) -> None:
    """A penalty counts tokens that are still on the device."""
    known: list[Any] = []
    own = device_profile(torch.device("cuda"))
    for steps_ahead in (0, 1, 3):
        with using_profile(replace(own, steps=replace(own.steps, steps_ahead=steps_ahead))):
            llm = LLM(checkpoint, device="cuda", dtype="bfloat16", **FEW)
        assert llm.engine._steps_ahead == steps_ahead
        answers = answers_of(llm)
        known = known or answers
        assert_same(answers, known)


def test_steps_stay_in_graphs_and_overlap(checkpoint: str) -> None:
    llm = LLM(checkpoint, device="cuda", dtype="bfloat16", **FEW)
    while llm.engine.prepare():
        pass
    engine = llm.engine
    device: Any = engine._device
    host, launch = Mock(wraps=device._sampler.sample), Mock(wraps=device.graphs._forward)
    device._sampler.sample, device.graphs._forward = host, launch
    kinds = [params for params in PARAMS if params.n == 1]
    for number, params in enumerate(kinds):
        engine.add(Request(request_id=str(number), prompt=tuple(PROMPTS[number]), params=params))
    depths = []
    while engine.has_work:
        engine.step()
        depths.append(len(engine._flights))
    assert max(depths) == engine._steps_ahead > 1
    assert host.call_count == launch.call_count == 0


def test_borrowed_memory_is_seen_and_not_kept() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        wide = torch.randn(5, 70, device="cuda").to(dtype)
        lent = wide[:, :64]
        borrowed = borrow(lent)
        assert borrowed.data_ptr() == lent.data_ptr() and borrowed.dtype == dtype
        assert torch.equal(borrowed, lent) and borrowed.stride() == lent.stride()
        before = torch.cuda.memory_allocated()
        del wide, lent
        assert torch.cuda.memory_allocated() < before
