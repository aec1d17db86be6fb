"""Tokens that leave a server: how many, how evenly, and what each costs, by the number of API processes.

    python -m benchmarks.streams [--api-processes 1,2,4,8] [--streams 192] [--tokens 256] [--pace 0]
                                 [--clients 6] [--rounds 1] [--server-cores N] [--out FILE]

The server is the whole server; its engine is the real one around a model that costs nothing. With `--pace`
the engine makes that many steps per second, else as many as it can. Clients are processes of their own that
read bytes and parse no JSON. With `--server-cores` the server and its engine have that many cores, and the
clients the others. One line per number of API processes:

    tok_s         tokens per second, from the first request sent to the last token read
    ttft, gap     milliseconds to the first event, and between two events of a stream, as a client reads them
    us_per_token  CPU time of each process per token of all: API processes, then the engine
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing as mp
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from benchmarks.machine import facts, parse, write

ENGINE = "benchmarks.ipc_engine"
PROMPT_LEN = 64

Answer = tuple[float, list[float], bytes]  # when it was asked for, when its events came, how it begins


def serve_null(model: str, streams: int, pace: int, num_processes: int) -> None:
    """The server's process: the whole application around a null engine; its URL on standard output."""
    from infer.client.process_client import ProcessClient
    from infer.client.supervisor import ProcessOptions
    from infer.config.server import ServerConfig
    from infer.config.settings import EngineConfig
    from infer.log import setup_logging
    from infer.server import serve

    setup_logging("warning")
    start_real = ProcessClient.start

    async def start_null(config: EngineConfig, options: ProcessOptions | None = None) -> ProcessClient:
        return await start_real(config, replace(options or ProcessOptions(), module=ENGINE))

    ProcessClient.start = start_null  # type: ignore[method-assign]
    config = EngineConfig.from_knobs(
        model=model, seed=pace, max_batch_size=streams, max_queue=8 * streams, max_num_batched_tokens=8192
    )
    server = ServerConfig(port=0, api_processes=num_processes)
    with asyncio.Runner(loop_factory=serve.loop_factory()) as runner:
        runner.run(serve.serve({"null": config}, server, announce=lambda url: print(url, flush=True)))


class Stream(asyncio.Protocol):
    """One streamed request: when its events came."""

    def __init__(self, message: bytes) -> None:
        self._message = message
        self._tail = b""
        self.start = b""  # of the answer: what went wrong, where it has too few events
        self.times: list[float] = []
        self.asked = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._message)

    def data_received(self, data: bytes) -> None:
        """Note the time of every event."""
        now = time.perf_counter()
        self.start = self.start or data
        data = self._tail + data
        self.times += [now] * data.count(b'"text":')
        is_done = b"[DONE]" in data
        self._tail = data[-7:] if not data.endswith(b"}\n\n\r\n") else b""
        if is_done:
            self._transport.abort()
            if not self.done.done():
                self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """End, also without [DONE]: the number of events tells."""
        self.start = self.start or str(exc or "closed without an answer").encode()
        if not self.done.done():
            self.done.set_result(None)


