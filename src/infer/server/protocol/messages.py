"""The bodies of Anthropic's API, and what they are as a chat.

    system, messages of blocks   ──►  messages             turns.py
    tools, tool_choice           ──►  tools, tool_choice, parallel_tool_calls
    thinking, output_config      ──►  reasoning fields, response_format
    max_tokens, stop_sequences   ──►  max_tokens, stop

From there on a message is a chat: the same checks, the same template, the same engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infer.errors import RequestError, show_value
from infer.server.protocol.errors import Path, spell_path
from infer.server.protocol.schemas import Body, ChatRequest, CountedChat, Name, Neutral
from infer.server.protocol.structured import check_has_schema
from infer.server.protocol.turns import Turns

_TEXT_ONLY = "this server reads and writes text"
_NO_SERVER_TOOLS = "tools run where the client runs; describe one with name and input_schema"
_NOT_KEPT = Neutral((), "this server keeps nothing between requests; send the whole conversation")


class TextBlock(Body):
    """A piece of text of any author."""

    ignored = frozenset({"cache_control", "citations", "parsed_output"})

    text: str


class ThinkingBlock(Body):
    """Reasoning of an earlier answer."""

    thinking: str
    signature: str | None = None  # of no meaning here: answers carry the word "unsigned"


class HiddenThinkingBlock(Body):
    """Reasoning that another server has encrypted: no model here can read it."""

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
    """What a tool call came to."""

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
    """Whether tools are called, and which."""

    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """How much the model reasons before it answers."""

    neutral = {"display": Neutral(("summarized",), "reasoning is always shown")}

    budget_tokens: int | None = None


BLOCKS: dict[str, dict[str, type[Body]]] = {  # by the role of the message they stand in
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
EFFORTS = {"max": "xhigh"}  # by other names in a chat
THINKING = dict.fromkeys(("enabled", "disabled", "adaptive"), Thinking)


class CountTokensRequest(Body):
    """`POST /v1/messages/count_tokens`, and what it shares with `POST /v1/messages`."""

    neutral = {
        "compaction": _NOT_KEPT,
        "container": Neutral((), "this server runs no code"),
        "fallbacks": Neutral((), "this server has no other model to turn to"),
        "mcp_servers": Neutral(([],), _NO_SERVER_TOOLS),
        "speed": Neutral(("standard",), "there is one speed"),
        "thread": _NOT_KEPT,
    }
    ignored = frozenset(
        {
            "cache_control",
            "context_management",  # what may be left out of a prompt: nothing is
            "diagnostics",
            "inference_geo",
            "metadata",
            "service_tier",
            "user_profile_id",
            "workspace_id",
        }
    )
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
    output_format: dict[str, Any] | None = None  # the older name of output_config.format


class MessagesRequest(CountTokensRequest):
    """`POST /v1/messages`."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None


class OutputConfig(Body):
    """The form of the answer, and the effort that goes into it."""

    format: dict[str, Any] | None = None
    effort: str | None = None


def messages_to_chat(body: CountTokensRequest) -> ChatRequest:
    """The chat that a message is; raises a `RequestError` that names the field of the message."""
    is_answered = isinstance(body, MessagesRequest)
    turns = Turns(is_answered=is_answered)
    if body.system is not None:
        _add_content(turns, "system", body.system, ("system",), BLOCKS["system"])
    for i, message in enumerate(body.messages):
        _add_message(turns, message, ("messages", i))
    if is_answered and body.messages and body.messages[-1].get("role") == "assistant":
        raise RequestError.about(
            "messages", "ends with the assistant's turn, which this server cannot continue; end with a user's"
        )
    fields: dict[str, Any] = {"model": body.model, "messages": turns.messages()}
    if body.tools:
        fields["tools"] = [_tool(turns, tool, ("tools", i)) for i, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        fields |= _tool_choice(turns, body.tool_choice)
    fields |= _output(turns, body)
    if body.thinking is not None:  # says more than the effort
        fields |= _thinking(turns, body.thinking)
    if isinstance(body, MessagesRequest):
        fields |= {
            name: getattr(body, name) for name in ("max_tokens", "temperature", "top_p", "top_k", "stream")
        }
        fields["stop"] = body.stop_sequences
    body.note_ignored(turns.ignored)
    kind = ChatRequest if is_answered else CountedChat
    return kind.model_validate({name: value for name, value in fields.items() if value is not None})


def _add_message(turns: Turns, message: dict[str, Any], path: Path) -> None:
    """Add a message: a text, or blocks of what its author may say."""
    role, content = message.get("role"), message.get("content")
    unknown = set(message) - {"role", "content"}
    if unknown or not isinstance(role, str) or role not in BLOCKS or not isinstance(content, str | list):
        raise RequestError(
            f"{spell_path(path)} must have a role ({', '.join(BLOCKS)}) and a content (text or blocks), "
            f"and nothing else, got {show_value(message)}",
            param=spell_path(path),
        )
    _add_content(turns, role, content, (*path, "content"), BLOCKS[role])


def _add_content(
    turns: Turns, role: str, content: str | list[Any], path: Path, kinds: Mapping[str, type[Body]]
) -> None:
    """Add a text, or blocks of these kinds."""
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
    """What a tool said; a model has no other sign of failure than the text."""
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
    if (choice.name is None) == (given["type"] == "tool"):
        raise RequestError.about("tool_choice", "has a name if its type is 'tool', and only then")
    named = {"type": "function", "function": {"name": choice.name}}
    chosen = {"auto": "auto", "any": "required", "none": "none", "tool": named}[given["type"]]
    return {"tool_choice": chosen, "parallel_tool_calls": not choice.disable_parallel_tool_use}


def _thinking(turns: Turns, given: dict[str, Any]) -> dict[str, Any]:
    thinking = turns.read(THINKING, given, ("thinking",))
    if (thinking.budget_tokens is None) == (given["type"] == "enabled"):
        raise RequestError(
            "thinking has budget_tokens if its type is 'enabled', and only then",
            param="thinking.budget_tokens",
        )
    if given["type"] == "disabled":
        return {"reasoning_effort": "none"}
    return {"max_reasoning_tokens": thinking.budget_tokens}


def _output(turns: Turns, body: CountTokensRequest) -> dict[str, Any]:
    """The schema of the answer and the effort, by either of their names."""
    fields: dict[str, Any] = {}
    form = body.output_format
    if body.output_config is not None:
        config = turns.read({"": OutputConfig}, body.output_config, ("output_config",), default="")
        form = config.format or form
        if config.effort is not None:
            fields["reasoning_effort"] = EFFORTS.get(config.effort, config.effort)
    if form is not None:
        if form.get("type") == "json_schema":
            check_has_schema(form, "output_config.format", '"schema": {...}')
        rest = {name: value for name, value in form.items() if name != "type"}
        fields["response_format"] = {"type": form.get("type"), "json_schema": {"name": "output", **rest}}
    return fields
