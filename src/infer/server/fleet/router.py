"""The choice of a replica: one that has the start of the prompt in its cache, unless that one is busy.

Every replica keeps its own prefix cache, so two prompts that start alike should meet on the same one.
The router remembers, for the first blocks of recent prompts, which replica served them:

    prompt    [system prompt, 2 blocks][question]
    memory    hash(block 1) -> replica 0,  hash(blocks 1-2) -> replica 0,  ...        longest match wins

A match is a hint, not an order: if its replica has MAX_IMBALANCE requests more than the least busy one,
the least busy one gets the request, and is remembered from then on. Replicas that are down are left out, and
those that have given no sign of progress for MAX_SILENCE_S, a ping included, until they give one.

How busy a replica is comes from its last snapshot, plus what was sent to it since: a burst that arrives
between two steps is spread, not piled onto the replica that looked idle.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from infer.client.client import EngineClient
from infer.scheduling.request import Request

PREFIX_BLOCK = 16  # tokens hashed at a time
MAX_PREFIX_BLOCKS = 64  # a longer agreement makes no difference to the choice
MAX_REMEMBERED = 32_768
MAX_IMBALANCE = 4
MAX_SILENCE_S = 5.0  # longer than steps take
SNAPSHOT_LAG_S = 1.0  # after this long, whatever was sent is in the snapshot, or was never taken


@dataclass(slots=True)
class _Sent:
    """The requests sent to a replica since its last step."""

    step: int = -1
    count: int = 0
    at: float = 0.0


class Router:
    """Chooses among the replicas of one model. Belongs to one event loop."""

    def __init__(self, *, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._served_by: OrderedDict[int, EngineClient] = OrderedDict()
        self._sent: dict[int, _Sent] = {}
        self._turn = 0

    def pick(self, request: Request, clients: Sequence[EngineClient]) -> EngineClient:
        """Choose the replica for this request, and remember the choice."""
        if len(clients) == 1:
            return clients[0]
        up = [client for client in clients if client.failure is None] or list(clients)
        up = [client for client in up if client.silent_s < MAX_SILENCE_S] or up
        loads = [self._load(client) for client in up]
        least = min(loads)
        keys = _prefix_keys(request)
        chosen = self._remembered(keys, up)
        if chosen is None or loads[up.index(chosen)] > least + MAX_IMBALANCE:
            self._turn += 1  # equals take turns
            order = (up[(self._turn + i) % len(up)] for i in range(len(up)))
            chosen = next(client for client in order if loads[up.index(client)] == least)
        self._remember(keys, chosen)
        return chosen

    def forget(self, client: EngineClient) -> None:
        """Forget a replica that is gone, or whose cache was emptied."""
        self._sent.pop(id(client), None)
        self._served_by = OrderedDict((k, c) for k, c in self._served_by.items() if c is not client)

    def _load(self, client: EngineClient) -> int:
        stats = client.stats()
        sent = self._sent.setdefault(id(client), _Sent())
        if sent.step != stats.num_steps or self._clock() - sent.at > SNAPSHOT_LAG_S:
            sent.step, sent.count = stats.num_steps, 0
        return stats.num_running + stats.num_waiting + sent.count

    def _remembered(self, keys: Sequence[int], up: Sequence[EngineClient]) -> EngineClient | None:
        for key in reversed(keys):
            client = self._served_by.get(key)
            if client is not None and client in up:
                return client
        return None

    def _remember(self, keys: Sequence[int], client: EngineClient) -> None:
        sent = self._sent[id(client)]
        sent.count += 1
        sent.at = self._clock()
        for key in keys:
            self._served_by[key] = client
            self._served_by.move_to_end(key)
        while len(self._served_by) > MAX_REMEMBERED:
            self._served_by.popitem(last=False)


def _prefix_keys(request: Request) -> list[int]:
    """One hash per whole block of the prompt's start; each covers everything before it."""
    keys: list[int] = []
    key = hash(request.cache_salt)
    num_blocks = min(len(request.prompt) // PREFIX_BLOCK, MAX_PREFIX_BLOCKS)
    for start in range(0, num_blocks * PREFIX_BLOCK, PREFIX_BLOCK):
        key = hash((key, request.prompt[start : start + PREFIX_BLOCK]))
        keys.append(key)
    return keys
