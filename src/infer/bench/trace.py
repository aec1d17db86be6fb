"""`infer bench trace`: send one request after the other, and time each stage, from socket to socket.

    connect | receive parse tokenize submit | to_engine wait compute | from_engine send | network
    client  | server                        | engine                 | server           | the rest

The server reports its stages in the `server-timing` header of its answer to a request with the header
`x-infer-trace`. The first request counts as the cold one; it is, if the server has just started. Every prompt
is new and of the same length, so none is found in a prefix cache.
"""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import time
from dataclasses import replace

from infer.bench.metrics import RequestTrace
from infer.bench.render import align
from infer.bench.serve import ask_server
from infer.bench.sse_client import BrokenAnswer, Client, Connection, Endpoint, EventReader
from infer.errors import ConfigError

STAGES = {
    "connect": "open a connection",
    "receive": "read the body",
    "parse": "read JSON, check fields",
    "tokenize": "text to ids",
    "submit": "make the engine's request",
    "to_engine": "until the engine takes it",
    "wait": "until its first step",
    "compute": "until its first token is there",
    "from_engine": "until the server has it",
    "send": "write text, frame and head",
    "network": "the rest: wire and client",
}
FIRST_TOKEN = "first token"
IDS = (20, 99)  # ordinary token ids that every vocabulary has
_STAGE = re.compile(r"(\w+);dur=([0-9.]+)")


def bench_trace(
    endpoint: Endpoint, *, prompt_len: int, num_warm: int, seed: int = 42, wait_s: float = 0.0
) -> str:
    """Send a cold request and `num_warm` warm ones, and return the stages of each as a table."""
    endpoint = replace(endpoint, model=ask_server(endpoint, wait_s=wait_s).model)
    rng = random.Random(seed)
    prompts = [[rng.randint(*IDS) for _ in range(prompt_len)] for _ in range(1 + num_warm)]
    cold, *warm = asyncio.run(_ask_all(endpoint, prompts))
    rows = [["milliseconds", "cold", "warm p50", "warm max"]]
    for stage, meaning in {**STAGES, FIRST_TOKEN: "as this client sees it"}.items():
        values = [times[stage] for times in warm]
        cells = (cold[stage], statistics.median(values), max(values))
        rows.append([f"{stage:12} {meaning}", *(f"{value:.3f}" for value in cells)])
    return "\n".join(align(rows)) + "\n"


async def _ask_all(endpoint: Endpoint, prompts: list[list[int]]) -> list[dict[str, float]]:
    return [await _ask(endpoint, prompt) for prompt in prompts]


async def _ask(endpoint: Endpoint, prompt: list[int]) -> dict[str, float]:
    """Return the milliseconds of each stage of one request, over a new connection."""
    body = endpoint.body({"prompt": prompt}, max_tokens=2)
    message = endpoint.message("POST", "/v1/completions", body, headers=["x-infer-trace: 1"])
    started = time.perf_counter()
    connection: Connection | None = None
    try:
        async with asyncio.timeout(endpoint.timeout_s):
            connection = await Client(endpoint).connect()
            trace = RequestTrace(session=0, turn=0, asked=time.perf_counter())
            await connection.ask(message, EventReader(trace))
    except (BrokenAnswer, OSError) as error:
        raise ConfigError(f"the request to {endpoint.url} failed: {error}") from None
    finally:
        if connection is not None:
            connection.close()
    told = {name: float(ms) for name, ms in _STAGE.findall(connection.timing)}
    if not told:
        raise ConfigError(f"{endpoint.url} sent no server-timing header; is it an infer server?")
    times = dict.fromkeys(STAGES, 0.0) | told
    times["connect"] = 1000 * (trace.asked - started)
    times["network"] = 1000 * trace.ttft - sum(told.values())
    return times | {FIRST_TOKEN: 1000 * (trace.chunks[0] - started)}
