"""Prompts that share their starts, on several replicas: the router against taking turns.

    python -m benchmarks.routing [--model MODEL] [--replicas 4] [--api-processes 2] [--prefixes 12]
                                 [--prefix-tokens 256] [--requests 96] [--concurrency 4] [--out FILE]

Every prompt is one of the prefixes and a few tokens of its own, in random order; clients wait for an answer
before they ask again. The cache of a replica has room for a third of the prefixes. One line for each way:

    ttft        milliseconds to the first token, mean and median, behind a first round that fills the caches
    cached      share of the prompt tokens that were found in a cache
    busiest     requests of the busiest replica, in relation to the mean
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx

from benchmarks.machine import facts, parse, write

WAYS = ("turns", "router")
TURNS = "INFER_BENCH_TURNS"  # environment variable of an API process whose router takes turns
BLOCK = 16
OWN_TOKENS = 8
OUTPUT_TOKENS = 4
FIRST_ID = 1000  # smallest token id of prompts


def serve(way: str, model: str | None, replicas: int, api_processes: int, num_blocks: int) -> None:
    """Run the server; its URL goes to standard output."""
    from infer.config.server import ServerConfig
    from infer.config.settings import EngineConfig
    from infer.log import setup_logging
    from infer.server import serve as serving

    setup_logging("warning")
    knobs: dict[str, Any] = {"num_threads": 1, "block_size": BLOCK, "num_blocks": num_blocks}
    config = EngineConfig.from_knobs(model=model, max_batch_size=8, **knobs)
    server = ServerConfig(port=0, replicas=replicas, api_processes=api_processes)
    if way == "turns":
        os.environ[TURNS] = "1"
        take_turns()
    with asyncio.Runner(loop_factory=serving.loop_factory()) as runner:
        runner.run(serving.serve({"m": config}, server, announce=lambda url: print(url, flush=True)))


def take_turns() -> None:
    """Let every router send requests to one replica after the other, also those of other API processes."""
    from infer.server.fleet.router import Router
    from infer.server.processes import workers

    workers.WORKER_MODULE = "benchmarks.routing"  # it has no arguments then: see the end of this file

    def pick(router: Any, request: object, clients: Sequence[Any]) -> Any:
        router._turn += 1
        return clients[router._turn % len(clients)]

    Router.pick = pick  # type: ignore[assignment,method-assign]


def make_prompts(args: argparse.Namespace) -> list[list[int]]:
    """Return the prompts, each prefix equally often."""
    draw = random.Random(1)
    prefixes = [
        [draw.randrange(FIRST_ID, 2 * FIRST_ID) for _ in range(args.prefix_tokens)]
        for _ in range(args.prefixes)
    ]
    rest = [number % args.prefixes for number in range(args.requests - args.prefixes)]
    draw.shuffle(rest)
    return [
        prefixes[number] + [draw.randrange(FIRST_ID, 2 * FIRST_ID) for _ in range(OWN_TOKENS)]
        for number in (*range(args.prefixes), *rest)
    ]


async def ask(client: httpx.AsyncClient, prompt: list[int]) -> tuple[float, int]:
    """Return the seconds to the first token, and how many tokens of the prompt were cached."""
    body = {
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started, first, cached = time.perf_counter(), 0.0, 0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            first = first or time.perf_counter() - started
            usage = json.loads(line[6:]).get("usage")
            cached = usage["prompt_tokens_details"]["cached_tokens"] if usage else cached
    return first, cached


async def measure(url: str, args: argparse.Namespace) -> dict[str, float]:
    """Send all prompts and return the figures."""
    prompts = make_prompts(args)
    answers: dict[int, tuple[float, int]] = {}
    waiting = iter(range(len(prompts)))

    async def work() -> None:
        limits = httpx.Limits(max_keepalive_connections=0)  # every request may meet another API process
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
            for number in waiting:
                answers[number] = await ask(client, prompts[number])

    await asyncio.gather(*(work() for _ in range(args.concurrency)))
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        page = (await client.get("/metrics")).text
    served: Counter[str] = Counter()
    for engine, count in re.findall(r'infer_request_success_total{engine="(\d+)".*} (\S+)', page):
        served[engine] += int(float(count))
    counted = [answers[number] for number in range(args.prefixes, len(prompts))]
    num_tokens = len(counted) * (args.prefix_tokens + OWN_TOKENS)
    return {
        "ttft_ms_mean": round(1000 * statistics.mean(first for first, _ in counted), 1),
        "ttft_ms_p50": round(1000 * statistics.median(first for first, _ in counted), 1),
        "cached": round(sum(cached for _, cached in counted) / num_tokens, 3),
        "busiest": round(max(served.values()) / (sum(served.values()) / args.replicas), 2),
    }


def run(way: str, args: argparse.Namespace) -> dict[str, float]:
    """Start a server, measure it, and stop it."""
    num_blocks = args.prefixes * args.prefix_tokens // BLOCK // 3 + 16
    given = [way, args.model or "", args.replicas, args.api_processes, num_blocks]
    command = [sys.executable, "-m", "benchmarks.routing", "--serve", json.dumps(given)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            return asyncio.run(measure(process.stdout.readline().strip(), args))
        finally:
            process.terminate()


def main() -> None:
    """Measure both ways and print the figures."""
    parser = argparse.ArgumentParser(prog="benchmarks.routing")
    parser.add_argument("--model", help="default: the default model")
    for name, default in (("replicas", 4), ("api-processes", 2), ("prefixes", 12), ("prefix-tokens", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("requests", 96), ("concurrency", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parse(parser)
    if args.serve is not None:
        way, model, *numbers = json.loads(args.serve)
        serve(way, model or None, *numbers)
        return
    figures: dict[str, Any] = {}
    for way in WAYS:
        figures[way] = run(way, args)
        print(way, json.dumps(figures[way]), flush=True)
    speedup = figures["turns"]["ttft_ms_mean"] / figures["router"]["ttft_ms_mean"]
    figures["ttft_speedup"] = round(speedup, 2)
    print("ttft_speedup", figures["ttft_speedup"])
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "serve")}
    write({"machine": facts(), "settings": settings, "figures": figures}, args.out)


if __name__ == "__main__":
    if os.environ.get(TURNS) and len(sys.argv) == 1:
        from infer.server.processes import worker

        take_turns()
        sys.exit(worker.main())
    main()
