"""Cohere 2 (Command R7B, Command A): attention and MLP in parallel, on one norm of the residual stream.

   x ──► norm ──┬──► attention ──► (+) ──►
    │           └──► mlp ─────────► │
    └───────────────────────────────┘

norm            LayerNorm with a weight and no bias, once per block
three of four   layers have a sliding window, and rotate neighbouring channels of their heads together
the fourth      sees everything and does not rotate
logit_scale     multiplies the logits (Granite's divides them)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from infer.layers.attention import StepContext
from infer.layers.norm import LayerNorm
from infer.models import llama
from infer.models.config import ModelConfig
from infer.models.raw_config import RawConfig, read_window
from infer.models.weight_map import Target, WeightMap
from infer.quant.residual import ResidualStream


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config of a `Cohere2ForCausalLM`."""
    top = RawConfig(raw)
    top.refuse("use_qk_norm", "norms of queries and keys are not supported in this family")
    eps = top.number("layer_norm_eps", default=1e-5)
    keys = top.with_defaults(tie_word_embeddings=True, rms_norm_eps=eps)
    pattern = keys.size("sliding_window_pattern", default=4)
    shared = llama.read_shared_config(
        keys,
        family="cohere2",
        window=read_window(top),
        slides=lambda layer: (layer + 1) % pattern != 0,
        attention_bias=False,
    )
    return replace(
        shared,
        norm_eps=eps,
        pairs_neighbours=True,
        still_layers=tuple(layer for layer in range(shared.num_layers) if shared.window(layer) is None),
        logit_scale=keys.number("logit_scale", default=0.0625),
    )


class Block(nn.Module):
    """Attention and the MLP, which read the same norm; both are added to the residual stream."""

    def __init__(self, config: ModelConfig, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm = LayerNorm(config.hidden_size, eps=config.norm_eps, has_bias=False)
        self.attention, self.mlp = attention, mlp

    def forward(self, stream: ResidualStream, step: StepContext) -> None:
        """Add attention's output to the stream, and the MLP's for the same input."""
        normed_TD = self.norm(stream)
        stream.add(self.attention(normed_TD, step))
        stream.add(self.mlp(step.needed(normed_TD)))


class Cohere2(llama.Llama):
    """A stack of parallel blocks."""

    block = Block

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.norm = LayerNorm(config.hidden_size, eps=config.norm_eps, has_bias=False)


# fmt: off
WEIGHT_MAP: WeightMap = {
    **{key: target for key, target in llama.WEIGHT_MAP.items() if "layernorm" not in key},
    "model.layers.{}.input_layernorm":            Target("layers.{}.norm"),
}
# fmt: on
