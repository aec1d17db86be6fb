"""Gemma 4, whose layers have heads of two sizes and share keys, gets the tokens of `transformers`.

Every greedy output is checked by one forward pass of the reference over prompt and output, without a cache.
The store is full of NaN at first: a slot that is read before it is written shows.
"""

from __future__ import annotations

import functools
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from infer.config.settings import EngineConfig
from infer.engine import machine
from infer.engine.build import build_engine
from infer.engine.cache_fit import kept_cache
from infer.engine.device_build import resolve_for
from infer.engine.engine import Engine
from infer.errors import ConfigError
from infer.execution.gpu.device import GpuDevice
from infer.execution.torch_device import TorchDevice
from infer.loader.find.source import resolve_model
from infer.loader.load import LoadedModel, load_model
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request
from tests.integration.test_parity import CASES
from tests.support.checkpoints import VOCAB_SIZE, build_like, reference_model
from tests.support.kv_store import fill_store
from tests.support.step import run_step
from tests.support.thinned import thinned
from tests.support.tiny import drain, greedy, run_engine
from tests.unit.loader.tiny_files import write_gguf

KINDS = {
    "plain": {},
    "experts": CASES["gemma4: experts, values from keys, no shared keys"][1],
}
BLOCK_SIZE, NUM_OUT = 4, 20
WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "whole prompts": {"use_chunked_prefill": False, "use_prefix_caching": False},
    "small chunks": {"prefill_chunk_size": 3},
    "no program": {"record_cpu_step": False, "block_size": 16},
    "plain PyTorch": {"attention_backend": "sdpa"},
    "the reference of attention": {"attention_backend": "torch_ref"},
    "guesses": {"speculative_decoding": True},
    "the same bits": {"deterministic": True},
}


@functools.cache
def models(kind: str) -> tuple[Any, LoadedModel]:
    """The reference, and the same weights loaded as a user would load them."""
    changes = KINDS[kind] | {"final_logit_softcapping": None, "max_position_embeddings": 320}
    reference = reference_model("gemma4", **changes)
    with tempfile.TemporaryDirectory() as directory:
        reference.save_pretrained(directory)
        source = resolve_model(directory, revision=None, show_progress=False)
        return reference, load_model(source, dtype="float32", device="cpu")


def make_engine(kind: str, **knobs: Any) -> Engine:
    plain = {"block_size": BLOCK_SIZE, "num_blocks": 300, "prefill_chunk_size": 13, "max_batch_size": 4}
    engine = build_engine(EngineConfig.from_knobs(**(plain | knobs)), models(kind)[1])
    assert isinstance(engine._device, TorchDevice | GpuDevice)
    fill_store(engine._device.store, float("nan"))
    return engine


def make_requests() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(3)
    start = [rng.randrange(3, VOCAB_SIZE) for _ in range(40)]
    parts = [(40, 9), (0, 30), (21, 10), (40, 0), (0, 1)]
    prompts = [start[:cut] + [rng.randrange(3, VOCAB_SIZE) for _ in range(more)] for cut, more in parts]
    return [(prompt, greedy(NUM_OUT)) for prompt in prompts]


REQUESTS = make_requests()
GROWING = [(prompt[-3:], greedy(40)) for prompt, _ in REQUESTS]


def serve(engine: Engine, kind: str, requests: list[tuple[list[int], SamplingParams]] = REQUESTS) -> None:
    for (prompt, params), (output,) in zip(requests, run_engine(engine, requests), strict=True):
        assert len(output) == params.max_tokens
        with torch.no_grad():
            logits_TV = models(kind)[0](input_ids=torch.tensor([prompt + output])).logits[0]
        assert logits_TV[len(prompt) - 1 : -1].argmax(-1).tolist() == output


@pytest.mark.parametrize(("kind", "way"), thinned(KINDS, WAYS, keep=3))
def test_the_tokens_are_those_of_transformers(kind: str, way: str) -> None:
    engine = make_engine(kind, **WAYS[way])
    serve(engine, kind)
    if way == "as it is":
        serve(engine, kind)  # now with all that is cached
        assert engine.scheduler.usage().num_hit_tokens > 50


@pytest.mark.parametrize("swap_blocks", [0, 80])
def test_preemption_changes_no_token(swap_blocks: int) -> None:
    preemption = "swap" if swap_blocks else "recompute"
    engine = make_engine("plain", preemption=preemption, swap_blocks=swap_blocks, num_blocks=14)
    serve(engine, "plain", GROWING)
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_gpus_device_half_makes_the_same_tokens(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_gpu_kernels", lambda device: True)
    engine = make_engine(kind)
    assert isinstance(engine._device, GpuDevice)
    serve(engine, kind)
    serve(engine, kind)


def test_forks_and_aborts_give_all_blocks_back() -> None:
    engine = make_engine("plain")
    params = SamplingParams(temperature=1.0, seed=5, n=3, ignore_eos=True, max_tokens=NUM_OUT)
    for number, (prompt, _) in enumerate(REQUESTS):
        engine.add(Request(request_id=str(number), prompt=tuple(prompt), params=params))
    for _ in range(9):
        engine.step()
    engine.abort("0")
    drain(engine)
    engine.scheduler.pool.reset_prefix_cache()
    assert engine.scheduler.pool.num_free_blocks == engine.scheduler.pool.num_blocks


def test_narrow_layers_share_a_plane_and_the_plan_counts_it() -> None:
    """Tokens of 2 heads of 16 and of 2 heads of 24: a plane has room for 96 numbers, for 3 or 2 layers."""
    engine = make_engine("plain")
    device, pool = engine._device, engine.scheduler.pool
    assert isinstance(device, TorchDevice)
    kept = kept_cache(resolve_for(EngineConfig.from_knobs(), models("plain")[1]), models("plain")[1])
    layout = kept.layout
    assert layout.plane_heads(0, 0) == (1, 96) and layout.spans == (2, 3)
    assert layout.windows == (None, 5) and layout.num_planes == 1
    assert (layout.tables[4], layout.tables[5]) == (layout.tables[1], layout.tables[1])  # both see everything
    assert device.store.keys[0].shape[1:] == (2, 16) and device.store.keys[1].shape[1:] == (2, 24)
    assert kept.bytes_per_token == 2 * len(layout.windows) * 96 * 4
    assert device.store.num_bytes == pool.num_blocks * BLOCK_SIZE * kept.bytes_per_token // 2


@pytest.mark.parametrize(
    "knobs",
    [
        {"speculative_decoding": True, "draft_model": "any"},
        {"kv_cache_backend": "contiguous"},
        {"kv_cache_dtype": "int8"},
    ],
)
def test_what_layers_of_two_sizes_cannot_do_is_refused_by_name(knobs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="gemma4, whose layers differ in size"):
        make_engine("plain", **knobs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gguf_file_has_the_logits_of_the_reference(kind: str, tmp_path: Path) -> None:
    """Sizes are lists, a table says which pairs turn, and scales of experts are leaves of their matrices."""
    reference = reference_model("gemma4", **KINDS[kind])
    path = write_gguf(tmp_path / "model.gguf", reference)
    model = load_model(resolve_model(str(path)), dtype="float32", device="cpu")
    tokens = REQUESTS[0][0][:23]

    expected = run_step(build_like(reference), [tokens])[0]
    torch.testing.assert_close(run_step(model.model, [tokens])[0], expected, atol=1e-4, rtol=1e-4)
