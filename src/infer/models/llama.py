"""Llama 3, and the block that Mistral, Qwen 2.5 and Qwen 3 share with it.

             x ──► attention_norm ──► attention ──► (+) ──► mlp_norm ──► mlp ──► (+) ──►
              └──────────────────────────────────────┘ └───────────────────────────┘

The family agrees on pre-norm, RMSNorm, rotary positions, grouped-query attention, gated MLP.
Its members differ in three facts of ModelConfig, each read exactly once, in self_attention.py:

    qkv_bias         Qwen 2.5
    qk_norm          Qwen 3      (normalise each head before rotating it)
    layer_windows    Mistral 7B v0.1

(`attention_out_bias` and `mlp_bias` are options of Llama's own config that few checkpoints use.)
A family with another MLP or attention overrides `make_mlp` (mixtral.py) or `make_attention` (qwen3_5.py). A
family that combines the two in another way overrides `block` (granite.py, olmo2.py, gemma3.py).

x is the residual stream, an object that layers add to. The projections fuse the norms and additions next to
them (quant/residual.py).

Shapes:  T tokens of all sequences laid end to end, D hidden, N query heads, G kv heads, H head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from infer.errors import ConfigError
from infer.layers.attention import StepContext
from infer.layers.mlp import GatedMLP
from infer.layers.moe import MixtureOfExperts
from infer.layers.rotary import Rotary
from infer.models.config import ModelConfig
from infer.models.model import Model, layer_rotaries, norm_of
from infer.models.raw_config import (
    MAX_LAYERS,
    RawConfig,
    read_head_dim,
    read_heads,
    read_rope,
    read_rotary_dim,
    read_two_ropes,
    read_windows,
)
from infer.models.self_attention import SelfAttention
from infer.models.weight_map import IGNORED, Target, WeightMap
from infer.quant.residual import ResidualStream


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config of a `LlamaForCausalLM`."""
    keys = RawConfig(raw)
    mlp_bias = keys.flag("mlp_bias", default=False)
    return replace(read_shared_config(keys, family="llama", attention_bias=False), mlp_bias=mlp_bias)


def read_shared_config(
    raw: RawConfig,
    *,
    family: str,
    default_head_dim: int | None = None,
    window: int | None = None,
    slides: Callable[[int], bool] | None = None,
    rotary_share: float | None = None,
    attention_bias: bool | None = None,
) -> ModelConfig:
    """Read the keys that the families of this block share.

    `window` applies to all layers, or to the layers that `slides` selects; the config's `layer_types` win.
    `rotary_share` is the default share of a head that rotates; None: the family rotates whole heads.
    `attention_bias` is the default of the key that gives all attention matrices a bias; None: no such key.
    """
    if raw.get("per_layer_config"):
        raise ConfigError(f"'per_layer_config' in {raw.where}: layers that differ are not supported here")
    hidden_size, vocab_size = raw.size("hidden_size"), raw.size("vocab_size")
    num_layers = raw.size("num_hidden_layers", at_most=MAX_LAYERS)
    num_heads, num_kv_heads = read_heads(raw)
    context_len = raw.size("max_position_embeddings")
    head_dim = read_head_dim(raw, hidden_size, num_heads, default_head_dim)
    rotary_dim = read_rotary_dim(raw, head_dim, default=rotary_share)
    rope_theta, rope_scaling = read_rope(raw, context_len, rotary_dim)
    has_bias = attention_bias is not None and raw.flag("attention_bias", default=attention_bias)
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=raw.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        context_len=context_len if rope_scaling is None else rope_scaling.stretched(context_len),
        norm_eps=raw.number("rms_norm_eps", default=1e-6),
        activation=raw.activation("hidden_act", default="silu"),
        tie_embeddings=raw.flag("tie_word_embeddings", default=False),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        rotary_dim=None if rotary_dim == head_dim else rotary_dim,
        qkv_bias=has_bias,
        attention_out_bias=has_bias,
        layer_windows=read_windows(raw, num_layers, window, slides or (lambda layer: window is not None)),
        eos_ids=raw.token_ids("eos_token_id", vocab_size),
    )


