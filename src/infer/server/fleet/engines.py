"""Start the engines of one model: in processes of their own, or as threads of this process.

    processes   the files are found first (and downloaded), then all engines start at once; the tokenizer is
                opened meanwhile
    threads     with `in_process`: replicas share one copy of the weights

A start that fails or is cancelled leaves no engine behind. With `record`, each process writes a record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from infer.client.client import EngineClient, InProcessClient
from infer.client.messages import RecordOrders, Replica
from infer.client.placement import share_threads
from infer.client.process_client import ProcessClient
from infer.client.spawn import SpareEngines
from infer.client.supervisor import ProcessOptions
from infer.config.knobs import parse_bytes
from infer.config.server import ServerConfig
from infer.config.settings import EngineConfig
from infer.errors import ConfigError
from infer.frontend.open_model import find_source, make_served_encoder, open_model, open_text
from infer.frontend.prompts import PromptEncoder
from infer.loader.read_ahead import start_reading_ahead
from infer.server.fleet.load import finish
from infer.server.processes.workers import Workers
from infer.tools.record_files import RecordPaths


class EngineStarter:
    """Starts engines as a `ServerConfig` says; `workers` hear of every process that is started or ends."""

    def __init__(self, config: ServerConfig, workers: Workers, spares: SpareEngines) -> None:
        self._config, self._workers, self._spares = config, workers, spares
        self._records: RecordPaths | None = None
        if config.record is not None:
            path = Path(config.record).expanduser().absolute()
            self._records = RecordPaths(path, num_replicas=config.replicas, may_replace=config.overwrite)

    async def start(
        self, name: str, config: EngineConfig, shared: Sequence[int]
    ) -> tuple[PromptEncoder, list[EngineClient]]:
        """Start the engines of a model, which are known to all API processes by the numbers `shared`."""
        if self._config.in_process:
            return await self._start_threads(config)
        return await self._start_processes(config, shared, self.order_records(name, config))

    def record_paths(self, name: str) -> list[Path]:
        """Return the file of each engine's record; none if no records are written."""
        return [] if self._records is None else list(self._records.of(name))

    def order_records(self, name: str, config: EngineConfig) -> list[RecordOrders | None]:
        """Return the record settings of each engine of a model; a file that cannot be written is rejected."""
        server = self._config
        if self._records is None:
            return [None] * server.replicas
        if server.record_text and config.adapters.is_on:
            raise ConfigError(
                "record_text cannot record LoRA adapters; leave it out, or lora_modules and enable_lora"
            )
        max_bytes = parse_bytes(server.record_bytes) // 2  # the other half is for the predecessor
        return [
            RecordOrders(path=str(path), has_text=server.record_text, max_bytes=max_bytes)
            for path in self._records.of(name)
        ]

    async def _start_threads(self, config: EngineConfig) -> tuple[PromptEncoder, list[EngineClient]]:
        def build() -> tuple[PromptEncoder, list[EngineClient]]:
            from infer.engine.build import build_engine  # imported here: it imports torch

            server = self._config
            if config.adapters.is_on and server.replicas > 1:
                raise ConfigError(
                    "replicas of one process would share the room for LoRA adapters; leave out in_process or "
                    "replicas"
                )
            own = share_threads(config, server.replicas)
            encoder, loaded = open_model(own, show_progress=True)
            if server.replicas > 1 and not str(loaded.device).startswith("cpu"):
                raise ConfigError(
                    "replicas of one process would share a GPU; leave out in_process or replicas"
                )
            engines = [build_engine(own, loaded) for _ in range(server.replicas)]
            clients: list[EngineClient] = []
            for engine in engines:
                engine.keep_stories(server.explain_requests)
                several, timeout = len(engines) > 1, server.stuck_timeout
                clients.append(InProcessClient(engine, stuck_timeout=timeout, has_replicas=several))
            encoder.context_len = min(engine.context_len for engine in engines)
            return encoder, clients

        building = asyncio.ensure_future(asyncio.to_thread(build))
        try:
            return await asyncio.shield(building)
        except asyncio.CancelledError:  # the thread continues, and its engines must be closed
            building.add_done_callback(_close_unwanted)
            raise

    async def _start_processes(
        self, config: EngineConfig, shared: Sequence[int], records: Sequence[RecordOrders | None]
    ) -> tuple[PromptEncoder, list[EngineClient]]:
        # first: it downloads the files that every engine reads
        source = await asyncio.to_thread(find_source, config.load, show_progress=True)
        start_reading_ahead(source)
        server, workers = self._config, self._workers
        starts = []
        for number, engine in enumerate(shared):
            options = ProcessOptions(
                stuck_timeout=server.stuck_timeout,
                restart=server.restart_engine,
                spawn=self._spares.take,
                replica=Replica(number=number, count=len(shared), shares_device=server.share_device),
                num_links=workers.num_processes,
                num_stories=server.explain_requests,
                record=records[number],
                on_spawn=partial(workers.tell_spawned, engine),
                on_down=partial(workers.tell_down, engine),
            )
            starts.append(asyncio.create_task(ProcessClient.start(config, options)))
        # in parallel with the engines
        opening = asyncio.create_task(asyncio.to_thread(open_text, config.load, source))
        try:
            await asyncio.gather(opening, *starts, return_exceptions=True)
            text, engines = opening.result(), [start.result() for start in starts]
            ready = [engine.ready for engine in engines]
            encoder = await asyncio.to_thread(make_served_encoder, config.load, text, ready)
        except BaseException:
            started = [start for start in starts if not start.cancelled() and start.exception() is None]
            with suppress(asyncio.CancelledError):  # the first error is raised
                await finish(asyncio.gather(*(start.result().close() for start in started)))
            raise
        return encoder, list(engines)


def _close_unwanted(building: asyncio.Future[tuple[PromptEncoder, list[EngineClient]]]) -> None:
    if not building.cancelled() and building.exception() is None:
        for engine in building.result()[1]:
            asyncio.ensure_future(engine.close())
