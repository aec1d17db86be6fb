"""How the openai package sees a server that refuses: by an error class of its own, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import openai
import pytest
from openai import OpenAI

from infer.config.settings import EngineConfig
from infer.errors import QueueFull
from infer.frontend.open_model import open_model
from infer.frontend.prompts import PromptEncoder
from infer.scheduling.request import Request, StepOutput
from infer.server.app import build_app
from scripts.make_checkpoint import make_checkpoint
from tests.support.live_server import serve
from tests.support.wire import ScriptedClient, make_state, outputs_of


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    directory: Path = tmp_path_factory.mktemp("refusals") / "llama"
    make_checkpoint("llama", directory)
    config = EngineConfig.from_knobs(model=str(directory), dtype="float32")
    return open_model(config, show_progress=False)[0]


class Full:
    """An engine whose queue is full for the first `num_refusals` requests."""

    def __init__(self, num_refusals: int) -> None:
        self.num_left = num_refusals

    async def say(self, request: Request) -> AsyncGenerator[StepOutput, None]:
        await asyncio.sleep(0)
        if self.num_left:
            self.num_left -= 1
            raise QueueFull("too many are waiting")
        for output in outputs_of(request, [40, 41, 42]):
            yield output


@pytest.fixture
def engine() -> ScriptedClient:
    return ScriptedClient(Full(2).say)


@pytest.fixture
def url(encoder: PromptEncoder, engine: ScriptedClient) -> Iterator[str]:
    with serve(build_app(make_state(encoder, engine, access_log=False))) as found:
        yield f"{found}/v1"


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_full_queue_is_asked_again_until_it_answers(
    url: str, engine: ScriptedClient, is_stream: bool
) -> None:
    with OpenAI(base_url=url, api_key="any", max_retries=2, timeout=30) as client:
        if is_stream:
            chunks = client.completions.create(model="tiny", prompt="a", max_tokens=3, stream=True)
            num_tokens = sum(bool(chunk.choices) for chunk in chunks)
        else:
            answer = client.completions.create(model="tiny", prompt="a", max_tokens=3)
            assert answer.usage is not None
            num_tokens = answer.usage.completion_tokens
    assert num_tokens == 3
    assert len(engine.requests) == 3, "twice refused, then served"


def test_without_retries_a_full_queue_is_an_error_that_says_when_to_come_back(
    url: str, engine: ScriptedClient
) -> None:
    with (
        OpenAI(base_url=url, api_key="any", max_retries=0, timeout=30) as client,
        pytest.raises(openai.InternalServerError) as caught,
    ):
        client.completions.create(model="tiny", prompt="a", max_tokens=3)
    assert caught.value.status_code == 503
    assert int(caught.value.response.headers["retry-after"]) >= 1
    assert len(engine.requests) == 1
