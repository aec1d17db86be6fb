"""The HTTP client of the benchmarks: records the arrival of each chunk, and the number of tokens.

    Endpoint ──► Client ──► Connection: bytes ──► HTTP parser (C) ──► EventReader ──► RequestTrace

A client in Python is the bottleneck of a benchmark long before a server is, so HTTP and JSON are parsed in C,
and all bytes of one read share one timestamp (`benchmarks/client_speed.py` measures the cost). The number of
tokens is the server's `usage`; frames are counted only if a server sends none, and the trace says so.

No behaviour of a server ends a run: a refusal, a hang-up or garbage becomes the `error` of its trace.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import unquote, urlsplit

import httptools
import orjson

from infer.bench.metrics import RequestTrace
from infer.errors import ConfigError

Clock = Callable[[], float]

MAX_BODY = 1 << 26  # largest answer that is not an event stream, in bytes
MAX_EVENT = 1 << 24
CONNECT_S = 10.0
PAGE_S = 30.0  # timeout for a page, which a busy server may deliver late


class NotReady(ConfigError):
    """There is no server, or it is not ready; a later attempt may succeed."""


class BrokenAnswer(Exception):
    """The answer is unusable; the message goes into the trace, and a refusal has a status and a body."""

    def __init__(self, message: str, status: int | None = None, body: bytes = b"") -> None:
        super().__init__(message)
        self.status, self.body = status, body


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The address of the server, and the fields and headers of every request."""

    url: str  # http://host:port, https://host:port or unix:///path/of/socket
    model: str = ""
    api_key: str | None = None
    timeout_s: float = 600.0
    extra: Mapping[str, Any] = field(default_factory=dict)  # fields of every body: temperature, ignore_eos
    has_usage: bool = True  # True: ask for usage at the end of streams

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            (parts.hostname or "").encode("idna")
            parts.port  # noqa: B018  (reading it checks it)
            if parts.scheme in ("http", "https"):
                if not parts.hostname:
                    raise ValueError("it names no host")
                if any(map(str.isspace, self.url)):
                    raise ValueError("there is white space in it")
        except ValueError as error:
            raise ConfigError(
                f"--url must be an address such as http://127.0.0.1:8000, got {self.url!r}: {error}"
            ) from None
        if parts.scheme not in ("http", "https", "unix"):
            raise ConfigError(f"--url must start with http://, https:// or unix://, got {self.url!r}")

    @property
    def is_here(self) -> bool:
        """True if the server is on this machine, as far as its address shows."""
        parts = urlsplit(self.url)
        host = parts.hostname or ""
        return parts.scheme == "unix" or host in ("localhost", "::1") or host.startswith("127.")

    def message(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, headers: Sequence[str] = ()
    ) -> bytes:
        """Return an HTTP request as bytes; `headers` are further lines of its head."""
        parts = urlsplit(self.url)
        base = "" if parts.scheme == "unix" else parts.path.rstrip("/").removesuffix("/v1")
        payload = b"" if body is None else orjson.dumps(body)
        lines = [f"{method} {base}{path} HTTP/1.1", f"host: {parts.netloc or 'localhost'}"]
        lines += ["content-type: application/json", f"content-length: {len(payload)}"]
        lines += headers
        if self.api_key is not None:
            lines.append(f"authorization: Bearer {self.api_key}")
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + payload

    def body(self, prompt: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
        """Return the body of a streamed request."""
        made = {"model": self.model, **prompt, "max_tokens": max_tokens, "stream": True, **self.extra}
        return made | ({"stream_options": {"include_usage": True}} if self.has_usage else {})


class EventReader:
    """Reads one answer piece by piece into a trace."""

    def __init__(self, trace: RequestTrace, *, keeps_text: bool = False) -> None:
        self.trace = trace
        self.is_done = False
        self.pieces: list[str] = []
        self._keeps_text = keeps_text
        self._rest = b""

    def feed(self, data: bytes, now: float) -> None:
        """Process bytes of the body that arrived at `now`."""
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        if len(self._rest) > MAX_EVENT:
            raise BrokenAnswer("malformed stream: an event without end")
        for event in events:
            self._take(event, now)

    def _take(self, event: bytes, now: float) -> None:
        if event.startswith(b"data:"):
            payload = event[5:].strip()
        else:  # a comment, an event name, or lines in another order
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if not lines:
                return
            payload = b"\n".join(lines)
        if payload == b"[DONE]":
            self.is_done = True
        else:
            self._parse(payload, now)

    def _parse(self, payload: bytes, now: float) -> None:
        try:
            event = orjson.loads(payload)
            if event.get("error"):
                raise BrokenAnswer(f"error event: {error_message(event)}")
            if (usage := event.get("usage")) is not None:
                self._count(usage)
            for choice in event.get("choices") or []:
                self._take_choice(choice, now)
        except (ValueError, AttributeError, TypeError, KeyError) as error:
            raise BrokenAnswer(f"malformed event: {type(error).__name__} in {payload[:60]!r}") from None

    def _take_choice(self, choice: Mapping[str, Any], now: float) -> None:
        delta, goes_on = choice.get("delta"), choice.get("finish_reason") is None
        if delta is None:
            text = choice["text"]
            is_piece = bool(text) or goes_on
        else:
            text = delta.get("content") or ""
            others = ("reasoning_content", "reasoning", "tool_calls")
            # the role comes before the first token, and the finish reason may come after the last
            is_piece = bool(text) or any(map(delta.get, others)) or ("role" not in delta and goes_on)
        if is_piece:
            self.trace.chunks.append(now)
        if text and self._keeps_text:
            self.pieces.append(str(text))

    def take_whole(self, body: bytes, now: float) -> None:
        """Process an answer that came in one piece, from a server that does not stream."""
        try:
            answer = orjson.loads(body)
            choice = answer["choices"][0]
            text = choice["text"] if "text" in choice else choice["message"]["content"] or ""
            self._count(answer["usage"])
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise BrokenAnswer(f"malformed answer: {type(error).__name__} in {body[:60]!r}") from None
        self.trace.chunks.append(now)
        self.pieces.append(str(text))
        self.is_done = True

    def finish(self) -> None:
        """Check, at the end of the body, that the answer is complete."""
        trace = self.trace
        if not self.is_done and not trace.is_counted:
            raise BrokenAnswer(f"the stream ended early, after {len(trace.chunks)} chunks")
        if not trace.chunks:
            raise BrokenAnswer("the stream held no tokens")
        if not trace.is_counted:
            trace.num_output = len(trace.chunks)

    def _count(self, usage: Mapping[str, Any]) -> None:
        trace = self.trace
        trace.num_prompt = int(usage["prompt_tokens"])
        trace.num_output = int(usage.get("completion_tokens") or 0)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        trace.num_cached = None if cached is None else int(cached)
        trace.is_counted = True


def error_message(body: Any) -> str:
    """Return the message of an OpenAI error body, however it is nested."""
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict):
        error = error.get("message")
    return str(error if error is not None else body)[:200]


