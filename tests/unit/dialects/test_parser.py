"""What models write, in every notation: read whole, and cut anywhere."""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.dialects.answer import AnswerFormat, Tool
from infer.dialects.events import (
    AnswerEvent,
    CallDelta,
    CallStart,
    ContentDelta,
    ReasoningDelta,
    read_arguments,
)
from infer.dialects.parser import AnswerParser
from infer.dialects.table import BY_NAME, GEMMA_QUOTE, HARMONY_MARKERS, THINKS

TOOLS = (
    Tool(
        name="get_weather",
        parameters={
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "more": {"type": "object"},
            },
        },
    ),
    Tool(name="get-time"),
    Tool(name="now"),
)
CITY = '{"city": "Zürich", "days": 2}'
NESTED = r'{"city": "a}\"{ <b> \u00e9 ] \\", "more": {"x": [{"y": "😀"}], "z": {}}}'

Calls = list[tuple[str, str]]


def read(
    dialect: str | None,
    pieces: Sequence[str],
    *,
    thinks: bool = False,
    in_reasoning: bool = False,
    max_calls: int | None = None,
    choice: str = "auto",
    is_cut: bool = False,
) -> list[AnswerEvent]:
    form = AnswerFormat(
        dialect=BY_NAME[dialect] if dialect else None,
        tools=TOOLS if dialect else (),
        think=THINKS["harmony" if dialect == "harmony" else "think"] if thinks else None,
        in_reasoning=in_reasoning,
        max_calls=max_calls,
        choice=choice,
    )
    parser = AnswerParser(form, map(str, itertools.count()).__next__)
    events = [event for piece in pieces for event in parser.push(piece)]
    return events + parser.finish(is_cut=is_cut)


def joined(events: Sequence[AnswerEvent]) -> list[AnswerEvent]:
    """The events with neighbours of a kind made one."""
    made: list[AnswerEvent] = []
    for event in events:
        last = made[-1] if made else None
        if isinstance(event, ContentDelta) and isinstance(last, ContentDelta):
            made[-1] = ContentDelta(last.text + event.text)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            made[-1] = ReasoningDelta(last.text + event.text)
        elif isinstance(event, CallDelta) and isinstance(last, CallDelta) and last.index == event.index:
            made[-1] = CallDelta(event.index, last.arguments + event.arguments)
        else:
            made.append(event)
    return made


def parts(events: Sequence[AnswerEvent]) -> tuple[str, str, Calls]:
    """Reasoning, text, and the calls with their arguments."""
    names = [event.name for event in events if isinstance(event, CallStart)]
    calls = [
        (name, "".join(e.arguments for e in events if isinstance(e, CallDelta) and e.index == i))
        for i, name in enumerate(names)
    ]
    assert [event.index for event in events if isinstance(event, CallStart)] == list(range(len(names)))
    return (
        "".join(event.text for event in events if isinstance(event, ReasoningDelta)),
        "".join(event.text for event in events if isinstance(event, ContentDelta)),
        calls,
    )


