"""llama.cpp's routes through the whole application: bodies as its clients send them, frames and refusals."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import pytest

from infer.client.client import InProcessClient
from infer.engine.stats import EngineStats
from infer.errors import EngineError
from infer.frontend.llm import LLM
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request, StepOutput
from tests.support.app import Site
from tests.support.fake_client import FakeClient
from tests.support.wire import ScriptedClient, outputs_of
from tests.unit.server.conftest import run_client

GREEDY: dict[str, Any] = {"temperature": 0, "n_predict": 8}
COUNTS = ("tokens_predicted", "tokens_evaluated", "tokens_cached")


class BusyClient(FakeClient):
    """An engine with two places, both taken."""

    def stats(self) -> EngineStats:
        return EngineStats(num_running=2, max_batch_size=2)


@pytest.fixture(scope="module")
def engine(checkpoint: str) -> Iterator[InProcessClient]:
    """An engine of its own: one that has waited for grammars counts turns that are no steps of the others."""
    yield from run_client(checkpoint)


@pytest.fixture
def site(oracle: LLM, engine: InProcessClient) -> Site:
    return Site(engine, encoder=oracle.encoder)


def frames_of(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [json.loads(block.removeprefix("data: ")) for block in answer.text.split("\n\n")[:-1]]


def test_a_completion_is_the_offline_text(site: Site, oracle: LLM) -> None:
    expected = oracle.generate("Once there was", SamplingParams(temperature=0.0, max_tokens=8))[0]
    for path in ("/completion", "/completions"):
        made = site.request("POST", path, json={"prompt": "Once there was", **GREEDY, "return_tokens": True})
        body = made.json()
        assert body["content"] == expected.text
        assert body["tokens"] == expected.token_ids
        assert (body["stop"], body["stop_type"], body["stopping_word"]) == (True, "limit", "")
        assert [body[name] for name in COUNTS[:2]] == [8, len(expected.prompt_token_ids)]
        assert body["generation_settings"]["n_predict"] == 8
        timings = body["timings"]
        assert timings["prompt_n"] + timings["cache_n"] == len(expected.prompt_token_ids)
        assert timings["predicted_n"] == 8
        assert timings["predicted_ms"] > 0 and timings["prompt_ms"] > 0


def test_a_stream_joins_to_the_whole_text(site: Site) -> None:
    whole = site.request("POST", "/completion", json={"prompt": "Once there was", **GREEDY}).json()
    asked = {"prompt": "Once there was", **GREEDY, "stream": True, "n_probs": 2}
    *pieces, last = frames_of(site.request("POST", "/completion", json=asked))
    assert "".join(piece["content"] for piece in pieces) == whole["content"]
    assert [piece["stop"] for piece in pieces] == [False] * 8
    assert [piece["tokens_predicted"] for piece in pieces] == list(range(1, 9))
    for piece in pieces:
        (probs,) = piece["completion_probabilities"]
        assert [probs["id"]] == piece["tokens"]
        assert [probs["id"], len(probs["top_logprobs"])] == [probs["top_logprobs"][0]["id"], 2]
    assert {*last} == {*whole}
    assert (last["content"], last["stop"], last["stop_type"]) == ("", True, "limit")


def test_why_a_text_ends_is_told(site: Site) -> None:
    asked = {"prompt": "Once", "temperature": 0, "grammar": 'root ::= "yes" | "no"'}
    ended = site.request("POST", "/completion", json=asked).json()
    assert (ended["content"] in ("yes", "no"), ended["stop_type"]) == (True, "eos")
    stopped = site.request("POST", "/completion", json={**asked, "stop": ["s", "o"]}).json()
    assert (stopped["content"] in ("ye", "n"), stopped["stop_type"]) == (True, "word")
    assert stopped["stopping_word"] in ("s", "o")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    made = site.request("POST", "/completion", json={"prompt": "Once", "json_schema": schema}).json()
    assert json.loads(made["content"])["a"] in (1, 2)


def test_a_body_reaches_the_engine(oracle: LLM) -> None:
    async def script(request: Request) -> AsyncGenerator[StepOutput, None]:
        for output in outputs_of(request, [70], "stop"):
            yield output

    client = ScriptedClient(script)
    site = Site(client, encoder=oracle.encoder)
    asked = {
        "prompt": [70, 71],
        "n_predict": -1,
        "seed": -1,
        "repeat_penalty": 1.1,
        "logit_bias": [[70, 1.5], [71, False]],
        "cache_prompt": False,
        "id_slot": -1,
        "samplers": None,
        "typical_p": 1.0,
        "mirostat": 0,
        "grammar": "",
        "n_probs": 0,
    }
    answer = site.request("POST", "/completion", json=asked)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-infer-ignored"] == "id_slot"
    (request,) = client.requests
    assert request.prompt == (70, 71)
    assert request.cache_salt != ""
    params = request.params
    assert (params.max_tokens, params.seed, params.repetition_penalty) == (None, None, 1.1)
    assert params.logit_bias == {70: 1.5, 71: -100.0}
    assert (params.structured, params.logprobs) == (None, None)
    site.request("POST", "/completion", json={"prompt": "hi", "cache_prompt": True})
    assert client.requests[1].cache_salt == ""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "the required field 'prompt' is missing"),
        ({"prompt": "a", "n_predict": 0}, "n_predict is 0; set it to -1"),
        ({"prompt": "a", "n_predict": -5}, "n_predict must be"),
        ({"prompt": "a", "repeat_penalty": -1}, "repeat_penalty must be"),
        ({"prompt": ["a", "b"]}, "prompt is a list of prompts; send one per request"),
        ({"prompt": "a", "mirostat": 2}, "mirostat is not supported"),
        ({"prompt": "a", "image_data": [{"id": 1}]}, "this server reads and writes text"),
        ({"prompt": "a", "max_tokens": 3}, "unknown field 'max_tokens'; this route takes n_predict"),
        ({"prompt": "a", "logit_bias": [["Hello", 1]]}, "logit_bias[0] must be a token id and a number"),
        ({"prompt": "a", "grammar": "root ::= missing"}, "grammar"),
        ({"prompt": "a", "model": "gone"}, "model 'gone' is not served here"),
    ],
)
def test_a_refusal_names_the_field_as_it_was_sent(site: Site, body: Any, message: str) -> None:
    answer = site.request("POST", "/completion", json=body)
    assert answer.status_code in (400, 404, 422)
    assert message in answer.json()["error"]["message"]


def test_a_failure_in_a_stream_is_its_last_frame(oracle: LLM) -> None:
    async def script(request: Request) -> AsyncGenerator[StepOutput, None]:
        for output in outputs_of(request, [70, 71], None):
            yield output
        raise EngineError("the device is lost")

    site = Site(ScriptedClient(script), encoder=oracle.encoder)
    *_, last = frames_of(site.request("POST", "/completion", json={"prompt": "hi", "stream": True}))
    assert last["error"]["message"] == "the device is lost"


def test_props_and_slots_describe_the_engine(site: Site, oracle: LLM) -> None:
    props = site.request("GET", "/props").json()
    settings = props["default_generation_settings"]
    assert settings["n_ctx"] == oracle.encoder.context_len
    assert settings["params"]["n_predict"] == -1
    assert (props["model_alias"], props["modalities"]["vision"]) == ("fake", False)
    assert props["chat_template"] == (oracle.encoder.chat_template or "")
    slots = site.request("GET", "/slots").json()
    assert len(slots) == props["total_slots"] > 0
    assert slots[0] == {"id": 0, "n_ctx": oracle.encoder.context_len, "is_processing": False}
    assert site.request("GET", "/slots?fail_on_no_slot=1").status_code == 200
    full = Site(BusyClient(), encoder=oracle.encoder)
    assert [slot["is_processing"] for slot in full.request("GET", "/slots").json()] == [True, True]
    assert full.request("GET", "/slots?fail_on_no_slot=1").status_code == 503
