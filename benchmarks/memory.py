"""Does memory hold? Every shape under full load with little memory, and beside a process that takes the rest.

    python -m benchmarks.memory CFG_DIR [CFG_DIR ...] --out benchmarks/reports/memory-limits-h200.json

A CFG_DIR holds a `config.json`; weights are random, of that shape. For each shape and each `device_memory` an
engine is built in a process of its own and given more requests at once than it has places: prompts and
outputs of all lengths, some that penalise or want logprobs. Then twice beside a neighbour, another process
that takes whatever memory of the GPU is free, again and again, while the engine serves:

    8GiB ... 24GiB, 1.0    the limit alone
    neighbour              the engine has its default share, the neighbour takes all the rest
    crowded                the neighbour holds all but 9 GiB before the engine starts, and then the rest

A row is good if `errors` is 0, or if the engine was refused at its start; the reason, which says what would
fit, stands below the table. `process` is what the process had of the GPU at the end, CUDA's runtime included.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.machine import parse
from infer.bench.report import Row, make_report, make_row, skip_row, write_report
from infer.bench.target import BenchTarget, open_target
from infer.config.knobs import parse_bytes
from infer.engine.engine import Engine
from infer.errors import ConfigError
from infer.execution.halves import SmallerSteps
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request

LIMITS = ("8GiB", "12GiB", "16GiB", "24GiB", "1.0")
CROWDED = "9GiB"  # left by the neighbour at the start
MAX_SEQ_LEN = 8192
PIECES = (1 << 30, 64 << 20, 2 << 20)  # bytes that a neighbour takes at a time
TIMEOUT_S = 300
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0},
    {"temperature": 0.7, "repetition_penalty": 1.1},
    {"temperature": 0.0, "logprobs": 5},
)


# -- one case, in a process of its own --------------------------------------------------------------------


def make_requests(engine: Engine, count: int, vocab_size: int, tag: str) -> list[Request]:
    """Requests of all lengths: half of the prompts are short, the longest fill most of the context."""
    rng = random.Random(7)
    longest = engine.context_len - 160
    made = []
    for number in range(count):
        length = rng.randrange(1, 256) if number % 2 else rng.randrange(256, max(longest, 257))
        length = min(length, longest)
        params = SamplingParams(
            **KINDS[number % len(KINDS)], max_tokens=rng.randrange(16, 129), ignore_eos=True, seed=number
        )
        prompt = tuple(rng.choices(range(vocab_size), k=length))
        made.append(Request(request_id=f"{tag}-{number}", prompt=prompt, params=params))
    return made


def serve(engine: Engine, requests: Sequence[Request]) -> dict[str, float]:
    """Serve all of them at once; what cannot ever fit is refused, which is no error."""
    num_errors = num_refused = num_tokens = 0
    start = time.perf_counter()
    for request in requests:
        try:
            engine.add(request)
        except Exception:  # too long for this cache
            num_refused += 1
    while engine.has_work:
        for output in engine.step():
            num_tokens += len(output.token_ids)
            num_errors += output.finish_reason == "error"
    seconds = time.perf_counter() - start
    return {
        "num_requests": len(requests) - num_refused,
        "num_errors": num_errors,
        "num_output_tokens": num_tokens,
        "seconds": seconds,
    }


def run_case(
    target: BenchTarget, knobs: dict[str, Any], *, num_requests: int, has_neighbour: bool
) -> dict[str, float]:
    """The figures of one engine: where its memory went, and what came of the load."""
    repeated = 0
    run = SmallerSteps.run

    def counted(self: SmallerSteps, *given: Any) -> Any:
        nonlocal repeated
        repeated += 1
        return run(self, *given)

    SmallerSteps.run = counted  # type: ignore[method-assign, assignment]
    on_gpu = target.device.index is not None
    engine = target.engine(**knobs)
    while engine.prepare():
        pass
    figures = {"weights_bytes": float(target.weight_bytes), "kv_bytes": kv_bytes(engine)}
    arena = getattr(engine._device, "arena", None)
    figures["activation_bytes"] = float(arena.num_bytes if arena is not None else 0)
    if on_gpu:
        known = sum(figures.values())
        figures["graph_bytes"] = max(torch.cuda.memory_reserved() - known, 0.0)
    with ExitStack() as stack:
        if has_neighbour:
            stack.enter_context(neighbour("0B"))
        vocab_size = target.vocab_size
        first = serve(engine, make_requests(engine, num_requests // 2, vocab_size, "first"))
        second = serve(engine, make_requests(engine, num_requests - num_requests // 2, vocab_size, "second"))
    for name in ("num_requests", "num_errors"):
        figures[name] = first[name] + second[name]
    figures["output_tokens_per_s"] = (first["num_output_tokens"] + second["num_output_tokens"]) / (
        first["seconds"] + second["seconds"]
    )
    figures["num_repeated_steps"] = float(repeated)
    if on_gpu and not has_neighbour and (held := process_bytes()) is not None:
        figures["process_bytes"] = held
    assert engine.scheduler.pool.audit_blocks() == []
    return figures


def kv_bytes(engine: Engine) -> float:
    """Bytes of keys and values, as allocated."""
    store = engine._device.store  # type: ignore[attr-defined]
    return float(store.num_bytes)


def process_bytes() -> float | None:
    """What this process has of the GPU, CUDA's runtime included; None: the driver does not list it."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    used = dict(line.split(", ") for line in lines)
    return float(used[str(os.getpid())]) * 2**20 if str(os.getpid()) in used else None


