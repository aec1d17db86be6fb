"""Put a workload on a server: the right requests at the right times, and a trace of each.

    closed loop    `concurrency` clients, each takes the next session when its last has ended
    open loop      a session starts at its time, however many are still running

Bodies are made before the clock starts, except those that need an answer first. The client's own CPU time
is part of the result: a client that is busy for most of the run measures itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

import orjson

from infer.bench.metrics import RequestTrace
from infer.bench.sse_client import BrokenAnswer, Clock, Connection, EventReader
from infer.bench.workloads import Session, Turn, Workload
from infer.errors import ConfigError

CONNECT_S = 10.0
PAGE_S = 30.0  # for a page of a server that is busy


class NotReady(ConfigError):
    """No server is there, or it says that it cannot serve yet: a little later it may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where the server is, and what is sent to it with every request."""

    url: str  # http://host:port, https://host:port or unix:///path/of/socket
    model: str = ""
    api_key: str | None = None
    timeout_s: float = 600.0
    extra: Mapping[str, Any] = field(default_factory=dict)  # fields of every body: temperature, ignore_eos
    has_usage: bool = True  # whether to ask for usage at the end of streams

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in ("http", "https", "unix"):
            raise ConfigError(f"--url must start with http://, https:// or unix://, got {self.url!r}")

    @property
    def base(self) -> str:
        """What stands before /v1 in every path."""
        path = "" if urlsplit(self.url).scheme == "unix" else urlsplit(self.url).path
        return path.rstrip("/").removesuffix("/v1")

    @property
    def is_here(self) -> bool:
        """Whether the server is on this machine, as far as its address tells."""
        parts = urlsplit(self.url)
        host = parts.hostname or ""
        return parts.scheme == "unix" or host in ("localhost", "::1") or host.startswith("127.")

    def message(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """An HTTP request as bytes."""
        payload = b"" if body is None else orjson.dumps(body)
        lines = [f"{method} {self.base}{path} HTTP/1.1", f"host: {urlsplit(self.url).netloc or 'localhost'}"]
        lines += ["content-type: application/json", f"content-length: {len(payload)}"]
        if self.api_key is not None:
            lines.append(f"authorization: Bearer {self.api_key}")
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + payload

    def body(self, prompt: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
        """The body of a streamed request."""
        made = {"model": self.model, **prompt, "max_tokens": max_tokens, "stream": True, **self.extra}
        if self.has_usage:
            made["stream_options"] = {"include_usage": True}
        return made


@dataclass(slots=True, kw_only=True)
class LoadResult:
    """What came of one run."""

    traces: list[RequestTrace]
    seconds: float  # from the first request to the last answer
    cpu_share: float  # of one core, used by this client
    lag_s: float  # the most that a request of an open loop was sent too late

    @property
    def counts_frames(self) -> bool:
        """Whether tokens had to be counted by frames."""
        return any(trace.is_ok and not trace.is_counted for trace in self.traces)


class Client:
    """Connections to one server, reused where the server allows it."""

    def __init__(self, endpoint: Endpoint, clock: Clock = time.perf_counter) -> None:
        self.endpoint = endpoint
        self.clock = clock
        self._idle: list[Connection] = []

    async def ask(self, message: bytes, trace: RequestTrace, *, keeps_text: bool = False) -> str:
        """One request; what goes wrong is in the trace. Returns the text where it is kept."""
        reader = EventReader(trace, keeps_text=keeps_text)
        try:
            async with asyncio.timeout(self.endpoint.timeout_s):
                await self._exchange(message, reader)
        except BrokenAnswer as error:
            trace.error = str(error)
        except TimeoutError:
            trace.error = f"no end after {self.endpoint.timeout_s:g} s"
        except OSError as error:
            trace.error = f"cannot connect: {error.strerror or error}"
        trace.ended = self.clock()
        return "".join(reader.pieces)

    async def _exchange(self, message: bytes, reader: EventReader) -> None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                try:
                    return await self._ask_over(connection, message, reader)
                except BrokenAnswer:
                    if connection.has_answered:
                        raise
                # the server had just closed an idle connection, and has not seen the request
        return await self._ask_over(await self.connect(), message, reader)

    async def _ask_over(self, connection: Connection, message: bytes, reader: EventReader) -> None:
        try:
            await connection.ask(message, reader)
        finally:
            if connection.can_reuse:
                self._idle.append(connection)

    async def connect(self) -> Connection:
        """A new connection."""
        loop, parts = asyncio.get_running_loop(), urlsplit(self.endpoint.url)
        async with asyncio.timeout(CONNECT_S):
            if parts.scheme == "unix":
                path = unquote(parts.netloc + parts.path)
                _, made = await loop.create_unix_connection(lambda: Connection(self.clock), path)
            else:
                is_tls = parts.scheme == "https"
                _, made = await loop.create_connection(
                    lambda: Connection(self.clock),
                    parts.hostname or "localhost",
                    parts.port or (443 if is_tls else 80),
                    ssl=ssl.create_default_context() if is_tls else None,
                )
        return made

    def close(self) -> None:
        """Hang up everywhere."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()