def xml(name: str, **parameters: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def keyed(name: str, blank: str = "\n", **parameters: str) -> str:
    inner = "".join(
        f"<arg_key>{key}</arg_key>{blank}<arg_value>{value}</arg_value>{blank}"
        for key, value in parameters.items()
    )
    return f"<tool_call>{name}{blank}{inner}</tool_call>"


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


START = "<|start|>assistant"


def final(text: str, end: str = "<|return|>") -> str:
    return f"<|channel|>final<|message|>{text}{end}"


def analysis(text: str) -> str:
    return f"<|channel|>analysis<|message|>{text}<|end|>"


def harmony(name: str, arguments: str) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"


# ruff: noqa: E501
# dialect, what the model wrote, the text of the answer, its calls
RECORDED: list[tuple[str, str, str, Calls]] = [
    ("hermes", hermes("get_weather", CITY), "", [("get_weather", CITY)]),
    ("hermes", hermes("get_weather", NESTED), "", [("get_weather", NESTED)]),
    (
        "hermes",
        f"I look.\n{hermes('get_weather', CITY)}\n{hermes('get-time', '{}')}",
        "I look.",
        [("get_weather", CITY), ("get-time", "{}")],
    ),
    ("hermes", f"a\n{hermes('now', '{}')}\nb", "a\n\nb", [("now", "{}")]),
    ("hermes", hermes("unknown_tool", '{"a":1}'), "", [("unknown_tool", '{"a":1}')]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [("now", "{}")]),
    ("hermes", '<tool_call>{"name": "now", "arguments": ""}</tool_call>', "", [("now", "{}")]),
    ("hermes", f'<tool_call>{{"arguments": {CITY}, "name": "now"}}</tool_call>', "", [("now", CITY)]),
    ("hermes", f'<tool_call>{{"name": "now", "parameters": {CITY}}}</tool_call>', "", [("now", CITY)]),
    (
        "hermes",
        f'<tool_call>{{"name": "now", "arguments": {json.dumps(CITY)}, "id": [1, "]"]}}</tool_call>',
        "",
        [("now", CITY)],
    ),
    # malformed: text, with nothing lost
    ("hermes", "<tool_call>oops</tool_call>", "<tool_call>oops</tool_call>", []),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "now", "arguments": [1]}', '<tool_call>{"name": "now", "arguments": [1]}', []),
    ("hermes", '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    ("hermes", r'<tool_call>{"name": "\ud800", "arguments": {}}', r'<tool_call>{"name": "\ud800", "arguments": {}}', []),
    ("hermes", '<tool_call>{"name": "a b"}', '<tool_call>{"name": "a b"}', []),
    ("hermes", r'<tool_call>{"name": "now", "arguments": "{\"a\": \"\ud83d\ude00\ud83d\"}"}', "", [("now", '{"a": "😀\ufffd"}')]),
    ("hermes", "<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>", []),
    ("hermes", "<tool_call>", "<tool_call>", []),
    ("hermes", "a <tool_ca", "a <tool_ca", []),
    ("hermes", "2 < 3 <tool <tool_cal </tool_call> ok\n", "2 < 3 <tool <tool_cal </tool_call> ok\n", []),
    ("hermes", f"<tool_call>no {hermes('now', '{}')}", "<tool_call>no", [("now", "{}")]),
    # a brace that was forgotten, and answers that were cut off
    ("hermes", f'<tool_call>{{"name": "now", "arguments": {CITY}\n</tool_call>', "", [("now", CITY)]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": {}</tool_call>x', "x", [("now", '{"a": {}')]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"ci', "", [("now", '{"ci')]),
    ("hermes", '<tool_call>{"name": "no', '<tool_call>{"name": "no', []),
    (
        "smollm2",
        f'<tool_call>[\n{{"name": "get_weather", "arguments": {CITY}}},\n{{"name": "now", "arguments": {{}}}}\n]</tool_call>',
        "",
        [("get_weather", CITY), ("now", "{}")],
    ),
    ("smollm2", "No tool helps.", "No tool helps.", []),
    ("qwen3_coder", xml("now"), "", [("now", "{}")]),
    ("glm45", f"So: {keyed('now')}", "So:", [("now", "{}")]),
    ("glm45", keyed("now", ""), "", [("now", "{}")]),
    ("glm45", keyed("get_weather", "", city="\nZürich\n", days="2"), "",
     [("get_weather", '{"city": "\\nZürich\\n", "days": 2}')]),
    ("glm45", keyed("new", flag="true", l="[1, 2]", s="a < b"), "",
     [("new", '{"flag": true, "l": [1, 2], "s": "a < b"}')]),
    ("glm45", "Write <tool_call>f(x)</tool_call>.", "Write <tool_call>f(x)</tool_call>.", []),
    (
        "qwen3_coder",
        f"Ok.\n{xml('get_weather', city='Zürich', days='2')}\n{xml('get-time')}",
        "Ok.",
        [("get_weather", '{"city": "Zürich", "days": 2}'), ("get-time", "{}")],
    ),
    (
        "qwen3_coder",
        xml("get_weather", city='def f():\n    return "<x>"\n', units="null", more='{"a": [1, "]"]}'),
        "",
        [("get_weather", '{"city": "def f():\\n    return \\"<x>\\"\\n", "units": null, "more": {"a": [1, "]"]}}')],
    ),
    ("qwen3_coder", xml("get_weather", city="12", units="12", days="x"), "",
        [("get_weather", '{"city": "12", "units": "12", "days": "x"}')]),
    ("qwen3_coder", xml("new", flag="True", n="1.5", s="abc"), "",
        [("new", '{"flag": true, "n": 1.5, "s": "abc"}')]),
    ("qwen3_coder", xml("new", a="NaN", b="-Infinity", c="[Infinity]"), "",
        [("new", '{"a": "NaN", "b": "-Infinity", "c": "[Infinity]"}')]),
    ("qwen3_coder", "<function=now>\n</function>", "", [("now", "{}")]),
    ("qwen3_coder", hermes("get_weather", CITY), "", [("get_weather", CITY)]),
    ("qwen3_coder", "<tool_call>\n<function=>", "<tool_call>\n<function=>", []),
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nZür", "",
        [("get_weather", '{"city": "Zür')]),
    ("llama3_json", f'{{"name": "get_weather", "parameters": {CITY}}}', "", [("get_weather", CITY)]),
    (
        "llama3_json",
        f'<|python_tag|>{{"name": "get_weather", "parameters": {NESTED}}}; {{"name": "now", "parameters": {{}}}}',
        "",
        [("get_weather", NESTED), ("now", "{}")],
    ),
    ("llama3_json", '{"type": "function", "name": "now", "parameters": {}}', "", [("now", "{}")]),
    ("llama3_json", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    ("llama3_json", '{"name": "Bob"} is JSON.\n', '{"name": "Bob"} is JSON.\n', []),
    ("llama3_json", '\n{"age": 3}', '\n{"age": 3}', []),
    ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("llama3_json", "{ not json", "{ not json", []),
    ("mistral", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {CITY}}}]', "", [("get_weather", CITY)]),
    (
        "mistral",
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {NESTED}, "id": "abcdef123"}}, {{"arguments": {{}}, "name": "now"}}]',
        "",
        [("get_weather", NESTED), ("now", "{}")],
    ),
    ("mistral", "See [1] and [TOOL].", "See [1] and [TOOL].", []),
    ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"oops"}]', ', {"oops"}]', [("now", "{}")]),
    ("mistral_v11", f"[TOOL_CALLS]get_weather[ARGS]{CITY}", "", [("get_weather", CITY)]),
    (
        "mistral_v11",
        f"So.[TOOL_CALLS]get_weather[ARGS]{NESTED}[TOOL_CALLS]get-time[CALL_ID]abcdef123[ARGS]{{}}",
        "So.",
        [("get_weather", NESTED), ("get-time", "{}")],
    ),
    ("mistral_v11", f'[TOOL_CALLS][{{"name": "now", "arguments": {CITY}}}]', "", [("now", CITY)]),
    ("mistral_v11", "[TOOL_CALLS] hello there", "[TOOL_CALLS] hello there", []),
    ("gemma3", '```tool_code\n[get_weather(city="Zürich", days=2), now()]\n```', "",
        [("get_weather", '{"city": "Zürich", "days": 2}'), ("now", "{}")]),
    ("gemma3", '```tool_code\nprint(get_weather("a)\\"", days=2))\nnow()\n```\nOk.', "Ok.",
        [("get_weather", '{"city": "a)\\"", "days": 2}'), ("now", "{}")]),
    ("gemma3", "[now()]", "", [("now", "{}")]),
    ("gemma3", "```python\nx = [1]\n```", "```python\nx = [1]\n```", []),
    ("gemma3", "```tool_code\nimport os\n```", "```tool_code\nimport os\n```", []),
    ("gemma3", "```tool_code\n[now(os.getcwd())]\n```", "```tool_code\n[now(os.getcwd())]\n```", []),
    ("gemma3", "```tool_code\nfünc_ü(x=1)\n```", "```tool_code\nfünc_ü(x=1)\n```", []),
    ("gemma3", f"```tool_code\n{'f' * 129}()\n```", f"```tool_code\n{'f' * 129}()\n```", []),
    ("gemma3", f"```tool_code\n{'f' * 128}()\n```", "", [("f" * 128, "{}")]),
    ("gemma3", "```tool_code\nprint(ü())\n```", "```tool_code\nprint(ü())\n```", []),
    ("pythonic", "[get_weather(city='it\\'s', more={'x': [True, None, -1.5]}), now()]", "",
        [("get_weather", '{"city": "it\'s", "more": {"x": [true, null, -1.5]}}'), ("now", "{}")]),
    ("pythonic", r"[now(a='\ud83d\ude00')]", "", [("now", '{"a": "😀"}')]),
    ("pythonic", "[now(a=" + "(" * 5000 + ")" * 5000 + ")]", "[now(a=" + "(" * 5000 + ")" * 5000 + ")]", []),
    ("pythonic", "[now(a=" + "-" * 5000 + "1)]", "[now(a=" + "-" * 5000 + "1)]", []),
    ("pythonic", "[now(a=" + "1" * 5000 + ")]", "[now(a=" + "1" * 5000 + ")]", []),
    ("pythonic", "[now(a=1e999)]", "[now(a=1e999)]", []),
    ("pythonic", "[1] says so", "[1] says so", []),
    ("pythonic", "[print(1)]", "[print(1)]", []),
    ("pythonic", "[now(1)]", "[now(1)]", []),
    ("pythonic", "[now(x=1", "[now(x=1", []),
    ("olmo3", '<function_calls>get_weather(city="Zürich", days=2)\nnow()</function_calls>', "",
        [("get_weather", '{"city": "Zürich", "days": 2}'), ("now", "{}")]),
    ("olmo3", "I look.<function_calls>\nget_weather(city='a\\n', more={'x': true})\n</function_calls>Ok", "I look.Ok",
        [("get_weather", '{"city": "a\\n", "more": {"x": true}}')]),
    ("olmo3", "<function_calls>import os</function_calls>", "<function_calls>import os</function_calls>", []),
    ("gemma4", '<|tool_call>call:get_weather{city:<|"|>Zürich<|"|>,days:2}<tool_call|>', "",
        [("get_weather", CITY)]),
    ("gemma4", 'Ok.<|tool_call>call:new{a:[1,<|"|>x "y"\n<|"|>],b:{c:true,d:null,"e f":-1.5},g:"h",i:{},j:[]}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>", "Ok.",
        [("new", '{"a": [1, "x \\"y\\"\\n"], "b": {"c": true, "d": null, "e f": -1.5}, "g": "h", "i": {}, "j": []}'),
         ("now", "{}")]),
    ("gemma4", '<|tool_call>call:now{a:<|"|>2 < 3 <| 4<|"|>,b:word}', "", [("now", '{"a": "2 < 3 <| 4", "b": "word"}')]),
    ("gemma4", "<|tool_call>oops<tool_call|>", "<|tool_call>oops<tool_call|>", []),
    ("gemma4", '<|tool_call>call:now{a:<|"|>cut', "", [("now", '{"a": "cut')]),
    ("granite", f'<|tool_call|>[{{"name": "get_weather", "arguments": {CITY}}}, {{"name": "now", "arguments": {{}}}}]', "",
        [("get_weather", CITY), ("now", "{}")]),
    ("granite", f'<tool_call>[{{"name": "now", "arguments": {CITY}}}]', "", [("now", CITY)]),
    ("granite", "<|tool_call|>none", "<|tool_call|>none", []),
    ("phi4_mini", f'<|tool_call|>[{{"name": "now", "arguments": {CITY}}}]<|/tool_call|>', "", [("now", CITY)]),
    ("phi4_mini", f'<|tool_call|>{{"name": "now", "arguments": {CITY}}}<|/tool_call|> Ok', "Ok", [("now", CITY)]),
    ("phi4_mini", f'functools[{{"name": "now", "arguments": {CITY}}}]', "", [("now", CITY)]),
    ("phi4_mini", "functools is a module", "functools is a module", []),
    ("glm4", f"get_weather\n{CITY}", "", [("get_weather", CITY)]),
    ("glm4", f"\nget_weather\n{NESTED}\nnow\n{{}}\n", "", [("get_weather", NESTED), ("now", "{}")]),
    ("glm4", f"get_weather\n{CITY}\nand so on", "and so on", [("get_weather", CITY)]),
    ("glm4", f"get_rain\n{CITY}", f"get_rain\n{CITY}", []),
    ("glm4", "now is the time\n", "now is the time\n", []),
    ("glm4", "It is now", "It is now", []),
    ("harmony", final("So."), "So.", []),
    ("harmony", f"{analysis('hm')}{START}{final('2 < 3 ✓', '')}", "2 < 3 ✓", []),
    ("harmony", harmony("get_weather", CITY), "", [("get_weather", CITY)]),
    ("harmony", f"{analysis('hm')}{START}{harmony('get_weather', NESTED)}", "", [("get_weather", NESTED)]),
    ("harmony", f" to=functions.now<|channel|>commentary json<|message|>{CITY}<|call|>", "", [("now", CITY)]),
    ("harmony", f"{analysis('hm')}{START} to=functions.now<|channel|>analysis <|constrain|>json<|message|>{CITY}", "",
        [("now", CITY)]),
    ("harmony", f"<|channel|>commentary to=functions.now<|message|>{CITY}<|end|>{START}{harmony('now', '{}')}", "",
        [("now", CITY), ("now", "{}")]),
    ("harmony", f"<|channel|>commentary<|message|>I look. <|end|>{START}{harmony('now', '{}')}", "I look.",
        [("now", "{}")]),
    ("harmony", harmony("now", ""), "", [("now", "{}")]),
    ("harmony", f"{final('A', '<|end|>')}{START}{final('B')}", "A\n\nB", []),
    ("harmony", final('{"a": 1}').replace("final", "final <|constrain|>json"), '{"a": 1}', []),
    # malformed: no marker is shown, and no text is lost
    ("harmony", "So.", "So.", []),
    ("harmony", "final thoughts, in short", "final thoughts, in short", []),
    ("harmony", "final<|message|>So.", "So.", []),
    ("harmony", "<|message|>So.<|return|>", "So.", []),
    ("harmony", "<|channel|>final So it is, or not<|return|>", "So it is, or not", []),
    ("harmony", "<|channel|>final So<|return|>", "So", []),
    ("harmony", f"<|channel|>commentary to=functions.now {CITY}<|call|>", "", [("now", CITY)]),
    ("harmony", f"<|channel|>commentary to=now json {CITY}<|call|>", "", [("now", CITY)]),
    ("harmony", "<|channel|>commentary to=functions.now<|call|>", "", [("now", "{}")]),
    ("harmony", f"<|channel|>analysis<|message|>hm{final('So.')}", "So.", []),
    ("harmony", f"<|channel|>analysis<|channel|>analysis<|message|>hm<|end|>{final('So.')}", "So.", []),
    ("harmony", f"{analysis('hm')}So.", "So.", []),
    ("harmony", f"{analysis('hm')}{START}<|channel|><|message|>So<|message|>.", "So.", []),
    ("harmony", "<|channel|>" + "x" * 999, "x" * 999, []),
    ("harmony", f"<|start|>{START}{final('So. ')} and more", "So.", []),
    ("harmony", "<|channel|>final<|message|>a <|end| b", "a <|end| b", []),
    ("harmony", "<|channel|>final<|message|>So.\n", "So.\n", []),
]  # fmt: skip


