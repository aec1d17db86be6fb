"""Calls whose arguments are JSON: `{"name": "f", "arguments": {…}}` and `f[ARGS]{…}`."""

from __future__ import annotations

import json
from typing import Any

from infer.dialects.cursor import JSON, Cursor, Nesting, NotACall, Reader
from infer.dialects.table import Dialect
from infer.dialects.values import whole_characters
from infer.dialects.writer import AnswerWriter

ARGUMENT_KEYS = ("arguments", "parameters")


def read_json(text: Cursor, out: AnswerWriter, dialect: Dialect, marker: str) -> Reader[None]:
    """Read one object, several with semicolons between them, or a list of them."""
    if not marker and not (yield from text.comes("{")):
        return
    is_list = yield from text.begins_with("[")
    between = "," if is_list else ";"
    while True:
        yield from _read_object(text, out, is_bare=not marker)
        if out.is_done:
            return
        if not (yield from text.begins_with(between)):
            break
    if is_list:
        yield from text.begins_with("]")


def _read_object(text: Cursor, out: AnswerWriter, *, is_bare: bool) -> Reader[None]:
    yield from text.expect("{")
    name: str | None = None
    arguments: str | None = None
    has_started = False
    while True:
        key = _loads((yield from text.value((yield from text.first()))))
        yield from text.expect(":")
        char = yield from text.first()
        if key in ARGUMENT_KEYS and char == "{" and name is not None and not has_started:
            out.start(name)
            has_started = True
            yield from _stream_object(text, out)
            out.end_call()
            if out.is_done:
                return
        else:
            value = yield from text.value(char)
            if key == "name":
                name = out.known(_loads(value), is_bare=is_bare)
            elif key in ARGUMENT_KEYS:
                arguments = value
        if not (yield from text.begins_with(",")):
            break
    if not (yield from text.begins_with("}")) and not has_started:
        raise NotACall
    if not has_started:
        if name is None:
            raise NotACall
        made = _object_text(arguments)
        out.start(name)
        out.argue(made)
    out.end_call()


def _stream_object(text: Cursor, out: AnswerWriter) -> Reader[None]:
    """Pass an object on, character by character, up to its closing brace."""
    out.argue("{")
    inside = Nesting(*JSON, begun="{")
    while inside.is_open:
        char = yield from text.char()
        if not char:
            return
        if char == "<" and not inside.quote:  # a marker: a brace is missing
            text.unread(char)
            return
        inside.add(char)
        out.argue(char)


def _loads(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        raise NotACall from None


def _object_text(arguments: str | None) -> str:
    """The arguments, read before they could be passed on: an object, or an object in a string."""
    if arguments is None:
        return "{}"
    value = _loads(arguments)
    if isinstance(value, str):
        arguments = whole_characters(value.strip()) or "{}"
        value = _loads(arguments)
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise NotACall
    return arguments


def read_named(text: Cursor, out: AnswerWriter, dialect: Dialect, marker: str) -> Reader[None]:
    """Read a name and its JSON; without a marker several of them, after a marker also an object or a list."""
    if marker and (yield from text.comes("[{")):
        yield from read_json(text, out, dialect, marker)
        return
    while not out.is_done:
        yield from _read_named_call(text, out, is_bare=not marker)
        if marker:
            return


def _read_named_call(text: Cursor, out: AnswerWriter, *, is_bare: bool) -> Reader[None]:
    """`f[ARGS]{…}`, with or without `[CALL_ID]id` in the middle; the markers may be missing."""
    name = out.known((yield from text.name()), is_bare=is_bare)
    if (yield from text.begins_with("[CALL_ID]")):
        yield from text.name("[ARGS]")
    else:
        yield from text.begins_with("[ARGS]")
    yield from text.expect("{")
    out.start(name)
    yield from _stream_object(text, out)
    out.end_call()
