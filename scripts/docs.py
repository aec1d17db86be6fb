"""Write the parts of the docs that the code knows better: the knobs, the help texts, the benchmarks' tables.

    python scripts/docs.py            write docs/knobs.md, docs/cli.md, the tables of docs/benchmarks.md,
                                      docs/features/cpu.md, gpu.md and quantization.md and of README.md,
                                      and the size of the core there
    python scripts/docs.py --check    write nothing; fail if any is not what would be written

The first two are whole outputs of this script, so there is nothing in them to edit by hand. In other pages
it is what stands between a marker, such as `<!-- report FILE: COMMAND -->`, and `<!-- end -->`; in README.md
what stands between `<!-- size -->` and `<!-- /size -->` (scripts/size.py counts it).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infer.bench.metrics import MEASURES
from infer.bench.render import explanations, markdown_table, provenance
from infer.bench.report import read_report
from infer.cli.flags import LIBRARY_ONLY, SAMPLING_HELP
from infer.cli.main import build_parser
from infer.config.knobs import KnobRow
from infer.config.server import ServerConfig
from infer.config.settings import engine_sections, knob_table

DOCS = Path(__file__).resolve().parents[1] / "docs"
REPORTS = DOCS.parent / "benchmarks" / "reports"
sys.path.insert(0, str(DOCS.parent))  # run as a script, it finds its own folder alone

from benchmarks.ablations import ABLATIONS  # noqa: E402
from scripts import h200_tables, size  # noqa: E402

KNOBS_INTRO = """\
# Knobs

*Written by `scripts/docs.py` from `src/infer/config/settings.py`; do not edit.*

A knob has one name everywhere: `LLM("dir", max_seq_len=512)`, `--max-seq-len 512`, or
`max_seq_len: 512` in a YAML file given to `--config`. Flags win over the file, the file over the
defaults. No environment variable changes behaviour.
"""

CLI_INTRO = """\
# The command line

*Written by `scripts/docs.py` from the parsers of `src/infer/cli/`; do not edit.*

