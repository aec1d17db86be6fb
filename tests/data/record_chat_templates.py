"""Record what the families' published chat templates make of a set of conversations.

    python tests/data/record_chat_templates.py TEMPLATES_DIR > tests/data/chat_templates.json

TEMPLATES_DIR holds the published templates, one `NAME.jinja` for each row of PUBLISHED; they are other
people's text and not part of this repository. The renderings are facts about them, made by transformers' own
renderer, and are what our templates must reproduce. A rendering of null: the published template refuses.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

# file -> (our template, bos, eos)
PUBLISHED = {
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3", "<|begin_of_text|>", "<|eot_id|>"),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3", "<|begin_of_text|>", "<|eot_id|>"),
    "Qwen-Qwen2.5-7B-Instruct": ("qwen2", "", "<|im_end|>"),
    "Qwen-Qwen3-0.6B": ("qwen3", "", "<|im_end|>"),
    "Qwen-Qwen3-Coder-30B-A3B-Instruct": ("qwen3_coder", "", "<|im_end|>"),
    "google-gemma-3-it": ("gemma3", "<bos>", "<end_of_turn>"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", "<s>", "</s>"),
    "mistralai-Mistral-7B-Instruct-v0.2": ("mistral_v1", "<s>", "</s>"),
    "mistralai-Mistral-Large-Instruct-2411": ("mistral_v7", "<s>", "</s>"),
    "meta-llama-Llama-2-7b-chat": ("llama2", "<s>", "</s>"),
    "HuggingFaceTB-SmolLM2-135M-Instruct": ("smollm2", "<|im_start|>", "<|im_end|>"),
    "TinyLlama-TinyLlama-1.1B-Chat-v1.0": ("zephyr", "<s>", "</s>"),
}
WITHOUT_TOOLS = ("gemma3", "smollm2", "zephyr", "mistral_v1", "mistral_v7", "llama2")
KEYWORDS = {"llama3": ("date_string", "tools_in_user_message"), "qwen3": ("enable_thinking",)}

SYSTEM = {"role": "system", "content": "Answer in one sentence."}
HELLO = {"role": "user", "content": "Hello!"}
HI = {"role": "assistant", "content": "Hi, how can I help?"}
MORE = {"role": "user", "content": "Tell me about the year 1984.\nBriefly."}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in a city, in °C",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "<name> & country"},
                "days": {"type": "integer"},
            },
            "required": ["city"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "The time",
        "parameters": {"type": "object", "properties": {}},
    },
}
ASK = {"role": "user", "content": "How is the weather in Paris?"}


def call(*names: str) -> dict[str, Any]:
    calls = [
        {
            "type": "function",
            "id": f"abcdef{i:03d}",
            "function": {"name": name, "arguments": {"city": "Zürich", "days": 2}},
        }
        for i, name in enumerate(names)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(content: str, i: int = 0) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": f"abcdef{i:03d}"}


def said(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


PLAIN: dict[str, dict[str, Any]] = {
    "one user message": {"messages": [HELLO]},
    "a system message": {"messages": [SYSTEM, HELLO]},
    "several turns": {"messages": [SYSTEM, HELLO, HI, MORE]},
    "several turns without a system message": {"messages": [HELLO, HI, MORE]},
    "no generation prompt": {"messages": [HELLO, HI], "add_generation_prompt": False},
    "an answer to continue from": {"messages": [HELLO, HI]},
    "five turns": {"messages": [HELLO, HI, MORE, HI, HELLO]},
    "white space around the words": {
        "messages": [
            {"role": "system", "content": "  s \n"},
            {"role": "user", "content": "\n u  "},
            said(" a\n"),
            HELLO,
        ]
    },
    "empty content": {"messages": [{"role": "system", "content": ""}, {"role": "user", "content": ""}]},
    "other scripts": {"messages": [{"role": "user", "content": "안녕하세요 👋🏽 你好 مرحبا ½"}]},
    "quotes, braces and angles": {
        "messages": [{"role": "user", "content": 'say "{{ x }}" {% if %} <b> & \\n'}]
    },
    "two user messages in a row": {"messages": [HELLO, MORE]},
    "an assistant message first": {"messages": [HI, HELLO]},
    "a system message later": {"messages": [HELLO, SYSTEM]},
    "only a system message": {"messages": [SYSTEM]},
}
TOOLS: dict[str, dict[str, Any]] = {
    "tools": {"messages": [ASK], "tools": [WEATHER]},
    "tools and a system message": {"messages": [SYSTEM, ASK], "tools": [WEATHER, CLOCK]},
    "tools in a later turn": {"messages": [HELLO, HI, ASK], "tools": [WEATHER]},
    "a tool call and its result": {
        "messages": [ASK, call("get_weather"), result('{"c": 21}')],
        "tools": [WEATHER],
    },
    "an answer after the result": {
        "messages": [SYSTEM, ASK, call("get_weather"), result("sunny"), said("It is sunny."), HELLO],
        "tools": [WEATHER],
    },
    "two calls at once": {
        "messages": [ASK, call("get_weather", "get_time"), result("21"), result("noon", 1)],
        "tools": [WEATHER, CLOCK],
    },
    "a call with words before it": {
        "messages": [ASK, call("get_weather") | {"content": "Let me look."}, result("21")],
        "tools": [WEATHER],
    },
    "a call, no generation prompt": {
        "messages": [ASK, call("get_weather")],
        "tools": [WEATHER],
        "add_generation_prompt": False,
    },
    "a result without tools": {"messages": [ASK, call("get_weather"), result("21")]},
    "tools and only a system message": {"messages": [SYSTEM], "tools": [WEATHER]},
}
KEYED: dict[str, dict[str, Any]] = {
    "thinking off": {"messages": [HELLO], "enable_thinking": False},
    "thinking on": {"messages": [HELLO], "enable_thinking": True},
    "thinking off with tools": {"messages": [SYSTEM, ASK], "tools": [WEATHER], "enable_thinking": False},
    "earlier reasoning": {
        "messages": [HELLO, said("<think>\nhm\n</think>\n\nHi."), MORE],
        "enable_thinking": True,
    },
    "reasoning of the last answer": {
        "messages": [HELLO, said("<think>\nhm\n</think>\n\nHi.")],
        "add_generation_prompt": False,
        "enable_thinking": True,
    },
    "reasoning apart from the answer": {
        "messages": [
            HELLO,
            said("Hi.", reasoning_content="hm"),
            MORE,
            said("1984.", reasoning_content="\nwell\n"),
        ],
        "add_generation_prompt": False,
        "enable_thinking": True,
    },
    "reasoning between tool calls": {
        "messages": [
            ASK,
            call("get_weather") | {"reasoning_content": "look it up"},
            result("21"),
            said("21 °C.", reasoning_content="done"),
        ],
        "tools": [WEATHER],
        "add_generation_prompt": False,
        "enable_thinking": True,
    },
    "reasoning before a tool call, in the text": {
        "messages": [
            ASK,
            call("get_weather") | {"content": "<think>\nlook\n</think>\n\nOne moment."},
            result("21"),
        ],
        "tools": [WEATHER],
        "enable_thinking": True,
    },
    "a tool result sent by the user": {
        "messages": [
            ASK,
            said("x", reasoning_content="why"),
            {"role": "user", "content": "<tool_response>21</tool_response>"},
        ],
        "enable_thinking": True,
    },
    "a thought that never opened": {
        "messages": [HELLO, said("hm</think>Hi."), MORE, said("a</think>b</think>c")],
        "add_generation_prompt": False,
        "enable_thinking": True,
    },
    "tools in the system turn": {
        "messages": [SYSTEM, ASK],
        "tools": [WEATHER],
        "tools_in_user_message": False,
    },
    "tools in the system turn, with a result": {
        "messages": [ASK, call("get_weather"), result("21")],
        "tools": [WEATHER, CLOCK],
        "tools_in_user_message": False,
    },
    "another date": {"messages": [HELLO], "date_string": "01 Jan 2031"},
}


def cases_of(template: str) -> dict[str, dict[str, Any]]:
    keywords = KEYWORDS.get(template, ())
    cases = PLAIN | (TOOLS if template not in WITHOUT_TOOLS else {})
    known = {"messages", "tools", "add_generation_prompt", *keywords}
    cases = cases | {name: case for name, case in KEYED.items() if set(case) <= known}
    if "date_string" in keywords:
        cases = {name: {"date_string": "26 Jul 2024"} | case for name, case in cases.items()}
    return cases


def render(source: str, case: dict[str, Any], bos: str, eos: str) -> str | None:
    keywords = {
        name: value
        for name, value in case.items()
        if name not in ("messages", "tools", "add_generation_prompt")
    }
    try:
        rendering: Any = render_jinja_template(
            conversations=[case["messages"]],
            tools=case.get("tools"),
            chat_template=source,
            add_generation_prompt=case.get("add_generation_prompt", True),
            bos_token=bos,
            eos_token=eos,
            **keywords,
        )
    except (jinja2.TemplateError, TypeError):
        return None
    texts, _ = rendering
    return str(texts[0])


def main(directory: Path) -> None:
    record: dict[str, Any] = {}
    for published, (template, bos, eos) in PUBLISHED.items():
        source = (directory / f"{published}.jinja").read_text(encoding="utf-8")
        cases = [
            {"name": name, **case, "rendered": render(source, case, bos, eos)}
            for name, case in cases_of(template).items()
        ]
        record[published] = {"template": template, "bos": bos, "eos": eos, "cases": cases}
    json.dump(record, sys.stdout, ensure_ascii=False, separators=(",", ":"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
