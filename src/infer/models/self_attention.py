"""Self-attention of all families with rotary positions.

    x ──► qkv ──► norm and rotate the heads, fill the cache ──► attend ──► out

The second part is one pass over the projection (kernels/elementwise/heads.py). If the step supports it, one
kernel computes the second and the third part (`attend_projected`).

The kernels normalise one head at a time. OLMo normalises all queries of a token together, and all keys, so it
has two separate norms before the second part.

Shapes:  T tokens of all sequences laid end to end, D hidden, N query heads, G kv heads, H head size,
X = (N + 2 G) H, Y rows of one part.
"""

from __future__ import annotations

import torch
from torch import nn

from infer.kernels.elementwise.heads import HeadTransform, norm_rope_write
from infer.kernels.elementwise.rms_norm import rms_norm
from infer.layers.attention import AttentionLayer, StepContext
from infer.layers.linear import Linear
from infer.layers.norm import RMSNorm
from infer.layers.rotary import Rotary
from infer.models.config import ModelConfig
from infer.quant.projection import PendingProduct
from infer.quant.residual import NormedInput, as_tensor


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary positions; G kv heads serve N query heads.

    `in_features` is the width of the input where it is not the hidden size (EAGLE).
    """

    def __init__(
        self, config: ModelConfig, layer: int, rotary: Rotary, *, in_features: int | None = None
    ) -> None:
        super().__init__()
        sinks_N = torch.empty(config.num_heads) if config.attention_sinks else None
        self.sinks = None if sinks_N is None else nn.Parameter(sinks_N, requires_grad=False)
        self._layer = AttentionLayer(layer, config.scale, config.window(layer), config.attention_softcap)
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.eps, self.norm_offset = config.norm_eps, config.norm_offset
        q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv = Linear(
            in_features or config.hidden_size,
            q_rows + 2 * kv_rows,
            bias=config.qkv_bias,
            parts={"q": q_rows, "k": kv_rows, "v": kv_rows},
        )
        self.norms_projection, self.clip = config.projection_norm, config.clip_qkv
        has_norm = config.qk_norm or config.projection_norm
        self.q_norm = self._norm(q_rows if config.projection_norm else config.head_dim) if has_norm else None
        self.k_norm = self._norm(kv_rows if config.projection_norm else config.head_dim) if has_norm else None
        self.rotary = rotary
        self.out = Linear(q_rows, config.hidden_size, bias=config.attention_out_bias)

    @property
    def layer(self) -> AttentionLayer:
        """The facts of this layer that attention needs."""
        return self._layer if self.sinks is None else self._layer._replace(sinks_N=self.sinks.data)

    def _norm(self, size: int) -> RMSNorm:
        return RMSNorm(size, eps=self.eps, offset=self.norm_offset)

    def forward(self, x_TD: torch.Tensor | NormedInput, step: StepContext) -> torch.Tensor | PendingProduct:
        """Let each token look at its sequence up to itself; returns [T, D]."""
        y_TD: torch.Tensor | PendingProduct = self.out(self.look(x_TD, step).flatten(-2))
        return y_TD

    def look(self, x_TD: torch.Tensor | NormedInput, step: StepContext) -> torch.Tensor:
        """Cache the tokens' keys and values, then return the output of attention, [T, N, H]."""
        qkv_TX = as_tensor(self.qkv(x_TD))
        norm_weights = (self.q_norm.weight, self.k_norm.weight) if self.q_norm and self.k_norm else None
        if norm_weights is not None and self.norms_projection:
            for part_TY, weight_Y in zip(self.qkv.split(qkv_TX), norm_weights, strict=False):  # not values
                rms_norm(part_TY, weight_Y, eps=self.eps, offset=self.norm_offset, out=part_TY)
            norm_weights = None
        if self.clip is not None:
            qkv_TX = qkv_TX.clamp(-self.clip, self.clip)
        if self.rotary.query_P is not None:
            q_TY = self.qkv.split(qkv_TX)[0]
            q_TY.mul_(self.rotary.query_P[step.positions][:, None])
        return self.attend(qkv_TX, norm_weights, step)

    def attend(
        self, qkv_TX: torch.Tensor, norm_weights: tuple[torch.Tensor, torch.Tensor] | None, step: StepContext
    ) -> torch.Tensor:
        """Normalise the heads of a projection with these weights, rotate them, then attend: [T, N, H]."""
        transform = HeadTransform(
            norm_weights=norm_weights,
            cos_PR=self.rotary.cos_PR,
            sin_PR=self.rotary.sin_PR,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            eps=self.eps,
            offset=self.norm_offset,
        )
        seen_TNH = step.attend_projected(self.layer, qkv_TX, transform)
        if seen_TNH is None:
            cache = None if self._layer.is_shared else step.slots(self.layer.number)
            q_TNH, k_TGH, v_TGH = norm_rope_write(qkv_TX, transform, step.positions, cache)
            seen_TNH = step.attend(self.layer, q_TNH, k_TGH, v_TGH)
        return seen_TNH
