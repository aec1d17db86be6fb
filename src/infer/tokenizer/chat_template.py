"""Chat templates: turn a conversation into the exact text and ids that its model was trained on.

    messages, tools ──► clean ──► guard ──► Jinja template ──► text ──► ids
                                    │                                    │
                 "<|im_end|>" in what users wrote               guards removed, so it
                 gets a guard after each character              is encoded as plain text

Special tokens tell a model whose turn it is. Only the template may write them: <|im_end|> in a user's message
must not end the turn. So guard characters are inserted into every special-token spelling found in messages
and tools before the template sees them, and removed after the special tokens of the *template* were found.

Clients write messages in the OpenAI format; templates were written for a slightly different one:

    content       text, or a list of {"type": "text", "text": ...} parts   ->  text
    content       null next to tool_calls                                  ->  ""
    tool_calls    arguments as a JSON string                               ->  arguments as an object
    role          developer                                                ->  system
    reasoning     another name for reasoning_content                       ->  reasoning_content (or thinking)

Keys that no template reads are dropped. Content that cannot be shown to a model (an image, an unknown role,
arguments that are not JSON) is refused. So is a conversation beyond the limits below, which bound the work of
a request before its tokens are counted.

Templates are data, not code: one Jinja file per family in models/templates, chosen by `find_template` based
on the model type and the vocabulary's special tokens. A model that matches no family uses the template that
it was shipped with. Templates run in a sandbox (sandbox.py), which limits the time they take and the text
they produce.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser

from infer.errors import ConfigError, MalformedRequest, TemplateError, field_of, json_type, show_value
from infer.tokenizer.chat_families import FAMILIES, TEMPLATES, templates_directory
from infer.tokenizer.sandbox import Allowance, Sandbox, current
from infer.tokenizer.tokenizer import Tokenizer

CHECKPOINT = "checkpoint"  # the name of the template that was shipped with a model
GUARD = "\ufdd2"  # a code point that Unicode reserves for internal use; dropped from users' text
ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 4096
MAX_TOOLS = 512
MAX_CHARS = 8 * 2**20  # total length of all strings
MAX_DEPTH = 32  # depth of nested tool schemas and arguments

_STRING_KEYS = ("name", "tool_call_id", "reasoning_content", "reasoning")
MAX_RENDERED_CHARS = 4 * MAX_CHARS

# The end of a prompt: the beginning of an answer, the open last message, or the closed last message.
Opening = Literal["answer", "continued", "none"]
OPEN_END = "\ue0f1"  # a private-use character that marks the end of the text that an answer continues
# options that a client may set in addition to messages and tools, if the template reads them
KWARGS: dict[str, type] = {
    "enable_thinking": bool,
    "thinking": bool,  # another name for it
    "reasoning_effort": str,
    "date_string": str,
    "tools_in_user_message": bool,
}


SYSTEM_TOOLS = "message['tools']"  # a template that reads this wants tools in the system message, as JSON
RESULT_ROLES = {  # text that shows that a template has its own role for results of calls
    "'observation'": "observation",
    "'environment'": "environment",
    "<|/tool|>": "tool_response",
}


class ChatTemplate:
    """One family's chat format, bound to a tokenizer. Thread-safe."""

    def __init__(self, source: str, tokenizer: Tokenizer, *, name: str) -> None:
        """Compile a template; `name` is its name in errors."""
        self.name = name
        self.source = source
        self._tokenizer = tokenizer
        try:
            names, self._template = _compile(source)
        except RecursionError:
            raise ConfigError(f"chat template {name} is nested too deeply") from None
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"chat template {name}, line {error.lineno}: {error.message}") from None
        self.kwargs = frozenset(KWARGS) & names  # the keywords this template reads
        self.reads_tools = "tools" in names or SYSTEM_TOOLS in source
        # writes the tool calls of a conversation, for a template that does not show them
        self.write_calls: Callable[[Sequence[Mapping[str, Any]]], str] | None = None

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        context_len: int | None = None,
        /,
        opening: Opening = "answer",
        **options: Any,
    ) -> list[int]:
        """Return the ids of a conversation, beginning with one BOS if the checkpoint uses it.

        `options`: as for `render`. A text that is too long for `context_len` is refused before it is encoded.
        """
        if opening == "continued":
            text = self.render_open(messages, **options)
        else:
            text = self.render(messages, **{"add_generation_prompt": opening == "answer"} | options)
        ids = self._tokenizer.encode(
            text, add_special=False, parse_special=True, guard=GUARD, context_len=context_len
        )
        return self._tokenizer.begin(ids)

    def render_open(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Return the text up to the end of the last message's text, which an answer continues.

        Templates close each message, so the end of that text is marked, and the rest is cut off.
        """
        given = [dict(each) for each in clean_messages(messages)]
        messages = map_strings(given, lambda text: text.replace(OPEN_END, ""))
        last = messages[-1]
        if last["role"] != "assistant" or "tool_calls" in last:
            raise TemplateError(
                "only an assistant's message without tool calls can be continued, and the last message is "
                f"of the role {last['role']!r}; leave continue_final_message out",
                param="messages",
            )
        marked = [*messages[:-1], {**messages[-1], "content": last["content"] + OPEN_END}]
        text = self.render(marked, add_generation_prompt=False, **options)
        if text.count(OPEN_END) != 1:
            raise TemplateError(
                f"the {self.name} chat template does not show the last message's text once, so it cannot be "
                "continued",
                param="messages",
            )
        return text.partition(OPEN_END)[0]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Return the text, with guards inside every special-token spelling from messages and tools."""
        self.check_options(kwargs)
        given: dict[str, Any] = {"messages": clean_messages(messages), **kwargs}
        cleaned_tools = clean_tools(tools)
        _suit(self.source, given["messages"], cleaned_tools)
        if cleaned_tools and not self.reads_tools:
            raise TemplateError(f"the {self.name} chat format cannot show tools to the model", param="tools")
        given["tools"] = cleaned_tools
        num_chars = 0

        def guard(text: str) -> str:
            nonlocal num_chars
            num_chars += len(text)
            if num_chars > MAX_CHARS:
                raise TemplateError(f"messages and tools hold more than {MAX_CHARS} characters")
            return self._tokenizer.special_text.guard(text, GUARD)

        variables = {name: map_strings(value, guard) for name, value in given.items()}
        if "tool_calls" not in self.source and self.write_calls is not None:
            for message in variables["messages"]:
                message["content"] += self.write_calls(message.get("tool_calls", ()))
        return self._run(variables | {"add_generation_prompt": add_generation_prompt})

    def _run(self, variables: dict[str, Any]) -> str:
        tokenizer, allowance = self._tokenizer, Allowance()
        variables["bos_token"] = _spelling(tokenizer, tokenizer.bos_id)
        variables["eos_token"] = _spelling(tokenizer, next(iter(tokenizer.eos_ids), None))
        variables["gap"] = tokenizer.gap_after_special
        variables["published"] = tokenizer.published_chat_template or ""  # distinguishes versions of a family
        variables["range"] = allowance.range
        parts: list[str] = []
        num_chars = 0
        token = current.set(allowance)
        try:
            for part in self._template.generate(variables):
                parts.append(part)
                num_chars += len(part)
                allowance.spend(0)
                if num_chars > MAX_RENDERED_CHARS:
                    raise TemplateError(
                        f"chat template {self.name} made {num_chars} characters of these messages; "
                        f"the limit is {MAX_RENDERED_CHARS} characters"
                    )
        except TemplateError:
            raise
        except Exception as error:  # a template's expressions can raise any exception
            raise TemplateError(
                f"chat template {self.name} cannot render these messages: {error}", param="messages"
            ) from None
        finally:
            current.reset(token)
        return "".join(parts)

    def check_options(self, kwargs: Mapping[str, Any]) -> None:
        """Refuse keywords that this template does not read, and values of the wrong type."""
        for name, value in kwargs.items():
            if name not in KWARGS:
                raise TemplateError(
                    f"unknown chat template keyword {name!r}; allowed are {', '.join(KWARGS)}", param=name
                )
            if name not in self.kwargs:
                reads = ", ".join(sorted(self.kwargs)) or "none"
                raise TemplateError(
                    f"the {self.name} chat template does not read {name!r}; keywords it reads: {reads}",
                    param=name,
                )
            if not isinstance(value, KWARGS[name]):
                wanted = "true or false" if KWARGS[name] is bool else "a string"
                raise TemplateError(f"{name} must be {wanted}, got {show_value(value)}", param=name)


@functools.lru_cache(maxsize=16)  # engines of one process often use the same template
def _compile(source: str) -> tuple[set[str], jinja2.Template]:
    """Return the names that a template reads, and the compiled template."""
    names = jinja2.meta.find_undeclared_variables(_ENVIRONMENT.parse(source))
    return names, _ENVIRONMENT.from_string(source)


def _own_template(name: str, tokenizer: Tokenizer) -> ChatTemplate:
    source = (templates_directory() / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate(source, tokenizer, name=name)


def find_template(model_type: str, tokenizer: Tokenizer, override: str | None = None) -> ChatTemplate:
    """Choose a model's chat template: the override, our own for its family, or the one it was shipped with.

    `override` is a Jinja file, 'checkpoint' for the template that was shipped with the model, the name of one
    of ours, or 'family' for the one of ours that matches, which is the default for most models.
    """
    published = tokenizer.published_chat_template
    if override == "checkpoint":
        if published is None:
            raise ConfigError("--chat-template checkpoint: this model was shipped without a chat template")
        return ChatTemplate(published, tokenizer, name=CHECKPOINT)
    if override in TEMPLATES:
        return _own_template(override, tokenizer)
    if override not in (None, "family"):
        try:
            source = Path(override).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--chat-template {override}: cannot read the file: {error}; templates that need no file: "
                f"{', '.join(sorted(TEMPLATES))}"
            ) from None
        return ChatTemplate(source, tokenizer, name=Path(override).name)
    for family in FAMILIES:
        is_left_to_the_model = family.yields and published is not None and override is None
        if family.fits(model_type, tokenizer) and not is_left_to_the_model:
            return _own_template(family.template, tokenizer)
    if published is not None and override is None:  # the model's own format, or one without special tokens
        return ChatTemplate(published, tokenizer, name=CHECKPOINT)
    raise ConfigError(
        f"no chat template for model type {model_type!r} with this vocabulary (a base model has none); "
        f"give one with --chat-template FILE or name one of ours ({', '.join(sorted(TEMPLATES))}), use the "
        "model's own, if it has one, with --chat-template checkpoint, or add FAMILY.jinja to "
        f"{templates_directory()} and a row to tokenizer/chat_families.py"
    )


def clean_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Check a conversation and convert it to the form that templates expect."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise TemplateError(f"messages must be a list, got {json_type(messages)}", param="messages")
    if not messages:
        raise TemplateError("messages is empty; give at least one message", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise TemplateError(
            f"messages has {len(messages)} entries, at most {MAX_MESSAGES} are allowed", param="messages"
        )
    return [_clean_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def clean_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Check tool descriptions; an empty list means no tools."""
    if not tools:
        return None
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise TemplateError(f"tools must be a list, got {json_type(tools)}", param="tools")
    if len(tools) > MAX_TOOLS:
        raise TemplateError(f"tools has {len(tools)} entries, at most {MAX_TOOLS} are allowed", param="tools")
    for i, tool in enumerate(tools):
        _read_text(field_of(tool, "function", f"tools[{i}]"), "name", f"tools[{i}].function")
    return [dict(tool) for tool in tools]


def map_strings(value: Any, change: Callable[[str], str], *, depth: int = 0) -> Any:
    """Rebuild nested JSON, applying `change` to each string, including keys."""
    if depth > MAX_DEPTH:
        raise TemplateError(f"messages and tools may be nested {MAX_DEPTH} levels deep, not more")
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(k)): map_strings(v, change, depth=depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(item, change, depth=depth + 1) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise TemplateError(f"messages and tools hold JSON values only, got {type(value).__name__}")


def _clean_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = field_of(message, "role", where)
    if role not in ROLES:
        kind = TemplateError if isinstance(role, str) else MalformedRequest
        raise kind.about(f"{where}.role", f"is {show_value(role)}, allowed are {', '.join(ROLES)}")
    role = "system" if role == "developer" else role
    clean: dict[str, Any] = {"role": role}
    calls = message.get("tool_calls")
    if calls and role != "assistant":
        raise TemplateError(
            f"{where} has tool_calls, only assistant messages may", param=f"{where}.tool_calls"
        )
    if calls and message.get("content") is None:
        clean["content"] = ""
    else:
        clean["content"] = _clean_content(field_of(message, "content", where), f"{where}.content")
    if calls:
        clean["tool_calls"] = _clean_calls(calls, f"{where}.tool_calls")
    for key in _STRING_KEYS:
        if message.get(key) is not None:
            clean[key] = _read_text(message, key, where)
    if (reasoning := clean.pop("reasoning", None)) is not None:
        clean.setdefault("reasoning_content", reasoning)
    return clean


def _suit(source: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> None:
    """Rename fields and roles for published templates that use names of their own."""
    if "message.thinking" in source:  # gpt-oss; the text of a call is put there too
        for message in messages:
            if thought := message.get("reasoning_content"):
                text = message["content"] if message.get("tool_calls") else ""
                message["thinking"] = f"{thought}\n\n{text}" if text else thought
                message["content"] = "" if text else message["content"]
    if "block['thinking']" in source:  # Ministral 3
        for message in messages:
            if thought := message.get("reasoning_content"):
                text = [{"type": "text", "text": message["content"]}] if message["content"] else []
                message["content"] = [{"type": "thinking", "thinking": thought}, *text]
    if SYSTEM_TOOLS in source and tools:  # Phi-4-mini
        if messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": ""})
        messages[0]["tools"] = _to_json([tool["function"] for tool in tools])
    if 'message.get("metadata"' in source:  # GLM-4-0414
        messages[:] = [part for message in messages for part in _split_calls(message)]
    role = next((role for word, role in RESULT_ROLES.items() if word in source), "tool")
    if role != "tool" and not re.search(r"""["']tool["']""", source):
        for message in messages:
            message["role"] = role if message["role"] == "tool" else message["role"]


def _split_calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Split into a message for the text, if there is one, and one for each call."""
    calls = message.pop("tool_calls", ())
    parts = [
        {"role": "assistant", "metadata": function["name"], "content": _to_json(function["arguments"])}
        for function in (call["function"] for call in calls)
    ]
    return [message, *parts] if message["content"] or not parts else parts


def _read_text(given: Any, name: str, where: str) -> str:
    """Return a required text field of an object."""
    text = field_of(given, name, where)
    if not isinstance(text, str):
        raise MalformedRequest.about(f"{where}.{name}", f"must be text, got {show_value(text)}")
    return text


def _clean_content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise MalformedRequest.about(
            where, f"must be text or a list of text parts, got {show_value(content)}"
        )
    texts = []
    for i, part in enumerate(content):
        kind = field_of(part, "type", f"{where}[{i}]")
        if kind != "text":
            error = TemplateError if isinstance(kind, str) else MalformedRequest
            raise error.about(
                f"{where}[{i}]",
                f'has type {show_value(kind)}; this model reads text only: {{"type": "text", "text": "..."}}',
            )
        texts.append(_read_text(part, "text", f"{where}[{i}]"))
    return "".join(texts)


def _clean_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise MalformedRequest.about(where, f"must be a list, got {json_type(calls)}")
    cleaned = []
    for i, call in enumerate(calls):
        function = field_of(call, "function", f"{where}[{i}]")
        name = _read_text(function, "name", f"{where}[{i}].function")
        arguments = _parse_arguments(function.get("arguments"), f"{where}[{i}].function.arguments")
        entry: dict[str, Any] = {"type": "function"}
        if call.get("id") is not None:
            entry["id"] = str(call["id"])
        entry["function"] = {"name": name, "arguments": arguments}
        cleaned.append(entry)
    return cleaned


def _parse_arguments(arguments: Any, where: str) -> dict[str, Any]:
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise TemplateError(f"{where} is not valid JSON", param=where) from None
    if not isinstance(arguments, Mapping):
        raise MalformedRequest.about(where, f"must be a JSON object, got {json_type(arguments)}")
    return dict(arguments)


def _spelling(tokenizer: Tokenizer, token_id: int | None) -> str:
    return "" if token_id is None else tokenizer.token_text(token_id)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks answers for training; only its content is rendered."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(str(message).replace(GUARD, ""), param="messages")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as models saw it in training: not escaped for HTML, unlike Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _to_python(value: Any) -> str:
    """Write a JSON value as a Python literal; strings stay as in JSON, which keeps guards unescaped."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_to_json(key)}: {_to_python(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_to_python, value)) + "]"
    return _to_json(value) if isinstance(value, str) else repr(value)


def _build_environment() -> jinja2.Environment:
    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.add_filter("tojson", _to_json)
    environment.add_filter("topython", _to_python)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


_ENVIRONMENT = _build_environment()
