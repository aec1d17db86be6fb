"""A `StepContext` for a single sequence, which keeps the keys and values itself, without the engine's cache.

    step = WholeSequence(attend_sdpa, device)
    for chunk in chunks:                     # the whole sequence in one chunk, or in several
        step.advance(len(chunk))
        hidden_TD = model(chunk, step)

It is for models that run outside the engine's steps: embeddings, measurements, the comparison of two models.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from infer.kernels.delta.reference import DeltaRule, delta_rule
from infer.layers.attention import AttentionLayer, StepContext


class WholeSequence(StepContext):
    """One sequence, chunk after chunk; `attend` is a function of kernels/attention/reference.py."""

    def __init__(self, attend: Callable[..., torch.Tensor], device: torch.device) -> None:
        self._attend = attend
        self.positions = torch.arange(0, device=device)  # positions of this chunk's tokens
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # layer -> keys, values: [K, G, H] each
        self._states: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # layer -> state and tail

    def advance(self, num_tokens: int) -> None:
        """Set the length of the next chunk."""
        first = int(self.positions[-1]) + 1 if len(self.positions) else 0
        self.positions = torch.arange(first, first + num_tokens, device=self.positions.device)

    def attend(
        self, layer: AttentionLayer, q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGH: torch.Tensor
    ) -> torch.Tensor:
        """Attend over the earlier chunks and this one."""
        if layer.number in self._kept:
            keys_KGH, values_KGH = self._kept[layer.number]
            if layer.is_shared:
                k_TGH, v_TGH = keys_KGH, values_KGH
            else:
                k_TGH, v_TGH = torch.cat([keys_KGH, k_TGH]), torch.cat([values_KGH, v_TGH])
        self._kept[layer.number] = k_TGH, v_TGH
        _, scale, window, softcap, sinks_N, _ = layer
        return self._attend(q_TNH, k_TGH, v_TGH, scale=scale, window=window, softcap=softcap, sinks_N=sinks_N)

    def recur(
        self, layer: int, rule: DeltaRule, qkv_TC: torch.Tensor, b_TV: torch.Tensor, a_TV: torch.Tensor
    ) -> torch.Tensor:
        """Continue from the state after the earlier chunks."""
        if layer not in self._states:
            num_channels, num_taps = rule.conv_CW.shape
            state = b_TV.new_zeros((1, b_TV.shape[1], rule.key_dim, rule.value_dim), dtype=torch.float32)
            self._states[layer] = state, qkv_TC.new_zeros((1, num_taps - 1, num_channels))
        out, *left = delta_rule(rule, qkv_TC[None], b_TV[None], a_TV[None], *self._states[layer])
        self._states[layer] = left[0], left[1]
        return out[0]
