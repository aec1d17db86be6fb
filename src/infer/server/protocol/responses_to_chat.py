"""Convert bodies of `/v1/responses`, OpenAI's newer API, to chats.

    instructions, input items    ──►  messages             turns.py
    tools, tool_choice           ──►  tools, tool_choice   flat here, nested there; namespaces are flattened
    text.format                  ──►  response_format
    reasoning.effort             ──►  reasoning_effort
    max_output_tokens            ──►  max_tokens
    sampling fields              ──►  the same names       `TunedBody`

The conversation that a body continues, and the items that do not fit, are set by its route.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypeAlias

from pydantic import PrivateAttr

from infer.errors import RequestError, closest
from infer.server.protocol.body import Body, Neutral
from infer.server.protocol.errors import Path, spell_path
from infer.server.protocol.schemas import (
    ABOUT_THE_CLIENT,
    SAMPLING_NEUTRAL,
    TEXT_ONLY,
    ChatRequest,
    CountedChat,
    Int,
    Name,
    TunedBody,
)
from infer.server.protocol.structured import nested
from infer.server.protocol.turns import Turns
from infer.tokenizer.chat_template import map_strings

Item: TypeAlias = dict[str, Any]

_NOT_KEPT = (
    "this server stores responses, not conversations; send previous_response_id, or everything as input"
)
_NO_STORE = "this server stores no responses (response_store is 0); send the item itself"
_NO_HOSTED_TOOLS = "tools run where the client runs; describe one with type function, name and parameters"
_DIRECT = Neutral(({"type": "direct"},), _NO_HOSTED_TOOLS)


class TextPart(Body):
    """Text of a message or of a tool's output."""

    ignored = frozenset({"annotations", "logprobs", "parsed", "prompt_cache_breakpoint"})

    text: str


class RefusalPart(Body):
    """A refusal in an earlier answer, instead of text."""

    refusal: str


class MessageItem(Body):
    """A message of a user, the operator or the assistant."""

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
    """The result of a tool call."""

    ignored = frozenset({"id", "status"})
    neutral = {"caller": _DIRECT}

    call_id: str
    output: str | list[dict[str, Any]]


class ReasoningItem(Body):
    """Reasoning of an earlier answer: its text, or a summary if there is no text."""

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
    """Tools under a common name, which is returned with their calls."""

    name: str
    tools: list[dict[str, Any]]
    description: str | None = None


class NamedTool(Body):
    """The tool that must be called."""

    name: str


class TextOptions(Body):
    """The format of the answer's text."""

    where = "text."
    ignored = frozenset({"verbosity"})

    format: dict[str, Any] | None = None


class ReasoningOptions(Body):
    """The amount of reasoning before the answer."""

    where = "reasoning."
    ignored = frozenset({"summary", "generate_summary"})  # reasoning is sent unchanged
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
REFUSED_ITEMS = {"item_reference": _NO_STORE, "compaction": _NOT_KEPT}
REFUSED_PARTS = dict.fromkeys(("input_image", "input_file", "input_audio"), TEXT_ONLY)
TOOLS: dict[str, type[Body]] = {"function": ResponsesTool, "namespace": NamespaceTool}
HOSTED_TOOL = re.compile(  # types of tools that OpenAI defines; some end in a date
    "(apply_patch|code_interpreter|computer(?:_use(?:_preview)?)?|file_search|image_generation|local_shell"
    "|mcp|programmatic_tool_calling|shell|tool_search|web_search(?:_preview)?)[_0-9]*"
)
ROLES = ("user", "assistant", "system", "developer")
WITH_LOGPROBS = "message.output_text.logprobs"
INCLUDED_ANYWAY = frozenset({  # values of `include` without effect: always sent, or of hosted tools
    "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
    "message.input_image.image_url", "reasoning.encrypted_content", "web_search_call.action.sources",
    "web_search_call.results",
})  # fmt: skip


class ResponseStreamOptions(Body):
    """Options for what a stream has in addition to its events."""

    where = "stream_options."
    neutral = {"include_obfuscation": Neutral((False,), "events are not padded")}


