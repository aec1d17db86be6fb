"""Weight maps: tables that map the modules of a checkpoint to our modules.

    "model.layers.{}.self_attn.q_proj": Target("layers.{}.attention.qkv", part="q")

means: the module q_proj of layer i fills part "q" of our fused module qkv of layer i. The table names
*modules*; the last part of a tensor's name, its leaf (`weight`, `bias`, `qweight`, `scales`, ...), belongs to
the format of the file, so one table serves every format of a family.

The name of an expert's module has two numbers, its layer's and its expert's. Our module is one stack of all
experts, so the second number becomes the target's `expert`. A checkpoint may also hold the stack itself:

    "model.layers.{}.mlp.experts.{}.up_proj": Target("layers.{}.mlp.gate_up", part="up")     expert 5: [F, D]
    "model.layers.{}.mlp.experts.up_proj":    Target("layers.{}.mlp.gate_up", part="up")     all: [E, F, D]

A tensor without a leaf (as stacks are saved) is its module's weight, and its whole name is the key.

A key that ends in `.*` stands for a module and all below it, for parts of a checkpoint that we do not use:

    "vision_tower.*": IGNORED
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from infer.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Target:
    """The place of a checkpoint module's tensors."""

    module: str
    part: str | None = None  # the name of its slice in a fused module
    transposed: bool = False  # stored [in, out], as GPT-2's Conv1D does; ours are [out, in]
    ignored: bool = False  # known, but not used
    expert: int | None = None  # found in the tensor's name, never in a table


IGNORED = Target("", ignored=True)

WeightMap = Mapping[str, Target]


def nested(
    names: WeightMap, prefixes: Iterable[str], *, heads: Iterable[str] = ("lm_head",), ignored: Iterable[str]
) -> WeightMap:
    """The map of a checkpoint that may be multimodal: each prefix may take the place of "model".

    `heads`: names of the LM head; `ignored`: modules that are not read.
    """
    outer = ("lm_head", "score")
    inner = {name.removeprefix("model."): target for name, target in names.items() if name not in outer}
    text = {f"{prefix}.{name}": target for prefix in prefixes for name, target in inner.items()}
    return text | dict.fromkeys(heads, Target("head")) | dict.fromkeys((*ignored, "score"), IGNORED)


_INDEX = re.compile(r"\.(\d+)(?=\.|$)")
_MAX_DIGITS = 9  # digits of an expert's number that are read; more would be beyond any model, too


def find_target(tensor_name: str, weight_map: WeightMap) -> tuple[Target, str]:
    """Return the target with the numbers of its layer and expert filled in, and the tensor's leaf."""
    module, _, leaf = tensor_name.rpartition(".")
    key = _INDEX.sub(".{}", module)
    target = weight_map.get(key) or _wildcard_target(key, weight_map)
    if target is None:
        key, target = _INDEX.sub(".{}", tensor_name), weight_map.get(_INDEX.sub(".{}", tensor_name))
        if target is not None:
            module, leaf = tensor_name, "weight"
    if target is None:  # a leaf of a leaf: `weight.absmax`
        module, _, inner = module.rpartition(".")
        key, leaf = _INDEX.sub(".{}", module), f"{inner}.{leaf}"
        target = weight_map.get(key)
    if target is None:
        raise CheckpointError(f"tensor {tensor_name!r} is not in this model's weight map")
    indices = _INDEX.findall(module)
    expert = int(indices[1][:_MAX_DIGITS]) if names_an_expert(key, target) else None
    return replace(target, module=target.module.format(*indices), expert=expert), leaf


def names_an_expert(key: str, target: Target) -> bool:
    """Return True if a row maps single experts: its key has one number more than its target."""
    return not target.ignored and key.count("{}") == 2 and target.module.count("{}") == 1


def _wildcard_target(key: str, weight_map: WeightMap) -> Target | None:
    return next(
        (t for name, t in weight_map.items() if name.endswith(".*") and f"{key}.".startswith(name[:-1])), None
    )
