"""The model families that this package can run, and the lookup of a checkpoint's family.

A family is four facts: its names in checkpoints, how to read its config, how to build its network, and
where each checkpoint tensor goes. A new model is one file and one row here (docs/adding-a-model.md).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from infer.errors import ConfigError
from infer.models import (
    cohere2,
    exaone4,
    gemma2,
    gemma3,
    gemma4,
    glm4,
    gpt2,
    gpt_oss,
    granite,
    llama,
    ministral3,
    mistral,
    mistral3,
    mixtral,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    qwen_vl,
    smollm3,
)
from infer.models.config import HEADLESS, ModelConfig, read_architectures
from infer.models.model import Model
from infer.models.weight_map import WeightMap


@dataclass(frozen=True, slots=True)
class Family:
    """Everything the loader needs to know about one kind of network."""

    name: str
    architectures: tuple[str, ...]  # names in a config's `architectures`
    model_types: tuple[str, ...]  # names in its `model_type`, read only if `architectures` is missing
    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    build: Callable[[ModelConfig], Model]
    weight_map: WeightMap
    load: Callable[[ModelConfig, torch.dtype, torch.device], Model] | None = None  # None: by the weight map


# fmt: off
FAMILIES: tuple[Family, ...] = (
    Family("llama", ("LlamaForCausalLM",), ("llama",),
           llama.read_config, llama.Llama, llama.WEIGHT_MAP),
    Family("mistral", ("MistralForCausalLM",), ("mistral",),
           mistral.read_config, llama.Llama, llama.WEIGHT_MAP),
    Family("mixtral", ("MixtralForCausalLM",), ("mixtral",),
           mixtral.read_config, mixtral.Mixtral, mixtral.WEIGHT_MAP),
    Family("qwen2", ("Qwen2ForCausalLM",), ("qwen2",),
           qwen2.read_config, llama.Llama, llama.WEIGHT_MAP),
    Family("qwen2_moe", ("Qwen2MoeForCausalLM",), ("qwen2_moe",),
           qwen2_moe.read_config, mixtral.Mixtral, qwen2_moe.WEIGHT_MAP),
    Family("qwen3", ("Qwen3ForCausalLM",), ("qwen3",),
           qwen3.read_config, llama.Llama, qwen3.WEIGHT_MAP),
    Family("qwen3_moe", ("Qwen3MoeForCausalLM",), ("qwen3_moe",),
           qwen3_moe.read_config, mixtral.Mixtral, qwen3_moe.WEIGHT_MAP),
    Family("qwen3_5", ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"), ("qwen3_5_text", "qwen3_5"),
           qwen3_5.read_config, qwen3_5.Qwen35, qwen3_5.WEIGHT_MAP),
    Family("qwen3_5_moe", ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
           ("qwen3_5_moe_text", "qwen3_5_moe"),
           qwen3_5_moe.read_config, qwen3_5.Qwen35, qwen3_5_moe.WEIGHT_MAP),
    Family("qwen3_next", ("Qwen3NextForCausalLM",), ("qwen3_next",),
           qwen3_next.read_config, qwen3_next.Qwen3Next, qwen3_next.WEIGHT_MAP),
    Family("qwen2_vl", ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
           ("qwen2_vl", "qwen2_5_vl"),
           qwen_vl.read_qwen2_vl, llama.Llama, qwen_vl.QWEN2_MAP),
    Family("qwen3_vl", ("Qwen3VLForConditionalGeneration",), ("qwen3_vl",),
           qwen_vl.read_qwen3_vl, llama.Llama, qwen_vl.QWEN3_MAP),
    Family("qwen3_vl_moe", ("Qwen3VLMoeForConditionalGeneration",), ("qwen3_vl_moe",),
           qwen_vl.read_qwen3_vl_moe, mixtral.Mixtral, qwen_vl.MOE_MAP),
    Family("gemma2", ("Gemma2ForCausalLM",), ("gemma2",),
           gemma2.read_config, gemma3.Sandwich, gemma2.WEIGHT_MAP),
    Family("gemma3", ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), ("gemma3_text", "gemma3"),
           gemma3.read_config, gemma3.Sandwich, gemma3.WEIGHT_MAP),
    Family("gemma4", ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"), ("gemma4_text", "gemma4"),
           gemma4.read_config, gemma4.Gemma4, gemma4.WEIGHT_MAP),
    Family("olmo2", ("Olmo2ForCausalLM",), ("olmo2",),
           olmo2.read_config, olmo2.Olmo2, olmo2.WEIGHT_MAP),
    Family("olmo3", ("Olmo3ForCausalLM",), ("olmo3",),
           olmo3.read_config, olmo2.Olmo2, olmo2.WEIGHT_MAP),
    Family("olmoe", ("OlmoeForCausalLM",), ("olmoe",),
           olmoe.read_config, mixtral.Mixtral, olmoe.WEIGHT_MAP),
    Family("gpt_oss", ("GptOssForCausalLM",), ("gpt_oss",),
           gpt_oss.read_config, mixtral.Mixtral, gpt_oss.WEIGHT_MAP),
    Family("granite", ("GraniteForCausalLM",), ("granite",),
           granite.read_config, granite.Granite, llama.WEIGHT_MAP),
    Family("smollm3", ("SmolLM3ForCausalLM",), ("smollm3",),
           smollm3.read_config, llama.Llama, llama.WEIGHT_MAP),
    Family("exaone4", ("Exaone4ForCausalLM",), ("exaone4",),
           exaone4.read_config, olmo2.Olmo2, olmo2.WEIGHT_MAP),
    Family("phi3", ("Phi3ForCausalLM",), ("phi3",),
           phi3.read_config, llama.Llama, phi3.WEIGHT_MAP),
    Family("glm4", ("Glm4ForCausalLM",), ("glm4",),
           glm4.read_config, gemma3.Sandwich, glm4.WEIGHT_MAP),
    Family("ministral3", ("Ministral3ForCausalLM",), ("ministral3",),
           ministral3.read_config, llama.Llama, llama.WEIGHT_MAP),
    Family("mistral3", ("Mistral3ForConditionalGeneration",), ("mistral3",),
           mistral3.read_config, llama.Llama, mistral3.WEIGHT_MAP),
    Family("cohere2", ("Cohere2ForCausalLM",), ("cohere2",),
           cohere2.read_config, cohere2.Cohere2, cohere2.WEIGHT_MAP),
    Family("gpt2", ("GPT2LMHeadModel",), ("gpt2",),
           gpt2.read_config, gpt2.GPT2, gpt2.WEIGHT_MAP),
)
# fmt: on


def find_family(raw: Mapping[str, Any]) -> Family:
    """Find the family of a checkpoint by its config's `architectures`, or by `model_type` if there are none.

    Embedding models (`Qwen3Model`) and classifiers (`Qwen3ForSequenceClassification`) are found, too.
    """
    for section in (raw, raw.get("text_config")):
        if isinstance(section, Mapping) and section.get("is_causal") is False:
            raise ConfigError(
                "'is_causal' in config.json is false: attention to later tokens is not supported"
            )
    architectures = read_architectures(raw)
    model_type = raw.get("model_type")
    headless = f"(Text)?({'|'.join(HEADLESS)})$"  # Text: the text part of a multimodal model
    names = {*architectures, *(re.sub(headless, "ForCausalLM", x) for x in architectures)}
    for family in FAMILIES:
        if not names.isdisjoint(family.architectures):
            return family
        if not architectures and model_type in family.model_types:
            return family
    given = ", ".join(map(str, architectures)) or (model_type and f"model_type {model_type}")
    raise ConfigError(
        f"this checkpoint is {given or 'of no named architecture'}, which no family here has code for"
    )


def get_family(name: str) -> Family:
    """Return the family of a `ModelConfig.family`; a model that transformers' code runs has none."""
    found = next((family for family in FAMILIES if family.name == name), None)
    if found is None:
        raise ConfigError(
            f"{name} runs with the code of transformers; this feature needs a family of this package"
        )
    return found
