"""The base of every network here: token ids in, hidden states out, logits on demand.

    tokens_T ──► embedding ──► layer 0 ──► layer 1 ──► ... ──► norm ──► hidden_TD        forward
                                                                 hidden_SD ──► head ──► logits_SV

The head is separate because few tokens need it: a prompt of a thousand tokens needs one row of logits, and
with a large vocabulary the head is the most expensive matrix of the model.

A prompt does not need all of the last layer either: its last token needs the keys and values of the earlier
tokens, but nothing reads their output. A step lists the S of its T tokens that need logits
(`step.logit_indices`), and after the last attention only these rows remain:

    last layer      norm ──► qkv ──► attend ──► out ──► (+) ──► mlp ──► (+) ──► norm
                    T rows               └──► S rows

A model is single-device code for a ragged batch, without cache, padding or phases: `step.attend` hides the
keys and values of earlier tokens (layers/attention.py).

A layer takes the residual stream and adds to it (quant/residual.py). It declares its children in the order in
which they run, so the binder can tell which matrix reads the output of which (layers/bind.py).

A tied head *is* the embedding's parameter, not a copy of it.

The model itself handles LoRA adapters of the embedding and the head (`outer`), because its caller chooses the
rows that need logits: `forward` appends A x to each hidden state, and `logits` removes it.

Shapes:  T tokens of all sequences laid end to end, S rows that sample, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from functools import cache
from typing import Protocol, Self

import torch
from torch import nn

from infer.kernels.elementwise.embedding import scaled
from infer.kernels.runtime.communicator import Pipe
from infer.layers.adapted import OuterAdapters
from infer.layers.attention import LastLayerStep, StepContext
from infer.layers.embedding import Embedding
from infer.layers.linear import Linear
from infer.layers.norm import LayerNorm, RMSNorm
from infer.layers.rotary import Rotary, dynamic_theta, frequencies, query_factors, stretch
from infer.models.config import ModelConfig, RopeScaling
from infer.quant.residual import ResidualStream, as_tensor


class Network(Protocol):
    """The network that a step runs: a model, or a draft head (execution/head_model.py)."""

    config: ModelConfig

    def __call__(self, tokens_T: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Return the hidden states of all tokens, or of those whose logits are needed."""

    def logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Return [S, V]."""


class Model(nn.Module):
    """A decoder-only transformer; its parameters are uninitialised until a loader fills them."""

    layers: nn.ModuleList  # each takes the residual stream and the step, and adds to the stream
    pipe: Pipe | None = None  # links to the stages before and after; None: this rank has all layers
    norm: RMSNorm | LayerNorm

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, self.dtype = config, torch.get_default_dtype()
        self.embedding = Embedding(config.vocab_size, config.hidden_size, scale=config.embedding_scale)
        tied_weight = self.embedding.weight if config.tie_embeddings else None
        self.head = Linear(config.hidden_size, config.vocab_size, bias=False, tied_weight=tied_weight)
        self.outer: OuterAdapters | None = None  # adapters of embedding and head; None: no room is reserved

    def forward(self, tokens_T: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Return the hidden states after the final norm, for all tokens [T, D] or for some of them [S, D]."""
        stream, inputs = self.begin(tokens_T, step), step.layer_inputs
        last = len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            if inputs is not None:
                inputs.watch(number, stream)
            if number == last and step.logit_indices is not None:
                step = LastLayerStep(step, stream, step.logit_indices)
            layer(stream, step)
            if self.pipe is not None:  # reports progress to the watchdog
                self.pipe.tick()
        if self.pipe is None or self.pipe.stage == self.pipe.num_stages - 1:
            hidden = as_tensor(self.norm(stream))
            return hidden if self.outer is None else self.outer.extend(hidden)
        hidden_TD = stream.settle()
        self.pipe.pass_on(hidden_TD)
        return hidden_TD

    def begin(self, tokens_T: torch.Tensor, step: StepContext) -> ResidualStream:
        """The residual stream at the input of this rank's first layer."""
        if self.pipe is None or self.pipe.stage == 0:
            return self.embed(tokens_T, step)
        return ResidualStream(self.pipe.take(len(tokens_T), self.config.hidden_size, self.dtype))

    def embed(self, tokens_T: torch.Tensor, step: StepContext) -> ResidualStream:
        """The residual stream at the input of layer 0: the tokens' embeddings."""
        x_TD = self.embedding(tokens_T)
        if self.outer is not None:
            x_TD = self.outer.add_embedded(x_TD, tokens_T, self.embedding.factor)
        return ResidualStream(x_TD)

    def with_layers(self, numbers: Iterable[int]) -> Self:
        """A view of this model with some of its layers; the weights are shared."""
        view = copy(self)
        view._modules = dict(self._modules)
        view.layers = nn.ModuleList(self.layers[number] for number in numbers)
        return view

    def logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Return [S, V], the logits of some rows of `forward`'s result."""
        if hidden_SD.shape[1] == self.config.hidden_size:
            logits_SV = as_tensor(self.head(hidden_SD))
        else:
            assert self.outer is not None
            hidden_SD, h_SC = self.outer.split(hidden_SD)
            logits_SV = self.outer.add_logits(as_tensor(self.head(hidden_SD)), h_SC)
        cap, factor = self.config.logit_softcap, self.config.logit_scale
        if cap is not None:
            return (cap * torch.tanh(logits_SV.float() / cap)).to(logits_SV.dtype)
        return logits_SV if factor == 1.0 else scaled(logits_SV, factor)


def norm_of(config: ModelConfig) -> RMSNorm:
    """Make a norm of the residual stream."""
    return RMSNorm(config.hidden_size, eps=config.norm_eps, offset=config.norm_offset)


def layer_rotaries(config: ModelConfig) -> list[Rotary]:
    """The rotary tables of each layer; layers with the same rotation share them."""

    @cache
    def rotary_of(head_dim: int, *, is_still: bool, is_local: bool) -> Rotary:
        own = replace(config, head_dim=head_dim)
        if is_still:
            return Rotary(torch.empty(0), config.context_len, num_pairs=head_dim // 2)
        if is_local and config.local_rope_theta is not None:
            return make_rotary(own, config.local_rope_theta, None)
        return make_rotary(own, config.rope_theta, config.rope_scaling)

    has_local, sizes = config.local_rope_theta is not None, [size for _, size in config.kv_heads]
    return [
        rotary_of(
            sizes[layer] if sizes else config.head_dim,
            is_still=layer in config.still_layers,
            is_local=has_local and config.window(layer) is not None,
        )
        for layer in range(config.num_layers)
    ]


def make_rotary(config: ModelConfig, theta: float, scaling: RopeScaling | None) -> Rotary:
    """Make the rotary tables of one base and scaling, for sequences up to `config.context_len`."""
    size, scale, query_P = config.rotary_dim or config.head_dim, 1.0, None
    if scaling is not None:
        original, scale = scaling.original_context_len, scaling.attention_factor
        query_P = query_factors(config.query_growth, original, config.context_len)
        if scaling.kind == "dynamic":
            theta = dynamic_theta(theta, size, scaling, config.context_len)
    frequencies_R = frequencies(size, theta)
    if scaling is not None:
        frequencies_R = stretch(frequencies_R, theta, scaling, config.context_len)
    num_pairs = config.head_dim // 2
    return Rotary(frequencies_R, config.context_len, num_pairs=num_pairs, scale=scale, query_P=query_P)
