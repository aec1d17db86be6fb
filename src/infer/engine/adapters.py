"""The LoRA adapters of an engine: which adapter name uses which slot of the model.

    load      reads a directory, checks it against the model, fills a free slot
    enter     gives a request that names an adapter its slot, and a cache salt that is unique to this load
    unload    forgets the name at once; running requests continue, and the slot is free when they have ended

Keys and values depend on the adapter that computed them, so each load has its own salt: two adapters, or the
same name loaded again with other weights, never share a cached prefix.

If several ranks share the model, rank 0 keeps the names and sends the others the directory for each slot
(rank_worker.py). Each rank reads its shard, and a slot is filled only if every rank can fill it.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from infer.config.adapters import MAX_RANK, AdapterConfig, adapter_name_fault
from infer.errors import (
    AdapterFailed,
    CheckpointError,
    ConfigError,
    InferError,
    NameTaken,
    UnknownModel,
    closest,
)
from infer.execution.rank_ring import RankMessage
from infer.kernels.runtime.communicator import Communicator, RankGroup
from infer.layers.adapted import OUTER, AdapterBank, AdapterRoom
from infer.loader.adapter import LowRankPair, check_whole, cut_pair, read_adapter, whole_network
from infer.loader.load import LoadChoice, LoadedModel
from infer.loader.slices import ALONE, Rank
from infer.models.model import Model
from infer.models.registry import get_family
from infer.scheduling.request import Request

logger = logging.getLogger(__name__)

FAULT_BYTES = 960  # bytes of a rank's error message that other ranks receive
LEAST_RANK = 16  # default of max_lora_rank, unless an adapter in lora_modules needs more


class LoadedAdapter(NamedTuple):
    """An adapter that requests can name."""

    slot: int
    path: str
    salt: str  # random, so no other request can match its prefixes


class AdapterSlots:
    """Fills the adapter slots of a model, or of one rank's shard of it."""

    def __init__(self, bank: AdapterBank, loaded: LoadedModel, communicator: Communicator | None) -> None:
        self.bank, self._model, self._dtype = bank, loaded.model, loaded.dtype
        self._weight_map = get_family(loaded.config.family).weight_map
        self._network, self._communicator, self._rank = network_of(loaded), communicator, ALONE
        if communicator is not None:
            self._rank = Rank(communicator.rank, communicator.size)

    def read(self, directory: Path) -> list[LowRankPair]:
        """Return the matrix pairs of an adapter, checked against the whole model."""
        return read_adapter(directory, self._network, self._weight_map)

    def fill(self, slot: int, directory: Path, pairs: list[LowRankPair] | None = None) -> Exception | None:
        """Load an adapter into a slot, on all ranks or on none; returns the error, or None.

        `pairs`: the result of `read`, if it was called already.
        """
        fault, found = None, list[tuple[torch.Tensor, torch.Tensor]]()
        try:
            pairs = self.read(directory) if pairs is None else pairs
            check_whole(directory, self._model, self._weight_map, self._rank)
            cut = (cut_pair(pair, self._network, self._rank) for pair in pairs)
            found = [pair.read(self._dtype) for pair in cut]  # read before the slot is overwritten
        except Exception as error:
            fault = error
        if self._communicator is not None:
            said = "" if fault is None else str(fault) or type(fault).__name__
            texts = self._communicator.gather_bytes(said.encode()[:FAULT_BYTES].ljust(FAULT_BYTES, b"\0"))
            said_by = {rank: text.rstrip(b"\0").decode(errors="replace") for rank, text in enumerate(texts)}
            faults = (CheckpointError(f"rank {rank}: {text}") for rank, text in said_by.items() if text)
            fault = fault or next(faults, None)
        if fault is None and pairs is not None:
            self._fill(slot, pairs, found)
        return fault

    @torch.inference_mode()
    def _fill(
        self, slot: int, pairs: list[LowRankPair], found: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        stacks = self.bank.stacks
        for stack in stacks.values():
            stack.clear(slot)
        for pair, (a_RK, b_NR) in zip(pairs, found, strict=True):
            stack = stacks[pair.module]
            if pair.part is not None:
                stack.fill(slot, pair.part, a_RK, b_NR)
                continue
            for part, b_PR in enumerate(torch.split(b_NR, stack.parts)):  # one A for all parts
                stack.fill(slot, part, a_RK, b_PR)


class Adapters:
    """The adapters of one model. The engine's thread owns it."""

    def __init__(self, slots: AdapterSlots, ranks: RankGroup | None) -> None:
        """`ranks` are the other ranks, which fill the same slots with their shards."""
        self._slots, self._bank, self._ranks = slots, slots.bank, ranks
        self.loaded: dict[str, LoadedAdapter] = {}
        self._faults: dict[str, str] = {}  # why the last load under a name failed

    def enter(self, request: Request) -> tuple[Request, int]:
        """Return the request with its adapter's salt, and the adapter's slot."""
        found = self.loaded.get(request.adapter)
        if found is None:
            raise self._unknown(request.adapter)
        return replace(request, cache_salt=found.salt + request.cache_salt), found.slot

    def load(self, name: str, path: str, *, running: Collection[int] = (), replaces: bool = False) -> None:
        """Load the adapter in the directory `path`; slots in `running` are in use and not free.

        With `replaces` the name may be in use; the old adapter stays if loading the new one fails.
        """
        try:
            self._load(name, path, running, replaces=replaces)
        except Exception as error:
            self._faults[name] = str(error) if isinstance(error, InferError) else type(error).__name__
            raise
        self._faults.pop(name, None)

    def _load(self, name: str, path: str, running: Collection[int], *, replaces: bool) -> None:
        if wrong := adapter_name_fault(name):
            raise ConfigError(wrong)
        if name in self.loaded and not replaces:
            raise NameTaken(f"an adapter {name!r} is already loaded; unload it first, or use another name")
        taken = {each.slot for other, each in self.loaded.items() if other != name} | set(running)
        slot = next((slot for slot in range(1, self._bank.num_slots + 1) if slot not in taken), None)
        if slot is None:
            raise ConfigError(
                f"all {self._bank.num_slots} adapter slots are in use by {', '.join(self.loaded)} or by "
                "running requests; unload an adapter, or start with a higher max_loras"
            )
        directory = Path(os.path.expanduser(path))
        pairs = self._slots.read(directory)
        if (rank := max(pair.rank for pair in pairs)) > self._bank.rank:
            raise ConfigError(
                f"adapter {name!r} has rank {rank}, but max_lora_rank is {self._bank.rank}; raise it"
            )
        if missing := {pair.module for pair in pairs} - set(self._bank.stacks):
            raise ConfigError(
                f"adapter {name!r} adapts the {' and the '.join(sorted(missing))}; memory for that is "
                "reserved only if an adapter in lora_modules needs it: name this adapter there"
            )
        if self._ranks is not None:
            self._ranks.send(RankMessage.ADAPTER, msgspec.json.encode((slot, str(directory))))
        try:
            fault = self._slots.fill(slot, directory, pairs)
        finally:
            if self._ranks is not None:
                self._ranks.check()
        if fault is not None:
            raise fault
        self.loaded[name] = LoadedAdapter(slot, path, secrets.token_hex(16))
        logger.info("adapter loaded name=%s rank=%d matrices=%d path=%s", name, rank, len(pairs), path)

    def unload(self, name: str) -> None:
        """Forget a name; its slot is free when no running request uses it."""
        self._faults.pop(name, None)
        if self.loaded.pop(name, None) is None:
            raise self._unknown(name)
        logger.info("adapter unloaded name=%s", name)

    def _unknown(self, name: str) -> UnknownModel:
        if (fault := self._faults.get(name)) is not None:
            return AdapterFailed(f"adapter {name!r} could not be loaded: {fault}", param="adapter")
        hint = closest(name, self.loaded, listed="loaded" if self.loaded else "")
        return UnknownModel(f"no adapter {name!r} is loaded{hint}", param="adapter")


def network_of(loaded: LoadedModel | LoadChoice) -> Model:
    """Return the unsharded network, which adapters are made for."""
    if isinstance(loaded, LoadedModel):
        return loaded.model if loaded.whole is None else whole_network(loaded.whole)
    is_whole = loaded.plan.rank.world_size == 1
    return loaded.plan.skeleton if is_whole else whole_network(loaded.headers.config)


def needed_room(config: AdapterConfig, model: Model) -> AdapterRoom:
    """Return the size of the adapter bank; reads and checks the headers of all adapters in the config.

    `model` is the unsharded network, the same on all ranks.
    """
    weight_map = get_family(model.config.family).weight_map
    found, most, outer = LEAST_RANK, config.max_lora_rank or MAX_RANK, set[str]()
    for name, path in config.modules.items():
        pairs = read_adapter(Path(os.path.expanduser(path)), model, weight_map)
        rank = max(pair.rank for pair in pairs)
        outer |= {pair.module for pair in pairs}.intersection(OUTER)
        if rank > most:
            raise ConfigError(f"adapter {name!r} has rank {rank}, but max_lora_rank is {most}")
        found = max(found, rank)
    return AdapterRoom(config.num_slots, config.max_lora_rank or found, frozenset(outer))
