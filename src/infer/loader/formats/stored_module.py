"""The leaves of a quantized matrix on disk, and the description of a format.

A row of stored_formats.py is a `StoredFormat`: the tensors that identify it, a function that derives the
matrix's `Layout` from their headers, and one that opens it for reading. Both get a `StoredModule`, which
checks the shapes in a file against each other, because files are not trusted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, TypeGuard

import torch

from infer.errors import CheckpointError
from infer.kernels.linear.coded import TABLED
from infer.loader.formats.axes import Axes
from infer.loader.formats.checkpoint import StoredTensor
from infer.quant.coded import CodedRows, StoredCodes

_BLOCK = 128  # default number of rows and columns that share a scale
_INTEGERS = ("gptq", "awq", "auto-round", "compressed-tensors")  # methods whose configs name bits and groups

Tensors = Mapping[str, torch.Tensor]
ReadRows = Callable[[slice], CodedRows | torch.Tensor]  # returns codes, or float32 if they have uneven steps


class Layout(NamedTuple):
    """The layout of a matrix, read from headers."""

    num_rows: int
    size: int  # columns
    bits: int  # bits of a code
    group_size: int  # neighbouring columns that share a scale; 0: groups are not neighbours
    label: str  # text for the start line: int4-g128
    codes: StoredCodes | None = None  # None: steps are uneven


@dataclass(frozen=True, slots=True)
class Settings:
    """The `quantization_config` of a checkpoint: hints, which are used if they fit the tensors' shapes."""

    raw: Mapping[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> str:
        """The checkpoint's name for its quantization method."""
        return str(self.raw.get("quant_method") or "")

    @property
    def is_symmetric(self) -> bool | None:
        """True if all zeros are the middle code, the default of compressed-tensors; None: unknown."""
        said = [value for value in self._said("sym", "symmetric") if isinstance(value, bool)]
        return all(said) if said or self.method == "compressed-tensors" else None

    def has_minima(self, bits: int) -> bool:
        """Return True if a GPU keeps zero points as minima: for 8-bit integers with zero points."""
        return bits == 8 and not self.is_symmetric

    @property
    def has_true_zeros(self) -> bool:
        """True if GPTQ's qzeros are the zeros themselves; version 1 stores each zero minus one.

        AutoRound's own packing has true zeros and no version; exported as GPTQ, it is version 1.
        """
        if self.method == "auto-round":
            packing = str(self.raw.get("packing_format") or "auto_gptq")
            return "gptq" not in packing or "gptqmodel" in packing
        return self.raw.get("checkpoint_format") not in (None, "gptq")

    @property
    def has_int8_tokens(self) -> bool:
        """True if all matrices of 8-bit integers expect 8-bit activations: W8A8, symmetric."""
        groups = self.raw.get("config_groups")
        found = groups.values() if isinstance(groups, Mapping) else []
        wanted = [
            group.get("input_activations")
            for group in found
            if isinstance(group, Mapping) and _is_int8(group.get("weights"))
        ]
        return bool(wanted) and all(_is_int8(each) and each.get("symmetric", True) for each in wanted)

    def codes(self, size: int) -> StoredCodes | None:
        """Predict the codes of a matrix with `size` columns, without tensors; None: it is unpacked."""
        if self.method == "fp8":
            blocks = self.hints("weight_block_size") or [1, size]
            return StoredCodes("fp8", size, blocks[-1], scale_rows=blocks[0])
        if self.method == "bitsandbytes" and self.raw.get("load_in_4bit"):
            kind = str(self.raw.get("bnb_4bit_quant_type", "fp4"))
            is_known = kind in TABLED and size % 64 == 0  # 64: default block size
            return StoredCodes(kind, size, 64) if is_known else None
        if self.method == "squeezellm":
            return StoredCodes("lut4", size, size)
        bits, group = self.bits, (self.hints("group_size", "q_group_size") or [size])[0]
        if not bits or self.method not in _INTEGERS:
            return None
        kind = "int4" if bits <= 4 else "fp8" if "float" in str(self.raw.get("format")) else "int8"
        return StoredCodes(kind, size, group, has_minima=kind == "int8" and self.has_minima(bits))

    @property
    def bits(self) -> int:
        """The largest number of bits in the config; 0: there is none."""
        return max(self.hints("bits", "num_bits", "w_bit", "wbits"), default=0)

    def hints(self, *keys: str) -> list[int]:
        """Return every integer under one of these keys, in the config itself and in its groups."""
        found = self._said(*keys)
        flat = [number for value in found for number in (value if isinstance(value, list) else [value])]
        return [number for number in flat if type(number) is int and number > 0]

    def _said(self, *keys: str) -> list[Any]:
        groups = self.raw.get("config_groups")
        places = [self.raw]
        for group in groups.values() if isinstance(groups, Mapping) else ():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            places += [weights] if isinstance(weights, Mapping) else []
        return [place[key] for place in places for key in keys if key in place]


def _is_int8(scheme: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(scheme, Mapping) and (scheme.get("num_bits"), scheme.get("type")) == (8, "int")


@dataclass(frozen=True, slots=True)
class StoredModule:
    """The leaves of one matrix on disk."""

    name: str
    leaves: Mapping[str, StoredTensor]
    settings: Settings

    def fail(self, reason: str) -> NoReturn:
        """Refuse the matrix."""
        raise CheckpointError(f"{self.name} cannot be read: {reason}")

    def shape(self, leaf: str, num_axes: int) -> tuple[int, ...]:
        """Return the shape of a leaf, which must have `num_axes` axes, none of them empty."""
        shape = self.leaves[leaf].shape
        if len(shape) != num_axes or 0 in shape:
            self.fail(f"{leaf} is {list(shape)}, but {num_axes} axes are needed, none of them empty")
        return shape

    def check(self, leaf: str, *shapes: tuple[int, ...]) -> None:
        """Refuse a leaf if it exists and has none of these shapes."""
        if leaf in self.leaves and self.leaves[leaf].shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            self.fail(f"{leaf} is {list(self.leaves[leaf].shape)}, the other tensors need {wanted}")

    def words(self, count: int, bits: int, side: str) -> int:
        """Return the number of words for `count` codes, which must fill them exactly."""
        if count * bits % 32:
            self.fail(f"{count} {side} of {bits} bits do not fill words of 32")
        return count * bits // 32

    def read(self, leaf: str, device: torch.device | None = None) -> torch.Tensor:
        """Read a leaf as it is stored."""
        stored = self.leaves[leaf]
        out = torch.empty(stored.shape, dtype=stored.dtype, device=device)
        stored.copy_to(out)
        return out

    def step(self, size: int, count: int, what: str, hints: list[int], *, is_block: bool = False) -> int:
        """Return how many of `size` rows or columns share each of `count` entries; blocks use known sizes."""
        if count == 1:
            return size
        candidates = [*hints, _BLOCK, *([] if is_block else [size // count])]
        found = next((step for step in candidates if step and -(-size // step) == count), None)
        if found is None:
            self.fail(f"{count} {what} for {size} of its rows or columns; no size of groups gives that")
        return found

    def group_size(self, size: int, num_groups: int, leaf: str) -> int:
        """Return the number of columns that share a scale; 0 if `leaf` gives each column another group."""
        hints = self.settings.hints("group_size", "q_group_size")
        if leaf not in self.leaves:
            return self.step(size, num_groups, "groups", hints)
        self.check(leaf, (size,))
        order = self.read(leaf)
        if bool((order == -1).all()):  # the leaf was never filled
            return self.step(size, num_groups, "groups", hints)
        if int(order.min()) < 0 or int(order.max()) >= num_groups:
            self.fail(f"{leaf} names groups {int(order.min())} to {int(order.max())} of {num_groups}")
        changes = (order != order[0]).nonzero()
        step = int(changes[0]) if len(changes) else size
        return step if torch.equal(order, torch.arange(size, dtype=order.dtype) // step) else 0

    def order(self, leaf: str, group_size: int) -> tuple[int, str]:
        """Return the size of the groups that `leaf` gives each column, and a digest of the order by group.

        (`group_size`, "") if groups are neighbours; (0, "") if groups have different sizes.
        """
        if group_size:
            return group_size, ""
        groups, order = self.read(leaf).sort(stable=True)
        step = int((groups == 0).sum())
        if not step or not torch.equal(groups, torch.arange(len(groups), dtype=groups.dtype) // step):
            return 0, ""
        return step, hashlib.sha256(order.numpy().tobytes()).hexdigest()

    def finite(self, leaf: str, scales: torch.Tensor) -> torch.Tensor:
        """Return scales as float32; refused unless all are finite."""
        if not bool(scales.float().isfinite().all()):
            self.fail(f"{leaf} has scales that are not finite")
        return scales.float()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFormat:
    """A row of the table: how a format names its tensors, and the functions that read them."""

    name: str  # value of `quantization` that names it
    needs: Mapping[str, tuple[str, ...]]  # leaves that identify it, and their dtypes as files name them
    may_have: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    matches: Callable[[Mapping[str, StoredTensor]], bool] = lambda leaves: True  # a test beyond names
    measure: Callable[[StoredModule], Layout]
    open: Callable[[StoredModule, Layout, Tensors], ReadRows]
    axes: Callable[[StoredModule, Layout], Axes]  # leaves without axes are needed whole
