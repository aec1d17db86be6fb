"""The parts by which several API processes are one server, each by itself."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from subprocess import Popen
from types import SimpleNamespace
from typing import Any, cast

import httpx
import msgspec
import pytest
import zmq
from starlette import types
from starlette.types import Receive, Scope, Send

from infer.client.messages import Ready, encode
from infer.config.server import ServerConfig
from infer.config.settings import EngineConfig
from infer.engine.stats import EngineStats
from infer.errors import ConfigError, EngineError, EngineLost, EngineStopped, UnknownModel
from infer.server.app import build_app, create_app
from infer.server.connection import HEAD_TIMEOUT_S
from infer.server.fleet.fleet import Fleet
from infer.server.metrics import ServerMetrics
from infer.server.middleware.forward import Forward, Forwarded
from infer.server.processes import workers as workers_module
from infer.server.processes.accept import Acceptor
from infer.server.processes.board import Board
from infer.server.processes.channel import Channel
from infer.server.processes.messages import (
    CheckAlive,
    CountAlike,
    Down,
    ForgetPrefixes,
    FromFirst,
    GetUses,
    Gone,
    LoadOnDemand,
    ModelUse,
    ProcessMessage,
    Question,
    Scrape,
    Spawned,
    StoredResponse,
    ToFirst,
    Unserve,
)
from infer.server.processes.worker import EngineFeed, Worker
from infer.server.processes.workers import Workers, _Process, num_processes
from infer.server.response_store import RemoteStore
from infer.server.serve import HttpServer, _answer_process, loop_factory, uvicorn_config
from infer.server.state import ServedModel, ServerState
from tests.support.app import Site
from tests.support.fake_client import FakeClient


@pytest.mark.parametrize(("cores", "expected"), [(2, 1), (4, 1), (7, 1), (8, 2), (16, 4), (64, 8)])
def test_a_machine_with_a_gpu_has_a_process_for_every_four_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert num_processes(ServerConfig(), on_gpu=True) == expected
    assert num_processes(ServerConfig(), on_gpu=False) == 1
    assert num_processes(ServerConfig(in_process=True), on_gpu=True) == 1
    assert num_processes(ServerConfig(api_processes=3), on_gpu=False) == 3


def test_numbers_that_cannot_be_had_are_refused() -> None:
    for number, bound in ((0, "a positive integer"), (-1, "a positive integer"), (65, "at most 64")):
        with pytest.raises(ConfigError, match=f"api_processes must be {bound}, got {number}"):
            ServerConfig(api_processes=number)
    with pytest.raises(ConfigError, match="api_processes has no effect with in_process"):
        ServerConfig(api_processes=2, in_process=True)
    with pytest.raises(ConfigError, match="one process of its host"):
        create_app(server=ServerConfig(api_processes=2))


def test_processes_on_one_board_agree() -> None:
    first = Board(2)
    first.is_starting = True
    other = Board(2, 1, os.dup(first.fd))
    assert other.is_starting and first.is_starting, "a newcomer changes nothing"
    first.is_starting, first.is_draining = False, True
    assert not other.is_starting and other.is_draining
    first.count_request(2)
    other.count_request(3)
    assert first.num_active == other.num_active == 5
    other.count_request(-3)
    assert first.num_active == other.num_active == 2


def test_servers_of_one_process_share_nothing() -> None:
    first, other = Board(), Board()
    first.is_draining = True
    first.count_request(1)
    assert not other.is_draining and not other.num_active


def test_the_busier_process_knows_that_it_is() -> None:
    first = Board(2)
    other = Board(2, 1, os.dup(first.fd))
    assert not first.has_more_connections and not other.has_more_connections
    first.count_connection(1)
    assert first.has_more_connections and not other.has_more_connections
    other.count_connection(1)
    assert not first.has_more_connections


def test_a_server_that_has_shut_down_listens_no_more() -> None:
    async def main() -> None:
        site, listener = Site(), socket.create_server(("127.0.0.1", 0))
        address = listener.getsockname()
        listener.setblocking(False)
        http = uvicorn_config(site.state, Fleet(site.state, ServerMetrics("infer")))
        server = HttpServer(http, listener, Board(2))
        serving = asyncio.create_task(server.serve())
        _, writer = await asyncio.open_connection(*address)
        writer.close()
        server.should_exit = True
        await serving
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*address)

    asyncio.run(main())


class Greeting(asyncio.Protocol):
    """Says one word and hangs up."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(b"hello")
        transport.close()


