"""Where each tensor of a checkpoint goes, decided and checked before anything is read.

The weight map says which of our modules a tensor belongs to; the model, built but not yet filled, says
which places there are and what shape they have:

    checkpoint tensor                    weight map                  place
    ...layers.7.mlp.up_proj.weight  ──►  layers.7.mlp.gate_up "up" ──►  rows 1536..3071 of gate_up.weight

The matrices of all experts of a layer are one parameter (layers/moe.py), and each expert's is a place of its
own. A checkpoint may hold them one by one, or stacked in one tensor, which is then cut:

    ...layers.7.mlp.experts.3.up_proj.weight   ──►   expert 3, rows of "up" of gate_up.weight
    ...layers.7.mlp.experts.gate_up_proj       ──►   expert 0, expert 1, ... of gate_up.weight

Every place must be filled exactly once, by a tensor of its shape. All that is wrong is reported at
once: whoever has the wrong file wants to see the whole difference, not its first line.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from infer.errors import CheckpointError
from infer.layers.linear import Linear
from infer.layers.moe import ExpertLinear
from infer.loader.formats.checkpoint import StoredTensor
from infer.models.model import Model
from infer.models.weight_map import Target, WeightMap, find_target, names_an_expert

MAX_NAMED = 5  # of each kind of complaint; the rest is counted


@dataclass(frozen=True, slots=True)
class Place:
    """A parameter of the model or one expert's share of it, or the rows of one part of that."""

    parameter: str
    part: str | None = None
    expert: int | None = None


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
        if self.place.expert is not None:
            whole = whole[self.place.expert]
        if self.rows is not None:
            whole = whole[:, self.rows] if whole.dim() == 3 else whole[self.rows]
        return whole.T if self.transposed and whole.dim() == 2 else whole


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
        place = Place(f"{target.module}.{leaf}", target.part, target.expert)
        module = model.get_submodule(target.module) if place.parameter in parameters else None
        if module is None or not _has_expert(module, target.expert):
            complaints.unexpected.append(tensor_name)
            continue
        places = _places(module, place)
        for each in places:
            if (other := _taken_by(module, each, taken)) is not None:
                raise CheckpointError(f"{name}: tensors {other!r} and {tensor_name!r} fill the same place")
            taken[each] = tensor_name
        move = Move(tensor, place, _rows(module, target), target.transposed)
        if not tensor.is_readable:
            complaints.unreadable.append(f"{tensor_name} ({tensor.type_name})")
        elif (shape := tuple(move.destination(parameters).shape)) != tensor.shape:
            complaints.misshapen.append(f"{tensor_name} is {list(tensor.shape)}, not {list(shape)}")
        elif places == [place]:
            moves.append(move)
        else:
            moves += [replace(move, source=tensor.matrix(i), place=each) for i, each in enumerate(places)]
    complaints.missing = _missing(model, parameters, taken, weight_map)
    if text := complaints.text():
        raise CheckpointError(f"the weights of {name} do not fit its config: {text}")
    return moves


def _is_tied_copy(model: Model, target: Target, leaf: str) -> bool:
    return model.config.tie_embeddings and (target.module, leaf) == ("head", "weight")


def _has_expert(module: nn.Module, expert: int | None) -> bool:
    return expert is None or (isinstance(module, ExpertLinear) and expert < len(module.weight))


def _places(module: nn.Module, place: Place) -> list[Place]:
    """The place itself, or one per expert where a tensor holds the matrices of all of them."""
    if not isinstance(module, ExpertLinear) or place.expert is not None:
        return [place]
    return [replace(place, expert=expert) for expert in range(len(module.weight))]


def _taken_by(module: nn.Module, place: Place, taken: Mapping[Place, str]) -> str | None:
    """The tensor that fills this place already: all of it, or some part of the whole."""
    names: list[str | None] = [place.part]
    if isinstance(module, ExpertLinear):  # the only ones that checkpoints spell in parts and as a whole
        names = [None, place.part] if place.part else [None, *module.parts]
    return next((taken[other] for part in names if (other := replace(place, part=part)) in taken), None)


def _rows(module: nn.Module, target: Target) -> slice | None:
    if target.part is None:
        return None
    assert isinstance(module, Linear | ExpertLinear), f"{target.module} has no parts"
    return module.part_rows(target.part)


def _missing(
    model: Model, parameters: Mapping[str, torch.Tensor], taken: Collection[Place], weight_map: WeightMap
) -> list[str]:
    """The checkpoint's names of all places that no tensor fills."""
    spelling: dict[tuple[str, str | None, bool], str] = {}
    for key, target in weight_map.items():
        spelling.setdefault((target.module, target.part, names_an_expert(key, target)), key)
    missing = []
    for parameter in parameters:
        module_name, _, leaf = parameter.rpartition(".")
        generic, numbers = (
            re.sub(r"\.\d+(?=\.)", ".{}", module_name),
            re.findall(r"\.(\d+)(?=\.)", module_name),
        )
        module = model.get_submodule(module_name)
        for place in _places(module, Place(parameter)):
            if place in taken:
                continue
            is_expert = place.expert is not None
            parts: list[str | None] = []
            if isinstance(module, Linear | ExpertLinear):
                parts = [part for part in module.parts if (generic, part, is_expert) in spelling]
            for part in parts or [None]:
                if replace(place, part=part) not in taken:
                    key = spelling.get((generic, part, is_expert), generic)
                    missing.append(f"{key.format(*numbers, place.expert)}.{leaf}")
    return missing
