"""The worth of each idea on this machine: switch on one after the other, and look where it should show.

    static -> +continuous -> +paged -> +chunked -> +prefix -> +graphs -> +overlap -> +quant -> +program
           -> +speculation

Each ablation is run on the workload that shows it best and on one that it could hurt, before and after, with
everything that was switched on before it. The memory is the same for all: as many tokens of KV cache as
`SEQUENCES` of the longest length take. A sentence says what happened, also when nothing did.

    speed-up = after / before of the ablation's own figure, turned so that more than one is better; with
               several repeats the median of their ratios, as the two runs of a repeat have the same tokens
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from benchmarks.ablations import ABLATIONS, BASE, CPU_MODEL, GPU, GPU_SHAPE, Ablation, Look
from infer.bench.compare import SINGLE_BAND, spread
from infer.bench.metrics import MEASURES, show
from infer.bench.offline import WARM_UP, run_once, warm_up
from infer.bench.repeats import EngineBench
from infer.bench.report import Report, Row, make_row, skip_row
from infer.bench.target import BenchTarget
from infer.bench.workloads import fit, make_workload
from infer.cache.memory import kv_bytes_per_token
from infer.errors import ConfigError, closest
from infer.kernels.runtime.dispatch import is_gpu

SEQUENCES = 6  # sequences that a contiguous cache holds: few, so that memory is a limit
MAX_BATCH = 48
SEVERAL = "speed-ups are medians of the repeats' ratios, and not the ratio of the two medians beside them"
NOISE = 0.05  # a smaller change counts as none, and so does one within the spread of the repeats


class _Runs:
    """Runs a configuration on a workload once, however many rows ask for it."""

    def __init__(self, bench: EngineBench) -> None:
        target = bench.target
        self._bench = bench
        self._found: dict[tuple[str, str], list[dict[str, float]]] = {}
        self._forms: dict[str, BenchTarget] = {}
        config = target.loaded.config
        per_token = kv_bytes_per_token(
            config.num_layers, config.num_kv_heads, config.head_dim, target.loaded.dtype.itemsize
        )
        self.memory = f"{SEQUENCES * target.loaded.max_seq_len * per_token}B"

    def run(self, stage: _Stage, name: str) -> list[dict[str, float]]:
        """Return the figures of every repeat."""
        key, knobs = (stage.name, name), stage.knobs
        if key not in self._found:
            target = self._in_form(knobs)
            size = {"kv_cache_memory": self.memory, "num_blocks": None, "max_batch_size": MAX_BATCH}
            engine = warm_up(target.engine(**(dict(knobs) | size)), target)
            workload = fit(
                make_workload(name, seed=self._bench.seed, vocab_size=min(target.vocab_size, 10_000)),
                context_len=engine.context_len,
                vocab_size=target.vocab_size,
            )
            self._found[key] = [
                run_once(engine, workload, repeat, target.vocab_size).figures()
                for repeat in range(self._bench.repeats)
            ]
            speed = self._found[key][-1].get("output_tokens_per_s", 0.0)
            self._bench.tell(f"{stage.name} on {name}: {speed:.1f} tok/s")
        return self._found[key]

    def _in_form(self, knobs: Mapping[str, Any]) -> BenchTarget:
        form = knobs.get("quantization", self._bench.target.weights)
        if form not in self._forms:
            self._forms[form] = self._bench.target.in_form(form)
        return self._forms[form]

    def row(self, ablation: Ablation, look: Look, *stages: _Stage) -> Row:
        """Return the row of one ablation on one workload, before and after."""
        return _row(ablation, look, *(self.run(stage, look.workload) for stage in stages))


class _Stage(NamedTuple):
    """A name, and the knobs that are set by then."""

    name: str
    knobs: Mapping[str, Any]


def bench_matrix(bench: EngineBench, *, only: Sequence[str] = ()) -> Report:
    """Measure every ablation that this machine can run, in order, or those that `only` names."""
    names = [ablation.name for ablation in ABLATIONS]
    for name in only:
        if name not in names:
            raise ConfigError(f"unknown ablation {name!r}{closest(name, names, listed='known')}")
    runs, target = _Runs(bench), bench.target
    stage = _Stage("static", BASE)
    jobs: dict[str, Callable[[], Row]] = {}
    for ablation in ABLATIONS:
        reason = ablation.needs if ablation.needs not in ("", *_has(target)) else ""
        before = stage
        if ablation.without:
            before = _Stage(f"{stage.name} without {ablation.name}", {**stage.knobs, **ablation.without})
        after = _Stage(f"+{ablation.name}", {**stage.knobs, **ablation.knobs})
        for look in (ablation.best, ablation.risk) if not only or ablation.name in only else ():
            measure = partial(runs.row, ablation, look, before, after)
            skip = partial(_skip, ablation, look, reason)
            jobs[_name(ablation, look)] = skip if reason else measure
        stage = stage if reason else after
    size = {"kv_cache_memory": runs.memory, "max_batch_size": MAX_BATCH, "base": dict(BASE)}
    return bench.report(
        "matrix",
        jobs,
        warmup=WARM_UP,
        config=target.knobs() | size,
        notes=lambda rows: [SEVERAL] if bench.repeats > 1 else [],
    )


def _has(target: BenchTarget) -> list[str]:
    """Return the needs of ablations that are met here."""
    has_shape = not target.is_random or target.model_config is not None
    if is_gpu(target.device):
        return [GPU, *([GPU_SHAPE] if has_shape else [])]
    return [] if target.is_random else [CPU_MODEL]


def _name(ablation: Ablation, look: Look) -> str:
    return f"+{ablation.name} {look.workload}"


def _settings(ablation: Ablation, look: Look) -> dict[str, Any]:
    shows = "best" if look is ablation.best else "risk"
    return {"knobs": dict(ablation.knobs), "figure": look.figure, "shows": shows}


def _skip(ablation: Ablation, look: Look, reason: str) -> Row:
    note = f"not measured, {reason}: {ablation.why if look is ablation.best else ablation.price}."
    return skip_row(_name(ablation, look), "", reason, _settings(ablation, look), note=note)


def _row(
    ablation: Ablation, look: Look, before: list[dict[str, float]], after: list[dict[str, float]]
) -> Row:
    figure, measure = look.figure, MEASURES[look.figure]
    repeats = []
    for old, new in zip(before, after, strict=True):
        ratio = new[figure] / old[figure] if measure.better == "higher" else old[figure] / new[figure]
        repeats.append(new | {"speed_up": ratio})
    old_value, new_value = (statistics.median(run[figure] for run in side) for side in (before, after))
    made = make_row(_name(ablation, look), "", repeats, settings=_settings(ablation, look))
    gain = made.figures["speed_up"]
    band = max(NOISE, spread(gain), SINGLE_BAND if len(repeats) == 1 else 0.0)
    sentence = _sentence(ablation, gain.median, band, is_best=look is ablation.best)
    note = f"{measure.title} {show(figure, old_value)} -> {show(figure, new_value)}: {sentence}"
    if ablation.above:
        note += f" {ablation.above}"
    return msgspec.structs.replace(made, note=note)


def _sentence(ablation: Ablation, gain: float, band: float, *, is_best: bool) -> str:
    """Return the meaning of the ratio, in words that hold whichever way it went."""
    is_none = 1 / (1 + band) <= gain <= 1 + band
    if ablation.is_idle_at_risk and not is_best and not is_none:
        verdict = f"{gain:.2f} times better" if gain > 1 else f"{1 / gain:.2f} times worse"
        noise = "which is the machine's noise and not the switch's doing, for it changes nothing here"
        return f"{verdict}, {noise}: {ablation.price}."
    if gain > 1 + band:
        return f"{gain:.2f} times better{f', because {ablation.why}' if is_best else ' here too'}."
    if gain < 1 / (1 + band):
        reason = f": {ablation.unless}" if is_best else f", and it has nothing to give here: {ablation.price}"
        return f"{1 / gain:.2f} times worse{reason}."
    if is_best:
        return f"no difference beyond {band:.0%}: {ablation.unless}."
    return f"no difference beyond {band:.0%}, as it should be: {ablation.price}."


def speed_ups(report: Report) -> list[tuple[str, float]]:
    """Return name and ratio of every row that has one, for a chart."""
    return [(row.name, row.figures["speed_up"].median) for row in report.rows if "speed_up" in row.figures]
