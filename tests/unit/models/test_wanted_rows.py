"""Behind the last attention a model computes only the rows that are wanted of it, and the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from infer.layers.linear import ExpertLinear
from infer.models.registry import FAMILIES, get_family
from infer.tools.activation_diff import Recording, record
from scripts.make_checkpoint import Sizes, raw_config
from tests.support.step import ListCache, ListStep, run_step
from tests.support.thinned import thinned

PROMPT = [(place * 37) % 200 for place in range(100)]
CHUNKS = [
    [7],
    PROMPT,
    [9],
    [3, 4, 5],
]  # a row that decodes, a prompt, another row, a piece of a second prompt
all_families = pytest.mark.parametrize("name", [family.name for family in FAMILIES])


def build(name: str, num_layers: int = 2) -> Any:
    """A small model of this family with random weights."""
    torch.manual_seed(0)
    family = get_family(name)
    model = family.build(family.read_config(raw_config(name, Sizes(num_layers=num_layers))))
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape) * 0.1)
    return model


def run(model: Any, places: Sequence[int] | None) -> tuple[torch.Tensor, list[ListCache], Recording]:
    """A step of `CHUNKS`, two of them behind a past: the result, the caches, what each module made."""
    caches = [ListCache() for _ in CHUNKS]
    run_step(model, [[1, 2, 3], [4, 5]], [caches[0], caches[2]])
    hidden: list[torch.Tensor] = []

    def forward() -> None:
        tokens_T = torch.tensor([token for chunk in CHUNKS for token in chunk])
        step = ListStep(caches, [len(chunk) for chunk in CHUNKS])
        step.logit_indices = None if places is None else torch.tensor(places)
        hidden.append(model(tokens_T, step))

    with torch.no_grad():
        made = record(model, forward)
    return hidden[0], caches, made


@all_families
def test_wanted_rows_are_those_of_the_whole(name: str) -> None:
    model = build(name)
    whole, caches_of_whole, _ = run(model, None)
    assert len(whole) == sum(map(len, CHUNKS))
    assert whole.abs().max() > 0
    for places in ([100], [0, 100, 101], [104, 0, 0, 50]):
        wanted, caches, _ = run(model, places)
        torch.testing.assert_close(model.logits(wanted), model.logits(whole[places]), rtol=1e-5, atol=1e-6)
        for cache, other in zip(caches, caches_of_whole, strict=True):  # what later tokens will look at
            states = cache.states._states, other.states._states
            assert sorted([*cache.keys, *states[0]]) == list(range(len(model.layers)))
            for layer in cache.keys:
                assert torch.equal(cache.keys[layer], other.keys[layer])
                assert torch.equal(cache.values[layer], other.values[layer])
            for layer in states[0]:
                assert all(map(torch.equal, states[0][layer], states[1][layer]))


@pytest.mark.parametrize(
    "name", [each.name for each in FAMILIES if each.name != "cohere2"]
)  # a parallel block
def test_only_wanted_rows_pass_what_is_behind_the_last_attention(name: str) -> None:
    model = build(name, num_layers=3)
    num_tokens = sum(map(len, CHUNKS))
    _, _, made = run(model, [0, 100])
    experts = {part for part, module in model.named_modules() if isinstance(module, ExpertLinear)}
    rows = {part: len(y) for part, y in made.items() if part.partition("#")[0] not in experts}
    has_state = model.config.has_state(2)
    inner, outer = ("projected", "output") if has_state else ("qkv", "out")
    last = ("layers.2.attention_norm", f"layers.2.attention.{inner}")
    before = ("embedding", "position_embedding", "input_", "layers.0", "layers.1", *last)

    assert rows == {part: num_tokens if part.startswith(before) else 2 for part in rows}
    assert {
        f"layers.2.attention.{inner}",
        f"layers.2.attention.{outer}",
        "norm",
    } <= set(rows)
    assert {"layers.2.mlp_norm", "layers.2.post_mlp_norm"} & set(rows)
    assert {"layers.2.mlp.down", "layers.2.mlp"} & set(rows)


@all_families
def test_a_model_of_one_layer_is_all_last(name: str) -> None:
    model = build(name, num_layers=1)
    whole, wanted = run(model, None)[0], run(model, [100])[0]
    torch.testing.assert_close(wanted, whole[[100]], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", thinned([family.name for family in FAMILIES], keep=3))
def test_all_rows_in_another_order(name: str) -> None:
    model = build(name, num_layers=2)
    order = list(reversed(range(sum(map(len, CHUNKS)))))
    whole, wanted = run(model, None)[0], run(model, order)[0]
    torch.testing.assert_close(wanted, whole[order], rtol=1e-5, atol=1e-6)
