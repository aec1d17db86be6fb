"""Write a tiny random checkpoint of any family: what a hub would give, in a hundred kilobytes.

    python scripts/make_checkpoint.py qwen3 /tmp/tiny-qwen3
    python scripts/make_checkpoint.py llama /tmp/tiny-llama --layers 4 --shards 3 --dtype bfloat16

    OUT_DIR/
      config.json               the keys a published checkpoint of the family has
      generation_config.json    bos and eos ids
      model.safetensors         or model-0000i-of-0000N.safetensors and model.safetensors.index.json
      tokenizer.json            a byte-level BPE trained on the text below, with the family's special tokens
      tokenizer_config.json

No other library's model code is needed: names and shapes come from the family's own weight map. The
weights keep activations near one, and norm weights and biases are random too, so that every tensor
shows in the logits. The same arguments always write the same files.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from infer.errors import ConfigError, InferError
from infer.layers.linear import ExpertLinear
from infer.layers.norm import RMSNorm
from infer.models.model import Model
from infer.models.registry import find_family
from infer.models.weight_map import Target, WeightMap, names_an_expert

BARE_NAMES = (
    ".A_log",
    ".dt_bias",
    ".layer_scalar",
    ".router.scale",
    ".per_expert_scale",
)  # tensors without a leaf
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

CORPUS = """\
Once there was a small engine that learned to read. Every morning it took the words apart, letter by
letter, and every evening it put them together again. "Why do you do that?" asked the old clock on the
wall. "Because a word is only a path through smaller words," said the engine, "and I want to know all
the paths." The clock thought about this for an hour, which is a short time for a clock, and then it
said: "Then count the steps, and you will never be lost." So the engine counted: 1, 2, 3, 4, 5, 6, 7,
8, 9, 10, 20, 30, 100, 1000. It counted the stars in the sky and the stones in the river; it counted
the questions that people asked, and the answers that it gave. The sky is blue because the air bends
blue light more than red light. The capital of France is Paris. Water boils at one hundred degrees.
def add(a, b): return a + b
{"name": "engine", "tokens": [1, 2, 3], "done": true, "error": null}
Where is the river? The river is behind the house. What is the time? The time is now. Who are you? I am
the engine, and this is my song: the wheel turns, the river runs, the letters wait, the word becomes.
"""


@dataclass(frozen=True, slots=True)
class FamilyTokens:
    """The special tokens of a family; the first `eos` ends a turn."""

    special: tuple[str, ...]
    eos: tuple[str, ...]
    bos: str | None = None
    adds_bos: bool = False  # when encoding plain text
    plain: tuple[str, ...] = field(default=())  # one token each, but shown to people


_MISTRAL = FamilyTokens(
    ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"), eos=("</s>",), bos="<s>", adds_bos=True
)
_QWEN2 = FamilyTokens(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), eos=("<|im_end|>", "<|endoftext|>"))
_QWEN3 = FamilyTokens(
    ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    eos=("<|im_end|>", "<|endoftext|>"),
    plain=("<think>", "</think>"),
)
_GEMMA = FamilyTokens(
    ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
    eos=("<end_of_turn>", "<eos>"),
    bos="<bos>",
    adds_bos=True,
)
_OLMO = FamilyTokens(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), eos=("<|endoftext|>", "<|im_end|>"))
TOKENS = {
    "llama": FamilyTokens(
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        eos=("<|eot_id|>", "<|end_of_text|>"),
        bos="<|begin_of_text|>",
        adds_bos=True,
    ),
    "mistral": _MISTRAL,
    "mixtral": _MISTRAL,
    "qwen2": _QWEN2,
    "qwen2_moe": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "qwen3_next": _QWEN3,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "gemma4": FamilyTokens(
        ("<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", "<|channel>", "<channel|>"),
        eos=("<turn|>", "<eos>"),
        bos="<bos>",
        adds_bos=True,
    ),
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "olmoe": _OLMO,
    "gpt_oss": FamilyTokens(
        (
            "<|startoftext|>",
            "<|endoftext|>",
            "<|return|>",
            "<|channel|>",
            "<|start|>",
            "<|end|>",
            "<|message|>",
            "<|call|>",
            "<|constrain|>",
        ),
        eos=("<|return|>", "<|call|>", "<|endoftext|>"),
    ),  # fmt: skip
    "granite": FamilyTokens(
        ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"),
        eos=("<|end_of_text|>",),
        bos="<|end_of_text|>",
    ),
    "smollm3": _QWEN3,
    "exaone4": FamilyTokens(
        ("[PAD]", "[BOS]", "[EOS]", "[|endofturn|]"), eos=("[|endofturn|]",), bos="[BOS]"
    ),
    "phi3": FamilyTokens(
        ("<unk>", "<s>", "<|endoftext|>", "<|assistant|>", "<|user|>", "<|system|>", "<|end|>"),
        eos=("<|end|>", "<|endoftext|>"),
        bos="<s>",
    ),
    "glm4": FamilyTokens(
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        eos=("<|endoftext|>", "<|user|>", "<|observation|>"),
    ),
    "ministral3": _MISTRAL,
    "cohere2": FamilyTokens(
        ("<PAD>", "<BOS_TOKEN>", "<EOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        eos=("<|END_OF_TURN_TOKEN|>",),
        bos="<BOS_TOKEN>",
        adds_bos=True,
    ),
    "mistral3": _MISTRAL,
    "qwen2_vl": _QWEN2,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "gpt2": FamilyTokens(("<|endoftext|>",), eos=("<|endoftext|>",), bos="<|endoftext|>"),
}

# families of models that read images: the name of their class, and the family of their text part
READS_IMAGES = {
    "mistral3": ("Mistral3", "mistral"),
    "qwen2_vl": ("Qwen2_5_VL", "qwen2"),
    "qwen3_vl": ("Qwen3VL", "qwen3"),
    "qwen3_vl_moe": ("Qwen3VLMoe", "qwen3_moe"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large the network is."""

    num_layers: int = 2
    hidden_size: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    vocab_size: int = 512
    context_len: int = 256
    window: int = 16  # of the families that have one
    num_experts: int = 6  # likewise
    num_choices: int = 2


