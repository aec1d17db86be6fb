"""Models on demand whose weights are kept: who sleeps, who wakes, and who is closed when two things meet."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from infer.client.client import EngineClient
from infer.client.messages import Ready
from infer.client.process_client import ProcessClient
from infer.client.subscribers import CLOSED
from infer.config.server import ServerConfig
from infer.config.settings import EngineConfig
from infer.engine.stats import EngineStats
from infer.errors import ConfigError, EngineError, EngineStopped
from infer.frontend.llm import LLM
from infer.frontend.prompts import PromptEncoder
from infer.server.fleet.engines import EngineStarter
from infer.server.fleet.fleet import Fleet
from infer.server.metrics import ServerMetrics
from infer.server.state import ServerState


class Sleeper(ProcessClient):
    """An engine without a process, whose weights take 60 MiB; it turns over when it is allowed to."""

    num_bytes = 60 << 20

    def __init__(self) -> None:
        self.ready, self.prefixes = Ready(EngineStats()), set()
        self.may_turn = asyncio.Event()
        self.may_turn.set()
        self.calls: list[str] = []
        self.is_closed = self.has_left = False

    def stats(self) -> EngineStats:
        return EngineStats()

    @property
    def failure(self) -> EngineError | None:
        return None

    async def _turn(self, what: str) -> None:
        self.calls.append(what)
        await self.may_turn.wait()
        if self.is_closed:
            raise EngineStopped(CLOSED)

    async def sleep(self, max_bytes: int) -> int:
        await self._turn("sleep")
        self.has_left = self.num_bytes <= max_bytes
        return self.num_bytes

    async def wake(self) -> int:
        await self._turn("wake")
        return self.num_bytes

    async def drop_pinned(self) -> None:
        await self._turn("drop")

    async def close(self, reason: str = CLOSED) -> None:
        self.is_closed = True
        self.may_turn.set()


class Stand:
    """A fleet of models on demand, with room for one that sleeps, and the engines that it has started."""

    def __init__(self) -> None:
        server = ServerConfig(on_demand=True, model_memory="100MiB", max_loaded_models=4)
        self.state = ServerState(config=server)
        self.fleet = Fleet(self.state, ServerMetrics("infer"))
        self.engines: dict[str, list[Sleeper]] = {"a": [], "b": []}
        self.configs = {name: EngineConfig.from_knobs(model=name) for name in self.engines}

    async def load(self, name: str) -> Sleeper:
        assert self.state.demand is not None
        await self.state.demand(name)
        return self.engines[name][-1]

    def retire(self, name: str) -> asyncio.Task[None]:
        return asyncio.create_task(self.fleet._retire(self.state.models[name]))

    @property
    def asleep(self) -> list[str]:
        return list(self.state.asleep)

    @property
    def host_bytes(self) -> dict[str, int]:
        """The host memory of each model that has any, in MiB."""
        models = (*self.state.asleep.values(), *self.state.models.values())
        return {model.name: model.host_bytes >> 20 for model in models if model.host_bytes}


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def play(monkeypatch: pytest.MonkeyPatch, oracle: LLM, scene: Callable[[Stand], Awaitable[None]]) -> None:
    async def run() -> None:
        stand = Stand()

        async def start(
            fleet: Fleet, config: EngineConfig, *_: object
        ) -> tuple[PromptEncoder, list[EngineClient]]:
            made = Sleeper()
            stand.engines[str(config.load.model)].append(made)
            return oracle.encoder, [made]

        monkeypatch.setattr(EngineStarter, "_start_processes", start)
        await stand.fleet.start(stand.configs)
        try:
            await scene(stand)
        finally:
            await stand.fleet.close()

    asyncio.run(run())


def test_a_replacement_does_not_wake_what_it_replaces(monkeypatch: pytest.MonkeyPatch, oracle: LLM) -> None:
    async def scene(stand: Stand) -> None:
        old = await stand.load("a")
        await stand.retire("a")
        assert stand.asleep == ["a"]
        await stand.fleet.load("a", stand.configs["a"], replaces=True)
        assert len(stand.engines["a"]) == 2 and stand.asleep == []
        assert old.is_closed and "wake" not in old.calls

    play(monkeypatch, oracle, scene)


def test_a_model_does_not_sleep_under_a_name_that_was_unloaded(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM
) -> None:
    async def scene(stand: Stand) -> None:
        old, model = await stand.load("a"), stand.state.models["a"]
        model.num_held = 1
        leaving = stand.retire("a")
        await asyncio.sleep(0)
        await stand.fleet.unload("a")
        model.num_held = 0
        await leaving
        assert stand.asleep == [] and old.is_closed

    play(monkeypatch, oracle, scene)


def test_a_model_does_not_sleep_under_a_name_that_was_loaded_anew(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM
) -> None:
    async def scene(stand: Stand) -> None:
        old, model = await stand.load("a"), stand.state.models["a"]
        model.num_held = 1
        leaving = stand.retire("a")
        await asyncio.sleep(0)
        new = await stand.load("a")
        model.num_held = 0
        await leaving
        assert new is not old and stand.asleep == [] and old.is_closed and not new.is_closed
        await stand.retire("a")
        assert stand.asleep == ["a"] and not new.is_closed

    play(monkeypatch, oracle, scene)


def test_models_that_leave_together_do_not_exceed_the_budget(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM
) -> None:
    async def scene(stand: Stand) -> None:
        engines = [await stand.load(name) for name in "ab"]
        for engine in engines:
            engine.may_turn.clear()
        leaving = [stand.retire(name) for name in "ab"]
        await until(lambda: any(engine.calls for engine in engines))
        for _ in range(10):  # the other one gets its chance to ask
            await asyncio.sleep(0)
        for engine in engines:
            engine.may_turn.set()
        await asyncio.gather(*leaving)
        assert stand.asleep == ["b"] and [engine.is_closed for engine in engines] == [True, False]

    play(monkeypatch, oracle, scene)


def test_weights_that_do_not_fit_are_not_kept_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(stand: Stand) -> None:
        engine = await stand.load("a")
        engine.num_bytes = 101 << 20
        await stand.retire("a")
        assert stand.asleep == [] and engine.is_closed and stand.state.stage_of("a") == "unloaded"

    play(monkeypatch, oracle, scene)
    [line] = [entry.message for entry in caplog.records if "weights not kept" in entry.message]
    assert line.endswith(f"bytes={101 << 20} model_memory=100MiB reason='they take more'")


def test_a_budget_above_the_free_memory_is_refused_before_anything_starts() -> None:
    fleet = Fleet(
        ServerState(config=ServerConfig(on_demand=True, model_memory="999TiB")), ServerMetrics("infer")
    )
    with pytest.raises(ConfigError, match=r"model_memory=999TiB is more than there is: .* are free; set"):
        fleet.check({})


@pytest.mark.parametrize(
    ("given", "kept"), [("64", "64GiB"), ("1.5", "1.5GiB"), ("0", None), ("0.0", None), ("0B", None)]
)
def test_both_sizes_of_host_memory_are_read_alike(given: str, kept: str | None) -> None:
    assert ServerConfig(on_demand=True, model_memory=given).model_memory == kept
    assert EngineConfig.from_knobs(swap_space=given).cache.swap_space == kept


def test_a_model_that_wakes_does_not_make_room_for_others(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM
) -> None:
    async def scene(stand: Stand) -> None:
        first = await stand.load("a")
        await stand.load("b")
        await stand.retire("a")
        first.may_turn.clear()
        waking = asyncio.create_task(stand.load("a"))
        await until(lambda: "wake" in first.calls)
        await stand.retire("b")
        first.may_turn.set()
        assert await waking is first and not first.is_closed
        assert stand.asleep == ["b"]
        assert first.calls[-1] == "drop" and stand.host_bytes == {"b": 60}, "there is room for one"

    play(monkeypatch, oracle, scene)


def test_a_model_that_wakes_keeps_its_host_memory_until_another_one_sleeps(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM
) -> None:
    async def scene(stand: Stand) -> None:
        first = await stand.load("a")
        await stand.retire("a")
        assert await stand.load("a") is first and stand.host_bytes == {"a": 60}
        page = (await stand.fleet.metrics_text()).decode()
        assert 'infer_model_host_bytes{model_name="a"} 6.291456e+07' in page
        await stand.retire("a")
        assert await stand.load("a") is first and stand.host_bytes == {"a": 60}, (
            "its own takes no room from it"
        )
        await stand.load("b")
        await stand.retire("b")
        assert stand.asleep == ["b"] and stand.host_bytes == {"b": 60}
        assert first.calls == ["sleep", "wake", "sleep", "wake", "drop"]

    play(monkeypatch, oracle, scene)


def test_a_model_that_wakes_while_another_one_falls_asleep_gives_up_its_host_memory(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM
) -> None:
    async def scene(stand: Stand) -> None:
        first = await stand.load("a")
        second = await stand.load("b")
        await stand.retire("a")
        first.may_turn.clear()
        waking = asyncio.create_task(stand.load("a"))
        await until(lambda: "wake" in first.calls)
        second.may_turn.clear()
        leaving = stand.retire("b")
        await until(lambda: "sleep" in second.calls)
        first.may_turn.set()
        await waking
        second.may_turn.set()
        await leaving
        assert stand.asleep == ["b"] and stand.host_bytes == {"b": 60} and first.calls[-1] == "drop"

    play(monkeypatch, oracle, scene)


def test_a_model_that_leaves_with_its_host_memory_counts_until_it_has_gone(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM
) -> None:
    async def scene(stand: Stand) -> None:
        first = await stand.load("a")
        await stand.retire("a")
        await stand.load("a")
        model = stand.state.models["a"]
        model.num_held = 1
        leaving = stand.retire("a")
        await asyncio.sleep(0)
        await stand.load("b")
        await stand.retire("b")
        assert stand.asleep == ["b"] and first.calls[-1] == "drop", "the budget is for both"
        model.num_held = 0
        await leaving
        assert stand.host_bytes == {"a": 60}

    play(monkeypatch, oracle, scene)


def test_what_a_woken_model_keeps_makes_room_before_a_sleeping_model_does(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM
) -> None:
    async def scene(stand: Stand) -> None:
        first = await stand.load("a")
        await stand.retire("a")
        await stand.load("a")
        assert stand.state.models["a"].host_bytes == first.num_bytes
        await stand.load("b")
        await stand.retire("b")
        assert first.calls == ["sleep", "wake", "drop"]
        assert stand.asleep == ["b"] and stand.state.models["a"].host_bytes == 0 and not first.is_closed

    play(monkeypatch, oracle, scene)


def test_a_model_that_is_unloaded_while_it_wakes_is_closed(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM
) -> None:
    async def scene(stand: Stand) -> None:
        engine = await stand.load("a")
        await stand.retire("a")
        engine.may_turn.clear()
        waking = asyncio.create_task(stand.load("a"))
        await until(lambda: "wake" in engine.calls)
        await stand.fleet.unload("a")
        with pytest.raises(EngineStopped, match="unloaded"):
            await waking
        assert engine.is_closed and stand.asleep == [] and len(stand.engines["a"]) == 1

    play(monkeypatch, oracle, scene)


def test_a_model_that_falls_asleep_may_use_what_is_freed_meanwhile(
    monkeypatch: pytest.MonkeyPatch, oracle: LLM
) -> None:
    async def scene(stand: Stand) -> None:
        await stand.load("a")
        second = await stand.load("b")
        await stand.retire("a")
        second.may_turn.clear()
        leaving = stand.retire("b")
        await until(lambda: second.calls)
        await stand.fleet.unload("a")
        second.may_turn.set()
        await leaving
        assert stand.asleep == ["b"] and second.has_left and second.calls == ["sleep", "sleep"]

    play(monkeypatch, oracle, scene)
