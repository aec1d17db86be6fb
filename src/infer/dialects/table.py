"""The notations in which families of models write tool calls and reasoning: a table.

    hermes        <tool_call>⏎{"name": "f", "arguments": {…}}⏎</tool_call>         Hermes, Qwen 2.5, Qwen 3
    smollm2       <tool_call>[{"name": "f", "arguments": {…}}]</tool_call>         SmolLM2
    qwen3_coder   <tool_call>⏎<function=f>⏎<parameter=k>⏎v⏎</parameter>⏎</function>⏎</tool_call>
    llama3_json   {"name": "f", "parameters": {…}}; {…}                            Llama 3.1 and later
    mistral       [TOOL_CALLS][{"name": "f", "arguments": {…}}]                    Mistral 7B v0.3, Nemo
    mistral_v11   [TOOL_CALLS]f[ARGS]{…}                                           Mistral Small 3.2 and later
    pythonic      [f(k=1), g()]                                                    Llama 3.2 1B and 3B
    gemma3        ```tool_code⏎[f(k=1), g()]⏎```                                   Gemma 3
    gemma4        <|tool_call>call:f{k:<|"|>text<|"|>,n:1}<tool_call|>             Gemma 4
    olmo3         <function_calls>f(k=1)⏎g()</function_calls>                      OLMo 3
    granite       <|tool_call|>[{"name": "f", "arguments": {…}}]                   Granite 3
    phi4_mini     <|tool_call|>[{"name": "f", "arguments": {…}}]<|/tool_call|>     Phi-4-mini
    glm4          f⏎{…}                                                            GLM-4-0414
    glm45         <tool_call>f⏎<arg_key>k</arg_key>⏎<arg_value>v</arg_value>⏎</tool_call>    GLM-4.5 and later
    harmony       <|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>     gpt-oss

A row describes a call. With it the parser (parser.py) reads calls, and the grammar (grammar.py) makes a model
write them. A model's chat template identifies its row: a template that shows tools also shows the model, in
these very characters, how to call them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from infer.errors import ConfigError
from infer.tokenizer.chat_families import TEMPLATES
from infer.tokenizer.chat_template import ChatTemplate
from infer.tokenizer.tokenizer import Tokenizer

Form = Literal["json", "named", "xml", "keyed", "pythonic", "harmony", "gemma"]
KEYED_MARKERS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
GEMMA_QUOTE = '<|"|>'
HARMONY_MARKERS = (
    "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One notation of tool calls."""

    name: str
    form: Form
    begins: tuple[str, ...] = ()  # markers before calls; a grammar writes the first one
    end: str = ""  # marker after calls
    opening: str = ""  # text that a grammar writes between the marker and the first call
    between: str = ""  # text that a grammar writes between two calls
    closing: str = ""  # text that a grammar writes between the last call and the end marker
    is_repeated: bool = False  # True if every call has its own markers
    is_bare: bool = False  # True if calls may begin an answer without a marker
    key: str = "arguments"  # json: the name that a grammar gives the arguments; both names are read
    separator: str = "[ARGS]"  # named: between the name and the arguments
    has_short_ids: bool = False  # True if ids of calls are 9 letters and digits
    shown_by: tuple[str, ...] = ()  # a template that holds one of these texts asks for this notation

    @property
    def writes_marker(self) -> bool:
        """True if a forced call has the marker, which is optional for Llama."""
        return bool(self.begins) and not (self.is_bare and not self.end)

    def write_calls(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """The calls of earlier answers as the model wrote them, for templates that show only text."""
        if not calls or self.form not in ("json", "named"):
            return ""  # templates of the other notations show calls
        made = []
        for function in (call["function"] for call in calls):
            name, arguments = function["name"], json.dumps(function["arguments"], ensure_ascii=False)
            is_json = self.form == "json"
            made.append(
                f'{{"name": "{name}", "{self.key}": {arguments}}}'
                if is_json
                else name + self.separator + arguments
            )
        begin = (self.begins[0] if self.writes_marker else "") + self.opening
        if self.is_repeated:
            return self.between.join(f"{begin}{each}{self.closing}{self.end}" for each in made)
        return f"{begin}{self.between.join(made)}{self.closing}{self.end}"

    @property
    def is_whole(self) -> bool:
        """True if the notation covers whole answers, so that answers without tools are parsed as well."""
        return self.form == "harmony"

    @property
    def markers(self) -> tuple[str, ...]:
        """Every marker that may be a special token of the vocabulary."""
        if self.form == "harmony":
            return HARMONY_MARKERS
        if self.form == "gemma":
            return (*self.begins, self.end, GEMMA_QUOTE)
        if self.form == "keyed":
            return (*self.begins, self.end, *KEYED_MARKERS)
        return (*self.begins, *filter(None, (self.end,)), *(("[ARGS]", "[CALL_ID]") * (self.form == "named")))


_TAG = ("<tool_call>",)
DIALECTS = (  # the first match with a template wins
    Dialect(name="harmony", form="harmony", shown_by=("<|channel|>analysis<|message|>",)),
    Dialect(
        name="qwen3_coder", form="xml", begins=(*_TAG, "<function="), end="</tool_call>", opening="\n",
        between="\n", closing="\n", is_repeated=True, shown_by=("<function=",),
    ),
    Dialect(
        name="glm45", form="keyed", begins=_TAG, end="</tool_call>", between="\n", is_repeated=True,
        shown_by=("<arg_key>",),
    ),
    Dialect(
        name="smollm2", form="json", begins=_TAG, end="</tool_call>", opening="[", between=", ",
        closing="]", shown_by=("<tool_call>[",),
    ),
    Dialect(
        name="hermes", form="json", begins=_TAG, end="</tool_call>", opening="\n", between="\n",
        closing="\n", is_repeated=True, shown_by=_TAG,
    ),
    Dialect(
        name="mistral_v11", form="named", begins=("[TOOL_CALLS]",), is_repeated=True, has_short_ids=True,
        shown_by=("[ARGS]",),
    ),
    Dialect(
        name="mistral", form="json", begins=("[TOOL_CALLS]",), opening="[", between=", ", closing="]",
        has_short_ids=True, shown_by=("[TOOL_CALLS]",),
    ),
    Dialect(
        name="gemma3", form="pythonic", begins=("```tool_code",), end="```", opening="\n[", between=", ",
        closing="]\n", is_bare=True, shown_by=("```tool_code",),
    ),
    Dialect(
        name="gemma4", form="gemma", begins=("<|tool_call>",), end="<tool_call|>", is_repeated=True,
        shown_by=("<|tool_call>call:",),
    ),
    Dialect(
        name="olmo3", form="pythonic", begins=("<function_calls>",), end="</function_calls>", between="\n",
        shown_by=("<function_calls>",),
    ),
    Dialect(
        name="phi4_mini", form="json", begins=("<|tool_call|>", "functools"), end="<|/tool_call|>",
        opening="[", between=", ", closing="]", shown_by=("<|/tool|>", "<|/tool_call|>"),
    ),
    Dialect(
        name="granite", form="json", begins=("<|tool_call|>", *_TAG), opening="[", between=", ", closing="]",
        shown_by=("<|tool_call|>",),
    ),
    Dialect(name="glm4", form="named", between="\n", separator="\n", is_bare=True, shown_by=("# 可用工具",)),
    Dialect(
        name="llama3_json", form="json", begins=("<|python_tag|>",), between="; ", is_bare=True,
        key="parameters", shown_by=('"parameters": dictionary', "<|python_tag|>"),
    ),
    Dialect(name="pythonic", form="pythonic", opening="[", between=", ", closing="]", is_bare=True,
        shown_by=("[func_name1(",)),
)  # fmt: skip
BY_NAME: Mapping[str, Dialect] = {dialect.name: dialect for dialect in DIALECTS}
ALIASES = {  # names of the same notations in other servers
    "qwen3_xml": "qwen3_coder", "glm47": "glm45", "qwen25": "hermes", "qwen": "hermes",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json", "llama4_pythonic": "pythonic", "llama3_pythonic": "pythonic",
    "phi4_mini_json": "phi4_mini", "openai": "harmony", "gpt-oss": "harmony",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Think:
    """The tags around a model's reasoning before its answer."""

    begin: str
    end: str
    blank: str = "\n"  # whitespace after the begin tag and before the end tag
    next: str = ""  # header that the engine writes after the end, before a constrained answer
    wrap: tuple[str, str] | None = None  # tags around the answer that follows
    shown_by: str = ""  # text by which a template asks for these tags; "": the end tag

    @property
    def markers(self) -> tuple[str, ...]:
        """The special tokens in the tags."""
        return tuple(re.findall(r"<\|?/?\w+\|?>|\[/?\w+\]", self.begin + self.end))


THINK = Think("<think>", "</think>")
_THINKS: dict[str, Think] = {  # the first match with a template wins
    "granite": Think(
        "<think>", "</think>", wrap=("<response>", "</response>"), shown_by="<response></response>"
    ),
    "think": THINK,
    "qwen3": THINK,
    "deepseek_r1": THINK,
    "mistral": Think("[THINK]", "[/THINK]", ""),
    "granite_3_2": Think("Here is my thought process:", "Here is my response:"),
    "gemma4": Think("<|channel>thought", "<channel|>", shown_by="<|channel>thought"),
    "harmony": Think(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        "",
        "<|start|>assistant<|channel|>final<|message|>",
        shown_by="<|channel|>analysis<|message|>",
    ),  # fmt: skip
}
THINKS = _THINKS | {"openai_gptoss": _THINKS["harmony"], "gpt-oss": _THINKS["harmony"]}


def find_dialect(name: str, template: ChatTemplate, tokenizer: Tokenizer) -> Dialect | None:
    """The notation of a model's tool calls: by name, or with `auto` by its chat template."""
    if name == "auto":
        fits = (each for each in DIALECTS if any(text in template.source for text in each.shown_by))
        found = next(fits, None)
        return found if found is None or template.reads_tools or found.is_whole else None
    if name == "mistral" and tokenizer.token_id("[ARGS]") is not None:
        return BY_NAME["mistral_v11"]
    return BY_NAME[ALIASES.get(name, name)]


def find_think(name: str, template: ChatTemplate, tokenizer: Tokenizer) -> Think | None:
    """The tags of a model's reasoning; with `auto` the tags that its template writes.

    Tags of our own templates count only if they are tokens, as these also serve models that do not reason.
    """
    if name == "none":
        return None
    if name != "auto":
        return THINKS[name]
    source = template.source
    if is_ours := template.name in TEMPLATES:
        # our template also serves models of the family that do not reason, so the published one decides
        source = tokenizer.published_chat_template or source
    for think in _THINKS.values():
        is_known = not is_ours or tokenizer.token_id(think.end) is not None
        if is_known and (think.shown_by or think.end) in source:
            return think
    return None


def check_parsers(tool_call_parser: str, reasoning_parser: str) -> None:
    """Refuse names of parsers that are not in the tables."""
    for knob, given, known in (
        ("tool_call_parser", tool_call_parser, {"auto", *BY_NAME, *ALIASES}),
        ("reasoning_parser", reasoning_parser, {"auto", "none", *THINKS}),
    ):
        if given not in known:
            raise ConfigError(f"{knob} must be one of {', '.join(sorted(known))}, got {given!r}")
