"""What a GPU says of itself through NVML, the library that comes with NVIDIA's driver.

    read_gpu("GPU-5b1c...")  ->  memory, how busy it is, power, temperature

The library is called as it is, so nothing has to be installed; where it is not there, or does not know the
GPU, there are no readings. A server asks at a scrape for the GPUs of its engines, by the names that these say
they run on: the numbers of GPUs differ between processes, their names do not.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any, NamedTuple

_LIBRARY = "libnvidia-ml.so.1"
_CELSIUS_OF_GPU = 0  # the sensor


class GpuReading(NamedTuple):
    """How a GPU is now; None: it does not say."""

    memory_total: int  # bytes
    memory_used: int  # by all processes
    busy_share: float | None  # of the last moments, in which a kernel ran: 0 to 1
    memory_busy_share: float | None  # in which its memory was read or written
    power_watts: float | None
    temperature_celsius: float | None


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _Utilization(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in ("gpu", "memory")]


@lru_cache(maxsize=1)
def library() -> Any:
    """Return NVML, ready to be asked; None: there is none, or no driver behind it."""
    try:
        nvml = ctypes.CDLL(_LIBRARY)
        return nvml if nvml.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None


def read_gpu(name: str, nvml: Any = None) -> GpuReading | None:
    """Return the readings of the GPU with this name (its UUID); None: they cannot be had."""
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
