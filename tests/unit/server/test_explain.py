"""`GET /explain/{id}`: who may read the story of a request, under which ids, in which form, for how long."""

from __future__ import annotations

import asyncio
import os
import urllib.request
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest

from infer.cli.main import main
from infer.client.client import InProcessClient
from infer.config.server import ServerConfig
from infer.config.settings import EngineConfig
from infer.engine.build import build_engine
from infer.errors import ConfigError, EngineLost, RequestError
from infer.frontend.llm import LLM
from infer.frontend.open_model import open_model
from infer.scheduling.request import Request, StepOutput
from infer.server.app import build_app
from infer.server.explain.served import MAX_PARTS, ServedRequest, ServedRequests
from infer.server.routes.explain import wants_text
from tests.support.wire import ScriptedClient, make_state, outputs_of
from tests.unit.server.conftest import KNOBS

ANA, BOB = {"authorization": "Bearer ana"}, {"x-api-key": "bob"}
ROOT = {"authorization": "Bearer root"}
KEYS: dict[str, Any] = {"api_key": ("ana", "bob"), "admin_key": "root"}
TALK = [{"role": "user", "content": "the river runs behind the house"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the river", "max_tokens": 3},
    "/v1/chat/completions": {"messages": TALK, "max_tokens": 3},
    "/v1/messages": {"messages": TALK, "max_tokens": 3},
    "/v1/responses": {"input": "the river", "max_output_tokens": 3},
}
Script = Callable[[httpx.AsyncClient], Awaitable[None]]


@pytest.fixture(scope="module")
def engine(checkpoint: str) -> Iterator[InProcessClient]:
    config = EngineConfig.from_knobs(model=checkpoint, max_batch_size=2, **KNOBS)
    _, loaded = open_model(config, show_progress=False)
    made = build_engine(config, loaded)
    made.keep_stories(8)
    client = InProcessClient(made)
    yield client
    asyncio.run(client.close())


def serve(oracle: LLM, client: Any, script: Script, **knobs: Any) -> None:
    """Run a script against the whole application."""

    async def go() -> None:
        transport = httpx.ASGITransport(build_app(make_state(oracle.encoder, client, **knobs)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            await script(http)

    asyncio.run(go())


async def story(http: httpx.AsyncClient, name: str, **options: Any) -> dict[str, Any]:
    response = await http.get(f"/explain/{name}", **options)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


@pytest.mark.parametrize("path", BODIES)
def test_both_ids_of_an_answer_find_its_story(oracle: LLM, engine: InProcessClient, path: str) -> None:
    async def script(http: httpx.AsyncClient) -> None:
        answer = await http.post(path, json=BODIES[path])
        assert answer.status_code == 200, answer.text
        told = await story(http, answer.headers["x-request-id"])
        assert told["path"] == path and told["model"] == "tiny" and told["status"] == 200
        assert told["state"] == "ended" and told["prompts"][0]["output_tokens"] == 3
        assert await story(http, answer.json()["id"]) == told
        assert await story(http, told["prompts"][0]["engine_id"]) == told
        assert set(told["milliseconds"]) >= {"API", "queue", "prefill", "decode", "blocked", "out"}
        assert any(said.startswith("It ended with length") for said in told["sentences"])
        assert told["sentences"][0].startswith("The server had it for ") and told["advice"]

    serve(oracle, engine, script)


def test_a_stream_is_explained_and_plain_text_has_the_same_sentences(
    oracle: LLM, engine: InProcessClient
) -> None:
    async def script(http: httpx.AsyncClient) -> None:
        answer = await http.post(
            "/v1/completions",
            json={"prompt": "a b", "max_tokens": 4, "stream": True},
            headers={"x-request-id": "me"},
        )
        told = await story(http, "me")
        text = await http.get("/explain/me", headers={"accept": "text/plain, */*"})
        assert text.headers["content-type"] == "text/plain; charset=utf-8"
        assert answer.status_code == 200 and text.text.startswith(
            "me /v1/completions: model tiny, engine 0, ended,"
        )
        for said in (*told["sentences"], *told["advice"]):
            assert said in text.text
        assert "What would have made it faster:" in text.text and "#" in text.text

    serve(oracle, engine, script)


@pytest.mark.parametrize(
    ("accept", "is_text"),
    [("", False), ("*/*", False), ("text/plain", True), ("application/json, text/plain", False),
     ("text/html, TEXT/PLAIN;q=0.9", True)],
)  # fmt: skip
def test_text_is_for_those_who_ask(accept: str, is_text: bool) -> None:
    assert wants_text(accept) is is_text


def test_a_story_belongs_to_the_key_that_made_the_request(oracle: LLM, engine: InProcessClient) -> None:
    async def script(http: httpx.AsyncClient) -> None:
        mine = {"x-request-id": "mine"}
        body = BODIES["/v1/completions"]
        answer = await http.post("/v1/completions", json=body, headers=ANA | mine)
        own = await story(http, "mine", headers=ANA)
        unknown = await http.get("/explain/nobody", headers=BOB)
        for name in ("mine", answer.json()["id"], own["prompts"][0]["engine_id"]):
            foreign = await http.get(f"/explain/{name}", headers=BOB)
            assert foreign.status_code == 404 and foreign.content == unknown.content
        assert unknown.json()["error"]["code"] == "request_not_found"
        assert (await story(http, "mine", headers=ROOT)) == own, "the operator sees all"
        assert (await http.get("/explain/mine")).status_code == 401
        # the same id, chosen by another client, does not hide the first nor show it
        await http.post("/v1/completions", json=body | {"max_tokens": 1}, headers=BOB | mine)
        assert (await story(http, "mine", headers=ANA)) == own
        assert (await story(http, "mine", headers=BOB))["prompts"][0]["output_tokens"] == 1
        # the admin key opens nothing else
        assert (await http.post("/v1/completions", json=body, headers=ROOT)).status_code == 401

    serve(oracle, engine, script, **KEYS)


def test_a_request_is_explained_while_it_runs(oracle: LLM, engine: InProcessClient) -> None:
    async def script(http: httpx.AsyncClient) -> None:
        body = {"prompt": "a b c", "max_tokens": 200, "ignore_eos": True}
        running = [
            asyncio.ensure_future(
                http.post("/v1/completions", json=body, headers={"x-request-id": f"run{number}"})
            )
            for number in range(3)
        ]
        seen: set[str] = set()
        while not all(task.done() for task in running):
            for number in range(3):
                response = await http.get(f"/explain/run{number}")
                if response.status_code == 200:
                    seen.add(response.json()["state"])
            await asyncio.sleep(0)
        assert seen & {"waiting", "prefilling", "decoding"}
        told = await story(http, "run2")
        assert "batch was full (max_batch_size 2)" in " ".join(told["sentences"])
        assert told["prompts"][0]["queue"]["by_reason_ms"]["batch_full"] > 0

    serve(oracle, engine, script)


def test_stories_are_forgotten_after_others_and_never_kept_if_off(
    oracle: LLM, engine: InProcessClient
) -> None:
    async def two(http: httpx.AsyncClient) -> None:
        for name in "abc":
            await http.post(
                "/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"x-request-id": name}
            )
        assert (await http.get("/explain/a")).status_code == 404
        assert (await story(http, "b"))["id"] == "b" and (await story(http, "c"))["id"] == "c"

    async def none(http: httpx.AsyncClient) -> None:
        answer = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert (await http.get(f"/explain/{answer.headers['x-request-id']}")).status_code == 404

    serve(oracle, engine, two, explain_requests=2)
    serve(oracle, engine, none, explain_requests=0)


def test_what_the_engine_has_forgotten_the_server_still_knows(oracle: LLM) -> None:
    async def speaks(request: Request) -> AsyncGenerator[StepOutput, None]:
        for output in outputs_of(request, [300, 301]):
            yield output

    async def refuses(request: Request) -> AsyncGenerator[StepOutput, None]:
        raise RequestError("not this one", param="prompt")
        yield

    async def script(http: httpx.AsyncClient) -> None:
        headers = {"x-request-id": "r"}
        await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}, headers=headers)
        told = await story(http, "r")
        assert told["sentences"][0].startswith("Its engine has no record of it")
        assert told["sentences"][1].startswith("The server had it for ")
        assert told["sentences"][2].startswith("It has generated 2 tokens, ")
        assert told["sentences"][-1].startswith("It ended with length: max_tokens or the end of the context")
        text = (await http.get("/explain/r", headers={"accept": "text/plain"})).text
        assert "no record of it" in text and "faster" not in text, "no rule can be applied"

    async def refused(http: httpx.AsyncClient) -> None:
        answer = await http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "r"})
        assert answer.status_code == 422
        told = await story(http, "r")
        assert told["sentences"][0] == "It was rejected, or failed before its first token."
        assert told["sentences"][-1] == f"It ended with an error: {answer.json()['error']['message']}."
        assert told["status"] == 422

    serve(oracle, ScriptedClient(speaks), script)
    serve(oracle, ScriptedClient(refuses), refused)


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_error_of_an_engine_that_died_is_kept(oracle: LLM, is_stream: bool) -> None:
    async def dies(request: Request) -> AsyncGenerator[StepOutput, None]:
        yield outputs_of(request, [300, 301])[0]
        raise EngineLost("signal 9 (Killed) ended the engine process")

    async def script(http: httpx.AsyncClient) -> None:
        body = {"prompt": "x", "max_tokens": 2, "stream": is_stream}
        answer = await http.post("/v1/completions", json=body, headers={"x-request-id": "r"})
        assert "signal 9 (Killed)" in answer.text
        told = await story(http, "r")
        assert told["prompts"][0]["output_tokens"] == 1 and told["state"] == "ended"
        assert "It ended with an error: signal 9 (Killed) ended the engine process." in told["sentences"]
        assert told["prompts"][0]["error"] == "signal 9 (Killed) ended the engine process"

    serve(oracle, ScriptedClient(dies), script)


