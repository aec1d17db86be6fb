"""How a kernel is timed: what is measured, on which data, and what it is compared with.

A `Case` is one function at one shape: a way to make inputs, the bytes the function has to move, and
the implementations that compete on it. `measure` checks each of them against the reference and then
times it.

On a GPU the calls are captured into a CUDA graph, one call per set of inputs, and the replay of the
whole graph is timed with CUDA events: launching from Python costs more than most of these kernels run.
There are as many sets of inputs, and of outputs, as it takes to overflow the L2 cache several times,
so that memory and not the cache serves them (at decode shapes the count is capped and the cache does
serve them; such rows are marked). Bandwidth is judged against a plain copy on the same device.

On the CPU a call is timed in batches with the wall clock; the launcher runs the reference there, so
what competes are other ways of writing it in PyTorch.

Every figure is the median over the repetitions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

Outputs = torch.Tensor | tuple[torch.Tensor, ...]
Implementation = Callable[..., Outputs]

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}

_ROTATED_BYTES = 512 << 20  # ten times the largest L2 cache of today's GPUs
_MAX_ROTATION = 256
_REPETITIONS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One function at one shape."""

    kernel: str
    shape: str
    dtype: torch.dtype
    num_bytes: int  # read and written by an ideal implementation
    make_inputs: Callable[[], tuple[torch.Tensor, ...]]
    reference: Implementation
    implementations: Mapping[str, Implementation]  # the first one is ours


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One row of the report."""

    kernel: str
    shape: str
    dtype: str
    implementation: str
    median_us: float
    gb_per_s: float
    copy_share: float | None  # of the bandwidth of a copy; None on the CPU
    from_cache: bool  # all inputs and outputs together fit into the L2 cache
    max_error: float
    passed: bool

    def as_dict(self) -> dict[str, object]:
        """The row as JSON wants it."""
        return asdict(self)


def measure(case: Case, device: torch.device, copy_gb_per_s: float | None) -> list[Result]:
    """Check and time every implementation of one case."""
    rotation = min(max(_ROTATED_BYTES // case.num_bytes, 2), _MAX_ROTATION) if device.type == "cuda" else 1
    inputs = [case.make_inputs() for _ in range(rotation)]
    expected = case.reference(*inputs[0])
    results = []
    for name, implementation in case.implementations.items():
        max_error, passed = compare(implementation(*inputs[0]), expected, TOLERANCE[case.dtype])
        seconds = time_calls(implementation, inputs, device)
        gb_per_s = case.num_bytes / seconds / 1e9
        results.append(
            Result(
                kernel=case.kernel,
                shape=case.shape,
                dtype=str(case.dtype).removeprefix("torch."),
                implementation=name,
                median_us=seconds * 1e6,
                gb_per_s=gb_per_s,
                copy_share=gb_per_s / copy_gb_per_s if copy_gb_per_s else None,
                from_cache=device.type == "cuda" and rotation * case.num_bytes < l2_cache_bytes(device),
                max_error=max_error,
                passed=passed,
            )
        )
    return results


def compare(actual: Outputs, expected: Outputs, tolerance: float) -> tuple[float, bool]:
    """The largest absolute error, and whether every element is within the tolerance."""
    pairs = list(zip(_as_tuple(actual), _as_tuple(expected), strict=True))
    max_error = max(float((a.float() - b.float()).abs().max()) for a, b in pairs)
    return max_error, all(
        torch.allclose(a.float(), b.float(), rtol=tolerance, atol=tolerance) for a, b in pairs
    )


def time_calls(
    implementation: Implementation, inputs: Sequence[tuple[torch.Tensor, ...]], device: torch.device
) -> float:
    """Median seconds of one call."""
    if device.type == "cuda":
        return _time_on_gpu(implementation, inputs)
    return _time_on_cpu(lambda: implementation(*inputs[0]))


def copy_bandwidth(device: torch.device) -> float:
    """What a kernel that copies 1 GiB reaches, in GB/s, counting bytes read and bytes written.

    Not `copy_`: inside a graph that becomes a memcpy node, which an H200 runs at 63 % of this.
    """
    source = torch.randn(1 << 28, device=device)
    target = torch.empty_like(source)
    seconds = _time_on_gpu(lambda: torch.mul(source, 1.0, out=target), [()] * 4)
    return 2 * source.numel() * source.element_size() / seconds / 1e9


def l2_cache_bytes(device: torch.device) -> int:
    """The size of the GPU's last cache."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def _as_tuple(outputs: Outputs) -> tuple[torch.Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _time_on_gpu(implementation: Implementation, inputs: Sequence[tuple[torch.Tensor, ...]]) -> float:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())  # the inputs may still be on their way
    with torch.cuda.stream(stream):  # a capture wants compiled kernels and a warmed-up allocator
        for _ in range(3):
            implementation(*inputs[0])
    stream.synchronize()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [implementation(*each) for each in inputs]  # kept: each call writes memory of its own
    for _ in range(3):
        graph.replay()

    times_ms: list[float] = []
    for _ in range(_REPETITIONS):
        start, end = _event(), _event()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times_ms.append(start.elapsed_time(end))
    del outputs
    return statistics.median(times_ms) / len(inputs) / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _time_on_cpu(call: Callable[[], object]) -> float:
    for _ in range(5):
        call()
    start = time.perf_counter()
    call()
    batch = max(1, int(2e-3 / max(time.perf_counter() - start, 1e-7)))  # calls that take about 2 ms
    times = []
    for _ in range(_REPETITIONS):
        start = time.perf_counter()
        for _ in range(batch):
            call()
        times.append((time.perf_counter() - start) / batch)
    return statistics.median(times)
