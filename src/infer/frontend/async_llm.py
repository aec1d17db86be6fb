"""Generation for many tasks at once: the same engine, used from an event loop.

    async with AsyncLLM() as llm:
        async for piece in llm.stream("Once upon a time"):
            print(piece.text, end="", flush=True)

Every call is a request of its own, with one prompt and one answer; `asyncio.gather` makes several. The engine
batches all current requests in each step. Leaving an iterator, cancelling its task, or `abort(request_id)`
ends the request before the next step.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from os import PathLike
from typing import Any, Unpack

from infer.client.client import EngineClient, InProcessClient, embed
from infer.dialects.events import TextDelta
from infer.engine.engine import Engine
from infer.engine.gc_freeze import collect
from infer.errors import EngineError, EngineStopped
from infer.frontend.embeddings import EmbeddingJob, open_embeddings
from infer.frontend.inputs import Conversation, Prompt, check_single, read_prompt
from infer.frontend.outputs import OutputBuilder, RequestOutput, check_streams
from infer.frontend.prompts import ChatOptions, RequestOptions
from infer.frontend.scoring import ScoredDocument, open_scores, rank
from infer.frontend.text_model import Opener, TextModel
from infer.sampling.params import SamplingParams


class AsyncLLM(TextModel):
    """A model for one event loop; keywords are the knobs of docs/knobs.md."""

    def _start(self, engine: Engine) -> None:
        self._client: EngineClient | None = InProcessClient(engine)  # None: closed

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop the engine and free its memory; running requests and later calls get `EngineStopped`."""
        if self._client is not None and not self._is_inherited:
            await self._client.close()
            self._client = None
            collect()

    @property
    def client(self) -> EngineClient:
        """The client of the engine, until `close`."""
        self._check_process()
        if self._client is None:
            raise EngineStopped("this AsyncLLM was closed; make another one")
        return self._client

    async def encode(self, text: str) -> list[int]:
        """The ids of a plain prompt; computed in a thread, because a long text takes time."""
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

    async def load_adapter(self, name: str, path: str | PathLike[str]) -> None:
        """Load the LoRA adapter in a directory, for requests with `adapter=name`."""
        await self.client.set_adapter(name, os.fspath(path))

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter; requests that began with it go on."""
        await self.client.set_adapter(name, None)

    def abort(self, request_id: str) -> None:
        """End a request; its iterator yields a last piece, with finish_reason "abort"."""
        self.client.abort(request_id)

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> RequestOutput:
        """Continue a prompt and return the whole answer; cancelling the call ends the request.

        Options are fields of `RequestOptions`: request_id, priority, deadline and cache_salt.
        """
        return await self._answer(await self._open(self._open_prompt, prompt, params, **options))

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncGenerator[TextDelta, None]:
        """Continue a prompt piece by piece; leaving the loop ends the request."""
        return self._stream(self._open_prompt, prompt, params, **options)

    async def chat(
        self, messages: Conversation, params: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> RequestOutput:
        """Answer a conversation, or a string as its only message, with the whole answer; see `LLM.chat`."""
        return await self._answer(await self._open(self._open_chat, messages, params, **options))

    def stream_chat(
        self, messages: Conversation, params: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> AsyncGenerator[TextDelta, None]:
        """Answer a conversation piece by piece."""
        return self._stream(self._open_chat, messages, params, **options)

    async def embed(
        self,
        prompt: Prompt,
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        adapter: str = "",
    ) -> list[float]:
        """The embedding of a text or of token ids, batched with all other requests; see `LLM.embed`."""
        self._check_process()
        check_single(prompt)
        job = await asyncio.to_thread(
            open_embeddings,
            self.encoder,
            [read_prompt(prompt)],
            pooling=pooling,
            normalize=normalize,
            dimensions=dimensions,
        )
        (state,) = await self._hidden_states(job, adapter=adapter)
        return job.finish(state)

    async def score(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
        use_activation: bool = True,
    ) -> list[float]:
        """The relevance of each document to the query; see `LLM.score`."""
        self._check_process()
        queries, texts = ([each] if isinstance(each, str) else each for each in (query, documents))
        job = await asyncio.to_thread(
            open_scores,
            self.encoder,
            queries,
            texts,
            instruction=instruction,
            use_activation=use_activation,
        )
        return job.scores([job.finish(state) for state in await self._hidden_states(job.job)])

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
    ) -> list[ScoredDocument]:
        """The documents by relevance to the query, the best first; at most `top_n`."""
        return rank(documents, await self.score(query, documents, instruction=instruction), top_n)

    async def _hidden_states(self, job: EmbeddingJob, *, adapter: str = "") -> list[list[float]]:
        """The pooled hidden state of each input of a job; if one fails, the others are aborted."""
        requests = job.requests(self.encoder.next_id, adapter=adapter)
        tasks = [asyncio.ensure_future(embed(self.client, request)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _open(self, open_request: Opener, *given: Any, **options: Any) -> OutputBuilder:
        """Open a request in a thread, because rendering and tokenizing take time."""
        self._check_process()
        check_single(given[0])
        return await asyncio.to_thread(open_request, *given, **options)

    async def _answer(self, builder: OutputBuilder) -> RequestOutput:
        async for _ in self._read(builder):
            pass
        return builder.build()

    async def _stream(
        self, open_request: Opener, *given: Any, **options: Any
    ) -> AsyncGenerator[TextDelta, None]:
        builder = await self._open(open_request, *given, **options)
        check_streams(builder.request.params, "use generate")
        async with contextlib.aclosing(self._read(builder)) as deltas:
            async for delta in deltas:
                yield delta

    async def _read(self, builder: OutputBuilder) -> AsyncGenerator[TextDelta, None]:
        """Yield the pieces of an answer; a sequence that met a stop string is aborted."""
        async with contextlib.aclosing(self.client.generate(builder.request)) as outputs:
            async for output in outputs:
                delta, can_stop = builder.take(output)
                if can_stop:
                    self.client.abort(output.request_id, output.index)
                if delta is not None and delta.error is not None:
                    raise EngineError(delta.error)
                if delta is not None:
                    yield delta
                if builder.is_finished:
                    return
