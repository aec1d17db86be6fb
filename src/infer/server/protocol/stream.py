r"""A job's answer on its way to the client: outputs of engines, pieces of one token, server-sent events.

    Job ──► Request 0 ──► engine ──┐
        └─► Request 1 ──► engine ──┴──► Generation.read() ──► Piece ──► FrameWriter ──► EventStream

    data: {"id":...,"object":...,"created":...,"model":...,"choices":[{"index":0,"text":" sky",...}]}\n\n
          └──────── the same in every frame: bytes made once ────────┘

A piece holds one token, even if a step made several at once. A stream begins with its first token, so a
request that is refused or fails before is an HTTP error with a status. If the first token takes long (a
prompt of thousands of tokens on a CPU, a full queue), the stream begins `BEGIN_S` after the engine has taken
the request, and sends a sign of life every `PING_S`, because proxies and clients give up on a silent server.
Once a stream has begun, a failure is a frame: `data: {"error": ...}`, then the end.

A generation is closed when its client leaves or its time is up, and closing it aborts the engine's requests.
A client that stops reading stops the stream, not the engine: unread outputs wait as token ids, up to a limit,
until the connection's time is up. Sending to a disconnected client takes no time at all, so a backlog is sent
with pauses, in which the event loop learns of the disconnect.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import msgspec
import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from infer.dialects.events import TextDelta
from infer.errors import EngineError, EngineStopped, RequestError, RequestTimeout
from infer.finish_reason import FinishReason
from infer.frontend.outputs import OutputBuilder, RequestOutput
from infer.scheduling.request import DraftCounts, StepOutput
from infer.server.protocol.errors import to_api_error
from infer.server.protocol.schemas import AskingBody, SamplingBody
from infer.server.protocol.timings import AnswerTimes
from infer.server.protocol.translate import Job
from infer.server.state import RAW_SEND, current_id, current_record

logger = logging.getLogger(__name__)

T = TypeVar("T")

MERGE_AHEAD = 64  # outputs of several prompts that are read ahead of the writer
PAUSES = (*[False] * 15, True)  # True: the event loop runs after a frame was sent, or an output read
BEGIN_S = 2.0  # seconds after which the headers of a stream go out, if its request was not refused
PING_S = 15.0  # seconds between two signs of life before the first token
TAKEN_POLL_S = 0.1  # seconds between two looks at whether a slow engine has taken the request
LAST_READ_S = 30.0  # seconds beyond a job's own time limit for a client to read the rest
DONE = b"data: [DONE]\n\n"
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class Piece(NamedTuple):
    """One token of one output."""

    prompt: int  # index of the prompt within the job
    output: StepOutput
    delta: TextDelta


class Generation:
    """The answers to one job, read from its engines; closing it aborts the requests that have not ended."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.num_output = 0
        self.num_reasoning = 0  # output tokens that are reasoning
        self.first_at = 0.0  # perf_counter seconds of the first output; 0: none yet
        self._clients = [job.model.pick(request) for request in job.requests]
        self._builders = [
            OutputBuilder(request, job.model.encoder.tokenizer, text, is_chat=job.is_fresh, form=job.form)
            for request, text in zip(job.requests, job.prompts, strict=True)
        ]
        pairs = zip(self._clients, job.requests, strict=True)
        streams = [client.generate(request) for client, request in pairs]
        self._merged = merge(streams) if len(streams) > 1 else None
        self._first = streams[0]
        self._reader: asyncio.Task[Any] | None = None  # the task that waits for an output
        self._is_late = False
        self._timer: asyncio.TimerHandle | None = None  # one for all outputs: a timeout for each costs more
        if job.time_limit_s is not None:
            self._timer = asyncio.get_running_loop().call_later(job.time_limit_s, self._end_in_time)
        self._num_prompt = sum(len(request.prompt) for request in job.requests)
        self._num_cached = [0] * len(job.requests)
        self._num_open = len(job.requests)
        self._drafts: dict[tuple[int, int], DraftCounts] = {}  # drafts by prompt and answer, where it had any
        self._failure: EngineError | None = None
        self._times: AnswerTimes | None = None  # set if the client asked for them

    def keep_times(self) -> None:
        """Note when tokens come, for `metrics`."""
        record = current_record()
        self._times = AnswerTimes(perf_counter() if record is None else record.arrived_at)

    @property
    def is_open(self) -> bool:
        """True if an output of a prompt is still to come."""
        return self._num_open > 0

    @property
    def is_taken(self) -> bool:
        """True if the engines have taken every request and refused none."""
        pairs = zip(self._clients, self.job.requests, strict=True)
        return all(client.has_taken(request.request_id) for client, request in pairs)

    async def read(self) -> list[Piece]:
        """Wait for the next output of an engine; returns its tokens, one piece each."""
        if self._failure is not None:
            raise self._failure
        where, output = await self._next_output()
        self.first_at = self.first_at or perf_counter()
        builder, request_id = self._builders[where], self.job.requests[where].request_id
        self._num_cached[where] = max(self._num_cached[where], output.num_cached)
        if self._times is not None:
            self._times.take(where, output, perf_counter())
        if output.drafts is not None:
            self._drafts[where, output.index] = output.drafts
        pieces: list[Piece] = []
        parts = (output,) if len(output.token_ids) < 2 else one_token_each(output)
        for part in parts:
            delta, can_stop = builder.take(part)
            if can_stop:
                self._clients[where].abort(request_id, part.index)
            if delta is None:
                continue
            if delta.finish_reason is not None:
                self._failure = _failure_of(delta)
                if self._failure is not None:
                    break
                self._num_open -= builder.is_finished
            self.num_output += len(delta.token_ids)
            self.num_reasoning += delta.num_reasoning
            pieces.append(Piece(where, part, delta))
        if self._failure is not None and not pieces:
            raise self._failure
        return pieces

    async def collect(self, note: Callable[[Piece], object] | None = None) -> list[RequestOutput]:
        """Wait for the whole answers and return them, prompt by prompt; `note` is shown every piece."""
        pauses = itertools.cycle(PAUSES)
        try:
            while self.is_open:
                pieces = await self.read()
                if note is not None:
                    for piece in pieces:
                        note(piece)
                if next(pauses):
                    await asyncio.sleep(0)
        finally:
            await self.aclose()
        answers = [builder.build() for builder in self._builders]
        outputs = [output for answer in answers for output in answer.outputs]
        self.num_output = sum(len(output.token_ids) for output in outputs)
        self.num_reasoning = sum(output.num_reasoning_tokens for output in outputs)
        return answers

    async def aclose(self) -> None:
        """Abort every request that has not ended."""
        if self._timer is not None:
            self._timer.cancel()
        await (self._first if self._merged is None else self._merged).aclose()

    def usage(self, num_output: int | None = None) -> dict[str, Any]:
        """The number of tokens so far, in OpenAI's words."""
        num_output = self.num_output if num_output is None else num_output
        usage: dict[str, Any] = {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": num_output,
            "total_tokens": self._num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached)},
        }
        if self.job.form is not None and self.job.form.think is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoning}
        if self._drafts:
            num_kept = sum(drafts.num_accepted for drafts in self._drafts.values())
            num_judged = sum(drafts.num_drafts for drafts in self._drafts.values())
            usage.setdefault("completion_tokens_details", {}).update(
                accepted_prediction_tokens=num_kept, rejected_prediction_tokens=num_judged - num_kept
            )
        return usage

    def metrics(self) -> dict[str, Any]:
        """The times of the answer, if asked for, and the counts of drafts if there is a single answer.

        In vLLM's words and place.
        """
        found: dict[str, Any] = {}
        if self._times is not None:
            found = self._times.to_wire(self.num_output, sum(self._num_cached))
            if num_drafts := sum(drafts.num_drafts for drafts in self._drafts.values()):
                num_kept = sum(drafts.num_accepted for drafts in self._drafts.values())
                found["draft_acceptance_rate"] = round(num_kept / num_drafts, 4)
        if self._drafts and len(self.job.requests) * self.job.params.num_sequences == 1:
            found["speculative_decoding"] = self._drafts[0, 0].to_wire()
        return {"metrics": found} if found else {}

    async def _next_output(self) -> tuple[int, StepOutput]:
        if self._is_late:
            raise self._timeout()
        self._reader = asyncio.current_task()
        try:
            return (0, await anext(self._first)) if self._merged is None else await anext(self._merged)
        except asyncio.CancelledError:
            if self._is_late and self._reader is not None and self._reader.uncancel() == 0:
                raise self._timeout() from None
            raise
        except RequestError as error:
            raise error.of_prompt("prompt", "messages" if self.job.is_chat else "prompt") from None
        except StopAsyncIteration:
            raise EngineError("the engine ended a request without its last token") from None
        finally:
            self._reader = None

    def _end_in_time(self) -> None:
        """Wake the reader, if there is one, and let it raise: the time is up."""
        self._is_late = True
        if self._reader is not None:
            self._reader.cancel()

    def _timeout(self) -> RequestTimeout:
        return RequestTimeout(
            f"the answer was not complete after {self.job.time_limit_s:g} s; "
            "ask for fewer tokens or allow a longer timeout"
        )


