"""Tiny checkpoints on disk, written by the formats' own libraries from a reference model.

`write_gguf` does to the tensors what the format's converter does to them: names from the `gguf`
package's own table, rows of q and k reordered for llama, 1 added to Gemma's norms, GPT-2 transposed,
value heads of linear attention reordered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from tests.support.checkpoints import named_tensors, raw_config

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
ARCHITECTURES |= {"gemma3": "gemma3", "gpt2": "gpt2", "mixtral": "llama", "qwen3_moe": "qwen3moe"}
ARCHITECTURES |= {"qwen2_moe": "qwen2moe", "gemma2": "gemma2", "gemma4": "gemma4"}
ARCHITECTURES |= {name: name for name in ("granite", "smollm3", "olmo2", "exaone4", "phi3", "glm4")}
ARCHITECTURES |= {"olmo3": "olmo2", "gpt_oss": "gpt-oss", "olmoe": "olmoe"}
ARCHITECTURES |= {"cohere2": "cohere2", "ministral3": "mistral3"}
ARCHITECTURES |= {"qwen3_next": "qwen3next", "qwen3_5": "qwen35", "qwen3_5_moe": "qwen35moe"}
HYBRID = ("qwen3_next", "qwen3_5", "qwen3_5_moe")


def state(reference: Any) -> dict[str, torch.Tensor]:
    """The tensors a checkpoint of this model holds: a tied head is not stored."""
    tensors = {name: tensor.contiguous() for name, tensor in reference.state_dict().items()}
    if reference.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return tensors


def write_directory(directory: Path, reference: Any, *, num_shards: int = 1, **config: Any) -> Path:
    """Write config.json and the weights, in one file or in several with an index."""
    directory.mkdir(parents=True, exist_ok=True)
    raw = json.loads(reference.config.to_json_string(use_diff=False))
    raw |= {"architectures": raw_config(reference)["architectures"], **config}
    (directory / "config.json").write_text(json.dumps(raw))
    write_weights(directory, state(reference), num_shards=num_shards)
    return directory


def write_weights(directory: Path, tensors: dict[str, torch.Tensor], *, num_shards: int = 1) -> None:
    """Write safetensors files; the tensors are dealt out to the shards in turn."""
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return
    names = [f"model-{i + 1:05}-of-{num_shards:05}.safetensors" for i in range(num_shards)]
    weight_map = {name: names[i % num_shards] for i, name in enumerate(tensors)}
    for shard in names:
        save_file({n: t for n, t in tensors.items() if weight_map[n] == shard}, directory / shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def write_gguf(
    path: Path,
    reference: Any,
    *,
    kind: str = "F32",
    kinds: Mapping[str, str] | None = None,
    extra: dict[str, np.ndarray[Any, Any]] | None = None,
    numbers: Mapping[str, Any] | None = None,
    architecture: str = "",
    is_old: bool = False,
    is_fused: bool = False,
) -> Path:
    """Write a GGUF file; matrices whose rows fit are stored as `kind`, the rest as F32.

    `kinds` has others by a part of the tensor's name: {"ffn_down": "Q8_0"}. `numbers` are further keys of the
    architecture, which is the family's unless given. `is_old`: as the first files of Qwen 3 Next were
    written; `is_fused`: gate and up of experts are one stack.
    """
    family = reference.config.model_type.removesuffix("_text")
    architecture = architecture or ARCHITECTURES[family]
    writer = gguf.GGUFWriter(path, architecture)
    add_metadata(writer, reference.config, family)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, reference.config.num_hidden_layers)
    for key, value in (numbers or {}).items():
        kinds_of: dict[type, Any] = {
            list: writer.add_array,
            float: writer.add_float32,
            int: writer.add_uint32,
        }
        kinds_of[type(value)](f"{architecture}.{key}", value)
    is_fused |= family == "gemma4"
    tensors = state(reference) if is_fused else _split_gate_up(state(reference))
    if family in HYBRID:
        tensors = _hybrid_tensors(tensors, reference.config, family, is_old=is_old)
    if family == "gpt_oss":  # named without a leaf: sinks, and experts, whose gate and up are split
        named = named_tensors(reference)
        tensors = {n if n.endswith((".weight", ".bias")) else f"{n}.weight": t for n, t in named.items()}
    for name, tensor in tensors.items():
        if is_fused and family in HYBRID and name.endswith("_proj"):
            name += ".weight"
        stored_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        for end, leaf in GEMMA4_LEAVES.items():
            if name.endswith(end):
                known = names.get_name(name.removesuffix(end) + leaf[0])
                stored_name = f"{known}.{leaf[1]}"
        assert stored_name is not None, name
        chosen = next((other for part, other in (kinds or {}).items() if part in stored_name), kind)
        add_tensor(writer, stored_name, convert(architecture, name, tensor, reference.config), chosen)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _split_gate_up(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The stacks of experts as the format has them: gate and up apart, [E, F, D] each."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(".gate_up_proj"):
            found |= dict(
                zip(
                    (name.replace("gate_up", part) for part in ("gate", "up")),
                    tensor.chunk(2, dim=1),
                    strict=True,
                )
            )
        else:
            found[name] = tensor
    return {name + ".weight" * name.endswith("_proj"): tensor for name, tensor in found.items()}


def _hybrid_tensors(
    tensors: dict[str, torch.Tensor], config: Any, family: str, *, is_old: bool
) -> dict[str, torch.Tensor]:
    """The converter's changes to Qwen 3 Next and Qwen 3.5, under the names that its table knows."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    size, served = config.linear_value_head_dim, values // keys
    first = 2 * keys * config.linear_key_head_dim

    def tiled(
        tensor: torch.Tensor, dim: int, size: int
    ) -> torch.Tensor:  # [key head, r] becomes [r, key head]
        shape = tensor.shape
        parts = tensor.reshape(*shape[:dim], keys, served, size, *shape[dim + 1 :])
        return parts.transpose(dim, dim + 1).reshape(shape)

    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if ".conv1d." in name:
            tensor = tensor.squeeze()
        if family != "qwen3_next":
            if ".in_proj_qkv." in name or ".conv1d." in name:
                tensor = torch.cat([tensor[:first], tiled(tensor[first:], 0, size)])
            elif ".in_proj_z." in name:
                tensor = tiled(tensor, 0, size)
            elif name.endswith((".in_proj_b.weight", ".in_proj_a.weight", ".A_log", ".dt_bias")):
                tensor = tiled(tensor, 0, 1)
            elif ".linear_attn.out_proj." in name:
                tensor = tiled(tensor, 1, size)
        if name.endswith("norm.weight") and ".linear_attn." not in name:
            tensor = tensor + 1
        if name.endswith(".A_log"):
            tensor = -tensor.exp()
        if name.endswith(".dt_bias"):
            name = name.replace(".dt_bias", ".dt_proj.bias")
        if ".in_proj_qkvz." in name and not is_old:
            sizes = [config.linear_key_head_dim] * 2 + [served * size] * 2
            q, k, v, z = torch.split(tensor.view(keys, sum(sizes), -1), sizes, dim=1)
            found[name.replace("qkvz", "qkv")] = torch.cat([part.flatten(0, 1) for part in (q, k, v)])
            name, tensor = name.replace("qkvz", "z"), z.flatten(0, 1)
        found[name] = tensor
    return found


