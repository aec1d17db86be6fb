"""A conversation becomes the exact text, and the exact ids, its model was trained on.

    messages, tools ──► clean ──► guard ──► Jinja template ──► text ──► ids
                                    │                                    │
                 "<|im_end|>" in what users wrote               guards removed, so it
                 gets a guard behind each character             is encoded as plain text

Special tokens tell a model whose turn it is. Only the template may write them: <|im_end|> in a user's message
must not end the turn. So a guard character is put into every special-token spelling found in messages and
tools before the template sees them, and taken out after the special tokens of the *template* have been found.

Templates are data, not code: one Jinja file per family in models/templates, chosen by `find_template` from
the model type and from the special tokens the vocabulary has. They run in a sandbox
(sandbox.py), with limits on what a conversation can make of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser

from infer.errors import ConfigError, TemplateError
from infer.tokenizer.chat_families import FAMILIES, templates_directory
from infer.tokenizer.chat_messages import MAX_CHARS, clean_messages, clean_tools, map_strings
from infer.tokenizer.sandbox import Allowance, Sandbox, current
from infer.tokenizer.tokenizer import Tokenizer

GUARD = "\ufdd2"  # a code point that Unicode reserves for use inside programs; users' own are dropped
MAX_RENDERED_CHARS = 4 * MAX_CHARS

# what a client may set beside messages and tools, if the template reads it
KWARGS: dict[str, type] = {"enable_thinking": bool, "date_string": str, "tools_in_user_message": bool}


class ChatTemplate:
    """One family's chat format, bound to a tokenizer. Safe to share between threads."""

    def __init__(self, source: str, tokenizer: Tokenizer, *, name: str) -> None:
        """Compile a template; `name` is how errors call it."""
        self.name = name
        self._tokenizer = tokenizer
        try:
            names = jinja2.meta.find_undeclared_variables(_ENVIRONMENT.parse(source))
            self._template = _ENVIRONMENT.from_string(source)
        except RecursionError:
            raise ConfigError(f"chat template {name} is nested too deeply") from None
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"chat template {name}, line {error.lineno}: {error.message}") from None
        self.kwargs = frozenset(KWARGS) & names  # the keywords this template reads
        self.reads_tools = "tools" in names

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Return the text for display; `encode_chat` keeps users' text and markup apart, this does not."""
        return self._render(messages, tools, add_generation_prompt, kwargs).replace(GUARD, "")

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        context_len: int | None = None,
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """Return the ids of a conversation, beginning with BOS once if the checkpoint wants it.

        One that cannot fit `context_len` tokens is refused before it is tokenized.
        """
        text = self._render(messages, tools, add_generation_prompt, kwargs)
        ids = self._tokenizer.encode(
            text, add_special=False, parse_special=True, guard=GUARD, context_len=context_len
        )
        return self._tokenizer.begin(ids)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> str:
        """Render with a guard inside every special-token spelling that came from outside."""
        self._check_kwargs(kwargs)
        given: dict[str, Any] = {"messages": clean_messages(messages), **kwargs}
        cleaned_tools = clean_tools(tools)
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
        return self._run(variables | {"add_generation_prompt": add_generation_prompt})

    def _run(self, variables: dict[str, Any]) -> str:
        tokenizer, allowance = self._tokenizer, Allowance()
        variables["bos_token"] = _spelling(tokenizer, tokenizer.bos_id)
        variables["eos_token"] = _spelling(tokenizer, next(iter(tokenizer.eos_ids), None))
        variables["gap"] = tokenizer.gap_after_special
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
        except Exception as error:  # an expression of a template can fail in any way Python can
            raise TemplateError(
                f"chat template {self.name} cannot render these messages: {error}", param="messages"
            ) from None
        finally:
            current.reset(token)
        return "".join(parts)

    def _check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
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
                raise TemplateError(f"{name} must be {KWARGS[name].__name__}, got {value!r}", param=name)


def find_template(model_type: str, tokenizer: Tokenizer, override: str | None = None) -> ChatTemplate:
    """Choose a model's chat template: the override, or our own for its family.

    `override` is a Jinja file, or 'checkpoint' for the template that was shipped with the model, or 'family'
    for ours, which is the default for models that fit one.
    """
    if override == "checkpoint":
        if tokenizer.published_chat_template is None:
            raise ConfigError("--chat-template checkpoint: this model was shipped without a chat template")
        return ChatTemplate(tokenizer.published_chat_template, tokenizer, name="checkpoint")
    if override not in (None, "family"):
        try:
            source = Path(override).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--chat-template {override}: cannot read the file: {error}") from None
        return ChatTemplate(source, tokenizer, name=Path(override).name)
    for family in FAMILIES:
        if family.fits(model_type, tokenizer):
            source = (templates_directory() / f"{family.template}.jinja").read_text(encoding="utf-8")
            return ChatTemplate(source, tokenizer, name=family.template)
    raise ConfigError(
        f"no chat template for model type {model_type!r} with this vocabulary (a base model has none); "
        f"give one with --chat-template FILE, use the model's own with --chat-template checkpoint, "
        f"or add FAMILY.jinja to {templates_directory()} and a row to tokenizer/chat_families.py"
    )


def _spelling(tokenizer: Tokenizer, token_id: int | None) -> str:
    return "" if token_id is None else tokenizer.token_text(token_id)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks answers for training; here it is just its content."""

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
    """JSON as models saw it in training: not escaped for HTML, which Jinja's own filter does."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _build_environment() -> jinja2.Environment:
    environment = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
    )
    environment.add_filter("tojson", _to_json)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


_ENVIRONMENT = _build_environment()
