"""`infer bench serve --concurrency N --duration S`: a long load with a verdict at the end.

N clients send requests for S seconds, each as soon as its last answer ends, with prompts and outputs of all
lengths. They hang up during a third of the answers, as people do. Meanwhile the memory of the server is read.
The verdict has three criteria:

    errors        there must be none: refusals, broken streams and streams without their end are errors
    memory        the last quarter of the time is compared with the second, since warm-up happens in the
                  first; not in a soak of less than a minute
    p99 latency   the time to the first token, if a limit was given (`--slo ttft=...`)

If the server is on this machine and belongs to the same user, the memory is counted on the host and on GPUs,
for the processes that listen at the server's address and for their children. For a server on another machine,
its metrics give the GPU memory of all processes, so growth cannot be judged if other programs use the GPU.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from infer.bench import scrape
from infer.bench.metrics import RequestTrace, Slo, percentile, summarise
from infer.bench.report import Report, make_report, make_row
from infer.bench.serve import Plan, ask_server, choose_ids
from infer.bench.sse_client import BrokenAnswer, Client, Endpoint, EventReader, fetch
from infer.cache.host_bytes import resident_bytes
from infer.errors import ConfigError
from infer.tools.nvml import held_by

MAX_PROMPT, MAX_OUTPUT = 512, 128  # tokens; fewer if the context is shorter
HANG_UP_SHARE = 1 / 3
LONGEST_WAIT_S = 2.0  # longest time before a client hangs up
NUM_READINGS = 40  # memory readings of a soak
LEAST_JUDGED_S = 60.0  # shortest soak with a memory verdict; before, cache blocks may still be touched first
DRIFT_SHARE, DRIFT_BYTES = 0.05, 64 << 20  # growth above both counts as a leak
_LISTEN = "0A"  # state of a listening socket in /proc/net/tcp


@dataclass(slots=True)
class Soak:
    """The observations of a soak so far."""

    traces: list[RequestTrace] = field(default_factory=list)  # traces of requests that were not hung up on
    num_hung_up: int = 0
    host_bytes: list[float] = field(default_factory=list)
    gpu_bytes: list[float] = field(default_factory=list)
    is_shared: bool = False  # `gpu_bytes` count all processes on the GPU
    seconds: float = 0.0


def bench_soak(
    endpoint: Endpoint, plan: Plan, *, concurrency: int, duration_s: float,
    tell: Callable[[str], None] = lambda line: None,
) -> Report:  # fmt: skip
    """Run the load against a server and return a report of one row, whose note is the verdict."""
    served = ask_server(endpoint, wait_s=plan.wait_s)
    endpoint = replace(endpoint, model=served.model)
    notes: list[str] = []
    plan = choose_ids(endpoint, plan, notes)
    if plan.as_text or plan.vocab_size is None:
        raise ConfigError("a soak sends token ids, which this server refuses; use --workload instead")
    pids = [*server_pids(endpoint)] if endpoint.is_here else []
    longest = min(MAX_PROMPT, (served.context_len or 4 * MAX_PROMPT) // 2)
    soak = asyncio.run(_run(endpoint, plan, concurrency, duration_s, longest, pids, tell))
    figures = summarise(soak.traces, seconds=soak.seconds, slo=plan.slo)
    figures["num_hung_up"] = float(soak.num_hung_up)
    for name, readings in (("host_drift_share", soak.host_bytes), ("gpu_drift_share", soak.gpu_bytes)):
        if (drift := drift_of(readings)) is not None:
            figures[name] = drift[1]
    faults = judge(soak, plan.slo)
    verdict = f"FAILED: {'; '.join(faults)}" if faults else "passed"
    if soak.seconds < LEAST_JUDGED_S:
        notes.append(f"memory growth is judged only in a soak of {LEAST_JUDGED_S:g} s or more")
    if not soak.host_bytes:
        notes.append("the server's memory could not be read: it is on another machine or another user's")
    errors = dict.fromkeys(re.sub(r"\d+", "N", trace.error) for trace in soak.traces if trace.error)
    notes += [f"an error was: {error}" for error in [*errors][:5]]
    about = f"{concurrency} clients for {duration_s:g} s, a third of them hang up"
    row = make_row("soak", about, [figures], note=verdict)
    return make_report(
        "soak", [row], model={"name": served.model, "context_len": served.context_len, **served.form},
        config={**served.config, "concurrency": concurrency, "duration_s": duration_s},
        seed=plan.seed, repeats=1, warmup=0, notes=[*filter(None, [plan.note]), *notes],
        served_by=served.version,
    )  # fmt: skip


def judge(soak: Soak, slo: Slo) -> list[str]:
    """Return the failures in words; empty if the server has passed."""
    faults = []
    num_errors = sum(not trace.is_ok for trace in soak.traces)
    if num_errors or not soak.traces:
        faults.append(f"{num_errors} of {len(soak.traces)} requests failed")
    on_gpu = "GPU (all processes)" if soak.is_shared else "GPU"
    for where, readings in (("host", soak.host_bytes), (on_gpu, soak.gpu_bytes)):
        drift = drift_of(readings) if soak.seconds >= LEAST_JUDGED_S else None
        if drift is not None and drift[0] > DRIFT_BYTES and drift[1] > DRIFT_SHARE:
            faults.append(f"{where} memory grew by {drift[0] / 2**20:.0f} MiB ({drift[1]:.0%})")
    times = [trace.ttft for trace in soak.traces if trace.is_ok]
    if slo.ttft is not None and times and (seen := percentile(times, 99)) > slo.ttft:
        faults.append(f"TTFT p99 was {seen:.2f} s, the limit is {slo.ttft:g} s")
    return faults


def drift_of(readings: list[float]) -> tuple[float, float] | None:
    """Return the growth from second to last quarter, in bytes and as a share; None: too few readings."""
    quarter = len(readings) // 4
    if not quarter:
        return None
    before = statistics.median(readings[quarter : 2 * quarter])
    grown = statistics.median(readings[-quarter:]) - before
    return grown, grown / before if before else 0.0


async def _run(
    endpoint: Endpoint, plan: Plan, concurrency: int, duration_s: float, longest: int, pids: list[int],
    tell: Callable[[str], None],
) -> Soak:  # fmt: skip
    soak, client = Soak(), Client(endpoint)
    started = time.perf_counter()
    ends = started + duration_s
    try:
        async with asyncio.TaskGroup() as tasks:
            for number in range(concurrency):
                source = random.Random(f"{plan.seed} {number}")
                tasks.create_task(_ask_until(ends, client, plan, longest, source, soak))
            tasks.create_task(_read_memory(ends, duration_s / NUM_READINGS, endpoint, pids, soak, tell))
    finally:
        client.close()
    soak.seconds = time.perf_counter() - started
    return soak


async def _ask_until(
    ends: float, client: Client, plan: Plan, longest: int, source: random.Random, soak: Soak
) -> None:
    """Send requests as one client until the time is up, and let the last answer end."""
    endpoint, vocab_size = client.endpoint, plan.vocab_size
    assert vocab_size is not None
    while time.perf_counter() < ends:
        prompt = [source.randrange(vocab_size // 2, vocab_size) for _ in range(source.randint(1, longest))]
        body = endpoint.body({"prompt": prompt}, source.randint(1, min(MAX_OUTPUT, longest)))
        message = endpoint.message("POST", "/v1/completions", body)
        trace = RequestTrace(session=0, turn=0, asked=client.clock())
        if source.random() < HANG_UP_SHARE:
            await _hang_up(client, message, trace, source.random() * LONGEST_WAIT_S)
            soak.num_hung_up += 1
        else:
            await client.ask(message, trace)
            soak.traces.append(trace)


async def _hang_up(client: Client, message: bytes, trace: RequestTrace, after_s: float) -> None:
    """Send a request, and close the connection after `after_s` seconds, whatever has arrived."""
    with suppress(OSError, TimeoutError, BrokenAnswer):
        connection = await client.connect()
        asking = asyncio.create_task(connection.ask(message, EventReader(trace)))
        await asyncio.wait([asking], timeout=after_s)
        connection.close()
        await asking


async def _read_memory(
    ends: float, every_s: float, endpoint: Endpoint, pids: list[int], soak: Soak, tell: Callable[[str], None]
) -> None:
    soak.is_shared = held_by(pids) is None
    while (now := time.perf_counter()) < ends:
        host_bytes = sum(map(resident_bytes, pids))
        if host_bytes:
            soak.host_bytes.append(host_bytes)
        gpu_bytes = await _used_of_gpu(endpoint) if soak.is_shared else held_by(pids)
        if gpu_bytes:
            soak.gpu_bytes.append(gpu_bytes)
        num_errors = sum(not trace.is_ok for trace in soak.traces)
        if len(soak.host_bytes) % (NUM_READINGS // 4) == 1:
            tell(
                f"{ends - now:.0f} s left: {len(soak.traces)} answers, {num_errors} errors, "
                f"{soak.num_hung_up} hung up, host {host_bytes / 2**20:.0f} MiB"
            )
        await asyncio.sleep(max(0.0, min(every_s, ends - now)))


async def _used_of_gpu(endpoint: Endpoint) -> float | None:
    """Return the bytes that all processes use on the server's GPU, from its metrics; None: not reported."""
    with suppress(ConfigError):
        page = (await fetch(endpoint, "/metrics")).decode(errors="replace")
        return scrape.read_counters(page).get("gpu_bytes")
    return None


