"""Calls with tags around each parameter: `<function=f><parameter=k>v</parameter></function>`, and with keys
`f<arg_key>k</arg_key><arg_value>v</arg_value>`. A text is converted as it comes, other values at their end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from infer.dialects.cursor import Cursor, NotACall, Reader
from infer.dialects.notations.json_calls import read_json
from infer.dialects.table import KEYED_MARKERS, Dialect
from infer.dialects.values import is_text, read_value
from infer.dialects.writer import AnswerWriter

FUNCTION = "<function="
KEY = re.compile(r"[^<>\n]{1,256}")  # the name of a parameter, which JSON does not restrict


def read_xml(text: Cursor, out: AnswerWriter, dialect: Dialect, marker: str) -> Reader[None]:
    """Read `f>`, parameters, and the end of the function; or JSON, which these models write as well."""
    if marker != FUNCTION and not (yield from text.begins_with(FUNCTION)):
        yield from read_json(text, out, dialect, marker)
        return
    name = yield from text.name(">")
    out.start(name)
    if (yield from _read_parameters(text, out, name, "<parameter=", ">", "</parameter>", "\n")):
        yield from text.close("</function>")
        out.end_call()


def read_keyed(text: Cursor, out: AnswerWriter, dialect: Dialect, marker: str) -> Reader[None]:
    """Read `f`, then a key and a value for each parameter; newlines between them may be missing."""
    begin, middle, value, end = KEYED_MARKERS
    name = yield from text.name()
    if not (yield from text.comes((begin, dialect.end))):
        raise NotACall
    out.start(name)
    if (yield from _read_parameters(text, out, name, begin, middle, end, "", value)):
        out.end_call()


def _read_parameters(
    text: Cursor, out: AnswerWriter, name: str, begin: str, middle: str, end: str, blank: str, value: str = ""
) -> Reader[bool]:
    """Pass on the parameters as they come; returns True if they are complete.

    Each is `begin`, a key, `middle`, `value`, a value and `end`; a `blank` around the value is dropped.
    """
    properties = out.tools[name].properties if name in out.tools else {}
    out.argue("{")
    separator = ""
    while (yield from text.begins_with(begin)):
        key = yield from text.name(middle, KEY)
        if value:
            yield from text.expect(value)
        out.argue(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        if not (yield from _read_value(text, out, properties.get(key), end, blank)):
            return False
        separator = ", "
    rest = text.rest.lstrip()
    if text.has_ended and len(rest) > 1 and begin.startswith(rest):  # cut off, so not closed
        text.take_rest()
        return False
    out.argue("}")
    return True


def _read_value(
    text: Cursor, out: AnswerWriter, schema: Mapping[str, Any] | None, end: str, blank: str
) -> Reader[bool]:
    """Pass on a parameter's value: text as it comes, others at their end; returns True if complete."""
    kept: list[str] = []
    if is_open := is_text(schema):
        out.argue('"')
    pass_on = out.argue_string if is_open else kept.append
    char = yield from text.char()
    if char != blank:
        text.unread(char)
    if not (yield from text.until((blank + end, end), pass_on)):  # cut off: passed on, but not closed
        pass_on(text.take_rest())
        out.argue("".join(kept))
        return False
    out.argue('"' if is_open else read_value("".join(kept), schema))
    text.mark()
    return True
