"""Replicas on the nodes of a Ray cluster. Ray places, starts and watches them, but handles no requests.

    placement group {CPU, GPU} ──► actor ──► the replica's process, an ordinary server on the node's address

A replica of several ranks has a bundle for all of them on one node. If no node is large enough, it has
bundles on several nodes, each with an actor. The first actor has the server, the others only ranks, and they
communicate as with `--nnodes`, with a secret of their own. They end and are placed together.

One task manages each replica: it places the actor, waits for the model, passes its URL to the front, and
waits for its end. Whatever ended it (a crash, a killed actor, a lost node), the next replica is placed
wherever there is room, after a growing pause. Only if the first replica cannot start does the server give up,
because then nothing would ever serve.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import msgspec

from infer.client.messages import NodeLaunch
from infer.cluster.child import ReplicaLaunch, ReplicaProcess
from infer.cluster.replicas import RemoteServer, ReplicaSet
from infer.config.settings import EngineConfig
from infer.errors import ConfigError

logger = logging.getLogger(__name__)

PAUSES_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)  # pauses before a replica is placed again
DRAIN_POLL_S = 0.05
NO_ROOM_S = 10.0  # seconds without a place after which the log says so
HOW_TO_INSTALL = "--cluster ray needs the package ray; install it with: pip install 'infer[ray]'"
# Otherwise Ray runs its workers, and the servers that they start, at niceness 15.
FULL_PRIORITY = {"env_vars": {"RAY_worker_niceness": "0"}}
Resources: TypeAlias = dict[str, float]  # numbers of CPUs, GPUs and others, by Ray's names for them


def import_ray() -> Any:
    """The package ray; without it, an error that says how to install it."""
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise ConfigError(HOW_TO_INSTALL) from None


def _take_signals_back() -> None:
    """Have Python handle signals again: Ray's handler of SIGTERM aborts the process three seconds later."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        handler = signal.getsignal(number)
        if handler is not None:
            signal.signal(number, handler)
            signal.siginterrupt(number, False)


class ReplicaActor:
    """The actor on a node, which holds the process of one replica. Each call blocks a thread of its own."""

    def __init__(self, launch: ReplicaLaunch) -> None:
        host = import_ray().util.get_node_ip_address()
        # No other process is given a bound port. This socket never listens, so Linux lets node 0's engine
        # bind the port as well, now and when it is restarted.
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind((host, 0))
        models = dict(launch.models)
        for name, config in launch.models.items():
            if config.load.nnodes > 1:
                load = replace(config.load, master_addr=host, master_port=self._held.getsockname()[1])
                models[name] = replace(config, load=load)
        server = replace(launch.server, host=host, port=0)
        self._launch = msgspec.structs.replace(launch, models=models, server=server)
        self._process = ReplicaProcess(self._launch)

    def config(self) -> EngineConfig:
        """The settings of its model, with the address at which the ranks on other nodes join it."""
        (config,) = self._launch.models.values()
        return config

    def wait_ready(self) -> tuple[str, int, str]:
        """The URL of the replica once it serves, the id of its process, and the node that it is on."""
        node = import_ray().get_runtime_context().get_node_id()
        return self._process.wait_ready(), self._process.pid, node

    def wait_end(self) -> str:
        """Wait for the end of the replica and return how it ended."""
        return self._process.wait_end()

    def stop(self) -> None:
        """Let the replica drain and end."""
        self._process.stop()
        self._held.close()


class NodeActor:
    """The actor on a further node of a replica, which holds a process with ranks and no server."""

    def __init__(self, launch: NodeLaunch) -> None:
        self._process = ReplicaProcess(launch, "infer.client.rank_node")

    def wait_end(self) -> str:
        """Wait for the end of the process and return how it ended."""
        return f"a node of the replica: {self._process.wait_end()}"


@dataclass(slots=True)
class _Slot:
    """A replica that should exist, across all its restarts."""

    number: int
    task: asyncio.Task[None] | None = None
    server: RemoteServer | None = None
    actor: Any = None
    others: list[Any] = field(default_factory=list)  # actors on further nodes
    group: Any = None
    is_unplaced: bool = False  # True while the cluster has no room for it
    is_leaving: bool = False


