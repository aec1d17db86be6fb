"""The metadata of a GGUF file as the keys of a config.json, so that families read one format only.

    llama.embedding_length 576   ──►   hidden_size 576
    output.weight is absent      ──►   tie_word_embeddings true
    llama.attention.sliding_window     only in Mistral's files, whose architecture is llama too
    llama.expert_count                 only in Mixtral's files, whose architecture is llama too
    mistral3.rope.scaling.type         only in Ministral 3's files, not in Mistral Small 3's

Llama 3's rope scaling is given as a table, a tensor with one divisor per pair of channels; the parameters are
recovered from it, or the file is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from infer.errors import CheckpointError, ConfigError
from infer.loader.formats.gguf import GGMLType, GGUFFile
from infer.models.raw_config import MAX_LAYERS, RawConfig

ARCHITECTURES = (
    "llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "gemma2", "gemma3", "gemma4", "granite", "smollm3",
    "olmo2", "olmoe", "exaone4", "phi3", "glm4", "cohere2", "mistral3", "qwen3next", "qwen35", "qwen35moe",
    "gpt-oss", "gpt2",
)  # fmt: skip
# the text part of models that read images: its file differs from another architecture's in the name only
TEXT_PARTS = {"qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3moe"}
HYBRID = ("qwen3next", "qwen35", "qwen35moe")  # most of their layers have linear attention
PARTLY_ROTARY = ("phi3", "glm4", *HYBRID)
ROPE_FACTORS = "rope_freqs.weight"
LONGROPE_FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}

# The values that every published Llama 3 uses: (low_freq_factor, high_freq_factor, original context)
_LLAMA3 = (1.0, 4.0, 8192)
_GEMMA3_27B_LAYERS = 62  # layers of the one Gemma 3 whose attention scale is not its head size; in no key
_GEMMA2_27B_LAYERS = 46  # layers of the one Gemma 2 of that kind


class Keys(RawConfig):
    """Checked access to the metadata of the file's architecture, whose keys are named without its prefix."""

    def __init__(self, file: GGUFFile) -> None:
        name = file.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in (*ARCHITECTURES, *TEXT_PARTS):
            known = ", ".join((*ARCHITECTURES, *TEXT_PARTS))
            raise ConfigError(
                f"{file.path} holds a model of architecture {name!r}; supported in GGUF: {known}"
            )
        raw = {
            key.removeprefix(f"{name}."): value[0] if _is_one_number(value) else value
            for key, value in file.metadata.items()
            if key.startswith(f"{name}.")
        }
        super().__init__(raw, f"the {name} metadata of {file.path}")
        self.file, self.architecture = file, TEXT_PARTS.get(name, name)

    def optional_size(self, name: str) -> int:
        """Return a positive integer; 0: there is none."""
        return self.size(name) if self.get(name) else 0

    def num_layers(self) -> int:
        """Return the number of layers that a step runs; others predict further tokens."""
        count = self.size("block_count", at_most=MAX_LAYERS)
        drafting = self.optional_size("nextn_predict_layers") if self.architecture in HYBRID else 0
        if drafting >= count:
            raise CheckpointError(
                f"{self.where} has {count} layers, of which {drafting} predict further tokens"
            )
        return count - drafting


def _is_one_number(value: Any) -> bool:
    """Return True if a value is a list of integers, one per layer, that are all the same."""
    return isinstance(value, list) and len(set(map(repr, value))) == 1 and type(value[0]) is int


