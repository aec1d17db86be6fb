"""Replicas on machines that are not here: GPUs and cores are counted by what the test says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from infer.client import placement
from infer.client.load import use_threads
from infer.client.messages import Replica
from infer.client.placement import divide_memory, own_cpus, physical_cores, share_threads, take_place
from infer.config.settings import EngineConfig
from infer.errors import ConfigError
from infer.loader import load


class Machine:
    """A machine with these GPUs and cores; what a process is bound to is remembered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, num_gpus: int = 0, cores: Any = ()) -> None:
        self.bound: list[Any] = []
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        monkeypatch.setattr(torch.cuda, "set_device", self.bound.append)
        monkeypatch.setattr(torch, "get_num_threads", lambda: len(cores))
        monkeypatch.setattr(placement, "physical_cores", lambda: [list(core) for core in cores])
        monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: self.bound.append(cpus), raising=False)


def places(count: int, *, shares: bool = False, **knobs: Any) -> list[tuple[str, str | None]]:
    config = EngineConfig.from_knobs(**knobs)
    replicas = [Replica(number=number, count=count, shares_device=shares) for number in range(count)]
    placed = [take_place(config, replica) for replica in replicas]
    return [(each.load.device, each.cache.device_memory) for each in placed]


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_each_replica_gets_a_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, num_gpus=4)
    assert places(3, device=device, device_memory="12GiB") == [
        ("cuda:0", "12GiB"),
        ("cuda:1", "12GiB"),
        ("cuda:2", "12GiB"),
    ]
    assert machine.bound == ["cuda:0", "cuda:1", "cuda:2"]


@pytest.mark.parametrize(
    ("num_gpus", "knobs", "message"),
    [
        (
            2,
            {},
            r"replicas=3 need a GPU each, but there are 2 with CUDA_VISIBLE_DEVICES=5,7; set replicas=2 or ",
        ),
        (
            4,
            {"device": "cuda:1"},
            "but device=cuda:1 is one with .*; set replicas=1 or less, or share_device to",
        ),
    ],
)
def test_more_replicas_than_gpus_are_refused(
    num_gpus: int, knobs: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(monkeypatch, num_gpus=num_gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    with pytest.raises(ConfigError, match=message):
        places(3, **knobs)


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2)])
def test_replicas_of_ranks_are_refused_on_gpus(
    tensor: int, pipeline: int, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(monkeypatch, num_gpus=4)
    sizes = f"tensor_parallel_size={tensor} and pipeline_parallel_size={pipeline}"
    with pytest.raises(ConfigError, match=rf"replicas=2 with {sizes} is not .* a server for each"):
        places(2, shares=shares, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)


def test_replicas_that_share_divide_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, num_gpus=2)
    third, half = "12884901888B", f"{9 << 30}B"
    assert places(3, shares=True, device_memory="18GiB") == [
        ("cuda:0", half),
        ("cuda:1", "18GiB"),
        ("cuda:0", half),
    ]
    assert places(2, shares=True, device="cuda:1") == [("cuda:1", "0.450000")] * 2
    assert divide_memory("36GiB", 3) == third
    assert divide_memory(str(36 << 30), 3) == third
    assert EngineConfig.from_knobs(device_memory=third).cache.device_memory == third


def test_replicas_on_a_cpu_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors 0 to 7, of which two at a time are one core."""
    machine = Machine(monkeypatch, cores=[(0, 4), (1, 5), (2, 6), (3, 7)])
    config = EngineConfig.from_knobs(device="cpu")
    found = [take_place(config, Replica(number=number, count=2)) for number in range(2)]
    assert [each.load.num_threads for each in found] == [2, 2]
    assert machine.bound == [{0, 1, 4, 5}, {2, 3, 6, 7}]


def test_threads_that_were_asked_for_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, cores=[(0,), (1,)])
    config = EngineConfig.from_knobs(device="cpu", num_threads=3)
    assert take_place(config, Replica(number=1, count=2)) == config
    assert machine.bound == []


def test_engines_of_one_process_divide_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, cores=[(0,), (1,), (2,), (3,)])
    config = EngineConfig.from_knobs(device="cpu")
    assert [share_threads(config, count).load.num_threads for count in (1, 2, 3, 9)] == [None, 2, 1, 1]
    asked = EngineConfig.from_knobs(num_threads=3)
    assert share_threads(asked, 2) is asked
    assert machine.bound == []


@pytest.mark.parametrize(("count", "cores"), [(2, 2), (2, 5), (3, 5), (5, 5), (6, 5)])
def test_every_core_has_one_replica(count: int, cores: int) -> None:
    owned = [
        own_cpus(Replica(number=n, count=count), [[core] for core in range(cores)]) for n in range(count)
    ]
    if count > cores:
        assert owned == [set()] * count
    else:
        assert sorted(cpu for cpus in owned for cpu in cpus) == list(range(cores))
        assert all(owned)


def test_an_engine_alone_has_the_whole_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, num_gpus=2, cores=[(0,), (1,)])
    monkeypatch.setattr(load, "choose_device", lambda device: pytest.fail("not asked"))
    config = EngineConfig()
    assert take_place(config, Replica()) is config
    assert machine.bound == []


def test_an_engine_alone_is_bound_to_the_gpu_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and memory that name no device are then those of its GPU."""
    machine = Machine(monkeypatch, num_gpus=2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert places(1, device="cuda:1", device_memory="12GiB") == [("cuda:1", "12GiB")]
    assert machine.bound == ["cuda:1"]


def test_cores_are_read_from_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 9}, raising=False)
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        folder = tmp_path / f"cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert physical_cores(tmp_path) == [[0, 2], [1, 3], [9]]


def test_more_threads_than_cpus_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    use_threads(2)
    assert not caplog.messages
    use_threads(500)
    assert asked == [2, 500]
    assert caplog.messages == ["more threads than CPUs, so they wait for each other num_threads=500 cpus=2"]
