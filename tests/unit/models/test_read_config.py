from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.errors import CheckpointError, ConfigError, InferError
from infer.models.config import ModelConfig, RopeScaling
from infer.models.registry import find_family

# Facts of published configs; keys that no reader looks at are left out.
LLAMA_3_2_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
MISTRAL_7B: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN_2_5_3B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "max_position_embeddings": 32768,
    "max_window_layers": 70,
    "model_type": "qwen2",
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN_3_0_6B: dict[str, Any] = QWEN_2_5_3B | {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 1024,
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "sliding_window": None,
}
GEMMA_3_1B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
GEMMA_3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152},
}
GEMMA_4_E2B: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma4",
    "text_config": {
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "hidden_size": 1536,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 6144,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        "model_type": "gemma4_text",
        "num_attention_heads": 8,
        "num_hidden_layers": 35,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
    },
    "vision_config": {"hidden_size": 768},
}
GPT2: dict[str, Any] = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
PUBLISHED = [LLAMA_3_2_1B, MISTRAL_7B, QWEN_2_5_3B, QWEN_3_0_6B, GEMMA_3_1B, GEMMA_3_4B, GEMMA_4_E2B, GPT2]
ids = [f"{raw['model_type']}-{i}" for i, raw in enumerate(PUBLISHED)]


def read(raw: dict[str, Any], **changes: Any) -> ModelConfig:
    raw = raw | changes
    return find_family(raw).read_config(raw)


def without(raw: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key not in keys}


def test_llama_3_2_is_read() -> None:
    assert read(LLAMA_3_2_1B) == ModelConfig(
        family="llama",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        context_len=131072,
        norm_eps=1e-5,
        activation="silu",
        tie_embeddings=True,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(
            kind="llama3",
            factor=32.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_context_len=8192,
        ),
        eos_ids=(128001, 128008, 128009),
    )


def test_qwen_has_its_switches() -> None:
    qwen2, qwen3 = read(QWEN_2_5_3B), read(QWEN_3_0_6B)

    assert (qwen2.qkv_bias, qwen2.qk_norm, qwen2.attention_out_bias, qwen2.head_dim) == (
        True,
        False,
        False,
        128,
    )
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.attention_out_bias, qwen3.head_dim) == (
        False,
        True,
        False,
        128,
    )
    assert qwen2.layer_windows == qwen3.layer_windows == ()
    assert qwen2.eos_ids == (151645,)


def test_qwen_windows_begin_at_max_window_layers() -> None:
    on = {"use_sliding_window": True, "sliding_window": 100}

    assert read(QWEN_2_5_3B, **on, max_window_layers=34).layer_windows == (None,) * 34 + (100, 100)
    assert read(QWEN_2_5_3B, **on, max_window_layers=0).layer_windows == (100,) * 36
    assert read(QWEN_2_5_3B, **on, max_window_layers=70).layer_windows == ()
    assert (
        read(QWEN_2_5_3B, use_sliding_window=True, sliding_window=None, max_window_layers=1).layer_windows
        == ()
    )


def test_layer_types_decide_where_they_are_given() -> None:
    types = ["full_attention", "sliding_attention"] * 18
    config = read(QWEN_2_5_3B, use_sliding_window=True, sliding_window=100, layer_types=types)

    assert config.layer_windows == (None, 100) * 18


def test_mistral_windows_are_a_number_null_or_the_default() -> None:
    assert read(MISTRAL_7B, sliding_window=512).layer_windows == (512,) * 32
    assert read(MISTRAL_7B, sliding_window=None).layer_windows == ()
    assert read(without(MISTRAL_7B, "sliding_window")).layer_windows == (4096,) * 32


def test_gemma_layers_alternate_as_in_the_reference() -> None:
    from transformers import Gemma3TextConfig

    config = read(GEMMA_3_1B)
    reference = Gemma3TextConfig(**without(GEMMA_3_1B, "architectures", "model_type"))

    assert reference.layer_types is not None
    windows = [512 if kind == "sliding_attention" else None for kind in reference.layer_types]
    assert config.layer_windows == tuple(windows)
    assert config.layer_windows[:6] == (512,) * 5 + (None,)
    assert (config.rope_theta, config.local_rope_theta) == (1e6, 1e4)
    assert config.query_scale == pytest.approx(1 / 16)
    assert (config.activation, config.tie_embeddings, config.eos_ids) == ("gelu_tanh", True, (1, 106))


