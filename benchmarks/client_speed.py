"""How much the benchmark client can take in: streamed tokens per second of its own CPU time.

    python -m benchmarks.client_speed [--streams 64] [--tokens 500] [--requests 192]

A server in another process writes ready-made frames as fast as it can, each in a piece of its own; the
client reads, counts and times them as in any benchmark. Target: 20,000 tokens per second on one core.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from pathlib import Path

from infer.bench.load import run_load
from infer.bench.sse_client import Endpoint
from infer.bench.workloads import Arrival, Session, Turn, Workload
from infer.server.serve import loop_factory

TARGET = 20_000
CONSTANT = b'"id":"cmpl-0123456789abcdef01234567","object":"text_completion","created":1700000000,"model":"m"'
FRAME = (
    b'data: {%s,"choices":[{"index":0,"text":" sky","logprobs":null,"finish_reason":null}]}\n\n' % CONSTANT
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """A piece of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def serve(path: str, num_tokens: int) -> None:
    """The server's process."""
    token = chunk(FRAME)
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":%d}}\n\n' % num_tokens
    tail = chunk(usage) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not reader.at_eof():
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                return
            await reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]))
            writer.write(HEAD)
            for _ in range(num_tokens):
                writer.write(token)
                await asyncio.sleep(0)  # a piece of its own, as a token is
            writer.write(tail)

    async def run() -> None:
        listening = await asyncio.start_unix_server(answer, path)
        await listening.serve_forever()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run())


def main() -> int:
    """Measure; exit code 1 if the target is missed."""
    parser = argparse.ArgumentParser(description="Measure the benchmark client itself.")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--requests", type=int, default=192)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "socket")
        server = multiprocessing.get_context("spawn").Process(
            target=serve, args=(path, args.tokens), daemon=True
        )
        server.start()
        while not Path(path).exists():
            time.sleep(0.05)
        sessions = (Session(turns=(Turn(ids=(1,), max_tokens=args.tokens),)),) * args.requests
        arrival = Arrival(kind="closed", concurrency=args.streams)
        workload = Workload(name="client", about="", arrival=arrival, sessions=sessions)
        result = run_load(Endpoint(url=f"unix://{path}"), workload, processes=1)
        server.terminate()
    errors = {trace.error for trace in result.traces if trace.error}
    assert not errors, errors
    num_tokens = sum(trace.num_output for trace in result.traces)
    per_core = num_tokens / (result.seconds * result.cpu_share)
    print(
        f"{num_tokens} tokens, {num_tokens / result.seconds:,.0f} per second at {result.cpu_share:.0%} of a "
        f"core: {per_core:,.0f} per second of CPU time (target {TARGET:,})"
    )
    return 0 if per_core >= TARGET else 1


if __name__ == "__main__":
    raise SystemExit(main())
