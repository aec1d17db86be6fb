"""Convert bodies of `/v1/messages`, Anthropic's API, to chats.

system, messages of blocks   ──►  messages             turns.py
tools, tool_choice           ──►  tools, tool_choice, parallel_tool_calls
thinking, output_config      ──►  reasoning fields, response_format
max_tokens, stop_sequences   ──►  max_tokens, stop
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infer.errors import MalformedRequest, RequestError, show_value
from infer.server.protocol.body import Body, Neutral
from infer.server.protocol.errors import Path, spell_path
from infer.server.protocol.schemas import TEXT_ONLY, ChatRequest, CountedChat, Int, MeasuredBody, Name
from infer.server.protocol.structured import nested
from infer.server.protocol.turns import Turns

_NO_SERVER_TOOLS = "tools run where the client runs; describe one with name and input_schema"
_NOT_KEPT = Neutral((), "this server stores nothing between requests; send the whole conversation")


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
REFUSED_BLOCKS = dict.fromkeys(("image", "document", "search_result", "container_upload"), TEXT_ONLY)
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
    return kind.of(fields)


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
        fields["response_format"] = nested(form, "output_config.format", '"schema": {...}')
    return fields
