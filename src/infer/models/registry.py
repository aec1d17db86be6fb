"""Which families this package can run, and which of them a checkpoint belongs to.

A family is four facts: what checkpoints call it, how to read its config, how to build its network, and
which checkpoint tensor goes where. Adding a model is one file and one row (docs/adding-a-model.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from infer.errors import CheckpointError, ConfigError
from infer.models import (
    cohere2,
    exaone4,
    gemma3,
    glm4,
    gpt2,
    granite,
    llama,
    ministral3,
    mistral,
    mistral3,
    mixtral,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    smollm3,
)
from infer.models.config import ModelConfig
from infer.models.model import Model
from infer.models.weight_map import WeightMap


@dataclass(frozen=True, slots=True)
class Family:
    """Everything the loader needs to know about one kind of network."""

    name: str
    architectures: tuple[str, ...]  # in a config's `architectures`
    model_types: tuple[str, ...]  # in its `model_type`, asked only where `architectures` is missing
    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    build: Callable[[ModelConfig], Model]
    weight_map: WeightMap


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
    Family("qwen3", ("Qwen3ForCausalLM",), ("qwen3",),
           qwen3.read_config, llama.Llama, qwen3.WEIGHT_MAP),
    Family("qwen3_moe", ("Qwen3MoeForCausalLM",), ("qwen3_moe",),
           qwen3_moe.read_config, mixtral.Mixtral, qwen3_moe.WEIGHT_MAP),
    Family("gemma3", ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), ("gemma3_text", "gemma3"),
           gemma3.read_config, gemma3.Gemma3, gemma3.WEIGHT_MAP),
    Family("olmo2", ("Olmo2ForCausalLM",), ("olmo2",),
           olmo2.read_config, olmo2.Olmo2, olmo2.WEIGHT_MAP),
    Family("olmo3", ("Olmo3ForCausalLM",), ("olmo3",),
           olmo3.read_config, olmo2.Olmo2, olmo2.WEIGHT_MAP),
    Family("granite", ("GraniteForCausalLM",), ("granite",),
           granite.read_config, granite.Granite, llama.WEIGHT_MAP),
    Family("smollm3", ("SmolLM3ForCausalLM",), ("smollm3",),
           smollm3.read_config, llama.Llama, llama.WEIGHT_MAP),
    Family("exaone4", ("Exaone4ForCausalLM",), ("exaone4",),
           exaone4.read_config, olmo2.Olmo2, olmo2.WEIGHT_MAP),
    Family("phi3", ("Phi3ForCausalLM",), ("phi3",),
           phi3.read_config, llama.Llama, phi3.WEIGHT_MAP),
    Family("glm4", ("Glm4ForCausalLM",), ("glm4",),
           glm4.read_config, glm4.Glm4, glm4.WEIGHT_MAP),
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
    """The family of a checkpoint, from its config's `architectures` or, without one, its `model_type`."""
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list):
        raise CheckpointError(f"'architectures' in config.json must be a list, got {architectures!r}")
    model_type = raw.get("model_type")
    for family in FAMILIES:
        if any(name in family.architectures for name in architectures):
            return family
        if not architectures and model_type in family.model_types:
            return family
    given = ", ".join(map(str, architectures)) or (model_type and f"model_type {model_type}")
    supported = ", ".join(name for family in FAMILIES for name in family.architectures)
    raise ConfigError(
        f"this checkpoint is {given or 'of no named architecture'}, which is not supported; "
        f"supported: {supported}; docs/adding-a-model.md tells how to add one"
    )


def get_family(name: str) -> Family:
    """The family that a `ModelConfig.family` names."""
    return next(family for family in FAMILIES if family.name == name)
