"""The format of one answer: its notation, its tools, and whether it begins with reasoning.

    the model's dialect ──┐
    tools, tool_choice  ──┼──► AnswerFormat ──► AnswerParser   reads the answer, one parser for each sequence
    the rendered prompt ──┘                └──► constraint     makes the model write what tool_choice asks for

A conversation without tools, with a model that does not reason, has no format: its answer is text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from infer.constraints.description import Reasoning
from infer.dialects.events import TOOL_NAME, ToolCall, read_arguments
from infer.dialects.grammar import constraint
from infer.dialects.table import Dialect, Think
from infer.errors import MalformedRequest, RequestError, field_of, json_type, show_value, unknown_field
from infer.finish_reason import FinishReason
from infer.sampling.params import SamplingParams
from infer.tokenizer.tokenizer import Tokenizer

MAX_TOOLS = 128
MAX_DESCRIPTION = 65536  # characters of a tool's description
TOOL_KEYS = ("name", "description", "parameters", "strict")
_TAIL = 32  # tokens at the end of a prompt that show whether reasoning has begun

CHOICES = ("auto", "none", "required")  # no tool can have one of these as its name

EFFORTS: Mapping[str, int | None] = {  # tokens of reasoning; None: no limit
    "none": 0, "minimal": 512, "low": 1024, "medium": 4096, "high": None, "xhigh": None,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may ask to be called."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)  # a JSON schema of an object
    is_strict: bool = False  # True if a grammar makes arguments follow the schema

    @property
    def properties(self) -> Mapping[str, Any]:
        """The parameters by name."""
        found = self.parameters.get("properties")
        return found if isinstance(found, Mapping) else {}

    @property
    def required(self) -> tuple[str, ...]:
        """The names of the required parameters."""
        return tuple(self.parameters.get("required") or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """The format by which one answer is parsed."""

    dialect: Dialect | None = None  # None: calls are not parsed
    tools: tuple[Tool, ...] = ()
    choice: str = "auto"  # auto, required, or the name of a tool
    allowed: tuple[str, ...] | None = None  # names of the tools that may be called; None: all
    max_calls: int | None = None  # calls after which the answer ends
    think: Think | None = None  # None: the model does not reason, or was told not to
    in_reasoning: bool = False  # True if the prompt ends inside of reasoning
    in_text: bool = False  # True if the prompt ends inside of the answer's text, which goes on
    shown_ids: frozenset[int] = frozenset()  # special tokens that are markers: the parser gets their text

    @property
    def callable_tools(self) -> dict[int, Tool]:
        """The tools that may be called, by their index among all tools."""
        names = (self.choice,) if self.choice not in CHOICES else self.allowed
        return {i: tool for i, tool in enumerate(self.tools) if names is None or tool.name in names}

    @property
    def is_forced(self) -> bool:
        """True if the answer must be only calls, after its reasoning."""
        return self.dialect is not None and self.choice != "auto"

    def bind(
        self, params: SamplingParams, tokenizer: Tokenizer, max_reasoning: int | None = None
    ) -> SamplingParams:
        """The parameters, with forced calls and the end of reasoning for the engine to enforce."""
        structured = constraint(self, tokenizer, params.structured)
        reasoning = None
        if self.think is not None and (structured is not None or max_reasoning is not None):
            has_text = structured is not None and structured is params.structured  # text and no calls
            reasoning = _find_end(self.think, tokenizer, max_reasoning, self.think.next if has_text else "")
            if reasoning is None and self.in_reasoning and structured is not None:
                raise RequestError.about(
                    structured.param,
                    "would constrain an answer that begins with reasoning, but this model has no token "
                    f"{self.think.end} at which the constraint could begin; leave it out",
                )
        if structured is params.structured and reasoning is None:
            return params
        return replace(params, structured=structured, reasoning=reasoning)

    def opened(self, tokenizer: Tokenizer) -> tuple[list[int], AnswerFormat]:
        """The ids that open the reasoning, and the format of an answer after them.

        An engine that watches for the end of reasoning needs them: a model that never begins to reason would
        never end it.
        """
        assert self.think is not None
        if self.in_reasoning:
            return [], self
        ids = tokenizer.encode(self.think.begin, add_special=False, parse_special=True)
        ids += tokenizer.encode(self.think.blank, add_special=False)
        return ids, replace(self, in_reasoning=True)

    def finish_reason(self, reason: FinishReason | None, calls: Sequence[ToolCall]) -> FinishReason | None:
        """The reason in OpenAI's words: `tool_calls`, unless the client itself had named the tool.

        An answer whose last call was cut, for example by a stop string, keeps its own reason.
        """
        is_free = self.choice in ("auto", "required")
        if reason != FinishReason.STOP or not is_free or not calls:
            return reason
        return reason if read_arguments(calls[-1].arguments) is None else FinishReason.TOOL_CALLS


def _find_end(
    think: Think, tokenizer: Tokenizer, max_tokens: int | None, after: str = ""
) -> Reasoning | None:
    """The end of reasoning: its ids, which also force it after `max_tokens`, and the ids `after` it."""
    end_id = tokenizer.token_id(think.end)
    if end_id is not None:
        later = tuple(tokenizer.encode(after, add_special=False, parse_special=True))
        forced = (*tokenizer.encode(think.blank, add_special=False), end_id)
        return Reasoning(end_id=end_id, max_tokens=max_tokens, forced=forced, later=later)
    if max_tokens is None:
        return None  # no end token: a constraint holds from the start
    raise RequestError.about(
        "max_reasoning_tokens", f"is {max_tokens}, but this model has no token {think.end}; leave it out"
    )


def find_format(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    *,
    dialect: Dialect | None,
    think: Think | None,
    tools: tuple[Tool, ...] = (),
    choice: str = "auto",
    allowed: tuple[str, ...] | None = None,
    is_parallel: bool = True,
    is_continued: bool = False,
) -> AnswerFormat | None:
    """The format of the answer to a prompt; None if it is only text.

    An answer that continues the last message (`is_continued`) does not begin with reasoning.
    """
    in_reasoning = False
    think = None if is_continued else think
    if think is not None:
        tail = tokenizer.decode(prompt[-_TAIL:], skip_special=False).rstrip()
        in_reasoning = tail.endswith(think.begin)
        if tail.endswith(think.end):  # empty reasoning in the prompt: the model is told not to reason
            think = None
    if not tools:
        choice = "auto"
        dialect = dialect if dialect is not None and dialect.is_whole else None
    if dialect is None and think is None:
        return None
    markers = (*(dialect.markers if dialect else ()), *(think.markers if think else ()))
    ids = {tokenizer.token_id(marker) for marker in markers}
    is_single = not is_parallel or choice not in ("auto", "required")
    return AnswerFormat(
        dialect=dialect,
        tools=tools,
        choice=choice,
        allowed=allowed,
        max_calls=1 if dialect is not None and is_single else None,
        think=think,
        in_reasoning=in_reasoning,
        in_text=is_continued,
        shown_ids=frozenset(token_id for token_id in ids if token_id in tokenizer.special_ids),
    )


def read_tools(given: Sequence[Mapping[str, Any]] | None) -> tuple[Tool, ...]:
    """The tools of a request, checked; a `RequestError` names the wrong field."""
    if not given:
        return ()
    if len(given) > MAX_TOOLS:
        raise RequestError.about("tools", f"has {len(given)} entries, at most {MAX_TOOLS} are allowed")
    tools = tuple(_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(given))
    for i, tool in enumerate(tools):
        if tool.name in (other.name for other in tools[:i]):
            raise RequestError(f"tools[{i}] has the name {tool.name!r} of another tool", param="tools")
    return tools


def _read_tool(tool: Mapping[str, Any], where: str) -> Tool:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    function = tool.get("function") if kind == "function" else None
    if not isinstance(function, Mapping):
        what = "it has no type" if kind is None else f"the type {show_value(kind)} is not supported"
        what = what if kind != "function" else f"its function is {show_value(tool.get('function'))}"
        if isinstance(tool, Mapping) and "name" in tool and "function" not in tool:
            what = "name, description and parameters belong inside of function, as in chat completions"
        error = RequestError if isinstance(kind, str) and kind != "function" else MalformedRequest
        raise error.about(
            where, f'must look like {{"type": "function", "function": {{"name": ...}}}}; {what}'
        )
    for key, value in tool.items():
        if key not in ("type", "function") and value is not None:
            hint = "it belongs inside of function" if key in TOOL_KEYS else None
            raise unknown_field(key, f"{where}.", ("type", "function"), hint=hint)
    where += ".function"
    for key in function:
        if key not in TOOL_KEYS:
            raise unknown_field(key, f"{where}.", TOOL_KEYS)
    name = field_of(function, "name", where)
    description, strict = function.get("description"), function.get("strict")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        must = f"must be 1 to 64 letters, digits, underscores or dashes, got {show_value(name)}"
        raise (RequestError if isinstance(name, str) else MalformedRequest).about(f"{where}.name", must)
    if name in CHOICES:
        values = f"a value of tool_choice ({', '.join(CHOICES)})"
        raise RequestError.about(f"{where}.name", f"cannot be {name!r}, which is {values}; rename the tool")
    if description is not None and (not isinstance(description, str) or len(description) > MAX_DESCRIPTION):
        error = RequestError if isinstance(description, str) else MalformedRequest
        raise error.about(f"{where}.description", f"must be a string of at most {MAX_DESCRIPTION} characters")
    if not isinstance(strict, bool | None):
        raise MalformedRequest.about(f"{where}.strict", f"must be true or false, got {show_value(strict)}")
    return Tool(name=name, parameters=_read_schema(function.get("parameters"), where), is_strict=bool(strict))


def _read_schema(schema: Any, where: str) -> Mapping[str, Any]:
    where += ".parameters"
    if schema is None:
        return {"type": "object", "properties": {}}
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise (RequestError if isinstance(schema, Mapping) else MalformedRequest).about(
            where, 'must be the JSON schema of an object: {"type": "object", "properties": ...}'
        )
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not all(
        isinstance(each, Mapping | bool) for each in properties.values()
    ):
        raise MalformedRequest.about(f"{where}.properties", "must be an object of JSON schemas")
    if not isinstance(required, list | tuple) or not all(isinstance(each, str) for each in required):
        raise MalformedRequest.about(f"{where}.required", "must be a list of names")
    return schema if "type" in schema else {"type": "object", **schema}


def read_choice(given: object, tools: Sequence[Tool]) -> tuple[str, tuple[str, ...] | None]:
    """`tool_choice` as auto, none, required or a tool's name, and the allowed names; None: all."""
    if isinstance(given, Mapping) and given.get("type") == "allowed_tools":
        return _read_allowed(given, tools)
    if given is None:
        return "auto" if tools else "none", None
    if given in ("none", "auto") or (given == "required" and tools):
        return str(given) if tools else "none", None
    if given == "required":
        raise RequestError.about("tool_choice", "asks for a call, but there are no tools")
    kind = field_of(given, "type", "tool_choice") if isinstance(given, Mapping) else None
    if isinstance(given, Mapping) and kind == "function":
        return _read_name(given, tools, "tool_choice"), None
    what = f"{show_value(kind)} is not supported; " if kind is not None else ""
    error = RequestError if isinstance(given if kind is None else kind, str) else MalformedRequest
    raise error(
        f"{what}tool_choice must be 'auto', 'none', 'required' or an object that names a function of tools, "
        f"got {show_value(given)}",
        param="tool_choice",
    )


