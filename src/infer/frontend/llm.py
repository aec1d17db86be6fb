"""Offline generation: a model, an engine and this thread.

    llm = LLM("path/or/org/name", dtype="float32")
    for answer in llm.generate(["Once upon a time", "The sky is"], SamplingParams(temperature=0)):
        print(answer.text)

The engine batches all prompts of a call, and each answer is the same as for its prompt alone.

Only one thread at a time may call an `LLM`: a call during another thread's call raises `EngineError` at once.
Threads may take turns. For many callers use `AsyncLLM`, an `LLM` per thread, or a lock.

A forked child has neither the threads nor the GPU of its parent's engine, so calls there raise `EngineError`.
Make the `LLM` in the child, or start the child by spawn.

A model is large; `llm.close()`, or `with LLM(...) as llm:`, frees its memory.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from time import perf_counter
from typing import Any, Unpack, cast

from infer.dialects.events import TextDelta
from infer.engine.engine import Engine
from infer.engine.gc_freeze import collect
from infer.errors import BatchFailed, EngineError, EngineStopped, RequestError
from infer.frontend.embeddings import EmbeddingJob, open_embeddings
from infer.frontend.inputs import Conversation, Message, Prompt, as_batch, as_conversations, read_prompt
from infer.frontend.outputs import CompletionOutput, OutputBuilder, RequestOutput, check_streams
from infer.frontend.prompts import ChatOptions, RequestOptions
from infer.frontend.scoring import ScoredDocument, open_scores, rank
from infer.frontend.text_model import Opener, TextModel
from infer.log import progress
from infer.sampling.params import SamplingParams
from infer.scheduling.request import StepOutput

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "TextDelta"]


class LLM(TextModel):
    """A model that answers prompts; keywords are the knobs of docs/knobs.md.

    Only one thread at a time may call it; a call during another thread's call raises `EngineError`.
    `AsyncLLM` serves many callers at once.
    """

    def _start(self, engine: Engine) -> None:
        self._engine: Engine | None = engine  # None: closed
        self._streams: dict[str, _Stream] = {}
        self._dropped: deque[_Stream] = deque()  # streams without a reader, closed between steps
        self._turn = threading.RLock()  # held by the thread that is in a call

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Let one thread in and refuse others meanwhile, because the engine is not thread-safe."""
        self._check_process()
        if not self._turn.acquire(blocking=False):
            raise EngineError(
                "another thread is in a call of this LLM, which serves one thread at a time; use AsyncLLM "
                "for many callers, make an LLM for each thread, or guard the calls with a lock"
            )
        try:
            yield
        finally:
            self._turn.release()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the weights and the cache; open requests and later calls get `EngineStopped`."""
        if self._engine is None or self._is_inherited:
            return
        with self._in_turn():
            for stream in list(self._streams.values()):
                self._close(stream)
            self._dropped.clear()
            self._engine = None
        collect()

    @property
    def engine(self) -> Engine:
        """The engine, until `close`."""
        if self._engine is None:
            raise EngineStopped("this LLM was closed; make another one")
        return self._engine

    def encode(self, text: str) -> list[int]:
        """The ids of a plain prompt."""
        return self.encoder.encode(text)

    def encode_chat(
        self,
        messages: Conversation,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, object] | None = None,
    ) -> list[int]:
        """The ids of a conversation, ready for the assistant's answer."""
        return self.encoder.encode_chat(messages, tools=tools, template_options=template_options)

    def load_adapter(self, name: str, path: str | PathLike[str]) -> None:
        """Load the LoRA adapter in a directory, for requests with `adapter=name`."""
        with self._in_turn():
            self.engine.set_adapter(name, os.fspath(path))

    def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter; open streams go on with it."""
        with self._in_turn():
            self.engine.set_adapter(name, None)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool = False,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """Continue one prompt or many: text or token ids, one `SamplingParams` for all or one for each.

        `SamplingParams(n=, best_of=, logprobs=)` sets the number of outputs, of candidates and of logprobs.
        Options are fields of `RequestOptions`: priority, deadline, cache_salt and adapter, the same for every
        prompt.

        If some of the prompts fail in the engine, `BatchFailed` names them and holds the other answers.
        """
        asked = _with_params(as_batch(prompts), params, "prompts")
        opens = [partial(self._open_prompt, prompt, own, **options) for prompt, own in asked]
        with self._in_turn():
            return self._answer(opens, show_progress=show_progress)

    def _answer(self, opens: Sequence[Opener], *, show_progress: bool = False) -> list[RequestOutput]:
        """Answer several requests together."""
        streams: list[_Stream] = []
        try:
            self._run(streams, opens, "generating", show_progress=show_progress)
        except EngineError as error:
            if 1 < len(opens) == len(streams):
                raise _batch_error(streams, str(error)) from error
            raise
        if len(opens) > 1 and any(stream.error is not None for stream in streams):
            raise _batch_error(streams, "unfinished")
        return [stream.result() for stream in streams]

    def _run(
        self, streams: list[_Stream], opens: Sequence[Opener], label: str, *, show_progress: bool
    ) -> None:
        """Submit requests, each as one of `streams`, and run steps until all have ended."""
        try:
            for index, open_request in enumerate(opens):
                try:
                    streams.append(self._submit(open_request(), keeps_deltas=False))
                except RequestError as error:
                    if len(opens) > 1:
                        error.args = (f"prompt {index} of {len(opens)}: {error}",)
                    raise
            unfinished = {stream.request_id for stream in streams}
            with progress(label, total=len(streams), is_shown=show_progress) as advance:
                while unfinished:
                    finished = unfinished.intersection(self._step()[1])
                    unfinished -= finished
                    advance(len(finished))
        finally:
            for stream in streams:
                self._close(stream)

    def chat(
        self,
        messages: Conversation | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool = False,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answer one conversation or several; a plain string is a conversation of one message.

        Several conversations may share one `SamplingParams`, or have one each, as the prompts of `generate`.
        An answer's `text` does not include its `reasoning` and `tool_calls`, which have fields of their own.
        Options are fields of `ChatOptions`: `tools` are in the form of OpenAI's API, or Python functions
        (functions.py); `tool_choice` is 'auto', 'none', 'required', or the name of a tool;
        max_reasoning_tokens, template_options; priority, deadline, cache_salt and adapter as in `generate`.
        """
        asked = _with_params(as_conversations(messages), params, "conversations")
        opens = [partial(self._open_chat, each, own, **options) for each, own in asked]
        with self._in_turn():
            return self._answer(opens, show_progress=show_progress)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        adapter: str = "",
        show_progress: bool = False,
    ) -> list[list[float]]:
        """One vector for each text or list of token ids, equal to a server's from `/v1/embeddings`.

        `pooling` ("last", "mean") and `normalize` (to length 1) are as in the model's files, unless given.
        `dimensions` is the count of numbers kept at the start of each vector, `adapter` the name of the
        LoRA adapter that computes them.
        """
        given = [read_prompt(prompt) for prompt in as_batch(prompts)]
        job = open_embeddings(
            self.encoder, given, pooling=pooling, normalize=normalize, dimensions=dimensions
        )
        states = self._hidden_states(job, show_progress=show_progress, adapter=adapter)
        return [job.finish(state) for state in states]

    def score(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
        use_activation: bool = True,
        show_progress: bool = False,
    ) -> list[float]:
        """The relevance of each document to the query, equal to a server's from `/v1/score` (scoring.py).

        Several queries need the same number of documents and are scored pair by pair. `instruction` tells a
        reranker what a query is for; without `use_activation` a score is its logit.
        """
        queries, texts = ([each] if isinstance(each, str) else each for each in (query, documents))
        job = open_scores(
            self.encoder, queries, texts, instruction=instruction, use_activation=use_activation
        )
        states = self._hidden_states(job.job, show_progress=show_progress)
        return job.scores([job.finish(state) for state in states])

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        show_progress: bool = False,
    ) -> list[ScoredDocument]:
        """The documents by relevance to the query, the best first; at most `top_n`."""
        scores = self.score(query, documents, instruction=instruction, show_progress=show_progress)
        return rank(documents, scores, top_n)

    def _hidden_states(
        self, job: EmbeddingJob, *, show_progress: bool, adapter: str = ""
    ) -> list[list[float]]:
        """The pooled hidden state of each input of a job."""
        requests = job.requests(self.encoder.next_id, adapter=adapter)
        opens = [partial(OutputBuilder, request, self.tokenizer, None, is_chat=True) for request in requests]
        streams: list[_Stream] = []
        with self._in_turn():
            self._run(streams, opens, "embedding", show_progress=show_progress)
        return [stream.embedding() for stream in streams]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> TextStream:
        """Continue one prompt, piece by piece; closing the iterator ends the request."""
        return self._stream(partial(self._open_prompt, prompt, params, **options))

    def stream_chat(
        self, messages: Conversation, params: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> TextStream:
        """Answer one conversation, piece by piece; a piece's `events` tell reasoning and calls from text."""
        return self._stream(partial(self._open_chat, messages, params, **options))

    def _stream(self, open_request: Opener) -> TextStream:
        with self._in_turn():
            builder = open_request()
            check_streams(builder.request.params, "use generate")
            return TextStream(self, self._submit(builder, keeps_deltas=True))

    def _submit(self, builder: OutputBuilder, *, keeps_deltas: bool) -> _Stream:
        stream = _Stream(builder, keeps_deltas)
        self.engine.add(builder.request)  # must be last: a request in the engine always has a reader
        self._streams[stream.request_id] = stream
        return stream

    def _close(self, stream: _Stream) -> None:
        self._streams.pop(stream.request_id, None)
        if self._engine is not None:
            self._engine.abort(stream.request_id)

    def step(self) -> list[StepOutput]:
        """Run one step of the engine; returns its outputs, whose text goes to the open streams."""
        with self._in_turn():
            return self._step()[0]

    def _step(self) -> tuple[list[StepOutput], list[str]]:
        """Run one step; returns its outputs, which go to their streams, and the requests that have ended."""
        while self._dropped:
            self._close(self._dropped.popleft())
        outputs, finished = self.engine.step(), list[str]()
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.param is not None:
                stream.refusal = RequestError(output.error or "the request was refused", param=output.param)
            stream.hidden = output.embedding
            delta, can_stop = stream.builder.take(output)
            if delta is not None:
                stream.take(delta)
                if delta.finish_reason is not None and stream.builder.is_finished:
                    finished.append(output.request_id)
            if can_stop:
                self.engine.abort(output.request_id, output.index)
        return outputs, finished


def _with_params(batch: list[Any], params: object, named: str) -> list[tuple[Any, Any]]:
    """Return each prompt with its parameters, which are given once for all or once for each."""
    is_list = isinstance(params, Iterable) and not isinstance(params, Mapping | str)
    each = list(cast("Iterable[object]", params)) if is_list else [params] * len(batch)
    if len(each) != len(batch):
        raise RequestError(
            f"{len(batch)} {named} but {len(each)} sampling parameters; give one for all or one each",
            param="params",
        )
    return list(zip(batch, each, strict=True))


@dataclass(slots=True, eq=False)
class _Stream:
    """One open request: its builder, and its unread pieces if it is streamed."""

    builder: OutputBuilder
    keeps_deltas: bool
    deltas: deque[TextDelta] = field(default_factory=deque)
    error: str | None = None
    hidden: Sequence[float] = ()  # pooled hidden state of an embedding
    refusal: RequestError | None = None  # the request's fault, found after it was added
    opened_at: float = field(default_factory=perf_counter)
    first_s: float = 0.0  # seconds from the call to the first token
    last_s: float = 0.0  # seconds from the call to the latest piece

    @property
    def request_id(self) -> str:
        return self.builder.request.request_id

    def take(self, delta: TextDelta) -> None:
        self.last_s = perf_counter() - self.opened_at
        if delta.token_ids and not self.first_s:
            self.first_s = self.last_s
        self.error = self.error or delta.error
        if self.keeps_deltas:
            self.deltas.append(delta)

    @property
    def is_answered(self) -> bool:
        return self.error is None and self.builder.is_finished

    def result(self) -> RequestOutput:
        self._check()
        return self.builder.build()

    def embedding(self) -> list[float]:
        self._check()
        return list(self.hidden)

    def _check(self) -> None:
        if self.refusal is not None:
            raise self.refusal
        if self.error is not None:
            raise EngineError(f"request {self.request_id} failed: {self.error}")


class TextStream(Iterator[TextDelta]):
    """The pieces of one answer. Closing the stream ends the request at once, dropping it at the next step."""

    def __init__(self, llm: LLM, stream: _Stream) -> None:
        self._llm = llm
        self._stream = stream
        self._is_closed = False

    def __next__(self) -> TextDelta:
        with self._llm._in_turn():
            return self._read()

    def _read(self) -> TextDelta:
        deltas = self._stream.deltas
        try:
            while not deltas:
                if self._is_closed or self._stream.builder.is_finished:
                    raise StopIteration
                self._llm._step()
            delta = deltas.popleft()
            if delta.error is not None:
                raise self._stream.refusal or EngineError(delta.error)
        except BaseException:
            self.close()
            raise
        return delta

    @property
    def num_prompt_tokens(self) -> int:
        """The number of tokens of the prompt."""
        return len(self._stream.builder.request.prompt)

    @property
    def seconds(self) -> tuple[float, float]:
        """The seconds from the call to the first token and to the latest piece, whenever pieces are read."""
        return self._stream.first_s, self._stream.last_s

    def close(self) -> None:
        """End the request, whatever its state; no more pieces come."""
        if not self._is_closed and not self._llm._is_inherited:
            with self._llm._in_turn():
                self._is_closed = True
                self._stream.deltas.clear()
                self._llm._close(self._stream)

    def __del__(self) -> None:
        # Garbage may be collected in the middle of a step, when the engine must be left alone.
        if not self._is_closed:
            self._llm._dropped.append(self._stream)


def _batch_error(streams: Sequence[_Stream], reason: str) -> BatchFailed:
    """The error for a batch in which some prompts failed, with the answers that are complete."""
    outputs = [stream.result() if stream.is_answered else None for stream in streams]
    failed = [i for i, output in enumerate(outputs) if output is None]
    first = streams[failed[0]].error or reason
    more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
    return BatchFailed(
        f"prompt {failed[0]}{more} of {len(streams)} failed: {first}; "
        "the other answers are in this error's outputs",
        outputs=outputs,
    )
