"""The OpenAI routes without a network: an application around a tiny model, or around a scripted engine.

wire = Wire(state);  wire.post("/v1/completions", {...})     one body in, one answer out
ScriptedClient([...])                                        an engine that says what a test wants
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import httpx
from fastapi import FastAPI

from infer.client.client import EngineClient
from infer.config.server import ServerConfig
from infer.engine.live import LiveSnapshot
from infer.engine.stats import EngineStats
from infer.engine.stories import EngineStory
from infer.errors import EngineError
from infer.finish_reason import FinishReason
from infer.frontend.prompts import PromptEncoder
from infer.scheduling.request import Request, StepOutput
from infer.server.protocol.errors import install_error_handlers
from infer.server.routes import chat, completions, embeddings, messages, models, responses, scoring, tokens
from infer.server.state import RequestRecord, ServedModel, ServerState, recording


def make_state(encoder: PromptEncoder, *clients: EngineClient, **knobs: Any) -> ServerState:
    """A server's state with one model, called "tiny"."""
    model = ServedModel(name="tiny", encoder=encoder, clients=list(clients), created=1_700_000_000)
    return ServerState(config=ServerConfig(**knobs), models={"tiny": model}, default_model="tiny")


class Wire:
    """Talks to the routes of a state."""

    def __init__(self, state: ServerState) -> None:
        self.state = state
        self.app = FastAPI(redirect_slashes=False)
        self.app.state.server = state
        modules = completions, chat, messages, responses, models, tokens, embeddings, scoring
        # not `include_router`, which would analyse every route again at the first request
        self.app.router.routes.extend(route for module in modules for route in module.router.routes)
        install_error_handlers(self.app)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """One request on an event loop of its own."""

        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            record = RequestRecord("wire", 0.0, path)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                with recording(record):
                    return await client.request(method, path, **options)

        return asyncio.run(send())

    def get(self, path: str) -> httpx.Response:
        """GET."""
        return self.request("GET", path)

    def post(self, path: str, body: Any) -> httpx.Response:
        """POST some JSON."""
        return self.request("POST", path, json=body)

    def ok(self, path: str, body: Any) -> dict[str, Any]:
        """POST what must succeed."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def refused(self, path: str, body: Any, status: int, code: str | None = None) -> dict[str, Any]:
        """POST what must be refused with a status, and a code if that is another; returns the error."""
        response = self.post(path, body)
        assert response.status_code == status, response.text
        error: dict[str, Any] = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == (code or status)
        return error

    def frames(self, path: str, body: Any) -> list[Any]:
        """POST and read the data frames of a stream that ends with [DONE], which is left out."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return read_frames(response)


def invalid(path: str) -> int:
    """The status of a value that cannot be used: `/v1/completions` and its stream have one of their own."""
    return 422 if path.startswith("/v1/completions") else 400


def read_frames(response: httpx.Response) -> list[Any]:
    """The data frames of a stream; checks that nothing else is in it."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-1] == ""
    assert blocks[-2] == "data: [DONE]"
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks[:-1])
    return [json.loads(block[6:]) for block in blocks[:-2]]


def read_events(response: httpx.Response) -> list[tuple[str, Any]]:
    """The named events of a stream."""
    events = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


Script = Callable[[Request], AsyncGenerator[StepOutput, None]]


class ScriptedClient:
    """An engine client that runs a script for each request and remembers what was asked of it."""

    failure: EngineError | None = None  # why it cannot serve
    is_taken = True  # requests are not refused
    silent_s = 0.0
    prefixes: frozenset[int] = frozenset()

    def __init__(self, script: Script) -> None:
        self._script = script
        self.requests: list[Request] = []
        self.closed: list[str] = []  # requests whose iterator was closed, at its end or before
        self.aborted: list[tuple[str, int | None]] = []

    async def generate(self, request: Request) -> AsyncGenerator[StepOutput, None]:
        self.requests.append(request)
        try:
            async for output in self._script(request):
                yield output
        finally:
            self.closed.append(request.request_id)

    def has_taken(self, request_id: str) -> bool:
        return self.is_taken

    def abort(self, request_id: str, index: int | None = None) -> None:
        self.aborted.append((request_id, index))

    def stats(self) -> EngineStats:
        return EngineStats()

    async def reset_prefix_cache(self) -> int:
        return 0

    async def set_adapter(self, name: str, path: str | None, *, replaces: bool = False) -> None:
        return None

    async def explain(self, request_id: str) -> EngineStory | None:
        return None

    async def look(self) -> LiveSnapshot:
        raise EngineError("there is no engine to look at")

    async def close(self, reason: str = "") -> None:
        return None


def outputs_of(
    request: Request, ids: Sequence[int], finish_reason: str | None = "length"
) -> list[StepOutput]:
    """One output per token; the last says why it ended."""
    last = len(ids) - 1
    return [
        StepOutput(
            request_id=request.request_id,
            index=0,
            token_ids=(token_id,),
            finish_reason=FinishReason(finish_reason) if finish_reason and i == last else None,
        )
        for i, token_id in enumerate(ids)
    ]
