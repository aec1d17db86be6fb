"""The serving benchmarks of other projects: their requests, and their ways of reading the stream.

Each reader below treats the bytes as its client does, where it counts: what it splits on, what it skips,
what it indexes without looking. A client that would crash, or count wrongly, fails here.

    vllm bench serve       events split on a blank line; the first with choices is the first token
    sglang bench_serving   every line is JSON after "data: "; choices[0] must exist in all of them
    llmperf                cuts six bytes off every line; counts events as tokens
    guidellm               wants usage on every event, and looks for errors inside the stream
    aiperf                 accepts events by their `object`
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from infer.sampling.params import SamplingParams
from scripts.make_checkpoint import make_checkpoint
from tests.support.live_server import LiveServer, serve_model

PROMPT = "Once there was a small engine"
NUM_TOKENS = 12
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@dataclass
class Reading:
    """What a benchmark takes away from one stream."""

    text: str = ""
    num_tokens: int | None = None
    num_events: int = 0  # that it would time
    usages: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory: Path = tmp_path_factory.mktemp("tiny-llama")
    make_checkpoint("llama", directory)
    with serve_model(directory) as server:
        yield server


@pytest.fixture(scope="module")
def continued(live: LiveServer) -> str:
    return live.oracle.generate(PROMPT, PARAMS)[0].text


@pytest.fixture(scope="module")
def answered(live: LiveServer) -> str:
    return live.oracle.chat([{"role": "user", "content": PROMPT}], PARAMS)[0].text


def post(live: LiveServer, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    answer = httpx.post(f"{live.url}{path}", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return answer


# -- vllm bench serve ---------------------------------------------------------------------------------


def read_as_vllm(content: bytes) -> Reading:
    reading = Reading()
    for message in content.decode().split("\n\n"):
        message = message.strip()
        if not message or message.startswith(":"):
            continue
        data = message.removeprefix("data: ")
        if data == "[DONE]":
            continue
        event = json.loads(data)
        if choices := event.get("choices"):
            reading.num_events += 1
            piece = choices[0]["delta"].get("content") if "delta" in choices[0] else choices[0].get("text")
            reading.text += piece or ""
        elif usage := event.get("usage"):
            reading.num_tokens = usage["completion_tokens"]
    return reading


def test_vllm_bench_reads_completions(live: LiveServer, continued: str) -> None:
    body = {
        "model": live.model,
        "prompt": PROMPT,
        "repetition_penalty": 1.0,
        "temperature": 0.0,
        "max_tokens": NUM_TOKENS,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    answer = post(live, "/v1/completions", body, **{"x-request-id": "benchmark-serving-7"})
    assert answer.headers["x-request-id"] == "benchmark-serving-7"
    reading = read_as_vllm(answer.content)
    assert (reading.text, reading.num_tokens, reading.num_events) == (continued, NUM_TOKENS, NUM_TOKENS)


def test_vllm_bench_reads_chats(live: LiveServer, answered: str) -> None:
    body = {
        "model": live.model,
        "messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}],
        "temperature": 0.0,
        "max_completion_tokens": NUM_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    reading = read_as_vllm(post(live, "/v1/chat/completions", body).content)
    assert (reading.text, reading.num_tokens) == (answered, NUM_TOKENS)
    assert NUM_TOKENS <= reading.num_events <= NUM_TOKENS + 2  # the role, and perhaps an end of its own


# -- sglang bench_serving -----------------------------------------------------------------------------


def read_as_sglang(content: bytes) -> Reading:
    reading = Reading()
    for line in content.split(b"\n"):
        line = line.strip()
        if not line:
            continue
        data = line.decode().removeprefix("data: ")
        if data == "[DONE]":
            continue
        event = json.loads(data)
        choice = event["choices"][0]
        piece = choice["delta"].get("content") if "delta" in choice else choice["text"]
        reading.num_events += bool(piece)
        reading.text += piece or ""
        reading.usages += [event["usage"]] if event.get("usage") else []
    return reading


def test_sglang_bench_reads_completions(live: LiveServer, continued: str) -> None:
    body = {
        "model": live.model,
        "prompt": PROMPT,
        "temperature": 0.0,
        "best_of": 1,
        "max_tokens": NUM_TOKENS,
        "stream": True,
        "ignore_eos": True,
    }
    reading = read_as_sglang(post(live, "/v1/completions", body).content)
    assert reading.text == continued
    assert reading.usages == []  # not asked for


def test_sglang_bench_reads_chats(live: LiveServer, answered: str) -> None:
    body = {
        "model": live.model,
        "messages": [{"role": "user", "content": PROMPT}],
        "temperature": 0.0,
        "max_completion_tokens": NUM_TOKENS,
        "stream": True,
        "ignore_eos": True,
    }
    assert read_as_sglang(post(live, "/v1/chat/completions", body).content).text == answered


# -- llmperf ------------------------------------------------------------------------------------------


def read_as_llmperf(content: bytes) -> Reading:
    reading = Reading(num_tokens=0)
    for line in content.splitlines():
        line = line.strip()
        if not line:
            continue
        line = line[len("data: ") :]
        if line == b"[DONE]":
            continue
        assert reading.num_tokens is not None
        reading.num_tokens += 1
        event = json.loads(line)
        assert "error" not in event
        reading.text += event["choices"][0]["delta"].get("content") or ""
    return reading


def test_llmperf_counts_one_event_per_token(live: LiveServer, answered: str) -> None:
    body = {
        "model": live.model,
        "messages": [{"role": "system", "content": ""}, {"role": "user", "content": PROMPT}],
        "stream": True,
        "max_tokens": NUM_TOKENS,
        "temperature": 0.0,
    }
    reading = read_as_llmperf(post(live, "/v1/chat/completions", body | {"ignore_eos": True}).content)
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": PROMPT}]
    assert reading.text == live.oracle.chat(messages, PARAMS)[0].text
    assert reading.num_tokens is not None
    assert NUM_TOKENS <= reading.num_tokens <= NUM_TOKENS + 2


# -- guidellm -----------------------------------------------------------------------------------------


def read_as_guidellm(content: bytes) -> Reading:
    reading = Reading()
    for line in content.decode().splitlines():
        if not line.startswith("data:"):
            continue
        data = line[len("data:") :].strip()
        if data == "[DONE]":
            break
        event = json.loads(data)
        assert "error" not in event
        if event.get("usage"):
            reading.usages.append(event["usage"])
        for choice in event.get("choices", []):
            reading.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return reading


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm_sees_usage_grow(live: LiveServer, continued: str, answered: str, path: str) -> None:
    assert httpx.get(f"{live.url}/health").status_code == 200
    assert [card["id"] for card in httpx.get(f"{live.base_url}/models").json()["data"]] == [live.model]
    is_chat = path.startswith("/v1/chat")
    question: dict[str, Any] = (
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}],
            "max_completion_tokens": NUM_TOKENS,
        }
        if is_chat
        else {"prompt": PROMPT, "max_tokens": NUM_TOKENS}
    )
    body = {
        "model": live.model,
        **question,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "ignore_eos": True,
        "stop": None,
    }
    reading = read_as_guidellm(post(live, path, body).content)
    assert reading.text == (answered if is_chat else continued)
    counts = [usage["completion_tokens"] for usage in reading.usages]
    assert counts == sorted(counts)
    assert set(range(1, NUM_TOKENS + 1)) <= set(counts)
    assert counts[-1] == NUM_TOKENS
    assert reading.usages[-1]["prompt_tokens"] > 0


# -- aiperf -------------------------------------------------------------------------------------------

OBJECTS = {"chat.completion", "chat.completion.chunk", "completion", "text_completion"}


def read_as_aiperf(content: bytes) -> Reading:
    reading = Reading()
    for packet in content.decode().split("\n\n"):
        for line in packet.splitlines():
            name, _, value = line.partition(":")
            value = value.strip()
            if name != "data" or value == "[DONE]":
                continue
            event = json.loads(value)
            assert event["object"] in OBJECTS
            if event["choices"]:
                choice = event["choices"][0]
                reading.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return reading


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_aiperf_knows_every_object(live: LiveServer, continued: str, answered: str, path: str) -> None:
    is_chat = path.startswith("/v1/chat")
    question: dict[str, Any] = (
        {"messages": [{"role": "user", "content": PROMPT}], "max_completion_tokens": NUM_TOKENS}
        if is_chat
        else {"prompt": PROMPT, "max_tokens": NUM_TOKENS}
    )
    extra = {"ignore_eos": True, "min_tokens": NUM_TOKENS, "temperature": 0.0}
    body = {"model": live.model, "stream": True, **question, **extra}
    reading = read_as_aiperf(post(live, path, body).content)
    assert reading.text == (answered if is_chat else continued)