def _read_allowed(given: Mapping[str, Any], tools: Sequence[Tool]) -> tuple[str, tuple[str, ...]]:
    """The mode and the names of a choice that allows some of the tools."""
    where = "tool_choice"
    if given.get("allowed_tools") is not None or "tools" not in given:  # else the flat form of /v1/responses
        given, where = field_of(given, "allowed_tools", where), "tool_choice.allowed_tools"
    mode, listed = field_of(given, "mode", where), field_of(given, "tools", where)
    if mode not in ("auto", "required"):
        error = RequestError if isinstance(mode, str) else MalformedRequest
        raise error.about(f"{where}.mode", f"must be 'auto' or 'required', got {show_value(mode)}")
    if not isinstance(listed, list | tuple):
        raise MalformedRequest.about(f"{where}.tools", f"must be a list, got {json_type(listed)}")
    if not 1 <= len(listed) <= MAX_TOOLS:
        said = f"has {len(listed)} entries; allow 1 to {MAX_TOOLS} tools, or set tool_choice to 'none'"
        raise RequestError.about(f"{where}.tools", said)
    for i, each in enumerate(listed):
        if not isinstance(each, Mapping) or each.get("type") != "function":
            said = f'must look like {{"type": "function", "name": ...}}, got {show_value(each)}'
            error = RequestError if isinstance(each, Mapping) else MalformedRequest
            raise error.about(f"{where}.tools[{i}]", said)
    return mode, tuple(_read_name(each, tools, f"{where}.tools[{i}]") for i, each in enumerate(listed))


def _read_name(given: Mapping[str, Any], tools: Sequence[Tool], where: str) -> str:
    """The name of the tool that an object at `where` has, inside of `function` or flat."""
    function, place = given, where
    if given.get("function") is not None or "name" not in given:  # else the flat form of /v1/responses
        function, place = field_of(given, "function", where), f"{where}.function"
    name = field_of(function, "name", place)
    if not isinstance(name, str):
        raise MalformedRequest.about(f"{place}.name", f"must be text, got {show_value(name)}")
    if any(name == tool.name for tool in tools):
        return name
    names = ", ".join(tool.name for tool in tools) or "none"
    raise RequestError.about(where, f"names {show_value(name)}, but the tools are: {names}")
