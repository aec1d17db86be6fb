"""Run a workload against a server: send each request at its time, and record a trace of it.

    closed loop    `concurrency` clients; each starts the next session when its previous one has ended
    open loop      a session starts at its time, however many are still running; with a limit, it may
                   have to wait for another to end

Bodies are made before the clock starts, unless they depend on an answer. The client's own CPU time is part of
the result: a client that is busy for most of the run measures itself. A Python process uses one core, so a
large load is split over several:

    parent ──► spawn ──► worker 0: sessions 0, 2, 4 ...     each with its own event loop and connections
                    └──► worker 1: sessions 1, 3, 5 ...     all begin at the same time of the same clock
           ◄── a number for every answer, the traces at the end

`perf_counter` is the same clock in all processes of a machine, so a start time chosen by the parent is valid
in all of them.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from asyncio import new_event_loop
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from typing import Any

from infer.bench.metrics import RequestTrace
from infer.bench.sse_client import Client, Clock, Endpoint
from infer.bench.workloads import Session, Workload
from infer.errors import EngineError

with suppress(ImportError):  # not built for every platform
    from uvloop import new_event_loop

STREAMS_PER_PROCESS = 128
START_S = 1.0  # seconds from the last worker being ready to the common start


@dataclass(slots=True, kw_only=True)
class LoadResult:
    """The traces of one run, and the load on the client."""

    traces: list[RequestTrace]
    seconds: float  # time from the first request to the last answer
    cpu_share: float  # share of one core that this client used
    lag_s: float  # largest delay with which a request of an open loop was sent

    @property
    def counts_frames(self) -> bool:
        """True if tokens had to be counted as frames."""
        return any(trace.is_ok and not trace.is_counted for trace in self.traces)


# -- in this event loop --------------------------------------------------------------------------------


async def run_workload(
    endpoint: Endpoint,
    workload: Workload,
    *,
    clock: Clock = time.perf_counter,
    on_done: Callable[[], None] = lambda: None,
    starts_at: float | None = None,
) -> LoadResult:
    """Run a workload in this event loop; `starts_at` lets several processes begin together."""
    client, traces, lag_s = Client(endpoint, clock), list[RequestTrace](), 0.0
    sessions = workload.sessions
    first = [_message(endpoint, workload, session, []) for session in sessions]

    async def hold(numbers: Iterable[int]) -> None:
        """Run all turns of some sessions, one after the other."""
        for number in numbers:
            session, answers, message = sessions[number], list[str](), first[number]
            while True:
                trace = RequestTrace(session=number, turn=len(answers), asked=clock())
                has_more = len(answers) + 1 < len(session.turns)
                answers.append(await client.ask(message, trace, keeps_text=has_more))
                traces.append(trace)
                on_done()
                if trace.error is not None or not has_more:  # a session cannot continue after an error
                    break
                message = _message(endpoint, workload, session, answers)

    turns = asyncio.Semaphore(workload.arrival.concurrency or len(sessions))

    async def hold_in_turn(number: int) -> None:
        async with turns:
            await hold([number])

    if starts_at is not None:
        await asyncio.sleep(max(0.0, starts_at - clock()))
    started, cpu_started = clock(), time.process_time()
    try:
        async with asyncio.TaskGroup() as tasks:
            if workload.arrival.kind == "open":
                for number in sorted(range(len(sessions)), key=lambda number: sessions[number].start_s):
                    due = started + sessions[number].start_s
                    if (early := due - clock()) > 0:
                        await asyncio.sleep(early)
                    lag_s = max(lag_s, clock() - due)
                    tasks.create_task(hold_in_turn(number))
            else:
                waiting = iter(range(len(sessions)))  # shared by all clients; each takes the next one
                for _ in range(workload.arrival.concurrency or len(sessions)):
                    tasks.create_task(hold(waiting))
    finally:
        client.close()
    seconds, cpu_s = clock() - started, time.process_time() - cpu_started
    for trace in traces:
        trace.asked -= started
        trace.ended -= started
        trace.chunks = [when - started for when in trace.chunks]
    cpu_share = cpu_s / seconds if seconds else 0.0
    return LoadResult(traces=traces, seconds=seconds, cpu_share=cpu_share, lag_s=lag_s)


def _message(endpoint: Endpoint, workload: Workload, session: Session, answers: Sequence[str]) -> bytes:
    """Return the request of the turn after these answers."""
    turn = session.turns[len(answers)]
    if not workload.is_chat:
        assert len(session.turns) == 1, "only chats have several turns"
        body = endpoint.body({"prompt": turn.text or tuple(turn.ids)}, turn.max_tokens)
        return endpoint.message("POST", "/v1/completions", body)
    messages = [{"role": "system", "content": session.system}] if session.system else []
    for said, answer in zip(session.turns, answers, strict=False):
        messages += [{"role": "user", "content": said.text}, {"role": "assistant", "content": answer}]
    messages.append({"role": "user", "content": turn.text})
    body = endpoint.body({"messages": messages}, turn.max_tokens)
    return endpoint.message("POST", "/v1/chat/completions", body)


# -- in as many processes as it needs ------------------------------------------------------------------


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
        return _run(endpoint, workload, lambda: on_done(1))
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


def num_processes(workload: Workload) -> int:
    """Return the number of client processes: one per STREAMS_PER_PROCESS streams, at most one per core."""
    streams = workload.arrival.concurrency or len(workload.sessions)
    return max(1, min(-(-streams // STREAMS_PER_PROCESS), os.cpu_count() or 1))


def split(workload: Workload, count: int) -> list[Workload]:
    """Split the workload into `count` parts that together, run in parallel, are the same load."""
    parts = []
    for number in range(count):
        concurrency = workload.arrival.concurrency
        concurrency = concurrency and concurrency // count + (number < concurrency % count)
        arrival = replace(workload.arrival, concurrency=concurrency)
        parts.append(replace(workload, arrival=arrival, sessions=workload.sessions[number::count]))
    return [part for part in parts if part.sessions]


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


def _work(pipe: Pipe, endpoint: Endpoint, workload: Workload) -> None:
    """Run a part of the load in a worker process and send its traces to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent, which ends its workers
    pipe.send("ready")
    starts_at = pipe.recv()
    pipe.send(_run(endpoint, workload, lambda: pipe.send(1), starts_at))


def _run(
    endpoint: Endpoint, workload: Workload, on_done: Callable[[], None], starts_at: float | None = None
) -> LoadResult:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(run_workload(endpoint, workload, on_done=on_done, starts_at=starts_at))
