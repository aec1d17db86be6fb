"""What cannot work is refused while nothing is loaded yet: a large model takes minutes to read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from infer.async_llm import AsyncLLM
from infer.config import EngineConfig
from infer.engine import build, process
from infer.engine.memory_plan import count_parameters, find_machine, plan_memory, stored_parameters
from infer.errors import ConfigError
from infer.llm import LLM
from infer.loader import load
from infer.loader.load import read_headers
from infer.loader.source import resolve_model
from scripts.make_checkpoint import make_checkpoint


@pytest.fixture
def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*args: Any, **options: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(load, "_fill", fill)


def start_engine_process(model: str, **knobs: Any) -> None:
    process.load_engine(EngineConfig.from_knobs(model=model, **knobs))


@pytest.mark.usefixtures("nothing_is_read")
@pytest.mark.parametrize("start", [LLM, AsyncLLM, start_engine_process])
@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"max_seq_len": 9999}, "max_seq_len must be in 1..256"),
        ({"kv_cache_memory": "1KiB"}, "one block of 16 tokens takes"),
        (
            {"kv_cache_memory": "1KiB", "kv_cache_backend": "contiguous"},
            "one sequence of max_seq_len 256 takes",
        ),
        ({"kv_cache_memory": "1000TiB"}, "kv_cache_memory=1000TiB is more than there is"),
        ({"num_blocks": 10**10}, "num_blocks=10000000000 .* is more than there is: .*; set num_blocks="),
        ({"num_host_blocks": 10**10}, "; set num_host_blocks="),
        (
            {"use_chunked_prefill": False, "max_num_batched_tokens": 64},
            "without chunked prefill a step must hold",
        ),
        ({"attention_backend": "triton"}, "attention_backend=triton needs a GPU"),
        ({"use_cuda_graphs": True}, "use_cuda_graphs needs .* a GPU, and the model is on cpu; leave it out"),
        ({"use_overlap": True}, "use_overlap needs .* a GPU, and the model is on cpu; leave it out"),
        (
            {"deterministic": True, "attention_backend": "naive"},
            "deterministic needs the attention kernel in C",
        ),
    ],
)
def test_impossible_settings_are_refused_before_a_weight_is_read(
    checkpoint: str, start: Callable[..., object], knobs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        start(checkpoint, device="cpu", **knobs)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"use_cpu_program": True}, "use_cpu_program is for a model on a CPU, and this one is on cuda"),
        (
            {"use_cuda_graphs": True, "attention_backend": "sdpa"},
            "is on cuda with attention_backend=sdpa, which is plain PyTorch; leave it out",
        ),
        ({"use_cuda_graphs": True, "use_overlap": True}, None),
        ({"use_cuda_graphs": False, "use_cpu_program": False, "attention_backend": "sdpa"}, None),
    ],
)
def test_what_would_do_nothing_on_a_gpu_is_refused(knobs: dict[str, Any], message: str | None) -> None:
    config, device = EngineConfig.from_knobs(**knobs), torch.device("cuda")
    with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
        build.check_steps(config, device)


@pytest.mark.usefixtures("nothing_is_read")
def test_weights_that_leave_no_room_are_counted_before_they_are_read(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_parameters, _ = count_parameters(read_headers(resolve_model(checkpoint)))
    monkeypatch.setattr(build, "free_host_bytes", lambda: 4 * num_parameters + 1000)
    with pytest.raises(ConfigError, match="1000 B are free once the weights are there"):
        LLM(checkpoint, device="cpu", dtype="float32")


@pytest.mark.usefixtures("nothing_is_read")
def test_what_may_work_goes_on_to_the_weights(checkpoint: str) -> None:
    with pytest.raises(AssertionError, match="weights were read"):
        LLM(checkpoint, device="cpu", num_blocks=1, max_seq_len=200)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2", "mixtral"])
def test_the_headers_count_as_many_parameters_as_the_network(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path / family)
    headers = read_headers(resolve_model(str(tmp_path / family)))
    assert stored_parameters(headers) == count_parameters(headers)[0]


@pytest.mark.parametrize(
    ("device", "memory", "tokens"),
    [("cpu", None, 512), ("cuda", 24 << 30, 8192), ("cuda", 63 << 30, 8192), ("cuda", 80 << 30, 16384)],
)
def test_a_step_is_longer_where_there_is_memory_for_it(device: str, memory: int | None, tokens: int) -> None:
    defaults = build.step_defaults(torch.device(device), memory)
    scheduler = build.resolve_scheduler(EngineConfig.from_knobs(), 4096, defaults)
    assert scheduler.max_num_batched_tokens == tokens


def test_a_plan_for_a_gpu_that_is_half_used_has_the_steps_of_its_engine(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are as long as the GPU's memory allows, whatever is free of it at the moment."""
    monkeypatch.setattr("infer.engine.memory_plan.choose_device", torch.device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 << 30, 80 << 30))
    machine = find_machine("cuda", None)
    headers = read_headers(resolve_model(checkpoint))
    config, same = EngineConfig.from_knobs(), EngineConfig.from_knobs(max_num_batched_tokens=16384)
    plan, expected = (plan_memory(each, headers, machine, dtype="float32") for each in (config, same))
    assert machine.memory == 40 << 30
    assert plan.activations == expected.activations
