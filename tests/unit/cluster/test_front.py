"""The front of a cluster, before scripted replicas: real sockets, no engine, no Ray."""

from __future__ import annotations

import asyncio
import functools
import json
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from infer.cli.main import main
from infer.cluster import front as front_module
from infer.cluster import replicas as replicas_module
from infer.cluster import serve as serve_module
from infer.cluster import upstream as upstream_module
from infer.cluster.child import ReplicaLaunch
from infer.cluster.front import build_front, merge_pages
from infer.cluster.placing import RayPlacer
from infer.cluster.replicas import RemoteServer, ReplicaSet
from infer.cluster.upstream import ReplicaGone, Upstream
from infer.config.server import ServerConfig
from infer.config.settings import EngineConfig
from infer.errors import ConfigError
from infer.ray import ServeReplica
from infer.ray import app as serve_app
from infer.server.middleware.host_check import needs_host_check
from infer.server.protocol.stream import LAST_READ_S
from infer.server.state import ServerState

SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DIED = b"HTTP/1.1 503 Busy\r\ncontent-type: application/json\r\nretry-after: 1\r\ncontent-length: 2\r\n\r\n{}"
BUSY = DIED.replace(b"\r\n", b"\r\nx-infer-refused: 1\r\n", 1)
UNKNOWN = b"HTTP/1.1 404 Not Found\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
EVENT = b'data: {"choices": []}\n\n'
DONE = b"data: [DONE]\n\n"
NO_MODELS = ReplicaLaunch(models={}, server=ServerConfig(), log_level="info")


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that runs on an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **options: Any) -> None:
        asyncio.run(test(*args, **options))

    return run


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def whole(body: bytes, kind: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s" % (kind, len(body), body)


class FakeReplica:
    """Answers each request by a script: bytes, or "hang up" in their place."""

    def __init__(self, *script: bytes | str) -> None:
        self.script = script
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.num_connections = 0
        self.was_left = asyncio.Event()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                lengths = [
                    line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
                ]
                self.bodies.append(await reader.readexactly(int(lengths[0].split(b":")[1]) if lengths else 0))
                for piece in self.script:
                    if isinstance(piece, str):
                        if piece == "rest":
                            await asyncio.sleep(0.1)
                            continue
                        if piece == "wait":
                            await reader.read(1)
                            self.was_left.set()
                        return
                    writer.write(piece)
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


class FrontSite:
    """A front with its replicas."""

    def __init__(self, replicas: ReplicaSet, state: ServerState) -> None:
        self.replicas = replicas
        self.state = state
        self.app = build_front(state, replicas, check_host=needs_host_check(state.config))

    async def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **options)

    async def chat(self, **options: Any) -> httpx.Response:
        return await self.request("POST", "/v1/chat/completions", json={"messages": []}, **options)


@asynccontextmanager
async def front(*fakes: FakeReplica, **knobs: Any) -> AsyncIterator[FrontSite]:
    replicas = ReplicaSet()
    servers = []
    for number, fake in enumerate(fakes):
        server = await asyncio.start_server(fake.handle, "127.0.0.1", 0)
        servers.append(server)
        port = server.sockets[0].getsockname()[1]
        replicas.servers.append(RemoteServer(number, f"http://127.0.0.1:{port}", "inner"))
    try:
        yield FrontSite(replicas, ServerState(config=ServerConfig(**knobs)))
    finally:
        for remote in replicas.servers:
            remote.close()
        for server in servers:
            server.close()


@in_loop
async def test_a_request_is_passed_on_with_its_id_and_the_fronts_key() -> None:
    fake = FakeReplica(whole(b'{"a": 1}'))
    async with front(fake) as site:
        answer = await site.chat(headers={"x-request-id": "req-1", "authorization": "Bearer theirs"})
    assert answer.status_code == 200 and answer.json() == {"a": 1}
    assert answer.headers.get_list("x-request-id") == ["req-1"]
    assert fake.bodies == [b'{"messages":[]}']
    head = fake.heads[0].lower()
    assert b"x-request-id: req-1\r\n" in head
    assert b"authorization: bearer inner\r\n" in head and b"theirs" not in head


