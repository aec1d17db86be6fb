"""Qwen 3.5: three layers of linear attention to one of full attention, both with a gate on their output.

             x ──► attention_norm ──► attention ──► (+) ──► mlp_norm ──► mlp ──► (+) ──►
              └──────────────────────────────────────┘ └───────────────────────────┘

    linear attention    a state in place of keys and values (layers/delta.py)
    full attention      Qwen 3's, but only a quarter of each head rotates; the query projection has a gate
                        after each head, and attention's output is multiplied by the gate's sigmoid
    norms               weights are stored centred on zero, except the one after linear attention

Kernels rotate pairs (i, i + H/2) of a whole head. Here pairs are (i, i + R/2) of its first R channels. So the
channels of queries and keys are reordered such that these become the kernels' pairs; all others rotate by 0:

    as stored    a0 a1 b0 b1 c0 c1 c2 c3        R = 4 of H = 8: a rotates with b, c does not rotate
    in order     a0 a1 c0 c1 b0 b1 c2 c3

Scores are sums over the channels of a head, so the order does not change them.

The multimodal rotation has several axes; text has the same position on all of them, so it rotates as usual.

Shapes:  T tokens of all sequences laid end to end, D hidden, N query heads, G kv heads, H head size,
R channels of a head that rotate, X = 2 N H + 2 G H.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from infer.errors import ConfigError
from infer.layers.attention import StepContext
from infer.layers.delta import DeltaAttention
from infer.layers.linear import Linear
from infer.layers.rotary import Rotary
from infer.models import llama, qwen3
from infer.models.config import DeltaConfig, ModelConfig
from infer.models.mixtral import Mixtral
from infer.models.raw_config import RawConfig
from infer.models.self_attention import SelfAttention
from infer.models.weight_map import Target, WeightMap, nested
from infer.quant.projection import PendingProduct
from infer.quant.residual import NormedInput, as_tensor

_DEFAULTS = {  # defaults of the reference, which published configs leave out
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}
_KINDS = ("linear_attention", "full_attention")


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config of a `Qwen3_5ForCausalLM`, or the text part of a `Qwen3_5ForConditionalGeneration`."""
    top = RawConfig(raw)
    text = top.section("text_config") if "text_config" in raw else top
    return llama.with_outer_config(read_hybrid_config(text, family="qwen3_5"), top)


def read_hybrid_config(text: RawConfig, *, family: str) -> ModelConfig:
    """Read the keys that the families of this block share."""
    keys = text.with_defaults(**_DEFAULTS)
    shared = llama.read_shared_config(keys.without("layer_types"), family=family, rotary_share=0.25)
    keys.refuse("attention_bias", "biases are not supported in this family")
    keys.expect_silu()
    delta = _read_delta(keys, shared.num_layers)
    return replace(shared, norm_offset=1.0, qk_norm=True, delta=delta)


