"""Read safetensors checkpoints, one file or several with an index, and write single files.

    ┌──────────┬────────────────────────────────────────────┬───────────────────────────────┐
    │ length N │ N bytes of JSON: name -> dtype, shape, range │ the tensors, end to end       │
    └──────────┴────────────────────────────────────────────┴───────────────────────────────┘

Headers of all files are read and checked first: a checkpoint that does not fit the model is refused before
a byte of weights is read. The weights are mapped, not read: `copy_to` copies one tensor to its final place,
converting on the way, and releases the pages it has read, so loading needs no second copy.

Files are not trusted. Errors are ranges that overlap, leave holes or exceed the file, names that occur twice,
and an index that points outside its directory. Weights themselves are not inspected: a NaN in a checkpoint is
loaded as a NaN.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

import torch

from infer.errors import CheckpointError, closest
from infer.loader.formats.axes import Axes, plain_axes
from infer.loader.formats.hf_config import open_at_once, read_json
from infer.quant.coded import CodedRows, StoredCodes

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_INDEX_BYTES = 64 << 20
CHUNK_WEIGHTS = 1 << 20  # weights unpacked at a time: 4 MiB of float32 stay in the CPU's cache

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CODES = {  # types that only a quantization scheme can interpret
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
DTYPES = FLOATS | CODES
TYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
ITEM_BYTES = {name: dtype.itemsize for name, dtype in (CODES | FLOATS).items()}


class StoredTensor(ABC):
    """A tensor on disk that can be copied into a tensor in memory."""

    __slots__ = ()

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape, as its name in the checkpoint implies it."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """The tensor's size on disk."""

    @property
    @abstractmethod
    def type_name(self) -> str:
        """The type of its numbers, as the file names it."""

    @property
    def dtype(self) -> torch.dtype | None:
        """PyTorch's type of its numbers; None: PyTorch has no such type."""
        return None

    @property
    def is_readable(self) -> bool:
        """True if its numbers are weights, which `copy_to` can convert to any float type."""
        return True

    @property
    def codes(self) -> StoredCodes | None:
        """The description of its codes; None: plain numbers, or codes with uneven steps."""
        return None

    @property
    def formats(self) -> tuple[str, ...]:
        """The values of `quantization` that name its format; none for plain numbers."""
        return ()

    @property
    def axes(self) -> Axes:
        """The axes of each of its leaves."""
        return {"weight": plain_axes(len(self.shape))}

    @abstractmethod
    def rows(self, num_rows: int, device: torch.device) -> Iterator[tuple[slice, CodedRows | torch.Tensor]]:
        """Yield the rows of a matrix in order, on a device, about `num_rows` at a time; codes stay codes."""

    def copy_to(self, out: torch.Tensor) -> None:
        """Fill `out`, which has this tensor's shape, converting to its dtype and device.

        A matrix is unpacked a few rows at a time, so nothing of its size is ever allocated.
        """
        if (by_rows := self.transpose()) is not None:
            by_rows.copy_to(out.T)
            return
        for part, rows in self.rows(max(1, CHUNK_WEIGHTS // max(1, out.shape[1])), out.device):
            out[part].copy_(rows.numbers() if isinstance(rows, CodedRows) else rows)

    def transpose(self) -> StoredTensor | None:
        """Return the transposed matrix if that is how this one is stored, else None."""
        return None

    def matrix(self, index: int) -> StoredTensor:
        """Return one matrix of a stack [n, rows, columns]."""
        raise NotImplementedError(f"{type(self).__name__} is not a stack")


def slices_of(length: int, step: int) -> Iterator[slice]:
    """Yield slices of up to `step` that cover `length`."""
    for first in range(0, length, step):
        yield slice(first, min(first + step, length))


@dataclass(frozen=True, slots=True)
class DerivedTensor(StoredTensor):
    """A tensor whose numbers come from another tensor: some of them, or all in another order."""

    whole: StoredTensor

    @property
    def type_name(self) -> str:
        """The type of the other tensor's numbers."""
        return self.whole.type_name

    @property
    def dtype(self) -> torch.dtype | None:
        """PyTorch's type of the other tensor's numbers."""
        return self.whole.dtype

    @property
    def is_readable(self) -> bool:
        """True if the other tensor can be read."""
        return self.whole.is_readable

    @property
    def codes(self) -> StoredCodes | None:
        """The description of the other tensor's codes."""
        return self.whole.codes

    @property
    def formats(self) -> tuple[str, ...]:
        """The names of the other tensor's format."""
        return self.whole.formats

    @property
    def num_bytes(self) -> int:
        """The corresponding share of the other tensor's size on disk."""
        return self.whole.num_bytes * math.prod(self.shape) // max(math.prod(self.whole.shape), 1)


@dataclass(slots=True)
class _File:
    """One safetensors file, mapped when its first tensor is read."""

    path: Path
    mapped: mmap.mmap | None = field(default=None, repr=False)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return the bytes start..stop as a view of the mapped file."""
        return torch.frombuffer(self.map(), dtype=torch.uint8, count=stop - start, offset=start)

    def map(self) -> mmap.mmap:
        if self.mapped is None:
            try:
                with open(self.path, "rb") as handle:
                    # private and writable: PyTorch warns about read-only memory; nothing is written
                    self.mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"cannot map {self.path}: {error}") from None
        return self.mapped

    def forget(self, start: int, stop: int) -> None:
        """Release the pages of these bytes."""
        forget_pages(self.map(), start, stop)


def forget_pages(mapped: mmap.mmap, start: int, stop: int) -> None:
    """Release the pages between two bytes of a mapped file; the kernel can read them again."""
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED, first, last - first)


@dataclass(frozen=True, slots=True)
class SafeTensor(StoredTensor):
    """One tensor of a safetensors file."""

    file: _File
    type_name: str = field()  # field(): else the base class's property would be the default
    shape: tuple[int, ...] = field()
    start: int  # offset from the beginning of the file
    stop: int

    @property
    def num_bytes(self) -> int:
        """The tensor's size on disk."""
        return self.stop - self.start

    @property
    def dtype(self) -> torch.dtype:
        """PyTorch's type of its numbers."""
        return DTYPES[self.type_name]

    @property
    def is_readable(self) -> bool:
        """True for floats of 16 bits or more; other types mean nothing without a quantization scheme."""
        return self.type_name in FLOATS

    def copy_to(self, out: torch.Tensor) -> None:
        """Fill `out` from the mapped file."""
        assert tuple(out.shape) == self.shape, (out.shape, self.shape)
        if self.num_bytes == 0:
            return
        out.copy_(self._view())
        self.file.forget(self.start, self.stop)

    def rows(self, num_rows: int, device: torch.device) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the rows of a matrix as they are stored."""
        numbers = self._view() if self.num_bytes else torch.empty(self.shape, dtype=self.dtype)
        for part in slices_of(self.shape[0], num_rows):
            yield part, numbers[part].to(device)
        self.file.forget(self.start, self.stop)

    def matrix(self, index: int) -> StoredTensor:
        """Return one matrix of a stack: a part of the same bytes."""
        num_bytes = self.num_bytes // self.shape[0]
        start = self.start + index * num_bytes
        return SafeTensor(self.file, self.type_name, self.shape[1:], start, start + num_bytes)

    def _view(self) -> torch.Tensor:
        dtype = self.dtype
        raw = self.file.read(self.start, self.stop)
        if self.start % dtype.itemsize:  # a header of odd length: these bytes cannot be viewed in place
            raw = raw.clone()
        return raw.view(dtype).view(self.shape)


def open_checkpoint(directory: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the checkpoint by name, in the order of the files, without reading weights."""
    if (directory / SINGLE).exists():
        return read_header(directory / SINGLE)
    if (directory / INDEX).exists():
        return _open_sharded(directory)
    files = sorted(directory.glob("*.safetensors"))
    if len(files) == 1:
        return read_header(files[0])
    found = f"{len(files)} other *.safetensors files" if files else "no *.safetensors files"
    raise CheckpointError(f"{directory} has neither {SINGLE} nor {INDEX}, but {found}; one of them is needed")


def _open_sharded(directory: Path) -> dict[str, StoredTensor]:
    path = directory / INDEX
    weight_map = read_json(path, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no 'weight_map' of tensor names to files")
    shards: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        # A plain file name: no entry of an index may point outside its directory.
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(f"{path} puts tensor {name!r} in {shard!r}; a *.safetensors name is needed")
        shards.setdefault(shard, []).append(name)
    missing = [shard for shard in shards if not (directory / shard).exists()]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of the {len(shards)} files that {path} names are missing, "
            f"first {missing[0]!r}; the download is not complete"
        )
    tensors: dict[str, StoredTensor] = {}
    for shard, names in sorted(shards.items()):
        header = read_header(directory / shard)
        _check_shard(directory / shard, header, names, weight_map)
        tensors.update(header)
    return tensors


def _check_shard(
    path: Path, header: Mapping[str, StoredTensor], names: list[str], weight_map: Mapping[str, Any]
) -> None:
    """Check that index and shard name the same tensors, and that each tensor is in one shard only."""
    for name in names:
        if name not in header:
            raise CheckpointError(
                f"{INDEX} says that tensor {name!r} is in {path}, but it is not{closest(name, header)}"
            )
    for name in header:
        if weight_map.get(name) != path.name:
            other = f"puts it in {weight_map[name]!r}" if name in weight_map else "does not know it"
            raise CheckpointError(f"{path} holds tensor {name!r}, but {INDEX} {other}")


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Parse and check one file's header; its tensors must cover the rest of the file exactly."""
    try:
        size = path.stat().st_size
        with open(path, "rb", opener=open_at_once) as handle:
            num_bytes = int.from_bytes(handle.read(8), "little")
            if size < 8 or num_bytes > min(MAX_HEADER_BYTES, size - 8):
                _fail(path, f"its header claims {num_bytes} bytes, the file has {size} (a partial download?)")
            text = handle.read(num_bytes)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    try:
        entries = json.loads(text, object_pairs_hook=lambda pairs: _unique(path, pairs))
    except (ValueError, RecursionError) as error:  # ValueError: bad UTF-8, bad JSON, endless integers
        _fail(path, f"its header is not JSON: {error}")
    if not isinstance(entries, dict):
        _fail(path, "its header is not a JSON object")
    entries.pop("__metadata__", None)
    file, data_start = _File(path), 8 + num_bytes
    tensors = {name: _read_entry(file, name, entry, data_start) for name, entry in entries.items()}
    ordered = sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop))
    end = data_start
    for name, tensor in ordered:
        if tensor.start != end:
            what = "overlaps the tensor before it" if tensor.start < end else "leaves a hole before it"
            _fail(path, f"tensor {name!r} {what}")
        end = tensor.stop
    if end != size:
        what = "is cut short (a partial download?)" if end > size else "has bytes that belong to no tensor"
        _fail(path, f"its tensors end at byte {end}, the file has {size}: it {what}")
    return dict(ordered)


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write one file and sync it to disk."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        entry = {"dtype": TYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        header[name] = entry
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _read_entry(file: _File, name: str, entry: Any, data_start: int) -> SafeTensor:
    """Check one entry of the header: a known type, a shape, and a range of exactly the right length."""
    if not isinstance(entry, dict):
        _fail(file.path, f"the entry of tensor {name!r} is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        known = ", ".join(ITEM_BYTES)
        _fail(file.path, f"tensor {name!r} has the unknown dtype {dtype!r}; known: {known}")
    if not (_are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
        _fail(file.path, f"tensor {name!r} has shape {shape!r} and data_offsets {offsets!r}")
    start, stop = offsets
    num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    if stop - start != num_bytes:
        _fail(
            file.path,
            f"tensor {name!r}, {dtype} of shape {shape}, needs {num_bytes} bytes, not {stop - start}",
        )
    return SafeTensor(file, dtype, tuple(shape), data_start + start, data_start + stop)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**48 for size in value)


def _unique(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        last = {name: place for place, (name, _) in enumerate(pairs)}
        twice = next(name for place, (name, _) in enumerate(pairs) if last[name] != place)
        _fail(path, f"{twice!r} occurs twice in its header")
    return entries


def _fail(path: Path, reason: str) -> NoReturn:
    raise CheckpointError(f"{path} cannot be loaded: {reason}")
