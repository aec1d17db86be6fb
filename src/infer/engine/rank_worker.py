"""A rank of a model other than the first: it has a part of the weights, a device half, and nothing else.

    load its part ──► told ──► bind        the projections that it runs with; ranks can compute together now
                      told ──► probe       a prompt of made-up tokens, which rank 0 measures
                      told ──► build       its KV store, as large as rank 0 has found, and its device half
                      told ──► prepare     on a GPU, everything that steps need: kernels, captured graphs
                      told ──► order       its part of a step
                      told ──► ids         what was drawn, where the next order has come before

Messages come in the order in which rank 0 sends them (execution/rank_ring.py). Between two exchanges a rank
is never more than one message behind.
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from infer.cache.memory import CacheSize, StepBytes
from infer.config.settings import EngineConfig
from infer.engine.build import bind_rank, build_rank, join_ranks, probe_rank
from infer.errors import ConfigError
from infer.execution.device import StateShape
from infer.execution.order import read
from infer.execution.rank_mirror import RankMirror as RankMirror
from infer.execution.rank_ring import RankLink as RankLink
from infer.execution.rank_ring import RankMessage, link_bytes
from infer.execution.torch_device import TorchDevice
from infer.kernels.cpu.library import library, why_not
from infer.loader.load import LoadedModel


def make_memory(size: int) -> int:
    """A file without a name for the memory that this many ranks share: it is gone when all of them end."""
    make = getattr(os, "memfd_create", None)
    if make is not None:
        handle: int = make("infer-ranks")
    else:
        with tempfile.TemporaryFile() as file:
            handle = os.dup(file.fileno())
    os.truncate(handle, link_bytes(size))
    return handle


def open_link(handle: int, rank: int, size: int, num_stages: int = 1) -> RankLink:
    """One rank's end of this memory."""
    c = library()
    if c is None:
        name = "tensor_parallel_size" if num_stages == 1 else "pipeline_parallel_size"
        raise ConfigError(f"{name} above 1 needs the C kernels: {why_not()}")
    return RankLink(c, mmap.mmap(handle, link_bytes(size)), rank, size, num_stages)


def serve_rank(loaded: LoadedModel, link: RankLink, on_done: Callable[[], None]) -> NoReturn:
    """Do what rank 0 says until it is gone, a `DeviceLost`; `on_done` follows each part of a start."""
    on_done()
    config, device, warm_up, communicator = None, None, None, None
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
            device = warm_up = None  # those of an engine before this one
            settings = EngineConfig.from_knobs(**json.loads(body))
            communicator = communicator or join_ranks(link.communicator, loaded)
            config = bind_rank(settings, loaded, communicator, link.pipe)
            on_done()
        elif kind == RankMessage.PROBE:
            probe_rank(loaded, warm_up, json.loads(body))
        elif kind == RankMessage.PREPARE:
            while warm_up is not None and warm_up.prepare():
                pass
            on_done()
        else:
            assert kind == RankMessage.BUILD and config is not None and communicator is not None, kind
            size, shape, step = json.loads(body)
            step = None if step is None else StepBytes(*step)
            device, warm_up = build_rank(
                config, loaded, CacheSize(*size), StateShape(*shape), step, communicator
            )
            on_done()


def _receive_ids(link: RankLink, device: TorchDevice) -> None:
    kind, body = link.receive()
    assert kind == RankMessage.IDS, f"ids come before the next order, not a message of kind {kind}"
    device.learn(body)
