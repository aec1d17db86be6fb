"""What it costs a GPU that a step is two graphs, forward and sampler, and what masks cost beside that.

    python -m benchmarks.sampler_graph CFG_DIR [CFG_DIR ...] [--rows 1 8 32] [--repeats 9] [--out FILE]

A CFG_DIR holds a `config.json`; weights are random, of that shape. One engine decodes the same batch in turn

    whole     with forward and sampler captured as one graph, one launch a step
    split     as two, which is how steps are served
    masked    as two, each row under a mask that is there at once: the copy, and the sampler that reads it

and for each the microseconds of a step are taken while all rows decode. A cost is that of a round over the
`whole` round (`masked`: over the `split` round) beside it, in per cent; the median of all rounds is wanted
below 0.5 for `split`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from benchmarks.machine import parse
from infer.bench.report import Row, make_report, make_row, write_report
from infer.bench.target import BenchTarget
from infer.config.settings import EngineConfig
from infer.engine.engine import Engine
from infer.execution.device import PendingStep
from infer.execution.gpu.device import GpuDevice
from infer.execution.gpu.graphs import CapturedStep, StepGraphs, StepSize
from infer.execution.order import AWAITS_MASKS, StepOrder
from infer.kernels.runtime.dispatch import is_gpu
from infer.loader.random_weights import load_random
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request

PROMPT_LEN, WARM_STEPS = 64, 16
WANTED_PERCENT = 0.5
HALF = np.int32(0x55555555)  # a mask that allows every other id


def decode(engine: Engine, num_rows: int, num_steps: int) -> float:
    """Microseconds of a step, over many in which all rows decode."""
    rng = np.random.default_rng(7)
    engine.reset_prefix_cache()
    for number in range(num_rows):
        params = SamplingParams(
            temperature=0.6, seed=number, max_tokens=num_steps + 4 * WARM_STEPS, ignore_eos=True
        )
        prompt = tuple(rng.integers(10, 300, PROMPT_LEN).tolist())
        engine.add(Request(request_id=str(number), prompt=prompt, params=params))
    for _ in range(WARM_STEPS):
        engine.step()
    start, first = time.perf_counter(), engine.scheduler.step
    while engine.scheduler.step < first + num_steps:
        engine.step()
    seconds = time.perf_counter() - start  # as many steps were read as were launched
    for number in range(num_rows):
        engine.abort(str(number))
    while engine.has_work:
        engine.step()
    return seconds / num_steps * 1e6


class WholeGraphs(StepGraphs):
    """Steps whose sampler is recorded behind the forward, in the same graph; that of the sampler is empty."""

    def _record(self, size: StepSize) -> CapturedStep:
        forward, sample = self._forward, self._sample

        def both(size: StepSize) -> torch.Tensor:
            logits_SV = forward(size)
            sample(size, logits_SV)
            return logits_SV

        with mock.patch.multiple(self, _forward=both, _sample=lambda size, logits_SV: None):
            return super()._record(size)

    def sample(self, size: StepSize) -> torch.Tensor:
        """Return the logits of the last step, which has been sampled; one without a graph is sampled here."""
        captured = self._graphs.get(size)
        return super().sample(size) if captured is None else captured.logits_SV


def whole_graphs(device: GpuDevice, num_rows: int) -> StepGraphs:
    """Graphs of the same device half in which the sampler is a part of the forward, captured when needed."""
    launcher = device.launcher
    return WholeGraphs(
        partial(launcher.compute_logits, device.model), launcher.sample_logits, device.inputs.blank,
        max_rows=num_rows, max_tokens=512, captures=is_gpu(launcher.device), profile=launcher.profile,
    )  # fmt: skip


def run_masked(device: GpuDevice) -> Callable[[StepOrder], PendingStep]:
    """In place of `run`: every row that samples has a mask."""
    run = device.run
    device.rows.sampling.masks_RW.fill_(int(HALF))

    def run_under_masks(order: StepOrder) -> PendingStep:
        step = run(order._replace(flags=order.flags | AWAITS_MASKS))
        (numbers,) = order.num_sampled.nonzero()
        step._lines_KW = device.rows.masks.take(len(numbers))  # all the same: no step need be waited for
        step.sample(numbers.tolist(), order.stops[numbers].tolist())
        return step

    return run_under_masks


def measure(engine: Engine, num_rows: int, args: argparse.Namespace) -> list[dict[str, float]]:
    """The figures of all rounds; the first is not counted, in which graphs are captured."""
    device = engine._device
    assert isinstance(device, GpuDevice), "this benchmark needs the device half of a GPU"
    split, whole = device.graphs, whole_graphs(device, max(args.rows))
    rounds = []
    for _ in range(args.repeats + 1):
        device.graphs = device._sized.graphs = whole
        found = {"whole_us": decode(engine, num_rows, args.steps)}
        device.graphs = device._sized.graphs = split
        found["split_us"] = decode(engine, num_rows, args.steps)
        with mock.patch.object(device, "run", run_masked(device)):
            found["masked_us"] = decode(engine, num_rows, args.steps)
        found["split_percent"] = (found["split_us"] / found["whole_us"] - 1) * 100
        found["masked_percent"] = (found["masked_us"] / found["split_us"] - 1) * 100
        rounds.append(found)
    return rounds[1:]


def measure_shape(directory: Path, args: argparse.Namespace) -> tuple[list[Row], BenchTarget]:
    """A row for each number of rows of one shape."""
    loaded = load_random(directory, dtype=args.dtype, device=args.device, max_seq_len=2048)
    target = BenchTarget(
        loaded=loaded, config=EngineConfig.from_knobs(max_batch_size=max(args.rows)), is_random=True
    )
    engine = target.engine()
    start = time.perf_counter()
    while engine.prepare():
        pass
    print(f"{directory.name}: prepared in {time.perf_counter() - start:.1f} s", flush=True)
    rows = []
    for num_rows in args.rows:
        name = f"{directory.name} b{num_rows}"
        rows.append(make_row(name, "decoding", measure(engine, num_rows, args)))
        middle = {figure: value.median for figure, value in rows[-1].figures.items()}
        print(
            f"{name:20} whole {middle['whole_us']:8.1f} us   split {middle['split_us']:8.1f} us "
            f"{middle['split_percent']:+6.2f} %   masked {middle['masked_us']:8.1f} us "
            f"{middle['masked_percent']:+6.2f} %",
            flush=True,
        )
    return rows, target


def main() -> int:
    """Measure, print, write; exits with 1 if the second graph costs more than is wanted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("configs", nargs="+", type=Path, metavar="CFG_DIR")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=400, help="timed in each round")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--device", default="cuda", help="cpu: to try the program")
    parser.add_argument("--dtype", default="bfloat16")
    args = parse(parser)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("this benchmark needs a CUDA GPU", file=sys.stderr)
        return 2
    rows: list[Row] = []
    for directory in args.configs:
        found, target = measure_shape(directory, args)
        rows += found
    costs = {row.name: row.figures["split_percent"].median for row in rows}
    print(json.dumps({"worst_split_percent": max(costs.values()), "wanted": WANTED_PERCENT}))
    if args.out is not None:
        report = make_report(
            "sampler_graph", rows, model=target.facts(), config=target.knobs(), seed=7, repeats=args.repeats,
            warmup=1,
        )  # fmt: skip
        write_report(report, args.out)
    return 0 if statistics.median(costs.values()) <= WANTED_PERCENT else 1


if __name__ == "__main__":
    sys.exit(main())