async def merge(
    streams: Sequence[AsyncGenerator[StepOutput, None]],
) -> AsyncGenerator[tuple[int, StepOutput], None]:
    """Several streams as one, each output with the number of its stream; the first error ends all."""
    queue: asyncio.Queue[tuple[int, StepOutput | Exception | None]] = asyncio.Queue(MERGE_AHEAD)

    async def pump(where: int, stream: AsyncGenerator[StepOutput, None]) -> None:
        async with aclosing(stream):
            try:
                async for output in stream:
                    await queue.put((where, output))
            except Exception as error:  # raised again where the merged stream is read
                await queue.put((where, error))
            else:
                await queue.put((where, None))

    tasks = [asyncio.create_task(pump(where, stream)) for where, stream in enumerate(streams)]
    num_open = len(tasks)
    try:
        while num_open:
            where, message = await queue.get()
            if message is None:
                num_open -= 1
            elif isinstance(message, RequestError):
                raise message.of_prompt(f"prompt {where}", "prompt")
            elif isinstance(message, Exception):
                raise message
            else:
                yield where, message
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def one_token_each(output: StepOutput) -> Iterator[StepOutput]:
    """An output as outputs of one token each: a step may make several, and clients count a frame as one."""
    last = len(output.token_ids) - 1
    for i, token_id in enumerate(output.token_ids):
        yield msgspec.structs.replace(
            output,
            token_ids=(token_id,),
            logprobs=output.logprobs[i : i + 1],
            finish_reason=output.finish_reason if i == last else None,
            stop_reason=output.stop_reason if i == last else None,
            prompt_logprobs=output.prompt_logprobs if i == 0 else None,
        )


