"""The server's half of a request's story: when it came, which engines it went to, when its bytes left.

Each API process keeps the requests that it serves, and the last ones that it has served. A request belongs to
the API key that it came with: it is found by its ids and its *owner* together, so that an id that somebody
else chose, guessed or saw says nothing.

    x-request-id: req-7f             the id of an answer: chatcmpl-KEY, cmpl-KEY, msg_KEY or resp_KEY
    req-7f/chatcmpl-KEY-0            the id that the engine and the log know; each of these finds the request

No prompt and no answer is kept. Hashes of a prompt's beginning are kept, to count the prompts of the same
owner that begin alike.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterator

import msgspec

from infer.finish_reason import FinishReason
from infer.scheduling.request import Request

MAX_MARKS = 16  # ends of stages that are kept; a body with many prompts has more
MAX_PARTS = 8  # prompts of one body that are explained; the others are only counted
PREFIX_TOKENS = (64, 256, 1024)  # beginnings of prompts that are compared
_KEY = re.compile(r"[0-9a-f]{32}")


class ServedPart(msgspec.Struct, kw_only=True):
    """One prompt of a body, on its way to an engine and back. Times are perf_counter seconds."""

    engine_id: str  # what its engine calls the request
    model: str
    engine: str  # label of the engine, as in the metrics
    submitted_at: float
    prefixes: tuple[int, ...] = ()  # hashes of its first PREFIX_TOKENS tokens, as far as it has these
    salt: bytes = b""  # hash of its cache salt
    first_at: float = 0.0  # its first token has come back; 0: none has
    last_at: float = 0.0
    longest_gap_s: float = 0.0  # longest time between two of its tokens
    num_tokens: int = 0
    finish_reason: FinishReason | None = None


class ServedRequest(msgspec.Struct, kw_only=True):
    """One HTTP request that went to an engine."""

    request_id: str  # `x-request-id`
    owner: str  # hash of its API key; empty where there are none
    path: str
    arrived_at: float
    arrived: float  # seconds since 1970
    key: str  # the part that its answer's id and its engines' ids share; or one of the latter
    marks: list[tuple[str, float]]  # ends of stages
    parts: list[ServedPart] = []
    num_parts: int = 0
    status: int = 0  # 0: no answer was begun
    started_at: float = 0.0  # when the answer's first byte was sent
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
        """Begin to keep a request, whose first prompt is about to go to an engine."""
        self._open[id(served)] = served

    def end(self, served: ServedRequest) -> None:
        """Keep a request that has ended until `limit` others have."""
        if self._open.pop(id(served), None) is None:
            return
        served.marks = served.marks[:MAX_MARKS]
        self._ended[id(served)] = served
        while len(self._ended) > self.limit:
            self._ended.popitem(last=False)

    def find(self, name: str, owner: str | None) -> list[ServedRequest]:
        """The requests of an owner that have this id, the newest first; None: of every owner."""
        key = answer_key(name)
        return [
            served
            for served in self._newest_first()
            if (name == served.request_id or key == served.key) and owner in (None, served.owner)
        ]

    def count_alike(self, owner: str, prefixes: tuple[int, ...], salt: bytes) -> list[int]:
        """The number of an owner's prompts that begin with each of these prefixes and have another salt."""
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
    """Note a prompt that goes to the engine with these labels now."""
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
    """The 32 digits by which the ids of one answer are known; an id without them is its last part."""
    last = name.rpartition("/")[2]
    found = _KEY.search(last)
    return last if found is None else found[0]
