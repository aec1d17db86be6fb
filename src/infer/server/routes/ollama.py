"""Ollama's API under `/api/`: answers and embeddings (ollama_models.py has the routes about models).

    /api/chat        messages, tools, think, format, options  ──►  ChatRequest         as /v1/chat/completions
    /api/generate    system, prompt                           ──►  ChatRequest         of one or two messages
                     raw, prompt                              ──►  CompletionRequest   as /v1/completions
    /api/embed       input                                    ──►  EmbeddingRequest    as /v1/embeddings

A stream, the default here, is lines of JSON (NDJSON):

    {"model", "created_at", "message": {"role", "content"}, "done": false}       a piece of text
    {..., "message": {"role", "content": "", "thinking"}, ...}                   a piece of reasoning
    {..., "message": {"role", "content": "", "tool_calls": [...]}, ...}          a complete call
    {..., "done": true, "done_reason", "total_duration", "eval_count", ...}      the end
    {"error": "..."}                                                             instead of the rest
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import orjson
from fastapi import Request, Response

from infer.errors import RequestError
from infer.finish_reason import FinishReason
from infer.frontend.outputs import RequestOutput
from infer.frontend.prompts import PromptEncoder
from infer.sampling.params import MAX_INT
from infer.server.protocol.body import Body
from infer.server.protocol.errors import ApiError
from infer.server.protocol.generation import Generation, Piece
from infer.server.protocol.logprobs import chat_logprobs
from infer.server.protocol.ollama_to_chat import (
    OllamaBody,
    OllamaChat,
    OllamaGenerate,
    generate_to_chat,
    ollama_to_chat,
    read_format,
    read_sampling,
)
from infer.server.protocol.parts import Part, PartWriter
from infer.server.protocol.schemas import CompletionRequest, EmbeddingRequest, Int, Name
from infer.server.protocol.translate import Job, count_logprobs, encode_prompts, fill_context, open_completion
from infer.server.protocol.turns import Turns, spelled
from infer.server.routes.embeddings import list_response, make_vectors
from infer.server.routes.json_route import (
    answer,
    ignored_headers,
    json_response,
    make_router,
    open_agent,
    server_state,
)
from infer.server.routes.ollama_models import (
    NDJSON,
    OllamaErrorBody,
    find_name,
    now,
    read_keep_alive,
    use_model,
)
from infer.server.state import ServerState, current_record

router = make_router(OllamaErrorBody)

CUT_AT_END: dict[str, Any] = {"truncate_prompt_tokens": -1, "truncation_side": "right"}  # embeddings only


class OllamaEmbed(Body):
    """`POST /api/embed`."""

    ignored = frozenset({"keep_alive", "options"})
    elsewhere = {"prompt": "this route takes input"}

    model: Name
    input: str | list[str]
    dimensions: Int | None = None
    truncate: bool | None = None  # False: reject a text that does not fit; else cut off its end


class OllamaEmbeddings(Body):
    """`POST /api/embeddings`, the older route for one text."""

    ignored = frozenset({"keep_alive", "options"})
    elsewhere = {"input": "this route takes prompt, /api/embed takes input"}

    model: Name
    prompt: str


async def open_conversation(body: OllamaChat, http: Request) -> Job:
    """Return the job of `/api/chat`."""
    name = find_name(server_state(http), body.model)
    model = await use_model(server_state(http), name, body)
    check_abilities(body, model.encoder, has_tools=bool(body.tools))
    return fill_context(await open_agent(http, body, lambda it: ollama_to_chat(it, name)))


async def open_generate(body: OllamaGenerate, http: Request) -> Job:
    """Return the job of `/api/generate`: a completion of a raw prompt, or a chat after an earlier context."""
    state = server_state(http)
    name = find_name(state, body.model)
    encoder = (await use_model(state, name, body)).encoder
    check_abilities(body, encoder)
    if body.raw or body.suffix or not encoder.has_chat_template:
        return await open_raw(body, state, name)
    job = await open_agent(http, body, lambda it: generate_to_chat(it, name))
    if body.context:
        (before,) = await encode_prompts(encoder, [body.context], "context")
        request, bos_id = job.requests[0], encoder.tokenizer.bos_id
        prompt = request.prompt[1:] if request.prompt[:1] == (bos_id,) else request.prompt
        job = replace(job, requests=(replace(request, prompt=(*before, *prompt)),))
    return fill_context(job)


async def open_raw(body: OllamaGenerate, state: ServerState, name: str) -> Job:
    """Return the job of a prompt that is continued without a template."""
    for field in ("system", "context", "think"):
        if getattr(body, field):
            why = "raw is true" if body.raw else "this model has no chat template"
            why = "a suffix is given" if body.suffix else why
            raise RequestError.about(field, f"belongs to a conversation, and {why}; leave it out")
    turns = Turns()
    fields = {"max_tokens": MAX_INT} | read_sampling(turns, body) | read_format(body)
    fields["logprobs"] = count_logprobs(body.logprobs, body.top_logprobs)
    fields.pop("top_logprobs", None)
    body.note_ignored(turns.ignored)
    prompt = {"model": name, "prompt": body.prompt, "suffix": body.suffix}
    given = CompletionRequest.model_validate(prompt | fields)
    return fill_context(await open_completion(given, state))


def check_abilities(body: OllamaBody, encoder: PromptEncoder, *, has_tools: bool = False) -> None:
    """Reject what the model cannot do, in Ollama's words: clients look for them and retry without it."""
    lacks = {"tools": has_tools and encoder.dialect is None, "think": body.think and encoder.think is None}
    for field, is_lacking in lacks.items():
        if is_lacking:
            word = "tools" if field == "tools" else "thinking"
            raise RequestError(f'"{body.model}" does not support {word}; leave {field} out', param=field)


