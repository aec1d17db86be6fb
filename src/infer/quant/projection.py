"""The contract between a linear layer and the way its weights are kept: one object per layer.

    allocate     memory for the weights, in the form that they are kept in
    fill         convert some rows of a checkpoint's matrix to that form; rows come as the file has them
    num_bytes    the memory it keeps, for the memory plan
    prepare      compile, repack, choose kernels: once, when the engine is built
    multiply     y = x Wᵀ + b; `allocate`, `fill` and `multiply` are a complete scheme
    project      the same with a norm as prologue and a gate as epilogue; composed of `multiply` and the
                 reference norm and gate, unless a scheme has kernels that do more in one launch
                 (`project_rows`, `project_norm`, `project_sum`)
    add_to       `multiply` with the addition to the residual stream, and the norm that reads it, as epilogue

A *scheme* is one way to keep weights: a row of quant/registry.py and a subclass of `Projection` in a file of
its own (docs/adding-a-scheme.md).

A fused matrix is filled part by part, in any order: the parts are rows of W, which is [out, in]. No scheme
knows the format of a file, or in which tensors it keeps a matrix (loader/formats/quantized.py).

Shapes:  N rows of W (out), K columns (in), E experts, M tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import starmap
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from infer.kernels.elementwise.gated_activation import activate, gated_activation
from infer.kernels.linear.residual import ResidualSum
from infer.kernels.moe.grouped import by_expert
from infer.kernels.moe.many import ManyRows
from infer.kernels.runtime.dispatch import seconds_between
from infer.quant.memory import WeightMemory
from infer.quant.residual import NormedInput, PendingUpdate, ResidualNorm

if TYPE_CHECKING:
    from infer.kernels.linear.coded import CodedForm, CodedWeights
    from infer.kernels.linear.compiled import CompiledLinears
    from infer.quant.coded import CodedRows


ROWS_AT_ONCE = 1 << 20  # numbers: 4 MiB of float32, which stay in a CPU's cache between passes over them


class Source(Protocol):
    """A tensor on disk as a projection needs it (loader/formats/checkpoint.py)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape as the checkpoint's own names mean it."""

    def copy_to(self, out: torch.Tensor) -> None:
        """Fill `out`, which has this tensor's shape, converting to its dtype and device."""

    def rows(self, num_rows: int, device: torch.device) -> Iterator[tuple[slice, CodedRows | torch.Tensor]]:
        """The rows of a matrix in order on a device, about `num_rows` at a time; codes stay codes."""

    def transpose(self) -> Source | None:
        """The transposed matrix, if that is how this one is stored."""


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """The matrix that a projection is made for, and where."""

    num_rows: int
    size: int
    dtype: torch.dtype  # type of the activations
    device: torch.device
    parts: Mapping[str, int] = field(default_factory=dict)  # name -> rows, in the order of the rows
    num_experts: int | None = None
    memory: WeightMemory | None = None  # large pages of a CPU, shared by the matrices of a model
    form: CodedForm | None = None  # form of the codes on a GPU
    int8_tokens: bool = False  # its file is W8A8: tokens, too, are meant to be rounded to 8 bits
    has_order: bool = False  # columns are kept in the order of their groups: act-order
    num_outliers: int = 0  # numbers that are added to single elements of codes on a GPU
    runs: tuple[tuple[int, int], ...] = ()  # rows and bits, where a CPU keeps parts in bits of their own

    @property
    def row_counts(self) -> list[int]:
        """The rows of each part, or of the one matrix that has none."""
        return list(self.parts.values()) or [self.num_rows]

    @property
    def num_weights(self) -> int:
        """The numbers of the matrix, of all experts."""
        return self.num_rows * self.size * (self.num_experts or 1)

    def part_rows(self, part: str | None) -> slice:
        """The rows that a part fills; without a name, all."""
        if part is None:
            return slice(0, self.num_rows)
        assert part in self.parts, f"no part {part!r} in {list(self.parts)}"
        start = sum(list(self.parts.values())[: list(self.parts).index(part)])
        return slice(start, start + self.parts[part])


class Choices(NamedTuple):
    """The experts that each token is sent to, and their weights."""

    experts_TC: torch.Tensor
    weights_TC: torch.Tensor


class Neighbours(NamedTuple):
    """The surroundings of a projection, before and after it, as the binder found them."""

    reads_sum: bool = False  # its input is the norm of a sum that another projection writes
    writes_sum: bool = False  # its output is added to the stream, and a norm and a projection read the sum
    activation: str = ""  # activation of the gate in its epilogue
    is_head: bool = False


