"""An EAGLE-3 head: one layer that guesses a target model's next tokens from the target's hidden states.

    states of three layers, side by side ──► fc ──► g ─┐ (drafts: the y of the row before)
                                                       ├──► block ──► y ──► norm ──► head ──► draft tokens
    embedding of the *next* token ─────────────────────┘

The row at position t reads the target's states at t and token t + 1, which is known by then, and guesses
token t + 2. The row after it continues the chain: it reads y in place of g, and the guessed token.

The block is Llama's, with an input of twice the width: the norm of the embedding, then the norm of g. The
residual is g, or with `norm_before_residual` its norm. Other differences between published heads:

    norm_before_fc    one norm over the states of all layers, before `fc`
    fc_norm           one norm for each captured layer
    norm_output       the next row reads y after the last norm
    draft_vocab_size  tokens that can be guessed; `token_ids` has their ids in the target's vocabulary

A head without its own embedding or LM head shares the target's (`share`).

Shapes:  T rows, S of them whose guess is needed, C captured layers, D hidden size, F width of the target's
states, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from infer.errors import CheckpointError, ConfigError
from infer.kernels.elementwise.rms_norm import rms_norm
from infer.layers.attention import LastLayerStep, StepContext
from infer.layers.embedding import Embedding
from infer.layers.linear import Linear
from infer.layers.mlp import GatedMLP
from infer.layers.norm import RMSNorm
from infer.layers.rotary import Rotary
from infer.models import llama, qwen3
from infer.models.config import ModelConfig
from infer.models.model import Model, make_rotary
from infer.models.raw_config import MAX_LAYERS, RawConfig
from infer.models.self_attention import SelfAttention
from infer.models.weight_map import Target, WeightMap
from infer.quant.residual import ResidualStream, as_tensor

Q_NORMS = ("midlayer.self_attn.q_norm.weight", "layers.0.self_attn.q_norm.weight")  # blocks of Qwen 3


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """The facts of one head; its `block` has one layer, and the vocabulary of the target."""

    block: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    captured_layers: tuple[int, ...]  # layers of the target whose input is read, in the order `fc` has them
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    has_embedding: bool  # True: the head has its own embedding
    has_head: bool

    @property
    def states_width(self) -> int:
        """The width of the states of all captured layers, side by side."""
        return len(self.captured_layers) * self.target_hidden_size


def default_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers whose input published heads read: low, middle, high."""
    return 2, num_layers // 2, num_layers - 3


def read_config(raw: Mapping[str, Any], tensors: Collection[str], target: ModelConfig) -> EagleConfig:
    """Read the config of a head, in the layout of the reference or of the `speculators` library.

    The names of its `tensors` tell whether it has an embedding and QK-norms, which the config does not.
    """
    top = RawConfig(raw)
    is_nested = raw.get("transformer_layer_config") is not None
    layer = top.section("transformer_layer_config") if is_nested else top
    if layer.size("num_hidden_layers", default=1, at_most=MAX_LAYERS) != 1:
        raise ConfigError(
            f"num_hidden_layers in {layer.where} must be 1: heads with more layers are not supported"
        )
    block = llama.read_config({"num_hidden_layers": 1, **layer.raw, "tie_word_embeddings": False})
    if block.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"this head was made for a vocabulary of {block.vocab_size} tokens, the model has "
            f"{target.vocab_size}; use the head that was trained for this model"
        )
    width = top.size("target_hidden_size", default=block.hidden_size)
    if width != target.hidden_size:
        raise CheckpointError(
            f"this head reads states of width {width}, the model has {target.hidden_size}; "
            "use the head that was trained for this model"
        )
    config = EagleConfig(
        block=replace(block, family="eagle3", qk_norm=any(name in tensors for name in Q_NORMS)),
        draft_vocab_size=top.size("draft_vocab_size", default=block.vocab_size, at_most=block.vocab_size),
        target_hidden_size=width,
        captured_layers=_read_layers(top, target.num_layers),
        # default of nested configs: as in the engine that they are published for
        norm_before_residual=top.flag("norm_before_residual", default=is_nested),
        norm_before_fc=top.flag("norm_before_fc", default=False),
        fc_norm=top.flag("fc_norm", default=False),
        norm_output=top.flag("norm_output", default=False),
        has_embedding="embed_tokens.weight" in tensors,
        has_head="lm_head.weight" in tensors or top.get("draft_vocab_size") not in (None, block.vocab_size),
    )
    if config.has_embedding and not config.has_head and top.flag("tie_word_embeddings", default=False):
        raise ConfigError("tie_word_embeddings is not supported in a head that has its own embed_tokens")
    if not config.has_embedding and block.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"this head has no embed_tokens, and its hidden size {block.hidden_size} is not the model's, "
            f"{target.hidden_size}, so it cannot share the model's embedding"
        )
    return config


