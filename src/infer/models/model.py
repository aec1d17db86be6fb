"""What every network here is: token ids in, hidden states out, logits on demand.

    tokens_T ──► embedding ──► layer 0 ──► layer 1 ──► ... ──► norm ──► hidden_TD        forward
                                                                 hidden_SD ──► head ──► logits_SV

The head is apart because only the rows that sample pay for it: a prompt of a thousand tokens needs one
row of logits, and with a large vocabulary the head is the dearest matrix of the model.

A model is single-device code for a ragged batch. It knows no cache, no padding, no phases: keys,
values and the past are behind `step.attend` (layers/attention.py).

A tied head *is* the embedding's parameter, not a copy of it.

Shapes:  T tokens of all sequences laid end to end, S rows that sample, D hidden size, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn

from infer.layers.attention import StepContext
from infer.layers.embedding import Embedding
from infer.layers.linear import Linear
from infer.layers.norm import AddNorm
from infer.layers.rotary import Rotary, frequencies, stretch_llama3
from infer.models.config import ModelConfig, RopeScaling


class Model(nn.Module, ABC):
    """A decoder-only transformer; its parameters are uninitialised until a loader fills them."""

    layers: nn.ModuleList

    def __init__(self, config: ModelConfig, *, embedding_scale: float | None = None) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.hidden_size, scale=embedding_scale)
        tied_weight = self.embedding.weight if config.tie_embeddings else None
        self.head = Linear(config.hidden_size, config.vocab_size, bias=False, tied_weight=tied_weight)

    @abstractmethod
    def forward(self, tokens_T: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Return the hidden states of all tokens after the final norm, [T, D]."""

    def logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Return [S, V] for those rows of `forward`'s result that need them."""
        logits_SV: torch.Tensor = self.head(hidden_SD)
        return logits_SV


class ResidualStack(Model):
    """Layers that hand on their output and the stream it is still to be added to (layers/norm.py)."""

    norm: AddNorm

    def forward(self, tokens_T: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Return the hidden states of all tokens after the final norm, [T, D]."""
        x_TD, residual_TD = self.embedding(tokens_T), None
        for layer in self.layers:
            x_TD, residual_TD = layer(x_TD, residual_TD, step)
        hidden_TD: torch.Tensor = self.norm(x_TD, residual_TD)[0]
        return hidden_TD


def make_rotary(config: ModelConfig, theta: float, scaling: RopeScaling | None) -> Rotary:
    """The rotary tables of one base, stretched as the config says."""
    frequencies_R = frequencies(config.head_dim, theta)
    if scaling is not None and scaling.kind == "linear":
        frequencies_R = frequencies_R / scaling.factor
    elif scaling is not None:
        assert scaling.kind == "llama3", scaling
        frequencies_R = stretch_llama3(
            frequencies_R,
            factor=scaling.factor,
            low_freq_factor=scaling.low_freq_factor,
            high_freq_factor=scaling.high_freq_factor,
            original_context_len=scaling.original_context_len,
        )
    return Rotary(frequencies_R, config.context_len)