Standard output holds the answer and nothing else. Progress, log lines and notices go to standard error.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | `infer replay` found a difference; `infer bench` found a change for the worse or failed requests; \
a prompt of `infer generate --prompts-file`, or of `infer chat` from a pipe, has no answer; \
`infer serve` could not start an engine, or keep one alive, though nothing was wrong with its settings |
| 2 | an impossible request; one line says what to do |
| 130 | Ctrl-C (`infer serve` ends with 0 when it has drained) |
| 141 | the reader of a pipe has gone |
"""


def knobs_page() -> str:
    """Return a page with a table per section of EngineConfig, and one for the server."""
    parts = [KNOBS_INTRO]
    rows = knob_table(with_server=True).values()
    for section, section_type in (engine_sections() | {"server": ServerConfig}).items():
        parts.append(f"## {section}\n\n{(section_type.__doc__ or '').strip()}\n")
        table = ["| knob | type | default | what it does |", "|---|---|---|---|"]
        table += [_knob_row(row) for row in rows if row.section == section]
        parts.append("\n".join(table) + "\n")
    names = ", ".join(f"`{name}`" for name in SAMPLING_HELP)
    others = ", ".join(f"`{name}`" for name in sorted(LIBRARY_ONLY))
    parts.append(
        f"Each request has its own `SamplingParams` instead of knobs: {names}; from the library also "
        f"{others}. See [sampling](features/sampling.md) and [the command line](cli.md).\n"
    )
    return "\n".join(parts)


def _knob_row(row: KnobRow) -> str:
    kind = " \\| ".join(f"`{choice}`" for choice in row.choices) if row.choices else row.kind.__name__
    default = "" if row.default in (None, ()) else f"`{row.default}`"
    others = {"also": row.aliases, "off:": row.opposites, "was": row.formerly}
    aliases = "".join(f"; {word} `{name}`" for word, names in others.items() for name in names)
    return f"| `{row.name}` | {kind} | {default} | {row.help.replace('|', chr(92) + '|')}{aliases} |"


def cli_page() -> str:
    """Return a page with the help of `infer` and of all subcommands."""
    texts = _helps("infer", build_parser())
    sections = [f"## {name}\n\n```text\n{text.rstrip()}\n```\n" for name, text in texts.items()]
    return "\n".join([CLI_INTRO, *sections])


def _helps(name: str, parser: argparse.ArgumentParser) -> dict[str, str]:
    texts = {name: parser.format_help()}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command, inner in action.choices.items():
                texts |= _helps(f"{name} {command}", inner)
    return texts


REPORT = re.compile(r"(<!-- report (\S+): (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def benchmarks_page(page: str) -> str:
    """Return the page with the tables of its reports; for one that is missing, how to make it."""

    def table(match: re.Match[str]) -> str:
        path = REPORTS / match[2]
        if not path.exists():
            return f"{match[1]}*Not measured yet.* `{match[3]}`\n{match[4]}"
        report = read_report(path)
        if report.is_partial:
            raise SystemExit(f"{path.name} was interrupted: a page shows whole reports only; make it again")
        parts = [markdown_table(report), *filter(None, [explanations(report)]), provenance(report)]
        return f"{match[1]}\n" + "\n".join(parts) + f"\n{match[4]}"

    return REPORT.sub(table, page)


def ablation_table(page: str) -> str:
    """Return the page with a row for each ablation of the matrix: its switch and both of its sentences."""
    lines = ["| ablation | switches on | shows best on | could hurt |", "|---|---|---|---|"]
    for ablation in ABLATIONS:
        knobs = ", ".join(f"`{name}={value}`" for name, value in ablation.knobs.items())
        if ablation.above:
            knobs += f". {ablation.above}"
        looks = [
            f"`{look.workload}`, {MEASURES[look.figure].title}" for look in (ablation.best, ablation.risk)
        ]
        cells = [f"`+{ablation.name}`", knobs, f"{looks[0]}: {ablation.why}", f"{looks[1]}: {ablation.price}"]
        lines.append(f"| {' | '.join(cells)} |")
    return fill(page, "ablations", lines)


NOT_RECORDED = "not recorded"


def ages_table(page: str) -> str:
    """Return the page with a row for each report: the commit, the day and the versions that it is of."""
    lines = ["| report | commit | day | torch, Triton |", "|---|---|---|---|"]
    for path in sorted(REPORTS.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        about = (found, *(part for part in found.values() if isinstance(part, dict)))
        commit, day, torch, triton = (
            next((str(part[name]) for part in about for name in names if part.get(name)), "")
            for names in (("commit", "new"), ("created", "date"), ("torch",), ("triton",))
        )
        used = ", ".join(filter(None, (torch, triton)))
        if found.get("engine") == "vllm":
            used = f"vLLM {found['version']}"
        if path.name != "counts.json":  # of no machine: what the scheduler decides
            cells = (cell or NOT_RECORDED for cell in (commit[:12], day[:10], used))
            lines.append(f"| `{path.name}` | {' | '.join(cells)} |")
    return fill(page, "ages", [*lines, "", h200_tables.versions()])


def fill(text: str, marker: str, lines: Sequence[str]) -> str:
    """Return the text with these lines between `<!-- marker -->` and `<!-- end -->`."""
    pattern = re.compile(rf"(<!-- {marker} -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda match: match[1] + "".join(f"{line}\n" for line in lines) + match[2], text)


def gpu_page(text: str) -> str:
    """Return the page with its tables made anew from benchmarks/reports/gpu-*.json."""
    speeds = ["| shape | workload | tokens per second | of the roofline | peers |", "|---|---|---|---|---|"]
    steps = ["| shape | 1 row | 64 rows | 256 rows |", "|---|---:|---:|---:|"]
    loads = ["| shape | gaps | cached |", "|---|---:|---:|"]
    origins = [""]
    for path in sorted(REPORTS.glob("gpu-*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        if (form := found.get("quantization", "none")) != "none":
            found["model"] += f" in {form}"
        origins.append(gpu_origin(found))
        for name, row in found.items():
            share = row.get("roofline_share", row.get("floor_share")) if isinstance(row, dict) else None
            if share is None:
                continue
            figure = "in_tok_s" if name.startswith("prefill") else "out_tok_s"
            peers = ", ".join(
                f"{peer['engine']} {peer[name][figure]:,.0f}" for peer in found["peers"] if name in peer
            )
            speed = f"{row[figure]:,.0f}" + (" in" if figure == "in_tok_s" else "")
            speeds.append(f"| {found['model']} | `{name}` | {speed} | {share:.0%} | {peers} |")
        if "cpu_us_per_step" in found:
            cells = (f"{microseconds:.0f} us" for microseconds in found["cpu_us_per_step"].values())
            steps.append(f"| {found['model']} | {' | '.join(cells)} |")
            gaps, cached = found["mixed_load"]["ratio"], found["prefix_8k"]["gain"]
            loads.append(f"| {found['model']} | {gaps:.2f} x | {cached:.1f} x |")
    text = fill(fill(text, "gpu cpu", steps), "gpu load", loads)
    text = fill(text, "gpu reports", speeds + origins)
    for marker, write in GPU_TABLES.items():
        text = fill(text, marker, write())
    return text


GPU_TABLES = {
    "gpu http": h200_tables.http,
    "gpu traffic": h200_tables.traffic,
    "gpu together": h200_tables.together,
    "gpu starts": h200_tables.starts,
    "gpu neighbours": h200_tables.neighbours,
}


def gpu_origin(found: dict[str, Any]) -> str:
    """Return where the figures of one shape come from; what an older report does not hold is not guessed."""
    versions = found.get("versions") or {"torch": found["torch"]}
    used = ", ".join(f"{name} {version}" for name, version in versions.items())
    peers = [f"{peer['engine']} {peer.get('version', NOT_RECORDED)}" for peer in found["peers"]]
    said = [
        f"{found['device']}; {used}",
        f"commit {found.get('commit', NOT_RECORDED)}",
        f"date {found['created'][:10] if 'created' in found else NOT_RECORDED}",
        f"version of the peers: {', '.join(peers) or 'none'}",
    ]
    return f"- {found['model']}: {'; '.join(said)}"


CPU_DEFAULT = "ours int4"  # what `auto` is for the default model
QUIET = 0.1  # the share of a machine that other programs may take while engines are compared by the clock
CPU_PEER = {"int4": "llama.cpp Q4_0", "int8": "llama.cpp Q8_0"}
CPU_FIGURES = {
    "decode 1": "decode, 1 sequence",
    "decode 8": "8 sequences",
    "prefill": "prompt of 512",
    "long": "prompt of {long:,}",
    "http 1": "HTTP, 1 stream",
    "http 8": "8 streams",
}


def cpu_page(text: str) -> str:
    """Return the page with its first line and its tables made anew from benchmarks/reports/cpu*.json."""
    found = _cpu_report("cpu.json")
    (threads, engines), clock = next(iter(found["threads"].items())), _cpu_clock(found)
    one, many, prompt = (engines[CPU_DEFAULT][name][clock] for name in ("decode 1", "decode 8", "prefill"))
    line = (
        f"{found['machine']['cpu']}, {threads} used here, {found['of'][CPU_DEFAULT]['instruction_set']}: "
        f"**{one:,.0f} tokens per second** for one sequence, {many:,.0f} for eight, "
        f"{prompt:,.0f} tokens of a prompt per second."
    )
    text = fill(fill(text, "cpu speed", [line]), "cpu report", _cpu_tables(found))
    larger = [path.name for path in sorted(REPORTS.glob("cpu-*.json"))]
    return fill(text, "cpu larger", [line for name in larger for line in _cpu_larger(_cpu_report(name))])


def _cpu_report(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((REPORTS / name).read_text(encoding="utf-8"))
    return found


def _cpu_clock(found: dict[str, Any]) -> str:
    """By which clock a report compares: processor time where the machine had other work."""
    return "per_s" if found["others"] < QUIET else "per_cpu_s"


def _cpu_tables(found: dict[str, Any]) -> list[str]:
    clock = _cpu_clock(found)
    lines = []
    for threads, engines in found["threads"].items():
        shown = [name for name in CPU_FIGURES if any(name in figures for figures in engines.values())]
        heads = [CPU_FIGURES[name].format(long=found["long"]) for name in shown]
        has_http = "http 1" in shown
        heads += ["TTFT, 1 stream", "start"] if has_http else []
        lines += [
            f"| {threads} thread{'s' * (threads != '1')} | {' | '.join(heads)} |",
            "|---" * (len(heads) + 1) + "|",
        ]
        for engine, figures in engines.items():
            cells = [_cpu_cell(engines, engine, name, clock) for name in shown]
            if has_http:
                cells.append(f"{figures['http 1']['ttft_s'] * 1e3:.0f} ms" if "http 1" in figures else "")
                cells.append(f"{figures['start']['s']:.1f} s" if "start" in figures else "")
            lines.append(f"| {engine} | {' | '.join(cells)} |")
        lines.append("")
    uses = {
        of["version"] + ": " + of["instruction_set"] for of in found["of"].values() if "instruction_set" in of
    }
    lines += [f"- {each}" for each in sorted(uses)]
    return [*lines, "", _cpu_origin(found, clock)]


def _cpu_cell(engines: dict[str, Any], engine: str, name: str, clock: str) -> str:
    """Tokens per second; of ours also how many times llama.cpp's, with as many bits."""
    if name not in engines[engine]:
        return ""
    rate = engines[engine][name][clock]
    peer = engines.get(next((CPU_PEER[bits] for bits in CPU_PEER if f"ours {bits}" in engine), ""), {})
    return f"{rate:,.0f} ({rate / peer[name][clock]:.2f}x)" if name in peer else f"{rate:,.0f}"


