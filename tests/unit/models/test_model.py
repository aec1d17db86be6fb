from __future__ import annotations

from typing import Any

import pytest
import torch

from infer.models.model import layer_rotaries
from infer.models.registry import FAMILIES, get_family
from scripts.make_checkpoint import Sizes, raw_config

all_families = pytest.mark.parametrize("name", [family.name for family in FAMILIES])


def build(name: str, **changes: Any) -> Any:
    family = get_family(name)
    with torch.device("meta"):
        return family.build(family.read_config(raw_config(name, Sizes()) | changes))


@all_families
def test_a_tied_head_is_the_embedding(name: str) -> None:
    tied, untied = build(name, tie_word_embeddings=True), build(name, tie_word_embeddings=False)

    assert tied.head.weight is tied.embedding.weight
    assert untied.head.weight is not untied.embedding.weight
    assert "head.weight" not in dict(tied.named_parameters())


@all_families
def test_building_touches_no_memory_on_the_meta_device_and_tracks_no_gradient(name: str) -> None:
    model = build(name)

    assert all(parameter.is_meta and not parameter.requires_grad for parameter in model.parameters())
    assert all(buffer.is_meta for buffer in model.buffers())


@all_families
def test_weights_take_the_default_dtype_and_tables_stay_float32(name: str) -> None:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = build(name)
    finally:
        torch.set_default_dtype(previous)

    exact = ("decay.weight", "dt_bias.weight")  # of states, which are float32
    weights = {part: p.dtype for part, p in model.named_parameters() if not part.endswith(exact)}
    assert set(weights.values()) == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} <= {torch.float32, torch.int64}


@all_families
def test_the_config_knows_the_weights_that_a_token_meets_in_a_layer(name: str) -> None:
    """Those of the matrices that were built, of experts as many as a token is sent to."""
    model = build(name)
    for layer, block in enumerate(model.layers):
        matrices = {
            part: p
            for part, p in block.named_parameters()
            if p.ndim > 1
            and not part.endswith(("router.weight", "shared_gate.weight", "conv.weight", "bias"))
        }
        shares = dict.fromkeys(matrices, 1.0)
        if (experts := model.config.experts_of(layer)) is not None:
            stacked = [part for part, matrix in matrices.items() if matrix.ndim == 3]
            assert len(stacked) == 2
            shares |= dict.fromkeys(stacked, experts.num_choices / experts.num_experts)
        met = sum(matrix.numel() * shares[part] for part, matrix in matrices.items())
        assert model.config.layer_weights(layer) == met


def test_layers_share_one_rotary_table_per_base() -> None:
    llama, gemma3 = build("llama", num_hidden_layers=5), build("gemma3", num_hidden_layers=5)

    assert len({id(layer.attention.rotary) for layer in llama.layers}) == 1
    assert len({id(layer.attention.rotary) for layer in gemma3.layers}) == 2


def test_local_gemma_layers_turn_with_the_local_base() -> None:
    model = build("gemma3", num_hidden_layers=4)  # every second layer is global

    rotaries = layer_rotaries(model.config)
    turns = [float(rotary.sin_PR[1, -1]) for rotary in rotaries]  # of the slowest pair
    assert turns[0] == turns[2] > 10 * turns[1] == 10 * turns[3] > 0
    assert [layer.attention.layer.window for layer in model.layers] == [16, None, 16, None]
