"""Ollama's API under `/api/`, converted to a chat or a completion.

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

Only the operator chooses the models: `/api/pull` downloads nothing, and `keep_alive` has an effect only
on on-demand models. Ollama's names have a tag, so `my-model` is listed as `my-model:latest` and found by
either name.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from time import monotonic, perf_counter
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from infer import __version__
from infer.errors import RequestError, UnknownModel, closest, show_value
from infer.finish_reason import FinishReason
from infer.frontend.outputs import RequestOutput
from infer.frontend.prompts import PromptEncoder
from infer.sampling.params import MAX_INT
from infer.server.protocol.errors import ApiError
from infer.server.protocol.generation import Generation, Piece
from infer.server.protocol.logprobs import chat_logprobs
from infer.server.protocol.parts import Part, PartWriter
from infer.server.protocol.schemas import (
    AskingBody,
    Body,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    Int,
    Name,
    Neutral,
)
from infer.server.protocol.translate import Job, encode_prompts, fill_context, open_completion
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
from infer.server.routes.llama_cpp import RANDOM_SEED, LlamaSampling
from infer.server.state import ServedModel, ServerState, current_record

FOLLOWED = "0.12.11"  # version of Ollama's API; VS Code rejects servers below 0.6.4
LATEST = ":latest"
DURATION = re.compile(r"-?(?:\d+(?:\.\d+)?(?:ns|us|µs|ms|s|m|h))+")
DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
LONGEST_KEEP_S = 10 * 365 * 86_400.0  # a longer time means forever
NEVER = "9999-12-31T23:59:59Z"  # expiry time of a model that is never unloaded
NDJSON = "application/x-ndjson"
_TEXT_ONLY = Neutral(([],), "this server reads and writes text")
_NO_IMAGES = Neutral((), "this server makes no images")
_FILTERS = "filters are top_k, top_p and min_p"


# -- request bodies --------------------------------------------------------------------------------


class OllamaOptions(LlamaSampling):
    """The sampling parameters of a request, and Ollama's options for running a model."""

    neutral = {
        "mirostat": Neutral((0,), _FILTERS),
        "tfs_z": Neutral((1.0,), _FILTERS),
        "typical_p": Neutral((1.0,), _FILTERS),
    }
    # the operator sets num_ctx (max_seq_len); penalties apply to the whole text, not to repeat_last_n tokens
    ignored = frozenset({
        "draft_num_predict", "embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu",
        "mirostat_eta", "mirostat_tau", "num_batch", "num_ctx", "num_gpu", "num_keep", "num_thread",
        "numa", "penalize_newline", "repeat_last_n", "use_mlock", "use_mmap", "vocab_only",
    })  # fmt: skip

    num_predict: Int | None = None


SAMPLING_NAMES = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}  # others are the same
CUT_AT_END: dict[str, Any] = {"truncate_prompt_tokens": -1, "truncation_side": "right"}  # embeddings only
NO_LIMIT = (-2, -1, 0)  # values of num_predict
THINKING = {"low": "low", "medium": "medium", "high": "high", "max": "xhigh"}  # efforts in a chat


class OllamaMessage(Body):
    """A message by one author."""

    neutral = {"images": _TEXT_ONLY}

    role: str
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaCall(Body):
    """A tool call of an earlier answer."""

    ignored = frozenset({"index"})
    neutral = {"type": Neutral(("function",), "tools are functions")}

    function: dict[str, Any]
    id: str | None = None


class OllamaFunction(Body):
    """The function of a call."""

    ignored = frozenset({"index"})

    name: str
    arguments: dict[str, Any] | str | None = None


class OllamaBody(AskingBody):
    """The fields that `/api/chat` and `/api/generate` share."""

    ignored = frozenset({"shift", "truncate"})  # prompts are never truncated
    elsewhere = {
        **dict.fromkeys((*OllamaOptions.model_fields, *OllamaOptions.ignored), "put it into options"),
        "max_tokens": "put num_predict into options",
        "response_format": "this route takes format",
        "tool_choice": "this API has none; leave tools out where none may be called",
    }
    renamed = {
        **{SAMPLING_NAMES.get(name, name): f"options.{name}" for name in OllamaOptions.model_fields},
        "reasoning_effort": "think",
        "response_format.json_schema": "format",
        "response_format": "format",
    }

    model: Name
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: bool | str | None = None
    keep_alive: str | float | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None


