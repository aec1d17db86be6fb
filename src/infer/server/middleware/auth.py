"""The keys that requests need: every path needs one unless listed as open.

    /health, the pages at /, /ui, /docs    open: they reveal and change nothing
    /admin/...                             the admin key; without one configured, these routes do not exist,
                                           except /admin/live if only this machine can reach the server and
                                           no header of the request names a proxy
    /explain/...                           one of the API keys, for its own requests; or the admin key, for
                                           all requests
    everything else, known or not          one of the API keys, if any is configured

The decision uses the same path as the router (`scope["path"]` below its root path), so it cannot disagree
with a second parser of the URL or the Host header. All keys are compared as hashes and in constant time, so
the time of a rejection does not reveal how close a guess was. A key is sent as `authorization: Bearer KEY`,
or as `x-api-key: KEY`, as Anthropic's clients do.

With `cache_isolation=key`, a keyed hash of the API key is stored in the request's record and becomes part of
the salt of its prompts, so that two keys share no cached prefix. The hash is keyed with a secret that is
derived from all API keys: every API process has the same secret, which cannot be computed without them.

A plain hash of the API key is the asker, by which an alias of several models chooses one (state.py).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from infer.config.server import ServerConfig
from infer.server.protocol.errors import ApiError
from infer.server.state import current_record

HEALTH_PATH = "/health"
PAGE_PATHS = ("/", "/ui")
PAGE_PREFIX = "/ui/"
DOCS_PATH = "/docs"
ADMIN_PREFIX = "/admin"
EXPLAIN_PREFIX = "/explain/"
LIVE_PATH = "/admin/live"
ADAPTER_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")  # vLLM's paths; for the operator only
PROXY_HEADERS = (b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via")  # clients of proxies may be anywhere


def route_path(scope: Scope) -> str:
    """Return the path of a request below its root path, as the router matches it."""
    path, root_path = str(scope["path"]), str(scope.get("root_path", ""))
    below = path.removeprefix(root_path)
    return below if path == root_path or below.startswith("/") else path


def header_of(scope: Scope, name: bytes) -> bytes | None:
    """Return the value of a request's first header with a name; None: there is none."""
    return next((bytes(value) for key, value in scope["headers"] if key == name), None)


def is_open(path: str, config: ServerConfig) -> bool:
    """Return True if a path needs no key."""
    is_page = config.ui and (path in PAGE_PATHS or path.startswith(PAGE_PREFIX))
    is_docs = config.docs and (path == DOCS_PATH or path.startswith(DOCS_PATH + "/"))
    return path == HEALTH_PATH or is_page or is_docs


def is_admin(path: str) -> bool:
    """Return True if a path belongs to the operator."""
    return path == ADMIN_PREFIX or path.startswith(ADMIN_PREFIX + "/") or path in ADAPTER_PATHS


class KeyRing:
    """A set of keys, stored as hashes."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def opens(self, key: bytes) -> bool:
        """Return True if `key` is one of the keys, in constant time."""
        given = hashlib.sha256(key).digest()
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(matches)


class Auth:
    """ASGI middleware: passes a request on, or answers 401 (404 if admin routes are off)."""

    def __init__(self, app: ASGIApp, config: ServerConfig, *, is_private: bool = False) -> None:
        self._app = app
        self._config = config
        self._is_private = is_private  # True: only this machine can connect, and it needs no key
        self._clients = KeyRing(config.api_key)
        self._tenants = _tenant_secret(config.api_key) if config.cache_isolation == "key" else None
        self._admins = KeyRing(() if config.admin_key is None else (config.admin_key,))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or reject it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})  # the server has no websockets
            return
        path = route_path(scope)
        if is_admin(path) and not (path == LIVE_PATH and self._is_keyless(scope)):
            if not self._admins:
                message = "admin routes are off; start the server with --admin-key to use them"
                await ApiError(status=404, message=message).send_unread(scope, receive, send)
                return
            ring = self._admins
        elif is_open(path, self._config) or not self._clients:
            await self._app(scope, receive, send)
            return
        else:
            ring = self._clients
        is_operator = path.startswith(EXPLAIN_PREFIX) and self._admins.opens(key_of(scope))
        if ring.opens(key := key_of(scope)) or is_operator:
            if (record := current_record()) is not None:
                owner = hashlib.sha256(key).hexdigest()
                record.owner = None if is_operator else owner
                if self._tenants is not None:
                    record.tenant = hmac.new(self._tenants, key, hashlib.sha256).hexdigest()
            await self._app(scope, receive, send)
            return
        message = "no valid key was given; send it as 'authorization: Bearer KEY' or 'x-api-key: KEY'"
        error = ApiError(status=401, message=message, headers={"www-authenticate": "Bearer"})
        await error.send_unread(scope, receive, send)

    def _is_keyless(self, scope: Scope) -> bool:
        """Return True if a request may view /admin/live without a key, judging by its headers."""
        is_direct = all(header_of(scope, name) is None for name in PROXY_HEADERS)
        return self._is_private and not self._admins and is_direct


def _tenant_secret(keys: Iterable[str]) -> bytes:
    digests = sorted(hashlib.sha256(key.encode()).digest() for key in keys)
    return hashlib.sha256(b"cache isolation" + b"".join(digests)).digest()


def key_of(scope: Scope) -> bytes:
    """Return the key in the authorization header, else in Anthropic's header; empty without either."""
    given = header_of(scope, b"authorization")
    if given is None:
        return (header_of(scope, b"x-api-key") or b"").strip()
    scheme, _, key = given.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""
