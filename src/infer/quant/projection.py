"""The interface between a linear layer and the way its weights are stored: one object per layer.

    allocate     allocate memory for the weights, in the form that they are stored in
    fill         convert some rows of a checkpoint's matrix to that form
    num_bytes    the memory of the weights, for the memory plan
    prepare      compile, repack, choose kernels: once, when the engine is built
    multiply     y = x Wᵀ + b; `allocate`, `fill` and `multiply` are a complete scheme
    project      `multiply` with a norm as prologue and a gate as epilogue; calls the reference norm and gate,
                 unless a scheme has kernels that do more in one launch (`project_rows`, `project_norm`,
                 `project_sum`)
    add_to       `multiply` with the addition to the residual stream, and the norm that reads it, as epilogue

A *scheme* is one way to keep weights: a row of quant/registry.py and a subclass of `Projection` in a file of
its own (docs/adding-a-scheme.md).

A fused matrix is filled part by part, in any order: the parts are rows of W, which is [out, in]. Schemes do
not depend on file formats, which loader/formats/quantized.py reads.

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


ROWS_AT_ONCE = 1 << 20  # numbers: 4 MiB of float32, which stay in a CPU's cache between passes


class Source(Protocol):
    """A tensor on disk as a projection needs it (loader/formats/checkpoint.py)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape as the checkpoint's own names mean it."""

    def copy_to(self, out: torch.Tensor) -> None:
        """Fill `out`, which has this tensor's shape, converting to the dtype and device of `out`."""

    def rows(self, num_rows: int, device: torch.device) -> Iterator[tuple[slice, CodedRows | torch.Tensor]]:
        """Yield the rows of a matrix in order on a device, about `num_rows` at a time; codes stay codes."""

    def transpose(self) -> Source | None:
        """The transposed matrix, if that is how this one is stored."""


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """The shape, dtype, device and form of the matrix of a projection."""

    num_rows: int
    size: int
    dtype: torch.dtype  # type of the activations
    device: torch.device
    parts: Mapping[str, int] = field(default_factory=dict)  # name -> rows, in the order of the rows
    num_experts: int | None = None
    memory: WeightMemory | None = None  # large pages on a CPU, shared by the matrices of a model
    form: CodedForm | None = None  # form of the codes on a GPU
    int8_tokens: bool = False  # True: the file is W8A8, so activations are rounded to 8 bits as well
    has_order: bool = False  # True: columns are stored in the order of their groups (act-order)
    num_outliers: int = 0  # count of numbers that are added to single elements of codes on a GPU
    runs: tuple[tuple[int, int], ...] = ()  # rows and bits of each run, if parts have different bits on a CPU

    @property
    def row_counts(self) -> list[int]:
        """The number of rows of each part, or of the matrix if it has no parts."""
        return list(self.parts.values()) or [self.num_rows]

    @property
    def num_weights(self) -> int:
        """The number of weights, of all experts together."""
        return self.num_rows * self.size * (self.num_experts or 1)

    def part_rows(self, part: str | None) -> slice:
        """The rows that a part fills; None: all rows."""
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
    """The operations before and after a projection, as the binder found them."""

    reads_sum: bool = False  # its input is the norm of a sum that another projection writes
    writes_sum: bool = False  # its output is added to the stream, and a norm and a projection read the sum
    activation: str = ""  # activation of the gate in its epilogue
    is_head: bool = False