@pytest.mark.parametrize(
    ("dialect", "text", "content", "calls"),
    RECORDED,
    ids=[f"{row[0]} {i}" for i, row in enumerate(RECORDED)],
)
def test_a_recorded_answer(dialect: str, text: str, content: str, calls: Calls) -> None:
    read_all = functools.partial(read, thinks=dialect == "harmony")
    whole = read_all(dialect, [text])
    assert parts(whole)[1:] == (content, calls)
    assert ("hm" in text) == (parts(whole)[0] == "hm")
    cuts = random.Random(text)
    assert joined(read_all(dialect, list(text))) == joined(whole)
    for _ in range(10):
        places = [0, *sorted(cuts.choices(range(len(text) + 1), k=4)), len(text)]
        pieces = [text[a:b] for a, b in itertools.pairwise(places)]
        assert joined(read_all(dialect, pieces)) == joined(whole)


@pytest.mark.parametrize(
    ("dialect", "text", "ends", "calls"),
    [
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}\n', ["</tool_call>"], [("now", "{}")]),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1', ["</tool_call>"], [("now", '{"a": 1')]),
        ("smollm2", '<tool_call>[{"name": "now", "arguments": {}}]', ["</tool_call>"], [("now", "{}")]),
        ("qwen3_coder", "<tool_call>\n<function=now>\n", ["</function>", "\n</tool_call>"], [("now", "{}")]),
        ("gemma3", "```tool_code\n[now()]\n", ["```"], [("now", "{}")]),
        (
            "glm45",
            keyed("get_weather", days="2").removesuffix("</tool_call>"),
            ["</tool_call>"],
            [("get_weather", '{"days": 2}')],
        ),
    ],
)
def test_an_end_that_was_cut_off_is_not_text(dialect: str, text: str, ends: list[str], calls: Calls) -> None:
    end = "".join(ends)
    for length in range(len(end) + 1):
        cut = text + end[:length]
        assert parts(read(dialect, [cut])) == ("", "", calls) == parts(read(dialect, list(cut)))
    assert parts(read(dialect, [f"{text}{end} <"])) == ("", "<", calls)


