"""The handshake of the nodes of a model: node 0 listens, the others connect, and both sides authenticate.

    node 0                                      node 1
    nonce                                   ──►
                                            ◄── its nonce, number and facts, and a proof of the secret
    a proof of the same secret, or a refusal ──►

A proof is a keyed hash of both nonces, so the secret itself is never sent. It is in INFER_RANK_TOKEN, or in
the file that INFER_RANK_TOKEN_FILE names, and is optional only on a loopback address. Facts must be equal:
the version, the settings that decide how weights are loaded, and the weights. Later traffic on the connection
is neither signed nor encrypted, so only the nodes should be able to reach this network.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import logging
import os
import secrets
import selectors
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec
import torch

from infer import __version__
from infer.client.messages import TOKEN
from infer.config.settings import EngineConfig, LoadConfig
from infer.engine.machine import device_facts
from infer.errors import ConfigError
from infer.loader.find.source import resolve_model

logger = logging.getLogger(__name__)

TOKEN_FILE = "INFER_RANK_TOKEN_FILE"
MIN_TOKEN_LEN: Final = 16
GREETING_S: Final = 10.0  # time limit of the handshake
RETRY_S: Final = 0.5  # seconds until a node retries
TELL_S: Final = 30.0  # seconds between two log lines about missing nodes
WARN_S: Final = 0.5  # seconds between two log lines about rejected nodes
MAX_GUESTS: Final = 64  # most unauthenticated connections; beyond it, the oldest are closed
MAX_BYTES: Final = 1 << 16
_HEAD_BYTES: Final = 4
_EQUAL: Final = (
    "dtype", "quantization", "model_impl", "max_seq_len", "tensor_parallel_size", "pipeline_parallel_size",
    "nnodes",
)  # fmt: skip
_NUM_PAGES, _PAGE = 16, 4096  # samples of each weight file that are compared


class Greeting(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message of the handshake, as JSON after its length."""

    nonce: str = ""
    proof: str = ""
    node: int = 0
    facts: dict[str, str] = {}
    refused: str | None = None  # why the two sides cannot work together


def read_token(load: LoadConfig) -> bytes:
    """Return the secret of the nodes; none is needed on a loopback address."""
    text = os.environ.get(TOKEN, "")
    if not text and (path := os.environ.get(TOKEN_FILE)):
        try:
            text = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{TOKEN_FILE}={path} cannot be read: {error}") from None
    if not text and not _is_loopback(load.master_addr):
        raise ConfigError(
            f"nnodes={load.nnodes} with master_addr={load.master_addr} needs a secret that all nodes have: "
            f"set {TOKEN}, or {TOKEN_FILE} to the path of a file with it"
        )
    if text and len(text) < MIN_TOKEN_LEN:
        raise ConfigError(f"{TOKEN} must have at least {MIN_TOKEN_LEN} characters, got {len(text)}")
    return text.encode()


def facts_of(config: EngineConfig, device: torch.device) -> dict[str, str]:
    """Return the facts that must be equal on all nodes; `device` belongs to this node's first rank."""
    load = config.load
    source = resolve_model(load.model, revision=load.revision, show_progress=False)
    files = source.weight_files if source.is_gguf else [source.path / "config.json", *source.weight_files]
    knobs = {name: str(getattr(load, name)) for name in _EQUAL}
    machine = device_facts(device) | {"byteorder": sys.byteorder}
    return {"version": __version__, **knobs, **machine, "model": _digest(files)}


