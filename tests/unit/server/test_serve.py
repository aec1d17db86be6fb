"""Before the first request: the socket, and what an operator is told about it."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter

from infer.config.server import ServerConfig
from infer.config.settings import EngineConfig
from infer.errors import ConfigError, ModelSourceError
from infer.server import serve as serving
from infer.server.fleet.fleet import Fleet
from infer.server.metrics import ServerMetrics
from infer.server.serve import _loop_name, bind, drain, loop_factory, serve, warn_if_open
from infer.server.state import ServerState


def test_a_path_where_another_server_listens_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with bind(ServerConfig(uds=str(path))), pytest.raises(ConfigError) as caught:
        bind(ServerConfig(uds=str(path)))
    said = str(caught.value)
    assert said == f"cannot listen on {path}: another server listens there; choose another --uds"


def test_a_file_that_is_no_socket_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="there is a file that is not a socket; choose another --uds"):
        bind(ServerConfig(uds=str(path)))
    assert path.read_text() == "mine"


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*; choose another --port or --host"):
            bind(ServerConfig(port=port))


def test_a_certificate_that_cannot_be_used_leaves_no_socket_behind(tmp_path: Path) -> None:
    path, cert = tmp_path / "s", tmp_path / "cert.pem"
    cert.write_text("no certificate")
    config = ServerConfig(uds=str(path), tls_cert=str(cert), tls_key=str(cert))
    with pytest.raises(ConfigError, match="tls_cert '.*' has no certificate, or a damaged one"):
        asyncio.run(serve({}, config, announce=print))
    assert not path.exists()


def test_no_request_waits_until_its_route_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """FastAPI makes the validators of a route when it is first matched."""
    state = ServerState(config=ServerConfig())
    app = serving.uvicorn_config(state, Fleet(state, ServerMetrics("infer"))).loaded_app
    monkeypatch.setattr(TypeAdapter, "__init__", lambda *_, **__: pytest.fail("a validator is made"))

    async def ask() -> list[int]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            paths = ("completions", "chat/completions", "messages", "responses", "embeddings")
            return [(await client.post(f"/v1/{path}", json={"model": 1})).status_code for path in paths]

    assert set(asyncio.run(ask())) <= {400, 404, 503}


@pytest.mark.parametrize(
    ("knobs", "warns"),
    [
        ({}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": "::"}, True),
        ({"host": "0.0.0.0", "api_key": ("k",)}, False),
        ({"uds": "/tmp/s"}, False),
        ({"uds": "/tmp/s", "host": "0.0.0.0"}, False),
    ],
)
def test_an_open_door_is_mentioned(
    knobs: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="infer.server.serve"):
        warn_if_open(ServerConfig(**knobs))
    assert bool(caplog.records) is warns


@pytest.mark.parametrize("num_active", [0, 1])
def test_who_waits_for_the_last_answers_is_told_how_not_to(
    num_active: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="infer.server.serve")
    state = ServerState(config=ServerConfig())
    state.board.count_request(num_active)
    asyncio.run(drain(state, timeout_s=0.0))
    first, *rest = caplog.messages
    assert first.startswith(f"draining requests={num_active} timeout_s=0")
    assert ("a second signal (Ctrl-C) ends them at once" in first) == bool(num_active) == bool(rest)


def interrupt_self() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_last_line_of_a_server_that_was_stopped_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="infer")
    config = ServerConfig(uds=str(tmp_path / "s"))
    asyncio.run(serve({}, config, announce=lambda url: interrupt_self()))
    assert [message.partition(" ")[0] for message in caplog.messages[-2:]] == ["draining", "stopped"]


def test_a_server_that_cannot_start_has_not_stopped_but_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="infer")
    models = {"": EngineConfig.from_knobs(model=str(tmp_path / "absent"))}
    with pytest.raises(ModelSourceError):
        asyncio.run(serve(models, ServerConfig(uds=str(tmp_path / "s")), announce=print))
    assert "stopped" not in caplog.messages


def test_a_second_signal_says_how_many_requests_it_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="infer")
    monkeypatch.setattr("os._exit", sys.exit)
    monkeypatch.setattr(serving, "CUT_OFF_S", 0)

    async def interrupt_twice() -> None:
        state = ServerState(config=ServerConfig())
        state.board.count_request(3)
        stopping = serving.stop_on_signals(state)
        interrupt_self()
        await stopping
        assert caplog.messages == []
        interrupt_self()
        await asyncio.sleep(60)

    with pytest.raises(SystemExit) as caught:
        asyncio.run(interrupt_twice())
    assert caught.value.code == 130
    assert caplog.messages == ["second signal ended_requests=3", "stopped"]


def test_a_terminal_that_closes_twice_cuts_nothing_off() -> None:
    async def hang_up() -> None:
        state = ServerState(config=ServerConfig())
        stopping = serving.stop_on_signals(state)
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.wait_for(stopping, 5)
            await asyncio.sleep(0.01)
        assert not state.is_cut_off

    asyncio.run(hang_up())


def test_a_server_started_with_nohup_does_not_mind_its_terminal() -> None:
    async def hang_up() -> None:
        stopping = serving.stop_on_signals(ServerState(config=ServerConfig()))
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.05)
        assert not stopping.done()

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        asyncio.run(hang_up())
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_name_of_the_loop_says_when_the_fast_one_is_missing() -> None:
    async def name() -> str:
        return _loop_name()

    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        assert "uvloop is not installed" in runner.run(name())
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        assert runner.run(name()) == "uvloop"


@pytest.mark.parametrize("prefix", ["9x", "", "a b", "a-b", "a\n"])
def test_a_prefix_that_no_metric_can_have_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigError, match="metrics_prefix must be letters, digits, underscores and colons"):
        ServerConfig(metrics_prefix=prefix)


def test_the_start_says_once_what_the_model_has_and_leaves_ready_to_another_line(
    checkpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="infer")
    knobs: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_blocks": 256, "block_size": 4}
    config = EngineConfig.from_knobs(model=checkpoint, max_batch_size=5, max_seq_len=64, **knobs)

    async def start() -> None:
        fleet = Fleet(ServerState(config=ServerConfig(in_process=True)), ServerMetrics("infer"))
        await fleet.start({"tiny": config})
        await fleet.close()

    asyncio.run(start())
    (line,) = (message for message in caplog.messages if message.startswith("engine built "))
    assert " max_seq_len=64 max_batch_size=5 " in line
    assert re.search(r" kv_cache=[\d.]+[KM]iB kv_cache_tokens=1024 prefix_caching=on ", line)
    assert re.search(
        r" device=cpu threads=\d+ attention=\w+ decode_attention=\w+ mlp=kernels weights=\S+ dtype=float32"
        r" kv_cache_dtype=float32$",
        line,
    )
    assert not any("ready" in message for message in caplog.messages)
