from __future__ import annotations

import asyncio
import functools
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.routing import Match, Route

from infer.config.server import ServerConfig
from infer.server.app import build_app
from infer.server.middleware.auth import Auth, KeyRing, is_admin, is_open, route_path
from infer.server.state import ServerState

KEYS: dict[str, Any] = {"api_key": ("first-key", "second-key"), "admin_key": "admin-key"}


@functools.cache  # an application prepares its routes when the first request comes
def app_of(**config: Any) -> FastAPI:
    return build_app(ServerState(config=ServerConfig(**config)))


def call(
    method: str, path: str, *, key: str | None = None, headers: dict[str, str] | None = None, **config: Any
) -> httpx.Response:
    app = app_of(**(KEYS | config))
    sent = dict(headers or {}) | ({} if key is None else {"authorization": f"Bearer {key}"})

    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://host") as client:
            return await client.request(method, path, headers=sent)

    return asyncio.run(go())


def all_routes() -> list[tuple[str, str]]:
    """Everything the application says it has, and what it does not say."""
    app = build_app(ServerState(config=ServerConfig(**KEYS)))
    documented = [
        (method.upper(), path.replace("{model_id}", "x").replace("{model_id:path}", "x"))
        for path, operations in app.openapi()["paths"].items()
        for method in operations
    ]
    assert len(documented) > 10
    return [*documented, ("GET", "/openapi.json"), ("GET", "/docs"), ("POST", "/nowhere"), ("GET", "/v1")]


@pytest.mark.parametrize(("method", "path"), all_routes())
def test_every_route_but_health_refuses_requests_without_a_key(method: str, path: str) -> None:
    response = call(method, path)
    if path == "/health":
        assert response.status_code == 200
        return
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    if path.startswith("/api/"):  # Ollama's form
        assert error.startswith("no valid key was given")
    else:
        assert error.get("code", 401) == 401
        assert error["type"] == ("authentication_error" if "messages" in path else "AuthenticationError")
    if path.startswith("/explain/"):  # the operator may see every request's story
        assert call(method, path, key="admin-key").status_code == 404
        return
    wrong = "second-key" if is_admin(path) else "admin-key"
    assert call(method, path, key=wrong).status_code == 401, "one kind of key does not open the other door"
    right = "admin-key" if is_admin(path) else "second-key"
    assert call(method, path, key=right).status_code != 401


@pytest.mark.parametrize("path", ["/", "/ui", "/ui/app.js"])
def test_the_page_is_open_only_while_there_is_one(path: str) -> None:
    assert call("GET", path).status_code == 200
    assert call("GET", path, ui=False).status_code == 401


