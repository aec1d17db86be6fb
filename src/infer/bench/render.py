"""A report for people: Markdown for files and pages, a table and bars for the terminal.

Everything is made from the report alone, so a page can be written again from a file of long ago, and
scripts/docs.py can check that it still says what the file says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from infer.bench.compare import Comparison
from infer.bench.metrics import MEASURES, show
from infer.bench.report import Figure, Report, Row

# Which figures a table shows, in this order, as far as any row has them.
SHOWN = {
    "serve": (
        "output_tokens_per_s",
        "requests_per_s",
        "goodput_share",
        "ttft_p50_s",
        "ttft_p99_s",
        "itl_p50_s",
        "itl_p99_s",
        "tpot_p50_s",
        "e2e_p50_s",
        "e2e_p95_s",
        "queue_mean_s",
        "cache_hit_share",
        "num_errors",
        "client_cpu_share",
    ),
    "offline": (
        "output_tokens_per_s",
        "input_tokens_per_s",
        "seconds",
        "floor_s",
        "floor_share",
        "num_steps",
    ),
    "latency": (
        "ttft_p50_s",
        "ttft_p99_s",
        "tpot_p50_s",
        "tpot_p99_s",
        "itl_p99_s",
        "e2e_p50_s",
        "e2e_p99_s",
    ),
    "matrix": (
        "output_tokens_per_s",
        "ttft_p50_s",
        "ttft_p99_s",
        "itl_p99_s",
        "longest_gap_s",
        "mean_running",
        "kv_use",
        "cache_hit_share",
        "num_preemptions",
        "speed_up",
    ),
}


def columns(report: Report) -> list[str]:
    """The figures worth showing: the kind's own choice, or all that rows have."""
    present = dict.fromkeys(name for row in report.rows for name in row.figures)
    wanted = SHOWN.get(report.kind, tuple(present))
    return [name for name in wanted if name in present]


def cell(name: str, figure: Figure | None) -> str:
    """The median, and the spread of the repeats where there is one."""
    if figure is None:
        return ""
    text = show(name, figure.median)
    if len(figure.values) > 1 and figure.median and MEASURES.get(name) and MEASURES[name].better:
        half = (figure.high - figure.low) / 2 / abs(figure.median)
        if half >= 0.005:
            text += f" ±{half:.0%}"
    return text


def markdown_table(report: Report) -> str:
    """One row per row; the sentence that explains it, if there is one, below the table."""
    names = columns(report)
    titles = [MEASURES[name].title if name in MEASURES else name for name in names]
    lines = ["| " + " | ".join(["", *titles]) + " |", "|---" + "|---:" * len(names) + "|"]
    for row in report.rows:
        cells = [cell(name, row.figures.get(name)) for name in names]
        if row.skipped:
            cells = [row.skipped, *[""] * (len(names) - 1)]
        lines.append("| " + " | ".join([f"`{row.name}`", *cells]) + " |")
    return "\n".join(lines) + "\n"


def provenance(report: Report) -> str:
    """One paragraph: where, with what and how the figures were made."""
    machine = report.machine
    where = f"{machine.get('cpu', 'an unknown CPU')}, {machine.get('num_cpus', '?')} cores"
    if "gpu" in machine:
        where = f"{machine['gpu']}, {where}"
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    model = ", ".join(
        str(report.model[name]) for name in ("name", "dtype", "device") if report.model.get(name)
    )
    return (
        f"{model or 'no model'} on {where}; {versions}; commit {report.commit or 'unknown'}; "
        f"seed {report.seed}, {report.warmup} warm-up, medians of {report.repeats} "
        f"{'repeat' if report.repeats == 1 else 'repeats'}; {report.created[:10]}. `{report.command}`"
    )


