"""A report as text: Markdown for files and pages, a table and bars for the terminal.

Everything is generated from the report alone, so a page can be regenerated from an old file, and
scripts/docs.py can check that the two agree.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import zip_longest

from infer.bench.compare import Comparison
from infer.bench.metrics import CEILINGS, LATENCIES, MEASURES, PERCENTS, show
from infer.bench.report import Figure, Report, Row

# The figures that each kind of report shows if any row has them: a string of names for each table. The bare
# name of a latency means its three percentiles in one column.
SHOWN: dict[str, tuple[str, ...]] = {
    "serve": (
        "output_tokens_per_s requests_per_s goodput_per_s goodput_share queue_mean_s cache_hit_share "
        "draft_share num_preemptions num_errors client_cpu_share",
        "ttft itl tpot e2e",
    ),
    "offline": (
        "output_tokens_per_s input_tokens_per_s seconds roofline_s roofline_share num_steps draft_share",
    ),
    "latency": ("ttft itl tpot e2e",),
    "backends": ("largest_difference same_tokens output_tokens_per_s ttft_p50_s itl_p50_s seconds",),
    "soak": (
        "num_requests num_errors num_hung_up host_drift_share gpu_drift_share",
        "output_tokens_per_s ttft_p50_s ttft_p99_s itl_p99_s e2e_p99_s seconds",
    ),
    "structured": (
        "output_tokens_per_s token_cost_percent step_ms step_cost_percent chars_per_s chars_ratio",
        "fill_p50_ms fill_p99_ms fill_words_p99_ms consume_mean_us compile_max_ms vocabulary_s",
    ),
    "memory": (
        "weights_bytes kv_bytes activation_bytes graph_bytes process_bytes",
        "mean_running peak_running num_preemptions num_steps speed_up",
    ),
    "matrix": (
        "speed_up output_tokens_per_s ttft_p50_s ttft_p99_s itl_p99_s longest_wait_s num_starved "
        "mean_running kv_use cache_hit_share draft_share num_preemptions",
    ),
}
SHORT = 24  # characters of a reason that fit in a cell; longer reasons are shown below the table
NOT_TOLD = {"queue_mean_s": "not told"}  # figures that only a server's own metrics can give


def columns(report: Report) -> list[list[str]]:
    """Return the figures to show, table by table: the figures of the report's kind, or all that rows have."""
    present = dict.fromkeys(name for row in report.rows for name in row.figures)
    present |= dict.fromkeys(name for name in LATENCIES if f"{name}_p50_s" in present)
    if report.kind == "serve":
        present |= dict.fromkeys(NOT_TOLD)
    hidden = {*LATENCIES, *NOT_TOLD, *CEILINGS}  # ceilings are the same in every row, so a note has them
    plain = " ".join(name for name in present if name not in hidden)
    tables = SHOWN.get(report.kind, (plain,))
    shown = [[name for name in table.split() if name in present] for table in tables]
    return [names for names in shown if names] or [[]]


def title(name: str) -> str:
    """Return the heading of a column."""
    if name in LATENCIES:
        return f"{name.upper()} ms, {' / '.join(f'p{percent}' for percent in PERCENTS)}"
    return MEASURES[name].title if name in MEASURES else name


def cell_of(row: Row, name: str) -> str:
    """Return the text of a row in a column."""
    if name not in LATENCIES:
        return cell(name, row.figures.get(name)) or NOT_TOLD.get(name, "")
    figures = {key: row.figures.get(key) for key in (f"{name}_p{percent}_s" for percent in PERCENTS)}
    return " / ".join(cell(key, figure).replace(" ms", "") for key, figure in figures.items() if figure)


def json_lines(report: Report) -> str:
    """Return one JSON object for each row: its name, its settings, and the medians of its figures."""
    objects = [
        {
            "name": row.name,
            "settings": row.settings,
            **({"skipped": row.skipped} if row.skipped else {}),
            **{name: figure.median for name, figure in row.figures.items()},
        }
        for row in report.rows
    ]
    return "".join(json.dumps(each) + "\n" for each in objects)


def table_of(report: Report, names: Sequence[str]) -> list[list[str]]:
    """Return headings and cells of one table; a skipped row shows why, one without figures is left out."""
    rows = [["", *(map(title, names) if names else [""])]]
    for row in report.rows:
        cells = [cell_of(row, name) for name in names]
        if row.skipped:
            said = row.skipped if len(row.skipped) <= SHORT else row.skipped.partition(":")[0]  # "refused"
            cells = [said if len(said) <= SHORT else "not measured", *[""] * (len(names) - 1)]
        if any(cells):
            rows.append([row.name, *cells])
    return rows


