"""`POST /v1/responses`: OpenAI's newer API, as a chat in other words, and without a memory.

    instructions, input items    ──►  messages             turns.py
    tools, tool_choice           ──►  tools, tool_choice   flat here, nested there; namespaces are opened
    text.format                  ──►  response_format
    reasoning.effort             ──►  reasoning_effort
    max_output_tokens            ──►  max_tokens

Nothing is kept between requests: the whole conversation comes with each, and fields that point to an earlier
response are refused by name. The answer is items; every event of a stream has a number of its own, from 0.

    response.created, response.in_progress
    response.output_item.added                    an item: reasoning, a message, or a function call
      response.content_part.added                 its text, if it is no call
      response.{output_text, reasoning_text, function_call_arguments}.delta ... .done
      response.content_part.done
    response.output_item.done
    response.completed | response.incomplete      the whole response; incomplete: its limit was reached
    response.failed, error                        in place of the rest, if it fails
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import orjson
from fastapi import Request, Response
from pydantic import PrivateAttr

from infer.errors import RequestError
from infer.server.protocol.errors import Path, spell_path, to_api_error
from infer.server.protocol.parts import Part, PartWriter, reasoning_tokens
from infer.server.protocol.schemas import ABOUT_THE_CLIENT, AskingBody, Body, ChatRequest, Int, Name, Neutral
from infer.server.protocol.stream import Generation, named_event
from infer.server.protocol.structured import check_has_schema
from infer.server.protocol.turns import Turns
from infer.server.routes.json_route import answer, make_router, open_agent
from infer.tokenizer.chat_template import map_strings

_NOT_KEPT = "this server keeps nothing between requests; send the whole conversation as input"
_NO_HOSTED_TOOLS = "tools run where the client runs; describe one with type function, name and parameters"
_TEXT_ONLY = "this server reads and writes text"
_DIRECT = Neutral(({"type": "direct"},), _NO_HOSTED_TOOLS)


# -- what clients send -----------------------------------------------------------------------------


class TextPart(Body):
    """Text of a message, or what a tool said."""

    ignored = frozenset({"annotations", "logprobs", "parsed", "prompt_cache_breakpoint"})

    text: str


class RefusalPart(Body):
    """What an earlier answer said in place of a text."""

    refusal: str


class MessageItem(Body):
    """What a user, an operator or the assistant said."""

    ignored = frozenset({"id", "phase", "status"})

    role: str
    content: str | list[dict[str, Any]]


class FunctionCallItem(Body):
    """A tool call of an earlier answer."""

    ignored = frozenset({"id", "namespace", "parsed_arguments", "status"})
    neutral = {"caller": _DIRECT}

    call_id: str
    name: str
    arguments: str


class CallOutputItem(Body):
    """What a tool call came to."""

    ignored = frozenset({"id", "status"})
    neutral = {"caller": _DIRECT}

    call_id: str
    output: str | list[dict[str, Any]]


class ReasoningItem(Body):
    """Reasoning of an earlier answer: its text, or a summary where there is no text."""

    ignored = frozenset({"encrypted_content", "id", "status"})

    summary: list[dict[str, Any]] | None = None
    content: list[dict[str, Any]] | None = None


class ResponsesTool(Body):
    """A tool that the client runs."""

    ignored = frozenset({"output_schema"})
    elsewhere = {"function": 'tools are flat here: {"type": "function", "name": ..., "parameters": {...}}'}
    neutral = {
        "allowed_callers": Neutral((["direct"],), _NO_HOSTED_TOOLS),
        "defer_loading": Neutral((False,), "all tools are shown to the model"),
    }

    name: str
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class NamespaceTool(Body):
    """Tools under a common name, which comes back with their calls."""

    name: str
    tools: list[dict[str, Any]]
    description: str | None = None


class NamedTool(Body):
    """The tool that must be called."""

    name: str


class TextOptions(Body):
    """The form of the answer's text."""

    where = "text."
    ignored = frozenset({"verbosity"})

    format: dict[str, Any] | None = None


class ReasoningOptions(Body):
    """How much the model reasons before it answers."""

    where = "reasoning."
    ignored = frozenset({"summary", "generate_summary"})  # reasoning is shown as it is
    neutral = {"context": Neutral(("auto",), _NOT_KEPT), "mode": Neutral(("standard",), "there is one mode")}

    effort: str | None = None