class OllamaChat(OllamaBody):
    """`POST /api/chat`."""

    elsewhere = {**OllamaBody.elsewhere, "prompt": "plain prompts go to /api/generate"}

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerate(OllamaBody):
    """`POST /api/generate`."""

    neutral = {
        "images": _TEXT_ONLY,
        "template": Neutral(("",), "templates are never taken from requests"),
        **dict.fromkeys(("width", "height", "steps"), _NO_IMAGES),
    }
    elsewhere = {**OllamaBody.elsewhere, "messages": "conversations go to /api/chat"}
    renamed = {**OllamaBody.renamed, "messages": "prompt"}

    prompt: str | None = None
    system: str | None = None
    suffix: str | None = None
    raw: bool | None = None
    context: list[int] | None = None


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


class OllamaNamed(AskingBody):
    """A body about one model, named in the newer field or the older one."""

    ignored = frozenset({"insecure", "options", "password", "system", "template", "username", "verbose"})

    model: Name | None = None
    name: Name | None = None

    @property
    def wanted(self) -> str:
        """The model's name."""
        if (self.model or self.name) is None:
            raise RequestError.about("model", "is missing; give the name of a model")
        return str(self.model or self.name)


# -- names of models -------------------------------------------------------------------------------


def tagged(name: str) -> str:
    """Return a name as Ollama lists it, with a tag."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def find_name(state: ServerState, name: str) -> str:
    """Return the served name that a client means; either name may lack the tag."""
    known = [*state.names, *state.other_names]
    for each in (name, name.removesuffix(LATEST), tagged(name)):
        if each in known:
            return each
    hint = closest(name, known, listed="served")
    raise UnknownModel(f'model "{name[:100]}" not found{hint}', param="model")


async def use_model(state: ServerState, name: str, body: OllamaBody) -> ServedModel:
    """Return the model of a served name; an on-demand model stays loaded for the body's `keep_alive`."""
    keep_s = None if body.keep_alive is None else read_keep_alive(body.keep_alive)
    model = await state.use_model(name)
    if keep_s is not None and state.demand is not None:
        model.keep_s, model.kept_at = keep_s, monotonic()
    return model


def read_keep_alive(given: str | float) -> float:
    """Return the seconds that a model stays loaded after its last request.

    A number below 0 means forever, and so does one above ten years.
    """
    if isinstance(given, str) and DURATION.fullmatch(given):
        seconds = sum(float(number) * UNIT_S[unit] for number, unit in DURATION_PART.findall(given))
        seconds = -seconds if given.startswith("-") else seconds
    else:
        try:
            seconds = float(given)
        except ValueError:
            seconds = math.nan
    if math.isnan(seconds):
        raise RequestError.about(
            "keep_alive", f'must be seconds or a duration such as "5m" or "24h", got {show_value(given)}'
        )
    return math.inf if seconds < 0 or seconds > LONGEST_KEEP_S else seconds


# -- conversion to a chat --------------------------------------------------------------------------


def ollama_to_chat(body: OllamaChat, name: str) -> ChatRequest:
    """Convert a body of `/api/chat` to a chat; raises a `RequestError` that names the field."""
    turns = Turns()
    messages: list[dict[str, Any]] = []
    waiting = OpenCalls()
    for i, given in enumerate(body.messages or ()):
        path = ("messages", i)
        said = turns.read_as(OllamaMessage, given, path)
        message: dict[str, Any] = {"role": said.role, "content": said.content or ""}
        if said.thinking:
            message["reasoning_content"] = said.thinking
        if said.tool_calls:
            message["tool_calls"] = [
                _call(turns, call, (*path, "tool_calls", k)) for k, call in enumerate(said.tool_calls)
            ]
            for call in message["tool_calls"]:
                waiting.add(call)
        if said.role == "tool":
            named = {"tool_call_id": waiting.close(said), "name": said.tool_name}
            message |= {key: value for key, value in named.items() if value is not None}
        messages.append(message)
    fields: dict[str, Any] = {"model": name, "messages": messages}
    if messages and messages[-1]["role"] == "assistant":
        fields["continue_final_message"] = True  # the answer continues its text
    if body.tools:
        fields["tools"] = body.tools
    return _make_chat(turns, body, fields)


def _call(turns: Turns, given: dict[str, Any], path: tuple[str | int, ...]) -> dict[str, Any]:
    """Convert a tool call to OpenAI's format; a call without an id gets one."""
    call = turns.read_as(OllamaCall, given, path)
    function = turns.read_as(OllamaFunction, call.function, (*path, "function"))
    made_up = "call_" + "_".join(str(step) for step in path if isinstance(step, int))
    named = {"name": function.name, "arguments": function.arguments or {}}
    return {"id": call.id or made_up, "type": "function", "function": named}


