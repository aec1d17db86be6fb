"""Read a record back, trusting nothing in it.

A record may come from somebody else, so every line is checked before anything is built from it: that
it is JSON, of a known kind, with the fields and types that tools/record.py writes, and that steps do
not run backwards: neither those that ran, nor those after which something came. What is wrong is said
with the number of its line. Events are read from the file as they are asked for; a record of any length
takes the memory of one line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from infer.cache.memory import CacheSize
from infer.engine.run_manifest import RunFacts
from infer.errors import ConfigError, InferError
from infer.sampling.params import SamplingParams
from infer.scheduling.plan import COPY, SWAP_IN, SWAP_OUT, Chunk, StepPlan, Transfer
from infer.scheduling.preemption import PreemptionCost
from infer.scheduling.request import Request
from infer.tools.record import VERSION

MAX_LINE_BYTES = 64 << 20  # a prompt of a million tokens has about eight
MAX_STEPS_AHEAD = 64
MAX_STEP_GAP = 1_000_000  # between two events; an idle engine does not step


@dataclass(frozen=True, slots=True)
class Added:
    """A request came in after this step."""

    step: int
    seconds: float
    request: Request


@dataclass(frozen=True, slots=True)
class Aborted:
    """A request, or one sequence of it, was ended after this step."""

    step: int
    seconds: float
    request_id: str
    index: int | None


@dataclass(frozen=True, slots=True)
class Reset:
    """All cached prefixes were forgotten after this step."""

    step: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Ran:
    """A plan ran and sampled these ids."""

    step: int
    seconds: float
    plan: StepPlan
    ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """The plan of this step raised, and its requests ended with an error."""

    step: int
    seconds: float
    error: str


Event: TypeAlias = Added | Aborted | Reset | Ran | Failed


class Record:
    """A record on disk. Opening it reads all of it once, so damage shows before anything is built."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts = self._read_header()
        self.num_steps = 0
        self.last_step = 0
        last_ran = 0  # what ran is written when it is read: later than what came while it was under way
        for event in self.events():
            before = last_ran if isinstance(event, Ran) else self.last_step
            if not before <= event.step <= self.last_step + MAX_STEP_GAP:
                raise ConfigError(f"{path} goes from step {before} to {event.step}; it is damaged")
            self.last_step = max(self.last_step, event.step)
            if isinstance(event, Ran):
                last_ran = event.step
                self.num_steps += 1

    def events(self) -> Iterator[Event]:
        """Everything after the header, in order; read from the file as it is asked for."""
        for number, line in self._lines():
            if number > 1:
                yield _read_event(_Line(self.path, number, line))

    def _read_header(self) -> RunFacts:
        for number, line in self._lines():
            return _read_header(_Line(self.path, number, line))
        raise ConfigError(f"{self.path} is empty; a record begins with a header line")

    def _lines(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        try:
            with open(self.path, "rb") as handle:
                number = 0
                while line := handle.readline(MAX_LINE_BYTES):
                    number += 1
                    yield number, _parse(self.path, number, line)
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error.strerror}") from None


def _parse(path: Path, number: int, line: bytes) -> Mapping[str, Any]:
    if not line.endswith(b"\n"):
        reason = "is longer than any record's" if len(line) == MAX_LINE_BYTES else "is cut short"
        raise ConfigError(f"{path} line {number} {reason}")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} line {number} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} line {number} is not a JSON object")
    return value


class _Line:
    """One line's object, whose fields are checked as they are taken."""

    def __init__(self, path: Path, number: int, value: Mapping[str, Any]) -> None:
        self.path = path
        self.number = number
        self.value = value

    def fail(self, reason: str) -> NoReturn:
        raise ConfigError(f"{self.path} line {self.number}: {reason}")

    def take(self, name: str, *kinds: type) -> Any:
        if name not in self.value:
            self.fail(f"{name!r} is missing")
        value = self.value[name]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            self.fail(f"{name!r} is {_shown(value)}, not {' or '.join(_SPELLED[kind] for kind in kinds)}")
        return value

    def part(self, name: str) -> _Line:
        return _Line(self.path, self.number, self.take(name, dict))

    def integers(self, name: str) -> tuple[int, ...]:
        return self.row(name, self.take(name, list))

    def row(self, name: str, value: Any, length: int | None = None) -> tuple[int, ...]:
        is_row = isinstance(value, list) and all(type(item) is int for item in value)
        if not is_row or length not in (None, len(value)):
            self.fail(f"{name!r} holds {_shown(value)}, not {length or 'a list of'} integers")
        return tuple(value)


