"""The memory of a GPU that is not there: what an engine may take, what it measures, what it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from infer.cache.memory import GPU_RUNTIME_BYTES, StepBytes, graph_pool_bytes
from infer.config.knobs import parse_memory
from infer.config.profiles.find import Gpu
from infer.config.resolve import resolve_scheduler
from infer.config.settings import EngineConfig
from infer.engine import build, cache_fit, device_build, device_memory, machine, rehearsal
from infer.engine.build import build_engine
from infer.errors import ConfigError, NoRoom
from infer.execution.gpu.device import GpuDevice
from infer.execution.gpu.warm_up import WarmUp
from infer.kernels.runtime import dispatch
from infer.kernels.runtime.profiles import device_profile
from infer.tools import doctor, memory_needs
from infer.tools.doctor import _gpu_memory
from tests.support.tiny import drain, tiny_model

GIB = 1 << 30
GPU = torch.device("cuda", 0)


class FakeCuda:
    """The figures of a GPU with 80 GiB, of which this process has reserved 10 and others hold some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, others: int = 0, reserved: int = 10 * GIB) -> None:
        self.total, self.others, self.reserved = 80 * GIB, others, reserved
        self.fraction: float | None = None
        for name in ("mem_get_info", "memory_reserved", "set_per_process_memory_fraction"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return self.total - self.others - self.reserved - GPU_RUNTIME_BYTES, self.total

    def memory_reserved(self, device: Any = None) -> int:
        return self.reserved

    def set_per_process_memory_fraction(self, fraction: float, device: Any = None) -> None:
        self.fraction = fraction


@pytest.mark.parametrize(
    ("asked", "limit"),
    [
        (None, None),
        ("0.5", 40 * GIB),
        ("1", 80 * GIB),
        ("1.0", 80 * GIB),
        ("12GiB", 12 * GIB),
        ("80GiB", 80 * GIB),
    ],
)
def test_an_engine_may_take_a_size_or_a_share(
    asked: str | None, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(monkeypatch)
    memory = device_memory.look(GPU, asked)
    assert (memory.limit, memory.others) == (limit, 0)
    device_memory.enforce_limit(GPU, asked)
    if limit is None:
        assert memory.room == int(0.9 * memory.free)
        assert cuda.fraction is None, "without a limit that was asked for, PyTorch is given none"
    else:
        assert memory.room == min(limit - 10 * GIB - GPU_RUNTIME_BYTES, memory.free)
        assert cuda.fraction == pytest.approx((limit - GPU_RUNTIME_BYTES) / cuda.total)


@pytest.mark.parametrize("device", [GPU, torch.device("cpu")])
def test_more_than_a_device_has_is_refused(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    monkeypatch.setattr(device_memory, "host_memory", lambda: (80 * GIB, 0))
    message = r"device_memory is '90GiB', but this device has 80.0 GiB; .* a share such as 0.9"
    with pytest.raises(ConfigError, match=message):
        device_memory.look(device, "90GiB")


def test_what_other_processes_hold_is_not_counted_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch, others=65 * GIB)
    memory = device_memory.look(GPU, None)
    assert memory.others == 65 * GIB
    assert memory.free == 5 * GIB - GPU_RUNTIME_BYTES
    assert memory.room == int(0.9 * memory.free)
    assert "other processes hold 65.0 GiB" in _gpu_memory()
    found = memory_needs.machine_on(GPU, "60GiB")
    assert (found.memory, found.others, found.unloaded.limit) == (memory.free, 65 * GIB, 60 * GIB)


@pytest.mark.parametrize("text", ["0", "0.0", "1.5", "12", "-1", "much", "", "nan", "0GiB"])
def test_what_is_neither_a_size_nor_a_share_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"device_memory must be a size such as 12GiB, or a share .* got"):
        EngineConfig.from_knobs(device_memory=text)


def test_a_share_may_be_written_as_a_number() -> None:
    assert EngineConfig.from_knobs(device_memory=0.25).cache.device_memory == "0.25"
    assert EngineConfig.from_knobs(gpu_memory_utilization=0.9).cache.device_memory == "0.9"
    assert EngineConfig.from_knobs(mem_fraction_static=".8").cache.device_memory == ".8"
    assert parse_memory(".5", 100, "device_memory") == 50


def test_a_cpu_has_a_limit_only_if_one_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "host_memory", lambda: (100 * GIB, 2 * GIB))
    cpu = torch.device("cpu")
    assert device_memory.look(cpu, None, free_host=50 * GIB).room == 50 * GIB
    assert device_memory.look(cpu, "12GiB", free_host=50 * GIB).room == 10 * GIB
    assert device_memory.look(cpu, "0.9", free_host=50 * GIB).room == 50 * GIB


