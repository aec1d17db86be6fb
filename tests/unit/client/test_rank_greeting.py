"""Nodes that meet: those with the same secret, version, settings and weights, and no others."""

from __future__ import annotations

import shlex
import signal
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from infer.cli.flags import knobs_from
from infer.cli.main import build_parser
from infer.cli.serve import read_models
from infer.client import rank_greeting
from infer.client.rank_greeting import facts_of, gather_nodes, join, listen, read_token
from infer.client.rank_node import serve_node
from infer.config.settings import EngineConfig, LoadConfig
from infer.errors import ConfigError

FACTS = {"version": "1", "model": "abc"}
SECRET = b"a secret of some length"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def meet(
    *nodes: tuple[int, bytes, dict[str, str]], nnodes: int = 2, strangers: tuple[bytes, ...] = ()
) -> tuple[list[int], list[Any]]:
    """Let nodes come to node 0, in this order: the numbers it has admitted, and what each node got."""
    load = LoadConfig(tensor_parallel_size=nnodes, nnodes=nnodes, master_port=free_port())
    admitted: dict[int, socket.socket] = {}
    is_over = threading.Event()
    server = listen(load)
    found: list[bool] = []
    args = server, load, SECRET, FACTS, admitted.__setitem__, is_over.is_set
    gate = threading.Thread(target=lambda: found.append(gather_nodes(*args)))
    gate.start()
    results: list[Any] = []
    try:
        for said in strangers:
            with socket.create_connection(("127.0.0.1", load.master_port)) as stranger:
                stranger.sendall(said)
        for number, token, facts in nodes:
            own = LoadConfig(
                tensor_parallel_size=nnodes, nnodes=nnodes, node_rank=number, master_port=load.master_port
            )
            try:
                connection = join(own, token, facts)
                connection.close()
                results.append(None)
            except ConfigError as error:
                results.append(str(error))
    finally:
        is_over.set()
        gate.join()
    assert found == [len(admitted) == nnodes - 1]
    for connection in admitted.values():
        connection.close()
    return sorted(admitted), results


def test_nodes_with_the_same_secret_and_facts_are_admitted() -> None:
    assert meet((2, SECRET, FACTS), (1, SECRET, FACTS), nnodes=3) == ([1, 2], [None, None])