@in_loop
async def test_where_clients_have_keys_the_front_checks_them_and_passes_them_on() -> None:
    fake = FakeReplica(whole(b"{}"))
    async with front(fake, api_key=("secret",)) as site:
        assert (await site.chat()).status_code == 401 and not fake.heads
        assert (await site.chat(headers={"authorization": "Bearer secret"})).status_code == 200
    assert b"authorization: bearer secret\r\n" in fake.heads[0].lower()
    assert b"inner" not in fake.heads[0]


@in_loop
async def test_a_front_on_loopback_answers_for_this_machine_only() -> None:
    async with front(FakeReplica(whole(b"{}"))) as site:
        assert (await site.chat(headers={"host": "llm.example.com"})).status_code == 403
        assert (await site.chat(headers={"host": "localhost:8000"})).status_code == 200


@in_loop
async def test_behind_the_proxy_of_serve_every_host_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeReplica(whole(b"{}"))
    async with front(fake) as site:

        class Process:
            def __init__(self, launch: ReplicaLaunch) -> None:
                assert launch.server == replace(ServerConfig(), host="127.0.0.1", port=0)

            def wait_ready(self) -> str:
                return site.replicas.servers[0].url

            def stop(self) -> None:
                pass

        monkeypatch.setattr("infer.ray.ReplicaProcess", Process)
        replica = ServeReplica(NO_MODELS, "inner", ServerConfig())
        site.app = replica.front
        assert (await site.chat(headers={"host": "llm.example.com"})).status_code == 200
        assert (await site.request("POST", "/admin/drain", json={})).status_code == 404
        replica._replicas.servers[0].close()


@pytest.mark.parametrize("name", ["admin_key", "host", "tls_cert", "allowed_host"])
def test_the_application_of_serve_refuses_what_it_has_no_place_for(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} cannot be used with infer.ray:app"):
        serve_app({"model": "org/name", name: "x"})


@in_loop
async def test_a_connection_serves_several_requests() -> None:
    fake = FakeReplica(whole(b"{}"))
    async with front(fake) as site:
        for _ in range(3):
            assert (await site.chat()).status_code == 200
    assert fake.num_connections == 1 and len(fake.heads) == 3


@pytest.mark.parametrize(
    "script",
    [("hang up",), (SSE, "hang up"), (SSE, chunk(b": ping\n\n"), "hang up")],
    ids=["before the head", "after the head", "after a ping"],
)
@in_loop
async def test_a_replica_that_goes_before_its_first_event_is_replaced(
    script: tuple[bytes | str, ...],
) -> None:
    bad, good = FakeReplica(*script), FakeReplica(SSE, chunk(EVENT), chunk(DONE), b"0\r\n\r\n")
    async with front(bad, good) as site:
        seen: list[httpx.Response] = []
        while not bad.bodies or not seen:  # replicas take turns: the bad one is asked first sooner or later
            seen.append(await site.chat())
        assert [server.is_up for server in site.replicas.servers] == [False, True]
    for answer in seen:
        assert answer.status_code == 200 and answer.content.endswith(EVENT + DONE)


@in_loop
async def test_a_replica_that_goes_in_the_middle_of_a_stream_ends_it_with_an_error() -> None:
    paths = {
        "/v1/chat/completions": "data: ",
        "/v1/completions/stream": "event: error\ndata: ",
        "/v1/messages": "event: error\ndata: ",
        "/v1/responses": "event: error\ndata: ",
        "/completion": "data: ",
    }
    for path, prefix in paths.items():
        fakes = FakeReplica(SSE, chunk(EVENT), "hang up"), FakeReplica(SSE, chunk(EVENT), "hang up")
        async with front(*fakes) as site:
            answer = await site.request("POST", path, json={})
        assert answer.status_code == 200
        assert len(fakes[0].heads) + len(fakes[1].heads) == 1, "tokens would come twice"
        rest = answer.text.removeprefix(EVENT.decode())
        assert rest.startswith(prefix) and rest.count("data: ") == 1 + rest.count("[DONE]")
        told = json.loads(rest.removeprefix(prefix).split("\n")[0])
        assert "has ended" in told["error"]["message"]
        assert told.get("type") == ("error" if path in ("/v1/messages", "/v1/responses") else None)


