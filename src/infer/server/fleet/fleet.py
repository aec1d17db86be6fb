"""The models that a server runs: their engines are started, watched, added and removed here.

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
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from infer.client.client import EngineClient, InProcessClient
from infer.client.messages import RecordOrders, Replica
from infer.client.placement import is_on_gpu, share_threads
from infer.client.process_client import ProcessClient
from infer.client.spawn import SpareEngines
from infer.client.subscribers import CLOSED, SHUTTING_DOWN
from infer.client.supervisor import ProcessOptions
from infer.config.defaults import SERVER_MAX_QUEUE
from infer.config.knobs import parse_bytes
from infer.config.server import ModelShares, name_fault, parse_alias, weight_fault
from infer.config.settings import EngineConfig
from infer.engine.phases import spell_phases
from infer.errors import (
    ConfigError,
    EngineError,
    EngineLost,
    EngineStopped,
    InferError,
    NameTaken,
    RequestError,
    UnknownModel,
    closest,
)
from infer.frontend.prompts import PromptEncoder, find_source, make_served_encoder, open_model, open_text
from infer.loader.read_ahead import start_reading_ahead
from infer.server.fleet.load import Load, finish
from infer.server.fleet.metered_client import MeteredClient
from infer.server.fleet.on_demand import OnDemand
from infer.server.metrics import ServerMetrics
from infer.server.processes import messages
from infer.server.processes.messages import ModelUse, Question
from infer.server.processes.workers import Workers
from infer.server.state import ServedModel, ServerState
from infer.tools.host_memory import check_host_memory, check_loaded_memory
from infer.tools.record_files import RecordPaths

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
        self._spares = spares or SpareEngines(0)
        self.metrics = metrics
        self._workers = workers or Workers(state.config, state.board)  # the server's other API processes
        self._watcher: asyncio.Task[None] | None = None
        self._loading: dict[str, Load] = {}  # running loads, by each of their names
        self._adapter_paths: dict[str, str] = {}  # directories of adapters loaded at run time
        self._adapter_turn = asyncio.Lock()  # adapters are loaded and unloaded one at a time
        self._is_closing = False
        self._leaving: dict[asyncio.Task[int], ServedModel] = {}  # nameless models until their engines stop
        self._sleep_turn = asyncio.Lock()  # models are put to sleep one at a time: they share a budget
        self._records: RecordPaths | None = None
        if (server := state.config).record is not None:
            path = Path(server.record).expanduser().absolute()
            self._records = RecordPaths(path, num_replicas=server.replicas, may_replace=server.overwrite)
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
            self._order_records(name, config)

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
                self._check_adapters(name, config)
                self._note_adapters(name, config.adapters.modules)
            self.state.default_model, self.state.demand = next(iter(models), None), self._on_demand.demand
            self._note_loadable()
        for text in self.state.config.model_alias:
            alias, weights = parse_alias(text)
            named = {name or self.state.default_model or "": weight for name, weight in weights.items()}
            try:
                self.set_alias(alias, named)
            except RequestError as error:
                raise ConfigError(f"model_alias {text!r}: {error}") from None
        if self._on_demand is not None:
            await self._workers.call(self._names())  # before the first request
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
        async with self._on_demand.room(name, config) as fixed:
            self._check_new(name, config, replaces=replaces)  # another load may have taken the name meanwhile
            model = await self._bring_up(name, fixed, replaces=replaces)
            self._on_demand.catalog[model.name] = config
            self._note_loadable()
        return model

    def _check_new(self, name: str, config: EngineConfig, *, replaces: bool) -> None:
        """Reject a new model if its name is taken, or the name of one of its adapters."""
        if name in self.state.loadable and not replaces:
            raise _taken(name, "known and loaded on demand")
        self._check_name(name, replaces=replaces)
        self._check_adapters(name, config)

    async def _bring_up(self, name: str, config: EngineConfig, *, replaces: bool = False) -> ServedModel:
        """Load a model and give it its name."""
        self._check_name(name, replaces=replaces)
        self._check_adapters(name, config)
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
        again = {} if replaces else self._paths_of(model.name)
        self._note_adapters(model.name, [*config.adapters.modules, *again])
        self._adapter_paths |= again
        self.state.default_model = self.state.default_model or model.name
        self._tell_names()
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())
        return model

    async def unload(self, name: str) -> int:
        """Unload a model; requests that hold it have `drain_timeout` seconds to finish.

        Returns the number of requests that were cut off. A load under this name is cancelled. If the model
        was the default, the one that has been served the longest becomes the default.
        """
        if name in self._loading:
            await self._loading[name].end("the model was unloaded")
            if name not in self.state.names:
                return 0
        if name not in self.state.names:
            raise UnknownModel(f"no model is served under the name {name!r}", param="name")
        model = self.state.models.pop(name, None)
        self._note_adapters(name, ())
        if self._on_demand is not None:
            self._on_demand.catalog.pop(name, None)
            self._note_loadable()
        rest = {
            alias: {each: weights[each] for each in weights if each != name}
            for alias, weights in self.state.aliases.items()
        }
        self.state.aliases = {alias: weights for alias, weights in rest.items() if weights}
        if self.state.default_model == name:
            self.state.default_model = next(iter(self.state.names), None)
            logger.warning("default model changed model=%s", self.state.default_model or "none")
        self._tell_names()
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
        leaving.add_done_callback(self._leaving.pop)
        return leaving

    async def _take_away(self, model: ServedModel, timeout_s: float, *, may_sleep: bool) -> int:
        """Stop the engines of a model or put them to sleep; returns how many requests were cut off."""
        is_asleep, num_cut_off = False, 0
        try:
            waits = self._workers.unserve(model, timeout_s), model.wait_unheld(timeout_s)
            num_cut_off = (await asyncio.gather(*waits))[0] + model.num_held
            if num_cut_off:
                logger.warning("unload timed out model=%s cut_off_requests=%d", model.name, num_cut_off)
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
            room = parse_bytes(budget) - sum(each.host_bytes for each in self.state.asleep.values())
            taken = 0
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
            if taken <= room:
                break
            if not self.state.asleep:
                told = "weights not kept model=%s bytes=%d model_memory=%s reason='they take more'"
                logger.warning(told, model.name, taken, budget)
                return False
            await self._forget_asleep(next(iter(self.state.asleep)))
        name, taken_names = model.name, (*self.state.models, *self._loading, *self.state.asleep)
        if name not in self.state.names or name in taken_names:  # its requests took long to finish
            logger.info("weights not kept model=%s reason='it was unloaded or reloaded meanwhile'", name)
            return False
        for client in model.clients:
            self.metrics.remove(client)
        model.host_bytes = taken
        self.state.asleep[name] = model
        return True

    async def _forget_asleep(self, name: str) -> None:
        """Stop the engines of a sleeping model, if there is one with this name."""
        if (found := self.state.asleep.pop(name, None)) is not None:
            await self._close(found)
            logger.info("weights forgotten model=%s", name)

    async def _wake(self, name: str, config: EngineConfig) -> tuple[PromptEncoder, list[EngineClient]] | None:
        """Wake the engines of a sleeping model; None: there is none, or it has another config."""
        model = self.state.asleep.pop(name, None)  # so that only this task can close it
        if model is None:
            return None
        clients = [client.client for client in model.clients if isinstance(client, MeteredClient)]
        try:
            if model.config != config:
                raise EngineError("its settings have changed")
            for client in clients:
                assert isinstance(client, ProcessClient)
                await client.wake()
        except BaseException as error:
            await self._close(model)
            if not isinstance(error, Exception):  # the load was cancelled
                raise
            logger.warning("model reloaded model=%s reason=%r", name, str(error))
            return None
        return model.encoder, clients

    async def _uses(self) -> dict[str, ModelUse]:
        """Return the use of every loaded model, summed over all API processes."""
        uses = {name: model.use for name, model in self.state.models.items()}
        for others in await self._workers.call(messages.GetUses()):
            for name in uses.keys() & others.keys():
                uses[name] = uses[name].plus(others[name])
        return uses

    async def load_adapter(
        self, name: str, path: str, base: str | None = None, *, replaces: bool = False
    ) -> str:
        """Load a LoRA adapter into every engine of a model, the default one unless named.

        Returns the model's name. An adapter that it replaces serves until then, and keeps serving if this one
        cannot be read; requests that began with the old adapter always finish with it.
        """
        async with self._adapter_turn:
            base = base or self.state.default_model
            model = self.state.get_model(base)
            is_replaced = replaces and self.state.adapters.get(name) == model.name
            if not is_replaced:
                self._check_adapter_name(name)
            num_done = 0
            try:
                for client in model.clients:  # a restarted engine may have one of this name
                    await client.set_adapter(name, path, replaces=True)
                    num_done += 1
                if self.state.models.get(model.name) is not model:
                    gone = f"model {model.name!r} was unloaded or replaced meanwhile"
                    raise UnknownModel(gone, param="model")
                if not is_replaced:
                    self._check_adapter_name(name)  # a model or an alias may have taken the name meanwhile
            except BaseException:
                if num_done:  # the engines no longer agree
                    for client in model.clients:
                        with suppress(InferError):
                            await client.set_adapter(name, None)
                    self.state.adapters.pop(name, None)
                    self._tell_names()
                raise
            self.state.adapters[name] = model.name
            self._adapter_paths[name] = path
            await self._workers.call(self._names())
            return model.name

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter; requests that began with it finish."""
        async with self._adapter_turn:
            base = self.state.adapters.pop(name, None)
            if base is None:
                hint = closest(name, self.state.adapters)
                raise UnknownModel(f"no adapter is served under the name {name!r}{hint}", param="name")
            self._adapter_paths.pop(name, None)
            await self._workers.call(self._names())
            for client in self.state.models[base].clients if base in self.state.models else ():
                with suppress(UnknownModel, EngineStopped):  # an engine that was restarted, or is down
                    await client.set_adapter(name, None)

    def _check_adapter_name(self, name: str) -> None:
        """Reject a name that is taken, even by an on-demand model that is not loaded."""
        self._check_name(name)
        if name in self.state.names:
            raise NameTaken(f"a model named {name!r} is loaded on demand; use another name", param="name")

    def _check_adapters(self, name: str, config: EngineConfig) -> None:
        """Reject adapters whose names are taken."""
        for adapter in config.adapters.modules:
            if self.state.adapters.get(adapter, name) != name or adapter in (name, *self.state.names):
                way = "use another; every model loads lora_modules, /admin/adapters/load is for one"
                raise NameTaken(f"lora_modules: the name {adapter!r} is taken; {way}", param="knobs")

    def _note_adapters(self, name: str, adapters: Iterable[str]) -> None:
        """Set the adapters of a model to the given ones."""
        kept = {each: base for each, base in self.state.adapters.items() if base != name}
        self._adapter_paths = {each: path for each, path in self._adapter_paths.items() if each in kept}
        self.state.adapters = kept | dict.fromkeys(adapters, name)

    async def _restore_adapters(self, model: str, client: EngineClient) -> None:
        """Reload the adapters that were loaded at run time into a restarted engine."""
        for name, path in self._paths_of(model).items():
            with suppress(InferError):  # down again, or the files are gone: requests will fail
                await client.set_adapter(name, path, replaces=True)

    def _paths_of(self, model: str) -> dict[str, str]:
        """Return the directories of a model's adapters that were loaded at run time."""
        return {n: path for n, path in self._adapter_paths.items() if self.state.adapters.get(n) == model}

    def set_alias(self, alias: str, weights: ModelShares) -> None:
        """Set an alias of a model, or of several by weight; it can be changed at any time."""
        for name, weight in weights.items():
            if name not in self.state.names:
                param = "name" if len(weights) == 1 else "models"
                raise UnknownModel(f"no model is served under the name {name!r}", param=param)
            if fault := weight_fault(weight):
                raise RequestError.about("models", fault)
        if fault := name_fault(alias) if alias else "must not be empty":
            raise RequestError.about("alias", fault)
        if alias in (*self.state.names, *self.state.adapters) or alias in self._loading:
            what = "is being loaded" if alias in self._loading else "is served"
            raise NameTaken(f"a model named {alias!r} {what}; an alias must be another name", param="alias")
        self.state.aliases[alias] = dict(weights)
        self._tell_names()

    def remove_alias(self, alias: str) -> None:
        """Remove an alias."""
        if self.state.aliases.pop(alias, None) is None:
            raise UnknownModel(f"there is no alias {alias!r}", param="alias")
        self._tell_names()

    async def metrics_text(self) -> bytes:
        """Return the page at /metrics: the sum over all API processes."""
        total = self.metrics.sum_with(await self._workers.ask_all(messages.Scrape()))
        total.stages = {name: self.state.stage_of(name) for name in self.state.names}
        total.asleep = {name: model.host_bytes for name, model in self.state.asleep.items()}
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
        if self._on_demand is not None:
            await self._on_demand.close()
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
        """Cancel all loads and start no more: the server is about to stop."""
        self._is_closing = True
        await asyncio.gather(*(load.end(SHUTTING_DOWN) for load in set(self._loading.values())))

    # -- loading ----------------------------------------------------------------------------------

    def _check_name(self, name: str, *, replaces: bool = False) -> None:
        if fault := name_fault(name):
            raise RequestError.about("name", fault)
        is_served = (name in self.state.models and not replaces) or name in self.state.adapters
        if name in self.state.aliases:
            models = ", ".join(map(repr, self.state.aliases[name]))
            way = 'remove it (POST /admin/models/alias with "name": null), or use another name'
            raise NameTaken(f"{name!r} is an alias of {models}; {way}", param="name")
        if is_served or name in self._loading:
            raise _taken(name, "being loaded" if name in self._loading else "already served")

    async def _load(self, load: Load, config: EngineConfig, *, replaces: bool) -> ServedModel:
        """Start the engines of a model, or wake them, and have all API processes serve it."""
        name, started = load.name, time.perf_counter()
        shared = self._workers.new_engines(self.state.config.replicas)
        try:
            woken = await self._wake(name, config)
            encoder, engines = woken or await (
                self._start_threads(config)
                if self.state.config.in_process
                else self._start_processes(config, shared, self._order_records(name, config))
            )
        except BaseException:
            self._workers.tell(messages.Gone(list(shared)))
            raise
        served_name = name or encoder.name
        model = ServedModel(served_name, encoder, engines, int(time.time()), engines=shared, config=config)
        try:
            if not name:
                self._check_name(model.name)
                self._check_adapters(model.name, config)
                load.take(model.name)
            took = time.perf_counter() - started
            await self._serve(name, model, config, took, is_woken=woken is not None)
            for client in () if replaces else model.clients:  # an on-demand model is back
                await self._restore_adapters(model.name, client)
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
        for number, path in enumerate([] if self._records is None else self._records.of(name)):
            with_text = self.state.config.record_text
            logger.info("recording model=%s engine=%d text=%s file=%s", model.name, number, with_text, path)
        if model.encoder.has_chat_template:
            logger.info("chat template model=%s template=%s", model.name, model.encoder.template_in_use)
        if model.encoder.template_warning is not None:
            logger.warning("%s", model.encoder.template_warning)
        await self._workers.serve(model, config, labels)

    def _names(self) -> messages.SetNames:
        state = self.state
        return messages.SetNames(state.aliases, state.adapters, state.default_model, list(state.loadable))

    def _tell_names(self) -> None:
        self._workers.tell(self._names())

    def _note_loadable(self) -> None:
        assert self._on_demand is not None
        self.state.loadable = tuple(self._on_demand.catalog)
        self._tell_names()

    async def _start_threads(self, config: EngineConfig) -> tuple[PromptEncoder, list[EngineClient]]:
        def build() -> tuple[PromptEncoder, list[EngineClient]]:
            from infer.engine.build import build_engine  # imported here: it imports torch

            server = self.state.config
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
        server, workers = self.state.config, self._workers
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

    def _order_records(self, name: str, config: EngineConfig) -> list[RecordOrders | None]:
        """Return the record settings of each engine of a model; a file that cannot be written is rejected."""
        server = self.state.config
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
                num_restarts = meter.stats().num_restarts  # an engine may be back before this check
                if failure is None and num_restarts != meter.num_restarts:
                    meter.num_restarts = num_restarts
                    await self._restore_adapters(model, meter)
            self._check_all_lost()
            await asyncio.sleep(WATCH_INTERVAL_S)

    def _check_all_lost(self) -> None:
        """Mark the server as lost if every engine is down for good.

        An on-demand model that has lost its engines is unloaded instead: the next request loads it again.
        """
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


def _close_unwanted(building: asyncio.Future[tuple[PromptEncoder, list[EngineClient]]]) -> None:
    if not building.cancelled() and building.exception() is None:
        for engine in building.result()[1]:
            asyncio.ensure_future(engine.close())


def _taken(name: str, what: str) -> NameTaken:
    text = f"a model named {name!r} is {what}; unload or replace it, or use another name"
    return NameTaken(text, param="name")


def with_server_defaults(config: EngineConfig) -> EngineConfig:
    """Return the config with a bounded queue: SERVER_MAX_QUEUE if no limit was given."""
    if config.scheduler.max_queue is not None:
        return config
    return replace(config, scheduler=replace(config.scheduler, max_queue=SERVER_MAX_QUEUE))