ITEMS: dict[str, type[Body]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
}
PARTS: dict[str, type[Body]] = {"input_text": TextPart, "output_text": TextPart, "refusal": RefusalPart}
REASONING_PARTS: dict[str, type[Body]] = {"reasoning_text": TextPart, "summary_text": TextPart}
REFUSED_ITEMS = {"item_reference": _NOT_KEPT, "compaction": _NOT_KEPT}
REFUSED_PARTS = dict.fromkeys(("input_image", "input_file", "input_audio"), _TEXT_ONLY)
TOOLS: dict[str, type[Body]] = {"function": ResponsesTool, "namespace": NamespaceTool}
HOSTED_TOOL = re.compile(  # types of tools that OpenAI defines; some end in a date
    "(apply_patch|code_interpreter|computer(?:_use(?:_preview)?)?|file_search|image_generation|local_shell"
    "|mcp|programmatic_tool_calling|shell|tool_search|web_search(?:_preview)?)[_0-9]*"
)
ROLES = ("user", "assistant", "system", "developer")


class ResponseStreamOptions(Body):
    """What a stream carries beside its events."""

    where = "stream_options."
    neutral = {"include_obfuscation": Neutral((False,), "events are not padded")}


class ResponsesRequest(AskingBody):
    """`POST /v1/responses`."""

    neutral = {
        "background": Neutral((False,), "an answer comes on the connection that asked for it"),
        "context_management": Neutral(([],), _NOT_KEPT),
        "conversation": Neutral((), _NOT_KEPT),
        "max_tool_calls": Neutral((), "tools run where the client runs: it counts their calls"),
        "moderation": Neutral((), "this server does not moderate"),
        "previous_response_id": Neutral((), _NOT_KEPT),
        "prompt": Neutral((), "this server keeps no prompts; send instructions and input"),
        "store": Neutral((False,), "this server keeps nothing between requests"),
        "top_logprobs": Neutral((0,), "logprobs are a part of /v1/chat/completions"),
        "truncation": Neutral(("disabled",), "a prompt is never cut; shorten it before sending"),
    }
    ignored = (ABOUT_THE_CLIENT - {"metadata", "store", "user"}) | {"client_metadata"}
    elsewhere = {
        "max_tokens": "this route takes max_output_tokens",
        "messages": "messages go to /v1/chat/completions, this route takes input",
        "prompt": "plain prompts go to /v1/completions, this route takes input",
        "response_format": "this route takes text.format",
    }
    renamed = {
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "reasoning_effort": "reasoning.effort",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
    }

    model: Name | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    max_output_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream_options: ResponseStreamOptions | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None

    _namespaces: dict[str, str] = PrivateAttr(default_factory=dict)  # namespaces of functions, by name


# -- the chat that it is ---------------------------------------------------------------------------


def responses_to_chat(body: ResponsesRequest) -> ChatRequest:
    """The chat that a response answers; raises a `RequestError` that names the field of this API."""
    turns = Turns()
    if body.instructions is not None:
        turns.say("system", body.instructions)
    if isinstance(body.input, str):
        turns.say("user", body.input)
    else:
        for i, item in enumerate(body.input):
            _add_item(turns, item, ("input", i))
    fields: dict[str, Any] = {"messages": turns.messages(), "max_tokens": body.max_output_tokens}
    if body.tools:
        map_strings(body.tools, str)  # bounds their depth: tools are sent back, also those no template sees
        fields["tools"] = list(_functions(turns, body, body.tools, ("tools",)))
    if isinstance(body.tool_choice, dict):
        named = turns.read(
            {"function": NamedTool}, body.tool_choice, ("tool_choice",), refused=_NO_HOSTED_TOOLS
        )
        fields["tool_choice"] = {"type": "function", "function": {"name": named.name}}
    else:
        fields["tool_choice"] = body.tool_choice
    if body.text is not None:
        turns.ignored |= {f"text.{name}": None for name in body.text.ignored_fields}
        if body.text.format is not None:
            fields["response_format"] = _format(body.text.format)
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
        turns.ignored |= {f"reasoning.{name}": None for name in body.reasoning.ignored_fields}
    for kind in body.include or ():
        if kind != "reasoning.encrypted_content":  # reasoning is shown as it is
            raise RequestError.about("include", f"may hold 'reasoning.encrypted_content', got {kind[:80]!r}")
        turns.ignored["include"] = None
    for name in ("model", "parallel_tool_calls", "temperature", "top_p", "stream"):
        fields[name] = getattr(body, name)
    body.note_ignored(turns.ignored)
    return ChatRequest.model_validate({name: value for name, value in fields.items() if value is not None})


