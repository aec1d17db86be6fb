"""What clients of a server see, from its first second on: the rows that other servers were measured with.

    python -m benchmarks.serve_rows MODEL_DIR [--passes 2] [--rows c1_512_128 ...] [--out FILE] [-- FLAGS]

A server is started on a free port, `infer serve MODEL_DIR FLAGS`, and the clock with it. Then come its first
answer and the rows, pass after pass: the first one is a user's first minute, the second one is warm.

    c64_512_128    64 streams at once, prompts of 256 to 768 tokens (512 in the mean), 128 tokens of output

Prompts are random token ids, each of another length, so that no cache knows them and no length comes twice.
Clients are processes of their own: one that reads 64 streams would be slower than the server. For each row:
output tokens per second from the first request to the last token, and milliseconds (p50, p95, p99) to the
first token, between tokens as they arrive at a client, and per token behind the first. `gpu_busy` is the mean
of what the server's metrics say of its GPU. A stream that ends early is counted as an error.

Rows that no other server was measured with are run where they are named: one stream of longer
answers, 500 streams at once, and sequences of 32,000 tokens (which need `--max-seq-len 32768` or more).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.machine import parse, today, write
from infer.bench.metrics import percentile
from infer.bench.report import commit, machine, versions

START_TIMEOUT_S = 180.0
MODEL = "model"
MARGIN = 2**22  # bytes of one event, at most


class Load(NamedTuple):
    """One row: how many requests, how many of them at once, how long they are."""

    num_requests: int
    concurrency: int
    prompt_len: int
    max_tokens: int
    num_processes: int
    spread: float = 0.5  # of prompts around their mean
    schema: str = ""  # JSON that the answer must have; it must outlast the answer

    @property
    def name(self) -> str:
        """The row's name in every report."""
        return f"c{self.concurrency}_{self.prompt_len}_{self.max_tokens}"


ROWS = (
    Load(24, 1, 512, 128, 1),
    Load(128, 16, 512, 128, 2),
    Load(512, 64, 512, 128, 4),
    Load(768, 192, 512, 128, 6),
    Load(256, 128, 2048, 128, 4),
    Load(1020, 128, 128, 256, 6),
)
MORE_ROWS = (
    Load(16, 1, 256, 256, 1),
    Load(1500, 500, 512, 128, 10),
    Load(16, 4, 32_000, 128, 2, spread=0.01),
)
WHOLE = re.compile(rb'"finish_reason":\s*"length"')
BUSY = re.compile(r"^\S*gpu_utilization(?:{.*})? (\S+)$", re.MULTILINE)
SCRAPE_S = 0.25  # between two looks at the metrics


class Answer(NamedTuple):
    """When a request was sent and when its events came; an error instead, also if tokens are missing."""

    sent: float
    times: list[float]
    error: str = ""