def to_markdown(report: Report) -> str:
    """The whole report as a page."""
    parts = [f"# {report.kind}\n", provenance(report) + "\n", markdown_table(report)]
    explained = [f"- `{row.name}`: {_explain(row)}" for row in report.rows if _explain(row)]
    if explained:
        parts.append("\n".join(explained) + "\n")
    if report.notes:
        parts.append("\n".join(f"- {note}" for note in report.notes) + "\n")
    if report.config:
        settings = "\n".join(f"{name}: {value}" for name, value in report.config.items() if value is not None)
        parts.append(f"```yaml\n{settings}\n```\n")
    return "\n".join(parts)


def _explain(row: Row) -> str:
    return " ".join(filter(None, (row.about, row.note)))


def terminal(report: Report) -> str:
    """The table for a terminal, rows and columns exchanged where that is narrower."""
    names = columns(report)
    titles = [MEASURES[name].title if name in MEASURES else name for name in names]
    body = [[row.name, *(cell(name, row.figures.get(name)) for name in names)] for row in report.rows]
    for row, cells in zip(report.rows, body, strict=True):
        if row.skipped:
            cells[1:] = [row.skipped, *[""] * (len(names) - 1)] if names else [row.skipped]
    upright, lying = align([["", *titles], *body]), align(transpose([["", *titles], *body]))
    lines = min(upright, lying, key=lambda made: max(map(len, made)))
    notes = [f"{row.name}: {row.note}" for row in report.rows if row.note] + list(report.notes)
    return "\n".join([*lines, *([""] if notes else []), *notes]) + "\n"


def transpose(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Rows become columns."""
    width = max(map(len, rows))
    return [[row[at] if at < len(row) else "" for row in rows] for at in range(width)]


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with the first column to the left and the others to the right."""
    widths = [max(len(row[at]) if at < len(row) else 0 for row in rows) for at in range(max(map(len, rows)))]
    made = []
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            *(text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=False)),
        ]
        made.append("  ".join(cells).rstrip())
    return made


def comparison_table(found: Comparison, *, shows_all: bool = False) -> str:
    """One line per figure that changed, or per figure, with its band and its verdict."""
    rows = [["", "", "before", "after", "change", "band", "verdict"]]
    for verdict in found.verdicts:
        if shows_all or verdict.verdict != "same":
            rows.append(
                [
                    verdict.row,
                    MEASURES[verdict.figure].title,
                    show(verdict.figure, verdict.before),
                    show(verdict.figure, verdict.after),
                    f"{verdict.change:+.1%}",
                    f"±{verdict.band:.1%}",
                    verdict.verdict,
                ]
            )
    lines = [f"differs in {difference}" for difference in found.differences]
    lines += [f"only in the first: {name}" for name in found.only_before]
    lines += [f"only in the second: {name}" for name in found.only_after]
    if len(rows) > 1:
        lines += align(rows)
    counts = [
        f"{sum(v.verdict == kind for v in found.verdicts)} {kind}" for kind in ("better", "worse", "same")
    ]
    return "\n".join([*lines, ", ".join(counts)]) + "\n"


def bars(pairs: Sequence[tuple[str, float]], *, unit: str = "", width: int = 40) -> str:
    """A bar chart made of characters; a logarithmic one where the values are far apart."""
    if not pairs:
        return ""
    values = [value for _, value in pairs]
    is_log = max(values) > 20 * min(values)
    lengths = [math.log1p(value) if is_log else value for value in values]
    longest, most = max(len(label) for label, _ in pairs), max(lengths) or 1.0
    lines = [
        f"{label.ljust(longest)}  {'█' * max(1, round(width * length / most))} {value:.3g}{unit}\n"
        for (label, value), length in zip(pairs, lengths, strict=True)
    ]
    return "".join(lines) + ("(logarithmic)\n" if is_log else "")


def write_png(title: str, pairs: Sequence[tuple[str, float]], path: Path, *, unit: str = "") -> bool:
    """The same as a picture; False where matplotlib (extra `bench`) is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(pairs) + 1))
    axes.barh([label for label, _ in pairs], [value for _, value in pairs])
    axes.invert_yaxis()
    axes.set_title(title)
    axes.set_xlabel(unit)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return True
