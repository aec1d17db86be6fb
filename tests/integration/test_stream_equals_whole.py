"""A stream, put together again, is the answer that would not have been streamed: byte for byte.

More than two thousand seeded requests with random fields, each sent twice to the whole application in one
event loop. Temperatures are high, so that bytes that are no text, special tokens and early ends of text
come up in many of them; prompts of raw ids hold such bytes as well. The engine makes each answer once and
gives the same outputs to both: the last bit of a logprob depends on who else is in the batch.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncGenerator, Iterator
from collections.abc import Set as AbstractSet
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest

from infer.client.client import InProcessClient
from infer.config.server import ServerConfig
from infer.config.settings import EngineConfig
from infer.engine.build import build_engine
from infer.engine.live import LiveSnapshot
from infer.engine.stats import EngineStats
from infer.engine.stories import EngineStory
from infer.errors import EngineError
from infer.frontend.open_model import open_model
from infer.frontend.prompts import PromptEncoder
from infer.scheduling.request import Request, StepOutput
from infer.server.app import build_app
from infer.server.state import ServedModel, ServerState
from scripts.make_checkpoint import make_checkpoint

NUM_REQUESTS = int(os.environ.get("NUM_STREAMED_REQUESTS", "512"))  # thousands by hand
AT_ONCE = 64
VOCAB_SIZE = 512
WORDS = ("the", "river", "é", "🙂", "line\n", " ", "count", "日本", "<s>", "a")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PromptEncoder, InProcessClient]]:
    directory: Path = tmp_path_factory.mktemp("streams") / "llama"
    make_checkpoint("llama", directory)
    knobs: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "num_blocks": 2048, "block_size": 4}
    config = EngineConfig.from_knobs(model=str(directory), max_batch_size=4 * AT_ONCE, **knobs)
    encoder, loaded = open_model(config, show_progress=False)
    engine = InProcessClient(build_engine(config, loaded))
    yield encoder, engine
    asyncio.run(engine.close())


class Remembering:
    """An engine client that asks its engine once and then says the same again."""

    def __init__(self, engine: InProcessClient) -> None:
        self._engine = engine
        self._said: dict[tuple[tuple[int, ...], str], list[StepOutput]] = {}
        self.num_repeated = 0

    async def generate(self, request: Request) -> AsyncGenerator[StepOutput, None]:
        key = (request.prompt, repr(request.params))
        if key in self._said:
            self.num_repeated += 1
            for output in self._said[key]:
                yield output
            return
        said = self._said[key] = []
        async with aclosing(self._engine.generate(request)) as outputs:
            async for output in outputs:
                said.append(output)
                yield output

    def has_taken(self, request_id: str) -> bool:
        return self._engine.has_taken(request_id)

    def abort(self, request_id: str, index: int | None = None) -> None:
        self._engine.abort(request_id, index)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    @property
    def failure(self) -> EngineError | None:
        return self._engine.failure

    @property
    def silent_s(self) -> float:
        return self._engine.silent_s

    @property
    def prefixes(self) -> AbstractSet[int]:
        return self._engine.prefixes

    async def explain(self, request_id: str) -> EngineStory | None:
        return await self._engine.explain(request_id)

    async def look(self) -> LiveSnapshot:
        return await self._engine.look()

    async def set_adapter(self, name: str, path: str | None, *, replaces: bool = False) -> None:
        await self._engine.set_adapter(name, path, replaces=replaces)

    async def reset_prefix_cache(self) -> int:
        return await self._engine.reset_prefix_cache()

    async def close(self, reason: str = "") -> None:
        await self._engine.close(reason)


def draw(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A route and a body."""
    body: dict[str, Any] = {
        "max_tokens": rng.randint(1, 10),
        "temperature": rng.choice((0.0, 0.7, 1.5, 2.0)),
        "seed": rng.randrange(2**31),
        "n": rng.choice((1, 1, 1, 2, 3)),
    }
    if rng.random() < 0.4:
        body["stop"] = rng.sample(("e", "th", "\n", "�", "ing ", "a"), rng.randint(1, 2))
    if rng.random() < 0.3:
        body["ignore_eos"] = True
    if rng.random() < 0.2:
        body["stop_token_ids"] = rng.sample(range(VOCAB_SIZE), 20)
    text = " ".join(rng.choices(WORDS, k=rng.randint(1, 6)))
    if rng.random() < 0.3:
        if rng.random() < 0.4:
            body |= {"logprobs": True, "top_logprobs": rng.randint(0, 3)}
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}
    prompt: Any = text
    if rng.random() < 0.4:
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 8))]
    elif rng.random() < 0.2:
        prompt = [text, "another"]
    if rng.random() < 0.3:
        body["echo"] = True
    if rng.random() < 0.4:
        body["logprobs"] = rng.randint(0, 3)
    return "/v1/completions", body | {"prompt": prompt}