FORCED = [  # calls as a constraint has them written, and how many of the two have begun where an answer is cut
    ("hermes", hermes("get_weather", CITY) + "\n" + hermes("now", "{}")),
    (
        "smollm2",
        f'<tool_call>[{{"name": "get_weather", "arguments": {CITY}}}, {{"name": "now", "arguments": {{}}}}]</tool_call>',
    ),
    ("qwen3_coder", f"{xml('get_weather', city='Zürich', days='2')}\n{xml('now')}"),
    ("glm45", f"{keyed('get_weather', city='Zürich', days='2')}\n{keyed('now')}"),
    (
        "llama3_json",
        f'{{"name": "get_weather", "parameters": {CITY}}}; {{"name": "now", "parameters": {{}}}}',
    ),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {CITY}}}, {{"name": "now", "arguments": {{}}}}]',
    ),
    ("mistral_v11", f"[TOOL_CALLS]get_weather[ARGS]{CITY}[TOOL_CALLS]now[ARGS]{{}}"),
    ("gemma3", '```tool_code\n[get_weather(city="Zürich", days=2), now()]\n```'),
    ("pythonic", '[get_weather(city="Zürich", days=2), now()]'),
    ("olmo3", '<function_calls>get_weather(city="Zürich", days=2)\nnow()</function_calls>'),
    (
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>Zürich<|"|>,days:2}<tool_call|><|tool_call>call:now{}<tool_call|>',
    ),
    (
        "phi4_mini",
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {CITY}}}, {{"name": "now", "arguments": {{}}}}]<|/tool_call|>',
    ),
    (
        "granite",
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {CITY}}}, {{"name": "now", "arguments": {{}}}}]',
    ),
    ("glm4", f"get_weather\n{CITY}\nnow\n{{}}"),
    ("harmony", harmony("get_weather", CITY).replace("<|call|>", "<|end|>") + START + harmony("now", "{}")),
]


