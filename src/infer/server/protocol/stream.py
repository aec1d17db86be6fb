r"""Stream a job's output to the client: pieces of one token, server-sent events, a response.

    Generation ──► Piece ──► FrameWriter ──► frames ──► EventStream ──► client
              └──► RequestOutput ──► FrameWriter ──► the whole body

    data: {"id":...,"object":...,"created":...,"model":...,"choices":[{"index":0,"text":" sky",...}]}\n\n
          └──────── the same in every frame: bytes made once ────────┘

A stream begins with its first token, so a request that is rejected or fails before that gets an HTTP error
status. If the first token takes long (a prompt of thousands of tokens on a CPU, a full queue), the stream
begins once `BEGIN_S` have passed and the engine has accepted the request, and sends a ping every `PING_S`,
because proxies and clients give up on a silent server. Once a stream has begun, a failure is a frame:
`data: {"error": ...}`, then the end.

A client that stops reading stops the stream, not the engine: unread outputs are buffered as token ids, up to
a limit, until the stream's time is up. Sending to a disconnected client returns at once, so a backlog is sent
with pauses, in which the event loop can notice the disconnect.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from infer.dialects.events import TextDelta
from infer.finish_reason import FinishReason
from infer.frontend.outputs import RequestOutput
from infer.server.protocol.errors import ApiError, to_api_error
from infer.server.protocol.generation import PAUSES, Generation, Piece
from infer.server.protocol.schemas import AskingBody, SamplingBody
from infer.server.protocol.translate import Job
from infer.server.state import RAW_SEND, current_id, current_record

logger = logging.getLogger(__name__)

T = TypeVar("T")

BEGIN_S = 2.0  # seconds after which the headers of a stream are sent, if its request was accepted
PING_S = 15.0  # seconds between two pings before the first token
TAKEN_POLL_S = 0.1  # seconds between two checks whether a slow engine has accepted the request
LAST_READ_S = 30.0  # seconds beyond a job's own time limit for a client to read the rest
DONE = b"data: [DONE]\n\n"
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class FrameWriter(ABC):
    """The format of an answer: its body, or the frames of a stream."""

    ping = b": ping\n\n"  # sent before the first piece; readers skip it; may be empty
    media_type = "text/event-stream"  # type of a stream of its frames

    note: Callable[[Piece], object] | None = None  # gets the pieces of an answer that is not streamed

    def __init__(self, generation: Generation, body: AskingBody) -> None:
        self.generation = generation
        if body.wants_metrics:
            generation.keep_times()

    async def settle(self) -> None:
        """Finish work that must be done before the client sees the end."""
        return

    def whole(self, answers: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed, for routes that have one."""
        raise NotImplementedError

    @abstractmethod
    def frames(self, piece: Piece) -> list[bytes]:
        """Return the frames of one piece."""

    @abstractmethod
    def end(self) -> list[bytes]:
        """Return the frames after the last piece."""

    @classmethod
    def failure(cls, told: ApiError) -> bytes:
        """Return the last frame of a stream that fails, whatever was sent before."""
        return named_event("error", told.encode())

    def error(self, told: ApiError) -> bytes:
        """Return the last frames of this stream, which fails."""
        return self.failure(told)

    def is_slow(self, piece: Piece) -> bool:
        """Return True if the frames of a piece take so long that a thread should make them."""
        return False


