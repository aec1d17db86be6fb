"""Calls in Python's notation, `[f(k=1), g()]`, each converted to JSON when it is complete."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from infer.dialects.cursor import Cursor, NotACall, Reader
from infer.dialects.table import Dialect
from infer.dialects.values import WORDS, whole_characters
from infer.dialects.writer import AnswerWriter

BRACKETS = ("([{", ")]}", "\"'")  # opening brackets, closing brackets, quotes
MAX_CALL = 1 << 16  # characters of one call, which is parsed at once


def read_python(text: Cursor, out: AnswerWriter, dialect: Dialect, marker: str) -> Reader[None]:
    """Read a list of calls; after a marker also calls without brackets, one after another."""
    is_list = yield from text.begins_with("[")
    if not is_list and not marker:
        return
    while True:
        yield from _read_call(text, out, is_bare=not marker)
        if out.is_done:
            return
        has_more = yield from text.begins_with(",")
        if not has_more and (is_list or (yield from text.comes(dialect.end[:1])) or text.has_ended):
            break
    if is_list:
        yield from text.begins_with("]")


def _read_call(text: Cursor, out: AnswerWriter, *, is_bare: bool) -> Reader[None]:
    char = yield from text.first()
    call = ""
    while char and (char.isalnum() or char in "_."):
        call += char
        char = yield from text.char()
    if char != "(" or (is_bare and call not in out.tools):
        text.unread(char)
        raise NotACall
    call += yield from text.value("(", BRACKETS)
    name, arguments = _convert(call, {name: list(tool.properties) for name, tool in out.tools.items()})
    out.start(out.known(name, is_bare=is_bare))
    out.argue(arguments)
    out.end_call()


def _convert(text: str, parameters: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    """The name and the JSON arguments of `f(a, k=v)`, a call of literals.

    `parameters` has the parameters of each tool in order, for positional arguments.
    """
    if len(text) > MAX_CALL:
        raise NotACall
    try:
        node = ast.parse(text, mode="eval").body
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and "print" not in parameters:
            (node,) = node.args
        if not isinstance(node, ast.Call):
            raise NotACall
        name = ast.unparse(node.func)
        if not name.replace(".", "").isidentifier():
            raise NotACall
        given: dict[str, Any] = {}
        for key, value in zip(parameters.get(name, ())[: len(node.args)], node.args, strict=True):
            given[key] = _literal(value)
        for keyword in node.keywords:
            if keyword.arg is None or keyword.arg in given:
                raise NotACall
            given[keyword.arg] = _literal(keyword.value)
        return name, json.dumps(given, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise NotACall from None


def _literal(node: ast.expr) -> Any:
    """A Python literal; JSON's names for true, false and null are read as well."""
    if isinstance(node, ast.Name) and node.id in WORDS:
        return WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_literal(key) for key in node.keys if key is not None]
        if len(keys) != len(node.values) or not all(isinstance(key, str) for key in keys):
            raise ValueError("no JSON object")
        return dict(zip(keys, map(_literal, node.values), strict=True))
    value = ast.literal_eval(node)
    if isinstance(value, str):
        return whole_characters(value)
    if isinstance(value, bool | int | float) or value is None:
        return value
    raise ValueError("no JSON value")
