"""Certificates and keys: what works, and what is told about those that do not."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from infer.config.server import ServerConfig
from infer.errors import ConfigError
from infer.server import connection
from infer.server.connection import GuardedConnection
from infer.server.fleet.fleet import Fleet
from infer.server.metrics import ServerMetrics
from infer.server.processes.board import Board
from infer.server.serve import HttpServer, loop_factory, uvicorn_config
from infer.server.state import ServerState
from infer.server.tls import tls_context, warn_if_expired

DAY_S = 86_400


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with certificates and keys, good and bad."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    directory = tmp_path_factory.mktemp("tls")
    for name in ("a", "b"):
        openssl(
            directory,
            f"req -x509 -newkey rsa:2048 -nodes -keyout {name}.key -out {name}.pem -days 3 -subj /CN=x",
        )
    openssl(directory, "pkey -in a.key -aes256 -passout pass:x -out new.key")
    openssl(directory, "rsa -in a.key -aes256 -traditional -passout pass:x -out old.key")
    cert, key = (directory / "a.pem").read_text(), (directory / "a.key").read_text()
    (directory / "cut.pem").write_text(cert[:300] + "\n-----END CERTIFICATE-----\n")
    (directory / "chain.pem").write_text(cert + (directory / "cut.pem").read_text())
    (directory / "cut.key").write_text(key[:300] + "\n-----END PRIVATE KEY-----\n")
    (directory / "empty").touch()
    return directory


def openssl(directory: Path, command: str) -> None:
    subprocess.run(["openssl", *command.split()], cwd=directory, check=True, capture_output=True)


def config_of(files: Path, cert: str, key: str) -> ServerConfig:
    return ServerConfig(tls_cert=str(files / cert), tls_key=str(files / key))


def test_a_certificate_and_its_key_are_taken(files: Path) -> None:
    context = tls_context(config_of(files, "a.pem", "a.key"))
    assert context is not None and context.minimum_version >= ssl.TLSVersion.TLSv1_2
    assert context.options & ssl.OP_NO_RENEGOTIATION, (
        "older versions of OpenSSL let a client ask for handshakes"
    )
    assert tls_context(ServerConfig()) is None


@pytest.mark.parametrize(
    ("cert", "key", "message"),
    [
        ("none.pem", "a.key", "cannot read tls_cert '{}none.pem': No such file or directory"),
        ("a.pem", "none.key", "cannot read tls_key '{}none.key': No such file or directory"),
        (".", "a.key", "cannot read tls_cert '{}.': Is a directory"),
        ("cut.pem", "a.key", "tls_cert '{}cut.pem' has no certificate, or a damaged one, in PEM format"),
        ("chain.pem", "a.key", "tls_cert '{}chain.pem' has no certificate, or a damaged one, in PEM format"),
        ("empty", "a.key", "tls_cert '{}empty' has no certificate, or a damaged one, in PEM format"),
        ("a.key", "a.pem", "tls_cert '{}a.key' has no certificate, or a damaged one, in PEM format"),
        ("a.pem", "cut.key", "tls_key '{}cut.key' has no private key, or a damaged one, in PEM format"),
        ("a.pem", "empty", "tls_key '{}empty' has no private key, or a damaged one, in PEM format"),
        ("a.pem", "b.key", "tls_key '{}b.key' is not the key of tls_cert '{}a.pem'"),
        ("a.pem", "new.key", "tls_key '{}new.key' is encrypted; write it without a passphrase: openssl pkey"),
        ("a.pem", "old.key", "tls_key '{}old.key' is encrypted; write it without a passphrase: openssl pkey"),
    ],
)
def test_what_cannot_be_used_is_told_by_file_and_reason(
    files: Path, cert: str, key: str, message: str
) -> None:
    config = ServerConfig(tls_cert=f"{files}/{cert}", tls_key=f"{files}/{key}")
    with pytest.raises(ConfigError) as caught:
        tls_context(config)
    said = str(caught.value)
    assert said.startswith(message.replace("{}", f"{files}/")) and "\n" not in said


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, loop_factory()])
@pytest.mark.parametrize("begin", [b"GET /health HTTP/1.1\r\nx: ", b"no HTTP"])
def test_a_client_that_sends_no_request_cannot_put_off_the_end_of_its_connection(
    files: Path,
    begin: bytes,
    make_loop: Callable[[], asyncio.AbstractEventLoop] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It trickles a head, and never answers the alert that closes the connection."""
    monkeypatch.setattr(GuardedConnection, "head_timeout_s", 0.3)
    monkeypatch.setattr(connection, "LINGER_S", 0.3)

    def trickle(port: int) -> float:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(files / "a.pem")
        context.check_hostname = False
        with context.wrap_socket(socket.create_connection(("127.0.0.1", port), timeout=20)) as client:
            began = time.monotonic()
            client.sendall(begin)
            with contextlib.suppress(OSError):
                for _ in range(200):
                    client.sendall(b"G")
                    time.sleep(0.05)
            return time.monotonic() - began

    async def main() -> float:
        state = ServerState(config=config_of(files, "a.pem", "a.key"))
        http = uvicorn_config(state, Fleet(state, ServerMetrics("infer")))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            port = listener.getsockname()[1]
            server = HttpServer(http, listener, Board())
            serving = asyncio.create_task(server.serve())
            took_s = await asyncio.to_thread(trickle, port)
            server.should_exit = True
            await serving
        return took_s

    with asyncio.Runner(loop_factory=make_loop) as runner:
        assert 0.3 <= runner.run(main()) < 5


@pytest.mark.parametrize(
    ("days", "words"), [(-2, ["certificate not valid yet"]), (0.5, []), (4, ["certificate has expired"])]
)
def test_a_certificate_that_is_not_valid_today_is_mentioned(
    files: Path,
    days: float,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = time.time() + days * DAY_S
    monkeypatch.setattr(time, "time", lambda: now)
    with caplog.at_level(logging.WARNING, logger="infer.server.tls"):
        warn_if_expired(config_of(files, "a.pem", "a.key"))
        warn_if_expired(ServerConfig())
    assert [message[: len(word)] for message, word in zip(caplog.messages, words, strict=True)] == words
