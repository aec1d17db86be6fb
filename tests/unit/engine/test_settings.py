"""What cannot work is refused while nothing is loaded yet: a large model takes minutes to read."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from infer.client import process
from infer.config.knobs import refuse
from infer.config.machine_rules import Machine, ModelFacts, device_faults
from infer.config.profiles.cpu import CPU
from infer.config.profiles.generic import GENERIC
from infer.config.resolve import ResolvedScheduler, resolve
from infer.config.settings import EngineConfig
from infer.engine import cache_fit
from infer.engine.device_build import resolve_for
from infer.errors import ConfigError
from infer.frontend.async_llm import AsyncLLM
from infer.frontend.llm import LLM
from infer.loader import load
from infer.loader.find.source import resolve_model
from infer.loader.headers import ModelHeaders, read_headers
from infer.loader.load import LoadChoice
from infer.loader.quantization import Rule
from infer.loader.weight_plan import WeightPlan, num_weights, plan_weights
from infer.models.config import ModelConfig
from infer.tools.memory_needs import find_machine
from infer.tools.memory_plan import plan_memory
from scripts.make_checkpoint import make_checkpoint


@pytest.fixture
def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*args: Any, **options: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(load, "_fill", fill)


def plan_of(headers: ModelHeaders) -> WeightPlan:
    return plan_weights(headers, quantization="none", dtype="float32", device=torch.device("cpu"))


@pytest.fixture
def headers(checkpoint: str) -> ModelHeaders:
    return read_headers(resolve_model(checkpoint))


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
        ({"device_memory": "1MiB"}, r"it needs [\d.]+ [KMG]iB next to [\d.]+ [KMG]iB of this process, "),
        ({"num_blocks": 10**10}, "num_blocks=10000000000 .* is more than there is: .*; set num_blocks="),
        ({"swap_blocks": 10**10}, "; set swap_blocks="),
        (
            {"use_chunked_prefill": False, "max_num_batched_tokens": 64},
            "without chunked prefill a step must hold .*, or turn use_chunked_prefill on$",
        ),
        (
            {"kv_cache_backend": "naive", "max_num_batched_tokens": 64},
            "without chunked prefill a step must hold .*, or use another kv_cache_backend than naive$",
        ),
        ({"attention_backend": "triton"}, "attention_backend=triton needs a GPU"),
        ({"use_cuda_graphs": True}, "use_cuda_graphs needs .* a GPU, and the model is on cpu; leave it out"),
        ({"use_overlap": True}, "use_overlap needs .* a GPU, and the model is on cpu; leave it out"),
        (
            {"deterministic": True, "attention_backend": "naive"},
            "deterministic needs attention_backend=auto or c, not torch_ref; leave one of the two out",
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
        ({"record_cpu_step": True}, "record_cpu_step is for a model on a CPU, and this one is on cuda"),
        (
            {"use_cuda_graphs": True, "attention_backend": "sdpa"},
            "is on cuda with attention_backend=sdpa, which is plain PyTorch; leave it out",
        ),
        ({"use_cuda_graphs": True, "use_overlap": True}, None),
        ({"use_cuda_graphs": False, "record_cpu_step": False, "attention_backend": "sdpa"}, None),
    ],
)
def test_what_would_do_nothing_on_a_gpu_is_refused(knobs: dict[str, Any], message: str | None) -> None:
    config, machine = EngineConfig.from_knobs(**knobs), Machine(device="cuda", has_gpu_kernels=True)
    with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
        refuse(device_faults(config, machine))


@pytest.mark.usefixtures("nothing_is_read")
def test_weights_that_leave_no_room_are_counted_before_they_are_read(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_parameters = num_weights(plan_of(read_headers(resolve_model(checkpoint))).skeleton)
    monkeypatch.setattr(cache_fit, "free_host_bytes", lambda: 4 * num_parameters + 1000)
    with pytest.raises(ConfigError, match="1000 B are free once the weights are loaded"):
        LLM(checkpoint, device="cpu", dtype="float32")


@pytest.mark.usefixtures("nothing_is_read")
def test_what_may_work_goes_on_to_the_weights(checkpoint: str) -> None:
    with pytest.raises(AssertionError, match="weights were read"):
        LLM(checkpoint, device="cpu", num_blocks=1, max_seq_len=200)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2", "mixtral"])
def test_the_headers_count_as_many_parameters_as_the_network(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path / family)
    headers = read_headers(resolve_model(str(tmp_path / family)))
    stored = sum(math.prod(source.tensor.shape) for source in headers.sources if source.module)
    assert stored == num_weights(plan_of(headers).skeleton)


def model_of(
    num_layers: int, hidden_size: int, mlp_size: int, heads: tuple[int, int, int] = (32, 8, 64)
) -> ModelConfig:
    num_heads, num_kv_heads, head_dim = heads
    return ModelConfig(
        family="llama", vocab_size=128256, hidden_size=hidden_size, intermediate_size=mlp_size,
        num_layers=num_layers, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
        context_len=8192, norm_eps=1e-6, activation="silu", tie_embeddings=True,
    )  # fmt: skip


MODEL_06B = model_of(28, 1024, 3072, (16, 8, 128))  # 0.44 billion weights in its layers
MODEL_1B = model_of(16, 2048, 8192)  # 0.97 billion
MODEL_17B = model_of(24, 2048, 8192, (32, 32, 64))  # 1.61 billion
MODEL_8B = model_of(32, 4096, 14336, (32, 8, 128))
BOUNDARY = model_of(1, 1000, 497952, (1, 1, 1536))  # 1.5 billion: 1000 * (4 * 1536 + 3 * 497952)


def resolved_scheduler(
    device: str, memory: int | None, model: ModelConfig, **knobs: Any
) -> ResolvedScheduler:
    profile = GENERIC if device == "cuda" else CPU
    machine = Machine(device=device, gpu_memory=memory, has_gpu_kernels=device == "cuda", profile=profile)
    facts = ModelFacts(max_seq_len=4096, num_layer_weights=model.all_layer_weights)
    return resolve(EngineConfig.from_knobs(**knobs), machine, facts).scheduler


@pytest.mark.parametrize("model", [MODEL_1B, MODEL_8B])
@pytest.mark.parametrize(
    ("device", "memory", "tokens"),
    [("cpu", None, 512), ("cuda", 24 << 30, 8192), ("cuda", 63 << 30, 8192), ("cuda", 80 << 30, 16384)],
)
def test_a_step_is_longer_where_there_is_memory_for_it(
    model: ModelConfig, device: str, memory: int | None, tokens: int
) -> None:
    scheduler = resolved_scheduler(device, memory, model)
    assert scheduler.max_num_batched_tokens == tokens


@pytest.mark.parametrize(
    ("device", "model", "mixed"),
    [
        ("cuda", MODEL_06B, 8192),
        ("cuda", MODEL_1B, 8192),
        ("cuda", BOUNDARY, 8192),
        ("cuda", dataclasses.replace(BOUNDARY, intermediate_size=497953), 128),
        ("cuda", MODEL_17B, 128),
        ("cuda", MODEL_8B, 128),
        ("cpu", MODEL_06B, 128),
        ("cpu", MODEL_8B, 128),
    ],
)
@pytest.mark.parametrize("memory", [24 << 30, 80 << 30])
def test_beside_decoding_rows_a_small_model_on_a_gpu_computes_all_prompts(
    device: str, model: ModelConfig, mixed: int, memory: int
) -> None:

    def resolved(**knobs: Any) -> int | None:
        return resolved_scheduler(device, memory, model, **knobs).prefill_tokens_while_decoding

    assert resolved() == mixed
    assert resolved(prefill_tokens_while_decoding=77) == 77
    assert resolved(max_num_batched_tokens=16, max_batch_size=4) == 16  # no more than a step may have
    assert resolved(use_chunked_prefill=False, max_num_batched_tokens=4096) is None


@pytest.mark.parametrize(("model", "mixed"), [(MODEL_1B, 8192), (MODEL_8B, 128)])
def test_an_engine_has_the_steps_of_its_model(headers: ModelHeaders, model: ModelConfig, mixed: int) -> None:
    plan = dataclasses.replace(
        plan_of(headers),
        headers=dataclasses.replace(headers, config=model),
        skeleton=cast(Any, SimpleNamespace(config=model)),  # its config is all that is asked for
        device=torch.device("cuda"),
        rule=Rule("as stored", torch.bfloat16, "as the file has it", keeps_codes=True),
    )
    choice = LoadChoice(plan=plan, weights="as stored", max_seq_len=4096)
    assert resolve_for(EngineConfig.from_knobs(), choice).scheduler.prefill_tokens_while_decoding == mixed


def test_a_plan_for_a_gpu_that_is_half_used_has_the_steps_of_its_engine(
    headers: ModelHeaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are as long as the GPU's memory allows, whatever is free of it at the moment."""
    monkeypatch.setattr("infer.tools.memory_needs.choose_device", torch.device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 << 30, 80 << 30))
    machine = find_machine("cuda", None)
    config, same = EngineConfig.from_knobs(), EngineConfig.from_knobs(max_num_batched_tokens=16384)
    plan, expected = (plan_memory(each, headers, machine) for each in (config, same))
    assert machine.memory == 40 << 30
    assert plan.needs.step.activations == expected.needs.step.activations
