"""The nodes that the ranks of a replica are placed on, by what the nodes of a cluster have."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest

from infer.client.rank_greeting import listen
from infer.client.spawn import read_orders
from infer.cluster import placing
from infer.cluster import serve as cluster_serve
from infer.cluster.child import ReplicaLaunch
from infer.cluster.placing import RayPlacer, ReplicaActor, bundle_of, spread
from infer.cluster.replicas import ReplicaSet
from infer.cluster.scaling import LoadReport
from infer.cluster.serve import replica_launch
from infer.config.server import ServerConfig
from infer.config.settings import EngineConfig, LoadConfig


def launch_of(config: EngineConfig) -> ReplicaLaunch:
    return ReplicaLaunch(models={"m": config}, server=ServerConfig(), log_level="info")


def place(*sizes: dict[str, float], **knobs: Any) -> tuple[list[dict[str, float]], LoadConfig]:
    config = EngineConfig.from_knobs(**knobs)
    made, bundles = spread(launch_of(config), sizes)
    return bundles, made.models["m"].load


@contextmanager
def actor_of(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[ReplicaActor, ReplicaLaunch]]:
    """An actor on a node with the address 127.0.0.2, and what its process was started with."""
    process = mock.Mock()
    ray = SimpleNamespace(util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.2"))
    monkeypatch.setattr(placing, "import_ray", lambda: ray)
    monkeypatch.setattr(placing, "ReplicaProcess", process)
    actor = ReplicaActor(launch_of(config))
    ((launch,), _) = process.call_args
    yield actor, launch
    actor.stop()


def cpu(number: float) -> dict[str, float]:
    return {"CPU": number, "memory": 1e9}


def test_a_replica_has_a_gpu_for_each_rank_and_a_cpu_for_each_thread() -> None:
    for knobs, bundle in (
        ({}, {"CPU": 1.0, "GPU": 1.0}),
        ({"device": "cpu", "num_threads": 4}, {"CPU": 4.0}),
        ({"tensor_parallel_size": 4}, {"CPU": 4.0, "GPU": 4.0}),
        ({"tensor_parallel_size": 4, "device": "cuda:0"}, {"CPU": 4.0, "GPU": 1.0}),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "device": "cpu"}, {"CPU": 4.0}),
        ({"tensor_parallel_size": 2, "device": "cpu", "num_threads": 8}, {"CPU": 8.0}),
        ({"tensor_parallel_size": 4, "device": "cpu", "nnodes": 2}, {"CPU": 2.0}),
    ):
        assert bundle_of({"m": EngineConfig.from_knobs(**knobs)}) == bundle, knobs


@pytest.mark.parametrize(
    ("sizes", "nnodes"),
    [
        ((4.0,), 1),
        ((2.0, 4.0), 1),
        ((2.0, 2.0), 2),
        ((2.0, 3.0, 1.0), 2),
        ((1.0,) * 5, 4),
        ((3.0, 1.0), 1),
        ((), 1),
    ],
)
def test_ranks_are_on_as_few_nodes_as_are_large_enough(sizes: tuple[float, ...], nnodes: int) -> None:
    bundles, load = place(*map(cpu, sizes), tensor_parallel_size=4, device="cpu", num_threads=4)
    each = 4.0 / nnodes
    assert bundles == [{"CPU": each}] * nnodes
    assert load.nnodes == nnodes and load.num_threads == each


def test_gpus_are_on_as_few_nodes_and_a_number_that_was_given_is_kept() -> None:
    large, small = {"CPU": 8.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 1.0}
    assert place(small, large, tensor_parallel_size=4)[0] == [{"CPU": 4.0, "GPU": 4.0}]
    assert place(small, small, tensor_parallel_size=2)[0] == [{"CPU": 1.0, "GPU": 1.0}] * 2
    shared = place(small, tensor_parallel_size=2, device="cuda:0")[0]
    assert shared == [{"CPU": 2.0, "GPU": 1.0}], "ranks that share a GPU are on one node"
    bundles, load = place(cpu(64), tensor_parallel_size=2, nnodes=2, device="cpu")
    assert bundles == [{"CPU": 1.0}] * 2 and load.nnodes == 2


@pytest.mark.parametrize("nnodes", [1, 2])
def test_only_a_replica_on_several_nodes_gets_an_address_for_ranks(
    nnodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one node the address has no effect, and the start line would say so of knobs that nobody set."""
    config = EngineConfig.from_knobs(tensor_parallel_size=2, nnodes=nnodes)
    with actor_of(config, monkeypatch) as (actor, launch):
        pass
    assert (launch.server.host, launch.server.port) == ("127.0.0.2", 0)
    if nnodes == 1:
        assert launch.models["m"] == config
    else:
        port = launch.models["m"].load.master_port
        load = replace(config.load, master_addr="127.0.0.2", master_port=port)
        assert actor.config() == launch.models["m"] == replace(config, load=load)


def test_nobody_else_is_given_the_port_for_ranks_before_or_between_its_uses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with actor_of(EngineConfig.from_knobs(tensor_parallel_size=2, nnodes=2), monkeypatch) as (actor, _):
        load = actor.config().load
        for _ in range(2):  # the first engine, and the one after a crash
            with socket.socket() as other, pytest.raises(OSError, match="already in use"):
                other.bind((load.master_addr, load.master_port))
            with listen(load) as server, socket.create_connection(server.getsockname()):
                server.accept()[0].close()
    with socket.create_server((load.master_addr, load.master_port)):
        pass  # the port is free once the replica is stopped