_SPELLED = {
    str: "text",
    int: "an integer",
    float: "a number",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


def _read_header(line: _Line) -> RunFacts:
    if line.value.get("kind") != "header":
        line.fail("a record begins with a header line; this is not a record")
    version = line.take("version", int)
    if version != VERSION:
        line.fail(f"the record is of version {version}, and this release reads version {VERSION}")
    cache, cost = line.part("cache"), line.part("cost")
    return RunFacts(
        version=line.take("infer", str),
        model=line.take("model", str),
        fingerprint=line.take("fingerprint", str),
        dtype=line.take("dtype", str),
        device=line.take("device", str),
        num_threads=line.take("num_threads", int),
        context_len=line.take("context_len", int),
        knobs=line.take("knobs", dict),
        cache=CacheSize(
            cache.take("num_blocks", int), cache.take("block_size", int), cache.take("bytes_per_token", int)
        ),
        cost=PreemptionCost(
            cost.take("swap_seconds", float, int), cost.take("recompute_seconds", float, int)
        ),
        steps_ahead=_read_steps_ahead(line),
    )


def _read_steps_ahead(line: _Line) -> int:
    if "steps_ahead" not in line.value:  # there was one, on a GPU, before records said so
        overlaps = (
            line.take("device", str) == "cuda" and line.take("knobs", dict).get("use_overlap") is not False
        )
        return int(overlaps)
    steps_ahead: int = line.take("steps_ahead", int)
    if not 0 <= steps_ahead <= MAX_STEPS_AHEAD:
        line.fail(f"'steps_ahead' is {steps_ahead}, not one of 0 to {MAX_STEPS_AHEAD}")
    return steps_ahead


def _read_event(line: _Line) -> Event:
    kind, step, seconds = line.take("kind", str), line.take("step", int), line.take("t", float, int)
    if kind == "add":
        return Added(step, seconds, _read_request(line.part("request")))
    if kind == "abort":
        return Aborted(step, seconds, line.take("request_id", str), line.take("index", int, type(None)))
    if kind == "reset":
        return Reset(step, seconds)
    if kind == "failure":
        return Failed(step, seconds, line.take("error", str))
    if kind != "step":
        line.fail(f"the kind {kind!r} is not one of add, abort, reset, step, failure")
    chunks = tuple(Chunk(*line.row("chunks", item, 4)) for item in line.take("chunks", list))
    transfers = tuple(_read_transfer(line, item) for item in line.take("transfers", list))
    ids = tuple(line.row("ids", item) for item in line.take("ids", list))
    if len(ids) != len(chunks):
        line.fail(f"it has {len(chunks)} chunks but the ids of {len(ids)}")
    return Ran(step, seconds, StepPlan(step, chunks, line.integers("preempted"), transfers), ids)


def _read_transfer(line: _Line, value: Any) -> Transfer:
    if not isinstance(value, list) or len(value) != 3 or value[0] not in (COPY, SWAP_OUT, SWAP_IN):
        line.fail(f"'transfers' holds {_shown(value)}, not a kind and two blocks")
    return Transfer(value[0], *line.row("transfers", value[1:], 2))


def _read_request(line: _Line) -> Request:
    params = dict(line.take("params", dict))
    bias = params.get("logit_bias")
    unknown = set(params) - {field.name for field in fields(SamplingParams)}
    if unknown:
        line.fail(f"unknown sampling parameters {', '.join(sorted(unknown))}")
    try:
        if isinstance(bias, dict):
            params["logit_bias"] = {int(token_id): value for token_id, value in bias.items()}
        checked = SamplingParams(**params)
    except (InferError, ValueError) as error:
        line.fail(f"its sampling parameters are not possible: {error}")
    return Request(
        request_id=line.take("request_id", str),
        prompt=line.integers("prompt"),
        params=checked,
        priority=line.take("priority", int),
        deadline=line.take("deadline", float, int, type(None)),
        cache_salt=line.take("cache_salt", str),
    )


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text)} characters)"
