"""GPT-2: the ancestor.

       x ──► attention_norm ──► attention ──► (+) ──► mlp_norm ──► mlp ──► (+) ──►
        └──────────────────────────────────────┘ └───────────────────────────┘

The structure is Llama's, with older parts: LayerNorm with a bias, a bias on every matrix, learned positions
added to the embedding instead of rotary ones, a plain MLP with GELU, as many kv heads as query heads.

Its checkpoints store matrices [in, out] (the reference calls the layer Conv1D), so the weight map marks
them transposed. They exist with and without the prefix `transformer.`, and old ones carry the causal
mask of each layer as a buffer (`attn.bias`, `attn.masked_bias`), which is not a weight.

Shapes:  T tokens of all sequences laid end to end, D hidden, N heads, H head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from infer.errors import CheckpointError
from infer.kernels.elementwise.heads import write_slots
from infer.layers.attention import AttentionLayer, StepContext
from infer.layers.embedding import Embedding
from infer.layers.linear import Linear
from infer.layers.mlp import MLP
from infer.layers.norm import LayerNorm
from infer.models.config import ModelConfig
from infer.models.model import Model
from infer.models.raw_config import MAX_LAYERS, RawConfig
from infer.models.weight_map import IGNORED, Target, WeightMap
from infer.quant.projection import PendingProduct
from infer.quant.residual import ResidualStream


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config of a `GPT2LMHeadModel`."""
    keys = RawConfig(raw)
    keys.refuse("scale_attn_by_inverse_layer_idx", "scores scaled by layer are not supported")
    keys.refuse("add_cross_attention", "only decoder-only models are supported")
    hidden_size = keys.size("n_embd", "hidden_size")
    num_heads = keys.size("n_head", "num_attention_heads")
    if hidden_size % num_heads:
        raise CheckpointError(f"n_embd {hidden_size} is not a multiple of n_head {num_heads}")
    vocab_size = keys.size("vocab_size")
    return ModelConfig(
        family="gpt2",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=keys.size("n_inner", default=4 * hidden_size),
        num_layers=keys.size("n_layer", "num_hidden_layers", at_most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        context_len=keys.size("n_positions", "max_position_embeddings"),
        norm_eps=keys.number("layer_norm_epsilon", default=1e-5),
        activation=keys.activation("activation_function", default="gelu_new"),
        tie_embeddings=keys.flag("tie_word_embeddings", default=True),
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        gated_mlp=False,
        learned_positions=True,
        query_scale=None if keys.flag("scale_attn_weights", default=True) else 1.0,
        eos_ids=keys.token_ids("eos_token_id", vocab_size),
    )


class Attention(nn.Module):
    """Multi-head attention without rotary positions."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = AttentionLayer(layer, config.scale)
        self.head_dim = config.head_dim
        hidden, size = config.hidden_size, config.num_heads * config.head_dim
        self.qkv = Linear(hidden, 3 * size, bias=True, parts={"q": size, "k": size, "v": size})
        self.out = Linear(size, hidden, bias=True)

    def forward(self, x_TD: torch.Tensor, step: StepContext) -> torch.Tensor | PendingProduct:
        """Let each token look at its sequence up to itself."""
        q_TNH, k_TNH, v_TNH = (
            part.view(len(part), -1, self.head_dim) for part in self.qkv.split(self.qkv(x_TD))
        )
        cache = step.slots(self.layer.number)
        if cache is not None:
            write_slots(k_TNH, v_TNH, cache)
        seen_TNH = step.attend(self.layer, q_TNH, k_TNH, v_TNH)
        y_TD: torch.Tensor | PendingProduct = self.out(seen_TNH.flatten(-2))
        return y_TD


class Block(nn.Module):
    """Attention, then the MLP, each after a norm and each added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = Attention(config, layer)
        self.mlp_norm = LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, activation=config.activation)

    def forward(self, stream: ResidualStream, step: StepContext) -> None:
        """Add attention's output to the stream, then the MLP's."""
        stream.add(self.attention(self.attention_norm(stream), step))
        stream.add(self.mlp(self.mlp_norm(stream)))


class GPT2(Model):
    """A stack of blocks over the sum of token and position embeddings, which the first norm adds."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.position_embedding = Embedding(config.context_len, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_layers))
        self.norm = LayerNorm(config.hidden_size, eps=config.norm_eps)

    def embed(self, tokens_T: torch.Tensor, step: StepContext) -> ResidualStream:
        """The residual stream at the input of layer 0: the embeddings of tokens and positions."""
        stream = super().embed(tokens_T, step)
        stream.add(self.position_embedding(step.positions))
        return stream


# fmt: off
_STACK: WeightMap = {
    "wte":                  Target("embedding"),
    "wpe":                  Target("position_embedding"),
    "h.{}.ln_1":            Target("layers.{}.attention_norm"),
    "h.{}.attn":            IGNORED,  # attn.bias and attn.masked_bias: the causal mask
    "h.{}.attn.c_attn":     Target("layers.{}.attention.qkv", transposed=True),
    "h.{}.attn.c_proj":     Target("layers.{}.attention.out", transposed=True),
    "h.{}.ln_2":            Target("layers.{}.mlp_norm"),
    "h.{}.mlp.c_fc":        Target("layers.{}.mlp.up", transposed=True),
    "h.{}.mlp.c_proj":      Target("layers.{}.mlp.down", transposed=True),
    "ln_f":                 Target("norm"),
}
# fmt: on

WEIGHT_MAP: WeightMap = {
    **{f"transformer.{name}": target for name, target in _STACK.items()},
    **_STACK,
    "lm_head": Target("head"),
}
