"""Every block format unpacks to exactly what the format's own library says."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from infer.errors import CheckpointError
from infer.kernels.cpu.library import library
from infer.loader.formats.gguf import BLOCK, GGMLType, GGUFFile, GGUFTensor
from infer.loader.formats.gguf_quants import SUPPORTED, coded_rows, dequantize
from infer.loader.formats.gguf_tensors import PackedTensor
from infer.quant.coded import CodedRows
from infer.quant.packed import Int5, Int6, QuantizedRows, quantized_rows
from infer.quant.projection import WeightSpec

# Where a block holds float16 scales: random bytes there would often be NaN or infinite.
SCALES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0]}
SCALES |= {"Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
SCALES |= {
    name: [0] for name in ("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS")
}
SCALES |= {"IQ1_M": [], "MXFP4": [], "TQ1_0": [52], "TQ2_0": [64], "F16": [0], "BF16": [], "F32": []}
GROUPS_OF_32 = {"Q4_0", "Q5_0", "Q8_0", "IQ1_S", "IQ2_XXS", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "MXFP4"}
GROUPS_OF_32 |= {"TQ1_0", "TQ2_0"}  # of 256: the same scale eight times
FOUR_BITS = {"Q4_0", "Q4_1", "TQ1_0", "TQ2_0"}  # whose numbers int4 keeps to the last bit


def random_blocks(
    kind: GGMLType, rows: int, blocks: int, seed: int = 0
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes of every value, except that scales are finite."""
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (rows * blocks, BLOCK[kind][1]), dtype=np.uint8)
    for at in SCALES[kind.name]:
        scales = rng.normal(size=(rows * blocks, 1)).astype(np.float16)
        packed[:, at : at + 2] = scales.view(np.uint8)
    if kind.name == "MXFP4":
        packed[:, 0] = np.minimum(packed[:, 0], 250)  # a power of two that can be multiplied
    if kind.name == "IQ1_M":  # its scale is four times four bits, at the top of four words
        words = packed[:, 48:].view(np.uint16)
        scales = rng.normal(size=(rows * blocks, 1)).astype(np.float16).view(np.uint16)
        words[:] = words & 0x0FFF | (scales >> np.array([0, 4, 8, 12], dtype=np.uint16) & 15) << 12
    if kind.name in ("F32", "BF16"):
        numbers = rng.normal(size=rows * blocks).astype(np.float32)
        raw = (
            numbers
            if kind.name == "F32"
            else gguf.quants.quantize(numbers[None], gguf.GGMLQuantizationType.BF16)
        )
        packed = np.ascontiguousarray(raw).reshape(-1).view(np.uint8).reshape(packed.shape)
    return packed.reshape(rows, -1)


@pytest.mark.parametrize(("rows", "blocks"), [(37, 5), (1, 1)])
@pytest.mark.parametrize("name", SUPPORTED)
def test_unpacking_equals_the_reference_bit_for_bit(name: str, rows: int, blocks: int) -> None:
    kind = GGMLType[name]
    packed = random_blocks(kind, rows, blocks)
    expected = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[name]).astype(np.float32)
    ours = dequantize(torch.from_numpy(packed), kind)
    assert ours.dtype is torch.float32 and ours.shape == (rows, blocks * BLOCK[kind][0])
    assert np.array_equal(ours.numpy().view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16"])
def test_what_was_packed_comes_back_close(name: str) -> None:
    """Not against the other unpacker but against the numbers that went in."""
    weights = np.random.default_rng(1).normal(size=(16, 128)).astype(np.float32)
    packed = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[name])
    error = np.abs(dequantize(torch.from_numpy(packed), GGMLType[name]).numpy() - weights).max()
    assert error < {"4": 0.4, "5": 0.2, "8": 0.03, "1": 0.02}[name[1] if name != "BF16" else "1"]


def integer_groups(packed: torch.Tensor, kind: GGMLType, bits: int) -> QuantizedRows | None:
    rows = coded_rows(packed, kind)
    return quantized_rows(rows, bits) if isinstance(rows, CodedRows) else None


@pytest.mark.parametrize("name", SUPPORTED)
def test_integers_are_kept_where_32_weights_share_a_scale(name: str) -> None:
    """Then only the scale may be rounded, to float16; formats of other groups are left to be packed."""
    kind = GGMLType[name]
    packed = torch.from_numpy(random_blocks(kind, rows=7, blocks=4))
    if kind is GGMLType.MXFP4:
        packed.view(7, 4, -1)[:, :, 0] = 120  # a scale that float16 has
    rows = integer_groups(packed, kind, 8)
    assert (rows is not None) == (name in GROUPS_OF_32)
    if rows is not None:
        assert rows.minima is None
        exact = dequantize(packed, kind)
        torch.testing.assert_close(numbers(rows), exact, rtol=2**-11, atol=127 * 2.0**-25)


def numbers(rows: QuantizedRows) -> torch.Tensor:
    """What the integers stand for, each rounded to float32 once."""
    assert rows.integers.dtype is torch.int8 and rows.scales.dtype is torch.float16
    grouped = rows.integers.double().view(*rows.scales.shape, 32) * rows.scales.double().unsqueeze(2)
    if rows.minima is not None:
        assert rows.minima.dtype is torch.float16
        grouped += rows.minima.double().unsqueeze(2)
    return grouped.flatten(1).float()