@pytest.mark.parametrize("path", ["/health/", "/health/x", "//health", "/v1/../health", "/HEALTH", "/uix"])
def test_a_path_that_only_resembles_an_open_one_is_closed(path: str) -> None:
    async def inner(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError(f"{scope['path']} was let in")

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing needs to be read")

    layer = Auth(inner, ServerConfig(**KEYS))
    asyncio.run(layer({"type": "http", "path": path, "headers": []}, receive, send))
    assert sent[0]["status"] == 401


def test_what_looks_like_a_file_of_the_page_and_is_none_is_not_found() -> None:
    for path in ("/ui/../metrics", "/ui/%2e%2e/metrics", "/ui/..%2fmetrics", "/ui/nothing.js"):
        assert is_open("/ui/../metrics", ServerConfig())
        response = call("GET", path)
        assert response.status_code in (401, 404) and "infer_" not in response.text


def test_the_host_header_opens_nothing() -> None:
    for host in ("x/health", "host/health?", "health"):
        assert call("GET", "/metrics", headers={"host": host}).status_code == 401


@pytest.mark.parametrize(
    "value", ["", "first-key", "Basic first-key", "Bearer", "Bearer first-ke", "Bearer x y"]
)
def test_other_spellings_of_the_header_are_refused(value: str) -> None:
    assert call("GET", "/version", headers={"authorization": value}).status_code == 401


def test_the_scheme_may_be_written_in_any_case() -> None:
    assert call("GET", "/version", headers={"authorization": "bearer first-key"}).status_code == 200


def test_without_keys_the_server_is_open_but_admin_routes_are_off() -> None:
    assert call("GET", "/version", api_key=(), admin_key=None).status_code == 200
    response = call("POST", "/admin/drain", api_key=(), admin_key=None)
    assert response.status_code == 404
    assert "--admin-key" in response.json()["error"]["message"]


def test_an_admin_path_is_everything_under_admin_and_nothing_else() -> None:
    assert is_admin("/admin") and is_admin("/admin/x/y") and not is_admin("/administrator")


def test_a_websocket_is_closed() -> None:
    sent: list[Any] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("let in")

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    asyncio.run(Auth(inner, ServerConfig())({"type": "websocket", "path": "/", "headers": []}, receive, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_a_key_ring_compares_every_key() -> None:
    ring = KeyRing(["a", "b", "\u00e9"])
    assert ring.opens(b"a") and ring.opens(b"b") and ring.opens("\u00e9".encode())
    assert not ring.opens(b"") and not ring.opens(b"c")
    assert not KeyRing([])


@pytest.mark.parametrize(
    ("headers", "closes"), [({"content-length": "5"}, True), ({"content-length": "0"}, False), ({}, False)]
)
def test_a_refused_request_is_told_that_its_body_will_not_be_read(
    headers: dict[str, str], closes: bool
) -> None:
    sent: list[Any] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("let in")

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing needs to be read")

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "path": "/v1/models", "headers": raw}
    asyncio.run(Auth(inner, ServerConfig(**KEYS))(scope, receive, send))
    assert sent[0]["status"] == 401
    assert ((b"connection", b"close") in sent[0]["headers"]) is closes


@pytest.mark.parametrize("root_path", ["", "/api"])
def test_a_drain_can_be_undone_also_under_a_root_path(root_path: str) -> None:
    app = build_app(ServerState(config=ServerConfig(**KEYS)))

    async def go() -> list[int]:
        transport = httpx.ASGITransport(app, root_path=root_path)
        statuses = []
        async with httpx.AsyncClient(transport=transport, base_url="http://host") as client:
            for drain in (True, False):
                admin = {"authorization": "Bearer admin-key"}
                done = await client.post(f"{root_path}/admin/drain", json={"drain": drain}, headers=admin)
                seen = await client.get(f"{root_path}/health")
                statuses += [done.status_code, seen.status_code]
        return statuses

    assert asyncio.run(go()) == [200, 503, 200, 200]


@pytest.mark.parametrize("path", ["/api/admin/drain", "/admin/drain"])
def test_a_root_path_does_not_open_the_admin_routes(path: str) -> None:
    app = build_app(ServerState(config=ServerConfig(admin_key="admin-key")))

    async def go() -> int:
        transport = httpx.ASGITransport(app, root_path="/api")
        async with httpx.AsyncClient(transport=transport, base_url="http://host") as client:
            return (await client.post(path)).status_code

    assert asyncio.run(go()) == 401


@pytest.mark.parametrize("root_path", ["", "/", "/api", "/api/", "/admin"])
@pytest.mark.parametrize(
    "path",
    ["", "/", "/api", "/api/", "/api/admin/x", "/apiadmin/x", "/admin", "/admin/x", "//admin/x", "/x/api"],
)
def test_a_key_is_asked_for_on_the_path_that_the_router_matches(root_path: str, path: str) -> None:
    """A second reading of the path that disagrees with the first is how API keys were bypassed elsewhere."""
    scope = {"type": "http", "method": "GET", "path": path, "root_path": root_path, "headers": []}
    match, found = Route("/{rest:path}", lambda _: None).matches(scope)
    if match is Match.FULL:
        assert route_path(scope) == "/" + found["path_params"]["rest"]
    else:
        assert not route_path(scope).startswith("/")
