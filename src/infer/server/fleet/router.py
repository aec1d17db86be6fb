"""Choose a replica: the one that will finish computing the prompt first.

Every replica has its own prefix cache and reports its additions and evictions, so every API process knows the
contents. A replica's load is the time that its queue will take. The engines measure the time of a token and
of a row. All replicas use the mean, because they are alike and a single measurement may be noise:

    wait(replica) = prompt tokens that wait there * token_s + rows that decode there * row_s
    cost(replica) = wait(replica) + tokens of this prompt that it has not cached * token_s         least wins

So a prompt follows its prefix as long as waiting takes less time than computing it elsewhere, and a popular
prefix ends up cached on as many replicas as needed. If costs differ by less than CLOSE of the prompt's own
cost, the replica with the fewest requests gets it, and among equals the one that has served the fewest tokens
lately: a new prefix goes where cached prefixes attract the fewest requests. Requests that were just sent
count, too: their tokens are waiting, and their prefixes are expected.

Costs do not include the unknown length of outputs, so there is also a bound: a replica with more requests
than MAX_LOAD times the mean, and more than MAX_IMBALANCE above the least, gets none. Replicas that are down
get none, and neither do replicas without a sign of progress for MAX_SILENCE_S (an answered ping counts),
until they give one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic

from infer.client.client import EngineClient
from infer.engine.prefixes import prefix_hashes
from infer.engine.stats import EngineStats
from infer.scheduling.request import Request

PREFIX_BLOCK = 16  # tokens of a block, if an engine does not report it
MAX_PREFIX_BLOCKS = 512  # a longer match makes little difference to the choice
MAX_EXPECTED = 32_768
EXPECTED_S = 10.0  # seconds for which a prefix that was sent counts as cached
ADAPTER_S = 300.0  # the same with an adapter, whose prefixes engines do not report
MAX_LOAD = 1.25  # times the mean number of requests
MAX_IMBALANCE = 4  # requests above the least busy replica's that are always allowed
MAX_SILENCE_S = 5.0  # longer than steps take
SNAPSHOT_LAG_S = 1.0  # seconds after which sent requests are in the snapshot, or were never received
TOKEN_S = 1e-4  # seconds per token and (below) row until measured; the ratio matters
ROW_S = 1e-3
CLOSE = 0.02
LATELY_S = 30.0  # half-life of served tokens, in seconds


@dataclass(slots=True)
class _Sent:
    """The work that was sent to a replica since its last step, and the tokens that it has served."""

    step: int = -1
    count: int = 0
    num_tokens: int = 0  # tokens to compute
    at: float = 0.0
    served: int = 0  # tokens, by all API processes
    lately: float = 0.0  # the same, with exponential decay
    seen_at: float = 0.0


@dataclass(slots=True)
class _Option:
    """One replica as an option for one request."""

    client: EngineClient
    stats: EngineStats
    sent: _Sent
    num_cached: int = 0  # cached tokens of the prompt
    num_requests: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_requests = self.stats.num_running + self.stats.num_waiting + self.sent.count

    def cost_s(self, num_tokens: int, token_s: float, row_s: float) -> float:
        """Return the seconds until a prompt of `num_tokens` would be computed here."""
        to_compute = self.stats.num_queued_tokens + self.sent.num_tokens + num_tokens - self.num_cached
        return to_compute * token_s + (self.stats.num_running + self.sent.count) * row_s


class Router:
    """Chooses among the replicas of one model. Belongs to one event loop."""

    def __init__(self, *, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        # time of sending by replica and prefix
        self._expected: OrderedDict[tuple[int, int], float] = OrderedDict()
        self._sent: dict[int, _Sent] = {}
        self._turn = 0

    def pick(self, request: Request, clients: Sequence[EngineClient]) -> EngineClient:
        """Choose the replica for this request, and remember the choice."""
        if len(clients) == 1:
            return clients[0]
        up = [client for client in clients if client.failure is None] or list(clients)
        up = [client for client in up if client.silent_s < MAX_SILENCE_S] or up
        options = [self._look_at(client) for client in up]
        block_size = options[0].stats.block_size or PREFIX_BLOCK
        keys = prefix_hashes(request, block_size, MAX_PREFIX_BLOCKS)
        expected_s = ADAPTER_S if request.adapter else EXPECTED_S
        for option in options:
            option.num_cached = self._num_known(keys, option.client, expected_s) * block_size
        chosen = self._choose(len(request.prompt), options)
        self._remember(keys, chosen, len(request.prompt) - chosen.num_cached)
        return chosen.client

    def forget(self, client: EngineClient) -> None:
        """Forget the prefixes of a replica whose cache was emptied."""
        self._expected = OrderedDict(each for each in self._expected.items() if each[0][0] != id(client))

    def _look_at(self, client: EngineClient) -> _Option:
        stats, now = client.stats(), self._clock()
        served = stats.num_prompt_tokens + stats.num_output_tokens
        sent = self._sent.setdefault(id(client), _Sent(served=served, seen_at=now))
        if sent.step != stats.num_steps or now - sent.at > SNAPSHOT_LAG_S:
            sent.step, sent.count, sent.num_tokens = stats.num_steps, 0, 0
        sent.lately = sent.lately * 0.5 ** ((now - sent.seen_at) / LATELY_S) + served - sent.served
        sent.served, sent.seen_at = served, now
        return _Option(client, stats, sent)

    def _num_known(self, keys: Sequence[int], client: EngineClient, expected_s: float = EXPECTED_S) -> int:
        """Return the number of blocks of a prompt that a replica has cached, or will have soon."""
        prefixes, oldest = client.prefixes, self._clock() - expected_s
        for number in range(len(keys), 0, -1):
            key = keys[number - 1]
            if key in prefixes or self._expected.get((id(client), key), oldest) > oldest:
                return number
        return 0

    def _choose(self, num_tokens: int, options: Sequence[_Option]) -> _Option:
        counts = [option.num_requests for option in options]
        most = max(MAX_LOAD * sum(counts) / len(counts), min(counts) + MAX_IMBALANCE)
        options = [option for option in options if option.num_requests <= most]
        token_s = _mean([option.stats.token_s for option in options], TOKEN_S)
        row_s = _mean([option.stats.row_s for option in options], ROW_S)
        costs = [option.cost_s(num_tokens, token_s, row_s) for option in options]
        limit = min(costs) + CLOSE * num_tokens * token_s
        close = [option for option, cost in zip(options, costs, strict=True) if cost <= limit]
        least = min((option.num_requests, option.sent.lately) for option in close)
        close = [option for option in close if (option.num_requests, option.sent.lately) == least]
        self._turn += 1  # equals take turns
        return close[self._turn % len(close)]

    def _remember(self, keys: Sequence[int], option: _Option, num_tokens: int) -> None:
        sent, now = option.sent, self._clock()
        sent.count += 1
        sent.num_tokens += num_tokens
        sent.at = now
        for key in keys:
            self._expected[id(option.client), key] = now
            self._expected.move_to_end((id(option.client), key))
        while len(self._expected) > MAX_EXPECTED:
            self._expected.popitem(last=False)


def _mean(measured: Sequence[float], unknown: float) -> float:
    """Return the mean of the values that engines have measured; `unknown` if there are none."""
    known = [value for value in measured if value]
    return sum(known) / len(known) if known else unknown
