"""The whole application around scripted engines, spoken to without a network."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import httpx

from infer.client.client import EngineClient
from infer.config.server import ServerConfig
from infer.frontend.prompts import PromptEncoder
from infer.server.app import build_app
from infer.server.state import ServedModel, ServerState
from tests.support.fake_client import FakeClient


class Site:
    """An application with one model called "fake" and an engine per given client."""

    def __init__(self, *clients: EngineClient, encoder: PromptEncoder | None = None, **knobs: Any) -> None:
        self.clients: list[Any] = list(clients) or [FakeClient()]
        model = ServedModel(
            name="fake",
            encoder=cast(PromptEncoder, encoder),
            clients=list(self.clients),
            created=1_700_000_000,
        )
        config = ServerConfig(**knobs)
        self.state = ServerState(config=config, models={"fake": model}, default_model="fake")
        self.app = build_app(self.state)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """One request on an event loop of its own."""

        async def go() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://site") as client:
                return await client.request(method, path, **options)

        return asyncio.run(go())

    def metrics(self) -> dict[str, float]:
        """The page at /metrics as numbers by name and labels."""
        lines = self.app.state.metrics.text().decode().splitlines()
        rows = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in rows}
