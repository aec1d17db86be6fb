"""Record a run so that it can be replayed.

A record is a file of JSON lines: data only, one object per line, safe to open. The first line has the facts
of the run (engine/run_manifest.py); then all events follow in order:

    {"kind": "header", "version": 2, "model": ..., "knobs": {...}, "cache": {...}, "cost": {...}}
    {"kind": "add",   "step": 0, "t": 0.01, "request": {...}}      accepted after step 0
    {"kind": "step",  "step": 1, "t": 0.05, "chunks": [[0, 0, 9, 1]], "preempted": [], "transfers": [],
                      "ids": [[42]]}                               the plan that ran, and its sampled ids
    {"kind": "abort", "step": 1, "t": 0.05, "request_id": "a", "index": null}
    {"kind": "failure", "step": 2, "t": 0.06, "error": "..."}      the plan of this step could not run

With `orders`, it also has the device's orders and masks, each before its step:

    {"kind": "order", "step": 1, "t": 0.04, "data": "..."}         the `StepOrder` (execution/order.py)
    {"kind": "masks", "step": 1, "t": 0.04, "numbers": [0], "positions": [9], "data": "..."}

A server's record has no text unless requested: `"text": false` in the header, then a line of a
trace (bench/traces.py) for each output, when its request ends. `TraceRecorder` writes it.

    {"arrival": 0.01, "prompt_len": 40, "output_len": 12, "block_size": 16, "blocks": ["5f...", "07..."], ...}

`t` is seconds since the header. A whole line is written when its event happens, and nothing is buffered in
memory. Prompts and outputs are in a record, as token ids; paths are not, and cache salts are hashed
with a key that is discarded: equal salts stay equal, and none can be recovered.

A file that cannot be written is an error before the model starts. If writing fails later (a full disk), the
recording ends after its last whole line, with a warning, and the engine continues.

A record is not trusted: every line is checked before anything is built from it. It must be JSON of a known
kind, with the fields and types below, and step numbers must never decrease, in steps and in the events
between them. An error names its line. Events are read from the file one at a time, so a record of any length
takes the memory of one line.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import secrets
from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, fields
from os.path import samestat
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Literal, Self, TypeAlias
from zlib import compress, decompressobj
from zlib import error as zlib_error

import msgspec
import numpy as np

from infer.cache.layout import Transfer, TransferKind
from infer.cache.memory import CacheSize
from infer.constraints.description import Structured
from infer.engine.observer import EngineObserver
from infer.engine.run_manifest import RunFacts
from infer.errors import ConfigError, InferError, RequestError
from infer.execution.order import StepMasks, StepOrder
from infer.execution.order import read as read_order
from infer.execution.order import to_bytes as order_bytes
from infer.finish_reason import FinishReason
from infer.sampling.params import SamplingParams
from infer.scheduling.plan import Chunk, Chunks, StepPlan
from infer.scheduling.preemption import PreemptionCost
from infer.scheduling.request import Request
from infer.scheduling.sequence import SequenceGroup
from infer.speculative.adaptive import StepCosts
from infer.tools.record_files import open_record, set_aside
from infer.tools.typed_json import read_json

VERSION = 2  # version with orders; a record of version 1 has none
MAX_LINE_BYTES = 64 << 20  # a prompt of a million tokens takes about 8 MB
MAX_MASK_BYTES = 1 << 20  # enough for a vocabulary of eight million ids
MAX_STEP_GAP = 1_000_000  # most steps between two events; an idle engine does not step
# parameters that a record without text includes
TOLD_PARAMS = ("n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p")
NEARLY_FULL = 0.75  # share of `max_bytes` after which an idle engine begins the next record
MAX_TOLD = 1_000_000  # largest priority in a record without text

logger = logging.getLogger(__name__)


class RecordFile(EngineObserver):
    """The file of a record, which has whole lines only; the first has the facts of the run.

    A server sets `max_bytes`, beyond which the file never grows, and no failure of it stops the engine. When
    the file is set aside, the next one begins with the same header.
    """

    has_text = True

    def __init__(self, path: Path, *, max_bytes: int | None = None) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._key = secrets.token_bytes(16)  # key for hashes, never written to disk
        self._started = perf_counter()
        try:
            self._file: int | None = open_record(path)
        except OSError as error:
            raise ConfigError(f"cannot record to {path}: {error.strerror}") from None
        self._num_bytes = 0  # bytes written in whole lines
        self._is_paused = False  # lines are dropped until another engine starts
        self._header = b""

    def on_start(self, facts: RunFacts) -> None:
        """Begin the file with the facts of the run; earlier content is overwritten.

        If there is a limit, an engine that replaces another one begins the next file.
        """
        if self._file is None and self._header:
            return  # the recording has ended with a warning
        assert self._file is not None, "a recorder without max_bytes records one engine"
        self._started = perf_counter()
        form = {} if self.has_text else {"text": False}
        is_first = not self._header
        self._header = _to_line({"kind": "header", "version": VERSION, **form, **_header(facts)})
        try:
            if is_first:
                os.ftruncate(self._file, 0)
                self._append(self._header)
            else:
                self._begin_next()
        except OSError as error:
            if self._max_bytes is not None:
                self._end(error)
                return
            self.close()
            raise ConfigError(f"cannot record to {self.path}: {error.strerror}") from None

    def close(self) -> None:
        """End the recording; the file is complete after every event, so there is nothing to flush."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _write(self, line: Mapping[str, object]) -> None:
        """Write a whole line, or end the recording with a warning."""
        if self._file is None or self._is_paused:
            return
        text = _to_line(line)
        try:
            if self._max_bytes is not None and self._num_bytes + len(text) > self._max_bytes:
                self._make_room()
                if self._is_paused:
                    return
            self._append(text)
        except OSError as error:
            self._end(error)

    def _make_room(self) -> None:
        """Set a full file aside."""
        self._begin_next()

    def _begin_next(self) -> None:
        """Set the file aside and begin the next one; raises `OSError` if the file was moved or replaced."""
        assert self._file is not None
        if not self.path.exists() or not samestat(os.fstat(self._file), os.stat(self.path)):
            raise OSError(errno.EEXIST, "another file is in its place")
        set_aside(self.path)
        file = open_record(self.path, is_new=True)
        os.close(self._file)
        self._file, self._num_bytes = file, 0
        self._append(self._header)

    def _append(self, text: bytes) -> None:
        assert self._file is not None
        rest = memoryview(text)
        while rest:  # writes may be partial on a nearly full disk
            rest = rest[os.write(self._file, rest) :]
        self._num_bytes += len(text)

    def _end(self, error: OSError) -> None:
        """Truncate the file after its last whole line."""
        assert self._file is not None
        logger.warning("recording to %s ended: %s; the engine continues", self.path, error.strerror)
        try:
            os.ftruncate(self._file, self._num_bytes)
        except OSError as fault:  # a pipe or a device: there is nothing to cut
            logger.debug("cannot shorten %s: %s", self.path, fault)
        self.close()


