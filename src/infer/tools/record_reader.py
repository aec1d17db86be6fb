"""Read a record back, trusting nothing in it.

A record may come from a stranger, so every line is checked before anything is built from it: that it is JSON,
of a known kind, with the fields and types below, and that steps do not run backwards: neither those that ran,
nor those after which something came. An error names its line. Events are read from the file as they are asked
for; a record of any length takes the memory of one line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from infer.cache.memory import CacheSize
from infer.engine.run_manifest import RunFacts
from infer.errors import ConfigError, InferError
from infer.sampling.params import SamplingParams
from infer.sampling.structured import Structured
from infer.scheduling.plan import COPY, SWAP_IN, SWAP_OUT, Chunk, Chunks, StepPlan, Transfer
from infer.scheduling.preemption import PreemptionCost
from infer.scheduling.request import Request
from infer.tools.record import VERSION
from infer.tools.typed_json import read_json

MAX_LINE_BYTES = 64 << 20  # a prompt of a million tokens has about eight
MAX_STEP_GAP = 1_000_000  # between two events; an idle engine does not step

TransferKind = Annotated[str, msgspec.Meta(pattern=f"^({COPY}|{SWAP_OUT}|{SWAP_IN})$")]


class _Header(msgspec.Struct, kw_only=True):
    """The first line of a record."""

    kind: Literal["header"]
    version: int
    infer: str
    model: str
    fingerprint: str
    dtype: str
    device: str
    num_threads: int
    context_len: int
    knobs: dict[str, Any]
    cache: CacheSize
    cost: PreemptionCost
    steps_ahead: Annotated[int, msgspec.Meta(ge=0, le=64)] | None = None

    def to_facts(self) -> RunFacts:
        steps_ahead = self.steps_ahead
        if steps_ahead is None:  # there was one, on a GPU, before records said so
            steps_ahead = int(self.device == "cuda" and self.knobs.get("use_overlap") is not False)
        given = msgspec.structs.asdict(self) | {"version": self.infer, "steps_ahead": steps_ahead}
        return RunFacts(**{field.name: given[field.name] for field in fields(RunFacts)})


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    step: int
    seconds: float = msgspec.field(name="t")  # since the header


class _Request(msgspec.Struct, frozen=True):
    request_id: str
    prompt: tuple[int, ...]
    params: dict[str, Any]
    priority: int
    deadline: float | None
    cache_salt: str
    pooling: str | None = None


class Added(_Event, frozen=True, tag="add"):
    """A request came in after this step."""

    written: _Request = msgspec.field(name="request")

    def __post_init__(self) -> None:
        assert self.request  # which raises where its parameters are not possible

    @property
    def request(self) -> Request:
        """The request as it was accepted."""
        params = dict(self.written.params)
        if unknown := set(params) - {field.name for field in fields(SamplingParams)}:
            raise ValueError(f"unknown sampling parameters {', '.join(sorted(unknown))}")
        try:
            if isinstance(bias := params.get("logit_bias"), dict):
                params["logit_bias"] = {int(token_id): value for token_id, value in bias.items()}
            if isinstance(form := params.get("structured"), dict):  # it was accepted, also a tool's grammar
                params["structured"] = msgspec.convert(form, Structured)
            given = msgspec.structs.asdict(self.written) | {"params": SamplingParams(**params)}
        except (InferError, ValueError) as error:
            raise ValueError(f"its sampling parameters are not possible: {error}") from None
        return Request(**given)


class Aborted(_Event, frozen=True, tag="abort"):
    """A request, or one sequence of it, was ended after this step."""

    request_id: str
    index: int | None


class Reset(_Event, frozen=True, tag="reset"):
    """All cached prefixes were forgotten after this step."""


class Ran(_Event, frozen=True, tag="step"):
    """A plan ran and sampled these ids."""

    chunks: tuple[tuple[int, int, int, int], ...]
    preempted: tuple[int, ...]
    transfers: tuple[tuple[TransferKind, int, int], ...]
    ids: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.chunks):
            raise ValueError(f"it has {len(self.chunks)} chunks but the ids of {len(self.ids)}")

    @property
    def plan(self) -> StepPlan:
        """The plan as the scheduler made it."""
        chunks = tuple(Chunk(*chunk) for chunk in self.chunks)
        transfers = tuple(Transfer(*transfer) for transfer in self.transfers)
        return StepPlan(self.step, Chunks.of(chunks), self.preempted, transfers)


class Failed(_Event, frozen=True, tag="failure"):
    """The plan of this step raised, and its requests ended with an error."""

    error: str


Event: TypeAlias = Added | Aborted | Reset | Ran | Failed

_HEADER = msgspec.json.Decoder(_Header)
_EVENT: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


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
        """Yield everything after the header, in order; the file is read as events are asked for."""
        for where, line in self._lines():
            if not where.endswith(" line 1"):
                yield read_json(line, _EVENT, where)

    def _read_header(self) -> RunFacts:
        for where, line in self._lines():
            start = read_json(line, msgspec.json.Decoder(dict[str, Any]), where)
            if start.get("kind") != "header":
                raise ConfigError(f"{where}: a record begins with a header line; this is not a record")
            if (version := start.get("version")) != VERSION:
                raise ConfigError(
                    f"{where}: the record is of version {version}, and this release reads version {VERSION}"
                )
            return read_json(line, _HEADER, where).to_facts()
        raise ConfigError(f"{self.path} is empty; a record begins with a header line")

    def _lines(self) -> Iterator[tuple[str, bytes]]:
        """Yield every line with words for where it is."""
        try:
            with open(self.path, "rb") as handle:
                number = 0
                while line := handle.readline(MAX_LINE_BYTES):
                    number += 1
                    where = f"{self.path} line {number}"
                    if not line.endswith(b"\n"):
                        is_long = len(line) == MAX_LINE_BYTES
                        reason = "is longer than any record's" if is_long else "is cut short"
                        raise ConfigError(f"{where} {reason}")
                    yield where, line
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error.strerror}") from None
