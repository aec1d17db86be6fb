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

The parts have names, so the weight map can say which of them a checkpoint tensor fills. How the numbers
are stored and multiplied is the business of the layer's scheme (quant/).

Between two matrices stands the residual stream: one adds its result to it, the next one reads its norm.

    stream ──► norm ──► after ──► ... ──► into ──► (+) ──► stream ──► norm ──► after ──► ...

`after` is told the norm before it. `into` is told who reads behind it: for few tokens on a GPU it does the
addition and most of that norm while its result is still at hand, and returns an `Added` instead of a tensor,
which `after` takes as well (kernels/linear/small.py). For a hundred tokens or two it may return its result in
parts, which the norm adds up on its way (kernels/linear/split.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from infer.errors import ConfigError
from infer.kernels.elementwise.gated_activation import gated_activation
from infer.kernels.linear.invariant import places_are_alike
from infer.kernels.linear.residual import Added, Stream
from infer.kernels.linear.small import (
    added_gated_linear,
    added_linear,
    can_add,
    linear_into,
    norm_gated_linear,
    norm_linear,
    split_linear,
)
from infer.kernels.runtime.dispatch import use_triton
from infer.layers.norm import AddNorm
from infer.quant.dense import DENSE, INVARIANT
from infer.quant.scheme import Scheme


class Linear(nn.Module):
    """y = x Wᵀ + b, with W stored [out, in] as checkpoints do; a `tied_weight` is shared, not copied."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        parts: Mapping[str, int] | None = None,
        tied_weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.scheme: Scheme = DENSE
        self.parts = dict(parts or {})  # name -> number of rows, in the order of the rows
        assert not self.parts or sum(self.parts.values()) == out_features, (self.parts, out_features)
        if tied_weight is None:
            tied_weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        assert tied_weight.shape == (out_features, in_features), tied_weight.shape
        self.weight = tied_weight
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply the last dimension of `x`."""
        return self.scheme.multiply(x, self.weight, self.bias)

    def into(
        self, x: torch.Tensor, residual_TD: torch.Tensor | None, reader: Reader | None
    ) -> torch.Tensor | Added:
        """Multiply; and add the result to the stream for its next reader, where one kernel can do both.

        A result of three dimensions is one in parts, which the reader's norm adds up.
        """
        if reader is None or residual_TD is None or not use_triton(x):
            return self(x)  # type: ignore[no-any-return]
        norm, matrix, gated = reader
        is_plain = self.scheme is DENSE and matrix.scheme is DENSE
        if is_plain and can_add(x, self.weight, matrix.weight, gated=gated):
            return linear_into(Stream(residual_TD, norm.weight, norm.offset), x, self.weight, self.bias)
        parts_PTD = split_linear(x, self.weight) if is_plain and self.bias is None else None
        return self(x) if parts_PTD is None else parts_PTD

    def after(
        self, norm: AddNorm, x_TD: torch.Tensor | Added, residual_TD: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Multiply the normalised sum of `x_TD` and the residual stream; returns that and the sum."""
        if isinstance(x_TD, Added):
            return added_linear(x_TD, norm.eps, self.weight, self.bias), x_TD.sum_MN
        if self.scheme is DENSE and use_triton(x_TD):  # one kernel where there are few tokens
            return norm_linear(x_TD, residual_TD, norm.weight, norm.eps, norm.offset, self.weight, self.bias)
        normed_TD, residual_TD = norm(x_TD, residual_TD)
        return self(normed_TD), residual_TD

    def gated_after(
        self, norm: AddNorm, x_TD: torch.Tensor | Added, residual_TD: torch.Tensor | None, activation: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for a matrix of two parts, gate and up: the first result is act(gate) * up."""
        if isinstance(x_TD, Added):
            if self.bias is None:
                return added_gated_linear(x_TD, norm.eps, self.weight, activation), x_TD.sum_MN
        elif self.scheme is DENSE and self.bias is None and use_triton(x_TD):
            return norm_gated_linear(
                x_TD, residual_TD, norm.weight, norm.eps, norm.offset, self.weight, activation
            )
        y_TF, residual_TD = self.after(norm, x_TD, residual_TD)
        return gated_activation(y_TF, activation=activation), residual_TD

    def split(self, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Cut an output of this layer into its parts: views, no copy."""
        return torch.split(y, list(self.parts.values()), dim=-1)

    def part_rows(self, name: str) -> slice:
        """The rows of the weight (and of the bias) that part `name` fills."""
        return rows_of_part(self.parts, name)

    def extra_repr(self) -> str:
        """Shape and parts, for print(model)."""
        out_features, in_features = self.weight.shape
        parts = f", parts={self.parts}" if self.parts else ""
        return f"{in_features} -> {out_features}, bias={self.bias is not None}{parts}"


class Reader(NamedTuple):
    """Who reads the residual stream next: a norm and the matrix behind it; `gated` as in `gated_after`."""

    norm: AddNorm
    matrix: Linear
    gated: bool = False


def set_invariant(model: nn.Module, invariant: bool) -> None:
    """Whether plain matrices, also of routers and experts, are multiplied row by row or as fast as can be."""
    tried: set[torch.Size] = set()
    for name, module in model.named_modules():
        if getattr(module, "scheme", None) not in (DENSE, INVARIANT):
            continue
        setattr(module, "scheme", INVARIANT if invariant else DENSE)  # noqa: B010
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        w_NK = weight.flatten(0, -3)[0] if weight.dim() > 2 else weight  # of experts the first one
        if not invariant or weight.device.type != "cpu" or weight.is_meta or w_NK.shape in tried:
            continue
        tried.add(w_NK.shape)
        if not places_are_alike(w_NK):
            raise ConfigError(
                "deterministic cannot be had here: this machine's matrix library adds up the rows of a batch "
                f"in different orders ({name}, {tuple(w_NK.shape)}); use cpu_weights=int8, which needs none"
            )


def rows_of_part(parts: Mapping[str, int], name: str) -> slice:
    """Where part `name` lies among parts that are given with their numbers of rows, in order."""
    assert name in parts, f"no part {name!r} in {list(parts)}"
    start = 0
    for part, num_rows in parts.items():
        if part == name:
            break
        start += num_rows
    return slice(start, start + parts[name])
