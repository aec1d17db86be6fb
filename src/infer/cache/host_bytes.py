"""The memory of this machine: the total, the part a process uses, and the free part.

A container often allows less than the machine has. Linux reports both in files: /proc/meminfo for the
machine, and a folder with limit and usage for each control group of this process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """Return the total memory of the machine, and the part of it that this process uses."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), resident_bytes("self", root)


def resident_bytes(process: int | str, root: Path = Path("/")) -> int:
    """Return the resident memory of a process; 0 if it cannot be read."""
    try:
        statm = (root / f"proc/{process}/statm").read_text(encoding="ascii")
        return int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def free_host_bytes(root: Path = Path("/")) -> int:
    """Return the memory that can be allocated without swapping: the machine's, or less in a container."""
    return max(min([_machine_bytes(root), *_container_bytes(root)]), 0)


def _machine_bytes(root: Path) -> int:
    try:
        for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


# file names of a control group's limit and usage, and the key of the part that is only cached files
_CGROUP_V2 = ("memory.max", "memory.current", "inactive_file")
_CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _container_bytes(root: Path) -> Iterator[int]:
    """Yield the bytes that each control group of this process still allows; groups without limit: nothing."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top, names = root / "sys/fs/cgroup", _CGROUP_V2
        elif "memory" in controllers.split(","):
            top, names = root / "sys/fs/cgroup/memory", _CGROUP_V1
        else:
            continue
        group = top / path.strip("/")
        for folder in (group, *group.parents):
            yield from _group_bytes(folder, *names)
            if folder == top:
                break


def _group_bytes(folder: Path, limit_name: str, use_name: str, cached_name: str) -> Iterator[int]:
    try:
        limit, used = (int((folder / name).read_text(encoding="ascii")) for name in (limit_name, use_name))
        stat = (folder / "memory.stat").read_text(encoding="ascii")
        cached = dict(line.split() for line in stat.splitlines()).get(cached_name, "0")
        yield limit - used + int(cached)
    except (OSError, ValueError):  # the group does not exist here, or its limit is the word "max"
        return
