from __future__ import annotations

from typing import Any

import pytest

from infer.errors import CheckpointError, ConfigError, InferError
from infer.models.config import ExpertConfig
from tests.unit.models.test_read_config import MISTRAL_7B, QWEN_3_0_6B, read, without

# Facts of published configs; keys that no reader looks at are left out.
MIXTRAL_8X7B: dict[str, Any] = MISTRAL_7B | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
}
QWEN_3_30B_A3B: dict[str, Any] = QWEN_3_0_6B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}


QWEN_1_5_MOE_A2_7B: dict[str, Any] = without(
    QWEN_3_30B_A3B, "head_dim", "mlp_only_layers", "num_experts", "num_experts_per_tok"
) | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "intermediate_size": 5632,
    "max_window_layers": 21,
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "use_sliding_window": False,
}


OLMOE_1B_7B: dict[str, Any] = {
    "architectures": ["OlmoeForCausalLM"],
    "clip_qkv": None,
    "eos_token_id": 50279,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 50304,
}
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200002,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


def test_olmoe_clips_only_where_its_config_says_so() -> None:
    config = read(OLMOE_1B_7B)
    assert config.experts == ExpertConfig(num_experts=64, num_choices=8, size=1024, normalized=False)
    assert (config.projection_norm, config.clip_qkv, config.qkv_bias) == (True, None, False)
    assert read(OLMOE_1B_7B, clip_qkv=8.0).clip_qkv == 8.0


def test_gpt_oss_has_sinks_biases_and_unrounded_yarn() -> None:
    config = read(GPT_OSS_20B)
    assert config.experts == ExpertConfig(num_experts=32, num_choices=4, size=2880, normalized=True)
    assert config.layer_windows == (128, None) * 12
    assert (config.attention_sinks, config.qkv_bias, config.attention_out_bias, config.mlp_bias) == (
        True,
    ) * 4
    rope = config.rope_scaling
    assert rope is not None and (rope.kind, rope.truncate, rope.factor) == ("yarn", False, 32.0)
    assert rope.attention_factor == pytest.approx(1.3466, abs=1e-4)
    assert read(without(GPT_OSS_20B, "rope_scaling", "layer_types", "swiglu_limit", "rope_theta")) == config
    with pytest.raises(ConfigError, match="swiglu_limit"):
        read(GPT_OSS_20B, swiglu_limit=8.0)


def test_a_shared_expert_is_for_every_token() -> None:
    config = read(QWEN_1_5_MOE_A2_7B)
    experts = ExpertConfig(num_experts=60, num_choices=4, size=1408, normalized=False, shared_size=5632)
    assert config.experts == experts
    assert (config.qkv_bias, config.qk_norm, config.layer_windows) == (True, False, ())
    assert config.mlp_size(0) == 4 * 1408 + 5632
    windows = read(QWEN_1_5_MOE_A2_7B, use_sliding_window=True).layer_windows
    assert windows[:2] == (32768, None) and windows[20:] == (32768, None, None, None)


def test_mixtures_have_their_experts() -> None:
    mixtral, qwen = read(MIXTRAL_8X7B), read(QWEN_3_30B_A3B)

    assert mixtral.experts == ExpertConfig(num_experts=8, num_choices=2, size=14336, normalized=True)
    assert (mixtral.rope_theta, mixtral.layer_windows, mixtral.head_dim) == (1e6, (), 128)
    assert qwen.experts == ExpertConfig(num_experts=128, num_choices=8, size=768, normalized=True)
    assert (qwen.qk_norm, qwen.head_dim, qwen.mlp_size(0)) == (True, 128, 8 * 768)


def test_mixtures_take_the_defaults_of_the_reference() -> None:
    mixtral = read(
        without(MIXTRAL_8X7B, "num_local_experts", "num_experts_per_tok", "rope_theta", "rms_norm_eps")
    )
    qwen = read(without(QWEN_3_30B_A3B, "num_experts", "norm_topk_prob", "moe_intermediate_size"))

    assert mixtral == read(MIXTRAL_8X7B)
    assert qwen.experts == ExpertConfig(num_experts=128, num_choices=8, size=768, normalized=False)


def test_some_layers_of_a_mixture_may_be_plain() -> None:
    config = read(QWEN_3_30B_A3B, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])

    assert [layer for layer in range(6) if config.experts_of(layer)] == [1, 5]
    assert (config.mlp_size(0), config.mlp_size(1)) == (6144, 8 * 768)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 129}, "there are 128 experts"),
        ({"num_experts": 0}, "num_experts"),
        ({"mlp_only_layers": ["3"]}, "mlp_only_layers"),
        ({"mlp_only_layers": 3}, "mlp_only_layers"),
        ({"norm_topk_prob": 1}, "norm_topk_prob"),
    ],
)
def test_a_damaged_mixture_is_refused_by_its_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(QWEN_3_30B_A3B, **changes)


@pytest.mark.parametrize(
    "raw",
    [MIXTRAL_8X7B, QWEN_3_30B_A3B, QWEN_1_5_MOE_A2_7B, OLMOE_1B_7B, GPT_OSS_20B],
    ids=["mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "gpt_oss"],
)
@pytest.mark.parametrize("damage", [-1, 0, True, "x", 2.5, [], {}, 2**40], ids=repr)
def test_no_damage_to_any_key_is_more_than_an_error_of_ours(raw: dict[str, Any], damage: Any) -> None:
    for key in raw:
        try:
            read(raw, **{key: damage})
        except InferError as error:
            assert str(error)
