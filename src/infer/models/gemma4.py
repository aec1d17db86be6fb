"""Gemma 4, text only: Gemma 3's block, in layers of two sizes, some of which share keys and values.

    plain norms         weights are used as they are stored; each half has a norm before and after
    local and global    heads have the size `head_dim` in layers with a window, else `global_head_dim`; global
                        layers may have fewer kv heads, and rotate the first quarter of each head's pairs
    norms of heads      queries and keys with a weight, values without one; scores are not scaled
    values from keys    global layers may have no value matrix: the keys before their norm are the values
    shared keys         the last layers compute no keys and values; they read the cache of the last layer of
                        their kind that does (`LayerSpec.kv_layer`)
    inputs of layers    a second embedding holds a small vector for each layer, which is added to a projection
                        of the first embedding; each layer gates its vector and adds the result to the stream
    experts             next to the plain MLP: both read the stream, each with its own norms
    layer scalar        the stream is multiplied by one stored number after each layer

The text part of a `Gemma4ForConditionalGeneration` checkpoint is the same network under longer names; images
and sound are not read.

Shapes:  T tokens of all sequences laid end to end, D hidden, N query heads, G kv heads, H head size,
L layers, P numbers of a token's input to one layer, X rows of the fused projection.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from infer.errors import CheckpointError, ConfigError
from infer.kernels.elementwise.gated_activation import activate
from infer.kernels.elementwise.rms_norm import rms_norm
from infer.layers.attention import StepContext
from infer.layers.embedding import Embedding
from infer.layers.linear import Linear, Weights
from infer.layers.mlp import GatedMLP
from infer.layers.moe import MixtureOfExperts
from infer.layers.norm import RMSNorm
from infer.layers.rotary import Rotary
from infer.models import gemma3, llama
from infer.models.config import ExpertConfig, LayerSpec, ModelConfig, RopeScaling
from infer.models.mixtral import MAX_EXPERTS
from infer.models.model import Model, layer_rotaries
from infer.models.raw_config import MAX_HEAD_DIM, RawConfig, read_rope_scaling
from infer.models.self_attention import SelfAttention
from infer.models.weight_map import Target, WeightMap, nested
from infer.quant.projection import PendingProduct
from infer.quant.residual import NormedInput, ResidualStream, as_tensor

_DEFAULTS = {  # defaults of the reference, which published configs leave out
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}
_ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

Tensor = TypeVar("Tensor")


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config of a `Gemma4ForCausalLM`, or the text part of a `Gemma4ForConditionalGeneration`."""
    top = RawConfig(raw)
    text = top.section("text_config") if "text_config" in raw else top
    if text.get("use_bidirectional_attention") == "all":
        raise ConfigError(
            f"use_bidirectional_attention in {text.where} is 'all': only causal models generate"
        )
    keys = text.with_defaults(**_DEFAULTS)
    types = keys.get("layer_types")
    if isinstance(types, list) and types:  # the reference never gives the last layer a window
        keys = RawConfig({**keys.raw, "layer_types": [*types[:-1], "full_attention"]}, keys.where)
    num_layers = keys.size("num_hidden_layers")
    shared = llama.read_shared_config(
        keys.without("rope_parameters", "partial_rotary_factor", "per_layer_config"),
        family="gemma4",
        window=keys.size("sliding_window"),
        slides=lambda layer: (layer + 1) % 6 != 0 and layer + 1 != num_layers,
        attention_bias=False,
    )
    specs = _read_specs(keys, shared)
    theta, local_theta, scaling = _read_ropes(keys, shared, specs)
    input_size = 0
    if keys.get("hidden_size_per_layer_input") != 0:
        input_size = keys.size("hidden_size_per_layer_input", default=256)
    if input_size and (rows := keys.size("vocab_size_per_layer_input", default=262_144)) != shared.vocab_size:
        raise ConfigError(
            f"'vocab_size_per_layer_input' in {keys.where} is {rows} and the vocabulary has "
            f"{shared.vocab_size} tokens; only equal sizes are supported"
        )
    return replace(
        llama.with_outer_config(shared, top),
        activation=keys.activation("hidden_activation", default="gelu_pytorch_tanh"),
        embedding_scale=shared.hidden_size**0.5,
        num_kv_heads=max(spec.num_kv_heads for spec in specs),
        head_dim=max(spec.head_dim for spec in specs),
        rope_theta=theta,
        rope_scaling=scaling,
        local_rope_theta=local_theta,
        qk_norm=True,
        query_scale=1.0,
        logit_softcap=None
        if keys.get("final_logit_softcapping") is None
        else keys.number("final_logit_softcapping"),
        experts=_read_experts(keys, shared.intermediate_size),
        layer_specs=specs,
        layer_input_size=input_size,
    )