def test_a_process_that_hangs_keeps_no_connection_from_the_others() -> None:
    """The other process on the board has no connections, ever: it is stuck."""

    async def main() -> list[bytes]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            board = Board(2)
            acceptor = Acceptor(listener, board, Greeting, None)
            answers = []
            for _ in range(3):
                reader, writer = await asyncio.open_connection(*listener.getsockname())
                answers.append(await reader.read())
                writer.close()
            acceptor.close()
            assert board.has_more_connections, "connections were counted"
            return answers

    assert asyncio.run(main()) == [b"hello"] * 3


def over_channel(
    answer: Callable[[Any], Any],
    ask: Callable[[Channel[Any]], Awaitable[Any]],
    *,
    received: Any = FromFirst,
    hang_up: bool = False,
) -> Any:
    async def main() -> Any:
        ours, theirs = socket.socketpair()
        near: Channel[Any] = Channel(ours, ToFirst, lambda message: None)
        far: Channel[Any] = Channel(theirs, received, answer)
        await near.open()
        await far.open()
        running = [asyncio.create_task(near.run()), asyncio.create_task(far.run())]
        if hang_up:
            await asyncio.sleep(0)  # it has begun to read
            running[1].cancel()
        try:
            return await ask(near)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    return asyncio.run(main())


def test_a_channel_answers_questions_and_keeps_the_order_of_messages() -> None:
    seen: list[FromFirst] = []
    sent = (Down(3, "killed"), CountAlike("owner", [1, 2], b"salt"), Unserve([3], 1.5), GetUses())
    use = ModelUse(2, 1.0, None, 0.0)

    def answer(message: FromFirst) -> Any:
        seen.append(message)
        if isinstance(message, CountAlike):
            return asyncio.sleep(0, result=[*message.prefixes, 3])
        return {"m": use} if isinstance(message, GetUses) else len(seen)

    async def ask(channel: Channel[Any]) -> Any:
        channel.tell(sent[0])
        return [await channel.call(question) for question in sent[1:]]

    assert over_channel(answer, ask) == [[1, 2, 3], 3, {"m": use}]
    assert tuple(seen) == sent


def test_an_error_crosses_a_channel_as_what_it_is() -> None:
    async def fail() -> None:
        raise UnknownModel("no such model", param="name")

    with pytest.raises(UnknownModel, match="no such model") as caught:
        over_channel(lambda message: fail(), lambda channel: channel.call(Scrape()))
    assert caught.value.param == "name"


def test_an_error_in_an_answer_does_not_end_a_channel(caplog: pytest.LogCaptureFixture) -> None:
    def answer(message: FromFirst) -> Any:
        if not isinstance(message, Scrape):
            raise UnknownModel(f"no {type(message).__name__}", param="name")
        return {"a": 1}

    async def ask(channel: Channel[Any]) -> Any:
        channel.tell(ForgetPrefixes("m"))
        with pytest.raises(UnknownModel, match="no GetUses"):
            await channel.call(GetUses())
        return await channel.call(Scrape())

    assert over_channel(answer, ask) == {"a": 1}
    assert [record.getMessage() for record in caplog.records] == ["message failed name=ForgetPrefixes"]


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize("what", ["\udc80", object(), asyncio.CancelledError()])
def test_an_answer_that_cannot_be_sent_fails_alone(what: Any, is_slow: bool) -> None:
    async def later() -> Any:
        await asyncio.sleep(0)
        if isinstance(what, BaseException):
            raise what
        return what

    def answer(message: FromFirst) -> Any:
        if isinstance(message, Scrape):
            return {"a": 1}
        return later() if is_slow or isinstance(what, BaseException) else what

    async def ask(channel: Channel[Any]) -> Any:
        with pytest.raises(EngineError):
            await asyncio.wait_for(channel.call(GetUses()), 5)
        return await channel.call(Scrape())

    assert over_channel(answer, ask) == {"a": 1}