class RayPlacer:
    """Keeps a number of replicas running on a Ray cluster."""

    def __init__(self, launch: ReplicaLaunch, key: str, replicas: ReplicaSet) -> None:
        self._ray = import_ray()
        self._launch = launch
        self._key = key
        self._replicas = replicas
        self._slots: list[_Slot] = []
        self._next = 0
        self._has_served = False
        self._endings: set[asyncio.Task[None]] = set()  # the loop itself holds tasks only weakly
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # reason to give up
        self.on_ready: Callable[[], None] = lambda: None

    async def connect(self, address: str | None) -> None:
        """Join the cluster at an address; None: the cluster that Ray finds, or a new one on this machine."""
        options = {"namespace": "infer", "ignore_reinit_error": True, "log_to_driver": True}
        try:
            await asyncio.to_thread(self._ray.init, address=address, **options)
        except ConnectionError as error:
            raise ConfigError(
                f"no Ray cluster answers at {address or 'the usual address'}: {error}"
            ) from None
        _take_signals_back()

    @property
    def count(self) -> int:
        """The number of replicas that there should be."""
        return sum(not slot.is_leaving for slot in self._slots)

    @property
    def is_changing(self) -> bool:
        """True if a replica is being started, restarted or ended; not if it only waits for a place."""
        return any(slot.is_leaving or slot.server is None and not slot.is_unplaced for slot in self._slots)

    @property
    def num_unplaced(self) -> int:
        """The number of replicas that wait for a place in the cluster."""
        return sum(slot.is_unplaced and not slot.is_leaving for slot in self._slots)

    def add(self) -> None:
        """Add one replica."""
        slot = _Slot(self._next)
        self._next += 1
        slot.task = asyncio.create_task(self._keep(slot))
        self._slots.append(slot)

    def remove(self) -> None:
        """Remove one replica: one that has no place, or the youngest one, after its last request."""
        staying = [slot for slot in self._slots if not slot.is_leaving]
        slot = next((slot for slot in staying if slot.is_unplaced), staying[-1])
        slot.is_leaving = True
        if slot.server is not None:
            slot.server.is_leaving = True
        ending = asyncio.create_task(self._end(slot))
        self._endings.add(ending)
        ending.add_done_callback(self._note_ending)

    def _note_ending(self, ending: asyncio.Task[None]) -> None:
        self._endings.discard(ending)
        if not ending.cancelled() and (error := ending.exception()) is not None:
            logger.error("a replica could not be ended", exc_info=error)

    async def close(self) -> None:
        """End every replica."""
        await asyncio.gather(*(self._end(slot) for slot in list(self._slots)))
        await asyncio.to_thread(self._ray.shutdown)

    async def _keep(self, slot: _Slot) -> None:
        num_failures = 0
        while not slot.is_leaving:
            try:
                await self._start(slot)
                num_failures = 0
                reason = await _first(each.wait_end.remote() for each in (slot.actor, *slot.others))
            except Exception as error:  # Ray's errors: the actor or its node died, the start failed
                reason = str(error).strip().splitlines()[-1] if str(error) else type(error).__name__
            self._forget(slot)
            if slot.is_leaving:
                return
            if not self._has_served:
                if not self.lost.done():
                    self.lost.set_result(reason)
                return
            pause = PAUSES_S[min(num_failures, len(PAUSES_S) - 1)]
            num_failures += 1
            logger.warning("replica ended number=%d reason=%r next_in_s=%g", slot.number, reason, pause)
            await asyncio.sleep(pause)

    async def _start(self, slot: _Slot) -> None:
        """Place the actor, and let the front use its replica once that serves."""
        ray, strategies = self._ray, importlib.import_module("ray.util.scheduling_strategies")
        slot.is_unplaced = True
        try:
            launch, bundles = await self._find_place(slot)
        finally:
            slot.is_unplaced = False

        def place(kind: type, number: int, own: ReplicaLaunch | NodeLaunch) -> Any:
            bundle = bundles[number]
            options = {
                "num_cpus": bundle["CPU"],
                "num_gpus": bundle.get("GPU", 0),
                "max_concurrency": 4,
                "max_restarts": 0,  # `_keep` places it again, perhaps elsewhere
                "runtime_env": FULL_PRIORITY,
                "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(
                    slot.group, placement_group_bundle_index=number
                ),
            }
            return ray.remote(kind).options(**options).remote(own)

        token = secrets.token_hex(16)
        slot.actor = place(ReplicaActor, 0, msgspec.structs.replace(launch, token=token))
        ready = slot.actor.wait_ready.remote()
        if bundles[1:]:
            config: EngineConfig = await slot.actor.config.remote()
            for number in range(1, len(bundles)):
                own = replace(config, load=replace(config.load, node_rank=number))
                node = NodeLaunch(config=own, log_level=launch.log_level, token=token)
                slot.others.append(place(NodeActor, number, node))
            ready = _first([ready, *(each.wait_end.remote() for each in slot.others)])
        if isinstance(found := await ready, str):
            raise RuntimeError(f"a replica could not start: {found}")
        url, pid, node = found
        slot.server = RemoteServer(slot.number, url, self._key, is_leaving=slot.is_leaving)
        self._replicas.servers.append(slot.server)
        self._has_served = True
        told = slot.number, url, pid, node[:8], len(bundles)
        logger.info("replica serves number=%d url=%s pid=%d node=%s nodes=%d", *told)
        self.on_ready()

    async def _find_place(self, slot: _Slot) -> tuple[ReplicaLaunch, list[Resources]]:
        """Wait until the cluster has room for a replica, however long that takes, and return its bundles.

        Nodes that join meanwhile may be large enough for other bundles, which are then asked for instead.
        """
        util = importlib.import_module("ray.util")
        launch, bundles = await self._spread()
        while True:
            strategy = "STRICT_SPREAD" if bundles[1:] else "STRICT_PACK"
            slot.group = util.placement_group(bundles, strategy=strategy)
            placed = asyncio.ensure_future(slot.group.ready())
            try:
                if not (await asyncio.wait([placed], timeout=NO_ROOM_S))[0]:
                    told = "replica waits for a place number=%d needs=%s: no node has that much free"
                    logger.warning(told, slot.number, bundles)
                    while not placed.done() and (found := await self._spread())[1] == bundles:
                        await asyncio.wait([placed], timeout=NO_ROOM_S)
                if placed.done():
                    placed.result()
                    return launch, bundles
                launch, bundles = found
            finally:
                placed.cancel()
            util.remove_placement_group(slot.group)

    async def _spread(self) -> tuple[ReplicaLaunch, list[Resources]]:
        nodes = await asyncio.to_thread(self._ray.nodes)
        return spread(self._launch, [node["Resources"] for node in nodes if node["Alive"]])

    def _forget(self, slot: _Slot) -> None:
        if slot.server is not None:
            self._replicas.remove(slot.server)
            slot.server = None
        with suppress(Exception):  # the cluster may be gone
            for actor in (slot.actor, *slot.others):
                if actor is not None:
                    self._ray.kill(actor)
            if slot.group is not None:
                importlib.import_module("ray.util").remove_placement_group(slot.group)
        slot.actor = slot.group = None
        slot.others = []

    async def _end(self, slot: _Slot) -> None:
        slot.is_leaving = True
        while slot.server is not None and slot.server.num_active:
            await asyncio.sleep(DRAIN_POLL_S)
        if slot.server is not None and slot.actor is not None:
            with suppress(Exception):
                await slot.actor.stop.remote()
        if slot.task is not None and slot.server is None:
            slot.task.cancel()  # ends its wait for a place, a model or the next try
        if slot.task is not None:
            await asyncio.gather(slot.task, return_exceptions=True)
        self._forget(slot)
        if slot in self._slots:
            self._slots.remove(slot)