def nanoseconds(seconds: float) -> int:
    """Return seconds in nanoseconds, at least 0."""
    return max(int(seconds * 1e9), 0)


def spent() -> dict[str, int]:
    """Return the time of the current request so far, and how much of it was the wait for its model."""
    record = current_record()
    assert record is not None, "the access log gives every request a record"
    total_s = perf_counter() - record.arrived_at
    return {"total_duration": nanoseconds(total_s), "load_duration": nanoseconds(record.load_s)}


class OllamaWriter(PartWriter):
    """Ollama's format of a chat: lines of JSON, the last with the counts; calls are sent complete."""

    media_type = NDJSON
    ping = b""  # clients parse every line

    def __init__(self, generation: Generation, body: OllamaBody) -> None:
        super().__init__(generation, body)
        self.token_ids: list[int] = []
        self._model = body.model
        self._has_logprobs = bool(body.logprobs)
        self._logprobs: list[dict[str, Any]] = []  # logprobs that were not sent yet

    def said(self, content: str, rest: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a piece of the answer; `rest` has its reasoning and calls."""
        return {"message": {"role": "assistant", "content": content, **rest}}

    def frames(self, piece: Piece) -> list[bytes]:
        """Return the frames that a piece adds to the answer."""
        self._take(piece.delta.token_ids, piece.delta.logprobs)
        return super().frames(piece)

    def whole(self, answers: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        output = answers[0].outputs[0]
        self._take(output.token_ids, output.logprobs or ())
        return super().whole(answers)

    def add(self, part: Part, text: str) -> bytes:
        """Return a line with more text or reasoning; empty for a call, which is sent at its end."""
        match part.kind:
            case "text":
                return self._line(self.said(text, {}))
            case "reasoning":
                return self._line(self.said("", {"thinking": text}))
            case "call":
                return b""

    def close(self, part: Part) -> list[bytes]:
        """Return the line of a call; none for a call that was cut short."""
        calls = self._calls([part])
        return [self._line(self.said("", {"tool_calls": calls}))] if calls else []

    def finish(self) -> list[bytes]:
        """Return the last line."""
        return [self._line(self.said("", {}) | self.ending())]

    def body(self) -> dict[str, Any]:
        """Return the whole answer."""
        joined = {
            kind: "".join(part.text for part in self.parts if part.kind == kind)
            for kind in ("text", "reasoning")
        }
        rest: dict[str, Any] = {"thinking": joined["reasoning"]} if joined["reasoning"] else {}
        if calls := self._calls(self.parts):
            rest["tool_calls"] = calls
        return self._fields(self.said(joined["text"], rest) | self.ending())

    @classmethod
    def failure(cls, told: ApiError) -> bytes:
        """Return the last line of a stream that fails."""
        return told.encode() + b"\n"

    def ending(self) -> dict[str, Any]:
        """Return why the answer ended, how long it took and how many tokens it has."""
        usage, (prompt_s, answer_s) = self.generation.usage(), self.generation.phases_s()
        return {
            "done": True,
            "done_reason": "length" if self.finish_reason == FinishReason.LENGTH else "stop",
            **spent(),
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": nanoseconds(prompt_s),
            "eval_count": usage["completion_tokens"],
            "eval_duration": nanoseconds(answer_s),
            **self.generation.metrics(),
        }

    def _take(self, token_ids: Sequence[int], rows: Sequence[Any]) -> None:
        self.token_ids += token_ids
        if self._has_logprobs:
            tokenizer = self.generation.job.model.encoder.tokenizer
            self._logprobs += chat_logprobs(tokenizer, rows)["content"]

    def _calls(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """Return the calls among some parts, with their numbers within the whole answer."""
        numbers = {part.index: i for i, part in enumerate(each for each in self.parts if each.kind == "call")}
        return [
            {
                "id": part.call_id,
                "function": {"index": numbers[part.index], "name": part.name, "arguments": given},
            }
            for part in parts
            if part.kind == "call" and (given := part.arguments) is not None
        ]

    def _line(self, fields: Mapping[str, Any]) -> bytes:
        return orjson.dumps(self._fields(fields)) + b"\n"

    def _fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {"model": self._model, "created_at": now(), "done": False, **fields}
        if self._logprobs:
            made["logprobs"], self._logprobs = self._logprobs, []
        return made


class GenerateWriter(OllamaWriter):
    """Ollama's format of a completion; it ends with all tokens so far, so that a client can continue it."""

    def __init__(self, generation: Generation, body: OllamaGenerate) -> None:
        super().__init__(generation, body)
        self._has_context = generation.job.is_chat

    def said(self, content: str, rest: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a piece of the answer."""
        return {"response": content, **rest}

    def ending(self) -> dict[str, Any]:
        """Return the last fields, with the context unless the prompt was raw."""
        ended = super().ending()
        if self._has_context:
            ended["context"] = [*self.generation.job.requests[0].prompt, *self.token_ids]
        return ended


async def load(http: Request, body: OllamaBody, said: Mapping[str, Any]) -> Response:
    """Answer a body without a prompt, which clients send to load a model or unload an on-demand one."""
    state = server_state(http)
    name = find_name(state, body.model)
    is_unload = body.keep_alive is not None and read_keep_alive(body.keep_alive) == 0
    if is_unload and state.demand is None:
        raise RequestError.about(
            "keep_alive", "is 0, which unloads a model; here the server's operator does that (/admin/models)"
        )
    if not is_unload or state.models_of(name):
        await use_model(state, name, body)
    given = body.model_fields_set - {"model", "stream", "keep_alive"}
    body.note_ignored(sorted(name for name in given if getattr(body, name)))
    reason = "unload" if is_unload else "load"
    made = {"model": body.model, "created_at": now(), **said, "done": True, "done_reason": reason}
    return json_response(made, body)


def read_wishes(http: Request, body: OllamaBody) -> None:
    """Make this API's default (a stream) explicit, and note fields without effect."""
    body.stream = body.stream is not False
    if body.keep_alive is not None and server_state(http).demand is None:
        body.note_ignored(["keep_alive"])


@router.post("/api/chat", response_model=None)
async def chat(body: OllamaChat, http: Request) -> Response:
    """Answer a conversation."""
    read_wishes(http, body)
    if not body.messages:
        return await load(http, body, {"message": {"role": "assistant", "content": ""}})
    return await answer(http, body, open_conversation(body, http), OllamaWriter)


@router.post("/api/generate", response_model=None)
async def generate(body: OllamaGenerate, http: Request) -> Response:
    """Answer or continue a prompt."""
    read_wishes(http, body)
    if not body.prompt:
        return await load(http, body, {"response": ""})
    return await answer(http, body, open_generate(body, http), GenerateWriter)


@router.post("/api/embed", response_model=None)
async def embed(body: OllamaEmbed, http: Request) -> Response:
    """Return one vector per text."""
    most: dict[str, Any] = {"truncate_prompt_tokens": None} if body.truncate is False else {}
    wishes: dict[str, Any] = {"input": body.input, "dimensions": body.dimensions}
    vectors, num_tokens = await _vectors(http, body.model, wishes | CUT_AT_END | most)
    rest = {"model": body.model, **spent(), "prompt_eval_count": num_tokens}
    return await list_response(b'{"embeddings":[', vectors, rest, body)


@router.post("/api/embeddings", response_model=None)
async def embed_one(body: OllamaEmbeddings, http: Request) -> Response:
    """Return the vector of one text."""
    with spelled({"input": "prompt"}):
        vectors, _ = await _vectors(http, body.model, {"input": body.prompt} | CUT_AT_END)
    content = b'{"embedding":' + vectors[0] + b"}"
    return Response(content, headers=ignored_headers(body), media_type="application/json")


async def _vectors(http: Request, model: str, wishes: Mapping[str, Any]) -> tuple[list[bytes], int]:
    """Return the vectors of texts as JSON, and the number of tokens."""
    name = find_name(server_state(http), model)
    asked = EmbeddingRequest.model_validate({"model": name, **wishes})
    vectors, num_tokens, _ = await make_vectors(http, asked, lambda _, vector: orjson.dumps(vector))
    return vectors, num_tokens
