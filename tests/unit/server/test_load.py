"""Loads that are ended: what their caller, the one who ends them and the names get."""

from __future__ import annotations

import asyncio

import pytest

from infer.errors import EngineStopped
from infer.server.fleet.load import Load


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
