"""Pipeline stages: each rank has a range of a model's layers.

    stage 0    embedding ──► layers 0 .. 3 ──► hidden states ──┐
    stage 1                  layers 4 .. 7  ◄──────────────────┘ ──► norm ──► head

Modules keep their names and layers their numbers, so weights, caches and plans mean the same on every rank.
Modules of other ranks are replaced by `Elsewhere`, which leaves the stream unchanged. A tied head is the
embedding's table, so the first and the last stage both have it.
"""

from __future__ import annotations

from typing import Any

from torch import nn


class Elsewhere(nn.Module):
    """A placeholder for a part of the model that is on another stage."""

    def forward(self, x: Any, step: object = None) -> Any:
        """Return the input unchanged."""
        return x


def stage_layers(num_layers: int, num_stages: int) -> list[range]:
    """Split the layers evenly; stages before the last may have one more, because the last has the head."""
    ends = [-(-num_layers * (stage + 1) // num_stages) for stage in range(num_stages)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def keep_stage(model: nn.Module, layers: range, *, is_first: bool, is_last: bool, is_tied: bool) -> None:
    """Remove from a model the parts that are on other stages."""
    blocks = model.get_submodule("layers")
    assert isinstance(blocks, nn.ModuleList)
    for number in range(len(blocks)):
        if number not in layers:
            blocks[number] = Elsewhere()
    has_table = is_first or is_last
    kept = {"embedding": has_table if is_tied else is_first, "head": has_table if is_tied else is_last}
    kept |= {"position_embedding": is_first, "norm": is_last}
    for name, is_kept in kept.items():
        if not is_kept and name in model._modules:
            model._modules[name] = Elsewhere()


def is_elsewhere(model: nn.Module, module: str) -> bool:
    """True if a module, given by its name, is on other stages."""
    found: nn.Module = model
    for name in module.split("."):
        child = found._modules.get(name)
        if child is None or isinstance(child, Elsewhere):
            return isinstance(child, Elsewhere)
        found = child
    return False