class Projection:
    """The weights of one linear layer, or of one layer's experts, and every way to multiply with them.

    A scheme overrides `allocate`, `fill` and `multiply`. The other methods work for every scheme; a scheme
    with faster kernels overrides them, too.
    """

    scheme = ""  # its name in the registry
    can_add = False  # True: the layer returns a `PendingProduct`, whose reader calls `add_to`
    batch_invariant = False  # True: a row's bits do not depend on the other rows (`deterministic`)
    many: ManyRows | None = None  # kernel for experts with many rows

    def __init__(self, spec: WeightSpec, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        self.spec = spec
        self.bias: torch.Tensor | None = None  # the layer's own, in the dtype of the activations
        self.tensors = dict(self.allocate() if tensors is None else tensors)
        self._experts: dict[int, Projection] = {}
        self._made: list[tuple[Any, Any]] = []  # times before and after making codes that no file had

    # -- what it stores ---------------------------------------------------------------------------------

    def allocate(self) -> dict[str, torch.Tensor]:
        """Allocate all rows, of all experts; on the meta device, only their shapes."""
        raise NotImplementedError

    def load(self, source: Source, *, part: str | None, expert: int | None, transposed: bool) -> None:
        """Load a stored matrix into the rows of its part; `transposed`: it is stored [in, out]."""
        start = self.spec.part_rows(part).start
        for first, rows in self._rows(source, transposed):
            self.fill(rows, start + first, expert or 0)

    def fill(self, rows: CodedRows | torch.Tensor, first: int, expert: int) -> None:
        """Convert rows of a matrix, codes or plain numbers, to the stored form, from row `first` on."""
        raise NotImplementedError

    def num_rows_at_once(self) -> int:
        """The approximate number of rows for each call of `fill`."""
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
        """Seconds spent in `fill` on codes that no file had; see loader/code_cache.py."""
        seconds = sum(starmap(seconds_between, self._made), 0.0)
        self._made = [(0.0, seconds)]  # releases a GPU's events
        return seconds

    def num_bytes(self) -> int:
        """The bytes of the weights on any device, without the bias, which the layer owns."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def bytes_by_scheme(self) -> dict[str, int]:
        """`num_bytes` by the name of the scheme; a fused matrix may have several schemes."""
        return {self.scheme: self.num_bytes()}

    def scratch_bytes(self, num_tokens: int) -> int:
        """The fixed scratch memory of a product with this many tokens, such as W unpacked."""
        return 0

    # -- how it multiplies ------------------------------------------------------------------------------

    @property
    def active(self) -> Projection:
        """The projection that multiplies in the current step: this one, or one that it wraps."""
        return self

    def prepare(self, compiled: CompiledLinears, neighbours: Neighbours) -> None:
        """Repack, choose kernels, request their compilation; called once, before the first step."""

    def invariant(self) -> Projection | None:
        """A projection with these weights whose rows do not depend on each other; None: there is none."""
        return self if self.batch_invariant else None

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ + b; x is [..., K] and y is [..., N], both in the dtype of the activations."""
        raise NotImplementedError

    def project(self, x: torch.Tensor | NormedInput, activation: str = "") -> torch.Tensor:
        """`multiply`, with a norm as prologue if `x` is one, and a gate as epilogue if there is one."""
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
        """The norm of a sum, `multiply`, and the gate; a kernel that adds must pass the sum to `x.read`."""
        return self.project_rows(x.tensor(), activation)

    def project_sum(self, total: ResidualSum, eps: float, activation: str) -> torch.Tensor:
        """The rest of a norm that another projection began, `multiply`, and the gate."""
        raise NotImplementedError(f"{self.scheme} cannot read sums")

    def reads_sum(self, x: torch.Tensor, num_parts: int, activation: str) -> bool:
        """Return True if `project_sum` accepts a sum in `num_parts` parts for the number of tokens of `x`."""
        return False

    def add_to(
        self, x: torch.Tensor, residual: torch.Tensor, norm: ResidualNorm, reader: Projection, activation: str
    ) -> torch.Tensor | ResidualSum:
        """`multiply` for a sum that `reader` reads through `norm`; called only where `can_add` is set.

        Returns the product, [M, N] or in parts [P, M, N] that the norm adds up; or the finished sum, if
        `reader.reads_sum` returns True.
        """
        return self.multiply(x)

    @property
    def unreduced(self) -> Projection:
        """The rank's part of a matrix that several ranks share (layers/parallel.py)."""
        return self.active

    def reduced(self, y: torch.Tensor) -> torch.Tensor:
        """The sum of `unreduced` products of all ranks."""
        return y

    def lookup(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Rows of W for a tied embedding, in the dtype of activations; without it, the head stays dense."""
        raise NotImplementedError(f"{self.scheme} has no rows to look up")

    @property
    def can_dequantize(self) -> bool:
        """True if `dequantized` works: the scheme overrides it, or has a `lookup` for the default."""
        own = type(self)
        return (own.dequantized, own.lookup) != (Projection.dequantized, Projection.lookup)

    def dequantized(self) -> torch.Tensor:
        """W as plain numbers, [N, K], for the reference (quant/reference.py)."""
        return self.lookup(torch.arange(self.spec.num_rows, device=self.spec.device))

    # -- experts ----------------------------------------------------------------------------------------

    @property
    def stacked(self) -> torch.Tensor | CodedWeights | None:
        """The matrices of all experts as GPU kernels read them; None: kernels cannot read them."""
        return None

    def prepare_experts(self, compiled: CompiledLinears, activation: str) -> None:
        """`prepare` for the matrices of all experts; with an activation they are gate and up."""

    def expert(self, number: int) -> Projection:
        """The projection of one expert, which shares the memory."""
        if number not in self._experts:
            self._experts[number] = self.make_expert(number, replace(self.spec, num_experts=None))
            self._experts[number].bias = None if self.bias is None else self.bias[number]
        return self._experts[number]

    def make_expert(self, number: int, spec: WeightSpec) -> Projection:
        """Make the projection of one expert from its share of the tensors."""
        return type(self)(spec, {name: tensor[number] for name, tensor in self.tensors.items()})

    def experts_mlp(
        self, x_TD: torch.Tensor, choices: Choices, down: Projection, activation: str
    ) -> torch.Tensor | PendingProduct:
        """Send each token through its experts, one expert after the other; this projection is gate and up.

        A kernel may leave the sum of a token's experts pending, to be added to the residual stream.
        """

        def one_expert(number: int, x_MD: torch.Tensor) -> torch.Tensor:
            return down.expert(number).project(self.expert(number).project(x_MD, activation))

        return by_expert(x_TD, *choices, one_expert)


class Wrapped(Projection):
    """A projection that wraps another one of the same matrix, and activates and unpacks as it does."""

    def __init__(self, inner: Projection) -> None:
        super().__init__(inner.spec, inner.tensors)
        self.scheme, self.bias, self.batch_invariant = inner.scheme, inner.bias, inner.batch_invariant
        self._inner = inner

    def activate(self, y: torch.Tensor, activation: str) -> torch.Tensor:
        """Call the wrapped projection."""
        return self._inner.activate(y, activation)

    def scratch_bytes(self, num_tokens: int) -> int:
        """The scratch memory of the wrapped projection."""
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
    """A row of the registry: one way to store weights, and the devices that support it."""

    name: str  # the value of `quantization`, also shown in the start line
    devices: tuple[str, ...]  # "cpu", "cuda"
    make: Callable[[WeightSpec], Projection]
    cost: str = ""  # the accuracy lost by rounding 16-bit weights to it, as the start line shows it