@pytest.mark.parametrize("num_tokens", [1, 3, 9])
@pytest.mark.parametrize("name", ["Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q3_K", "Q4_0", "Q4_1", "Q4_K"])
def test_a_cpu_multiplies_the_integers_of_5_and_6_bits(name: str, num_tokens: int) -> None:
    """Only scales are rounded, to float16; those of Q5_0 and Q5_1 are float16 in the file."""
    kind, c = GGMLType[name], library()
    make = Int6 if name in ("Q6_K", "Q3_K") else Int5
    if c is None or make.bits not in c.linear:
        pytest.skip("kept in int8 here")
    packed = random_blocks(kind, rows=21, blocks=512 // BLOCK[kind][0])
    exact = torch.from_numpy(gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[name]))
    projection = make(WeightSpec(21, 512, torch.float32, torch.device("cpu")))
    for part in (slice(0, 5), slice(5, 21)):
        rows = coded_rows(torch.from_numpy(packed[part]), kind)
        projection.fill(rows, part.start, 0)
    assert projection.num_bytes() == (32 * 512 * (projection.bits + 1)) // 8  # two tiles of 16 rows
    kept = projection.dequantized()
    if name.endswith("_K"):
        torch.testing.assert_close(kept, exact, rtol=2**-9, atol=float(exact.abs().max()) * 2**-11)
    else:
        assert torch.equal(kept, exact)
    x = torch.randn(num_tokens, 512)
    product, size = x.double() @ kept.double().T, x.double().abs() @ kept.double().abs().T
    assert ((projection.multiply(x) - product).abs() <= size * 2**-13).all()


@pytest.mark.parametrize("name", SUPPORTED)
def test_files_in_four_bits_keep_their_numbers_in_int4(name: str) -> None:
    """To the last bit; Q4_K within what rounding its two products to float16 takes."""
    kind = GGMLType[name]
    packed = random_blocks(kind, rows=7, blocks=4)
    rows = integer_groups(torch.from_numpy(packed), kind, 4)
    assert (rows is not None) == (name in FOUR_BITS | {"Q4_K"})
    if rows is None:
        return
    assert rows.minima is not None and bool(((rows.integers >= 0) & (rows.integers < 16)).all())
    exact = torch.from_numpy(
        gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[name]).astype(np.float32)
    )
    if name in FOUR_BITS:
        assert torch.equal(numbers(rows), exact)
    else:
        steps = rows.scales.float().abs() * 15 + rows.minima.float().abs()
        off = (numbers(rows) - exact).abs().view(*rows.scales.shape, 32).amax(dim=2)
        assert bool((off <= steps * 2**-10).all()) and bool((off > 0).any())


@pytest.mark.parametrize("name", sorted(FOUR_BITS | {"Q4_K"}))
def test_a_scale_below_the_normal_numbers_of_float16_is_kept(name: str) -> None:
    kind = GGMLType[name]
    packed = torch.from_numpy(random_blocks(kind, rows=7, blocks=4))
    for at in SCALES[name]:
        packed.view(28, -1)[:, at] = torch.arange(28) + 1  # so many times 2^-24
        packed.view(28, -1)[:, at + 1] = 0
    rows = integer_groups(packed, kind, 4)
    assert rows is not None and torch.equal(numbers(rows), dequantize(packed, kind))


@pytest.mark.parametrize("exponent", [90, 200])
def test_scales_that_float16_does_not_have_are_left_to_be_packed(exponent: int) -> None:
    packed = torch.from_numpy(random_blocks(GGMLType.MXFP4, rows=7, blocks=4))
    packed.view(7, 4, -1)[:, :, 0] = 120
    packed[3, 0] = exponent
    assert integer_groups(packed, GGMLType.MXFP4, 8) is None


def test_a_minimum_that_float16_does_not_have_is_left_to_be_packed() -> None:
    packed = torch.from_numpy(random_blocks(GGMLType.Q4_0, rows=7, blocks=4))
    packed.view(28, -1)[5, :2] = torch.tensor([9000.0]).half().view(torch.uint8)  # times -8
    assert integer_groups(packed, GGMLType.Q4_0, 4) is None
    assert integer_groups(packed, GGMLType.Q4_0, 8) is not None


def stored(packed: torch.Tensor, kind: GGMLType) -> PackedTensor:
    """The tensor of a file that holds these rows and nothing else."""
    mapped = mmap.mmap(-1, packed.numel())
    mapped.write(packed.numpy().tobytes())
    shape = (len(packed), packed.shape[1] // BLOCK[kind][1] * BLOCK[kind][0])
    tensor = GGUFTensor("w", shape, kind, 0, packed.numel())
    return PackedTensor(GGUFFile(Path("w.gguf"), {}, {"w": tensor}, mapped), tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_filling_in_steps_equals_unpacking_at_once(dtype: torch.dtype) -> None:
    packed = torch.from_numpy(random_blocks(GGMLType.Q4_K, rows=900, blocks=8))  # several chunks
    out = torch.full((900, 8 * 256), float("nan"), dtype=dtype)
    stored(packed, GGMLType.Q4_K).copy_to(out)
    assert torch.equal(out, dequantize(packed, GGMLType.Q4_K).to(dtype))


def test_a_transposed_view_can_be_filled() -> None:
    packed = torch.from_numpy(random_blocks(GGMLType.Q8_0, rows=6, blocks=2))
    out = torch.empty(64, 6)
    stored(packed, GGMLType.Q8_0).copy_to(out.T)
    assert torch.equal(out, dequantize(packed, GGMLType.Q8_0).T)


def test_a_format_we_cannot_unpack_is_named_with_those_we_can() -> None:
    with pytest.raises(CheckpointError, match=r"type Q8_K are not supported; supported types: F32, .*Q6_K"):
        dequantize(torch.zeros(1, 292, dtype=torch.uint8), GGMLType.Q8_K)


def test_block_sizes_agree_with_the_format_library() -> None:
    for kind, sizes in BLOCK.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)] == sizes, kind.name
        assert gguf.GGMLQuantizationType(kind).name == kind.name
