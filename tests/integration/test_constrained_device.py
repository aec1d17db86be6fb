"""Constraints on the device half of a GPU, on the CPU: the tokens are those of the CPU's own.

There the whole step waits for its masks; here the forward has run, ids arrive late, and what a grammar forces
takes the place of what was sampled meanwhile.
"""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from infer import LLM, SamplingParams
from infer.constraints.description import Reasoning, Structured
from infer.engine import machine
from infer.execution.gpu.device import GpuDevice
from infer.scheduling.request import Request
from scripts.make_checkpoint import Sizes, make_checkpoint

pytest.importorskip("llguidance")

PROMPTS = [[(7 * i + j) % 200 + 10 for j in range(3 + 5 * (i % 4))] for i in range(11)]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 6}}, "required": ["name"]}
JSON = Structured(kind="json_schema", text=json.dumps(SCHEMA))
FORCED = Structured(
    kind="regex",
    text=r'\{"the name of the engine": "[a-z]{1,4}", "tokens": \[[0-9], [0-9]{1,3}\], "done": true\}',
)  # of which most has one way to be written
CHOICE = Structured(kind="choice", text=json.dumps(["the engine", "the clock", "the river"]))
THINKS = Reasoning(end_id=10, max_tokens=5, forced=(10,))  # one id in the place of one that was sampled
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.3, "frequency_penalty": 0.4}
KINDS: list[dict[str, Any]] = [
    {"structured": FORCED},
    {},
    {"structured": FORCED, **PENALTIES},
    {"structured": CHOICE, "temperature": 1.0, "seed": 5},
    {"reasoning": THINKS, **PENALTIES},
    {"structured": FORCED, "reasoning": THINKS, "temperature": 0.8, "seed": 3},
    {"structured": FORCED, "n": 2, "temperature": 1.0, "seed": 4},
    {"structured": JSON, "logprobs": 1},
    PENALTIES,
    {"banned_ids": [(11,), (12, 13), (20, 21, 22)], "temperature": 1.0, "seed": 6, "n": 2},
    {"allowed_token_ids": range(10, 30), "banned_ids": [(12, 12)], "temperature": 1.0, "seed": 7},
]
KNOBS: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 8, "max_batch_size": 5},
    {"block_size": 2, "num_blocks": 64, "preemption": "recompute"},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory: Path = tmp_path_factory.mktemp("tiny") / "qwen3"
    make_checkpoint("qwen3", directory, sizes=Sizes(vocab_size=397, context_len=128))
    return str(directory)


def tokens_of(llm: LLM) -> list[list[list[int]]]:
    params = [SamplingParams(**({"temperature": 0.0, "max_tokens": 40} | kind)) for kind in KINDS]
    answers = llm.generate(PROMPTS, params)
    return [[list(output.token_ids) for output in answer.outputs] for answer in answers]


@functools.cache
def expected(directory: str) -> list[list[list[int]]]:
    return tokens_of(LLM(directory, device="cpu", dtype="float32"))


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_constrained_rows_have_the_tokens_of_the_cpu(
    checkpoint: str, knobs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = expected(checkpoint)
    monkeypatch.setattr(machine, "has_gpu_kernels", lambda device: True)
    llm = LLM(checkpoint, device="cpu", dtype="float32", **knobs)
    assert isinstance(llm.engine._device, GpuDevice)
    assert tokens_of(llm) == known
    assert bool(llm.engine.scheduler.num_preemptions) is ("num_blocks" in knobs)


def test_steps_without_memory_for_their_sampler_change_no_token(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are run again in halves, under the same masks, when the host has already put other tokens."""
    known = expected(checkpoint)
    monkeypatch.setattr(machine, "has_gpu_kernels", lambda device: True)
    llm = LLM(checkpoint, device="cpu", dtype="float32")
    device: Any = llm.engine._device
    sample, calls = device.graphs.sample, itertools.count(1)

    def starve(size: Any) -> Any:
        if next(calls) % 4 == 0:
            raise torch.OutOfMemoryError("none left")
        return sample(size)

    monkeypatch.setattr(device.graphs, "sample", starve)
    assert tokens_of(llm) == known


@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
def test_drafts_of_constrained_rows_are_judged_under_a_mask_each(
    checkpoint: str, on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More masks than the batch has rows: one for every position of each window."""
    monkeypatch.setattr(machine, "has_gpu_kernels", lambda device: on_gpu)
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=24, structured=JSON)

    def serve(num_drafts: int) -> list[tuple[int, ...]]:
        llm = LLM(checkpoint, device="cpu", dtype="float32", max_batch_size=4, use_overlap=False)
        engine, made = llm.engine, {str(number): list[int]() for number in range(4)}
        for number in range(4):
            engine.add(Request(request_id=str(number), prompt=tuple(PROMPTS[number]), params=params))
        while engine.has_work:
            for seq in engine.scheduler.running if num_drafts else ():
                if seq.num_pending == 1 and seq.num_output > 0:
                    engine.scheduler.propose(
                        seq, [*KNOWN[seq.request_id][seq.num_output :][:2], 11][:num_drafts]
                    )
            for output in engine.step():
                assert output.error is None
                made[output.request_id] += output.token_ids
        return [tuple(ids) for ids in made.values()]

    KNOWN.update({str(number): () for number in range(4)})
    expected = serve(0)
    KNOWN.update({str(number): ids for number, ids in enumerate(expected)})
    assert serve(3) == expected


KNOWN: dict[str, tuple[int, ...]] = {}