class ResponsesRequest(TunedBody):
    """`POST /v1/responses`."""

    neutral = SAMPLING_NEUTRAL | {
        "background": Neutral((False,), "an answer comes on the connection that asked for it"),
        "context_management": Neutral(([],), _NOT_KEPT),
        "conversation": Neutral((), _NOT_KEPT),
        "moderation": Neutral((), "this server does not moderate"),
        "prompt": Neutral((), "this server stores no prompts; send instructions and input"),
    }
    # max_tool_calls counts calls of hosted tools, and there are none
    ignored = (ABOUT_THE_CLIENT - {"metadata", "store", "user"}) | {"client_metadata", "max_tool_calls"}
    elsewhere = {
        "max_tokens": "this route takes max_output_tokens",
        "messages": "messages go to /v1/chat/completions, this route takes input",
        "prompt": "plain prompts go to /v1/completions, this route takes input",
        "response_format": "this route takes text.format",
    }
    renamed = {
        "logprobs": "top_logprobs",
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "reasoning_effort": "reasoning.effort",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
    }

    is_answered: ClassVar[bool] = True  # a model answers it: every tool result follows its call

    input: str | list[Item]
    previous_response_id: Name | None = None
    store: bool | None = None  # null: true, if the server stores responses
    truncation: str | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    top_logprobs: Int | None = None
    max_output_tokens: Int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream_options: ResponseStreamOptions | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None

    _namespaces: dict[str, str] = PrivateAttr(default_factory=dict)  # namespaces of functions, by name
    _history: list[Item] = PrivateAttr(default_factory=list)  # conversation that it continues
    _left_out: frozenset[int] = PrivateAttr(default=frozenset())  # indices of items that do not fit

    @property
    def items(self) -> list[Item]:
        """The input as items."""
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input


class InputTokensRequest(ResponsesRequest):
    """`POST /v1/responses/input_tokens`: a body whose prompt is only counted; it may lack earlier turns."""

    is_answered = False
    ignored = ResponsesRequest.ignored | {"personality"}

    input: str | list[Item] | None = None  # type: ignore[assignment]  # may be absent

    @property
    def items(self) -> list[Item]:
        """The input as items; there may be none."""
        return [] if self.input is None else super().items


def responses_to_chat(body: ResponsesRequest) -> ChatRequest:
    """Convert a body to a chat; raises a `RequestError` that names the field of this API."""
    turns = Turns(is_answered=body.is_answered)
    if body.instructions is not None:
        turns.say("system", body.instructions)
    num_history = len(body._history)
    for i, item in enumerate(body._history):
        if i not in body._left_out:
            _add_item(turns, item, ("previous_response_id", i))
    turns.ignored.clear()  # fields of stored items were reported before
    for i, item in enumerate(body.items):
        if num_history + i not in body._left_out:
            _add_item(turns, item, ("input", i))
    fields: dict[str, Any] = {"messages": turns.messages(), "max_tokens": body.max_output_tokens}
    for value in (body.items, body.tools, body.tool_choice):
        map_strings(value, str)  # checks the depth of what is stored or sent back, used by a template or not
    if body.tools:
        fields["tools"] = list(_functions(turns, body, body.tools, ("tools",)))
    if isinstance(body.tool_choice, dict) and body.tool_choice.get("type") != "allowed_tools":
        named = turns.read(
            {"function": NamedTool}, body.tool_choice, ("tool_choice",), refused=_NO_HOSTED_TOOLS
        )
        fields["tool_choice"] = {"type": "function", "function": {"name": named.name}}
    else:
        fields["tool_choice"] = body.tool_choice
    if body.text is not None:
        turns.ignored |= {f"text.{name}": None for name in body.text.ignored_fields}
        if body.text.format is not None:
            form = '"name": ..., "schema": {...}'
            fields["response_format"] = nested(body.text.format, "text.format", form)
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
        turns.ignored |= {f"reasoning.{name}": None for name in body.reasoning.ignored_fields}
    for kind in body.include or ():
        if kind in INCLUDED_ANYWAY:
            turns.ignored["include"] = None
        elif kind != WITH_LOGPROBS:
            hint = closest(kind[:80], sorted(INCLUDED_ANYWAY | {WITH_LOGPROBS}), listed="allowed")
            raise RequestError.about("include", f"has {kind[:80]!r}{hint}")
    if WITH_LOGPROBS in (body.include or ()) or body.top_logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.truncation not in (None, "auto", "disabled"):
        raise RequestError.about("truncation", f"must be 'auto' or 'disabled', got {body.truncation[:40]!r}")
    for name in (*TunedBody.model_fields, "chat_template_kwargs", "parallel_tool_calls"):
        fields[name] = getattr(body, name)
    body.note_ignored(turns.ignored)
    chat = ChatRequest if body.is_answered else CountedChat
    return chat.of(fields)


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
    """Return the texts of a list of parts."""
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
    """Yield the functions of a list of tools and of its namespaces, without hosted tools.

    A hosted tool is reported as ignored; with `required`, which may need it, it is rejected.
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