@pytest.mark.parametrize("question", [Unserve(cast(Any, "0"), 1.0), LoadOnDemand("m"), GetUses()])
def test_a_message_of_a_wrong_type_fails_alone(question: Question[Any]) -> None:
    """A field that does not fit, a message for the other end, an answer that is not what was asked for."""

    async def ask(channel: Channel[Any]) -> None:
        with pytest.raises((EngineError, msgspec.ValidationError), match="ValidationError|Expected"):
            await channel.call(question)
        assert await channel.call(Scrape()) == {"a": 1}

    over_channel(lambda message: {"a": 1}, ask)


def test_a_question_to_a_process_that_is_gone_is_an_error() -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    with pytest.raises(EngineStopped):
        over_channel(lambda message: never(), lambda channel: channel.call(Scrape()), hang_up=True)


def test_another_process_asks_for_the_responses_of_process_0() -> None:
    state = ServerState(config=ServerConfig())
    stored = StoredResponse(b"{}", b"[]", b"x")

    async def ask(channel: Channel[Any]) -> None:
        remote = RemoteStore(channel)
        await remote.put("a", "resp_1", stored)
        assert await remote.get("a", "resp_1") == await state.responses.get("a", "resp_1") == stored
        assert await remote.get("b", "resp_1") is None
        assert await remote.delete("a", "resp_1")
        assert not await remote.delete("a", "resp_1")

    over_channel(partial(_answer_process, Forwarded(Site().app), state), ask, received=ToFirst)


def observe(metrics: ServerMetrics, values: list[float]) -> None:
    meter = metrics.meters[0]
    for value in values:
        meter.observe("time_to_first_token_seconds", value)
        meter.observe("request_generation_tokens", 100 * value)
        meter.counts["generation_tokens"] += 7
        meter.finished["length"] += 1
        metrics.count_http("POST", "/x", 200 if value < 1 else 503, is_gone=value > 2, error_code="c")
        metrics.num_active += 1


def test_the_sum_over_processes_is_what_one_process_would_have_counted() -> None:
    client = FakeClient()
    one, *parts = [ServerMetrics("infer") for _ in range(4)]
    for metrics in (one, *parts):
        metrics.add("m", client)
    for number, part in enumerate(parts):
        values = [0.25 * number, 0.5 + number, 4.0]
        observe(part, values)
        observe(one, values)
    assert parts[0].sum_with([part.snapshot() for part in parts[1:]]).text() == one.text()
    assert parts[0].sum_with([]).text() == parts[0].text()


def test_counts_are_summed_under_the_labels_that_process_0_chose() -> None:
    """A model is loaded again while a request holds the old one in process 0, but none in the other."""
    zero, other = ServerMetrics("infer"), ServerMetrics("infer")
    old = zero.add("m", FakeClient())
    label = zero.add("m", FakeClient()).labels[1]
    other.add("m", FakeClient(), label=label).counts["generation_tokens"] += 1000
    zero.remove(old)
    (meter,) = zero.sum_with([other.snapshot()]).meters
    assert (meter.labels, meter.counts["generation_tokens"]) == (("m", "1"), 1000)


