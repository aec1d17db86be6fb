"""A report: the results of a benchmark, and everything that is needed to repeat it.

    Report   schema, version, kind, when, machine, versions, commit, model, config, seed, repeats, warm-up
    └── Row      one workload, shape or setting
        └── Figure   median, low and high of the repeats, and the repeats themselves

Reports are JSON, checked when they are written and when they are read: an unknown or missing field, or one of
the wrong type, is an error that names it. `version` grows when a field changes its meaning; an older
reader refuses an unknown version rather than misread it. A run that was interrupted is reported too:
`is_partial` is set, and rows with missing repeats say so.

Other engines' results, `{"engine": ..., "model": ..., "WORKLOAD": {"s": ..., "out_tok_s": ...}}`, are read
as reports too, so that they can be compared with ours.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from infer import __version__
from infer.errors import ConfigError
from infer.kernels.cpu.build import cpu_name
from infer.tools.typed_json import read_json

SCHEMA = "infer-bench"
VERSION = 1
SECRETS = ("--api-key",)


class Figure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured number: the median of the repeats, their extremes, and all of them."""

    median: float
    low: float
    high: float
    values: list[float]  # one per repeat, in their order


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The figures of one workload, shape or setting."""

    name: str
    about: str
    settings: dict[str, Any]  # settings of this row alone: its arrival process, its knobs
    figures: dict[str, Figure]
    note: str = ""  # a sentence that explains the figures
    skipped: str = ""  # reason why there are no figures


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a report file."""

    schema: str
    version: int
    kind: str  # the subcommand of `infer bench` that made it
    created: str
    command: str
    machine: dict[str, str | int]
    versions: dict[str, str]
    commit: str
    model: dict[str, Any]  # name, revision, dtype, device and sizes, as far as they are known
    config: dict[str, Any]  # every knob; for a server, the settings that it reports
    seed: int
    repeats: int
    warmup: int  # requests or calls before the first measured one
    rows: list[Row]
    notes: list[str] = []
    is_partial: bool = False  # interrupted: rows may lack repeats, or be skipped


_OBJECT = msgspec.json.Decoder(dict[str, Any])
_REPORT = msgspec.json.Decoder(Report)


def make_row(
    name: str,
    about: str,
    runs: Sequence[Mapping[str, float]],
    *,
    settings: Mapping[str, Any] | None = None,
    note: str = "",
) -> Row:
    """Return a row with the figures that all repeats have."""
    figures = {}
    for figure in runs[0]:
        if all(figure in run for run in runs):
            values = [run[figure] for run in runs]
            median = statistics.median(values)
            figures[figure] = Figure(median=median, low=min(values), high=max(values), values=values)
    return Row(name=name, about=about, settings=dict(settings or {}), figures=figures, note=note)


def skip_row(
    name: str, about: str, reason: str, settings: Mapping[str, Any] | None = None, *, note: str = ""
) -> Row:
    """Return a row that could not be measured here."""
    return Row(name=name, about=about, settings=dict(settings or {}), figures={}, skipped=reason, note=note)


def make_report(
    kind: str,
    rows: Sequence[Row],
    *,
    model: Mapping[str, Any],
    config: Mapping[str, Any],
    seed: int,
    repeats: int,
    warmup: int,
    notes: Sequence[str] = (),
    is_partial: bool = False,
    served_by: str = "",
) -> Report:
    """Return a report of rows just measured on this machine; `served_by`: a server's version, if known."""
    return Report(
        schema=SCHEMA,
        version=VERSION,
        kind=kind,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=command_line(sys.argv[1:]),
        machine=machine(),
        versions=versions() | ({"server": served_by} if served_by else {}),
        commit=commit(),
        model={name: _in_utf8(fact) if isinstance(fact, str) else fact for name, fact in model.items()},
        config=dict(config),
        seed=seed,
        repeats=repeats,
        warmup=warmup,
        rows=list(rows),
        notes=[*(["interrupted: this report is not complete"] if is_partial else []), *notes],
        is_partial=is_partial,
    )


