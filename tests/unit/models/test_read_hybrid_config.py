from __future__ import annotations

from typing import Any

import pytest

from infer.errors import InferError
from infer.models.config import ExpertConfig
from infer.models.registry import find_family

# Facts of a published config; keys that no reader looks at are left out.
QWEN_3_NEXT_80B: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}


def test_qwen3_next() -> None:
    config = find_family(QWEN_3_NEXT_80B).read_config(QWEN_3_NEXT_80B)
    assert config.delta is not None
    assert [layer for layer in range(12) if not config.has_state(layer)] == [3, 7, 11]
    assert config.delta.num_channels == 8192
    assert (config.rotary_dim, config.head_dim, config.rope_theta) == (64, 256, 10_000_000.0)
    assert config.experts == ExpertConfig(
        num_experts=512, num_choices=10, size=512, normalized=True, shared_size=512
    )


def test_the_text_part_of_a_model_that_reads_images() -> None:
    text = {key: value for key, value in QWEN_3_NEXT_80B.items() if "expert" not in key and "eos" not in key}
    raw = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": True,
        "eos_token_id": 7,
        "text_config": text
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000000,
                "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10],
                "mrope_interleaved": True,
            }
        },
    }
    config = find_family(raw).read_config(raw)
    assert config.family == "qwen3_5"
    assert config.tie_embeddings
    assert config.eos_ids == (7,)
    assert config.rotary_dim == 64


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads"),
        ({"layer_types": ["conv"] * 48}, "layer_types"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    raw = QWEN_3_NEXT_80B | changes
    with pytest.raises(InferError, match=named):
        find_family(raw).read_config(raw)
