"""Generation for many tasks at once: the same engine behind an event loop.

    async with AsyncLLM() as llm:
        async for piece in llm.stream("Once upon a time"):
            print(piece.text, end="", flush=True)

Every call is a request of its own, with one prompt and one answer: `asyncio.gather` makes several. The
engine batches whatever is there at each step. Leaving an iterator, cancelling its task, or
`abort(request_id)` ends the request before the next step.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Unpack

from infer.client.client import EngineClient, InProcessClient
from infer.engine.gc_freeze import collect
from infer.engine.observer import EngineObserver
from infer.errors import EngineError, EngineStopped
from infer.frontend.embeddings import open_embeddings
from infer.frontend.llm import TextModel
from infer.frontend.outputs import OutputBuilder, RequestOutput, TextDelta, check_streams
from infer.frontend.prompts import Conversation, Prompt, RequestOptions, check_single, read_prompt
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request


class AsyncLLM(TextModel):
    """A model for one event loop; keywords are the knobs of docs/knobs.md."""

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        show_progress: bool = False,
        observer: EngineObserver | None = None,
        **knobs: Any,
    ) -> None:
        engine = self._open_engine(model, knobs, observer, show_progress=show_progress)
        self._client: EngineClient | None = InProcessClient(engine)  # None: closed

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop the engine and let go of it; requests still running, and later calls, get `EngineStopped`."""
        if self._client is not None:
            await self._client.close()
            self._client = None
            collect()

    @property
    def client(self) -> EngineClient:
        """The client of the engine, until `close`."""
        if self._client is None:
            raise EngineStopped("this AsyncLLM was closed; make another one")
        return self._client

    async def encode(self, text: str) -> list[int]:
        """The ids of a plain prompt; in a thread, as a long text takes its time."""
        return await asyncio.to_thread(self.encoder.encode, text)

    async def encode_chat(
        self,
        messages: Conversation,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The ids of a conversation, ready for the assistant's answer; rendered and tokenized in a thread."""
        check_single(messages)
        return await asyncio.to_thread(
            self.encoder.encode_chat, messages, tools=tools, template_options=template_options
        )

    def abort(self, request_id: str) -> None:
        """End a request; its iterator yields a last piece, with finish_reason "abort"."""
        self.client.abort(request_id)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """Continue a prompt and return the whole answer; cancelling the call ends the request.

        Options are those of `RequestOptions`: priority, deadline and cache_salt.
        """
        return await self._generate(prompt, params, request_id, options, is_chat=False)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[TextDelta, None]:
        """Continue a prompt piece by piece; leaving the loop ends the request."""
        return self._stream(prompt, params, request_id, options, is_chat=False)

    async def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """Answer a conversation, or a text as its only message, and return the whole answer."""
        prompt = await self.encode_chat(messages, tools=tools, template_options=template_options)
        return await self._generate(prompt, params, request_id, options, is_chat=True)

    async def stream_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[TextDelta, None]:
        """Answer a conversation piece by piece."""
        prompt = await self.encode_chat(messages, tools=tools, template_options=template_options)
        stream = self._stream(prompt, params, request_id, options, is_chat=True)
        async with contextlib.aclosing(stream) as deltas:
            async for delta in deltas:
                yield delta

    async def embed(
        self, prompt: Prompt, *, pooling: str | None = None, normalize: bool | None = None
    ) -> list[float]:
        """The vector of a text or of token ids, between two steps of the others; see `LLM.embed`."""
        check_single(prompt)
        given = read_prompt(prompt)
        job = await asyncio.to_thread(
            open_embeddings, self.encoder, [given], pooling=pooling, normalize=normalize
        )
        return job.finish(await self.client.embed(job.prompts[0], job.pooling))

    async def _generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        options: RequestOptions,
        *,
        is_chat: bool,
    ) -> RequestOutput:
        request, builder = await self._open(prompt, params, request_id, options, is_chat=is_chat)
        async with contextlib.aclosing(self._deltas(request, builder)) as deltas:
            async for _ in deltas:
                pass
        return builder.build()

    async def _stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        options: RequestOptions,
        *,
        is_chat: bool,
    ) -> AsyncGenerator[TextDelta, None]:
        request, builder = await self._open(prompt, params, request_id, options, is_chat=is_chat)
        check_streams(request.params, "use generate")
        async with contextlib.aclosing(self._deltas(request, builder)) as deltas:
            async for delta in deltas:
                yield delta

    async def _open(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        options: RequestOptions,
        *,
        is_chat: bool,
    ) -> tuple[Request, OutputBuilder]:
        check_single(prompt)
        request = await asyncio.to_thread(self.encoder.make_request, prompt, params, request_id, **options)
        text = prompt if isinstance(prompt, str) else None
        return request, OutputBuilder(request, self.encoder.tokenizer, text, is_chat=is_chat)

    async def _deltas(self, request: Request, builder: OutputBuilder) -> AsyncGenerator[TextDelta, None]:
        """The pieces of a request as they come; sequences that met a stop string are aborted."""
        async with contextlib.aclosing(self.client.generate(request)) as outputs:
            async for output in outputs:
                delta, can_stop = builder.take(output)
                if can_stop:
                    self.client.abort(request.request_id, output.index)
                if delta is not None:
                    if delta.error is not None:
                        raise EngineError(delta.error)
                    yield delta
                if builder.is_finished:
                    return
