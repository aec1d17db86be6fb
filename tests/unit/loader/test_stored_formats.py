"""Quantized matrices as files hold them: words packed by hand and bit by bit, and the numbers they stand for.

Nothing here is packed by the package: `words` below writes one bit after the other, as each format's
description says, and what a matrix stands for is computed in float64 from the codes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from safetensors.torch import save_file

from infer.errors import CheckpointError
from infer.kernels.linear.coded import CodedForm
from infer.loader import weight_plan
from infer.loader.formats import quantized
from infer.loader.formats.bit_stream import unpack
from infer.loader.formats.checkpoint import open_checkpoint
from infer.loader.formats.quantized import QuantizedTensor, describe, quantized_checkpoint
from infer.loader.formats.stored_formats import CODES
from infer.loader.formats.stored_module import Settings, StoredModule
from infer.loader.forms import form_of, is_four_bit, stored_form
from infer.loader.headers import WeightSource
from infer.loader.quantization import Rule
from infer.loader.weight_plan import Kept
from infer.quant.coded import CodedRows
from infer.quant.gpu_schemes import GPUWeights
from infer.quant.packed import QuantizedRows, quantized_rows
from infer.quant.projection import WeightSpec
from infer.quant.rounding import fit_rows
from scripts.unpickle import main as unpickle

Leaves = dict[str, torch.Tensor]
K, N, G = 96, 64, 32


def words(codes: Sequence[int], bits: int) -> list[int]:
    """Codes end to end, the first one in the lowest bits, as signed words of 32 bits."""
    stream = sum(code << bits * place for place, code in enumerate(codes))
    count = -(-len(codes) * bits // 32)
    return [(stream >> 32 * n & 0xFFFFFFFF) - ((stream >> 32 * n + 31 & 1) << 32) for n in range(count)]


def packed(codes: np.ndarray, bits: int, axis: int) -> torch.Tensor:
    """Every line along an axis as words."""
    lines = [words([int(code) for code in line], bits) for line in (codes.T if axis == 0 else codes)]
    matrix = torch.tensor(lines, dtype=torch.int32)
    return (matrix.T if axis == 0 else matrix).contiguous()


def opened(path: Path, leaves: Leaves, settings: dict[str, Any] | None = None) -> QuantizedTensor:
    """The matrix that a file of these leaves holds."""
    path.mkdir(exist_ok=True)
    save_file(
        {f"m.{leaf}": tensor.contiguous() for leaf, tensor in leaves.items()}, path / "model.safetensors"
    )
    found = quantized_checkpoint(open_checkpoint(path), {}, settings or {})
    assert list(found) == ["m.weight"]
    tensor = found["m.weight"]
    assert isinstance(tensor, QuantizedTensor)
    return tensor


def numbers(tensor: QuantizedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.full(tensor.shape, torch.nan, dtype=dtype)
    tensor.copy_to(out)
    return out


def draw(bits: int, groups: int = K // G) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [N, K], float16 scales and zeros [N, G]."""
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 2**bits, (N, K))
    return (
        codes,
        rng.uniform(0.001, 0.1, (N, groups)).astype(np.float16),
        rng.integers(0, 2**bits, (N, groups)),
    )


def meant(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray | int, group: np.ndarray) -> torch.Tensor:
    """(code - zero) * scale, in float64."""
    zero = zeros[:, group] if isinstance(zeros, np.ndarray) else zeros
    return torch.from_numpy((codes.astype(np.int64) - zero) * scales.astype(np.float64)[:, group])


IN_ORDER = np.arange(K) // G


# -- words ---------------------------------------------------------------------------------------------


def test_a_word_of_eight_codes() -> None:
    assert unpack(torch.tensor([[0x76543210]], dtype=torch.int32), 4, 8).tolist() == [list(range(8))]


def test_the_highest_code_of_a_negative_word() -> None:
    assert unpack(torch.tensor([[-1]], dtype=torch.int32), 4, 8).tolist() == [[15] * 8]
    assert unpack(torch.tensor([[-(2**31)]], dtype=torch.int32), 8, 4).tolist() == [[0, 0, 0, 128]]


def test_codes_of_three_bits_straddle_words() -> None:
    """Code 10 has two bits in word 0 and one in word 1, code 21 one bit in word 1 and two in word 2."""
    codes = [0] * 32
    codes[10], codes[21] = 0b110, 0b011
    assert words(codes, 3) == [-(2**31), 1 - 2**31, 1]
    assert unpack(torch.tensor([words(codes, 3)], dtype=torch.int32), 3, 32).tolist() == [codes]


@given(
    st.integers(1, 8).flatmap(lambda b: st.tuples(st.just(b), st.lists(st.integers(0, 2**b - 1), min_size=1)))
)
def test_every_stream_of_codes_is_read_back(drawn: tuple[int, list[int]]) -> None:
    bits, codes = drawn
    assert unpack(torch.tensor([words(codes, bits)], dtype=torch.int32), bits, len(codes)).tolist() == [codes]


