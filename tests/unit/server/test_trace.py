"""A request that asks for a trace is told what each of its stages took; others are told nothing."""

from __future__ import annotations

import re

import pytest

from infer.bench.sse_client import Endpoint
from infer.bench.trace import FIRST_TOKEN, STAGES, bench_trace
from infer.client.client import InProcessClient
from infer.frontend.llm import LLM
from infer.server.app import build_app
from tests.support.live_server import serve
from tests.support.wire import Wire, make_state

TOLD = [stage for stage in STAGES if stage not in ("connect", "network")]
ASKS = {"x-infer-trace": "1"}


@pytest.fixture
def wire(oracle: LLM, client: InProcessClient) -> Wire:
    """The routes inside the whole application."""
    made = Wire(make_state(oracle.encoder, client))
    made.app = build_app(made.state)
    return made


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a b"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_stages_are_told_in_order(wire: Wire, path: str, body: dict[str, object], stream: bool) -> None:
    answer = wire.request("POST", path, json={**body, "max_tokens": 2, "stream": stream}, headers=ASKS)
    assert answer.status_code == 200
    stages = re.findall(r"(\w+);dur=([0-9.]+)", answer.headers["server-timing"])
    assert [name for name, _ in stages] == TOLD
    assert all(float(ms) >= 0 for _, ms in stages)


@pytest.mark.parametrize("inputs", ["a b", ["a b", "c", "d e f"]])
def test_an_embedding_tells_the_same_stages(wire: Wire, inputs: object) -> None:
    answer = wire.request("POST", "/v1/embeddings", json={"input": inputs}, headers=ASKS)
    assert answer.status_code == 200
    stages = re.findall(r"(\w+);dur=(-?[0-9.]+)", answer.headers["server-timing"])
    assert [name for name, _ in stages] == TOLD
    assert all(float(ms) >= 0 for _, ms in stages)


def test_several_prompts_tell_each_stage_once(wire: Wire) -> None:
    body = {"prompt": ["a", "b c"], "max_tokens": 2}
    answer = wire.request("POST", "/v1/completions", json=body, headers=ASKS)
    stages = re.findall(r"(\w+);dur=(-?[0-9.]+)", answer.headers["server-timing"])
    assert [name for name, _ in stages] == TOLD
    assert all(float(ms) >= 0 for _, ms in stages)


def test_nothing_is_told_unasked(wire: Wire) -> None:
    assert "server-timing" not in wire.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).headers


def test_a_refusal_tells_the_stages_it_reached(wire: Wire) -> None:
    answer = wire.request("POST", "/v1/completions", json={"prompt": []}, headers=ASKS)
    assert answer.status_code == 422
    assert re.findall(r"(\w+);dur", answer.headers["server-timing"]) == ["receive", "parse", "send"]


def test_the_command_prints_every_stage(oracle: LLM, client: InProcessClient) -> None:
    with serve(build_app(make_state(oracle.encoder, client))) as url:
        table = bench_trace(Endpoint(url=url), prompt_len=5, num_warm=2)
    head, *rows = table.splitlines()
    assert head.split() == ["milliseconds", "cold", "warm", "p50", "warm", "max"]
    assert [row.split("  ")[0].strip() for row in rows] == [*STAGES, FIRST_TOKEN]
    parts = [sum(float(row.split()[-3]) for row in rows[:-1]), float(rows[-1].split()[-3])]
    assert parts[0] == pytest.approx(parts[1], abs=0.1)  # the stages are the whole
