"""One tiny model for all tests of the routes: served in process, with an offline `LLM` as its oracle.

FastAPI describes the answers of every route anew for each application that is built, which takes longer than
a request: here it finds the descriptions of the same route's answers that another application has made.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator
from typing import Any

import fastapi.routing
import pytest

from infer.client.client import InProcessClient
from infer.config.settings import EngineConfig
from infer.engine.build import build_engine
from infer.frontend.llm import LLM
from infer.frontend.open_model import open_model
from tests.support.wire import Wire, make_state

KNOBS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "num_blocks": 256, "block_size": 4}


@pytest.fixture(autouse=True, scope="session")
def _answers_described_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        routing: Any = fastapi.routing
        patch.setattr(routing, "create_model_field", functools.cache(routing.create_model_field))
        yield


@pytest.fixture(scope="session")
def oracle(checkpoint: str) -> LLM:
    return LLM(checkpoint, **KNOBS)


def run_client(checkpoint: str) -> Iterator[InProcessClient]:
    """An engine of its own in a thread, closed at the end."""
    config = EngineConfig.from_knobs(model=checkpoint, **KNOBS)
    _, loaded = open_model(config, show_progress=False)
    made = InProcessClient(build_engine(config, loaded))
    yield made
    asyncio.run(made.close())


@pytest.fixture(scope="session")
def client(checkpoint: str) -> Iterator[InProcessClient]:
    yield from run_client(checkpoint)


@pytest.fixture
def wire(oracle: LLM, client: InProcessClient) -> Wire:
    return Wire(make_state(oracle.encoder, client, max_prompts=8, max_n=4))