def make_checkpoint(
    family: str,
    out_dir: Path,
    *,
    sizes: Sizes | None = None,
    seed: int = 0,
    num_shards: int = 1,
    dtype: str = "float32",
    tie_embeddings: bool | None = None,
    **changes: Any,
) -> None:
    """Write the files; `tie_embeddings` None is the family's habit, `changes` are further config keys."""
    if any(out_dir.glob("*.safetensors")):
        raise ConfigError(f"{out_dir} already holds a checkpoint; delete it or choose another directory")
    sizes = sizes or Sizes()
    tokenizer = train_tokenizer(family, sizes.vocab_size)
    raw = raw_config(family, sizes) | _token_ids(family, tokenizer) | {"dtype": dtype} | changes
    if tie_embeddings is not None:
        raw["tie_word_embeddings"] = tie_embeddings
    found = find_family(raw)
    with torch.device("meta"):  # only names and shapes are wanted
        model = found.build(found.read_config(raw))
    tensors = dict(random_tensors(model, found.weight_map, seed, DTYPES[dtype]))
    if family == "gpt_oss":
        tensors |= gpt_oss_experts(model, seed, DTYPES[dtype])

    out_dir.mkdir(parents=True, exist_ok=True)
    _write_json(out_dir / "config.json", raw)
    _write_json(out_dir / "generation_config.json", _token_ids(family, tokenizer))
    _write_tensors(out_dir, tensors, num_shards)
    tokenizer.save(str(out_dir / "tokenizer.json"))
    tokens = TOKENS[family]
    _write_json(
        out_dir / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens.bos,
            "eos_token": tokens.eos[0],
            "add_bos_token": tokens.adds_bos,
            "clean_up_tokenization_spaces": False,
            "model_max_length": sizes.context_len,
        },
    )


