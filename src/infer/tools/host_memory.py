"""The host memory that a server is told to use, compared with the memory that is there."""

from __future__ import annotations

from infer.cache.memory import format_bytes, free_host_bytes
from infer.config.knobs import parse_bytes
from infer.errors import ConfigError


def check_host_memory(size: str, name: str) -> None:
    """Refuse a size that is more than the machine, or the container around this process, has free."""
    if parse_bytes(size, name) > (free := free_host_bytes()):
        raise ConfigError(
            f"{name}={size} is more than there is: {format_bytes(free)} of host memory are free; "
            f"set {name} to less, such as {free * 3 // 4 >> 20}MiB, or leave it out"
        )
