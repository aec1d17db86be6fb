"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's API, converted to a chat.

    system, messages of blocks   ──►  messages             turns.py
    tools, tool_choice           ──►  tools, tool_choice, parallel_tool_calls
    thinking, output_config      ──►  reasoning fields, response_format
    max_tokens, stop_sequences   ──►  max_tokens, stop

From there on, a message is a chat: the same checks, template and engine. Its answer consists of blocks:

    message_start, ping
    content_block_start, content_block_delta ..., content_block_stop     each block: thinking, text, tool_use
    message_delta, message_stop                                          the stop reason and the usage
    error                                                                instead of the rest, if it fails

A request whose max_tokens do not fit after its prompt is not rejected, unlike in a chat: agents ask for more
than small models have. Its answer may fill the context, and then ends with the stop reason
model_context_window_exceeded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import orjson
from fastapi import Request, Response
from pydantic import BaseModel

from infer.errors import ContextOverflow, MalformedRequest, RequestError, show_value
from infer.finish_reason import FinishReason
from infer.server.protocol.errors import Path, spell_path
from infer.server.protocol.parts import Part, PartWriter, reasoning_tokens
from infer.server.protocol.schemas import Body, ChatRequest, CountedChat, Int, MeasuredBody, Name, Neutral
from infer.server.protocol.stream import named_event
from infer.server.protocol.structured import check_has_schema
from infer.server.protocol.translate import Job, fill_context
from infer.server.protocol.turns import Turns, spelled
from infer.server.routes.json_route import answer, json_response, make_router, open_agent

_TEXT_ONLY = "this server reads and writes text"
_NO_SERVER_TOOLS = "tools run where the client runs; describe one with name and input_schema"
_NOT_KEPT = Neutral((), "this server stores nothing between requests; send the whole conversation")


# -- request bodies --------------------------------------------------------------------------------


class TextBlock(Body):
    """Text by any author."""

    ignored = frozenset({"cache_control", "citations", "parsed_output"})

    text: str


class ThinkingBlock(Body):
    """Reasoning of an earlier answer."""

    thinking: str
    signature: str | None = None  # ignored: our answers have the signature "unsigned"


class HiddenThinkingBlock(Body):
    """Reasoning that another server has encrypted, which no model here can read."""

    ignored = frozenset({"data"})


class ToolUseBlock(Body):
    """A tool call of an earlier answer."""

    ignored = frozenset({"cache_control"})
    neutral = {
        "caller": Neutral(({"type": "direct"},), _NO_SERVER_TOOLS),
        "toolset_name": Neutral((), _NO_SERVER_TOOLS),
    }

    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Body):
    """The result of a tool call."""

    ignored = frozenset({"cache_control"})
    neutral = {"toolset_name": Neutral((), _NO_SERVER_TOOLS)}

    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None


class CustomTool(Body):
    """A tool that the client runs."""

    ignored = frozenset({"cache_control", "defer_loading", "eager_input_streaming"})  # all tools are shown
    neutral = {
        "allowed_callers": Neutral((["direct"],), _NO_SERVER_TOOLS),
        "input_examples": Neutral(([],), "put examples into the description"),
    }

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ToolChoice(Body):
    """The setting whether tools are called, and which."""

    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """The amount of reasoning before the answer."""

    ignored = frozenset({"display"})  # reasoning is always shown

    budget_tokens: Int | None = None


BLOCKS: dict[str, dict[str, type[Body]]] = {  # block types by the role of their message
    "user": {"text": TextBlock, "tool_result": ToolResultBlock},
    "assistant": {
        "text": TextBlock,
        "thinking": ThinkingBlock,
        "tool_use": ToolUseBlock,
        "redacted_thinking": HiddenThinkingBlock,
    },
    "system": {"text": TextBlock},
}
REFUSED_BLOCKS = dict.fromkeys(("image", "document", "search_result", "container_upload"), _TEXT_ONLY)
TOOL_CHOICES = dict.fromkeys(("auto", "any", "tool", "none"), ToolChoice)
EFFORTS = {"max": "xhigh"}  # efforts that have other names in a chat
THINKING = dict.fromkeys(("enabled", "disabled", "adaptive"), Thinking)


class Message(Body):
    """A message by one author: a text, or blocks."""

    role: str
    content: str | list[dict[str, Any]]


