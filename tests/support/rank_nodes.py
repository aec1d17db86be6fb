"""The nodes of a model in one process: memory for each of them, joined by real sockets."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from infer.engine.rank_worker import make_memory, open_link
from infer.execution.rank_mirror import RankMirror
from infer.execution.rank_ring import RankLink

SILENT_S = 120.0


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = socket.create_connection(server.getsockname())
        return server.accept()[0], there


@dataclass(slots=True, eq=False)
class Nodes:
    """The links of all ranks, and what joins their nodes."""

    links: list[RankLink] = field(default_factory=list)
    mirrors: list[RankMirror] = field(default_factory=list)
    reports: list[tuple[int, int, bytes]] = field(default_factory=list)  # taker, sender, report
    losses: list[tuple[int, str]] = field(default_factory=list)

    def close(self) -> None:
        for link in self.links:
            link.communicator.abort()
        for mirror in self.mirrors:
            mirror.close()


def open_nodes(size: int, num_stages: int, nnodes: int, *, meets_all: bool = False) -> Nodes:
    """Ranks on this many nodes, equally many on each."""
    nodes, each = Nodes(), size // nnodes
    ranges = [range(node * each, (node + 1) * each) for node in range(nnodes)]

    def lose(node: int) -> Callable[[str], None]:
        def note(reason: str) -> None:
            nodes.losses.append((node, reason))
            nodes.links[ranges[node][0]].communicator.abort()

        return note

    def take(node: int) -> Callable[[int, bytes], None]:
        return lambda sender, body: nodes.reports.append((node, sender, body))

    for node, ranks in enumerate(ranges):
        handle = make_memory(size)
        nodes.links += [open_link(handle, rank, size, num_stages) for rank in ranks]
        os.close(handle)
        first = nodes.links[ranks[0]]
        nodes.mirrors.append(
            RankMirror(first, ranges, node, meets_all=meets_all, on_report=take(node), on_loss=lose(node))
        )
    for node in range(1, nnodes):
        here, there = tcp_pair()
        nodes.mirrors[0].add(node, here, SILENT_S)
        nodes.mirrors[node].add(0, there, SILENT_S)
        nodes.mirrors[node].start()
    nodes.mirrors[0].start()
    return nodes