@pytest.mark.parametrize(("dialect", "text"), FORCED, ids=[row[0] for row in FORCED])
def test_forced_calls_that_are_cut_anywhere_are_no_text(dialect: str, text: str) -> None:
    assert parts(read(dialect, [text], choice="required")) == ("", "", [("get_weather", CITY), ("now", "{}")])
    end = f"<|end|>{START}" if dialect == "harmony" else "</think>\n"
    for length in range(len(text)):
        cut = text[:length]
        reasoning, content, calls = parts(read(dialect, [cut], choice="required", is_cut=True))
        assert (reasoning, content) == ("", ""), cut
        assert [name for name, _ in calls] == ["get_weather", "now"][: len(calls)]
        assert joined(read(dialect, list(cut), choice="required")) == joined(
            read(dialect, [cut], choice="required")
        )
        thought = parts(read(dialect, [f"hm </thi{end}{cut}"], thinks=True, in_reasoning=True, choice="now"))
        assert thought[:2] == ("hm </thi", "")


@pytest.mark.parametrize(
    ("dialect", "text", "content"),
    [
        ("hermes", 'I look.\n<tool_call>{"name": "no', "I look."),
        ("hermes", "I look.\n<tool_call>", "I look."),
        ("smollm2", '<tool_call>[{"name": "no', ""),
        ("gemma3", "```tool_code\n[now(x=1", ""),
        ("hermes", "2 <tool_ca", "2 <tool_ca"),  # may be text
        ("hermes", "<tool_call>oops", "<tool_call>oops"),  # is no call
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>'),
        ("llama3_json", '{"name": "no', '{"name": "no'),
        ("pythonic", "[now(x=1", "[now(x=1"),
    ],
)
def test_a_call_that_is_cut_is_no_text_behind_its_marker(dialect: str, text: str, content: str) -> None:
    assert parts(read(dialect, [text], is_cut=True)) == ("", content, [])
    assert parts(read(dialect, [text])) == ("", text, []), "an answer that ended so by itself means it"


