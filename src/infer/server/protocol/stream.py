r"""Server-sent events: one frame per token, cheap to build, and an end that every client recognises.

    data: {"id":...,"object":...,"created":...,"model":...,"choices":[{"index":0,"text":" sky",...}]}\n\n
          └──────── the same in every frame: bytes made once ────────┘

A stream begins when its first token is there, so a refused or failed request is still an HTTP error with a
status. After that a failure is a frame: `data: {"error": ...}`, then the end.

The generator of frames is closed when the client leaves, and closing it aborts the engine's requests. A
client that stops reading stops this generator, not the engine: what it has not read waits as token ids, so
many and no more, until the connection's time is up. To send to a client that is gone takes no time at all,
so a backlog is walked with pauses, in which the loop learns that nobody is there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from typing import Any

import orjson
from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from infer.server.middleware.request_record import current_id
from infer.server.protocol.errors import to_api_error
from infer.server.routes.json_route import unless_disconnected
from infer.server.threads import Breather

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
LAST_READ_S = 30.0  # beyond a job's own time limit, for a client to read what is left

Frames = AsyncGenerator[bytes, None]


class ChunkWriter:
    """Writes the frames of one stream in OpenAI's form."""

    def __init__(
        self,
        *,
        job_id: str,
        kind: str,
        created: int,
        model: str,
        num_choices: int,
        opening: bytes,
        closing: bytes,
    ) -> None:
        """`opening` and `closing` are what stands around a piece of text inside a choice."""
        constant = orjson.dumps({"id": job_id, "object": kind, "created": created, "model": model})
        self._before = b"data: " + constant[:-1] + b',"choices":['
        self._heads = [self._before + b'{"index":%d,' % index for index in range(num_choices)]
        self._closing = closing
        self._openings = [head + opening for head in self._heads]
        self._plain = closing + b',"logprobs":null,"finish_reason":null}]}\n\n'

    def token(self, index: int, text: str) -> bytes:
        """The common frame: a token in the middle of a choice, and nothing but its text."""
        return self._openings[index] + orjson.dumps(text) + self._plain

    def chunk(
        self,
        index: int,
        text: str,
        *,
        logprobs: Mapping[str, Any] | None = None,
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
        usage: Mapping[str, Any] | None = None,
    ) -> bytes:
        """Any other frame that holds text."""
        end = b""
        if finish_reason is not None:
            end = b',"stop_reason":' + orjson.dumps(stop_reason)
        return b"".join(
            (
                self._openings[index],
                orjson.dumps(text),
                self._closing,
                b',"logprobs":',
                orjson.dumps(logprobs),
                b',"finish_reason":',
                orjson.dumps(finish_reason),
                end,
                b"}]",
                _usage_field(usage),
                b"}\n\n",
            )
        )

    def role(self, index: int, usage: Mapping[str, Any] | None = None) -> bytes:
        """The first frame of a chat choice: who speaks."""
        delta = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        return self._heads[index] + delta + _usage_field(usage) + b"}\n\n"

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        """The frame before the end, for clients that asked for it."""
        return self._before + b"]" + _usage_field(usage) + b"}\n\n"


def _usage_field(usage: Mapping[str, Any] | None) -> bytes:
    return b"" if usage is None else b',"usage":' + orjson.dumps(usage)


def data_error(error: BaseException) -> bytes:
    """How a stream of data frames fails."""
    return b"data: " + to_api_error(error).encode() + b"\n\n" + DONE


def named_event(name: str, data: Mapping[str, Any]) -> bytes:
    """A frame with an event name."""
    return _named(name, orjson.dumps(data))


def _named(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


def named_error(error: BaseException) -> bytes:
    """How a stream of named events fails."""
    return _named("error", to_api_error(error).encode())


class EventStream(StreamingResponse):
    """A response of frames that ends the work behind them when its client leaves or does not read."""

    media_type = "text/event-stream"

    def __init__(self, frames: Frames, *, headers: Mapping[str, str], time_limit_s: float | None) -> None:
        super().__init__(frames, headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        self._frames = frames
        self._time_limit_s = None if time_limit_s is None else time_limit_s + LAST_READ_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything to whoever is there to receive it."""
        with suppress(ClientDisconnect, OSError):  # OSError: a send found nobody
            await unless_disconnected(receive, self._send_frames(send))

    async def _send_frames(self, send: Send) -> None:
        try:
            async with asyncio.timeout(self._time_limit_s):
                await self.stream_response(send)
        except TimeoutError:
            logger.warning("request %s: its stream was not read in time; it is closed", current_id())
        finally:
            await self._frames.aclose()


async def start_stream(
    http: Request,
    frames: Frames,
    *,
    on_error: Callable[[BaseException], bytes],
    headers: Mapping[str, str],
    time_limit_s: float | None,
) -> EventStream:
    """Wait for the first frame, so that an error before it is an HTTP error; then stream."""

    async def get_first() -> bytes:
        return await anext(frames)

    try:
        first = await unless_disconnected(http.receive, get_first())
    except BaseException:
        await frames.aclose()
        raise
    return EventStream(_guard(first, frames, on_error), headers=headers, time_limit_s=time_limit_s)


async def _guard(first: bytes, frames: Frames, on_error: Callable[[BaseException], bytes]) -> Frames:
    """All frames, and the error's where they break off."""
    breather = Breather()
    try:
        yield first
        async for frame in frames:
            yield frame
            await breather.pause()
    except Exception as error:  # the status is sent: whatever happened can only be said in the stream
        yield on_error(error)
    finally:
        await frames.aclose()
