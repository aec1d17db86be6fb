"""What self-attention hands to the step: the projection as it is, or queries, keys and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from infer.kernels.elementwise.heads import HeadTransform, norm_rope_write
from infer.layers.attention import AttentionLayer
from infer.models.registry import get_family
from scripts.make_checkpoint import Sizes, raw_config
from tests.support.step import ListCache, ListStep, run_step


class ProjectedStep(ListStep):
    """Takes the projection, and does with it what the transform says."""

    def __init__(self, caches: list[ListCache], lengths: list[int]) -> None:
        super().__init__(caches, lengths)
        self.layers: list[int] = []

    def attend_projected(
        self, layer: AttentionLayer, qkv_TX: torch.Tensor, transform: HeadTransform
    ) -> torch.Tensor:
        self.layers.append(layer.number)
        q, k, v = norm_rope_write(qkv_TX, transform, self.positions)
        return self.attend(layer, q, k, v)


def build(name: str) -> Any:
    """A small model of this family with random weights; windows so short that they matter."""
    torch.manual_seed(0)
    family = get_family(name)
    model = family.build(family.read_config(raw_config(name, Sizes()) | {"sliding_window": 4}))
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape) * 0.1)
    return model


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_a_step_may_take_the_projection_as_it_is(name: str) -> None:
    model, prompt = build(name), [5, 3, 8, 1, 9, 2, 7]
    caches = [ListCache(), ListCache()]
    run_step(model, [prompt, prompt], caches)
    token = torch.tensor([4])
    step = ProjectedStep(caches[:1], [1])
    with torch.no_grad():
        taken = model(token, step)
        asked = model(token, ListStep(caches[1:], [1]))

    assert step.layers == list(range(len(model.layers)))
    assert torch.equal(taken, asked)
    assert taken.abs().max() > 0