def _read_layers(raw: RawConfig, num_layers: int) -> tuple[int, ...]:
    """The layers whose input is read; SGLang's `eagle_config` instead lists the layers before them."""
    name, nested = "eagle_aux_hidden_state_layer_ids", raw.section("eagle_config")
    outputs = nested.get(name)
    ids = raw.get(name) or outputs or list(default_layers(num_layers))
    shift = 1 if raw.get(name) is None and outputs is not None else 0
    if not isinstance(ids, list) or not all(type(number) is int for number in ids):
        raise CheckpointError(f"{name!r} in {raw.where} must be a list of layers, got {ids!r:.100}")
    layers = tuple(number + shift for number in ids)
    if not all(0 <= number < num_layers for number in layers):
        raise ConfigError(
            f"this head reads the inputs of layers {layers!r:.100}, the model has 0..{num_layers - 1}"
        )
    return layers


class EagleBlock(nn.Module):
    """Llama's block, whose input is the next token's embedding and the state, side by side."""

    def __init__(self, config: EagleConfig, rotary: Rotary) -> None:
        super().__init__()
        block, eps = config.block, config.block.norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.embedding_norm = RMSNorm(block.hidden_size, eps=eps)
        self.state_norm = RMSNorm(block.hidden_size, eps=eps)
        self.attention = SelfAttention(block, 0, rotary, in_features=2 * block.hidden_size)
        self.mlp_norm = RMSNorm(block.hidden_size, eps=eps)
        self.mlp = GatedMLP(
            block.hidden_size, block.intermediate_size, activation=block.activation, bias=block.mlp_bias
        )

    def forward(
        self, embedded_TD: torch.Tensor, states_TD: torch.Tensor, step: StepContext
    ) -> ResidualStream:
        """The residual stream after the block, of all rows or of the rows whose guess is needed."""
        stream = self.attend(embedded_TD, states_TD, step)
        stream.add(self.mlp(self.mlp_norm(stream)))
        return stream

    def attend(self, embedded_TD: torch.Tensor, states_TD: torch.Tensor, step: StepContext) -> ResidualStream:
        """The residual stream after the attention, which has cached the keys and values of all rows."""
        x_TX = self.inputs(embedded_TD, states_TD)
        normed_TD = x_TX[:, embedded_TD.shape[1] :]
        stream = ResidualStream(normed_TD.contiguous() if self.norm_before_residual else states_TD)
        if step.logit_indices is not None:
            step = LastLayerStep(step, stream, step.logit_indices)
        stream.add(self.attention(x_TX, step))
        return stream

    def inputs(self, embedded_TD: torch.Tensor, states_TD: torch.Tensor) -> torch.Tensor:
        """The norms of embeddings and states, side by side."""
        parts = (self.embedding_norm, embedded_TD), (self.state_norm, states_TD)
        x_TX = states_TD.new_empty((len(states_TD), 2 * states_TD.shape[1]))
        for (norm, part_TD), out_TD in zip(parts, x_TX.chunk(2, dim=-1), strict=True):
            rms_norm(part_TD, norm.weight, eps=norm.eps, offset=norm.offset, out=out_TD)
        return x_TX


