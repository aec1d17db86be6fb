"""OLMo 2: norms come after attention and after the MLP, and nowhere before them.

       x ──► attention ──► post_attention_norm ──► (+) ──► mlp ──► post_mlp_norm ──► (+) ──►
        └──────────────────────────────────────────┘ └───────────────────────────────┘

All queries of a token are normalised together before they are split into heads, and so are its keys
(`projection_norm`). The rest is Llama's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from infer.layers.attention import StepContext
from infer.layers.mlp import GatedMLP
from infer.layers.norm import RMSNorm
from infer.layers.rotary import Rotary
from infer.models import llama, qwen3
from infer.models.config import ModelConfig
from infer.models.model import Model, layer_rotaries
from infer.models.raw_config import RawConfig
from infer.models.self_attention import SelfAttention
from infer.models.weight_map import Target, WeightMap
from infer.quant.residual import ResidualStream


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config of an `Olmo2ForCausalLM`."""
    keys = RawConfig(raw).with_defaults(rms_norm_eps=1e-5)
    shared = llama.read_shared_config(keys, family="olmo2", attention_bias=False)
    return replace(shared, projection_norm=True)


class Block(nn.Module):
    """Attention, then the MLP, each normalised and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int, rotary: Rotary) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.attention = SelfAttention(config, layer, rotary)
        self.post_attention_norm = RMSNorm(size, eps=eps)
        self.mlp = GatedMLP(size, config.intermediate_size, activation=config.activation, bias=False)
        self.post_mlp_norm = RMSNorm(size, eps=eps)

    def forward(self, stream: ResidualStream, step: StepContext) -> None:
        """Add the norm of attention's output to the stream, then that of the MLP's."""
        stream.add(self.post_attention_norm(self.attention(stream.settle(), step)))
        stream.add(self.post_mlp_norm(self.mlp(stream.settle())))


class Olmo2(Model):
    """A stack of blocks with norms at their ends."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(
            Block(config, layer, rotary) for layer, rotary in enumerate(layer_rotaries(config))
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps)


# fmt: off
WEIGHT_MAP: WeightMap = {
    **{key: target for key, target in qwen3.WEIGHT_MAP.items() if not key.endswith("input_layernorm")},
    "model.layers.{}.post_attention_layernorm":   Target("layers.{}.post_attention_norm"),
    "model.layers.{}.post_feedforward_layernorm": Target("layers.{}.post_mlp_norm"),
}
# fmt: on