def raw_config(family: str, sizes: Sizes) -> dict[str, Any]:
    """The config.json of a published checkpoint of this family, at these sizes."""
    if family == "gpt2":
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "activation_function": "gelu_new",
            "n_embd": sizes.hidden_size,
            "n_head": sizes.num_heads,
            "n_layer": sizes.num_layers,
            "n_positions": sizes.context_len,
            "layer_norm_epsilon": 1e-5,
            "vocab_size": sizes.vocab_size,
        }
    common = {
        "hidden_act": "silu",
        "hidden_size": sizes.hidden_size,
        "intermediate_size": 2 * sizes.hidden_size,
        "max_position_embeddings": sizes.context_len,
        "num_attention_heads": sizes.num_heads,
        "num_hidden_layers": sizes.num_layers,
        "num_key_value_heads": sizes.num_kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "vocab_size": sizes.vocab_size,
    }
    head_dim = sizes.hidden_size // sizes.num_heads
    hybrid = {
        "head_dim": head_dim,
        "full_attention_interval": 2,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": head_dim // 2,
        "linear_value_head_dim": head_dim // 2,
        "linear_num_key_heads": sizes.num_kv_heads,
        "linear_num_value_heads": sizes.num_heads,
    }
    experts = {
        "moe_intermediate_size": sizes.hidden_size // 2,
        "shared_expert_intermediate_size": sizes.hidden_size // 2,
        "norm_topk_prob": True,
        "num_experts": sizes.num_experts,
        "num_experts_per_tok": sizes.num_choices,
    }
    of_family: dict[str, dict[str, Any]] = {
        "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": head_dim},
        "mistral": {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": sizes.window,
        },
        "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False},
        "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": head_dim},
        "mixtral": {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": sizes.num_experts,
            "num_experts_per_tok": sizes.num_choices,
            "sliding_window": None,
        },
        "qwen2_moe": {
            "architectures": ["Qwen2MoeForCausalLM"],
            "model_type": "qwen2_moe",
            "decoder_sparse_step": 1,
            "moe_intermediate_size": sizes.hidden_size // 2,
            "norm_topk_prob": False,
            "num_experts": sizes.num_experts,
            "num_experts_per_tok": sizes.num_choices,
            "shared_expert_intermediate_size": sizes.hidden_size,
        },
        "qwen3_moe": {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "head_dim": head_dim,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": sizes.hidden_size // 2,
            "norm_topk_prob": True,
            "num_experts": sizes.num_experts,
            "num_experts_per_tok": sizes.num_choices,
        },
        "qwen3_5": {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", **hybrid},
        "qwen3_5_moe": {
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "model_type": "qwen3_5_moe_text",
            **hybrid,
            **experts,
        },
        "qwen3_next": {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            **hybrid,
            **experts,
        },
        "gemma2": {
            "architectures": ["Gemma2ForCausalLM"],
            "model_type": "gemma2",
            "head_dim": head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 4,
            "sliding_window": sizes.window,
            "attn_logit_softcapping": 2.5,
            "final_logit_softcapping": 2.0,
            "tie_word_embeddings": True,
        },
        "gemma3": {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "head_dim": head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": head_dim,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "sliding_window": sizes.window,
            "sliding_window_pattern": 2,
            "tie_word_embeddings": True,
        },
        "gemma4": {
            "architectures": ["Gemma4ForCausalLM"],
            "model_type": "gemma4_text",
            "head_dim": head_dim,
            "global_head_dim": 2 * head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": sizes.vocab_size,
            "layer_types": _types(sizes.num_layers, lambda layer: layer % 2 == 0),
            "num_kv_shared_layers": max(sizes.num_layers - 2, 0),
            "sliding_window": sizes.window,
            "tie_word_embeddings": True,
        },
        "olmo2": {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
        "gpt_oss": {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "head_dim": head_dim,
            "num_local_experts": sizes.num_experts,
            "num_experts_per_tok": sizes.num_choices,
            "sliding_window": sizes.window,
            "swiglu_limit": 7.0,
            "rope_theta": 150_000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": sizes.context_len // 4,
            },
        },
        "olmoe": {
            "architectures": ["OlmoeForCausalLM"],
            "model_type": "olmoe",
            "clip_qkv": 4.0,
            "norm_topk_prob": False,
            "num_experts": sizes.num_experts,
            "num_experts_per_tok": sizes.num_choices,
        },
        "olmo3": {
            "architectures": ["Olmo3ForCausalLM"],
            "model_type": "olmo3",
            "layer_types": _types(sizes.num_layers, lambda layer: layer % 2 == 0),
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": max(sizes.context_len // 4, 2),
            },
            "sliding_window": sizes.window,
        },
        "granite": {
            "architectures": ["GraniteForCausalLM"],
            "model_type": "granite",
            "attention_multiplier": 1 / head_dim,
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
            "tie_word_embeddings": True,
        },
        "smollm3": {
            "architectures": ["SmolLM3ForCausalLM"],
            "model_type": "smollm3",
            "pad_token_id": 0,
            "no_rope_layer_interval": 2,
            "tie_word_embeddings": True,
        },
        "exaone4": {
            "architectures": ["Exaone4ForCausalLM"],
            "model_type": "exaone4",
            "head_dim": head_dim,
            "layer_types": _types(sizes.num_layers, lambda layer: layer % 2 == 0),
            "sliding_window": sizes.window,
        },
        "phi3": {
            "architectures": ["Phi3ForCausalLM"],
            "model_type": "phi3",
            "pad_token_id": 0,
            "original_max_position_embeddings": max(sizes.context_len // 2, 2),
            "partial_rotary_factor": 0.75,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0 + 0.01 * pair for pair in range(3 * head_dim // 8)],
                "long_factor": [1.0 + 0.5 * pair for pair in range(3 * head_dim // 8)],
            },
            "tie_word_embeddings": True,
        },
        "glm4": {
            "architectures": ["Glm4ForCausalLM"],
            "model_type": "glm4",
            "pad_token_id": 0,
            "attention_bias": True,
            "head_dim": head_dim,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
        },
    }
    of_family["cohere2"] = {
        "architectures": ["Cohere2ForCausalLM"],
        "model_type": "cohere2",
        "layer_norm_eps": 1e-5,
        "layer_types": _types(sizes.num_layers, lambda layer: layer % 2 == 0),
        "logit_scale": 0.25,
        "sliding_window": sizes.window,
        "tie_word_embeddings": True,
    }
    of_family["ministral3"] = {
        "architectures": ["Ministral3ForCausalLM"],
        "model_type": "ministral3",
        "head_dim": head_dim,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": max(sizes.context_len // 4, 2),
            "llama_4_scaling_beta": 0.1,
        },
    }
    if family in READS_IMAGES:
        name, text = READS_IMAGES[family]
        return {
            "architectures": [f"{name}ForConditionalGeneration"],
            "model_type": family,
            "text_config": common
            | of_family[text]
            | {"architectures": None, "head_dim": head_dim, "sliding_window": None},
            "tie_word_embeddings": False,
        }
    if family not in of_family:
        raise ConfigError(f"unknown family {family!r}; known: {', '.join(TOKENS)}")
    return common | of_family[family]


def _types(num_layers: int, slides: Callable[[int], bool]) -> list[str]:
    """The `layer_types` of a config."""
    return ["sliding_attention" if slides(layer) else "full_attention" for layer in range(num_layers)]


def random_tensors(
    model: Model, weight_map: WeightMap, seed: int, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a checkpoint under the name and in the layout that checkpoints use."""
    generator = torch.Generator().manual_seed(seed)
    modules: dict[str, Any] = dict(model.named_modules())
    filled: set[tuple[str, str | None]] = set()
    for key, target in weight_map.items():
        is_tied = target.module == "head" and model.config.tie_embeddings
        if target.ignored or is_tied:
            continue
        for layer in range(model.config.num_layers if "{}" in key else 1):
            path = target.module.format(layer)
            module = modules.get(path)  # None: not every layer has a router
            is_stack = isinstance(module, ExpertLinear)
            is_spare_name = (path, target.part) in filled  # a second spelling of the same module
            if module is None or is_spare_name or is_stack != names_an_expert(key, target):
                continue
            if target.part is not None and target.part not in module.parts:
                continue  # a layer that shares the keys and values of another one (gemma4)
            filled.add((path, target.part))
            for expert in range(len(module.weight) if is_stack else 1):
                for leaf, parameter in module.named_parameters(recurse=False):
                    shape = _shape(module, parameter[expert] if is_stack else parameter, target)
                    tensor = _random_tensor(module, leaf, shape, generator)
                    name = key.format(layer, expert)
                    tensor -= 3.0 * name.endswith(".A_log")  # so that states forget slowly
                    yield name if name.endswith(BARE_NAMES) else f"{name}.{leaf}", tensor.to(dtype)


def gpt_oss_experts(model: Model, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The experts of gpt-oss as its files have them: [in, out], gate and up by turns."""
    generator = torch.Generator().manual_seed(seed)
    config, tensors = model.config, dict[str, torch.Tensor]()
    assert config.experts is not None, config
    num, size, width = config.experts.num_experts, config.experts.size, config.hidden_size
    for layer in range(config.num_layers):
        for name, rows, columns in (("gate_up_proj", 2 * size, width), ("down_proj", width, size)):
            stem = f"model.layers.{layer}.mlp.experts.{name}"
            weight = torch.randn(num, columns, rows, generator=generator) * columns**-0.5
            tensors[stem] = weight.to(dtype)
            tensors[f"{stem}_bias"] = (0.3 * torch.randn(num, rows, generator=generator)).to(dtype)
    return tensors


def _shape(module: Any, parameter: torch.Tensor, target: Target) -> tuple[int, ...]:
    shape = list(parameter.shape)
    if target.part is not None:
        rows = module.spec.part_rows(target.part)
        shape[0] = rows.stop - rows.start
    return tuple(reversed(shape) if target.transposed else shape)


def _random_tensor(
    module: Any, leaf: str, shape: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if leaf == "bias":
        return 0.1 * noise
    if len(shape) == 1:  # a norm: around 1, or around 0 where the norm itself adds the 1
        centre = 1.0 - module.offset if isinstance(module, RMSNorm) else 1.0
        return 0.1 * noise + centre
    in_features: int = module.weight.shape[-1]  # our weights are [out, in], whatever the file's layout
    return noise / math.sqrt(in_features)


def train_tokenizer(family: str, vocab_size: int) -> Tokenizer:
    """A byte-level BPE with the family's special tokens first; at most `vocab_size` tokens."""
    if family not in TOKENS:
        raise ConfigError(f"unknown family {family!r}; known: {', '.join(TOKENS)}")
    tokens = TOKENS[family]
    smallest = 256 + len(tokens.special) + len(tokens.plain)
    if vocab_size < smallest:
        raise ConfigError(f"vocab_size {vocab_size} is too small: bytes and special tokens need {smallest}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(tokens.plain),
        special_tokens=list(tokens.special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS.splitlines(), trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in tokens.plain])
    if tokens.adds_bos and tokens.bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens.bos} $A",
            pair=f"{tokens.bos} $A {tokens.bos} $B",
            special_tokens=[(tokens.bos, tokenizer.token_to_id(tokens.bos))],
        )
    return tokenizer


def _token_ids(family: str, tokenizer: Tokenizer) -> dict[str, Any]:
    tokens = TOKENS[family]
    eos_ids = [tokenizer.token_to_id(text) for text in tokens.eos]
    bos = tokens.bos or tokens.eos[-1]  # Qwen writes its <|endoftext|> there, though it never uses it
    return {
        "bos_token_id": tokenizer.token_to_id(bos),
        "eos_token_id": eos_ids if len(eos_ids) > 1 else eos_ids[0],
    }


def _write_tensors(out_dir: Path, tensors: dict[str, torch.Tensor], num_shards: int) -> None:
    names = list(tensors)
    if not 1 <= num_shards <= len(names):
        raise ConfigError(f"shards must be in 1..{len(names)}, the number of tensors, got {num_shards}")
    if num_shards == 1:
        save_file(tensors, out_dir / "model.safetensors", metadata={"format": "pt"})
        return
    shard_of: dict[str, str] = {}
    for shard in range(num_shards):
        chosen = names[shard * len(names) // num_shards : (shard + 1) * len(names) // num_shards]
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        save_file({name: tensors[name] for name in chosen}, out_dir / file_name, metadata={"format": "pt"})
        shard_of |= dict.fromkeys(chosen, file_name)
    total_size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    _write_json(
        out_dir / "model.safetensors.index.json",
        {"metadata": {"total_size": total_size}, "weight_map": shard_of},
    )


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Write a checkpoint from a shell."""
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", choices=list(TOKENS))
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--layers", type=int, default=Sizes().num_layers)
    parser.add_argument("--hidden", type=int, default=Sizes().hidden_size)
    parser.add_argument("--heads", type=int, default=Sizes().num_heads)
    parser.add_argument("--kv-heads", type=int, default=Sizes().num_kv_heads)
    parser.add_argument("--vocab", type=int, default=Sizes().vocab_size)
    parser.add_argument("--context", type=int, default=Sizes().context_len)
    parser.add_argument("--window", type=int, default=Sizes().window)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument(
        "--tied",
        action=argparse.BooleanOptionalAction,
        help="share embedding and head; default: the family's way",
    )
    args = parser.parse_args(argv)
    sizes = Sizes(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        vocab_size=args.vocab,
        context_len=args.context,
        window=args.window,
    )
    try:
        make_checkpoint(
            args.family,
            args.out_dir,
            sizes=sizes,
            seed=args.seed,
            num_shards=args.shards,
            dtype=args.dtype,
            tie_embeddings=args.tied,
        )
    except InferError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote a {args.family} checkpoint to {args.out_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
