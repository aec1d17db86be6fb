r"""One connection to a server, and what its answers say: when each piece came, how many tokens there were.

    bytes ──► HTTP parser (C) ──► EventReader ──► RequestTrace

A client in Python is the bottleneck of a benchmark long before a server is, so the common event, a piece of
text in the middle of an answer, is recognised by a few substrings and never parsed:

    data: {...,"choices":[{"index":0,"text":" sky","finish_reason":null}]}\n\n   one clock reading, one append

The substrings cannot be part of the text itself: inside a JSON string every quote has a backslash before it.
The first event, the last, errors and usage are parsed. Tokens are counted by the server's `usage`; frames
are counted only where a server has none, and the trace says so.

Nothing that a server does ends a run: a refusal, a hang-up or garbage becomes the `error` of its trace.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, cast

import httptools
import orjson

from infer.bench.metrics import RequestTrace

Clock = Callable[[], float]

MAX_BODY = 1 << 26  # bytes of an answer that is no stream of events
MAX_EVENT = 1 << 24


class BrokenAnswer(Exception):
    """The answer cannot be used; the message is for the trace, the status is that of a refusal."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class EventReader:
    """Reads one answer piece by piece into a trace."""

    def __init__(self, trace: RequestTrace, *, keeps_text: bool = False) -> None:
        self.trace = trace
        self.is_done = False
        self.pieces: list[str] = []
        self._keeps_text = keeps_text
        self._rest = b""

    def feed(self, data: bytes, now: float) -> None:
        """Take bytes of the body that came at `now`."""
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
        else:  # a comment, an event's name, or lines in another order
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if not lines:
                return
            payload = b"\n".join(lines)
        trace = self.trace
        if (
            trace.chunks
            and not self._keeps_text
            and (b'"finish_reason":null' in payload or b'"finish_reason": null' in payload)
            and payload.endswith(b"}")
            and b'"usage":{' not in payload
            and b'"usage": {' not in payload
            and b'"error"' not in payload
        ):
            trace.chunks.append(now)
        elif payload == b"[DONE]":
            self.is_done = True
        else:
            self._parse(payload, now)

    def _parse(self, payload: bytes, now: float) -> None:
        try:
            event = orjson.loads(payload)
            if event.get("error"):
                raise BrokenAnswer(f"error event: {error_message(event)}")
            choices = event.get("choices") or []
            usage = event.get("usage")
            if usage is not None:
                _count(self.trace, usage)
            for choice in choices:
                self._take_choice(choice, now)
        except (ValueError, AttributeError, TypeError, KeyError) as error:
            raise BrokenAnswer(f"malformed event: {type(error).__name__} in {payload[:60]!r}") from None

    def _take_choice(self, choice: Mapping[str, Any], now: float) -> None:
        delta = choice.get("delta")
        if delta is None:
            text = choice["text"]
            is_piece = bool(text) or choice.get("finish_reason") is None
        else:
            text = delta.get("content") or ""
            spoken = (
                text or delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls")
            )
            # who speaks is said before the first token, and why it ended may come after the last
            is_piece = bool(spoken) or ("role" not in delta and choice.get("finish_reason") is None)
        if is_piece:
            self.trace.chunks.append(now)
        if text and self._keeps_text:
            self.pieces.append(str(text))

    def whole(self, body: bytes, now: float) -> None:
        """An answer that came in one piece, from a server that does not stream."""
        try:
            answer = orjson.loads(body)
            choice = answer["choices"][0]
            text = choice["text"] if "text" in choice else choice["message"]["content"] or ""
            _count(self.trace, answer["usage"])
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise BrokenAnswer(f"malformed answer: {type(error).__name__} in {body[:60]!r}") from None
        self.trace.chunks.append(now)
        self.pieces.append(str(text))
        self.is_done = True

    def finish(self) -> None:
        """The body has ended; was it an answer?"""
        trace = self.trace
        if not self.is_done and not trace.is_counted:
            raise BrokenAnswer(f"the stream ended early, after {len(trace.chunks)} chunks")
        if not trace.chunks:
            raise BrokenAnswer("the stream held no tokens")
        if not trace.is_counted:
            trace.num_output = len(trace.chunks)