def put_together(content: bytes) -> dict[str, Any]:
    """The choices and the usage that the frames of a stream add up to."""
    blocks = content.split(b"\n\n")
    assert blocks[-2:] == [b"data: [DONE]", b""]
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for block in blocks[:-2]:
        event = json.loads(block.removeprefix(b"data: "))
        usage = event.get("usage", usage)
        for part in event["choices"]:
            choice = choices.setdefault(part["index"], {"text": "", "logprobs": None})
            choice["text"] += part["text"] if "text" in part else part["delta"].get("content") or ""
            if part["logprobs"] is not None:
                have = choice["logprobs"] = choice["logprobs"] or {}
                for key, values in part["logprobs"].items():
                    have[key] = (
                        have[key] + values if have.get(key) is not None and values is not None else values
                    )
            if part["finish_reason"] is not None:
                choice |= {"finish_reason": part["finish_reason"], "stop_reason": part.get("stop_reason")}
    return {"choices": choices, "usage": usage}


def spread(body: dict[str, Any]) -> dict[str, Any]:
    """The same of an answer that was not streamed."""
    choices = {}
    for each in body["choices"]:
        text = each["text"] if "text" in each else each["message"]["content"]
        keys = ("logprobs", "finish_reason", "stop_reason")
        choices[each["index"]] = {"text": text} | {key: each[key] for key in keys}
    return {"choices": choices, "usage": body["usage"]}


@pytest.mark.slow
def test_a_stream_is_the_whole_answer_in_pieces(parts: tuple[PromptEncoder, InProcessClient]) -> None:
    encoder, engine = parts
    rng = random.Random(20240501)
    asked = [draw(rng) for _ in range(NUM_REQUESTS)]
    client = Remembering(engine)
    model = ServedModel(name="tiny", encoder=encoder, clients=[client], created=0)
    config = ServerConfig(access_log=False)
    app = build_app(ServerState(config=config, models={"tiny": model}, default_model="tiny"))
    seen: set[str] = set()

    async def one(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        whole = await http.post(path, json=body)
        streamed = await http.post(path, json=body | options)
        assert whole.status_code == streamed.status_code == 200, (whole.text, body)
        left, right = put_together(streamed.content), spread(whole.json())
        assert left == right, body
        for choice in right["choices"].values():
            seen.add(choice["finish_reason"])
            seen.update("�" if "�" in choice["text"] else "", "<" if "<s>" in choice["text"] else "")
            seen.add(type(choice["stop_reason"]).__name__)

    async def all_of_them() -> None:
        waiting = iter(asked)

        async def work(http: httpx.AsyncClient) -> None:
            for path, body in waiting:
                await one(http, path, body)

        transport = httpx.ASGITransport(app)
        async with (
            httpx.AsyncClient(transport=transport, base_url="http://site", timeout=120) as http,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(AT_ONCE):
                group.create_task(work(http))

    asyncio.run(all_of_them())
    assert client.num_repeated >= NUM_REQUESTS
    assert {"stop", "length", "�", "str", "int"} <= seen, "the interesting cases have come up"