def _failure_of(delta: TextDelta) -> EngineError | None:
    if delta.finish_reason == FinishReason.ERROR:
        return EngineError(delta.error or "the engine could not finish this request")
    if delta.finish_reason == FinishReason.ABORT:
        return EngineStopped("the request was aborted before its end")
    return None


class FrameWriter(ABC):
    """The form of an answer: the way the client sees the whole of it, or its pieces and end in a stream."""

    ping = b": ping\n\n"  # a sign of life before the first piece, which readers skip; may be empty
    media_type = "text/event-stream"  # type of a stream of its frames

    note: Callable[[Piece], object] | None = None  # shown the pieces of an answer that is not streamed

    def __init__(self, generation: Generation, body: AskingBody) -> None:
        self.generation = generation
        if body.wants_metrics:
            generation.keep_times()

    async def settle(self) -> None:
        """Do what must be done before the client learns of the end."""
        return

    def whole(self, answers: Sequence[RequestOutput]) -> dict[str, Any]:
        """The body of an answer that is not streamed, for routes that have one."""
        raise NotImplementedError

    @abstractmethod
    def frames(self, piece: Piece) -> list[bytes]:
        """The frames of one piece."""

    @abstractmethod
    def end(self) -> list[bytes]:
        """The frames after the last piece."""

    @classmethod
    def failure(cls, error: BaseException) -> bytes:
        """The only frame of a stream that fails before anything is known of its answer."""
        return named_event("error", to_api_error(error).encode())

    def error(self, error: BaseException) -> bytes:
        """The last frame of a stream that fails."""
        return self.failure(error)

    def is_slow(self, piece: Piece) -> bool:
        """Return True if the frames of a piece take so long that a thread should write them."""
        return False


