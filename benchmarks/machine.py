"""What a report must say about where, when and of what it was made."""

from __future__ import annotations

import datetime
import platform

from infer.bench.report import commit, machine


def facts() -> dict[str, str]:
    """Python, CPU, commit and date; two reports that differ in the first two do not compare."""
    found = machine()
    return {
        "python": platform.python_version(),
        "cpu": f"{found['cpu']}, {found['num_cpus']} threads",
        "commit": commit(),
        "date": today(),
    }


def today() -> str:
    """The moment a report is made."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
