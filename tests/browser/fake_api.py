r"""The routes the page calls, answered by a script instead of a model, so that a test holds the clock.

What the last message (or the prompt) begins with decides what happens:

    say TEXT     streams TEXT word by word
    pause TEXT   streams the first word, then waits for `gate`, then the others
    wait TEXT    sends comments that keep the connection alive, waits for `gate`, then streams TEXT
    fail TEXT    the same, but then sends TEXT as an error event
    flood N TEXT streams TEXT N times, where \n is a line break
    refuse       answers 422 with a message, before the stream
    break        streams one word, then an error event
    cut          streams one word, then closes the connection without [DONE]
    think TEXT   streams TEXT word by word as reasoning, and then "so yes"
    call CALLS   streams tool calls, each NAME JSON with "; " between, as pieces of three characters
    callcut ...  the same, and breaks off within the last one
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from infer.server.routes.pages import DIRECTORY, HEADERS


class FakeApi:
    """The scripted routes, and what they were asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.wanted_key: str | None = None
        self.gate = asyncio.Event()
        self.hung_up = threading.Event()  # a stream was left before its end
        self.loop: asyncio.AbstractEventLoop | None = None
        self.sights: list[dict[str, Any]] = []  # events of /admin/live, sent to whoever looks
        self.looks: list[str] = []  # the queries of those who looked
        self.num_looking = 0
        self.admin_key: str | None = None
        self.stories: dict[str, str] = {}  # by request id
        self.metrics_text = ""
        self.app = Starlette(
            routes=[
                Route("/", self.index),
                Route("/v1/models", self.models),
                Route("/v1/chat/completions", self.answer, methods=["POST"]),
                Route("/v1/completions", self.answer, methods=["POST"]),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/admin/live", self.live),
                Route("/explain/{request_id:path}", self.explain),
                Route("/metrics", self.metrics),
                Mount("/ui", StaticFiles(directory=DIRECTORY, html=True)),
            ]
        )

    def reset(self) -> None:
        """Forget everything, and close the gate."""
        self.bodies.clear()
        self.keys.clear()
        self.wanted_key = None
        self.gate.clear()
        self.hung_up.clear()
        self.sights.clear()
        self.looks.clear()
        self.admin_key, self.stories, self.metrics_text = None, {}, ""

    def open_gate(self) -> None:
        """Let paused streams go on; called from the test's thread."""
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self.gate.set)

    async def index(self, request: Request) -> Response:
        """The page, under the policy the server uses."""
        self.loop = asyncio.get_running_loop()
        return FileResponse(DIRECTORY / "index.html", headers=HEADERS)

    def is_allowed(self, request: Request) -> bool:
        """Whether a request has the key, if one is wanted."""
        self.keys.append(request.headers.get("authorization"))
        return self.wanted_key is None or self.keys[-1] == f"Bearer {self.wanted_key}"

    async def models(self, request: Request) -> Response:
        """Two models; a key if one is wanted."""
        if not self.is_allowed(request):
            return error(401, "this server wants an API key; send it as a bearer token")
        defaults = {"temperature": 0.7, "top_k": 20}
        cards = [
            {
                "id": "tiny-llama",
                "object": "model",
                "max_model_len": 4096,
                "default_sampling_params": defaults,
            },
            {"id": "tiny-qwen3", "object": "model", "max_model_len": 64, "default_sampling_params": {}},
        ]
        return JSONResponse({"object": "list", "data": cards})

    async def live(self, request: Request) -> Response:
        """The events that the test has put down, and those that it will."""
        if self.admin_key and request.headers.get("authorization") != f"Bearer {self.admin_key}":
            return error(401, "no valid key was given")
        self.looks.append(request.url.query)
        return StreamingResponse(self._send_sights(), media_type="text/event-stream")

    async def _send_sights(self) -> AsyncIterator[str]:
        sent, self.num_looking = 0, self.num_looking + 1
        try:
            while True:
                for sight in self.sights[sent:]:
                    sent += 1
                    yield event(sight)
                await asyncio.sleep(0.01)
        finally:
            self.num_looking -= 1

    async def explain(self, request: Request) -> Response:
        """The story of a request, as text."""
        assert request.headers["accept"] == "text/plain"
        story = self.stories.get(request.path_params["request_id"])
        return error(404, "no such request") if story is None else Response(story, media_type="text/plain")

    async def metrics(self, request: Request) -> Response:
        """What the test says."""
        return Response(self.metrics_text, media_type="text/plain")

    async def tokenize(self, request: Request) -> Response:
        """A token per word."""
        return JSONResponse({"count": len((await request.json())["prompt"].split(" "))})

    async def answer(self, request: Request) -> Response:
        """What the script says."""
        if not self.is_allowed(request):
            return error(401, "this server wants an API key; send it as a bearer token")
        body = await request.json()
        self.bodies.append(body)
        text = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        verb, _, rest = text.partition(" ")
        if verb == "refuse" and "response_format" in body:
            return error(422, "response_format: the keyword 'contains' at /properties/a is not supported")
        if verb == "refuse":
            return error(422, "temperature must be in 0..2, got 7")
        stream = self.events("messages" in body, verb, rest)
        if verb in ("think", "call", "callcut"):
            stream = script(verb, rest)
        elif body.get("messages", [{}])[-1].get("role") == "tool":
            stream = self.events(True, "say", f"it gave {text}")
        return StreamingResponse(stream, media_type="text/event-stream")

    async def events(self, is_chat: bool, verb: str, rest: str) -> AsyncIterator[str]:
        """Chunks as OpenAI's API shapes them."""
        words = [word + " " for word in rest.split(" ")]
        if verb == "flood":
            count, _, unit = rest.partition(" ")
            words = [unit.replace("\\n", "\n")] * int(count)
        has_ended = False
        try:
            if verb in ("wait", "fail"):
                yield ": ping\n\n: ping\n\n"
                await self.gate.wait()
            if verb == "fail":
                yield event({"error": {"message": rest, "type": "engine_error", "code": 503}})
                return
            for number, word in enumerate(words):
                if verb == "pause" and number == 1:
                    await self.gate.wait()
                yield event({"choices": [choice(is_chat, word, None)]})
                if verb == "break":
                    yield event({"error": {"message": "the engine stopped", "type": "engine_error"}})
                if verb in ("break", "cut"):
                    return
            yield event({"choices": [choice(is_chat, "", "stop")]})
            usage = {
                "prompt_tokens": 5,
                "completion_tokens": len(words),
                "prompt_tokens_details": {"cached_tokens": 3},
            }
            yield event({"choices": [], "usage": usage})
            yield "data: [DONE]\n\n"
            has_ended = True
        finally:
            if not has_ended:
                self.hung_up.set()