PROSE = [  # text that speaks of a call: the dialect, what is before the place where it is clear, and the rest
    ("qwen3_coder", "It begins with <function= and", " then the name follows, a sign and more"),
    ("qwen3_coder", "It begins with <tool_call>\n<function=the", " name, and `>` ends"),
    ("qwen3_coder", f"So: <function={'f' * 128}", "fff and more"),
    ("qwen3_coder", "Write <function=", "<name> there"),
    ("mistral_v11", "Write [TOOL_CALLS]name[CALL_ID]the", " id that was given, then [ARG"),
]


@pytest.mark.parametrize("is_cut", [True, False])
@pytest.mark.parametrize(("dialect", "begin", "rest"), PROSE, ids=range(len(PROSE)))
def test_prose_behind_a_marker_is_text_as_soon_as_it_is_no_name(
    dialect: str, begin: str, rest: str, is_cut: bool
) -> None:
    for pieces in ([begin + rest], list(begin + rest)):
        assert parts(read(dialect, pieces, is_cut=is_cut)) == ("", begin + rest, [])
    form = AnswerFormat(dialect=BY_NAME[dialect], tools=TOOLS, think=None, choice="auto")
    parser = AnswerParser(form)
    parser.push(begin[:-1])
    held = "".join(
        event.text for event in parser.push(begin[-1] + rest[:3]) if isinstance(event, ContentDelta)
    )
    assert begin[-1] in held, "it is not held back until the answer ends"