class FakeArena:
    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The build of an engine for a GPU, on the CPU; what it measures is given, and told in order."""
    told: list[str] = []

    def peak_of(work: Callable[[], object], device: torch.device) -> int:
        work()
        told.append("measured")
        return {1: 30 << 20, 2: 400 << 20, 3: 100 << 20}[told.count("measured")]

    monkeypatch.setattr(machine, "has_gpu_kernels", lambda device: True)
    for module in (build, device_build):
        monkeypatch.setattr(module, "is_gpu", lambda device: True)
    monkeypatch.setattr(build, "freeze_with", lambda engine: None)
    monkeypatch.setattr(device_build, "enforce_limit", lambda device, asked: told.append(f"limit {asked}"))
    monkeypatch.setattr(device_build, "Arena", FakeArena)
    monkeypatch.setattr(build, "gpu_name", lambda device: "GPU-1234")
    monkeypatch.setattr(device_memory, "peak_of", peak_of)
    monkeypatch.setattr(device_memory, "host_memory", lambda: (80 * GIB, 0))
    monkeypatch.setattr(cache_fit, "free_host_bytes", lambda: 80 * GIB)
    return told


def test_the_largest_step_runs_before_the_cache_takes_the_rest(
    fake_gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[StepBytes] = []
    fit = cache_fit.fit_to_device

    def spy(*given: Any, step: StepBytes, **more: Any) -> Any:
        seen.append(step)
        return fit(*given, step=step, **more)

    monkeypatch.setattr(build, "fit_to_device", spy)
    config = EngineConfig.from_knobs(max_num_batched_tokens=2048, max_batch_size=4, num_blocks=8)
    engine = build_engine(config, tiny_model("llama"))
    assert fake_gpu == ["limit None", "measured", "measured", "measured"]
    [step] = seen
    assert engine.stats().gpu == "GPU-1234"
    assert isinstance(engine._device, GpuDevice)
    arena = engine._device.arena
    assert isinstance(arena, FakeArena)
    assert step.activations == step.layers == 500 << 20  # a quarter for gaps
    assert arena.num_bytes == step.activations + (32 << 20)  # and a workspace for what captures steps
    assert (step.logits, step.buffers) == (125 << 20, (30 + 32) << 20)
    share = (4 + 1024) / 2048  # the largest captured step has 1,024 tokens of prompts
    assert step.graphs == int(1.25 * (int(share * (400 << 20)) + (100 << 20))) + (32 << 20)
    assert engine._device.graphs._pool_bytes == step.graph_block


def test_a_step_that_does_not_fit_is_refused_with_what_would(
    fake_gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: WarmUp) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore")

    monkeypatch.setattr(WarmUp, "compute_padding", fail)
    config = EngineConfig.from_knobs(max_num_batched_tokens=4096, max_batch_size=64, device_memory="9GiB")
    with pytest.raises(ConfigError) as caught:
        build_engine(config, tiny_model("llama"))
    assert str(caught.value).startswith(
        "a step of max_num_batched_tokens=4096 and max_batch_size=64 does not fit next to the weights: "
    )
    assert str(caught.value).endswith(
        "(CUDA out of memory. Tried to allocate 2.00 GiB); set max_num_batched_tokens=1024 and "
        "max_batch_size=16, or raise device_memory"
    )


def test_a_cache_fills_what_device_memory_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "host_memory", lambda: (80 * GIB, 1 * GIB))
    monkeypatch.setattr(cache_fit, "free_host_bytes", lambda: 70 * GIB)

    def num_blocks(**knobs: Any) -> int:
        config = EngineConfig.from_knobs(max_num_batched_tokens=64, kv_cache_share=1.0, **knobs)
        engine = build_engine(config, tiny_model("llama"))
        drain(engine)
        return engine.scheduler.pool.num_blocks

    unlimited = num_blocks()
    limited = num_blocks(device_memory=str(GIB + (1 << 20)))
    assert limited < unlimited
    with pytest.raises(ConfigError, match="there is no room for a KV cache: .* of device_memory are left"):
        num_blocks(device_memory=str(GIB + (1 << 16)))


@pytest.mark.usefixtures("fake_gpu")
def test_weights_beyond_the_limit_are_refused_before_a_step_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "host_memory", lambda: (80 * GIB, 16 * GIB))
    config = EngineConfig.from_knobs(device_memory="12GiB")
    with pytest.raises(
        NoRoom, match="the weights take 4.0 GiB more than there is: .* is 12.0 GiB, and other"
    ):
        build_engine(config, tiny_model("llama"))


def test_the_pool_of_captured_steps_has_room_for_a_matrix_that_is_unpacked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its size does not depend on the tokens, so a captured step needs it as the largest step does."""
    FakeCuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(rehearsal, "collect", lambda: None)
    scheduler = resolve_scheduler(
        EngineConfig.from_knobs(max_num_batched_tokens=8192, max_batch_size=64), 4096
    )
    warm_up: Any = MagicMock()

    def graphs(scratch: int) -> int:
        peaks = iter([0, 1000 << 20, 5 << 20])  # of buffers, layers and logits

        def peak_of(work: Callable[[], object], device: torch.device) -> int:
            work()
            return next(peaks)

        monkeypatch.setattr(device_memory, "peak_of", peak_of)
        computed = StepBytes(0, 0, scratch=scratch)
        return rehearsal.rehearse(lambda: warm_up, lambda _: None, GPU, scheduler, computed, 448, None).graphs

    share = 512 / 8192
    assert graphs(0) == graph_pool_bytes(int((1000 << 20) * share), 5 << 20, 0)
    assert graphs(192 << 20) == graph_pool_bytes((192 << 20) + int((808 << 20) * share), 5 << 20, 192 << 20)


@pytest.mark.parametrize(
    ("capability", "num_sms", "expected"),
    [
        (
            (9, 0),
            132,
            "up to 512 tokens (fp8: 1,024, in blocks 384) CUDA C++, norm and gate fused; experts in Triton",
        ),
        ((9, 0), 60, "fp8, int8, int4; up to 64 tokens Triton, tile by tile; above"),  # a slice of one
        ((8, 9), 142, "fp8, int8, int4; up to 64 tokens Triton, tile by tile; above"),
    ],
)
def test_the_doctor_asks_as_the_kernels_do(
    capability: tuple[int, int], num_sms: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "nvidia_capability", lambda device: capability)
    monkeypatch.setattr(doctor, "nvidia_capability", lambda device: capability)
    monkeypatch.setattr(
        doctor, "gpu_of", lambda device: Gpu("a GPU", capability, num_sms, device_profile(device))
    )
    assert expected in doctor._quantized_products()