def test_a_replica_has_the_settings_of_the_front_and_not_its_address() -> None:
    front = ServerConfig(
        port=9000, cluster="ray", replicas=2, max_replicas=3, api_key=("a",), drain_timeout=5.0, max_n=2
    )
    models = {"m": EngineConfig.from_knobs(model="m", num_blocks=7)}
    launch = replica_launch(models, front, "key of the front", "warning")
    server = ServerConfig(api_key=("a", "key of the front"), drain_timeout=5.0, max_n=2, response_store=0)
    assert launch == ReplicaLaunch(models=models, server=server, log_level="warning")
    assert read_orders(msgspec.json.encode(launch), ReplicaLaunch) == launch


class FullCluster:
    """Ray's side of a cluster with room for a number of replicas; the others wait for a place."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.sizes = [cpu(1)]
        self.asked: list[Any] = []  # bundles of all groups, in order
        self.groups: list[asyncio.Future[None]] = []
        self.options: list[dict[str, Any]] = []
        self.kill = mock.Mock()
        self.PlacementGroupSchedulingStrategy = mock.Mock()

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": size} for size in self.sizes]

    def placement_group(self, bundles: Any, strategy: str) -> Any:
        ready = asyncio.get_running_loop().create_future()
        self.groups.append(ready)
        self.asked.append(bundles)
        if len(self.groups) <= self.room:
            ready.set_result(None)
        return SimpleNamespace(ready=lambda: ready, future=ready)

    def remove_placement_group(self, group: Any) -> None:
        self.groups.remove(group.future)

    def remote(self, kind: type) -> Any:
        async def ready() -> tuple[str, int, str]:
            return "http://127.0.0.1:1", 1, "node"

        async def config() -> EngineConfig:
            return EngineConfig.from_knobs(tensor_parallel_size=2, nnodes=2)

        actor = SimpleNamespace(
            wait_ready=SimpleNamespace(remote=ready),
            wait_end=SimpleNamespace(remote=asyncio.Event().wait),
            config=SimpleNamespace(remote=config),
        )

        def options(**given: Any) -> Any:
            self.options.append(given)
            return SimpleNamespace(remote=lambda _: actor)

        return SimpleNamespace(options=options)


def use(ray: FullCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ray", "ray.util", "ray.util.scheduling_strategies"):
        monkeypatch.setitem(sys.modules, name, ray)
    monkeypatch.setattr(placing, "NO_ROOM_S", 0.01)


def test_a_replica_that_waits_for_a_large_node_takes_two_small_ones_that_join(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ray, replicas = FullCluster(room=0), ReplicaSet()
    use(ray, monkeypatch)
    config = EngineConfig.from_knobs(tensor_parallel_size=4, device="cpu", num_threads=4)

    async def grow() -> None:
        placer = RayPlacer(launch_of(config), "k", replicas)
        placer.add()
        async with asyncio.timeout(30):
            while "replica waits for a place" not in caplog.text:
                await asyncio.sleep(0.01)
            assert ray.asked == [[{"CPU": 4.0}]] and placer.num_unplaced == 1
            ray.sizes, ray.room = [cpu(1), cpu(2), cpu(2)], 1
            while not replicas.servers:
                await asyncio.sleep(0.01)
        assert ray.asked[1:] == [[{"CPU": 2.0}] * 2] and len(ray.groups) == 1, "the first group is given back"
        assert placer.num_unplaced == 0
        for slot in placer._slots:
            assert slot.task is not None
            slot.task.cancel()

    asyncio.run(grow())


def test_a_replica_that_finds_no_place_is_logged_and_taken_back_when_it_is_not_needed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While it waits, Ray's own autoscaler may rent a machine for it."""
    ray, replicas = FullCluster(room=2), ReplicaSet()
    use(ray, monkeypatch)
    monkeypatch.setattr(cluster_serve, "PROBE_EVERY_S", 0.001)

    async def probe() -> list[LoadReport]:
        return [LoadReport(each.number, 0, 0, 0, 0) for each in replicas.servers]

    async def scale() -> None:
        placer = RayPlacer(launch_of(EngineConfig()), "k", replicas)
        for _ in range(3):
            placer.add()
        config = ServerConfig(cluster="ray", max_replicas=3, replicas=2, scale_down_after=0.05)
        watching = asyncio.create_task(cluster_serve._watch(placer, replicas, config))
        async with asyncio.timeout(30):
            while placer.count == 3 or len(ray.groups) == 3:
                await asyncio.sleep(0.01)
        watching.cancel()
        assert [each.number for each in replicas.servers] == [0, 1]
        for slot in placer._slots:
            assert slot.task is not None
            slot.task.cancel()

    monkeypatch.setattr(replicas, "probe", probe)
    with caplog.at_level("INFO", "infer"):
        asyncio.run(scale())
    environments = [each["runtime_env"]["env_vars"] for each in ray.options]
    assert environments == [{"RAY_worker_niceness": "0"}] * 2, "what a worker starts inherits its niceness"
    assert "replica waits for a place number=2 needs=[{'CPU': 1.0" in caplog.text
