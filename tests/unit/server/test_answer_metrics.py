"""`"metrics": true` in a body: the answer tells its own times, on every route, whole and streamed."""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from infer.finish_reason import FinishReason
from infer.frontend.llm import LLM
from infer.scheduling.request import DraftCounts, Request, StepOutput
from infer.server.protocol.timings import MAX_GAPS, AnswerTimes, percentile
from tests.support.wire import ScriptedClient, Wire, make_state, outputs_of, read_events

TALK = [{"role": "user", "content": "the river runs behind the house"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the river", "max_tokens": 5, "ignore_eos": True},
    "/v1/chat/completions": {"messages": TALK, "max_tokens": 5, "ignore_eos": True},
    "/v1/messages": {"messages": TALK, "max_tokens": 5},
    "/v1/responses": {"input": "the river", "max_output_tokens": 5, "ignore_eos": True},
}
NAMES = {
    "time_to_first_token_ms", "queue_time_ms", "generation_time_ms", "mean_itl_ms", "p99_itl_ms",
    "tokens_per_second", "cached_tokens",
}  # fmt: skip
paths = pytest.mark.parametrize("path", BODIES)


def check(metrics: dict[str, Any]) -> None:
    assert metrics.keys() == NAMES
    assert 0 <= metrics["time_to_first_token_ms"] <= metrics["generation_time_ms"]
    assert metrics["queue_time_ms"] >= 0 and metrics["tokens_per_second"] >= 0


@paths
@pytest.mark.parametrize("name", ["metrics", "include_metrics"])
def test_a_whole_answer_has_its_times_if_they_are_asked_for(wire: Wire, path: str, name: str) -> None:
    check(wire.ok(path, BODIES[path] | {name: True})["metrics"])
    assert "metrics" not in wire.ok(path, BODIES[path] | {name: False})
    assert "metrics" not in wire.ok(path, BODIES[path])
    assert wire.post(path, BODIES[path] | {name: "yes"}).status_code in (400, 422)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_last_chunk_of_a_stream_has_them_with_usage_or_without(wire: Wire, path: str) -> None:
    body = BODIES[path] | {"stream": True, "metrics": True}
    *frames, last = wire.frames(path, body)
    check(last["metrics"])
    assert last["choices"] == [] and "usage" not in last
    assert all("metrics" not in frame for frame in frames)
    last = wire.frames(path, body | {"stream_options": {"include_usage": True}})[-1]
    check(last["metrics"])
    assert last["usage"]["completion_tokens"] == 5
    assert "metrics" not in wire.frames(path, BODIES[path] | {"stream": True})[-1]


def test_named_events_end_with_them(wire: Wire) -> None:
    body = {"prompt": "the river", "max_tokens": 3, "metrics": True}
    check(read_events(wire.post("/v1/completions/stream", body))[-1][1]["metrics"])
    message = wire.post("/v1/messages", BODIES["/v1/messages"] | {"stream": True, "metrics": True})
    events = dict(read_events(message))
    check(events["message_delta"]["metrics"])
    response = wire.post("/v1/responses", BODIES["/v1/responses"] | {"stream": True, "metrics": True})
    name, last = read_events(response)[-1]
    assert name == "response.incomplete"
    check(last["response"]["metrics"])


def test_drafts_are_among_them(oracle: LLM) -> None:
    async def drafted(request: Request) -> AsyncGenerator[StepOutput, None]:
        made = outputs_of(request, [300, 301, 302])
        counts = DraftCounts(4, (0, 1, 1))
        for output in made[:-1]:
            yield output
        yield StepOutput(
            request.request_id, 0, (302,), finish_reason=FinishReason.LENGTH, drafts=counts, num_cached=1
        )

    wire = Wire(make_state(oracle.encoder, ScriptedClient(drafted)))
    metrics = wire.ok("/v1/completions", {"prompt": "a", "max_tokens": 3, "metrics": True})["metrics"]
    assert metrics["draft_acceptance_rate"] == 0.75
    assert metrics["speculative_decoding"]["num_accepted_draft_tokens"] == 3
    assert metrics["cached_tokens"] == 1


def output(*ids: int, index: int = 0, queue_s: float = 0.0) -> StepOutput:
    return StepOutput("r", index, ids, queue_s=queue_s)


def test_times_are_counted_per_token_and_per_gap() -> None:
    times = AnswerTimes(10.0)
    times.take(0, output(1, queue_s=0.5), 11.0)
    times.take(0, output(2), 11.1)
    times.take(0, output(3, 4, 5), 11.4)  # three tokens of one step
    times.take(0, output(), 19.0)  # an end without a token
    assert times.to_wire(5, 7) == {
        "time_to_first_token_ms": 1000.0,
        "queue_time_ms": 500.0,
        "generation_time_ms": 1400.0,
        "mean_itl_ms": 100.0,
        "p99_itl_ms": 300.0,
        "tokens_per_second": 3.571,
        "cached_tokens": 7,
    }


def test_sequences_are_told_apart_and_an_answer_of_one_token_has_no_gaps() -> None:
    times = AnswerTimes(0.0)
    for index in range(3):
        times.take(0, output(1, index=index), 1.0 + index)
    found = times.to_wire(3, 0)
    assert found["mean_itl_ms"] is None and found["p99_itl_ms"] is None
    assert found["time_to_first_token_ms"] == 1000.0 and found["generation_time_ms"] == 3000.0
    empty = AnswerTimes(0.0).to_wire(0, 0)
    assert empty["time_to_first_token_ms"] is None and empty["tokens_per_second"] is None


def test_what_is_kept_for_the_percentile_is_bounded() -> None:
    times = AnswerTimes(0.0)
    for number in range(MAX_GAPS + 100):
        times.take(0, output(1), float(number))
    assert len(times._gaps) == MAX_GAPS and times.to_wire(1, 0)["mean_itl_ms"] == 1000.0
    assert percentile(array("d", range(200)), 0.99) == 198.0
