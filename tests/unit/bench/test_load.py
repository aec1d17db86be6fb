"""The client against a server whose latencies are known; see fake_server.py for the clock."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from infer.bench.load import LoadResult, run_workload
from infer.bench.metrics import Slo, summarise
from infer.bench.sse_client import Endpoint
from infer.bench.workloads import Arrival, Session, Turn, Workload, make_workload
from tests.unit.bench.fake_server import (
    HEAD,
    FakeServer,
    Script,
    Wire,
    frame,
    piece,
    steady,
    usage,
    with_server,
)


@pytest.mark.parametrize("module", ["infer.bench.load", "benchmarks.client_speed"])
def test_a_platform_without_uvloop_has_a_client(module: str) -> None:
    script = f"import sys; sys.modules['uvloop'] = None; import {module} as made; print(made.run_load)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert "<function run_load" in done.stdout, done.stderr


def requests(count: int, arrival: Arrival, *, tokens: int = 5, every: float = 0.0) -> Workload:
    sessions = tuple(
        Session(turns=(Turn(ids=(1, 2, 3), max_tokens=tokens),), start_s=number * every)
        for number in range(count)
    )
    return Workload(name="w", about="", arrival=arrival, sessions=sessions)


ONE_BY_ONE = Arrival(kind="closed", concurrency=1)


def run(script: Script, workload: Workload, **endpoint: Any) -> tuple[LoadResult, FakeServer]:
    async def work(server: FakeServer) -> tuple[LoadResult, FakeServer]:
        clock = asyncio.get_running_loop().time
        return await run_workload(Endpoint(url=server.url, **endpoint), workload, clock=clock), server

    return with_server(script, work)


@pytest.mark.parametrize(("ttft", "itl"), [(0.2, 0.05), (3.0, 0.004), (0.05, 0.5)])
def test_known_latencies_are_reported(ttft: float, itl: float) -> None:
    result, _ = run(steady(ttft, itl), requests(20, ONE_BY_ONE, tokens=11))
    figures = summarise(result.traces, seconds=result.seconds, slo=Slo())
    for percent in (50, 95, 99):
        assert figures[f"ttft_p{percent}_s"] == pytest.approx(ttft, rel=0.02)
        assert figures[f"itl_p{percent}_s"] == pytest.approx(itl, rel=0.02)
        assert figures[f"tpot_p{percent}_s"] == pytest.approx(itl, rel=0.02)
        assert figures[f"e2e_p{percent}_s"] == pytest.approx(ttft + 10 * itl, rel=0.02)
    assert figures["output_tokens_per_s"] == pytest.approx(11 / (ttft + 10 * itl), rel=0.02)
    assert figures["num_output_tokens"] == 220
    assert figures["num_errors"] == 0


def test_tokens_are_counted_by_usage_and_not_by_frames() -> None:
    result, _ = run(steady(0.1, 0.2, per_frame=2), requests(1, ONE_BY_ONE, tokens=8))
    (trace,) = result.traces
    assert (len(trace.chunks), trace.num_output, trace.num_prompt) == (4, 8, 3)
    assert trace.tpot == pytest.approx(0.6 / 7)


def test_frames_are_counted_where_there_is_no_usage() -> None:
    result, server = run(steady(0.1, 0.1), requests(1, ONE_BY_ONE), has_usage=False)
    assert "stream_options" not in server.bodies[0]
    assert result.traces[0].num_output == 5
    assert result.counts_frames


def test_a_closed_loop_keeps_so_many_at_once() -> None:
    result, server = run(steady(0.1, 0.1), requests(10, Arrival(kind="closed", concurrency=3)))
    assert server.peak_running == 3
    assert server.num_connections == 3  # each client keeps its own
    assert result.seconds == pytest.approx(4 * 0.5)


def test_an_open_loop_does_not_wait_for_answers() -> None:
    result, server = run(steady(5.0, 0.1), requests(8, Arrival(kind="open", rate=4.0), every=0.25))
    starts = [when - server.asked_at[0] for when in server.asked_at]
    assert starts == pytest.approx([0.25 * number for number in range(8)], abs=1e-6)
    assert server.peak_running == 8
    assert [trace.ttft for trace in result.traces] == pytest.approx([5.0] * 8)
    assert result.lag_s == pytest.approx(0.0, abs=1e-6)


def test_an_open_loop_may_have_a_limit() -> None:
    result, server = run(
        steady(1.0, 0.0), requests(6, Arrival(kind="open", rate=4.0, concurrency=2), every=0.25)
    )
    assert server.peak_running == 2
    starts = [when - server.asked_at[0] for when in server.asked_at]
    assert starts == pytest.approx([0.0, 0.25, 1.0, 1.25, 2.0, 2.25], abs=1e-6)
    assert [trace.ttft for trace in result.traces] == pytest.approx([1.0] * 6)  # from when it was sent


def test_a_chat_starts_with_its_first_token_and_not_with_its_role() -> None:
    chat = Workload(
        name="c",
        about="",
        arrival=ONE_BY_ONE,
        is_chat=True,
        sessions=(Session(turns=(Turn(text="hi", max_tokens=3),)),),
    )
    result, server = run(steady(1.0, 0.1, is_chat=True), chat)
    assert result.traces[0].ttft == pytest.approx(1.0)
    assert len(result.traces[0].chunks) == 3
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "hi"}]


def test_a_session_sends_its_whole_history() -> None:
    turns = tuple(Turn(text=text, max_tokens=2) for text in ("a", "b", "c"))
    chat = Workload(
        name="c", about="", arrival=ONE_BY_ONE, is_chat=True, sessions=(Session(turns=turns, system="s"),)
    )
    result, server = run(steady(0.1, 0.1, is_chat=True), chat)
    assert [(trace.session, trace.turn) for trace in result.traces] == [(0, 0), (0, 1), (0, 2)]
    said = [(message["role"], message["content"]) for message in server.bodies[2]["messages"]]
    assert said == [
        ("system", "s"),
        ("user", "a"),
        ("assistant", "w w "),
        ("user", "b"),
        ("assistant", "w w "),
        ("user", "c"),
    ]


def test_every_serving_workload_runs_to_its_end() -> None:
    for name in ("baseline", "chunked_prefill", "w3_shared_prefix", "agent_session", "chat_serving"):
        workload = make_workload(name)
        result, server = run(steady(0.1, 0.001, is_chat=workload.is_chat), workload)
        assert len(result.traces) == workload.num_requests == len(server.bodies)
        assert sum(trace.num_output for trace in result.traces) == workload.num_output_tokens


# -- what servers do wrong ----------------------------------------------------------------------------


async def refuse(wire: Wire, body: Mapping[str, Any]) -> None:
    payload = json.dumps({"error": {"message": "the queue is full", "type": "x"}}).encode()
    wire.raw(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: %d\r\n\r\n" % len(payload) + payload)


async def hang_up_at_once(wire: Wire, body: Mapping[str, Any]) -> None:
    wire.hang_up()


async def hang_up_half_way(wire: Wire, body: Mapping[str, Any]) -> None:
    wire.raw(HEAD)
    wire.send(piece())
    wire.send(piece())
    await asyncio.sleep(0.1)
    wire.hang_up()


async def garbage_event(wire: Wire, body: Mapping[str, Any]) -> None:
    wire.raw(HEAD)
    wire.send(piece())
    wire.send(b'data: {"choices": [{"te\n\n')
    wire.end()


async def wrong_shape(wire: Wire, body: Mapping[str, Any]) -> None:
    wire.raw(HEAD)
    wire.send(frame({"choices": [{"index": 0}]}))
    wire.end()


async def not_an_object(wire: Wire, body: Mapping[str, Any]) -> None:
    wire.raw(HEAD)
    wire.send(frame([1, 2]))
    wire.end()


async def error_event(wire: Wire, body: Mapping[str, Any]) -> None:
    wire.raw(HEAD)
    wire.send(piece())
    wire.send(frame({"error": {"message": "out of memory", "code": 500}}))
    wire.send(b"data: [DONE]\n\n")
    wire.end()


async def ends_early(wire: Wire, body: Mapping[str, Any]) -> None:
    wire.raw(HEAD)
    wire.send(piece())
    wire.end()


async def no_tokens(wire: Wire, body: Mapping[str, Any]) -> None:
    wire.raw(HEAD)
    wire.send(b"data: [DONE]\n\n")
    wire.end()


async def not_http(wire: Wire, body: Mapping[str, Any]) -> None:
    wire.raw(b"\x00\x01garbage\r\n\r\n")


async def never_ends(wire: Wire, body: Mapping[str, Any]) -> None:
    wire.raw(HEAD)
    wire.send(piece())
    await asyncio.sleep(10_000)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (refuse, "HTTP 503: the queue is full"),
        (hang_up_at_once, "hung up after 0 chunks"),
        (hang_up_half_way, "hung up after 2 chunks"),
        (garbage_event, "malformed event"),
        (wrong_shape, "malformed event: KeyError"),
        (not_an_object, "malformed event"),
        (error_event, "error event: out of memory"),
        (ends_early, "the stream ended early, after 1 chunks"),
        (no_tokens, "the stream held no tokens"),
        (not_http, "malformed HTTP"),
        (never_ends, "no end after 30 s"),
    ],
)
def test_a_broken_answer_is_counted_and_survived(script: Script, message: str) -> None:
    """The first of three requests goes wrong; the other two are measured as if nothing had happened."""
    good = steady(0.5, 0.1)
    calls = iter(range(100))

    async def first_breaks(wire: Wire, body: Mapping[str, Any]) -> None:
        await (script if next(calls) == 0 else good)(wire, body)

    result, _ = run(first_breaks, requests(3, ONE_BY_ONE), timeout_s=30.0)
    broken, *rest = result.traces
    assert broken.error is not None and message in broken.error
    assert not broken.is_ok
    assert [trace.error for trace in rest] == [None, None]
    assert [trace.ttft for trace in rest] == pytest.approx([0.5, 0.5])


def test_no_server_is_an_error_of_each_request() -> None:
    async def work(server: FakeServer) -> LoadResult:
        clock = asyncio.get_running_loop().time
        return await run_workload(Endpoint(url=server.url + "x"), requests(3, ONE_BY_ONE), clock=clock)

    result = with_server(refuse, work)
    assert [(trace.error or "")[:15] for trace in result.traces] == ["cannot connect:"] * 3


def test_an_idle_connection_that_the_server_closed_is_replaced() -> None:
    async def once(wire: Wire, body: Mapping[str, Any]) -> None:
        await steady(0.1, 0.1)(wire, body)
        wire.writer.close()

    result, server = run(once, requests(3, ONE_BY_ONE))
    assert [trace.error for trace in result.traces] == [None] * 3
    assert server.num_connections == 3


def test_the_form_of_a_stream_does_not_matter() -> None:
    """Comments, event names, carriage returns, pieces cut anywhere, spaces in the JSON, usage with each."""
    frames = b": ping\n\n" + piece("a") + b"event: token\n" + piece("b") + piece('say "usage":{ or "error"')
    frames += frame(
        {"choices": [{"text": "c", "finish_reason": "stop"}], "usage": {"prompt_tokens": 3, "x": 1}}
    )
    frames = (frames + usage(3, 4, cached=2) + b"data: [DONE]\n\n").replace(b"\n", b"\r\n")

    async def dribble(wire: Wire, body: Mapping[str, Any]) -> None:
        wire.raw(HEAD)
        for at in range(0, len(frames), 7):
            wire.send(frames[at : at + 7])
            await asyncio.sleep(0.001)
        wire.end()

    (trace,) = run(dribble, requests(1, ONE_BY_ONE))[0].traces
    assert trace.error is None
    assert (len(trace.chunks), trace.num_output, trace.num_prompt, trace.num_cached) == (4, 4, 3, 2)


def test_a_server_that_does_not_stream_has_one_chunk() -> None:
    body = {"choices": [{"text": "hello"}], "usage": {"prompt_tokens": 3, "completion_tokens": 7}}
    payload = json.dumps(body).encode()

    async def whole(wire: Wire, _: Mapping[str, Any]) -> None:
        await asyncio.sleep(2)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        wire.raw(head % len(payload) + payload)

    (trace,) = run(whole, requests(1, ONE_BY_ONE))[0].traces
    assert (trace.error, trace.num_output, len(trace.chunks)) == (None, 7, 1)
    assert trace.ttft == pytest.approx(2.0)


async def by_hand(path: str, body: Mapping[str, Any]) -> tuple[float, list[float], int]:
    """A client that shares no line with ours: whole lines, all JSON; TTFT, gaps, tokens."""
    reader, writer = await asyncio.open_unix_connection(path)
    payload = json.dumps(body).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(payload) + payload)
    now = asyncio.get_running_loop().time
    asked, times, tokens = now(), [], 0
    while (line := await reader.readline()) != b"data: [DONE]\n":
        if line.startswith(b"data: "):
            event = json.loads(line[6:])
            times += [now()] if event["choices"] else []
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    writer.transport.abort()
    return times[0] - asked, [b - a for a, b in zip(times, times[1:], strict=False)], tokens


def test_an_independent_client_agrees() -> None:
    """On the same irregular server, in turns: every figure within five per cent, the counts exactly."""

    async def uneven(wire: Wire, body: Mapping[str, Any]) -> None:
        wire.raw(HEAD)
        for number in range(body["max_tokens"]):
            await asyncio.sleep(0.7 if number == 0 else 0.01 * (1 + number % 7))
            wire.send(piece("x", "length" if number + 1 == body["max_tokens"] else None))
        wire.send(usage(3, body["max_tokens"]))
        wire.send(b"data: [DONE]\n\n")
        wire.end()

    async def work(server: FakeServer) -> None:
        clock = asyncio.get_running_loop().time
        ours = await run_workload(Endpoint(url=server.url), requests(5, ONE_BY_ONE, tokens=30), clock=clock)
        theirs = [await by_hand(server.url.removeprefix("unix://"), body) for body in list(server.bodies)]
        for trace, (ttft, gaps, tokens) in zip(ours.traces, theirs, strict=True):
            assert trace.num_output == tokens
            assert trace.ttft == pytest.approx(ttft, rel=0.05)
            assert trace.gaps() == pytest.approx(gaps, rel=0.05)

    with_server(uneven, work)
