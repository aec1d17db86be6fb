"""Compute the figures of a report from the times of requests.

    asked ──────── first ──── ... ──── last
    ├──── TTFT ────┤                      |      time to first token
                   ├─ ITL ─┤              |      between two chunks of a stream
                   ├─ (last - first) / (tokens - 1) = TPOT, time per output token after the first
    ├──────────────── E2E ────────────────┤

Percentiles interpolate between the two nearest values, as numpy does by default. Every figure is computed
for each repeat separately, then the median of the repeats is reported with the lowest and highest. Pooling
all repeats would hide that one of them was disturbed.

Goodput counts only the requests that met every limit of the SLO: a server that answers every request late has
throughput but no goodput.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from infer.errors import ConfigError

PERCENTS = (50, 95, 99)
LATENCIES = ("ttft", "itl", "tpot", "e2e")


@dataclass(slots=True, kw_only=True)
class RequestTrace:
    """One request as its client saw it; times are seconds since the start of the run."""

    session: int
    turn: int
    asked: float
    chunks: list[float] = field(default_factory=list)  # arrival times of the chunks of the answer
    ended: float = 0.0
    num_prompt: int = 0  # tokens, from the server's count
    num_output: int = 0
    num_cached: int | None = None  # prompt tokens from the prefix cache; None: unknown
    is_counted: bool = False  # True if the server reported the number of tokens
    queue_s: float | None = None  # time in the queue, if known
    error: str | None = None

    @property
    def is_ok(self) -> bool:
        """True if the request got an answer."""
        return self.error is None and bool(self.chunks)

    @property
    def ttft(self) -> float:
        """The seconds from sending the request to the first chunk."""
        return self.chunks[0] - self.asked

    @property
    def tpot(self) -> float | None:
        """The seconds per token after the first; None for a single token."""
        if self.num_output < 2:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.num_output - 1)

    @property
    def e2e(self) -> float:
        """The seconds from sending the request to the last chunk."""
        return self.chunks[-1] - self.asked

    def gaps(self) -> list[float]:
        """Return the seconds between successive chunks."""
        return [after - before for before, after in zip(self.chunks, self.chunks[1:], strict=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """The limits that a request must meet to count as good, in seconds; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def __str__(self) -> str:
        """Return the limits as `read_slo` reads them."""
        return ",".join(f"{name}={limit:g}" for name, limit in asdict(self).items() if limit is not None)

    def is_met(self, trace: RequestTrace) -> bool:
        """Return True if a request met all limits."""
        if not trace.is_ok:
            return False
        seen = {"ttft": trace.ttft, "tpot": trace.tpot or 0.0, "e2e": trace.e2e}
        return all(limit is None or seen[name] <= limit for name, limit in asdict(self).items())


