"""The models that a server runs: they are loaded, watched, replaced and unloaded here.

    load     headers and tokenizer in this process, weights in each engine's own process
    watch    every second: has an engine died, come back, or stopped making progress?
    unload   first the name is removed, then requests that hold the model finish, then the engines stop
    replace  load the new model while the old one serves, give it the name, then unload the old one

With `on_demand`, models are loaded when they are requested (on_demand.py).

A load ends early if its caller leaves, if its name is unloaded, and at shutdown (load.py): its engines are
killed, and the name is free again.

An engine's own client restarts it when it dies. When all engines are down for good, the server is lost
(`Workers.lost`) and exits, so that a service manager can restart it. With `on_demand`, only the model is
unloaded.

With `in_process` the engines are threads of this process and replicas share one copy of the weights.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from infer.client.client import EngineClient
from infer.client.placement import is_on_gpu
from infer.client.process_client import ProcessClient
from infer.client.spawn import SpareEngines
from infer.client.subscribers import CLOSED, SHUTTING_DOWN
from infer.config.defaults import SERVER_MAX_QUEUE
from infer.config.knobs import parse_bytes
from infer.config.server import parse_alias
from infer.config.settings import EngineConfig
from infer.engine.phases import spell_phases
from infer.errors import (
    ConfigError,
    EngineError,
    EngineLost,
    EngineStopped,
    RequestError,
    UnknownModel,
)
from infer.frontend.prompts import PromptEncoder
from infer.server.fleet.adapters import ServedAdapters
from infer.server.fleet.engines import EngineStarter
from infer.server.fleet.load import Load, finish, in_turn
from infer.server.fleet.metered_client import MeteredClient
from infer.server.fleet.names import Names, name_taken
from infer.server.fleet.on_demand import OnDemand
from infer.server.metrics import ServerMetrics
from infer.server.processes import messages
from infer.server.processes.messages import ModelUse, Question
from infer.server.processes.workers import Workers
from infer.server.state import ServedModel, ServerState
from infer.tools.host_memory import check_host_memory, check_loaded_memory

logger = logging.getLogger(__name__)
T = TypeVar("T")

WATCH_INTERVAL_S = 1.0


class Fleet:
    """Starts and stops the engines of a `ServerState`."""

    def __init__(
        self,
        state: ServerState,
        metrics: ServerMetrics,
        spares: SpareEngines | None = None,
        workers: Workers | None = None,
    ) -> None:
        self.state = state
        self.metrics = metrics
        self._workers = workers or Workers(state.config, state.board)  # the server's other API processes
        self._watcher: asyncio.Task[None] | None = None
        self._loading: dict[str, Load] = {}  # running loads, by each of their names
        self.names = Names(state, self._workers, self._loading)
        self._waiting: dict[str, Load] = {}  # loads that wait for their turn
        self.adapters = ServedAdapters(state, self.names)
        self._is_closing = False
        self._leaving: dict[asyncio.Task[int], ServedModel] = {}  # nameless models until their engines stop
        self._sleep_turn = asyncio.Lock()  # models are put to sleep one at a time: they share a budget
        self._starter = EngineStarter(state.config, self._workers, spares or SpareEngines(0))
        self._on_demand: OnDemand | None = None
        if state.config.on_demand:
            self._on_demand = OnDemand(
                state, load=self._bring_up, retire=self._retire, uses=self._uses, leaving=self._leaving
            )

    def check(self, models: Mapping[str, EngineConfig]) -> None:
        """Reject settings that do not fit this machine, and create the record files of the first models."""
        if (budget := self.state.config.model_memory) is not None:
            check_host_memory(budget, "model_memory")
        if (budget := self.state.config.loaded_memory) is not None:
            places = set(map(is_on_gpu, models.values()))
            check_loaded_memory(budget, on_gpu=True in places, on_cpu=False in places)
        for name, config in models.items():
            self._starter.order_records(name, config)

    async def start(self, models: Mapping[str, EngineConfig]) -> None:
        """Load the first models, one after another; the first one is the default.

        With `on_demand`, they are only registered.
        """
        started = time.perf_counter()
        self.state.board.is_starting = True
        if self._on_demand is None:
            for name, config in models.items():
                await self.load(name, config)
        else:
            if "" in models:
                raise ConfigError("on_demand needs a name for every model: NAME=MODEL, or served_model_name")
            self._on_demand.catalog.update(models)
            for name, config in models.items():
                self.names.check_adapters(name, config)
                self.adapters.note(name, config.adapters.modules)
            self.state.default_model, self.state.demand = next(iter(models), None), self._on_demand.demand
            self._note_loadable()
        for text in self.state.config.model_alias:
            alias, weights = parse_alias(text)
            named = {name or self.state.default_model or "": weight for name, weight in weights.items()}
            try:
                self.names.set_alias(alias, named)
            except RequestError as error:
                raise ConfigError(f"model_alias {text!r}: {error}") from None
        if self._on_demand is not None:
            await self.names.share()  # before the first request
        self.state.board.is_starting = False
        self.metrics.startup_s = time.perf_counter() - started

    async def load(self, name: str, config: EngineConfig, *, replaces: bool = False) -> ServedModel:
        """Start the engines of a model and serve it under a name; an empty name means the model's own.

        A model that it replaces serves until the new one is ready, and is unloaded when its last request has
        ended; there must be memory for both.
        """
        if self._on_demand is None:
            return await self._bring_up(name, config, replaces=replaces)
        if name not in self._loading:  # else a running load decides whether the name is free
            self._check_new(name, config, replaces=replaces)  # no other model makes room in vain
        async with in_turn(name, self._waiting, self._on_demand.room(name, config)) as fixed:
            self._check_new(name, config, replaces=replaces)  # another load may have taken the name meanwhile
            model = await self._bring_up(name, fixed, replaces=replaces)
            self._on_demand.catalog[model.name] = config
            self._note_loadable()
        return model

    def _check_new(self, name: str, config: EngineConfig, *, replaces: bool) -> None:
        """Reject a new model if its name is taken, or the name of one of its adapters."""
        if name in self.state.loadable and not replaces:
            raise name_taken(name, "known and loaded on demand")
        self.names.check(name, replaces=replaces)
        self.names.check_adapters(name, config)

    async def _bring_up(self, name: str, config: EngineConfig, *, replaces: bool = False) -> ServedModel:
        """Load a model and give it its name."""
        self.names.check(name, replaces=replaces)
        self.names.check_adapters(name, config)
        if self._is_closing:
            raise EngineStopped(SHUTTING_DOWN)
        try:
            with Load(name, self._loading) as load:
                if replaces:  # sleeping weights are the old model's
                    await self._forget_asleep(name)
                model = await self._load(load, with_server_defaults(config), replaces=replaces)
        except asyncio.CancelledError:
            reason = "the server stops" if self.state.board.is_draining else "its caller has left"
            logger.info("load ended model=%s reason=%r", name or "default", reason)
            raise
        if (old := self.state.models.get(model.name)) is not None:
            self._start_leaving(old, math.inf)
        model.used_at = time.monotonic()  # requests that wait for it use it next
        self.state.models[model.name] = model
        if replaces:
            self.adapters.note(model.name, config.adapters.modules)
        else:
            self.adapters.bring_back(model.name, config.adapters.modules)
        self.state.default_model = self.state.default_model or model.name
        self.names.tell()
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())
        return model

    async def unload(self, name: str) -> int:
        """Unload a model; requests that hold it have `drain_timeout` seconds to finish.

        Returns the number of requests that were cut off. A load under this name is cancelled. If the model
        was the default, the one that has been served the longest becomes the default.
        """
        loads = [running[name] for running in (self._waiting, self._loading) if name in running]
        for load in loads:
            await load.end("the model was unloaded")
        if loads and name not in self.state.names:
            return 0
        if name not in self.state.names:
            raise UnknownModel(f"no model is served under the name {name!r}", param="name")
        model = self.state.models.pop(name, None)
        self.adapters.note(name, ())
        if self._on_demand is not None:
            self._on_demand.catalog.pop(name, None)
            self._note_loadable()
        self.names.forget(name)
        await self._forget_asleep(name)
        if model is None:
            return 0
        leaving = self._start_leaving(model, self.state.config.drain_timeout)
        try:
            return await asyncio.shield(leaving)
        except asyncio.CancelledError:
            if leaving.cancelled():  # the server is shutting down; not only this caller was cancelled
                raise EngineStopped(SHUTTING_DOWN) from None
            raise

    async def _retire(self, model: ServedModel) -> None:
        """Unload an on-demand model when no request holds it any more; it keeps its name."""
        if self.state.models.get(model.name) is model:
            del self.state.models[model.name]
            await asyncio.shield(self._start_leaving(model, math.inf, may_sleep=True))

    def _start_leaving(
        self, model: ServedModel, timeout_s: float, *, may_sleep: bool = False
    ) -> asyncio.Task[int]:
        """Remove a model that has lost its name, in a task that outlives its caller."""
        leaving = asyncio.create_task(self._take_away(model, timeout_s, may_sleep=may_sleep))
        self._leaving[leaving] = model
        leaving.add_done_callback(self._forget_leaving)
        return leaving

    def _forget_leaving(self, ended: asyncio.Task[int]) -> None:
        del self._leaving[ended]
        if not ended.cancelled():
            ended.exception()  # marks it as retrieved, even if no one waits

    async def _take_away(self, model: ServedModel, timeout_s: float, *, may_sleep: bool) -> int:
        """Stop the engines of a model or put them to sleep; returns how many requests were cut off."""
        is_asleep, num_cut_off = False, 0
        try:
            waits = self._workers.unserve(model, timeout_s), model.wait_unheld(timeout_s)
            elsewhere, _ = await asyncio.gather(*waits, return_exceptions=True)
            num_cut_off = model.num_held + (elsewhere if isinstance(elsewhere, int) else 0)
            if num_cut_off:
                logger.warning("unload timed out model=%s cut_off_requests=%d", model.name, num_cut_off)
            if isinstance(elsewhere, BaseException):  # an API process hangs or has ended
                raise elsewhere
            if may_sleep:
                async with self._sleep_turn:
                    is_asleep = await self._put_to_sleep(model)
        finally:  # also at shutdown
            if not is_asleep:
                await self._close(model, model.why_cut_off(timeout_s) if num_cut_off else CLOSED)
        logger.info("model unloaded model=%s%s", model.name, " weights=kept" if is_asleep else "")
        return num_cut_off

    async def _put_to_sleep(self, model: ServedModel) -> bool:
        """Move the weights of a model to host memory; returns False if they cannot move or do not fit."""
        budget = self.state.config.model_memory
        if budget is None or self._is_closing or self._workers.num_processes > 1:
            return False
        while True:
            room, taken = self._host_room(model), 0
            try:
                for client in model.clients:
                    assert isinstance(client, MeteredClient) and isinstance(client.client, ProcessClient)
                    taken += await client.client.sleep(max(room - taken, 0))
            except EngineError as error:
                told = "weights not kept model=%s reason=%r, so the next request loads it from its files"
                logger.warning(told, model.name, str(error))
                return False
            if self._is_closing:
                return False
            left = self._host_room(model)  # other models may have woken or gone meanwhile
            if taken <= min(room, left):
                break
            if taken > left and not await self._free_host_memory(model):
                told = "weights not kept model=%s bytes=%d model_memory=%s reason='they take more'"
                logger.warning(told, model.name, taken, budget)
                return False
        name, taken_names = model.name, (*self.state.models, *self._loading, *self.state.asleep)
        if name not in self.state.names or name in taken_names:  # its requests took long to finish
            logger.info("weights not kept model=%s reason='it was unloaded or reloaded meanwhile'", name)
            return False
        for client in model.clients:
            self.metrics.remove(client)
        model.host_bytes = taken
        self.state.asleep[name] = model
        return True

    def _host_room(self, model: ServedModel) -> int:
        """Return the bytes of `model_memory` that the other models leave to a model."""
        if (budget := self.state.config.model_memory) is None:
            return 0
        others = {*self.state.asleep.values(), *self.state.models.values(), *self._leaving.values()} - {model}
        return parse_bytes(budget) - sum(each.host_bytes for each in others)

    async def _free_host_memory(self, model: ServedModel) -> bool:
        """Free what another model takes of `model_memory`; returns False if none takes any.

        Memory that a model kept when it woke goes first, then the model that has slept the longest.
        """
        asleep = self.state.asleep
        awake = {*self._leaving.values(), *self.state.models.values()} - {model, *asleep.values()}
        if kept := [each for each in awake if each.host_bytes]:
            await self._drop_pinned(kept[0])
        elif asleep:
            await self._forget_asleep(next(iter(asleep)))
        else:
            return False
        return True

    async def _drop_pinned(self, model: ServedModel) -> None:
        """Free the host memory that a model kept when it woke."""
        for client in model.clients:
            assert isinstance(client, MeteredClient) and isinstance(client.client, ProcessClient)
            with suppress(EngineError):  # it has died, and its memory is free
                await client.client.drop_pinned()
        model.host_bytes = 0

    async def _forget_asleep(self, name: str) -> None:
        """Stop the engines of a sleeping model, if there is one with this name."""
        if (found := self.state.asleep.pop(name, None)) is not None:
            await self._close(found)
            logger.info("weights forgotten model=%s", name)

    async def _wake(
        self, name: str, config: EngineConfig
    ) -> tuple[PromptEncoder, list[EngineClient], int] | None:
        """Wake the engines of a sleeping model; None: there is none, or it has another config.

        The number is the bytes of host memory that they keep for the next time.
        """
        model = self.state.asleep.pop(name, None)  # so that only this task can close it
        if model is None:
            return None
        clients = [client.client for client in model.clients if isinstance(client, MeteredClient)]
        try:
            if model.config != config:
                raise EngineError("its settings have changed")
            num_kept = 0
            for client in clients:
                assert isinstance(client, ProcessClient)
                num_kept += await client.wake()
        except BaseException as error:
            await self._close(model)
            if not isinstance(error, Exception):  # the load was cancelled
                raise
            logger.warning("model reloaded model=%s reason=%r", name, str(error))
            return None
        return model.encoder, clients, num_kept

    async def _uses(self) -> dict[str, ModelUse]:
        """Return the use of every loaded model, summed over all API processes."""
        uses = {name: model.use for name, model in self.state.models.items()}
        for others in await self._workers.call(messages.GetUses()):
            for name in uses.keys() & others.keys():
                uses[name] = uses[name].plus(others[name])
        return uses

    async def metrics_text(self) -> bytes:
        """Return the page at /metrics: the sum over all API processes."""
        total = self.metrics.sum_with(await self._workers.ask_all(messages.Scrape()))
        total.stages = {name: self.state.stage_of(name) for name in self.state.names}
        models = (*self.state.asleep.values(), *self.state.models.values())
        total.host_bytes = {model.name: model.host_bytes for model in models if model.host_bytes}
        return total.text()

    async def ask_processes(self, question: Question[T]) -> list[T]:
        """Return the answers of the other API processes."""
        return await self._workers.ask_all(question)

    async def reset_prefix_caches(self, name: str | None) -> int:
        """Empty the prefix caches of one model or of all; returns how many blocks were forgotten."""
        models = list(self.state.models.values()) if name is None else self.state.models_of(name)
        num_forgotten = 0
        for model in models:
            for client in model.clients:
                num_forgotten += await client.reset_prefix_cache()
                model.router.forget(client)
            self._workers.tell(messages.ForgetPrefixes(model.name))
        return num_forgotten

    async def close(self) -> None:
        """Stop every engine; open requests and loads get `EngineStopped`."""
        await self.end_loads()
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
            self._watcher = None
        models, self.state.models = self.state.models, {}
        asleep, self.state.asleep = self.state.asleep, {}
        closing = (*models.values(), *self._leaving.values(), *asleep.values())
        await asyncio.gather(*(self._close(model, SHUTTING_DOWN) for model in closing))
        leaving = list(self._leaving)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)

    async def end_loads(self) -> None:
        """Cancel all loads, and start and restart no engines: the server is about to stop."""
        self._is_closing = True
        for meter in self.metrics.meters:
            if isinstance(meter.client, ProcessClient):
                meter.client.stop_restarts()
        running = (self._waiting, self._loading, self.adapters.waiting)
        loads = {load for each in running for load in each.values()}
        await asyncio.gather(*(load.end(SHUTTING_DOWN) for load in loads))
        if self._on_demand is not None:
            await self._on_demand.close()  # loads that wait for room

    # -- loading ----------------------------------------------------------------------------------

    async def _load(self, load: Load, config: EngineConfig, *, replaces: bool) -> ServedModel:
        """Start the engines of a model, or wake them, and have all API processes serve it."""
        name, started = load.name, time.perf_counter()
        shared = self._workers.new_engines(self.state.config.replicas)
        try:
            woken = await self._wake(name, config)
            encoder, engines, num_kept = woken or (*await self._starter.start(name, config, shared), 0)
        except BaseException:
            self._workers.tell(messages.Gone(list(shared)))
            raise
        served_name = name or encoder.name
        model = ServedModel(served_name, encoder, engines, int(time.time()), engines=shared, config=config)
        model.host_bytes = num_kept
        try:
            if not name:
                self.names.check(model.name)
                self.names.check_adapters(model.name, config)
                load.take(model.name)
            took = time.perf_counter() - started
            await self._serve(name, model, config, took, is_woken=woken is not None)
            for client in () if replaces else model.clients:  # an on-demand model is back
                await self.adapters.restore(model.name, client)
            if model.host_bytes > self._host_room(model):  # another model fell asleep while it woke
                await self._drop_pinned(model)
        except BaseException:
            with suppress(asyncio.CancelledError):  # the first error is raised
                await self._close(model)
            raise
        return model

    async def _serve(
        self, name: str, model: ServedModel, config: EngineConfig, seconds: float, *, is_woken: bool
    ) -> None:
        """Meter the engines of a model that took `seconds` to start, and have other processes serve it."""
        first, told = model.clients[0], " from=host_memory" if is_woken else ""
        if isinstance(first, ProcessClient) and not is_woken and (phases := spell_phases(first.ready.phases)):
            told = f" {phases}"
        labels = []
        for number, engine in enumerate(model.clients):
            model.clients[number] = client = self.metrics.add(model.name, engine, cache=config.cache)
            labels.append(client.labels[1])
        logger.info(
            "model loaded model=%s engines=%d seconds=%.2f%s", model.name, len(model.clients), seconds, told
        )
        for number, path in enumerate(self._starter.record_paths(name)):
            with_text = self.state.config.record_text
            logger.info("recording model=%s engine=%d text=%s file=%s", model.name, number, with_text, path)
        if model.encoder.has_chat_template:
            logger.info("chat template model=%s template=%s", model.name, model.encoder.template_in_use)
        if model.encoder.template_warning is not None:
            logger.warning("%s", model.encoder.template_warning)
        await self._workers.serve(model, config, labels)

    def _note_loadable(self) -> None:
        assert self._on_demand is not None
        self.state.loadable = tuple(self._on_demand.catalog)
        self.names.tell()

    async def _close(self, model: ServedModel, reason: str = CLOSED) -> None:
        for client in model.clients:
            self.metrics.remove(client)
        try:
            await finish(asyncio.gather(*(client.close(reason) for client in model.clients)))
        finally:
            self._workers.tell(messages.Gone(list(model.engines)))

    # -- watching ---------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Log when engines go down and come back, and detect when all are lost."""
        while True:
            for meter in self.metrics.meters:
                model, engine = meter.labels
                failure = meter.failure
                if failure is not None and not meter.is_down:
                    logger.error("engine down model=%s engine=%s reason=%r", model, engine, str(failure))
                elif failure is None and meter.is_down:
                    logger.warning("engine back model=%s engine=%s", model, engine)
                meter.is_down = failure is not None
                if meter.takes_adapters():
                    await self.adapters.restore(model, meter)
            self._check_all_lost()
            await asyncio.sleep(WATCH_INTERVAL_S)

    def _check_all_lost(self) -> None:
        """Mark the server as lost if every engine is down for good.

        An on-demand model that has lost its engines is unloaded instead: the next request loads it again.
        """
        if self._is_closing:
            return
        if self._on_demand is not None:
            for model in list(self.state.models.values()):
                if all(isinstance(client.failure, EngineLost) for client in model.clients):
                    logger.error("model lost model=%s; the next request loads it again", model.name)
                    del self.state.models[model.name]
                    self._start_leaving(model, math.inf)
            return
        failures = [meter.failure for meter in self.metrics.meters]
        lost = self._workers.lost
        if lost.done() or not failures or self._loading:
            return
        if all(isinstance(failure, EngineLost) for failure in failures):
            lost.set_result(f"no engine is left: {failures[-1]}")


def with_server_defaults(config: EngineConfig) -> EngineConfig:
    """Return the config with a bounded queue: SERVER_MAX_QUEUE if no limit was given."""
    if config.scheduler.max_queue is not None:
        return config
    return replace(config, scheduler=replace(config.scheduler, max_queue=SERVER_MAX_QUEUE))
