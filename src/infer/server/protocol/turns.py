"""Convert a conversation of blocks or items to the messages that a chat template reads.

`/v1/messages` has blocks inside messages and `/v1/responses` a flat list of items; a chat has one message per
turn, with the turn's reasoning, its text and its tool calls:

    thinking, text, tool_use   |   reasoning, message, function_call     ──►   one assistant message
    tool_result                |   function_call_output                  ──►   one tool message each
    text, text                 |   message, message                      ──►   one user message

Blocks and items are bodies themselves (body.py): none of their fields is dropped silently.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import ValidationError

from infer.errors import MalformedRequest, RequestError, closest, json_type, show_value
from infer.server.protocol.body import Body
from infer.server.protocol.errors import Path, spell_path, validation_error
from infer.server.protocol.schemas import check_call_id

Block = TypeVar("Block", bound=Body)


class Turns:
    """Builds the messages of a conversation from its parts, in order."""

    def __init__(self, *, is_answered: bool = True) -> None:
        self._is_answered = is_answered  # a model answers it: every tool result follows its call
        self._turns: list[dict[str, Any]] = []
        self._call_ids: set[str] = set()
        self.ignored: dict[str, None] = {}  # fields without effect, in order

    def say(self, role: str, text: str) -> None:
        """Add text to a turn of this role; texts of one turn are joined by newlines."""
        self._turn(role)["content"].append(text)

    def think(self, text: str) -> None:
        """Add reasoning to the assistant's turn."""
        self._turn("assistant").setdefault("reasoning_content", []).append(text)

    def call(self, call_id: str, name: str, arguments: str | Mapping[str, Any]) -> None:
        """Add a tool call to the assistant's turn; its arguments are an object, or its JSON text."""
        made = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._turn("assistant").setdefault("tool_calls", []).append(made)
        self._call_ids.add(call_id)

    def answer_call(self, call_id: str, text: str, path: Path) -> None:
        """Add the result of a tool call; `path` is the place of its id."""
        if self._is_answered:
            check_call_id(call_id, self._call_ids, spell_path(path))
        self._turns.append({"role": "tool", "tool_call_id": call_id, "content": [text]})

    def messages(self) -> list[dict[str, Any]]:
        """Return the conversation as chat messages."""
        joined = ("content", "reasoning_content")
        return [
            {key: "\n".join(value) if key in joined else value for key, value in turn.items()}
            for turn in self._turns
        ]

    def read(
        self,
        kinds: Mapping[str, type[Block]],
        given: Any,
        path: Path,
        *,
        refused: Mapping[str, str] | str = "",
        default: str | None = None,
    ) -> Block:
        """Parse a block, an item or a tool as the class of its type; an error names its place in the body.

        `refused` is the reason why other types are not supported, or a table of reasons by type.
        """
        where = spell_path(path)
        if not isinstance(given, dict):
            raise MalformedRequest.about(where, f"must be an object, got {json_type(given)}")
        kind = given.get("type", default)
        if not isinstance(kind, str):
            message = f"{where}.type must be a string: {', '.join(kinds)}; got {show_value(kind)}"
            raise MalformedRequest(message, param=f"{where}.type")
        if kind not in kinds:
            reason = refused if isinstance(refused, str) else refused.get(kind)
            hint = f": {reason}" if reason else closest(kind[:80], list(kinds), listed="allowed")
            raise RequestError.about(where, f"has type {kind[:80]!r}, which is not supported{hint}")
        return self.read_as(kinds[kind], {name: given[name] for name in given if name != "type"}, path)

    def read_as(self, kind: type[Block], given: dict[str, Any], path: Path) -> Block:
        """Parse an object as this class; an error names its place in the body."""
        try:
            made = kind.model_validate(given, context={"where": f"{spell_path(path)}."})
        except ValidationError as error:
            found = [{**each, "loc": ("body", *path, *each["loc"])} for each in error.errors()]
            raise validation_error(found, {}) from None
        for name in made.ignored_fields:
            if given[name] not in (None, [], {}):  # values without effect
                self.ignored[f"{path[0]}.{name}"] = None
        return made

    def _turn(self, role: str) -> dict[str, Any]:
        if not self._turns or self._turns[-1]["role"] != role:
            self._turns.append({"role": role, "content": []})
        return self._turns[-1]


@contextmanager
def spelled(spellings: Mapping[str, str]) -> Iterator[None]:
    """Rename chat fields in errors to the names of another API, given by `spellings`."""
    try:
        yield
    except RequestError as error:
        param = error.param or ""
        for name, other in spellings.items():
            if param == name or param.startswith((f"{name}.", f"{name}[")):
                error.param = other + param.removeprefix(name)
                error.args = (re.sub(rf"\b{name}\b", other, str(error)), *error.args[1:])
                break
        raise
