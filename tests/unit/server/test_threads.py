"""One client's large answer, or its long backlog, does not stop the event loop for the others."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from infer.finish_reason import FinishReason
from infer.frontend.llm import LLM
from infer.sampling.params import RowLogprobs
from infer.scheduling.request import Request, StepOutput
from infer.server.protocol import logprobs
from infer.server.routes import tokens
from infer.server.routes.json_route import LARGE
from tests.support.wire import ScriptedClient, Wire, make_state, outputs_of
from tests.unit.server.test_stream import BODIES, CHAT, PATH, serve_until_gone

SHOWN = {PATH: {"logprobs": 5}, CHAT: {"logprobs": True, "top_logprobs": 5}}
ROW = RowLogprobs(300, -1.0, 1, tuple((300 + i, -1.0 - i) for i in range(5)))


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The threads that spelled a token."""
    seen: set[int] = set()
    spell, entry = logprobs.spell, logprobs._entry

    def spelling(*args: Any) -> str:
        seen.add(threading.get_ident())
        return spell(*args)

    def making(*args: Any) -> dict[str, Any]:
        seen.add(threading.get_ident())
        return entry(*args)

    monkeypatch.setattr(logprobs, "spell", spelling)
    monkeypatch.setattr(tokens, "spell", spelling)
    monkeypatch.setattr(logprobs, "_entry", making)
    return seen


@pytest.mark.parametrize("path", [PATH, CHAT])
@pytest.mark.parametrize("num_tokens", [3, LARGE // 6 + 1])
def test_only_large_logprobs_are_spelled_in_a_thread(
    oracle: LLM, threads: set[int], path: str, num_tokens: int
) -> None:
    async def script(request: Request) -> AsyncGenerator[StepOutput, None]:
        yield StepOutput(
            request_id=request.request_id,
            index=0,
            token_ids=(300,) * num_tokens,
            logprobs=(ROW,) * num_tokens,
            finish_reason=FinishReason.STOP,
        )

    wire = Wire(make_state(oracle.encoder, ScriptedClient(script)))
    wire.ok(path, BODIES[path] | SHOWN[path])
    assert (threading.get_ident() in threads) == (num_tokens == 3)
    assert len(threads) == 1


@pytest.mark.parametrize("num_words", [3, LARGE])
def test_only_many_token_strings_are_spelled_in_a_thread(
    wire: Wire, threads: set[int], num_words: int
) -> None:
    assert wire.ok("/tokenize", {"prompt": "x " * num_words, "return_token_strs": True})["token_strs"]
    assert (threading.get_ident() in threads) == (num_words == 3)


@pytest.mark.parametrize(
    ("path", "stream"),
    [(PATH, False), (CHAT, False), (PATH, True), (CHAT, True), (PATH + "/stream", True)],
)
def test_the_backlog_of_a_client_who_left_is_not_walked_to_its_end(
    oracle: LLM, path: str, stream: bool
) -> None:
    """Everything is there at once and sending takes no time: only a pause lets the loop see who left."""
    num_read = 0

    async def script(request: Request) -> AsyncGenerator[StepOutput, None]:
        nonlocal num_read
        for output in outputs_of(request, [300] * 2000):
            num_read += 1
            yield output

    wire = Wire(make_state(oracle.encoder, ScriptedClient(script)))
    body = json.dumps(BODIES[path.removesuffix("/stream")] | {"stream": stream}).encode()
    serve_until_gone(wire, path, body, is_gone_at_once=not stream)
    assert 0 < num_read <= 100
