"""Convert bodies of Ollama's `/api/chat` and `/api/generate` to chats.

    messages, tools, think, format, options   ──►  ollama_to_chat     ──► ChatRequest
    system, prompt                            ──►  generate_to_chat   ──► ChatRequest of one or two messages
    raw, prompt                               ──►  (routes/ollama.py)     CompletionRequest

A missing option has the model's default. Tool results often name no call, or only the tool: they answer the
calls that are still open, in order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

from infer.errors import RequestError, show_value
from infer.server.protocol.body import Body, Neutral
from infer.server.protocol.errors import Path
from infer.server.protocol.schemas import (
    RANDOM_SEED,
    TEXT_ONLY,
    AskingBody,
    ChatRequest,
    Int,
    LlamaSampling,
    Name,
)
from infer.server.protocol.turns import Turns

_NO_INPUT_IMAGES = Neutral(([],), TEXT_ONLY)
_NO_IMAGES = Neutral((), "this server makes no images")
_FILTERS = "filters are top_k, top_p and min_p"


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
NO_LIMIT = (-2, -1, 0)  # values of num_predict
THINKING = {"low": "low", "medium": "medium", "high": "high", "max": "xhigh"}  # efforts in a chat


class OllamaMessage(Body):
    """A message by one author."""

    neutral = {"images": _NO_INPUT_IMAGES}

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
        "images": _NO_INPUT_IMAGES,
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


def _call(turns: Turns, given: dict[str, Any], path: Path) -> dict[str, Any]:
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
    fields |= read_sampling(turns, body) | _thinking(body) | read_format(body)
    body.note_ignored(turns.ignored)
    return ChatRequest.model_validate(fields)


def read_sampling(turns: Turns, body: OllamaBody) -> dict[str, Any]:
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


def read_format(body: OllamaBody) -> dict[str, Any]:
    """Return the format of the answer: free text, any JSON object, or a JSON schema."""
    if isinstance(body.format, dict):
        schema = {"name": "format", "schema": body.format}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if body.format == "json":
        return {"response_format": {"type": "json_object"}}
    if body.format:
        raise RequestError.about("format", f'must be "json" or a JSON schema, got {show_value(body.format)}')
    return {}
