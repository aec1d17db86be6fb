"""Requests of a command to a server, by an address or a unix socket, with nothing but the standard library.

http://host:port, https://host:port     through the proxy of the environment, if one is set
unix:///path/of/socket                  on this machine: `infer serve --uds /path/of/socket`
"""

from __future__ import annotations

import http.client
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import unquote

from infer.errors import ConfigError

UNIX = "unix://"
SCHEMES = ("http://", "https://", UNIX)


class Unreachable(OSError):
    """A server that did not answer; the text says which, and why."""


def base_of(url: str) -> str:
    """Return the address of a server without the path of its API."""
    if not url.startswith(SCHEMES):
        raise ConfigError(f"--url must start with http://, https:// or unix://, got {url!r}")
    return url if url.startswith(UNIX) else url.rstrip("/").removesuffix("/v1")


def open_url(
    base: str, path: str, *, data: bytes | None = None, headers: Mapping[str, str], timeout_s: float
) -> http.client.HTTPResponse:
    """Send a request and wait for the head of its answer; a status from 400 on raises `HTTPError`."""
    is_unix = base.startswith(UNIX)
    handlers = [_SocketHandler(unquote(base.removeprefix(UNIX)))] if is_unix else []
    opener = urllib.request.build_opener(*handlers)
    try:
        url = f"{'http://localhost' if is_unix else base}{path}"
        request = urllib.request.Request(url, data=data, headers=dict(headers))
        answer: http.client.HTTPResponse = opener.open(request, timeout=timeout_s)
    except urllib.error.HTTPError:
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: not an address
        reason = getattr(error, "reason", None) or error
        advice = "is the server running?"
        if isinstance(reason, ssl.SSLCertVerificationError):
            advice = "SSL_CERT_FILE=cert.pem in the environment makes it trusted"
        raise Unreachable(f"cannot reach {base}: {reason}; {advice}") from None
    return answer


class _SocketHandler(urllib.request.HTTPHandler):
    """Opens plain HTTP addresses through a unix socket, and never through a proxy."""

    handler_order = urllib.request.ProxyHandler.handler_order - 1  # asked first

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(_SocketConnection, self._path), request)


class _SocketConnection(http.client.HTTPConnection):
    def __init__(self, path: str, host: str, **options: Any) -> None:
        super().__init__(host, **options)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
