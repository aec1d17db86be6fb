"""Who asks for how much, and when: the load that a simulation runs under.

A trace is JSON lines, one request each, lengths instead of words:

    {"arrival": 0.0, "prompt_len": 400, "output_len": 120}
    {"arrival": 0.3, "prompt_len": 900, "output_len": 40, "prefix_id": "tools", "prefix_len": 800}
    {"arrival": 0.9, "prompt_len": 30, "output_len": 200, "priority": -1, "deadline": 5.0}

`arrival` and `deadline` are seconds from the start. Requests with one `prefix_id` share the first
`prefix_len` tokens of their prompts (those with the shorter one share that much); all other tokens are
unlike any other request's. Built-in workloads make such requests from a seed:

    mixed           short chats and, less urgent, longer documents, at a steady pace
    shared_prefix   a few long system prompts, each in front of many short questions
    long_prompts    prompts of thousands of tokens among short chats
    bursty          silence, then many at once; priorities and deadlines
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from infer.errors import ConfigError, closest
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request

MAX_LEN = 1 << 24  # tokens of one prompt or output
VOCAB_SIZE = 1 << 32  # token ids are made up, so there may be as many as there can be


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One line of a trace."""

    arrival: float
    prompt_len: int
    output_len: int
    prefix_id: str | None = None
    prefix_len: int = 0
    priority: int = 0
    deadline: float | None = None


class RequestMaker:
    """Turns lengths into prompts: equal tokens where prefixes are shared, unlike ones everywhere else.

    Every prefix has an odd id that it repeats, and every request an even one for what is its own.
    """

    def __init__(self) -> None:
        self._prefixes: dict[str, int] = {}
        self._num_made = 0

    def make(self, item: TraceRequest) -> Request:
        """The next request; it has its number in the trace for a name."""
        number = self._num_made
        self._num_made += 1
        shared: tuple[int, ...] = ()
        if item.prefix_id is not None:
            which = self._prefixes.setdefault(item.prefix_id, len(self._prefixes))
            shared = (2 * which + 1,) * item.prefix_len
        return Request(
            request_id=str(number),
            prompt=shared + (2 * number,) * (item.prompt_len - len(shared)),
            params=SamplingParams(max_tokens=item.output_len, ignore_eos=True),
            priority=item.priority,
            deadline=item.deadline,
        )


def read_trace(path: Path) -> list[TraceRequest]:
    """Read a trace, in the order of arrival; what is wrong is said with the number of its line."""
    requests = []
    try:
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    requests.append(_read_line(f"{path} line {number}", line))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if not requests:
        raise ConfigError(f"{path} holds no request; a trace has one JSON object per line")
    return sorted(requests, key=lambda item: item.arrival)


def _read_line(where: str, line: bytes) -> TraceRequest:
    def fail(reason: str) -> NoReturn:
        raise ConfigError(f"{where}: {reason}")

    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        fail(f"not JSON: {error}")
    if not isinstance(raw, dict):
        fail("not a JSON object")
    known = [field.name for field in fields(TraceRequest)]
    for name in raw:
        if name not in known:
            fail(f"unknown key {name!r}{closest(name, known, listed='known')}")
    checked: dict[str, Any] = {
        "arrival": _number(raw, "arrival", fail),
        "prompt_len": _integer(raw, "prompt_len", fail, low=1),
        "output_len": _integer(raw, "output_len", fail, low=1),
        "prefix_len": _integer(raw, "prefix_len", fail, low=0, default=0),
        "priority": _integer(raw, "priority", fail, low=-MAX_LEN, default=0),
        "deadline": None if raw.get("deadline") is None else _number(raw, "deadline", fail),
    }
    if (prefix_id := raw.get("prefix_id")) is not None:
        checked["prefix_id"] = str(prefix_id)
    if (prefix_id is None) != (checked["prefix_len"] == 0):
        fail("prefix_id and prefix_len go together; give both or neither")
    if checked["prefix_len"] > checked["prompt_len"]:
        fail(f"prefix_len is {checked['prefix_len']}, longer than prompt_len, {checked['prompt_len']}")
    return TraceRequest(**checked)


def _number(raw: Mapping[str, Any], name: str, fail: Callable[[str], NoReturn]) -> float:
    value = raw.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        fail(f"{name!r} must be seconds, 0 or more, got {value!r}")
    return float(value)


def _integer(
    raw: Mapping[str, Any],
    name: str,
    fail: Callable[[str], NoReturn],
    *,
    low: int,
    default: int | None = None,
) -> int:
    value = raw.get(name, default)
    if type(value) is not int or not low <= value < MAX_LEN:
        fail(f"{name!r} must be an integer in [{low}, {MAX_LEN - 1}], got {value!r}")
    return value


# -- built-in workloads -------------------------------------------------------------------------------


def _length(rng: random.Random, typical: int, *, least: int = 4, most: int) -> int:
    """A length around `typical` with a long tail, as prompts and answers have."""
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


WORKLOADS: dict[str, Callable[[random.Random, int, float], TraceRequest]] = {
    "mixed": _mixed,
    "shared_prefix": _shared_prefix,
    "long_prompts": _long_prompts,
    "bursty": _bursty,
}


def make_workload(name: str, *, num_requests: int, seed: int) -> list[TraceRequest]:
    """A built-in workload; the same seed gives the same requests."""
    if name not in WORKLOADS:
        raise ConfigError(f"workload must be one of {', '.join(WORKLOADS)}, got {name!r}")
    rng = random.Random(f"{name} {seed}")
    requests: list[TraceRequest] = []
    now = 0.0
    for number in range(num_requests):
        requests.append(WORKLOADS[name](rng, number, now))
        now = requests[-1].arrival
    return requests
