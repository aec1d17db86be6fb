"""Mixtures of experts through the whole engine: tokens, packed weights, memory, templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from infer.bench.roofline import shape_of
from infer.config.settings import EngineConfig, LoadConfig
from infer.engine import machine
from infer.engine.build import build_engine
from infer.engine.cache_fit import token_elements
from infer.execution.gpu.device import GpuDevice
from infer.frontend.open_model import make_encoder
from infer.kernels.cpu.library import library
from infer.layers.linear import ExpertLinear, Linear
from infer.layers.moe import MixtureOfExperts
from infer.loader.find.source import resolve_model
from infer.loader.headers import read_headers
from infer.loader.load import LoadedModel, load_model
from infer.loader.weight_plan import kept_bytes, num_weights, plan_weights
from infer.quant.packed import Packed
from scripts.make_checkpoint import make_checkpoint
from tests.integration.test_engine_toggles import REQUESTS, expected, run_row
from tests.support.checkpoints import MOE_FAMILIES, reference_model
from tests.support.step import run_step
from tests.support.tiny import SIZES, make_engine, random_prompts, run_engine
from tests.support.toggles import pairwise_rows
from tests.unit.loader.tiny_files import write_directory, write_gguf

every_family = pytest.mark.parametrize("family", MOE_FAMILIES)
needs_c = pytest.mark.skipif(library() is None, reason="needs a C compiler")


def load(path: Path, **knobs: Any) -> LoadedModel:
    return load_model(resolve_model(str(path), show_progress=False), device="cpu", **knobs)


@pytest.mark.parametrize("number", range(0, len(pairwise_rows()), 5), ids=lambda number: f"row {number + 1}")
def test_no_toggle_changes_a_token(number: int) -> None:
    family = MOE_FAMILIES[number % len(MOE_FAMILIES)]
    assert run_row(family, number) == expected(family)


@every_family
def test_neither_defaults_nor_preemption_change_a_token(family: str) -> None:
    assert run_engine(make_engine(family), REQUESTS) == expected(family)
    engine = make_engine(family, block_size=2, num_blocks=30, prefill_chunk_size=5, preemption="recompute")
    assert run_engine(engine, REQUESTS) == expected(family)
    assert engine.scheduler.num_preemptions > 0


@every_family
def test_the_device_half_of_a_gpu_gives_the_same_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_gpu_kernels", lambda device: True)
    engine = make_engine(family)
    assert isinstance(engine._device, GpuDevice)
    assert run_engine(engine, REQUESTS) == expected(family)


@needs_c
@every_family
def test_packed_experts_are_near_to_what_they_stand_for(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path, sizes=SIZES, seed=1)
    packed, dense = load(tmp_path, quantization="int8").model, load(tmp_path, quantization="fp32").model
    matrices = [m for m in packed.modules() if isinstance(m, Linear | ExpertLinear)]
    assert all(isinstance(m.stored, Packed) for m in matrices if not m.always_dense)
    mlp = packed.get_submodule("layers.1.mlp")
    assert isinstance(mlp, MixtureOfExperts) and mlp.router.weight.dtype == torch.float32
    tokens = random_prompts(3)[1]
    logits = run_step(dense, [tokens])[0]
    errors = (run_step(packed, [tokens])[0] - logits).norm(dim=1) / logits.norm(dim=1)
    assert errors.median() < 0.06  # of the typical token: rounding sends one here and there to another expert


@needs_c
def test_packed_experts_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path, sizes=SIZES, seed=1)
    loaded = load(tmp_path, quantization="int8")
    requests = [request for request in REQUESTS if request[1].is_greedy][:4]

    def run(some: list[Any], **knobs: Any) -> list[list[list[int]]]:
        config = EngineConfig.from_knobs(num_blocks=64, **knobs)
        return run_engine(build_engine(config, loaded), some)

    alone = [run([request], max_batch_size=1, use_prefix_caching=False)[0] for request in requests]
    assert run(requests) == alone


@needs_c
def test_a_stack_is_packed_as_its_matrices_are(tmp_path: Path) -> None:
    """From safetensors expert by expert, as one stack, and from the blocks of a GGUF file."""
    reference = reference_model("mixtral", hidden_size=64, intermediate_size=96)
    stacked = load(write_directory(tmp_path / "stacked", reference), quantization="int8").model
    reference.save_pretrained(tmp_path / "single")
    assert (
        "model.layers.0.block_sparse_moe.experts.0.w1.weight"
        in read_headers(resolve_model(str(tmp_path / "single"), show_progress=False)).tensors
    )
    single = load(tmp_path / "single", quantization="int8").model
    blocks = load(write_gguf(tmp_path / "m.gguf", reference, kind="Q8_0"), quantization="int8").model
    for name in ("gate_up", "down"):
        ours, same, near = (
            model.get_submodule(f"layers.1.mlp.{name}") for model in (stacked, single, blocks)
        )
        stacks = [layer.stored.matrices for layer in (ours, same, near) if isinstance(layer.stored, Packed)]
        for matrices in zip(*stacks, strict=True):
            a, b, c = (matrix.dequantized() for matrix in matrices)
            assert torch.equal(a, b)
            torch.testing.assert_close(a, c, atol=0.01, rtol=0)


@every_family
def test_the_plan_counts_every_expert_and_the_floor_only_the_chosen(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path, sizes=SIZES, seed=1)
    headers = read_headers(resolve_model(str(tmp_path), show_progress=False))
    model = load(tmp_path, dtype="float32").model
    plan = plan_weights(headers, quantization="none", dtype="float32", device=torch.device("cpu"))
    num_parameters = num_weights(plan.skeleton)
    assert num_parameters == sum(parameter.numel() for parameter in model.parameters())
    config, experts = headers.config, headers.config.experts
    assert experts is not None and num_parameters > 2 * 6 * 3 * 64 * experts.size  # layers, experts, matrices
    mlp_size = 2 * experts.size + experts.shared_size
    assert token_elements(config) == 4 * 64 + 4 * (mlp_size + 2 * 64)
    shape = shape_of(config, weight_bytes=2, kv_bytes=2)
    assert shape.layer_params == 2 * (64 * (2 * 64 + 2 * 32) + 3 * 64 * mlp_size)


@needs_c
def test_the_plan_knows_what_packed_experts_take(tmp_path: Path) -> None:
    make_checkpoint("mixtral", tmp_path, sizes=SIZES, seed=1, hidden_size=256, intermediate_size=512)
    headers = read_headers(resolve_model(str(tmp_path), show_progress=False))
    model = load(tmp_path, quantization="int8").model
    kept = sum(m.stored.num_bytes() for m in model.modules() if isinstance(m, Linear | ExpertLinear))
    kept += model.embedding.weight.numel() * 2
    plan = plan_weights(headers, quantization="int8", dtype="auto", device=torch.device("cpu"))
    planned = kept_bytes(plan.skeleton)
    assert planned == pytest.approx(kept, rel=0.01)


@pytest.mark.parametrize(("family", "mark"), [("mixtral", "[INST]"), ("qwen3_moe", "<|im_start|>")])
def test_a_chat_has_the_template_of_its_dense_sibling(family: str, mark: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path, sizes=SIZES)
    encoder = make_encoder(LoadConfig(), read_headers(resolve_model(str(tmp_path), show_progress=False)))
    assert encoder.tokenizer.token_id(mark) in encoder.encode_chat([{"role": "user", "content": "hello"}])
