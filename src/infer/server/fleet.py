"""The models a server runs: their engines are started, watched, added and removed here.

    load     headers and tokenizer in this process, weights in each engine's own process
    watch    every few seconds: has an engine died, come back, or stopped making progress?
    unload   first the name goes, then those who still use it finish, then the engines stop

With `in_process` the engines are threads of this process and replicas share one copy of the weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from infer.config import EngineConfig
from infer.engine.client import EngineClient, InProcessClient
from infer.errors import EngineError, RequestError, UnknownModel
from infer.server.metrics import ServerMetrics
from infer.server.observed import ObservedClient
from infer.server.state import ServedModel, ServerState

if TYPE_CHECKING:
    from infer.front import TextFront

logger = logging.getLogger(__name__)

DEFAULT_MAX_WAITING = 512
WATCH_INTERVAL_S = 1.0
UNLOAD_TIMEOUT_S = 30.0


class Fleet:
    """Starts and stops the engines behind a `ServerState`."""

    def __init__(self, state: ServerState, metrics: ServerMetrics) -> None:
        self.state = state
        self.metrics = metrics
        self._watcher: asyncio.Task[None] | None = None
        self._is_loading: set[str] = set()

    async def start(self, models: Mapping[str, EngineConfig]) -> None:
        """Load the first models, one after the other; the first of them is the default."""
        started = time.perf_counter()
        self.state.is_starting = True
        for name, config in models.items():
            await self.load(name, config)
        self.state.is_starting = False
        self.metrics.startup_s = time.perf_counter() - started
        logger.info("ready after %.2f s", self.metrics.startup_s)

    async def load(self, name: str, config: EngineConfig) -> ServedModel:
        """Start the engines of a model and serve it under a name; an empty name means its own."""
        self._check_name(name)
        self._is_loading.add(name)
        try:
            model = await self._load(name, with_server_defaults(config))
        finally:
            self._is_loading.discard(name)
        self.state.models[model.name] = model
        self.state.default_model = self.state.default_model or model.name
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())
        return model

    async def unload(self, name: str) -> None:
        """Serve a model no longer; its running requests get some time to finish."""
        model = self.state.models.pop(name, None)
        if model is None:
            raise UnknownModel(f"no model is served under the name {name!r}", param="name")
        self.state.aliases = {a: m for a, m in self.state.aliases.items() if m != name}
        if self.state.default_model == name:
            self.state.default_model = next(iter(self.state.models), None)
        give_up_at = time.monotonic() + UNLOAD_TIMEOUT_S
        while _is_busy(model) and time.monotonic() < give_up_at:
            await asyncio.sleep(0.05)
        await self._close(model)
        logger.info("model %s is no longer served", name)

    def set_alias(self, alias: str, name: str) -> None:
        """Let a second name mean a model; an alias may be pointed elsewhere at any time."""
        if name not in self.state.models:
            raise UnknownModel(f"no model is served under the name {name!r}", param="name")
        if not alias or alias in self.state.models:
            raise RequestError(f"alias must be a name no model has, got {alias!r}", param="alias")
        self.state.aliases[alias] = name

    async def reset_prefix_caches(self, name: str | None) -> int:
        """Empty the prefix caches of one model or of all; returns how many blocks were forgotten."""
        models = list(self.state.models.values()) if name is None else [self.state.get_model(name)]
        num_forgotten = 0
        for model in models:
            for client in model.clients:
                num_forgotten += await client.reset_prefix_cache()
                model.router.forget(client)
        return num_forgotten

    async def close(self) -> None:
        """Stop every engine; whoever still waits for one gets `EngineStopped`."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
            self._watcher = None
        models, self.state.models = self.state.models, {}
        await asyncio.gather(*(self._close(model) for model in models.values()))

    # -- loading ----------------------------------------------------------------------------------

    def _check_name(self, name: str) -> None:
        if name in self.state.models or name in self.state.aliases or name in self._is_loading:
            raise RequestError(
                f"a model named {name!r} is already served; unload it or use another name", param="name"
            )

    async def _load(self, name: str, config: EngineConfig) -> ServedModel:
        started = time.perf_counter()
        front, engines = await (
            self._start_threads(config) if self.state.config.in_process else self._start_processes(config)
        )
        if not name:
            name = front.name
            self._check_name(name)
        clients: list[EngineClient] = [ObservedClient(engine, name, self.metrics) for engine in engines]
        seconds = time.perf_counter() - started
        logger.info("model %s: %d engine(s) after %.2f s", name, len(clients), seconds)
        return ServedModel(
            name=name,
            front=front,
            clients=clients,
            created=int(time.time()),
            max_waiting=config.scheduler.max_waiting,
        )

    async def _start_threads(self, config: EngineConfig) -> tuple[TextFront, list[EngineClient]]:
        def build() -> tuple[TextFront, list[EngineClient]]:
            from infer.engine.build import build_engine
            from infer.front import open_model

            front, loaded = open_model(config.load, show_progress=True)
            timeout = self.state.config.stuck_timeout
            engines = [build_engine(config, loaded) for _ in range(self.state.config.replicas)]
            return front, [InProcessClient(engine, stuck_timeout=timeout) for engine in engines]

        return await asyncio.to_thread(build)

    async def _start_processes(self, config: EngineConfig) -> tuple[TextFront, list[EngineClient]]:
        from infer.engine.process_client import ProcessClient

        def open_headers() -> Callable[[], TextFront]:
            from infer.front import TextFront, find_headers

            headers = find_headers(config.load, show_progress=True)
            return lambda: TextFront(config.load, headers)

        open_front = await asyncio.to_thread(open_headers)  # first: it fetches what every engine will read
        server = self.state.config
        starts = [
            ProcessClient.start(config, stuck_timeout=server.stuck_timeout, restart=server.restart_engine)
            for _ in range(server.replicas)
        ]
        opening = asyncio.create_task(asyncio.to_thread(open_front))  # beside the engines, not before them
        results = await asyncio.gather(opening, *starts, return_exceptions=True)
        engines: list[EngineClient] = [result for result in results if isinstance(result, ProcessClient)]
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            await asyncio.gather(*(engine.close() for engine in engines))
            raise failures[0]
        return opening.result(), engines

    async def _close(self, model: ServedModel) -> None:
        for client in model.clients:
            self.metrics.remove(client)
        await asyncio.gather(*(client.close() for client in model.clients))

    # -- watching ---------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Log when an engine goes down and when it is back, and count the latter."""
        while True:
            for meter in self.metrics.meters:
                model, engine = meter.labels
                reason = failure_of(meter.client)
                if reason is not None and not meter.is_down:
                    logger.error("engine %s of %s is down: %s", engine, model, reason)
                elif reason is None and meter.is_down:
                    logger.warning("engine %s of %s is back", engine, model)
                    meter.num_restarts += 1
                meter.is_down = reason is not None
            await asyncio.sleep(WATCH_INTERVAL_S)


def with_server_defaults(config: EngineConfig) -> EngineConfig:
    """A server's queue is bounded even if nobody said how long it may be."""
    if config.scheduler.max_waiting is not None:
        return config
    return replace(config, scheduler=replace(config.scheduler, max_waiting=DEFAULT_MAX_WAITING))


def failure_of(client: EngineClient) -> str | None:
    """Why an engine cannot serve at the moment; None: it can."""
    try:
        client.check_health()
    except EngineError as error:
        return str(error)
    return None


def _is_busy(model: ServedModel) -> bool:
    return any(
        client.stats().num_running + client.stats().num_waiting > 0
        for client in model.clients
        if failure_of(client) is None
    )
