"""What a report must say about where it was made."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path


def facts() -> dict[str, str]:
    """Python, CPU and commit; two reports that differ here do not compare."""
    return {"python": platform.python_version(), "cpu": _cpu_name(), "commit": _commit()}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} threads" if names else platform.machine()


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
