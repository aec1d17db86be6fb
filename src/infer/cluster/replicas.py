"""The replicas that a front knows, and the choice among them for a request.

A request goes to the replica that served a body with the same beginning, whose prefix cache may hold it,
unless that replica runs over MAX_IMBALANCE more requests than the least busy one. Bodies are compared in
pieces of 256 bytes, because the front has no tokenizer. (Engines of one server: server/fleet/router.py.)
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit
from weakref import WeakSet

from infer.cluster.scaling import LoadReport, read_load
from infer.cluster.upstream import ReplicaGone, Upstream

logger = logging.getLogger(__name__)

PIECE = 256  # bytes hashed at a time
MAX_PIECES = 64
MAX_REMEMBERED = 32_768
MAX_IMBALANCE = 4
PROBE_S = 5.0
MAX_IDLE = 64  # connections kept to one replica
SILENT_S = 2.0  # seconds without a byte after which an answer of a replica that has ended is given up


@dataclass(slots=True, eq=False)
class RemoteServer:
    """A server on some node: its address, and its state."""

    number: int
    url: str
    key: str  # a key that it accepts, for the front's own requests
    is_up: bool = True  # state after the last request or probe
    is_leaving: bool = False  # True if it ends after its last request
    num_active: int = 0  # requests of the front that it is running
    idle: list[Upstream] = field(default_factory=list)
    opened: WeakSet[Upstream] = field(default_factory=WeakSet)  # connections that are idle or in use

    async def connect(self) -> Upstream:
        """An idle connection, or else a new one."""
        while self.idle:
            kept = self.idle.pop()
            if kept.is_reusable:
                return kept
            kept.close()
        return await self.connect_anew()

    async def connect_anew(self) -> Upstream:
        """A new connection."""
        parts = urlsplit(self.url)
        assert parts.hostname is not None and parts.port is not None
        made = await Upstream.connect(parts.hostname, parts.port)
        self.opened.add(made)
        return made

    def give_back(self, connection: Upstream) -> None:
        """Keep a connection for the next request, if it can take one."""
        if connection.is_reusable and len(self.idle) < MAX_IDLE:
            self.idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close idle connections, and others when nothing more comes over them: the replica has ended.

        A machine that has lost its power or its network closes no connection itself. A process that has ended
        may have sent more than was read, and a report of its end may be wrong.
        """
        for connection in list(self.opened):
            connection.close_when_silent(0.0 if connection in self.idle else SILENT_S)

    async def get(self, path: str) -> tuple[int, bytes]:
        """Fetch a page with the front's own key."""
        head = f"GET {path} HTTP/1.1\r\nhost: replica\r\nauthorization: Bearer {self.key}\r\n\r\n"
        async with asyncio.timeout(PROBE_S):
            connection = await self.connect()
            try:
                status, _ = await connection.ask(head.encode())
                page = b"".join([piece async for piece in connection.pieces()])
            except BaseException:
                connection.close()
                raise
        self.give_back(connection)
        return status, page


class ReplicaSet:
    """All current replicas. Belongs to one event loop."""

    def __init__(self) -> None:
        self.servers: list[RemoteServer] = []
        self._served_by: OrderedDict[int, RemoteServer] = OrderedDict()
        self._turn = 0

    @property
    def up(self) -> list[RemoteServer]:
        """The replicas that take requests."""
        return [server for server in self.servers if server.is_up and not server.is_leaving]

    def remove(self, server: RemoteServer) -> None:
        """Remove a replica that has ended."""
        if server in self.servers:
            self.servers.remove(server)
        server.is_up = False
        server.close()
        self._served_by = OrderedDict((k, s) for k, s in self._served_by.items() if s is not server)

    def pick(self, body: bytes, without: Collection[RemoteServer] = ()) -> RemoteServer | None:
        """Choose the replica for a request, and remember the choice; None: no replica is left."""
        able = [server for server in self.up if server not in without]
        if not able:
            return None
        least = min(server.num_active for server in able)
        keys = _beginnings(body) if len(able) > 1 else []
        chosen = next((s for key in reversed(keys) if (s := self._served_by.get(key)) in able), None)
        if chosen is None or chosen.num_active > least + MAX_IMBALANCE:
            self._turn += 1  # equally good replicas take turns
            close = [server for server in able if server.num_active == least]
            chosen = close[self._turn % len(close)]
        for key in keys:
            self._served_by[key] = chosen
            self._served_by.move_to_end(key)
        while len(self._served_by) > MAX_REMEMBERED:
            self._served_by.popitem(last=False)
        return chosen

    async def probe(self) -> list[LoadReport]:
        """Ask every replica for its state; returns the loads of replicas that take requests."""
        servers = list(self.servers)
        found = await asyncio.gather(*(self._probe(server) for server in servers))
        return [load for load in found if load is not None]

    async def _probe(self, server: RemoteServer) -> LoadReport | None:
        status, load = 0, None
        with suppress(ReplicaGone, TimeoutError):
            status, _ = await server.get("/health")
            if status == 200 and not server.is_leaving:
                answered, page = await server.get("/metrics")
                load = read_load(server.number, page) if answered == 200 else None
        if server.is_up != (status == 200):
            server.is_up = status == 200
            logger.info("replica %s number=%d", "is up" if server.is_up else "does not serve", server.number)
        return load


def _beginnings(body: bytes) -> list[int]:
    """One hash per whole piece of a body's beginning; each hash covers all earlier pieces."""
    keys: list[int] = []
    key = 0
    for start in range(0, min(len(body) // PIECE, MAX_PIECES) * PIECE, PIECE):
        key = hash((key, body[start : start + PIECE]))
        keys.append(key)
    return keys
