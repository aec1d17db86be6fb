"""Every block format unpacks to exactly what the format's own library says."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch

from infer.errors import CheckpointError
from infer.loader.gguf import BLOCK, GGMLType
from infer.loader.gguf_quants import SUPPORTED, dequantize, dequantize_into

# Where a block holds float16 scales: random bytes there would often be NaN or infinite.
SCALES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0]}
SCALES |= {"Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "F16": [0], "BF16": [], "F32": []}


def random_blocks(
    kind: GGMLType, rows: int, blocks: int, seed: int = 0
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes of every value, except that scales are finite."""
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (rows * blocks, BLOCK[kind][1]), dtype=np.uint8)
    for at in SCALES[kind.name]:
        scales = rng.normal(size=(rows * blocks, 1)).astype(np.float16)
        packed[:, at : at + 2] = scales.view(np.uint8)
    if kind.name in ("F32", "BF16"):
        numbers = rng.normal(size=rows * blocks).astype(np.float32)
        raw = (
            numbers
            if kind.name == "F32"
            else gguf.quants.quantize(numbers[None], gguf.GGMLQuantizationType.BF16)
        )
        packed = np.ascontiguousarray(raw).reshape(-1).view(np.uint8).reshape(packed.shape)
    return packed.reshape(rows, -1)


@pytest.mark.parametrize("name", SUPPORTED)
def test_unpacking_equals_the_reference_bit_for_bit(name: str) -> None:
    kind = GGMLType[name]
    packed = random_blocks(kind, rows=37, blocks=5)
    expected = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[name]).astype(np.float32)
    ours = dequantize(torch.from_numpy(packed), kind)
    assert ours.dtype is torch.float32 and ours.shape == (37, 5 * BLOCK[kind][0])
    assert np.array_equal(ours.numpy().view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16"])
def test_what_was_packed_comes_back_close(name: str) -> None:
    """Not against the other unpacker but against the numbers that went in."""
    weights = np.random.default_rng(1).normal(size=(16, 128)).astype(np.float32)
    packed = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[name])
    error = np.abs(dequantize(torch.from_numpy(packed), GGMLType[name]).numpy() - weights).max()
    assert error < {"4": 0.4, "5": 0.2, "8": 0.03, "1": 0.02}[name[1] if name != "BF16" else "1"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_filling_in_steps_equals_unpacking_at_once(dtype: torch.dtype) -> None:
    packed = torch.from_numpy(random_blocks(GGMLType.Q4_K, rows=900, blocks=8))  # several chunks
    out = torch.full((900, 8 * 256), float("nan"), dtype=dtype)
    dequantize_into(out, packed, GGMLType.Q4_K)
    assert torch.equal(out, dequantize(packed, GGMLType.Q4_K).to(dtype))


def test_a_transposed_view_can_be_filled() -> None:
    packed = torch.from_numpy(random_blocks(GGMLType.Q8_0, rows=6, blocks=2))
    out = torch.empty(64, 6)
    dequantize_into(out.T, packed, GGMLType.Q8_0)
    assert torch.equal(out, dequantize(packed, GGMLType.Q8_0).T)


def test_a_format_we_cannot_unpack_is_named_with_those_we_can() -> None:
    with pytest.raises(
        CheckpointError, match=r"type IQ2_XXS are not supported; supported types: F32, .*Q6_K"
    ):
        dequantize(torch.zeros(1, 66, dtype=torch.uint8), GGMLType.IQ2_XXS)


def test_block_sizes_agree_with_the_format_library() -> None:
    for kind, sizes in BLOCK.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)] == sizes, kind.name
        assert gguf.GGMLQuantizationType(kind).name == kind.name
