"""The experts of a gpt-oss checkpoint, with the names and the layout of other stacks of experts.

    file                                         becomes
    experts.gate_up_proj       [E, D, 2F]        experts.gate_proj, up_proj  [E, F, D]: 0, 2, ..; 1, 3, ..
    experts.down_proj          [E, F, D]         experts.down_proj           [E, D, F]
    experts.gate_up_proj_bias  [E, 2F]           experts.gate_proj.bias, up_proj.bias
    experts.down_proj_bias     [E, D]            experts.down_proj.bias

If the matrices are MXFP4, they are already stored [out, in]:

    ..._blocks    [E, out, in / 32, 16]    two codes in a byte, the even column in the low half
    ..._scales    [E, out, in / 32]        exponents: 32 columns are multiplied by 2^(byte - 127)

A code is a float of 4 bits (sign, two bits of exponent, one of mantissa). Twice its value is a small integer,
so the codes are read as integers of 8 bits with half the scale. Neither scheme rounds them: mxfp4 turns them
back into codes, and int8 keeps them exactly.

Shapes:  E experts, D hidden size, F intermediate size of an expert, R rows, K columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from infer.errors import CheckpointError
from infer.loader.formats.axes import ROWS, WHOLE, Axes, Axis, Ranges, plain_axes
from infer.loader.formats.checkpoint import StoredTensor, slices_of
from infer.quant.coded import CodedRows, StoredCodes

BLOCK = 32  # columns that share a scale
# twice the values of the codes
TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_PARTS = {"gate_up_proj": (("gate_proj", 0), ("up_proj", 1)), "down_proj": (("down_proj", None),)}


@dataclass(frozen=True, slots=True)
class ExpertStack(StoredTensor):
    """One matrix of one expert or of all: all rows of the file's matrix, or every second row."""

    stored: StoredTensor  # [E, in, out], or blocks [E, out, in / 32, 16], or a bias [E, out]
    scales: StoredTensor | None = None  # scales of the blocks
    first: int | None = None  # 0 or 1: the first of every second row; None: all rows
    index: int | None = None  # number of one expert; None: all experts
    rows_kept: Ranges | None = None  # rows of a rank, and below its columns; None: all
    columns_kept: Ranges | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [E, out, in], or [E, out] for a bias; without E for one expert."""
        sizes = list(self.stored.shape[1:])
        if self.scales is not None:
            sizes = [sizes[0], sizes[1] * BLOCK]
        elif len(sizes) == 2:
            sizes.reverse()
        sizes[0] //= 1 if self.first is None else 2
        for axis, kept in enumerate((self.rows_kept, self.columns_kept)):
            if kept is not None:
                sizes[axis] = sum(map(len, kept))
        return tuple(sizes) if self.index is not None else (self.stored.shape[0], *sizes)

    @property
    def num_bytes(self) -> int:
        """The approximate size of its share on disk."""
        both = self.stored.num_bytes + (self.scales.num_bytes if self.scales is not None else 0)
        whole = both // (1 if self.first is None else 2)
        return whole if self.index is None else whole // self.stored.shape[0]

    @property
    def type_name(self) -> str:
        """The type of its numbers."""
        return self.stored.type_name if self.scales is None else "mxfp4"

    @property
    def dtype(self) -> torch.dtype | None:
        """PyTorch's type of plain numbers."""
        return self.stored.dtype if self.scales is None else None

    @property
    def is_readable(self) -> bool:
        """True if it has codes, or plain numbers of a type that can be read."""
        return self.scales is not None or self.stored.is_readable

    @property
    def codes(self) -> StoredCodes | None:
        """The description of its codes, if it has codes."""
        return None if self.scales is None else StoredCodes("mxfp4", self.shape[-1], BLOCK)

    @property
    def formats(self) -> tuple[str, ...]:
        """The name of its format."""
        return () if self.scales is None else ("mxfp4",)

    @property
    def axes(self) -> Axes:
        """The axes: rows, and columns, in blocks of 32 if there are codes."""
        if len(self.stored.shape) == 2:
            return {"weight": (WHOLE, ROWS)}
        if self.scales is None:
            return {"weight": plain_axes(len(self.shape))}
        return {"weight": (WHOLE,) * (len(self.shape) - 2) + (ROWS, Axis("columns", BLOCK, BLOCK, "block"))}

    def matrix(self, index: int) -> StoredTensor:
        """Return the matrix of one expert."""
        return replace(self, index=index)

    def cut(self, rows: Ranges, columns: Ranges) -> StoredTensor:
        """Return the part that a rank has."""
        return replace(self, rows_kept=rows, columns_kept=columns or None)

    def copy_to(self, out: torch.Tensor) -> None:
        """Fill `out`, a matrix or a bias of one expert."""
        if out.dim() > 1:
            StoredTensor.copy_to(self, out)
        elif self.rows_kept == ():
            out.zero_()  # the bias after a partial sum, which another rank adds
        else:
            out.copy_(_kept(self._every(self._read(self.stored)), self.rows_kept, 0))

    def rows(self, num_rows: int, device: torch.device) -> Iterator[tuple[slice, CodedRows | torch.Tensor]]:
        """Yield the rows of one expert's matrix: plain numbers, or codes as integers."""
        held = self._read(self.stored)
        held = _kept(self._every(held if self.scales is not None else held.T), self.rows_kept, 0)
        exponents = (
            None if self.scales is None else _kept(self._every(self._read(self.scales)), self.rows_kept, 0)
        )
        if self.columns_kept is not None:
            columns = self.columns_kept
            if exponents is not None:
                columns = tuple(range(each.start // BLOCK, each.stop // BLOCK) for each in columns)
                exponents = _kept(exponents, columns, 1)
            held = _kept(held, columns, 1)
        for part in slices_of(len(held), num_rows):
            if exponents is None:
                yield part, held[part].to(device)
            else:
                yield part, coded_rows(held[part].to(device), exponents[part].to(device))

    def _read(self, stored: StoredTensor) -> torch.Tensor:
        """Return the numbers of one expert as they are stored: a view of the mapped file."""
        assert self.index is not None, "a stack is read matrix by matrix"
        ((_, numbers),) = list(stored.matrix(self.index).rows(1 << 40, torch.device("cpu")))
        assert isinstance(numbers, torch.Tensor)
        return numbers

    def _every(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.first is None else rows[self.first :: 2]


def _kept(held: torch.Tensor, ranges: Ranges | None, axis: int) -> torch.Tensor:
    if ranges is None:
        return held
    return torch.cat([held.narrow(axis, each.start, len(each)) for each in ranges], dim=axis)


def coded_rows(blocks: torch.Tensor, exponents: torch.Tensor) -> CodedRows:
    """Convert blocks [R, K / 32, 16] and exponents [R, K / 32] to integers and scales."""
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1)  # low half first
    twice = torch.tensor(TWICE, dtype=torch.int8, device=blocks.device)
    # bits of the float32 2^(exponent - 128); 0 on underflow
    words = (exponents.int() - 1).clamp_(min=0) << 23
    scales = words.view(torch.float32).masked_fill_(exponents == 255, torch.nan)
    return CodedRows(twice[codes.long()], 8, scales, 0, BLOCK)


def translated(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return all tensors of a checkpoint, with the experts' tensors renamed."""
    found: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        if not module.endswith(".mlp.experts") or last.endswith("_scales"):
            if not last.endswith("_proj_scales"):
                found[name] = tensor
            continue
        leaf = next((each for each in ("_blocks", "_bias") if last.endswith(each)), "")
        scales = None
        if leaf == "_blocks":
            scales = tensors.get(f"{name.removesuffix('_blocks')}_scales")
            _check_blocks(name, tensor, scales)
        num_axes = {"_blocks": 4, "_bias": 2}.get(leaf, 3)
        parts = _PARTS.get(last.removesuffix(leaf), ((last, None),))
        if len(tensor.shape) != num_axes or (tensor.shape[1 if leaf else 2] % len(parts)):
            raise CheckpointError(
                f"{name} has the shape {list(tensor.shape)}; it must have {num_axes} axes, and as many rows "
                "for gates as for the other half"
            )
        for part, first in parts:
            stack = ExpertStack(tensor, scales, first)
            found[f"{module}.{part}" + (".bias" if leaf == "_bias" else "")] = stack
    return found


def turned(tensors: Mapping[str, StoredTensor], hidden_size: int) -> dict[str, StoredTensor]:
    """Return all tensors; stacks of experts that are [E, in, out], as in Qwen 3-VL, become [E, out, in]."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        axis = {"gate_up_proj": 2, "down_proj": 1}.get(name.rpartition(".mlp.experts.")[2], 0)
        if axis and len(tensor.shape) == 3 and tensor.shape[axis] != hidden_size:
            found[name] = ExpertStack(tensor)
    return found


def _check_blocks(name: str, blocks: StoredTensor, scales: StoredTensor | None) -> None:
    if scales is None:
        raise CheckpointError(f"{name} has no scales: {name.removesuffix('_blocks')}_scales is missing")
    is_even = len(blocks.shape) == 4 and blocks.shape[3] == BLOCK // 2 and scales.shape == blocks.shape[:3]
    if (blocks.type_name, scales.type_name) != ("U8", "U8") or not is_even:
        raise CheckpointError(
            f"{name} is {blocks.type_name} {list(blocks.shape)} with scales {scales.type_name} "
            f"{list(scales.shape)}; MXFP4 has bytes [E, out, in / 32, 16] and [E, out, in / 32]"
        )