def _cpu_larger(found: dict[str, Any]) -> list[str]:
    heads = ["decode, 1 sequence", "GB/s", "8 sequences", "prompt of 512"]
    lines = []
    for threads, engines in found["threads"].items():
        lines += [
            f"| {Path(found['model']).stem}, {threads} threads | {' | '.join(heads)} |",
            "|---" * 5 + "|",
        ]
        for engine, figures in engines.items():
            names = ("decode 1", "decode 8", "prefill")
            one, many, prompt = (_cpu_cell(engines, engine, name, "per_s") for name in names)
            lines.append(f"| {engine} | {one} | {figures['decode 1']['gb_per_s']:.1f} | {many} | {prompt} |")
    return [*lines, "", _cpu_origin(found, "per_s"), ""]


def _cpu_origin(found: dict[str, Any], clock: str) -> str:
    machine, others = found["machine"], found["others"]
    unit = "by the clock" if clock == "per_s" else "of processor time"
    return (
        f"Tokens per second {unit}. {machine['cpu']}, {machine['architecture']}; "
        f"other programs took {others:.0%} of it; medians of {found['rounds']} x {found.get('repeats', 3)}; "
        f"commit {machine['commit']}, {machine['date'][:10]}."
    )


SIZE = re.compile(r"<!-- size -->.*?<!-- /size -->", re.DOTALL)


