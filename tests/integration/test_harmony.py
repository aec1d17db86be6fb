"""Harmony with an engine that really runs: a random network writes well-formed calls and final messages."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import jsonschema
import pytest

from infer.constraints.description import Structured
from infer.dialects.table import HARMONY_MARKERS
from infer.frontend.llm import LLM
from infer.sampling.params import SamplingParams
from scripts import make_checkpoint
from tests.support.live_server import KNOBS

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Zürich"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A network with the tokens of Harmony, and a stop list such as gpt-oss has."""
    directory = tmp_path_factory.mktemp("harmony") / "llama"
    tokens = make_checkpoint.FamilyTokens(
        ("<|endoftext|>", *HARMONY_MARKERS), eos=("<|return|>", "<|endoftext|>", "<|call|>")
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(make_checkpoint.TOKENS, "llama", tokens)
        make_checkpoint.make_checkpoint("llama", directory, sizes=make_checkpoint.Sizes(context_len=4096))
    with LLM(str(directory), chat_template="harmony", **KNOBS) as made:
        yield made


def unlikely_ends(llm: LLM) -> dict[int, float]:
    """A bias by which a random network does not end its answer in the middle of its analysis."""
    return dict.fromkeys((0, *llm.tokenizer.special_ids), -100.0)


@pytest.mark.parametrize("choice", ["required", "get_weather"])
@pytest.mark.parametrize("seed", range(3))
def test_a_forced_call_follows_the_analysis(llm: LLM, choice: str, seed: int) -> None:
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=400, logit_bias=unlikely_ends(llm))
    (answer,) = llm.chat("Weather?", params, tools=TOOLS, tool_choice=choice, max_reasoning_tokens=12)
    (call,) = answer.tool_calls
    assert answer.text == ""
    assert call.name == "get_weather" or choice == "required"
    if call.name == "get_weather":
        jsonschema.validate(json.loads(call.arguments), SCHEMA)
    assert answer.finish_reason == ("tool_calls" if choice == "required" else "stop")
    assert answer.num_reasoning_tokens > 0


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_constraint_holds_in_the_final_message(llm: LLM, tools: list[dict[str, object]] | None) -> None:
    params = SamplingParams(
        temperature=1.0,
        seed=1,
        max_tokens=400,
        logit_bias=unlikely_ends(llm),
        structured=dataclasses.replace(Structured.json_schema(SCHEMA), param="response_format"),
    )
    (answer,) = llm.chat("Weather?", params, tools=tools, max_reasoning_tokens=5)
    assert not any(marker in answer.text + (answer.reasoning or "") for marker in HARMONY_MARKERS)
    if answer.tool_calls:
        assert tools is not None
    else:
        jsonschema.validate(json.loads(answer.text), SCHEMA)
    text = llm.tokenizer.decode(answer.token_ids, skip_special=False)
    assert "<|end|><|start|>assistant<|channel|>" in text
