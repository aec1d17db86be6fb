"""The default model at temperature 1: every answer is JSON of its schema.

Constrained and free requests share batches, the cache is too small for all of them, so sequences are
preempted in the middle of a form, and some requests make several outputs.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from infer.constraints.description import Structured
from infer.frontend.llm import LLM
from infer.sampling.params import SamplingParams
from tests.support.fetched import fetched_model


def closed(**properties: Any) -> dict[str, Any]:
    """An object of these properties, all of them required."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


NAME: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": 12}
TREE: dict[str, Any] = closed(
    name=NAME, left={"anyOf": [{"type": "null"}, closed(name=NAME, left={"type": "null"})]}
)
SCHEMAS: list[dict[str, Any]] = [
    closed(name=NAME, age={"type": "integer", "minimum": 0, "maximum": 120}, is_tall={"type": "boolean"}),
    closed(
        colours={"type": "array", "items": {"enum": ["red", "blue", "ünder"]}, "minItems": 2, "maxItems": 4}
    ),
    closed(day={"type": "string", "format": "date"}, price={"type": "number", "minimum": 0, "maximum": 9.5}),
    {**closed(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}), "required": []},
    TREE,
    {"type": "array", "prefixItems": [NAME, {"const": {"a": [1, None]}}], "items": False, "minItems": 2},
    {
        "$ref": "#/$defs/pair",
        "$defs": {"pair": closed(a={"$ref": "#/$defs/n"}, b=NAME), "n": {"enum": [1, 2.5]}},
    },
    {"oneOf": [closed(kind={"const": "cat"}, lives={"enum": [7, 9]}), closed(kind={"const": "dog"})]},
]
QUESTIONS = ["Invent a person.", "Describe what you see.", "What is on the table?", "Tell me about a trip."]


def answer_all(num_requests: int, num_blocks: int = 128) -> None:
    fetched_model()
    llm = LLM(device="cpu", max_seq_len=512, block_size=8, num_blocks=num_blocks, prefill_chunk_size=64)
    prompts, params = [], []
    for i in range(num_requests):
        schema = SCHEMAS[i % len(SCHEMAS)]
        is_free = i % 5 == 4
        prompts.append(llm.encode_chat([{"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]}]))
        params.append(
            SamplingParams(
                temperature=1.0,
                seed=i,
                max_tokens=24 if is_free else 300,
                n=2 if i % 7 == 0 else 1,
                logprobs=1 if i % 11 == 0 else None,
                structured=None if is_free else Structured.json_schema(schema),
            )
        )
    answers = llm.generate(prompts, params)
    num_checked = 0
    for asked, answer in zip(params, answers, strict=True):
        if asked.structured is None:
            continue
        for output in answer.outputs:
            assert output.finish_reason == "stop", output.text
            jsonschema.validate(
                json.loads(output.text),
                json.loads(asked.structured.text),
                format_checker=jsonschema.FormatChecker(),
            )
            num_checked += 1
    assert num_checked >= num_requests * 4 // 5
    assert llm.engine.scheduler.num_preemptions > 0, "the cache was large enough for all"
    texts = {output.text for answer in answers for output in answer.outputs}
    assert len(texts) > num_requests // 2, "they are drawn, not repeated"


def test_two_answers_of_every_schema() -> None:
    answer_all(2 * len(SCHEMAS), num_blocks=64)


@pytest.mark.slow
def test_500_requests() -> None:
    answer_all(500)