@in_loop
async def test_a_refusal_after_signs_of_life_ends_the_stream_and_its_connection() -> None:
    bad, other = FakeReplica(SSE, chunk(b": ping\n\n"), "hang up"), FakeReplica(UNKNOWN, "wait")
    async with front(other, bad) as site:  # the second takes the first turn
        answer = await site.chat()
        assert answer.status_code == 200 and "refused the request with status 404" in answer.text
        async with asyncio.timeout(5):
            await other.was_left.wait()


@in_loop
async def test_the_lines_of_ollamas_stream_end_with_an_error_too() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"
    async with front(FakeReplica(head, chunk(b'{"message": {}}\n'), "hang up")) as site:
        answer = await site.request("POST", "/api/chat", json={})
    first, second = answer.text.splitlines()
    assert json.loads(first) == {"message": {}} and "has ended" in json.loads(second)["error"]


@in_loop
async def test_a_full_replica_sends_the_request_to_the_next_one() -> None:
    fakes = FakeReplica(BUSY), FakeReplica(whole(b"{}"))
    async with front(*fakes) as site:
        statuses = [(await site.chat()).status_code for _ in range(4)]
    assert statuses == [200] * 4


@in_loop
async def test_if_all_are_full_the_client_learns_it() -> None:
    async with front(FakeReplica(BUSY), FakeReplica(BUSY)) as site:
        answer = await site.chat()
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"


@in_loop
async def test_full_replicas_are_all_asked() -> None:
    fakes = [FakeReplica(BUSY) for _ in range(4)]
    async with front(*fakes) as site:
        assert (await site.chat()).status_code == 503
    assert [len(fake.bodies) for fake in fakes] == [1] * 4


@pytest.mark.parametrize(
    "script",
    [(DIED,), ("hang up",), (SSE, chunk(b": ping\n\n"), "hang up")],
    ids=["its engine dies", "it dies", "it dies after a ping"],
)
@in_loop
async def test_a_request_that_ends_replicas_ends_no_more_than_two(script: tuple[bytes | str, ...]) -> None:
    fakes = [FakeReplica(*script) for _ in range(5)]
    async with front(*fakes) as site:
        answer = await site.chat()
        if script == ("hang up",):
            assert answer.status_code == 500 and answer.headers["x-should-retry"] == "false"
        elif len(script) == 1:
            assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert sum(server.is_up for server in site.replicas.servers) == (5 if script == (DIED,) else 3)
    assert sum(len(fake.bodies) for fake in fakes) == 2
    assert len(script) == 1 or "2 replicas" in answer.text


@in_loop
async def test_replicas_that_cannot_be_reached_do_not_count_as_tries() -> None:
    good = FakeReplica(whole(b"{}"))
    async with front(good) as site:
        site.replicas.servers += [RemoteServer(n, "http://127.0.0.1:1", "inner") for n in range(1, 6)]
        assert (await site.chat()).status_code == 200


@in_loop
async def test_the_only_replica_is_probed_at_once_when_a_connection_breaks() -> None:
    class Moody(FakeReplica):
        async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.script = (whole(b"{}"),) if self.num_connections else ("hang up",)
            await super().handle(reader, writer)

    async with front(Moody()) as site:
        assert (await site.chat()).status_code == 503
        assert site.replicas.servers[0].is_up
        assert (await site.chat()).status_code == 200


