"""Quantized matrices as each format's own library writes and reads them, bit for bit.

compressed-tensors, bitsandbytes, auto-round, and accelerate for transformers, are asked where they are
installed; they are not among the development dependencies.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from infer.loader.find.source import resolve_model
from infer.loader.formats.checkpoint import open_checkpoint
from infer.loader.formats.quantized import quantized_checkpoint
from infer.loader.headers import read_headers
from infer.tools.quantize import Recipe, config_of, quantize_checkpoint, quantize_matrix
from scripts.make_checkpoint import Sizes, make_checkpoint

N, K = 96, 128


def read(path: Path, leaves: dict[str, torch.Tensor], **settings: Any) -> torch.Tensor:
    """The matrix that these leaves stand for."""
    save_file({f"m.{leaf}": value.contiguous() for leaf, value in leaves.items()}, path / "model.safetensors")
    stored = quantized_checkpoint(open_checkpoint(path), {}, settings)["m.weight"]
    out = torch.empty(stored.shape)
    stored.copy_to(out)
    return out


def weight() -> torch.Tensor:
    return torch.randn(N, K) * torch.rand(N, 1)


@pytest.mark.filterwarnings("ignore")  # of the library
def test_transformers_reads_the_same_fp8_model(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    sizes = Sizes(hidden_size=256)  # whole blocks: of others it makes blocks of another size
    make_checkpoint("llama", tmp_path / "dense", sizes=sizes, dtype="bfloat16")
    source = resolve_model(str(tmp_path / "dense"), show_progress=False)
    quantize_checkpoint(source, tmp_path / "fp8", Recipe(scheme="fp8-block"))
    config = FineGrainedFP8Config(dequantize=True, weight_block_size=(128, 128))
    theirs = AutoModelForCausalLM.from_pretrained(
        str(tmp_path / "fp8"), dtype=torch.float32, quantization_config=config
    ).state_dict()
    tensors = read_headers(resolve_model(str(tmp_path / "fp8"), show_progress=False)).tensors
    assert tensors.keys() == theirs.keys()
    for name, stored in tensors.items():
        ours = torch.empty(stored.shape)
        stored.copy_to(ours)
        assert torch.equal(ours, theirs[name]), name


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
def test_compressed_tensors_packs_what_is_read(bits: int, symmetric: bool, tmp_path: Path) -> None:
    pack = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers").pack_to_int32
    quantization = pytest.importorskip("compressed_tensors.quantization")
    dequantize = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward").dequantize
    middle = 2 ** (bits - 1)
    codes = torch.randint(-middle, middle, (N, K), dtype=torch.int8)
    scale = (torch.rand(N, K // 32) + 0.1).half()
    zeros = torch.randint(-middle, middle, scale.shape, dtype=torch.int8)
    args = quantization.QuantizationArgs(num_bits=bits, strategy="group", group_size=32, symmetric=symmetric)
    leaves = {
        "weight_packed": pack(codes, bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor([N, K]),
    }
    if not symmetric:
        leaves["weight_zero_point"] = pack(zeros, bits, packed_dim=0)
    theirs = dequantize(codes, scale, None if symmetric else zeros, args)
    assert torch.equal(read(tmp_path, leaves).half(), theirs)


@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_reads_what_is_written(symmetric: bool, tmp_path: Path) -> None:
    unpack = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers").unpack_from_int32
    quantization = pytest.importorskip("compressed_tensors.quantization")
    dequantize = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward").dequantize
    recipe = Recipe(scheme="ct-w4a16", group_size=32, symmetric=symmetric)
    leaves = quantize_matrix(weight(), recipe)
    codes = unpack(leaves["weight_packed"], 4, torch.Size((N, K)))
    zeros = leaves.get("weight_zero_point")
    if zeros is not None:
        zeros = unpack(zeros, 4, torch.Size((N, K // 32)), packed_dim=0)
    args = quantization.QuantizationArgs(num_bits=4, strategy="group", group_size=32, symmetric=symmetric)
    theirs = dequantize(codes, leaves["weight_scale"], zeros, args)
    assert torch.equal(read(tmp_path, leaves).half(), theirs)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False])
def test_bitsandbytes_4bit(kind: str, nested: bool, tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    packed, state = functional.quantize_4bit(
        weight(), blocksize=64, quant_type=kind, compress_statistics=nested
    )
    leaves = {
        "weight": packed,
        **{f"weight.{name}": value for name, value in state.as_dict(packed=True).items()},
    }
    assert torch.equal(read(tmp_path, leaves), functional.dequantize_4bit(packed, state))


@pytest.mark.parametrize("nested", [True, False])
def test_bitsandbytes_reads_what_is_written(nested: bool, tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    leaves = quantize_matrix(weight(), Recipe(scheme="nf4", nested=nested))
    states = {leaf.removeprefix("weight."): value for leaf, value in leaves.items() if leaf != "weight"}
    state = functional.QuantState.from_dict(states, device=torch.device("cpu"))
    assert torch.equal(read(tmp_path, leaves), functional.dequantize_4bit(leaves["weight"], state))


def test_bitsandbytes_int8(tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    codes, stats, _ = functional.int8_vectorwise_quant(weight().half())
    theirs = functional.int8_vectorwise_dequant(codes, stats)
    torch.testing.assert_close(read(tmp_path, {"weight": codes, "SCB": stats}), theirs, rtol=1e-6, atol=0)


def _groups(bits: int, *, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zeros, [N, G], as a quantizer would find them."""
    groups = weight().view(N, -1, 32)
    most = 2**bits - 1
    scale = (groups.amax(-1) - groups.amin(-1)).clamp(min=0.01) / most
    zeros = torch.randint(1, most + 1, scale.shape).float()
    return scale.half().float(), torch.full_like(zeros, 2 ** (bits - 1)) if symmetric else zeros


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.filterwarnings("ignore::UserWarning")  # of the library
@pytest.mark.parametrize("packing", ["auto_round:auto_gptq", "auto_round", "auto_round:gptqmodel"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_auto_round_packs_what_is_read(bits: int, packing: str, symmetric: bool, tmp_path: Path) -> None:
    """Its own packing has true zeros, and what it exports for GPTQ zeros less one."""
    export = pytest.importorskip("auto_round.export.export_to_autoround.export")
    make = export.dynamic_import_quant_linear_for_packing(packing, bits, 32, symmetric)
    layer = make(bits=bits, group_size=32, infeatures=K, outfeatures=N, bias=False)
    linear = torch.nn.Linear(K, N, bias=False)
    scale, zeros = _groups(bits, symmetric=symmetric)
    layer.device = torch.device("cpu")
    layer.pack(linear, scale, zeros, device="cpu")
    leaves = {name: value for name, value in layer.state_dict().items() if value is not None}
    theirs = layer(torch.eye(K)).T
    settings = {"quant_method": "auto-round", "packing_format": packing, "sym": symmetric, "bits": bits}
    assert torch.equal(read(tmp_path, leaves, **settings).half(), theirs.half())


def test_auto_round_packs_awq(tmp_path: Path) -> None:
    awq = pytest.importorskip("auto_round.export.export_to_awq.utils")
    scale, zeros = _groups(4, symmetric=False)
    layer = awq.WQLinear_GEMM.from_linear(
        torch.nn.Linear(K, N, bias=False), 4, 32, scales=scale.T.contiguous(), zeros=zeros.T.contiguous()
    )
    theirs = awq.dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, 4, 32).T
    ours = read(tmp_path, {name: value for name, value in layer.state_dict().items() if value is not None})
    assert torch.equal(ours.half(), theirs)
    written = quantize_matrix(weight(), Recipe(scheme="awq", group_size=32))
    theirs = awq.dequantize_gemm(written["qweight"], written["qzeros"], written["scales"], 4, 32).T
    assert torch.equal(read(tmp_path, written).half(), theirs)


def test_a_config_of_each_library_is_understood() -> None:
    """What is written beside the weights is JSON that the library would have written."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    for scheme in ("ct-w4a16", "ct-w8a16", "ct-int8", "fp8-channel"):
        raw = json.loads(json.dumps(config_of(Recipe(scheme=scheme), ["lm_head"])))
        assert quantization.QuantizationConfig(**raw).ignore == ["lm_head"]