def test_a_body_of_many_prompts_has_a_story_for_the_first_ones(oracle: LLM, engine: InProcessClient) -> None:
    async def script(http: httpx.AsyncClient) -> None:
        prompts = [f"number {number}" for number in range(MAX_PARTS + 2)]
        body = {"prompt": prompts, "max_tokens": 1}
        answer = await http.post("/v1/completions", json=body, headers={"x-request-id": "many"})
        assert answer.status_code == 200, answer.text
        told = await story(http, "many")
        assert told["num_prompts"] == MAX_PARTS + 2 and len(told["prompts"]) == MAX_PARTS
        text = (await http.get("/explain/many", headers={"accept": "text/plain"})).text
        assert f"prompt 3 of {MAX_PARTS + 2}" in text

    serve(oracle, engine, script)


def test_prompts_that_a_salt_keeps_apart_are_counted_for_their_owner_alone(
    oracle: LLM, engine: InProcessClient
) -> None:
    async def script(http: httpx.AsyncClient) -> None:
        ids = [7 + number % 50 for number in range(80)]

        async def ask(name: str, key: dict[str, str], salt: str) -> str:
            body = {"prompt": ids, "max_tokens": 1, "cache_salt": salt}
            await http.post("/v1/completions", json=body, headers=key | {"x-request-id": name})
            return " ".join((await story(http, name, headers=key))["advice"])

        assert "cache_salt" not in await ask("b1", BOB, "b")
        assert "cache_salt" not in await ask("a1", ANA, "x"), "what others ask is not told"
        assert "its first 64 tokens are shared with one other, but cache_salt differs" in (
            await ask("a2", ANA, "y")
        )
        assert "cache_salt" not in await ask("a3", ANA, "y"), "the cache had it"

    serve(oracle, engine, script, **KEYS)


