"""Compare configured memory sizes with the memory that is available."""

from __future__ import annotations

from infer.cache.host_bytes import free_host_bytes
from infer.config.knobs import format_bytes, parse_bytes
from infer.errors import ConfigError
from infer.tools import nvml


def check_host_memory(size: str, name: str) -> None:
    """Refuse a size that exceeds the free memory of the machine or of this process's container."""
    if parse_bytes(size, name) > (free := free_host_bytes()):
        raise ConfigError(
            f"{name}={size} is more than there is: {format_bytes(free)} of host memory are free; "
            f"set {name} to less, such as {free * 3 // 4 >> 20}MiB, or leave it out"
        )


def check_loaded_memory(size: str, *, on_gpu: bool, on_cpu: bool) -> None:
    """Refuse a size for loaded models that exceeds their devices' memory; skipped if a GPU's is unknown."""
    gpus, host = nvml.total_memory() if on_gpu else 0, free_host_bytes() if on_cpu else 0
    if gpus is not None and parse_bytes(size) > gpus + host:
        parts = [f"{format_bytes(gpus)} of GPUs"] * on_gpu + [
            f"{format_bytes(host)} of free host memory"
        ] * on_cpu
        raise ConfigError(
            f"loaded_memory={size} is more than there is for models: {' and '.join(parts)}; set it to less, "
            f"such as {(gpus + host) * 3 // 4 >> 20}MiB, or leave it out to count models (max_loaded_models)"
        )
