"""Write down a run so that it can be run again.

A record is JSON lines: data only, one object per line, safe to open. The first line holds the facts of
the run (engine/run_manifest.py); then everything that happens, in order:

    {"kind": "header", "version": 1, "model": ..., "knobs": {...}, "cache": {...}, "cost": {...}}
    {"kind": "add",   "step": 0, "t": 0.01, "request": {...}}      accepted after step 0
    {"kind": "step",  "step": 1, "t": 0.05, "chunks": [[0, 0, 9, 1]], "preempted": [], "transfers": [],
                      "ids": [[42]]}                               the plan that ran, and what it sampled
    {"kind": "abort", "step": 1, "t": 0.05, "request_id": "a", "index": null}
    {"kind": "failure", "step": 2, "t": 0.06, "error": "..."}      the plan of this step could not run

`t` is seconds since the header. A line is written whole when its event happens, and nothing is kept in
memory. Prompts and outputs are in a record, as token ids; paths are not, and cache salts are hashed
with a key that is thrown away: equal ones stay equal, and none can be guessed back.

A file that cannot be written is an error before the model starts. If it fails later (a full disk) the
recording ends after its last whole line, with a warning, and the engine goes on.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from types import TracebackType

import msgspec

from infer.engine.observer import EngineObserver
from infer.engine.run_manifest import RunFacts
from infer.errors import ConfigError
from infer.log import get_logger
from infer.scheduling.plan import StepPlan
from infer.scheduling.request import Request

VERSION = 1

logger = get_logger(__name__)


class Recorder(EngineObserver):
    """An observer that writes a record; give it to `LLM(observer=...)` and close it afterwards."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_steps = 0
        self._salt_key = secrets.token_bytes(16)
        self._started = perf_counter()
        try:
            # readable by its owner alone: it holds prompts
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            if stat.S_ISREG(os.fstat(descriptor).st_mode):  # a file that was there keeps its mode otherwise
                os.fchmod(descriptor, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot record to {path}: {error.strerror}") from None
        self._file: int | None = descriptor
        self._num_bytes = 0  # written in whole lines

    def on_start(self, facts: RunFacts) -> None:
        """Begin the file with the facts of the run; whatever it held before is gone."""
        assert self._file is not None, "a recorder records one engine"
        self._started = perf_counter()
        try:
            os.ftruncate(self._file, 0)
            self._append({"kind": "header", "version": VERSION, **_header(facts)})
        except OSError as error:
            self.close()
            raise ConfigError(f"cannot record to {self.path}: {error.strerror}") from None

    def on_add(self, step: int, request: Request) -> None:
        """Write the whole request, its salt hashed."""
        written = {
            "request_id": request.request_id,
            "prompt": request.prompt,
            "params": asdict(request.params),
            "priority": request.priority,
            "deadline": request.deadline,
            "cache_salt": self._hash_salt(request.cache_salt),
            "pooling": request.pooling,
        }
        self._event("add", step, request=written)

    def on_abort(self, step: int, request_id: str, index: int | None) -> None:
        """Write which sequence ended."""
        self._event("abort", step, request_id=request_id, index=index)

    def on_reset(self, step: int) -> None:
        """Write that the cached prefixes were forgotten."""
        self._event("reset", step)

    def on_step(self, plan: StepPlan, ids: Seq[tuple[int, ...]]) -> None:
        """Write a plan that ran and what it sampled."""
        self.num_steps += 1
        self._event(
            "step",
            plan.step,
            chunks=[msgspec.structs.astuple(chunk) for chunk in plan.chunks],
            preempted=plan.preempted,
            transfers=plan.transfers,
            ids=ids,
        )

    def on_failure(self, step: int, reason: str) -> None:
        """Write that a step could not run."""
        self._event("failure", step, error=reason)

    def close(self) -> None:
        """End the recording; the file is complete after every event, so nothing is written here."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _event(self, kind: str, step: int, **facts: object) -> None:
        if self._file is None:
            return
        try:
            self._append({"kind": kind, "step": step, "t": round(perf_counter() - self._started, 6), **facts})
        except OSError as error:
            logger.warning(
                "recording to %s ended at step %d: %s; the engine goes on", self.path, step, error.strerror
            )
            self._cut()

    def _append(self, line: Mapping[str, object]) -> None:
        assert self._file is not None
        text = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        rest = memoryview(text)
        while rest:  # a disk that is nearly full takes a part
            rest = rest[os.write(self._file, rest) :]
        self._num_bytes += len(text)

    def _cut(self) -> None:
        """Leave the file as it was after its last whole line."""
        assert self._file is not None
        try:
            os.ftruncate(self._file, self._num_bytes)
        except OSError as error:  # a pipe or a device: there is nothing to cut
            logger.debug("cannot shorten %s: %s", self.path, error)
        self.close()

    def _hash_salt(self, salt: str) -> str:
        if not salt:
            return ""
        return hashlib.blake2b(salt.encode(), key=self._salt_key, digest_size=12).hexdigest()


def _header(facts: RunFacts) -> dict[str, object]:
    written = asdict(facts)
    written["infer"] = written.pop("version")
    return written
