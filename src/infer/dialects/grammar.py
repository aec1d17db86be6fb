"""The grammar of the tool calls that a request asks for, in the family's own notation.

    required           start: one call or more                      the model chooses the tool
    a named tool       start: one call of that tool
    auto, strict       a trigger, and after it the rest of a call   free text is never masked
    allowed tools      as required or auto, with calls of these tools only
    auto, with a response_format: calls, or JSON of that format

A grammar is written in Lark's notation, in which a JSON schema (`%json {…}`) or a token of the vocabulary
(`<[id]>`) is a symbol: a marker that is a single token can only be written as that token.

Arguments follow the tool's schema. Keywords that the matcher cannot enforce are ignored, and a schema that it
cannot follow at all allows any object, unless the tool is `strict`: then the tool is refused by name. XML
holds raw text, so only the choices of a string are enforced there; in Python notation, names must be valid in
Python.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from infer.constraints.description import MAX_GRAMMAR_BYTES, WHITESPACE, Structured
from infer.constraints.schema_checks import check_keywords, close_objects
from infer.dialects.table import GEMMA_QUOTE, KEYED_MARKERS, Dialect
from infer.dialects.values import schema_types
from infer.errors import RequestError
from infer.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from infer.dialects.answer import AnswerFormat, Tool

_LEAD = r"/[ \n]{0,4}/"  # blanks after reasoning
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")  # keywords that hold schemas by name
_NOTES = frozenset(("title", "description", "examples", "default", "$comment", "deprecated", "x-guidance"))
_STRING_KEYWORDS = ("pattern", "format", "minLength", "maxLength")


def constraint(form: AnswerFormat, tokenizer: Tokenizer, text: Structured | None = None) -> Structured | None:
    """The constraint that an answer's tools and `tool_choice` demand; None if the model is free.

    With `text`, a constraint on answers that are not calls, an answer is either calls or that text.
    """
    dialect = form.dialect
    is_free = (
        form.choice == "auto" and form.allowed is None and not any(tool.is_strict for tool in form.tools)
    )
    if dialect is None or not form.tools or (text is None and is_free):
        return text
    asked = {i: replace(tool, parameters=_bare(tool.parameters)) for i, tool in form.callable_tools.items()}
    if (size := sum(len(_compact(tool.parameters)) for tool in asked.values())) > MAX_GRAMMAR_BYTES:
        raise RequestError(
            f"the parameters of all tools have {size} characters without their descriptions, at most "
            f"{MAX_GRAMMAR_BYTES} are allowed; offer fewer tools, or leave tool_choice and strict out",
            param="tools",
        )
    tools = [_followed(tool, f"tools[{i}].function.parameters") for i, tool in asked.items()]
    lines = _Lines(dialect, tokenizer, is_triggered=form.choice == "auto" and text is None)
    if dialect.form == "harmony" and form.think is not None:
        lines.lead = f"{lines.marker('<|start|>')} {_quote('assistant')}"
    elif form.think is not None:
        lines.lead = _LEAD
    names = " | ".join([lines.tool(tool) for tool in tools])
    if form.choice == "auto" and text is None:
        grammar = lines.behind_trigger(names)
        return Structured(kind="grammar", text=grammar, triggers=(_trigger(dialect),), param="tools")
    other = lines.other(text) if text is not None and form.choice == "auto" else ""
    grammar = lines.answer(names, is_single=form.max_calls == 1 or dialect.is_whole, other=other)
    return Structured(kind="grammar", text=grammar, param="tools")


def _followed(tool: Tool, where: str) -> Tool:
    """The tool with a schema that the matcher can follow."""
    schema = dict(tool.parameters)
    is_plain = not set(schema) - {"type", "properties", "required", "$defs", "definitions", "$schema"}
    if is_plain:
        schema.setdefault("properties", {})  # else a model could write no property
    close_objects(schema)
    try:
        check_keywords(schema, param=where, is_lenient=not tool.is_strict)
    except RequestError:
        if tool.is_strict:
            raise
        schema = {"type": "object"}
    else:
        if is_plain:
            schema["additionalProperties"] = False
    return replace(tool, parameters=schema)


def _bare(schema: Any) -> Any:
    """A schema without titles and descriptions, which are only for the model."""
    if isinstance(schema, list):
        return [_bare(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, Mapping):
            made[key] = {name: _bare(each) for name, each in value.items()}
        elif key not in _NOTES:
            made[key] = value if key in ("enum", "const", "required") else _bare(value)
    return made


def _references(schema: Any) -> Iterator[str]:
    """Every `$ref` in a schema."""
    stack = [schema]
    while stack:
        each = stack.pop()
        if isinstance(each, Mapping):
            if isinstance(ref := each.get("$ref"), str):
                yield ref
            stack += [value for key, value in each.items() if key not in ("enum", "const")]
        elif isinstance(each, list):
            stack += each


def _reached(schema: Any, whole: Mapping[str, Any]) -> dict[str, dict[str, Any]] | None:
    """The definitions in `whole` that `schema` refers to; None if it refers to anything else."""
    found: dict[str, dict[str, Any]] = {}
    waiting = [schema]
    while waiting:
        for ref in _references(waiting.pop()):
            keyword, name = ([unquote(step) for step in ref.split("/")[1:]] + ["", ""])[:2]
            name = name.replace("~1", "/").replace("~0", "~")
            if keyword not in ("$defs", "definitions") or name not in whole.get(keyword, ()):
                return None
            if name not in found.setdefault(keyword, {}):
                found[keyword][name] = whole[keyword][name]
                waiting.append(whole[keyword][name])
    return found


def _trigger(dialect: Dialect) -> str:
    """The text after which a call is certain, before its name."""
    if dialect.form == "xml":
        return "<function="
    if dialect.form == "harmony":
        return " to=functions."
    if dialect.form == "json" and not dialect.writes_marker:
        return '{"name": "'
    if not dialect.begins:
        raise RequestError(
            "strict or allowed tools need tool_choice 'required' or a named tool with this model: its calls "
            f"({dialect.name}) have no marker after which they could be enforced",
            param="tools",
        )
    return dialect.begins[0]


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _compact(schema: Mapping[str, Any] | bool) -> str:
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


class _Lines:
    """The rules of a grammar, as they are written."""

    def __init__(self, dialect: Dialect, tokenizer: Tokenizer, *, is_triggered: bool) -> None:
        self._dialect = dialect
        self._is_triggered = is_triggered
        self._tokenizer = tokenizer
        self._rules: list[str] = []
        self._names: dict[str, str] = {}  # names of rules, by their bodies
        self._symbols: dict[tuple[str, str], str] = {}  # rules of schemas, by tool and schema
        self._size = 0
        self.lead = ""  # text in front of everything
        first = tokenizer.token_id(dialect.begins[0]) if dialect.begins else None
        gap = tokenizer.gap_after_special if first in tokenizer.special_ids else ""
        self._opening = gap + dialect.opening

    def marker(self, text: str) -> str:
        token_id = self._tokenizer.token_id(text) if text else None
        return f"<[{token_id}]>" if token_id is not None else self._text(text)

    def _text(self, text: str) -> str:
        return _quote(text) if text else ""

    def _rule(self, body: str, option: str = "") -> str:
        """The name of the rule with this body; equal bodies share a rule."""
        if body not in self._names:
            self._size += len(body)
            if self._size > MAX_GRAMMAR_BYTES:
                raise RequestError(
                    f"the grammar of these tools has more than the {MAX_GRAMMAR_BYTES} characters that are "
                    "allowed; send fewer tools, or smaller schemas",
                    param="tools",
                )
            self._names[body] = f"r{len(self._rules)}"
            self._rules.append(f"{self._names[body]}{option}: {body}")
        return self._names[body]

    def _finish(self, start: str) -> str:
        return "\n".join((f"start: {start}", *self._rules))

    # -- the answer ----------------------------------------------------------------------------------

    def other(self, text: Structured) -> str:
        """The rule for answers that are not calls."""
        if text.kind not in ("json_schema", "json_object"):
            raise RequestError.about(
                text.param,
                f"is a {text.kind} for the whole answer and leaves no room for calls of tools; "
                "set tool_choice to 'none', or leave one of the two out",
            )
        schema = json.loads(text.text) if text.kind == "json_schema" else {"type": "object"}
        whole = dict(schema) if isinstance(schema, Mapping) else {}
        whole["x-guidance"] = {"whitespace_pattern": text.whitespace or WHITESPACE, "lenient": False}
        head = self.header("final", " ", "<|constrain|>", "json") if self._dialect.form == "harmony" else ""
        return self._rule(f"{head} %json {json.dumps(whole, ensure_ascii=False)}".strip())

    def header(self, *parts: str) -> str:
        """The header of a Harmony message."""
        markers = [
            self.marker(part) if part.startswith("<|") else _quote(part)
            for part in ("<|channel|>", *parts, "<|message|>")
        ]
        return " ".join(markers)

    def answer(self, tool: str, *, is_single: bool, other: str = "") -> str:
        """The grammar of an answer that is either only calls or the `other` rule."""
        dialect = self._dialect
        call = self._rule(tool)
        begin = self.marker(dialect.begins[0]) if dialect.writes_marker else ""
        opening, closing = f"{begin} {self._text(self._opening)}", self._text(dialect.closing)
        end, between = self.marker(dialect.end), self._text(dialect.between)
        if dialect.is_repeated:
            call = self._rule(f"{opening} {call} {closing} {end}")
            opening = closing = end = ""
        more = "" if is_single else f"({between} {call})*"
        calls = self._rule(f"{opening} {call} {more} {closing} {end}")
        return self._finish(f"{self.lead} ({calls}{' | ' + other if other else ''})")

    def behind_trigger(self, tool: str) -> str:
        """The grammar of the text after a trigger, to the end of the call."""
        dialect = self._dialect
        call = self._rule(tool)
        if dialect.form in ("xml", "harmony") or not dialect.writes_marker:
            return self._finish(call)
        more = "" if dialect.is_repeated else f"({self._text(dialect.between)} {call})*"
        opening, closing = (self._text(text.strip()) for text in (dialect.opening, dialect.closing))
        blanks = _LEAD if dialect.end else "/ ?/"
        end = f"{_LEAD} {self.marker(dialect.end)}" if dialect.end else ""
        if dialect.form == "named":
            blanks = ""
        return self._finish(f"{blanks} {opening} {call} {more} {closing} {end}")

    # -- one call ------------------------------------------------------------------------------------

    def tool(self, tool: Tool) -> str:
        """The rule of one tool's call."""
        write = {
            "json": self._json, "named": self._named, "xml": self._xml, "keyed": self._keyed,
            "pythonic": self._pythonic, "harmony": self._harmony, "gemma": self._gemma,
        }  # fmt: skip
        return self._rule(write[self._dialect.form](tool))

    def _schema(self, schema: Mapping[str, Any] | bool, tool: Tool) -> str:
        """A JSON schema as a symbol: the tool's schema, or a part of it with the definitions that it uses."""
        key = tool.name, _compact(schema)
        if key in self._symbols:
            return self._symbols[key]
        options: dict[str, Any] = {"whitespace_pattern": WHITESPACE}
        if not tool.is_strict:
            options |= {"lenient": True, "coerce_one_of": True}
        if self._dialect.form == "pythonic":
            options["json_allowed_escapes"] = 'nrbtf\\"u'  # escapes that mean the same in Python
        whole = dict(schema) if isinstance(schema, Mapping) else ({} if schema else {"not": {}})
        if schema is not tool.parameters:
            reached = _reached(schema, tool.parameters)
            if reached is None and tool.is_strict:
                raise RequestError(
                    f"a $ref of the strict tool {tool.name!r} cannot be followed: this model writes its "
                    "arguments one by one, so each can refer to $defs only; "
                    "move it there, or leave strict out",
                    param="tools",
                )
            whole = {} if reached is None else whole | reached
        whole["x-guidance"] = options
        self._symbols[key] = self._rule("%json " + _compact(whole))
        return self._symbols[key]

    def _json(self, tool: Tool) -> str:
        head = f'{{"name": {_quote(tool.name)}, "{self._dialect.key}": '
        if not self._dialect.writes_marker and self._is_triggered:
            head = head.removeprefix('{"name": "')
        return f'{_quote(head)} {self._schema(tool.parameters, tool)} "}}"'

    def _named(self, tool: Tool) -> str:
        separator = self.marker(self._dialect.separator)
        return f"{_quote(tool.name)} {separator} {self._schema(tool.parameters, tool)}"

    def _harmony(self, tool: Tool) -> str:
        arguments = self._schema(tool.parameters, tool)
        if not self._is_triggered:
            recipient = f"commentary to=functions.{tool.name} "
            return f"{self.header(recipient, '<|constrain|>', 'json')} {arguments}"
        channel = f'({self.marker("<|channel|>")} ("commentary" | "analysis"))?'
        kind = f'(" json" | " "? {self.marker("<|constrain|>")} "json")?'
        return f"{_quote(tool.name)} {channel} {kind} {self.marker('<|message|>')} {arguments}"

    def _xml(self, tool: Tool) -> str:
        head = f"<function={tool.name}>\n"
        if self._is_triggered:
            head = head.removeprefix("<function=")
        parts = [_quote(head)]
        for name, schema in tool.properties.items():
            rule = self._rule(
                f"{_quote(f'<parameter={name}>' + chr(10))} "
                f"{self._raw_value(schema, tool, name, chr(10) + '</parameter>' + chr(10))}"
            )
            parts.append(rule if name in tool.required else f"{rule}?")
        return " ".join((*parts, _quote("</function>")))

    def _keyed(self, tool: Tool) -> str:
        begin, middle, value, end = map(self.marker, KEYED_MARKERS)
        parts = [_quote(tool.name + "\n")]
        for name, schema in tool.properties.items():
            head = f'{begin} {_quote(name)} {middle} "\\n" {value}'
            rule = self._rule(f'{head} {self._raw_value(schema, tool, name, KEYED_MARKERS[-1])} "\\n"')
            parts.append(rule if name in tool.required else f"{rule}?")
        return " ".join(parts)

    def _gemma(self, tool: Tool) -> str:
        """Plain text in the notation's own quotes; other values are JSON, which is read as well."""
        quote, given = self.marker(GEMMA_QUOTE), []
        for name, schema in tool.properties.items():
            key = name if re.fullmatch(r"[\w.-]+", name) else json.dumps(name, ensure_ascii=False)
            is_plain = isinstance(schema, Mapping) and schema_types(schema) == {"string"}
            if is_plain and not any(each in schema for each in (*_STRING_KEYWORDS, "enum", "const")):
                is_token = quote.startswith("<[")  # else the quote's characters end the text
                rest = (r"/(.|\n)*/", "") if is_token else (r'/(.|\n)*<\|"\|>/', "[lazy]")
                value = f"{quote} {self._rule(*rest)} {quote if is_token else ''}"
            else:
                value = self._schema(schema, tool)
            given.append((name in tool.required, self._rule(f"{_quote(key + ':')} {value}")))
        return f'{_quote(f"call:{tool.name}{{")} {self._listed(given, ",")} "}}"'

    def _raw_value(self, schema: Mapping[str, Any] | bool, tool: Tool, name: str, after: str) -> str:
        """A value, as raw text if it can be text, and the end marker."""
        end = self.marker(after)
        types = schema_types(schema if isinstance(schema, Mapping) else None)
        if "string" not in types or not isinstance(schema, Mapping):
            return f"{self._schema(schema, tool)} {end}"
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list) and all(isinstance(value, str) and value for value in values):
            return f"({' | '.join(map(_quote, values))}) {end}"
        if tool.is_strict and (given := [key for key in _STRING_KEYWORDS if key in schema]):
            raise RequestError(
                f"{given[0]} of the parameter {name!r} of the strict tool {tool.name!r} cannot be enforced: "
                "this model writes arguments as raw text; leave it out, or leave strict out",
                param="tools",
            )
        if end.startswith("<["):  # text cannot contain this token
            return self._rule(r"/(.|\n)*/") + " " + end
        return self._rule(
            r"/(.|\n)*" + after.lstrip().replace("/", r"\/").replace("\n", r"\n") + "/", "[lazy]"
        )

    def _pythonic(self, tool: Tool) -> str:
        for name in (tool.name, *tool.properties):
            if not name.isidentifier():
                raise RequestError(
                    f"this model calls tools in Python's notation, in which {name!r} (of the tool "
                    f"{tool.name!r}) is not a valid name; rename it, or leave tool_choice and strict out",
                    param="tools",
                )
        given = [
            (name in tool.required, self._rule(f'"{name}=" {self._schema(schema, tool)}'))
            for name, schema in tool.properties.items()
        ]
        return f'"{tool.name}(" {self._listed(given, ", ")} ")"'

    def _listed(self, given: list[tuple[bool, str]], separator: str) -> str:
        """The arguments with a separator between them, required arguments first."""
        comma = _quote(separator)
        required = [rule for is_required, rule in given if is_required]
        optional = [rule for is_required, rule in given if not is_required]
        if required:
            return f" {comma} ".join(required) + "".join(f" ({comma} {rule})?" for rule in optional)
        firsts = [  # any optional argument may be the first
            self._rule(rule + "".join(f" ({comma} {later})?" for later in optional[i + 1 :]))
            for i, rule in enumerate(optional)
        ]
        return f"({' | '.join(firsts)})?" if firsts else ""
