"""Read the header of a GGUF file, trusting nothing in it.

A GGUF file is one model in one file (github.com/ggml-org/ggml/blob/master/docs/gguf.md):

    "GGUF" version  #tensors  #keys │ keys and values │ tensor infos │ padding │ tensor data
    ────────── fixed, 24 bytes ─────│── metadata: model sizes, the tokenizer ──│── mapped, not read

Numbers are little-endian. A tensor info is a name, a shape, a type and an offset into the data; most
types pack a block of 32 or 256 numbers into a few bytes (`gguf_quants.py` unpacks them).

Every count, length and offset is checked against the rest of the file before it is used: a damaged file must
lead to a `CheckpointError`, never to a huge allocation or to weights read from the wrong place. The checks
take hardly any time (docs/features/gguf.md has the measurement), because the file is mapped and arrays of
numbers are read in one piece.

The format lists dimensions fastest first; shapes here are row-major, as everywhere in Python.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from infer.errors import CheckpointError

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_ARRAY_LEN = 1 << 23  # the largest vocabularies have some 300 thousand entries
MAX_KEY_BYTES = (1 << 16) - 1  # the specification's own limit
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32


class GGMLType(IntEnum):
    """The type of a tensor's numbers, by its number in the file."""

    F32, F16, Q4_0, Q4_1 = 0, 1, 2, 3
    Q5_0, Q5_1, Q8_0, Q8_1 = 6, 7, 8, 9
    Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, Q8_K = 10, 11, 12, 13, 14, 15
    IQ2_XXS, IQ2_XS, IQ3_XXS, IQ1_S, IQ4_NL, IQ3_S, IQ2_S, IQ4_XS = 16, 17, 18, 19, 20, 21, 22, 23
    I8, I16, I32, I64, F64, IQ1_M, BF16 = 24, 25, 26, 27, 28, 29, 30
    TQ1_0, TQ2_0, MXFP4 = 34, 35, 39


_T = GGMLType
_BLOCK_BYTES: dict[int, dict[GGMLType, int]] = {  # numbers per block -> bytes per block
    1: {
        _T.F64: 8, _T.F32: 4, _T.F16: 2, _T.BF16: 2, _T.I64: 8, _T.I32: 4, _T.I16: 2, _T.I8: 1,
    },
    32: {
        _T.Q4_0: 18, _T.Q4_1: 20, _T.Q5_0: 22, _T.Q5_1: 24, _T.Q8_0: 34, _T.Q8_1: 40,
        _T.IQ4_NL: 18, _T.MXFP4: 17,
    },
    256: {
        _T.Q2_K: 84, _T.Q3_K: 110, _T.Q4_K: 144, _T.Q5_K: 176, _T.Q6_K: 210, _T.Q8_K: 292,
        _T.IQ1_S: 50, _T.IQ1_M: 56, _T.IQ2_XXS: 66, _T.IQ2_XS: 74, _T.IQ2_S: 82, _T.IQ3_XXS: 98,
        _T.IQ3_S: 110, _T.IQ4_XS: 136, _T.TQ1_0: 54, _T.TQ2_0: 66,
    },
}  # fmt: skip
BLOCK = {kind: (numbers, size) for numbers, sizes in _BLOCK_BYTES.items() for kind, size in sizes.items()}