def test_what_is_about_the_whole_server_is_answered_by_process_0() -> None:
    keys: dict[str, Any] = {"admin_key": "root", "api_key": ("k",)}
    first, other = Site(**keys), Site(**keys)
    app = build_app(other.state, ask=Forwarded(first.app).answer)

    def ask(method: str, path: str, key: str, **options: Any) -> httpx.Response:
        other.app = app
        return other.request(method, path, headers={"authorization": f"Bearer {key}"}, **options)

    first.state.board.is_draining = True
    health = ask("GET", "/health", "k")
    assert health.status_code == 503 and "draining" in health.json()["error"]["message"]
    drained = ask("POST", "/admin/drain", "root", json={"drain": False})
    assert drained.json() == {"is_draining": False, "num_active": 0} and not first.state.board.is_draining
    assert ask("POST", "/admin/drain", "k", json={}).status_code == 401
    assert ask("POST", "/admin/nothing", "root", json={}).status_code == 404
    page = ask("GET", "/metrics", "k").text
    assert "infer_http_requests_total{" not in page, "process 0 has served nothing itself"
    counted = app.state.metrics.text().decode()
    assert 'infer_http_requests_total{method="POST",route="/admin/drain",status="200"} 1.0' in counted
    assert 'route="unmatched",status="404"' in counted


