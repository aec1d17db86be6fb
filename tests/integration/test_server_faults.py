"""A bad day on loopback: slow, rude and greedy clients. Afterwards every book must balance."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn

from infer.client.client import InProcessClient
from infer.config.server import ServerConfig
from infer.config.settings import EngineConfig
from infer.engine.build import build_engine
from infer.frontend.llm import LLM
from infer.frontend.open_model import open_model
from infer.sampling.params import SamplingParams
from infer.server.app import build_app
from infer.server.connection import MAX_HEAD_BYTES, GuardedConnection
from infer.server.state import ServedModel, ServerState
from tests.support.server_process import wait_until

JSON = {"content-type": "application/json"}
KNOBS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "block_size": 4, "num_blocks": 128}
HEAD_TIMEOUT_S = 0.4
MAX_WAITING = 6
NUM_CROWD = 70


class Impatient(GuardedConnection):
    """The guarded connection, with less patience than in life."""

    head_timeout_s = HEAD_TIMEOUT_S


@dataclass(slots=True)
class Live:
    port: int
    state: ServerState
    engine: InProcessClient
    server: uvicorn.Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        connection.settimeout(10)
        return connection

    def is_quiet(self) -> bool:
        stats = self.engine.stats()
        busy = stats.num_running + stats.num_waiting + stats.num_used_blocks + self.state.board.num_active
        return busy == 0


@pytest.fixture(scope="module")
def oracle(checkpoint: str) -> LLM:
    return LLM(checkpoint, **KNOBS)


@pytest.fixture(scope="module")
def module_live(checkpoint: str) -> Iterator[Live]:
    config = EngineConfig.from_knobs(model=checkpoint, max_batch_size=2, max_queue=MAX_WAITING, **KNOBS)
    encoder, loaded = open_model(config, show_progress=False)
    engine = InProcessClient(build_engine(config, loaded))
    model = ServedModel(name="tiny", encoder=encoder, clients=[engine], created=0)
    server_config = ServerConfig(max_body_size="64KiB", access_log=False)
    state = ServerState(config=server_config, models={"tiny": model}, default_model="tiny")
    options = uvicorn.Config(
        build_app(state), port=0, http=Impatient, ws="none", log_config=None, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(options)
    listener = options.bind_socket()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    wait_until(lambda: server.started)
    yield Live(listener.getsockname()[1], state, engine, server)
    server.should_exit = True
    thread.join()
    asyncio.run(engine.close())


@pytest.fixture
def live(module_live: Live) -> Iterator[Live]:
    """The server; whatever a test did to it, it must be quiet again soon after."""
    yield module_live
    wait_until(module_live.is_quiet)
    assert httpx.get(f"{module_live.url}/health").status_code == 200


def body_of(prompt: str, num_tokens: int, **fields: object) -> bytes:
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    return json.dumps(body | fields).encode()


def head_of(length: int) -> bytes:
    lines = ("POST /v1/completions HTTP/1.1", "host: x", "content-type: application/json")
    return "\r\n".join([*lines, f"content-length: {length}", "", ""]).encode()


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def num_open_sockets() -> int:
    count = 0
    for fd in open_files():
        with contextlib.suppress(OSError):  # closed in this moment
            count += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    return count


def open_files() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]


def offline(oracle: LLM, prompt: str, num_tokens: int) -> str:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return oracle.generate(prompt, params)[0].text


@pytest.mark.parametrize("sent", [b"", b"POST /v1/compl", b"GET /health HTTP/1.1\r\nhost: x\r\n"])
def test_a_head_that_never_ends_is_cut_off(live: Live, sent: bytes) -> None:
    with live.connect() as connection:
        started = time.monotonic()
        connection.sendall(sent)
        assert read_all(connection) == b""
        assert time.monotonic() - started < HEAD_TIMEOUT_S + 15


def test_a_head_that_trickles_in_is_cut_off_all_the_same(live: Live) -> None:
    with live.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        started = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - started < 20:
                connection.sendall(b"x-a: b\r\n")
                time.sleep(0.05)
        assert time.monotonic() - started < 20


def test_a_second_request_on_a_connection_is_timed_as_well(live: Live) -> None:
    with live.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /health HT")
        assert read_all(connection) == b""


def test_a_head_without_measure_is_refused(live: Live) -> None:
    with live.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        answer = b""
        try:
            for _ in range(400):
                connection.sendall(b"x-a: " + b"b" * 1000 + b"\r\n")
            answer = read_all(connection)
        except OSError:  # it was closed while we were still talking
            pass
        assert answer == b"" or answer.startswith(b"HTTP/1.1 431")
    assert MAX_HEAD_BYTES < 400 * 1000


def test_many_silent_connections_keep_no_client_out(live: Live) -> None:
    silent = [live.connect() for _ in range(150)]
    try:
        assert httpx.get(f"{live.url}/health").status_code == 200
        wait_until(lambda: len(live.server.server_state.connections) <= 2)
    finally:
        for connection in silent:
            connection.close()


def test_a_body_bomb_in_chunks_is_stopped_at_the_limit(live: Live) -> None:
    with live.connect() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        chunk = b"4000\r\n" + b"x" * 0x4000 + b"\r\n"
        with pytest.raises(OSError):
            for _ in range(2000):  # 32 MiB
                connection.sendall(chunk)
    assert httpx.get(f"{live.url}/health").status_code == 200


def test_a_declared_bomb_is_refused_unread(live: Live) -> None:
    with live.connect() as connection:
        connection.sendall(head_of(10**12))
        assert read_all(connection).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    "stage", ["in the head", "in the body", "after the body", "while waiting", "while running"]
)
def test_a_client_that_leaves_at_any_stage_leaves_nothing_behind(
    live: Live, oracle: LLM, stage: str, is_stream: bool
) -> None:
    body = body_of("The river", 100, stream=is_stream)
    whole = head_of(len(body)) + body
    others = [live.connect() for _ in range(2)] if stage == "while waiting" else []
    for other in others:  # two run at once: the next must wait
        other.sendall(whole)
    if others:
        wait_until(lambda: live.engine.stats().num_running == 2 or live.is_quiet())
    with live.connect() as connection:
        cut = {"in the head": 20, "in the body": len(whole) - 5}.get(stage, len(whole))
        connection.sendall(whole[:cut])
        if stage == "while running":
            if is_stream:
                assert connection.recv(65536).startswith(b"HTTP/1.1 200")
            else:
                wait_until(lambda: live.engine.stats().num_running > 0)
    for other in others:
        other.close()
    wait_until(live.is_quiet)
    answer = httpx.post(f"{live.url}/v1/completions", content=body_of("The river", 8), headers=JSON)
    assert answer.json()["choices"][0]["text"] == offline(oracle, "The river", 8)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("number", [1, 2])
def test_a_client_that_only_stops_sending_gets_its_whole_answer(
    live: Live, oracle: LLM, stream: bool, number: int
) -> None:
    body = body_of("a prompt", 40, stream=stream)
    with live.connect() as connection:
        connection.sendall((head_of(len(body)) + body) * number)
        connection.shutdown(socket.SHUT_WR)
        answers = read_all(connection).split(b"HTTP/1.1 200 OK")[1:]  # to the end: the server closes it
    assert len(answers) == number
    for answer in answers:
        if stream:
            assert answer.count(b"data: ") >= 40 and answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        else:
            text = json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"]
            assert text == offline(oracle, "a prompt", 40)


def test_a_full_queue_refuses_with_a_time_to_come_back(live: Live, oracle: LLM) -> None:
    num_tokens, prompts = 60, [f"question {i}" for i in range(24)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        contents = [body_of(prompt, num_tokens) for prompt in prompts]
        url = f"{live.url}/v1/completions"
        answers = list(
            pool.map(lambda each: httpx.post(url, content=each, headers=JSON, timeout=60), contents)
        )
    refused = [answer for answer in answers if answer.status_code == 503]
    assert refused and all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    for prompt, answer in zip(prompts, answers, strict=True):
        if answer.status_code != 503:
            assert answer.json()["choices"][0]["text"] == offline(oracle, prompt, num_tokens)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # sockets the clients dropped
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_crowd_of_which_a_third_hangs_up_leaves_the_others_with_their_answers(
    live: Live, oracle: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that is refused comes again; one that stays gets the offline answer."""
    monkeypatch.setattr(Impatient, "head_timeout_s", 10.0)  # all of them connect in the same moment
    rng = random.Random(0)
    prompts = [f"number {i % 7}" for i in range(NUM_CROWD)]
    lengths = [rng.choice((2, 4, 8)) for _ in prompts]
    leaves_after = [rng.uniform(0, 2) if i % 3 == 0 else None for i in range(len(prompts))]
    before = num_open_sockets()

    async def one(client: httpx.AsyncClient, where: int) -> str | None:
        content = body_of(prompts[where], lengths[where])
        for _ in range(400):
            try:
                answer = await client.post(f"{live.url}/v1/completions", content=content)
            except (
                httpx.ReadError,
                httpx.RemoteProtocolError,
            ):  # an idle connection ended as it was used again
                continue
            if answer.status_code != 503:
                text: str = answer.json()["choices"][0]["text"]
                return text
            await asyncio.sleep(0.1 + 0.4 * rng.random())  # as long as a client waits that was told to
        raise AssertionError("refused too often")

    async def crowd() -> list[str | None]:
        async def maybe_leave(client: httpx.AsyncClient, where: int) -> str | None:
            try:
                return await asyncio.wait_for(one(client, where), leaves_after[where])
            except TimeoutError:
                return None

        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(limits=limits, timeout=60, headers=JSON) as client:
            return await asyncio.gather(*(maybe_leave(client, i) for i in range(len(prompts))))

    answers = asyncio.run(crowd())
    cases = sorted({*zip(prompts, lengths, strict=True)})
    right = {case: offline(oracle, *case) for case in cases}
    for where, answer in enumerate(answers):
        if leaves_after[where] is None:
            assert answer is not None
        if answer is not None:
            assert answer == right[prompts[where], lengths[where]]
    wait_until(live.is_quiet)
    wait_until(lambda: not live.server.server_state.tasks, 30)

    def all_are_closed() -> bool:
        gc.collect()  # a client that leaves while it connects may drop its socket without closing it
        return num_open_sockets() <= before

    wait_until(all_are_closed, 60)  # the server waits for the request of such a client as long as set above
    assert live.state.models["tiny"].num_held == 0