class CountTokensRequest(Body):
    """`POST /v1/messages/count_tokens`, and the fields shared with `POST /v1/messages`."""

    neutral = {
        "compaction": _NOT_KEPT,
        "container": Neutral((), "this server runs no code"),
        "fallbacks": Neutral((), "this server has no other model to turn to"),
        "mcp_servers": Neutral(([],), _NO_SERVER_TOOLS),
        "speed": Neutral(("standard",), "there is one speed"),
        "thread": _NOT_KEPT,
    }
    # context_management allows dropping parts of a prompt: we never drop any
    ignored = frozenset({
        "cache_control", "context_management", "diagnostics", "inference_geo", "metadata", "service_tier",
        "user_profile_id", "workspace_id",
    })  # fmt: skip
    elsewhere = {
        "max_completion_tokens": "this route takes max_tokens",
        "prompt": "plain prompts go to /v1/completions, this route takes messages",
        "stop": "this route takes stop_sequences",
    }
    renamed = {
        "max_reasoning_tokens": "thinking.budget_tokens",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
        "reasoning_effort": "output_config.effort",
        "response_format.json_schema": "output_config.format",
        "response_format": "output_config.format",
        "stop": "stop_sequences",
    }

    model: Name | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None  # older name of output_config.format


class MessagesRequest(CountTokensRequest, MeasuredBody):
    """`POST /v1/messages`."""

    max_tokens: Int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    num_speculative_tokens: Int | None = None
    cache_salt: Name | None = None


class OutputConfig(Body):
    """The format of the answer, and the reasoning effort."""

    format: dict[str, Any] | None = None
    effort: str | None = None


# -- conversion to a chat --------------------------------------------------------------------------


