"""A KV cache in 8 bits: other numbers than float32, and always the same ones, whatever is turned on.

Weights are int8 on the C kernels, where a token's bits do not depend on its batch, chunk or cache; so what
reads another code or scale than was written shows in a token.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from infer.config.machine_rules import Machine, ModelFacts
from infer.config.resolve import resolve
from infer.config.settings import EngineConfig
from infer.engine import machine
from infer.errors import ConfigError
from infer.execution.gpu.device import GpuDevice
from infer.kernels.cpu.library import library
from infer.sampling.params import SamplingParams
from tests.integration.test_cpu_weights import REQUESTS, make_engine
from tests.support.thinned import thinned
from tests.support.tiny import greedy, random_prompts, run_engine
from tests.support.tiny import make_engine as make_plain

needs_c = pytest.mark.skipif(library() is None, reason="needs a C compiler")
both = pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])

SMALL = {"block_size": 2, "num_blocks": 26, "max_batch_size": 6, "prefill_chunk_size": 5}
SETTINGS: dict[str, dict[str, Any]] = {
    "recompute": {"preemption": "recompute", **SMALL},
    "swap": {"preemption": "swap", "swap_blocks": 40, **SMALL},
    "nothing cached": {"use_prefix_caching": False, "prefill_chunk_size": 1},
    "contiguous": {"kv_cache_backend": "contiguous", "block_size": 1, "num_blocks": 200},
    "not recorded": {"record_cpu_step": False, "max_batch_size": 3},
    "static": {"batching_mode": "static", "use_chunked_prefill": False, "max_num_batched_tokens": 200},
}


@functools.cache
def alone(family: str, kv_cache_dtype: str) -> list[list[list[int]]]:
    """Every request by itself in an engine that runs one sequence and shares nothing."""
    knobs: dict[str, Any] = {"max_batch_size": 1, "use_prefix_caching": False}
    return [
        run_engine(make_engine(family, kv_cache_dtype=kv_cache_dtype, **knobs), [request])[0]
        for request in REQUESTS
    ]


@needs_c
@both
@pytest.mark.parametrize(  # families without windows, and with
    ("family", "setting"), thinned(("qwen3", "gemma3"), SETTINGS, keep=2)
)
def test_no_setting_changes_a_token(kv_cache_dtype: str, family: str, setting: str) -> None:
    engine = make_engine(family, kv_cache_dtype=kv_cache_dtype, **SETTINGS[setting])
    assert run_engine(engine, REQUESTS) == alone(family, kv_cache_dtype)
    assert engine.scheduler.num_preemptions > 0 or SMALL.items() - SETTINGS[setting].items()


@needs_c
@both
def test_forks_and_beams_copy_codes_and_scales(kv_cache_dtype: str) -> None:
    wide = [
        (prompt, SamplingParams(temperature=0.0, n=3, use_beam_search=True, max_tokens=9, ignore_eos=True))
        if number % 2
        else (prompt, SamplingParams(temperature=0.9, n=3, seed=number, max_tokens=9, ignore_eos=True))
        for number, prompt in enumerate(random_prompts(4))
    ]
    apart = [
        run_engine(make_engine("llama", kv_cache_dtype=kv_cache_dtype, num_blocks=200, block_size=1), [one])[
            0
        ]
        for one in wide
    ]
    engine = make_engine("llama", kv_cache_dtype=kv_cache_dtype, block_size=4, num_blocks=60)
    assert run_engine(engine, wide) == apart


@needs_c
@both
def test_three_times_the_tokens_of_float32_fit_the_same_memory(kv_cache_dtype: str) -> None:
    sizes = [
        make_engine(
            "llama", kv_cache_dtype=dtype, num_blocks=None, kv_cache_memory="128KiB", max_batch_size=64
        )
        for dtype in ("auto", kv_cache_dtype)
    ]
    before, after = (engine.scheduler.pool.num_blocks for engine in sizes)
    head_dim = sizes[0]._device.model.config.head_dim  # type: ignore[attr-defined]
    assert after == before * 4 * head_dim // (head_dim + 4)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"kv_cache_dtype": "fp8_e5m2"}, "must be one of auto, none, fp8, int8"),
        ({"kv_cache_dtype": "fp8", "kv_cache_backend": "naive"}, "kv_cache_backend=naive keeps none"),
        ({"cache_type_k": "q8_0"}, "use kv_cache_dtype=int8 or fp8"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_knobs(**knobs)


def test_spellings_of_other_engines_are_taken() -> None:
    for given, meant in (("fp8_e4m3", "fp8"), ("int8_per_token_head", "int8")):
        assert EngineConfig.from_knobs(kv_cache_dtype=given).cache.kv_cache_dtype == meant


@pytest.mark.parametrize(("family", "kv_cache_dtype"), [("qwen3", "fp8"), ("gemma3", "int8")])
def test_the_device_half_of_a_gpu_reads_the_same_codes(
    family: str, kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, over the kernels' references; the kernels themselves are in tests/gpu."""
    requests = [(prompt, greedy(8)) for prompt in random_prompts(5)]
    expected = run_engine(make_plain(family, kv_cache_dtype=kv_cache_dtype), requests)
    monkeypatch.setattr(machine, "has_gpu_kernels", lambda device: True)
    engine = make_plain(family, kv_cache_dtype=kv_cache_dtype)
    assert isinstance(engine._device, GpuDevice)
    assert run_engine(engine, requests) == expected


@pytest.mark.parametrize(
    ("knobs", "found", "message"),
    [
        (
            {"kv_cache_dtype": "fp8"},
            {"has_fp8": False},
            "compute capability 8.9 or later.* use kv_cache_dtype=int8",
        ),
        (
            {"kv_cache_dtype": "int8", "attention_backend": "flash"},
            {},
            "attention_backend=flash reads no 8-bit",
        ),
    ],
)
def test_a_gpu_that_cannot_is_told_what_can(
    knobs: dict[str, Any], found: dict[str, Any], message: str
) -> None:
    gpu = Machine(device="cuda", has_gpu_kernels=True, gpu_memory=24 << 30, **found)
    with pytest.raises(ConfigError, match=message):
        resolve(EngineConfig.from_knobs(**knobs), gpu, ModelFacts(max_seq_len=64, num_layer_weights=1))
