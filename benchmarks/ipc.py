"""What a process boundary between server and engine costs: tokens per second, CPU and latency.

    python -m benchmarks.ipc [--streams 64] [--tokens 500] [--steps-per-second 300]

The engine is real but its model is not: a step "samples" token 1 for every sequence, at once or at a fixed
pace. So the figures are those of the loop, the messages and the queues alone. Three parts:

    flat out    how many tokens per second cross, and what each process spends on one
    paced       the CPU share of each process at the pace of a model that makes `--steps-per-second`
    latency     submit to first token, one request at a time, in a process and in a thread
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.ipc_engine import make_engine
from infer.client.client import EngineClient, InProcessClient
from infer.client.process_client import ProcessClient
from infer.client.supervisor import ProcessOptions
from infer.config.settings import EngineConfig
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request

MODULE = "benchmarks.ipc_engine"


@dataclass
class Clock:
    """CPU and wall time since it was made, of this process and of another."""

    pid: int

    def __post_init__(self) -> None:
        self.start = time.perf_counter(), time.process_time(), self._other_s()

    def read(self) -> tuple[float, float, float]:
        """Seconds: wall, this process, the other."""
        wall, own, other = self.start
        return time.perf_counter() - wall, time.process_time() - own, self._other_s() - other

    def _other_s(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def read_one(client: EngineClient, name: str, num_tokens: int) -> None:
    """One stream, read to its end."""
    params = SamplingParams(max_tokens=num_tokens)
    async for _ in client.generate(Request(request_id=name, prompt=(2, 3, 4), params=params)):
        pass


def config_for(streams: int, pace: int) -> EngineConfig:
    """The same engine, paced or not."""
    return EngineConfig.from_knobs(seed=pace, max_batch_size=streams)


async def measure_streams(streams: int, num_tokens: int, pace: int) -> tuple[float, float, float]:
    """Tokens per second, and the CPU share of server and engine."""
    client = await ProcessClient.start(config_for(streams, pace), ProcessOptions(module=MODULE))
    assert client.pid is not None
    clock = Clock(client.pid)
    await asyncio.gather(*(read_one(client, f"request-{i:032}", num_tokens) for i in range(streams)))
    wall, own, other = clock.read()
    await client.close()
    return streams * num_tokens / wall, own / wall, other / wall


async def measure_idle(seconds: float) -> tuple[float, float]:
    """Return the CPU share of server and engine without requests."""
    client = await ProcessClient.start(config_for(1, 0), ProcessOptions(module=MODULE))
    await read_one(client, "warm", 5)
    assert client.pid is not None
    clock = Clock(client.pid)
    await asyncio.sleep(seconds)
    wall, own, other = clock.read()
    await client.close()
    return own / wall, other / wall


async def measure_latency(client: EngineClient, repeats: int) -> tuple[float, float]:
    """Milliseconds from submit to the one token: median and 99th percentile."""
    times = []
    for number in range(repeats):
        start = time.perf_counter()
        await read_one(client, f"one-{number}", 1)
        times.append((time.perf_counter() - start) * 1e3)
    await client.close()
    return statistics.median(times), statistics.quantiles(times, n=100)[98]


async def measure(streams: int, num_tokens: int, pace: int) -> None:
    """All parts, printed."""
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}")
    rate, own, other = await measure_streams(streams, num_tokens, 0)
    print(f"flat out   {streams} streams: {rate:,.0f} tokens/s = {rate / streams:,.0f} steps/s")
    print(f"           CPU per token: server {own / rate * 1e6:.1f} us, engine {other / rate * 1e6:.1f} us")
    rate, own, other = await measure_streams(streams, num_tokens, pace)
    print(f"paced      {rate / streams:,.0f} steps/s: server {own:.1%}, engine {other:.1%} of a core")
    own, other = await measure_idle(5.0)
    print(f"idle       server {own:.2%}, engine {other:.2%} of a core")
    process = await ProcessClient.start(config_for(1, 0), ProcessOptions(module=MODULE))
    median, p99 = await measure_latency(process, 500)
    print(f"latency    in a process: median {median:.3f} ms, p99 {p99:.3f} ms")
    median, p99 = await measure_latency(InProcessClient(make_engine(config_for(1, 0))), 500)
    print(f"           in a thread:  median {median:.3f} ms, p99 {p99:.3f} ms")


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--steps-per-second", type=int, default=300)
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.streams, arguments.tokens, arguments.steps_per_second))


if __name__ == "__main__":
    main()