def test_a_client_that_reads_nothing_is_cut_off(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that nobody takes fill the buffers of the kernel and then ours: neither waits for ever."""
    monkeypatch.setattr(Impatient, "send_timeout_s", 0.5)
    monkeypatch.setattr(Impatient, "head_timeout_s", 60.0)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", live.port))
        connection.settimeout(1.0)

        def is_there() -> bool:
            clients = [getattr(each, "client", None) for each in list(live.server.server_state.connections)]
            return connection.getsockname() in clients

        wait_until(is_there)
        with contextlib.suppress(OSError):  # the server stops reading as well, or has had enough
            for _ in range(500):
                connection.sendall(b"GET /ui HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 20)
        wait_until(lambda: not is_there())


def test_a_client_that_reads_slowly_gets_all_of_its_answer(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a client that takes nothing at all in the time is cut off, however long the rest takes."""
    monkeypatch.setattr(Impatient, "send_timeout_s", 1.0)
    monkeypatch.setattr(Impatient, "head_timeout_s", 60.0)
    number, received = 300, 0
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        connection.connect(("127.0.0.1", live.port))
        connection.sendall(b"GET /ui HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * number)
        connection.settimeout(10)
        started, answers = time.monotonic(), 0
        while answers < number:
            part = connection.recv(65536)
            assert part, f"cut off after {received} bytes and {time.monotonic() - started:.1f} s"
            received += len(part)
            answers += part.count(b"HTTP/1.1 200")
            time.sleep(max(0.0, 2.5 * answers / number - (time.monotonic() - started)))
    assert time.monotonic() - started > 2