@pytest.mark.parametrize(("leaves", "answers"), [(True, True), (True, False), (False, True)])
def test_process_0_hears_of_a_client_that_leaves_another_process(leaves: bool, answers: bool) -> None:
    """A route that then sends nothing, as one that reads the connection does, is no error."""
    heard: list[str] = []

    async def first(scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = SimpleNamespace(path=scope["path"])
        heard.append((await receive())["body"].decode())
        async with asyncio.timeout(5):
            heard.append((await receive())["type"])
        if not answers:
            return
        await send({"type": "http.response.start", "status": 499, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def live() -> None:
        forwarded, is_gone = Forwarded(first), asyncio.Event()
        bodies = [{"type": "http.request", "body": b"load it"}]

        async def receive() -> types.Message:
            if bodies:
                return bodies.pop()
            await is_gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: types.Message) -> None:
            heard.append(str(message.get("status", "")))

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/admin/models/load",
            "query_string": b"",
            "headers": [],
        }
        asking = asyncio.create_task(Forward(first, forwarded.answer)(scope, receive, send))
        while not heard:
            await asyncio.sleep(0)
        if leaves:
            is_gone.set()
            await asking
            assert heard == ["load it", "http.disconnect"] + ["499", ""] * answers
        else:
            await asyncio.sleep(0.05)
            assert heard == ["load it"]
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        assert not forwarded._left

    asyncio.run(live())


def engine_at(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """What an engine does first: it connects and says that it is ready."""
    engine = context.socket(zmq.PAIR)
    engine.linger = 0
    engine.connect(endpoint)
    engine.send(encode(Ready(EngineStats())))
    return engine


def test_an_engine_that_died_before_its_ready_was_read_is_known_to_be_dead(tmp_path: Path) -> None:
    async def main() -> list[tuple[bool, str]]:
        feed, engines = EngineFeed(), []
        feed.spawned(f"ipc://{tmp_path}/1")
        engines.append(engine_at(context, f"ipc://{tmp_path}/1"))
        feed.down("killed")  # on the channel, while `Ready` is on its way through the socket
        first, _ = await asyncio.wait_for(feed.next(), 10)
        feed.spawned(f"ipc://{tmp_path}/2")
        engines.append(engine_at(context, f"ipc://{tmp_path}/2"))
        second, _ = await asyncio.wait_for(feed.next(), 10)
        links = [(link.exited.is_set(), link.exit_reason) for link in (first, second)]
        feed.spawned(f"ipc://{tmp_path}/3")  # the end of the second is not told
        links.append((second.exited.is_set(), second.exit_reason))
        feed.close()
        for end in (first, second):
            await end.close()
        for engine in engines:
            engine.close()
        return links

    with zmq.Context() as context:
        links = asyncio.run(main())
    assert links == [(True, "killed"), (False, ""), (True, "the engine process has ended")]


class FewWorkers:
    """In place of `Workers`: notes what it is told, and cannot serve."""

    def __init__(self, failure: BaseException) -> None:
        self.failure = failure
        self.forgotten: list[int] = []

    def new_engines(self, number: int) -> list[int]:
        return list(range(7, 7 + number))

    async def serve(self, model: ServedModel, config: EngineConfig, labels: list[str]) -> None:
        assert labels == ["0", "1"]
        raise self.failure

    def tell(self, message: ProcessMessage) -> None:
        assert isinstance(message, Gone)
        self.forgotten += message.engines


@pytest.mark.parametrize("failure", [EngineError("worker 1: no tokenizer"), asyncio.CancelledError()])
def test_a_load_that_another_process_cannot_serve_leaves_nothing(failure: BaseException) -> None:
    engines, workers = [FakeClient(), FakeClient()], FewWorkers(failure)
    state = ServerState(config=ServerConfig(replicas=2))
    fleet = Fleet(state, ServerMetrics("infer"), None, cast(Workers, workers))

    async def start(config: EngineConfig, shared: Any, records: Any) -> Any:
        return SimpleNamespace(name="m", template_warning=None, has_chat_template=False), list(engines)

    fleet._starter._start_processes = start  # type: ignore[method-assign]
    with pytest.raises(type(failure)):
        asyncio.run(fleet.load("m", EngineConfig.from_knobs(model="x")))
    assert all(engine.is_closed for engine in engines) and not fleet.metrics.meters
    assert workers.forgotten == [7, 8] and not fleet.state.models


def test_an_engine_that_ended_before_its_start_was_read_is_no_error(tmp_path: Path) -> None:
    async def main() -> None:
        worker = Worker(Site().state, ServerMetrics("infer"), [])
        worker.answer(Spawned(0, f"ipc://{tmp_path}/gone/engine-0"))
        worker.answer(Down(0, "no such model"))
        await worker.answer(Gone([0]))

    asyncio.run(main())


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_an_engine_that_is_gone_leaves_nothing_in_an_api_process(tmp_path: Path) -> None:
    async def main() -> None:
        state = Site().state
        worker = Worker(state, ServerMetrics("infer"), [])
        (model,) = state.models.values()
        model.engines = [3]
        before = num_files()
        for engine in range(4):  # none of them becomes ready
            worker.answer(Spawned(engine, f"ipc://{tmp_path}/{engine}"))
        waiting = asyncio.create_task(worker._feeds[2].next())
        await asyncio.sleep(0)
        await worker.answer(Gone([0, 1]))
        assert list(worker._feeds) == [2, 3] and list(state.models.values()) == [model]
        await worker.answer(Gone([2, 3]))
        with pytest.raises(EngineStopped, match="the engine was closed"):
            await waiting
        assert not state.models, "its load has failed elsewhere"
        assert num_files() == before

    asyncio.run(main())


class Answering:
    """In place of the `Channel` to an API process: answers after an event, or is closed."""

    def __init__(self, *, is_closed: bool = False) -> None:
        self.is_awake = asyncio.Event()
        self.is_closed = is_closed

    async def call(self, question: Question[Any]) -> Any:
        if self.is_closed:
            raise EngineStopped("a process of the server has ended")
        await self.is_awake.wait()
        return {}

    async def run(self) -> None:
        assert self.is_closed


def processes_of(*channels: Answering, code: int = 0) -> Workers:
    """A server's other processes: every child has ended with this code when it is waited for."""
    workers = Workers(ServerConfig(), Board(len(channels) + 1))
    child = cast(Popen[bytes], SimpleNamespace(wait=lambda timeout: code, pid=42))
    for number, channel in enumerate(channels, 1):
        workers._processes.append(_Process(number, child, cast(Channel[Any], channel)))
    return workers


def test_a_process_that_hangs_is_left_out_of_a_scrape_and_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers_module, "SCRAPE_TIMEOUT", 0.01)

    async def main() -> list[int]:
        quick, hanging = Answering(), Answering()
        quick.is_awake.set()
        workers = processes_of(quick, hanging)
        counts = [len(await workers.ask_all(Scrape())), len(await workers.ask_all(Scrape()))]
        hanging.is_awake.set()
        return [*counts, len(await workers.ask_all(Scrape()))]

    assert asyncio.run(main()) == [1, 1, 2]
    assert [record.getMessage() for record in caplog.records] == ["API process does not answer process=2"]


def test_a_process_that_hangs_ends_a_call_with_its_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers_module, "PING_INTERVAL", 0.01)
    monkeypatch.setattr(workers_module, "PING_TIMEOUT", 0.05)

    async def main() -> None:
        quick, hanging = Answering(), Answering()
        quick.is_awake.set()
        workers = processes_of(quick, hanging)
        async with asyncio.timeout(5):
            for _ in range(2):
                with pytest.raises(
                    EngineStopped, match=r"API process 2 \(pid 42\) has not answered for 0.05 s"
                ):
                    await workers.call(GetUses())
            hanging.is_awake.set()
            assert await workers.call(GetUses()) == [{}, {}]

    asyncio.run(main())
    assert [record.getMessage() for record in caplog.records] == ["API process does not answer process=2"]


