"""The events for pages that look at an engine: who may have them, how often they come, and when they end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
import pytest

from infer.config.server import ServerConfig
from infer.engine.live import LiveRequest
from infer.errors import EngineStopped
from infer.frontend.prompts import PromptEncoder
from infer.server.app import build_app
from infer.server.middleware.forward import Forward
from infer.server.routes import live
from infer.server.state import ServedModel, ServerState
from tests.support.fake_client import FakeClient, fake_snapshot

PATIENCE_S = 20


class Page:
    """One GET of an application, read event by event, for as long as the test likes."""

    def __init__(self, app: Any, query: str = "", key: str | None = None) -> None:
        self.status = 0
        self.events: list[dict[str, Any]] = []
        self.num_comments = 0
        self.body = b""
        self._left, self._news = asyncio.Event(), asyncio.Event()
        headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
        scope = {
            "type": "http", "method": "GET", "path": "/admin/live", "raw_path": b"/admin/live",
            "headers": headers, "root_path": "", "query_string": query.encode(), "http_version": "1.1",
            "scheme": "http",
        }  # fmt: skip
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))
        self.task.add_done_callback(lambda _: self._news.set())
        self._is_asked = False

    async def _receive(self) -> dict[str, Any]:
        if not self._is_asked:
            self._is_asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        self.body += message.get("body", b"")
        *frames, self.body = self.body.split(b"\n\n")
        self.events += [json.loads(frame.removeprefix(b"data: ")) for frame in frames if frame[:1] == b"d"]
        self.num_comments += sum(frame[:1] == b":" for frame in frames)
        self._news.set()

    async def until(self, is_so: Callable[[Page], bool]) -> None:
        """Wait for events until something is so."""
        async with asyncio.timeout(PATIENCE_S):
            while not is_so(self):
                assert not self.task.done(), (self.status, self.body, self.events)
                self._news.clear()
                await self._news.wait()

    async def end(self) -> None:
        """Wait for the end of the stream."""
        async with asyncio.timeout(PATIENCE_S):
            await self.task

    async def leave(self) -> None:
        """Close the connection, and wait until the application has noticed."""
        self._left.set()
        await self.end()


def make_app(*clients: FakeClient, check_host: bool = False, **knobs: Any) -> Any:
    served = list(clients) or [FakeClient()]
    encoder = cast(PromptEncoder, None)
    model = ServedModel(name="fake", encoder=encoder, clients=list(served), created=1)
    state = ServerState(config=ServerConfig(**knobs), models={"fake": model}, default_model="fake")
    return build_app(state, check_host=check_host)


@asynccontextmanager
async def page_of(app: Any, query: str = "", key: str | None = None) -> AsyncIterator[Page]:
    page = Page(app, query, key)
    try:
        yield page
    finally:
        await page.leave()


# -- keys -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "check_host", "key", "status"),
    [
        ({"admin_key": "root"}, False, "root", 200),
        ({"admin_key": "root"}, False, None, 401),
        ({"admin_key": "root", "api_key": ("user",)}, False, "user", 401),
        ({"admin_key": "root"}, True, None, 401),  # on loopback, too: a key that is set is asked for
        ({"admin_key": "root"}, True, "root", 200),
        ({}, True, None, 200),  # loopback without keys
        ({"allowed_host": ("llm.example.com",)}, True, None, 404),  # a proxy or a tunnel passes others on
        ({"cors_origin": ("https://example.com",)}, True, None, 404),  # pages from elsewhere may ask
        ({"cors_origin": ("https://example.com",), "admin_key": "root"}, True, "root", 200),
        ({}, False, None, 404),
        ({"api_key": ("user",)}, False, "user", 404),
        ({"api_key": ("user",)}, False, None, 404),
    ],
)
def test_the_view_needs_the_admin_key_or_a_private_server(
    knobs: dict[str, Any], check_host: bool, key: str | None, status: int
) -> None:
    async def main() -> None:
        async with page_of(make_app(check_host=check_host, **knobs), key=key) as page:
            await page.until(lambda page: page.status > 0)
            assert page.status == status

    asyncio.run(main())


def test_a_private_server_opens_the_view_and_no_other_admin_route() -> None:
    async def main() -> None:
        transport = httpx.ASGITransport(make_app(check_host=True))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for path in ("/admin/drain", "/admin/live/x", "/admin/livex", "/admin"):
                assert (await client.post(path, json={})).status_code == 404
            for name in ("Forwarded", "X-Forwarded-For", "X-Real-IP", "Via"):
                async with asyncio.timeout(30):  # a stream would not end
                    proxied = await client.get("/admin/live", headers={name: "10.0.0.9"})
                assert proxied.status_code == 404
            foreign = await client.get("/admin/live", headers={"host": "evil.example"})
            assert foreign.status_code == 403

    asyncio.run(main())


# -- what is asked for ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "status", "word"),
    [
        ("model=other", 404, "served: fake"),
        ("replica=2", 400, "has 2 engines, numbered from 0"),
        ("replica=-1", 400, "replica"),
        ("replica=x", 400, "replica"),
    ],
)
def test_an_engine_that_is_not_there_is_refused(query: str, status: int, word: str) -> None:
    async def main() -> None:
        app = make_app(FakeClient(), FakeClient(), admin_key="root")
        async with page_of(app, query, "root") as page:
            await page.end()
            assert page.status == status and word in page.body.decode()

    asyncio.run(main())


def test_a_page_sees_the_replica_it_asked_for() -> None:
    async def main() -> None:
        first, second = FakeClient(), FakeClient()
        second.sight = {"requests": [LiveRequest("req-1/a", "decode", "", 1, 4, 2, 5, 0, 2, 0)]}
        async with page_of(make_app(first, second, admin_key="root"), "model=fake&replica=1", "root") as page:
            await page.until(lambda page: len(page.events) >= 1)
            event = page.events[0]
            assert event["models"] == {"fake": 2} and (event["model"], event["replica"]) == ("fake", 1)
            assert event["requests"] == [["req-1/a", "decode", "", 1, 4, 2, 5, 0, 2, 0]]
            assert event["cells"] == [0, 8] and event["counts"] == [8, 0, 0, 0]
        assert first.num_looks == 0

    asyncio.run(main())


def test_a_page_holds_no_model() -> None:
    async def main() -> None:
        app = make_app(admin_key="root")
        async with page_of(app, key="root") as page:
            await page.until(lambda page: len(page.events) >= 1)
            assert app.state.server.models["fake"].num_held == 0

    asyncio.run(main())


# -- rate and end ---------------------------------------------------------------------------------


def test_events_come_at_most_ten_times_a_second_and_end_with_the_page() -> None:
    async def main() -> None:
        client = FakeClient()
        app, loop = make_app(client, admin_key="root"), asyncio.get_running_loop()
        started = loop.time()
        async with page_of(app, key="root") as page:
            await page.until(lambda page: len(page.events) >= 6)
            assert loop.time() - started >= 5 * live.INTERVAL_S * 0.9
            numbers = [event["number"] for event in page.events]
            assert numbers == list(range(1, len(numbers) + 1))
        num_looks = client.num_looks
        await asyncio.sleep(3 * live.INTERVAL_S)
        assert client.num_looks <= num_looks + 1 and app.state.live.num_pages == 0

    asyncio.run(main())


def test_an_engine_that_says_so_is_asked_more_rarely() -> None:
    async def main() -> None:
        client, loop = FakeClient(), asyncio.get_running_loop()
        client.sight = {"interval_s": 0.5}
        started = loop.time()
        async with page_of(make_app(client, admin_key="root"), key="root") as page:
            await page.until(lambda page: len(page.events) >= 3)
            assert loop.time() - started >= 0.9

    asyncio.run(main())


def test_several_pages_share_each_question() -> None:
    async def main() -> None:
        client = FakeClient()
        app = make_app(client, admin_key="root")
        pages = [Page(app, key="root") for _ in range(4)]
        for page in pages:
            await page.until(lambda page: len(page.events) >= 5)
        assert client.num_looks <= max(len(page.events) for page in pages) + 1
        for page in pages:
            await page.leave()

    asyncio.run(main())


def test_a_page_gets_the_steps_it_has_not_seen() -> None:
    async def main() -> None:
        app = make_app(admin_key="root")
        async with page_of(app, key="root") as page:
            await page.until(lambda page: len(page.events) >= 4)
            assert [row[0] for event in page.events for row in event["steps"]] == [
                event["number"] for event in page.events
            ]
            late = Page(app, key="root")
            await late.until(lambda page: len(page.events) >= 1)
            assert [row[0] for row in late.events[0]["steps"]] == list(range(1, late.events[0]["number"] + 1))
            await late.leave()

    asyncio.run(main())


def test_steps_of_an_engine_that_was_started_again_are_all_new() -> None:
    seen = fake_snapshot(9, {})
    assert [row[0] for row in live.new_steps(fake_snapshot(2, {}), seen)] == [1, 2]
    assert [row[0] for row in live.new_steps(fake_snapshot(10, {}), seen)] == [10]


def test_what_was_seen_long_ago_is_not_shown_to_a_newcomer() -> None:
    async def main() -> None:
        client = FakeClient()
        feed = live.LiveFeed(client)
        assert (await feed.next(None)).number == 1
        feed._asked_at -= 2 * live.MAX_INTERVAL_S + 1
        assert (await feed.next(None)).number == 2

    asyncio.run(main())


def test_the_end_of_an_engine_is_told_and_ends_the_stream() -> None:
    async def main() -> None:
        client = FakeClient()
        async with page_of(make_app(client, admin_key="root"), key="root") as page:
            await page.until(lambda page: len(page.events) >= 1)
            client.failure = EngineStopped("the engine process has ended")
            await page.end()
            assert page.events[-1]["error"]["message"] == "the engine process has ended"

    asyncio.run(main())


def test_an_engine_that_is_busy_keeps_the_stream_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        client, gate = FakeClient(), asyncio.Event()
        look = client.look

        async def look_late() -> Any:
            await gate.wait()
            return await look()

        monkeypatch.setattr(client, "look", look_late)
        monkeypatch.setattr(live, "SILENCE_S", 0.01)
        async with page_of(make_app(client, admin_key="root"), key="root") as page:
            await page.until(lambda page: page.num_comments >= 3)
            gate.set()
            await page.until(lambda page: len(page.events) >= 1)

    asyncio.run(main())


def test_the_number_of_pages_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(live, "MAX_PAGES", 2)
        app = make_app(admin_key="root")
        pages = [Page(app, key="root") for _ in range(2)]
        for page in pages:
            await page.until(lambda page: page.status == 200)
        async with page_of(app, key="root") as third:
            await third.end()
            assert third.status == 503 and "2 pages already watch this server" in third.body.decode()
        for page in pages:
            await page.leave()
        async with page_of(app, key="root") as fourth:
            await fourth.until(lambda page: page.status == 200)

    asyncio.run(main())


def test_every_api_process_asks_the_engine_itself() -> None:
    async def main() -> None:
        asked: list[str] = []

        async def inner(scope: Any, receive: Any, send: Any) -> None:
            asked.append(scope["path"])

        async def ask(question: Any) -> None:
            raise AssertionError("process 0 was asked")

        async def nothing(*_: Any) -> Any:
            raise AssertionError("nothing is read or sent")

        await Forward(inner, ask)({"type": "http", "path": "/admin/live"}, nothing, nothing)
        assert asked == ["/admin/live"]

    asyncio.run(main())
