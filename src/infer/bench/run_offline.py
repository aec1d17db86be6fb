"""Run a workload on an engine without a server: requests go in at their times, every token's time comes out.

The loop is the one every caller of an engine has: add what is due, step, hand out. Two clocks fit in: the
real one, and the virtual one of a simulation, which the runner moves by what a step would have cost.

    offline      drive(engine, workload)                                     this machine's speed
    simulated    drive(engine, workload, clock=..., wait=...)                the scheduler's decisions alone
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from infer.bench.metrics import RequestTrace, Slo, percentile, summarise
from infer.bench.workloads import FIRST_ID, WORDS, Session, Turn, Workload
from infer.engine.engine import Engine
from infer.errors import InferError
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request, StepOutput

SAMPLE_EVERY = 16  # steps: to ask an engine of 256 sequences how full it is takes a quarter of a millisecond
STARVED_S = 30.0  # without a token, and nobody waits any longer
_WORD_IDS = {word: FIRST_ID + number for number, word in enumerate(WORDS)}


@dataclass(slots=True, kw_only=True)
class DriveResult:
    """What came of one run."""

    traces: list[RequestTrace]
    seconds: float
    step_s: list[float] = field(default_factory=list)  # how long each step took
    running: list[int] = field(default_factory=list)  # sequences, after each step that was looked at
    kv_use: list[float] = field(default_factory=list)  # share of blocks that sequences hold, likewise
    counters: dict[str, float] = field(default_factory=dict)  # how the engine's counters changed

    def figures(self, slo: Slo | None = None) -> dict[str, float]:
        """Everything there is to say about the run."""
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
        return found


COUNTERS = ("num_steps", "num_preemptions", "num_step_tokens", "num_queried_tokens", "num_hit_tokens")


def to_ids(workload: Workload) -> Workload:
    """A chat as token ids, a word each: an engine has no words."""
    if not workload.is_chat:
        return workload

    def ids(text: str) -> tuple[int, ...]:
        return tuple(_WORD_IDS[word] for word in text.split())

    sessions = []
    for session in workload.sessions:
        first, *rest = session.turns
        turns = [Turn(ids=ids(session.system) + ids(first.text), max_tokens=first.max_tokens)]
        turns += [Turn(ids=ids(turn.text), max_tokens=turn.max_tokens) for turn in rest]
        sessions.append(Session(turns=tuple(turns), start_s=session.start_s))
    return Workload(
        name=workload.name, about=workload.about, arrival=workload.arrival, sessions=tuple(sessions)
    )


class _Drive:
    def __init__(
        self,
        engine: Engine,
        workload: Workload,
        clock: Callable[[], float],
        wait: Callable[[float], None],
        params: Mapping[str, float],
        sample_every: int,
    ) -> None:
        self._engine = engine
        self._workload = to_ids(workload)
        self._clock = clock
        self._wait = wait
        self._params = params
        self._sample_every = sample_every
        self._is_open = workload.arrival.kind == "open"
        self._most = workload.arrival.concurrency or len(workload.sessions)
        order = sorted(range(len(self._workload.sessions)), key=lambda n: self._workload.sessions[n].start_s)
        self._pending = deque(order if self._is_open else range(len(self._workload.sessions)))
        self._active: dict[str, tuple[RequestTrace, list[int]]] = {}
        self._num_sessions = 0  # on their way
        self._started = clock()
        self.result = DriveResult(traces=[], seconds=0.0)

    def run(self) -> DriveResult:
        before = self._engine.stats()
        while self._pending or self._active:
            self._admit()
            if not self._active:
                if self._pending and self._is_open:
                    due = self._workload.sessions[self._pending[0]].start_s
                    self._wait(max(0.0, due - self._now()))
                continue
            began = self._now()
            outputs = self._engine.step()
            now = self._now()
            self.result.step_s.append(now - began)
            for output in outputs:
                self._take(output, now)
            if len(self.result.step_s) % self._sample_every == 1 % self._sample_every:
                stats = self._engine.stats()
                self.result.running.append(stats.num_running)
                self.result.kv_use.append(stats.num_used_blocks / max(stats.num_blocks, 1))
        after = self._engine.stats()
        self.result.counters = {name: getattr(after, name) - getattr(before, name) for name in COUNTERS}
        self.result.seconds = max((trace.ended for trace in self.result.traces), default=0.0)
        return self.result

    def _now(self) -> float:
        return self._clock() - self._started

    def _admit(self) -> None:
        while self._pending and self._num_sessions < self._most:
            if self._is_open and self._workload.sessions[self._pending[0]].start_s > self._now():
                return
            self._num_sessions += 1
            self._ask(self._pending.popleft(), 0, [])

    def _ask(self, number: int, turn: int, history: list[int]) -> None:
        session = self._workload.sessions[number]
        asked = session.turns[turn]
        prompt = [*history, *asked.ids]
        # an open loop counts from when the request was due: a step that was under way is part of the wait
        due = session.start_s if self._is_open and turn == 0 else self._now()
        trace = RequestTrace(session=number, turn=turn, asked=due, num_prompt=len(prompt), is_counted=True)
        self.result.traces.append(trace)
        params = SamplingParams(max_tokens=asked.max_tokens, ignore_eos=True, **self._params)  # type: ignore[arg-type]
        name = f"{number}.{turn}"
        try:
            self._engine.add(
                Request(
                    request_id=name,
                    prompt=tuple(prompt),
                    params=params,
                    priority=session.priority,
                    deadline=session.deadline,
                )
            )
        except InferError as error:
            trace.error, trace.ended = str(error), self._now()
            self._num_sessions -= 1
            return
        self._active[name] = (trace, prompt)

    def _take(self, output: StepOutput, now: float) -> None:
        trace, tokens = self._active[output.request_id]
        if output.token_ids:
            trace.chunks.append(now)
            trace.num_output += len(output.token_ids)
            tokens += output.token_ids
        trace.num_cached = output.num_cached
        trace.queue_s = output.queue_s
        if output.finish_reason is None:
            return
        trace.ended = now
        trace.error = output.error
        del self._active[output.request_id]
        session = self._workload.sessions[trace.session]
        if trace.error is None and trace.turn + 1 < len(session.turns):
            self._ask(trace.session, trace.turn + 1, tokens)
        else:
            self._num_sessions -= 1


def drive(
    engine: Engine,
    workload: Workload,
    *,
    clock: Callable[[], float] = time.perf_counter,
    wait: Callable[[float], None] = time.sleep,
    sample_every: int = SAMPLE_EVERY,
    **params: float,
) -> DriveResult:
    """Run a workload to its end; `params` are sampling parameters of every request."""
    return _Drive(engine, workload, clock, wait, params, sample_every).run()
