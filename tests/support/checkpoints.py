"""Tiny models of every family, from the reference's own config classes, with weights that hide nothing.

`reference_model("llama", ...)` is a randomly initialised `transformers` model; `build_like(reference)` is
ours with the same weights, copied through the family's weight map. Norm weights and biases are random
too: with the usual ones and zeros a forgotten bias or a missing `1 + w` would not show.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from infer.layers.linear import ExpertLinear
from infer.loader.row_order import row_order
from infer.models.model import Model
from infer.models.registry import find_family
from infer.models.weight_map import WeightMap, find_target

VOCAB_SIZE = 199  # a prime: nothing else in a tiny model has this size
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_SMALL_EXPERTS = {"moe_intermediate_size": 56, "shared_expert_intermediate_size": 40}
TINY: dict[str, dict[str, Any]] = {
    "llama": _COMMON,
    "mistral": _COMMON | {"sliding_window": 5},
    "qwen2": _COMMON,
    "qwen3": _COMMON | {"head_dim": 16},
    "mixtral": _COMMON | {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2_moe": _COMMON
    | {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 56,
        "shared_expert_intermediate_size": 72,
        "mlp_only_layers": [1],
    },
    "qwen3_moe": _COMMON
    | {
        "head_dim": 16,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 56,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "gemma2": _COMMON
    | {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "query_pre_attn_scalar": 3,
        "sliding_window": 5,
        "attn_logit_softcapping": 2.5,
        "final_logit_softcapping": 1.5,
    },
    "gemma3": _COMMON
    | {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma4": _COMMON
    | {
        "num_hidden_layers": 6,
        "head_dim": 16,
        "global_head_dim": 24,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2,
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 1.5,
    },
    "qwen3_5": _COMMON | _HYBRID,
    "qwen3_5_moe": _COMMON | _HYBRID | {"num_experts": 6, "num_experts_per_tok": 2} | _SMALL_EXPERTS,
    "qwen3_next": _COMMON
    | _HYBRID
    | {"num_experts": 5, "num_experts_per_tok": 3, "mlp_only_layers": [1]}
    | _SMALL_EXPERTS,
    "olmo2": _COMMON,
    "olmo3": _COMMON
    | {
        "num_hidden_layers": 4,
        "sliding_window": 5,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 500_000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 8,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 500_000.0},
        },
    },
    "olmoe": _COMMON | {"num_experts": 5, "num_experts_per_tok": 2, "clip_qkv": 1.2},
    "gpt_oss": _COMMON
    | {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 8.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    },
    "granite": _COMMON
    | {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.3,
        "logits_scaling": 6.0,
    },
    "smollm3": _COMMON | {"num_hidden_layers": 4},
    "exaone4": _COMMON | {"num_hidden_layers": 4, "sliding_window": 5, "head_dim": 16},
    "phi3": _COMMON
    | {
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 128,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": [1.0, 1.1, 1.3, 1.5, 1.7, 2.0],
            "long_factor": [1.5, 2.0, 4.0, 9.0, 20.0, 40.0],
        },
    },
    "glm4": _COMMON | {"head_dim": 16},
    "ministral3": _COMMON
    | {
        "head_dim": 20,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 8,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.4,
        },
    },
    "cohere2": _COMMON | {"num_hidden_layers": 4, "sliding_window": 5, "logit_scale": 0.3},
    "gpt2": {"vocab_size": VOCAB_SIZE, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 128},
}
MOE_FAMILIES = ("mixtral", "qwen3_moe", "qwen2_moe")  # apart, because most tests need no second kind of MLP
# run by test_parity and test_more_families: other tests see no difference
MORE_FAMILIES = (
    "olmo2", "olmo3", "granite", "smollm3", "exaone4", "phi3", "glm4", "ministral3", "cohere2", "gemma4",
)  # fmt: skip
MORE_MOE_FAMILIES = ("olmoe", "gpt_oss")  # likewise
HYBRID_FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")  # in test_hybrid: their blocks hold states
UNCUT_FAMILIES = ("olmo2", "olmo3", "olmoe", "gemma4", *HYBRID_FAMILIES)  # ranks cannot share them
FAMILIES = tuple(
    family
    for family in TINY
    if family not in MOE_FAMILIES + MORE_FAMILIES + MORE_MOE_FAMILIES + HYBRID_FAMILIES
)


def reference_model(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A tiny `transformers` model of a family; `changes` override keys of its config."""
    import transformers

    classes: dict[str, tuple[Any, Any]] = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
        "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
        "qwen2_moe": (transformers.Qwen2MoeConfig, transformers.Qwen2MoeForCausalLM),
        "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM),
        "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
        "gemma4": (transformers.Gemma4TextConfig, transformers.Gemma4ForCausalLM),
        "qwen3_5": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM),
        "qwen3_5_moe": (transformers.Qwen3_5MoeTextConfig, transformers.Qwen3_5MoeForCausalLM),
        "qwen3_next": (transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM),
        "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM),
        "olmo3": (transformers.Olmo3Config, transformers.Olmo3ForCausalLM),
        "olmoe": (transformers.OlmoeConfig, transformers.OlmoeForCausalLM),
        "gpt_oss": (transformers.GptOssConfig, transformers.GptOssForCausalLM),
        "granite": (transformers.GraniteConfig, transformers.GraniteForCausalLM),
        "smollm3": (transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM),
        "exaone4": (transformers.Exaone4Config, transformers.Exaone4ForCausalLM),
        "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM),
        "glm4": (transformers.Glm4Config, transformers.Glm4ForCausalLM),
        "ministral3": (transformers.Ministral3Config, transformers.Ministral3ForCausalLM),
        "cohere2": (transformers.Cohere2Config, transformers.Cohere2ForCausalLM),
        "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
    }
    config_class, model_class = classes[family]
    special_ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
        config = config_class(**(TINY[family] | special_ids | changes))
        config._attn_implementation = "eager"
        model = model_class(config)
    randomize(model, seed)
    return model.to(dtype).eval()