def _read_specs(keys: RawConfig, shared: ModelConfig) -> tuple[LayerSpec, ...]:
    """The sizes of each layer; `shared` has the sizes of layers with a window."""
    num_layers, num_shared = shared.num_layers, 0
    if keys.get("num_kv_shared_layers") not in (None, 0):
        num_shared = keys.size("num_kv_shared_layers", at_most=num_layers - 1)
    values_are_keys = keys.flag("attention_k_eq_v", default=False)
    is_wide = keys.flag("use_double_wide_mlp", default=False)
    overrides = _read_overrides(keys, num_layers)
    global_heads = keys.get("num_global_key_value_heads") if values_are_keys else None
    found, sizes = list[LayerSpec](), list[tuple[int, int]]()
    owners: dict[bool, int] = {}  # the last layer of each kind that has keys and values
    for layer in range(num_layers):
        is_global, is_shared = shared.window(layer) is None, layer >= num_layers - num_shared
        size = {"head_dim": shared.head_dim, "num_key_value_heads": shared.num_kv_heads}
        if is_global and overrides is None:
            size["head_dim"] = keys.get("global_head_dim")
            size["num_key_value_heads"] = global_heads or shared.num_kv_heads
        own = RawConfig({**size, **(overrides or {}).get(layer, {})}, f"layer {layer} of {keys.where}")
        num_kv_heads = own.size("num_key_value_heads")
        head_dim = own.size("head_dim", at_most=MAX_HEAD_DIM)
        if shared.num_heads % num_kv_heads or head_dim % 2:
            raise CheckpointError(
                f"{own.where} has {num_kv_heads} kv heads of {head_dim} for {shared.num_heads} query heads; "
                "kv heads must divide query heads, and the head size must be even"
            )
        if not is_shared:
            owners[is_global] = layer
        source = owners.get(is_global)
        if source is None or (source < layer and sizes[source] != (num_kv_heads, head_dim)):
            raise CheckpointError(
                f"{own.where} shares keys and values, but no earlier layer of its kind has any"
            )
        sizes.append((num_kv_heads, head_dim))
        found.append(
            LayerSpec(
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                mlp_size=shared.intermediate_size * (2 if is_wide and is_shared else 1),
                kv_layer=source,
                has_values=not (values_are_keys and is_global),
            )
        )
    return tuple(found)


def _read_overrides(keys: RawConfig, num_layers: int) -> dict[int, Mapping[str, Any]] | None:
    """The sizes that newer files give by layer ("05"); None: the file has `global_head_dim` instead."""
    if keys.get("per_layer_config") is None:
        return None
    section = keys.section("per_layer_config")
    found: dict[int, Mapping[str, Any]] = {}
    for name in section.raw:
        if not (name.isascii() and name.isdigit() and len(name) < 5 and int(name) < num_layers):
            raise CheckpointError(f"{section.where} must name layers 0 to {num_layers - 1}, got {name!r}")
        found[int(name)] = section.section(name).raw
        if others := set(found[int(name)]) - {"head_dim", "num_key_value_heads"}:
            raise ConfigError(f"{min(others)!r} of layer {name} in {section.where} is not supported")
    return found