class Recorder(RecordFile):
    """An observer that writes a record; pass it to `LLM(observer=...)` and close it afterwards.

    Every file begins with a new engine, because a replay does too. So when a file is full, the next one waits
    for a new engine (`wants_new_engine`), and events until then are not recorded.
    """

    def __init__(self, path: Path, *, orders: bool = False, max_bytes: int | None = None) -> None:
        super().__init__(path, max_bytes=max_bytes)
        self._has_orders = orders  # True: record orders and masks
        self.goes_on = False  # True: an idle engine will be rebuilt, which begins the next file
        self.num_steps = 0

    @property
    def wants_new_engine(self) -> bool:
        """True if the file is nearly full, and the next one may begin."""
        is_open = self._file is not None and self._max_bytes is not None and self.goes_on
        return is_open and self._num_bytes > (self._max_bytes or 0) * NEARLY_FULL

    def on_start(self, facts: RunFacts) -> None:
        """Begin a file and resume recording."""
        super().on_start(facts)
        self._is_paused = False

    def _make_room(self) -> None:
        if not self.goes_on:
            raise OSError(errno.EFBIG, f"its {self._max_bytes} bytes are full")
        logger.warning(
            "record %s is full (%d bytes): the next one begins after a second without requests; "
            "until then nothing is written",
            self.path,
            self._num_bytes,
        )
        self._is_paused = True

    def on_add(self, step: int, request: Request) -> None:
        """Write the whole request, with its salt hashed; requests with an adapter are refused."""
        if request.adapter:
            raise RequestError("a request with a LoRA adapter cannot be recorded", param="adapter")
        written = {field.name: getattr(request, field.name) for field in fields(request)}
        written |= {"params": asdict(request.params), "cache_salt": self._hash_salt(request.cache_salt)}
        self._event("add", step, request=written)

    def on_abort(self, step: int, request_id: str, index: int | None) -> None:
        """Write the request or sequence that was aborted."""
        self._event("abort", step, request_id=request_id, index=index)

    def on_reset(self, step: int) -> None:
        """Write that the cached prefixes were dropped."""
        self._event("reset", step)

    def on_order(self, order: StepOrder) -> None:
        """Write the device's order, if orders are recorded."""
        if self._has_orders:
            self._event("order", order.step, data=b64encode(order_bytes(order)).decode())

    def on_masks(self, step: int, masks: StepMasks) -> None:
        """Write the masks of a step, if orders are recorded."""
        if self._has_orders:
            lines = compress(masks.lines_KW.tobytes(), level=1)
            facts = {"numbers": [*masks.numbers], "positions": [*masks.positions]}
            self._event("masks", step, **facts, data=b64encode(lines).decode())

    def on_step(self, plan: StepPlan, ids: Seq[tuple[int, ...]]) -> None:
        """Write a plan that ran and its sampled ids."""
        self.num_steps += 1
        chunks = [msgspec.structs.astuple(chunk) for chunk in plan.chunks]
        changes = {"preempted": plan.preempted, "transfers": plan.transfers}
        self._event("step", plan.step, chunks=chunks, **changes, ids=ids)

    def on_failure(self, step: int, reason: str) -> None:
        """Write that a step could not run."""
        self._event("failure", step, error=reason)

    def _event(self, kind: str, step: int, **facts: object) -> None:
        self._write({"kind": kind, "step": step, "t": round(perf_counter() - self._started, 6), **facts})

    def _hash_salt(self, salt: str) -> str:
        if not salt:
            return ""
        return hashlib.blake2b(salt.encode(), key=self._key, digest_size=12).hexdigest()