@contextmanager
def neighbour(leave: str) -> Iterator[None]:
    """Another process that holds the memory of the GPU, all but `leave`, for as long as this lasts."""
    command = [sys.executable, "-m", "benchmarks.memory", "--neighbour", leave]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()  # it has taken what there was
        try:
            yield
        finally:
            process.stdin.close()  # it ends


def take_memory(leave: int) -> None:
    """Hold all of the GPU's memory but `leave`, and what becomes free later, until standard input closes."""
    held: list[torch.Tensor] = []

    def take() -> None:
        for piece in PIECES:
            while torch.cuda.mem_get_info()[0] - piece >= leave:
                try:
                    held.append(torch.empty(piece, dtype=torch.uint8, device="cuda"))
                except torch.OutOfMemoryError:
                    break

    take()
    print("taken", flush=True)
    while not _input_closed(0.02):
        take()


def _input_closed(timeout: float) -> bool:
    ready, _, _ = select.select([sys.stdin], [], [], timeout)
    return bool(ready) and not sys.stdin.readline()


# -- all cases --------------------------------------------------------------------------------------------


def cases(limits: Sequence[str], *, alone: bool) -> list[tuple[str, dict[str, Any], str]]:
    """Each row's name, its knobs, and what part a neighbour has in it."""
    plain = [(limit, {"device_memory": limit}, "") for limit in limits]
    beside: list[tuple[str, dict[str, Any], str]] = [
        ("neighbour", {}, "while serving"),
        ("crowded", {}, "from the start"),
    ]
    return plain if alone else [*plain, *beside]


def measure(shape: Path | None, args: argparse.Namespace) -> Iterator[Row]:
    """A row for each case of a shape, measured in a process of its own."""
    where = "tiny" if shape is None else shape.name
    for name, knobs, part in cases(args.limits, alone=args.alone):
        if part and not torch.cuda.is_available():
            continue
        label = f"{where} {name}"
        about = f"{json.dumps(knobs)}, neighbour {part or 'none'}"
        command = [sys.executable, "-m", "benchmarks.memory", "--case", json.dumps(knobs)]
        command += ["--num-requests", str(args.num_requests), *([str(shape)] if shape else [])]
        command += ["--beside"] * bool(part)
        with ExitStack() as stack:
            if part == "from the start":
                stack.enter_context(neighbour(CROWDED))
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        found = json.loads(done.stdout.splitlines()[-1]) if done.stdout.strip() else {}
        if "refused" in found:
            row = skip_row(label, about, f"refused: {found['refused']}")
        elif not found:
            row = skip_row(label, about, f"failed: {done.stderr.strip().splitlines()[-1:]}")
        else:
            row = make_row(label, about, [found])
        print(f"{label:28} {row.skipped or {k: round(v.median) for k, v in row.figures.items()}}", flush=True)
        yield row


def main() -> int:
    """Measure, print, write; 1 if a request failed, or a process did."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("configs", nargs="*", type=Path, metavar="CFG_DIR", help="none: a tiny shape")
    parser.add_argument("--limits", nargs="+", default=list(LIMITS), metavar="SIZE")
    parser.add_argument("--alone", action="store_true", help="the limits, and no neighbour")
    parser.add_argument("--num-requests", type=int, default=320)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--beside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--neighbour", metavar="LEAVE", help=argparse.SUPPRESS)
    args = parse(parser)
    if args.neighbour is not None:
        take_memory(0 if args.neighbour == "0B" else parse_bytes(args.neighbour))
        return 0
    if args.case is not None:
        return run_one(args)
    shapes = args.configs or [None]
    rows = [row for shape in shapes for row in measure(shape, args)]
    if args.out is not None:
        names = ", ".join("tiny" if shape is None else shape.name for shape in shapes)
        report = make_report(
            "memory-limits",
            rows,
            model={"name": f"{names} (random weights)"},
            config={"max_seq_len": MAX_SEQ_LEN, "num_requests": args.num_requests},
            seed=7,
            repeats=1,
            warmup=0,
        )
        command = " ".join(Path(word).name for word in sys.argv[1:])
        report = msgspec.structs.replace(report, command=f"python -m benchmarks.memory {command}")
        write_report(report, args.out)
    has_failed = any(
        row.skipped.startswith("failed") or (row.figures and row.figures["num_errors"].high) for row in rows
    )
    return int(bool(has_failed))


def run_one(args: argparse.Namespace) -> int:
    """One case: its figures, or why it was refused, as the last line."""
    shape = args.configs[0] if args.configs else None
    try:
        is_gpu = torch.cuda.is_available()
        load = {"dtype": "bfloat16" if is_gpu else "float32"} | (
            {"max_seq_len": MAX_SEQ_LEN} if shape else {}
        )
        target = open_target(load, model_config=shape, is_tiny=shape is None)
        figures = run_case(target, args.case, num_requests=args.num_requests, has_neighbour=args.beside)
    except ConfigError as error:
        print(json.dumps({"refused": str(error)}))
        return 0
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
