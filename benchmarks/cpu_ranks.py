"""Ranks on a CPU: the speed of one process, two ranks and two stages, in turns; and the way of an order.

    python -m benchmarks.cpu_ranks [--model MODEL] [--threads 2] [--rounds 20] [--rows 1 16] [--out FILE]
    python -m benchmarks.cpu_ranks --orders [--readers 3] [--sequences 256]

Every way has the same threads in all, and an engine in a process of its own, which sleeps while another one
decodes: so each round meets the same machine, and what is compared is the median of the rounds. The way of an
order is measured from the arrays that rank 0 has until the last of the other ranks has arrays; between two of
them the ranks wait long enough to fall asleep, or just long enough to wait awake.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import facts, parse, write

WAYS: dict[str, dict[str, int]] = {
    "1 process": {},
    "2 ranks": {"tensor_parallel_size": 2},
    "2 stages": {"pipeline_parallel_size": 2},
}
PROMPT_TOKENS = 64
GAPS_S = {"awake": 0.0, "asleep": 2e-3}


def decode(knobs: dict[str, Any]) -> None:
    """Be an engine: read a number of rows and of tokens, decode them, print milliseconds of a step."""
    from benchmarks.adapters import speed
    from infer import LLM

    with LLM(**knobs) as llm:
        print("ready", flush=True)
        for number, line in enumerate(sys.stdin):
            rows, tokens = map(int, line.split())
            print(1e3 * rows / speed(llm.engine, rows, tokens, [], str(number)), flush=True)


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Return the milliseconds of a step in each way, and its speed in relation to the first way's."""
    most, common = max(args.rows), {"device": "cpu", "num_threads": args.threads, "max_seq_len": 1024}
    common |= {"max_batch_size": most, "use_prefix_caching": False, "kv_cache_memory": "256MiB"}
    children: dict[str, subprocess.Popen[str]] = {}
    found: dict[str, Any] = {}

    def ask(name: str, rows: int) -> float:
        child = children[name]
        assert child.stdin is not None and child.stdout is not None
        print(rows, args.tokens, file=child.stdin, flush=True)
        return float(child.stdout.readline())

    try:
        for name, ranks in WAYS.items():
            given = json.dumps({"model": args.model, **common, **ranks})
            command = [sys.executable, "-m", "benchmarks.cpu_ranks", "--decode", given]
            children[name] = child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
        for rows in args.rows:
            times: dict[str, list[float]] = {name: [] for name in WAYS}
            for name in WAYS:
                ask(name, rows)  # it warms up
            for _ in range(args.rounds):
                for name in WAYS:
                    times[name].append(ask(name, rows))
            medians = {name: statistics.median(each) for name, each in times.items()}
            first = medians["1 process"]
            best = {name: min(each) for name, each in times.items()}
            found[str(rows)] = {
                name: {
                    "step_ms": round(medians[name], 2),
                    "best_ms": round(best[name], 2),
                    "speed": round(first / medians[name], 3),
                    "best_speed": round(best["1 process"] / best[name], 3),
                }
                for name in WAYS
            }
            print(f"{rows} rows", json.dumps(found[str(rows)]), flush=True)
    finally:
        for child in children.values():
            child.kill()
            child.communicate()
    return found


def table(times: int, size: int) -> np.ndarray:
    """Return the nanoseconds at which each rank has read each order, in memory that all of them share."""
    return np.frombuffer(mmap.mmap(times, 0), np.int64).reshape(size, -1)


def read_orders(handle: int, rank: int, size: int, times: int) -> None:
    """Be another rank: write down when each order was read."""
    from infer.engine.rank_worker import open_link
    from infer.execution.order import read

    link = open_link(handle, rank, size)
    own = table(times, size)[rank]
    for place in range(len(own)):
        read(memoryview(link.receive()[1]))
        own[place] = time.monotonic_ns()


def order_of(sequences: int) -> bytes:
    """Return an order in which this many sequences decode, as an engine made it and wrote it down."""
    import tempfile

    from infer import LLM
    from infer.engine.observer import EngineObserver
    from infer.execution.order import DECODE, StepOrder, to_bytes
    from infer.sampling.params import SamplingParams
    from scripts.make_checkpoint import make_checkpoint

    orders: dict[int, bytes] = {}  # orders whose rows all decode, by the number of rows

    class Keeper(EngineObserver):
        def on_order(self, order: StepOrder) -> None:
            if (order.kinds == DECODE).all():
                orders[order.num_rows] = bytes(to_bytes(order))

    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint("llama", Path(folder))
        with LLM(folder, device="cpu", max_batch_size=sequences, observer=Keeper()) as llm:
            prompts = [[5 + number % 90, 6, 7] for number in range(sequences)]
            llm.generate(prompts, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    return orders[sequences]


def send_orders(args: argparse.Namespace) -> dict[str, Any]:
    """Return the microseconds until the last rank has an order, and how long the sender took."""
    from infer.engine.rank_worker import make_memory, open_link
    from infer.execution.order import read, to_bytes
    from infer.execution.rank_ring import RankMessage

    body, size, found = order_of(args.sequences), args.readers + 1, dict[str, Any]()
    order = read(memoryview(body))
    for name, gap_s in GAPS_S.items():
        handle, times = make_memory(size), os.memfd_create("times")
        os.truncate(times, 8 * args.orders_sent * size)
        given = [(handle, rank, size, times) for rank in range(1, size)]
        readers = [get_context("fork").Process(target=read_orders, args=each) for each in given]
        for reader in readers:
            reader.start()
        link, told, sends = open_link(handle, 0, size), table(times, size), list[tuple[int, int]]()
        time.sleep(1)
        for place in range(args.orders_sent):
            time.sleep(gap_s)
            started = time.monotonic_ns()
            link.send(RankMessage.ORDER, to_bytes(order))
            sends.append((started, time.monotonic_ns()))
            while not told[1:, place].all():
                os.sched_yield()  # the next is not sent before this one has arrived
        for reader in readers:
            reader.join()
        us = [(told[1:, place].max() - started) / 1e3 for place, (started, _) in enumerate(sends)]
        own = [(ended - started) / 1e3 for started, ended in sends]
        found[name] = {
            "bytes": len(body),
            "arrived_us_p50": round(statistics.median(us), 1),
            "arrived_us_best": round(min(us), 1),
            "send_us_p50": round(statistics.median(own), 1),
        }
        print(name, json.dumps(found[name]), flush=True)
    return found


def main() -> None:
    """Measure, print, and write what was found."""
    parser = argparse.ArgumentParser(prog="benchmarks.cpu_ranks", description=__doc__)
    parser.add_argument("--model", help="default: the default model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--orders", action="store_true", help="measure the way of an order")
    parser.add_argument("--orders-sent", type=int, default=2000)
    parser.add_argument("--readers", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--decode", help=argparse.SUPPRESS)
    args = parse(parser)
    if args.decode is not None:
        decode(json.loads(args.decode))
        return
    figures = send_orders(args) if args.orders else compare(args)
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "decode")}
    write({"machine": facts(), "settings": settings, "figures": figures}, args.out)


if __name__ == "__main__":
    main()
