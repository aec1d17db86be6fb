"""Gemma 3, text only.

       x ──► attention_norm ──► attention ──► post_attention_norm ──► (+) ──► (same with the MLP) ──►
        └──────────────────────────────────────────────────────────────┘

Its differences from the Llama block:

    sandwich norms       each half is normalised before *and* after, and then added
    (1 + w) norms        weights are stored centred on zero: offset 1 in every norm
    scaled embedding     rows times sqrt(D), rounded to the dtype of the weights
    GeGLU                the gate's activation is GELU in its tanh form
    local and global     five layers with a sliding window, then one that sees everything; the RoPE base is
                         10 000 in local layers and 1 000 000 in global ones
    query scale          1 / sqrt(query_pre_attn_scalar), which need not be the head size

The text part of a `Gemma3ForConditionalGeneration` checkpoint is the same network under longer names;
its vision tower is not loaded.

Shapes:  T tokens of all sequences laid end to end, D hidden, N query heads, G kv heads, H head size.
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
from infer.models.raw_config import RawConfig, read_window
from infer.models.weight_map import Target, WeightMap, nested
from infer.quant.residual import ResidualStream

_DEFAULTS = {  # defaults of the reference, which published multimodal configs leave out
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config of a `Gemma3ForCausalLM`, or the text part of a `Gemma3ForConditionalGeneration`."""
    top = RawConfig(raw)
    text = top.section("text_config") if "text_config" in raw else top
    text.refuse("attn_logit_softcapping", "capped attention scores are not supported")
    text.refuse("final_logit_softcapping", "capped logits are not supported")
    text.refuse("use_bidirectional_attention", "only causal models can generate")
    keys = text.with_defaults(**_DEFAULTS)
    pattern = keys.size("sliding_window_pattern", "_sliding_window_pattern", default=6)
    shared = llama.read_shared_config(
        keys,
        family="gemma3",
        window=read_window(text),
        slides=lambda layer: (layer + 1) % pattern != 0,
        attention_bias=False,
    )
    local_theta = keys.number("rope_local_base_freq", default=10_000.0)
    both = llama.with_two_ropes(shared, keys, theta=1_000_000.0, local_theta=local_theta)
    return replace(
        llama.with_outer_config(both, top),
        norm_offset=1.0,
        activation=keys.activation("hidden_activation", default="gelu_pytorch_tanh"),
        embedding_scale=shared.hidden_size**0.5,
        qk_norm=True,
        query_scale=keys.number("query_pre_attn_scalar", default=256) ** -0.5,
    )


class Block(nn.Module):
    """Attention, then the MLP, each between two norms and each added to the residual stream."""

    def __init__(self, config: ModelConfig, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.attention = norm_of(config), attention
        self.post_attention_norm = norm_of(config)
        self.mlp_norm, self.mlp = norm_of(config), mlp
        self.post_mlp_norm = norm_of(config)

    def forward(self, stream: ResidualStream, step: StepContext) -> None:
        """Add attention's output to the stream, then the MLP's, each normalised once more."""
        stream.add(self.post_attention_norm(self.attention(self.attention_norm(stream), step)))
        stream.add(self.post_mlp_norm(self.mlp(self.mlp_norm(stream))))


class Sandwich(llama.Llama):
    """A stack of these blocks."""

    block = Block


# Names that differ from Qwen 3's: in Llama, `post_attention_layernorm` is the norm *before* the MLP.
SANDWICH_NORMS: WeightMap = {
    "model.layers.{}.post_attention_layernorm": Target("layers.{}.post_attention_norm"),
    "model.layers.{}.pre_feedforward_layernorm": Target("layers.{}.mlp_norm"),
    "model.layers.{}.post_feedforward_layernorm": Target("layers.{}.post_mlp_norm"),
}
TEXT_MAP: WeightMap = {**qwen3.WEIGHT_MAP, **SANDWICH_NORMS}
_VISION = ("vision_tower.*", "multi_modal_projector.*")
WEIGHT_MAP = nested(
    TEXT_MAP,
    ("model", "language_model.model", "model.language_model"),  # text-only, multimodal
    heads=("lm_head", "language_model.lm_head"),
    ignored=(*_VISION, *(f"model.{name}" for name in _VISION)),
)
