"""gpt-oss: Llama's block with sinks, biases everywhere, and experts with a clamped gate.

    sinks            each query head has a score that belongs to no position (kernels/attention/reference.py)
    windows          even layers see 128 tokens, odd ones everything; one yarn table for both
    router           has a bias; its softmax is over the chosen experts' logits alone, which equals a softmax
                     over all experts whose chosen weights are then scaled to sum to 1
    experts          biases, and  (up + 1) * gate * sigmoid(1.702 gate)  with gate <= 7 and |up| <= 7

Files interleave gate and up, and store expert matrices as [in, out] or as MXFP4; loader/formats/gpt_oss.py
translates them to the names and the layout of this map.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from infer.errors import ConfigError
from infer.kernels.elementwise.gated_activation import CLAMPED, CLAMPED_ALPHA, CLAMPED_LIMIT
from infer.models import llama
from infer.models.config import ModelConfig
from infer.models.mixtral import STACKED_EXPERTS, read_experts
from infer.models.raw_config import RawConfig
from infer.models.weight_map import Target, WeightMap

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config of a `GptOssForCausalLM`."""
    keys = RawConfig(raw).with_defaults(
        rms_norm_eps=1e-5, rope_theta=150_000.0, head_dim=64, sliding_window=128
    )
    if keys.get("rope_parameters") is None and keys.get("rope_scaling") is None:
        keys = keys.with_defaults(rope_scaling=_YARN)
    for name, known in (("swiglu_alpha", CLAMPED_ALPHA), ("swiglu_limit", CLAMPED_LIMIT)):
        if (given := keys.number(name, default=known)) != known:
            raise ConfigError(f"{name!r} in {keys.where} is {given:g}; only {known:g} is supported")
    keys.expect_silu()
    shared = llama.read_shared_config(
        keys,
        family="gpt_oss",
        window=keys.size("sliding_window"),
        slides=lambda layer: layer % 2 == 0,
        attention_bias=True,
    )
    return replace(
        shared,
        attention_sinks=True,
        mlp_bias=True,
        activation=CLAMPED,
        experts=read_experts(keys, (128, 4), size=shared.intermediate_size, normalized=True),
    )


# fmt: off
WEIGHT_MAP: WeightMap = {
    **{key: target for key, target in llama.WEIGHT_MAP.items() if ".mlp." not in key},
    **{key: STACKED_EXPERTS[key] for key in STACKED_EXPERTS if not key.endswith((".gate", ".gate_up_proj"))},
    "model.layers.{}.self_attn":    Target("layers.{}.attention"),  # its sinks
    "model.layers.{}.mlp.router":   Target("layers.{}.mlp.router"),
}
# fmt: on
