"""Put a workload on a server: the right requests at the right times, and a trace of each.

    closed loop    `concurrency` clients, each takes the next session when its last has ended
    open loop      a session starts at its time, however many are still running

Bodies are made before the clock starts, except those that need an answer first. The client's own CPU time
is part of the result: a client that is busy for most of the run measures itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from infer.bench.metrics import RequestTrace
from infer.bench.sse_client import Client, Clock, Endpoint
from infer.bench.workloads import Session, Workload


@dataclass(slots=True, kw_only=True)
class LoadResult:
    """The traces of one run, and what the client spent on it."""

    traces: list[RequestTrace]
    seconds: float  # from the first request to the last answer
    cpu_share: float  # of one core, used by this client
    lag_s: float  # the most that a request of an open loop was sent too late

    @property
    def counts_frames(self) -> bool:
        """Whether tokens had to be counted by frames."""
        return any(trace.is_ok and not trace.is_counted for trace in self.traces)


class _Run:
    """Sends the requests of one workload and keeps their traces."""

    def __init__(self, client: Client, workload: Workload, on_done: Callable[[RequestTrace], None]) -> None:
        self._client = client
        self._workload = workload
        self._on_done = on_done
        self._path = "/v1/chat/completions" if workload.is_chat else "/v1/completions"
        self._first = [self._message(session, []) for session in workload.sessions]
        self.traces: list[RequestTrace] = []
        self.lag_s = 0.0
        self._started = 0.0

    async def go(self) -> None:
        """Send all requests and wait for the last answer."""
        self._started = self._client.clock()
        if self._workload.arrival.kind == "open":
            await self._open_loop()
        else:
            await self._closed_loop()

    async def _open_loop(self) -> None:
        order = sorted(range(len(self._first)), key=lambda number: self._workload.sessions[number].start_s)
        async with asyncio.TaskGroup() as tasks:
            for number in order:
                due = self._started + self._workload.sessions[number].start_s
                wait = due - self._client.clock()
                if wait > 0:
                    await asyncio.sleep(wait)
                self.lag_s = max(self.lag_s, self._client.clock() - due)
                tasks.create_task(self._session(number))

    async def _closed_loop(self) -> None:
        numbers = iter(range(len(self._first)))

        async def client() -> None:
            for number in numbers:
                await self._session(number)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._workload.arrival.concurrency or len(self._first)):
                tasks.create_task(client())

    async def _session(self, number: int) -> None:
        session = self._workload.sessions[number]
        answers: list[str] = []
        for index, _ in enumerate(session.turns):
            message = self._first[number] if index == 0 else self._message(session, answers)
            trace = RequestTrace(session=number, turn=index, asked=self._client.clock())
            has_more = index + 1 < len(session.turns)
            answers.append(await self._client.ask(message, trace, keeps_text=has_more))
            self.traces.append(trace)
            self._on_done(trace)
            if trace.error is not None:
                break  # there is nothing to go on from

    def _message(self, session: Session, answers: Sequence[str]) -> bytes:
        """Return the request of the turn after these answers."""
        turn = session.turns[len(answers)]
        prompt: dict[str, Any] = {"prompt": turn.text or tuple(turn.ids)}
        if self._workload.is_chat:
            messages = [{"role": "system", "content": session.system}] if session.system else []
            for said, answer in zip(session.turns, answers, strict=False):
                messages += [{"role": "user", "content": said.text}, {"role": "assistant", "content": answer}]
            prompt = {"messages": [*messages, {"role": "user", "content": turn.text}]}
        else:
            assert len(session.turns) == 1, "only chats have several turns"
        endpoint = self._client.endpoint
        return endpoint.message("POST", self._path, endpoint.body(prompt, turn.max_tokens))


async def run_workload(
    endpoint: Endpoint,
    workload: Workload,
    *,
    clock: Clock = time.perf_counter,
    on_done: Callable[[RequestTrace], None] = lambda trace: None,
    starts_at: float | None = None,
) -> LoadResult:
    """Run a workload in this event loop; `starts_at` lets several processes begin together."""
    client = Client(endpoint, clock)
    run = _Run(client, workload, on_done)
    if starts_at is not None:
        await asyncio.sleep(max(0.0, starts_at - clock()))
    started, cpu_started = clock(), time.process_time()
    try:
        await run.go()
    finally:
        client.close()
    seconds, cpu_s = clock() - started, time.process_time() - cpu_started
    for trace in run.traces:
        trace.asked -= started
        trace.ended -= started
        trace.chunks = [when - started for when in trace.chunks]
    return LoadResult(
        traces=run.traces, seconds=seconds, cpu_share=cpu_s / seconds if seconds else 0.0, lag_s=run.lag_s
    )
