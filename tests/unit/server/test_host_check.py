"""A server on loopback without keys answers for this machine and for no name that pretends to be it."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from infer.config.server import ServerConfig
from infer.server.middleware.host_check import HostCheck, needs_host_check


def status_for(host: str, *allowed: str) -> int:
    def answer(request: Request) -> PlainTextResponse:
        return PlainTextResponse("hello")

    app = HostCheck(Starlette(routes=[Route("/", answer)]), tuple(allowed))

    async def go() -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            return (await client.get("/", headers={"host": host})).status_code

    return asyncio.run(go())


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8000",
        "127.0.0.1:8000",
        "127.8.9.1",
        "[::1]:8000",
        "[::1]",
        "a.localhost",
        "localhost.:8000",
        "localhost:",
    ],
)
def test_names_of_this_machine_are_answered(host: str) -> None:
    assert status_for(host) == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "10.0.0.1",
        "[::1",
        "[[::1]]",
        "[::1]evil.example",
        "[::1].evil.example:8000",
        "[::1]:8000.evil.example",
        "127.0.0.1:8000.evil.example",
        "localhost:8000:9000",
        "localhost:80@evil.example",
        "",
    ],
)
def test_other_names_are_not(host: str) -> None:
    assert status_for(host) == 403


def test_the_operator_can_add_a_name() -> None:
    assert status_for("box.lan:8000", "box.lan") == 200


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        ({}, True),
        ({"host": "::1"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"api_key": ("k",)}, False),
        ({"uds": "/tmp/s"}, False),
    ],
)
def test_it_is_checked_only_where_reaching_the_server_is_all_it_takes(
    knobs: dict[str, object], expected: bool
) -> None:
    assert needs_host_check(ServerConfig(**knobs)) is expected  # type: ignore[arg-type]