# The types of metadata values: the number in the file -> a NumPy type.
_NUMBERS = dict(enumerate(("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4"))) | {
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """The position of one tensor's bytes in the file, and their type and shape."""

    name: str
    shape: tuple[int, ...]  # row-major: [out, in] for a matrix
    kind: GGMLType
    offset: int  # bytes from the start of the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A parsed header over the mapped file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    mapped: mmap.mmap  # the whole file; pages are read when they are first accessed

    def packed_rows(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return a view of a tensor's bytes as stored, one row of numbers (the last dimension) per row."""
        tensor = self.tensors[name]
        data = np.frombuffer(self.mapped, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)
        return data.reshape(math.prod(tensor.shape[:-1]), -1)


def read_gguf(path: Path) -> GGUFFile:
    """Parse and check the header of a GGUF file; tensors are not read."""
    try:
        with open(path, "rb") as handle:
            # private and writable: PyTorch warns about read-only memory; nothing is written
            mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise CheckpointError(f"{path} is empty") from None
    return _Header(path, mapped).parse()


class _Header:
    """A cursor over the mapped file that cannot be moved past its end."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self.path = path
        self.mapped = mapped
        self.size = len(mapped)
        self.at = 0

    def parse(self) -> GGUFFile:
        if self.take(4, "the magic number") != b"GGUF":
            self.fail(f"it begins with {self.mapped[:4]!r}, so it is not a GGUF file")
        version = self.u32("the version")
        if version not in (2, 3):
            reason = "it is big-endian" if version in (0x02000000, 0x03000000) else f"it is version {version}"
            self.fail(f"{reason}; little-endian versions 2 and 3 can be read")
        num_tensors = self.count("tensors", MAX_TENSORS)
        num_keys = self.count("metadata keys", MAX_KEYS)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.string("a metadata key", MAX_KEY_BYTES)
            if key in metadata:
                self.fail(f"the metadata key {key!r} occurs twice")
            metadata[key] = self.value(key)
        if metadata.get("split.count", 0) not in (0, 1):
            self.fail(f"it is one of {metadata['split.count']} pieces; join them into one file first")
        infos = [self.tensor_info() for _ in range(num_tensors)]
        tensors = self.place(infos, self.alignment(metadata))
        return GGUFFile(self.path, metadata, tensors, self.mapped)

    def fail(self, reason: str) -> NoReturn:
        raise CheckpointError(f"{self.path} cannot be loaded: {reason}")

    def take(self, num_bytes: int, what: str) -> bytes:
        start, stop = self.at, self.at + num_bytes
        if stop > self.size:
            left = self.size - start
            self.fail(
                f"{what} at byte {start} needs {num_bytes} bytes, {left} are left (a partial download?)"
            )
        self.at = stop
        return self.mapped[start:stop]

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def count(self, what: str, limit: int) -> int:
        number = self.u64(f"the number of {what}")
        if number > limit:
            self.fail(f"it claims {number} {what}, more than the {limit} allowed")
        return number

    def string(self, what: str, limit: int | None = None) -> str:
        length = self.u64(f"the length of {what}")
        if limit is not None and length > limit:
            self.fail(f"{what} at byte {self.at} is {length} bytes long, more than the {limit} allowed")
        raw = self.take(length, what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.fail(f"{what} before byte {self.at} is not UTF-8: {raw[:40]!r}")

    def value(self, key: str) -> Any:
        kind = self.u32(f"the type of {key!r}")
        if kind == _STRING:
            return self.string(f"the value of {key!r}")
        if kind == _ARRAY:
            element = self.u32(f"the element type of {key!r}")
            length = self.count(f"elements of {key!r}", MAX_ARRAY_LEN)
            return self.strings(key, length) if element == _STRING else self.numbers(key, element, length)
        return self.numbers(key, kind, 1)[0]

    def numbers(self, key: str, kind: int, length: int) -> list[Any]:
        if kind == _BOOL:
            raw = self.take(length, f"the value of {key!r}")
            if raw.strip(b"\0\1"):
                self.fail(f"the metadata key {key!r} is a boolean that is neither 0 nor 1")
            return [bool(byte) for byte in raw]
        if kind not in _NUMBERS:
            self.fail(f"the metadata key {key!r} has the unknown type {kind}")
        dtype = np.dtype(_NUMBERS[kind])
        values: list[Any] = np.frombuffer(
            self.take(length * dtype.itemsize, f"the value of {key!r}"), dtype
        ).tolist()
        return values

    def strings(self, key: str, length: int) -> list[str]:
        """Read an array of strings. This is the hot loop: a vocabulary has hundreds of thousands of them."""
        mapped, size, at = self.mapped, self.size, self.at
        unpack = struct.Struct("<Q").unpack_from
        values = []
        for _ in range(length):
            if at + 8 > size:
                break
            start = at + 8
            at = start + unpack(mapped, at)[0]
            if at > size:
                break
            values.append(mapped[start:at])
        if len(values) < length:
            self.fail(f"the array {key!r} ends after {len(values)} of {length} strings (a partial download?)")
        self.at = at
        try:
            return [raw.decode() for raw in values]
        except UnicodeDecodeError as error:
            self.fail(f"a string of {key!r} is not UTF-8: {error.object[:40]!r}")

    def alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            self.fail(f"general.alignment must be a power of two, got {alignment!r}")
        return alignment

    def tensor_info(self) -> GGUFTensor:
        name = self.string("a tensor's name", MAX_KEY_BYTES)
        num_dimensions = self.u32(f"the rank of tensor {name!r}")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            self.fail(f"tensor {name!r} has {num_dimensions} dimensions, 1 to {MAX_DIMENSIONS} are allowed")
        shape = tuple(self.u64(f"the shape of tensor {name!r}") for _ in range(num_dimensions))[::-1]
        type_number = self.u32(f"the type of tensor {name!r}")
        offset = self.u64(f"the offset of tensor {name!r}")
        if type_number not in GGMLType.__members__.values():
            self.fail(f"tensor {name!r} has the unknown type {type_number}")
        kind = GGMLType(type_number)
        block_len, block_bytes = BLOCK[kind]
        if min(shape) < 1 or shape[-1] % block_len:
            self.fail(
                f"tensor {name!r} has shape {list(shape)}; {kind.name} packs {block_len} numbers of a row"
            )
        return GGUFTensor(name, shape, kind, offset, math.prod(shape) // block_len * block_bytes)

    def place(self, infos: list[GGUFTensor], alignment: int) -> dict[str, GGUFTensor]:
        """Turn offsets into file positions, checking that tensors neither exceed the file nor overlap."""
        base = -(-self.at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for info in infos:
            if info.name in tensors:
                self.fail(f"tensor {info.name!r} occurs twice")
            if info.offset % alignment:
                self.fail(f"tensor {info.name!r} lies at offset {info.offset}, not a multiple of {alignment}")
            start = base + info.offset
            if start + info.num_bytes > self.size:
                self.fail(
                    f"tensor {info.name!r} ends at byte {start + info.num_bytes}, "
                    f"but the file has {self.size} bytes (a partial download?)"
                )
            tensors[info.name] = GGUFTensor(info.name, info.shape, info.kind, start, info.num_bytes)
        ordered = sorted(tensors.values(), key=lambda tensor: tensor.offset)
        for left, right in zip(ordered, ordered[1:], strict=False):
            if left.offset + left.num_bytes > right.offset:
                self.fail(f"tensors {left.name!r} and {right.name!r} overlap")
        return tensors
