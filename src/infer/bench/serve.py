"""`infer bench serve`: run workloads against a server, repeat by repeat, and write one report.

served model ──► accepted token ids ──► warm up ──► for each workload and repeat: new tokens, run, count
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from infer.bench import scrape
from infer.bench.load import LoadResult, run_load
from infer.bench.metrics import Slo, cached_share, summarise
from infer.bench.repeats import RowJob, run_rows
from infer.bench.report import Report, make_report
from infer.bench.sse_client import Endpoint, NotReady, fetch
from infer.bench.workloads import (
    DEFAULT_VOCAB,
    RANDOM,
    WORDS,
    RandomLoad,
    Turn,
    Workload,
    fit,
    make_workload,
    random_workload,
    shortened,
    vary,
)
from infer.errors import ConfigError
from infer.log import progress

BUSY_CLIENT = 0.8  # share of a core; a client that needs more may be measuring itself
LATE_S = 0.05
POLL_S = 0.2
ELSEWHERE = "the machine and the commit are the client's; the server is at another address"
FORM = ("revision", "dtype", "weights")  # properties of a model that a server may give in /v1/models
LEAST_VOCAB = 100  # a server that refuses ids below this accepts no ids at all


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The workloads to run, and how to run them."""

    workloads: Sequence[str]
    seed: int = 42
    repeats: int = 1
    warmup: int = 4
    vocab_size: int | None = None  # limit of token ids; None: the largest that the server accepts
    as_text: bool = False  # True: send words instead of token ids
    processes: int | None = None
    slo: Slo = field(default_factory=Slo)
    wait_s: float = 0.0  # seconds to wait for the server to be ready
    note: str = ""  # remark for the report about facts that the server does not reveal
    random: RandomLoad = field(default_factory=RandomLoad)  # sizes of the workload of that name

    def make(self, name: str) -> Workload:
        """Return the workload of this name, with ids that the server accepts."""
        draw = {"seed": self.seed, "vocab_size": self.vocab_size or DEFAULT_VOCAB}
        return random_workload(self.random, **draw) if name == RANDOM else make_workload(name, **draw)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The model of a server, and the facts that the server reports about itself."""

    model: str
    context_len: int | None
    version: str  # empty: unknown
    config: dict[str, Any]
    form: dict[str, str] = field(default_factory=dict)  # values of FORM, as far as the server gives them


def ask_server(endpoint: Endpoint, *, wait_s: float = 0.0) -> Served:
    """Return the model to request and the server's facts; waits up to `wait_s` for the server to start."""
    page = _wait_for(endpoint, "/v1/models", wait_s)
    try:
        cards = json.loads(page)["data"]
        names = [str(card["id"]) for card in cards]
        lengths = [card.get("max_model_len") for card in cards]
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ConfigError(
            f"{endpoint.url}/v1/models holds no list of models; is this an OpenAI-compatible server?"
        ) from None
    if not names:
        raise ConfigError(f"{endpoint.url} serves no model")
    if endpoint.model and endpoint.model not in names:
        raise ConfigError(f"{endpoint.url} serves {', '.join(names)}, not {endpoint.model!r}")
    chosen = names.index(endpoint.model) if endpoint.model else 0
    return Served(
        model=names[chosen],
        context_len=int(lengths[chosen]) if lengths[chosen] else None,
        version=_version(endpoint),
        config=dict(scrape.read_config(_page(endpoint, "/metrics"))),
        form={name: str(cards[chosen][name]) for name in FORM if cards[chosen].get(name)},
    )


def _wait_for(endpoint: Endpoint, path: str, wait_s: float) -> bytes:
    gives_up = time.monotonic() + wait_s
    while True:
        try:
            return asyncio.run(fetch(endpoint, path))
        except NotReady:
            if time.monotonic() >= gives_up:
                raise
            time.sleep(POLL_S)


def bench_server(
    endpoint: Endpoint, plan: Plan, *, tell: Callable[[str], None] = lambda line: None
) -> Report:
    """Run every workload and report; `tell` gets a line for each repeat as it ends."""
    served = ask_server(endpoint, wait_s=plan.wait_s)
    endpoint = replace(endpoint, model=served.model)
    notes: list[str] = [] if endpoint.is_here else [ELSEWHERE]
    plan = choose_ids(endpoint, plan, notes)
    whole = [_make(name, plan) for name in plan.workloads]
    workloads = [_fit(workload, plan, served) for workload in whole]
    notes += shortened(whole, workloads)
    for note in notes:
        tell(note)
    _warm_up(endpoint, plan)
    jobs = {workload.name: partial(_bench, endpoint, workload, plan, tell, notes) for workload in workloads}
    rows, is_partial = run_rows(jobs, plan.repeats)
    meaning = f"goodput and in SLO count requests within {plan.slo} (seconds)" if str(plan.slo) else ""
    return make_report(
        "serve",
        rows,
        model={"name": served.model, "context_len": served.context_len, **served.form},
        config={
            **served.config,
            "transport": endpoint.url.partition("://")[0],
            "sent": dict(endpoint.extra),
            "prompts": "words" if plan.as_text else f"token ids below {plan.vocab_size}",
            "slo": asdict(plan.slo),
        },
        seed=plan.seed,
        repeats=plan.repeats,
        warmup=plan.warmup,
        notes=list(dict.fromkeys([*filter(None, [plan.note, meaning]), *notes])),
        is_partial=is_partial,
        served_by=served.version,
    )


