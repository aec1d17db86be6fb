"""GET /admin/live?model=NAME&replica=0: an engine at work, as server-sent events, for the page's Live tab.

    data: {"models": {"tiny": 1}, "model": "tiny", "replica": 0, "number": 7, "cells": [...], ...}

An event is a `LiveSnapshot` (engine/live.py) with the steps that this page has not seen, and the names of all
models with their numbers of engines. A page gets at most ten events a second. Pages that watch the same
engine share each request to it. After the last one has left, no more requests are sent, and a few seconds
later the engine stops recording steps.

It needs the admin key; a server on loopback without keys shows it to everyone on this machine (auth.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from time import monotonic

import msgspec
import numpy as np
from fastapi import APIRouter, Query
from fastapi import Request as HttpRequest
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from infer.client.client import EngineClient
from infer.engine.live import STEP_COLUMNS, LiveSnapshot
from infer.errors import RequestError, UnknownModel
from infer.server.middleware.auth import LIVE_PATH
from infer.server.protocol.errors import ApiError, to_api_error
from infer.server.protocol.stream import unless_disconnected
from infer.server.state import ServedModel, ServerState

INTERVAL_S = 0.1  # time between two requests to one engine
MAX_INTERVAL_S = 1.0  # longest such time: an engine that is asked less often stops recording
SILENCE_S = 5.0  # silence after which a stream sends a comment
MAX_PAGES = 16  # most pages of one API process at a time
TOTALS = ("steps", "output_tokens", "prompt_tokens", "queried_tokens", "hit_tokens", "preemptions")
ALIVE = b": the engine is busy with a step\n\n"

router = APIRouter(tags=["admin"])


class LiveFeed:
    """The snapshots of one engine, shared by all pages of this process that watch it."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._asked_at = -INTERVAL_S
        self._last: LiveSnapshot | None = None
        self._asking: asyncio.Task[LiveSnapshot] | None = None

    async def next(self, seen: LiveSnapshot | None) -> LiveSnapshot:
        """Wait for a snapshot after `seen`; all waiters share one request."""
        if monotonic() - self._asked_at > 2 * MAX_INTERVAL_S:  # no page has asked for a while
            self._last = None
        while self._last is None or (seen is not None and self._last.number == seen.number):
            if self._asking is None:
                self._asking = asyncio.ensure_future(self._ask())
            self._last = await asyncio.shield(self._asking)
        return self._last

    async def _ask(self) -> LiveSnapshot:
        try:
            wait_s = INTERVAL_S if self._last is None else max(INTERVAL_S, self._last.interval_s)
            await asyncio.sleep(self._asked_at + min(wait_s, MAX_INTERVAL_S) - monotonic())
            self._asked_at = monotonic()
            return await self._client.look()
        finally:
            self._asking = None


class LiveFeeds:
    """One feed for each engine that pages watch."""

    def __init__(self) -> None:
        self._feeds: dict[EngineClient, tuple[LiveFeed, int]] = {}  # each with its number of pages

    @property
    def num_pages(self) -> int:
        """The number of open pages."""
        return sum(number for _, number in self._feeds.values())

    @contextlib.contextmanager
    def looking(self, client: EngineClient) -> Iterator[LiveFeed]:
        """Add a page that watches an engine; the feed ends with the last page."""
        feed, number = self._feeds.get(client) or (LiveFeed(client), 0)
        self._feeds[client] = feed, number + 1
        try:
            yield feed
        finally:
            number = self._feeds.pop(client)[1] - 1
            if number:
                self._feeds[client] = feed, number


class LiveStream(Response):
    """Events for one page, until it leaves or the engine ends."""

    def __init__(self, state: ServerState, feeds: LiveFeeds, model: ServedModel, replica: int) -> None:
        self.status_code, self.background, self.media_type = 200, None, "text/event-stream"
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})
        self._state, self._feeds = state, feeds
        self._model, self._replica = model, replica

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events for as long as the client is connected."""
        with (
            self._feeds.looking(self._model.clients[self._replica]) as feed,
            contextlib.suppress(ClientDisconnect),
        ):
            await unless_disconnected(receive, self._send_all(feed, send))

    async def _send_all(self, feed: LiveFeed, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await send(start)
        with contextlib.suppress(OSError):  # the connection is closed
            async with contextlib.aclosing(self._events(feed)) as events:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self, feed: LiveFeed) -> AsyncGenerator[bytes, None]:
        """Yield snapshots, and comments while there are none; the last event is the error that ended them."""
        seen: LiveSnapshot | None = None
        while True:
            next_one = asyncio.ensure_future(feed.next(seen))
            try:
                while not (await asyncio.wait((next_one,), timeout=SILENCE_S))[0]:
                    yield ALIVE
                snapshot = next_one.result()
            except Exception as error:
                yield b"data: " + to_api_error(error).encode() + b"\n\n"
                return
            finally:
                next_one.cancel()
            yield self._event_of(snapshot, seen)
            seen = snapshot

    def _event_of(self, snapshot: LiveSnapshot, seen: LiveSnapshot | None) -> bytes:
        told = {
            "models": {name: len(model.clients) for name, model in self._state.models.items()},
            "model": self._model.name,
            "replica": self._replica,
            "totals": self._totals(),
            **msgspec.structs.asdict(snapshot),
            "steps": new_steps(snapshot, seen),
        }
        return b"data: " + msgspec.json.encode(told) + b"\n\n"

    def _totals(self) -> dict[str, int]:
        """Return the engine's counters from its last report, for rates."""
        stats = self._model.clients[self._replica].stats()
        return {name: getattr(stats, f"num_{name}") for name in TOTALS}


def new_steps(snapshot: LiveSnapshot, seen: LiveSnapshot | None) -> list[list[int]]:
    """Return the steps of a snapshot that are not in the one seen before."""
    rows = np.frombuffer(snapshot.steps, np.int64).reshape(-1, len(STEP_COLUMNS))
    if seen is not None and seen.steps and snapshot.number > seen.number:
        last = np.frombuffer(seen.steps, np.int64)[-len(STEP_COLUMNS)]
        rows = rows[rows[:, 0] > last]
    steps: list[list[int]] = rows.tolist()
    return steps


@router.get(LIVE_PATH)
async def look(http: HttpRequest, model: str | None = None, replica: int = Query(0, ge=0)) -> Response:
    """Show what an engine is doing, as an endless stream of server-sent events."""
    state: ServerState = http.app.state.server
    feeds: LiveFeeds = http.app.state.live
    wanted = model or state.default_model or ""
    served = next(iter(state.models_of(wanted)), None)  # not held: a page does not prevent unloading
    if served is None:
        raise UnknownModel(f"model {wanted!r} is not loaded; the first request loads it", param="model")
    if replica >= len(served.clients):
        raise RequestError(
            f"replica is {replica}, but {served.name!r} has {len(served.clients)} engines, numbered from 0",
            param="replica",
        )
    if feeds.num_pages >= MAX_PAGES:
        message = f"{MAX_PAGES} pages already watch this server; close one of them"
        return ApiError.for_now(message).response()
    return LiveStream(state, feeds, served, replica)
