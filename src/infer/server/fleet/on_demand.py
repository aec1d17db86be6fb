"""Models that are loaded when they are requested, and unloaded to make room for others.

    request for b ──► b is loaded: served at once
                 └──► not loaded: one load for all requests ──► room? ──► engines start ──► served
                                                                 └── no: the least recently used model
                                                                     accepts no new requests, finishes
                                                                     its running ones, and stops

Models are loaded one at a time, in the order of the requests. To make room, a model without requests is
unloaded first. A model with requests is never cut off: it stops when they have finished, and new requests for
it wait for its next load, so that no model can starve the others. A failed load is reported to all requests
that wait for it, and the next request tries again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from time import monotonic

from infer.client.planned import Planned, plan_model
from infer.client.subscribers import SHUTTING_DOWN
from infer.config.knobs import parse_bytes
from infer.config.settings import EngineConfig
from infer.errors import ConfigError, EngineError, EngineStopped, NoRoom
from infer.server.processes.messages import ModelUse
from infer.server.state import ServedModel, ServerState

logger = logging.getLogger(__name__)

SWEEP_S = 1.0  # seconds between two checks for idle models
SETTLE_S = 0.5  # seconds before an unused model counts as idle: requests that waited come first


class OnDemand:
    """Loads and unloads the models of a catalog; the constructor's callables are the fleet's."""

    def __init__(
        self,
        state: ServerState,
        *,
        load: Callable[[str, EngineConfig], Awaitable[object]],
        retire: Callable[[ServedModel], Awaitable[None]],
        uses: Callable[[], Awaitable[Mapping[str, ModelUse]]],
        leaving: Mapping[asyncio.Task[int], ServedModel],
    ) -> None:
        self.catalog: dict[str, EngineConfig] = {}  # configs by model name
        self._state = state
        self._load, self._retire, self._uses = load, retire, uses
        self._leaving = leaving  # models that lost their names but still have engines, by unloading task
        self._plans: dict[str, tuple[EngineConfig, int, Planned]] = {}  # latest plans; bytes of other models
        self._loads: dict[str, asyncio.Task[None]] = {}  # running loads, by model name
        self._turn = asyncio.Lock()  # held while a model loads
        self._sweeper: asyncio.Task[None] | None = None
        self._is_closed = False

    async def demand(self, name: str) -> None:
        """Wait until a model is loaded; all callers share one load and its failure.

        A caller that leaves does not cancel the load.
        """
        if self._is_closed:
            raise EngineStopped(SHUTTING_DOWN)
        loading = self._loads.get(name)
        if loading is None:
            loading = self._loads[name] = asyncio.create_task(self._load_in_turn(name))
            loading.add_done_callback(lambda ended: self._forget(name, ended))
        try:
            await asyncio.shield(loading)
        except asyncio.CancelledError:
            if loading.cancelled():  # the load was cancelled, not only this caller
                raise EngineStopped(SHUTTING_DOWN) from None
            raise

    @asynccontextmanager
    async def room(self, name: str, config: EngineConfig) -> AsyncIterator[EngineConfig]:
        """Wait for the turn to load a model, make room, and yield settings that fit into it.

        A replacement does not count against the number of models; loaded memory must have room for both.
        """
        async with self._turn:
            plan = await self._measure(name, config)
            while not self._has_room(name, plan.num_bytes):
                await self._make_room()
            taken = self._num_bytes_taken()
            if plan.num_blocks is not None and taken < self._plans[name][1]:  # other models were unloaded
                with suppress(NoRoom):
                    larger = await self._plan(config)
                    if self._has_room(name, larger.num_bytes):
                        plan, self._plans[name] = larger, (config, taken, larger)
            try:
                yield plan.fix(config)
            except BaseException:
                self._plans.pop(name, None)  # there may be less memory now than when it was planned
                raise
            for model in self._state.models.values():  # only the new model has no size yet
                model.planned_bytes = model.planned_bytes or plan.num_bytes
            if self._sweeper is None:
                self._sweeper = asyncio.create_task(self._sweep())

    async def _measure(self, name: str, config: EngineConfig) -> Planned:
        """Return the memory that a model will take; reject a model that exceeds the limit by itself."""
        budget = self._state.config.loaded_memory
        if budget is None:
            return Planned(0)
        if (known := self._plans.get(name)) is None or known[0] != config:
            while True:
                try:
                    self._plans[name] = config, self._num_bytes_taken(), await self._plan(config)
                    break
                except NoRoom:  # other models still use the memory
                    if not self._state.models and not self._leaving:
                        raise
                    await self._make_room()
        plan = self._plans[name][2]
        if plan.num_bytes > parse_bytes(budget):
            raise ConfigError(
                f"model {name!r} takes {plan.num_bytes / 2**20:,.1f}MiB with its KV cache, and loaded_memory "
                f"is {budget}; set a larger one, or make the cache smaller (kv_cache_memory, device_memory)"
            )
        return plan

    async def _plan(self, config: EngineConfig) -> Planned:
        """Return the memory that the engines of a model will take."""
        plan = await asyncio.to_thread(plan_model, config)
        return replace(plan, num_bytes=plan.num_bytes * self._state.config.replicas)

    def _has_room(self, name: str, needed: int) -> bool:
        server, models = self._state.config, self._state.models
        num_loaded = len(models) + len(self._leaving)
        limit = server.max_loaded_models or (1 if server.loaded_memory is None else num_loaded + 1)
        if num_loaded + (name not in models) > limit:
            return False
        budget = server.loaded_memory
        return budget is None or self._num_bytes_taken() + needed <= parse_bytes(budget)

    def _num_bytes_taken(self) -> int:
        return sum(each.planned_bytes for each in (*self._state.models.values(), *self._leaving.values()))

    async def close(self) -> None:
        """Cancel all loads, which end with `EngineStopped`, and the sweeper; begin no more."""
        self._is_closed = True
        tasks = [*self._loads.values(), *([] if self._sweeper is None else [self._sweeper])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _load_in_turn(self, name: str) -> None:
        config = self.catalog.get(name)
        if config is None or name in self._state.models:  # unloaded, or loaded, before this task began
            return
        try:
            async with self.room(name, config) as fixed:
                if self.catalog.get(name) is config and name not in self._state.models:  # still wanted
                    await self._load(name, fixed)
        except EngineStopped:  # killed, unloaded or shutting down
            raise
        except Exception as error:
            logger.error("model not loaded model=%s reason=%r", name, str(error), exc_info=error)
            raise EngineError(f"model {name!r} could not be loaded; the log of the server says why") from None

    def _forget(self, name: str, ended: asyncio.Task[None]) -> None:
        del self._loads[name]
        if not ended.cancelled():
            ended.exception()  # marks it as retrieved, even if no request waits any more

    async def _make_room(self) -> None:
        if self._leaving:
            await asyncio.wait(self._leaving, return_when=asyncio.FIRST_COMPLETED)
        else:
            await self._free_one()

    async def _free_one(self) -> None:
        """Unload the least recently used model, preferring idle ones."""
        uses = await self._uses()
        loaded = [model for model in self._state.models.values() if model.name in uses]
        if not loaded:
            return
        least = min(loaded, key=lambda model: (uses[model.name].num_held > 0, uses[model.name].used_at))
        rest_s = uses[least.name].used_at + SETTLE_S - monotonic()
        if uses[least.name].num_held == 0 and rest_s > 0:
            await asyncio.sleep(rest_s)
            return
        logger.info("model unloaded to make room model=%s requests=%d", least.name, uses[least.name].num_held)
        await self._retire(least)

    async def _sweep(self) -> None:
        """Unload models that have been idle for long enough, periodically."""
        while True:
            await asyncio.sleep(SWEEP_S)
            if self._turn.locked() or not self._state.models:
                continue
            try:
                if any(map(self._is_over, (await self._uses()).values())):
                    await self._retire_idle()
            except Exception:
                logger.exception("idle models could not be unloaded; the next try is in %g s", SWEEP_S)

    async def _retire_idle(self) -> None:
        async with self._turn:
            for name in list(self._state.models):
                use = (await self._uses()).get(name)  # anew: requests arrive while another model is unloaded
                model = self._state.models.get(name)
                if model is not None and use is not None and self._is_over(use):
                    logger.info("model idle model=%s seconds=%.0f", name, monotonic() - use.used_at)
                    await self._retire(model)

    def _is_over(self, use: ModelUse) -> bool:
        keep_s = use.keep_s if use.keep_s is not None else self._state.config.idle_unload or float("inf")
        return use.num_held == 0 and monotonic() - use.used_at >= max(keep_s, SETTLE_S)