def _add_item(turns: Turns, given: Any, path: Path) -> None:
    match turns.read(ITEMS, given, path, refused=REFUSED_ITEMS, default="message"):
        case MessageItem(role=role, content=content):
            if role not in ROLES:
                where = spell_path((*path, "role"))
                raise RequestError.about(where, f"is {role[:40]!r}, allowed are {', '.join(ROLES)}")
            for text in _texts(turns, content, (*path, "content")):
                turns.say("system" if role == "developer" else role, text)
        case FunctionCallItem(call_id=call_id, name=name, arguments=arguments):
            turns.call(call_id, name, arguments)
        case CallOutputItem(call_id=call_id, output=output):
            text = "\n".join(_texts(turns, output, (*path, "output")))
            turns.answer_call(call_id, text, (*path, "call_id"))
        case ReasoningItem(content=content, summary=summary):
            which = "content" if content else "summary"
            for text in _texts(turns, content or summary or [], (*path, which), REASONING_PARTS):
                turns.think(text)


def _texts(
    turns: Turns, content: str | list[dict[str, Any]], path: Path, kinds: Mapping[str, type[Body]] = PARTS
) -> list[str]:
    """The texts of a list of parts."""
    if isinstance(content, str):
        return [content]
    texts: list[str] = []
    for i, given in enumerate(content):
        match turns.read(kinds, given, (*path, i), refused=REFUSED_PARTS):
            case TextPart(text=text) | RefusalPart(refusal=text):
                texts.append(text)
    return texts


def _functions(
    turns: Turns, body: ResponsesRequest, tools: list[dict[str, Any]], path: Path, namespace: str = ""
) -> Iterator[dict[str, Any]]:
    """Yields the functions of a list of tools and of its namespaces, without the hosted tools.

    A hosted tool that may be left uncalled is named as ignored; with `required` it is refused.
    """
    for i, given in enumerate(tools):
        hosted = HOSTED_TOOL.fullmatch(str(given.get("type")))
        if hosted and body.tool_choice != "required":
            turns.ignored[f"tools.{hosted[1]}"] = None
            continue
        match turns.read(TOOLS, given, (*path, i), refused=_NO_HOSTED_TOOLS):
            case NamespaceTool(name=name, tools=inner, description=description):
                if description:
                    turns.ignored["tools.namespace.description"] = None
                yield from _functions(turns, body, inner, (*path, i, "tools"), name)
            case ResponsesTool() as tool:
                if namespace:
                    body._namespaces[tool.name] = namespace
                yield {"type": "function", "function": tool.model_dump(exclude_none=True)}


def _format(given: dict[str, Any]) -> dict[str, Any]:
    """The format of a chat, where a schema stands one level deeper."""
    if given.get("type") != "json_schema":
        return given
    check_has_schema(given, "text.format", '"name": ..., "schema": {...}')
    return {"type": "json_schema", "json_schema": {name: given[name] for name in given if name != "type"}}


# -- the answer ------------------------------------------------------------------------------------

router = make_router()

DELTAS = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


@router.post("/v1/responses", response_model=None)
async def create_response(body: ResponsesRequest, http: Request) -> Response:
    """Answer a conversation."""
    return await answer(http, body, open_agent(http, body, responses_to_chat), ResponseWriter)


