"""A mixture of experts in place of the feed-forward half of a block.

                     ┌──► expert 0
    x ──► router ────┼──► expert 1 ──┐
                     ├──► expert 2   ├──► weighted sum        2 of 8 in Mixtral, 8 of 128 in Qwen 3
                     └──► expert 3 ──┘

An expert is a small gated MLP. A token costs only the experts it is sent to, but all experts are in memory.
Their matrices are stacked, so that one kernel can reach every expert from one pointer:

    gate_up   [E, 2F, D]      rows of the gate, then rows of up
    down      [E, D, F]

Every token also goes through the shared expert, if there is one (Qwen 2 MoE, Qwen 3.5). Its output is
multiplied by a gate, one number for each token:

    y = sum of the chosen experts + sigmoid(shared_gate x) * shared(x)

The router stays a dense matrix in the model's dtype even if experts are quantized: its rounding errors would
send tokens to other experts. The gate, one row, stays dense as well.

Shapes:  T tokens, M tokens of one expert, E experts, D hidden size, F intermediate size of one expert.
"""

from __future__ import annotations

import torch
from torch import nn

from infer.kernels.linear.coded import CodedWeights
from infer.kernels.linear.compiled import CompiledLinears
from infer.kernels.moe.few import ExpertShape, FewExperts
from infer.kernels.moe.grouped import route
from infer.kernels.runtime.profiles import device_profile
from infer.layers.facts import ExpertConfig
from infer.layers.linear import ExpertLinear, Linear, Weights
from infer.layers.mlp import GatedMLP
from infer.quant.chosen import ChosenExperts
from infer.quant.projection import Choices, PendingProduct
from infer.quant.residual import NormedInput, as_tensor

ALWAYS_DENSE = (".router", ".shared_gate")  # name endings of modules that no scheme packs


class MixtureOfExperts(nn.Module):
    """Send each token through a few of many gated MLPs, and add up their outputs by the router's weights.

    `bias`: the router and all experts' matrices have biases (gpt-oss). `scaled`: each expert's weight is
    multiplied by a stored number (Gemma 4).
    """

    def __init__(
        self,
        hidden_size: int,
        experts: ExpertConfig,
        *,
        activation: str,
        bias: bool = False,
        scaled: bool = False,
    ) -> None:
        super().__init__()
        self.num_choices, self.normalized = experts.num_choices, experts.normalized
        self.activation, count, size = activation, experts.num_experts, experts.size
        self.router = Linear(hidden_size, count, bias=bias, always_dense=True)
        halves = {"gate": size, "up": size}
        self.gate_up = ExpertLinear(count, hidden_size, 2 * size, parts=halves, bias=bias)
        self.down = ExpertLinear(count, size, hidden_size, bias=bias)
        self.has_shared = experts.shared_size > 0
        if self.has_shared:
            self.shared = GatedMLP(hidden_size, experts.shared_size, activation=activation, bias=False)
            self.shared_gate = Linear(hidden_size, 1, bias=False, always_dense=True)
        self.scale = Weights(count) if scaled else None
        self.few: FewExperts | None = None  # kernels for few tokens; None: there are none

    def prepare(self, compiled: CompiledLinears) -> None:
        """Request the kernels for few tokens, if both matrices have a form that these kernels read."""
        gate_up, down = self.gate_up.projection, self.down.projection
        if gate_up.bias is not None:
            return
        gate_up.prepare_experts(compiled, self.activation)
        down.prepare_experts(compiled, "")
        stacks = gate_up.stacked, down.stacked
        if stacks[0] is None or stacks[1] is None or gate_up.batch_invariant or self.has_shared:
            return
        if self.scale is not None:  # these kernels cannot scale the router's weights
            return
        forms = (stack.form if isinstance(stack, CodedWeights) else None for stack in stacks)
        spec = self.gate_up.spec
        shape = ExpertShape(
            spec.size, spec.num_rows // 2, self.gate_up.num_experts, self.num_choices,
            self.normalized, self.activation, *forms,
        )  # fmt: skip
        self.few = FewExperts(shape, device_profile(compiled.device).linear)
        compiled.use(self.few)

    def forward(
        self, x_TD: torch.Tensor | NormedInput, routed_by: torch.Tensor | None = None
    ) -> torch.Tensor | PendingProduct:
        """Return [T, D]; the router reads `routed_by`, or the experts' input if it is None."""
        num_rows = len(x_TD.stream.residual_TD if isinstance(x_TD, NormedInput) else x_TD)
        few = self.few if self.few is not None and self.few.is_for(num_rows) else None
        if few is None:
            x_TD = as_tensor(x_TD)  # router and experts read the same rows
        logits_TE = as_tensor(self.router(x_TD if routed_by is None else routed_by))
        gate_up, down = self.gate_up.projection, self.down.projection
        if few is not None:
            chosen = ChosenExperts(few, gate_up, down, logits_TE)
            return PendingProduct(chosen, chosen.gated(x_TD))
        choices = Choices(*route(logits_TE, self.num_choices, normalized=self.normalized))
        if self.scale is not None:
            factors_TC = self.scale.weight[choices.experts_TC.long()].float()
            choices = choices._replace(weights_TC=choices.weights_TC * factors_TC)
        x_TD = as_tensor(x_TD)
        mixed = gate_up.experts_mlp(x_TD, choices, down.unreduced, self.activation)
        if not self.has_shared and down.unreduced is down:
            return mixed
        y_TD = as_tensor(mixed)
        if self.has_shared:  # both terms are this rank's shares of one sum, if there are several ranks
            gated_TF = self.shared.gate_up.gated(x_TD, self.activation)
            shared_TD = self.shared.down.projection.unreduced.project(gated_TF)
            y_TD = torch.addcmul(y_TD, as_tensor(self.shared_gate(x_TD)).sigmoid(), shared_TD)
        return down.reduced(y_TD)