async def ask(port: int, load: Load, seed: int, model: str = MODEL) -> Answer:
    """Send one request and note when its tokens come; read from the socket itself, which costs little."""
    draw = random.Random(seed)
    away = int(load.prompt_len * load.spread)
    length = draw.randint(load.prompt_len - away, load.prompt_len + away)
    asked = {
        "model": model,
        "prompt": [draw.randint(300, 9000) for _ in range(length)],
        "max_tokens": load.max_tokens,
        "temperature": 0.6,
        "stream": True,
    }
    if load.schema:
        schema = {"name": "answer", "schema": json.loads(load.schema)}
        asked["response_format"] = {"type": "json_schema", "json_schema": schema}
    else:
        asked["ignore_eos"] = True
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"  # noqa: E501
    sent, times, last = time.perf_counter(), list[float](), b""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=MARGIN)
    except OSError as error:
        return Answer(sent, [], str(error))
    try:
        writer.write(head.encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            return Answer(sent, [], (status + await reader.read(500)).decode(errors="replace"))
        while line := await reader.readline():
            if line.startswith(b"data: [DONE]"):
                if not WHOLE.search(last):
                    break
                return Answer(sent, times)
            if line.startswith(b"data:"):
                last = line
                if b'"text":' in line:
                    times.append(time.perf_counter())
    except OSError as error:
        return Answer(sent, [], str(error))
    finally:
        writer.close()
    return Answer(sent, [], f"the stream ended after {len(times)} events: {last[-200:]!r}")


def run_clients(port: int, load: Load, number: int, seed: int) -> list[Answer]:
    """The part of one client process: its share of the requests, its share of them at once."""

    async def ask_all() -> list[Answer]:
        places = asyncio.Semaphore(load.concurrency // load.num_processes)

        async def ask_in_turn(index: int) -> Answer:
            async with places:
                return await ask(port, load, seed + number * 100_000 + index)

        numbers = range(load.num_requests // load.num_processes)
        return list(await asyncio.gather(*map(ask_in_turn, numbers)))

    return asyncio.run(ask_all())


class BusyGpu(threading.Thread):
    """Reads from the server's metrics how busy its GPU is, again and again while a row runs."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._url, self._ended = f"http://127.0.0.1:{port}/metrics", threading.Event()
        self._shares: list[float] = []

    def run(self) -> None:
        """Read until the row has ended; without a GPU, once."""
        while not self._ended.wait(SCRAPE_S):
            with suppress(OSError), urllib.request.urlopen(self._url, timeout=10) as page:
                found = BUSY.findall(page.read().decode())
                self._shares += map(float, found)
                if not found:
                    return

    def end(self) -> float | None:
        """The mean of all readings, of which the first tells of the time before; None: there are none."""
        self._ended.set()
        self.join()
        return round(statistics.mean(self._shares[1:]), 3) if len(self._shares) > 1 else None


def measure(port: int, load: Load, seed: int) -> dict[str, Any]:
    """One row."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(load.num_processes) as pool:
        pool.map(abs, range(load.num_processes))  # all have started
        shares = [(port, load, number, seed) for number in range(load.num_processes)]
        busy = BusyGpu(port)
        busy.start()
        answers = [answer for share in pool.starmap(run_clients, shares, chunksize=1) for answer in share]
        gpu_busy = busy.end()
    errors = [answer.error for answer in answers if answer.error]
    done = [answer for answer in answers if answer.times]
    if errors:
        print(f"{load.name}: {len(errors)} errors, the first: {errors[0][:300]}", file=sys.stderr)
    if not done:
        return {"errors": len(errors)}
    first = [answer.times[0] - answer.sent for answer in done]
    gaps = [b - a for answer in done for a, b in zip(answer.times, answer.times[1:], strict=False)]
    tokens = [
        (answer.times[-1] - answer.times[0]) / (len(answer.times) - 1)
        for answer in done
        if len(answer.times) > 1
    ]
    seconds = max(answer.times[-1] for answer in done) - min(answer.sent for answer in done)
    return {
        "out_tok_s": round(load.max_tokens * len(done) / seconds),  # an event may have several tokens
        "ttft_ms": [round(percentile(first, p) * 1e3, 2) for p in (50, 95, 99)],
        "gap_ms": [round(percentile(gaps, p) * 1e3, 2) for p in (50, 95, 99)],
        "tpot_ms": [round(percentile(tokens, p) * 1e3, 2) for p in (50, 95, 99)],
        "gpu_busy": gpu_busy,
        "requests": len(done),
        "errors": len(errors),
    }


class Server:
    """A server of its own process; `healthy_s` and `first_answer_s` are seconds since it was started.

    `flags` name a model that is served as MODEL.
    """

    def __init__(self, flags: Sequence[str], log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        command = [sys.executable, "-m", "infer", "serve"]
        self.started = time.perf_counter()
        with log.open("w", encoding="utf-8") as lines:
            self._process = subprocess.Popen(
                [*command, "--port", str(self.port), "--no-access-log", *flags], stdout=lines, stderr=lines
            )
        self.healthy_s = self._wait("/health")
        body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 1}
        self.first_answer_s = self._wait("/v1/completions", json.dumps(body).encode())

    def _wait(self, path: str, body: bytes | None = None) -> float:
        """Seconds since the start until a request succeeds."""
        url = f"http://127.0.0.1:{self.port}{path}"
        while time.perf_counter() - self.started < START_TIMEOUT_S and self._process.poll() is None:
            try:
                asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
                with urllib.request.urlopen(asked, timeout=START_TIMEOUT_S):
                    return round(time.perf_counter() - self.started, 2)
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.02)
        self.stop()
        raise SystemExit(f"the server did not answer {path}; see its log")

    def stop(self) -> None:
        """End the server; a second later by force."""
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main(argv: Sequence[str] | None = None) -> int:
    """Start, measure, write."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    flags = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
    parser = argparse.ArgumentParser(description="what clients of a server see")
    parser.add_argument("model", type=Path, help="a checkpoint's directory")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--rows", nargs="+", choices=[load.name for load in (*ROWS, *MORE_ROWS)])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--log", type=Path, default=Path("serve-rows.log"), help="where the server's log goes"
    )
    args = parse(parser, arguments[: len(arguments) - len(flags) - 1] if flags else arguments)
    server = Server([str(args.model), "--served-model-name", MODEL, *flags], args.log)
    lines = args.log.read_text(encoding="utf-8").splitlines()
    phases = [re.sub(r"^.*?infer\.\S+: ", "", line) for line in lines if re.search(r"_s=|seconds=", line)]
    found: dict[str, Any] = {
        "engine": "infer", "model": args.model.name, "created": today(), "commit": commit(),
        "versions": versions(), "machine": machine(), "flags": flags,
        "healthy_s": server.healthy_s, "first_answer_s": server.first_answer_s, "phases": phases,
    }  # fmt: skip
    print(f"{args.model.name}: healthy after {server.healthy_s} s, first answer {server.first_answer_s} s")
    print("\n".join(phases))
    try:
        for number in range(args.passes):
            found[f"pass_{number + 1}"] = rows = {}
            for load in (*ROWS, *MORE_ROWS):
                if load.name in (args.rows or [load.name for load in ROWS]):
                    rows[load.name] = row = measure(server.port, load, args.seed + number * 10_000_000)
                    print(f"pass {number + 1} {load.name:14} {json.dumps(row)}", flush=True)
                    write(found, args.out)
    finally:
        server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
