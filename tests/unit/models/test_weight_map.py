from __future__ import annotations

import time

import pytest
import torch

from infer.errors import CheckpointError
from infer.layers.linear import Projected
from infer.models.registry import FAMILIES, get_family
from infer.models.weight_map import IGNORED, Target, find_target
from scripts.make_checkpoint import Sizes, raw_config


def test_the_layer_number_and_the_leaf_are_filled_in() -> None:
    llama = get_family("llama").weight_map

    assert find_target("model.layers.7.mlp.up_proj.qweight", llama) == (
        Target("layers.7.mlp.gate_up", part="up"),
        "qweight",
    )


@pytest.mark.parametrize(
    ("name", "target", "leaf"),
    [
        (
            "model.layers.7.mlp.experts.12.up_proj.weight",
            Target("layers.7.mlp.gate_up", part="up", expert=12),
            "weight",
        ),
        ("model.layers.7.mlp.experts.down_proj", Target("layers.7.mlp.down"), "weight"),
        ("model.layers.7.mlp.experts.gate_up_proj", Target("layers.7.mlp.gate_up"), "weight"),
        ("model.layers.7.mlp.up_proj.bias", Target("layers.7.mlp.gate_up", part="up"), "bias"),
    ],
)
def test_the_number_of_an_expert_is_found_and_a_stack_needs_none(
    name: str, target: Target, leaf: str
) -> None:
    assert find_target(name, get_family("qwen3_moe").weight_map) == (target, leaf)


def test_an_endless_number_is_no_expert() -> None:
    name = f"model.layers.0.mlp.experts.{'9' * 5000}.up_proj.weight"
    assert find_target(name, get_family("qwen3_moe").weight_map)[0].expert == 999_999_999


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model.layers.3.self_attn.rotary_emb.inv_freq"),
        ("llama", "model.rotary_emb.inv_freq"),
        ("gpt2", "h.3.attn.bias"),
        ("gpt2", "transformer.h.3.attn.masked_bias"),
        ("gemma3", "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight"),
        ("gemma3", "model.multi_modal_projector.mm_input_projection_weight"),
    ],
)
def test_known_tensors_of_no_use_are_ignored(family: str, name: str) -> None:
    assert find_target(name, get_family(family).weight_map)[0].ignored


def test_a_causal_mask_is_not_mistaken_for_a_bias() -> None:
    gpt2 = get_family("gpt2").weight_map

    assert find_target("h.0.attn.bias", gpt2)[0].ignored
    assert not find_target("h.0.attn.c_attn.bias", gpt2)[0].ignored


def test_the_prefixes_of_a_family_lead_to_the_same_module() -> None:
    gpt2, gemma3 = get_family("gpt2").weight_map, get_family("gemma3").weight_map

    assert find_target("h.1.mlp.c_fc.weight", gpt2) == find_target("transformer.h.1.mlp.c_fc.weight", gpt2)
    of_text = find_target("model.layers.1.mlp.up_proj.weight", gemma3)
    assert find_target("language_model.model.layers.1.mlp.up_proj.weight", gemma3) == of_text
    assert find_target("model.language_model.layers.1.mlp.up_proj.weight", gemma3) == of_text


def test_many_unknown_tensors_are_refused_quickly() -> None:
    start = time.process_time()
    for layer in range(5000):
        with pytest.raises(
            CheckpointError, match=rf"'model\.layers\.{layer}\.self_attn\.q_prj\.weight' is not"
        ):
            find_target(f"model.layers.{layer}.self_attn.q_prj.weight", get_family("llama").weight_map)
    assert time.process_time() - start < 3


def test_a_wildcard_covers_the_module_and_all_below_it_but_not_its_namesakes() -> None:
    weight_map = {"tower.*": IGNORED}

    assert find_target("tower.weight", weight_map)[0].ignored
    assert find_target("tower.a.0.b.weight", weight_map)[0].ignored
    with pytest.raises(CheckpointError):
        find_target("towers.weight", weight_map)


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_the_map_reaches_every_parameter_of_the_network(name: str) -> None:
    family = get_family(name)
    with torch.device("meta"):
        model = family.build(family.read_config(raw_config(name, Sizes())))
    targets = {
        (target.module.format(layer), target.part)
        for target in family.weight_map.values()
        for layer in range(model.config.num_layers)
    }

    for path, module in model.named_modules():
        if not list(module.parameters(recurse=False)):
            continue
        parts = list(module.parts) if isinstance(module, Projected) else []
        assert (path, None) in targets or (parts and all((path, part) in targets for part in parts)), path
