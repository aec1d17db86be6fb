"""A step can ask for the residual stream as some layers are given it, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from infer.layers.attention import LayerInputs
from infer.models.registry import FAMILIES
from tests.support.checkpoints import build_like, reference_model
from tests.support.step import ListCache, ListStep
from tests.unit.models.test_wanted_rows import build

TOKENS = [5, 17, 3, 99, 42, 7, 7, 0]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2"])
def test_inputs_of_layers_are_those_of_transformers(family: str) -> None:
    reference = reference_model(family)
    model = build_like(reference)
    with torch.no_grad():
        expected = reference(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
        step = ListStep([ListCache()], [len(TOKENS)])
        step.layer_inputs = LayerInputs([2, 0, 1, 2])
        model(torch.tensor(TOKENS), step)
    states = step.layer_inputs.states()
    wanted = torch.cat([expected[layer][0] for layer in (2, 0, 1, 2)], dim=-1)
    torch.testing.assert_close(states, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
@pytest.mark.parametrize("places", [None, [6]], ids=str)
def test_keeping_inputs_changes_no_bit(name: str, places: list[int] | None) -> None:
    model = build(name, num_layers=3)

    def run(inputs: LayerInputs | None) -> torch.Tensor:
        step = ListStep([ListCache(), ListCache()], [5, 3])
        step.logit_indices = None if places is None else torch.tensor(places)
        step.layer_inputs = inputs
        with torch.no_grad():
            hidden: torch.Tensor = model(torch.tensor(TOKENS), step)
        return hidden

    inputs = LayerInputs([1, 2])
    assert torch.equal(run(inputs), run(None))
    assert inputs.states().shape == (len(TOKENS), 2 * model.config.hidden_size)  # rows without logits, too