class Projection:
    """The weights of one linear layer, or of one layer's experts, and every way to multiply with them.

    A scheme overrides `allocate`, `fill` and `multiply`; the rest is right for every scheme, and may be
    overridden by one that is faster.
    """

    scheme = ""  # its name in the registry
    can_add = False  # `add_to` does more than multiply: the layer returns a `PendingProduct`
    batch_invariant = False  # a row's bits do not depend on the other rows (`deterministic`)
    many: ManyRows | None = None  # kernel of experts with many rows

    def __init__(self, spec: WeightSpec, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        self.spec = spec
        self.bias: torch.Tensor | None = None  # the layer's own, in the dtype of the activations
        self.tensors = dict(self.allocate() if tensors is None else tensors)
        self._experts: dict[int, Projection] = {}
        self._made: list[tuple[Any, Any]] = []  # moments before and after making codes that no file had

    # -- what it stores ---------------------------------------------------------------------------------

    def allocate(self) -> dict[str, torch.Tensor]:
        """Memory for all rows, of all experts; on the meta device it has shapes and takes none."""
        raise NotImplementedError

    def load(self, source: Source, *, part: str | None, expert: int | None, transposed: bool) -> None:
        """Bring a stored matrix into the rows of its part; `transposed`: it is stored [in, out]."""
        start = self.spec.part_rows(part).start
        for first, rows in self._rows(source, transposed):
            self.fill(rows, start + first, expert or 0)

    def fill(self, rows: CodedRows | torch.Tensor, first: int, expert: int) -> None:
        """Bring rows of a matrix, codes or plain numbers, into the form that is kept, from row `first` on."""
        raise NotImplementedError

    def num_rows_at_once(self) -> int:
        """The approximate number of rows that `fill` is given at a time."""
        return max(1, ROWS_AT_ONCE // self.spec.size)

    def _rows(self, source: Source, transposed: bool) -> Iterator[tuple[int, CodedRows | torch.Tensor]]:
        spec, step = self.spec, self.num_rows_at_once()
        by_rows = source.transpose() if transposed else source
        if by_rows is not None:
            yield from ((part.start, rows) for part, rows in by_rows.rows(step, spec.device))
            return
        whole = torch.empty(source.shape, dtype=spec.dtype, device=spec.device)
        source.copy_to(whole)
        yield from ((first, whole.T[first : first + step]) for first in range(0, whole.shape[1], step))

    def making_seconds(self) -> float:
        """Seconds spent in `fill` on codes that no file had: many justify a cache (loader/code_cache.py)."""
        seconds = sum(starmap(seconds_between, self._made), 0.0)
        self._made = [(0.0, seconds)]  # a GPU's events are let go
        return seconds

    def num_bytes(self) -> int:
        """The memory of the weights, wherever they are; the bias is the layer's."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def bytes_by_scheme(self) -> dict[str, int]:
        """`num_bytes` by the name of the scheme that keeps them, which may be several for a fused matrix."""
        return {self.scheme: self.num_bytes()}

    def scratch_bytes(self, num_tokens: int) -> int:
        """The fixed scratch memory of a product of this many tokens: W unpacked, where a scheme does that."""
        return 0

    # -- how it multiplies ------------------------------------------------------------------------------

    def prepare(self, compiled: CompiledLinears, neighbours: Neighbours) -> None:
        """Repack, choose kernels, ask for what is to be compiled; called once, before the first step."""

    def invariant(self) -> Projection | None:
        """A projection with these weights whose rows do not depend on each other; None: there is none."""
        return self if self.batch_invariant else None

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ + b; x is [..., K] and y is [..., N], both in the dtype of the activations."""
        raise NotImplementedError

    def project(self, x: torch.Tensor | NormedInput, activation: str = "") -> torch.Tensor:
        """`multiply` with a norm as prologue if `x` is one, and with an activation a gate as epilogue."""
        if isinstance(x, torch.Tensor):
            return self.project_rows(x, activation)
        if x.is_read:
            return self.project_rows(x.tensor(), activation)
        stream = x.stream
        if isinstance(stream.update, PendingProduct):
            writer, rows = stream.update.projection, stream.update.x
            added = writer.add_to(rows, stream.residual_TD, x.norm, self, activation)
            if isinstance(added, ResidualSum):
                x.begun = added
                x.read(added.sum_MN)
                return self.project_sum(added, x.norm.eps, activation)
            stream.update = added
        return self.project_norm(x, activation)

    def project_rows(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """`multiply`, and the gate after it."""
        y = self.multiply(x)
        return gated_activation(y, activation=activation) if activation else y

    def activate(self, y: torch.Tensor, activation: str) -> torch.Tensor:
        """The ungated activation of a product of this projection (GPT-2)."""
        return activate(y, activation)

    def project_norm(self, x: NormedInput, activation: str) -> torch.Tensor:
        """The norm of a sum, `multiply`, and the gate; a kernel that adds must tell `x.read` the sum."""
        return self.project_rows(x.tensor(), activation)

    def project_sum(self, total: ResidualSum, eps: float, activation: str) -> torch.Tensor:
        """The rest of a norm that another projection began, `multiply`, and the gate."""
        raise NotImplementedError(f"{self.scheme} said that it cannot read sums")

    def reads_sum(self, x: torch.Tensor, num_parts: int, activation: str) -> bool:
        """Return True if `project_sum` takes a sum in `num_parts` parts, of as many tokens as `x` has."""
        return False

    def add_to(
        self, x: torch.Tensor, residual: torch.Tensor, norm: ResidualNorm, reader: Projection, activation: str
    ) -> torch.Tensor | ResidualSum:
        """`multiply` for a sum that `reader` reads through `norm`; called only where `can_add` is set.

        Returns the product, [M, N] or in parts [P, M, N] that the norm adds up; or the finished sum, if
        `reader.reads_sum` says that it can be read.
        """
        return self.multiply(x)

    @property
    def unreduced(self) -> Projection:
        """The part of this rank alone, where several share a matrix (layers/parallel.py)."""
        return self

    def reduced(self, y: torch.Tensor) -> torch.Tensor:
        """The sum of `unreduced` products of all ranks."""
        return y

    def lookup(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Rows of W for a tied embedding, in the dtype of activations; without it, the head stays dense."""
        raise NotImplementedError(f"{self.scheme} has no rows to look up")

    @property
    def can_dequantize(self) -> bool:
        """True if there is a `dequantized`: the scheme's own, or the default with the scheme's `lookup`."""
        own = type(self)
        return (own.dequantized, own.lookup) != (Projection.dequantized, Projection.lookup)

    def dequantized(self) -> torch.Tensor:
        """W as plain numbers, [N, K]: what the reference multiplies with (quant/reference.py)."""
        return self.lookup(torch.arange(self.spec.num_rows, device=self.spec.device))

    # -- experts ----------------------------------------------------------------------------------------

    @property
    def stacked(self) -> torch.Tensor | CodedWeights | None:
        """The matrices of all experts as the kernels of a GPU read them; None: there is no such form."""
        return None

    def prepare_experts(self, compiled: CompiledLinears, activation: str) -> None:
        """`prepare` for the matrices of all experts, of gate and up if there is an activation."""

    def expert(self, number: int) -> Projection:
        """The projection of one expert, on the same memory."""
        if number not in self._experts:
            self._experts[number] = self.make_expert(number, replace(self.spec, num_experts=None))
            self._experts[number].bias = None if self.bias is None else self.bias[number]
        return self._experts[number]

    def make_expert(self, number: int, spec: WeightSpec) -> Projection:
        """Make the projection of one expert from its share of the leaves."""
        return type(self)(spec, {name: tensor[number] for name, tensor in self.tensors.items()})

    def experts_mlp(
        self, x_TD: torch.Tensor, choices: Choices, down: Projection, activation: str
    ) -> torch.Tensor | PendingProduct:
        """Send each token through its experts, this projection being gate and up; expert by expert.

        A kernel may leave the sum of a token's experts to the residual stream, which it is added to.
        """

        def one_expert(number: int, x_MD: torch.Tensor) -> torch.Tensor:
            return down.expert(number).project(self.expert(number).project(x_MD, activation))

        return by_expert(x_TD, *choices, one_expert)


class Wrapped(Projection):
    """A projection around another one of the same matrix, which activates and unpacks as that one does."""

    def __init__(self, inner: Projection) -> None:
        super().__init__(inner.spec, inner.tensors)
        self.scheme, self.bias, self.batch_invariant = inner.scheme, inner.bias, inner.batch_invariant
        self._inner = inner

    def activate(self, y: torch.Tensor, activation: str) -> torch.Tensor:
        """The activation of the projection that multiplies."""
        return self._inner.activate(y, activation)

    def scratch_bytes(self, num_tokens: int) -> int:
        """The scratch memory of its product."""
        return self._inner.scratch_bytes(num_tokens)


class PendingProduct(PendingUpdate):
    """A product that has not been computed, because its result is to be added to the residual stream."""

    __slots__ = ("_product", "projection")

    def __init__(self, projection: Projection, x: torch.Tensor) -> None:
        super().__init__(x)
        self.projection = projection
        self._product: torch.Tensor | None = None

    def tensor(self) -> torch.Tensor:
        """Compute the product alone, once."""
        if self._product is None:
            self._product = self.projection.project(self.x)
        return self._product


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A row of the registry: one way to keep weights, and where it can be had."""

    name: str  # the value of `quantization`, and what the start line says
    devices: tuple[str, ...]  # "cpu", "cuda"
    make: Callable[[WeightSpec], Projection]
    cost: str = ""  # the start line's words on the accuracy lost by rounding 16-bit weights to it