def bundle_of(models: Mapping[str, EngineConfig]) -> Resources:
    """The resources of a replica on a node: a CPU per thread, and a GPU per rank unless all are on CPUs."""
    loads = [engine.load for engine in models.values()]
    threads = max(max(load.num_threads or 1, load.num_local_ranks) for load in loads)
    gpus = max(1 if load.names_gpu else load.num_local_ranks for load in loads)
    gpu = {} if {load.device for load in loads} == {"cpu"} else {"GPU": float(gpus)}
    return {"CPU": float(threads)} | gpu


def spread(launch: ReplicaLaunch, sizes: Sequence[Resources]) -> tuple[ReplicaLaunch, list[Resources]]:
    """The settings of a replica and its bundles, one for each node that it needs.

    One node is enough if any node is large enough, or if all ranks share a GPU; `sizes` has the resources of
    all nodes. If there are too few nodes, the replica waits for a node that the cluster may add.
    """
    nodes, bundle = [config.load.nnodes for config in launch.models.values()], bundle_of(launch.models)
    if nodes != [1]:  # several models, or a number of nodes that was given
        return launch, [bundle] * max(nodes)
    ((name, config),) = launch.models.items()
    load = config.load
    for nnodes in range(1, 1 if load.names_gpu else load.num_ranks + 1):
        if load.num_ranks % nnodes == 0:
            threads = load.num_threads and max(1, load.num_threads // nnodes)
            models = {name: replace(config, load=replace(load, nnodes=nnodes, num_threads=threads))}
            each = bundle_of(models)
            num_large = sum(all(size.get(kind, 0) >= each[kind] for kind in each) for size in sizes)
            if num_large >= nnodes:
                return msgspec.structs.replace(launch, models=models), [each] * nnodes
    return launch, [bundle]


async def _first(results: Iterable[Awaitable[Any]]) -> Any:
    """The first of several results, or its error, without waiting for the others."""
    tasks = [asyncio.ensure_future(each) for each in results]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
