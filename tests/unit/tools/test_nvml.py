"""NVML without a GPU: a library that answers like the real one, or does not."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest

from infer.engine.stats import EngineStats
from infer.server import metrics
from infer.server.metrics import ServerMetrics
from infer.tools import nvml
from infer.tools.nvml import GpuReading, held_by, read_gpu
from tests.support.fake_client import FakeClient

NAME = "GPU-5b1c0000-0000-0000-0000-000000000007"


class FakeNvml:
    """Fills what it is given as NVML does, and returns 0; `unknown` calls return an error."""

    def __init__(self, *unknown: str) -> None:
        self.unknown = unknown

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name in self.unknown:
                return 3  # not supported
            if name == "nvmlDeviceGetHandleByUUID":
                if arguments[0] != NAME.encode():
                    return 6
                ctypes.cast(arguments[1], ctypes.POINTER(ctypes.c_void_p))[0] = 1234
                return 0
            if name == "nvmlDeviceGetCount_v2":
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_uint))[0] = 2
                return 0
            if name == "nvmlDeviceGetHandleByIndex_v2":
                ctypes.cast(arguments[1], ctypes.POINTER(ctypes.c_void_p))[0] = 1234
                return 0
            assert arguments[0].value == 1234, "every question is about the GPU that was found"
            numbers = {
                "nvmlDeviceGetMemoryInfo": (ctypes.c_ulonglong, (80 << 30, 50 << 30, 30 << 30)),
                "nvmlDeviceGetUtilizationRates": (ctypes.c_uint, (75, 40)),
                "nvmlDeviceGetPowerUsage": (ctypes.c_uint, (512_500,)),
                "nvmlDeviceGetTemperature": (ctypes.c_uint, (61,)),
            }
            kind, values = numbers[name]
            into = ctypes.cast(arguments[-1], ctypes.POINTER(kind))
            for place, value in enumerate(values):
                into[place] = value
            return 0

        return call


def test_a_gpu_is_read_by_its_name() -> None:
    assert read_gpu(NAME, FakeNvml()) == GpuReading(80 << 30, 30 << 30, 0.75, 0.4, 512.5, 61.0)
    assert read_gpu("GPU-other", FakeNvml()) is None


def test_the_memory_of_all_gpus_is_added_up() -> None:
    assert nvml.total_memory(FakeNvml()) == 2 * (80 << 30)
    assert nvml.total_memory(FakeNvml("nvmlDeviceGetMemoryInfo")) is None


def test_what_a_gpu_does_not_say_is_left_out() -> None:
    old = FakeNvml("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetTemperature")
    assert read_gpu(NAME, old) == GpuReading(80 << 30, 30 << 30, None, None, None, None)
    assert read_gpu(NAME, FakeNvml("nvmlDeviceGetMemoryInfo")) is None


def test_without_the_library_there_are_no_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.library.cache_clear()
    monkeypatch.setattr(nvml, "_LIBRARY", "libnone.so.0")
    assert nvml.library() is None
    assert read_gpu(NAME) is None
    nvml.library.cache_clear()


class TwoGpus:
    """The processes of two GPUs: pid and bytes; the second does not tell one process's bytes."""

    listed = (((7, 100), (8, 30)), ((7, 20), (9, 2**64 - 1)))

    def nvmlDeviceGetCount_v2(self, into: Any) -> int:
        ctypes.cast(into, ctypes.POINTER(ctypes.c_uint))[0] = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, into: Any) -> int:
        ctypes.cast(into, ctypes.POINTER(ctypes.c_void_p))[0] = index + 1
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, device: ctypes.c_void_p, number: Any, into: Any) -> int:
        room = ctypes.cast(number, ctypes.POINTER(ctypes.c_uint))
        processes = self.listed[(device.value or 0) - 1]
        assert room[0] >= len(processes)
        room[0] = len(processes)
        for place, (pid, held) in enumerate(processes):
            words = struct.pack("=IIQII", pid, 0, held, 1, 1)  # a pid is padded, as a C compiler does
            ctypes.memmove(ctypes.byref(into, place * len(words)), words, len(words))
        return 0


def test_the_memory_of_processes_is_counted_over_gpus() -> None:
    assert held_by([7], TwoGpus()) == 120
    assert held_by([7, 8, 10], TwoGpus()) == 150
    assert held_by([9], TwoGpus()) is None
    assert held_by([], TwoGpus()) is None


class ClientOnGpu(FakeClient):
    gpu = NAME

    def stats(self) -> EngineStats:
        return EngineStats(gpu=self.gpu)


def page(*gpus: str) -> list[str]:
    served = ServerMetrics("infer")
    for gpu in gpus:
        client = ClientOnGpu()
        client.gpu = gpu
        served.add("m", client)
    return [line for line in served.text().decode().splitlines() if line.startswith("infer_gpu_")]


def test_the_page_has_the_gpus_of_its_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "read_gpu", lambda name: read_gpu(name, FakeNvml()))
    labels = f'{{engine="0",gpu="{NAME}",model_name="m"}}'
    assert page(NAME, "") == [
        f"infer_gpu_memory_used_bytes{labels} 3.221225472e+10",
        f"infer_gpu_memory_total_bytes{labels} 8.589934592e+10",
        f"infer_gpu_utilization{labels} 0.75",
        f"infer_gpu_memory_utilization{labels} 0.4",
        f"infer_gpu_power_watts{labels} 512.5",
        f"infer_gpu_temperature_celsius{labels} 61.0",
    ]
    monkeypatch.setattr(metrics, "read_gpu", lambda name: read_gpu(name, FakeNvml("nvmlDeviceGetPowerUsage")))
    assert not any("watts" in line for line in page(NAME))


def test_an_engine_on_a_cpu_has_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "read_gpu", lambda name: pytest.fail("not asked"))
    assert page("") == []
