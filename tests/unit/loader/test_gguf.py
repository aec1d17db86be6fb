"""GGUF headers: read like the format's own library reads them, and safe where that one is not."""

from __future__ import annotations

import random
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from infer.errors import CheckpointError, InferError
from infer.loader.formats.gguf import GGMLType, GGUFFile, read_gguf
from infer.loader.formats.gguf_config import hf_config_from_gguf
from infer.loader.formats.gguf_tensors import gguf_checkpoint
from infer.models.registry import find_family

STRING, ARRAY, BOOL, U32 = 8, 9, 7, 4


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def tensor(name: str, dimensions: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset)


def write_raw(
    directory: Path,
    *,
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: bytes = b"",
    magic: bytes = b"GGUF",
    version: int = 3,
    num_keys: int | None = None,
    num_tensors: int | None = None,
) -> Path:
    """A GGUF file with anything at all in its header."""
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    )
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys + tensors)
    path = directory / "model.gguf"
    path.write_bytes(header + bytes(-len(header) % 32 if tensors else 0) + data)
    return path


def write_library_file(path: Path) -> Path:
    """A small file by the format's own writer, with every kind of value, and a runnable llama in it."""
    writer = gguf.GGUFWriter(path, "llama")
    sizes = {"block_count": 1, "embedding_length": 32, "feed_forward_length": 32, "context_length": 64}
    for name, value in (sizes | {"attention.head_count": 2, "attention.head_count_kv": 1}).items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -100)
    writer.add_uint16("a.u16", 60_000)
    writer.add_int16("a.i16", -30_000)
    writer.add_int32("a.i32", -(2**31))
    writer.add_uint64("a.u64", 2**64 - 1)
    writer.add_int64("a.i64", -(2**63))
    writer.add_float64("a.f64", 1e300)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "häß 日本 🎉")
    writer.add_array("a.ints", [1, 2, 3])
    writer.add_array("a.floats", [0.5, -1.0])
    writer.add_array("a.bools", [True, False])
    writer.add_array("a.strings", ["", "b", "ü"])
    writer.add_token_list([f"t{i}" for i in range(7)])
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (7, 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    shapes |= {"blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32)}
    shapes |= {"blk.0.attn_output": (32, 32), "blk.0.ffn_gate": (32, 32), "blk.0.ffn_up": (32, 32)}
    for name, shape in (shapes | {"blk.0.ffn_down": (32, 32)}).items():
        values = rng.normal(size=shape).astype(np.float32)
        if len(shape) == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def library_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_library_file(tmp_path_factory.mktemp("gguf") / "library.gguf")


def test_metadata_and_tensors_equal_what_the_format_library_reads(library_file: Path) -> None:
    ours, theirs = read_gguf(library_file), gguf.GGUFReader(library_file)
    expected = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == expected
    assert list(ours.tensors) == [info.name for info in theirs.tensors]
    for info in theirs.tensors:
        mine = ours.tensors[info.name]
        assert mine.shape == tuple(int(size) for size in reversed(info.shape))
        assert mine.kind == int(info.tensor_type) and mine.offset == info.data_offset
        assert np.array_equal(ours.packed_rows(info.name).ravel(), info.data.view(np.uint8).ravel())


def test_version_2_is_read_like_version_3(tmp_path: Path) -> None:
    key = text("k") + struct.pack("<II", U32, 7)
    assert read_gguf(write_raw(tmp_path, keys=(key,), version=2)).metadata == {"k": 7}


@pytest.mark.parametrize(
    ("file", "complaint"),
    [
        ({"magic": b"GGML"}, "it begins with b'GGML', so it is not a GGUF file"),
        ({"version": 1}, "it is version 1"),
        ({"version": 0x03000000}, "it is big-endian"),
        ({"num_keys": 2**40}, "claims 1099511627776 metadata keys"),
        ({"num_tensors": 2**63}, "claims .* tensors, more than"),
        ({"num_keys": 3}, "a metadata key .* needs 8 bytes"),
        ({"keys": (struct.pack("<Q", 2**40),)}, "a metadata key .* is 1099511627776 bytes long"),
        ({"keys": (text("k") + struct.pack("<IQ", STRING, 2**62),)}, "value of 'k' .* needs"),
        ({"keys": (text("k") + struct.pack("<IIQ", ARRAY, U32, 2**60),)}, "claims .* elements of 'k'"),
        ({"keys": (text("k") + struct.pack("<IIQ", ARRAY, U32, 1000),)}, "value of 'k' .* needs 4000 bytes"),
        ({"keys": (text("k") + struct.pack("<IIQ", ARRAY, STRING, 9) + text("a"),)}, "'k' ends after 1 of 9"),
        ({"keys": (text("k") + struct.pack("<IIQ", ARRAY, ARRAY, 1),)}, "'k' has the unknown type 9"),
        ({"keys": (text("k") + struct.pack("<I", 77),)}, "'k' has the unknown type 77"),
        ({"keys": (text("k") + struct.pack("<IB", BOOL, 2),)}, "'k' is a boolean that is neither"),
        ({"keys": (text("k") + struct.pack("<II", U32, 1),) * 2}, "key 'k' occurs twice"),
        ({"keys": (text(b"\xff\xfe") + struct.pack("<II", U32, 1),)}, "not UTF-8"),
        ({"keys": (text("k") + struct.pack("<I", STRING) + text(b"\xff"),)}, "value of 'k' .* not UTF-8"),
        (
            {"keys": (text("k") + struct.pack("<IIQ", ARRAY, STRING, 1) + text(b"\xff"),)},
            "string of 'k' is not UTF-8",
        ),
        (
            {"keys": (text("general.alignment") + struct.pack("<II", U32, 33),)},
            "must be a power of two, got 33",
        ),
        (
            {"keys": (text("general.alignment") + struct.pack("<II", U32, 0),)},
            "must be a power of two, got 0",
        ),
        ({"keys": (text("split.count") + struct.pack("<II", U32, 3),)}, "one of 3 pieces"),
        ({"tensors": (tensor("t", [4], kind=99),), "data": bytes(64)}, "'t' has the unknown type 99"),
        ({"tensors": (tensor("t", []),), "data": bytes(64)}, "'t' has 0 dimensions"),
        ({"tensors": (tensor("t", [1] * 5),), "data": bytes(64)}, "'t' has 5 dimensions"),
        ({"tensors": (tensor("t", [0, 4]),), "data": bytes(64)}, r"'t' has shape \[4, 0\]"),
        ({"tensors": (tensor("t", [33], kind=2),), "data": bytes(64)}, r"'t' has shape \[33\].*Q4_0"),
        (
            {"tensors": (tensor("t", [2**40, 2**40]),), "data": bytes(64)},
            "'t' ends at byte .*, but the file has",
        ),
        ({"tensors": (tensor("t", [17]),), "data": bytes(64)}, "'t' ends at byte"),
        ({"tensors": (tensor("t", [4], offset=2**62),), "data": bytes(64)}, "'t' ends at byte"),
        ({"tensors": (tensor("t", [4], offset=4),), "data": bytes(64)}, "offset 4, not a multiple of 32"),
        ({"tensors": (tensor("t", [4]), tensor("u", [4])), "data": bytes(64)}, "'t' and 'u' overlap"),
        ({"tensors": (tensor("t", [4]), tensor("t", [4], offset=32)), "data": bytes(64)}, "'t' occurs twice"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path: Path, file: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CheckpointError, match=rf"model.gguf cannot be loaded: .*{complaint}"):
        read_gguf(write_raw(tmp_path, **file))


def test_a_file_that_is_empty_or_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(CheckpointError, match="is empty"):
        read_gguf(tmp_path / "empty.gguf")
    with pytest.raises(CheckpointError, match="No such file"):
        read_gguf(tmp_path / "gone.gguf")


def read_everything(path: Path) -> GGUFFile:
    """All that loading does with a file, up to the weights in memory."""
    file = read_gguf(path)
    raw = hf_config_from_gguf(file)
    find_family(raw).read_config(raw)
    for stored in gguf_checkpoint(file).values():
        if stored.is_readable:
            stored.copy_to(torch.empty(stored.shape))
    return file


def test_every_truncation_is_noticed(library_file: Path, tmp_path: Path) -> None:
    whole, path = library_file.read_bytes(), tmp_path / "cut.gguf"
    infos = read_gguf(library_file).tensors.values()
    end = max(info.offset + info.num_bytes for info in infos)  # padding may follow
    for length in [*range(0, 2200, 7), *range(2200, end, 97), end - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            read_everything(path)
    path.write_bytes(whole[:end])
    read_everything(path)


def test_flipped_bits_give_an_error_of_ours_or_a_model_of_the_same_size(
    library_file: Path, tmp_path: Path
) -> None:
    whole, path = library_file.read_bytes(), tmp_path / "flipped.gguf"
    header_end = min(info.offset for info in read_gguf(library_file).tensors.values())
    choose = random.Random(0)
    num_refused = 0
    for _ in range(800):
        damaged = bytearray(whole)
        for _ in range(choose.choice([1, 1, 1, 8])):
            damaged[choose.randrange(header_end)] ^= 1 << choose.randrange(8)
        path.write_bytes(damaged)
        try:
            file = read_everything(path)
        except InferError:
            num_refused += 1
            continue
        assert sum(info.num_bytes for info in file.tensors.values()) <= len(whole)
    assert num_refused > 300


def test_a_number_of_layers_is_bounded_before_layers_are_listed(library_file: Path) -> None:
    file = read_gguf(library_file)
    metadata = {key.replace("llama.", "gemma3."): value for key, value in file.metadata.items()}
    metadata |= {"general.architecture": "gemma3", "gemma3.attention.sliding_window": 16}
    assert len(hf_config_from_gguf(replace(file, metadata=metadata))["layer_types"]) == 1
    for count in (0, 2**28):
        with pytest.raises(
            CheckpointError, match=r"'block_count' in the gemma3 metadata of .* must be an integer in 1..1024"
        ):
            hf_config_from_gguf(replace(file, metadata=metadata | {"gemma3.block_count": count}))


def test_types_have_the_numbers_of_the_format() -> None:
    for kind in GGMLType:
        assert gguf.GGMLQuantizationType[kind.name].value == kind.value
