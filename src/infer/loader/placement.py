"""The place of each tensor of a checkpoint, decided and checked before any weights are read.

The weight map names our module for each tensor. The model, built but not yet filled, has the places and their
shapes. Every matrix is one tensor by now, however its file stores it (formats/quantized.py), and a linear
layer's projection loads it itself, so this file knows no number formats.

    checkpoint tensor                    weight map                  place
    ...layers.7.mlp.up_proj.weight  ──►  layers.7.mlp.gate_up "up" ──►  rows 1536..3071 of gate_up.weight

The matrices of all experts of a layer are one parameter (layers/moe.py), in which each expert's matrix is a
place. A checkpoint may hold them one by one, or stacked in one tensor, which is then split:

    ...layers.7.mlp.experts.3.up_proj.weight   ──►   expert 3, rows of "up" of gate_up.weight
    ...layers.7.mlp.experts.gate_up_proj       ──►   expert 0, expert 1, ... of gate_up.weight

Every place must be filled exactly once, by a tensor of its shape. All mismatches are reported together,
because the full list explains a wrong file better than its first entry.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from infer.errors import CheckpointError
from infer.layers.embedding import Embedding
from infer.layers.linear import ExpertLinear, Projected
from infer.layers.stages import is_elsewhere
from infer.loader.cut_tensor import cut_tensor
from infer.loader.formats.checkpoint import StoredTensor
from infer.loader.headers import ModelHeaders, WeightSource
from infer.loader.row_order import reordered, row_order
from infer.loader.slices import Slice
from infer.models.config import ModelConfig
from infer.models.model import Model
from infer.models.weight_map import Target, WeightMap, names_an_expert
from infer.quant.projection import Projection

MAX_ZEROS = 1 << 24  # largest bias that is checked for all zeros, and then skipped if the model has none
MAX_NAMED = 5  # names listed for each kind of mismatch; the rest are counted


@dataclass(frozen=True, slots=True)
class Place:
    """A leaf of one module, or the slice of it for one expert, one part, or both."""

    module: str
    leaf: str
    part: str | None = None
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class Move:
    """One tensor and the place it fills."""

    source: StoredTensor
    place: Place
    transposed: bool

    def projection(self, model: nn.Module) -> Projection | None:
        """Return the projection that loads the tensor; None: the tensor is a parameter of its module."""
        module = model.get_submodule(self.place.module)
        if isinstance(module, Embedding):
            return module.table
        return module.stored if isinstance(module, Projected) and self.place.leaf != "bias" else None

    def run(self, model: nn.Module) -> None:
        """Copy the tensor into its place."""
        module, projection = model.get_submodule(self.place.module), self.projection(model)
        leaf, part, expert = self.place.leaf, self.place.part, self.place.expert
        if projection is not None:
            projection.load(self.source, part=part, expert=expert, transposed=self.transposed)
        else:
            whole = getattr(module, leaf) if expert is None else getattr(module, leaf)[expert]
            if part is not None:
                assert isinstance(module, Projected), f"{module} has no parts"
                whole = whole[module.spec.part_rows(part)]
            self.source.copy_to(whole)


def _complaint(names: list[str], what: str) -> str:
    """Describe a kind of mismatch: the number of tensors, and the first few by name."""
    rest = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{len(names)} {what}: {', '.join(names[:MAX_NAMED])}{rest}"


def plan_moves(model: Model, headers: ModelHeaders, slices: Mapping[str, Slice] | None = None) -> list[Move]:
    """Match the tensors of a checkpoint with the places of its model, as `match_tensors` does.

    A model that transformers loads needs no moves.
    """
    if headers.family.load is not None:
        return []
    name, is_tied = headers.source.name, model.config.tie_embeddings
    return match_tensors(
        model,
        [source for source in headers.sources if not is_elsewhere(model, source.module)],
        headers.family.weight_map,
        name=name,
        is_tied=is_tied,
        slices=slices or {},
        config=model.config,
    )


def match_tensors(
    model: nn.Module,
    tensors: Iterable[WeightSource],
    weight_map: WeightMap,
    *,
    name: str,
    is_tied: bool,
    slices: Mapping[str, Slice] = {},
    config: ModelConfig | None = None,
) -> list[Move]:
    """Match tensors with places, in the order of the tensors; raises an error that lists all mismatches.

    A tied head is the embedding's parameter, so a copy of it in the checkpoint is skipped. `slices`: a rank's
    slices of tensors, by name. `config` decides which rows of queries and keys are reordered (row_order.py).
    """
    modules = dict(model.named_modules())
    unexpected, misshapen, unreadable = list[str](), list[str](), list[str]()
    moves: list[Move] = []
    taken: dict[Place, str] = {}
    for source in tensors:
        tensor_name, tensor, target, leaf = source
        if target is None:
            unexpected.append(tensor_name)
            continue
        if target.ignored or (is_tied and (target.module, leaf) == ("head", "weight")):
            continue
        module = modules.get(target.module)
        if module is not None and leaf == "bias" and leaf not in leaves_of(module) and _is_zero(tensor):
            continue  # quantizers write a bias for every matrix
        if module is None or not _has_place(module, target, leaf):
            unexpected.append(tensor_name)
            continue
        place = Place(target.module, leaf, target.part, target.expert)
        places = _places(module, place)
        for each in places:
            if (other := _taken_by(module, each, taken)) is not None:
                raise CheckpointError(f"{name}: tensors {other!r} and {tensor_name!r} fill the same place")
            taken[each] = tensor_name
        pieces, shape, is_transposed = _pieces(source, module, place, places, slices.get(tensor_name), config)
        if not tensor.is_readable:
            unreadable.append(f"{tensor_name} ({tensor.type_name})")
        elif pieces[0].shape != shape:
            shape = shape if places == [place] else (len(places), *shape)
            misshapen.append(f"{tensor_name} is {list(tensor.shape)}, not {list(shape)}")
        else:
            moves += [Move(piece, each, is_transposed) for piece, each in zip(pieces, places, strict=True)]
    complaints = {
        "missing": _missing(modules, taken, weight_map, is_tied=is_tied),
        "not part of this model": unexpected,
        "of the wrong shape": misshapen,
        "in a format that cannot be read": unreadable,
    }
    if text := "; ".join(_complaint(names, what) for what, names in complaints.items() if names):
        raise CheckpointError(f"the weights of {name} do not fit its config: {text}")
    return moves


def leaves_of(module: nn.Module) -> Collection[str]:
    """Return the names of the tensors that fill a module, without its children."""
    if isinstance(module, Projected):
        return ("weight",) if module.bias is None else ("weight", "bias")
    return [name for name, _ in module.named_parameters(recurse=False)]


def _shape(module: nn.Module, place: Place) -> tuple[int, ...]:
    """Return the shape that the tensor of a part or an expert must have."""
    if not isinstance(module, Projected):
        return tuple(getattr(module, place.leaf).shape)
    rows = module.spec.num_rows if place.part is None else module.parts[place.part]
    return (rows,) if place.leaf == "bias" else (rows, module.spec.size)


def _is_zero(tensor: StoredTensor) -> bool:
    if not tensor.is_readable or math.prod(tensor.shape) > MAX_ZEROS:
        return False
    numbers = torch.empty(tensor.shape)
    tensor.copy_to(numbers)
    return not bool(numbers.any())


def _has_place(module: nn.Module, target: Target, leaf: str) -> bool:
    """Return True if a module has the leaf, the part and the expert of a target."""
    if isinstance(module, Projected) and target.part not in (None, *module.parts):
        return False  # a layer without a value matrix, for example
    expert = target.expert
    has_expert = expert is None or (isinstance(module, ExpertLinear) and expert < module.num_experts)
    return has_expert and leaf in leaves_of(module)


def _pieces(
    source: WeightSource,
    module: nn.Module,
    place: Place,
    places: Sequence[Place],
    cut: Slice | None,
    config: ModelConfig | None,
) -> tuple[list[StoredTensor], tuple[int, ...], bool]:
    """Return the tensors for the places, the shape that each must have, and True if they are transposed."""
    tensor, target = source.tensor, source.target
    assert target is not None
    is_whole = places != [place] and tensor.shape[:1] == (len(places),)
    pieces = [tensor.matrix(number) for number in range(len(places))] if is_whole else [tensor]
    shape = _shape(module, place)
    is_transposed = target.transposed and len(shape) == 2
    if cut is not None:
        pieces = [cut_tensor(each, cut, transposed=is_transposed) for each in pieces]
        shape = shape if cut.rows else (0,)  # the bias after a partial sum, which another rank adds
    parts = module.parts if isinstance(module, Projected) else {}
    num_rows = pieces[0].shape[0] if pieces[0].shape else 0
    if config and (order := row_order(config, target.module, target.part, parts, num_rows)):
        assert not is_transposed, source.name
        pieces = [reordered(pieces[0], order, source.name, config.head_dim)]
    return pieces, shape[::-1] if is_transposed else shape, is_transposed


def _places(module: nn.Module, place: Place) -> list[Place]:
    """Return the place itself, or one per expert if a tensor has the matrices of all experts."""
    if not isinstance(module, ExpertLinear) or place.expert is not None:
        return [place]
    return [replace(place, expert=expert) for expert in range(module.num_experts)]


def _taken_by(module: nn.Module, place: Place, taken: Mapping[Place, str]) -> str | None:
    """Return the name of the tensor that already fills this place, or a part of it."""
    names: list[str | None] = [place.part]
    if isinstance(module, ExpertLinear):  # the only modules stored either in parts or as a whole
        names = [None, place.part] if place.part else [None, *module.parts]
    return next((taken[other] for part in names if (other := replace(place, part=part)) in taken), None)


def _missing(
    modules: Mapping[str, nn.Module],
    taken: Collection[Place],
    weight_map: WeightMap,
    *,
    is_tied: bool,
) -> list[str]:
    """Return the names in the checkpoint of all places that no tensor fills."""
    spelling: dict[tuple[str, str | None, bool], str] = {}
    for key, target in weight_map.items():
        spelling.setdefault((target.module, target.part, names_an_expert(key, target)), key)
    literal = {target.module for target in weight_map.values()}
    missing = []
    for name, module, leaf in (
        (name, each, leaf) for name, each in modules.items() for leaf in leaves_of(each)
    ):
        if is_tied and name == "head":
            continue
        generic, numbers = re.sub(r"\.\d+(?=\.)", ".{}", name), re.findall(r"\.(\d+)(?=\.)", name)
        generic = name if name in literal else generic
        for place in _places(module, Place(name, leaf)):
            if place in taken:
                continue
            is_expert = place.expert is not None
            parts: list[str | None] = []
            if isinstance(module, Projected):
                names = (
                    (part, (generic, part, each)) for part in module.parts for each in (is_expert, False)
                )
                parts = list(dict.fromkeys(part for part, name in names if name in spelling))
            for part in parts or [None]:
                if replace(place, part=part) not in taken:
                    stack = spelling.get((generic, part, False), generic)
                    key = spelling.get((generic, part, is_expert), stack)
                    missing.append(f"{key.format(*numbers, place.expert)}.{leaf}")
    return missing