def randomize(model: nn.Module, seed: int) -> None:
    """Fill every parameter so that each matrix roughly keeps the size of what it multiplies."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("bias"):
            parameter.data = 0.3 * noise
        elif name.endswith("A_log"):  # slow enough that states remember what came long before
            parameter.data = noise - 2.0
        elif parameter.dim() == 1:
            parameter.data = parameter.data + 0.3 * noise  # around 1, or around 0 where offset is 1
        elif "embed" in name or "wte" in name or "wpe" in name:
            parameter.data = 0.8 * noise
        else:
            parameter.data = noise * parameter.shape[-1] ** -0.5
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer += 0.3 * torch.randn(buffer.shape, generator=generator)


def raw_config(reference: Any) -> dict[str, Any]:
    """What the reference would write to config.json."""
    config: dict[str, Any] = reference.config.to_dict()
    return config | {"architectures": [type(reference).__name__]}


def build_like(reference: Any, raw: Mapping[str, Any] | None = None) -> Model:
    """Our model of the same family, with the reference's weights and dtype."""
    raw = raw_config(reference) if raw is None else raw
    family = find_family(raw)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(reference.dtype)
    try:
        model = family.build(family.read_config(raw))
    finally:
        torch.set_default_dtype(previous)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))  # whatever the weight map forgets poisons the logits
    copy_weights(model, named_tensors(reference), family.weight_map)
    return model


def named_tensors(reference: Any) -> dict[str, torch.Tensor]:
    """The reference's tensors under the names of a weight map; of gpt-oss, which are translated, by hand."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in reference.state_dict().items():
        if reference.config.model_type != "gpt_oss" or ".experts." not in name:
            found[name] = tensor
            continue
        leaf = ".bias" if name.endswith("_bias") else ""
        rows = tensor if leaf else tensor.transpose(1, 2)
        name = name.removesuffix("_bias")
        if name.endswith("gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            found |= {f"{stem}gate_proj{leaf}": rows[:, ::2], f"{stem}up_proj{leaf}": rows[:, 1::2]}
        else:
            found[name + leaf] = rows
    return found


def copy_weights(model: Model, tensors: Mapping[str, torch.Tensor], weight_map: WeightMap) -> None:
    """What the loader does, in ten lines: each checkpoint tensor into its final place."""
    for name, tensor in tensors.items():
        target, leaf = find_target(name, weight_map)
        if target.ignored or (target.module == "head" and model.config.tie_embeddings):
            continue
        module: Any = model.get_submodule(target.module)
        rows = slice(None) if target.part is None else module.spec.part_rows(target.part)
        whole = getattr(module, leaf).data
        is_stack = isinstance(module, ExpertLinear) and target.expert is None and target.part is not None
        place = whole[:, rows] if is_stack else whole[rows]
        source = tensor.t() if target.transposed else tensor
        order = row_order(model.config, target.module, target.part, getattr(module, "parts", {}), len(source))
        source = source if order is None else source[order]
        assert place.shape == source.shape, (name, tuple(place.shape), tuple(source.shape))
        place.copy_(source)