def test_a_parameter_whose_name_never_ends_is_text() -> None:
    text = "<function=now><parameter=a name\nof it, <function=now>"
    for is_cut in (True, False):
        found = parts(read("qwen3_coder", list(text), is_cut=is_cut, max_calls=2))
        assert found == ("", "<parameter=a name\nof it,", [("now", "{"), ("now", "{}")])
    assert parts(read("qwen3_coder", [text], max_calls=1)) == ("", "<parameter=a name", [("now", "{")])
    named = "<function=now><parameter= größe in cm >\n3\n</parameter></function>"
    assert parts(read("qwen3_coder", [named])) == ("", "", [("now", '{"größe in cm": 3}')])


SCRAPS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "now", ', '"arguments": ', CITY, "{", "}", "[", "]",
    "<function=now>", "<parameter=a>", "</parameter>", "</function>", "[TOOL_CALLS]", "[ARGS]", "now", "now(", "a=1", ")",
    "```tool_code", "```", "<|python_tag|>", "<function_calls>", "</function_calls>", "<|tool_call|>", "now\n", "<|tool_call>", "call:now", '<|"|>', "a:", *HARMONY_MARKERS, "assistant", "final", " to=functions.now", "; ", ", ", '"', "\\", "\n", " ", "é", "😀", "<", "x",
]  # fmt: skip


@given(
    st.sampled_from([*BY_NAME, None]),
    st.lists(st.sampled_from(SCRAPS), max_size=14).map("".join),
    st.lists(st.integers(0, 200), max_size=6),
    st.booleans(),
    st.booleans(),
)
def test_any_scraps_cut_anywhere(
    dialect: str | None, text: str, places: list[int], thinks: bool, in_reasoning: bool
) -> None:
    flags: dict[str, Any] = {"thinks": thinks, "in_reasoning": thinks and in_reasoning}
    whole = read(dialect, [text], **flags)
    cuts = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(cuts)]
    assert joined(read(dialect, pieces, **flags)) == joined(whole)
    reasoning, content, calls = parts(whole)
    if dialect == "harmony":
        assert not any(marker in content + reasoning for marker in HARMONY_MARKERS)
    elif not calls and not thinks:
        assert content == text  # what is no call is text, to the last blank


REASONED: list[tuple[str, bool, tuple[str, str, Calls]]] = [
    ("<think>\nhm, 2 < 3\n</think>\n\nSo.", False, ("hm, 2 < 3", "So.", [])),
    ("hm\n</think>\n\nSo.", True, ("hm", "So.", [])),
    ("<think>\n\n</think>\n\nSo.", False, ("", "So.", [])),
    ("hm, and then", True, ("hm, and then", "", [])),
    ("<think>hm </thi", False, ("hm </thi", "", [])),
    ("So. <think>", False, ("", "So. <think>", [])),
    ("hm</think>\nRome is old \n", True, ("hm", "Rome is old \n", [])),
    (f"{hermes('now', '{}')}\nRome is old \n", False, ("", "Rome is old \n", [("now", "{}")])),
    (f"Rome is old \n{hermes('now', '{}')}\n", False, ("", "Rome is old", [("now", "{}")])),
    (" \n<thing> is it\n", False, ("", " \n<thing> is it\n", [])),
    (f"<think>I call\n{hermes('now', '{}')}", False, ("I call", "", [("now", "{}")])),
    (f"hm</think>{hermes('now', '{}')}", True, ("hm", "", [("now", "{}")])),
]


def test_a_call_in_xml_ends_reasoning_that_was_not_closed() -> None:
    for text in (f"<think>I call\n{xml('get_weather', city='Zürich', days='2')}", f"I call {xml('now')}"):
        is_inside = not text.startswith("<think>")
        for pieces in ([text], list(text)):
            found = parts(read("qwen3_coder", pieces, thinks=True, in_reasoning=is_inside))
            assert found == ("I call", "", [("now", "{}") if is_inside else ("get_weather", CITY)])


@pytest.mark.parametrize(("text", "in_reasoning", "expected"), REASONED)
def test_reasoning_is_split_off(text: str, in_reasoning: bool, expected: tuple[str, str, Calls]) -> None:
    for pieces in ([text], list(text)):
        assert parts(read("hermes", pieces, thinks=True, in_reasoning=in_reasoning)) == expected