def read_slo(text: str) -> Slo:
    """Return the SLO of a text such as `ttft=1,tpot=0.1`, in seconds."""
    limits: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            seconds = float(value)
        except ValueError:
            seconds = 0.0
        if name not in ("ttft", "tpot", "e2e") or not seconds > 0:
            raise ConfigError(f"an SLO looks like ttft=1,tpot=0.1,e2e=30 in seconds, got {text!r}")
        limits[name] = seconds
    return Slo(**limits)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value below which `percent` of all lie, interpolated; `values` need not be sorted."""
    return float(np.percentile(values, percent))


def summarise(traces: Sequence[RequestTrace], *, seconds: float, slo: Slo) -> dict[str, float]:
    """Return the figures of one run that took `seconds`; figures without data are left out."""
    good = [trace for trace in traces if trace.is_ok]
    figures: dict[str, float] = {
        "seconds": seconds,
        "num_requests": len(traces),
        "num_errors": len(traces) - len(good),
        "num_prompt_tokens": sum(trace.num_prompt for trace in good),
        "num_output_tokens": sum(trace.num_output for trace in good),
        "num_cached_tokens": sum(trace.num_cached or 0 for trace in good),
    }
    if seconds > 0:
        figures |= {
            "requests_per_s": len(good) / seconds,
            "input_tokens_per_s": figures["num_prompt_tokens"] / seconds,
            "output_tokens_per_s": figures["num_output_tokens"] / seconds,
            "goodput_per_s": sum(map(slo.is_met, traces)) / seconds,
            "goodput_share": sum(map(slo.is_met, traces)) / max(len(traces), 1),
        }
    samples: dict[str, list[float]] = {
        "ttft": [trace.ttft for trace in good],
        "itl": [gap for trace in good for gap in trace.gaps()],
        "tpot": [tpot for trace in good if (tpot := trace.tpot) is not None],
        "e2e": [trace.e2e for trace in good],
        "queue": [trace.queue_s for trace in good if trace.queue_s is not None],
    }
    for name, values in samples.items():
        if values:
            figures |= {f"{name}_p{percent}_s": percentile(values, percent) for percent in PERCENTS}
    if samples["itl"]:
        figures["longest_gap_s"] = max(samples["itl"])
    return figures


def cached_share(traces: Sequence[RequestTrace]) -> float | None:
    """Return the share of all prompt tokens that came from the prefix cache; None if it is unknown."""
    told = [(trace.num_cached, trace.num_prompt) for trace in traces if trace.is_ok]
    num_prompt = sum(length for cached, length in told if cached is not None)
    return sum(cached or 0 for cached, _ in told) / num_prompt if num_prompt else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """The title, unit and better direction of a figure."""

    title: str
    unit: str
    better: str  # "higher", "lower", or "": neither


MEASURES: dict[str, Measure] = {
    "output_tokens_per_s": Measure(title="output", unit="tok/s", better="higher"),
    "input_tokens_per_s": Measure(title="input", unit="tok/s", better="higher"),
    "requests_per_s": Measure(title="requests", unit="req/s", better="higher"),
    "goodput_per_s": Measure(title="goodput", unit="req/s", better="higher"),
    "goodput_share": Measure(title="in SLO", unit="%", better="higher"),
    **{
        f"{name}_p{percent}_s": Measure(title=f"{title} p{percent}", unit="ms", better="lower")
        for name, title in (*((name, name.upper()) for name in LATENCIES), ("queue", "queue"))
        for percent in PERCENTS
    },
    "queue_mean_s": Measure(title="queue mean", unit="ms", better="lower"),
    "longest_gap_s": Measure(title="longest gap", unit="ms", better="lower"),
    "seconds": Measure(title="wall", unit="s", better="lower"),
    "num_requests": Measure(title="requests", unit="", better=""),
    "num_errors": Measure(title="errors", unit="", better="lower"),
    "num_prompt_tokens": Measure(title="prompt tokens", unit="", better=""),
    "num_output_tokens": Measure(title="output tokens", unit="", better=""),
    "num_cached_tokens": Measure(title="cached tokens", unit="", better=""),
    "cached_share": Measure(title="cached prompt", unit="%", better=""),
    "client_cpu_share": Measure(title="client CPU", unit="%", better=""),
    "roofline_s": Measure(title="roofline", unit="ms", better=""),
    "roofline_share": Measure(title="of roofline", unit="%", better="higher"),
    "copy_gb_per_s": Measure(title="copy", unit="GB/s", better=""),
    "matmul_tflops": Measure(title="matmul", unit="TFLOP/s", better=""),
    "mfu": Measure(title="MFU", unit="%", better="higher"),
    "step_p50_s": Measure(title="step p50", unit="ms", better="lower"),
    "num_steps": Measure(title="steps", unit="", better="lower"),
    "num_preemptions": Measure(title="preemptions", unit="", better="lower"),
    "num_starved": Measure(title="over 30 s", unit="", better="lower"),
    "longest_wait_s": Measure(title="longest wait", unit="ms", better="lower"),
    "tokens_per_step": Measure(title="tokens/step", unit="", better="higher"),
    "mean_running": Measure(title="running", unit="", better="higher"),
    "peak_running": Measure(title="peak running", unit="", better="higher"),
    "kv_use": Measure(title="KV use", unit="%", better="higher"),
    "fragmentation": Measure(title="fragmentation", unit="%", better="lower"),
    "cache_hit_share": Measure(title="cache hits", unit="%", better="higher"),
    "draft_share": Measure(title="drafts kept", unit="%", better="higher"),
    "gb_per_s": Measure(title="read", unit="GB/s", better="higher"),
    "call_p50_s": Measure(title="call p50", unit="ms", better="lower"),
    "weights_bytes": Measure(title="weights", unit="MiB", better="lower"),
    "kv_bytes": Measure(title="KV cache", unit="MiB", better=""),
    "activation_bytes": Measure(title="activations", unit="MiB", better="lower"),
    "graph_bytes": Measure(title="graphs", unit="MiB", better="lower"),
    "process_bytes": Measure(title="process", unit="MiB", better="lower"),
    "num_hung_up": Measure(title="hung up", unit="", better=""),
    "host_drift_share": Measure(title="host memory growth", unit="%", better="lower"),
    "gpu_drift_share": Measure(title="GPU memory growth", unit="%", better="lower"),
    "num_repeated_steps": Measure(title="repeated steps", unit="", better="lower"),
    "largest_difference": Measure(title="largest difference", unit="", better="lower"),
    "same_tokens": Measure(title="same tokens", unit="", better="higher"),
    "speed_up": Measure(title="speed-up", unit="x", better="higher"),
}
CEILINGS = ("copy_gb_per_s", "matmul_tflops")  # limits of the machine, measured with the rest of a report
_SCALES = {"ms": 1000.0, "%": 100.0, "MiB": 2.0**-20}


def show(name: str, value: float) -> str:
    """Return a figure as text, in the unit of its measure, with three significant digits."""
    unit = MEASURES[name].unit if name in MEASURES else ""
    value *= _SCALES.get(unit, 1.0)
    text = f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"
    return f"{text} {unit}".rstrip()
