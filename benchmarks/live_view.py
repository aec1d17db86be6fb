"""What a page that looks at an engine costs: tokens per second with and without it, and one snapshot.

    python -m benchmarks.live_view [--model DIRECTORY] [--device cuda] [--rows 64] [--pairs 8] [--seconds 2]

Two parts:

    snapshots    milliseconds (of CPU) and kilobytes of one snapshot, by blocks in use, of an engine without a
                 model in which 1,000 requests wait
    throughput   one engine decodes `--rows` sequences without a pause. Runs of `--seconds` with a page and
                 without one take turns, so that whatever else the machine does meets both. Every tenth of a
                 second the engine is asked for a snapshot, which is encoded as it is for its server. The
                 result is the median ratio of all pairs of runs, and the share of the engine's CPU time that
                 snapshots and rows of steps took, which other programs on the machine hardly change.

Without `--model` the model is a tiny random one on the CPU. Its steps are short, so a share of them is small:
the worst case. CPU seconds are those of this process, and on a CPU they are less noisy than the clock.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.ipc_engine import NullDevice
from benchmarks.machine import facts
from infer.cache.paged_pool import PagedKVCachePool
from infer.client.messages import LiveReport, encode
from infer.client.process import load_engine
from infer.config.defaults import SIMULATED_STEPS
from infer.config.resolve import resolve_scheduler
from infer.config.settings import EngineConfig
from infer.engine.engine import Engine
from infer.engine.live import MIN_INTERVAL_S, WATCH_S, LiveView
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request
from infer.scheduling.scheduler import Scheduler
from scripts.make_checkpoint import make_checkpoint

PROMPT_LEN = 32
OUTPUT_LEN = 160
BLOCK_SIZE = 16


class Run(NamedTuple):
    """Tokens of some seconds."""

    per_second: float
    per_cpu_second: float
    share: float  # share of the CPU time that the view took


class Load:
    """An engine that always has the same number of requests."""

    def __init__(self, engine: Engine, num_rows: int) -> None:
        self._engine = engine
        self._numbers = itertools.count()
        self._view_s = 0.0  # CPU seconds in the view
        view = engine._live
        self._note, view.note = view.note, self._timed_note  # type: ignore[method-assign]
        for _ in range(num_rows):
            self._add()

    def _timed_note(self, *given: Any, **named: Any) -> None:
        start = time.thread_time()
        self._note(*given, **named)
        self._view_s += time.thread_time() - start

    def _add(self) -> None:
        number = next(self._numbers)
        prompt = tuple((number * 31 + place * 7) % 100 + 3 for place in range(PROMPT_LEN))
        params = SamplingParams(max_tokens=OUTPUT_LEN, ignore_eos=True, temperature=0.0)
        self._engine.add(Request(request_id=f"request-{number:032}", prompt=prompt, params=params))

    def run(self, seconds: float, *, with_page: bool) -> Run:
        """Step for a while, with a page that looks or without one."""
        clock, cpu = time.perf_counter(), time.process_time()
        num_tokens, look_at, self._view_s = 0, 0.0, 0.0
        while (now := time.perf_counter()) < clock + seconds:
            if with_page and now >= look_at:
                start = time.thread_time()
                encode(LiveReport(1, self._engine.look()))
                self._view_s += time.thread_time() - start
                look_at = now + MIN_INTERVAL_S
            for output in self._engine.step():
                num_tokens += len(output.token_ids)
                if output.finish_reason is not None:
                    self._add()
        cpu_s = time.process_time() - cpu
        return Run(num_tokens / (time.perf_counter() - clock), num_tokens / cpu_s, self._view_s / cpu_s)


def compare(engine: Engine, num_rows: int, num_pairs: int, seconds: float) -> None:
    """Print the throughput with a page as a share of that without one."""
    load = Load(engine, num_rows)
    load.run(seconds, with_page=False)
    walls: list[float] = []
    cpus: list[float] = []
    shares: list[float] = []
    for number in range(num_pairs):
        runs = {}
        for with_page in (False, True) if number % 2 else (True, False):
            if not with_page:
                load.run(WATCH_S + 0.1, with_page=False)  # until nothing is written down any more
            runs[with_page] = load.run(seconds, with_page=with_page)
        walls.append(runs[True].per_second / runs[False].per_second)
        shares.append(runs[True].share)
        cpus.append(runs[True].per_cpu_second / runs[False].per_cpu_second)
        print(
            f"  pair {number + 1}: {runs[False].per_second:,.0f} tokens/s without, {walls[-1]:.4f} of it with"
        )
    for name, ratios in (("by the clock", walls), ("by CPU time", cpus)):
        low, high = min(ratios), max(ratios)
        print(f"throughput {name}: {statistics.median(ratios):.4f} of that without ({low:.4f} to {high:.4f})")
    print(
        f"view       {statistics.median(shares):.2%} of the CPU time ({min(shares):.2%} to {max(shares):.2%})"
    )


def snapshot_costs() -> Iterator[tuple[int, int, float, float]]:
    """Yield blocks, blocks held by sequences, milliseconds and kilobytes of a snapshot."""
    for num_blocks, num_rows in ((2048, 16), (16_384, 64), (100_000, 256)):
        pool = PagedKVCachePool(num_blocks, BLOCK_SIZE)
        config = EngineConfig.from_knobs(max_batch_size=num_rows, max_num_batched_tokens=65_536)
        scheduler = Scheduler(pool, resolve_scheduler(config, 8192, SIMULATED_STEPS))
        engine = Engine(scheduler, NullDevice(0), context_len=8192, vocab_size=100_000)
        length = num_blocks * BLOCK_SIZE // num_rows * 3 // 4
        for number in range(num_rows + 1000):  # a thousand wait
            prompt = tuple(range(number, number + length))
            params = SamplingParams(max_tokens=100, ignore_eos=True)
            engine.add(Request(request_id=f"request-{number:032}", prompt=prompt, params=params))
        while len(scheduler.running) < num_rows or any(seq.num_output < 2 for seq in scheduler.running):
            engine.step()
        clock = [0.0]
        view, times = LiveView(scheduler, lambda now=clock: now[0]), []  # type: ignore[misc]
        for _ in range(30):
            clock[0] += MIN_INTERVAL_S
            start = time.thread_time()
            data = encode(LiveReport(1, view.look()))
            times.append(1e3 * (time.thread_time() - start))
        yield num_blocks, pool.usage().num_used, statistics.median(times), len(data) / 1e3


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a checkpoint's directory; without it, a tiny random model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=2.0)
    given = parser.parse_args()
    print(facts())
    for num_blocks, num_used, milliseconds, kilobytes in snapshot_costs():
        print(
            f"snapshot   {num_blocks:,} blocks, {num_used:,} held: {milliseconds:.2f} ms, {kilobytes:.0f} kB"
        )
    with tempfile.TemporaryDirectory() as directory:
        if given.model is None:
            make_checkpoint("llama", Path(directory))
        knobs = {"device": given.device, "max_batch_size": given.rows}
        if given.device == "cpu":
            knobs |= {"num_threads": 1, "num_blocks": 64 * given.rows}
        engine = load_engine(EngineConfig.from_knobs(model=given.model or directory, **knobs))
        while engine.prepare():
            pass
        compare(engine, given.rows, given.pairs, given.seconds)


if __name__ == "__main__":
    main()
