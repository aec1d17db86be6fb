"""A disk cache of codes that were slow to make, for the next start.

    ~/.cache/infer/codes/<weights>-<key>.safetensors     all matrices that were rounded while they were loaded

The first part of the name identifies the checkpoint, which is all that read_ahead.py knows. The key is a hash
of everything that the codes depend on: the checkpoint's files, the code that rounds and lays out, the order
of the parts of each matrix, and on a CPU the compiled library, whose layout depends on the processor's
instructions. So a file is never stale. It is written under a temporary name and renamed into place when it is
complete, and each tensor has a checksum. An unreadable or changed file is made again; a directory that cannot
be written to is not an error.

Only codes made from numbers of 16 bits or more are cached: the codes of a quantized file are already on disk
and need little work. A CPU of two cores loads and rounds a billion weights in 8 s to int8 and in 25 s to
int4. A GPU needs less than a second, so its codes are cached only for very large models.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from infer.errors import CheckpointError, ModelSourceError
from infer.kernels.cpu.library import library
from infer.kernels.runtime.dispatch import device_kind
from infer.loader.find.source import ModelSource
from infer.loader.formats.checkpoint import read_header, write_safetensors
from infer.loader.formats.quantized import short_bytes
from infer.loader.placement import Move
from infer.loader.read_ahead import codes_dir, codes_prefix
from infer.loader.slices import ALONE, Rank
from infer.loader.weight_plan import WeightPlan
from infer.log import progress
from infer.models.model import Model
from infer.quant.packed import Packed
from infer.quant.projection import Projection

SLOW_SECONDS = 5.0  # codes that took no longer than this are not cached
MAX_BYTES = 64 << 30  # total size of the cache; the least recently read files are evicted
UNFINISHED_SECONDS = 24 * 3600.0  # an unfinished file older than this was left by a killed process

_CHECKSUMS = "checksums"
_SUFFIX = ".safetensors"  # name suffix of complete files
_PIECE_BYTES = 16 << 20  # bytes of a GPU tensor that a checksum copies to the host at a time
_SAMPLES, _SAMPLE_BYTES = 64, 4096  # samples of a weight file: some container images give all files one mtime
_CODE = (
    "quant/*.py",
    "loader/**/*.py",
    "models/*.py",
    "layers/*.py",
    "kernels/linear/coded.py",
    "kernels/cpu/operations.py",
)
_FAILURES = (CheckpointError, OSError, RuntimeError)  # RuntimeError: out of memory, on a GPU or a CPU

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CodeCache:
    """The projections of a model that are rounded during loading, and the file that may hold their codes."""

    projections: Mapping[str, Projection]
    path: Path | None  # None: there is nothing to cache, or no directory for it

    @classmethod
    def open(cls, plan: WeightPlan, model: Model, moves: list[Move]) -> tuple[CodeCache, list[Move]]:
        """Fill what is cached; return the cache of a model and the moves that are still needed."""
        places = [(move, projection) for move in moves if (projection := move.projection(model))]
        made = {
            move.place.module: projection
            for move, projection in places
            if plan.modules[move.place.module].is_rounded
        }
        cache, source = cls(made, None), plan.headers.source
        with contextlib.suppress(ModelSourceError, OSError):  # no home, or an error that loading reports
            if made:
                name = f"{codes_prefix(source)}-{_key(made, source, plan.rank)}{_SUFFIX}"
                cache = cls(made, codes_dir() / name)
        held = {id(move) for move, _ in places if move.place.module in made} if cache.read() else set()
        return cache, [move for move in moves if id(move) not in held]

    def read(self) -> bool:
        """Fill the projections from the file; return False if there is none or if it was damaged."""
        if self.path is None or not os.path.exists(self.path):
            return False
        places = self._tensors()
        sums = torch.empty(len(places), dtype=torch.int64)
        try:
            _check_private(self.path.parent)
            stored = read_header(self.path)
            expected = {name: (place.dtype, tuple(place.shape)) for name, place in places.items()}
            expected[_CHECKSUMS] = (sums.dtype, tuple(sums.shape))
            if {name: (tensor.dtype, tensor.shape) for name, tensor in stored.items()} != expected:
                raise CheckpointError("it holds other tensors")
            stored[_CHECKSUMS].copy_to(sums)
            for (name, place), checksum in zip(places.items(), sums.tolist(), strict=True):
                stored[name].copy_to(place)
                if _checksum(place) != checksum:
                    raise CheckpointError(f"the checksum of {name} is wrong")
        except _FAILURES as error:
            log.warning("codes on disk cannot be used and are made again path=%s reason=%s", self.path, error)
            for place in places.values():
                place.zero_()
            return False
        with contextlib.suppress(OSError):  # a read-only disk
            os.utime(self.path)
        log.info("codes were read from the cache path=%s", self.path)
        return True

    def keep(self, *, show_progress: bool = False) -> None:
        """Write the file if the codes were slow to make; a failure to write is only logged."""
        seconds = sum(projection.making_seconds() for projection in self.projections.values())
        if self.path is None or seconds <= SLOW_SECONDS:
            return
        tensors = self._tensors()
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        size = short_bytes(num_bytes)
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_private(self.path.parent)
            _make_room(self.path.parent, num_bytes)
            sums = torch.tensor([_checksum(tensor) for tensor in tensors.values()], dtype=torch.int64)
            with progress(
                f"keeping rounded weights for the next start, {size}", None, is_shown=show_progress
            ):
                _write_whole(self.path, {**tensors, _CHECKSUMS: sums})
        except _FAILURES as error:
            log.warning("codes are not kept for the next start path=%s reason=%s", self.path, error)
            return
        log.info("codes are kept for the next start path=%s size=%s seconds=%.1f", self.path, size, seconds)

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {
            f"{module}.{name}": tensor
            for module, projection in self.projections.items()
            for name, tensor in projection.tensors.items()
        }


def _key(projections: Mapping[str, Projection], source: ModelSource, rank: Rank = ALONE) -> str:
    digest = hashlib.sha256(repr(tuple(rank)).encode() if rank.world_size > 1 else b"")
    root = Path(__file__).parents[1]
    code = (path.read_bytes() for pattern in _CODE for path in sorted(root.glob(pattern)))
    for part in (*code, *_identity(source)):
        digest.update(len(part).to_bytes(8, "little") + part)
    for module, projection in projections.items():
        shapes = [(name, tensor.dtype, *tensor.shape) for name, tensor in projection.tensors.items()]
        spec = projection.spec
        parts = tuple(spec.parts.items())
        kind = device_kind(spec.device)
        described = (module, projection.scheme, spec.form, spec.dtype, kind, parts, shapes)
        digest.update(repr(described).encode())
    c = library() if any(isinstance(projection, Packed) for projection in projections.values()) else None
    digest.update(b"" if c is None else c.path.name.encode())
    return digest.hexdigest()[:24]


def _identity(source: ModelSource) -> Iterator[bytes]:
    """Yield the identity of a checkpoint, in any directory: sizes, times, and samples of its files."""
    for path in source.weight_files:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            yield repr((path.name, found.st_size, found.st_mtime_ns)).encode()
            for number in range(_SAMPLES):
                file.seek(found.st_size * number // _SAMPLES)
                yield file.read(_SAMPLE_BYTES)


def _checksum(tensor: torch.Tensor) -> int:
    checksum = 0
    for piece in torch.split(tensor.flatten().view(torch.uint8), _PIECE_BYTES):
        checksum = zlib.crc32(piece.cpu().numpy().data, checksum)
    return checksum


def _write_whole(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a file that appears under its name only when complete, even if other processes write it too."""
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.", suffix=".unfinished")
    os.close(handle)
    try:
        write_safetensors(Path(unfinished), tensors)
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise


def _check_private(folder: Path) -> None:
    """Refuse a directory that another user could write to, because weights decide what a model says."""
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(f"{folder} must be writable by its owner alone")


def _make_room(folder: Path, num_bytes: int) -> None:
    """Remove abandoned unfinished files, then evict the least recently read files until a new one fits."""
    files = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process has renamed or removed it
            found = path.stat()
            if path.suffix != _SUFFIX and found.st_mtime < time.time() - UNFINISHED_SECONDS:
                path.unlink()
            else:
                files.append((found.st_mtime, found.st_size, path))
    allowed = min(shutil.disk_usage(folder).free // 2, MAX_BYTES)
    if num_bytes > allowed:
        raise OSError(
            f"they take {short_bytes(num_bytes)}, more than {short_bytes(allowed)}, half of the free space"
        )
    taken = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if taken + num_bytes > MAX_BYTES:
            path.unlink(missing_ok=True)
            taken -= size
