"""Mirrors the ranks' shared memory between machines: each node has a copy, and sockets send the changes.

    node 0                                                   node 1
    rank 0 writes data, then a word ─► watch ── frame ─────► data, then the word ─► rank 1, which waits
                                       rank 1's words ◄───── ...

Every word has one writer. The data that belongs to a word's number is written before the word, and is not
overwritten until all readers have read it. So a copy may be late, but is never out of order, and ranks run
the same code on one machine or several. Every other node has a connection to node 0, which forwards frames.

A frame is a header of three numbers, and bytes; nothing in it is executed or unpickled. A word that the
sender does not own, a number out of sequence, or data that is too long ends the connection.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from infer.errors import DeviceLost
from infer.execution.rank_ring import RankLink, linked_words, slot_length
from infer.kernels.cpu.collectives import LINE_STATE, WORD_BYTES, MirroredWord

BEAT_S: Final = 0.25  # seconds between two heartbeats
REPORT_BYTES: Final = 1 << 16  # longest report
_HEAD: Final = struct.Struct("<HII")  # number of a word, or _LINES or _REPORT; its value; bytes that follow
_LINES, _REPORT = 0xFFFF, 0xFFFE
_STATE_BYTES: Final = LINE_STATE.stop - LINE_STATE.start
_AT_ONCE: Final = 1 << 14  # most bytes that are copied to be sent together with their header
_WRAP: Final = 1 << 32


class _Peer:
    """The connection to another node."""

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number, self.connection, self.turn = number, connection, threading.Lock()

    def send(self, kind: int, value: int, body: bytes | memoryview) -> None:
        head = _HEAD.pack(kind, value, len(body))
        with self.turn:
            if len(body) <= _AT_ONCE:
                self.connection.sendall(head + body)
            else:
                self.connection.sendall(head)
                self.connection.sendall(body)


class RankMirror:
    """One node's side of the connections between the nodes of a model."""

    def __init__(
        self,
        link: RankLink,
        nodes: Sequence[range],
        own: int,
        *,
        meets_all: bool = False,
        on_report: Callable[[int, bytes], None],
        on_loss: Callable[[str], None],
    ) -> None:
        """`nodes`: the ranks of each node; `meets_all`: ranks exchange data with ranks of other stages.

        Threads call `on_report` with a node and its report, and `on_loss` when a node is lost.
        """
        self._library, self._memory, self._region = link.library, link.memory, link.communicator.address
        self._nodes, self._own = nodes, own
        self._words = linked_words(link.size, link.num_stages, meets_all=meets_all)
        self._peers: dict[int, _Peer] = {}
        self._on_report, self._on_loss = on_report, on_loss
        self._is_closed = threading.Event()

    def add(self, number: int, connection: socket.socket, silent_s: float) -> None:
        """Add a connection to another node, which is lost after `silent_s` seconds without a heartbeat."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(silent_s)
        peer = self._peers[number] = _Peer(number, connection)
        if self._is_closed.is_set():  # closed before the connection was made
            self.close()
            return
        self._start(f"infer-node-{number}", partial(self._run, peer, self._take_frames))
        self._start(f"infer-beat-{number}", partial(self._run, peer, self._send_beats))

    def start(self) -> None:
        """Begin to mirror changes; call this when all nodes are connected."""
        for number, word in enumerate(self._words):
            peers = self._readers(word)
            if word.writer in self._nodes[self._own] and peers:
                self._start(f"infer-word-{number}", partial(self._watch, number, peers))

    def report(self, body: bytes) -> None:
        """Send a report to node 0; node 0 sends it to all nodes."""
        for peer in list(self._peers.values()):
            self._run(peer, _Peer.send, _REPORT, 0, body)

    def report_end(self, body: bytes) -> None:
        """Send a last report, but skip connections that are busy."""
        for peer in list(self._peers.values()):
            if peer.turn.acquire(timeout=BEAT_S):
                with contextlib.suppress(OSError):
                    peer.connection.sendall(_HEAD.pack(_REPORT, 0, len(body)) + body)
                peer.turn.release()

    def close(self) -> None:
        """Close all connections; threads that wait for one return."""
        self._is_closed.set()
        for peer in list(self._peers.values()):
            with contextlib.suppress(OSError):
                peer.connection.shutdown(socket.SHUT_RDWR)
            peer.connection.close()

    # -- threads ----------------------------------------------------------------------------------

    def _start(self, name: str, target: Callable[[], None]) -> None:
        threading.Thread(target=target, name=name, daemon=True).start()

    def _run(self, peer: _Peer, work: Callable[..., None], *args: object) -> None:
        """Run the work of a connection until it ends."""
        try:
            work(peer, *args)
        except Exception as error:  # report it: otherwise all ranks would wait forever
            if not self._is_closed.is_set():
                said = str(error) if isinstance(error, OSError | DeviceLost) else repr(error)
                reason = "has not answered" if isinstance(error, TimeoutError) else f"is gone: {said}"
                self._on_loss(f"node {peer.number} {reason}")

    def _watch(self, number: int, peers: Sequence[_Peer]) -> None:
        """Send each new value of a word, with its data."""
        word, seen = self._words[number], 0
        while self._library.word_watch(self._region + word.offset, seen, self._region):
            value = self._library.word_get(self._region + word.offset)
            if not word.num_slots:
                seen = (value - 1) % _WRAP  # the last value says it all
            while seen != value:
                seen = (seen + 1) % _WRAP
                for peer in peers:
                    self._run(peer, _Peer.send, number, seen, self._data(word, seen))

    def _send_beats(self, peer: _Peer) -> None:
        while not self._is_closed.wait(BEAT_S):
            lines = (self._line(rank) for rank in self._nodes[self._own])
            peer.send(_LINES, 0, b"".join(bytes(memoryview(self._memory)[line]) for line in lines))

    def _take_frames(self, peer: _Peer) -> None:
        sent: dict[int, int] = {}  # the last value of each word
        head = memoryview(bytearray(_HEAD.size))
        while True:
            _fill(peer.connection, head)
            kind, value, length = _HEAD.unpack(head)
            if kind in (_LINES, _REPORT):
                self._take_note(peer, kind, length)
                continue
            word = self._words[kind] if kind < len(self._words) else None
            is_theirs = word is not None and word.writer not in self._nodes[self._own] and (
                self._own > 0 or word.writer in self._nodes[peer.number]
            )  # fmt: skip
            if word is None or not is_theirs or length > word.slot_bytes:
                raise DeviceLost(f"it has sent {length} bytes for word {kind}, which it may not")
            if word.num_slots and value != (sent.get(kind, 0) + 1) % _WRAP:
                raise DeviceLost(f"it has sent number {value} of word {kind} after {sent.get(kind, 0)}")
            sent[kind] = value
            data = self._place(word, value)[:length]
            _fill(peer.connection, data)
            self._library.word_set(self._region + word.offset, value)
            for other in self._readers(word) if self._own == 0 else ():
                self._run(other, _Peer.send, kind, value, data)

    def _take_note(self, peer: _Peer, kind: int, length: int) -> None:
        ranks = self._nodes[peer.number]
        if length > REPORT_BYTES or (kind == _LINES and length != len(ranks) * _STATE_BYTES):
            raise DeviceLost(f"it has sent {length} bytes of news")
        body = bytearray(length)
        _fill(peer.connection, memoryview(body))
        if kind == _REPORT:
            self._on_report(peer.number, bytes(body))
            return
        for number, rank in enumerate(ranks):
            self._memory[self._line(rank)] = bytes(body[number * _STATE_BYTES : (number + 1) * _STATE_BYTES])

    # -- places -----------------------------------------------------------------------------------

    def _readers(self, word: MirroredWord) -> list[_Peer]:
        """Return the nodes to send a word to: node 0, or as node 0 all nodes that read the word."""
        own = self._nodes[self._own]
        if self._own > 0:
            return [] if word.readers <= set(own) else [self._peers[0]]
        there = {number: ranks for number, ranks in enumerate(self._nodes) if word.writer not in ranks}
        return [self._peers[number] for number in there if number and word.readers & set(there[number])]

    def _place(self, word: MirroredWord, number: int) -> memoryview:
        start = word.first_slot + number % (word.num_slots or 1) * word.slot_bytes
        return memoryview(self._memory)[start : start + word.slot_bytes]

    def _data(self, word: MirroredWord, number: int) -> memoryview:
        return self._place(word, number)[: slot_length(self._memory, word, number)]

    def _line(self, rank: int) -> slice:
        start = WORD_BYTES * (1 + rank)
        return slice(start + LINE_STATE.start, start + LINE_STATE.stop)


def _fill(connection: socket.socket, place: memoryview) -> None:
    """Receive bytes until `place` is full."""
    while len(place):
        count = connection.recv_into(place)
        if not count:
            raise ConnectionResetError("the connection has ended")
        place = place[count:]
