"""Safetensors files: what is read equals what was written, and nothing damaged gets through."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from infer.errors import CheckpointError
from infer.loader.formats.checkpoint import INDEX, StoredTensor, open_checkpoint
from tests.unit.loader.tiny_files import write_weights

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b.weight": torch.arange(10, dtype=torch.bfloat16) / 4,
    "c.weight": torch.tensor([[0.5], [-1.5]], dtype=torch.float16),
    "d.empty": torch.empty(0, 4),
    "e.scalar": torch.tensor(3.25, dtype=torch.float64),
}


def read(stored: StoredTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.full(stored.shape, float("nan"), dtype=dtype)
    stored.copy_to(out)
    return out


def read_all(directory: Path) -> dict[str, torch.Tensor]:
    return {name: read(stored) for name, stored in open_checkpoint(directory).items() if stored.is_readable}


def write_raw(directory: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    """A safetensors file with any header at all."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = directory / "model.safetensors"
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(start: int, stop: int, shape: list[Any] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [(stop - start) // 4] if shape is None else shape,
        "data_offsets": [start, stop],
    }


@pytest.mark.parametrize("num_shards", [1, 2])
def test_what_was_saved_is_read_back(tmp_path: Path, num_shards: int) -> None:
    write_weights(tmp_path, dict(TENSORS), num_shards=num_shards)
    stored = open_checkpoint(tmp_path)
    assert stored.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(read(stored[name], tensor.dtype), tensor), name
        assert torch.equal(read(stored[name]), tensor.float()), name


def test_a_single_file_of_another_name_will_do_but_two_will_not(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "weights.safetensors")
    assert list(open_checkpoint(tmp_path)) == ["x"]
    save_file({"y": torch.ones(2)}, tmp_path / "more.safetensors")
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor .* but 2 other"):
        open_checkpoint(tmp_path)


def test_a_header_of_odd_length_is_read_all_the_same(tmp_path: Path) -> None:
    data = torch.tensor([1.5, -2.0]).numpy().tobytes()
    text = json.dumps({"x": entry(0, 8)}).encode()
    write_raw(tmp_path, text + b" " * ((1 - len(text)) % 8), data)
    assert torch.equal(read(open_checkpoint(tmp_path)["x"]), torch.tensor([1.5, -2.0]))


def test_reading_twice_gives_the_same_though_the_pages_were_given_back(tmp_path: Path) -> None:
    save_file({"x": torch.randn(300, 300)}, tmp_path / "model.safetensors")
    stored = open_checkpoint(tmp_path)["x"]
    assert torch.equal(read(stored), read(stored))


def test_integers_are_known_but_cannot_be_copied(tmp_path: Path) -> None:
    save_file({"mask": torch.ones(4, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    assert not open_checkpoint(tmp_path)["mask"].is_readable


@pytest.mark.parametrize(
    ("header", "num_bytes", "complaint"),
    [
        ({"x": entry(0, 8), "y": entry(4, 12)}, 12, "overlaps the tensor before it"),
        ({"x": entry(0, 8), "y": entry(0, 8)}, 8, "overlaps the tensor before it"),
        ({"x": entry(0, 4), "y": entry(8, 12)}, 12, "leaves a hole before it"),
        ({"x": entry(0, 16)}, 8, "cut short"),
        ({"x": entry(0, 8)}, 12, "belong to no tensor"),
        ({"x": entry(0, 8, [3])}, 8, "needs 12 bytes, not 8"),
        ({"x": entry(0, 8, [2**40, 2**40])}, 8, "needs"),
        ({"x": entry(8, 0, [-2])}, 8, "data_offsets"),
        ({"x": entry(0, 8, [2.0])}, 8, "data_offsets"),
        ({"x": entry(0, 8, [True, 2])}, 8, "data_offsets"),
        ({"x": entry(0, 8, dtype="F4_WEIRD")}, 8, "unknown dtype 'F4_WEIRD'"),
        ({"x": [1, 2]}, 0, "entry of tensor 'x' is not an object"),
        ({"x": {"dtype": "F32"}}, 0, "shape None"),
        ([1, 2], 0, "not a JSON object"),
        (b'{"x": ', 0, "not JSON"),
        (b"\xff\xfe", 0, "not JSON"),
        (b"[" * 100_000, 0, "not JSON"),
        (b'{"x": ' + b"9" * 5000 + b"}", 0, "not JSON"),
        (b'{"x": {}, "x": {}}', 0, "'x' occurs twice"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path: Path, header: Any, num_bytes: int, complaint: str) -> None:
    write_raw(tmp_path, header, bytes(num_bytes))
    with pytest.raises(CheckpointError, match=complaint):
        open_checkpoint(tmp_path)


def test_a_name_that_occurs_twice_is_found_in_one_pass(tmp_path: Path) -> None:
    names = [f'"n{i}": 0' for i in range(40_000)]
    write_raw(tmp_path, ("{" + ", ".join([*names, names[-1]]) + "}").encode(), b"")
    start = time.process_time()
    with pytest.raises(CheckpointError, match="'n39999' occurs twice"):
        open_checkpoint(tmp_path)
    assert time.process_time() - start < 2  # comparing all pairs takes ten times that


@pytest.mark.parametrize("length", [1, 10**6, 2**63])
def test_a_wrong_header_length_is_refused(tmp_path: Path, length: int) -> None:
    write_raw(tmp_path, {"x": entry(0, 8)}, bytes(8), length=length)
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be loaded: its header"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "shard", ["../other.safetensors", "/etc/x.safetensors", "a/b.safetensors", "x.bin", 3, ""]
)
def test_an_index_cannot_point_anywhere_but_beside_itself(tmp_path: Path, shard: Any) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": shard}}))
    with pytest.raises(CheckpointError, match="puts tensor 'x' in"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "complaint"),
    [
        ({"x": "1.safetensors", "y": "2.safetensors"}, "1 of the 2 files .* missing, first '2.safetensors'"),
        ({"x": "1.safetensors", "z": "1.safetensors"}, "tensor 'z' is in .*, but it is not"),
        ({}, "no 'weight_map'"),
        ([], "no 'weight_map'"),
    ],
)
def test_an_index_must_agree_with_its_files(tmp_path: Path, weight_map: Any, complaint: str) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "1.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=complaint):
        open_checkpoint(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "1.safetensors")
    save_file({"x": torch.ones(2), "y": torch.ones(2)}, tmp_path / "2.safetensors")
    index = {"weight_map": {"x": "1.safetensors", "y": "2.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="holds tensor 'x', but .* puts it in '1.safetensors'"):
        open_checkpoint(tmp_path)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(dict(TENSORS), path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            read_all(tmp_path)


def test_flipped_bits_are_noticed_or_stay_within_their_tensor(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(dict(TENSORS), path)
    whole = path.read_bytes()
    header_end = 8 + int.from_bytes(whole[:8], "little")
    choose = random.Random(0)
    num_refused = 0
    for _ in range(600):
        position = choose.randrange(header_end if choose.random() < 0.8 else len(whole))
        damaged = bytearray(whole)
        damaged[position] ^= 1 << choose.randrange(8)
        path.write_bytes(damaged)
        try:
            tensors = read_all(tmp_path)
        except CheckpointError as error:
            assert "model.safetensors" in str(error)
            num_refused += 1
            continue
        sizes = sum(tensor.numel() for tensor in tensors.values())
        assert sizes <= sum(tensor.numel() for tensor in TENSORS.values())
    assert num_refused > 300
