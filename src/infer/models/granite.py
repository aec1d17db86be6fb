"""Granite 3: Llama's block with four factors.

    embedding_multiplier   scales the embeddings
    attention_multiplier   scales attention scores, in place of 1 / sqrt(head size)
    residual_multiplier    scales what attention and the MLP add to the residual stream
    logits_scaling         divides the logits: without it, greedy tokens are the same but logprobs are wrong

Llama's options for biases (`attention_bias`, `mlp_bias`) hold here, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from infer.kernels.elementwise.embedding import scaled
from infer.layers.attention import StepContext
from infer.models import llama
from infer.models.config import ModelConfig
from infer.models.raw_config import RawConfig
from infer.quant.residual import ResidualStream, as_tensor


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config of a `GraniteForCausalLM`."""
    keys = RawConfig(raw)
    embedding_scale = keys.number("embedding_multiplier", default=1.0)
    return replace(
        llama.read_config(raw),
        family="granite",
        embedding_scale=None if embedding_scale == 1.0 else embedding_scale,
        query_scale=keys.number("attention_multiplier", default=1.0),
        residual_scale=keys.number("residual_multiplier", default=1.0),
        logit_scale=1.0 / keys.number("logits_scaling", default=1.0),
    )


class Block(llama.Block):
    """Llama's block, whose two halves are scaled before they are added to the residual stream."""

    def __init__(self, config: ModelConfig, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__(config, attention, mlp)
        self.factor = config.residual_scale

    def forward(self, stream: ResidualStream, step: StepContext) -> None:
        """Add attention's scaled output to the stream, then the MLP's."""
        stream.add(scaled(as_tensor(self.attention(self.attention_norm(stream), step)), self.factor))
        stream.add(scaled(as_tensor(self.mlp(self.mlp_norm(stream))), self.factor))


class Granite(llama.Llama):
    """A stack of blocks with scaled halves."""

    block = Block
