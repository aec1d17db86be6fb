"""The life of a front: bind, place replicas, forward, scale, drain, end.

It is as in `server/serve.py`, with replicas in place of engines: the port is bound first and answers 503
until a replica serves, SIGTERM drains, and a second signal ends the server at once.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from infer.cluster.child import ReplicaLaunch
from infer.cluster.front import build_front
from infer.cluster.placing import RayPlacer, import_ray
from infer.cluster.replicas import ReplicaSet
from infer.cluster.scaling import Scaler
from infer.config.server import ServerConfig
from infer.config.settings import EngineConfig
from infer.errors import EngineLost
from infer.server.middleware.host_check import needs_host_check
from infer.server.processes.board import Board
from infer.server.serve import (
    HttpServer,
    bind,
    drain,
    http_config,
    remove_socket,
    stop_on_signals,
    url_of,
    warn_if_open,
)
from infer.server.state import ServerState

logger = logging.getLogger(__name__)

PROBE_EVERY_S = 1.0

# Settings that only the front has: its address, and things that exist only once.
OF_FRONT = (
    "host", "port", "uds", "tls_cert", "tls_key", "cors_origin", "allowed_host", "cluster", "ray_address",
    "replicas", "max_replicas", "target_queue_time", "scale_down_after", "api_processes",
)  # fmt: skip


async def serve_cluster(
    models: Mapping[str, EngineConfig],
    config: ServerConfig,
    *,
    announce: Callable[[str], None],
    log_level: str = "info",
) -> None:
    """Serve these models from replicas on a cluster until a signal comes."""
    import_ray()  # its error, how to install ray, comes before the port is bound
    state = ServerState(config=config, board=Board(1))
    state.board.is_starting = True
    replicas = ReplicaSet()
    http = http_config(build_front(state, replicas, check_host=needs_host_check(config)), config)
    listener = bind(config)
    server = HttpServer(http, listener, state.board)
    warn_if_open(config)
    stopping = stop_on_signals(state)
    key = secrets.token_hex(16)
    placer = RayPlacer(replica_launch(models, config, key, log_level), key, replicas)
    ready = asyncio.Event()
    placer.on_ready = ready.set
    serving = asyncio.create_task(server.serve())
    scaling: asyncio.Task[None] | None = None
    starting = asyncio.create_task(_start(placer, config, ready))
    ends: set[asyncio.Future[Any]] = {stopping, serving, placer.lost}
    try:
        await asyncio.wait({starting, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if placer.lost.done():
            raise EngineLost(placer.lost.result())
        if starting.done():
            starting.result()
            state.board.is_starting = False
            scaling = asyncio.create_task(_watch(placer, replicas, config))
            announce(url_of(config, listener))
            await asyncio.wait({scaling, *ends}, return_when=asyncio.FIRST_COMPLETED)
            await drain(state, config.drain_timeout)
            if scaling.done():
                scaling.result()  # it ends only by an error, which ends the front
    finally:
        state.board.is_draining = True
        starting.cancel()
        if scaling is not None:
            scaling.cancel()
        server.should_exit = True
        await asyncio.gather(serving, placer.close(), return_exceptions=True)
        stopping.cancel()
        remove_socket(config)
    logger.info("stopped")


async def _start(placer: RayPlacer, config: ServerConfig, ready: asyncio.Event) -> None:
    await placer.connect(config.ray_address)
    for _ in range(config.replicas):
        placer.add()
    await ready.wait()


async def _watch(placer: RayPlacer, replicas: ReplicaSet, config: ServerConfig) -> None:
    """Probe the replicas every second, and add or remove some."""
    highest = config.max_replicas or config.replicas
    scaler = Scaler(config.replicas, highest, config.target_queue_time, config.scale_down_after)
    clock = asyncio.get_running_loop().time
    while True:
        reports = await replicas.probe()
        if not placer.is_changing and len(reports) + placer.num_unplaced == placer.count:
            wanted = scaler.decide(reports, clock(), placer.num_unplaced)
            if wanted != placer.count:
                logger.info("replicas=%d wanted=%d", placer.count, wanted)
                placer.add() if wanted > placer.count else placer.remove()
        await asyncio.sleep(PROBE_EVERY_S)


def replica_launch(
    models: Mapping[str, EngineConfig], config: ServerConfig, key: str, log_level: str
) -> ReplicaLaunch:
    """The settings of each replica; it accepts the clients' keys, and a key that only the front knows."""
    plain: dict[str, Any] = {name: getattr(ServerConfig(), name) for name in OF_FRONT}
    server = replace(config, **plain, api_key=(*config.api_key, key), response_store=0)
    return ReplicaLaunch(models=dict(models), server=server, log_level=log_level)