def test_the_text_part_of_a_multimodal_gemma_falls_back_on_the_references_defaults() -> None:
    from transformers import Gemma3TextConfig

    config = read(GEMMA_3_4B)
    reference = Gemma3TextConfig(**without(GEMMA_3_4B["text_config"], "model_type"))

    assert (config.vocab_size, config.head_dim) == (reference.vocab_size, reference.head_dim)
    assert (config.num_heads, config.num_kv_heads) == (
        reference.num_attention_heads,
        reference.num_key_value_heads,
    )
    assert config.context_len == reference.max_position_embeddings
    assert config.rope_scaling == RopeScaling(kind="linear", factor=8.0)
    assert config.eos_ids == (1, 106)


def test_gpt2_is_read() -> None:
    config = read(GPT2)

    assert (config.intermediate_size, config.head_dim, config.num_kv_heads) == (3072, 64, 12)
    assert (config.activation, config.tie_embeddings, config.context_len) == ("gelu_tanh", True, 1024)
    assert read(GPT2, scale_attn_weights=False).scale == 1.0


def test_both_spellings_of_rope_are_read_alike() -> None:
    llama = without(LLAMA_3_2_1B, "rope_theta", "rope_scaling")
    llama["rope_parameters"] = LLAMA_3_2_1B["rope_scaling"] | {"rope_theta": 500000.0}
    gemma = without(GEMMA_3_1B, "rope_theta", "rope_local_base_freq", "rope_scaling")
    gemma["rope_parameters"] = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    old_type = copy.deepcopy(LLAMA_3_2_1B)
    old_type["rope_scaling"]["type"] = old_type["rope_scaling"].pop("rope_type")

    assert read(llama) == read(old_type) == read(LLAMA_3_2_1B)
    assert read(gemma) == read(GEMMA_3_1B)


@pytest.mark.parametrize("kind", ["proportional", "mrope", 3])
def test_other_rope_types_are_refused_with_the_supported_ones(kind: object) -> None:
    with pytest.raises(ConfigError, match="default, linear, dynamic, llama3, yarn, longrope"):
        read(LLAMA_3_2_1B, rope_scaling={"rope_type": kind, "factor": 2.0})


