"""Every measured figure of the README and of the docs comes from a report in benchmarks/reports.

Directly below the block that shows a figure, a comment that readers of the page do not see names its place:

    The engine makes 246 tokens per second, 1.29 times as many as vLLM; a first token takes 94 ms.
    <!-- figures
    246 = gpu-qwen3-8b.json > b1_256_256 > out_tok_s
    1.29 = gpu-qwen3-8b.json > b1_256_256 > out_tok_s / peers > engine=vllm > b1_256_256 > out_tok_s
    94 = cpu.json > threads > 2 > ours int4 > http 1 > ttft_s * 1000
    -->

A step of a path is a key, a position in a list, or `field=value` of one of a list's entries; a figure of
several repeats is their median. `A / B` is a ratio inside one report, `* 1000` changes the unit.

Tables between `<!-- ... -->` and `<!-- end -->` are written by scripts/docs.py, whose --check compares them.
A fence shows what a command prints. docs/log.md, docs/decisions and docs/unreported.md tell what was measured
once, and say so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
REPORTS = ROOT / "benchmarks" / "reports"
PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "benchmarks.md",
    *sorted((ROOT / "docs" / "features").glob("*.md")),
]

NUMBER = r"\d[\d,]*(?:\.\d+)?"
FIGURE = re.compile(
    rf"({NUMBER})(?:\*\*)? ?(?:"
    r"tok/s|tokens (?:per|a) second|ms\b|us\b|µs\b|[GMK]i?B/s|TB/s|TFLOP/s|%|x(?= faster|\b(?! \d))"
    r"|times (?:as|the|better|faster|slower|worse)\b)"
    r"|(\d+\.\d+) s\b"
)
MARK = re.compile(r"<!-- figures\n(.*?)-->", re.DOTALL)
LINE = re.compile(rf"({NUMBER}) = (\S+\.json) > (.+)")
GENERATED = re.compile(
    r"<!-- (?:report .*?|[a-z ]+) -->\n.*?<!-- end -->|<!-- size -->.*?<!-- /size -->", re.DOTALL
)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)

# Words with a unit that are no measurement, and what they are.
NOT_MEASURED = {
    "routing": {
        "1.25 times the mean number": "a limit of the router",
        "within 2 %": "what a test of the shares holds",
    },
    "README": {"1.94 times the tokens": "bytes, counted"},
    "benchmarks": {
        "75 % with long prompts": "a workload",
        "by more than 5 % and 64 MiB": "a limit of the soak",
        "above 80 % of a core": "a limit of the client",
        "within 2 % from the second cycle": "a limit of the soak of every route",
        "6 % of 16 layers, 3 % of 36": "one layer's share",
        "A share above 100 %": "what a roofline means",
        "never below 2 %; a single repeat gets 8 %": "bands of the comparison",
        "differ by more than 8 %": "a band of the comparison",
        "within 5 % (8 % of a single repeat)": "bands of the sentences",
        "0.3 s for `import infer`, 0.5 s for `infer --help`": "targets",
    },
    "cpu": {
        "leave 6 % out at either end": "ranges that are tried",
        "32 times as long (two seconds at most)": "a rule",
    },
    "live-view": {"at most 0.5 % of the engine's time": "a limit of snapshots"},
    "quantization": {"The largest 0.45 % of a matrix": "a default of the command"},
    "engine-process": {"+ 0.25 s": "an interval", "after 0.5 s, 1 s, 2 s, 4 s": "intervals"},
    "gpu": {
        "2.4 % in Qwen 3 8B (36 layers) and 5.6 %": "matrix products, counted",
        "above 100 %": "what a roofline means",
    },
    "kv-cache-dtype": {
        "| 1.88x |": "bytes, counted",
        "| 1.94x |": "bytes, counted",
        "| 1.97x |": "bytes, counted",
        "3.9 times the tokens": "bytes, counted",
    },
    "memory-plan": {"90 % of what a GPU has left": "a default", "a CPU 25 % of it": "a default"},
    "models": {"within 1.25 times the reference's": "a tolerance"},
    "playground": {"`first after 96 ms`": "an example of what the page shows"},
    "simulator": {
        "`base` 2.2 ms, `per_token` 0.89 ms, `per_kv_token` 3.5 us": "defaults",
        "`per_block` (0.13 ms)": "a default",
    },
}


def blocks(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Return what stands between empty lines, each with the figures and places that its marks name."""
    for block in re.split(r"\n\s*\n", FENCE.sub("", GENERATED.sub("", text))):
        named = dict(
            line.split(" = ", 1) for mark in MARK.findall(block) for line in mark.strip().split("\n")
        )
        yield MARK.sub("", block), named