def with_two_ropes(shared: ModelConfig, raw: RawConfig, *, theta: float, local_theta: float) -> ModelConfig:
    """Give windowed layers their own RoPE base; `theta` and `local_theta` are the defaults of both bases."""
    context_len = raw.size("max_position_embeddings")
    theta, local_theta, scaling = read_two_ropes(
        raw, context_len, shared.head_dim, theta=theta, local_theta=local_theta
    )
    return replace(
        shared,
        context_len=context_len if scaling is None else scaling.stretched(context_len),
        rope_theta=theta,
        rope_scaling=scaling,
        local_rope_theta=local_theta,
    )


def with_outer_config(text: ModelConfig, top: RawConfig) -> ModelConfig:
    """Complete the config of a text model from the multimodal config around it."""
    return replace(
        text,
        tie_embeddings=top.flag("tie_word_embeddings", default=text.tie_embeddings),
        eos_ids=tuple(dict.fromkeys(text.eos_ids + top.token_ids("eos_token_id", text.vocab_size))),
    )


class Block(nn.Module):
    """Attention, then the MLP, each after a norm and each added to the residual stream."""

    def __init__(self, config: ModelConfig, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm = norm_of(config)
        self.attention = attention
        self.mlp_norm = norm_of(config)
        self.mlp = mlp

    def forward(self, stream: ResidualStream, step: StepContext) -> None:
        """Add attention's output to the stream, then the MLP's."""
        stream.add(self.attention(self.attention_norm(stream), step))
        stream.add(self.mlp(self.mlp_norm(stream)))


class Llama(Model):
    """A stack of blocks."""

    block: Callable[[ModelConfig, nn.Module, nn.Module], nn.Module] = Block

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(
            self.block(config, self.make_attention(config, layer, rotary), self.make_mlp(config, layer))
            for layer, rotary in enumerate(layer_rotaries(config))
        )
        self.norm = norm_of(config)

    def make_attention(self, config: ModelConfig, layer: int, rotary: Rotary) -> nn.Module:
        """The attention of one layer."""
        return SelfAttention(config, layer, rotary)

    @staticmethod
    def make_mlp(config: ModelConfig, layer: int) -> GatedMLP | MixtureOfExperts:
        """The MLP of one layer."""
        return GatedMLP(
            config.hidden_size, config.intermediate_size, activation=config.activation, bias=config.mlp_bias
        )


# fmt: off
WEIGHT_MAP: WeightMap = {
    "model.embed_tokens":                         Target("embedding"),
    "model.layers.{}.input_layernorm":            Target("layers.{}.attention_norm"),
    "model.layers.{}.self_attn.q_proj":           Target("layers.{}.attention.qkv", part="q"),
    "model.layers.{}.self_attn.k_proj":           Target("layers.{}.attention.qkv", part="k"),
    "model.layers.{}.self_attn.v_proj":           Target("layers.{}.attention.qkv", part="v"),
    "model.layers.{}.self_attn.o_proj":           Target("layers.{}.attention.out"),
    "model.layers.{}.self_attn.rotary_emb":       IGNORED,  # frequencies: we compute our own
    "model.layers.{}.post_attention_layernorm":   Target("layers.{}.mlp_norm"),
    "model.layers.{}.mlp.gate_proj":              Target("layers.{}.mlp.gate_up", part="gate"),
    "model.layers.{}.mlp.up_proj":                Target("layers.{}.mlp.gate_up", part="up"),
    "model.layers.{}.mlp.down_proj":              Target("layers.{}.mlp.down"),
    "model.norm":                                 Target("norm"),
    "model.rotary_emb":                           IGNORED,
    "lm_head":                                    Target("head"),
    "score":                                      IGNORED,  # a classifier's head: loader/score_head.py
}
# fmt: on
