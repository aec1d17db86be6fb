"""Traces: loads as lengths and arrival times, which `infer simulate` reads from a file or draws from a seed.

A trace is a file of JSON lines, one request each:

    {"arrival": 0.0, "prompt_len": 400, "output_len": 120}
    {"arrival": 0.3, "prompt_len": 900, "output_len": 40, "prefix_id": "tools", "prefix_len": 800}
    {"arrival": 0.9, "prompt_len": 30, "output_len": 200, "priority": -1, "deadline": 5.0}

A record of `infer serve --record` is a trace too. It begins with a header, and its lines have a hash for each
block of the prompt, which shows shared prefixes: a hash covers all tokens up to the end of its block.

    {"arrival": 4.1, "prompt_len": 40, "output_len": 12, "block_size": 16, "blocks": ["5f...", "07..."], ...}

`arrival` and `deadline` are seconds from the start. Requests with the same `prefix_id` share the first
`prefix_len` tokens of their prompts (the smaller of two different lengths); all other tokens are unique.
`to_workload` makes token ids from a trace, so that everything that runs a workload can run a trace. Built-in
loads draw their requests from a seed:

    mixed           short chats and, less urgent, longer documents, at a steady rate
    shared_prefix   a few long system prompts, each before many short questions
    long_prompts    prompts of thousands of tokens among short chats
    bursty          silence, then many at once; priorities and deadlines
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from infer.bench.workloads import Arrival, Session, Turn, Workload
from infer.errors import ConfigError, closest
from infer.tools.typed_json import read_json

MAX_LEN = 1 << 24  # tokens of one prompt or output

Seconds = Annotated[float, msgspec.Meta(ge=0)]
Length = Annotated[int, msgspec.Meta(ge=1, lt=MAX_LEN)]


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of a trace."""

    arrival: Seconds
    prompt_len: Length
    output_len: Length
    prefix_id: str | int | float | None = None
    prefix_len: Annotated[int, msgspec.Meta(ge=0, lt=MAX_LEN)] = 0
    priority: Annotated[int, msgspec.Meta(ge=-MAX_LEN, lt=MAX_LEN)] = 0
    deadline: Seconds | None = None
    block_size: Annotated[int, msgspec.Meta(ge=0, lt=MAX_LEN)] = 0
    blocks: tuple[str, ...] = ()  # a hash for each block of the prompt, of all tokens up to its end
    params: dict[str, Any] = {}  # this field and the next are only for people who read a record
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        if self.blocks and self.prefix_id is not None:
            raise ValueError("blocks and prefix_id both say what is shared; give one of them")
        if self.blocks and not 0 < len(self.blocks) * self.block_size <= self.prompt_len:
            raise ValueError(
                f"{len(self.blocks)} blocks of {self.block_size} tokens do not fit a prompt of "
                f"{self.prompt_len}"
            )
        if (self.prefix_id is None) != (self.prefix_len == 0):
            raise ValueError("prefix_id and prefix_len go together; give both or neither")
        if self.prefix_len > self.prompt_len:
            raise ValueError(f"prefix_len is {self.prefix_len}, longer than prompt_len, {self.prompt_len}")


class RepeatedIds(Sequence[int]):
    """A prompt of a few ids, each repeated, of constant size in memory, because traces may span a day."""

    def __init__(self, *runs: tuple[int, int]) -> None:
        self._runs = runs  # (id, number of repetitions)

    def __len__(self) -> int:
        return sum(count for _, count in self._runs)

    def __iter__(self) -> Iterator[int]:
        for token_id, count in self._runs:
            yield from (token_id,) * count

    def __getitem__(self, place: Any) -> Any:
        return tuple(self)[place]


def to_workload(name: str, requests: Sequence[TraceRequest]) -> Workload:
    """Return the requests as sessions of one turn, with equal tokens only in shared prefixes.

    Every prefix repeats an odd id, and every request an even id for its own tokens.
    """
    prefixes: dict[str, int] = {}
    sessions = []
    for number, item in enumerate(requests):
        shared = [(name, item.block_size) for name in item.blocks]
        if item.prefix_id is not None:
            shared.append((str(item.prefix_id), item.prefix_len))
        runs = [(2 * prefixes.setdefault(name, len(prefixes)) + 1, count) for name, count in shared]
        ids = RepeatedIds(*runs, (2 * number, item.prompt_len - sum(count for _, count in runs)))
        sessions.append(
            Session(
                turns=(Turn(ids=ids, max_tokens=item.output_len),),
                start_s=item.arrival,
                priority=item.priority,
                deadline=item.deadline,
            )
        )
    return Workload(name=name, about="", arrival=Arrival(kind="open"), sessions=tuple(sessions))


