"""Run a workload on an engine without a server: add requests at their times, record the time of every token.

Every user of an engine runs this loop: add the requests that are due, step, deliver. It uses the real clock
or the virtual clock of a simulation, which the device advances by the cost of each step.

    offline      run_offline(engine, workload)                    this machine's speed
    simulated    run_offline(engine, workload, clock=device)      the scheduler's decisions alone
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from infer.bench.metrics import RequestTrace, Slo, percentile, summarise
from infer.bench.workloads import FIRST_ID, WORDS, Turn, Workload
from infer.engine.engine import Engine
from infer.errors import InferError
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request, StepOutput

SAMPLE_EVERY = 16  # steps between two samples of the engine's load, which take measured time
STARVED_S = 30.0  # seconds without a token after which a request counts as starved
COUNTERS = (
    "num_steps", "num_preemptions", "num_step_tokens", "num_queried_tokens", "num_hit_tokens",
    "num_draft_tokens", "num_accepted_tokens",
)  # fmt: skip
_WORD_IDS = {word: FIRST_ID + number for number, word in enumerate(WORDS)}


class Clock(Protocol):
    """The time of a run, from its start."""

    def seconds(self) -> float:
        """Return the seconds since the start."""

    def wait_until(self, when: float) -> None:
        """Return at this time, or immediately if it is past."""


class WallClock:
    """The machine's own time."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    def seconds(self) -> float:
        """Return the seconds since this clock was made."""
        return time.perf_counter() - self._started

    def wait_until(self, when: float) -> None:
        """Sleep until this time."""
        time.sleep(max(0.0, when - self.seconds()))


@dataclass(slots=True, kw_only=True)
class OfflineResult:
    """The traces of one run, and statistics of the engine."""

    traces: list[RequestTrace] = field(default_factory=list)
    seconds: float = 0.0  # time to the end of the last request
    num_blocks: int = 0  # blocks of the cache
    step_s: list[float] = field(default_factory=list)  # seconds of each step
    running: list[int] = field(default_factory=list)  # running sequences after each sampled step
    kv_use: list[float] = field(default_factory=list)  # share of blocks in use after the same steps
    counters: dict[str, float] = field(default_factory=dict)  # increase of the engine's counters

    def figures(self, slo: Slo | None = None) -> dict[str, float]:
        """Return every figure of the run by its name in MEASURES."""
        found = summarise(self.traces, seconds=self.seconds, slo=slo or Slo())
        waits = [max([trace.ttft, *trace.gaps()]) for trace in self.traces if trace.is_ok]
        found |= {
            "num_steps": self.counters["num_steps"],
            "num_preemptions": self.counters["num_preemptions"],
            "tokens_per_step": self.counters["num_step_tokens"] / max(self.counters["num_steps"], 1),
            "num_starved": sum(wait > STARVED_S for wait in waits),
            "longest_wait_s": max(waits, default=0.0),
        }
        if self.step_s:
            found |= {
                "step_p50_s": percentile(self.step_s, 50),
                "mean_running": sum(self.running) / len(self.running),
                "peak_running": max(self.running),
                "kv_use": sum(self.kv_use) / len(self.kv_use),
            }
        if self.counters["num_queried_tokens"]:
            found["cache_hit_share"] = self.counters["num_hit_tokens"] / self.counters["num_queried_tokens"]
        if self.counters["num_draft_tokens"]:
            found["draft_share"] = self.counters["num_accepted_tokens"] / self.counters["num_draft_tokens"]
        return found


def to_ids(workload: Workload) -> Workload:
    """Return a chat as token ids, one for each word, because engines accept only ids."""
    if not workload.is_chat:
        return workload

    def ids(text: str) -> tuple[int, ...]:
        return tuple(_WORD_IDS[word] for word in text.split())

    sessions = []
    for session in workload.sessions:
        turns = [Turn(ids=ids(turn.text), max_tokens=turn.max_tokens) for turn in session.turns]
        turns[0] = replace(turns[0], ids=(*ids(session.system), *turns[0].ids))
        sessions.append(replace(session, system="", turns=tuple(turns)))
    return replace(workload, is_chat=False, sessions=tuple(sessions))