class _Run:
    """One workload on its way."""

    def __init__(self, client: Client, workload: Workload, on_done: Callable[[RequestTrace], None]) -> None:
        self._client = client
        self._workload = workload
        self._on_done = on_done
        self._path = "/v1/chat/completions" if workload.is_chat else "/v1/completions"
        self._first = [self._message(self._prompt(session, [])) for session in workload.sessions]
        self.traces: list[RequestTrace] = []
        self.lag_s = 0.0
        self._started = 0.0

    async def go(self) -> None:
        """Run to the end."""
        self._started = self._client.clock()
        if self._workload.arrival.kind == "open":
            await self._open_loop()
        else:
            await self._closed_loop()

    async def _open_loop(self) -> None:
        order = sorted(range(len(self._first)), key=lambda number: self._workload.sessions[number].start_s)
        async with asyncio.TaskGroup() as tasks:
            for number in order:
                due = self._started + self._workload.sessions[number].start_s
                wait = due - self._client.clock()
                if wait > 0:
                    await asyncio.sleep(wait)
                self.lag_s = max(self.lag_s, self._client.clock() - due)
                tasks.create_task(self._session(number))

    async def _closed_loop(self) -> None:
        numbers = iter(range(len(self._first)))

        async def client() -> None:
            for number in numbers:
                await self._session(number)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._workload.arrival.concurrency or len(self._first)):
                tasks.create_task(client())

    async def _session(self, number: int) -> None:
        session = self._workload.sessions[number]
        answers: list[str] = []
        for index, _ in enumerate(session.turns):
            message = self._first[number] if index == 0 else self._message(self._prompt(session, answers))
            trace = RequestTrace(session=number, turn=index, asked=self._client.clock())
            has_more = index + 1 < len(session.turns)
            answers.append(await self._client.ask(message, trace, keeps_text=has_more))
            self.traces.append(trace)
            self._on_done(trace)
            if trace.error is not None:
                break  # there is nothing to go on from

    def _prompt(self, session: Session, answers: Sequence[str]) -> tuple[dict[str, Any], Turn]:
        """The prompt of the turn after these answers."""
        turn = session.turns[len(answers)]
        if not self._workload.is_chat:
            assert len(session.turns) == 1, "only chats have several turns"
            return {"prompt": turn.text or turn.ids}, turn
        messages = [{"role": "system", "content": session.system}] if session.system else []
        for said, answer in zip(session.turns, answers, strict=False):
            messages += [{"role": "user", "content": said.text}, {"role": "assistant", "content": answer}]
        return {"messages": [*messages, {"role": "user", "content": turn.text}]}, turn

    def _message(self, prompt: tuple[dict[str, Any], Turn]) -> bytes:
        endpoint = self._client.endpoint
        return endpoint.message("POST", self._path, endpoint.body(prompt[0], prompt[1].max_tokens))


async def run_workload(
    endpoint: Endpoint,
    workload: Workload,
    *,
    clock: Clock = time.perf_counter,
    on_done: Callable[[RequestTrace], None] = lambda trace: None,
    starts_at: float | None = None,
) -> LoadResult:
    """Run a workload in this event loop; `starts_at` lets several processes begin together."""
    client = Client(endpoint, clock)
    run = _Run(client, workload, on_done)
    if starts_at is not None:
        await asyncio.sleep(max(0.0, starts_at - clock()))
    started, cpu_started = clock(), time.process_time()
    try:
        await run.go()
    finally:
        client.close()
    seconds, cpu_s = clock() - started, time.process_time() - cpu_started
    for trace in run.traces:
        trace.asked -= started
        trace.ended -= started
        trace.chunks = [when - started for when in trace.chunks]
    return LoadResult(
        traces=run.traces, seconds=seconds, cpu_share=cpu_s / seconds if seconds else 0.0, lag_s=run.lag_s
    )


async def fetch(endpoint: Endpoint, path: str) -> bytes:
    """The body of a GET; raises ConfigError if there is none."""
    client = Client(endpoint)
    connection: Connection | None = None
    try:
        async with asyncio.timeout(PAGE_S):
            connection = await client.connect()
            return await connection.get(endpoint.message("GET", path))
    except BrokenAnswer as error:
        kind = NotReady if (error.status or 0) >= 500 else ConfigError
        page = endpoint.url.rstrip("/").removesuffix("/v1") + path
        raise kind(f"cannot read {page}: {error}{_advice(endpoint, error.status)}") from None
    except (OSError, TimeoutError) as error:
        raise NotReady(
            f"no server answers at {endpoint.url}: {_reason(error)}; is the server running?"
        ) from None
    finally:
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.close()


def _advice(endpoint: Endpoint, status: int | None) -> str:
    """What to do about a refusal."""
    if status in (401, 403):
        return "; is this key right?" if endpoint.api_key else "; give the server's key with --api-key"
    return "; is this an OpenAI-compatible server?" if status in (None, 404, 405) else ""


def _reason(error: OSError) -> str:
    """In a few words; asyncio repeats the address in its own."""
    if isinstance(error, TimeoutError):
        return f"no answer within {CONNECT_S:g} s"
    known = error.errno is not None and error.errno > 0
    return os.strerror(error.errno).lower() if known and error.errno else str(error).lower()
