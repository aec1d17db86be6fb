"""Small questions: attention alone, where the memory goes, how long until the first token.

attention   decode attention over scattered blocks: bytes of keys and values per second, against a copy; the C
            kernel where it can read the model, else PyTorch (GPUs: benchmarks/kernels/attention_decode.py)
memory      weights, KV cache, activations, process; sequences at once, paged against contiguous
startup     fresh processes: imports, help, first token, a server
"""

from __future__ import annotations

import math
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.policies import run_knobs
from infer.bench.repeats import EngineBench, RowJob, Tell, beyond_roofline, run_rows
from infer.bench.report import Report, Row, make_report, make_row, revision_of
from infer.bench.roofline import best_seconds, measure_ceilings
from infer.bench.target import BenchTarget
from infer.bench.workloads import Turn, Workload
from infer.cache.memory import kv_bytes_per_token
from infer.engine.cache_fit import compute_step, kept_as
from infer.engine.device_build import resolve_for
from infer.errors import EngineError
from infer.execution.cpu_step import attention_library
from infer.kernels.attention.paged import attend_paged
from infer.kernels.cpu.library import Library
from infer.kernels.cpu.operations import attend
from infer.kernels.runtime.dispatch import is_gpu
from infer.loader.find.default_model import FILE_SHA256
from infer.loader.find.source import resolve_model
from infer.loader.random_weights import make_generator

BLOCK_SIZE = 16
CAPACITY_SEQUENCES = 16  # sequences of the longest length that fill the memory of the capacity rows
CAPACITY_LEN = 2048


@torch.inference_mode()
def bench_attention(bench: EngineBench, *, batches: Sequence[int], contexts: Sequence[int]) -> Report:
    """Time decode attention of one layer over blocks in random order, as a running server has them."""
    target = bench.target
    loaded, config = target.loaded, target.loaded.config
    ceilings = measure_ceilings(loaded.device, loaded.dtype)

    def job(name: str, batch: int, context: int) -> RowJob:
        work, num_bytes = _attention(target, batch, context, bench.seed)

        def run(repeat: int) -> dict[str, float]:
            seconds = best_seconds(work, loaded.device)
            bench.tell(f"attention {name}: {num_bytes / seconds / 1e9:.1f} GB/s")
            return {
                "call_p50_s": seconds,
                "gb_per_s": num_bytes / seconds / 1e9,
                **ceilings.figures(num_bytes / ceilings.copy_bytes_per_s, seconds),
            }

        kernel = "C kernel" if _c_kernel(target) else "PyTorch"
        about = f"{kernel}, one layer, one query per sequence, scattered blocks"
        return RowJob(about, run)

    cases = {
        f"batch {batch}, context {context}": (batch, context) for batch in batches for context in contexts
    }
    sizes = ("num_heads", "num_kv_heads", "head_dim")
    return bench.report(
        "attention",
        {name: partial(job, name, *case) for name, case in cases.items()},
        warmup=1,
        config={name: getattr(config, name) for name in sizes} | {"block_size": BLOCK_SIZE},
        notes=lambda rows: [
            f"copy {ceilings.copy_bytes_per_s / 1e9:.1f} GB/s in this run",
            *beyond_roofline(rows),
        ],
    )