class ChunkWriter(FrameWriter):
    """OpenAI's form: `data:` frames that are chunks of a completion, usage on request, then [DONE]."""

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
        """The usage at the end."""
        return self.generation.usage()

    def end(self) -> list[bytes]:
        """The frame of usage and metrics where they were asked for, and [DONE]."""
        if not self._ends_with_usage and not self._ends_with_metrics:
            return [DONE]
        rest = {"usage": self.last_usage()} if self._ends_with_usage else {}
        rest |= self.generation.metrics()
        return [self._before + b"]," + orjson.dumps(rest)[1:] + b"\n\n", DONE]

    @classmethod
    def failure(cls, error: BaseException) -> bytes:
        """The error as a frame, and [DONE]."""
        return b"data: " + to_api_error(error).encode() + b"\n\n" + DONE

    def token(
        self,
        index: int,
        delta: TextDelta,
        logprobs: Mapping[str, Any] | None,
        prompt_ids: Sequence[int] | None = None,
    ) -> bytes:
        """The frame of one token; most hold nothing but its text, and are put together from three parts."""
        if logprobs is None and delta.finish_reason is None and not (self.has_usage or self.has_ids):
            return self._openings[index] + orjson.dumps(delta.text) + self._plain
        reasons = delta.finish_reason, delta.stop_reason
        text, ids = self.text(delta.text), delta.token_ids
        return self.frame(index, text, logprobs, *reasons, token_ids=ids, prompt_ids=prompt_ids)

    def text(self, text: str) -> bytes:
        """The field of a choice that holds its text."""
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
        """A frame whose choice holds `inner`: a field with its name, without braces.

        `num_output` tokens are counted as made; by default, all so far. Ids are shown where that was asked.
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
    """The fields with which every body and every chunk of OpenAI's first two routes begins."""
    return {"id": job.job_id, "object": kind, "created": job.created, "model": job.model_name}


