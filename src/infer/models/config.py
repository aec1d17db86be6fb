"""The shape of a network, independent of the file format.

Each family's `read_config` turns the keys of a `config.json` (or of a GGUF header, translated to the
same keys) into one `ModelConfig`. Everything downstream reads only this: models build themselves
from it, the loader sizes tensors from it, the memory plan computes bytes from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infer.errors import CheckpointError
from infer.layers.facts import DeltaConfig as DeltaConfig
from infer.layers.facts import ExpertConfig as ExpertConfig
from infer.layers.facts import RopeScaling as RopeScaling

HEADLESS = ("ForSequenceClassification", "Model")  # name endings of architectures without an LM head


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """The facts of one layer, in a model whose layers differ in size (Gemma 4)."""

    num_kv_heads: int
    head_dim: int
    mlp_size: int
    kv_layer: int  # the layer whose cached keys and values this one reads: itself or an earlier one
    has_values: bool = True  # False: no value matrix; the keys before their norm are the values


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The facts of one decoder-only transformer. Sizes in elements, `context_len` in tokens."""

    family: str  # the registry's name, or the model_type if transformers' code computes it
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int  # the largest number, where layers differ
    head_dim: int  # the largest size, where layers differ
    context_len: int
    norm_eps: float
    activation: str  # "silu", "gelu_tanh" or "gelu"
    tie_embeddings: bool

    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rotary_dim: int | None = None  # channels of a head that rotate, counted from the first; None: all
    pairs_neighbours: bool = False  # GLM-4: files pair channels 2 i and 2 i + 1, not i and i + half
    qkv_bias: bool = False  # Qwen 2.5
    attention_out_bias: bool = False  # Llama's `attention_bias` adds one to the output projection too
    mlp_bias: bool = False
    gated_mlp: bool = True  # False (GPT-2): only up and down
    qk_norm: bool = False  # Qwen 3: normalise each head before rotating it
    projection_norm: bool = False  # OLMo: normalise all queries of a token at once, and all keys
    clip_qkv: float | None = None  # OLMoE: queries, keys and values are clamped to ± this
    layer_windows: tuple[int | None, ...] = ()  # tokens; None: no window; (): no windows

    norm_offset: float = 0.0  # Gemma, Qwen 3.5: 1, because norm weights are stored centred on zero
    embedding_scale: float | None = None  # Granite, Gemma: factor on embeddings
    residual_scale: float = 1.0  # Granite: factor on what attention and MLP add to the stream
    logit_scale: float = 1.0  # Granite: factor on logits
    query_scale: float | None = None  # factor on attention scores; None: head_dim ** -0.5
    attention_softcap: float | None = None  # Gemma 2: cap c of scores: s becomes c tanh(s / c)
    attention_sinks: bool = False  # gpt-oss: each query head has a score that belongs to no position
    logit_softcap: float | None = None  # Gemma 2: the same cap for logits
    learned_positions: bool = False  # GPT-2: a stored vector per position, instead of rotary tables
    local_rope_theta: float | None = None  # Gemma 3, OLMo 3: the RoPE base of layers with a window, unscaled
    # Ministral 3: a query at p is multiplied by 1 + query_growth ln(1 + floor(p / trained context))
    query_growth: float = 0.0
    still_layers: tuple[int, ...] = ()  # SmolLM3: layers that do not rotate their heads

    experts: ExpertConfig | None = None  # Mixtral, Qwen 2 MoE, Qwen 3 MoE

    delta: DeltaConfig | None = None  # Qwen 3 Next and Qwen 3.5

    layer_specs: tuple[LayerSpec, ...] = ()  # Gemma 4: sizes of each layer; (): all layers are alike
    layer_input_size: int = 0  # Gemma 4: width of each layer's slice of a second embedding; 0: none

    impl: str = "infer"  # the package whose code runs the network: "infer" or "transformers"
    has_head: bool = True  # False: an embedding model or a classifier, which generates no tokens

    eos_ids: tuple[int, ...] = ()

    def window(self, layer: int) -> int | None:
        """The sliding window of one layer in tokens, or None if the layer has none."""
        return self.layer_windows[layer] if self.layer_windows else None

    @property
    def kv_heads(self) -> tuple[tuple[int, int], ...]:
        """The number and the size of the kv heads of each layer; (): all layers are alike."""
        return tuple((spec.num_kv_heads, spec.head_dim) for spec in self.layer_specs)

    def has_state(self, layer: int) -> bool:
        """True if a layer has a state in place of keys and values."""
        return self.delta is not None and layer in self.delta.layers

    def experts_of(self, layer: int) -> ExpertConfig | None:
        """The experts of one layer, or None where it has a plain MLP."""
        if self.experts is None or layer in self.experts.dense_layers:
            return None
        return self.experts

    def mlp_size(self, layer: int) -> int:
        """The intermediate size of one layer for one token, summed over the experts it is sent to."""
        experts = self.experts_of(layer)
        if experts is None:
            return self.layer_specs[layer].mlp_size if self.layer_specs else self.intermediate_size
        return experts.num_choices * experts.size + experts.shared_size

    def layer_weights(self, layer: int) -> int:
        """The number of weights of one layer that one token uses: of the experts, only those it is sent to.

        Only matrices are counted; norms, biases and routers are too small to matter.
        """
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        if self.layer_specs:
            spec = self.layer_specs[layer]
            num_kept = spec.num_kv_heads * (1 + spec.has_values) if spec.kv_layer == layer else 0
            attention = (2 * self.num_heads + num_kept) * spec.head_dim + 2 * self.layer_input_size
        if self.delta is not None:  # a state has q, k, v, gate, b, a and output; attention has a gate, too
            gated = self.delta.num_channels + 2 * self.delta.num_value_heads * (self.delta.value_dim + 1)
            attention = gated if self.has_state(layer) else attention + self.num_heads * self.head_dim
        mlp = (3 if self.gated_mlp else 2) * self.mlp_size(layer)
        return self.hidden_size * (attention + mlp)

    @property
    def all_layer_weights(self) -> int:
        """The number of weights of all layers that one token uses."""
        return sum(map(self.layer_weights, range(self.num_layers)))

    @property
    def has_plain_scores(self) -> bool:
        """True if scores have no cap and no sinks, and all layers have the same head size.

        Some kernels support only this.
        """
        return self.attention_softcap is None and not self.attention_sinks and not self.layer_specs

    @property
    def pair_order(self) -> tuple[int, ...]:
        """The channels of a query or key head, as numbered in the file, in the order that kernels need.

        Kernels rotate channel i with channel i + H/2; pairs that do not rotate come last.
        """
        size = self.rotary_dim or self.head_dim
        step, half = (2, 1) if self.pairs_neighbours else (1, size // 2)
        firsts = [step * pair for pair in range(size // 2)]
        middle = (size + self.head_dim) // 2
        return (
            *firsts, *range(size, middle), *(first + half for first in firsts), *range(middle, self.head_dim),
        )  # fmt: skip

    @property
    def channel_order(self) -> tuple[int, ...] | None:
        """The order in which a file's channels are loaded (loader/row_order.py); None: unchanged.

        Hybrid models have gates between their query rows, so they reorder the products (models/qwen3_5.py).
        """
        is_kept = self.delta is not None or self.pair_order == tuple(range(self.head_dim))
        return None if is_kept else self.pair_order

    @property
    def scale(self) -> float:
        """The factor on attention scores."""
        return self.query_scale if self.query_scale is not None else self.head_dim**-0.5


def read_architectures(raw: Mapping[str, Any]) -> list[str]:
    """The names in a config's `architectures`."""
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list):
        raise CheckpointError(f"'architectures' in config.json must be a list, got {architectures!r}")
    return [str(name) for name in architectures]


def is_headless(raw: Mapping[str, Any]) -> bool:
    """True for an embedding model or a classifier, which has no LM head."""
    return any(x.endswith(HEADLESS) and not x.endswith("LMHeadModel") for x in read_architectures(raw))
