"""`infer bench serve`: workloads against a server, repeat by repeat, into one report.

ask who is there ──► warm up ──► for each workload, for each repeat: other tokens, run, count
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from infer.bench import scrape
from infer.bench.adapt import fit, vary
from infer.bench.load import LoadResult, Target, fetch
from infer.bench.metrics import Slo, summarise
from infer.bench.processes import run_load
from infer.bench.report import Report, Row, make_report, make_row
from infer.bench.workloads import (
    DEFAULT_VOCAB,
    WORDS,
    Arrival,
    Session,
    Turn,
    Workload,
    make_workload,
)
from infer.errors import ConfigError
from infer.log import progress

BUSY_CLIENT = 0.8  # of a core: from here on the client may be what is measured
LATE_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run."""

    workloads: Sequence[str]
    seed: int = 42
    repeats: int = 1
    warmup: int = 4
    vocab_size: int = DEFAULT_VOCAB
    as_text: bool = False  # words instead of token ids
    processes: int | None = None
    slo: Slo = field(default_factory=Slo)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What the server says it serves."""

    model: str
    context_len: int | None
    config: dict[str, Any]


def ask_server(target: Target) -> Served:
    """The model to ask for, and how the server is set up as far as it tells."""
    cards = json.loads(asyncio.run(fetch(target, "/v1/models"))).get("data") or []
    names = [str(card["id"]) for card in cards]
    if not names:
        raise ConfigError(f"{target.url} serves no model")
    if target.model and target.model not in names:
        raise ConfigError(f"{target.url} serves {', '.join(names)}, not {target.model!r}")
    card = cards[names.index(target.model) if target.model else 0]
    context_len = card.get("max_model_len")
    return Served(
        model=str(card["id"]),
        context_len=int(context_len) if context_len else None,
        config=dict(scrape.read_config(_metrics(target))),
    )


def bench_server(target: Target, plan: Plan, *, tell: Callable[[str], None] = lambda line: None) -> Report:
    """Run every workload and report; `tell` gets a line for each repeat as it ends."""
    served = ask_server(target)
    target = replace(target, model=served.model)
    workloads = [_prepare(name, plan, served) for name in plan.workloads]
    _warm_up(target, plan)
    rows, notes = [], []
    for workload in workloads:
        row, said = _bench(target, workload, plan, tell)
        rows.append(row)
        notes += said
    url = target.url.partition("://")[0]
    return make_report(
        "serve",
        rows,
        model={"name": served.model, "context_len": served.context_len},
        config={
            **served.config,
            "transport": url,
            "sent": dict(target.extra),
            "slo": {name: getattr(plan.slo, name) for name in ("ttft", "tpot", "e2e")},
        },
        seed=plan.seed,
        repeats=plan.repeats,
        warmup=plan.warmup,
        notes=list(dict.fromkeys(notes)),
    )


def _prepare(name: str, plan: Plan, served: Served) -> Workload:
    workload = make_workload(name, seed=plan.seed, vocab_size=plan.vocab_size)
    if plan.as_text and not workload.is_chat:
        workload = _as_text(workload)
    vocab_size = None if workload.is_chat or plan.as_text else plan.vocab_size
    if served.context_len is not None:
        workload = fit(workload, context_len=served.context_len, vocab_size=vocab_size)
    return workload


def _as_text(workload: Workload) -> Workload:
    """Words instead of ids, one for each: for servers that take only text."""

    def words(turn: Turn) -> Turn:
        return replace(turn, ids=(), text=" ".join(WORDS[token_id % len(WORDS)] for token_id in turn.ids))

    sessions = tuple(
        replace(session, turns=tuple(map(words, session.turns))) for session in workload.sessions
    )
    return replace(workload, sessions=sessions)


def _warm_up(target: Target, plan: Plan) -> None:
    """A few requests that nobody counts: connections, caches of compiled kernels, first allocations."""
    turn = Turn(text=" ".join(WORDS[:32]), max_tokens=16)
    sessions = (Session(turns=(turn,)),) * plan.warmup
    arrival = Arrival(kind="closed", concurrency=max(1, plan.warmup // 2))
    if sessions:
        result = run_load(
            target, Workload(name="warm-up", about="", arrival=arrival, sessions=sessions), processes=1
        )
        errors = [trace.error for trace in result.traces if trace.error]
        if len(errors) == len(sessions):
            raise ConfigError(f"the server answers no request: {errors[0]}")


def _bench(
    target: Target, workload: Workload, plan: Plan, tell: Callable[[str], None]
) -> tuple[Row, list[str]]:
    runs, notes = [], []
    for repeat in range(plan.repeats):
        before = scrape.read_counters(_metrics(target))
        label = f"{workload.name} {repeat + 1}/{plan.repeats}"
        with progress(label, total=workload.num_requests) as advance:
            varied = vary(workload, repeat, plan.vocab_size)
            result = run_load(target, varied, processes=plan.processes, on_done=advance)
        figures = summarise(result.traces, seconds=result.seconds, slo=plan.slo)
        figures["client_cpu_share"] = result.cpu_share
        figures |= scrape.figures(before, scrape.read_counters(_metrics(target)))
        runs.append(figures)
        notes += _notes(workload.name, result)
        tell(
            f"{label}: {figures.get('output_tokens_per_s', 0):.1f} tok/s, "
            f"{figures['num_errors']:.0f} errors, client at {result.cpu_share:.0%} of a core"
        )
    settings = {
        "arrival": workload.arrival.describe(),
        "num_requests": workload.num_requests,
        "endpoint": "chat" if workload.is_chat else "completions",
    }
    return make_row(workload.name, workload.about, runs, settings=settings), notes


def _notes(name: str, result: LoadResult) -> list[str]:
    """What a reader must know before trusting the figures."""
    notes = []
    if result.cpu_share > BUSY_CLIENT:
        notes.append(
            f"{name}: the client used {result.cpu_share:.0%} of a core; its own speed is part of the figures"
        )
    if result.lag_s > LATE_S:
        notes.append(f"{name}: requests were sent up to {1000 * result.lag_s:.0f} ms late")
    if result.counts_frames:
        notes.append(f"{name}: the server sends no usage, so frames were counted as tokens")
    errors: dict[str, list[str]] = {}
    for trace in result.traces:
        if trace.error:  # those that differ in a number are of one kind
            errors.setdefault(re.sub(r"\d+", "N", trace.error), []).append(trace.error)
    notes += [f"{name}: {len(alike)} failed: {alike[0]}" for alike in errors.values()]
    return notes


def _metrics(target: Target) -> str:
    try:
        return asyncio.run(fetch(target, "/metrics")).decode(errors="replace")
    except ConfigError:
        return ""
