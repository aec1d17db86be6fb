"""Where each tensor of a checkpoint goes, decided and checked before anything is read.

The weight map says which of our modules a tensor belongs to; the model, built but not yet filled, says
which places there are and what shape they have:

    checkpoint tensor                    weight map                  place
    ...layers.7.mlp.up_proj.weight  ──►  layers.7.mlp.gate_up "up" ──►  rows 1536..3071 of gate_up.weight

Every place must be filled exactly once, by a tensor of its shape. All that is wrong is reported at
once: whoever has the wrong file wants to see the whole difference, not its first line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from infer.errors import CheckpointError
from infer.layers.linear import Linear
from infer.loader.checkpoint import StoredTensor
from infer.models.model import Model
from infer.models.weight_map import Target, WeightMap, find_target

MAX_NAMED = 5  # of each kind of complaint; the rest is counted


@dataclass(frozen=True, slots=True)
class Place:
    """A parameter of the model, or the rows of one part of it."""

    parameter: str
    part: str | None = None


@dataclass(frozen=True, slots=True)
class Move:
    """One tensor and the place it fills."""

    source: StoredTensor
    place: Place
    rows: slice | None
    transposed: bool

    def destination(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The view of the parameter that this tensor fills, in the tensor's own orientation."""
        whole = parameters[self.place.parameter]
        rows = whole if self.rows is None else whole[self.rows]
        return rows.T if self.transposed and rows.dim() == 2 else rows


@dataclass(slots=True)
class _Complaints:
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)

    def text(self) -> str:
        sections = {
            "missing": self.missing,
            "not part of this model": self.unexpected,
            "of the wrong shape": self.misshapen,
            "in a format that cannot be read": self.unreadable,
        }
        return "; ".join(f"{len(names)} {what}: {_some(names)}" for what, names in sections.items() if names)


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + rest


def plan_moves(
    model: Model, tensors: Mapping[str, StoredTensor], weight_map: WeightMap, *, name: str
) -> list[Move]:
    """Match tensors with places, in the order of the tensors, or say everything that does not match.

    A tied head is the embedding's own parameter: a copy of it in the checkpoint has no place.
    """
    parameters = dict(model.named_parameters())  # a shared parameter appears once, under its first name
    complaints = _Complaints()
    moves: list[Move] = []
    taken: dict[Place, str] = {}
    for tensor_name, tensor in tensors.items():
        try:
            target, leaf = find_target(tensor_name, weight_map)
        except CheckpointError:
            complaints.unexpected.append(tensor_name)
            continue
        if target.ignored or _is_tied_copy(model, target, leaf):
            continue
        place = Place(f"{target.module}.{leaf}", target.part)
        if place.parameter not in parameters:
            complaints.unexpected.append(tensor_name)
            continue
        if place in taken:
            raise CheckpointError(f"{name}: tensors {taken[place]!r} and {tensor_name!r} fill the same place")
        taken[place] = tensor_name
        move = Move(tensor, place, _rows(model, target), target.transposed)
        moves.append(move)
        if not tensor.is_readable:
            complaints.unreadable.append(f"{tensor_name} ({tensor.type_name})")
        elif (shape := tuple(move.destination(parameters).shape)) != tensor.shape:
            complaints.misshapen.append(f"{tensor_name} is {list(tensor.shape)}, not {list(shape)}")
    complaints.missing = _missing(model, parameters, set(taken), weight_map)
    if text := complaints.text():
        raise CheckpointError(f"the weights of {name} do not fit its config: {text}")
    return moves


def _is_tied_copy(model: Model, target: Target, leaf: str) -> bool:
    return model.config.tie_embeddings and (target.module, leaf) == ("head", "weight")


def _rows(model: Model, target: Target) -> slice | None:
    if target.part is None:
        return None
    module = model.get_submodule(target.module)
    assert isinstance(module, Linear), f"{target.module} has no parts"
    return module.part_rows(target.part)


def _missing(
    model: Model, parameters: Mapping[str, torch.Tensor], taken: set[Place], weight_map: WeightMap
) -> list[str]:
    """The checkpoint's names of all places that no tensor fills."""
    spelling: dict[tuple[str, str | None], str] = {}
    for key, target in weight_map.items():
        spelling.setdefault((target.module, target.part), key)
    missing = []
    for parameter in parameters:
        if Place(parameter) in taken:
            continue
        module_name, _, leaf = parameter.rpartition(".")
        generic, layers = (
            re.sub(r"\.\d+(?=\.)", ".{}", module_name),
            re.findall(r"\.(\d+)(?=\.)", module_name),
        )
        module = model.get_submodule(module_name)
        parts: list[str | None] = [None]
        if isinstance(module, Linear) and (generic, None) not in spelling:
            parts = list(module.parts)
        for part in parts:
            if Place(parameter, part) not in taken:
                key = spelling.get((generic, part), generic)
                missing.append(f"{key.format(*layers)}.{leaf}")
    return missing
