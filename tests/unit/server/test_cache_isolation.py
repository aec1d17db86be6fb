"""Cached prefixes are shared by requests with one salt; with `cache_isolation=key`, by those of one key."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from infer.client.client import InProcessClient
from infer.config.server import ServerConfig
from infer.errors import ConfigError
from infer.frontend.llm import LLM
from infer.scheduling.request import Request
from infer.server.app import build_app
from tests.support.wire import Wire, make_state

MESSAGES = [{"role": "user", "content": "the river runs behind the house"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the river runs behind the house", "max_tokens": 1},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/responses": {"input": "the river runs behind the house", "max_output_tokens": 1},
    "/v1/embeddings": {"input": "the river runs behind the house", "pooling": "last"},
}
SALTED = [path for path in BODIES if path != "/v1/responses"]


def watch_salts(client: InProcessClient, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The salts of all requests that the engine gets from now on."""
    salts: list[str] = []
    generate = client.generate

    def watched(request: Request) -> Any:
        salts.append(request.cache_salt)
        return generate(request)

    monkeypatch.setattr(client, "generate", watched)
    return salts


@pytest.mark.parametrize("path", SALTED)
def test_a_salt_reaches_the_engine(
    wire: Wire, client: InProcessClient, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    salts = watch_salts(client, monkeypatch)
    wire.ok(path, BODIES[path] | {"cache_salt": "mine"})
    wire.ok(path, BODIES[path])
    assert salts == ["mine", ""]
    assert wire.post(path, BODIES[path] | {"cache_salt": 7}).status_code in (400, 422)


@pytest.mark.parametrize("path", BODIES)
def test_each_key_has_a_salt_of_its_own(
    oracle: LLM, client: InProcessClient, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    salts = watch_salts(client, monkeypatch)

    def ask(header: dict[str, str], order: tuple[str, ...] = ("first", "second"), **fields: str) -> None:
        config: dict[str, Any] = {"api_key": order, "cache_isolation": "key"}
        app = build_app(make_state(oracle.encoder, client, **config))

        async def go() -> httpx.Response:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://host") as http:
                return await http.post(path, json=BODIES[path] | fields, headers=header)

        assert asyncio.run(go()).status_code == 200

    ask({"authorization": "Bearer first"})
    ask({"x-api-key": "first"})
    ask({"authorization": "Bearer first"}, ("second", "first"))  # as another API process may have them
    ask({"authorization": "Bearer second"})
    first, again, elsewhere, second = salts
    assert first == again == elsewhere != second and len(first) == len(second) == 64
    assert "first" not in first
    if path in SALTED:
        ask({"authorization": "Bearer second"}, cache_salt=first)  # a guess at another's is one's own
        assert salts[-1] == second + first


def test_two_keys_share_no_cached_prefix(oracle: LLM, client: InProcessClient) -> None:
    config: dict[str, Any] = {"api_key": ("tenant-1", "tenant-2"), "cache_isolation": "key"}
    app = build_app(make_state(oracle.encoder, client, **config))
    body = {"prompt": [7, 3, 9, 11] * 6, "max_tokens": 1}

    async def cached(key: str) -> int:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://host") as http:
            answer = await http.post("/v1/completions", json=body, headers={"x-api-key": key})
            return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    async def all_of_them() -> list[int]:
        return [await cached(key) for key in ("tenant-1", "tenant-1", "tenant-2", "tenant-2")]

    assert asyncio.run(all_of_them()) == [0, 23, 0, 23]


def test_isolation_by_key_needs_keys() -> None:
    with pytest.raises(ConfigError, match="cache_isolation has no effect without api_key"):
        ServerConfig(cache_isolation="key")
