"""The server's half of a request's story: when it arrived, which engines served it, when its bytes were sent.

Each API process keeps the requests that it is serving, and the last ones that it has served. A request
belongs to the API key that it came with: it is found only by an id and its *owner* together, so that an id
that was chosen, guessed or seen by the owner of another key reveals nothing.

    x-request-id: req-7f             the id of a response: chatcmpl-KEY, cmpl-KEY, msg_KEY or resp_KEY
    req-7f/chatcmpl-KEY-0            the id in the engine and the log; any of these finds the request

Prompts and outputs are not stored. Hashes of a prompt's first tokens are, to count the same owner's prompts
that share a prefix.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterator

import msgspec

from infer.finish_reason import FinishReason
from infer.scheduling.request import Request

MAX_MARKS = 16  # most ends of stages that are stored
MAX_PARTS = 8  # most prompts of one body that are explained
PREFIX_TOKENS = (64, 256, 1024)  # lengths of prefixes that are compared
_KEY = re.compile(r"[0-9a-f]{32}")


class ServedPart(msgspec.Struct, kw_only=True):
    """One prompt of a body, on its way to an engine and back. Times are perf_counter seconds."""

    engine_id: str  # id of the request in its engine
    model: str
    engine: str  # label of the engine, as in the metrics
    submitted_at: float
    prefixes: tuple[int, ...] = ()  # hashes of its first PREFIX_TOKENS tokens
    salt: bytes = b""  # hash of its cache salt
    first_at: float = 0.0  # when its first token arrived; 0: none yet
    last_at: float = 0.0
    longest_gap_s: float = 0.0  # longest time between two of its tokens
    num_tokens: int = 0
    finish_reason: FinishReason | None = None


class ServedRequest(msgspec.Struct, kw_only=True):
    """One HTTP request that went to an engine."""

    request_id: str  # `x-request-id`
    owner: str  # hash of its API key; empty without keys
    path: str
    arrived_at: float
    arrived: float  # seconds since 1970
    key: str  # the common part of its response's id and its engine ids, or one of these
    marks: list[tuple[str, float]]  # ends of stages
    parts: list[ServedPart] = []
    num_parts: int = 0
    status: int = 0  # 0: no response has started
    started_at: float = 0.0  # when the response's first byte was sent
    ended_at: float = 0.0  # when its last byte was sent
    is_gone: bool = False  # the client left before that
    error: str | None = None


class ServedRequests:
    """The requests of one API process: the open ones, and the last `limit` that have ended."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._open: dict[int, ServedRequest] = {}  # open requests by identity
        self._ended: OrderedDict[int, ServedRequest] = OrderedDict()

    def open(self, served: ServedRequest) -> None:
        """Add a request whose first prompt is about to go to an engine."""
        self._open[id(served)] = served

    def end(self, served: ServedRequest) -> None:
        """Move a request to the finished ones, and drop the oldest over `limit`."""
        if self._open.pop(id(served), None) is None:
            return
        served.marks = served.marks[:MAX_MARKS]
        self._ended[id(served)] = served
        while len(self._ended) > self.limit:
            self._ended.popitem(last=False)

    def find(self, name: str, owner: str | None) -> list[ServedRequest]:
        """Return the requests with this id that an owner has, newest first; None: any owner."""
        key = answer_key(name)
        return [
            served
            for served in self._newest_first()
            if (name == served.request_id or key == served.key) and owner in (None, served.owner)
        ]

    def count_alike(self, owner: str, prefixes: tuple[int, ...], salt: bytes) -> list[int]:
        """Count, for each prefix, the owner's prompts that begin with it but have another salt."""
        parts = [
            part
            for served in self._newest_first()
            if served.owner == owner
            for part in served.parts
            if part.salt != salt
        ]
        return [
            sum(part.prefixes[place : place + 1] == (prefix,) for part in parts)
            for place, prefix in enumerate(prefixes)
        ]

    def _newest_first(self) -> Iterator[ServedRequest]:
        yield from reversed(self._open.values())
        yield from reversed(self._ended.values())


def add_part(served: ServedRequest, request: Request, labels: tuple[str, str], now: float) -> ServedPart:
    """Record a prompt that goes to the engine with these labels now."""
    part = ServedPart(
        engine_id=request.request_id,
        model=labels[0],
        engine=labels[1],
        submitted_at=now,
        prefixes=tuple(hash(request.prompt[:n]) for n in PREFIX_TOKENS if n <= len(request.prompt)),
        salt=hashlib.blake2b(request.cache_salt.encode(errors="replace"), digest_size=8).digest(),
    )
    served.num_parts += 1
    if len(served.parts) < MAX_PARTS:
        served.parts.append(part)
    return part


def answer_key(name: str) -> str:
    """Return the 32 digits that the ids of one response share; without them, the id's last part."""
    last = name.rpartition("/")[2]
    found = _KEY.search(last)
    return last if found is None else found[0]