class ChunkWriter(FrameWriter):
    """OpenAI's format: `data:` frames with chunks of a completion, usage on request, then [DONE]."""

    kind: str  # the `object` field of a chunk
    prompt_in_choice = True  # True: the prompt's ids are a field of the choice; False: of the chunk
    opening: bytes  # bytes before and after the text of a piece, inside its choice
    closing: bytes

    def __init__(self, generation: Generation, body: SamplingBody, *, num_choices: int) -> None:
        super().__init__(generation, body)
        options = body.stream_options
        self._before = b"data: " + orjson.dumps(job_fields(generation.job, self.kind))[:-1] + b',"choices":['
        self._heads = [self._before + b'{"index":%d,' % index for index in range(num_choices)]
        self._openings = [head + self.opening for head in self._heads]
        self._plain = self.closing + b',"logprobs":null,"finish_reason":null}]}\n\n'
        self._ends_with_usage = options is not None and bool(options.include_usage)
        self._ends_with_metrics = body.wants_metrics
        self.has_usage = options is not None and bool(options.continuous_usage_stats)
        self.has_ids = bool(body.return_token_ids)

    def last_usage(self) -> Mapping[str, Any]:
        """Return the usage at the end."""
        return self.generation.usage()

    def end(self) -> list[bytes]:
        """Return the frame of usage and metrics, if requested, and [DONE]."""
        if not self._ends_with_usage and not self._ends_with_metrics:
            return [DONE]
        rest = {"usage": self.last_usage()} if self._ends_with_usage else {}
        rest |= self.generation.metrics()
        return [self._before + b"]," + orjson.dumps(rest)[1:] + b"\n\n", DONE]

    @classmethod
    def failure(cls, told: ApiError) -> bytes:
        """Return the error as a frame, and [DONE]."""
        return b"data: " + told.encode() + b"\n\n" + DONE

    def token(
        self,
        index: int,
        delta: TextDelta,
        logprobs: Mapping[str, Any] | None,
        prompt_ids: Sequence[int] | None = None,
    ) -> bytes:
        """Return the frame of one token; most have only its text and are joined from three parts."""
        if logprobs is None and delta.finish_reason is None and not (self.has_usage or self.has_ids):
            return self._openings[index] + orjson.dumps(delta.text) + self._plain
        reasons = delta.finish_reason, delta.stop_reason
        text, ids = self.text(delta.text), delta.token_ids
        return self.frame(index, text, logprobs, *reasons, token_ids=ids, prompt_ids=prompt_ids)

    def text(self, text: str) -> bytes:
        """Return the field of a choice with its text."""
        return self.opening + orjson.dumps(text) + self.closing

    def frame(
        self,
        index: int,
        inner: bytes,
        logprobs: Mapping[str, Any] | None = None,
        finish_reason: FinishReason | None = None,
        stop_reason: str | int | None = None,
        num_output: int | None = None,
        token_ids: Sequence[int] = (),
        prompt_ids: Sequence[int] | None = None,
    ) -> bytes:
        """Return a frame whose choice has `inner`: a field with its name, without braces.

        Usage counts `num_output` tokens, by default all so far. Ids are included if they were requested.
        """
        reasons: dict[str, Any] = {"logprobs": logprobs, "finish_reason": finish_reason}
        if finish_reason is not None:
            reasons["stop_reason"] = stop_reason
        if self.has_ids:
            reasons["token_ids"] = token_ids
            if prompt_ids is not None and self.prompt_in_choice:
                reasons["prompt_token_ids"] = prompt_ids
        usage = b""
        if self.has_usage:
            usage = b',"usage":' + orjson.dumps(self.generation.usage(num_output))
        if self.has_ids and prompt_ids is not None and not self.prompt_in_choice:
            usage += b',"prompt_token_ids":' + orjson.dumps(prompt_ids)
        return self._heads[index] + inner + b"," + orjson.dumps(reasons)[1:] + b"]" + usage + b"}\n\n"


def job_fields(job: Job, kind: str) -> dict[str, Any]:
    """Return the first fields of every body and chunk of OpenAI's completions and chat."""
    return {"id": job.job_id, "object": kind, "created": job.created, "model": job.model_name}