def add_metadata(writer: gguf.GGUFWriter, config: Any, family: str) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_head_count(config.num_attention_heads)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token{i}" for i in range(config.vocab_size)])
    if family == "gpt2":
        writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    if family == "cohere2":
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_logit_scale(config.logit_scale)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if family == "gemma4":
        add_gemma4_metadata(writer, config)
        return
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if family != "qwen3_5_moe":
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if family in ("mixtral", "qwen3_moe", "qwen2_moe", "gpt_oss", "olmoe", "qwen3_next", "qwen3_5_moe"):
        writer.add_expert_count(getattr(config, "num_local_experts", None) or config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if family in ("qwen3_moe", "qwen2_moe", "qwen3_next", "qwen3_5_moe"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if family in ("qwen2_moe", "qwen3_next", "qwen3_5_moe"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if family in ("mistral", "gemma2", "gemma3", "olmo3", "exaone4", "gpt_oss", "cohere2"):
        writer.add_sliding_window(config.sliding_window)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if family in ("olmo3", "exaone4"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if family == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if family in HYBRID:
        values = config.linear_num_value_heads
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(values)
        writer.add_ssm_inner_size(config.linear_value_head_dim * values)
        writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)
    if family == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    for edge in ("fast", "slow"):
        if f"beta_{edge}" in rope:
            getattr(writer, f"add_rope_scaling_yarn_beta_{edge}")(rope[f"beta_{edge}"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "partial_rotary_factor" in rope:
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
    if rope.get("rope_type") == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        for name in ("long", "short"):
            factors = np.array(rope[f"{name}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)


GEMMA4_LEAVES = {  # tensors without a leaf: the module that the format gives them to, and a leaf
    ".layer_scalar": (".layer_scalar", "weight"),
    ".router.scale": (".router.proj", "scale"),
    ".router.per_expert_scale": (".experts.down_proj", "scale"),
    ".experts.gate_up_proj": (".experts.gate_up_proj", "weight"),
    ".experts.down_proj": (".experts.down_proj", "weight"),
}


def add_gemma4_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    of_layers = [config.per_layer_config[layer] for layer in range(config.num_hidden_layers)]
    shared = config.num_hidden_layers - config.num_kv_shared_layers
    is_local = [kind == "sliding_attention" for kind in config.layer_types]
    writer.add_key_length(of_layers[-1].head_dim)
    writer.add_key_length_swa(of_layers[0].head_dim)
    writer.add_head_count_kv([layer.num_key_value_heads for layer in of_layers])
    widths = [2 if config.use_double_wide_mlp and n >= shared else 1 for n in range(len(of_layers))]
    writer.add_feed_forward_length([config.intermediate_size * width for width in widths])
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(is_local)
    ropes = config.rope_parameters
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    if config.final_logit_softcapping is not None:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    num_pairs = of_layers[-1].head_dim // 2
    num_turned = int(num_pairs * ropes["full_attention"]["partial_rotary_factor"])
    divisors = [1.0] * num_turned + [1e30] * (num_pairs - num_turned)
    writer.add_tensor("rope_freqs.weight", np.array(divisors, dtype=np.float32))


def convert(architecture: str, name: str, tensor: torch.Tensor, config: Any) -> np.ndarray[Any, Any]:
    """What the converter does to a tensor before it is stored."""
    if architecture in ("llama", "mistral3", "granite", "smollm3") and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        rest = tensor.shape[1:]
        tensor = (
            tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *rest)
            .swapaxes(1, 2)
            .reshape(tensor.shape)
        )
    if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
        tensor = tensor + 1
    if name.endswith("shared_expert_gate.weight"):
        tensor = tensor[0]
    if architecture == "gpt2" and ".c_" in name and tensor.dim() == 2:
        tensor = tensor.T
    return tensor.float().contiguous().numpy()


def add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray[Any, Any], kind: str) -> None:
    quantization = gguf.GGMLQuantizationType[kind]
    if kind == "F32" or values.ndim == 1 or values.shape[-1] % gguf.GGML_QUANT_SIZES[quantization][0]:
        writer.add_tensor(name, values)
        return
    packed = gguf.quants.quantize(values, quantization)
    writer.add_tensor(name, packed, raw_dtype=quantization)
