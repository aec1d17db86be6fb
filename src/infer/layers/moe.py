"""A mixture of experts in place of the feed-forward half of a block.

                     ┌──► expert 0
    x ──► router ────┼──► expert 1 ──┐
                     ├──► expert 2   ├──► weighted sum        2 of 8 in Mixtral, 8 of 128 in Qwen 3
                     └──► expert 3 ──┘

An expert is a small gated MLP. A token pays for the experts it is sent to, while the memory holds all of
them. Their matrices are stacked, so that one kernel can reach every expert from one pointer:

    gate_up   [E, 2F, D]      rows of the gate, then rows of up
    down      [E, D, F]

The router is a plain matrix in the model's dtype, whatever form the experts have: its rounding errors
would not make a result a little worse, but send a token to someone else.

Shapes:  T tokens, M tokens of one expert, E experts, D hidden size, F intermediate size of one expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from infer.kernels.elementwise.gated_activation import gated_activation
from infer.kernels.linear.residual import Added
from infer.kernels.moe.grouped import by_expert, experts_mlp, route
from infer.kernels.runtime.dispatch import use_triton
from infer.layers.linear import Reader, rows_of_part
from infer.layers.norm import AddNorm
from infer.quant.dense import DENSE, INVARIANT
from infer.quant.scheme import Scheme


class Router(nn.Module):
    """One logit per expert."""

    def __init__(self, hidden_size: int, num_experts: int) -> None:
        super().__init__()
        self.scheme: Scheme = DENSE
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size), requires_grad=False)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return [T, E]."""
        return self.scheme.multiply(x_TD, self.weight, None)

    def extra_repr(self) -> str:
        """Sizes, for print(model)."""
        return f"{self.weight.shape[1]} -> {self.weight.shape[0]} experts"


class ExpertLinear(nn.Module):
    """A stack of matrices of one shape, one per expert; each may hold parts as a `Linear` does.

    `packed` is one scheme per expert where the weights are kept in a form of their own (quant/); the
    parameter is then an empty shell.
    """

    def __init__(
        self, num_experts: int, in_features: int, out_features: int, parts: Mapping[str, int] | None = None
    ) -> None:
        super().__init__()
        self.parts = dict(parts or {})
        assert not self.parts or sum(self.parts.values()) == out_features, (self.parts, out_features)
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features), requires_grad=False)
        self.scheme: Scheme = DENSE
        self.packed: Sequence[Scheme] | None = None

    def forward(self, x_MK: torch.Tensor, expert: int) -> torch.Tensor:
        """Multiply with the matrix of one expert."""
        if self.packed is not None:
            return self.packed[expert].multiply(x_MK, self.weight, None)
        return self.scheme.multiply(x_MK, self.weight[expert], None)

    def part_rows(self, name: str) -> slice:
        """The rows of each expert's matrix that part `name` fills."""
        return rows_of_part(self.parts, name)

    def extra_repr(self) -> str:
        """Shape and parts, for print(model)."""
        num_experts, out_features, in_features = self.weight.shape
        parts = f", parts={self.parts}" if self.parts else ""
        return f"{num_experts} x ({in_features} -> {out_features}){parts}"


class MixtureOfExperts(nn.Module):
    """Each token through `num_choices` of `num_experts` gated MLPs, mixed by the router's weights.

    `normalized`: the weights of a token's experts add up to 1.
    """

    def __init__(
        self,
        hidden_size: int,
        expert_size: int,
        *,
        num_experts: int,
        num_choices: int,
        normalized: bool,
        activation: str,
    ) -> None:
        super().__init__()
        self.num_choices, self.normalized, self.activation = num_choices, normalized, activation
        self.router = Router(hidden_size, num_experts)
        halves = {"gate": expert_size, "up": expert_size}
        self.gate_up = ExpertLinear(num_experts, hidden_size, 2 * expert_size, parts=halves)
        self.down = ExpertLinear(num_experts, expert_size, hidden_size)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return [T, D]."""
        experts_TC, weights_TC = route(self.router(x_TD), self.num_choices, normalized=self.normalized)
        if self.gate_up.packed is None and use_triton(x_TD):
            return experts_mlp(
                x_TD,
                experts_TC,
                weights_TC,
                self.gate_up.weight,
                self.down.weight,
                activation=self.activation,
                invariant=self.gate_up.scheme is INVARIANT,
            )
        return by_expert(x_TD, experts_TC, weights_TC, self._one_expert)

    def _one_expert(self, expert: int, x_MD: torch.Tensor) -> torch.Tensor:
        y_MD: torch.Tensor = self.down(
            gated_activation(self.gate_up(x_MD, expert), activation=self.activation), expert
        )
        return y_MD

    def reader(self, norm: AddNorm) -> None:
        """None: router and experts read the same normalised tokens, so somebody has to make them."""

    def after(
        self,
        norm: AddNorm,
        x_TD: torch.Tensor | Added,
        residual_TD: torch.Tensor | None,
        reader: Reader | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the normalised sum of `x_TD` and the residual stream; returns [T, D] and the sum."""
        del reader  # a mixture is added up by its own kernels
        assert not isinstance(x_TD, Added), "nothing was to be added for this norm"
        normed_TD, residual_TD = norm(x_TD, residual_TD)
        return self(normed_TD), residual_TD