def hf_config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """Return the metadata of a GGUF file as the keys of a config.json, for `Family.read_config`."""
    keys = Keys(file)
    architecture = keys.architecture
    if "token_embd.weight" not in file.tensors or len(file.tensors["token_embd.weight"].shape) != 2:
        raise CheckpointError(f"{file.path} has no matrix 'token_embd.weight'")
    shared = {
        "model_type": architecture,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": _eos_ids(file.metadata),
    }
    if architecture == "gpt2":
        return shared | _gpt2_config(keys)
    if architecture == "gemma4":
        return shared | _gemma4_config(keys)
    hidden_size, num_heads = keys.size("embedding_length"), keys.size("attention.head_count")
    head_dim = keys.size("attention.key_length", default=hidden_size // num_heads)
    rotated = keys.size("rope.dimension_count", default=head_dim)
    if rotated != head_dim and architecture not in PARTLY_ROTARY:
        raise ConfigError(
            f"{file.path} rotates {rotated} of {head_dim} channels; partial rotation is not supported"
        )
    config = shared | {
        "hidden_size": hidden_size,
        "intermediate_size": keys.size(
            "feed_forward_length", default=keys.optional_size("expert_feed_forward_length") or None
        ),
        "num_hidden_layers": keys.num_layers(),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.size("attention.head_count_kv", default=num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.size("context_length"),
        **_norm_eps(keys),
        "rope_theta": keys.number("rope.freq_base", default=1e6 if architecture == "gemma3" else 1e4),
        "rope_scaling": _rope_scaling(keys, head_dim, rotated),
        **({"partial_rotary_factor": rotated / head_dim} if architecture in PARTLY_ROTARY else {}),
    }
    return config | _family_config(keys, config)


def _norm_eps(keys: Keys) -> dict[str, float]:
    if keys.architecture == "cohere2":
        return {"layer_norm_eps": keys.number("attention.layer_norm_epsilon")}
    return {"rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon")}


def _family_config(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    tensors, window = keys.file.tensors, keys.optional_size("attention.sliding_window")
    if keys.architecture in HYBRID:
        return _hybrid_config(keys, config["num_hidden_layers"])
    if keys.optional_size("expert_count"):
        return _experts_config(keys, window, config["rope_scaling"])
    if keys.architecture == "llama" and window:
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    if keys.architecture == "llama":
        return {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        }
    if keys.architecture == "gemma2":
        is_27b = config["num_hidden_layers"] == _GEMMA2_27B_LAYERS
        head_share = config["hidden_size"] // config["num_attention_heads"]
        return {
            "architectures": ["Gemma2ForCausalLM"],
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": head_share if is_27b else config["head_dim"],
            "sliding_window": keys.size("attention.sliding_window", default=4096),
            "attn_logit_softcapping": keys.number("attn_logit_softcapping", default=50.0),
            "final_logit_softcapping": keys.number("final_logit_softcapping", default=30.0),
        }
    if keys.architecture == "gemma3":
        is_27b = config["num_hidden_layers"] == _GEMMA3_27B_LAYERS
        head_share = config["hidden_size"] // config["num_attention_heads"]
        return {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": head_share if is_27b else config["head_dim"],
            "sliding_window": keys.size("attention.sliding_window"),
            "layer_types": _layer_types(keys, config["num_hidden_layers"]),
            "rope_local_base_freq": keys.number("rope.freq_base_swa", default=1e4),
        }
    has_bias = "blk.0.attn_q.bias" in tensors
    if keys.architecture == "granite":
        return {
            "architectures": ["GraniteForCausalLM"],
            "attention_bias": has_bias,
            "mlp_bias": "blk.0.ffn_up.bias" in tensors,
            "attention_multiplier": keys.number("attention.scale", default=config["head_dim"] ** -0.5),
            "embedding_multiplier": keys.number("embedding_scale", default=1.0),
            "residual_multiplier": keys.number("residual_scale", default=1.0),
            "logits_scaling": keys.number("logit_scale", default=1.0),
        }
    if keys.architecture in ("olmo2", "exaone4"):  # files of OLMo 3 say olmo2
        name = "Exaone4" if keys.architecture == "exaone4" else "Olmo3" if window else "Olmo2"
        types = {"layer_types": _layer_types(keys, config["num_hidden_layers"], default=4)} if window else {}
        return {"architectures": [f"{name}ForCausalLM"], "sliding_window": window or None, **types}
    if keys.architecture == "phi3":
        original = keys.size(
            "rope.scaling.original_context_length", default=config["max_position_embeddings"]
        )
        return {
            "architectures": ["Phi3ForCausalLM"],
            "original_max_position_embeddings": original,
            "sliding_window": window or None,
        }
    if keys.architecture == "glm4":
        return {"architectures": ["Glm4ForCausalLM"], "attention_bias": has_bias}
    if keys.architecture == "cohere2":
        return {
            "architectures": ["Cohere2ForCausalLM"],
            "attention_bias": has_bias,
            "logit_scale": keys.number("logit_scale"),
            "sliding_window": window or None,
            "layer_types": _layer_types(keys, config["num_hidden_layers"], default=4),
        }
    if keys.architecture == "mistral3":
        rope = config["rope_scaling"] or {"rope_type": "default"}
        growth = keys.get("attention.temperature_scale")
        return {
            "architectures": ["Ministral3ForCausalLM"],
            "rope_scaling": rope | ({"llama_4_scaling_beta": growth} if growth else {}),
        }
    if keys.architecture == "smollm3":
        return {"architectures": ["SmolLM3ForCausalLM"], "attention_bias": has_bias}
    return {"architectures": [f"{keys.architecture.capitalize()}ForCausalLM"]}


def _experts_config(keys: Keys, window: int, rope: Mapping[str, Any] | None) -> dict[str, Any]:
    shared = {
        "num_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "sliding_window": window or None,
    }
    if keys.architecture == "llama":
        return shared | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    if keys.architecture == "gpt-oss":  # no key for `truncate`: its yarn does not round
        rope = {"truncate": False, **(rope or {"rope_type": "default"})}
        return shared | {"architectures": ["GptOssForCausalLM"], "rope_scaling": rope}
    if keys.architecture == "olmoe":
        return shared | {"architectures": ["OlmoeForCausalLM"], "norm_topk_prob": False}
    if keys.architecture == "qwen2moe":
        return shared | {
            "architectures": ["Qwen2MoeForCausalLM"],
            "model_type": "qwen2_moe",
            "moe_intermediate_size": keys.size("expert_feed_forward_length"),
            "shared_expert_intermediate_size": keys.size("expert_shared_feed_forward_length"),
            "norm_topk_prob": False,  # no key for it: false in every published model
            "qkv_bias": "blk.0.attn_q.bias" in keys.file.tensors,
        }
    if keys.architecture != "qwen3moe":
        raise ConfigError(f"{keys.file.path} is a {keys.architecture} with experts, which is not supported")
    return shared | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "norm_topk_prob": True,  # no key for it: true in every published model
        "use_sliding_window": window > 0,
    }


def _hybrid_config(keys: Keys, num_layers: int) -> dict[str, Any]:
    """Read the sizes of linear attention, and experts, if there are any.

    Newer files of Qwen 3 Next have the rows of linear attention in the order of Qwen 3.5.
    """
    num_values = keys.size("ssm.time_step_rank")
    every = keys.size("full_attention_interval", default=4)
    is_linear = keys.get("attention.recurrent_layers")
    if not isinstance(is_linear, list) or len(is_linear) < num_layers:
        is_linear = [(layer + 1) % every != 0 for layer in range(num_layers)]
    kinds = ("full_attention", "linear_attention")
    shared = {
        "layer_types": [kinds[bool(each)] for each in is_linear[:num_layers]],
        "linear_conv_kernel_dim": keys.size("ssm.conv_kernel"),
        "linear_key_head_dim": keys.size("ssm.state_size"),
        "linear_num_key_heads": keys.size("ssm.group_count"),
        "linear_num_value_heads": num_values,
        "linear_value_head_dim": keys.size("ssm.inner_size") // num_values,
    }
    if keys.architecture == "qwen35":
        return shared | {"architectures": ["Qwen3_5ForCausalLM"]}
    name = "Qwen3NextForCausalLM" if has_grouped_rows(keys.file) else "Qwen3_5MoeForCausalLM"
    return shared | {
        "architectures": [name],
        "num_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.size("expert_shared_feed_forward_length"),
        "norm_topk_prob": True,  # no key for it: true in every published model
    }


def has_grouped_rows(file: GGUFFile) -> bool:
    """Return True if linear attention has one input matrix, grouped by key head: an old Qwen 3 Next."""
    return any(name.endswith(".ssm_in.weight") for name in file.tensors)


def _layer_types(keys: Keys, num_layers: int, *, default: int = 6) -> list[str]:
    """Return the type of each layer, given as a list, or as a period whose last layer has full attention."""
    pattern = keys.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list) or not all(isinstance(is_local, bool) for is_local in pattern):
        every = keys.size("attention.sliding_window_pattern", default=default)
        pattern = [(layer + 1) % every != 0 for layer in range(num_layers)]
    return ["sliding_attention" if is_local else "full_attention" for is_local in pattern]