# -- the server's processes -----------------------------------------------------------------------------


def server_pids(endpoint: Endpoint) -> Iterator[int]:
    """Yield the processes that listen at an address of this machine, and all their children."""
    inodes = _listening(endpoint)
    parents = {}
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):  # the process has ended, or is another user's
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if any(os.readlink(entry) in inodes for entry in (folder / "fd").iterdir()):
                found.add(int(folder.name))
    while True:
        children = {pid for pid, parent in parents.items() if parent in found} - found
        if not children:
            break
        found |= children
    yield from sorted(found)


def _listening(endpoint: Endpoint) -> set[str]:
    """Return the sockets that listen at the address, as links in /proc name them."""
    parts = urlsplit(endpoint.url)
    inodes = []
    with suppress(OSError):
        if parts.scheme == "unix":
            path = unquote(parts.netloc + parts.path)
            lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
            inodes = [line[6] for line in lines if line[-1] == path]
        else:
            port = f":{parts.port or (443 if parts.scheme == 'https' else 80):04X}"
            for name in ("tcp", "tcp6"):
                lines = [line.split() for line in Path("/proc/net", name).read_text().splitlines()[1:]]
                inodes += [line[9] for line in lines if line[1].endswith(port) and line[3] == _LISTEN]
    return {f"socket:[{inode}]" for inode in inodes}