async def script(verb: str, rest: str) -> AsyncIterator[str]:
    """An answer with more than text in it."""
    for delta in thoughts(rest) if verb == "think" else calls(rest, is_cut=verb == "callcut"):
        yield event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    reason = {"think": "stop", "call": "tool_calls", "callcut": "length"}[verb]
    yield event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    usage = {"completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 4}}
    yield event({"choices": [], "usage": usage})
    yield "data: [DONE]\n\n"


def thoughts(text: str) -> Iterator[dict[str, object]]:
    """Deltas of reasoning, and of an answer behind it."""
    for word in text.split(" "):
        yield {"reasoning_content": word + " ", "reasoning": word + " "}
    yield {"content": "so yes"}


def calls(text: str, *, is_cut: bool) -> Iterator[dict[str, object]]:
    """Deltas of tool calls, in OpenAI's shape."""
    for index, call in enumerate(text.split("; ")):
        name, _, arguments = call.partition(" ")
        begin = {"index": index, "id": f"call_{index}", "type": "function"}
        yield {"tool_calls": [begin | {"function": {"name": name, "arguments": ""}}]}
        if is_cut and index == text.count("; "):
            arguments = arguments[:-1]
        for at in range(0, len(arguments), 3):
            yield {"tool_calls": [{"index": index, "function": {"arguments": arguments[at : at + 3]}}]}


def choice(is_chat: bool, text: str, finish_reason: str | None) -> dict[str, object]:
    """One choice of a streamed chunk."""
    content = {"delta": {"content": text}} if is_chat else {"text": text}
    return {"index": 0, **content, "finish_reason": finish_reason}


def event(payload: dict[str, object]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(payload)}\n\n"


def error(status: int, message: str) -> Response:
    """An error in OpenAI's shape."""
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}
    return JSONResponse(body, status_code=status)
