"""The loop of a rank other than 0: it loads its shard of the weights, then handles messages from rank 0.

    bind        chooses its projections; after that, ranks can compute together
    probe       runs a prompt of made-up tokens, which rank 0 times
    build       allocates its KV store, with the size that rank 0 has found, and builds its device half
    prepare     on a GPU, compiles kernels and captures graphs
    agree       finds the captured graphs that all ranks have; no others are used
    order       runs its part of a step
    adapter     loads its part of a LoRA adapter into a slot
    ids         receives sampled ids, if the next order arrived before them

Messages arrive in the order in which rank 0 sends them (execution/rank_ring.py). Between two collectives a
rank is never more than one message late.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, NoReturn

import msgspec
import torch

from infer.cache.memory import CacheSize, StepBytes
from infer.config.settings import EngineConfig
from infer.engine.adapters import AdapterSlots
from infer.engine.device_build import DeviceBuild, join_ranks, make_bank, probe_rank, resolve_for
from infer.errors import ConfigError, DeviceLost
from infer.execution.device import StateShape
from infer.execution.gpu.device import GpuDevice
from infer.execution.order import read
from infer.execution.rank_mirror import RankMirror as RankMirror
from infer.execution.rank_ring import RankLink as RankLink
from infer.execution.rank_ring import RankMessage, link_bytes
from infer.execution.torch_device import TorchDevice
from infer.kernels.cpu.library import library, why_not
from infer.kernels.runtime.dispatch import is_gpu
from infer.loader.load import LoadedModel

LOOK_S: Final = 0.25  # seconds between two checks of a rank's GPU


def make_memory(size: int) -> int:
    """Return an anonymous file for the memory shared by `size` ranks; it is freed when all of them end."""
    make = getattr(os, "memfd_create", None)
    if make is not None:
        handle: int = make("infer-ranks")
    else:
        with tempfile.TemporaryFile() as file:
            handle = os.dup(file.fileno())
    os.truncate(handle, link_bytes(size))
    return handle


def open_link(handle: int, rank: int, size: int, num_stages: int = 1) -> RankLink:
    """Return one rank's link over the memory that `make_memory` has made."""
    c = library()
    if c is None:
        name = "tensor_parallel_size" if num_stages == 1 else "pipeline_parallel_size"
        raise ConfigError(f"{name} above 1 needs the C kernels: {why_not()}")
    return RankLink(c, mmap.mmap(handle, link_bytes(size)), rank, size, num_stages)


def serve_rank(loaded: LoadedModel, link: RankLink, on_done: Callable[[], None]) -> NoReturn:
    """Handle rank 0's messages until it ends, which raises `DeviceLost`; call `on_done` after each phase."""
    on_done()
    build, device, warm_up, communicator, slots = None, None, None, None, None
    while True:
        kind, body = link.receive()
        if kind == RankMessage.ORDER:
            assert device is not None
            device.compute_part(read(memoryview(body)))
        elif kind in (RankMessage.AHEAD, RankMessage.IDS):
            assert isinstance(device, TorchDevice)
            if kind == RankMessage.IDS:
                device.learn(body)
            else:
                device.compute_part(read(memoryview(body)), partial(_receive_ids, link, device))
        elif kind == RankMessage.BIND:
            build = device = warm_up = slots = None  # free the parts of the previous engine
            settings = msgspec.json.decode(body, type=EngineConfig)
            communicator = communicator or join_ranks(settings, link.communicator, loaded)
            config, bank = resolve_for(settings, loaded), make_bank(settings, loaded)
            build = DeviceBuild(config, loaded, bank, communicator)
            build.bind(link.pipe)()
            slots = None if bank is None else AdapterSlots(bank, loaded, communicator)
            on_done()
        elif kind == RankMessage.PROBE:
            probe_rank(loaded, warm_up, msgspec.json.decode(body, type=int))
        elif kind == RankMessage.PREPARE:
            while warm_up is not None and warm_up.prepare():
                pass
            on_done()
        elif kind == RankMessage.ADAPTER:
            assert slots is not None
            slot, path = msgspec.json.decode(body, type=tuple[int, str])
            slots.fill(slot, Path(path))  # rank 0 reports the error if any rank fails
        elif kind == RankMessage.AGREE:
            assert isinstance(device, GpuDevice)
            device.launcher.agree()
        else:
            assert kind == RankMessage.BUILD and build is not None, kind
            size, shape, step = msgspec.json.decode(body, type=tuple[CacheSize, StateShape, StepBytes | None])
            device, warm_up = build.make_warm(build.make_store(size), shape, step)
            on_done()


def watch_device(device: torch.device, on_lost: Callable[[DeviceLost], None]) -> None:
    """Poll a GPU until it has a fault, and then call `on_lost`; runs in a separate thread.

    A rank launches steps without waiting for them, while kernels of other ranks wait for its sums. An idle
    stream is polled: after a fault, every CUDA call raises. A CPU has no faults of this kind.
    """
    if not is_gpu(device):
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    while True:
        try:
            stream.query()
        except torch.AcceleratorError as error:
            on_lost(DeviceLost.of("in a step", error))
            return
        time.sleep(LOOK_S)


def _receive_ids(link: RankLink, device: TorchDevice) -> None:
    kind, body = link.receive()
    assert kind == RankMessage.IDS, f"expected the sampled ids, got a message of kind {kind}"
    device.learn(body)
