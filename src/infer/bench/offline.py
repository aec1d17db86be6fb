"""The engine without HTTP: throughput, latency, prompts alone, decoding alone.

    offline    whole workloads, all requests at once              tokens per second, against the roofline
    latency    one request at a time                              TTFT, TPOT, E2E
    prefill    one prompt, one token out                          tokens per second, share of the matmul rate
    decode     a batch that only decodes, at a given context      step time, against the roofline

Every repeat has new tokens and an empty prefix cache, outputs have a fixed length (end-of-text is ignored),
and the machine's ceilings are measured in the same process.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

from infer.bench.metrics import percentile
from infer.bench.repeats import EngineBench, RowJob, beyond_roofline
from infer.bench.report import Report, Row, skip_row
from infer.bench.roofline import (
    Ceilings,
    decode_roofline,
    measure_ceilings,
    prefill_flops,
    prefill_roofline,
    workload_roofline,
)
from infer.bench.run_offline import OfflineResult, run_offline
from infer.bench.target import BenchTarget
from infer.bench.workloads import (
    DEFAULT_VOCAB,
    FIRST_ID,
    Turn,
    Workload,
    fit,
    make_workload,
    shortened,
    vary,
)
from infer.engine.engine import Engine
from infer.errors import ConfigError
from infer.loader.quantization import PACKED

TEMPERATURE = 0.6  # not greedy: random weights would fall into cycles, an unrealistically easy load
WARM_UP = 2


def run_once(engine: Engine, workload: Workload, repeat: int, vocab_size: int) -> OfflineResult:
    """Run one repeat with new tokens and an empty prefix cache; raises an error if a request failed."""
    engine.reset_prefix_cache()
    result = run_offline(engine, vary(workload, repeat, vocab_size), temperature=TEMPERATURE)
    for trace in result.traces:
        if trace.error is not None:
            raise ConfigError(f"a request of {workload.name} failed: {trace.error}")
    return result


def warm_up(engine: Engine, target: BenchTarget) -> Engine:
    """Run a few short requests to trigger allocations, kernel compilation and graph capture."""
    workload = batch(4, 32, 8, target.vocab_size, seed=99)
    for _ in range(WARM_UP):
        run_offline(engine, fit(workload, context_len=engine.context_len), temperature=TEMPERATURE)
    return engine


def batch(
    count: int, prompt_len: int, output_len: int, vocab_size: int, *, seed: int, concurrency: int = 0
) -> Workload:
    """Return `count` requests of one shape, all at once or in a closed loop of `concurrency` clients."""
    rng, most = random.Random(seed), min(vocab_size, DEFAULT_VOCAB)
    prompts = (tuple(rng.randrange(FIRST_ID, most) for _ in range(prompt_len)) for _ in range(count))
    turns = (Turn(ids=ids, max_tokens=output_len) for ids in prompts)
    return Workload.of(f"{count} x {prompt_len}/{output_len}", turns, concurrency=concurrency)


def bench_offline(bench: EngineBench, names: Sequence[str]) -> Report:
    """Measure whole workloads, each against its roofline."""
    target = bench.target
    vocab_size = min(target.vocab_size, DEFAULT_VOCAB)
    made = [make_workload(name, seed=bench.seed, vocab_size=vocab_size) for name in names]
    ceilings = measure_ceilings(target.device, target.loaded.dtype)
    engine = warm_up(target.engine(), target)

    def job(workload: Workload) -> RowJob:
        def run(repeat: int) -> dict[str, float]:
            result = run_once(engine, workload, repeat, target.vocab_size)
            figures = result.figures() | _rooflines(target, ceilings, result)
            bench.tell(
                f"{workload.name} {repeat + 1}/{bench.repeats}: {figures['output_tokens_per_s']:.1f} tok/s, "
                f"{figures['roofline_share']:.0%} of the roofline"
            )
            return figures

        return RowJob(workload.about, run, {"arrival": workload.arrival.describe()})

    fitted = [fit(whole, context_len=engine.context_len, vocab_size=target.vocab_size) for whole in made]
    for line in shortened(made, fitted):
        bench.tell(line)
    jobs = {workload.name: partial(job, workload) for workload in fitted}
    return bench.report("offline", jobs, warmup=WARM_UP, notes=partial(_ceiling_notes, target, ceilings))


def _rooflines(target: BenchTarget, ceilings: Ceilings, result: OfflineResult) -> dict[str, float]:
    lengths = [(trace.num_prompt, trace.num_output) for trace in result.traces]
    roofline = workload_roofline(target.shape(), ceilings, lengths)
    return ceilings.figures(roofline, result.seconds)


def bench_latency(bench: EngineBench) -> Report:
    """Measure one request at a time, at three sizes."""
    target = bench.target
    engine = warm_up(target.engine(), target)

    def job(name: str, prompt_len: int, output_len: int) -> RowJob | Row:
        about = f"3 requests one after the other, {prompt_len} tokens in, {output_len} out"
        if prompt_len + output_len > engine.context_len:
            return skip_row(name, about, f"the context is {engine.context_len}")
        one_by_one = batch(3, prompt_len, output_len, target.vocab_size, seed=bench.seed, concurrency=1)

        def run(repeat: int) -> dict[str, float]:
            figures = run_once(engine, one_by_one, repeat, target.vocab_size).figures()
            bench.tell(f"latency {name}: TTFT {1000 * figures['ttft_p50_s']:.1f} ms")
            return figures

        return RowJob(about, run)

    sizes = ((32, 32), (128, 128), (1024, 64))
    names = {f"{prompt}/{output}": (prompt, output) for prompt, output in sizes}
    jobs = {name: partial(job, name, *size) for name, size in names.items()}
    return bench.report("latency", jobs, warmup=WARM_UP)


def bench_prefill(bench: EngineBench, *, lengths: Sequence[int]) -> Report:
    """Measure one prompt at a time, one token out."""
    target = bench.target
    ceilings = measure_ceilings(target.device, target.loaded.dtype)
    engine, shape = warm_up(target.engine(), target), target.shape()

    def job(length: int) -> RowJob | Row:
        about = f"one prompt of {length} tokens, one token out"
        if length + 1 > engine.context_len:
            return skip_row(str(length), about, f"the context is {engine.context_len}")
        workload = batch(1, length, 1, target.vocab_size, seed=bench.seed)
        roofline = prefill_roofline(shape, ceilings, length)

        def run(repeat: int) -> dict[str, float]:
            seconds = run_once(engine, workload, repeat, target.vocab_size).traces[0].ttft
            bench.tell(f"prefill {length}: {length / seconds:.0f} tok/s")
            return {
                "input_tokens_per_s": length / seconds,
                "ttft_p50_s": seconds,
                **ceilings.figures(roofline, seconds),
                "mfu": prefill_flops(shape, length) / seconds / ceilings.matmul_flops_per_s,
            }

        return RowJob(about, run)

    jobs = {str(length): partial(job, length) for length in lengths}
    return bench.report("prefill", jobs, warmup=WARM_UP, notes=partial(_ceiling_notes, target, ceilings))


def bench_decode(bench: EngineBench, *, batches: Sequence[int], context: int, num_steps: int) -> Report:
    """Measure a batch that is past its prompts: the median step, against the roofline of that step."""
    target = bench.target
    ceilings = measure_ceilings(target.device, target.loaded.dtype)

    def job(size: int) -> RowJob:
        engine = warm_up(target.engine(max_batch_size=size), target)
        pool = engine.scheduler.pool
        room = min(engine.context_len, pool.num_blocks * pool.block_size + 1)
        if num_steps >= room:
            raise ConfigError(
                f"--steps is {num_steps}, but a sequence has room for {room} tokens here, prompt included; "
                "give fewer, or raise --max-seq-len or --num-blocks"
            )
        prompt_len = max(1, min(context, room - num_steps))
        if prompt_len < context:
            bench.tell(f"batch {size}: a context of {context} tokens does not fit, so it is {prompt_len}")
        workload = batch(size, prompt_len, num_steps, target.vocab_size, seed=bench.seed)
        middle = prompt_len + num_steps / 2
        roofline = decode_roofline(target.shape(), ceilings, batch=size, context=middle)

        def run(repeat: int) -> dict[str, float]:
            result = run_once(engine, workload, repeat, target.vocab_size)
            gaps = [gap for trace in result.traces for gap in trace.gaps()]
            step = percentile(gaps, 50) if gaps else result.seconds
            bench.tell(f"decode batch {size}: {size / step:.1f} tok/s")
            return {
                "output_tokens_per_s": size / step,
                "step_p50_s": step,
                "itl_p99_s": percentile(gaps, 99) if gaps else step,
                **ceilings.figures(roofline, step),
            }

        return RowJob(f"{size} sequences of about {middle:.0f} tokens", run)

    jobs = {f"batch {size}": partial(job, size) for size in batches}
    return bench.report("decode", jobs, warmup=WARM_UP, notes=partial(_ceiling_notes, target, ceilings))


def _ceiling_notes(target: BenchTarget, ceilings: Ceilings, rows: Sequence[Row]) -> list[str]:
    notes = [
        f"ceilings measured in this run: copy {ceilings.copy_bytes_per_s / 1e9:.1f} GB/s, "
        f"matmul {ceilings.matmul_flops_per_s / 1e12:.3g} TFLOP/s"
    ]
    if target.loaded.weights in PACKED:
        notes.append(
            f"the weights are {target.loaded.weights} and multiplied as integers, the matmul rate is of "
            f"{target.loaded.dtype}: a prompt may be faster than its roofline"
        )
    return notes + beyond_roofline(rows)