def named_event(name: str, data: bytes) -> bytes:
    """Return a frame with an event name."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


class EventStream(Response):
    """A response of frames that closes its generation when the client leaves or does not read.

    It may begin while its job is still being opened, because the model has to be loaded first: every later
    error is then a frame, even if the body is rejected.
    """

    def __init__(
        self, kind: type[FrameWriter], opening: asyncio.Future[FrameWriter], headers: Mapping[str, str]
    ) -> None:
        self.status_code, self.background, self.media_type = 200, None, kind.media_type
        self.init_headers({**STREAM_HEADERS, **headers})
        self._kind, self._opening = kind, opening
        self._has_ended = False
        self._first = asyncio.ensure_future(self._read_first())

    @classmethod
    async def start(cls, http: Request, writer: FrameWriter, headers: Mapping[str, str]) -> EventStream:
        """Wait until the stream can begin, so that a rejection is an HTTP error; returns the response."""
        opening: asyncio.Future[FrameWriter] = asyncio.get_running_loop().create_future()
        opening.set_result(writer)
        stream = cls(type(writer), opening, headers)
        try:
            await unless_disconnected(http.receive, stream._until_begun(writer.generation))
        except BaseException:
            await stream._close()
            raise
        return stream

    async def _until_begun(self, generation: Generation) -> None:
        """Wait for the first frames, or until they are late and the request was accepted."""
        await asyncio.wait((self._first,), timeout=BEGIN_S)
        while not self._first.done() and not generation.is_taken:
            await asyncio.wait((self._first,), timeout=TAKEN_POLL_S)
        if self._first.done():
            self._first.result()  # raises the error, if there is one

    async def _close(self) -> None:
        """Abort unfinished requests; cancel the task of the first frames and retrieve its error."""
        self._first.cancel()
        if not self._first.done():
            await asyncio.wait((self._first,))
        if not self._first.cancelled():
            self._first.exception()
        await close_opening(self._opening)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send every frame, for as long as the client is connected."""
        with suppress(ClientDisconnect):
            # Middleware ignores frames, so frames bypass it; only the first message and the last one pass
            # through it.
            await unless_disconnected(receive, self._send_frames(send, scope.get(RAW_SEND, send)))

    async def _send_frames(self, send: Send, send_frame: Send) -> None:
        pauses = itertools.cycle(PAUSES)
        try:
            async with asyncio.timeout(None) as limit:
                start = {"type": "http.response.start", "status": self.status_code}
                await send({**start, "headers": self.raw_headers})
                await self._ping_until(self._opening, send_frame)
                limit.reschedule(self._ends_at())
                await self._ping_until(self._first, send_frame)
                frames = await self._frames_of(self._first)
                while frames:
                    for frame in frames:
                        await send_frame({"type": "http.response.body", "body": frame, "more_body": True})
                        if next(pauses):
                            await asyncio.sleep(0)
                    frames = await self._frames_of(self._read_frames())
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError as error:
            if not isinstance(error, TimeoutError):  # the connection is closed
                if (record := current_record()) is not None:
                    record.is_gone = True
                return
            logger.warning("stream closed: the client did not read in time request_id=%s", current_id())
        finally:
            await self._close()

    async def _ping_until(self, awaited: asyncio.Future[Any], send_frame: Send) -> None:
        """Wait, and send pings meanwhile."""
        while not awaited.done():
            if self._kind.ping:
                await send_frame({"type": "http.response.body", "body": self._kind.ping, "more_body": True})
            await asyncio.wait((awaited,), timeout=PING_S)

    def _ends_at(self) -> float | None:
        """Return the event loop's time by which the client must have read everything; None: no limit."""
        job = None if self._opening.exception() is not None else self._opening.result().generation.job
        if job is None or job.time_limit_s is None:
            return None
        return asyncio.get_running_loop().time() + job.time_limit_s + LAST_READ_S

    async def _frames_of(self, reading: Awaitable[list[bytes]]) -> list[bytes]:
        """Return the next frames; a failure becomes the last one, since status 200 has been sent."""
        try:
            return await reading
        except Exception as error:
            self._has_ended = True
            is_open, told = self._opening.exception() is None, to_api_error(error)
            return [self._opening.result().error(told) if is_open else self._kind.failure(told)]

    async def _read_first(self) -> list[bytes]:
        """Wait for the job, then for the first frames."""
        if not self._opening.done():
            await asyncio.wait((self._opening,))
        return await self._read_frames()

    async def _read_frames(self) -> list[bytes]:
        """Wait for the next frames; returns an empty list once the stream has ended."""
        if self._has_ended:
            return []
        writer = self._opening.result()
        while writer.generation.is_open:
            frames: list[bytes] = []
            for piece in await writer.generation.read():
                if writer.is_slow(piece):
                    frames += await asyncio.to_thread(writer.frames, piece)
                else:
                    frames += writer.frames(piece)
            if frames:
                return frames
        self._has_ended = True
        frames = writer.end()
        await writer.settle()
        return frames


async def close_opening(opening: asyncio.Future[FrameWriter]) -> None:
    """Cancel the opening of a job that is no longer needed, and close its generation.

    This awaits as little as possible, because it may itself be cancelled once the client has everything.
    """
    opening.cancel()
    if not opening.done():
        await asyncio.wait((opening,))
    if not opening.cancelled() and opening.exception() is None:
        await opening.result().generation.aclose()


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; if the client disconnects, cancel it, which aborts its requests."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_until_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
