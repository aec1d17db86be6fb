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
from infer.models import llama, qwen3
from infer.models.config import ModelConfig
from infer.models.model import norm_of
from infer.models.raw_config import RawConfig
from infer.models.weight_map import Target, WeightMap
from infer.quant.residual import ResidualStream


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config of an `Olmo2ForCausalLM`."""
    keys = RawConfig(raw).with_defaults(rms_norm_eps=1e-5)
    shared = llama.read_shared_config(keys, family="olmo2", attention_bias=False)
    return replace(shared, projection_norm=True)


class Block(nn.Module):
    """Attention, then the MLP, each normalised and added to the residual stream."""

    def __init__(self, config: ModelConfig, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention, self.post_attention_norm = attention, norm_of(config)
        self.mlp, self.post_mlp_norm = mlp, norm_of(config)

    def forward(self, stream: ResidualStream, step: StepContext) -> None:
        """Add the norm of attention's output to the stream, then the norm of the MLP's."""
        stream.add(self.post_attention_norm(self.attention(stream.settle(), step)))
        stream.add(self.post_mlp_norm(self.mlp(stream.settle())))


class Olmo2(llama.Llama):
    """A stack of blocks with norms at their ends."""

    block = Block


# fmt: off
WEIGHT_MAP: WeightMap = {
    **{key: target for key, target in qwen3.WEIGHT_MAP.items() if not key.endswith("input_layernorm")},
    "model.layers.{}.post_attention_layernorm":   Target("layers.{}.post_attention_norm"),
    "model.layers.{}.post_feedforward_layernorm": Target("layers.{}.post_mlp_norm"),
}
# fmt: on
