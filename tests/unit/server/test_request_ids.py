"""One grep for the id a client sees finds every log line about its request."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from infer.client.client import InProcessClient
from infer.errors import EngineError
from infer.frontend.llm import LLM
from infer.scheduling.request import Request, StepOutput
from infer.server.metrics import ServerMetrics
from infer.server.middleware.access_log import AccessLog
from tests.support.wire import Script, ScriptedClient, Wire, make_state, outputs_of

ID = "client-7f21"
PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
BODY = {"prompt": ["a", "b"], "max_tokens": 2}
TALK = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


async def answers(request: Request) -> AsyncGenerator[StepOutput, None]:
    for output in outputs_of(request, [300, 301]):
        yield output


async def engine_fails(request: Request) -> AsyncGenerator[StepOutput, None]:
    yield outputs_of(request, [300], None)[0]
    raise EngineError("MemoryError in step 3")


async def bug(request: Request) -> AsyncGenerator[StepOutput, None]:
    yield outputs_of(request, [300], None)[0]
    raise KeyError("nobody foresaw")


def post(wire: Wire, path: str, body: dict[str, Any]) -> httpx.Response:
    return wire.request("POST", path, json=body, headers={"x-request-id": ID})


def logged(wire: Wire) -> Wire:
    """The routes behind the access log."""
    metrics = ServerMetrics("infer")
    wire.app = AccessLog(wire.app, metrics, is_logged=True, ignores_unknown=True)  # type: ignore[assignment]
    return wire


def scripted(oracle: LLM, script: Script) -> tuple[Wire, ScriptedClient]:
    client = ScriptedClient(script)
    return logged(Wire(make_state(oracle.encoder, client))), client


@pytest.mark.parametrize(("path", "body"), [(PATH, BODY), (CHAT, TALK)])
def test_the_engine_knows_a_request_by_the_clients_id(oracle: LLM, path: str, body: dict[str, Any]) -> None:
    wire, client = scripted(oracle, answers)
    response = post(wire, path, body)
    assert response.headers["x-request-id"] == ID
    job_id = response.json()["id"]
    names = [request.request_id for request in client.requests]
    assert names == [f"{ID}/{job_id}-{i}" for i in range(len(names))]
    post(wire, path, body)
    assert len({request.request_id for request in client.requests}) == 2 * len(names), (
        "even if it comes twice"
    )


@pytest.mark.parametrize("script", [engine_fails, bug])
@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_is_logged_under_the_clients_id(
    oracle: LLM, script: Script, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    wire, _ = scripted(oracle, script)
    post(wire, PATH, BODY | {"stream": stream})
    assert all(ID in record.getMessage() for record in caplog.records if record.name.startswith("infer."))
    assert any(record.levelno == logging.ERROR for record in caplog.records)


def test_a_failed_step_names_its_requests(
    oracle: LLM, client: InProcessClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(client._engine._device, "run", fail)
    response = post(logged(Wire(make_state(oracle.encoder, client))), CHAT, TALK)
    assert response.status_code == 500
    lines = [record.getMessage() for record in caplog.records if "failed for" in record.getMessage()]
    assert len(lines) == 1
    assert f"{ID}/chatcmpl-" in lines[0]


def test_a_failed_embedding_names_its_request(
    oracle: LLM, client: InProcessClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(client._engine._device, "run", fail)
    response = post(logged(Wire(make_state(oracle.encoder, client))), "/v1/embeddings", {"input": "x"})
    assert response.status_code == 500
    assert any(f"failed for {ID}/embd-" in record.getMessage() for record in caplog.records)