class Guess(NamedTuple):
    """The output of a head for its rows."""

    hidden_SD: torch.Tensor  # states after the last norm, which `logits` reads
    states_SD: torch.Tensor  # state of the next row of the chain


class Eagle3(nn.Module):
    """One head, which has a KV store of one layer."""

    token_ids_W: torch.Tensor

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        block, width, num_states = config.block, config.target_hidden_size, len(config.captured_layers)
        size, eps = block.hidden_size, block.norm_eps
        self.embedding = Embedding(block.vocab_size, size) if config.has_embedding else None
        self.input_norm = RMSNorm(num_states * width, eps=eps) if config.norm_before_fc else None
        self.fc_norms = nn.ModuleList(RMSNorm(width, eps=eps) for _ in range(num_states * config.fc_norm))
        self.fc = Linear(num_states * width, size, bias=False)
        self.rotary = make_rotary(block, block.rope_theta, block.rope_scaling)
        self.layers = nn.ModuleList([EagleBlock(config, self.rotary)])  # a list: the binder wants one
        self.norm = RMSNorm(size, eps=eps)
        self.head = Linear(size, config.draft_vocab_size, bias=False) if config.has_head else None
        token_ids_W = torch.arange(config.draft_vocab_size)
        self.register_buffer("token_ids_W", token_ids_W, persistent=False)

    def share(self, target: Model) -> None:
        """Take from the target the parts that the head lacks."""
        self.embedding = self.embedding or target.embedding
        self.head = self.head or target.head

    def combine(self, states_TF: torch.Tensor) -> torch.Tensor:
        """Return g of each row, [T, D], from the states of the captured layers (`LayerInputs.states`)."""
        if self.input_norm is not None:
            states_TF = as_tensor(self.input_norm(states_TF))
        if self.fc_norms:
            parts = torch.split(states_TF, self.config.target_hidden_size, dim=-1)
            pairs = zip(self.fc_norms, parts, strict=True)
            states_TF = torch.cat([as_tensor(norm(part)) for norm, part in pairs], dim=-1)
        return as_tensor(self.fc(states_TF))

    def forward(self, next_tokens_T: torch.Tensor, states_TD: torch.Tensor, step: StepContext) -> Guess:
        """Run the rows at `step.positions`: each has a state and, in the target's ids, the token after it."""
        assert self.embedding is not None, "share has not been called"
        stream = self.layers[0](self.embedding(next_tokens_T), states_TD, step)
        hidden_SD = as_tensor(self.norm(stream))
        return Guess(hidden_SD, hidden_SD if self.config.norm_output else stream.settle())

    def remember(self, next_tokens_T: torch.Tensor, states_TD: torch.Tensor, step: StepContext) -> None:
        """Cache the keys and values of these rows without guessing."""
        assert self.embedding is not None, "share has not been called"
        block = self.layers[0]
        assert isinstance(block, EagleBlock)
        block.attention.look(block.inputs(self.embedding(next_tokens_T), states_TD), step)

    def logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Return [S, W]; column w is the token `token_ids_W[w]`."""
        assert self.head is not None, "share has not been called"
        return as_tensor(self.head(hidden_SD))


# fmt: off
_LAYER = "model.layers.{}."
_BLOCK: WeightMap = {
    **{key.removeprefix(_LAYER): replace(target, module=target.module.format(0))
       for key, target in qwen3.WEIGHT_MAP.items() if key.startswith(_LAYER)},
    "input_layernorm":            Target("layers.0.embedding_norm"),
    "hidden_norm":                Target("layers.0.state_norm"),
}
WEIGHT_MAP: WeightMap = {
    "embed_tokens":   Target("embedding"),
    "input_norm":     Target("input_norm"),
    "fc_norm.{}":     Target("fc_norms.{}"),
    "fc":             Target("fc"),
    **{f"midlayer.{name}": target for name, target in _BLOCK.items()},
    **{f"layers.{{}}.{name}": target for name, target in _BLOCK.items()},
    "norm":           Target("norm"),
    "lm_head":        Target("head"),
}
# fmt: on
