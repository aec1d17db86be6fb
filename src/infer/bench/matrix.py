"""What each idea is worth on this machine: switch one on after the other, and look where it should show.

    static -> +continuous -> +paged -> +chunked -> +prefix -> +graphs -> +overlap

Each toggle is run on the workload that shows it best and on one that it could hurt, before and after, with
everything that was switched on before it. The memory is the same for all: as many tokens of KV cache as
`SEQUENCES` of the longest length take. A sentence says what happened, also when nothing did.

    speed-up = after / before of the toggle's own figure, turned so that more than one is better
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infer.bench.adapt import fit
from infer.bench.metrics import MEASURES, show
from infer.bench.offline import WARM_UP, run_repeats, warm_up
from infer.bench.report import Report, Row, make_report, make_row, skip_row
from infer.bench.subject import Subject
from infer.bench.workloads import make_workload
from infer.cache.memory import kv_bytes_per_token
from infer.config import knob_table
from infer.errors import ConfigError, closest

SEQUENCES = 6  # that a contiguous cache holds: few, so that memory is a limit
MAX_BATCH = 48
NOISE = 0.05  # a smaller change is called none


@dataclass(frozen=True, slots=True, kw_only=True)
class Toggle:
    """One idea, its switch, and where it shows."""

    name: str
    knobs: Mapping[str, Any]
    helps_on: str  # a workload, and the figure to look at
    helps_figure: str
    hurts_on: str
    hurts_figure: str
    why: str  # what it does, in a sentence
    why_not: str  # why it may not show
    needs_gpu: bool = False


TOGGLES = (
    Toggle(
        name="continuous",
        knobs={"batching_mode": "continuous"},
        helps_on="continuous_batching",
        helps_figure="ttft_p50_s",
        hurts_on="baseline",
        hurts_figure="output_tokens_per_s",
        why="who arrives joins at the next step, and does not wait until a whole batch is done",
        why_not="with one request at a time there is no batch to join",
    ),
    Toggle(
        name="paged",
        knobs={"kv_cache_backend": "paged"},
        helps_on="paged_attention",
        helps_figure="output_tokens_per_s",
        hurts_on="w1_single",
        hurts_figure="output_tokens_per_s",
        why="a sequence takes the blocks it fills and not the longest length, so more run in the same memory",
        why_not="one sequence has memory enough either way, and its blocks must be found through a table",
    ),
    Toggle(
        name="chunked",
        knobs={"use_chunked_prefill": True, "prefill_chunk_size": 256, "max_num_batched_tokens": 256},
        helps_on="chunked_prefill",
        helps_figure="itl_p99_s",
        hurts_on="prefill_8x4096",
        hurts_figure="ttft_p50_s",
        # Pieces alone do not shorten a step: under the default budget several prompts' pieces share one.
        why="prompts come in pieces and a step holds 256 tokens in all, so whoever decodes waits for less",
        why_not="nobody decodes meanwhile, and every piece pays for a step of its own",
    ),
    Toggle(
        name="prefix",
        knobs={"use_prefix_caching": True},
        helps_on="prefix_caching",
        helps_figure="ttft_p50_s",
        hurts_on="w2_mixed",
        hurts_figure="output_tokens_per_s",
        why="a start that somebody has computed is taken from the cache",
        why_not="nothing is shared, so looking it up and keeping it is all there is",
    ),
    Toggle(
        name="graphs",
        knobs={"use_cuda_graphs": True},
        helps_on="b1_256_256",
        helps_figure="output_tokens_per_s",
        hurts_on="b128_256_256",
        hurts_figure="output_tokens_per_s",
        why="a decode step is launched as one graph, so Python no longer sets the pace",
        why_not="a large batch keeps the GPU busy while Python launches, and padding costs a little",
        needs_gpu=True,
    ),
    Toggle(
        name="overlap",
        knobs={"use_overlap": True},
        helps_on="b32_256_256",
        helps_figure="output_tokens_per_s",
        hurts_on="b1_256_256",
        hurts_figure="output_tokens_per_s",
        why="the next step is planned while the GPU computes this one",
        why_not="there is little to plan for one sequence",
        needs_gpu=True,
    ),
)

BASE: Mapping[str, Any] = {
    "batching_mode": "static",
    "kv_cache_backend": "contiguous",
    "use_chunked_prefill": False,
    "use_prefix_caching": False,
    "use_cuda_graphs": False,
    "use_overlap": False,
}

Tell = Callable[[str], None]


class _Bench:
    """Runs a configuration on a workload, once, however many rows ask for it."""

    def __init__(self, subject: Subject, *, seed: int, repeats: int, tell: Tell) -> None:
        self._subject = subject
        self._seed, self._repeats, self._tell = seed, repeats, tell
        self._found: dict[tuple[str, str], list[dict[str, float]]] = {}
        config = subject.loaded.config
        per_token = kv_bytes_per_token(
            config.num_layers, config.num_kv_heads, config.head_dim, subject.loaded.dtype.itemsize
        )
        self.memory = f"{SEQUENCES * subject.loaded.max_seq_len * per_token}B"

    def run(self, stage: str, knobs: Mapping[str, Any], name: str) -> list[dict[str, float]]:
        """The figures of every repeat."""
        key = (stage, name)
        if key not in self._found:
            subject = self._subject
            size = {"kv_cache_memory": self.memory, "num_blocks": None, "max_batch_size": MAX_BATCH}
            engine = subject.engine(**(dict(knobs) | size))
            warm_up(engine, subject)
            workload = fit(
                make_workload(name, seed=self._seed, vocab_size=min(subject.vocab_size, 10_000)),
                context_len=engine.context_len,
                vocab_size=subject.vocab_size,
            )
            results = run_repeats(engine, workload, self._repeats, subject.vocab_size)
            self._found[key] = [result.figures() for result in results]
            speed = self._found[key][-1].get("output_tokens_per_s", 0.0)
            self._tell(f"{stage} on {name}: {speed:.1f} tok/s")
        return self._found[key]


def bench_matrix(
    subject: Subject, *, seed: int, repeats: int, tell: Tell, only: Sequence[str] = ()
) -> Report:
    """Every toggle that this machine has, in order; `only` names those to run."""
    names = [toggle.name for toggle in TOGGLES]
    for name in only:
        if name not in names:
            raise ConfigError(f"unknown toggle {name!r}{closest(name, names)}; known: {', '.join(names)}")
    bench = _Bench(subject, seed=seed, repeats=repeats, tell=tell)
    known = knob_table()
    knobs = {name: value for name, value in BASE.items() if name in known}
    stage = "static"
    rows: list[Row] = []
    for toggle in TOGGLES:
        reason = _cannot(toggle, subject)
        if reason or (only and toggle.name not in only):
            rows += [
                skip_row(f"+{toggle.name} {workload}", toggle.why, reason or "not asked for")
                for workload in (toggle.helps_on, toggle.hurts_on)
            ]
            if not reason:
                knobs |= toggle.knobs
                stage = f"+{toggle.name}"
            continue
        after = knobs | dict(toggle.knobs)
        for workload, figure, is_best in (
            (toggle.helps_on, toggle.helps_figure, True),
            (toggle.hurts_on, toggle.hurts_figure, False),
        ):
            before_runs = bench.run(stage, knobs, workload)
            after_runs = bench.run(f"+{toggle.name}", after, workload)
            rows.append(_row(toggle, workload, figure, before_runs, after_runs, is_best=is_best))
        knobs, stage = after, f"+{toggle.name}"
    return make_report(
        "matrix",
        rows,
        model=subject.facts(),
        config=subject.knobs()
        | {"kv_cache_memory": bench.memory, "max_batch_size": MAX_BATCH}
        | {"base": {name: value for name, value in BASE.items() if name in known}},
        seed=seed,
        repeats=repeats,
        warmup=WARM_UP,
    )


def _cannot(toggle: Toggle, subject: Subject) -> str:
    if toggle.needs_gpu and subject.device.type != "cuda":
        return "needs a GPU"
    missing = [name for name in toggle.knobs if name not in knob_table()]
    return f"no knob {', '.join(missing)} in this version" if missing else ""


def _row(
    toggle: Toggle,
    workload: str,
    figure: str,
    before: list[dict[str, float]],
    after: list[dict[str, float]],
    *,
    is_best: bool,
) -> Row:
    higher = MEASURES[figure].better == "higher"
    runs = []
    for old, new in zip(before, after, strict=True):
        ratio = new[figure] / old[figure] if higher else old[figure] / new[figure]
        runs.append(new | {"speed_up": ratio})
    made = make_row(f"+{toggle.name} {workload}", toggle.why, runs)
    gain = made.figures["speed_up"].median
    middle = sorted(run[figure] for run in before)[len(before) // 2]
    seen = f"{MEASURES[figure].title} {show(figure, middle)} -> {show(figure, made.figures[figure].median)}"
    note = f"{seen}: {_sentence(toggle, gain, is_best=is_best)}"
    settings = {"knobs": dict(toggle.knobs), "figure": figure, "shows": "best" if is_best else "risk"}
    return make_row(made.name, toggle.why, runs, settings=settings, note=note)


def _sentence(toggle: Toggle, gain: float, *, is_best: bool) -> str:
    """What the ratio means, in words that hold whichever way it went."""
    if gain > 1 + NOISE:
        return (
            f"{gain:.2f} times better, because {toggle.why}." if is_best else f"{gain:.2f} times better too."
        )
    if gain < 1 - NOISE:
        reason = "the machine is not limited by what it removes" if is_best else toggle.why_not
        return f"{1 / gain:.2f} times worse: {reason}."
    if is_best:
        return "no difference here: the load or the model is too small for it to show."
    return f"no difference, as it should be: {toggle.why_not}."


def speed_ups(report: Report) -> list[tuple[str, float]]:
    """What a chart of the matrix shows."""
    return [(row.name, row.figures["speed_up"].median) for row in report.rows if "speed_up" in row.figures]
