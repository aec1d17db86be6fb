"""What the server adds to the engine: time to first token, time between tokens, tokens per second and core.

    python -m benchmarks.server_overhead [--streams 64] [--tokens 400] [--steps-per-second 40] [--out FILE]

Three processes, as in life: a client (this one), the server with everything that is in it (keys, limits,
log, metrics, tokenizer, detokenizer, event streams), and an engine whose model costs nothing.

    first token    one request at a time, over an open connection, minus the same asked of the engine itself
    between        `--streams` streams at a fixed pace: how late chunks are, minus the same at the engine
    flat out       the same streams without a pace: tokens per second of the server's own CPU time
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.machine import facts, parse, write
from infer.client.process_client import ProcessClient
from infer.client.supervisor import ProcessOptions
from infer.config.defaults import SERVER_MAX_QUEUE
from infer.config.server import ServerConfig
from infer.config.settings import EngineConfig
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request

TARGETS = {"first_token_ms_p50": 2.0, "between_ms_p99": 5.0, "tokens_per_core_s": 5000.0}
ENGINE = "benchmarks.ipc_engine"
NUM_WARM_UP = 20


@dataclass(slots=True)
class Server:
    """The server's process and where it listens."""

    process: subprocess.Popen[str]
    port: int

    def cpu_s(self) -> float:
        """Seconds of CPU time it has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """Stop it."""
        self.process.terminate()
        self.process.wait(30)


def start(model: str, streams: int, pace: int) -> Server:
    """Start a server whose engine makes `pace` steps per second; 0: as many as it can."""
    command = [sys.executable, "-m", "benchmarks.server_overhead", "--serve", model]
    command += ["--streams", str(streams), "--steps-per-second", str(pace)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return Server(process, int(process.stdout.readline().rsplit(":", 1)[1]))


async def run_server(model: str, streams: int, pace: int) -> None:
    """The server's process: the whole application around a null engine."""
    from infer.server import serve  # only here: the client's process needs none of it

    start_real = ProcessClient.start

    async def start_null(config: EngineConfig, options: ProcessOptions | None = None) -> ProcessClient:
        return await start_real(config, replace(options or ProcessOptions(), module=ENGINE))

    ProcessClient.start = start_null  # type: ignore[method-assign]
    assert streams <= SERVER_MAX_QUEUE
    config = EngineConfig.from_knobs(model=model, seed=pace, max_batch_size=streams)
    await serve.serve({"null": config}, ServerConfig(port=0), announce=lambda url: print(url, flush=True))