def test_whole_codes_in_a_word_leave_bits_unused() -> None:
    codes = [number % 8 for number in range(25)]
    padded = [sum(code << 3 * place for place, code in enumerate(codes[n : n + 10])) for n in (0, 10, 20)]
    assert unpack(torch.tensor([padded], dtype=torch.int32), 3, 25, padded=True).tolist() == [codes]


# -- GPTQ ----------------------------------------------------------------------------------------------


def gptq(
    bits: int, *, version: int = 1, symmetric: bool = False
) -> tuple[Leaves, torch.Tensor, dict[str, Any]]:
    codes, scales, zeros = draw(bits)
    zeros = np.full_like(zeros, 2 ** (bits - 1)) if symmetric else np.maximum(zeros, 1)
    leaves = {
        "qweight": packed(codes.T, bits, axis=0),
        "qzeros": packed((zeros - (version == 1)).T, bits, axis=1),
        "scales": torch.from_numpy(scales.T.copy()),
        "g_idx": torch.from_numpy(IN_ORDER.astype(np.int32)),
    }
    settings = {"quant_method": "gptq", "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}
    return leaves, meant(codes, scales, zeros, IN_ORDER), settings | {"sym": symmetric}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq(bits: int, symmetric: bool, version: int, tmp_path: Path) -> None:
    leaves, expected, settings = gptq(bits, version=version, symmetric=symmetric)
    tensor = opened(tmp_path, leaves, settings)
    assert (tensor.shape, tensor.layout.bits, tensor.layout.group_size) == ((N, K), bits, G)
    assert torch.equal(numbers(tensor).double(), expected)
    assert describe([tensor]).startswith(f"gptq:int{bits}-g{G} ")


def test_gptq_read_as_the_other_version_is_wrong_by_one_step(tmp_path: Path) -> None:
    leaves, expected, settings = gptq(4, version=1)
    wrong = numbers(opened(tmp_path, leaves, settings | {"checkpoint_format": "gptq_v2"})).double()
    scales = leaves["scales"].T.double().repeat_interleave(G, 1)
    assert torch.equal(wrong - expected, scales.expand(N, K))


@pytest.mark.parametrize("said", [True, None])
@pytest.mark.parametrize("version", [1, 2])
def test_symmetric_gptq_needs_no_version(version: int, said: bool | None, tmp_path: Path) -> None:
    """Files that name version 1 and hold the zeros of version 2 are published; all of them are symmetric."""
    leaves, expected, _ = gptq(4, version=version, symmetric=True)
    for claimed in ({}, {"checkpoint_format": "gptq"}, {"checkpoint_format": "gptq_v2"}):
        tensor = opened(tmp_path, leaves, claimed if said is None else claimed | {"sym": said})
        assert torch.equal(numbers(tensor).double(), expected)


def test_a_zero_of_zero_is_stored_as_all_ones_in_version_1(tmp_path: Path) -> None:
    codes, scales, zeros = draw(4)
    zeros[:, 0] = 0
    leaves, _, settings = gptq(4)
    leaves["qweight"], leaves["qzeros"] = packed(codes.T, 4, axis=0), packed((zeros.T - 1) % 16, 4, axis=1)
    expected = meant(codes, scales, zeros, IN_ORDER)
    assert torch.equal(numbers(opened(tmp_path, leaves, settings)).double(), expected)


@pytest.mark.parametrize("bits", [3, 4])
def test_gptq_with_columns_that_name_their_groups(bits: int, tmp_path: Path) -> None:
    leaves, _, settings = gptq(bits)
    codes, scales, zeros = draw(bits)
    order = np.random.default_rng(0).permutation(K) // G
    leaves["g_idx"] = torch.from_numpy(order.astype(np.int32))
    tensor = opened(tmp_path, leaves, settings)
    assert torch.equal(numbers(tensor).double(), meant(codes, scales, np.maximum(zeros, 1), order))
    assert tensor.layout.group_size == 0 and is_four_bit([tensor])
    assert "int" in tensor.type_name and tensor.type_name.endswith("-actorder")
    assert all(isinstance(rows, torch.Tensor) for rows in as_kept(tensor, 4))
    ((_, rows),) = tensor.rows(N, torch.device("cpu"))
    assert isinstance(rows, CodedRows)
    ordered, columns = rows.in_order()
    assert ordered.groups == G and torch.equal(ordered.numbers(), rows.numbers()[:, columns])
    assert fit_rows(ordered, CodedForm("int4", 32, has_minima=True)) is not None


def test_columns_that_name_groups_of_different_sizes_have_no_order(tmp_path: Path) -> None:
    leaves, _, settings = gptq(4)
    leaves["g_idx"][0] = 1
    tensor = opened(tmp_path, leaves, settings)
    assert tensor.codes is not None and not tensor.codes.order and form_of(tensor) is None


@pytest.mark.parametrize(("is_head", "num_experts"), [(False, None), (True, None), (False, 1)])
def test_a_gpu_never_rounds_codes_whose_columns_name_their_groups(
    is_head: bool, num_experts: int | None, tmp_path: Path
) -> None:
    """A head and experts, which know no order of columns, are plain numbers."""
    leaves, _, settings = gptq(4)
    leaves["g_idx"] = torch.from_numpy((np.random.default_rng(0).permutation(K) // G).astype(np.int32))
    source = WeightSource("m.weight", opened(tmp_path, leaves, settings), None, "weight")
    spec = WeightSpec(N, K, torch.bfloat16, torch.device("meta"), num_experts=num_experts)
    rule = Rule("as stored", torch.bfloat16, "", keeps_codes=True, home="cuda")
    kept = weight_plan._keep(Kept(sources=(source,), spec=spec), rule, Settings(settings), is_head=is_head)
    is_plain = is_head or num_experts is not None
    assert kept.is_dense is is_plain and kept.spec is not None and kept.spec.has_order is not is_plain


def test_matrices_in_different_orders_do_not_stay_4_bits_together(tmp_path: Path) -> None:
    leaves, _, settings = gptq(4)
    tensors: list[QuantizedTensor] = []
    for seed in (0, 1, 1):
        order = np.random.default_rng(seed).permutation(K) // G
        leaves["g_idx"] = torch.from_numpy(order.astype(np.int32))
        tensors.append(opened(tmp_path / str(len(tensors)), leaves, settings))
    assert is_four_bit(tensors[1:]) and not is_four_bit(tensors)


def test_gptq_without_g_idx(tmp_path: Path) -> None:
    leaves, expected, settings = gptq(4)
    del leaves["g_idx"]
    assert torch.equal(numbers(opened(tmp_path, leaves, settings)).double(), expected)


def test_gptq_with_a_short_last_group(tmp_path: Path) -> None:
    """96 columns in groups of 64: the file says so in g_idx, or its config does."""
    codes, scales, zeros = draw(4, groups=2)
    zeros = np.maximum(zeros, 1)
    leaves, _, settings = gptq(4)
    leaves |= {
        "qzeros": packed(zeros.T - 1, 4, axis=1),
        "scales": torch.from_numpy(scales.T.copy()),
        "g_idx": torch.arange(K, dtype=torch.int32) // 64,
    }
    expected = meant(codes, scales, zeros, np.arange(K) // 64)
    assert torch.equal(numbers(opened(tmp_path, leaves, settings)).double(), expected)
    del leaves["g_idx"]
    assert torch.equal(numbers(opened(tmp_path, leaves, settings | {"group_size": 64})).double(), expected)


# -- AWQ -----------------------------------------------------------------------------------------------


def awq(columns: Sequence[int] = (0, 2, 4, 6, 1, 3, 5, 7)) -> tuple[Leaves, torch.Tensor]:
    """Nibble i of a word holds column columns[i] of eight."""
    codes, scales, zeros = draw(4)

    def in_order(rows: np.ndarray) -> np.ndarray:
        return rows.reshape(len(rows), -1, 8)[:, :, list(columns)].reshape(len(rows), -1)

    leaves = {
        "qweight": packed(in_order(codes.T), 4, axis=1),
        "qzeros": packed(in_order(zeros.T), 4, axis=1),
        "scales": torch.from_numpy(scales.T.copy()),
    }
    return leaves, meant(codes, scales, zeros, IN_ORDER)


def test_awq(tmp_path: Path) -> None:
    leaves, expected = awq()
    tensor = opened(tmp_path, leaves)
    assert tensor.format.name == "awq" and torch.equal(numbers(tensor).double(), expected)


def test_a_word_of_awq(tmp_path: Path) -> None:
    """Codes 0 .. 7 of eight columns are 0x75316420."""
    leaves = {
        "qweight": torch.full((32, 4), 0x75316420, dtype=torch.int32),
        "qzeros": torch.zeros(1, 4, dtype=torch.int32),
        "scales": torch.ones(1, 32, dtype=torch.float16),
    }
    assert numbers(opened(tmp_path, leaves))[:, 0].tolist() == [*range(8)] * 4


def test_awq_in_natural_order_is_not_what_it_means(tmp_path: Path) -> None:
    leaves, expected = awq(columns=range(8))
    assert not torch.equal(numbers(opened(tmp_path, leaves)).double(), expected)


# -- compressed-tensors --------------------------------------------------------------------------------


def compressed(bits: int, *, symmetric: bool, groups: int = K // G) -> tuple[Leaves, torch.Tensor]:
    """Signed codes, stored with the middle added, and so are zeros."""
    codes, scales, zeros = draw(bits, groups)
    middle = 2 ** (bits - 1)
    leaves = {
        "weight_packed": packed(codes, bits, axis=1),
        "weight_scale": torch.from_numpy(scales),
        "weight_shape": torch.tensor([N, K]),
    }
    if not symmetric:
        leaves["weight_zero_point"] = packed(zeros, bits, axis=0)
    column = np.arange(K) // (K // groups)
    return leaves, meant(codes - middle, scales, 0 if symmetric else zeros - middle, column)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_compressed_tensors_packed(bits: int, symmetric: bool, groups: int, tmp_path: Path) -> None:
    leaves, expected = compressed(bits, symmetric=symmetric, groups=groups)
    tensor = opened(tmp_path, leaves)
    assert tensor.layout.bits == bits and torch.equal(numbers(tensor).double(), expected)


def test_compressed_tensors_of_old_versions_waste_bits(tmp_path: Path) -> None:
    leaves, expected = compressed(3, symmetric=True)
    codes, _, _ = draw(3)
    rows = [
        [sum(int(code) << 3 * place for place, code in enumerate(row[n : n + 10])) for n in range(0, K, 10)]
        for row in codes
    ]
    leaves["weight_packed"] = torch.tensor(rows, dtype=torch.int32)
    assert torch.equal(numbers(opened(tmp_path, leaves)).double(), expected)


def test_compressed_tensors_with_an_order_of_columns(tmp_path: Path) -> None:
    leaves, _ = compressed(4, symmetric=True)
    codes, scales, _ = draw(4)
    order = np.random.default_rng(1).permutation(K) // G
    leaves["weight_g_idx"] = torch.from_numpy(order.astype(np.int32))
    assert torch.equal(numbers(opened(tmp_path, leaves)).double(), meant(codes, scales, 8, order))
    leaves["weight_g_idx"].fill_(-1)  # declared, never set
    assert torch.equal(numbers(opened(tmp_path, leaves)).double(), meant(codes, scales, 8, IN_ORDER))


def test_int8_with_a_scale_per_row(tmp_path: Path) -> None:
    codes = torch.randint(-128, 128, (N, K), dtype=torch.int8)
    scale = torch.rand(N, 1).bfloat16()
    tensor = opened(tmp_path, {"weight": codes, "weight_scale": scale})
    assert tensor.format.name == "compressed-tensors" and not is_four_bit([tensor])
    assert torch.equal(numbers(tensor).double(), codes.double() * scale.double())


def test_int8_with_zeros(tmp_path: Path) -> None:
    codes, zeros = (torch.randint(-128, 128, (N, size), dtype=torch.int8) for size in (K, 1))
    scale = torch.rand(N, 1)
    tensor = opened(tmp_path, {"weight": codes, "weight_scale": scale, "weight_zero_point": zeros})
    exact = (codes.double() - zeros.double()) * scale.double()
    assert torch.equal(numbers(tensor), exact.float())


# -- fp8 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "rows", "columns"),
    [((), N, K), ((1,), N, K), ((1, 1), N, K), ((N,), 1, K), ((N, 1), 1, K), ((N, 3), 1, 32)],
    ids=str,
)
def test_fp8(shape: tuple[int, ...], rows: int, columns: int, tmp_path: Path) -> None:
    codes = torch.randn(N, K).to(torch.float8_e4m3fn)
    scale = torch.rand(shape) + 0.5
    tensor = opened(tmp_path, {"weight": codes, "weight_scale": scale, "input_scale": torch.ones(1)})
    matrix = scale.view(-1, 1) if len(shape) < 2 else scale
    by_weight = matrix.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    assert tensor.format.name == "fp8" and torch.equal(numbers(tensor), codes.float() * by_weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_in_blocks_that_end_early(dtype: torch.dtype, tmp_path: Path) -> None:
    """576 x 320: 4.5 x 2.5 blocks of 128 x 128; `inv` or not, the scale multiplies."""
    codes = torch.randn(576, 320).to(torch.float8_e4m3fn)
    scale = (torch.rand(5, 3) + 0.5).to(dtype)
    tensor = opened(tmp_path, {"weight": codes, "weight_scale_inv": scale})
    assert tensor.type_name == "fp8:e4m3-128x128"
    got = numbers(tensor)
    for i in range(5):
        for j in range(3):
            block = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
            assert torch.equal(got[block], codes[block].float() * scale[i, j].float())


def test_fp8_in_blocks_of_another_size(tmp_path: Path) -> None:
    codes, scale = torch.randn(N, K).to(torch.float8_e4m3fn), torch.rand(4, 2) + 0.5
    tensor = opened(tmp_path, {"weight": codes, "weight_scale_inv": scale}, {"weight_block_size": [16, 64]})
    by_weight = scale.repeat_interleave(16, 0).repeat_interleave(64, 1)[:, :K]
    assert torch.equal(numbers(tensor), codes.float() * by_weight)


# -- bitsandbytes --------------------------------------------------------------------------------------


def nf4(*, nested: bool, rows: int = N, size: int = K) -> tuple[Leaves, torch.Tensor]:
    """Blocks of 64 over the flattened matrix; the first of two codes in the high half of a byte."""
    count = rows * size
    codes = torch.randint(0, 16, (count,))
    table = torch.sort(torch.rand(16) * 2 - 1)[0]
    absmax = torch.rand(-(-count // 64)) + 0.1
    pairs = torch.cat((codes, torch.zeros(count % 2, dtype=torch.int64))).view(-1, 2)
    state: dict[str, Any] = {"blocksize": 64, "shape": [rows, size], "quant_type": "nf4", "dtype": "float16"}
    leaves = {"weight": (pairs[:, :1] * 16 + pairs[:, 1:]).to(torch.uint8), "weight.quant_map": table}
    leaves["weight.absmax"] = absmax
    if nested:
        state |= {"nested_blocksize": 256, "nested_offset": 0.25, "nested_dtype": "float32"}
        codes8 = torch.randint(0, 256, absmax.shape, dtype=torch.uint8)
        levels, scales = torch.linspace(-1, 1, 256), torch.rand(-(-len(absmax) // 256)) + 0.1
        absmax = levels[codes8.long()] * scales.repeat_interleave(256)[: len(absmax)] + 0.25
        leaves |= {"weight.absmax": codes8, "weight.nested_absmax": scales, "weight.nested_quant_map": levels}
    text = bytearray(json.dumps(state).encode())
    leaves["weight.quant_state.bitsandbytes__nf4"] = torch.frombuffer(text, dtype=torch.uint8)
    expected = table[codes] * absmax.repeat_interleave(64)[:count]
    return leaves, expected.view(rows, size)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(64, 96), (33, 35), (1, 7), (300, 128)], ids=str)
def test_nf4(nested: bool, shape: tuple[int, int], tmp_path: Path) -> None:
    leaves, expected = nf4(nested=nested, rows=shape[0], size=shape[1])
    tensor = opened(tmp_path, leaves)
    assert tensor.type_name == "bitsandbytes:nf4-g64" and torch.equal(numbers(tensor), expected)


def test_nested_blocks_of_any_length_take_no_memory_of_theirs(tmp_path: Path) -> None:
    leaves, expected = nf4(nested=True, rows=64, size=96)
    name = "weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(leaves[name].tolist())) | {"nested_blocksize": 2**40}
    leaves[name] = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    assert torch.equal(numbers(opened(tmp_path, leaves)), expected), "all blocks are in the first of these"


def test_int8_of_bitsandbytes(tmp_path: Path) -> None:
    codes = torch.randint(-127, 128, (N, K), dtype=torch.int8)
    leaves = {"weight": codes, "SCB": torch.rand(N), "weight_format": torch.zeros((), dtype=torch.uint8)}
    tensor = opened(tmp_path, leaves)
    torch.testing.assert_close(numbers(tensor), codes.float() * leaves["SCB"][:, None] / 127)
    with pytest.raises(CheckpointError, match="weight_format is not 0"):
        opened(tmp_path, leaves | {"weight_format": torch.ones((), dtype=torch.uint8)})


# -- SqueezeLLM ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("share", [None, 0.05, 0.0], ids=["dense", "sparse", "sparse without any"])
def test_squeezellm(bits: int, share: float | None, tmp_path: Path) -> None:
    codes, _, _ = draw(bits)
    table = torch.randn(N, 2**bits)
    expected = torch.stack([table[row][torch.from_numpy(codes[row])] for row in range(N)])
    leaves = {"qweight": packed(codes.T, bits, axis=0), "lookup_table": table}
    if share is not None:
        outliers = torch.where(torch.rand(N, K) < share, torch.randn(N, K), torch.zeros(N, K))
        outliers[3] = 0  # a row without any
        where = outliers.nonzero()
        starts = torch.tensor([0, *outliers.count_nonzero(1).cumsum(0).tolist()], dtype=torch.int32)
        leaves |= {
            "rows": starts, "cols": where[:, 1].int(), "vals": outliers[outliers != 0],
            "startrows": torch.zeros(8, dtype=torch.int32),
        }  # fmt: skip
        expected = expected + outliers
    tensor = opened(tmp_path, leaves)
    assert tensor.format.name == "squeezellm" and torch.equal(numbers(tensor), expected)
    assert tensor.codes is not None and (tensor.codes.num_outliers > 0) == bool(share)
    device, count = torch.device("cpu"), tensor.codes.num_outliers
    form = form_of(tensor)
    projection = GPUWeights(WeightSpec(N, K, torch.float32, device, form=form, num_outliers=count))
    projection.load(tensor, part=None, expert=None, transposed=False)
    torch.testing.assert_close(projection.dequantized(), expected)


# -- integers for the kernels of a CPU -----------------------------------------------------------------


def as_kept(tensor: QuantizedTensor, bits: int) -> Iterator[torch.Tensor | QuantizedRows]:
    """The rows as a CPU's kernels take them: integers where they have that form, else numbers."""
    for _, rows in tensor.rows(32, torch.device("cpu")):
        integers = quantized_rows(rows, bits) if isinstance(rows, CodedRows) else None
        yield integers or (rows.numbers() if isinstance(rows, CodedRows) else rows)


def from_integers(tensor: QuantizedTensor, bits: int) -> torch.Tensor:
    """What the integers that are handed out stand for; all of them must be integers."""
    rows = []
    for chunk in as_kept(tensor, bits):
        assert isinstance(chunk, QuantizedRows), "not kept as integers"
        scales = chunk.scales.double().repeat_interleave(32, 1)[:, : tensor.shape[1]]
        part = chunk.integers.double() * scales
        if chunk.minima is not None:
            assert bits == 4 and 0 <= int(chunk.integers.min()) <= int(chunk.integers.max()) <= 15
            part += chunk.minima.double().repeat_interleave(32, 1)[:, : tensor.shape[1]]
        rows.append(part)
    return torch.cat(rows)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_codes_of_four_bits_or_less_stay_as_they_are(bits: int, tmp_path: Path) -> None:
    leaves, expected, settings = gptq(bits, symmetric=True)
    tensor = opened(tmp_path, leaves, settings)
    assert is_four_bit([tensor])
    for kept in (4, 8):  # a head has 8
        assert torch.equal(from_integers(tensor, kept), expected)


@pytest.mark.parametrize("make", [lambda: gptq(4)[:2], awq, lambda: compressed(4, symmetric=False)])
def test_zeros_become_minima_within_a_part_in_two_thousand(
    make: Callable[[], tuple[Leaves, torch.Tensor]], tmp_path: Path
) -> None:
    leaves, expected = make()
    tensor = opened(tmp_path, leaves, {"sym": False})
    assert is_four_bit([tensor]) and torch.equal(from_integers(tensor, 8), expected)
    zeros_times_scales = 16 * 0.1
    assert float((from_integers(tensor, 4) - expected).abs().max()) <= zeros_times_scales / 2048


def test_int8_stays_as_it_is(tmp_path: Path) -> None:
    for leaves, expected, settings in (
        gptq(8, symmetric=True),
        (*compressed(8, symmetric=True), {}),
    ):
        tensor = opened(tmp_path, leaves, settings)
        assert not is_four_bit([tensor]) and torch.equal(from_integers(tensor, 8), expected)


def test_what_has_no_such_form_is_handed_out_as_numbers(tmp_path: Path) -> None:
    groups_of_16 = compressed(4, symmetric=True, groups=6)
    eight_bits = gptq(8)[:2]  # code minus zero has nine
    for leaves, expected in (groups_of_16, eight_bits, nf4(nested=True)):
        tensor = opened(tmp_path, leaves, {"sym": False})
        chunks = list(as_kept(tensor, 8))
        assert not is_four_bit([tensor]) and all(isinstance(rows, torch.Tensor) for rows in chunks)
        assert torch.equal(torch.cat(chunks).double(), expected.double())  # type: ignore[arg-type]


def test_a_scale_that_a_float16_cannot_hold_is_not_rounded_to_nothing(tmp_path: Path) -> None:
    leaves, _ = compressed(4, symmetric=True)
    leaves["weight_scale"] = torch.full((N, 3), 1e-9)
    tensor = opened(tmp_path, leaves)
    assert all(isinstance(rows, torch.Tensor) and bool(rows.any()) for rows in as_kept(tensor, 4))


# -- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [lambda: gptq(4)[0], lambda: awq()[0], lambda: compressed(8, symmetric=False)[0]]
)
def test_the_codes_of_a_large_matrix_come_to_the_device_with_their_rows(
    make: Callable[[], Leaves], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head of 600 MiB must not lie beside the weights, where loading is said to take 256 MiB."""
    tensor, gpu, asked = opened(tmp_path, make()), torch.device("cuda", 0), dict[str, torch.device]()

    def read(module: StoredModule, leaf: str, device: torch.device | None = None) -> torch.Tensor:
        asked[leaf] = device or torch.device("cpu")
        return read_leaf(module, leaf)

    read_leaf = StoredModule.read
    monkeypatch.setattr(StoredModule, "read", read)
    whole = [rows for _, rows in tensor.rows(N, gpu)]
    assert set(asked.values()) == {gpu}
    monkeypatch.setattr(quantized, "_MOST_CODES", 64)
    parts = [rows for _, rows in tensor.rows(32, gpu)]
    assert [leaf for leaf, device in asked.items() if device != gpu] == [min(CODES & asked.keys())]
    assert torch.equal(torch.cat([rows.numbers() for rows in parts]), whole[0].numbers())  # type: ignore[union-attr]


def test_every_leaf_of_the_wrong_shape_is_refused(tmp_path: Path) -> None:
    makers: list[tuple[Leaves, dict[str, Any]]] = [
        (gptq(4)[0], gptq(4)[2]), (gptq(3)[0], gptq(3)[2]), (awq()[0], {}),
        (compressed(4, symmetric=False)[0], {}), (nf4(nested=True)[0], {}), (nf4(nested=False)[0], {}),
        ({"weight": torch.zeros(N, K).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(1, 1)}, {}),
    ]  # fmt: skip
    for leaves, settings in makers:
        for leaf, tensor in leaves.items():
            for axis in range(tensor.dim()):
                longer = torch.cat((tensor.float(), tensor.narrow(axis, 0, 1).float()), axis).to(tensor.dtype)
                for wrong in (longer, tensor.narrow(axis, 0, 0), tensor.flatten()[None, None]):
                    try:
                        other = opened(tmp_path, leaves | {leaf: wrong}, settings)
                    except CheckpointError:
                        continue
                    assert other.shape != (N, K), f"{leaf} {list(wrong.shape)} was accepted"


def test_a_column_of_a_group_that_is_not_there(tmp_path: Path) -> None:
    leaves, _, settings = gptq(4)
    for wrong in (3, -1, 2**31 - 1):
        leaves["g_idx"][5] = wrong
        with pytest.raises(CheckpointError, match=r"m cannot be read: g_idx names groups .* of 3"):
            opened(tmp_path, leaves, settings)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_scales_that_are_not_numbers(value: float, tmp_path: Path) -> None:
    leaves, _, settings = gptq(4)
    leaves["scales"][1, 7] = value
    with pytest.raises(CheckpointError, match="scales has scales that are not finite"):
        numbers(opened(tmp_path, leaves, settings))


@pytest.mark.parametrize(
    ("dtype", "code"),
    [
        *((torch.float8_e4m3fn, code) for code in (0x7F, 0xFF)),
        *((torch.float8_e5m2, code) for code in (0xFC, 0x7E)),
    ],
)
def test_codes_of_fp8_that_are_not_numbers(dtype: torch.dtype, code: int, tmp_path: Path) -> None:
    codes = torch.full((N, K), 0x7E if dtype is torch.float8_e4m3fn else 0x7B, dtype=torch.uint8)
    leaves = {"weight": codes.view(dtype), "weight_scale": torch.ones(N, 1)}
    assert bool(numbers(opened(tmp_path, leaves)).isfinite().all())
    codes[3, 5] = code
    with pytest.raises(CheckpointError, match="m cannot be read: weight has codes that are not finite"):
        numbers(opened(tmp_path, leaves))


@pytest.mark.parametrize("symmetric", [True, False, None])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_config_alone_says_what_the_file_would(bits: int, symmetric: bool | None, tmp_path: Path) -> None:
    leaves, _, settings = gptq(bits)
    settings = {**settings, "quant_method": "gptq", "bits": bits, "group_size": 32}
    settings = {key: value for key, value in settings.items() if key not in ("sym", "desc_act")}
    if symmetric is not None:
        settings["sym"] = symmetric
    leaves = {name: tensor for name, tensor in leaves.items() if name != "g_idx"}
    form = form_of(opened(tmp_path, leaves, settings))
    assert form is not None and form.has_minima == (bits == 8 and not symmetric)
    codes = Settings(settings).codes(K)
    assert codes is not None and stored_form(codes) == form
    weights = {"num_bits": bits, "type": "int", "group_size": 32}
    for said in ({}, {"symmetric": True}, {"symmetric": False}):
        group = {"weights": weights | said}
        planned = Settings({"quant_method": "compressed-tensors", "config_groups": {"g": group}}).codes(K)
        assert planned is not None and planned.has_minima == (bits == 8 and said == {"symmetric": False})


def test_zeros_that_are_no_codes(tmp_path: Path) -> None:
    leaves, _ = compressed(4, symmetric=False)
    leaves["weight_zero_point"] = torch.full(leaves["weight_scale"].shape, 100, dtype=torch.int8)
    with pytest.raises(CheckpointError, match="weight_zero_point has zeros that are no codes of 4 bits"):
        numbers(opened(tmp_path, leaves))


def test_a_symmetric_file_with_other_zeros(tmp_path: Path) -> None:
    leaves, _, settings = gptq(4)
    with pytest.raises(CheckpointError, match="the config says sym, but qzeros are neither all 7 nor all 8"):
        numbers(opened(tmp_path, leaves, settings | {"sym": True}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": torch.zeros(N + 1, dtype=torch.int32)}, "not a sparse matrix"),
        ({"cols": torch.full((4,), K, dtype=torch.int32)}, "not a sparse matrix"),
        (
            {"full_rows": torch.ones(K, 2)},
            "full_rows, dense rows next to the sparse weights, are not supported",
        ),
    ],
)
def test_sparse_weights_that_lie_elsewhere(change: Leaves, message: str, tmp_path: Path) -> None:
    codes, _, _ = draw(4)
    starts = torch.full((N + 1,), 4, dtype=torch.int32)
    starts[0] = 0
    leaves = {
        "qweight": packed(codes.T, 4, axis=0), "lookup_table": torch.randn(N, 16),
        "rows": starts, "cols": torch.zeros(4, dtype=torch.int32), "vals": torch.ones(4),
    }  # fmt: skip
    numbers(opened(tmp_path, leaves))
    with pytest.raises(CheckpointError, match=message):
        numbers(opened(tmp_path, leaves | change))


@pytest.mark.parametrize(
    "text", [b"{", b"[]", b'{"shape": [64, 96]}', b'{"shape": [1e999, 2], "blocksize": 64}', b"\xff" * 80]
)
def test_the_state_of_bitsandbytes_that_is_none(text: bytes, tmp_path: Path) -> None:
    leaves, _ = nf4(nested=False)
    leaves["weight.quant_state.bitsandbytes__nf4"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="is not the JSON of a state"):
        opened(tmp_path, leaves)


def test_a_nested_absmax_that_is_missing_is_named(tmp_path: Path) -> None:
    leaves, _ = nf4(nested=True)
    del leaves["weight.nested_absmax"]
    with pytest.raises(CheckpointError, match="weight.nested_absmax is missing"):
        opened(tmp_path, leaves)


def test_a_config_that_contradicts_the_tensors_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened(tmp_path, nf4(nested=False)[0], {"quant_method": "hqq"})
    assert len(caplog.records) == 1
    assert "says quant_method 'hqq', but the tensors are read as bitsandbytes:nf4" in caplog.text
    caplog.clear()
    leaves = gptq(4)[0]
    for settings in ({"bits": 5, "quant_method": "gptq"}, {"bits": 4, "quant_method": "gptq"}):
        opened(tmp_path, leaves, settings)
    assert len(caplog.records) == 1 and "says bits 5, but the tensors are read as gptq:int4" in caplog.text


def test_a_format_that_is_not_known_is_named_with_those_that_are(tmp_path: Path) -> None:
    leaves = {
        "weight_packed": torch.zeros(N, K // 2, dtype=torch.uint8),
        "weight_scale": torch.ones(N, K // 16).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.ones(1),
    }
    settings = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path, leaves, settings)
    for part in ("weight_packed U8 [64, 48]", "gptq, awq, compressed-tensors", "format nvfp4-pack-quantized"):
        assert part in str(caught.value)


@pytest.mark.parametrize("missing", ["qweight", "qzeros", "scales"])
def test_a_leaf_that_is_missing(missing: str, tmp_path: Path) -> None:
    leaves, _, settings = gptq(4)
    del leaves[missing]
    with pytest.raises(CheckpointError, match="m cannot be read: it is stored as"):
        opened(tmp_path, leaves, settings)


@pytest.mark.parametrize("version", ["marlin", "gptq_p", "bitblas"])
def test_a_version_of_gptq_that_is_not_known(version: str, tmp_path: Path) -> None:
    leaves, _, settings = gptq(3)
    with pytest.raises(CheckpointError, match=f"checkpoint_format is '{version}'; supported: gptq, gptq_v2"):
        opened(tmp_path, leaves, settings | {"checkpoint_format": version})


# what a config may say: nothing of it may do more than mislead
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.sampled_from(["gptq", "x", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["weights", "a"]), inner),
    max_leaves=6,
)
KEYS = (
    "quant_method",
    "sym",
    "checkpoint_format",
    "packing_format",
    "group_size",
    "num_bits",
    "config_groups",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    paths = [tmp_path_factory.mktemp(name) for name in ("gptq", "compressed")]
    for path, leaves in zip(paths, (gptq(4)[0], compressed(4, symmetric=False)[0]), strict=True):
        opened(path, leaves)
    return paths


@given(settings=st.dictionaries(st.sampled_from([*KEYS, "weight_block_size", "version", "format"]), ANYTHING))
def test_no_config_makes_it_fail_otherwise(settings: dict[str, Any], files: list[Path]) -> None:
    for path in files:
        try:
            tensor = quantized_checkpoint(open_checkpoint(path), {}, settings)["m.weight"]
            assert isinstance(tensor, QuantizedTensor) and numbers(tensor).isfinite().all()
        except CheckpointError as error:
            assert "checkpoint_format" in str(error) or "sym" in str(error)


def test_a_pickle_of_tensors_is_converted(tmp_path: Path) -> None:
    codes, _, _ = draw(4)
    leaves = {"m.qweight": packed(codes.T, 4, axis=0), "m.lookup_table": torch.randn(N, 16)}
    torch.save({"state_dict": leaves, "step": 3}, tmp_path / "model.pt")
    assert unpickle([str(tmp_path / "model.pt"), str(tmp_path / "out")]) == 0
    found = quantized_checkpoint(open_checkpoint(tmp_path / "out"), {}, {})
    assert found["m.weight"].type_name == "squeezellm:lut4"
    torch.save({"path": Path("a")}, tmp_path / "code.pt")  # an object of a class, however harmless
    with pytest.raises(SystemExit):
        unpickle([str(tmp_path / "code.pt"), str(tmp_path / "other")])


def integers(size: int, scales: tuple[int, ...], dtype: torch.dtype = torch.int8) -> Leaves:
    return {"weight": torch.ones(size, size, dtype=dtype), "weight_scale": torch.ones(scales)}


def words_of(qweight: tuple[int, int], size: int) -> Leaves:
    zeros = torch.zeros(size // 32, size // 8, dtype=torch.int32)
    scales = torch.ones(size // 32, size, dtype=torch.float16)
    return {"qweight": torch.zeros(qweight, dtype=torch.int32), "qzeros": zeros, "scales": scales}


@pytest.mark.parametrize(
    ("method", "leaves", "stored_as"),
    [
        ("fp8", integers(64, (64, 1)), "compressed-tensors"),
        ("awq", words_of((8, 64), 64), "gptq"),  # [64, 8], transposed
        ("gptq", words_of((64, 8), 64), "awq"),
    ],
)
def test_tensors_that_mean_other_numbers_than_the_config_are_refused(
    method: str, leaves: Leaves, stored_as: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=f"the config says {method}, but .* are stored as {stored_as},"):
        opened(tmp_path, leaves, {"quant_method": method})
    assert opened(tmp_path, leaves, {"quant_method": stored_as}).format.name == stored_as
