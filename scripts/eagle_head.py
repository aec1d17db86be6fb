"""An EAGLE-3 head in plain PyTorch, as it is trained: every row drafts several tokens in a row.

    step 0     row t    state g(t)        token t+1   ──►  guess of token t+2     sees rows ..t of step 0
    step 1     row t    y of step 0       token t+2   ──►  guess of token t+3     and row t of step 1
    step 2     row t    y of step 1       token t+3   ──►  guess of token t+4     and row t of step 2

A row stands for a chain that starts behind it: it sees the rows before it as they are when their tokens are
known, and what it has drafted itself. That is what a served head sees (models/eagle3.py), and a test compares
the two.

Shapes:  B sequences, L tokens of each (padded), D hidden size, N query heads, G kv heads, H head size,
R pairs of it, F numbers of the states of all layers, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from infer.models.config import ModelConfig


class TrainedAttention(nn.Module):
    """Attention of the rows of one step to the rows of the first step, and to themselves in the others."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, self.head_dim = config.hidden_size, config.head_dim
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.q_proj = nn.Linear(2 * size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * size, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * size, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, size, bias=False)
        self.theta = config.rope_theta

    def _rotated(self, x_BLNH: torch.Tensor, first: int) -> torch.Tensor:
        """Turn heads by their positions, which begin at `first`."""
        pairs = torch.arange(0, self.head_dim, 2, device=x_BLNH.device, dtype=torch.float32)
        positions = torch.arange(first, first + x_BLNH.shape[1], device=x_BLNH.device)
        angles_L1R = (positions[:, None] * self.theta ** (-pairs / self.head_dim))[:, None]
        low, high = x_BLNH.float().chunk(2, dim=-1)
        cos, sin = angles_L1R.cos(), angles_L1R.sin()
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x_BLNH.dtype)

    def forward(self, x_BLX: torch.Tensor, kept: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Attend in step `len(kept)`, whose keys and values are added to `kept`."""
        B, L, _ = x_BLX.shape
        number, group = len(kept), self.num_heads // self.num_kv_heads
        q = self._rotated(self.q_proj(x_BLX).view(B, L, self.num_heads, self.head_dim), number)
        k = self._rotated(self.k_proj(x_BLX).view(B, L, self.num_kv_heads, self.head_dim), number)
        v = self.v_proj(x_BLX).view(B, L, self.num_kv_heads, self.head_dim)
        q, k, v = (
            heads.transpose(1, 2)
            for heads in (q, k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2))
        )
        kept.append((k, v))
        if number == 0:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scale = self.head_dim**-0.5
            hidden_LL = torch.ones(L, L, dtype=torch.bool, device=q.device).triu(1)
            first_k, first_v = kept[0]
            scores = (q @ first_k.transpose(-1, -2) * scale).masked_fill(hidden_LL, -torch.inf)
            own = [(q * keys).sum(-1, keepdim=True) * scale for keys, _ in kept[1:]]
            weights = torch.cat([scores, *own], dim=-1).softmax(dim=-1, dtype=torch.float32).to(v.dtype)
            out = weights[..., :L] @ first_v
            for place, (_, values) in enumerate(kept[1:]):
                out = out + weights[..., L + place, None] * values
        y: torch.Tensor = self.o_proj(out.transpose(1, 2).reshape(B, L, -1))
        return y


class TrainedNorm(nn.Module):
    """An RMS norm in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class TrainedMLP(nn.Module):
    """A gated MLP."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return down(silu(gate x) * up x)."""
        y: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class TrainedBlock(nn.Module):
    """The one layer of a head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = TrainedNorm(size, eps)
        self.hidden_norm = TrainedNorm(size, eps)
        self.self_attn = TrainedAttention(config)
        self.post_attention_layernorm = TrainedNorm(size, eps)
        self.mlp = TrainedMLP(config)


class TrainedHead(nn.Module):
    """An EAGLE-3 head whose parameters have the published names (models/eagle3.py has the served one).

    States of high layers are many times larger than those of low ones. They are divided by their `scales`,
    one for each layer, so that `fc` learns from all of them; `published` has `fc` for states as they are.
    """

    scales_F: torch.Tensor

    def __init__(self, config: ModelConfig, rows_WD: torch.Tensor, scales: Sequence[float]) -> None:
        super().__init__()
        size = config.hidden_size
        scales_F = torch.tensor(scales).repeat_interleave(size)
        self.register_buffer("scales_F", scales_F, persistent=False)
        self.fc = nn.Linear(3 * size, size, bias=False)
        self.midlayer = TrainedBlock(config)
        self.norm = TrainedNorm(size, config.norm_eps)
        self.lm_head = nn.Linear(size, len(rows_WD), bias=False)
        with torch.no_grad():
            self.lm_head.weight.copy_(rows_WD)

    def start(self, states_BLF: torch.Tensor) -> torch.Tensor:
        """The states of step 0, from those of the model's layers."""
        g_BLD: torch.Tensor = self.fc(states_BLF / self.scales_F)
        return g_BLD.float()  # the residual stream stays in float32

    def step(
        self,
        embedded_BLD: torch.Tensor,
        states_BLD: torch.Tensor,
        kept: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """One draft step of all rows; returns y, which the next one starts from."""
        block = self.midlayer
        x = torch.cat([block.input_layernorm(embedded_BLD), block.hidden_norm(states_BLD)], dim=-1)
        a = states_BLD + block.self_attn(x, kept)
        y: torch.Tensor = a + block.mlp(block.post_attention_layernorm(a))
        return y

    def logits(self, y: torch.Tensor) -> torch.Tensor:
        """The logits of draft tokens."""
        logits: torch.Tensor = self.lm_head(self.norm(y))
        return logits

    def published(self) -> dict[str, torch.Tensor]:
        """The weights by their published names."""
        return self.state_dict() | {"fc.weight": self.fc.weight.detach() / self.scales_F}