def read_trace(path: Path) -> list[TraceRequest]:
    """Return the requests of a file in the order of arrival; errors name the line.

    In a record, arrivals count from its first request, because earlier files may be gone.
    """
    decoder = msgspec.json.Decoder(TraceRequest)
    is_record = False
    try:
        with open(path, "rb") as lines:
            requests = []
            for number, line in enumerate(lines, start=1):
                if number == 1 and line.startswith(b'{"kind":"header"'):
                    is_record = _check_header(line, path)
                elif line.strip():
                    requests.append(read_json(line, decoder, f"{path} line {number}"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if not requests:
        raise ConfigError(f"{path} holds no request; a trace has one JSON object per line")
    requests.sort(key=lambda item: item.arrival)
    start = requests[0].arrival if is_record else 0.0
    return [_begin_at(start, item) for item in requests] if start else requests


def _begin_at(start: float, item: TraceRequest) -> TraceRequest:
    """Return the request with its times relative to `start`."""
    deadline = None if item.deadline is None else max(0.0, item.deadline - start)
    return msgspec.structs.replace(item, arrival=item.arrival - start, deadline=deadline)


def _check_header(line: bytes, path: Path) -> bool:
    """Return True for the header of a record without text; a record with text is refused."""
    if read_json(line, msgspec.json.Decoder(dict[str, Any]), f"{path} line 1").get("text") is not False:
        raise ConfigError(
            f"{path} is a record of a whole run, for 'infer replay' and --cost; a trace is recorded by "
            "'infer serve --record' without --record-text"
        )
    return True


# -- built-in loads ------------------------------------------------------------------------------------


def _length(rng: random.Random, typical: int, *, least: int = 4, most: int) -> int:
    """Return a length around `typical` with a long tail, as prompts and answers have."""
    return max(least, min(most, round(rng.lognormvariate(math.log(typical), 0.7))))


def _mixed(rng: random.Random, number: int, now: float) -> TraceRequest:
    is_document = rng.random() < 0.2
    return TraceRequest(
        arrival=now + rng.expovariate(0.6),
        prompt_len=_length(rng, 600 if is_document else 60, most=2000),
        output_len=_length(rng, 40 if is_document else 80, most=400),
        priority=1 if is_document else 0,
    )


def _shared_prefix(rng: random.Random, number: int, now: float) -> TraceRequest:
    which = rng.randrange(4)
    prefix_len = 300 + 150 * which
    return TraceRequest(
        arrival=now + rng.expovariate(0.6),
        prompt_len=prefix_len + _length(rng, 30, most=200),
        output_len=_length(rng, 60, most=300),
        prefix_id=f"system-{which}",
        prefix_len=prefix_len,
    )


def _long_prompts(rng: random.Random, number: int, now: float) -> TraceRequest:
    is_long = rng.random() < 0.15
    return TraceRequest(
        arrival=now + rng.expovariate(0.5),
        prompt_len=_length(rng, 2200, most=4000) if is_long else _length(rng, 50, most=400),
        output_len=_length(rng, 60, most=300),
    )


def _bursty(rng: random.Random, number: int, now: float) -> TraceRequest:
    is_first_of_burst = number % 40 == 0
    arrival = now + (rng.uniform(20, 40) if is_first_of_burst and number else rng.expovariate(40))
    return TraceRequest(
        arrival=arrival,
        prompt_len=_length(rng, 80, most=800),
        output_len=_length(rng, 60, most=300),
        priority=rng.choice([0, 0, 0, 1, 2]),
        deadline=arrival + rng.choice([10.0, 30.0, 60.0]),
    )


def _newcomers(rng: random.Random, number: int, now: float) -> TraceRequest:
    is_long = number % 5 == 0  # four requests of one token arrive while its prompt is computed
    pause = rng.uniform(20, 30) if is_long else 1.0
    return TraceRequest(
        arrival=now + pause if number else now, prompt_len=3000 if is_long else 1, output_len=8
    )


LOADS: dict[str, Callable[[random.Random, int, float], TraceRequest]] = {
    "mixed": _mixed,
    "shared_prefix": _shared_prefix,
    "long_prompts": _long_prompts,
    "bursty": _bursty,
    "newcomers": _newcomers,
}


def draw_trace(name: str, *, num_requests: int, seed: int) -> list[TraceRequest]:
    """Return the requests of a built-in load; the same seed gives the same requests."""
    if name not in LOADS:
        raise ConfigError(f"workload must be one of {', '.join(LOADS)}, got {name!r}{closest(name, LOADS)}")
    rng = random.Random(f"{name} {seed}")
    requests: list[TraceRequest] = []
    now = 0.0
    for number in range(num_requests):
        requests.append(LOADS[name](rng, number, now))
        now = requests[-1].arrival
    return requests
