"""Flags for the form of an answer: JSON of a schema, a regular expression, one of several texts, a grammar.

    --json-schema '{"type": "object", ...}'     or the name of a file that holds it
    --regex '[0-9]{4}'                          of the whole answer
    --choice yes --choice no
    --grammar FILE                              in Lark's notation, or in EBNF

One of them at a time. An engine here gets the constraint itself; a server of `--url` is asked in the words
that it is most likely to know: OpenAI's for a schema, vLLM's for the others.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from infer.errors import ConfigError
from infer.sampling.structured import Structured


def add_form_flags(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the flags; at most one may be given."""
    group = parser.add_argument_group("form of the answer, one of these")
    one = group.add_mutually_exclusive_group()
    one.add_argument("--json-schema", metavar="FILE|JSON", help="JSON that this schema allows")
    one.add_argument(
        "--regex", metavar="PATTERN", help="text that this regular expression matches as a whole"
    )
    one.add_argument(
        "--choice", metavar="TEXT", action="append", help="this text, or that of another --choice"
    )
    one.add_argument(
        "--grammar",
        metavar="FILE",
        type=Path,
        help="text of this grammar, in Lark's notation (start: ...) or EBNF (root ::= ...)",
    )


def form_from(args: argparse.Namespace) -> Structured | None:
    """The constraint that flags ask for, checked; None where they ask for none."""
    if args.json_schema is not None:
        given: str = args.json_schema
        text = given if given.lstrip().startswith("{") else _read("--json-schema", Path(given))
        return Structured.json_schema(text, param="--json-schema")
    if args.regex is not None:
        return Structured.regex(args.regex, param="--regex")
    if args.choice is not None:
        return Structured.choice(args.choice, param="--choice")
    if args.grammar is not None:
        return Structured.grammar(_read("--grammar", args.grammar), param="--grammar")
    return None


def to_fields(structured: Structured) -> dict[str, Any]:
    """A constraint as fields of a request to a server."""
    if structured.kind == "json_schema":
        described = {"name": "answer", "schema": json.loads(structured.text), "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": described}}
    if structured.kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    value = structured.choices if structured.kind == "choice" else structured.text
    return {"structured_outputs": {structured.kind: value}}


def _read(flag: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {flag} {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} {path} is not UTF-8: {error}") from None