def listen(load: LoadConfig) -> socket.socket:
    """Return the socket on which node 0 waits for the others."""
    try:
        family = socket.getaddrinfo(load.master_addr, load.master_port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((load.master_addr, load.master_port), family=family)
    except OSError as error:
        raise ConfigError(
            f"node 0 cannot listen on master_addr={load.master_addr}, master_port={load.master_port}: "
            f"{error}; master_addr is an address of this machine that the other nodes reach"
        ) from None


def command_of(load: LoadConfig, node: int) -> str:
    """Return the command that starts another node."""
    plain, names = LoadConfig(), (*_EQUAL, "revision", "device", "master_addr", "master_port")
    given = {name: getattr(load, name) for name in names if getattr(load, name) != getattr(plain, name)}
    flags = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return shlex.join(["infer", "serve", *filter(None, [load.model]), *flags, "--node-rank", str(node)])


def gather_nodes(
    server: socket.socket,
    load: LoadConfig,
    token: bytes,
    facts: Mapping[str, str],
    add: Callable[[int, socket.socket], None],
    is_over: Callable[[], bool],
) -> bool:
    """Wait for all other nodes, as node 0; `add` gets each connection. False: `is_over` before that."""
    missing, told_at, warned_at = set(range(1, load.nnodes)), -TELL_S, -WARN_S
    guests: dict[socket.socket, _Guest] = {}  # earliest first
    with server, selectors.DefaultSelector() as ready, contextlib.ExitStack() as leaving:
        leaving.callback(_close, guests)
        server.setblocking(False)
        ready.register(server, selectors.EVENT_READ)

        def dismiss(connection: socket.socket, reason: object) -> None:
            nonlocal warned_at
            ready.unregister(connection)
            address = guests.pop(connection).address
            connection.close()
            if time.monotonic() - warned_at >= WARN_S:
                warned_at = time.monotonic()
                logger.warning("node not admitted address=%s reason=%r", address, str(reason))

        while missing and not is_over():
            if time.monotonic() - told_at >= TELL_S:
                told_at = time.monotonic()
                where = f"{load.master_addr}:{load.master_port}"
                commands = "; ".join(command_of(load, node) for node in sorted(missing))
                logger.info("waiting for nodes at %s; start on the others: %s", where, commands)
            for connection in [each.fileobj for each, _ in ready.select(RETRY_S)]:
                assert isinstance(connection, socket.socket)
                try:
                    if connection is server:
                        own, address = server.accept()
                        guests[own] = _Guest(address[0], time.monotonic() + GREETING_S)
                        ready.register(own, selectors.EVENT_READ)
                        own.setblocking(False)
                        _send(own, Greeting(nonce=guests[own].nonce))
                    elif (theirs := guests[connection].hear(connection)) is not None:
                        _admit(connection, token, facts, missing, theirs, guests[connection].nonce)
                        ready.unregister(connection)
                        del guests[connection]
                        add(theirs.node, connection)
                        missing.remove(theirs.node)
                except (OSError, ValueError, msgspec.MsgspecError) as error:
                    if connection in guests:
                        dismiss(connection, error)
                    else:  # no more connections can be accepted now
                        time.sleep(RETRY_S)
            for connection, guest in list(guests.items()):
                if len(guests) > MAX_GUESTS or time.monotonic() > guest.until:
                    dismiss(connection, "it has not authenticated")
    return not missing


def _close(connections: Iterable[socket.socket]) -> None:
    for connection in connections:
        connection.close()


class _Guest:
    """A connection to node 0 that has not yet authenticated."""

    def __init__(self, address: str, until: float) -> None:
        self.address, self.until, self.nonce = address, until, secrets.token_hex(16)
        self._heard = bytearray()

    def hear(self, connection: socket.socket) -> Greeting | None:
        """Read the bytes that have arrived; returns the greeting once it is complete."""
        piece = connection.recv(_HEAD_BYTES + MAX_BYTES - len(self._heard))
        if not piece:
            raise ConnectionResetError("the other side has closed the connection")
        self._heard += piece
        length = _check_length(self._heard)
        if len(self._heard) < _HEAD_BYTES + length:
            return None
        return msgspec.json.decode(self._heard[_HEAD_BYTES : _HEAD_BYTES + length], type=Greeting)


def join(load: LoadConfig, token: bytes, facts: Mapping[str, str]) -> socket.socket:
    """Connect to node 0, retrying until it listens; raises `ConfigError` if it rejects this node."""
    told_at = -TELL_S
    while True:
        try:
            connection = socket.create_connection((load.master_addr, load.master_port), GREETING_S)
            try:
                _introduce(connection, load, token, facts)
                return connection
            except BaseException:
                connection.close()
                raise
        except (OSError, msgspec.MsgspecError) as error:
            if time.monotonic() - told_at >= TELL_S:
                told_at = time.monotonic()
                where = f"{load.master_addr}:{load.master_port}"
                logger.info("waiting for node 0 address=%s reason=%r", where, str(error))
            time.sleep(RETRY_S)


def _admit(
    connection: socket.socket,
    token: bytes,
    facts: Mapping[str, str],
    missing: set[int],
    theirs: Greeting,
    nonce: str,
) -> None:
    """Answer a node that wants to join; raises an error if it is not admitted."""
    if not _is_proof(theirs.proof, _prove(token, "node", nonce, theirs)):
        reason = f"the secret ({TOKEN}) of this node differs from node 0's"
        _send(connection, Greeting(refused=reason))
        raise ConnectionRefusedError(f"node {theirs.node} has another secret ({TOKEN})")
    for name, value in facts.items():
        if theirs.facts.get(name) != value:
            reason = f"node {theirs.node} has {name}={theirs.facts.get(name)}, and node 0 has {name}={value}"
            _send(connection, Greeting(refused=f"{reason}; they must be equal"))
            raise ConnectionRefusedError(reason)
    if theirs.node not in missing:  # the old one may be about to exit, so the new one is too early
        raise ConnectionRefusedError(f"node {theirs.node} has already joined")
    _send(connection, Greeting(proof=_prove(token, "head", nonce, theirs)))


def _introduce(connection: socket.socket, load: LoadConfig, token: bytes, facts: Mapping[str, str]) -> None:
    """Perform the handshake with node 0."""
    first = _receive(connection)
    own = Greeting(nonce=secrets.token_hex(16), node=load.node_rank, facts=dict(facts))
    _send(connection, msgspec.structs.replace(own, proof=_prove(token, "node", first.nonce, own)))
    last = _receive(connection)
    if last.refused is not None:
        raise ConfigError(f"node 0 at {load.master_addr} rejects this node: {last.refused}")
    if not _is_proof(last.proof, _prove(token, "head", first.nonce, own)):
        raise ConfigError(f"the server at {load.master_addr}:{load.master_port} does not know the secret")


def _prove(token: bytes, who: str, nonce: str, node: Greeting) -> str:
    told = msgspec.json.encode([who, nonce, node.nonce, node.node, sorted(node.facts.items())])
    return hmac.new(token, told, hashlib.sha256).hexdigest()


def _is_proof(given: str, proof: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), proof.encode())