def choose_ids(endpoint: Endpoint, plan: Plan, notes: list[str]) -> Plan:
    """Return the plan with token ids that this server accepts, or with words if it accepts none.

    It tries sizes with one request each, the largest first, which nearly every server accepts.
    """
    if plan.as_text or plan.vocab_size is not None:
        return replace(plan, vocab_size=plan.vocab_size or DEFAULT_VOCAB)
    if all(plan.make(name).is_chat for name in plan.workloads):
        return replace(plan, vocab_size=DEFAULT_VOCAB)
    size, refusal = DEFAULT_VOCAB, ""
    while size > LEAST_VOCAB:
        turn = Turn(ids=(size - 1,) * 8, max_tokens=1)
        error = _try(endpoint, turn)
        if error is None:
            if refusal:
                notes.append(f"the server refused larger token ids, so all are below {size}: {refusal}")
            return replace(plan, vocab_size=size)
        if not error.startswith(("HTTP 400", "HTTP 422")):
            raise ConfigError(
                f"the server refuses every request: {error}; --text sends words instead of token ids"
            )
        refusal, size = error, size // 2
    if (error := _try(endpoint, Turn(text="the time", max_tokens=1))) is not None:
        raise ConfigError(_no_answer(error))
    notes.append(f"the server accepts no token ids, so prompts are words, about as long: {refusal}")
    return replace(plan, as_text=True, vocab_size=DEFAULT_VOCAB)


def _try(endpoint: Endpoint, turn: Turn, *, count: int = 1, concurrency: int = 1) -> str | None:
    """Return the error of this request if all of its copies fail."""
    workload = Workload.of("try", [turn] * count, concurrency=concurrency)
    errors = [trace.error for trace in run_load(endpoint, workload, processes=1).traces]
    return errors[0] if all(errors) else None


def _make(name: str, plan: Plan) -> Workload:
    workload = plan.make(name)
    return _as_text(workload) if plan.as_text and not workload.is_chat else workload


def _fit(workload: Workload, plan: Plan, served: Served) -> Workload:
    if served.context_len is None:
        return workload
    vocab_size = None if workload.is_chat or plan.as_text else plan.vocab_size
    return fit(workload, context_len=served.context_len, vocab_size=vocab_size)


def _as_text(workload: Workload) -> Workload:
    """Return the workload with a word for each id, for servers that accept only text."""

    def words(turn: Turn) -> Turn:
        return replace(turn, ids=(), text=" ".join(WORDS[token_id % len(WORDS)] for token_id in turn.ids))

    return workload.change(words)


def _warm_up(endpoint: Endpoint, plan: Plan) -> None:
    """Send a few uncounted requests, to open connections, compile kernels and allocate memory."""
    if plan.warmup:
        turn = Turn(text=" ".join(WORDS[:32]), max_tokens=16)
        error = _try(endpoint, turn, count=plan.warmup, concurrency=max(1, plan.warmup // 2))
        if error is not None:
            raise ConfigError(_no_answer(error))


def _no_answer(error: str) -> str:
    hint = "; --no-ignore-eos leaves the field out" if "ignore_eos" in error else ""
    return f"the server refuses every request: {error}{hint}"


def _bench(
    endpoint: Endpoint, workload: Workload, plan: Plan, tell: Callable[[str], None], notes: list[str]
) -> RowJob:
    """Return the job that measures one workload, adding caveats for readers to the notes."""

    def run(repeat: int) -> dict[str, float]:
        before = scrape.read_counters(_page(endpoint, "/metrics"))
        label = f"{workload.name} {repeat + 1}/{plan.repeats}"
        with progress(label, total=workload.num_requests) as advance:
            varied = vary(workload, repeat, plan.vocab_size or DEFAULT_VOCAB)
            result = run_load(endpoint, varied, processes=plan.processes, on_done=advance)
        figures = summarise(result.traces, seconds=result.seconds, slo=plan.slo)
        figures["client_cpu_share"] = result.cpu_share
        if (share := cached_share(result.traces)) is not None:
            figures["cached_share"] = share
        figures |= scrape.figures(before, scrape.read_counters(_page(endpoint, "/metrics")))
        notes.extend(_notes(workload.name, result))
        tell(
            f"{label}: {figures.get('output_tokens_per_s', 0):.1f} tok/s, "
            f"{figures['num_errors']:.0f} errors, client at {result.cpu_share:.0%} of a core"
        )
        return figures

    settings = {
        "arrival": workload.arrival.describe(),
        "num_requests": workload.num_requests,
        "endpoint": "chat" if workload.is_chat else "completions",
    }
    return RowJob(workload.about, run, settings)


def _notes(name: str, result: LoadResult) -> list[str]:
    """Return caveats about the figures of a run."""
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
        if trace.error:  # errors that differ only in numbers are grouped
            errors.setdefault(re.sub(r"\d+", "N", trace.error), []).append(trace.error)
    notes += [f"{name}: {len(alike)} failed: {alike[0]}" for alike in errors.values()]
    return notes


def _version(endpoint: Endpoint) -> str:
    """Return the version of the server; empty if it has no page for that."""
    try:
        return str(json.loads(_page(endpoint, "/version"))["version"])
    except (ValueError, LookupError, TypeError):
        return ""


def _page(endpoint: Endpoint, path: str) -> str:
    """Return an optional page of a server; empty if it has none."""
    try:
        return asyncio.run(fetch(endpoint, path)).decode(errors="replace")
    except ConfigError:
        return ""