async def stream(port: int, num_tokens: int, num_requests: int = 1) -> list[list[float]]:
    """Ask over one connection, one request after the other; the times of each one's chunks, from asking."""
    body = {"prompt": [5, 6, 7], "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    payload = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    message = f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    answers = []
    for _ in range(num_requests):
        asked = time.perf_counter()
        writer.write(message)
        times: list[float] = []
        while True:
            line = await reader.readline()
            assert line, "the server closed the connection"
            if line.startswith(b"data: {"):
                times.append(time.perf_counter() - asked)
            elif line.startswith(b"data: [DONE]"):
                break
        while (await reader.readline()) != b"0\r\n":  # the end of the chunked body
            pass
        await reader.readline()
        assert len(times) == num_tokens, f"{len(times)} chunks for {num_tokens} tokens"
        answers.append(times)
    writer.close()
    return answers


async def ask_engine(client: ProcessClient, name: str, num_tokens: int) -> list[float]:
    """The same asked of the engine itself: the times of its outputs."""
    params = SamplingParams(max_tokens=num_tokens)
    asked = time.perf_counter()
    request = Request(request_id=name, prompt=(5, 6, 7), params=params)
    return [time.perf_counter() - asked async for _ in client.generate(request)]


async def engine_times(streams: int, num_tokens: int, pace: int, num_rounds: int) -> list[list[float]]:
    """The times of `num_rounds` rounds of `streams` requests at once, without a server."""
    config = EngineConfig.from_knobs(seed=pace, max_batch_size=max(streams, 2))
    client = await ProcessClient.start(config, ProcessOptions(module=ENGINE))
    found: list[list[float]] = []
    for number in range(num_rounds):
        names = [f"{number}-{i}" for i in range(streams)]
        found += await asyncio.gather(*(ask_engine(client, name, num_tokens) for name in names))
    await client.close()
    return found


def lateness_ms(streams: Sequence[Sequence[float]], pace: int) -> list[float]:
    """How much later than the pace each token came after the one before, sorted; the start is left out."""
    gaps = [b - a for times in streams for a, b in zip(times[2:], times[3:], strict=False)]
    return sorted(1000 * (gap - 1 / pace) for gap in gaps)


async def measure(model: str, streams: int, num_tokens: int, pace: int) -> dict[str, float]:
    """All figures."""
    server = start(model, streams, 0)
    try:
        answers = (await stream(server.port, 1, 200 + NUM_WARM_UP))[NUM_WARM_UP:]
        first_s = statistics.median(times[0] for times in answers)
        cpu_before, started = server.cpu_s(), time.perf_counter()
        await asyncio.gather(*(stream(server.port, num_tokens) for _ in range(streams)))
        wall_s, cpu_s = time.perf_counter() - started, server.cpu_s() - cpu_before
    finally:
        server.stop()
    direct = await engine_times(1, 1, 0, 200 + NUM_WARM_UP)
    direct_s = statistics.median(times[0] for times in direct[NUM_WARM_UP:])
    num_paced = max(num_tokens // 4, 8)
    paced = start(model, streams, pace)
    try:
        rounds = await asyncio.gather(*(stream(paced.port, num_paced) for _ in range(streams)))
    finally:
        paced.stop()
    late_ms = lateness_ms([times for (times,) in rounds], pace)
    engine_late_ms = lateness_ms(await engine_times(streams, num_paced, pace, 1), pace)
    at = int(0.99 * len(late_ms))
    return {
        "first_token_ms_p50": round(1000 * (first_s - direct_s), 3),
        "first_token_with_engine_ms_p50": round(1000 * first_s, 3),
        "between_ms_p99": round(late_ms[at] - engine_late_ms[at], 3),
        "between_with_engine_ms_p99": round(late_ms[at], 3),
        "tokens_per_core_s": round(streams * num_tokens / max(cpu_s, 1 / os.sysconf("SC_CLK_TCK"))),
        "tokens_per_s": round(streams * num_tokens / wall_s),
    }


def main() -> int:
    """Measure and print; exit code 1 if a target is missed."""
    parser = argparse.ArgumentParser(description="Measure what the server adds to the engine.")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--steps-per-second", type=int, default=40)
    parser.add_argument("--serve", metavar="MODEL", help=argparse.SUPPRESS)
    args = parse(parser)
    if args.serve:
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run_server(args.serve, args.streams, args.steps_per_second))
        return 0
    from scripts.make_checkpoint import make_checkpoint

    load = round(os.getloadavg()[0], 2)
    with tempfile.TemporaryDirectory() as directory:
        make_checkpoint("llama", Path(directory))
        figures = asyncio.run(measure(directory, args.streams, args.tokens, args.steps_per_second))
    report = {
        "machine": facts(),
        "load_before": load,  # of other work: on a busy machine the figures say more about that
        "streams": args.streams,
        "tokens": args.tokens,
        "figures": figures,
        "targets": TARGETS,
    }
    print(json.dumps(report, indent=2))
    write(report, args.out)
    is_fast = figures["first_token_ms_p50"] <= TARGETS["first_token_ms_p50"]
    is_even = figures["between_ms_p99"] <= TARGETS["between_ms_p99"]
    return 0 if is_fast and is_even and figures["tokens_per_core_s"] >= TARGETS["tokens_per_core_s"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
