"""Token masks on a real GPU: rows under one beside rows without, and the tokens are those of the CPU."""

from __future__ import annotations

import json
import random
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from infer import LLM, SamplingParams
from infer.constraints.description import Structured
from infer.execution.gpu.device import GpuDevice
from infer.scheduling.request import Request
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.gpu.graphs import FEW_SIZES
from tests.kernels.step_contract import SampledRows, asking_params
from tests.support.masked import mask_steps
from tests.support.tiny import drain

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
VOCAB_SIZE = 397  # no multiple of 32
PROMPTS = [[(7 * i + j) % 200 + 10 for j in range(3 + 5 * (i % 6))] for i in range(12)]
FEW: dict[str, Any] = FEW_SIZES | {"max_batch_size": 16}  # all of these and their forks run together
KNOBS: list[dict[str, Any]] = [
    {},
    {"use_cuda_graphs": False},
    {"use_overlap": False},
    {"use_cuda_graphs": False, "use_overlap": False},
    {"max_batch_size": 5, "prefill_chunk_size": 5},
    {"block_size": 4, "num_blocks": 40, "preemption": "recompute"},
    {"block_size": 4, "num_blocks": 40, "preemption": "swap", "swap_blocks": 60},
    {"deterministic": True},
]


@pytest.mark.parametrize("vocab_size", [31, 33, 32_000, 49_152, 128_257, 151_936])
def test_masks_of_real_vocabularies(vocab_size: int) -> None:
    """Every third row, beside biases, bans and penalties."""
    source, num_rows = random.Random(vocab_size), 48
    params = [asking_params(source, vocab_size, number) for number in range(num_rows)]
    rows = SampledRows(params, DEVICE, seed=5, vocab_size=vocab_size)
    rows.mask_some(range(1, num_rows, 3))
    generator = torch.Generator().manual_seed(vocab_size)
    rows.check((torch.randn(num_rows, vocab_size, generator=generator) * 3).bfloat16().to(DEVICE))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory: Path = tmp_path_factory.mktemp("tiny") / "qwen3"
    make_checkpoint("qwen3", directory, sizes=Sizes(vocab_size=VOCAB_SIZE))
    return str(directory)


def allow(request_id: str, position: int) -> Collection[int] | None:
    """Other ids at every position for two of three requests, some of which are free now and then."""
    number = int(request_id)
    if number % 3 == 0 or number % 3 == 1 and position % 4 == 2:
        return None
    return {VOCAB_SIZE - 1, *range((number + position) % 7, VOCAB_SIZE, 5 + 11 * (number % 2))}


def params_of(number: int) -> SamplingParams:
    kinds: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.2},
        {"temperature": 0.9, "top_p": 0.9, "seed": number},
        {"n": 2, "temperature": 1.0, "seed": number},
    ]
    return SamplingParams(
        **({"temperature": 0.0} | kinds[number % 4]), max_tokens=20 + number, ignore_eos=True
    )


def masked_tokens(directory: str, device: str, **knobs: Any) -> dict[tuple[str, int], list[int]]:
    engine = LLM(directory, device=device, dtype="float32", **(FEW | knobs)).engine
    counts = mask_steps(engine, allow)
    for number, prompt in enumerate(PROMPTS):
        engine.add(Request(request_id=str(number), prompt=tuple(prompt), params=params_of(number)))
    tokens: dict[tuple[str, int], list[int]] = {}
    for output in drain(engine):
        assert output.finish_reason != "error", output
        tokens.setdefault((output.request_id, output.index), []).extend(output.token_ids)
    assert max(counts) > 1
    return tokens


def test_rows_under_masks_have_the_tokens_of_the_cpu(checkpoint: str) -> None:
    expected = masked_tokens(checkpoint, "cpu")
    for (request_id, _), ids in expected.items():
        for position, token_id in enumerate(ids):
            allowed = allow(request_id, position)
            assert allowed is None or token_id in allowed
    for knobs in KNOBS:
        assert masked_tokens(checkpoint, DEVICE, **knobs) == expected, knobs


def test_after_prepare_steps_under_masks_capture_nothing(checkpoint: str) -> None:
    engine = LLM(checkpoint, device=DEVICE, dtype="bfloat16", **FEW).engine
    while engine.prepare():
        pass
    device = engine._device
    assert isinstance(device, GpuDevice)
    num_graphs, reserved = len(device.graphs._graphs), torch.cuda.memory_reserved()
    mask_steps(engine, allow)
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        engine.add(Request(request_id=str(number), prompt=tuple(prompt), params=params))
    drain(engine)
    assert len(device.graphs._graphs) == num_graphs
    assert torch.cuda.memory_reserved() <= reserved + (32 << 20)


# -- real constraints -------------------------------------------------------------------------------------

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "kind": {"enum": ["engine", "river", "clock"]},
            "counts": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
        },
        "required": ["name", "kind", "counts"],
        "additionalProperties": False,
    }
)
CONSTRAINTS: list[Structured | None] = [
    Structured(kind="json_schema", text=SCHEMA),
    None,
    Structured(kind="regex", text="(the|river|[0-9]{2,4}) ?(runs|turns){1,3}"),
    Structured(kind="choice", text=json.dumps(["the engine", "the clock", "the river"])),
    None,
    Structured(kind="json_object"),
]


def constrained(directory: str, device: str, **knobs: Any) -> tuple[list[list[int]], list[str]]:
    """The tokens and the texts of constrained requests beside free ones."""
    llm = LLM(directory, device=device, dtype="float32", **(FEW | knobs))
    params = [
        SamplingParams(temperature=0.0, max_tokens=60, structured=CONSTRAINTS[number % len(CONSTRAINTS)])
        for number in range(len(PROMPTS))
    ]
    answers = llm.generate(PROMPTS, params)
    return [answer.token_ids for answer in answers], [answer.text for answer in answers]


def test_constrained_rows_have_the_tokens_of_the_cpu(checkpoint: str) -> None:
    pytest.importorskip("llguidance")
    expected = constrained(checkpoint, "cpu")
    for knobs in KNOBS:
        assert constrained(checkpoint, DEVICE, **knobs) == expected, knobs


@pytest.mark.parametrize("use_cuda_graphs", [True, False])
def test_what_was_sampled_matches_its_constraint(checkpoint: str, use_cuda_graphs: bool) -> None:
    """At a temperature, so that tokens come that the model would hardly choose."""
    pytest.importorskip("llguidance")
    jsonschema = pytest.importorskip("jsonschema")
    llm = LLM(checkpoint, device=DEVICE, dtype="bfloat16", use_cuda_graphs=use_cuda_graphs, **FEW)
    params = [
        SamplingParams(
            temperature=1.0, seed=number, max_tokens=200, structured=CONSTRAINTS[0] if number % 2 else None
        )
        for number in range(24)
    ]
    answers = llm.generate([PROMPTS[number % 12] for number in range(24)], params)
    ended = [answer.outputs[0] for answer in answers[1::2]]
    assert any(output.finish_reason == "stop" for output in ended)
    for output in ended:
        if output.finish_reason == "stop":
            jsonschema.validate(json.loads(output.text), json.loads(SCHEMA))
        else:
            assert output.finish_reason == "length" and output.text.lstrip().startswith("{")
