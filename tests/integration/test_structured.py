"""Constraints on a real model: valid outputs, the same tokens however steps are made, records that replay."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from infer import LLM, SamplingParams, Structured
from infer.config.settings import EngineConfig
from infer.engine import machine
from infer.engine.build import build_engine
from infer.engine.engine import Engine
from infer.engine.observer import EngineObserver
from infer.errors import RequestError
from infer.execution.device import PendingStep
from infer.execution.gpu.device import GpuDevice
from infer.execution.order import StepOrder
from infer.frontend.async_llm import AsyncLLM
from infer.loader.find.source import resolve_model
from infer.loader.load import LoadedModel, load_model
from infer.scheduling.request import Request
from infer.scheduling.sequence import Sequence
from infer.tokenizer.tokenizer import Tokenizer
from infer.tools.record import Record, Recorder
from infer.tools.replay import replay_model
from tests.support.thinned import thinned
from tests.support.tiny import drain

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "role": {"enum": ["user", "admin"]},
    },
    "required": ["name", "age", "role"],
    "additionalProperties": False,
}
TRIGGERED = Structured.regex("[0-9]{3};", triggers=("e", "t", " "))
PARAMS: list[dict[str, Any]] = [
    {"structured": {"json_schema": PERSON}},
    {"structured": {"json_schema": PERSON}, "temperature": 1.0, "seed": 3},
    {"structured": {"json_schema": PERSON, "whitespace": " "}, "presence_penalty": 1, "logit_bias": {9: 2}},
    {"structured": {"choice": ["yes", "no", "not sure"]}, "temperature": 1.0, "seed": 1, "n": 3},
    {"structured": {"regex": "[a-f]{3}-[0-9]{2}"}, "temperature": 1, "top_p": 0.9, "seed": 2, "logprobs": 1},
    {"structured": {"grammar": 'start: "<" /[a-z]{2,5}/ ">" '}, "frequency_penalty": 0.5, "min_tokens": 30},
    {"structured": TRIGGERED, "temperature": 1.0, "seed": 5},
    {"reasoning": {"end_id": 7, "max_tokens": 3, "forced": (9, 7)}, "structured": {"choice": ["ab", "cd"]}},
    {"temperature": 1.0, "seed": 6, "ignore_eos": True},
    {"structured": {"json_object": True}, "temperature": 1.0, "seed": 7, "best_of": 2},
]
KNOBS: list[dict[str, Any]] = [
    {"max_batch_size": 3},
    {"use_chunked_prefill": False},
    {"prefill_chunk_size": 3, "max_num_batched_tokens": 16},
    {"use_prefix_caching": False},
    {"block_size": 4, "num_blocks": 34, "preemption": "recompute"},
    {"block_size": 4, "num_blocks": 34, "preemption": "swap", "swap_blocks": 60},
    {"kv_cache_backend": "naive"},
]
DEVICE_KNOBS = [{}, {"use_overlap": False}, KNOBS[2], KNOBS[4], KNOBS[5]]


@pytest.fixture(scope="module")
def loaded(checkpoint: str) -> LoadedModel:
    source = resolve_model(checkpoint, revision=None, show_progress=False)
    return load_model(source, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def usual(loaded: LoadedModel) -> dict[tuple[int, int], list[int]]:
    """What each request gets from an engine that has room for all."""
    return run(make_engine(loaded))


def make_engine(loaded: LoadedModel, observer: EngineObserver | None = None, **knobs: Any) -> Engine:
    config = EngineConfig.from_knobs(**({"num_blocks": 64, "max_seq_len": 120} | knobs))
    return build_engine(config, loaded, observer=observer)


def run(engine: Engine) -> dict[tuple[int, int], list[int]]:
    tokens: dict[tuple[int, int], list[int]] = {}
    for number, given in enumerate(PARAMS):
        params = SamplingParams(**({"temperature": 0.0, "max_tokens": 60} | given))
        prompt = tuple((5 * number + i) % 200 + 20 for i in range(3 + 4 * number))
        engine.add(Request(request_id=str(number), prompt=prompt, params=params))
    for output in drain(engine):
        assert output.finish_reason != "error", output
        tokens.setdefault((int(output.request_id), output.index), []).extend(output.token_ids)
    return tokens


def check_texts(tokens: dict[tuple[int, int], list[int]], checkpoint: str) -> None:
    """Raise unless each output is what its request asked for."""
    tokenizer = Tokenizer.from_directory(Path(checkpoint))
    texts = {key: tokenizer.decode(ids) for key, ids in tokens.items()}
    for number in (0, 1, 2):
        if len(tokens[number, 0]) < 60:
            jsonschema.validate(json.loads(texts[number, 0]), PERSON)
    assert {texts[3, index] for index in range(3)} <= {"yes", "no", "not sure"}
    assert re.fullmatch("[a-f]{3}-[0-9]{2}", texts[4, 0])
    assert re.fullmatch("<[a-z]{2,5}>", texts[5, 0])
    assert tuple(tokens[7, 0][3:5]) == (9, 7) and tokenizer.decode(tokens[7, 0][5:]) in ("ab", "cd")


def test_what_comes_out_is_what_was_asked_for(
    usual: dict[tuple[int, int], list[int]], checkpoint: str
) -> None:
    check_texts(usual, checkpoint)


@pytest.mark.parametrize("knobs", thinned(KNOBS, keep=2), ids=str)
def test_no_setting_changes_a_token(
    loaded: LoadedModel, usual: dict[tuple[int, int], list[int]], knobs: dict[str, Any]
) -> None:
    engine = make_engine(loaded, **knobs)
    assert run(engine) == usual
    if "preemption" in knobs:
        assert engine.scheduler.num_preemptions


def test_jumps_change_no_token(loaded: LoadedModel, usual: dict[tuple[int, int], list[int]]) -> None:
    engine = make_engine(loaded)
    engine._guided.jumps = False
    assert run(engine) == usual


@pytest.mark.parametrize("knobs", thinned(DEVICE_KNOBS, keep=2), ids=str)
def test_the_device_half_of_a_gpu_gives_the_same_tokens(
    loaded: LoadedModel,
    usual: dict[tuple[int, int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
    knobs: dict[str, Any],
) -> None:
    """With state on the device and a step ahead: rows whose tokens were forced are sent anew."""
    monkeypatch.setattr(machine, "has_gpu_kernels", lambda device: True)
    engine = make_engine(loaded, **knobs)
    assert isinstance(engine._device, GpuDevice)
    grown: list[int] = []
    grow = engine.scheduler.state.grow

    def grow_and_note(seq: Sequence, count: int) -> None:
        grown.append(count)
        grow(seq, count)

    monkeypatch.setattr(engine.scheduler.state, "grow", grow_and_note)
    monkeypatch.setattr(engine._guided, "is_worth_it", lambda *_: True)
    assert run(engine) == usual
    assert len(grown) > 5 and max(grown) > 1


@pytest.mark.parametrize("on_device", [False, True])
def test_steps_are_counted_once(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, on_device: bool
) -> None:
    """A plan that finds nothing to do, because the ids of a step are awaited, is not a step."""
    if on_device:
        monkeypatch.setattr(machine, "has_gpu_kernels", lambda device: True)
    engine = make_engine(loaded)
    num_orders, device_run = 0, engine._device.run

    def count_and_run(order: StepOrder) -> PendingStep:
        nonlocal num_orders
        num_orders += 1
        return device_run(order)

    monkeypatch.setattr(engine._device, "run", count_and_run)
    run(engine)
    stats = engine.stats()
    assert stats.num_steps == sum(stats.step_sizes) == num_orders


@pytest.mark.parametrize("on_device", [False, True])
def test_a_record_of_constrained_requests_is_replayed(
    checkpoint: str,
    loaded: LoadedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    on_device: bool,
) -> None:
    if on_device:
        monkeypatch.setattr(machine, "has_gpu_kernels", lambda device: True)
    with Recorder(tmp_path / "record.jsonl") as recorder:
        engine = make_engine(loaded, recorder, block_size=4, num_blocks=34)
        run(engine)
    replay = replay_model(Record(tmp_path / "record.jsonl"), checkpoint, device="cpu", show_progress=False)
    report = replay.run()
    assert report.difference is None and report.num_steps == recorder.num_steps


def test_llm_takes_a_constraint_and_says_what_is_wrong_with_it(checkpoint: str) -> None:
    with LLM(checkpoint, device="cpu", dtype="float32") as llm:
        params = SamplingParams(structured=Structured.choice(["yes", "no"]), max_tokens=8)
        answers = llm.generate(["a", "b"], params)
        assert {answer.text for answer in answers} <= {"yes", "no"}
        assert all(answer.outputs[0].finish_reason == "stop" for answer in answers)
        pieces = [delta.text for delta in llm.stream("a", params)]
        assert "".join(pieces) in ("yes", "no")
        with pytest.raises(RequestError, match="unclosed group"):
            llm.generate("a", SamplingParams(structured=Structured(kind="regex", text="("), max_tokens=8))


def test_min_tokens_holds_back_an_end_that_is_optional_and_no_other(checkpoint: str) -> None:
    with LLM(checkpoint, device="cpu", dtype="float32") as llm:
        (eos, *_) = llm.engine._eos_ids
        for pattern, min_tokens, most in (("[a-z]*", 0, 1), ("[a-z]*", 7, 8), ("[a-f]{3}", 7, 3)):
            params = SamplingParams(
                structured={"regex": pattern},  # type: ignore[arg-type]
                logit_bias={eos: 100.0},
                min_tokens=min_tokens,
                max_tokens=20,
            )
            (output,) = llm.generate("a", params)[0].outputs
            assert output.finish_reason == "stop" and len(output.token_ids) <= most
            assert len(output.token_ids) == most or pattern == "[a-f]{3}"


def test_async_llm_compiles_aside_and_raises_late(checkpoint: str) -> None:
    async def main() -> None:
        async with AsyncLLM(checkpoint, device="cpu", dtype="float32") as llm:
            good = SamplingParams(structured=Structured.json_schema(PERSON), max_tokens=60, temperature=0.0)
            wrong = Structured(kind="regex", text="(", param="guided_regex")
            bad = SamplingParams(structured=wrong, max_tokens=8)
            free = SamplingParams(max_tokens=20, ignore_eos=True)
            answer, error, other = await asyncio.gather(
                llm.generate("a", good),
                llm.generate("b", bad),
                llm.generate("c", free),
                return_exceptions=True,
            )
            assert not isinstance(answer, BaseException) and not isinstance(other, BaseException)
            assert isinstance(error, RequestError) and error.param == "guided_regex"
            assert answer.text.startswith("{")

    asyncio.run(main())