class ResponseWriter(PartWriter):
    """OpenAI's response; in a stream, its items are added, filled and done."""

    def __init__(self, generation: Generation, body: ResponsesRequest) -> None:
        super().__init__(generation, body)
        job, self._num_sent, self._namespaces = generation.job, 0, body._namespaces
        self._key = job.job_id.rpartition("-")[2]
        text = {"format": {"type": "text"}} if body.text is None or body.text.format is None else body.text
        self._constant: dict[str, Any] = {
            "id": f"resp_{self._key}",
            "object": "response",
            "created_at": job.created,
            "model": job.model_name,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {
                "effort": None if body.reasoning is None else body.reasoning.effort,
                "summary": None,
            },
            "store": False,
            "temperature": job.params.temperature,
            "text": text if isinstance(text, dict) else text.model_dump(exclude_none=True),
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": job.params.top_p,
            "truncation": "disabled",
            "user": body.user,
        }

    def begin(self) -> list[bytes]:
        """The response without an item, twice: it was created, and it is worked at."""
        begun = self._at("in_progress", [])
        return [self._event("created", response=begun), self._event("in_progress", response=begun)]

    def open(self, part: Part) -> list[bytes]:
        """An empty item, with an empty text in it."""
        item = self._item(part, "in_progress")
        frames = [self._event("output_item.added", output_index=part.index, item=item)]
        if part.kind != "call":
            content = self._content(part.kind, "")
            frames.append(self._event("content_part.added", **self._place(part), part=content))
        return frames

    def add(self, part: Part, text: str) -> bytes:
        """More of an item."""
        return self._event(f"{DELTAS[part.kind]}.delta", **self._place(part), delta=text, **_logprobs(part))

    def close(self, part: Part) -> list[bytes]:
        """The whole item."""
        status = "incomplete" if self.finish_reason == "length" else "completed"
        place, name = self._place(part), f"{DELTAS[part.kind]}.done"
        if part.kind == "call":
            frames = [self._event(name, **place, name=part.name, arguments=part.text)]
        else:
            content = self._content(part.kind, part.text)
            frames = [
                self._event(name, **place, text=part.text, **_logprobs(part)),
                self._event("content_part.done", **place, part=content),
            ]
        item = self._item(part, status)
        return [*frames, self._event("output_item.done", output_index=part.index, item=item)]

    def finish(self) -> list[bytes]:
        """The whole response."""
        response = self.body()
        return [self._event(response["status"], response=response)]

    def body(self) -> dict[str, Any]:
        """The whole response; incomplete if its limit was reached, inside its last item."""
        is_cut = self.finish_reason == "length"
        items = [self._item(part, "completed") for part in self.parts]
        if is_cut:
            items[-1]["status"] = "incomplete"
        response = self._at("incomplete" if is_cut else "completed", items)
        response["usage"] = self._usage()
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return response

    def error(self, error: BaseException) -> bytes:
        """The response that has failed, and the event by which OpenAI's package raises."""
        told = to_api_error(error)
        response = self._at("failed", [self._item(part, "incomplete") for part in self.parts])
        response["error"] = {"code": "server_error", "message": told.message}
        failed = self._event("failed", response=response)
        fields = {"code": "server_error", "message": told.message, "param": told.param}
        number = {"type": "error", "sequence_number": self._num_sent}
        return failed + named_event("error", orjson.dumps(number | fields | orjson.loads(told.encode())))

    def _event(self, name: str, /, **fields: Any) -> bytes:
        kind = f"response.{name}"
        data = orjson.dumps({"type": kind, "sequence_number": self._num_sent, **fields})
        self._num_sent += 1
        return named_event(kind, data)

    def _place(self, part: Part) -> dict[str, Any]:
        """Which item an event is about, and which text of it."""
        place = {"item_id": self._item_id(part), "output_index": part.index}
        return place if part.kind == "call" else place | {"content_index": 0}

    def _item(self, part: Part, status: str) -> dict[str, Any]:
        """A part of the answer as an item; one that is in progress is empty."""
        made: dict[str, Any] = {"id": self._item_id(part), "status": status}
        is_open = status == "in_progress"
        match part.kind:
            case "call":
                text = "" if is_open else part.text
                call = {"type": "function_call", "call_id": part.call_id, "name": part.name}
                if part.name in self._namespaces:
                    call["namespace"] = self._namespaces[part.name]
                return made | call | {"arguments": text}
            case "text":
                made |= {"type": "message", "role": "assistant"}
            case "reasoning":
                made |= {"type": "reasoning", "summary": []}
        return made | {"content": [] if is_open else [self._content(part.kind, part.text)]}

    def _item_id(self, part: Part) -> str:
        """The id of a part's item."""
        return f"{PREFIXES[part.kind]}_{self._key}_{part.index}"

    def _content(self, kind: str, text: str) -> dict[str, Any]:
        """The text of an item."""
        if kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _at(self, status: str, items: list[dict[str, Any]]) -> dict[str, Any]:
        moment = {"status": status, "output": items, "usage": None, "error": None, "incomplete_details": None}
        return self._constant | moment

    def _usage(self) -> dict[str, Any]:
        counts = self.generation.usage()
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": reasoning_tokens(counts)},
            "total_tokens": counts["total_tokens"],
        }


def _logprobs(part: Part) -> dict[str, Any]:
    """Events of a text have a list for logprobs, which is empty here."""
    return {"logprobs": []} if part.kind == "text" else {}