class OpenCalls:
    """Calls without a result, in order; adding and closing take amortized constant time."""

    def __init__(self) -> None:
        self._ids: deque[str] = deque()
        self._ids_by_name: defaultdict[str | None, deque[str]] = defaultdict(deque)
        self._closed: set[str] = set()

    def add(self, call: Mapping[str, Any]) -> None:
        """Add a call."""
        self._ids.append(call["id"])
        self._ids_by_name[call["function"]["name"]].append(call["id"])

    def close(self, said: OllamaMessage) -> str | None:
        """Return the id of the call that a result answers: by id, by its tool's name, else the next one."""
        named = [] if said.tool_call_id is None else [said.tool_call_id]
        for waiting in (deque(named), self._ids_by_name[said.tool_name], self._ids):
            while waiting:
                found = waiting.popleft()
                if found not in self._closed or named:
                    self._closed.add(found)
                    return found
        return None


def generate_to_chat(body: OllamaGenerate, name: str) -> ChatRequest:
    """Convert a body of `/api/generate` to a chat: a system message, if any, and a user message."""
    system = [{"role": "system", "content": body.system}] if body.system else []
    messages = [*system, {"role": "user", "content": body.prompt}]
    return _make_chat(Turns(), body, {"model": name, "messages": messages})


def _make_chat(turns: Turns, body: OllamaBody, fields: dict[str, Any]) -> ChatRequest:
    """Return a chat, adding the fields that both routes share."""
    fields |= _sampling(turns, body) | _thinking(body) | _format(body)
    body.note_ignored(turns.ignored)
    return ChatRequest.model_validate(fields)


def _sampling(turns: Turns, body: OllamaBody) -> dict[str, Any]:
    """Return options, logprobs and stream as fields of a chat."""
    options = turns.read_as(OllamaOptions, body.options or {}, ("options",))
    given = {name: getattr(options, name) for name in OllamaOptions.model_fields}
    if given["num_predict"] in NO_LIMIT:
        given["num_predict"] = None
    if given["seed"] == RANDOM_SEED:
        given["seed"] = None
    fields = {SAMPLING_NAMES.get(name, name): value for name, value in given.items()}
    fields |= {name: getattr(body, name) for name in ("stream", "logprobs", "top_logprobs")}
    return {name: value for name, value in fields.items() if value is not None}


def _thinking(body: OllamaBody) -> dict[str, Any]:
    """Return the limit on reasoning; without `think`, the model's own default applies."""
    if body.think is None:
        return {}
    if isinstance(body.think, bool):
        return {"reasoning_effort": "high" if body.think else "none"}
    if body.think not in THINKING:
        allowed = ", ".join(("true", "false", *THINKING))
        raise RequestError.about("think", f"must be one of {allowed}, got {show_value(body.think)}")
    return {"reasoning_effort": THINKING[body.think]}


def _format(body: OllamaBody) -> dict[str, Any]:
    """Return the format of the answer: free text, any JSON object, or a JSON schema."""
    if isinstance(body.format, dict):
        schema = {"name": "format", "schema": body.format}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if body.format == "json":
        return {"response_format": {"type": "json_object"}}
    if body.format:
        raise RequestError.about("format", f'must be "json" or a JSON schema, got {show_value(body.format)}')
    return {}


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
    fields = {"max_tokens": MAX_INT} | _sampling(turns, body) | _format(body)
    has_logprobs, num_top = fields.pop("logprobs", False), fields.pop("top_logprobs", None)
    if num_top is not None and not has_logprobs:
        raise RequestError.about("top_logprobs", "needs logprobs to be true")
    fields["logprobs"] = (num_top or 0) if has_logprobs else None
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


# -- responses -------------------------------------------------------------------------------------


class OllamaErrorBody(BaseModel):
    """The body of every error of these routes."""

    error: str


router = make_router(OllamaErrorBody)
root = APIRouter(include_in_schema=False)  # only for servers without the web page, which has this path


@root.head("/")
@root.get("/")
async def probe() -> Response:
    """Answer that the server is running, which Ollama's clients check first."""
    return Response("infer is running", media_type="text/plain")


def spell_time(at: datetime) -> str:
    """Format a UTC time as Ollama does."""
    return at.isoformat().replace("+00:00", "Z")


def now() -> str:
    """Return the current time."""
    return spell_time(datetime.now(UTC))


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


# -- served models ---------------------------------------------------------------------------------


def details(state: ServerState, name: str, model: ServedModel | None) -> dict[str, Any]:
    """Return Ollama's details of a model, as far as they are known; `model` is None if it is not loaded."""
    family, form = "", ""
    if model is not None:
        stats, family = model.clients[0].stats(), model.encoder.family
        form = stats.weights or stats.dtype
    return {
        "parent_model": tagged(state.adapters[name]) if name in state.adapters else "",
        "format": "",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": form,
    }


