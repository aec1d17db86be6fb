"""Gemma 4's calls, `call:f{…}`: JSON in which keys have no quotes, and strings have special quotes."""

from __future__ import annotations

import json

from infer.dialects.cursor import Cursor, NotACall, Reader
from infer.dialects.table import GEMMA_QUOTE, Dialect
from infer.dialects.values import read_value
from infer.dialects.writer import AnswerWriter

MAX_DEPTH = 64  # nested objects and lists of a call


def read_gemma(text: Cursor, out: AnswerWriter, dialect: Dialect, marker: str) -> Reader[None]:
    """Read one call."""
    yield from text.expect("call:")
    name = yield from text.name()
    yield from text.expect("{")
    out.start(name)
    yield from _read_value(text, out, "{")
    out.end_call()


def _read_value(text: Cursor, out: AnswerWriter, char: str, depth: int = 1) -> Reader[None]:
    """Pass on a value as JSON, strings as they come; `char` is its first character."""
    if depth > MAX_DEPTH:
        raise NotACall
    if char and char in "{[":
        close, separator = "}]"["{[".index(char)], ""
        out.argue(char)
        while (char := (yield from text.first())) not in ("", close):
            if char == ",":
                continue
            out.argue(separator)
            separator = ", "
            if close == "}":
                key = yield from _read_word(text, char)
                out.argue((key if key[0] == '"' else json.dumps(key, ensure_ascii=False)) + ": ")
                yield from text.expect(":")
                char = yield from text.first()
            yield from _read_value(text, out, char, depth + 1)
            if text.has_ended:
                return
        out.argue(char)
    elif char == "<":
        text.unread(char)
        yield from text.expect(GEMMA_QUOTE)
        out.argue('"')
        if not (yield from text.until((GEMMA_QUOTE,), out.argue_string)):  # cut off, so not closed
            out.argue_string(text.take_rest())
            return
        out.argue('"')
    else:
        word = yield from _read_word(text, char)
        out.argue(word if word.startswith('"') else read_value(word, None))
    text.mark()


def _read_word(text: Cursor, char: str) -> Reader[str]:
    """A key, a number, a name such as `true`, or a string in JSON's quotes, as it was written."""
    if char == '"':
        return (yield from text.value(char))
    word = ""
    while char and char not in ":,{}[]<":
        word += char
        char = yield from text.char()
    text.unread(char)
    if not word:
        raise NotACall
    return word.strip()
