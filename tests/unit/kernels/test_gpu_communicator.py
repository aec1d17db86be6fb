"""Ranks on GPUs that cannot work together are refused in time; nothing here needs a GPU."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from infer.engine.machine import device_facts
from infer.errors import ConfigError, DeviceLost
from infer.execution.halves import MAX_PARTS
from infer.kernels.cpu.collectives import SharedCommunicator
from infer.kernels.runtime import nccl
from infer.kernels.runtime.device_ranks import RankFacts, check_alike, have_room, wait_for_all
from infer.kernels.runtime.gpu_way import (
    DEPTH,
    IDS,
    NUM_BLOCKS,
    NUM_THREADS,
    NUM_UNITS,
    GpuWay,
    RankMemory,
)
from infer.kernels.runtime.node_communicator import HINT


def test_gpus_of_different_kinds_are_refused_by_name() -> None:
    check_alike(["NVIDIA L4", "NVIDIA L4"])
    with pytest.raises(ConfigError, match="rank 0 has NVIDIA L4, rank 1 has NVIDIA A10"):
        check_alike(["NVIDIA L4", "NVIDIA A10"])


@pytest.mark.parametrize(
    ("cards", "has_room"),
    [([0, 1, 2, 3], True), ([0, 0], True), ([0, 0, 0, 0], False), ([0, 1, 1, 1], False)],
)
def test_kernels_start_early_unless_more_than_two_ranks_share_a_gpu(cards: list[int], has_room: bool) -> None:
    assert have_room([RankFacts(card, 0, "NVIDIA H200") for card in cards]) is has_room


@pytest.mark.parametrize(("is_aborted", "wait_s"), [(True, 60.0), (False, 0.0)])
def test_ranks_that_do_not_come_together_are_not_waited_for(is_aborted: bool, wait_s: float) -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    shared: Any = SimpleNamespace(is_aborted=is_aborted)
    with pytest.raises(DeviceLost, match="did not come together for NCCL"):
        wait_for_all(cast(SharedCommunicator, shared), wait_s, "", thread)
    over.set()
    thread.join()


def test_machines_without_nccl_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "load_nccl", lambda: None)
    with pytest.raises(ConfigError, match=r"need NCCL, and libnccl\.so\.2 cannot be loaded here; install"):
        nccl.nccl_version()
    assert device_facts(torch.device("cpu")) == {"device": "cpu"}, "CPUs need none"


def test_a_group_that_was_aborted_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL has freed its memory, while the engine's thread may be in the middle of a step."""
    aborted: list[int | None] = []

    def error_string(code: int) -> bytes:
        return b"invalid argument" if code == 4 else b"?"

    group = object.__new__(nccl.NcclGroup)
    group._group = ctypes.c_void_p(7)
    group._nccl = SimpleNamespace(
        ncclCommAbort=lambda group: aborted.append(group.value),
        ncclBroadcast=lambda *args: 0 if args[-2].value == 7 else 4,
        ncclGetErrorString=error_string,
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    group.broadcast(torch.zeros(1))
    group.abort()
    with pytest.raises(DeviceLost, match="NCCL failed: invalid argument"):
        group.broadcast(torch.zeros(1))
    group.abort()
    assert aborted == [7, None]


def test_a_network_that_nccl_did_not_find_is_a_hint() -> None:
    shared: Any = SimpleNamespace(is_aborted=False)
    thread: Any = SimpleNamespace(is_alive=lambda: True, join=lambda timeout: None)
    with pytest.raises(DeviceLost, match="within 0 s; NCCL_SOCKET_IFNAME names the network interface"):
        wait_for_all(shared, 0.0, HINT, thread)


@pytest.mark.parametrize("num_ids", [1, 1024, 1025, 8192, NUM_BLOCKS * NUM_THREADS * NUM_UNITS])
def test_ids_of_all_parts_of_a_step_have_room_on_their_way(num_ids: int) -> None:
    """Stages take them when they need them, and rank 0 must not wait for that."""
    launched: list[int] = []
    kernels: Any = {"tell": lambda num_blocks, *_: launched.append(num_blocks)}
    memory = RankMemory([0, 0], 0, 0, 0, rank=0)
    way = GpuWay(kernels, memory, torch.device("cpu"), IDS, 0, [1])
    way.go(torch.zeros(num_ids, dtype=torch.int64))
    sets_of_slots = -(-num_ids // (launched[0] * NUM_THREADS * NUM_UNITS))
    assert launched[0] <= NUM_BLOCKS and sets_of_slots * MAX_PARTS <= DEPTH
