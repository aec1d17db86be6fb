"""What the front of a cluster adds to the first token: the same requests, to a server and through a front.

    python -m benchmarks.front_overhead [MODEL] [--requests 200] [--concurrency 1] [--ray] [--out FILE]

One server is started, and one front before it, each in a process of its own. Ray takes no part in requests,
so none is needed. With `--ray` the front is `infer serve --cluster ray` on a cluster of two nodes of this
machine, and its replica, asked directly, is a third way next to a server without Ray.

The ways take turns, in another order each time, so that whatever else the machine does hits all of them. What
is added is the difference between two requests of one turn: the report has its median and its quartiles.
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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from benchmarks.machine import facts, parse, write
from infer.cluster.child import READY
from infer.cluster.front import build_front
from infer.cluster.replicas import RemoteServer, ReplicaSet
from infer.cluster.upstream import Upstream
from infer.config.server import ServerConfig
from infer.server.processes.board import Board
from infer.server.serve import HttpServer, bind, http_config, loop_factory, stop_on_signals, url_of
from infer.server.state import ServerState

KEY = "bench"
KNOBS = (
    "--api-key",
    KEY,
    "--no-access-log",
    "--num-threads",
    "1",
    "--kv-cache-memory",
    "128MiB",
    "--device",
    "cpu",
)
SERVES = re.compile(r"replica serves .*url=(\S+)")


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


async def measure(urls: Mapping[str, str], num_turns: int, concurrency: int) -> dict[str, list[float]]:
    """Milliseconds to the first token by way; a turn has the same place in every list."""
    times: dict[str, list[float]] = {name: [] for name in urls}
    draw, names = random.Random(1), list(urls)
    for _ in range(num_turns):
        draw.shuffle(names)
        for name in names:
            seconds = await asyncio.gather(*(first_token_s(urls[name]) for _ in range(concurrency)))
            times[name].append(1000 * statistics.median(seconds))
    return times


@contextmanager
def started(*command: str, **streams: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that says where it serves, and its URL; it is ended with the context.

    It has a session of its own, as replicas have: on a busy machine Linux shares the processors out by
    session, and one in ours would get them sooner, whenever this process gives way to it.
    """
    streams |= {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen([sys.executable, "-m", *command], **streams)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().rpartition(" ")[2].strip()
    finally:
        process.terminate()
        process.communicate()


@contextmanager
def fronts(model: list[str], server: str, *, with_ray: bool) -> Iterator[dict[str, str]]:
    """The URLs of a front before the server; with Ray, of a front and its replica on a cluster of its own."""
    if not with_ray:
        with started("benchmarks.front_overhead", "--front-of", server) as (_, front):
            yield {"front": front}
        return
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    from ray.cluster_utils import Cluster

    here: dict[str, Any] = {"node_ip_address": "127.0.0.1"}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **here}
    )
    try:
        cluster.add_node(num_cpus=1, **here)
        command = ("infer", "serve", *model, *KNOBS, "--port", "0", "--cluster", "ray", "--ray-address")
        with started(*command, cluster.address, stderr=subprocess.PIPE) as (process, front):
            assert process.stderr is not None
            found = filter(None, map(SERVES.search, process.stderr))
            yield {"replica": next(found)[1], "front": front}
    finally:
        cluster.shutdown()


def main() -> None:
    """Start all of them, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", help="default: the default model")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--ray", action="store_true", help="the front of a real Ray cluster")
    parser.add_argument("--front-of", help=argparse.SUPPRESS)
    args = parse(parser)
    if args.front_of:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(run_front(args.front_of))
        return
    model = [args.model] if args.model else []
    with (
        started("infer.server", *model, "--port", "0", *KNOBS, "--log-level", "warning") as (_, server),
        fronts(model, server, with_ray=args.ray) as urls,
    ):
        urls = {"server": server} | urls
        asyncio.run(measure(urls, 8, args.concurrency))  # warm
        times = asyncio.run(measure(urls, args.requests // args.concurrency, args.concurrency))
    figures = {name: spread(values) for name, values in times.items()}
    for name in list(urls)[1:]:
        differences = [new - old for new, old in zip(times[name], times["server"], strict=True)]
        figures[f"added by {name}"] = spread(differences)
    for name, row in figures.items():
        print(f"{name:16} first token in ms:", json.dumps(row))
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "front_of")}
    write({"machine": facts(), "settings": settings, "figures": figures}, args.out)


def spread(values: list[float]) -> dict[str, float]:
    """The median of milliseconds, and the quarters around it."""
    quarter, _, three_quarters = statistics.quantiles(values, n=4)
    found = {"p25": quarter, "p50": statistics.median(values), "p75": three_quarters}
    return {name: round(value, 2) for name, value in found.items()}


if __name__ == "__main__":
    main()
