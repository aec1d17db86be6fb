"""A matrix multiplication whose weight may hold several of the checkpoint's matrices.

Queries, keys and values are three matrices applied to the same input. Stacked by rows they are one
matrix, and one large multiplication is faster than three small ones:

                      ┌────────┐ part "q": rows 0..575
    qkv.weight        │   Wq   │
    [out, in]         ├────────┤ part "k": rows 576..767
                      │   Wk   │
                      ├────────┤ part "v": rows 768..959
                      │   Wv   │
                      └────────┘

The parts have names, so the weight map can say which part a checkpoint tensor fills. The layer's `Projection`
(quant/projection.py) stores and multiplies the numbers. A layer starts with a dense projection, in the
current dtype and on the current device.

    stored        the projection as it was loaded
    projection    `stored` or its variant for `deterministic`, wrapped for adapters and ranks (bind.py)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn

from infer.kernels.elementwise.gated_activation import gated_activation
from infer.quant.dense import Dense
from infer.quant.projection import PendingProduct, Projection, WeightSpec
from infer.quant.residual import NormedInput, as_tensor

_WITHOUT_WEIGHTS: ContextVar[bool] = ContextVar("without_weights", default=False)


@contextmanager
def without_weights() -> Iterator[None]:
    """Build linear layers whose weights have shapes but no memory: a loader sets their projections."""
    token = _WITHOUT_WEIGHTS.set(True)
    try:
        yield
    finally:
        _WITHOUT_WEIGHTS.reset(token)


class Weights(nn.Module):
    """A named tensor of a checkpoint that is not a layer's matrix."""

    def __init__(self, *shape: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Projected(nn.Module):
    """A layer with a projection of one matrix, or of one per expert; its tensors are its parameters."""

    weight: nn.Parameter  # the matrix, if it is dense
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        parts: Mapping[str, int] | None,
        *,
        num_experts: int | None = None,
        tied_weight: nn.Parameter | None = None,
        always_dense: bool = False,
    ) -> None:
        super().__init__()
        parts = dict(parts or {})
        assert not parts or sum(parts.values()) == out_features, (parts, out_features)
        device = torch.device("meta") if _WITHOUT_WEIGHTS.get() else torch.get_default_device()
        dtype = torch.get_default_dtype()
        self.spec = WeightSpec(out_features, in_features, dtype, device, parts, num_experts)
        self.always_dense = always_dense  # True: too small to be worth packing, and sensitive to rounding
        self.bias = None
        self._leaves: tuple[str, ...] = ()
        assert tied_weight is None or tied_weight.shape == (out_features, in_features), tied_weight
        self.use(Dense(self.spec, None if tied_weight is None else {"weight": tied_weight}))

    def use(self, projection: Projection) -> None:
        """Replace the projection; the tensors of the new one become the parameters."""
        for name in self._leaves:
            delattr(self, name)
        for name, tensor in projection.tensors.items():
            if not isinstance(tensor, nn.Parameter):
                tensor = projection.tensors[name] = nn.Parameter(tensor, requires_grad=False)
            self.register_parameter(name, tensor)
        self._leaves = tuple(projection.tensors)
        projection.bias = self.bias
        self.stored = self.projection = projection

    @property
    def parts(self) -> Mapping[str, int]:
        """The names of the matrices that are fused, and their rows, in order."""
        return self.spec.parts

    def extra_repr(self) -> str:
        """Shape, parts and scheme, for print(model)."""
        spec, scheme = self.spec, self.projection.scheme
        experts = "" if spec.num_experts is None else f"{spec.num_experts} experts, "
        parts = f", parts={dict(spec.parts)}" if spec.parts else ""
        shape = f"{experts}{spec.size} -> {spec.num_rows}, bias={self.bias is not None}"
        return shape + parts + ("" if scheme == "none" else f", {scheme}")


class Linear(Projected):
    """y = x Wᵀ + b, with W stored [out, in] as checkpoints do; a `tied_weight` is shared, not copied."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        parts: Mapping[str, int] | None = None,
        tied_weight: nn.Parameter | None = None,
        always_dense: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, parts, tied_weight=tied_weight, always_dense=always_dense)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self.projection.bias = self.bias

    def forward(self, x: torch.Tensor | NormedInput) -> torch.Tensor | PendingProduct:
        """Multiply the last dimension of `x`; a product that a kernel adds to the stream is left pending."""
        projection = self.projection.active
        if projection.can_add:
            return PendingProduct(projection, as_tensor(x))
        return projection.project(x)

    def gated(self, x: torch.Tensor | NormedInput, activation: str) -> torch.Tensor:
        """Return act(gate) * up for a matrix with the parts gate and up."""
        if self._forward_hooks:  # hooks need the product before the gate
            return gated_activation(as_tensor(self(x)), activation=activation)
        return self.projection.active.project(x, activation)

    def split(self, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split an output of this layer into its parts, as views."""
        return torch.split(y, list(self.parts.values()), dim=-1)


class ExpertLinear(Projected):
    """A stack of matrices of one shape, one per expert; each may have parts like a `Linear`."""

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        parts: Mapping[str, int] | None = None,
        *,
        bias: bool,
    ) -> None:
        super().__init__(in_features, out_features, parts, num_experts=num_experts)
        self.num_experts = num_experts  # number of matrices
        shape = num_experts, out_features
        self.bias = nn.Parameter(torch.empty(shape), requires_grad=False) if bias else None
        self.projection.bias = self.bias