def unmarked(page: Path) -> list[str]:
    """Return the figures of a page with a unit and without a place in a report or a reason to have none."""
    missing = []
    for block, named in blocks(page.read_text(encoding="utf-8")):
        text = " ".join(block.split())
        for words in NOT_MEASURED.get(page.stem, {}):
            text = text.replace(words, "")
        missing += [match[0] for match in FIGURE.finditer(text) if (match[1] or match[2]) not in named]
    return missing


def step_into(found: Any, step: str) -> Any:
    """Return what a step of a path leads to."""
    if isinstance(found, dict):
        return found[step]
    if step.isdigit():
        return found[int(step)]
    wanted = dict(part.split("=", 1) for part in step.split(" and "))
    [entry] = [each for each in found if all(str(each.get(name)) == value for name, value in wanted.items())]
    return entry


def value_at(report: Any, path: str) -> float:
    """Return the number at a path of a report; also a ratio of two, or a number in another unit."""
    if " / " in path:
        above, below = path.split(" / ")
        return value_at(report, above) / value_at(report, below)
    path, _, factor = path.partition(" * ")
    for step in path.split(" > "):
        report = step_into(report, step)
    if isinstance(report, dict):
        report = report["median"]
    return float(report) * float(factor or 1)


def is_rounded(written: str, value: float) -> bool:
    """Say that a figure is the value, rounded to the digits that are written."""
    digits = len(written.partition(".")[2])
    return abs(float(written.replace(",", "")) - value) <= 0.5 * float(f"1e-{digits}") + 1e-9


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_measured_figure_names_its_report(page: Path) -> None:
    assert unmarked(page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_named_figure_is_what_its_report_says(page: Path) -> None:
    for block, named in blocks(page.read_text(encoding="utf-8")):
        for written, place in named.items():
            name, _, path = place.partition(" > ")
            value = value_at(json.loads((REPORTS / name).read_text(encoding="utf-8")), path)
            assert is_rounded(written, value), f"{page.name} says {written}, {name} says {value} at {path}"
            shown = rf"(?<![\d.,]){re.escape(written)}(?![\d]|[.,]\d)"
            assert re.search(shown, block), f"{page.name}: {written} is named and not shown: {block[:80]}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.stem in NOT_MEASURED], ids=lambda page: page.stem
)
def test_no_exception_is_out_of_use(page: Path) -> None:
    text = " ".join(page.read_text(encoding="utf-8").split())
    assert [words for words in NOT_MEASURED[page.stem] if words not in text] == []


def test_a_figure_without_a_report_and_a_wrong_one_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("It makes 246 tokens per second and waits 6 ms.\n<!-- figures\n246 = a.json > x\n-->\n")
    assert unmarked(page) == ["6 ms"]
    report = {"x": [{"name": "a b", "n": {"median": 0.2455}}, {"name": "c", "n": 3}], "y": 4.0}
    assert value_at(report, "x > name=a b > n * 1000") == 245.5
    assert value_at(report, "x > 1 > n / y") == 0.75
    assert is_rounded("246", 245.5) and not is_rounded("246", 247) and is_rounded("1.30", 1.2951)
