"""Several client processes for one load, because one Python process feeds one core.

    parent ──► spawn ──► worker 0: sessions 0, 2, 4 ...     each its own event loop and connections
                    └──► worker 1: sessions 1, 3, 5 ...     all begin at the same moment of the same clock
           ◄── a number for every answer, the traces at the end

`perf_counter` is one clock for all processes of a machine, so a moment named by the parent is the same
moment in all of them.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from typing import Any

from infer.bench.load import LoadResult, run_workload
from infer.bench.metrics import RequestTrace
from infer.bench.sse_client import Endpoint
from infer.bench.workloads import Workload
from infer.errors import EngineError

STREAMS_PER_PROCESS = 128
START_S = 1.0  # for all workers to be ready once the last has said so


def num_processes(workload: Workload) -> int:
    """Return how many client processes a load needs: one for so many streams, at most one per core."""
    streams = workload.arrival.concurrency or len(workload.sessions)
    return max(1, min(-(-streams // STREAMS_PER_PROCESS), os.cpu_count() or 1))


def split(workload: Workload, count: int) -> list[Workload]:
    """Return the workload in `count` parts that make the whole when they run side by side."""
    parts = []
    for number in range(count):
        concurrency = workload.arrival.concurrency
        if concurrency:
            concurrency = concurrency // count + (number < concurrency % count)
        arrival = replace(workload.arrival, concurrency=concurrency)
        parts.append(replace(workload, arrival=arrival, sessions=workload.sessions[number::count]))
    return [part for part in parts if part.sessions]


def run_load(
    endpoint: Endpoint,
    workload: Workload,
    *,
    processes: int | None = None,
    on_done: Callable[[int], None] = lambda count: None,
) -> LoadResult:
    """Run a workload in as many processes as it needs; `on_done` is called with every answer."""
    concurrency = workload.arrival.concurrency or len(workload.sessions)
    count = min(processes or num_processes(workload), len(workload.sessions), concurrency)
    if count == 1:
        return _run_here(endpoint, workload, on_done)
    context = multiprocessing.get_context("spawn")
    pipes: list[Pipe] = []
    workers = []
    try:
        for part in split(workload, count):
            mine, theirs = context.Pipe()
            worker = context.Process(target=_work, args=(theirs, endpoint, part), daemon=True)
            worker.start()
            theirs.close()
            pipes.append(mine)
            workers.append(worker)
        for pipe in pipes:
            _receive(pipe)  # ready
        starts_at = time.perf_counter() + START_S
        for pipe in pipes:
            pipe.send(starts_at)
        return _collect(pipes, on_done)
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def _collect(pipes: list[Pipe], on_done: Callable[[int], None]) -> LoadResult:
    results: list[LoadResult] = []
    waiting = {pipe: number for number, pipe in enumerate(pipes)}
    while waiting:
        for ready in wait(list(waiting)):
            assert isinstance(ready, Pipe)
            message = _receive(ready)
            if isinstance(message, int):
                on_done(message)
                continue
            for trace in message.traces:
                trace.session = trace.session * len(pipes) + waiting[ready]
            results.append(message)
            del waiting[ready]
    return LoadResult(
        traces=sorted((t for result in results for t in result.traces), key=lambda trace: trace.asked),
        seconds=max(result.seconds for result in results),
        cpu_share=max(result.cpu_share for result in results),
        lag_s=max(result.lag_s for result in results),
    )


def _receive(pipe: Pipe) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        raise EngineError("a client process of the benchmark died") from None


def _run_here(endpoint: Endpoint, workload: Workload, on_done: Callable[[int], None]) -> LoadResult:
    def count_one(trace: RequestTrace) -> None:
        on_done(1)

    with asyncio.Runner(loop_factory=fast_loop) as runner:
        return runner.run(run_workload(endpoint, workload, on_done=count_one))


def _work(pipe: Pipe, endpoint: Endpoint, workload: Workload) -> None:
    """Run a part of the load in a worker process and send its traces to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    pipe.send("ready")
    starts_at = pipe.recv()
    with asyncio.Runner(loop_factory=fast_loop) as runner:
        result = runner.run(
            run_workload(endpoint, workload, on_done=lambda trace: pipe.send(1), starts_at=starts_at)
        )
    pipe.send(result)


def fast_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop of libuv where it is installed, at half the cost per event."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