class TraceRecorder(RecordFile):
    """An observer that writes the lengths and times of requests, but no text."""

    has_text = False

    def on_start(self, facts: RunFacts) -> None:
        """Begin the file; prefixes are compared in blocks of the engine's cache."""
        self._block_size = facts.cache.block_size
        super().on_start(facts)

    def on_end(self, group: SequenceGroup) -> None:
        """Write a line for each output of a request."""
        request = group.request
        params = {name: getattr(request.params, name) for name in TOLD_PARAMS}
        line = {
            "arrival": round(max(0.0, group.added_at - self._started), 6),
            "prompt_len": len(request.prompt),
            "priority": max(-MAX_TOLD, min(MAX_TOLD, request.priority)),
            "params": params | {"structured": request.params.structured is not None},
            "block_size": self._block_size,
            "blocks": self._hash_blocks(request),
        }
        if request.deadline is not None:  # converted to seconds since the header
            line["deadline"] = round(max(0.0, request.deadline - self._started), 6)
        for seq in group.sequences:
            if seq.finish_reason != FinishReason.DROPPED:  # not a beam that was replaced by others
                num_output = len(seq.tokens) - seq.num_prompt
                self._write(line | {"output_len": max(1, num_output), "finish_reason": seq.finish_reason})

    def _hash_blocks(self, request: Request) -> list[str]:
        """Return a hash for each full block of a prompt, over all tokens up to its end."""
        chain = hashlib.blake2b(key=self._key, digest_size=8)
        chain.update(repr((request.adapter, request.cache_salt)).encode())
        ids = memoryview(array("I", request.prompt))
        hashes = []
        for stop in range(self._block_size, len(ids) + 1, self._block_size):
            chain.update(ids[stop - self._block_size : stop])
            hashes.append(chain.hexdigest())
        return hashes