def test_node_0_says_where_it_waits_and_how_the_others_are_started(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", rank_greeting.__name__)
    cut: dict[str, Any] = {"tensor_parallel_size": 3, "nnodes": 3, "master_port": free_port()}
    load = LoadConfig(model="a model", revision="v1.0", device="cpu", **cut)
    is_over = iter([False, True]).__next__
    assert not gather_nodes(listen(load), load, SECRET, FACTS, lambda *node: None, is_over)
    (said,) = caplog.messages
    where, commands = said.split("; start on the others: ")
    assert where == f"waiting for nodes at 127.0.0.1:{load.master_port}"
    for node, command in enumerate(commands.split("; "), 1):
        program, *words = shlex.split(command)
        args = build_parser().parse_args(words)
        (engine,) = read_models(args, knobs_from(args, with_server=True))[0].values()
        assert program == "infer" and engine.load == replace(load, node_rank=node)


@pytest.mark.parametrize(
    ("token", "facts", "reason"),
    [
        (b"another secret", FACTS, "the secret (INFER_RANK_TOKEN) of this node differs from node 0's"),
        (b"", FACTS, "the secret (INFER_RANK_TOKEN) of this node differs from node 0's"),
        (
            SECRET,
            FACTS | {"version": "2"},
            "node 1 has version=2, and node 0 has version=1; they must be equal",
        ),
        (
            SECRET,
            FACTS | {"model": "xyz"},
            "node 1 has model=xyz, and node 0 has model=abc; they must be equal",
        ),
        (SECRET, {"version": "1"}, "node 1 has model=None, and node 0 has model=abc; they must be equal"),
    ],
)
def test_others_are_refused_and_the_right_one_is_waited_for(
    token: bytes, facts: dict[str, str], reason: str
) -> None:
    admitted, (refused, other) = meet((1, token, facts), (1, SECRET, FACTS))
    assert reason in refused and other is None and admitted == [1]


def test_strangers_do_not_keep_nodes_out() -> None:
    bodies = (b"{}", b"[1,2]", '{"proof":"é"}'.encode(), b'{"proof":"\\ud800"}', b'{"nonce":"\\ud800"}')
    framed = (len(body).to_bytes(4, "little") + body for body in bodies)
    said = (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, *framed)
    assert meet((1, SECRET, FACTS), strangers=said) == ([1], [None])


def test_what_does_not_know_the_secret_is_not_taken_for_node_0() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pretend() -> None:
            connection = server.accept()[0]
            with connection:
                rank_greeting._send(connection, rank_greeting.Greeting(nonce="0" * 32))
                rank_greeting._receive(connection)
                rank_greeting._send(connection, rank_greeting.Greeting(proof="0" * 64))

        thread = threading.Thread(target=pretend)
        thread.start()
        load = LoadConfig(tensor_parallel_size=2, nnodes=2, node_rank=1, master_port=server.getsockname()[1])
        with pytest.raises(ConfigError, match="does not know the secret"):
            join(load, SECRET, FACTS)
        thread.join()


def test_a_secret_is_needed_beyond_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("INFER_RANK_TOKEN", raising=False)
    monkeypatch.delenv("INFER_RANK_TOKEN_FILE", raising=False)
    here, away = (LoadConfig(tensor_parallel_size=2, nnodes=2, master_addr=a) for a in ("::1", "192.0.2.7"))
    assert read_token(here) == b""
    with pytest.raises(ConfigError, match="master_addr=192.0.2.7 needs a secret .* set INFER_RANK_TOKEN"):
        read_token(away)
    file = tmp_path / "secret"
    monkeypatch.setenv("INFER_RANK_TOKEN_FILE", str(file))
    with pytest.raises(ConfigError, match="INFER_RANK_TOKEN_FILE=.* cannot be read"):
        read_token(away)
    file.write_text("0123456789abcdef\n")
    assert read_token(away) == b"0123456789abcdef"
    monkeypatch.setenv("INFER_RANK_TOKEN", "short")
    with pytest.raises(ConfigError, match="at least 16 characters, got 5"):
        read_token(away)


def test_an_address_of_another_machine_is_refused() -> None:
    load = LoadConfig(tensor_parallel_size=2, nnodes=2, master_addr="192.0.2.7")
    with pytest.raises(ConfigError, match="cannot listen on master_addr=192.0.2.7"):
        listen(load)


def test_facts_name_what_differs(checkpoint: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in Path(checkpoint).iterdir():
        (copy / file.name).write_bytes(file.read_bytes())

    def facts(**knobs: Any) -> dict[str, str]:
        knobs = {"model": str(copy), "tensor_parallel_size": 2, "nnodes": 2} | knobs
        return facts_of(EngineConfig.from_knobs(**knobs), torch.device("cpu"))

    assert facts() == facts(model=checkpoint, node_rank=1, num_threads=3, max_batch_size=7)
    assert facts()["dtype"] == "auto" and facts(dtype="float32")["dtype"] == "float32"
    (weights,) = copy.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert facts()["model"] != facts(model=checkpoint)["model"]


def test_silent_strangers_do_not_hold_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_greeting, "GREETING_S", 3600.0)  # a stranger may be there for long
    monkeypatch.setattr(rank_greeting, "MAX_GUESTS", 4)
    load = LoadConfig(tensor_parallel_size=2, nnodes=2, master_port=free_port())
    own = LoadConfig(tensor_parallel_size=2, nnodes=2, node_rank=1, master_port=load.master_port)
    admitted: dict[int, socket.socket] = {}
    is_over = threading.Event()
    args = listen(load), load, SECRET, FACTS, admitted.__setitem__, is_over.is_set
    gate = threading.Thread(target=gather_nodes, args=args)
    gate.start()
    joined: list[socket.socket] = []
    strangers = [socket.create_connection(("127.0.0.1", load.master_port)) for _ in range(9)]
    try:
        for stranger in strangers:
            stranger.settimeout(30)
            assert stranger.recv(1)  # each is greeted, whatever the others do
        strangers[-1].sendall(b"\x10\x00")  # it may take its time with the rest
        for stranger in strangers[:5]:  # the oldest have made room
            while stranger.recv(1 << 10):
                pass
        node = threading.Thread(target=lambda: joined.append(join(own, SECRET, FACTS)), daemon=True)
        node.start()
        gate.join(30)
        node.join(30)
        assert list(admitted) == [1] and len(joined) == 1
    finally:
        is_over.set()
        for connection in (*strangers, *admitted.values(), *joined):
            connection.close()
        gate.join(30)


def test_a_model_that_cannot_be_cut_is_refused_by_every_node(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 0 refuses it before it listens, so the others would wait for good."""
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    config = EngineConfig.from_knobs(
        model=checkpoint, device="cpu", tensor_parallel_size=6, nnodes=2, node_rank=1, master_port=free_port()
    )
    with pytest.raises(ConfigError, match="tensor_parallel_size=6"):
        serve_node(config)
