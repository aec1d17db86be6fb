"""What the front of a cluster adds to the first token: the same requests, to a replica and through a front.

    python -m benchmarks.front_overhead MODEL [--requests 200] [--concurrency 1]

One server is started, and one front before it, each in a process of its own. Ray takes no part in requests,
so none is needed. Requests alternate between the two ways, so that whatever else the machine does hits both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
from time import perf_counter
from urllib.parse import urlsplit

from infer.cluster.child import READY
from infer.cluster.front import build_front
from infer.cluster.replicas import RemoteServer, ReplicaSet
from infer.cluster.upstream import Upstream
from infer.config.server import ServerConfig
from infer.server.processes.board import Board
from infer.server.serve import HttpServer, bind, http_config, loop_factory, stop_on_signals, url_of
from infer.server.state import ServerState

KEY = "bench"


async def run_front(url: str) -> None:
    """Serve a front before one replica until a signal comes."""
    config = ServerConfig(port=0, access_log=False)
    state, replicas = ServerState(config=config, board=Board(1)), ReplicaSet()
    replicas.servers.append(RemoteServer(0, url, KEY))
    listener = bind(config)
    server = HttpServer(
        http_config(build_front(state, replicas, check_host=False), config), listener, state.board
    )
    stopping = stop_on_signals(state)
    serving = asyncio.create_task(server.serve())
    print(f"{READY}{url_of(config, listener)}", flush=True)
    await stopping
    server.should_exit = True
    await serving


async def first_token_s(url: str) -> float:
    """Seconds until the first event of a stream, over a connection that is open already."""
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    connection = await Upstream.connect(parts.hostname, parts.port)
    body = json.dumps({"prompt": "Once", "max_tokens": 4, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    started = perf_counter()
    status, _ = await connection.ask(head.encode() + body)
    assert status == 200, status
    await connection.read()
    took = perf_counter() - started
    while await connection.read() is not None:
        pass
    connection.close()
    return took


async def measure(urls: dict[str, str], num_requests: int, concurrency: int) -> dict[str, list[float]]:
    """Milliseconds to the first token by way."""
    times: dict[str, list[float]] = {name: [] for name in urls}
    for _ in range(num_requests // concurrency):
        for name, url in urls.items():
            seconds = await asyncio.gather(*(first_token_s(url) for _ in range(concurrency)))
            times[name] += [1000 * each for each in seconds]
    return times


def start(*command: str) -> tuple[subprocess.Popen[str], str]:
    """Start a process that says where it serves."""
    process = subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().removeprefix(READY).strip()


def main() -> None:
    """Start both, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--front-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.front_of:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(run_front(args.front_of))
        return
    quiet = ("--api-key", KEY, "--no-access-log", "--log-level", "warning", "--num-threads", "1")
    made = [start("infer.server", args.model, "--port", "0", *quiet)]
    try:
        made.append(start("benchmarks.front_overhead", args.model, "--front-of", made[0][1]))
        urls = {"replica": made[0][1], "front": made[1][1]}
        asyncio.run(measure(urls, 4 * args.concurrency, args.concurrency))  # warm
        times = asyncio.run(measure(urls, args.requests, args.concurrency))
    finally:
        for process, _ in reversed(made):
            process.terminate()
            process.wait()
    for name, values in times.items():
        p10, *_, p90 = statistics.quantiles(values, n=10)
        shown = f"p10 {p10:.2f}  p50 {statistics.median(values):.2f}  p90 {p90:.2f}"
        print(f"{name:8} first token in ms: {shown}")
    added = statistics.median(times["front"]) - statistics.median(times["replica"])
    print(f"added    p50 {added:.2f}")


if __name__ == "__main__":
    main()