def _to_line(data: Mapping[str, object]) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode() + b"\n"


def _header(facts: RunFacts) -> dict[str, object]:
    written = asdict(facts)
    written["infer"] = written.pop("version")
    return written


# -- reading --------------------------------------------------------------------------------------------


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
    step_costs: StepCosts | None = None
    draft_model: str = ""
    draft_fingerprint: str = ""
    steps_ahead: Annotated[int, msgspec.Meta(ge=0, le=64)] | None = None

    def to_facts(self) -> RunFacts:
        steps_ahead = self.steps_ahead
        if steps_ahead is None:  # older records lack the field; it was one on a GPU
            steps_ahead = int(self.device == "cuda" and self.knobs.get("use_overlap") is not False)
        given = msgspec.structs.asdict(self) | {"version": self.infer, "steps_ahead": steps_ahead}
        return RunFacts(**{field.name: given[field.name] for field in fields(RunFacts)})


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    step: int
    seconds: float = msgspec.field(name="t")  # seconds since the header


class _Request(msgspec.Struct, frozen=True):
    request_id: str
    prompt: tuple[int, ...]
    params: dict[str, Any]
    priority: int
    deadline: float | None
    cache_salt: str
    pooling: str | None = None


class Added(_Event, frozen=True, tag="add"):
    """A request was added after this step."""

    written: _Request = msgspec.field(name="request")

    def __post_init__(self) -> None:
        _ = self.request  # raises an error if its parameters are invalid

    @property
    def request(self) -> Request:
        """The request as it was accepted."""
        params = dict(self.written.params)
        if unknown := set(params) - {field.name for field in fields(SamplingParams)}:
            raise ValueError(f"unknown sampling parameters {', '.join(sorted(unknown))}")
        try:
            if isinstance(bias := params.get("logit_bias"), dict):
                params["logit_bias"] = {int(token_id): value for token_id, value in bias.items()}
            if isinstance(form := params.get("structured"), dict):  # accepted before, even a tool's grammar
                params["structured"] = msgspec.convert(form, Structured)
            given = msgspec.structs.asdict(self.written) | {"params": SamplingParams(**params)}
        except (InferError, ValueError) as error:
            raise ValueError(f"its sampling parameters are not possible: {error}") from None
        return Request(**given)


class Aborted(_Event, frozen=True, tag="abort"):
    """A request, or one of its sequences, was aborted after this step."""

    request_id: str
    index: int | None


class Reset(_Event, frozen=True, tag="reset"):
    """All cached prefixes were dropped after this step."""


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
        """Return the plan as the scheduler made it."""
        chunks = tuple(Chunk(*chunk) for chunk in self.chunks)
        transfers = tuple(Transfer(*transfer) for transfer in self.transfers)
        return StepPlan(self.step, Chunks.of(chunks), self.preempted, transfers)


class Ordered(_Event, frozen=True, tag="order"):
    """The device received this order."""

    data: str

    def __post_init__(self) -> None:
        if self.order.step != self.step:
            raise ValueError(f"the line says step {self.step}, its order says step {self.order.step}")

    @property
    def order(self) -> StepOrder:
        """The order that the device received."""
        return read_order(memoryview(bytearray(b64decode(self.data, validate=True))))


