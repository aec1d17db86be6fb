"""The LoRA adapters of an engine: names of directories on one side, slots of the model on the other.

    load      read a directory, check it against the model, put it into a free slot
    enter     a request that names an adapter gets its slot, and a cache salt that no other load shares
    unload    the name is gone at once; requests that began with it go on, and the slot is free after them

Keys and values depend on the adapter that computed them, so each load has a salt of its own: two adapters, or
the same name loaded again with other weights, never share a cached prefix.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from infer.config.adapters import MAX_RANK, AdapterConfig, adapter_name_fault
from infer.errors import ConfigError, NameTaken, UnknownModel, closest
from infer.layers.adapted import OUTER, AdapterBank, AdapterRoom
from infer.loader.adapter import LowRankPair, check_whole, read_adapter
from infer.models.model import Model
from infer.models.weight_map import WeightMap
from infer.scheduling.request import Request

logger = logging.getLogger(__name__)

LEAST_RANK = 16  # kept where no adapter asks for more: what others keep


class LoadedAdapter(NamedTuple):
    """An adapter that requests can name."""

    slot: int
    path: str
    salt: str  # nobody can guess it, so no request reaches its prefixes under another name


class Adapters:
    """The adapters of one model. The engine's thread owns it."""

    def __init__(self, bank: AdapterBank, model: Model, weight_map: WeightMap, dtype: torch.dtype) -> None:
        self._bank, self._model, self._weight_map, self._dtype = bank, model, weight_map, dtype
        self.loaded: dict[str, LoadedAdapter] = {}

    def enter(self, request: Request) -> tuple[Request, int]:
        """The request with the salt of its adapter, and the adapter's slot."""
        found = self.loaded.get(request.adapter)
        if found is None:
            raise self._unknown(request.adapter)
        return replace(request, cache_salt=found.salt + request.cache_salt), found.slot

    def load(self, name: str, path: str, *, running: Collection[int] = (), replaces: bool = False) -> None:
        """Load the adapter in a directory; slots that are still `running` are not free.

        With `replaces` another adapter may have the name: it is served until this one is, if that fails too.
        """
        if fault := adapter_name_fault(name):
            raise ConfigError(fault)
        if name in self.loaded and not replaces:
            raise NameTaken(f"an adapter {name!r} is loaded already; unload it first, or use another name")
        taken = {each.slot for other, each in self.loaded.items() if other != name} | set(running)
        slot = next((slot for slot in range(1, self._bank.num_slots + 1) if slot not in taken), None)
        if slot is None:
            raise ConfigError(
                f"all {self._bank.num_slots} places for adapters are taken by {', '.join(self.loaded)} or by "
                "requests that still run; unload one, or start with a higher max_loras"
            )
        pairs = read_adapter(Path(os.path.expanduser(path)), self._model, self._weight_map)
        if (rank := max(pair.rank for pair in pairs)) > self._bank.rank:
            raise ConfigError(
                f"adapter {name!r} has rank {rank}, but max_lora_rank is {self._bank.rank}; start with more"
            )
        if missing := {pair.module for pair in pairs} - set(self._bank.stacks):
            raise ConfigError(
                f"adapter {name!r} adapts the {' and the '.join(sorted(missing))}; there is room for that "
                "only if an adapter of lora_modules does, too: name it there"
            )
        check_whole(Path(os.path.expanduser(path)), self._model, self._weight_map)
        self._fill(slot, pairs)
        self.loaded[name] = LoadedAdapter(slot, path, secrets.token_hex(16))
        logger.info("adapter loaded name=%s rank=%d matrices=%d path=%s", name, rank, len(pairs), path)

    @torch.inference_mode()
    def _fill(self, slot: int, pairs: list[LowRankPair]) -> None:
        stacks = self._bank.stacks
        found = [pair.read(self._dtype) for pair in pairs]  # before the slot's adapter, if any, is gone
        for stack in stacks.values():
            stack.clear(slot)
        for pair, (a_RK, b_NR) in zip(pairs, found, strict=True):
            stack = stacks[pair.module]
            if pair.part is not None:
                stack.fill(slot, pair.part, a_RK, b_NR)
                continue
            for part, b_PR in enumerate(torch.split(b_NR, stack.parts)):  # one A for all parts
                stack.fill(slot, part, a_RK, b_PR)

    def unload(self, name: str) -> None:
        """Forget a name; its slot is free when no request runs with it."""
        if self.loaded.pop(name, None) is None:
            raise self._unknown(name)
        logger.info("adapter unloaded name=%s", name)

    def _unknown(self, name: str) -> UnknownModel:
        hint = closest(name, self.loaded, listed="loaded" if self.loaded else "")
        return UnknownModel(f"no adapter {name!r} is loaded{hint}", param="adapter")


def needed_room(config: AdapterConfig, model: Model, weight_map: WeightMap) -> AdapterRoom:
    """The room that a bank has; the headers of all adapters of the config are read and checked."""
    found, most, outer = LEAST_RANK, config.max_lora_rank or MAX_RANK, set[str]()
    for name, path in config.modules.items():
        pairs = read_adapter(Path(os.path.expanduser(path)), model, weight_map)
        rank = max(pair.rank for pair in pairs)
        outer |= {pair.module for pair in pairs}.intersection(OUTER)
        if rank > most:
            raise ConfigError(f"adapter {name!r} has rank {rank}, but max_lora_rank is {most}")
        found = max(found, rank)
    return AdapterRoom(config.num_slots, config.max_lora_rank or found, frozenset(outer))
