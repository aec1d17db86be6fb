"""Read the state of GPUs through NVML, the library that comes with NVIDIA's driver.

    read_gpu("GPU-5b1c...")  ->  memory, utilisation, power, temperature
    held_by([4711, 4712])    ->  bytes that these processes use on all GPUs

The library is called through ctypes, so nothing has to be installed; if it is missing, or does not know the
GPU, there are no readings. On each scrape, a server reads the GPUs of its engines by the UUIDs that the
engines report, because GPU numbers differ between processes and UUIDs do not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from functools import lru_cache
from typing import Any, NamedTuple

_LIBRARY = "libnvidia-ml.so.1"
_CELSIUS_OF_GPU = 0  # number of the sensor
_UNKNOWN = 2**64 - 1  # bytes of a process if the driver does not know them
_LIST_PROCESSES = "nvmlDeviceGetComputeRunningProcesses_v3"  # missing in drivers from before 2021
_MOST_PROCESSES = 1024  # limit of the processes listed for one GPU


class GpuReading(NamedTuple):
    """The current state of a GPU; None: not reported."""

    memory_total: int  # bytes
    memory_used: int  # bytes that all processes use
    busy_share: float | None  # share of the last sample period in which a kernel ran, 0 to 1
    memory_busy_share: float | None  # share of that period in which memory was read or written
    power_watts: float | None
    temperature_celsius: float | None


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _Utilization(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in ("gpu", "memory")]


class _Process(ctypes.Structure):
    _fields_ = [("pid", ctypes.c_uint), ("memory", ctypes.c_ulonglong), ("slices", ctypes.c_uint * 2)]


@lru_cache(maxsize=1)
def library() -> Any:
    """Return NVML, initialised; None: there is none, or it finds no driver."""
    try:
        nvml = ctypes.CDLL(_LIBRARY)
        return nvml if nvml.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None


def read_gpu(name: str, nvml: Any = None) -> GpuReading | None:
    """Return the readings of the GPU with this name (its UUID); None: there are none."""
    nvml = nvml or library()
    device = ctypes.c_void_p()
    if nvml is None or nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(device)):
        return None
    memory, busy, number = _Memory(), _Utilization(), ctypes.c_uint()
    if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
        return None
    knows_busy = not nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(busy))
    power = None
    if not nvml.nvmlDeviceGetPowerUsage(device, ctypes.byref(number)):
        power = number.value / 1000
    celsius = None
    if not nvml.nvmlDeviceGetTemperature(device, _CELSIUS_OF_GPU, ctypes.byref(number)):
        celsius = float(number.value)
    return GpuReading(
        memory_total=memory.total,
        memory_used=memory.used,
        busy_share=busy.gpu / 100 if knows_busy else None,
        memory_busy_share=busy.memory / 100 if knows_busy else None,
        power_watts=power,
        temperature_celsius=celsius,
    )


def total_memory(nvml: Any = None) -> int | None:
    """Return the total memory of all GPUs, in bytes; None: none reports it."""
    nvml = nvml or library()
    count, device, memory, total = ctypes.c_uint(), ctypes.c_void_p(), _Memory(), 0
    if nvml is None or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return None
    for index in range(count.value):
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
            continue
        if not nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
            total += memory.total
    return total or None


def held_by(pids: Collection[int], nvml: Any = None) -> int | None:
    """Return the bytes that these processes use on all GPUs, including CUDA's own; None: none is listed.

    In a container the driver may list processes by pids that differ from those inside.
    """
    nvml = nvml or library()
    count, device, held = ctypes.c_uint(), ctypes.c_void_p(), []
    if nvml is None or not hasattr(nvml, _LIST_PROCESSES) or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return None
    for index in range(count.value):
        number, listed = ctypes.c_uint(_MOST_PROCESSES), (_Process * _MOST_PROCESSES)()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
            continue
        if getattr(nvml, _LIST_PROCESSES)(device, ctypes.byref(number), listed):
            continue
        held += [one.memory for one in listed[: number.value] if one.pid in pids and one.memory != _UNKNOWN]
    return sum(held) if held else None
