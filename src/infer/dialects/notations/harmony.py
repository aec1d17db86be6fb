"""Harmony, gpt-oss's notation: an answer consists of messages, and each header gives the kind of its text.

    <|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>So.<|return|>

Models sometimes write broken headers. Known words are removed from a header, other words are text, and text
without a header is the answer; markers are never shown.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from infer.dialects.cursor import NAME, Cursor, Reader
from infer.dialects.table import HARMONY_MARKERS
from infer.dialects.writer import AnswerWriter

if TYPE_CHECKING:
    from infer.dialects.answer import AnswerFormat

HEADER = re.compile(r" ?[\w.:/=-]{0,160}( [\w.:/=-]{0,160}){0,2} ?", re.ASCII)  # words between markers
HEADER_WORD = re.compile(r" ?(to=(?P<recipient>\S*)|(?P<channel>analysis|commentary|final)|assistant)(?= |$)")


def read_messages(text: Cursor, out: AnswerWriter, form: AnswerFormat) -> Reader[None]:
    """Read messages, one after another, up to the marker that ends a call or the answer."""
    spoken: set[bool] = set()  # kinds of text so far: True for reasoning
    channel, recipient = ("analysis" if out.is_reasoning else "final"), ""
    if not out.is_reasoning and not form.in_text:
        channel, recipient = yield from _read_header(text, out, form)
    while True:
        name = recipient.removeprefix("functions.")
        out.in_call = bool(out.tools and NAME.fullmatch(name) and name not in ("assistant", "user"))
        out.is_reasoning = channel == "analysis" and form.think is not None and not out.in_call
        if out.in_call:
            out.start(name)
        out.begin_text("" if out.in_call or out.is_reasoning not in spoken else "\n\n")
        marker = "<|message|>"
        while marker in ("<|message|>", "<|constrain|>"):  # neither has a meaning inside a message
            marker = yield from out.read_prose(HARMONY_MARKERS)
        if out.in_call:
            if not out.has_text and not (text.has_ended and text.is_cut):
                out.argue("{}")
            out.end_call()
        elif out.has_text:
            spoken.add(out.is_reasoning)
        if marker or out.in_call or out.is_reasoning or not out.has_text:
            out.end_text()
        out.in_call = False
        out.is_done = out.is_done or marker in ("<|call|>", "<|return|>")
        if not marker or out.is_done:
            return
        if marker != "<|end|>":
            text.unread(marker)
        out.is_reasoning = False
        channel, recipient = yield from _read_header(text, out, form)


def _read_header(text: Cursor, out: AnswerWriter, form: AnswerFormat) -> Reader[tuple[str, str]]:
    """The channel and the recipient of the next message; other text is left unread."""
    out.is_header = True
    channel = recipient = words = ""
    has_begun = False  # True once a marker has come
    while True:
        char, marker = yield from _read_marker(text)
        if char and not marker and HEADER.fullmatch(words + char):
            words += char
            continue
        if marker or has_begun or words.lstrip().startswith("to="):
            while (found := HEADER_WORD.match(words)) is not None:
                channel, recipient = found["channel"] or channel, found["recipient"] or recipient
                words = words[found.end() :]
        if recipient or (channel and marker in ("<|message|>", "<|constrain|>")):
            words = ""  # the type of the content
        if text.has_ended:
            is_lost = (text.is_cut and has_begun) or form.is_forced
            recipient, words = "", "" if is_lost else words
        if words.strip() or marker not in ("<|start|>", "<|channel|>", "<|constrain|>"):
            break
        if marker == "<|start|>":
            channel = recipient = ""
        has_begun, words = True, ""
    if words.strip() or marker != "<|message|>":
        text.unread(words + (marker or char))
    out.is_header = False
    return channel, recipient


def _read_marker(text: Cursor) -> Reader[tuple[str, str]]:
    """The next character, and the marker that it begins, if it begins one."""
    char = yield from text.char()
    if char == "<":
        text.unread(char)
        for marker in HARMONY_MARKERS:
            if (yield from text.begins_with(marker)):
                return char, marker
        yield from text.char()
    return char, ""