def readme(text: str) -> str:
    """Return the README with its table of speeds, and the size of the core as scripts/size.py counts it."""
    text = fill(text, "measured", h200_tables.measured())
    return SIZE.sub(f"<!-- size -->{size.claim(size.measure())}<!-- /size -->", text)


def main() -> int:
    """Write the pages, or compare them."""
    parser = argparse.ArgumentParser(description="Write the generated pages of docs/.")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    args = parser.parse_args()
    pages = {DOCS / "knobs.md": knobs_page(), DOCS / "cli.md": cli_page()}
    benchmarks = DOCS / "benchmarks.md"
    pages[benchmarks] = ages_table(ablation_table(benchmarks_page(benchmarks.read_text(encoding="utf-8"))))
    gpu = DOCS / "features" / "gpu.md"
    pages[gpu] = gpu_page(gpu.read_text(encoding="utf-8"))
    cpu = DOCS / "features" / "cpu.md"
    pages[cpu] = cpu_page(cpu.read_text(encoding="utf-8"))
    quantization = DOCS / "features" / "quantization.md"
    pages[quantization] = fill(quantization.read_text(encoding="utf-8"), "gpu forms", h200_tables.forms())
    front = DOCS.parent / "README.md"
    pages[front] = readme(front.read_text(encoding="utf-8"))
    if not args.check:
        for path, text in pages.items():
            path.write_text(text, encoding="utf-8")
        return 0
    stale = [p.name for p, text in pages.items() if not p.exists() or p.read_text(encoding="utf-8") != text]
    if stale:
        print(f"stale: {', '.join(stale)}; run 'make format'", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
