"""The residual stream of a model, and the two places at which a projection may be fused with it.

`norm(stream)` returns a `NormedInput`: the norm of the stream, not computed yet. The projection that receives
it computes the norm, in its prologue or before. The projection at the end of a sub-layer may return a
`PendingUpdate`: its product, not computed yet. `stream.add` keeps it until the stream is read. Only then are
all three parts of a fusion known: the projection that writes, the norm, and the projection that reads. This
file does not import projections; projection.py imports it.

    writer.add_to(x, residual, norm, reader)  ──►  a `ResidualSum`, if one kernel can multiply, add and begin
                                                   the norm; else the product, whole or in parts
    reader.project(normed)                    ──►  the rest of the norm, the product, the gate

Both places also accept plain tensors, so a layer without fusion is correct, only slower. Code that needs the
sum sets `on_sum`, which any kernel that computes the sum calls; fusion and bits stay the same.

Shapes:  T tokens, D hidden size, P parts of a product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from infer.kernels.elementwise.embedding import added
from infer.kernels.linear.residual import ResidualSum


class ResidualNorm(Protocol):
    """An RMS norm that reads the residual stream (layers/norm.py)."""

    weight: torch.nn.Parameter
    eps: float
    offset: float

    def normalize(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalised sum and the sum; `x_TD` may come in parts, [P, T, D]."""


class Deferred:
    """A tensor that has not been computed yet; a PyTorch operation computes it before using it."""

    __slots__ = ()

    def tensor(self) -> torch.Tensor:
        """Compute and return the tensor."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def computed(value: Any) -> Any:
            if isinstance(value, list | tuple):  # arguments of torch.cat and similar functions
                return type(value)(map(computed, value))
            return value.tensor() if isinstance(value, Deferred) else value

        return func(*map(computed, args), **{name: computed(v) for name, v in (kwargs or {}).items()})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor(), name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.tensor()[index]

    def __add__(self, other: Any) -> Any:
        return self.tensor() + other

    def __mul__(self, other: Any) -> Any:
        return self.tensor() * other

    def __sub__(self, other: Any) -> Any:
        return self.tensor() - other

    def __truediv__(self, other: Any) -> Any:
        return self.tensor() / other

    def __neg__(self) -> torch.Tensor:
        return -self.tensor()

    def __len__(self) -> int:
        return len(self.tensor())

    __radd__, __rmul__ = __add__, __mul__


class PendingUpdate(Deferred):
    """An update of the residual stream that has not been computed: one row for each row of `x`."""

    __slots__ = ("x",)

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class ResidualStream:
    """The sum of all updates so far, and at most one update that has not been added yet."""

    __slots__ = ("on_sum", "residual_TD", "unread", "update")

    def __init__(self, x_TD: torch.Tensor) -> None:
        self.residual_TD = x_TD
        self.update: torch.Tensor | PendingUpdate | None = None
        self.unread: NormedInput | None = None  # a norm of the current sum that nobody has read yet
        self.on_sum: Callable[[torch.Tensor], None] | None = None  # called with the next sum that is computed

    def add(self, update: torch.Tensor | PendingUpdate) -> None:
        """Add a sub-layer's output: by the kernel that computes it, or by the norm that reads the sum."""
        if self.update is not None or self.unread is not None:
            self.settle()
        self.update = update

    def settle(self) -> torch.Tensor:
        """Return the current sum; a pending norm of it is computed first."""
        if self.unread is not None:
            self.unread.tensor()
        if self.update is not None:
            self.residual_TD = added(as_tensor(self.update), self.residual_TD)
            self.update = None
        self.tell_sum()
        return self.residual_TD

    def tell_sum(self) -> None:
        """Pass the sum, which is now complete, to `on_sum`, once; no update is added."""
        if self.on_sum is not None:
            tell, self.on_sum = self.on_sum, None
            tell(self.residual_TD)

    def select(self, indices_S: torch.Tensor) -> None:
        """Keep the rows of some tokens, and their order."""
        self.residual_TD = self.settle().index_select(0, indices_S)


class NormedInput(Deferred):
    """The norm of the residual stream at the time of the call; its first reader computes it."""

    __slots__ = ("_normed_TD", "_total_TD", "begun", "norm", "stream")

    def __init__(self, norm: ResidualNorm, stream: ResidualStream) -> None:
        if stream.unread is not None:  # two norms of one sum: the first is computed now
            stream.unread.tensor()
        self.norm, self.stream = norm, stream
        self._total_TD: torch.Tensor | None = None
        self._normed_TD: torch.Tensor | None = None
        self.begun: ResidualSum | None = None  # the sum as its writer left it, with the norm begun
        stream.unread = self

    @property
    def is_read(self) -> bool:
        """True if the norm has been read: the stream holds the sum, or later updates as well."""
        return self._total_TD is not None

    def read(self, total_TD: torch.Tensor, normed_TD: torch.Tensor | None = None) -> None:
        """Store the sum in the stream, and the norm, if it was computed separately, for later readers."""
        self._total_TD, self._normed_TD = total_TD, normed_TD
        stream = self.stream
        stream.residual_TD, stream.update, stream.unread = total_TD, None, None
        stream.tell_sum()

    def tensor(self) -> torch.Tensor:
        """Compute the addition and the norm separately from any projection."""
        if self._normed_TD is None:
            if self._total_TD is not None:
                self._normed_TD, _ = self.norm.normalize(self._total_TD, None)
                return self._normed_TD
            residual_TD, update = self.stream.residual_TD, self.stream.update
            if update is None:
                normed_TD, total_TD = self.norm.normalize(residual_TD, None)
            else:
                normed_TD, total_TD = self.norm.normalize(as_tensor(update), residual_TD)
            self.read(total_TD, normed_TD)
        assert self._normed_TD is not None
        return self._normed_TD


def as_tensor(x: torch.Tensor | Deferred) -> torch.Tensor:
    """Compute what is pending; a tensor is returned as it is."""
    return x if isinstance(x, torch.Tensor) else x.tensor()
