"""What every network here is: token ids in, hidden states out, logits on demand.

    tokens_T ──► embedding ──► layer 0 ──► layer 1 ──► ... ──► norm ──► hidden_TD        forward
                                                                 hidden_SD ──► head ──► logits_SV

The head is apart because only the rows that sample pay for it: a prompt of a thousand tokens needs one
row of logits, and with a large vocabulary the head is the dearest matrix of the model.

Nor does a prompt need all of the last layer. What the other tokens leave behind for the one that samples are
their keys and values; what they would make of the last attention nobody reads. `forward` can be told at which
places S of the T tokens stand that are wanted, and from there on the others are gone:

    last layer      norm ──► qkv ──► attend ──► rows at places_S ──► out ──► (+) ──► mlp ──► (+) ──► norm
                    T rows                      S rows

A model is single-device code for a ragged batch. It knows no cache, no padding, no phases: keys,
values and the past are behind `step.attend` (layers/attention.py).

A tied head *is* the embedding's parameter, not a copy of it.

Shapes:  T tokens of all sequences laid end to end, S rows that sample, D hidden size, V vocabulary.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from infer.layers.attention import StepContext
from infer.layers.embedding import Embedding
from infer.layers.linear import Linear, Reader
from infer.layers.norm import AddLayerNorm, AddNorm
from infer.layers.rotary import Rotary, frequencies, stretch_llama3
from infer.models.config import ModelConfig, RopeScaling


class Layer(nn.Module):
    """Attention and an MLP, from one output and the stream it is to be added to, to the next such pair.

        x, residual = layer(x, residual, step, reader, places_S)

    `reader` is who reads the sum of the result, if that is known (layers/linear.py, `into`); `places_S` are
    the tokens whose rows are returned, and None means all.
    """

    @property
    def reader(self) -> Reader | None:
        """Who reads the stream that this layer is given; None: nobody who could take it added."""
        return None


class Model(nn.Module):
    """A decoder-only transformer; its parameters are uninitialised until a loader fills them."""

    layers: nn.ModuleList  # each a `Layer`
    norm: AddNorm | AddLayerNorm

    def __init__(self, config: ModelConfig, *, embedding_scale: float | None = None) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.hidden_size, scale=embedding_scale)
        tied_weight = self.embedding.weight if config.tie_embeddings else None
        self.head = Linear(config.hidden_size, config.vocab_size, bias=False, tied_weight=tied_weight)

    def forward(
        self, tokens_T: torch.Tensor, step: StepContext, places_S: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the hidden states after the final norm: of all tokens [T, D], or of some of them [S, D]."""
        x_TD, residual_TD = self.embed(tokens_T, step)
        for layer, behind in pairwise(self.layers):
            x_TD, residual_TD = layer(x_TD, residual_TD, step, behind.reader)
        x_SD, residual_SD = self.layers[-1](x_TD, residual_TD, step, None, places_S)
        hidden_SD: torch.Tensor = self.norm(x_SD, residual_SD)[0]
        return hidden_SD

    def embed(self, tokens_T: torch.Tensor, step: StepContext) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the first layer is given: the tokens' embeddings, and a stream if there is one before it."""
        del step
        return self.embedding(tokens_T), None

    def logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Return [S, V] for those rows of `forward`'s result that need them."""
        logits_SV: torch.Tensor = self.head(hidden_SD)
        return logits_SV


def rows_at(places_S: torch.Tensor | None, rows_TX: torch.Tensor) -> torch.Tensor:
    """The rows of these tokens, [S, X]; without places the rows of all, as they are."""
    return rows_TX if places_S is None else rows_TX.index_select(0, places_S)


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