def test_ids_of_any_length_and_shape_are_unknown(oracle: LLM, engine: InProcessClient) -> None:
    async def script(http: httpx.AsyncClient) -> None:
        for name in ("x" * 1000, "%00", "a/b/c", "..%2f..%2fadmin", "%F0%9F%98%80"):
            assert (await http.get(f"/explain/{name}")).status_code == 404

    serve(oracle, engine, script)


def test_a_negative_number_of_stories_is_refused() -> None:
    with pytest.raises(ConfigError, match="explain_requests must be an integer >= 0"):
        ServerConfig(explain_requests=-1)


def test_open_requests_are_kept_whatever_the_limit() -> None:
    kept = ServedRequests(1)
    opened = [
        ServedRequest(
            request_id=f"r{n}", owner="", path="/", arrived_at=0.0, arrived=0.0, key=f"x-{n}", marks=[]
        )
        for n in range(3)
    ]
    for served in opened:
        kept.open(served)
    assert all(kept.find(f"r{number}", "") for number in range(3))
    for served in opened:
        kept.end(served)
        kept.end(served)  # twice is once
    assert [bool(kept.find(f"r{number}", "")) for number in range(3)] == [False, False, True]


def test_the_command_prints_the_text_and_says_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    class Answer:
        def __enter__(self) -> Answer:
            return self

        def __exit__(self, *error: object) -> None:
            return None

        def read(self, size: int) -> bytes:
            return b"the story\n"

    def send(opener: object, request: Any, timeout: float) -> Answer:
        asked.append(request)
        return Answer()

    monkeypatch.setattr(urllib.request.OpenerDirector, "open", send)
    assert main(["explain", "cmpl-1 2", "--url", "http://h:1/v1", "--api-key", "k"]) == 0
    assert capsys.readouterr().out == "the story\n"
    (request,) = asked
    assert request.full_url == "http://h:1/explain/cmpl-1%202"
    assert request.headers["Accept"] == "text/plain" and request.headers["Authorization"] == "Bearer k"
    not_utf8 = os.fsdecode(b"x\xff")  # the server has no such id, and says so
    assert main(["explain", not_utf8, "--url", "http://h:1"]) == 0
    assert asked[1].full_url == "http://h:1/explain/x%FF"
    monkeypatch.undo()
    assert main(["explain", "x", "--url", "http://127.0.0.1:1"]) == 2
    assert "cannot reach http://127.0.0.1:1" in capsys.readouterr().err