def messages_to_chat(body: CountTokensRequest) -> ChatRequest:
    """Convert a body to a chat; raises a `RequestError` that names the field of the body."""
    is_answered = isinstance(body, MessagesRequest)
    turns = Turns(is_answered=is_answered)
    if body.system is not None:
        _add_content(turns, "system", body.system, ("system",), BLOCKS["system"])
    for i, message in enumerate(body.messages):
        _add_message(turns, message, ("messages", i))
    fields: dict[str, Any] = {"model": body.model, "messages": turns.messages()}
    last = fields["messages"][-1] if fields["messages"] else {}  # an assistant's blocks may be empty
    if last.get("role") == "assistant" and (is_answered or "tool_calls" not in last):
        fields["continue_final_message"] = True  # the answer continues its text
    if body.tools:
        fields["tools"] = [_tool(turns, tool, ("tools", i)) for i, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        fields |= _tool_choice(turns, body.tool_choice)
    fields |= _output(turns, body)
    if body.thinking is not None:  # takes precedence over the effort
        fields |= _thinking(turns, body.thinking)
    if isinstance(body, MessagesRequest):
        names = (
            "max_tokens", "temperature", "top_p", "top_k", "num_speculative_tokens", "stream", "cache_salt",
        )  # fmt: skip
        fields |= {name: getattr(body, name) for name in names}
        fields["stop"] = body.stop_sequences
    body.note_ignored(turns.ignored)
    kind = ChatRequest if is_answered else CountedChat
    return kind.model_validate({name: value for name, value in fields.items() if value is not None})


def _add_message(turns: Turns, message: dict[str, Any], path: Path) -> None:
    """Add a message: a text, or blocks of the types that its role allows."""
    said = turns.read_as(Message, message, path)
    if said.role not in BLOCKS:
        where = spell_path((*path, "role"))
        raise RequestError.about(where, f"is {show_value(said.role)}, allowed are {', '.join(BLOCKS)}")
    if said.content == [] and said.role != "assistant":
        raise RequestError.about(
            spell_path((*path, "content")), "is empty; give a text, or at least one block"
        )
    _add_content(turns, said.role, said.content, (*path, "content"), BLOCKS[said.role])


def _add_content(
    turns: Turns, role: str, content: str | list[Any], path: Path, kinds: Mapping[str, type[Body]]
) -> None:
    """Add a text, or blocks of these types."""
    if isinstance(content, str):
        turns.say(role, content)
        return
    for i, given in enumerate(content):
        where = (*path, i)
        match turns.read(kinds, given, where, refused=REFUSED_BLOCKS):
            case TextBlock(text=text):
                turns.say(role, text)
            case ThinkingBlock(thinking=text):
                turns.think(text)
            case ToolUseBlock(id=call_id, name=name, input=given_input):
                turns.call(call_id, name, given_input)
            case ToolResultBlock() as result:
                text = _result_text(turns, result, where)
                turns.answer_call(result.tool_use_id, text, (*where, "tool_use_id"))


def _result_text(turns: Turns, result: ToolResultBlock, path: Path) -> str:
    """Return the text of a tool's result; its text is the only way to tell a model of an error."""
    said = Turns()
    if result.content is not None:
        _add_content(said, "tool", result.content, (*path, "content"), BLOCKS["system"])
    turns.ignored |= said.ignored
    text = "\n".join(message["content"] for message in said.messages())
    return f"Error: {text}" if result.is_error and not text.lower().startswith("error") else text


def _tool(turns: Turns, given: Any, path: Path) -> dict[str, Any]:
    tool = turns.read({"custom": CustomTool}, given, path, refused=_NO_SERVER_TOOLS, default="custom")
    described = {"description": tool.description, "strict": tool.strict}
    function = {"name": tool.name, "parameters": tool.input_schema} | {
        name: value for name, value in described.items() if value is not None
    }
    return {"type": "function", "function": function}


def _tool_choice(turns: Turns, given: dict[str, Any]) -> dict[str, Any]:
    choice = turns.read(TOOL_CHOICES, given, ("tool_choice",))
    _check_goes_with("tool", given["type"], "tool_choice.name", choice.name)
    named = {"type": "function", "function": {"name": choice.name}}
    chosen = {"auto": "auto", "any": "required", "none": "none", "tool": named}[given["type"]]
    return {"tool_choice": chosen, "parallel_tool_calls": not choice.disable_parallel_tool_use}


def _thinking(turns: Turns, given: dict[str, Any]) -> dict[str, Any]:
    thinking = turns.read(THINKING, given, ("thinking",))
    _check_goes_with("enabled", given["type"], "thinking.budget_tokens", thinking.budget_tokens)
    if given["type"] == "disabled":
        return {"reasoning_effort": "none"}
    return {"max_reasoning_tokens": thinking.budget_tokens}


def _check_goes_with(wanted: str, kind: str, where: str, value: object) -> None:
    """Check a field that one type requires and no other type allows."""
    if (value is None) == (kind == wanted):
        error, given, advice = RequestError, f"is {show_value(value)}", "leave it out"
        if value is None:
            error, given, advice = MalformedRequest, "is missing", "give it"
        raise error.about(
            where, f"{given} and the type is {kind!r}; only {wanted!r} has it: {advice}, or change the type"
        )


def _output(turns: Turns, body: CountTokensRequest) -> dict[str, Any]:
    """Return the answer's schema, under either name, and the effort."""
    fields: dict[str, Any] = {}
    form = body.output_format
    if body.output_config is not None:
        config = turns.read_as(OutputConfig, body.output_config, ("output_config",))
        form = config.format or form
        if config.effort is not None:
            fields["reasoning_effort"] = EFFORTS.get(config.effort, config.effort)
    if form is not None:
        if form.get("type") == "json_schema":
            check_has_schema(form, "output_config.format", '"schema": {...}')
        rest = {name: value for name, value in form.items() if name != "type"}
        fields["response_format"] = {"type": form.get("type"), "json_schema": {"name": "output", **rest}}
    return fields


# -- responses -------------------------------------------------------------------------------------


class MessageError(BaseModel):
    """The type and message of an error."""

    type: str
    message: str


class MessageErrorBody(BaseModel):
    """The body of every error of these routes."""

    type: Literal["error"]
    error: MessageError
    request_id: str


router = make_router(MessageErrorBody)

UNSIGNED = "unsigned"  # signature of reasoning, which clients require and send back
DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


@router.post("/v1/messages", response_model=None)
async def create_message(body: MessagesRequest, http: Request) -> Response:
    """Answer a conversation."""
    return await answer(http, body, open_message(body, http), MessageWriter)


@router.post("/v1/messages/count_tokens", response_model=None)
async def count_tokens(body: CountTokensRequest, http: Request) -> Response:
    """Return the number of tokens of a conversation's prompt."""
    with spelled(body.spellings):
        job = await open_agent(http, body, messages_to_chat)
    return json_response({"input_tokens": len(job.requests[0].prompt)}, body)


async def open_message(body: MessagesRequest, http: Request) -> Job:
    """Return the job of a chat; without its `max_tokens` if that exceeds the rest of the context."""
    try:
        job = await open_agent(http, body, messages_to_chat)
    except ContextOverflow as error:
        raise _too_long(*error.lengths) from None
    num_prompt, context_len = len(job.requests[0].prompt), job.model.encoder.context_len
    if num_prompt >= context_len:
        raise _too_long(num_prompt, context_len)
    return fill_context(job)


def _too_long(num_prompt_tokens: int, context_len: int) -> ContextOverflow:
    """Return the error with the words that make agents shorten a conversation."""
    message = f"prompt is too long: {num_prompt_tokens} tokens > {context_len} maximum; shorten the messages"
    return ContextOverflow.in_words(message, param="messages")


class MessageWriter(PartWriter):
    """Anthropic's format: a stream opens, fills and closes blocks between its start and its end."""

    ping = named_event("ping", b'{"type":"ping"}')

    def begin(self) -> list[bytes]:
        """Return the message without content, and the ping that Anthropic sends after it."""
        message = self._message([], {"stop_reason": None, "stop_sequence": None})
        return [_event("message_start", message=message), _event("ping")]

    def open(self, part: Part) -> list[bytes]:
        """Return the event of an empty block."""
        return [_event("content_block_start", index=part.index, content_block=block(part, is_open=True))]

    def add(self, part: Part, text: str) -> bytes:
        """Return the event of a block's next text."""
        kind, key = DELTAS[part.kind]
        return _delta(part, {"type": kind, key: text})

    def close(self, part: Part) -> list[bytes]:
        """Return the end of a block; reasoning is signed first."""
        stop = _event("content_block_stop", index=part.index)
        if part.kind != "reasoning":
            return [stop]
        return [_delta(part, {"type": "signature_delta", "signature": UNSIGNED}), stop]

    def finish(self) -> list[bytes]:
        """Return the events with the stop reason and the usage."""
        metrics = self.generation.metrics()
        ended = _event("message_delta", delta=self._reason(), usage=self._usage(), **metrics)
        return [ended, _event("message_stop")]

    def body(self) -> dict[str, Any]:
        """Return the whole message, without calls that were cut short (arguments that are not an object)."""
        whole = [part for part in self.parts if part.kind != "call" or part.arguments is not None]
        content = [block(part) for part in whole or [Part("text", 0)]]
        return self._message(content, self._reason()) | self.generation.metrics()

    def _message(self, content: list[dict[str, Any]], reason: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": "msg_" + self.generation.job.job_id.rpartition("-")[2],
            "type": "message",
            "role": "assistant",
            "model": self.generation.job.model_name,
            "content": content,
            **reason,
            "usage": self._usage(),
        }

    def _reason(self) -> dict[str, Any]:
        """Return the stop reason, with Anthropic's names."""
        sequence = self.stop_reason if isinstance(self.stop_reason, str) else None
        calls = [part for part in self.parts if part.kind == "call"]
        if self.finish_reason == FinishReason.LENGTH:
            is_full = self.generation.job.params.max_tokens is None  # `fill_context` has lifted the limit
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif calls and calls[-1].arguments is not None:
            reason = "tool_use"
        else:
            reason = "end_turn" if sequence is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": sequence if reason == "stop_sequence" else None}

    def _usage(self) -> dict[str, Any]:
        """Return the usage so far; Anthropic counts cached prompt tokens separately."""
        counts = self.generation.usage()
        num_cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"] - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": reasoning_tokens(counts)},
        }


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, orjson.dumps({"type": kind, **fields}))


def _delta(part: Part, delta: dict[str, str]) -> bytes:
    return _event("content_block_delta", index=part.index, delta=delta)


def block(part: Part, *, is_open: bool = False) -> dict[str, Any]:
    """Convert a part of an answer to a block; with `is_open`, an empty one."""
    text = "" if is_open else part.text
    match part.kind:
        case "text":
            return {"type": "text", "text": text}  # no citations: some clients reject a null there
        case "reasoning":
            return {"type": "thinking", "thinking": text, "signature": "" if is_open else UNSIGNED}
        case "call":
            given = {} if is_open else part.arguments
            return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": given}
