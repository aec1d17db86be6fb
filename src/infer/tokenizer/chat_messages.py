"""What a client may put into a conversation, and the form templates expect it in.

Clients write messages in the OpenAI format, templates were written for a slightly different one:

    content       text, or a list of {"type": "text", "text": ...} parts   ->  text
    content       null beside tool_calls                                   ->  ""
    tool_calls    arguments as a JSON string                               ->  arguments as an object
    role          developer                                                ->  system

Keys that no template reads are dropped. What cannot be shown to a model (an image, an unknown role,
arguments that are no JSON) is refused, and so is a conversation beyond the limits below: they bound the
work a request can cause before its tokens are counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from infer.errors import TemplateError

ROLES = ("system", "user", "assistant", "tool")
MAX_MESSAGES = 4096
MAX_TOOLS = 512
MAX_CHARS = 8 * 2**20  # of all strings together
MAX_DEPTH = 32  # of nested tool schemas and arguments

_STRING_KEYS = ("name", "tool_call_id", "reasoning_content")


def clean_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Check a conversation and bring it into the form templates expect."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise TemplateError(f"messages must be a list, got {type(messages).__name__}", param="messages")
    if not messages:
        raise TemplateError("messages is empty; give at least one message", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise TemplateError(
            f"messages has {len(messages)} entries, at most {MAX_MESSAGES} are allowed", param="messages"
        )
    return [_clean_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def clean_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Check tool descriptions; an empty list is no tools."""
    if not tools:
        return None
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise TemplateError(f"tools must be a list, got {type(tools).__name__}", param="tools")
    if len(tools) > MAX_TOOLS:
        raise TemplateError(f"tools has {len(tools)} entries, at most {MAX_TOOLS} are allowed", param="tools")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise TemplateError(
                f'tools[{i}] must look like {{"type": "function", "function": {{"name": ...}}}}',
                param="tools",
            )
    return [dict(tool) for tool in tools]


def map_strings(value: Any, change: Callable[[str], str], *, depth: int = 0) -> Any:
    """Rebuild nested JSON with each string, keys included, passed through `change`."""
    if depth > MAX_DEPTH:
        raise TemplateError(f"messages and tools may be nested {MAX_DEPTH} levels deep, not more")
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(k)): map_strings(v, change, depth=depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(item, change, depth=depth + 1) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise TemplateError(f"messages and tools hold JSON values only, got {type(value).__name__}")


def _clean_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TemplateError(f"{where} must be an object with role and content", param=where)
    role = message.get("role")
    role = "system" if role == "developer" else role
    if role not in ROLES:
        raise TemplateError(
            f"{where}.role is {role!r}, allowed are {', '.join(ROLES)}", param=f"{where}.role"
        )
    clean: dict[str, Any] = {"role": role}
    calls = message.get("tool_calls")
    if calls and role != "assistant":
        raise TemplateError(
            f"{where} has tool_calls, only assistant messages may", param=f"{where}.tool_calls"
        )
    clean["content"] = _clean_content(message.get("content"), f"{where}.content", may_be_missing=bool(calls))
    if calls:
        clean["tool_calls"] = _clean_calls(calls, f"{where}.tool_calls")
    for key in _STRING_KEYS:
        if message.get(key) is not None:
            if not isinstance(message[key], str):
                raise TemplateError(
                    f"{where}.{key} must be text, got {message[key]!r}", param=f"{where}.{key}"
                )
            clean[key] = message[key]
    return clean


def _clean_content(content: Any, where: str, *, may_be_missing: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and may_be_missing:
        return ""
    if not isinstance(content, Sequence):
        raise TemplateError(f"{where} must be text or a list of text parts, got {content!r}", param=where)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise TemplateError(
                f"{where}[{i}] has type {kind!r}; this model reads text only: "
                '{"type": "text", "text": "..."}',
                param=where,
            )
        texts.append(part["text"])
    return "".join(texts)


def _clean_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise TemplateError(f"{where} must be a list, got {type(calls).__name__}", param=where)
    cleaned = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise TemplateError(f"{where}[{i}].function must have a name and arguments", param=where)
        arguments = _parse_arguments(function.get("arguments"), f"{where}[{i}].function.arguments")
        entry: dict[str, Any] = {"type": "function"}
        if call.get("id") is not None:
            entry["id"] = str(call["id"])
        entry["function"] = {"name": function["name"], "arguments": arguments}
        cleaned.append(entry)
    return cleaned


def _parse_arguments(arguments: Any, where: str) -> dict[str, Any]:
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise TemplateError(f"{where} is not valid JSON", param=where) from None
    if not isinstance(arguments, Mapping):
        raise TemplateError(f"{where} must be a JSON object, got {type(arguments).__name__}", param=where)
    return dict(arguments)