def _gpt2_config(keys: Keys) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": keys.size("embedding_length"),
        "n_layer": keys.size("block_count", at_most=MAX_LAYERS),
        "n_head": keys.size("attention.head_count"),
        "n_positions": keys.size("context_length"),
        "n_inner": keys.size("feed_forward_length"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def _gemma4_config(keys: Keys) -> dict[str, Any]:
    """Read facts of layers, lists if they differ; a table tells which pairs rotate: divisors 1, or 1e30."""
    num_layers, tensors = keys.size("block_count", at_most=MAX_LAYERS), keys.file.tensors
    types = _layer_types(keys, num_layers)
    head_dim, local_dim = keys.size("attention.key_length"), keys.size("attention.key_length_swa")
    kv_heads, mlp_sizes = (
        _per_layer(keys, name, num_layers) for name in ("attention.head_count_kv", "feed_forward_length")
    )
    sizes = {
        str(layer): {
            "head_dim": head_dim if kind == "full_attention" else local_dim,
            "num_key_value_heads": count,
        }
        for layer, (kind, count) in enumerate(zip(types, kv_heads, strict=False))
    }
    divisors = _table(keys, ROPE_FACTORS, head_dim // 2)
    num_pairs = divisors.count(1.0)
    if not all(divisor > 1e20 for divisor in divisors[num_pairs:]):
        raise ConfigError(f"{keys.file.path} stretches rotary positions in a way that is not Gemma 4's")
    first_global = types.index("full_attention") if "full_attention" in types else num_layers - 1
    experts: dict[str, Any] = {}
    if keys.optional_size("expert_count"):
        experts = {
            "enable_moe_block": True,
            "num_experts": keys.size("expert_count"),
            "top_k_experts": keys.size("expert_used_count"),
            "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        }
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "hidden_size": keys.size("embedding_length"),
        "intermediate_size": mlp_sizes[0],
        "num_hidden_layers": num_layers,
        "num_attention_heads": keys.size("attention.head_count"),
        "num_key_value_heads": kv_heads[0],
        "head_dim": local_dim,
        "per_layer_config": sizes,
        "max_position_embeddings": keys.size("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "sliding_window": keys.size("attention.sliding_window"),
        "layer_types": types,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 2 * num_pairs / head_dim,
                "rope_theta": keys.number("rope.freq_base", default=1e6),
            },
            "sliding_attention": {"rope_theta": keys.number("rope.freq_base_swa", default=1e4)},
        },
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
        "hidden_size_per_layer_input": keys.optional_size("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": tensors["token_embd.weight"].shape[0],
        "num_kv_shared_layers": keys.optional_size("attention.shared_kv_layers"),
        "use_double_wide_mlp": mlp_sizes[-1] == 2 * mlp_sizes[0],
        "attention_k_eq_v": f"blk.{first_global}.attn_v.weight" not in tensors,
        **experts,
    }


def _per_layer(keys: Keys, name: str, num_layers: int) -> list[int]:
    """Return a positive integer for each layer, given as a list or as one number for all."""
    value = keys.get(name)
    if not isinstance(value, list):
        return [keys.size(name)] * num_layers
    if len(value) != num_layers:
        raise CheckpointError(f"{name!r} in {keys.where} must have {num_layers} numbers, got {len(value)}")
    return [RawConfig({name: each}, keys.where).size(name) for each in value]


def _rope_scaling(keys: Keys, head_dim: int, rotated: int) -> dict[str, Any] | None:
    if ROPE_FACTORS in keys.file.tensors:
        return _llama3_scaling(keys, head_dim)
    if any(name in keys.file.tensors for name in LONGROPE_FACTORS.values()):
        factors = {key: _table(keys, name, rotated // 2) for key, name in LONGROPE_FACTORS.items()}
        return {"rope_type": "longrope", "attention_factor": keys.get("rope.scaling.attn_factor"), **factors}
    kind = str(keys.get("rope.scaling.type") or "none")
    if kind == "none":
        return None
    if keys.number("rope.scaling.attn_factor", default=1.0) != 1.0:
        raise ConfigError(f"{keys.where} has an attention factor of its own, which is not supported")
    original = keys.size("rope.scaling.original_context_length", default=keys.size("context_length"))
    scaling = {"rope_type": kind, "factor": keys.number("rope.scaling.factor", default=1.0)}
    if kind == "yarn":
        scaling |= _yarn_settings(keys)
    return scaling | {"original_max_position_embeddings": original}


def _yarn_settings(keys: Keys) -> dict[str, float]:
    """Read the settings of yarn that a file may leave out."""
    if keys.number("rope.scaling.yarn_ext_factor", default=1.0) != 1.0:
        raise ConfigError(f"{keys.where} extrapolates yarn by a factor, which is not supported")
    names = {"attention_factor": "attn_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
    found = {ours: keys.get(f"rope.scaling.yarn_{theirs}") for ours, theirs in names.items()}
    if weight := keys.get("rope.scaling.yarn_log_multiplier"):
        found |= {"mscale": 1.0, "mscale_all_dim": weight}
    return {name: value for name, value in found.items() if value is not None}


def _table(keys: Keys, name: str, count: int) -> list[float]:
    """Return the numbers of a tensor that has one for each pair of channels."""
    tensor = keys.file.tensors.get(name)
    if tensor is None or tensor.shape != (count,) or tensor.kind is not GGMLType.F32:
        raise CheckpointError(f"{keys.file.path}: {name!r} must be {count} numbers of type F32")
    numbers: list[float] = keys.file.packed_rows(name)[0].view("<f4").tolist()
    return numbers


def _llama3_scaling(keys: Keys, head_dim: int) -> dict[str, Any] | None:
    """Recover the parameters of a table of divisors, or refuse a table that is not Llama 3's."""
    path, divisors = keys.file.path, _table(keys, ROPE_FACTORS, head_dim // 2)
    if all(divisor == 1.0 for divisor in divisors):
        return None
    factor = max(divisors)  # the slowest pairs are divided by the full factor
    low, high, original = _LLAMA3
    theta = keys.number("rope.freq_base", default=1e4)
    is_llama3 = math.isfinite(factor) and factor > 1
    for pair, divisor in enumerate(divisors if is_llama3 else []):
        turns = original * theta ** (-2 * pair / head_dim) / (2 * math.pi)
        keep = min(max((turns - low) / (high - low), 0.0), 1.0)
        is_llama3 &= math.isclose(divisor, 1 / (keep + (1 - keep) / factor), rel_tol=1e-3)
    if not is_llama3:
        raise ConfigError(f"{path} stretches rotary positions in a way that is not Llama 3's")
    return {
        "rope_type": "llama3",
        "factor": round(factor, 4),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _eos_ids(metadata: Mapping[str, Any]) -> list[int]:
    names: tuple[str, ...] = ("eos", "eot", "eom")  # end of sequence, of turn, of message
    if metadata.get("general.architecture") == "gpt-oss":  # its answers have several messages
        names = names[:1]
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    return list(dict.fromkeys(token_id for token_id in ids if isinstance(token_id, int)))