def write_report(report: Report, path: Path) -> None:
    """Write JSON that `read_report` accepts."""
    data = msgspec.json.encode(report)
    check_report(data, str(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(data, indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write the report {path}: {error.strerror}") from None


def read_report(path: Path) -> Report:
    """Return the checked report of a file, ours or another engine's."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the report {path}: {error.strerror}") from None
    raw = read_json(data, _OBJECT, f"the report {path}")
    return (
        check_report(data, str(path)) if "schema" in raw or "engine" not in raw else _from_engine(raw, path)
    )


def check_report(data: bytes, where: str) -> Report:
    """Return the report in this JSON; raises a ConfigError that says what is wrong with it."""
    report = read_json(data, _REPORT, f"{where} is not a benchmark report")
    if report.schema != SCHEMA or report.version != VERSION:
        raise ConfigError(
            f"{where} is {report.schema} version {report.version}; this version reads {SCHEMA} {VERSION}"
        )
    for row in report.rows:
        if bool(row.figures) == bool(row.skipped):
            raise ConfigError(f"{where}: row {row.name!r} must have figures, or say why it was skipped")
        for name, figure in row.figures.items():
            count = len(figure.values)
            is_complete = count == report.repeats or (report.is_partial and 0 < count < report.repeats)
            if not is_complete or not figure.low <= figure.median <= figure.high:
                raise ConfigError(
                    f"{where}: {name} of row {row.name!r} has {count} values for "
                    f"{report.repeats} repeats, or a median outside them"
                )
    return report


class _EngineRow(
    msgspec.Struct,
    rename={"seconds": "s", "output_tokens_per_s": "out_tok_s", "input_tokens_per_s": "in_tok_s"},
):
    """One workload in the results of another engine."""

    seconds: float | None = None
    output_tokens_per_s: float | None = None
    input_tokens_per_s: float | None = None
    note: str = ""


def _from_engine(raw: Mapping[str, Any], where: Path) -> Report:
    """Return another engine's results as a report of one repeat."""
    rows = []
    for name, value in raw.items():
        if isinstance(value, dict):
            try:
                figures = msgspec.structs.asdict(msgspec.convert(value, _EngineRow))
            except msgspec.ValidationError as error:
                raise ConfigError(f"{where}: row {name!r}: {error}") from None
            note = figures.pop("note")
            if known := {figure: number for figure, number in figures.items() if number is not None}:
                rows.append(make_row(name, "", [known], note=note))
    if not rows:
        raise ConfigError(f"{where} names an engine, but has no results in a format that infer reads")
    return Report(
        schema=SCHEMA,
        version=VERSION,
        kind="offline",
        created=str(raw.get("created", "")),
        command="",
        machine={},
        versions={"engine": " ".join(filter(None, (str(raw["engine"]), str(raw.get("version", "")))))},
        commit=str(raw.get("commit", "")),
        model={"name": str(raw.get("model", ""))},
        config={},
        seed=0,
        repeats=1,
        warmup=0,
        rows=rows,
    )


# -- where it was measured ----------------------------------------------------------------------------


def machine() -> dict[str, str | int]:
    """Return facts about the hardware; if they differ, a comparison is about machines, not programs."""
    found: dict[str, str | int] = {
        "cpu": cpu_name(),
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20,
        "system": f"{platform.system()} {platform.machine()}",
    }
    return found | _gpu()


def _gpu() -> dict[str, str | int]:
    """Return the first GPU as its driver names it; a client of a server cannot learn it otherwise."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
        name, _, memory = done.stdout.splitlines()[0].rpartition(", ")
        return {"gpu": name, "gpu_memory_mib": int(memory)}
    except (OSError, subprocess.SubprocessError, LookupError, ValueError):
        return {}


def versions() -> dict[str, str]:
    """Return the versions of the programs that determine speed, and of the libraries in use."""
    found = {"infer": __version__, "python": platform.python_version()}
    for name in ("torch", "triton", "numpy"):
        if name in sys.modules:
            found[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return found


def commit() -> str:
    """Return the commit of this code, with `-dirty` if code was changed; `unknown` outside a repository.

    Changed reports and pages do not count, so the first of several reports does not make the others dirty.
    """

    def git(*command: str) -> str:
        root = str(Path(__file__).resolve().parents[3])
        done = subprocess.run(
            ["git", "-C", root, *command], capture_output=True, text=True, check=True, timeout=10
        )
        return done.stdout.strip()

    try:
        name = git("describe", "--always", "--abbrev=12", "--exclude=*")
        no_code = (":!benchmarks/reports", ":!docs", ":!*.md")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *no_code)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{name}-dirty" if changed else name


def revision_of(model: Path) -> str:
    """Return the identity of a model: the hub's commit of a snapshot, or a hash of the files.

    A file's hash is its `sha256sum`; a directory's hash covers the list of its config and weights.
    """
    folders = model.parts
    if "snapshots" in folders[:-1]:
        name = folders[folders.index("snapshots") + 1]
        if len(name) == 40 and set(name) <= set("0123456789abcdef"):
            return name
    digests = {}
    for file in (
        [model] if model.is_file() else sorted([*model.glob("config.json"), *model.glob("*.safetensors")])
    ):
        with open(file, "rb") as handle:
            digests[file.name] = hashlib.file_digest(handle, "sha256").hexdigest()
    listed = "".join(f"{digest}  {name}\n" for name, digest in digests.items())
    whole = digests[model.name] if model.is_file() else hashlib.sha256(listed.encode()).hexdigest()
    return f"sha256:{whole}"


def command_line(arguments: Sequence[str]) -> str:
    """Return the command for a report, without keys and without directories of this machine."""
    program = Path(sys.argv[0])
    said = (
        ["python", "-m", f"benchmarks.{program.stem}"] if program.parent.name == "benchmarks" else ["infer"]
    )
    hides_next = False
    for argument in arguments:
        name, has_value, _ = argument.partition("=")
        said.append(
            "..." if hides_next else f"{name}=..." if name in SECRETS and has_value else _short(argument)
        )
        hides_next = argument in SECRETS
    return shlex.join(map(_in_utf8, said))


def _in_utf8(text: str) -> str:
    """Return a text with U+FFFD for every byte of a file's name that is not UTF-8, which JSON cannot hold."""
    return os.fsencode(text).decode(errors="replace")


def _short(argument: str) -> str:
    """Return an argument without the directories of this machine, or a URL without its user."""
    if "://" in argument:
        scheme, _, rest = argument.partition("://")
        return f"{scheme}://{rest.rpartition('@')[2]}"
    return Path(argument).name if os.sep in argument else argument