@in_loop
async def test_the_replica_that_knows_a_request_explains_it() -> None:
    fakes = FakeReplica(UNKNOWN), FakeReplica(whole(b"[7]")), FakeReplica(UNKNOWN)
    async with front(*fakes) as site:
        for _ in range(3):
            assert (await site.request("GET", "/explain/req-1")).json() == [7]
        assert (await site.request("GET", "/explain/req-1")).status_code == 200
    async with front(FakeReplica(UNKNOWN), FakeReplica(UNKNOWN)) as site:
        assert (await site.request("GET", "/explain/req-1")).status_code == 404


@in_loop
async def test_without_replicas_requests_and_health_are_503() -> None:
    async with front() as site:
        assert (await site.request("GET", "/health")).status_code == 503
        answer = await site.chat()
    assert answer.status_code == 503 and "retry-after" in answer.headers


@in_loop
async def test_health_says_whether_the_front_starts_serves_or_drains() -> None:
    async with front(FakeReplica()) as site:
        assert (await site.request("GET", "/health")).json() == {"status": "ok"}
        site.state.board.is_starting = True
        assert "starting" in (await site.request("GET", "/health")).text
        assert (await site.chat()).status_code == 503
        site.state.board.is_starting, site.state.board.is_draining = False, True
        assert "draining" in (await site.request("GET", "/health")).text


@in_loop
async def test_the_answer_to_head_has_no_body_and_keeps_its_connection() -> None:
    fake = FakeReplica(b"HTTP/1.1 200 OK\r\ncontent-length: 400\r\n\r\n")
    async with front(fake) as site, asyncio.timeout(30):
        for _ in range(2):
            answer = await site.request("HEAD", "/v1/models")
            assert answer.status_code == 200 and answer.content == b""
    assert fake.num_connections == 1


@in_loop
async def test_an_interim_answer_is_followed_by_the_real_one() -> None:
    async with front(FakeReplica(b"HTTP/1.1 100 Continue\r\n\r\n", whole(b"[1]"))) as site:
        answer = await site.chat()
    assert answer.status_code == 200 and answer.json() == [1]


@in_loop
async def test_a_replica_that_freezes_costs_no_more_than_the_time_of_a_request() -> None:
    front_module.OVERTIME_S, usual = 0.1, front_module.OVERTIME_S
    try:
        async with front(FakeReplica("wait"), request_timeout=0.1) as site:
            answer = await site.chat()
        assert answer.status_code == 504 and "request_timeout" in answer.text
        async with front(FakeReplica(SSE, chunk(EVENT), "wait"), request_timeout=0.1) as site:
            answer = await site.chat()
        assert answer.status_code == 200 and "request_timeout" in answer.text.removeprefix(EVENT.decode())
    finally:
        front_module.OVERTIME_S = usual


@in_loop
async def test_an_answer_that_still_flows_ends_though_its_replica_is_said_to_have_ended() -> None:
    pieces = [piece for _ in range(8) for piece in (chunk(EVENT), "rest")]
    with shorter_silence(0.3):
        async with front(FakeReplica(SSE, *pieces, chunk(DONE), b"0\r\n\r\n")) as site:
            (replica,) = site.replicas.servers
            asked = asyncio.create_task(site.chat())
            async with asyncio.timeout(30):
                while not replica.num_active:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.05)
                site.replicas.remove(replica)
                answer = await asked
            assert answer.content == 8 * EVENT + DONE
            assert not replica.idle and not any(not each._is_lost for each in replica.opened)


@contextmanager
def shorter_silence(seconds: float) -> Iterator[None]:
    replicas_module.SILENT_S, usual = seconds, replicas_module.SILENT_S
    try:
        yield
    finally:
        replicas_module.SILENT_S = usual


