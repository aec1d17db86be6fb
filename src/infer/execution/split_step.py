"""A step whose decoding rows and prompts use different attention backends.

    tokens      A B | C C C C | D D            A and B decode, C and D do not
    contexts    decode_attention_backend for A and B, attention_backend for C and D

A row is completely in one of the two, and reads only its own cache, so either may run first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from infer.execution.order import DECODE, StepOrder
from infer.kernels.delta.reference import DeltaRule
from infer.layers.attention import AttentionLayer, StepContext


class SplitStep(StepContext):
    """Several contexts, each for some of a step's tokens."""

    def __init__(self, positions_T: torch.Tensor, parts: Sequence[tuple[StepContext, torch.Tensor]]) -> None:
        self.positions, self._parts = positions_T, parts

    def attend(
        self, layer: AttentionLayer, q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGH: torch.Tensor
    ) -> torch.Tensor:
        """Let each context cache and attend to its own tokens; see layers/attention.py."""
        out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
        for context, places in self._parts:
            out_TNH[places] = context.attend(layer, q_TNH[places], k_TGH[places], v_TGH[places])
        return out_TNH

    def recur(
        self, layer: int, rule: DeltaRule, qkv_TC: torch.Tensor, b_TV: torch.Tensor, a_TV: torch.Tensor
    ) -> torch.Tensor:
        """Let each context advance the states of its own tokens."""
        out_TVH = qkv_TC.new_empty((*b_TV.shape, rule.value_dim))
        for context, places in self._parts:
            out_TVH[places] = context.recur(layer, rule, qkv_TC[places], b_TV[places], a_TV[places])
        return out_TVH


def split_step(
    order: StepOrder,
    positions_T: torch.Tensor,
    make: Callable[[StepOrder, str], StepContext],
    backends: tuple[str, str],
) -> SplitStep:
    """Return the step of an order; `make` builds a context for decoding rows and one for the others."""
    is_decode = order.kinds == DECODE
    parts = []
    for backend, is_part in zip(backends, (is_decode, ~is_decode), strict=True):
        numbers = is_part.nonzero()[0]
        if len(numbers):
            context = make(order.select(numbers), backend)
            places = torch.from_numpy(is_part.repeat(order.counts).nonzero()[0]).to(positions_T.device)
            parts.append((context, places))
    return SplitStep(positions_T, parts)