async def _load(port: int, streams: int, num_tokens: int, seed: int) -> list[Answer]:
    ids = [300 + (seed * 7919 + i) % 200 for i in range(PROMPT_LEN)]
    body = {"prompt": ids, "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    payload = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    message = f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload

    async def one() -> Answer:
        asked = time.perf_counter()
        make = asyncio.get_running_loop().create_connection(lambda: Stream(message), "127.0.0.1", port)
        _, stream = await make
        await stream.done
        return asked, stream.times, stream.start

    return list(await asyncio.gather(*(one() for _ in range(streams))))


def _client(port: int, streams: int, num_tokens: int, seed: int, start: Any, queue: Any) -> None:
    start.wait()
    queue.put(asyncio.run(_load(port, streams, num_tokens, seed)))


def load(port: int, streams: int, num_tokens: int, num_clients: int) -> list[Answer]:
    """Ask for all streams at once, from several processes; when each was asked for and its events came."""
    context = mp.get_context("spawn")
    queue, start = context.Queue(), context.Barrier(num_clients + 1)
    shares = [streams // num_clients + (i < streams % num_clients) for i in range(num_clients)]
    clients = [
        context.Process(target=_client, args=(port, share, num_tokens, i, start, queue))
        for i, share in enumerate(shares)
    ]
    for client in clients:
        client.start()
    start.wait()
    results = [row for _ in clients for row in queue.get()]
    for client in clients:
        client.join()
    return results


def cpu_s(pid: int) -> float:
    """Seconds of CPU time a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def family(pid: int) -> list[int]:
    """A process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *map(int, children)]


def percentiles(values: Sequence[float]) -> list[float]:
    """Milliseconds at p50, p95 and p99."""
    ordered = sorted(values)
    return [round(1e3 * ordered[min(len(ordered) - 1, int(len(ordered) * p))], 2) for p in (0.5, 0.95, 0.99)]


def measure(model: str, args: argparse.Namespace, num_processes: int) -> dict[str, Any]:
    """Start a server, load it, stop it."""
    command = [sys.executable, "-m", "benchmarks.streams", "--serve", model, "--streams", str(args.streams)]
    command += ["--pace", str(args.pace), "--api-processes", str(num_processes)]
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[: args.server_cores])  # which the server's processes inherit
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    os.sched_setaffinity(0, cores[args.server_cores or 0 :])
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline().rsplit(":", 1)[1])
        load(port, args.clients, 8, args.clients)  # warm up
        best: dict[str, Any] = {}
        for _ in range(args.rounds):
            pids = family(process.pid)
            before = [cpu_s(pid) for pid in pids]
            results = load(port, args.streams, args.tokens, args.clients)
            used = [cpu_s(pid) - was for pid, was in zip(pids, before, strict=True)]
            num = sum(len(times) for _, times, _ in results)
            short = [begin.decode() for _, times, begin in results if len(times) < args.tokens]
            if short:
                sys.exit(f"{len(short)} of {args.streams} streams have too few events; one is:\n{short[0]}")
            wall = max(times[-1] for _, times, _ in results) - min(asked for asked, *_ in results)
            found = {
                "api_processes": num_processes,
                "tok_s": round(num / wall),
                "ttft_ms": percentiles([times[0] - asked for asked, times, _ in results]),
                "gap_ms": percentiles([b - a for _, t, _ in results for a, b in zip(t, t[1:], strict=False)]),
                "us_per_token": [round(1e6 * each / num, 2) for each in used],
            }
            if not best or found["tok_s"] > best["tok_s"]:
                best = found
        return best
    finally:
        process.terminate()
        process.wait(60)
        os.sched_setaffinity(0, cores)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure the tokens that leave a server.")
    parser.add_argument("--api-processes", default="1")
    parser.add_argument("--streams", type=int, default=192)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--pace", type=int, default=0, help="engine steps per second; 0: as many as it can")
    parser.add_argument("--clients", type=int, default=6, help="client processes")
    parser.add_argument(
        "--rounds", type=int, default=1, help="loads of each; the one with most tokens counts"
    )
    parser.add_argument("--server-cores", type=int, help="for server and engine; the clients get the others")
    parser.add_argument("--serve", metavar="MODEL", help=argparse.SUPPRESS)
    args = parse(parser)
    if args.server_cores is not None and not 0 < args.server_cores < len(os.sched_getaffinity(0)):
        parser.error(f"--server-cores is {args.server_cores}, of {len(os.sched_getaffinity(0))} cores")
    if args.serve:
        serve_null(args.serve, args.streams, args.pace, int(args.api_processes))
        return 0
    from scripts.make_checkpoint import make_checkpoint

    rows = []
    with tempfile.TemporaryDirectory() as directory:
        make_checkpoint("llama", Path(directory))
        for number in map(int, args.api_processes.split(",")):
            rows.append(measure(directory, args, number))
            print(json.dumps(rows[-1]), flush=True)
    found = {"machine": facts(), "streams": args.streams, "tokens": args.tokens, "pace": args.pace}
    write({**found, "server_cores": args.server_cores, "rows": rows}, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
