"""Streams that break, clients that leave, readers that stall: no work is done in vain."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from infer.client.client import InProcessClient
from infer.errors import EngineStopped, QueueFull, RequestError
from infer.finish_reason import FinishReason
from infer.frontend.llm import LLM
from infer.scheduling.request import Request, StepOutput
from infer.server.protocol import stream as stream_module
from infer.server.protocol.stream import EventStream
from tests.support.wire import ScriptedClient, Wire, make_state, outputs_of, read_events, read_frames

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    PATH: {"prompt": "x", "max_tokens": 50},
    CHAT: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 50},
}


def scripted(oracle: LLM, script: Any, **knobs: Any) -> tuple[Wire, ScriptedClient]:
    client = ScriptedClient(script)
    return Wire(make_state(oracle.encoder, client, **knobs)), client


async def fails_after_two(request: Request) -> AsyncGenerator[StepOutput, None]:
    for output in outputs_of(request, [300, 301], None):
        yield output
    raise EngineStopped("the engine died")


async def never(request: Request) -> AsyncGenerator[StepOutput, None]:
    await asyncio.Event().wait()
    yield  # type: ignore[misc]


async def two_then_silence(request: Request) -> AsyncGenerator[StepOutput, None]:
    for output in outputs_of(request, [300, 301], None):
        yield output
    await asyncio.Event().wait()


async def endless(request: Request) -> AsyncGenerator[StepOutput, None]:
    while True:
        yield outputs_of(request, [300], None)[0]
        await asyncio.sleep(0)


@pytest.mark.parametrize("path", [PATH, CHAT])
def test_a_failure_in_mid_stream_is_an_error_frame_and_the_end(oracle: LLM, path: str) -> None:
    wire, client = scripted(oracle, fails_after_two)
    frames = read_frames(wire.post(path, BODIES[path] | {"stream": True}))
    error = frames[-1]["error"]
    assert (error["message"], error["code"]) == ("the engine died", 503)
    assert len(frames) == 3 + (path == CHAT)
    assert len(client.closed) == 1


def late(error: Exception | None = None) -> Callable[[Request], AsyncGenerator[StepOutput, None]]:
    """A script whose first token, or error, takes a tenth of a second."""

    async def script(request: Request) -> AsyncGenerator[StepOutput, None]:
        await asyncio.sleep(0.1)
        if error is not None:
            raise error
        for output in outputs_of(request, [300, 301], "length"):
            yield output

    return script


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("BEGIN_S", 0.01), ("PING_S", 0.03), ("TAKEN_POLL_S", 0.01)):
        monkeypatch.setattr(stream_module, name, seconds)


PINGS = {
    PATH: ": ping",
    f"{PATH}/stream": ": ping",
    CHAT: ": ping",
    "/v1/responses": ": ping",
    "/v1/messages": 'event: ping\ndata: {"type":"ping"}',
}


@pytest.mark.parametrize("path", PINGS)
def test_a_stream_whose_first_token_is_late_begins_with_signs_of_life(
    oracle: LLM, hurried: None, path: str
) -> None:
    body = BODIES.get(path.removesuffix("/stream"), BODIES[CHAT]) | {"stream": True}
    if path == "/v1/responses":
        body = {"input": "x", "stream": True}
    wire, client = scripted(oracle, late())
    response = wire.post(path, body)
    assert response.status_code == 200
    blocks = response.text.split("\n\n")
    num_pings = blocks.index(next(block for block in blocks if block != PINGS[path]))
    assert 2 <= num_pings <= 5
    assert len(client.closed) == 1


@pytest.mark.parametrize("path", [PATH, CHAT])
def test_an_error_after_the_signs_of_life_is_a_frame(oracle: LLM, hurried: None, path: str) -> None:
    wire, client = scripted(oracle, late(EngineStopped("the engine died")))
    response = wire.post(path, BODIES[path] | {"stream": True})
    assert response.status_code == 200
    error, done = [block for block in response.text.split("\n\n") if block not in ("", ": ping")]
    assert json.loads(error.removeprefix("data: "))["error"]["message"] == "the engine died"
    assert done == "data: [DONE]"
    assert len(client.closed) == 1


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/responses", {"input": "x"}, "text.format"),
        ("/v1/messages", BODIES[CHAT], "output_config.format"),
    ],
)
def test_an_error_in_a_stream_names_fields_as_they_were_sent(
    oracle: LLM, hurried: None, path: str, body: dict[str, Any], param: str
) -> None:
    wire, _ = scripted(oracle, late(RequestError.about("response_format", "cannot be enforced")))
    text = wire.post(path, body | {"stream": True}).text
    told = json.loads(text.rpartition("data: ")[2])["error"]
    assert (told["param"], told["message"]) == (param, f"{param} cannot be enforced")


def test_a_stream_does_not_begin_before_the_engine_has_taken_its_request(oracle: LLM, hurried: None) -> None:
    wire, client = scripted(oracle, late(QueueFull("too many")))
    client.is_taken = False
    response = wire.post(CHAT, BODIES[CHAT] | {"stream": True})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"


def test_an_answer_that_is_not_streamed_has_no_signs_of_life(oracle: LLM, hurried: None) -> None:
    wire, _ = scripted(oracle, late(EngineStopped("the engine died")))
    assert wire.post(CHAT, BODIES[CHAT]).status_code == 503


def test_a_failure_among_named_events_is_the_last_event(oracle: LLM) -> None:
    wire, _ = scripted(oracle, fails_after_two)
    events = read_events(wire.post(PATH + "/stream", BODIES[PATH]))
    assert [name for name, _ in events] == ["token", "token", "error"]
    assert events[-1][1]["error"]["code"] == 503


def test_an_unforeseen_failure_in_mid_stream_tells_nothing(oracle: LLM) -> None:
    async def script(request: Request) -> AsyncGenerator[StepOutput, None]:
        yield outputs_of(request, [300], None)[0]
        raise KeyError("/secret/place/of/things")

    wire, _ = scripted(oracle, script)
    frames = read_frames(wire.post(PATH, BODIES[PATH] | {"stream": True}))
    assert "secret" not in json.dumps(frames)
    assert frames[-1]["error"]["code"] == 500


@pytest.mark.parametrize("finish_reason", ["error", "abort"])
def test_an_output_that_failed_is_no_answer(oracle: LLM, finish_reason: str) -> None:
    async def script(request: Request) -> AsyncGenerator[StepOutput, None]:
        for output in outputs_of(request, [300, 301], finish_reason):
            yield output

    wire, _ = scripted(oracle, script)
    wire.refused(PATH, BODIES[PATH], 500 if finish_reason == "error" else 503)
    frames = read_frames(wire.post(PATH, BODIES[PATH] | {"stream": True}))
    assert "error" in frames[-1]


@pytest.mark.parametrize("path", [PATH, CHAT])
def test_a_request_out_of_time_gets_a_504(oracle: LLM, path: str) -> None:
    wire, client = scripted(oracle, never)
    for stream in (False, True):
        wire.refused(path, BODIES[path] | {"timeout": 0.02, "stream": stream}, 504)
    assert len(client.closed) == 2


def test_the_operators_time_limit_holds_without_the_clients(oracle: LLM) -> None:
    wire, _ = scripted(oracle, never, request_timeout=0.02)
    assert "0.02 s" in wire.refused(PATH, BODIES[PATH], 504)["message"]


def test_time_running_out_in_mid_stream_is_an_error_frame(oracle: LLM) -> None:
    wire, client = scripted(oracle, two_then_silence)
    body = BODIES[PATH] | {"timeout": 0.05}
    assert read_frames(wire.post(PATH, body | {"stream": True}))[-1]["error"]["code"] == 504
    assert read_events(wire.post(PATH + "/stream", body))[-1][0] == "error"
    assert len(client.closed) == 2


def test_several_tokens_of_one_step_are_several_chunks(oracle: LLM) -> None:
    async def script(request: Request) -> AsyncGenerator[StepOutput, None]:
        yield StepOutput(request_id=request.request_id, index=0, token_ids=(300, 301, 302))
        yield StepOutput(
            request_id=request.request_id,
            index=0,
            token_ids=(303, 304),
            finish_reason=FinishReason.STOP,
            stop_reason=304,
        )

    wire, _ = scripted(oracle, script)
    events = read_events(wire.post(PATH + "/stream", BODIES[PATH]))
    assert [event["id"] for name, event in events if name == "token"] == [300, 301, 302, 303, 304]
    assert events[-1][1]["choices"][0] == {"index": 0, "finish_reason": "stop", "stop_reason": 304}


def test_one_refused_prompt_ends_the_others(oracle: LLM) -> None:
    async def script(request: Request) -> AsyncGenerator[StepOutput, None]:
        if request.request_id.endswith("-2"):
            raise QueueFull("full")
        await asyncio.Event().wait()
        yield  # type: ignore[misc]

    wire, client = scripted(oracle, script)
    for stream in (False, True):
        wire.refused(PATH, {"prompt": ["a", "b", "c", "d"], "stream": stream}, 503)
    assert len(client.closed) == 8


def test_a_stop_string_tells_the_engine_to_stop(oracle: LLM) -> None:
    wire, client = scripted(oracle, endless)
    stop = oracle.tokenizer.token_text(300)
    answer = wire.ok(PATH, {"prompt": "x", "max_tokens": 50, "stop": stop})
    assert answer["choices"][0]["text"] == ""
    assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["stop_reason"]) == ("stop", stop)
    assert client.aborted == [(client.requests[0].request_id, 0)]


# -- clients that leave ---------------------------------------------------------------------------


def make_scope(path: str, content: bytes) -> dict[str, Any]:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": headers,
        "client": ("test", 1),
        "server": ("test", 80),
    }


def serve_until_gone(wire: Wire, path: str, content: bytes, *, is_gone_at_once: bool) -> None:
    """Serve a client who leaves at once, or with the first frame; `send` never waits, as for the dead."""
    messages = iter([{"type": "http.request", "body": content, "more_body": False}])

    async def main() -> None:
        gone = asyncio.Event()
        if is_gone_at_once:
            gone.set()

        async def receive() -> Any:
            if (message := next(messages, None)) is not None:
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            gone.set()

        async with asyncio.timeout(10):
            await wire.app(make_scope(path, content), receive, send)

    asyncio.run(main())


async def leave(wire: Wire, path: str, body: Any, is_time: Callable[[list[Any]], bool]) -> list[Any]:
    """Send a body, then hang up as soon as `is_time` says so of what was received; returns that."""
    sent: list[Any] = []
    gone = asyncio.Event()
    content = json.dumps(body).encode()
    bodies = iter([{"type": "http.request", "body": content, "more_body": False}])

    async def receive() -> Any:
        if (message := next(bodies, None)) is not None:
            return message
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    async def hang_up() -> None:
        while not is_time(sent):
            await asyncio.sleep(0.001)
        gone.set()

    scope = make_scope(path, content)
    async with asyncio.timeout(10):
        await asyncio.gather(wire.app(scope, receive, send), hang_up())
    return sent


@pytest.mark.parametrize("path", [PATH, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_leaving_while_waiting_ends_the_request(oracle: LLM, path: str, stream: bool) -> None:
    wire, client = scripted(oracle, never)
    body = BODIES[path] | {"stream": stream}
    asyncio.run(leave(wire, path, body, lambda sent: bool(client.requests)))
    assert client.closed == [request.request_id for request in client.requests]


@pytest.mark.parametrize("path", [PATH, CHAT, PATH + "/stream"])
def test_leaving_in_mid_stream_ends_the_request(oracle: LLM, path: str) -> None:
    wire, client = scripted(oracle, endless)
    body = BODIES[path.removesuffix("/stream")] | {"stream": True}
    sent = asyncio.run(leave(wire, path, body, lambda sent: len(sent) > 5))
    assert len(sent) > 5
    assert client.closed == [client.requests[0].request_id]


def test_leaving_a_batch_ends_every_prompt(oracle: LLM) -> None:
    wire, client = scripted(oracle, endless)
    body = {"prompt": ["a", "b", "c"], "stream": True}
    asyncio.run(leave(wire, PATH, body, lambda sent: len(sent) > 5))
    assert sorted(client.closed) == sorted(request.request_id for request in client.requests)
    assert len(client.closed) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_frees_the_blocks_of_a_real_engine(wire: Wire, client: InProcessClient, stream: bool) -> None:
    body = {
        "prompt": ["the river", "the engine"],
        "n": 2,
        "max_tokens": 200,
        "ignore_eos": True,
        "stream": stream,
    }

    async def main() -> None:
        engine = client._engine
        steps = engine.scheduler.step
        await leave(wire, PATH, body, lambda sent: engine.scheduler.step > steps + 3)
        async with asyncio.timeout(10):
            while engine.num_requests:
                await asyncio.sleep(0.001)
        assert engine.scheduler.step < steps + 150
        assert engine.scheduler.pool.usage().num_used == 0

    asyncio.run(main())


def test_a_reader_who_stalls_is_cut_off(oracle: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "LAST_READ_S", 0.05)
    wire, client = scripted(oracle, endless, request_timeout=0.05)
    num_sent = 0

    async def send(message: Any) -> None:
        nonlocal num_sent
        num_sent += 1
        if num_sent > 3:
            await asyncio.Event().wait()

    async def receive() -> Any:
        if num_sent == 0 and not client.requests:
            return {"type": "http.request", "body": json.dumps(BODIES[PATH] | {"stream": True}).encode()}
        return await asyncio.Event().wait()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "method": "POST",
        "path": PATH,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }

    async def main() -> None:
        async with asyncio.timeout(10):
            await wire.app(scope, receive, send)

    asyncio.run(main())
    assert num_sent == 4
    assert len(client.closed) == 1, "the engine works no more for a client that does not read"


def test_nothing_is_left_behind_on_the_event_loop(oracle: LLM) -> None:
    wire, _ = scripted(oracle, endless)

    async def main() -> None:
        for body in (BODIES[PATH] | {"stream": True}, {"prompt": ["a", "b"], "stream": True}):
            await leave(wire, PATH, body, lambda sent: len(sent) > 3)
        async with asyncio.timeout(10):
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0.001)

    asyncio.run(main())


def test_a_refusal_by_the_engine_comes_before_the_stream(oracle: LLM) -> None:
    async def script(request: Request) -> AsyncGenerator[StepOutput, None]:
        raise RequestError("too long", param="prompt")
        yield

    wire, _ = scripted(oracle, script)
    assert wire.refused(PATH, BODIES[PATH] | {"stream": True}, 422)["param"] == "prompt"


def test_a_stream_that_has_ended_is_closed_though_its_client_leaves_at_once() -> None:
    """The server says that the client is gone when the last frame is sent, which cancels what still runs."""
    closed: list[bool] = []

    async def aclose() -> None:
        closed.append(True)

    async def end() -> None:
        writer: Any = SimpleNamespace(generation=SimpleNamespace(aclose=aclose))
        opening: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        opening.set_result(writer)
        stream: Any = object.__new__(EventStream)
        stream._opening, stream._first = opening, asyncio.get_running_loop().create_future()
        stream._first.set_result([])
        closing = asyncio.ensure_future(stream._close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)

    asyncio.run(end())
    assert closed == [True]