def _send(connection: socket.socket, greeting: Greeting) -> None:
    body = msgspec.json.encode(greeting)
    connection.sendall(len(body).to_bytes(_HEAD_BYTES, "little") + body)


def _receive(connection: socket.socket) -> Greeting:
    length = _check_length(_read(connection, _HEAD_BYTES))
    return msgspec.json.decode(_read(connection, length), type=Greeting)


def _check_length(head: bytes | bytearray) -> int:
    """Return the length of a greeting in bytes, from its header."""
    length = int.from_bytes(head[:_HEAD_BYTES], "little")
    if length > MAX_BYTES:
        raise ConnectionError(f"a greeting of {length} bytes")
    return length


def _read(connection: socket.socket, length: int) -> bytes:
    body = b""
    while len(body) < length:
        piece = connection.recv(length - len(body))
        if not piece:
            raise ConnectionResetError("the other side has closed the connection")
        body += piece
    return body


def _digest(files: list[Path]) -> str:
    """Return sixteen digits that hash the files' sizes and evenly spaced pages in them."""
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for number in range(_NUM_PAGES):
                file.seek(max(size - _PAGE, 0) * number // (_NUM_PAGES - 1))
                digest.update(file.read(_PAGE))
    return digest.hexdigest()[:16]


def _is_loopback(address: str) -> bool:
    try:
        found = socket.getaddrinfo(address, None)
    except OSError:
        return False
    return all(ipaddress.ip_address(each[4][0]).is_loopback for each in found)
