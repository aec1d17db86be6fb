"""What the text of an output must match, as text: the engine compiles it (structured/), nothing here does.

    json_object   any JSON object                    regex     a regular expression, of the whole output
    json_schema   a JSON schema                      choice    one of several texts
    grammar       a grammar in Lark's notation

A constraint holds for the whole output, unless it waits for something:

    reasoning ... </think> {"a": 1}         `Reasoning.end_id`: free before it, constrained behind it
    text <tool_call>{...}</tool_call> text  `triggers`: free until one of them, and again behind each match

Shapes and sizes are checked on construction, in the process that answers HTTP. Whether a schema can be
compiled is the engine's answer: a `RequestError` that names the keyword and where it stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Structured:
    """A constraint on an output's text."""

    kind: Kind
    text: str = ""  # the schema as JSON, the expression, the choices as a JSON list, or the grammar
    triggers: tuple[str, ...] = ()  # texts behind which it begins; none: it holds from the start
    whitespace: str | None = None  # a pattern for blanks between JSON tokens; None: up to 8
    param: str = "structured"  # the field that the client gave it in, for errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """How an output's reasoning ends: it begins inside it, and a constraint waits until it is over."""

    end_id: int  # the token that ends it
    max_tokens: int | None = None  # of reasoning; then `forced` is appended, as if the model had said it
    forced: tuple[int, ...] = ()  # ids that end it early; the last is `end_id`, or text behind it
