"""gpt-oss from its own files: experts [in, out] and in MXFP4, on a CPU, in the forms of a GPU, over ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from infer.config.settings import EngineConfig
from infer.engine.build import build_engine
from infer.errors import CheckpointError, ConfigError
from infer.kernels.cpu.library import MXFP4, library
from infer.kernels.linear.coded import E2M1, CodedForm
from infer.layers.linear import ExpertLinear
from infer.loader.find.source import resolve_model
from infer.loader.headers import headers_of_config, read_headers
from infer.loader.load import LoadedModel, load_model
from infer.loader.slices import Rank
from infer.loader.weight_plan import kept_bytes, plan_weights
from infer.quant.gpu_schemes import GPUWeights
from infer.quant.packed import Mxfp4
from infer.quant.rounding import round_rows
from infer.tools.quantize import Recipe, quantize_checkpoint
from tests.support.checkpoints import reference_model
from tests.support.step import run_step
from tests.support.tiny import greedy, run_engine
from tests.unit.loader.tiny_files import write_directory

TOKENS = torch.randint(0, 199, (23,), generator=torch.Generator().manual_seed(1)).tolist()
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
CPU = torch.device("cpu")
has_kernel = (c := library()) is not None and MXFP4 in c.linear
needs_kernel = pytest.mark.skipif(not has_kernel, reason="no C kernel for floats of 4 bits")


def write_mxfp4(directory: Path, reference: Any) -> Path:
    """Random codes for the experts: in the file, and unpacked by the reference's own function."""
    generator = torch.Generator().manual_seed(5)
    write_directory(directory, reference, quantization_config={"quant_method": "mxfp4"})
    tensors = load_file(directory / "model.safetensors")
    parameters = dict(reference.named_parameters())
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (num, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(119, 124, (num, rows, columns // 32), dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        parameters[name].data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, directory / "model.safetensors")
    return directory


def load(path: Path, **knobs: Any) -> LoadedModel:
    return load_model(resolve_model(str(path), show_progress=False), device="cpu", **knobs)


def logits_of(reference: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = reference(input_ids=torch.tensor([TOKENS])).logits[0]
    return logits


def test_codes_unpacked_to_float32_give_the_logits_of_the_reference(tmp_path: Path) -> None:
    reference = reference_model("gpt_oss", **SIZES)
    model = load(write_mxfp4(tmp_path, reference), dtype="float32").model
    expected = logits_of(reference)
    assert (run_step(model, [TOKENS])[0] - expected).abs().max() / expected.std() < 1e-5


@needs_kernel
@pytest.mark.parametrize("world_size", [1, 2])
def test_experts_stay_codes_on_a_cpu(tmp_path: Path, world_size: int) -> None:
    """All of their numbers are exact; activations are rounded to 15 bits on the way."""
    reference = reference_model("gpt_oss", **{**SIZES, "intermediate_size": 128})
    path = write_mxfp4(tmp_path, reference)
    headers = read_headers(resolve_model(str(path), show_progress=False))
    plan = plan_weights(
        headers, quantization="auto", dtype="auto", device=torch.device("cpu"), rank=Rank(0, world_size)
    )
    plan.check_cuts()
    stacks = [m for m in plan.skeleton.modules() if isinstance(m, ExpertLinear)]
    assert all(isinstance(stack.stored, Mxfp4) for stack in stacks)
    num_weights = sum(stack.stored.spec.num_weights for stack in stacks)
    assert sum(stack.stored.num_bytes() for stack in stacks) == num_weights * 5 // 8
    if world_size > 1:
        return
    loaded = load(path, quantization="auto")
    assert kept_bytes(plan.skeleton) == pytest.approx(kept_bytes(loaded.model), rel=0.01)
    blocks: Any = loaded.model.layers
    for layer, block in enumerate(blocks):
        gate_up = block.mlp.gate_up.stored.expert(3).dequantized()
        own = reference.model.layers[layer].mlp.experts.gate_up_proj[3].T
        assert torch.equal(gate_up, torch.cat((own[::2], own[1::2])))
        assert torch.equal(
            block.mlp.down.stored.expert(1).dequantized(),
            reference.model.layers[layer].mlp.experts.down_proj[1].T,
        )
        x = torch.randn(5, 64)
        bias = block.mlp.gate_up.bias[3].float()
        y = block.mlp.gate_up.projection.expert(3).multiply(x)
        torch.testing.assert_close(y, x @ gate_up.T + bias, rtol=1e-3, atol=1e-3)
    outputs = run_engine(
        build_engine(EngineConfig.from_knobs(num_blocks=64), loaded), [(TOKENS, greedy(8))] * 3
    )
    assert outputs[0] == outputs[1] == outputs[2]


def test_experts_stay_codes_in_the_form_of_a_gpu(tmp_path: Path) -> None:
    reference = reference_model("gpt_oss", **SIZES)
    headers = read_headers(resolve_model(str(write_mxfp4(tmp_path, reference)), show_progress=False))
    plan = plan_weights(
        headers, quantization="auto", dtype="bfloat16", device=torch.device("cpu"), home="cuda"
    )
    stacks = [m for m in plan.skeleton.modules() if isinstance(m, ExpertLinear)]
    assert {m.stored.scheme for m in stacks} == {"mxfp4"} and isinstance(stacks[0].stored, GPUWeights)


def test_a_cut_through_a_block_of_codes_is_refused(tmp_path: Path) -> None:
    path = write_mxfp4(tmp_path, reference_model("gpt_oss", **SIZES))  # 96 columns are three blocks
    headers = read_headers(resolve_model(str(path), show_progress=False))
    plan = plan_weights(
        headers, quantization="none", dtype="float32", device=torch.device("cpu"), rank=Rank(0, 2)
    )
    with pytest.raises(ConfigError, match="a block of 32 columns straddles the cut at column 48"):
        plan.check_cuts()


def test_a_config_alone_tells_what_the_experts_will_take(tmp_path: Path) -> None:
    """Random weights for it are rounded to the same form."""
    path = write_mxfp4(tmp_path, reference_model("gpt_oss", **SIZES))
    headers = headers_of_config(path / "config.json", "gpt-oss")
    for device, home in ((CPU, None), (CPU, "cuda")):
        plan = plan_weights(
            headers, quantization="auto", dtype="bfloat16" if home else "auto", device=device, home=home
        )
        schemes = {m.stored.scheme for m in plan.skeleton.modules() if isinstance(m, ExpertLinear)}
        assert schemes == {"mxfp4" if has_kernel or home else "none"}


def test_numbers_are_rounded_to_the_nearest_float_of_4_bits() -> None:
    weight = torch.tensor([[6.0, -5.1, 0.2, 0.3, -1.2, 2.4, 2.6, -0.0] * 4, [0.375, 0.0] * 16])
    part = round_rows(weight, CodedForm("mxfp4", 32))
    assert part.scales.tolist() == [[1.0], [2.0**-4]]
    numbers = torch.tensor(E2M1)[part.codes.long()] * part.scales
    assert numbers[0, :8].tolist() == [6.0, -6.0, 0.0, 0.5, -1.0, 2.0, 3.0, 0.0]
    assert numbers[1, :2].tolist() == [0.375, 0.0]


def test_files_that_tools_cannot_write_are_refused(tmp_path: Path) -> None:
    path = write_directory(tmp_path / "plain", reference_model("gpt_oss", **SIZES))
    with pytest.raises(ConfigError, match="experts of gpt-oss have a layout of their own"):
        quantize_checkpoint(
            resolve_model(str(path), show_progress=False), tmp_path / "out", Recipe(scheme="gptq")
        )


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    path = write_mxfp4(tmp_path, reference_model("gpt_oss", **SIZES))
    tensors = load_file(path / "model.safetensors")
    lost = dict(tensors)
    del lost["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(lost, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.down_proj_blocks has no scales"):
        load(path)
    tensors["model.layers.0.mlp.experts.down_proj_scales"] = torch.zeros(5, 64, 2, dtype=torch.uint8)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"MXFP4 has bytes \[E, out, in / 32, 16\]"):
        load(path)
    for name, shape in (("down_proj", []), ("gate_up_proj_bias", [5]), ("gate_up_proj", [5, 64, 129])):
        odd = tensors | {f"model.layers.0.mlp.experts.{name}": torch.zeros(shape)}
        save_file(odd, path / "model.safetensors")
        with pytest.raises(CheckpointError, match=rf"experts\.{name} has the shape"):
            load(path)
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {"swiglu_limit": 5.0}))
    with pytest.raises(ConfigError, match=r"'swiglu_limit' in config.json is 5; only 7 is supported"):
        load(path)