def test_a_slow_answer_of_a_process_that_does_not_hang_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "PING_INTERVAL", 0.01)
    monkeypatch.setattr(workers_module, "PING_TIMEOUT", 0.05)

    class Busy(Answering):
        async def call(self, question: Question[Any]) -> Any:
            return None if isinstance(question, CheckAlive) else await super().call(question)

    async def main() -> list[Any]:
        process = Busy()
        asyncio.get_running_loop().call_later(0.3, process.is_awake.set)
        return await processes_of(process).call(Unserve([0], 60.0))

    assert asyncio.run(main()) == [{}]


def test_a_process_that_starts_with_the_server_has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers nothing before it has imported everything, which may take long on a busy machine."""
    monkeypatch.setattr(workers_module, "PING_INTERVAL", 0.01)
    monkeypatch.setattr(workers_module, "PING_TIMEOUT", 0.05)

    async def main() -> list[Any]:
        process = Answering()
        workers = processes_of(process)
        workers._board.is_starting = True
        asyncio.get_running_loop().call_later(0.3, process.is_awake.set)
        return await workers.call(GetUses())

    assert asyncio.run(main()) == [{}]


def test_processes_that_die_together_in_a_load_are_one_loss_with_its_exit_code() -> None:
    async def main() -> None:
        workers = processes_of(Answering(is_closed=True), Answering(is_closed=True), code=4)
        model = ServedModel(name="m", encoder=cast(Any, None), clients=[], created=1)
        load = workers.serve(model, EngineConfig.from_knobs(model="x"), [])
        runs = [workers._run(process) for process in workers._processes]
        failure, *ends = await asyncio.gather(load, *runs, return_exceptions=True)
        assert ends == [None, None] and isinstance(failure, EngineLost)
        assert re.fullmatch("API process [12] ended with exit code 4", str(failure))

    asyncio.run(main())


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, loop_factory()])
def test_a_tls_handshake_that_never_ends_is_cut_off(
    make_loop: Callable[[], asyncio.AbstractEventLoop] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert HEAD_TIMEOUT_S == 15.0
    monkeypatch.setattr("infer.server.processes.accept.HEAD_TIMEOUT_S", 0.2)

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            board = Board(2)
            acceptor = Acceptor(listener, board, Greeting, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(b"\x16\x03\x01\x02\x00")  # the first bytes of a handshake
            async with asyncio.timeout(5):
                assert await reader.read() == b""
            writer.close()
            while board.has_more_connections:
                await asyncio.sleep(0.01)
            acceptor.close()

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(main())