@pytest.mark.parametrize(
    "text", ["<think>hm</think>\n<response>So.\n</response>\n", "<think>hm</think>So.", "<response>So."]
)
def test_an_answer_may_have_tags_of_its_own_behind_reasoning(text: str) -> None:
    form = AnswerFormat(think=THINKS["granite"])
    for pieces in ([text], list(text)):
        parser = AnswerParser(form)
        events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
        assert parts(events) == ("hm" if "hm" in text else "", "So.", [])


def test_reasoning_may_be_announced_in_words() -> None:
    parser = AnswerParser(AnswerFormat(think=THINKS["granite_3_2"]))
    events = parser.push("Here is my thought process: hm\nHere is my resp") + parser.push("onse:\nSo.")
    assert parts(events + parser.finish()) == ("hm", "So.", [])


def test_arguments_are_passed_on_as_they_come() -> None:
    parser = AnswerParser(AnswerFormat(dialect=BY_NAME["hermes"], tools=TOOLS), lambda: "id")
    assert parser.push('Hi<tool_call>\n{"name": "now"') == [ContentDelta("Hi")]
    assert parser.push(', "arguments": {"a": "b') == [CallStart(0, "id", "now"), CallDelta(0, '{"a": "b')]
    assert parser.push('c"') == [CallDelta(0, 'c"')]
    assert parser.push("}}\n</tool_call>") == [CallDelta(0, "}")]
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("dialect", "begin", "end", "is_closed"),
    [
        ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\n", "\n</parameter>", False),
        ("glm45", "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>", "</arg_value>", False),
        ("gemma4", "<|tool_call>call:get_weather{city:", GEMMA_QUOTE, True),
    ],
)
def test_text_in_arguments_is_passed_on_as_it_comes(
    dialect: str, begin: str, end: str, is_closed: bool
) -> None:
    parser = AnswerParser(AnswerFormat(dialect=BY_NAME[dialect], tools=TOOLS), lambda: "id")
    opening = parser.push(begin + (GEMMA_QUOTE if is_closed else ""))
    assert opening == [CallStart(0, "id", "get_weather"), CallDelta(0, '{"city": "')]
    assert parser.push('Zü"r') == [CallDelta(0, 'Zü\\"r')]
    assert parser.push(end[:-1]) == []
    assert parser.push("ich") == [CallDelta(0, json.dumps(end[:-1] + "ich")[1:-1])]
    assert parser.push(end[:2]) == []
    assert parser.push(end[2:]) == [CallDelta(0, '"')]


def test_only_what_may_be_a_marker_is_held_back() -> None:
    parser = AnswerParser(AnswerFormat(dialect=BY_NAME["hermes"], tools=TOOLS))
    assert parser.push("a <tool") == [ContentDelta("a")]
    assert parser.push("box") == [ContentDelta(" <toolbox")]


def test_an_answer_with_one_call_is_done_behind_it() -> None:
    text = hermes("now", CITY)
    form = AnswerFormat(dialect=BY_NAME["hermes"], tools=TOOLS, max_calls=1)
    parser = AnswerParser(form, lambda: "id")
    parser.push(text[: text.index("}}") + 1])
    assert parser.is_done
    assert parser.push("}</tool_call>" + text) == [] == parser.finish()


@pytest.mark.parametrize("name", BY_NAME)
def test_ids_have_the_form_that_the_family_knows(name: str) -> None:
    texts = {dialect: text for dialect, text, _, calls in reversed(RECORDED) if calls}
    parser = AnswerParser(AnswerFormat(dialect=BY_NAME[name], tools=TOOLS))
    starts: list[Any] = [e for e in (*parser.push(texts[name]), *parser.finish()) if isinstance(e, CallStart)]
    for start in starts:
        if name.startswith("mistral"):
            assert len(start.call_id) == 9
            assert start.call_id.isalnum()
        else:
            assert start.call_id.startswith("call_")
            assert len(start.call_id) == 29


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ('{"a": "x\ny"}', {"a": "x\ny"}),
        ('{"a": ', None),
        ("", None),
        ("[1]", None),
        ('{"a": NaN}', None),
        ('{"a": "\\ud800"}', None),
        ('{"a": ' * 100_000, None),
    ],
)
def test_arguments_are_an_object_that_can_be_written_or_none(text: str, expected: object) -> None:
    assert read_arguments(text) == expected


def test_nesting_of_a_gemma_call_ends_somewhere() -> None:
    events = read("gemma4", ["<|tool_call>call:now{a:", "[" * 5000, "<tool_call|> Ok."])
    assert isinstance(events[0], CallStart)
    assert "".join(event.text for event in events if isinstance(event, ContentDelta)).endswith("Ok.")
