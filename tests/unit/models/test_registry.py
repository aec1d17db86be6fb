from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infer.errors import CheckpointError, ConfigError
from infer.loader.headers import choose_family
from infer.models.config import is_headless
from infer.models.registry import FAMILIES, find_family, get_family


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_is_found_by_each_of_its_names(family: Any) -> None:
    for architecture in family.architectures:
        assert find_family({"architectures": [architecture]}) is family
    for model_type in family.model_types:
        assert find_family({"model_type": model_type}) is family
    assert get_family(family.name) is family


def test_no_name_belongs_to_two_families() -> None:
    names = [name for family in FAMILIES for name in (family.name, *family.architectures)]

    assert len(names) == len(set(names))


def test_architectures_decide_before_the_model_type() -> None:
    assert find_family({"architectures": ["Qwen3ForCausalLM"], "model_type": "llama"}).name == "qwen3"


@pytest.mark.parametrize("name", ["LlamaForSequenceClassification", "LlamaModel"])
def test_a_classifier_and_an_embedding_model_have_the_network_of_their_family_and_no_head(name: str) -> None:
    raw = {"architectures": [name], "model_type": "llama"}
    assert find_family(raw).name == "llama"
    assert is_headless(raw)
    for name in ("LlamaForCausalLM", "GPT2LMHeadModel"):
        assert not is_headless({"architectures": [name]})


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("Gemma3TextForSequenceClassification", "gemma3"),
        ("Gemma3TextModel", "gemma3"),
        ("Gemma4TextModel", "gemma4"),
        ("Qwen3_5TextModel", "qwen3_5"),
        ("Qwen3_5MoeTextModel", "qwen3_5_moe"),
    ],
)
def test_the_text_part_of_a_multimodal_model_without_its_head_is_found(name: str, family: str) -> None:
    assert find_family({"architectures": [name]}).name == family


@pytest.mark.parametrize(
    ("raw", "given"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"model_type": "mamba"}, "mamba"),
        ({}, "no named architecture"),
    ],
)
def test_an_unknown_model_is_told_what_is_supported_and_how_to_add_one(raw: Any, given: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_family(raw, Path("config.json"), "infer")

    found, advice, families = str(caught.value).split("; ")
    assert given in found and found.endswith("which no family here has code for")
    assert advice == "model_impl=auto may run it with the code of transformers"
    assert families.endswith("(docs/adding-a-model.md explains how to add one)")
    assert all(family.name in families for family in FAMILIES)


def test_how_a_checkpoint_is_quantized_is_no_matter_of_its_family() -> None:
    raw = {"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "gptq", "bits": 4}}
    assert find_family(raw).name == "llama"


@pytest.mark.parametrize("raw", [{"architectures": "LlamaForCausalLM"}, {"architectures": {"a": 1}}])
def test_architectures_of_the_wrong_type_are_a_broken_checkpoint(raw: Any) -> None:
    with pytest.raises(CheckpointError, match="architectures"):
        find_family(raw)


@pytest.mark.parametrize("raw", [{"is_causal": False}, {"text_config": {"is_causal": False}}])
def test_a_model_whose_tokens_see_what_comes_behind_them_is_refused(raw: dict[str, Any]) -> None:
    assert find_family({"architectures": ["Qwen2Model"], "is_causal": True}).name == "qwen2"
    with pytest.raises(ConfigError, match="is_causal"):
        find_family({"architectures": ["Qwen2Model"]} | raw)
