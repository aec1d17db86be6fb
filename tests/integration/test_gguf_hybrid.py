"""Qwen 3 Next and Qwen 3.5 from GGUF: the order of value heads, packed columns, old files, extra layers."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from infer.errors import CheckpointError
from infer.loader.find.source import resolve_model
from infer.loader.headers import read_headers
from infer.loader.load import load_model
from tests.support.checkpoints import build_like, reference_model
from tests.support.step import run_step
from tests.unit.loader.tiny_files import write_gguf

TOKENS = torch.randint(0, 199, (23,), generator=torch.Generator().manual_seed(1)).tolist()
PACKED: dict[str, Any] = {
    "hidden_size": 64,
    "linear_value_head_dim": 32,
    "linear_key_head_dim": 16,
    "head_dim": 32,
}


def logits(path: Path, **settings: Any) -> torch.Tensor:
    model = load_model(resolve_model(str(path)), dtype="float32", device="cpu", **settings)
    return run_step(model.model, [TOKENS])[0]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_packed_columns_of_value_heads_change_places(kind: str, tmp_path: Path) -> None:
    """With the columns of the output matrix in the order of the file, nothing of the logits would be left."""
    reference = reference_model("qwen3_5", **PACKED)
    path = write_gguf(tmp_path / "model.gguf", reference, kinds={"ssm_out": kind, "attn_gate": kind})
    for name, tensor in reference.state_dict().items():
        if name.endswith((".linear_attn.out_proj.weight", ".linear_attn.in_proj_z.weight")):
            packed = gguf.quants.quantize(tensor.numpy(), gguf.GGMLQuantizationType[kind])
            tensor.copy_(torch.from_numpy(gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[kind])))
    expected = run_step(build_like(reference), [TOKENS])[0]

    torch.testing.assert_close(logits(path, quantization="none"), expected, atol=1e-4, rtol=1e-4)
    difference = (logits(path, quantization="auto") - expected).abs().max() / expected.std()
    assert difference < 0.1


def test_groups_that_are_larger_than_a_value_head_are_refused(tmp_path: Path) -> None:
    reference = reference_model("qwen3_5", **(PACKED | {"linear_value_head_dim": 16}))
    path = write_gguf(tmp_path / "model.gguf", reference, kinds={"ssm_out": "Q8_0"})
    with pytest.raises(CheckpointError, match=r"ssm_out.* groups of 32 columns in Q8_0, which its heads"):
        logits(path, quantization="none")


@pytest.mark.parametrize("size", [80, 2**24])
def test_heads_that_do_not_fit_the_rows_are_refused(size: int, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", reference_model("qwen3_5"))
    old, new = (b"qwen35.ssm.state_size" + struct.pack("<II", 4, number) for number in (8, size))
    assert path.read_bytes().count(old) == 1
    path.write_bytes(path.read_bytes().replace(old, new))
    with pytest.raises(CheckpointError, match=r"the heads of linear attention in the metadata need"):
        read_headers(resolve_model(str(path)))


def test_the_first_files_of_qwen3_next_are_read(tmp_path: Path) -> None:
    """They have q, k, v and z in one matrix, grouped by key head."""
    reference = reference_model("qwen3_next", mlp_only_layers=[])
    path = write_gguf(tmp_path / "model.gguf", reference, is_old=True)
    expected = run_step(build_like(reference), [TOKENS])[0]
    torch.testing.assert_close(logits(path), expected, atol=1e-4, rtol=1e-4)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    reference = reference_model("qwen3_5")
    expected = run_step(build_like(reference), [TOKENS])[0]
    reference.config.num_hidden_layers += 1
    extra: dict[str, Any] = {"blk.4.nextn.eh_proj.weight": np.zeros((48, 96), np.float32)}
    extra |= {"blk.4.attn_norm.weight": np.ones(48, np.float32)}
    path = write_gguf(tmp_path / "model.gguf", reference, extra=extra, numbers={"nextn_predict_layers": 1})
    torch.testing.assert_close(logits(path), expected, atol=1e-4, rtol=1e-4)


def test_a_list_says_which_layers_have_linear_attention(tmp_path: Path) -> None:
    types = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
    reference = reference_model("qwen3_5", layer_types=types)
    is_linear = [kind == "linear_attention" for kind in types]
    path = write_gguf(tmp_path / "model.gguf", reference, numbers={"attention.recurrent_layers": is_linear})
    expected = run_step(build_like(reference), [TOKENS])[0]
    torch.testing.assert_close(logits(path), expected, atol=1e-4, rtol=1e-4)


def test_gate_and_up_of_all_experts_may_be_one_stack(tmp_path: Path) -> None:
    reference = reference_model("qwen3_5_moe")
    path = write_gguf(tmp_path / "model.gguf", reference, is_fused=True)
    assert any("gate_up_exps" in tensor.name for tensor in gguf.GGUFReader(path).tensors)
    expected = run_step(build_like(reference), [TOKENS])[0]
    torch.testing.assert_close(logits(path), expected, atol=1e-4, rtol=1e-4)