def named_event(name: str, data: bytes) -> bytes:
    """A frame with an event name."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


class EventStream(Response):
    """A response of frames that closes its generation when the client leaves or does not read."""

    def __init__(self, writer: FrameWriter, headers: Mapping[str, str]) -> None:
        self.status_code, self.background, self.media_type = 200, None, writer.media_type
        self.init_headers({**STREAM_HEADERS, **headers})
        limit_s = writer.generation.job.time_limit_s
        self._time_limit_s = None if limit_s is None else limit_s + LAST_READ_S
        self._generation = writer.generation
        self._writer = writer
        self._has_ended = False
        self._first = asyncio.ensure_future(self._read_frames())

    @classmethod
    async def start(cls, http: Request, writer: FrameWriter, headers: Mapping[str, str]) -> EventStream:
        """Wait until the stream can begin, so that a refusal is an HTTP error; returns the response."""
        stream = cls(writer, headers)
        try:
            await unless_disconnected(http.receive, stream._until_begun())
        except BaseException:
            await stream._close()
            raise
        return stream

    async def _until_begun(self) -> None:
        """Wait for the first frames, or until they are late and the request has been taken."""
        await asyncio.wait((self._first,), timeout=BEGIN_S)
        while not self._first.done() and not self._generation.is_taken:
            await asyncio.wait((self._first,), timeout=TAKEN_POLL_S)
        if self._first.done():
            self._first.result()  # raises the error that took the place of frames

    async def _close(self) -> None:
        """Abort what has not ended; a reader of first frames is cancelled, and its error is seen."""
        self._first.cancel()
        await asyncio.gather(self._first, return_exceptions=True)
        await self._generation.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send every frame, for as long as the client is connected."""
        with suppress(ClientDisconnect):
            # No layer does anything with a frame, so frames go past all of them; the first message and the
            # last one do not.
            await unless_disconnected(receive, self._send_frames(send, scope.get(RAW_SEND, send)))

    async def _send_frames(self, send: Send, send_frame: Send) -> None:
        pauses = itertools.cycle(PAUSES)
        try:
            async with asyncio.timeout(self._time_limit_s):
                start = {"type": "http.response.start", "status": self.status_code}
                await send({**start, "headers": self.raw_headers})
                frames = await self._first_frames(send_frame)
                while frames:
                    for frame in frames:
                        await send_frame({"type": "http.response.body", "body": frame, "more_body": True})
                        if next(pauses):
                            await asyncio.sleep(0)
                    try:
                        frames = await self._read_frames()
                    except Exception as error:
                        frames = self._fail(error)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError as error:
            if not isinstance(error, TimeoutError):  # a send found the connection closed
                if (record := current_record()) is not None:
                    record.is_gone = True
                return
            logger.warning("stream closed: the client did not read in time request_id=%s", current_id())
        finally:
            await self._close()

    async def _first_frames(self, send_frame: Send) -> list[bytes]:
        """Wait for the first frames, with a sign of life now and then."""
        while not self._first.done():
            if self._writer.ping:
                await send_frame({"type": "http.response.body", "body": self._writer.ping, "more_body": True})
            await asyncio.wait((self._first,), timeout=PING_S)
        try:
            return self._first.result()
        except Exception as error:
            return self._fail(error)

    def _fail(self, error: Exception) -> list[bytes]:
        """End a stream whose status is sent: a failure can only be a frame."""
        self._has_ended = True
        return [self._writer.error(error)]

    async def _read_frames(self) -> list[bytes]:
        """Wait for the next frames; returns none once the stream has ended."""
        generation, writer = self._generation, self._writer
        while not self._has_ended and generation.is_open:
            frames: list[bytes] = []
            for piece in await generation.read():
                if writer.is_slow(piece):
                    frames += await asyncio.to_thread(writer.frames, piece)
                else:
                    frames += writer.frames(piece)
            if frames:
                return frames
        if self._has_ended:
            return []
        self._has_ended = True
        frames = writer.end()
        await writer.settle()
        return frames


class LateStream(Response):
    """A stream that begins while its job is still being opened: the model has to be loaded first.

    Whatever goes wrong after that is a frame, a body that is refused included.
    """

    def __init__(self, kind: type[FrameWriter], opening: asyncio.Future[FrameWriter]) -> None:
        self.status_code, self.background, self.media_type = 200, None, kind.media_type
        self.init_headers(STREAM_HEADERS)
        self._kind, self._opening = kind, opening

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send signs of life until the job is known, then its stream."""
        try:
            with suppress(ClientDisconnect):
                await unless_disconnected(receive, self._send_all(send, scope.get(RAW_SEND, send)))
        except OSError:  # a send found the connection closed
            if (record := current_record()) is not None:
                record.is_gone = True
        finally:
            await close_opening(self._opening)

    async def _send_all(self, send: Send, send_frame: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while not self._opening.done():
            if self._kind.ping:
                await send_frame({"type": "http.response.body", "body": self._kind.ping, "more_body": True})
            await asyncio.wait((self._opening,), timeout=PING_S)
        try:
            stream = EventStream(self._opening.result(), {})
        except Exception as error:
            await send({"type": "http.response.body", "body": self._kind.failure(error), "more_body": False})
            return

        async def send_rest(message: Message) -> None:
            if message["type"] != "http.response.start":
                await send(message)

        await stream._send_frames(send_rest, send_frame)


async def close_opening(opening: asyncio.Future[FrameWriter]) -> None:
    """End the opening of a job that is not wanted any more, and its generation."""
    opening.cancel()
    (writer,) = await asyncio.gather(opening, return_exceptions=True)
    if isinstance(writer, FrameWriter):
        await writer.generation.aclose()


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, but cancel it, and so abort its requests, if the client disconnects."""
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
