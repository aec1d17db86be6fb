"""What settings mean on a machine: decided once, without asking the machine that runs the tests."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from infer.cache.kv_store import crossing_bytes
from infer.cache.layout import KVLayout
from infer.cache.memory import CacheSize
from infer.config.machine_rules import Machine, ModelFacts
from infer.config.profiles.generic import GENERIC
from infer.config.resolve import ResolvedConfig, resolve
from infer.config.settings import FAST_PRODUCTS_COST, EngineConfig
from infer.engine.speculation_build import draft_bytes
from infer.engine.start_line import describe_engine
from infer.errors import ConfigError
from infer.execution.gpu.graphs import most_tokens
from infer.models.config import ModelConfig

CPU = Machine(device="cpu", has_c_attention=True)
GPU = Machine(device="cuda:0", gpu_memory=80 << 30, has_gpu_kernels=True, profile=GENERIC)
SMALL = ModelFacts(max_seq_len=4096, num_layer_weights=10**9)
LARGE = ModelFacts(max_seq_len=4096, num_layer_weights=10**10, dtype="bfloat16")


def resolved(machine: Machine, model: ModelFacts = SMALL, **knobs: Any) -> ResolvedConfig:
    return resolve(EngineConfig.from_knobs(**knobs), machine, model)


def packed(**knobs: Any) -> ResolvedConfig:
    return resolved(CPU, replace(SMALL, weights="int4"), **knobs)


def test_every_limit_of_the_scheduler_is_decided() -> None:
    for machine in (CPU, GPU):
        scheduler = resolved(machine).scheduler
        for field in fields(scheduler):
            if field.name not in ("max_queue", "max_prefill_chunks_per_step"):  # None: no limit
                assert getattr(scheduler, field.name) is not None, field.name


def test_a_step_is_as_wide_as_its_tokens_allow() -> None:
    assert resolved(CPU, max_num_batched_tokens=16).scheduler.max_batch_size == 16
    assert resolved(CPU, max_batch_size=1000).scheduler.max_num_batched_tokens == 1000


@pytest.mark.parametrize(
    ("gib", "model", "expected"),
    [
        (8, SMALL, (256, 8192)),
        (8, LARGE, (32, 1024)),
        (12, LARGE, (32, 1024)),
        (15, LARGE, (256, 8192)),
        (80, LARGE, (256, 16384)),
    ],
)
def test_a_large_model_has_small_steps_where_memory_is_tight(
    gib: int, model: ModelFacts, expected: tuple[int, int]
) -> None:
    scheduler = resolved(replace(GPU, gpu_memory=gib << 30), model).scheduler
    assert (scheduler.max_batch_size, scheduler.max_num_batched_tokens) == expected


@pytest.mark.parametrize(
    ("machine", "model", "knobs", "expected"),
    [
        (CPU, SMALL, {}, (False, False, 0)),
        (GPU, SMALL, {}, (True, True, 3)),
        (GPU, LARGE, {}, (True, True, 1)),
        (GPU, SMALL, {"use_overlap": False}, (True, True, 0)),
        (GPU, SMALL, {"enforce_eager": True}, (True, False, 3)),
        (GPU, SMALL, {"attention_backend": "sdpa"}, (False, False, 0)),
        (GPU, SMALL, {"kv_cache_backend": "naive"}, (True, True, 0)),
    ],
)
def test_what_runs_a_step_follows_from_the_machine_and_the_knobs(
    machine: Machine, model: ModelFacts, knobs: dict[str, Any], expected: tuple[bool, bool, int]
) -> None:
    config = resolved(machine, model, **knobs)
    assert (config.uses_gpu_device, config.use_cuda_graphs, config.steps_ahead) == expected


def test_decisions_have_reasons_and_what_was_given_has_none() -> None:
    reasons = resolved(CPU, max_batch_size=7).reasons
    assert reasons["max_num_batched_tokens"] == "512 is the default on a CPU"
    assert "max_batch_size" not in reasons
    assert resolved(GPU).reasons["prefill_tokens_while_decoding"] == (
        "8192 is the default for a small model on a GPU"
    )


@pytest.mark.parametrize(
    ("machine", "model", "knobs", "expected"),
    [
        (GPU, replace(SMALL, num_layer_weights=440_000_000, num_layers=28), {}, 4096),
        (GPU, replace(SMALL, num_layer_weights=973_000_000, num_layers=16), {}, 16384),
        (GPU, replace(LARGE, num_layers=1000), {}, 16384),
        (CPU, replace(SMALL, num_layer_weights=440_000_000, num_layers=28), {}, 512),
        (GPU, replace(SMALL, num_layers=1000), {"use_chunked_prefill": False}, 16384),
        (GPU, replace(SMALL, num_layers=1000), {"max_num_batched_tokens": 8192}, 8192),
        (GPU, replace(SMALL, num_layers=1000), {"prefill_tokens_while_decoding": 512}, 16384),
        (GPU, replace(SMALL, num_layers=1000), {"itl_target_ms": 20.0}, 16384),
        (GPU, replace(SMALL, num_layers=1000), {"enforce_eager": True}, 16384),
        (GPU, replace(SMALL, num_layers=1000), {"attention_backend": "sdpa"}, 16384),
    ],
)
def test_short_prompts_are_packed_where_launching_takes_longer_than_computing(
    machine: Machine, model: ModelFacts, knobs: dict[str, Any], expected: int
) -> None:
    assert resolved(machine, model, **knobs).scheduler.packed_step_tokens == expected


@pytest.mark.parametrize("layer_weights", [1e6, 15.7e6, 24e6, 25e6, 61e6, 2e8])
@pytest.mark.parametrize("machine", [GPU, replace(GPU, gpu_memory=24 << 30)])
def test_a_packed_step_is_a_graph(machine: Machine, layer_weights: float) -> None:
    model = replace(SMALL, num_layer_weights=int(layer_weights) * 4, num_layers=4)
    scheduler = resolved(machine, model).scheduler
    if scheduler.packed_step_tokens < scheduler.max_num_batched_tokens:
        config = SimpleNamespace(all_layer_weights=model.num_layer_weights, num_layers=4)
        most = most_tokens(cast(ModelConfig, config), scheduler.max_num_batched_tokens, GENERIC.graphs)
        assert scheduler.packed_step_tokens <= most
    else:
        assert layer_weights > 24e6


def test_the_start_line_says_what_another_setting_turns_off() -> None:
    config = resolved(CPU, kv_cache_backend="contiguous")
    line = describe_engine("tiny", config, CacheSize(4, 16, 1024), attention=config.backends[:2])
    assert line.startswith("engine built model=tiny max_seq_len=4096 max_batch_size=64 kv_cache=64.0KiB ")
    assert " prefix_caching=off " in line
    assert line.endswith('note="use_prefix_caching is off, because kv_cache_backend is contiguous"')
    plain = describe_engine("tiny", resolved(CPU), CacheSize(4, 16, 1024), attention=("c", "sdpa"))
    assert " preemption=recompute device=cpu " in plain
    assert " attention=c decode_attention=sdpa mlp=kernels " in plain
    assert " prefix_caching=on " in plain and "note=" not in plain


def test_the_start_line_names_ranks_stages_and_the_host_tier_on_a_cpu() -> None:
    config = resolved(CPU, tensor_parallel_size=2, pipeline_parallel_size=3, swap_blocks=8)
    size = CacheSize(4, 16, 1024, num_host_blocks=8)
    line = describe_engine("tiny", config, size, attention=("c", "c"))
    assert " ranks=2 stages=3 " in line and " host_cache=128.0KiB " in line


def test_a_head_that_drafts_counts_the_buffer_of_its_blocks_on_their_way_to_the_host() -> None:
    head, layout = ModelConfig(
        family="llama", vocab_size=100, hidden_size=64, num_layers=1, num_heads=4, num_kv_heads=2,
        head_dim=16, intermediate_size=128, context_len=256, norm_eps=1e-5, activation="silu",
        tie_embeddings=False,
    ), KVLayout.whole(1)  # fmt: skip
    found = [
        draft_bytes(resolved(GPU, swap_blocks=blocks), head, torch.bfloat16, layout, states_width=192).step
        for blocks in (0, 8)
    ]
    assert found[1] - found[0] == crossing_bytes(16 * 2 * 2 * 16 * 2)


def test_the_start_line_says_what_fast_products_cost() -> None:
    line = describe_engine("tiny", packed(), CacheSize(4, 16, 1024), attention=("c", "c"))
    assert " weights=int4 products=exact " in line
    line = describe_engine("tiny", packed(cpu_products="fast"), CacheSize(4, 16, 1024), attention=("c", "c"))
    assert f' products="fast, activations in 8 bits: {FAST_PRODUCTS_COST}" ' in line
    line = describe_engine("tiny", resolved(CPU), CacheSize(4, 16, 1024), attention=("c", "c"))
    assert "products=" not in line


def test_fast_products_need_integers_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match="int8 or int4 on a CPU, and these are as stored on cuda"):
        resolved(GPU, cpu_products="fast")
    with pytest.raises(ConfigError, match="int8 or int4 on a CPU, and these are as stored on cpu"):
        resolved(CPU, cpu_products="fast")
    with pytest.raises(ConfigError, match="cpu_products must be one of exact, fast"):
        packed(cpu_products="quick")


def test_the_start_line_says_that_contiguous_slots_have_a_size_of_their_own() -> None:
    config = resolved(CPU, kv_cache_backend="contiguous", block_size=8)
    line = describe_engine("tiny", config, CacheSize(4, 16, 1024), attention=("c", "c"))
    assert line.endswith('; block_size is 4096 (max_seq_len), because kv_cache_backend is contiguous"')
    assert "block_size" not in resolved(CPU, block_size=8).overruled


def test_deterministic_needs_a_kernel_that_can() -> None:
    assert resolved(GPU, deterministic=True).backends == ("invariant", "invariant", "kernels")
    with pytest.raises(ConfigError, match="deterministic needs attention_backend=auto or triton, not flash"):
        resolved(GPU, deterministic=True, attention_backend="flash")
    with pytest.raises(ConfigError, match="deterministic needs the attention kernel in C"):
        resolved(Machine(device="cpu"), deterministic=True)


def test_the_start_line_names_knobs_that_another_turns_off() -> None:
    config = resolved(CPU, kv_cache_backend="naive")
    line = describe_engine("tiny", config, CacheSize(4, 16, 1024), attention=("c", "c"))
    assert line.endswith('note="use_prefix_caching is off, because kv_cache_backend is naive"')