def listed(state: ServerState, name: str) -> dict[str, Any]:
    """Return a model's entry in a list; its digest, by which clients identify models, hashes its name."""
    model = next(iter(state.models_of(name)), None)
    return {
        "name": tagged(name),
        "model": tagged(name),
        "modified_at": made_at(model),
        "size": 0,
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": details(state, name, model),
    }


def made_at(model: ServedModel | None) -> str:
    """Return the time at which a model was loaded; 1970 if it is not."""
    return spell_time(datetime.fromtimestamp(0 if model is None else model.created, UTC))


def expires_at(state: ServerState, model: ServedModel) -> str:
    """Return the time at which a model will be unloaded if no request uses it."""
    keep_s = model.keep_s if model.keep_s is not None else state.config.idle_unload or math.inf
    if math.isinf(keep_s):
        return NEVER
    rest_s = max(model.used_at + keep_s - monotonic(), 0.0)
    return spell_time(datetime.now(UTC) + timedelta(seconds=rest_s))


@router.head("/api/tags", response_model=None, include_in_schema=False)
@router.get("/api/tags", response_model=None)
async def list_tags(http: Request) -> Response:
    """List all models, aliases and adapters."""
    state = server_state(http)
    return json_response({"models": [listed(state, name) for name in (*state.names, *state.other_names)]})


@router.get("/api/ps", response_model=None)
async def list_running(http: Request) -> Response:
    """List the loaded models."""
    state = server_state(http)
    models = []
    for name, model in state.models.items():
        expires = expires_at(state, model)
        rest = {"expires_at": expires, "size_vram": 0, "context_length": model.encoder.context_len}
        models.append(listed(state, name) | rest)
    return json_response({"models": models})


@router.post("/api/show", response_model=None)
async def show(body: OllamaNamed, http: Request) -> Response:
    """Return the facts that clients may know about a model, above all its context length and capabilities.

    This never loads a model: little more than the name of an unloaded on-demand model is known.
    """
    state = server_state(http)
    name = find_name(state, body.wanted)
    model = state.look_at(name)
    shown: dict[str, Any] = {
        "modelfile": f"FROM {tagged(name)}",
        "parameters": "",
        "template": "",
        "modified_at": made_at(model),
        "details": details(state, name, model),
        "model_info": {"general.basename": name if model is None else model.name},
        "capabilities": ["completion"],
    }
    if model is not None:
        encoder = model.encoder
        parameters = [
            f"{option:<30} {value}"
            for option in OllamaOptions.model_fields
            if (value := encoder.sampling_defaults.get(SAMPLING_NAMES.get(option, option))) is not None
        ]
        shown |= {"parameters": "\n".join(parameters), "template": encoder.chat_template or ""}
        shown["model_info"]["general.architecture"] = encoder.family
        shown["model_info"][f"{encoder.family}.context_length"] = encoder.context_len
        abilities = {"tools": encoder.dialect is not None, "thinking": encoder.think is not None}
        shown["capabilities"] += [ability for ability, has_it in abilities.items() if has_it]
    return json_response(shown, body)


@router.head("/api/version", response_model=None, include_in_schema=False)
@router.get("/api/version", response_model=None)
async def get_version() -> Response:
    """Return the version of Ollama's API, which clients check, and this package's version."""
    return json_response({"version": FOLLOWED, "infer": __version__})


@router.post("/api/pull", response_model=None)
async def pull(body: OllamaNamed, http: Request) -> Response:
    """Report success for a served model; other models are not downloaded."""
    try:
        find_name(server_state(http), body.wanted)
    except UnknownModel as error:
        advice = "this server fetches nothing for clients: its operator starts it with the model"
        raise UnknownModel(f"{error}; {advice}", param="model") from None
    if body.stream is False:
        return json_response({"status": "success"}, body)
    lines = b"".join(orjson.dumps({"status": each}) + b"\n" for each in ("pulling manifest", "success"))
    return Response(lines, headers=ignored_headers(body), media_type=NDJSON)


@router.delete("/api/delete", response_model=None)
@router.post("/api/create", response_model=None)
@router.post("/api/copy", response_model=None)
@router.post("/api/push", response_model=None)
@router.post("/api/blobs/{digest}", response_model=None)
async def refuse_change(http: Request) -> Response:
    """Reject changes to the served models, which only the operator can make."""
    raise RequestError(
        f"{http.url.path[:100]} is not supported: the operator chooses the models when "
        "the server starts or through /admin/models"
    )
