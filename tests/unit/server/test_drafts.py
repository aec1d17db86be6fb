"""What clients see of speculative decoding: the same text, counts of drafts, and a way to go without."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from infer.client.client import InProcessClient
from infer.config.settings import EngineConfig
from infer.engine.build import build_engine
from infer.frontend.llm import LLM
from infer.frontend.open_model import open_model
from infer.server.metrics import ServerMetrics
from tests.support.app import Site
from tests.support.server_process import wait_until
from tests.support.wire import Wire, make_state
from tests.unit.server.conftest import KNOBS

DRAFTED: dict[str, Any] = {"speculative_method": "ngram", "adaptive_speculation": False}
PROMPT = "the cat sat on the mat and the cat sat on the mat and the cat sat"
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": PROMPT}],
    "max_tokens": 60,
    "temperature": 0,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def engine(checkpoint: str) -> Iterator[InProcessClient]:
    config = EngineConfig.from_knobs(model=checkpoint, **KNOBS, **DRAFTED)
    _, loaded = open_model(config, show_progress=False)
    made = InProcessClient(build_engine(config, loaded))
    yield made
    asyncio.run(made.close())


@pytest.fixture
def drafted(oracle: LLM, engine: InProcessClient) -> Wire:
    return Wire(make_state(oracle.encoder, engine))


def check(answer: dict[str, Any]) -> dict[str, Any]:
    """The counts of an answer, which agree with each other."""
    found: dict[str, Any] = answer["metrics"]["speculative_decoding"]
    details = answer["usage"]["completion_tokens_details"]
    num_kept, num_drafts = found["num_accepted_draft_tokens"], found["num_draft_tokens"]
    assert details["accepted_prediction_tokens"] == num_kept
    assert details["rejected_prediction_tokens"] == num_drafts - num_kept
    assert sum(found["acceptance_histogram"]) == found["num_spec_steps"] > 0
    assert found["mean_acceptance_length"] == 1 + num_kept / found["num_spec_steps"]
    assert found["draft_acceptance_rate"] == num_kept / num_drafts
    return found


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)], ids=["text", "chat"]
)
def test_an_answer_is_the_same_and_says_what_became_of_drafts(
    wire: Wire, drafted: Wire, path: str, body: dict[str, Any]
) -> None:
    plain, found = wire.ok(path, body), drafted.ok(path, body)
    assert found["choices"] == plain["choices"]
    assert "metrics" not in plain and "completion_tokens_details" not in plain["usage"]
    counts = check(found)
    frames = drafted.frames(path, body | {"stream": True, "stream_options": {"include_usage": True}})
    assert check(frames[-1]) == counts
    assert frames[-1]["choices"] == []


MESSAGE: dict[str, Any] = {"messages": CHAT["messages"], "max_tokens": 60, "temperature": 0}
OLLAMA: dict[str, Any] = {"model": "fake", "options": {"temperature": 0, "num_predict": 60}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", MESSAGE),
        ("/v1/responses", {"input": PROMPT, "max_output_tokens": 60, "temperature": 0}),
        ("/api/generate", {"prompt": PROMPT, **OLLAMA}),
        ("/api/chat", {"messages": CHAT["messages"], **OLLAMA}),
    ],
)
def test_other_routes_say_what_became_of_drafts(
    oracle: LLM, engine: InProcessClient, path: str, body: dict[str, Any]
) -> None:
    """One object, in the body of an answer and at the end of a stream."""
    site = Site(engine, encoder=oracle.encoder)
    whole = site.request("POST", path, json=body | {"stream": False}).json()
    counts = whole["metrics"]["speculative_decoding"]
    assert counts["num_draft_tokens"] >= counts["num_accepted_draft_tokens"] >= 0
    assert sum(counts["acceptance_histogram"]) == counts["num_spec_steps"] > 0
    lines = site.request("POST", path, json=body | {"stream": True}).text.splitlines()
    ends = [json.loads(line.removeprefix("data: ")) for line in lines if '"metrics"' in line]
    found = [end["response"] if path == "/v1/responses" else end for end in ends]
    assert [each["metrics"]["speculative_decoding"] for each in found] == [counts]
    without = body | {"stream": False, "num_speculative_tokens": 0}
    if path.startswith("/v1"):
        assert "metrics" not in site.request("POST", path, json=without).json()


def saved_s(engine: InProcessClient) -> float:
    """The seconds that drafts saved, after the last step is counted: its answers are sent before that."""
    wait_until(lambda: not engine.stats().num_running)
    return engine.stats().draft_saved_s


def test_the_time_saved_is_that_of_all_answers(oracle: LLM, engine: InProcessClient) -> None:
    site, before = Site(engine, encoder=oracle.encoder), saved_s(engine)
    saved = [
        site.request("POST", "/v1/completions", json=body).json()["metrics"]["speculative_decoding"]
        for body in (BODY, BODY | {"prompt": "one two one two one"})
    ]
    total = sum(each["seconds_saved"] for each in saved)
    assert saved_s(engine) - before == pytest.approx(total)
    assert total != 0


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)], ids=["text", "chat"]
)
def test_a_request_can_go_without(wire: Wire, drafted: Wire, path: str, body: dict[str, Any]) -> None:
    found = drafted.ok(path, body | {"num_speculative_tokens": 0})
    assert "metrics" not in found and "completion_tokens_details" not in found["usage"]
    assert found["choices"] == wire.ok(path, body)["choices"]
    short = drafted.ok(path, body | {"num_speculative_tokens": 1})
    assert len(check(short)["acceptance_histogram"]) <= 2
    error = drafted.refused(
        path, body | {"num_speculative_tokens": 17}, 422 if path == "/v1/completions" else 400
    )
    assert error["param"] == "num_speculative_tokens"


def test_other_routes_can_go_without(drafted: Wire, engine: InProcessClient) -> None:
    before = engine.stats().num_draft_tokens
    message = {"messages": CHAT["messages"], "max_tokens": 40, "num_speculative_tokens": 0}
    drafted.ok("/v1/messages", message)
    drafted.ok("/v1/responses", {"input": PROMPT, "max_output_tokens": 40, "num_speculative_tokens": 0})
    assert engine.stats().num_draft_tokens == before


def test_an_answer_that_ends_at_a_stop_string_has_its_counts(drafted: Wire) -> None:
    whole = drafted.ok("/v1/completions", BODY)
    text = whole["choices"][0]["text"]
    cut = drafted.ok("/v1/completions", BODY | {"stop": [text[-4:]]})
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert check(cut)["num_spec_steps"] <= check(whole)["num_spec_steps"]


def test_several_answers_are_counted_together(drafted: Wire) -> None:
    answer = drafted.ok("/v1/completions", BODY | {"prompt": [PROMPT, PROMPT]})
    assert "metrics" not in answer, "it is of one answer"
    assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] >= 0


def test_llama_cpps_timings_have_drafts(oracle: LLM, engine: InProcessClient) -> None:
    site = Site(engine, encoder=oracle.encoder)
    body = {"prompt": PROMPT, "n_predict": 40, "temperature": 0, "ignore_eos": True, "speculative.n_max": 4}
    timings = site.request("POST", "/completion", json=body).json()["timings"]
    assert 0 <= timings["draft_n_accepted"] <= timings["draft_n"] > 0
    plain = site.request("POST", "/completion", json=body | {"num_speculative_tokens": 0})
    assert "draft_n" not in plain.json()["timings"]
    assert "speculative.n_max" in plain.headers["x-infer-ignored"]


def test_metrics_have_what_the_engine_counted(drafted: Wire, engine: InProcessClient) -> None:
    drafted.ok("/v1/completions", BODY)
    metrics = ServerMetrics("vllm")
    metrics.add("m", engine)
    stats = engine.stats()
    rows = dict(line.rsplit(" ", 1) for line in metrics.text().decode().splitlines() if line[0] != "#")
    labels = '{engine="0",model_name="m"}'
    for name, count in {
        "spec_decode_num_drafts_total": stats.num_draft_windows,
        "spec_decode_num_draft_tokens_total": stats.num_draft_tokens,
        "spec_decode_num_accepted_tokens_total": stats.num_accepted_tokens,
        "spec_decode_seconds_saved": stats.draft_saved_s,
    }.items():
        assert float(rows[f"infer_{name}{labels}"]) == float(rows[f"vllm:{name}{labels}"]) == count
    assert stats.num_draft_tokens >= stats.num_draft_windows > 0
    by_position = [
        float(
            rows[
                f'infer_spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="{i}"}}'
            ]
        )
        for i in range(8)
    ]
    assert sum(by_position) == stats.num_accepted_tokens
    assert by_position == sorted(by_position, reverse=True)
