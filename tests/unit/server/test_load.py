"""Loads that are ended: what their caller, the one who ends them and the names get."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from infer.client.process_client import ProcessClient
from infer.client.subscribers import CLOSED
from infer.config.server import ServerConfig
from infer.config.settings import EngineConfig
from infer.errors import ConfigError, EngineError, EngineStopped, NameTaken
from infer.server.fleet import engines as engines_module
from infer.server.fleet.engines import EngineStarter
from infer.server.fleet.fleet import Fleet
from infer.server.fleet.load import Load
from infer.server.metrics import ServerMetrics
from infer.server.processes.workers import Workers
from infer.server.state import ServedModel, ServerState
from tests.support.fake_client import FakeClient


class Engines:
    """Engines that become ready when they are told to, and are closed when their load ends before."""

    def __init__(self) -> None:
        self.running: dict[str, Load] = {}
        self.may_start = asyncio.Event()
        self.may_close = asyncio.Event()
        self.is_closed = False

    async def load(self) -> str:
        with Load("", self.running) as load:
            load.take("own")
            try:
                await self.may_start.wait()
            except asyncio.CancelledError:
                await self.may_close.wait()
                self.is_closed = True
                raise
        return "served"


async def begin() -> tuple[Engines, asyncio.Task[str]]:
    engines = Engines()
    loading = asyncio.create_task(engines.load())
    await asyncio.sleep(0)
    assert set(engines.running) == {"", "own"}
    return engines, loading


def test_a_load_that_is_ended_raises_the_reason_after_its_engines_are_closed() -> None:
    async def live() -> None:
        engines, loading = await begin()
        ends = [asyncio.create_task(engines.running["own"].end(reason)) for reason in ("first", "second")]
        await asyncio.sleep(0.01)
        assert engines.running and not any(end.done() for end in ends)
        engines.may_close.set()
        await asyncio.gather(*ends)
        assert engines.is_closed and not engines.running
        with pytest.raises(EngineStopped, match=r"the load of '' was ended: first$"):
            await loading
        assert loading.cancelling() == 0

    asyncio.run(live())


def test_a_load_is_ended_even_if_its_engines_are_ready_at_the_same_moment() -> None:
    async def live() -> None:
        engines, loading = await begin()
        engines.may_close.set()
        engines.may_start.set()
        await engines.running["own"].end("unloaded")
        assert engines.is_closed
        with pytest.raises(EngineStopped, match="unloaded"):
            await loading

    asyncio.run(live())


@pytest.mark.parametrize("is_ended", [False, True])
def test_a_caller_that_is_cancelled_stays_cancelled(is_ended: bool) -> None:
    async def live() -> None:
        engines, loading = await begin()
        engines.may_close.set()
        ends = [engines.running["own"].end("unloaded")] if is_ended else []
        tasks = [asyncio.create_task(end) for end in ends]
        loading.cancel()
        await asyncio.gather(loading, *tasks, return_exceptions=True)
        assert loading.cancelled() and engines.is_closed and not engines.running

    asyncio.run(live())


def test_a_load_that_fails_or_is_done_frees_its_names() -> None:
    async def live() -> None:
        engines, loading = await begin()
        engines.may_start.set()
        assert await loading == "served" and not engines.running
        with pytest.raises(ValueError, match="no weights"), Load("b", engines.running):
            raise ValueError("no weights")
        assert not engines.running

    asyncio.run(live())


class Slow(FakeClient):
    """An engine that takes its time to close."""

    def __init__(self) -> None:
        super().__init__()
        self.is_closing = asyncio.Event()
        self.may_close = asyncio.Event()

    async def close(self, reason: str = CLOSED) -> None:
        self.is_closing.set()
        await self.may_close.wait()
        await super().close(reason)


TEXT: Any = SimpleNamespace(name="m", template_warning=None, has_chat_template=False)


def fleet_that_fails(monkeypatch: pytest.MonkeyPatch, engine: Slow, place: str) -> Fleet:
    """Return a fleet whose loads fail when the engine runs: as a second one starts, or as they are served."""

    async def serve(self: Workers, *_: object) -> None:
        raise EngineError("no tokenizer")

    async def start_all(self: Fleet, *_: object) -> tuple[Any, list[Slow]]:
        return TEXT, [engine]

    async def start_one(config: EngineConfig, options: Any) -> Slow:
        if options.replica.number == 1:
            raise EngineError("no tokenizer")
        return engine

    monkeypatch.setattr(Workers, "serve", serve)
    if place == "serve":
        monkeypatch.setattr(EngineStarter, "_start_processes", start_all)
    else:
        monkeypatch.setattr(ProcessClient, "start", start_one)
        for name in ("find_source", "start_reading_ahead", "open_text"):
            monkeypatch.setattr(engines_module, name, lambda *_, **__: None)
    return Fleet(ServerState(config=ServerConfig(replicas=2)), ServerMetrics("infer"))


@pytest.mark.parametrize("place", ["serve", "start"])
@pytest.mark.parametrize("is_ended", [False, True])
def test_a_failed_load_that_is_ended_closes_its_engines_and_keeps_its_error(
    monkeypatch: pytest.MonkeyPatch, place: str, is_ended: bool
) -> None:
    async def live() -> None:
        fleet = fleet_that_fails(monkeypatch, engine := Slow(), place)
        loading = asyncio.create_task(fleet.load("m", EngineConfig.from_knobs(model="x")))
        await engine.is_closing.wait()
        ending = asyncio.create_task(fleet.unload("m")) if is_ended else None
        for _ in range(3):
            await asyncio.sleep(0.01)
            if ending is None:
                loading.cancel()
        assert not loading.done() and "m" in fleet._loading
        engine.may_close.set()
        with pytest.raises(EngineError, match="no tokenizer"):
            await loading
        assert engine.is_closed and not fleet._loading
        if ending is not None:
            assert await ending == 0 and loading.cancelling() == 0

    asyncio.run(live())


def test_a_caller_that_leaves_while_its_load_is_ended_leaves_no_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def live() -> None:
        fleet = fleet_that_fails(monkeypatch, engine := Slow(), "serve")
        is_served = asyncio.Event()

        async def serve(self: Workers, *_: object) -> None:
            is_served.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(Workers, "serve", serve)
        loading = asyncio.create_task(fleet.load("m", EngineConfig.from_knobs(model="x")))
        await is_served.wait()
        ending = asyncio.create_task(fleet.unload("m"))
        await engine.is_closing.wait()
        loading.cancel()
        await asyncio.sleep(0.01)
        assert not loading.done() and not ending.done()
        engine.may_close.set()
        assert await ending == 0 and engine.is_closed
        await asyncio.wait([loading])
        assert loading.cancelled()

    asyncio.run(live())


def fleet_with_a_sleeper(monkeypatch: pytest.MonkeyPatch, engine: Slow) -> Fleet:
    """Return a fleet with a model "m" that sleeps, whose loads fail when they start engines."""

    async def start(self: Fleet, *_: object) -> None:
        raise ConfigError("no such model")

    monkeypatch.setattr(EngineStarter, "_start_processes", start)
    fleet = Fleet(ServerState(config=ServerConfig()), ServerMetrics("infer"))
    metered = fleet.metrics.add("m", engine)
    config = EngineConfig.from_knobs(model="x")
    fleet.state.asleep["m"] = ServedModel("m", TEXT, [metered], 0, config=config)
    return fleet


def test_a_replacement_has_its_name_before_the_sleeping_model_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def live() -> None:
        fleet = fleet_with_a_sleeper(monkeypatch, engine := Slow())
        config = EngineConfig.from_knobs(model="x")
        first = asyncio.create_task(fleet.load("m", config, replaces=True))
        await engine.is_closing.wait()
        with pytest.raises(NameTaken, match="'m' is being loaded; unload or replace it, or use another name"):
            await fleet.load("m", config, replaces=True)
        ending = asyncio.create_task(fleet.unload("m"))
        await asyncio.sleep(0.01)
        assert not ending.done()
        engine.may_close.set()
        assert await ending == 0 and engine.is_closed
        with pytest.raises(EngineStopped, match="the model was unloaded"):
            await first
        assert not fleet._loading

    asyncio.run(live())
