"""One rank's slice of a stored tensor, as a `StoredTensor` of its own.

    plain numbers    a view of the mapped file: pages of other ranks' rows are not touched
    quantized        the same matrix with sliced leaves: words, groups and scales (formats/axes.py)
    GGUF             blocks of the slice, in the row order of the Hugging Face name

A cut along columns reads a part of every row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from infer.loader.formats.axes import Ranges
from infer.loader.formats.checkpoint import DerivedTensor, StoredTensor, slices_of
from infer.loader.formats.gguf_tensors import PackedTensor
from infer.loader.formats.gpt_oss import ExpertStack
from infer.loader.formats.quantized import QuantizedTensor
from infer.loader.slices import Slice
from infer.quant.coded import CodedRows


def cut_tensor(tensor: StoredTensor, cut: Slice, *, transposed: bool) -> StoredTensor:
    """Return a slice of a tensor; `transposed`: its name means [in, out]."""
    if isinstance(tensor, QuantizedTensor):
        leaves = {
            leaf: CutTensor(stored, cut.leaves[leaf]) if any(cut.leaves[leaf]) else stored
            for leaf, stored in tensor.module.leaves.items()
        }
        size = _length(cut.columns)
        codes = tensor.layout.codes
        layout = tensor.layout._replace(
            num_rows=_length(cut.rows), size=size, codes=None if codes is None else codes._replace(size=size)
        )
        return replace(tensor, module=replace(tensor.module, leaves=leaves), layout=layout)
    if isinstance(tensor, ExpertStack):
        return tensor.cut(cut.rows, cut.columns)
    is_matrix = len(tensor.shape) > 1 and bool(cut.columns)
    if isinstance(tensor, PackedTensor) and is_matrix:
        return CutBlocks(replace(tensor, transposed=False), cut, tensor.transposed)
    axes: tuple[Ranges | None, ...] = (cut.rows, cut.columns) if is_matrix else (cut.rows,)
    axes = (None,) * (len(tensor.shape) - len(axes)) + axes  # biases of experts are stacked
    return CutTensor(tensor, axes[::-1] if transposed else axes)


def part_of(held: torch.Tensor, axes: tuple[Ranges | None, ...]) -> torch.Tensor:
    """Return the entries in some ranges along each axis: a view if each axis has one range."""
    for number, ranges in enumerate(axes):
        if ranges is not None:
            parts = [held.narrow(number, each.start, len(each)) for each in ranges]
            held = parts[0] if len(parts) == 1 else torch.cat(parts, dim=number)
    return held


@dataclass(frozen=True, slots=True)
class CutTensor(DerivedTensor):
    """Some ranges along the axes of plain numbers or of a leaf of codes; None: the whole axis."""

    ranges: tuple[Ranges | None, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        pairs = zip(self.whole.shape, self.ranges, strict=True)
        return tuple(size if ranges is None else _length(ranges) for size, ranges in pairs)

    def copy_to(self, out: torch.Tensor) -> None:
        """Fill `out`, which has the shape of the part."""
        if 0 in self.shape:
            out.zero_()  # the bias after a partial sum, which another rank adds
            return
        if len(self.shape) == 1:
            numbers = torch.empty(self.whole.shape, dtype=self.whole.dtype or torch.float32)
            self.whole.copy_to(numbers)
            out.copy_(part_of(numbers, self.ranges))
            return
        for part, rows in self.rows(self.shape[0], torch.device("cpu")):
            out[part].copy_(rows)

    def rows(self, num_rows: int, device: torch.device) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the rows of the part, some at a time."""
        held: torch.Tensor | None = None
        for _, whole in self.whole.rows(self.whole.shape[0], torch.device("cpu")):  # a view: nothing is read
            assert isinstance(whole, torch.Tensor), self.whole
            held = part_of(whole, self.ranges)
            for part in slices_of(len(held), num_rows):
                yield part, held[part].to(device)


@dataclass(frozen=True, slots=True)
class CutBlocks(DerivedTensor):
    """Some rows and blocks of a matrix of a GGUF file."""

    whole: PackedTensor
    cut: Slice
    transposed: bool = False  # True: the name means [in, out]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part, as the name means it."""
        shape = _length(self.cut.rows), _length(self.cut.columns)
        return shape[::-1] if self.transposed else shape

    def rows(self, num_rows: int, device: torch.device) -> Iterator[tuple[slice, CodedRows | torch.Tensor]]:
        """Yield the rows of the part: codes, or float32 if the file has plain numbers."""
        packed = self.whole.packed_rows()
        blocks = packed.reshape(len(packed), self.whole.num_blocks, -1)
        held = part_of(blocks, self.cut.leaves["weight"][-2:]).flatten(1)
        for part in slices_of(len(held), num_rows):
            yield part, self.whole.coded(held[part].to(device))

    def transpose(self) -> StoredTensor | None:
        """Return the matrix as it is stored, if the name means its transpose."""
        return replace(self, transposed=False) if self.transposed else None


def _length(ranges: Ranges) -> int:
    return sum(map(len, ranges))