@in_loop
async def test_an_answer_that_waited_for_its_client_has_time_to_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While the client does not read, nothing can come, whatever the replica does."""
    now = 1000.0
    monkeypatch.setattr(upstream_module, "monotonic", lambda: now)
    body, is_over = bytes(upstream_module.MAX_BACKLOG + 1), asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body) + 1, body))
        try:
            await reader.read()
            writer.close()
            await writer.wait_closed()
        except ConnectionError:
            pass
        is_over.set()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        connection = await Upstream.connect(*server.sockets[0].getsockname())
        await connection.ask(b"GET / HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(30):
            while connection._backlog < len(body):
                await asyncio.sleep(0.01)
        connection.close_when_silent(2.0)
        now += 60.0  # the client does not read
        connection._close_if_silent()
        assert await connection.read() == body
        now += 1.0
        connection._close_if_silent()
        assert not connection._is_lost
        now += 1.0
        connection._close_if_silent()
        assert connection._is_lost
        await asyncio.wait_for(is_over.wait(), 30)


@in_loop
@pytest.mark.parametrize("begins", [False, True])
async def test_a_replica_whose_node_is_gone_without_a_word_is_not_waited_for(begins: bool) -> None:
    """A machine that loses its power or its network closes no connection; Ray notices it and says so."""
    script = (SSE, chunk(EVENT), "wait") if begins else ("wait",)
    async with front(FakeReplica(*script), FakeReplica(whole(b'{"a": 1}'))) as site:
        silent = site.replicas.servers[0]
        site.replicas.servers[1].is_up = False  # so that the request goes to the other one
        asked = asyncio.create_task(site.chat())
        async with asyncio.timeout(30):
            while not silent.num_active:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            site.replicas.servers[1].is_up = True
            site.replicas.remove(silent)
            answer = await asked
    if begins:
        assert "the replica that was answering has ended" in answer.text
    else:
        assert answer.json() == {"a": 1}


@in_loop
async def test_a_request_timeout_of_zero_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_module, "OVERTIME_S", 0.0)
    async with front(FakeReplica(whole(b"{}")), request_timeout=0.0) as site:
        assert (await site.chat()).status_code == 200


def test_the_front_waits_longer_than_a_replica_gives_its_readers() -> None:
    assert front_module.OVERTIME_S > LAST_READ_S


@in_loop
async def test_a_client_that_leaves_ends_the_request_at_the_replica() -> None:
    fake = FakeReplica(SSE, chunk(EVENT), "wait")
    async with front(fake) as site:
        left = asyncio.Event()
        bodies = [{"type": "http.request", "body": b"{}", "more_body": False}]

        async def receive() -> dict[str, Any]:
            if bodies:
                return bodies.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message.get("body"):
                left.set()

        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "headers": [],
        }
        scope |= {"query_string": b"", "raw_path": b"/v1/chat/completions"}
        async with asyncio.timeout(30):
            await site.app(scope, receive, send)
            await fake.was_left.wait()
        assert site.replicas.servers[0].num_active == 0 and site.replicas.servers[0].is_up


@in_loop
async def test_bodies_that_begin_alike_meet_on_one_replica_unless_it_is_busy() -> None:
    replicas = ReplicaSet()
    replicas.servers = [RemoteServer(number, f"http://127.0.0.1:{number}", "k") for number in range(3)]
    start = b"x" * 600
    first = replicas.pick(start + b"one")
    assert first is not None
    assert all(replicas.pick(start + bytes([n])) is first for n in range(10))
    assert len({replicas.pick(bytes([n]) * 600) for n in range(12)}) == 3
    first.num_active = 5
    assert replicas.pick(start) is not first
    assert replicas.pick(start, without=replicas.servers) is None


@in_loop
async def test_probes_notice_replicas_that_are_unwell_and_well_again() -> None:
    page = whole(b'infer_num_requests_running{engine="0"} 3.0\n', b"text/plain")
    fake = FakeReplica(page)
    async with front(fake) as site:
        [report] = await site.replicas.probe()
        assert report.num_running == 3.0
        fake.script = (BUSY,)
        assert await site.replicas.probe() == [] and site.replicas.up == []
        fake.script = (page,)
        assert len(await site.replicas.probe()) == 1 and len(site.replicas.up) == 1


@in_loop
async def test_metrics_of_all_replicas_are_one_page() -> None:
    page = (
        b'# HELP infer_a A.\n# TYPE infer_a gauge\ninfer_a{engine="0"} 1.0\n'
        b"# HELP infer_b B.\n# TYPE infer_b gauge\ninfer_b 2.0\n"
    )
    async with front(
        FakeReplica(whole(page, b"text/plain")), FakeReplica(whole(page, b"text/plain"))
    ) as site:
        text = (await site.request("GET", "/metrics")).text
    assert text.count("# TYPE infer_a gauge") == 1
    for number in (0, 1):
        assert f'infer_a{{replica="{number}",engine="0"}} 1.0' in text
        assert f'infer_b{{replica="{number}"}} 2.0' in text
    assert merge_pages([]) == b"\n"


@in_loop
async def test_an_answer_that_is_no_http_is_a_lost_replica() -> None:
    server = await asyncio.start_server(FakeReplica(b"SSH-2.0\r\n\r\n").handle, "127.0.0.1", 0)
    connection = await Upstream.connect("127.0.0.1", server.sockets[0].getsockname()[1])
    with pytest.raises(ReplicaGone):
        await connection.ask(b"GET / HTTP/1.1\r\n\r\n")
    server.close()


@pytest.mark.parametrize(
    "knobs",
    [
        {"max_replicas": 2},
        {"ray_address": "auto"},
        {"cluster": "ray", "replicas": 3, "max_replicas": 2},
        {"cluster": "ray", "admin_key": "k"},
        {"cluster": "ray", "in_process": True},
        {"cluster": "ray", "api_processes": 2},
        {"cluster": "ray", "target_queue_time": 0.0},
        {"cluster": "slurm"},
    ],
    ids=str,
)
def test_settings_that_contradict_a_cluster_are_refused(knobs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServerConfig(**knobs)


class FakePlacer:
    """A cluster that is there at once."""

    def __init__(self, *_: Any) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.on_ready: Callable[[], None] = lambda: None

    async def connect(self, address: str | None) -> None:
        pass

    def add(self) -> None:
        self.on_ready()

    async def close(self) -> None:
        pass


def test_a_front_that_can_no_longer_watch_its_replicas_ends_with_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def watch(*_: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(serve_module, "import_ray", lambda: None)
    monkeypatch.setattr(serve_module, "RayPlacer", FakePlacer)
    monkeypatch.setattr(serve_module, "_watch", watch)
    config = ServerConfig(cluster="ray", port=0)
    with pytest.raises(KeyError, match="a bug"):
        asyncio.run(serve_module.serve_cluster({"": EngineConfig()}, config, announce=lambda _: None))


@in_loop
async def test_a_replica_that_cannot_be_ended_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("infer.cluster.placing.import_ray", lambda: None)
    monkeypatch.setattr(RayPlacer, "_keep", lambda *_: asyncio.sleep(0))
    monkeypatch.setattr(RayPlacer, "_end", fail)
    placer = RayPlacer(NO_MODELS, "inner", ReplicaSet())
    placer.add()
    placer.remove()
    async with asyncio.timeout(30):
        while "could not be ended" not in caplog.text:
            await asyncio.sleep(0)
    assert "a bug" in caplog.text


@in_loop
async def test_pages_of_other_origins_may_read_the_name_of_the_model() -> None:
    async with front(FakeReplica(whole(b"{}")), cors_origin=("https://a.example",)) as site:
        answer = await site.chat(headers={"origin": "https://a.example"})
    assert "x-infer-model" in answer.headers["access-control-expose-headers"]


def test_without_ray_the_flag_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["serve", "--cluster", "ray", "--port", "0"]) == 2
    assert "pip install 'infer[ray]'" in capsys.readouterr().err