def _attention(target: BenchTarget, batch: int, context: int, seed: int) -> tuple[Callable[[], Any], int]:
    """Return a call to time, and the bytes of keys and values it must read."""
    loaded, config = target.loaded, target.loaded.config
    per_sequence = -(-context // BLOCK_SIZE)
    generator = make_generator("cpu", seed)
    order = torch.randperm(batch * per_sequence, generator=generator).view(batch, per_sequence)
    like: dict[str, Any] = {"device": loaded.device, "dtype": loaded.dtype}
    store = (batch * per_sequence * BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    keys_PGH, values_PGH = torch.randn(store, **like), torch.randn(store, **like)
    q_SNH = torch.randn((batch, config.num_heads, config.head_dim), **like)
    if (c := _c_kernel(target)) is not None:
        rows = torch.arange(batch)
        items_I6 = torch.stack([rows, rows * 0 + 1, rows, rows * 0 + context - 1, rows * 0 - 1, rows * 0], 1)
        paged: dict[str, Any] = {"block_size": BLOCK_SIZE, "scale": config.scale, "window": None}
        work = partial(attend, c, q_SNH, keys_PGH, values_PGH, order.contiguous(), items_I6, **paged)
    else:
        slots = (order[:, :, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten(1)[:, :context]
        slots_SL = slots.to(loaded.device)
        work = partial(attend_paged, q_SNH, keys_PGH, values_PGH, slots_SL, None, scale=config.scale)
    per_token = kv_bytes_per_token(1, config.num_kv_heads, config.head_dim, loaded.dtype.itemsize)
    return work, batch * context * per_token


def _c_kernel(target: BenchTarget) -> Library | None:
    """Return the C library, if it is built and its attention can read this model's keys."""
    loaded = target.loaded
    return attention_library(loaded.device, loaded.dtype, loaded.config.head_dim)


def bench_memory(target: BenchTarget, *, seed: int, tell: Tell) -> Report:
    """Report where this model's memory goes, and the worth of the cache's layout."""
    loaded, config = target.loaded, target.loaded.config
    engine = target.engine()
    stats, resolved = engine.stats(), resolve_for(target.config, loaded)
    per_token = kv_bytes_per_token(
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        kept_as(resolved.settings.cache, loaded.dtype).itemsize,
    )
    split = {
        "weights_bytes": float(target.weight_bytes),
        "kv_bytes": float(stats.num_blocks * stats.block_size * per_token),
        "activation_bytes": float(compute_step(resolved, loaded).activations),
        "graph_bytes": 0.0,
        "process_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
    }
    about = (
        "weights and cache as allocated, activations as planned for the largest step; the process is smaller "
        "than their sum, for a cache takes no memory until it is written to"
    )
    if is_gpu(loaded.device):
        torch.cuda.synchronize(loaded.device)
        known = split["weights_bytes"] + split["kv_bytes"]
        split["process_bytes"] = float(torch.cuda.max_memory_reserved(loaded.device))
        split["graph_bytes"] = max(0.0, float(torch.cuda.memory_allocated(loaded.device)) - known)
        about = "on the GPU; what is allocated beside weights and cache counts as graphs and buffers"
    rows = [make_row("split", about, [split]), *capacity_rows(seed=seed)]
    for row in rows[1:]:
        tell(f"{row.name}: {row.figures['mean_running'].median:.1f} sequences at once")
    return make_report(
        "memory", rows, model=target.facts(), config=target.knobs(), seed=seed, repeats=1, warmup=0
    )


def capacity_rows(*, seed: int, num_requests: int = 300) -> list[Row]:
    """Return the number of sequences that the same memory holds, paged and contiguous; always simulated."""
    rng = random.Random(seed)

    def draw(median: float, spread: float, low: int, high: int) -> int:
        return min(max(int(rng.lognormvariate(math.log(median), spread)), low), high)

    turns = (
        Turn(ids=(number,) * draw(150, 1.0, 16, 1500), max_tokens=draw(120, 0.8, 8, 500))
        for number in range(num_requests)
    )
    workload = Workload.of("mixed lengths", turns)
    rows = []
    base = 0.0
    for layout in ("contiguous", "paged"):
        result = run_knobs(
            workload,
            kv_cache_backend=layout,
            num_blocks=CAPACITY_SEQUENCES * CAPACITY_LEN // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            max_seq_len=CAPACITY_LEN,
            max_batch_size=512,
            use_prefix_caching=False,
        )
        figures = result.figures()
        busy = result.running[: int(0.7 * len(result.running))]  # the last steps have nothing left to run
        kept = {name: figures[name] for name in ("peak_running", "num_preemptions", "num_steps")}
        kept["mean_running"] = sum(busy) / len(busy)
        base = base or kept["mean_running"]
        kept["speed_up"] = kept["mean_running"] / base
        about = (
            f"{num_requests} requests, memory for {CAPACITY_SEQUENCES} of {CAPACITY_LEN} tokens, simulated"
        )
        rows.append(make_row(layout, about, [kept]))
    return rows


def bench_startup(*, model: str | None, repeats: int, tell: Tell) -> Report:
    """Time fresh processes with warm file caches: the cost that code can change, not the disk's."""
    infer = [sys.executable, "-m", "infer"]
    chosen = ["--model", model] if model else []
    commands: dict[str, tuple[str, list[str]]] = {
        "python": ("an interpreter that does nothing", [sys.executable, "-c", ""]),
        "import infer": ("the package", [sys.executable, "-c", "import infer"]),
        "infer --help": ("the command line", [*infer, "--help"]),
        "import torch": ("what every model needs", [sys.executable, "-c", "import torch"]),
        "first token": (
            "from the start of the process to the first byte of an answer",
            [*infer, "generate", "Hello", "--max-tokens", "4", "--temperature", "0", *chosen],
        ),
        "server ready": (
            "from the start of `infer serve` to the line that says its URL",
            [*infer, "serve", "--port", "0", *chosen],
        ),
    }

    def job(name: str, about: str, command: list[str]) -> RowJob:
        def run(repeat: int) -> dict[str, float]:
            seconds = first_byte_s(command)
            tell(f"{name}: {seconds:.2f} s")
            return {"seconds": seconds}

        first_byte_s(command)  # first run, which brings its files into memory
        return RowJob(about, run)

    rows, is_partial = run_rows({name: partial(job, name, *what) for name, what in commands.items()}, repeats)
    return make_report(
        "startup",
        rows,
        model=_started_model(model, rows),
        config={},
        seed=0,
        repeats=repeats,
        warmup=1,
        is_partial=is_partial,
    )


def _started_model(model: str | None, rows: Sequence[Row]) -> dict[str, str]:
    """Return name and revision; a model that did not start may not be on this disk."""
    if model is None:
        return {"name": "the default model", "revision": f"sha256:{FILE_SHA256}"}
    known = {"name": Path(model).name}
    if rows[-1].figures:
        known["revision"] = revision_of(resolve_model(model, show_progress=False).path)
    return known


def first_byte_s(command: list[str]) -> float:
    """Return the seconds until a process wrote its first byte or ended well; raises if it failed."""
    started = perf_counter()
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said) as process,
    ):
        assert process.stdout is not None
        process.stdout.read(1)
        seconds = perf_counter() - started
        if "serve" in command:  # the others end by themselves
            process.terminate()
        process.stdout.read()
        if process.wait() != 0:
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
            raise EngineError(lines[-1] if lines else f"exit code {process.returncode}")
    return seconds
