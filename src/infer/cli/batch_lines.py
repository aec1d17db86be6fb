"""The two files of `infer batch`, in OpenAI's batch format: one JSON object per line.

    in    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    out   {"id": "batch_req_...", "custom_id": "a", "response": {"status_code": 200, "request_id": "...",
           "body": {...}}, "error": null}

The whole input is checked before a model is loaded: a mistake in line 40,000 should not show after an hour.
Bodies are checked by the API itself, when their turn comes.

Whole lines are appended to the output, in the order in which answers come. So an interrupted run can be
continued: lines with an answer are not asked again. A last line that a power failure or a full disk cut off
is removed.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from infer.errors import ConfigError, shorten

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_LINE_BYTES = 64 << 20
SHOWN_LEN = 60  # characters of a value in a message


class BatchLine(NamedTuple):
    """One request of the input."""

    number: int  # line number, from 1
    custom_id: str
    url: str
    body: dict[str, Any]


def read_lines(path: Path) -> Iterator[BatchLine]:
    """The requests of a file, each checked; a `ConfigError` names the line."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
                if len(line) > MAX_LINE_BYTES:
                    raise ConfigError(f"{path}, line {number}: longer than {MAX_LINE_BYTES} bytes")
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    yield _read_line(f"{path}, line {number}", number, line)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def _read_line(where: str, number: int, line: bytes) -> BatchLine:
    found = _read_object(where, line)
    custom_id = found.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise ConfigError(f"{where}: custom_id must be a non-empty string, got {_show(custom_id)}")
    if found.get("method", "POST") != "POST":
        raise ConfigError(f'{where}: method must be "POST", got {_show(found["method"])}')
    if (url := found.get("url")) not in URLS:
        raise ConfigError(f"{where}: url must be one of {', '.join(URLS)}, got {_show(url)}")
    body = found.get("body")
    if not isinstance(body, dict):
        raise ConfigError(f"{where}: body must be an object, got {_show(body)}")
    if body.get("stream"):
        raise ConfigError(f"{where}: an answer in a file is not streamed; leave stream out of the body")
    return BatchLine(number, custom_id, str(url), body)


def check_input(path: Path) -> dict[str, int]:
    """Check every line; returns the number of the line of each custom_id."""
    numbers: dict[str, int] = {}
    for line in read_lines(path):
        if line.custom_id in numbers:
            raise ConfigError(
                f"{path}, line {line.number}: custom_id {_show(line.custom_id)} is already used in line "
                f"{numbers[line.custom_id]}; each line needs its own"
            )
        numbers[line.custom_id] = line.number
    if not numbers:
        raise ConfigError(f"{path} holds no request; write one JSON object per line")
    return numbers


class BatchOutput:
    """The output file: reads the lines that it has, and appends more."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.statuses: dict[str, int] = {}  # statuses by custom_id; 0: no answer came
        self.num_cut = 0  # bytes of an incomplete last line
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            self._read()
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None

    def check_belongs_to(self, path: Path, numbers: dict[str, int]) -> None:
        """Refuse an output that was made from another input."""
        if strange := next((custom_id for custom_id in self.statuses if custom_id not in numbers), None):
            raise ConfigError(
                f"{self.path} has an answer to custom_id {_show(strange)}, which {path} does not have; "
                "name the output of this input, or a new file"
            )

    @property
    def num_failed(self) -> int:
        """The number of lines without a good answer."""
        return sum(status != 200 for status in self.statuses.values())

    def add(self, custom_id: str, line: dict[str, Any], status: int) -> None:
        """Append a line, or nothing of it if the disk is full."""
        data = orjson.dumps(line) + b"\n"
        size = os.fstat(self._file).st_size
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            os.ftruncate(self._file, size)
            raise ConfigError(
                f"cannot write {self.path}: {error.strerror}; run the same command to continue"
            ) from None
        self.statuses[custom_id] = status

    def forget_failed(self) -> int:
        """Replace the file atomically by one without the failed lines; returns their number."""
        if not (count := self.num_failed):
            return 0
        kept = self.path.with_name(self.path.name + ".kept")
        with self.path.open("rb") as old, kept.open("wb") as new:
            for line in old:
                if self.statuses[orjson.loads(line)["custom_id"]] == 200:
                    new.write(line)
            new.flush()
            os.fsync(new.fileno())
        os.close(self._file)
        os.replace(kept, self.path)
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND)
        self.statuses = {custom_id: 200 for custom_id, status in self.statuses.items() if status == 200}
        return count

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _read(self) -> None:
        end = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                custom_id, status = _read_answer(f"{self.path}, line {number}", line)
                self.statuses[custom_id] = status
                end += len(line)
        self.num_cut = os.fstat(self._file).st_size - end
        if self.num_cut:
            os.ftruncate(self._file, end)


def _read_answer(where: str, line: bytes) -> tuple[str, int]:
    found = _read_object(where, line)
    try:
        response = found["response"]
        return str(found["custom_id"]), 0 if response is None else int(response["status_code"])
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"{where}: 'infer batch' did not write this line; name another output") from None


def _read_object(where: str, line: bytes) -> dict[str, Any]:
    try:
        found = orjson.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: a JSON object is expected, got {_show(found)}")
    return found


def _show(value: object) -> str:
    return shorten(orjson.dumps(value).decode(), SHOWN_LEN)