def cell(name: str, figure: Figure | None) -> str:
    """Return the median as text, with the spread of the repeats if there is any."""
    if figure is None:
        return ""
    if name == "num_errors":
        return show(name, figure.high)  # a median would hide errors of a single repeat
    text = show(name, figure.median)
    if len(figure.values) > 1 and figure.median and MEASURES.get(name) and MEASURES[name].better:
        half = (figure.high - figure.low) / 2 / abs(figure.median)
        if half >= 0.005:
            text += f" ±{half:.0%}"
    return text


def markdown_table(report: Report) -> str:
    """Return the tables of a report in Markdown."""
    made = []
    for names in columns(report):
        (_, *titles), *body = table_of(report, names)
        lines = ["| " + " | ".join(["", *titles]) + " |", "|---" + "|---:" * len(titles) + "|"]
        lines += ["| " + " | ".join([f"`{name}`", *cells]) + " |" for name, *cells in body]
        made.append("\n".join(lines) + "\n")
    return "\n".join(made)


def explanations(report: Report) -> str:
    """Return a list in Markdown: a sentence for each row that has one, then the notes of the report."""
    lines = [f"- `{name}`: {sentence}" for name, sentence in sentences(report)]
    lines += [f"- {note}" for note in report.notes]
    return "".join(f"{line}\n" for line in lines)


def sentences(report: Report) -> list[tuple[str, str]]:
    """Return name and sentence of rows with a note, or with a reason that is too long for the table."""
    said = [(row.name, row.note or (row.skipped if len(row.skipped) > SHORT else "")) for row in report.rows]
    return [(name, sentence) for name, sentence in said if sentence]


def provenance(report: Report) -> str:
    """Return a paragraph on where, with what and how the figures were made."""
    machine = report.machine
    where = f"{machine.get('cpu', 'an unknown CPU')}, {machine.get('num_cpus', '?')} cores"
    if "gpu" in machine and report.model.get("device") != "cpu":
        where = f"{machine['gpu']}, {where}"
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    facts = [str(report.model[name]) for name in ("name", "dtype", "device") if report.model.get(name)]
    if weights := report.model.get("weights"):
        facts.insert(1, f"weights {weights}")
    if revision := report.model.get("revision"):
        facts.insert(1, f"revision {revision.removeprefix('sha256:')[:12]}")
    model = ", ".join(facts)
    return (
        f"{model or 'no model'} on {where}; {versions}; commit {report.commit or 'unknown'}; "
        f"seed {report.seed}, {report.warmup} warm-up, medians of {report.repeats} "
        f"{'repeat' if report.repeats == 1 else 'repeats'}; {report.created[:10]}. `{report.command}`"
    )


def to_markdown(report: Report) -> str:
    """Return the whole report as a page in Markdown."""
    heading = f"# {report.kind}{' (interrupted)' if report.is_partial else ''}\n"
    parts = [heading, provenance(report) + "\n", markdown_table(report)]
    if report.rows and any(row.about for row in report.rows):
        parts.append("".join(f"- `{row.name}`: {row.about}\n" for row in report.rows if row.about))
    if said := explanations(report):
        parts.append(said)
    if report.config:
        settings = "\n".join(f"{name}: {value}" for name, value in report.config.items() if value is not None)
        parts.append(f"```yaml\n{settings}\n```\n")
    return "\n".join(parts)


def terminal(report: Report) -> str:
    """Return the tables for a terminal, transposed if that is narrower."""
    lines: list[str] = []
    for names in columns(report):
        table = table_of(report, names)
        upright, lying = align(table), align(transpose(table))
        lines += [*min(upright, lying, key=lambda made: max(map(len, made))), ""]
    notes = [f"{name}: {sentence}" for name, sentence in sentences(report)] + list(report.notes)
    return "\n".join([*lines, *notes]).rstrip("\n") + "\n"


def transpose(rows: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return a table whose rows are the columns of this one."""
    return list(zip_longest(*rows, fillvalue=""))


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with the first column aligned left and the others aligned right."""
    first, *others = transpose(rows)
    columns = [_padded(first, str.ljust), *(_padded(column, str.rjust) for column in others)]
    return ["  ".join(cells).rstrip() for cells in transpose(columns)]


def cut_columns(
    rows: Sequence[Sequence[str]], *, num_names: int, width: int | None
) -> list[list[tuple[str, ...]]]:
    """Return a table as parts that fit a width, if there is one; each begins with the columns of names."""
    columns = transpose(rows)
    parts = [columns[:num_names]]
    for column in columns[num_names:]:
        line_len = sum(max(map(len, each)) + 2 for each in (*parts[-1], column)) - 2
        if width is not None and line_len > width and len(parts[-1]) > num_names:
            parts.append(columns[:num_names])
        parts[-1].append(column)
    return [transpose(part) for part in parts]


def _padded(column: Sequence[str], pad: Callable[[str, int], str]) -> list[str]:
    width = max(map(len, column))
    return [pad(text, width) for text in column]


def comparison_table(found: Comparison, *, shows_all: bool = False) -> str:
    """Return a line per figure that changed, or per figure, with its band and its verdict."""
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