class Connection(asyncio.Protocol):
    """One connection, which carries one request at a time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._reader: EventReader | None = None  # None while a plain body is read
        self._ended: asyncio.Future[None] | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._is_stream = True
        self._body = b""
        self._now = 0.0
        self.can_reuse = False
        self.has_answered = False  # True if any byte of the last answer has arrived
        self.timing = ""  # `server-timing` header of the last answer

    @property
    def is_open(self) -> bool:
        """True if another request may be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, message: bytes, reader: EventReader | None = None) -> bytes:
        """Send a request and read its answer to the end; without a reader, return a plain body."""
        assert self._transport is not None
        self._reader, self._body, self._is_stream, self.can_reuse = reader, b"", True, False
        self.has_answered, self.timing = False, ""
        self._parser = httptools.HttpResponseParser(self)
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        try:
            await self._ended
        finally:
            self._reader = self._ended = None
            if not self.can_reuse:
                self.close()
        return self._body

    def close(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    # -- called by the transport --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the request in flight, if there is one."""
        self._transport = None
        count = len(self._reader.trace.chunks) if self._reader is not None else 0
        self._fail(BrokenAnswer(f"hung up after {count} chunks"))

    def data_received(self, data: bytes) -> None:
        """Parse incoming bytes; all bytes of one read get the same timestamp."""
        if self._ended is None or self._parser is None:
            self.close()  # an answer without a request
            return
        self._now = self._clock()
        self.has_answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            is_known = isinstance(cause, BrokenAnswer)
            self._fail(cause if is_known else BrokenAnswer(f"malformed answer: {cause}"))
        except httptools.HttpParserError as error:
            self._fail(BrokenAnswer(f"malformed HTTP: {error}"))

    # -- called by the parser -----------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """Detect an event stream, and store the server's timing of its stages."""
        if name.lower() == b"content-type":
            self._is_stream = b"event-stream" in value
        elif name.lower() == b"server-timing":
            self.timing = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        """Process a piece of the answer."""
        assert self._parser is not None
        if self._is_stream and self._reader is not None and self._parser.get_status_code() == 200:
            self._reader.feed(body, self._now)
        else:
            self._body += body
            if len(self._body) > MAX_BODY:
                raise BrokenAnswer("the answer is too large")

    def on_message_complete(self) -> None:
        """End the request: the answer is complete."""
        assert self._parser is not None and self._ended is not None
        status = self._parser.get_status_code()
        if status != 200:
            try:
                message = error_message(orjson.loads(self._body))
            except ValueError:
                message = self._body[:100].decode(errors="replace")
            raise BrokenAnswer(f"HTTP {status}: {message}", status, self._body)
        if self._reader is not None:
            if not self._is_stream:
                self._reader.take_whole(self._body, self._now)
            self._reader.finish()
        self.can_reuse = self._parser.should_keep_alive()
        if not self._ended.done():
            self._ended.set_result(None)

    def _fail(self, error: BaseException | None) -> None:
        if self._ended is not None and not self._ended.done() and error is not None:
            self._ended.set_exception(error)


class Client:
    """Connections to one server, reused if the server allows it."""

    def __init__(self, endpoint: Endpoint, clock: Clock = time.perf_counter) -> None:
        self.endpoint = endpoint
        self.clock = clock
        self._idle: list[Connection] = []

    async def ask(self, message: bytes, trace: RequestTrace, *, keeps_text: bool = False) -> str:
        """Send one request and return the text if it is kept; errors are in the trace."""
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

    async def send(self, message: bytes) -> tuple[int, bytes]:
        """Send one request; return the status and body of its answer, or raise an error if there is none."""
        try:
            async with asyncio.timeout(self.endpoint.timeout_s):
                return 200, await self._exchange(message, None)
        except BrokenAnswer as error:
            if error.status is None:
                raise
            return error.status, error.body

    async def _exchange(self, message: bytes, reader: EventReader | None) -> bytes:
        while True:
            while self._idle and not self._idle[-1].is_open:
                self._idle.pop()
            is_reused = bool(self._idle)
            connection = self._idle.pop() if is_reused else await self.connect()
            try:
                return await connection.ask(message, reader)
            except BrokenAnswer:
                if not is_reused or connection.has_answered:
                    raise  # otherwise the server closed an idle connection before it saw the request
            finally:
                if connection.can_reuse:
                    self._idle.append(connection)

    async def connect(self) -> Connection:
        """Return a new connection."""
        loop, parts = asyncio.get_running_loop(), urlsplit(self.endpoint.url)
        async with asyncio.timeout(CONNECT_S):
            if parts.scheme == "unix":
                path = unquote(parts.netloc + parts.path)
                return (await loop.create_unix_connection(lambda: Connection(self.clock), path))[1]
            is_tls = parts.scheme == "https"
            host, port = parts.hostname or "localhost", parts.port or (443 if is_tls else 80)
            secure = ssl.create_default_context() if is_tls else None
            return (await loop.create_connection(lambda: Connection(self.clock), host, port, ssl=secure))[1]

    def close(self) -> None:
        """Close all idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()


async def fetch(endpoint: Endpoint, path: str) -> bytes:
    """Return the body of a GET; raises ConfigError on failure."""
    connection: Connection | None = None
    try:
        async with asyncio.timeout(PAGE_S):
            connection = await Client(endpoint).connect()
            return await connection.ask(endpoint.message("GET", path))
    except BrokenAnswer as error:
        kind = NotReady if (error.status or 0) >= 500 else ConfigError
        page = endpoint.url.rstrip("/").removesuffix("/v1") + path
        raise kind(f"cannot read {page}: {error}{_advice(endpoint, error.status)}") from None
    except OSError as error:  # includes timeouts
        raise NotReady(
            f"no server answers at {endpoint.url}: {_reason(error)}; is the server running?"
        ) from None
    finally:
        if connection is not None:
            connection.close()


def _advice(endpoint: Endpoint, status: int | None) -> str:
    """Return what to do about a refusal."""
    if status in (401, 403):
        return "; is this key right?" if endpoint.api_key else "; give the server's key with --api-key"
    return "; is this an OpenAI-compatible server?" if status in (None, 404, 405) else ""


def _reason(error: OSError) -> str:
    """Return the cause in a few words; asyncio's own message repeats the address."""
    if isinstance(error, TimeoutError):
        return f"no answer within {CONNECT_S:g} s"
    known = error.errno is not None and error.errno > 0
    return os.strerror(error.errno).lower() if known and error.errno else str(error).lower()