def _count(trace: RequestTrace, usage: Mapping[str, Any]) -> None:
    trace.num_prompt = int(usage["prompt_tokens"])
    trace.num_output = int(usage.get("completion_tokens") or 0)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    trace.num_cached = None if cached is None else int(cached)
    trace.is_counted = True


def error_message(body: Any) -> str:
    """The message of an OpenAI error body, however it is nested."""
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict):
        error = error.get("message")
    return str(error if error is not None else body)[:200]


class Connection(asyncio.Protocol):
    """One connection; requests go over it one after the other."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._reader: EventReader | None = None
        self._ended: asyncio.Future[None] | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._is_stream = True
        self._is_plain = False  # the body itself is wanted
        self._body = b""
        self._now = 0.0
        self.can_reuse = False
        self.has_answered = False  # of the last request: whether any byte came back

    @property
    def is_open(self) -> bool:
        """Whether another request may be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, message: bytes, reader: EventReader) -> None:
        """Send a request and read its answer to the end; raises BrokenAnswer."""
        assert self._transport is not None
        self._reader, self._body, self._is_stream, self.can_reuse = reader, b"", True, False
        self.has_answered = False
        self._parser = httptools.HttpResponseParser(self)
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        try:
            await self._ended
        finally:
            self._reader = self._ended = None
            if not self.can_reuse:
                self.close()

    async def get(self, message: bytes) -> bytes:
        """Send a request whose answer is a plain body."""
        reader = EventReader(RequestTrace(session=0, turn=0, asked=0.0))
        self._is_plain = True
        try:
            await self.ask(message, reader)
        finally:
            self._is_plain = False
        return self._body

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.abort()

    # -- the transport's side ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection stands."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """The other side is gone."""
        self._transport = None
        if self._reader is not None:
            self._fail(BrokenAnswer(f"hung up after {len(self._reader.trace.chunks)} chunks"))

    def data_received(self, data: bytes) -> None:
        """Everything that came at once gets one reading of the clock."""
        if self._reader is None or self._parser is None:
            self.close()  # nobody asked
            return
        self._now = self._clock()
        self.has_answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            self._fail(
                cause if isinstance(cause, BrokenAnswer) else BrokenAnswer(f"malformed answer: {cause}")
            )
        except httptools.HttpParserError as error:
            self._fail(BrokenAnswer(f"malformed HTTP: {error}"))

    # -- the parser's side ------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """Is this a stream of events?"""
        if name.lower() == b"content-type":
            self._is_stream = b"event-stream" in value

    def on_body(self, body: bytes) -> None:
        """A piece of the answer."""
        assert self._reader is not None and self._parser is not None
        if self._is_stream and not self._is_plain and self._parser.get_status_code() == 200:
            self._reader.feed(body, self._now)
        else:
            self._body += body
            if len(self._body) > MAX_BODY:
                raise BrokenAnswer("the answer is too large")

    def on_message_complete(self) -> None:
        """The whole answer is there."""
        assert self._reader is not None and self._parser is not None and self._ended is not None
        status = self._parser.get_status_code()
        if status != 200:
            try:
                message = error_message(orjson.loads(self._body))
            except ValueError:
                message = self._body[:100].decode(errors="replace")
            raise BrokenAnswer(f"HTTP {status}: {message}", status)
        if not self._is_plain:
            if not self._is_stream:
                self._reader.whole(self._body, self._now)
            self._reader.finish()
        self.can_reuse = self._parser.should_keep_alive()
        if not self._ended.done():
            self._ended.set_result(None)

    def _fail(self, error: BrokenAnswer) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)