class _Run:
    """Submits the requests of one workload to an engine and collects their traces."""

    def __init__(
        self, engine: Engine, workload: Workload, clock: Clock, sample_every: int, params: Mapping[str, Any]
    ) -> None:
        self._engine = engine
        self._sessions = to_ids(workload).sessions
        self._now = clock.seconds
        self._clock = clock
        self._sample_every = sample_every
        self._params = params
        self._is_open = workload.arrival.kind == "open"
        self._most = workload.arrival.concurrency or len(self._sessions)
        order = range(len(self._sessions))
        by_start = sorted(order, key=lambda number: self._sessions[number].start_s)
        self._pending = deque(by_start if self._is_open else order)
        self._active: dict[tuple[str, int], tuple[RequestTrace, list[int], float]] = {}  # last: seconds late
        self._num_sessions = 0  # active sessions
        self.result = OfflineResult()

    def run(self) -> OfflineResult:
        result, before = self.result, self._engine.stats()
        scheduler, pool = self._engine.scheduler, self._engine.scheduler.pool
        while self._pending or self._active:
            self._admit()
            if not self._active:
                if self._pending and self._is_open:
                    self._clock.wait_until(self._sessions[self._pending[0]].start_s)
                continue
            began = self._now()
            outputs = self._engine.step()
            now = self._now()
            result.step_s.append(now - began)
            for output in outputs:
                self._take(output, now)
            if len(result.step_s) % self._sample_every == 1 % self._sample_every:
                result.running.append(len(scheduler.running))
                result.kv_use.append(1 - pool.num_free_blocks / max(pool.num_blocks, 1))
        after = self._engine.stats()
        result.counters = {name: getattr(after, name) - getattr(before, name) for name in COUNTERS}
        result.num_blocks = pool.num_blocks
        result.seconds = max((trace.ended for trace in result.traces), default=0.0)
        return result

    def _admit(self) -> None:
        while self._pending and self._num_sessions < self._most:
            if self._is_open and self._sessions[self._pending[0]].start_s > self._now():
                return
            self._num_sessions += 1
            self._ask(self._pending.popleft(), 0, [])

    def _ask(self, number: int, turn: int, history: list[int]) -> None:
        session = self._sessions[number]
        asked = session.turns[turn]
        prompt = [*history, *asked.ids]
        # in an open loop, times count from when the request was due: waiting for a running step is included
        due = session.start_s if self._is_open and turn == 0 else self._now()
        request = Request(
            request_id=f"{number}.{turn}",
            prompt=tuple(prompt),
            params=SamplingParams(max_tokens=asked.max_tokens, ignore_eos=True, **self._params),
            priority=session.priority,
            deadline=session.deadline,
        )
        traces = [
            RequestTrace(session=number, turn=turn, asked=due, num_prompt=len(prompt), is_counted=True)
            for _ in range(request.params.n)
        ]
        self.result.traces += traces
        try:
            self._engine.add(request)
        except InferError as error:
            for trace in traces:
                trace.error, trace.ended = str(error), self._now()
            self._num_sessions -= 1
            return
        for index, trace in enumerate(traces):
            self._active[request.request_id, index] = (trace, prompt.copy(), self._now() - due)

    def _take(self, output: StepOutput, now: float) -> None:
        key = output.request_id, output.index
        trace, tokens, late_s = self._active[key]
        if output.token_ids:
            trace.chunks.append(now)
            trace.num_output += len(output.token_ids)
            tokens += output.token_ids
        trace.num_cached = output.num_cached
        trace.queue_s = late_s + output.queue_s
        if output.finish_reason is None:
            return
        trace.ended = now
        trace.error = output.error
        del self._active[key]
        if any(request_id == output.request_id for request_id, _ in self._active):
            return  # the session continues with the answer that ends last
        if trace.error is None and trace.turn + 1 < len(self._sessions[trace.session].turns):
            self._ask(trace.session, trace.turn + 1, tokens)
        else:
            self._num_sessions -= 1


def run_offline(
    engine: Engine,
    workload: Workload,
    *,
    clock: Clock | None = None,
    sample_every: int = SAMPLE_EVERY,
    **params: float,
) -> OfflineResult:
    """Run a workload to its end; `params` are sampling parameters of every request."""
    return _Run(engine, workload, clock or WallClock(), sample_every, params).run()