def _read_ropes(
    keys: RawConfig, shared: ModelConfig, specs: tuple[LayerSpec, ...]
) -> tuple[float, float, RopeScaling | None]:
    """Base of global layers, base of layers with a window, and the scaling of the former."""
    both = keys.section("rope_parameters") if keys.get("rope_parameters") else RawConfig(_ROPES)
    of_global, of_local = both.section("full_attention"), both.section("sliding_attention")
    head_dim = next(s.head_dim for n, s in enumerate(specs) if shared.window(n) is None)
    scaling: RopeScaling | None
    if of_global.get("rope_type") == "proportional":
        share = min(of_global.number("partial_rotary_factor", default=1.0), 1.0)
        num_pairs = int(share * head_dim // 2)
        factor = of_global.number("factor", default=1.0)
        scaling = RopeScaling(kind="proportional", factor=factor, num_pairs=num_pairs)
    else:
        scaling = read_rope_scaling(of_global, shared.context_len, head_dim)
    if read_rope_scaling(of_local, shared.context_len, shared.head_dim) is not None:
        raise ConfigError(
            f"rope scaling in {of_local.where} is not supported: only global layers may have it"
        )
    thetas = of_global.number("rope_theta", default=1e6), of_local.number("rope_theta", default=1e4)
    if min(thetas) <= 1:
        raise CheckpointError(f"rope_theta in {both.where} must exceed 1, got {min(thetas)!r}")
    return *thetas, scaling


def _read_experts(keys: RawConfig, mlp_size: int) -> ExpertConfig | None:
    if not keys.flag("enable_moe_block", default=False):
        return None
    num_experts = keys.size("num_experts", at_most=MAX_EXPERTS)
    return ExpertConfig(
        num_experts=num_experts,
        num_choices=keys.size("top_k_experts", at_most=num_experts),
        size=keys.size("moe_intermediate_size"),
        normalized=True,
        shared_size=mlp_size,
    )


class LayeredStream(ResidualStream):
    """A residual stream together with the input vectors of all layers."""

    __slots__ = ("inputs_TLP",)

    def __init__(self, x_TD: torch.Tensor, inputs_TLP: torch.Tensor | None) -> None:
        super().__init__(x_TD)
        self.inputs_TLP = inputs_TLP

    def select(self, indices_S: torch.Tensor) -> None:
        """Keep the rows of some tokens, and their order."""
        super().select(indices_S)
        if self.inputs_TLP is not None:
            self.inputs_TLP = self.inputs_TLP.index_select(0, indices_S)


class Gemma4Attention(SelfAttention):
    """Attention that also normalises values; it may have no value matrix, or neither keys nor values."""

    def __init__(self, config: ModelConfig, layer: int, rotary: Rotary) -> None:
        spec = config.layer_specs[layer]
        config = replace(config, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim)
        super().__init__(config, layer, rotary)
        self.kv_rows, self.has_values = spec.num_kv_heads * spec.head_dim, spec.has_values
        parts = dict(self.qkv.parts)
        if spec.kv_layer != layer:
            self._layer = self._layer._replace(number=spec.kv_layer, is_shared=True)
            self.num_kv_heads, self.k_norm, parts = 0, None, {"q": parts["q"]}
        elif not spec.has_values:
            del parts["v"]
        self.qkv = Linear(config.hidden_size, sum(parts.values()), bias=config.qkv_bias, parts=parts)
        self.unit_H: torch.Tensor
        self.register_buffer("unit_H", torch.ones(spec.head_dim, dtype=torch.float32), persistent=False)

    def forward(self, x_TD: torch.Tensor | NormedInput, step: StepContext) -> torch.Tensor | PendingProduct:
        """Let each token look at its sequence up to itself; returns [T, D]."""
        qkv_TX = as_tensor(self.qkv(x_TD))
        assert self.q_norm is not None
        norm_weights = self.q_norm.weight, self.q_norm.weight
        if self.k_norm is not None:
            if not self.has_values:
                qkv_TX = torch.cat([qkv_TX, qkv_TX[:, -self.kv_rows :]], dim=-1)
            v_TGH = qkv_TX[:, -self.kv_rows :].view(len(qkv_TX), self.num_kv_heads, -1)
            rms_norm(v_TGH, self.unit_H, eps=self.eps, out=v_TGH)
            norm_weights = self.q_norm.weight, self.k_norm.weight
        y_TD: torch.Tensor | PendingProduct = self.out(self.attend(qkv_TX, norm_weights, step).flatten(-2))
        return y_TD


class Gemma4Block(nn.Module):
    """Attention, then the MLP and perhaps experts, then the layer's own input, each between two norms."""

    def __init__(self, config: ModelConfig, layer: int, rotary: Rotary) -> None:
        super().__init__()
        size, self.eps, self.number = config.hidden_size, config.norm_eps, layer
        self.activation, self.router_scale = config.activation, size**-0.5
        self.attention_norm = self._norm(size)
        self.attention = Gemma4Attention(config, layer, rotary)
        self.post_attention_norm = self._norm(size)
        self.mlp_norm = self._norm(size)
        mlp_size = config.layer_specs[layer].mlp_size
        self.mlp = GatedMLP(size, mlp_size, activation=config.activation, bias=False)
        self.experts: MixtureOfExperts | None = None
        if config.experts is not None:
            self.dense_out_norm, self.router_norm = self._norm(size), self._norm(size)
            self.expert_norm = self._norm(size)
            alone = replace(config.experts, shared_size=0)  # the plain MLP is not a shared expert
            self.experts = MixtureOfExperts(size, alone, activation=config.activation, scaled=True)
            self.expert_out_norm = self._norm(size)
        self.post_mlp_norm = self._norm(size)
        self.input_size = config.layer_input_size
        if self.input_size:
            self.input_gate = Linear(size, self.input_size, bias=False)
            self.input_out = Linear(self.input_size, size, bias=False)
            self.post_input_norm = self._norm(size)
        self.scalar = Weights(1)

    def _norm(self, size: int) -> RMSNorm:
        return RMSNorm(size, eps=self.eps)

    def forward(self, stream: LayeredStream, step: StepContext) -> None:
        """Add the outputs of attention, the MLP and the layer's input to the stream, then scale it."""
        stream.add(self.post_attention_norm(self.attention(self.attention_norm(stream), step)))
        y_TD = self.mlp(self.mlp_norm(stream))
        if self.experts is not None:
            x_TD = stream.settle()
            routed_by = self.router_norm(x_TD) * self.router_scale
            chosen_TD = self.experts(self.expert_norm(x_TD), routed_by)
            y_TD = self.dense_out_norm(y_TD) + self.expert_out_norm(chosen_TD)
        stream.add(self.post_mlp_norm(y_TD))
        if stream.inputs_TLP is not None:
            gate_TP = activate(as_tensor(self.input_gate(stream.settle())), self.activation)
            y_TD = as_tensor(self.input_out(gate_TP * stream.inputs_TLP[:, self.number]))
            stream.add(self.post_input_norm(y_TD))
        stream.residual_TD = stream.settle() * self.scalar.weight


class Gemma4(Model):
    """A stack of local and global blocks, with one rotary table for each kind."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.input_size = config.layer_input_size
        if self.input_size:
            width = config.num_layers * self.input_size
            self.input_embedding = Embedding(config.vocab_size, width, scale=self.input_size**0.5)
            self.input_projection = Linear(config.hidden_size, width, bias=False)
            self.input_norm = RMSNorm(self.input_size, eps=config.norm_eps)
        self.layers = nn.ModuleList(
            Gemma4Block(config, layer, rotary) for layer, rotary in enumerate(layer_rotaries(config))
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps)

    def embed(self, tokens_T: torch.Tensor, step: StepContext) -> ResidualStream:
        """The tokens' embeddings, together with the input vectors of all layers."""
        x_TD = super().embed(tokens_T, step).settle()
        if not self.input_size:
            return LayeredStream(x_TD, None)
        mixed_TX = as_tensor(self.input_projection(x_TD)) * self.config.hidden_size**-0.5
        shape = len(tokens_T), -1, self.input_size
        normed_TLP = as_tensor(self.input_norm(mixed_TX.view(shape)))
        own_TLP = self.input_embedding(tokens_T).view(shape)
        return LayeredStream(x_TD, (normed_TLP + own_TLP) * 2.0**-0.5)


def own_tensors(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The tensors of a checkpoint without the keys and values of layers that use another layer's."""
    unused = {str(n) for n, spec in enumerate(config.layer_specs) if spec.kv_layer != n}

    def is_used(name: str) -> bool:
        found = re.search(r"\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.", f".{name}")
        return found is None or found[1] not in unused

    return {name: tensor for name, tensor in tensors.items() if is_used(name)}


# fmt: off
_TEXT: WeightMap = {
    **gemma3.TEXT_MAP,
    "embed_tokens_per_layer":                     Target("input_embedding"),
    "per_layer_model_projection":                 Target("input_projection"),
    "per_layer_projection_norm":                  Target("input_norm"),
    "layers.{}.layer_scalar":                     Target("layers.{}.scalar"),
    "layers.{}.per_layer_input_gate":             Target("layers.{}.input_gate"),
    "layers.{}.per_layer_projection":             Target("layers.{}.input_out"),
    "layers.{}.post_per_layer_input_norm":        Target("layers.{}.post_input_norm"),
    "layers.{}.post_feedforward_layernorm_1":     Target("layers.{}.dense_out_norm"),
    "layers.{}.pre_feedforward_layernorm_2":      Target("layers.{}.expert_norm"),
    "layers.{}.post_feedforward_layernorm_2":     Target("layers.{}.expert_out_norm"),
    "layers.{}.router.scale":                     Target("layers.{}.router_norm"),
    "layers.{}.router.proj":                      Target("layers.{}.experts.router"),
    "layers.{}.router.per_expert_scale":          Target("layers.{}.experts.scale"),
    "layers.{}.experts.gate_up_proj":             Target("layers.{}.experts.gate_up"),
    "layers.{}.experts.gate_proj":                Target("layers.{}.experts.gate_up", part="gate"),
    "layers.{}.experts.up_proj":                  Target("layers.{}.experts.gate_up", part="up"),
    "layers.{}.experts.down_proj":                Target("layers.{}.experts.down"),
}
# fmt: on
_OTHERS = ("vision_tower.*", "audio_tower.*", "embed_vision.*", "embed_audio.*")
WEIGHT_MAP = nested(
    _TEXT, ("model", "model.language_model"), ignored=tuple(f"model.{name}" for name in _OTHERS)
)