def test_the_context_of_a_stretched_model_is_the_stretched_one() -> None:
    """Published Qwen configs name the trained context and stretch it with yarn."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}

    assert read(LLAMA_3_2_1B, max_position_embeddings=32768, rope_scaling=yarn).context_len == 131072
    assert read(LLAMA_3_2_1B, max_position_embeddings=131072, rope_scaling=yarn).context_len == 131072
    dynamic = {"type": "dynamic", "factor": 2.0}
    assert read(LLAMA_3_2_1B, max_position_embeddings=4096, rope_scaling=dynamic).context_len == 8192


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"rope_type": "longrope", "short_factor": [1.0] * 31, "long_factor": [1.0] * 32},
            "list of 32 numbers",
        ),
        ({"rope_type": "longrope", "short_factor": [0.0] * 32, "long_factor": [1.0] * 32}, "positive number"),
        ({"rope_type": "dynamic", "factor": 1e9}, "at most 4096"),
        ({"rope_type": "yarn", "factor": "4"}, "positive number"),
    ],
)
def test_damaged_rope_sections_are_named(section: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(LLAMA_3_2_1B, rope_scaling=section)


def test_a_head_that_turns_in_part_is_refused_where_the_family_has_none() -> None:
    with pytest.raises(ConfigError, match="partial_rotary_factor"):
        read(LLAMA_3_2_1B, partial_rotary_factor=0.5)


_SMALL = {
    "hidden_size": 64, "vocab_size": 99, "num_hidden_layers": 8, "num_attention_heads": 4,
    "intermediate_size": 96, "max_position_embeddings": 1024,
}  # fmt: skip


def test_smollm3_s_list_says_which_layers_rotate() -> None:
    """The list is called `no_rope_layers`, and a 1 in it means that the layer does rotate."""
    raw = _SMALL | {"architectures": ["SmolLM3ForCausalLM"]}

    assert read(raw).still_layers == (3, 7)
    assert read(raw, no_rope_layers=[1, 0, 1, 1, 1, 1, 0, 1]).still_layers == (1, 6)
    assert (read(raw).rope_theta, read(raw).tie_embeddings, read(raw).layer_windows) == (2e6, True, ())
    assert read(raw, use_sliding_window=True, sliding_window=64).window(3) == 64
    assert read(raw, use_sliding_window=True, sliding_window=64).window(2) is None
    with pytest.raises(CheckpointError, match="no_rope_layers"):
        read(raw, no_rope_layers=[1, 0, 2, 1, 1, 1, 0, 1])


def test_exaone4_rotates_where_it_has_a_window_or_nowhere_one() -> None:
    raw = _SMALL | {"architectures": ["Exaone4ForCausalLM"], "sliding_window": 64}
    for pattern in ({}, {"sliding_window_pattern": "LLLG"}, {"sliding_window_pattern": 4}):
        assert read(raw, **pattern).still_layers == (3, 7)
    assert read(raw, sliding_window=None, sliding_window_pattern=None).still_layers == ()


def test_olmo3_scales_positions_only_in_layers_without_a_window() -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128}
    config = read(
        _SMALL | {"architectures": ["Olmo3ForCausalLM"], "rope_scaling": yarn, "sliding_window": 64}
    )

    assert config.rope_scaling is not None and config.rope_scaling.kind == "yarn"
    assert (config.rope_theta, config.local_rope_theta) == (5e5, 5e5)
    assert [config.window(layer) for layer in range(4)] == [64, 64, 64, None]
    assert read(_SMALL | {"architectures": ["Olmo3ForCausalLM"]}).window(0) == 4096


def test_phi_4_mini_is_read() -> None:
    """Three quarters of a head turn; the trained context stands beside the section, and `su` is longrope."""
    factors = [1.0] * 48
    raw: dict[str, Any] = {
        "architectures": ["Phi3ForCausalLM"], "hidden_size": 3072, "intermediate_size": 8192,
        "vocab_size": 200064, "num_hidden_layers": 32, "num_attention_heads": 24, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "sliding_window": 262144,
        "partial_rotary_factor": 0.75, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        "rope_scaling": {"long_factor": factors, "short_factor": factors, "type": "longrope"},
    }  # fmt: skip
    config = read(raw)

    assert (config.head_dim, config.rotary_dim, config.context_len) == (128, 96, 131072)
    assert config.rope_scaling is not None
    assert (config.rope_scaling.kind, config.rope_scaling.original_context_len) == ("longrope", 4096)
    assert config.rope_scaling.attention_factor == pytest.approx((1 + math.log(32) / math.log(4096)) ** 0.5)
    assert config.window(0) == 262144
    assert read(without(raw, "sliding_window")).layer_windows == ()
    assert read(raw, rope_scaling=raw["rope_scaling"] | {"type": "su"}) == config
    with pytest.raises(CheckpointError, match="list of 48 numbers"):
        read(raw, rope_scaling=raw["rope_scaling"] | {"long_factor": factors[:-1]})


def test_glm4_turns_neighbours_of_half_a_head() -> None:
    config = read(_SMALL | {"architectures": ["Glm4ForCausalLM"], "head_dim": 8, "num_key_value_heads": 2})

    assert (config.rotary_dim, config.qkv_bias, config.attention_out_bias) == (4, True, False)
    assert config.channel_order == (0, 2, 4, 5, 1, 3, 6, 7)
    assert config.norm_eps == 1.5625e-7
    with pytest.raises(CheckpointError, match="an even number of them must"):
        read(_SMALL | {"architectures": ["Glm4ForCausalLM"], "partial_rotary_factor": 1e308})


def test_mistral_small_3_leaves_out_what_equals_the_reference() -> None:
    """Heads of 128, which are not an equal share of 5120, and no window."""
    raw = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "mistral"}}
    config = read(raw)

    assert (config.head_dim, config.hidden_size, config.num_kv_heads) == (128, 5120, 8)
    assert (config.rope_theta, config.layer_windows, config.tie_embeddings) == (1e9, (), False)
    with pytest.raises(ConfigError, match="'model_type' in text_config"):
        read(raw, text_config={"model_type": "ministral"})


def test_ministral_3_is_yarn_without_an_attention_factor_of_its_own() -> None:
    config = read(_SMALL | {"architectures": ["Ministral3ForCausalLM"], "num_key_value_heads": 2})

    assert config.rope_scaling is not None
    assert (config.rope_scaling.kind, config.rope_scaling.original_context_len) == ("yarn", 16384)
    assert (config.rope_scaling.attention_factor, config.query_growth, config.head_dim) == (1.0, 0.1, 128)


def test_cohere2_multiplies_its_logits_and_rotates_only_behind_windows() -> None:
    config = read(_SMALL | {"architectures": ["Cohere2ForCausalLM"]})

    assert (config.logit_scale, config.still_layers, config.window(0)) == (0.0625, (3, 7), 4096)
    with pytest.raises(ConfigError, match="use_qk_norm"):
        read(_SMALL | {"architectures": ["Cohere2ForCausalLM"], "use_qk_norm": True})


def test_granite_divides_its_logits() -> None:
    """A forgotten division leaves the likeliest token as it is and makes every logprob wrong."""
    raw = _SMALL | {
        "architectures": ["GraniteForCausalLM"],
        "logits_scaling": 8.0,
        "attention_multiplier": 0.5,
    }

    assert (read(raw).logit_scale, read(raw).scale) == (0.125, 0.5)


def test_a_head_size_is_given_or_derived() -> None:
    assert read(without(LLAMA_3_2_1B, "head_dim")).head_dim == 64
    assert read(LLAMA_3_2_1B, head_dim=None).head_dim == 64
    assert read(LLAMA_3_2_1B, head_dim=128).head_dim == 128
    with pytest.raises(CheckpointError, match="hidden_size 2048 is not a multiple"):
        read(LLAMA_3_2_1B, head_dim=None, num_attention_heads=24)


def test_kv_heads_default_to_the_query_heads() -> None:
    assert read(without(LLAMA_3_2_1B, "num_key_value_heads")).num_kv_heads == 32


def test_token_ids_outside_the_vocabulary_are_left_out() -> None:
    config = read(GPT2, vocab_size=33)

    assert config.eos_ids == ()


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        *[(LLAMA_3_2_1B, key) for key in ("vocab_size", "hidden_size", "intermediate_size")],
        *[
            (MISTRAL_7B, key)
            for key in ("num_hidden_layers", "num_attention_heads", "max_position_embeddings")
        ],
        *[(GEMMA_3_1B, key) for key in ("hidden_size", "intermediate_size", "num_hidden_layers")],
        *[(GPT2, key) for key in ("vocab_size", "n_embd", "n_layer", "n_head", "n_positions")],
    ],
)
def test_a_missing_key_is_named(raw: dict[str, Any], key: str) -> None:
    with pytest.raises(CheckpointError, match=f"no '{key}'"):
        read(without(raw, key))


@pytest.mark.parametrize("value", [0, -1, 2.5, "64", True, [64], 10**9])
def test_an_impossible_size_is_named(value: object) -> None:
    with pytest.raises(CheckpointError, match="'hidden_size' in config.json must be an integer"):
        read(LLAMA_3_2_1B, hidden_size=value)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_key_value_heads": 5}, CheckpointError, "32 is not a multiple of num_key_value_heads 5"),
        ({"hidden_act": "relu6"}, ConfigError, "'relu6'.*known: silu"),
        ({"hidden_act": ["silu"]}, ConfigError, "hidden_act"),
        ({"head_dim": 63}, CheckpointError, "even"),
        ({"head_dim": 2**20}, CheckpointError, "head_dim.*1..4096"),
        ({"head_dim": None, "hidden_size": 2**20}, CheckpointError, "head_dim.*1..4096"),
        ({"rms_norm_eps": float("nan")}, CheckpointError, "rms_norm_eps"),
        ({"rms_norm_eps": 0}, CheckpointError, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, CheckpointError, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, CheckpointError, "tie_word_embeddings"),
        ({"rope_scaling": [1]}, CheckpointError, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "linear"}}, CheckpointError, "no 'factor'"),
        ({"eos_token_id": "2"}, CheckpointError, "eos_token_id"),
        ({"layer_types": ["full_attention"]}, CheckpointError, "16 layers"),
        ({"layer_types": ["chunked_attention"] * 16}, ConfigError, "chunked_attention"),
        ({"layer_types": ["sliding_attention"] * 16}, CheckpointError, "no window"),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        read(LLAMA_3_2_1B, **changes)


@pytest.mark.parametrize(
    ("raw", "changes", "message"),
    [
        (GEMMA_3_1B, {"final_logit_softcapping": 30.0}, "capped logits"),
        (GEMMA_3_1B, {"attn_logit_softcapping": 50.0}, "capped attention"),
        (GEMMA_3_1B, {"use_bidirectional_attention": True}, "causal"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scaled by layer"),
        (GPT2, {"add_cross_attention": True}, "decoder-only"),
    ],
)
def test_what_the_network_does_not_do_is_refused(
    raw: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(raw, **changes)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@pytest.mark.parametrize("published", PUBLISHED, ids=ids)
@given(data=st.data())
def test_a_damaged_config_is_read_or_refused_but_never_crashes(published: dict[str, Any], data: Any) -> None:
    raw = copy.deepcopy(published)
    place = data.draw(
        st.sampled_from([raw, *[raw[key] for key in raw if isinstance(raw[key], dict)]]), label="object"
    )
    keys = st.sampled_from([*place, "layer_types", "rope_parameters", "text_config", "quantization_config"])
    for key in data.draw(st.lists(keys, min_size=1, max_size=3), label="keys"):
        place[key] = data.draw(JSON, label=key)

    try:
        config = find_family(raw).read_config(raw)
    except InferError:
        return
    assert isinstance(config, ModelConfig)


GEMMA_2_2B: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "eos_token_id": [1, 107],
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}


@pytest.mark.parametrize("raw", [GEMMA_2_2B, GEMMA_3_1B, GEMMA_3_4B, GEMMA_4_E2B], ids=["2", "3", "3v", "4"])
def test_hidden_activation_is_a_key_of_gemma_alone(raw: dict[str, Any]) -> None:
    both: dict[str, Any] = {"hidden_act": "silu", "hidden_activation": "gelu"}
    assert read(LLAMA_3_2_1B, **both).activation == read(QWEN_3_0_6B, **both).activation == "silu"
    text = raw.get("text_config", {})

    def activation(**changes: str | None) -> str:
        return read(raw, **changes, **({"text_config": text | changes} if text else {})).activation

    assert activation(**both) == "gelu"
    assert activation(hidden_act="silu", hidden_activation=None) == "gelu_tanh", "as the reference"


def test_gemma_2_has_caps_and_windows_in_even_layers() -> None:
    config = read(GEMMA_2_2B)
    assert (config.attention_softcap, config.logit_softcap) == (50.0, 30.0)
    assert config.layer_windows == (4096, None) * 13
    assert (config.scale, config.activation, config.tie_embeddings) == (1 / 16, "gelu_tanh", True)
    assert not config.has_plain_scores and not config.qk_norm
    assert read(GEMMA_2_2B, query_pre_attn_scalar=144).scale == 1 / 12
    absent = read(without(GEMMA_2_2B, "attn_logit_softcapping", "final_logit_softcapping"))
    assert (absent.attention_softcap, absent.logit_softcap) == (50.0, 30.0)
    uncapped = read(GEMMA_2_2B, attn_logit_softcapping=None, final_logit_softcapping=None)
    assert uncapped.has_plain_scores and uncapped.logit_softcap is None
    with pytest.raises(CheckpointError, match="attn_logit_softcapping"):
        read(GEMMA_2_2B, attn_logit_softcapping=-1.0)
    with pytest.raises(ConfigError, match="use_bidirectional_attention"):
        read(GEMMA_2_2B, use_bidirectional_attention=True)


def test_gemma4_has_layers_of_two_sizes() -> None:
    config = read(GEMMA_4_E2B)
    local, wide = config.layer_specs[0], config.layer_specs[4]
    assert (local.num_kv_heads, local.head_dim, wide.head_dim) == (1, 256, 512)
    assert (config.head_dim, config.window(0), config.window(4)) == (512, 512, None)
    assert [config.layer_specs[n].kv_layer for n in (14, 15, 19, 33, 34)] == [14, 13, 14, 13, 14]
    assert (config.layer_specs[14].mlp_size, config.layer_specs[15].mlp_size) == (6144, 12288)
    assert config.rope_scaling == RopeScaling(kind="proportional", factor=1.0, num_pairs=64)
    assert (config.rope_theta, config.local_rope_theta, config.scale) == (1e6, 1e4, 1.0)
    assert (config.logit_softcap, config.layer_input_size, config.tie_embeddings) == (30.0, 256, True)
    assert config.eos_ids == (1, 106)


def test_gemma4_with_experts_has_fewer_kv_heads_in_global_layers() -> None:
    text = without(GEMMA_4_E2B["text_config"], "num_kv_shared_layers", "layer_types") | {
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 0,
        "moe_intermediate_size": 704,
        "num_experts": 128,
        "num_global_key_value_heads": 2,
        "num_hidden_layers": 7,
        "num_key_value_heads": 8,
        "top_k_experts": 8,
    }
    config = find_family({"model_type": "gemma4_text"}).read_config(text)
    assert [spec.num_kv_heads for spec in config.layer_specs] == [8] * 5 + [2] * 2
    assert [spec.has_values for spec in config.layer_specs] == [True] * 5 + [False] * 2
    assert config.experts is not None and (config.experts.num_experts, config.experts.num_choices) == (128, 8)
    assert config.mlp_size(0) == 8 * 704 + 6144


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"use_bidirectional_attention": "all"}, "causal"),
        ({"vocab_size_per_layer_input": 7}, "only equal sizes"),
        ({"num_kv_shared_layers": 35}, "num_kv_shared_layers"),
        ({"layer_types": ["full_attention"] * 15 + ["sliding_attention"] * 20}, "no earlier layer"),
        ({"per_layer_config": {"4": {"num_key_value_heads": 3}}}, "3 kv heads"),
        ({"per_layer_config": {"4": {"sliding_window": 3}}}, "'sliding_window' of layer 4"),
        ({"per_layer_config": {"four": {"head_dim": 8}}}, "'four'"),
        ({"per_layer_config": {"35": {"head_dim": 8}}}, "0 to 34, got '35'"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2}}}, "only global"),
    ],
)
def test_gemma4_configs_that_cannot_be_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InferError, match=says):
        read(GEMMA_4_E2B | {"text_config": GEMMA_4_E2B["text_config"] | changes})


@pytest.mark.parametrize("global_head_dim", [32, 16], ids=["two head sizes", "one head size"])
def test_gemma4_sizes_of_layers_are_read_as_the_reference_writes_them(global_head_dim: int) -> None:
    """It pads the numbers of layers with zeros ("05"), and writes {} if all layers are alike."""
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 12, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    reference = transformers.Gemma4TextConfig(**sizes, global_head_dim=global_head_dim)
    config = find_family({"model_type": "gemma4_text"}).read_config(json.loads(reference.to_json_string()))
    layers = [reference.per_layer_config[layer] for layer in range(12)]
    assert [spec.head_dim for spec in config.layer_specs] == [layer.head_dim for layer in layers]


@pytest.mark.parametrize("published", [LLAMA_3_2_1B, GEMMA_2_2B], ids=["llama", "gemma2"])
def test_layers_that_differ_are_refused_where_the_family_has_one_kind(published: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="per_layer_config"):
        read(published, per_layer_config={"0": {"rms_norm_eps": 0.1}})
    assert read(published, per_layer_config={}) == read(published)


@pytest.mark.parametrize("architecture", ["Qwen3_5ForCausalLM", "Qwen3NextForCausalLM"])
def test_linear_attention_with_another_activation_is_refused(architecture: str) -> None:
    with pytest.raises(ConfigError, match="'hidden_act' in config.json must be silu, got 'gelu'"):
        read(_SMALL | {"architectures": [architecture], "hidden_act": "gelu"})