def _read_delta(keys: RawConfig, num_layers: int) -> DeltaConfig:
    every = keys.size("full_attention_interval")
    kinds = keys.get("layer_types") or [_KINDS[(layer + 1) % every == 0] for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= set(_KINDS):
        raise ConfigError(
            f"'layer_types' in {keys.where} must name {num_layers} layers as {' or '.join(_KINDS)}, "
            f"got {kinds!r}"
        )
    num_keys, num_values = keys.size("linear_num_key_heads"), keys.size("linear_num_value_heads")
    if num_values % num_keys or num_values % 2:
        raise ConfigError(
            f"linear_num_value_heads {num_values} in {keys.where} must be even, and a multiple of "
            f"linear_num_key_heads {num_keys}"
        )
    num_taps = keys.size("linear_conv_kernel_dim")
    if num_taps != 4:
        raise ConfigError(f"linear_conv_kernel_dim in {keys.where} must be 4, got {num_taps}")
    return DeltaConfig(
        layers=frozenset(layer for layer, kind in enumerate(kinds) if kind == "linear_attention"),
        num_key_heads=num_keys,
        num_value_heads=num_values,
        key_dim=keys.size("linear_key_head_dim"),
        value_dim=keys.size("linear_value_head_dim"),
        num_taps=num_taps,
    )


class GatedAttention(SelfAttention):
    """Attention that rotates a part of each head and gates its output."""

    def __init__(self, config: ModelConfig, layer: int, rotary: Rotary) -> None:
        super().__init__(config, layer, rotary)
        N, G, H = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv = Linear(
            config.hidden_size, 2 * (N + G) * H, bias=False, parts={"q": 2 * N * H, "k": G * H, "v": G * H}
        )
        turned = config.pair_order
        first_k = 2 * N * H
        q = [2 * H * head + place for head in range(N) for place in turned]
        k = [first_k + H * head + place for head in range(G) for place in turned]
        v = list(range(first_k + G * H, first_k + 2 * G * H))
        gate = [2 * H * head + H + place for head in range(N) for place in range(H)]
        self.qkv_order: torch.Tensor
        self.gate_order: torch.Tensor
        self.turned_order: torch.Tensor
        orders = {"qkv": q + k + v, "gate": gate, "turned": turned}
        for name, order in orders.items():
            self.register_buffer(f"{name}_order", torch.tensor(order), persistent=False)

    def forward(self, x_TD: torch.Tensor | NormedInput, step: StepContext) -> torch.Tensor | PendingProduct:
        """Let each token look at its sequence up to itself; returns [T, D]."""
        y_TX = as_tensor(self.qkv(x_TD))
        assert self.q_norm is not None and self.k_norm is not None
        norms = self.q_norm.weight[self.turned_order], self.k_norm.weight[self.turned_order]
        gate_TX = y_TX.index_select(-1, self.gate_order)
        seen_TNH = self.attend(y_TX.index_select(-1, self.qkv_order), norms, step)
        y_TD: torch.Tensor | PendingProduct = self.out(seen_TNH.flatten(-2) * step.needed(gate_TX).sigmoid())
        return y_TD


class Qwen35(Mixtral):
    """A stack of blocks with linear and with full attention."""

    def make_attention(self, config: ModelConfig, layer: int, rotary: Rotary) -> nn.Module:
        """The attention of one layer, of either kind."""
        delta = config.delta
        if delta is None or layer not in delta.layers:
            return GatedAttention(config, layer, rotary)
        parts, order = self.delta_parts(delta)
        eps = config.norm_eps
        return DeltaAttention(config.hidden_size, layer, delta, eps=eps, parts=parts, order=order)

    @staticmethod
    def delta_parts(delta: DeltaConfig) -> tuple[dict[str, int], list[int] | None]:
        """The rows of each input matrix of linear attention, and the order of all rows; None: unchanged."""
        num_values = delta.num_value_heads
        sizes = delta.num_channels, num_values * delta.value_dim, num_values, num_values
        return dict(zip(("qkv", "z", "b", "a"), sizes, strict=True)), None


# fmt: off
LAYER_MAP: WeightMap = {
    **qwen3.WEIGHT_MAP,
    "layers.{}.linear_attn.conv1d":              Target("layers.{}.attention.conv"),
    "layers.{}.linear_attn.A_log":               Target("layers.{}.attention.decay"),
    "layers.{}.linear_attn.dt_bias":             Target("layers.{}.attention.dt_bias"),
    "layers.{}.linear_attn.norm":                Target("layers.{}.attention.norm"),
    "layers.{}.linear_attn.out_proj":            Target("layers.{}.attention.output"),
}
TEXT_MAP: WeightMap = {
    **LAYER_MAP,
    "layers.{}.linear_attn.in_proj_qkv":         Target("layers.{}.attention.projected", part="qkv"),
    "layers.{}.linear_attn.in_proj_z":           Target("layers.{}.attention.projected", part="z"),
    "layers.{}.linear_attn.in_proj_b":           Target("layers.{}.attention.projected", part="b"),
    "layers.{}.linear_attn.in_proj_a":           Target("layers.{}.attention.projected", part="a"),
}
# fmt: on


def with_prefixes(names: WeightMap) -> WeightMap:
    """The weight map of a checkpoint whose text part has these names, with or without a vision part."""
    prefixes, drafting = ("model", "model.language_model"), "mtp.*"
    return nested(names, prefixes, ignored=("model.visual.*", drafting))


WEIGHT_MAP = with_prefixes(TEXT_MAP)