class Masked(_Event, frozen=True, tag="masks"):
    """The order of this step was sampled with these masks."""

    numbers: tuple[int, ...]
    positions: tuple[int, ...]
    data: str

    def __post_init__(self) -> None:
        if len(self.positions) != len(self.numbers):
            raise ValueError(f"it has {len(self.numbers)} masks at {len(self.positions)} positions")
        _ = self.lines

    @property
    def lines(self) -> np.ndarray:
        """The masks, a line of 32-bit words each; raises `ValueError` if the data does not match."""
        most = MAX_MASK_BYTES * len(self.numbers)
        try:
            lines = decompressobj().decompress(b64decode(self.data, validate=True), most + 1)
        except zlib_error as error:
            raise ValueError(f"its masks cannot be unpacked: {error}") from None
        num_masks, num_words = len(self.numbers), len(lines) // (4 * max(len(self.numbers), 1))
        if len(lines) > most or len(lines) != 4 * num_masks * num_words:
            raise ValueError(f"its data does not hold {num_masks} masks")
        return np.frombuffer(bytearray(lines), dtype=np.int32).reshape(num_masks, num_words)


class Failed(_Event, frozen=True, tag="failure"):
    """The plan of this step raised an exception, and its requests ended with an error."""

    error: str


Event: TypeAlias = Added | Aborted | Reset | Ran | Failed | Ordered | Masked

_HEADER = msgspec.json.Decoder(_Header)
_EVENT: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


class Record:
    """A record on disk. Opening it reads all of it once, so damage is found before anything is built."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts = self._read_header()
        self.num_steps = 0
        self.has_orders = False
        self.last_step = 0
        last_ran = 0  # checked separately: a step is written when it is read, after events during it
        for event in self.events():
            self.has_orders |= isinstance(event, Ordered)
            before = last_ran if isinstance(event, Ran) else self.last_step
            if not before <= event.step <= self.last_step + MAX_STEP_GAP:
                raise ConfigError(f"{path} goes from step {before} to {event.step}; it is damaged")
            self.last_step = max(self.last_step, event.step)
            if isinstance(event, Ran):
                last_ran = event.step
                self.num_steps += 1

    def events(self) -> Iterator[Event]:
        """Yield the events after the header in order, reading the file lazily."""
        for where, line in self._lines():
            if not where.endswith(" line 1"):
                yield read_json(line, _EVENT, where)

    def _read_header(self) -> RunFacts:
        for where, line in self._lines():
            try:
                start = read_json(line, msgspec.json.Decoder(dict[str, Any]), where)
                if start.get("kind") != "header":
                    raise ConfigError(f"{where}: a record begins with a header line")
            except ConfigError as error:
                raise ConfigError(f"{error}; this is not a record of 'infer generate --record'") from None
            if start.get("text") is False:
                raise ConfigError(
                    f"{self.path} was recorded without text, so it cannot be run again: "
                    f"'infer simulate --trace {self.path}' runs its load, and "
                    "'infer serve --record FILE --record-text' records all"
                )
            if (version := start.get("version")) not in range(1, VERSION + 1):
                raise ConfigError(
                    f"{where}: the record is of version {version}, "
                    f"and this release reads versions 1 to {VERSION}"
                )
            return read_json(line, _HEADER, where).to_facts()
        raise ConfigError(f"{self.path} is empty; a record begins with a header line")

    def _lines(self) -> Iterator[tuple[str, bytes]]:
        """Yield every line with a description of its place."""
        try:
            with open(self.path, "rb") as handle:
                number = 0
                while line := handle.readline(MAX_LINE_BYTES):
                    number += 1
                    where = f"{self.path} line {number}"
                    if not line.endswith(b"\n") and (number > 1 or line.startswith(b'{"kind":')):
                        is_long = len(line) == MAX_LINE_BYTES
                        reason = "is longer than any record's" if is_long else "is cut short"
                        raise ConfigError(f"{where} {reason}")
                    yield where, line
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error.strerror}") from None
