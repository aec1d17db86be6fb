"""Access from web pages of other origins: CORS, and protection of a loopback server against DNS rebinding.

After it is loaded, any web page can point its own domain at 127.0.0.1 (DNS rebinding) and then talk to a
local server as if it were its own. The browser still sends the page's domain in the Host header. So a server
that listens on loopback without a key accepts only host names of this machine, and names that the operator
adds.
"""

from __future__ import annotations

import re
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from infer.config.server import ServerConfig, is_loopback
from infer.server.middleware.auth import header_of
from infer.server.protocol.errors import ApiError

_NAME_AND_PORT = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[^\[\]:]+)(:[0-9]*)?")

_EXPOSED = ("x-request-id", "x-infer-ignored", "x-infer-model", "retry-after")  # headers that pages can read


def cors_options(config: ServerConfig) -> dict[str, Any]:
    """Return the options of CORS: requests that allowed origins may send, and headers they may read."""
    # OpenAI's client sends a dozen x-stainless-... headers
    allowed = {"allow_origins": list(config.cors_origin), "allow_methods": ["GET", "POST", "DELETE"]}
    return {**allowed, "allow_headers": ["*"], "expose_headers": _EXPOSED}


def needs_host_check(config: ServerConfig) -> bool:
    """Return True if a server trusts its clients because only this machine can reach it."""
    return config.uds is None and not config.api_key and is_loopback(config.host)


class HostCheck:
    """ASGI middleware: answers 403 to requests with the name of another host."""

    def __init__(self, app: ASGIApp, allowed_host: tuple[str, ...]) -> None:
        self._app = app
        self._allowed = frozenset(name.lower() for name in allowed_host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or reject it."""
        if scope["type"] == "http":
            host = _host_of(scope)
            if host is not None and not is_loopback(host) and host.lower() not in self._allowed:
                message = (
                    f"this server answers for this machine only, not for host {host[:100]!r}; "
                    "start it with --allowed-host NAME, with --api-key, or on another --host"
                )
                await ApiError(status=403, message=message).send_unread(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _host_of(scope: Scope) -> str | None:
    """Return the Host header without its port, or unchanged if it is not a name and a port.

    None if the header is missing; browsers always send it.
    """
    given = header_of(scope, b"host")
    if given is None:
        return None
    text = given.decode("latin-1").strip()
    found = _NAME_AND_PORT.fullmatch(text)
    return found["name"] if found else text
