"""How much there is to read: lines of Python, C and CUDA per package of src/infer, beside a budget for each.

    python scripts/size.py            the table of packages
    python scripts/size.py --files    the files of every package below it, the longest first
    python scripts/size.py --claim    the sentence about the core, which scripts/docs.py writes into README.md

A budget only goes down: `limit` is what no commit exceeds (tests/unit/test_size.py holds it), and `target` is
where it should end. A feature raises a limit only by a commit that says why. Files past 400 lines and
functions past 60 are marked; these are smells to notice, not errors.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "infer"
SOURCES = (".py", ".c", ".h", ".cu", ".cuh")
LONG_FILE, LONG_FUNCTION = 400, 60

# the packages of the reading claim: what decides which tokens are computed, and computes them
CORE = ("scheduling", "cache", "execution", "engine", "models", "layers", "quant")


class Budget(NamedTuple):
    """Lines that a group of packages may have."""

    limit: int  # no commit exceeds it
    target: int  # where it should end; a limit above it is a debt


BUDGETS: Mapping[str, Budget] = {
    "core": Budget(limit=23_324, target=9_000),
    "kernels": Budget(limit=20_450, target=9_500),
    "server": Budget(limit=13_016, target=4_300),
    "src": Budget(limit=98_748, target=39_000),
}


class Size(NamedTuple):
    """Lines and files."""

    lines: int
    files: int


def measure(package: Path = PACKAGE) -> dict[str, Size]:
    """Return the size of every package (`.`: files beside them), then of `core` and of all of `src`."""
    sizes: dict[str, Size] = {}
    for file in sources(package):
        relative = file.relative_to(package)
        part = relative.parts[0] if len(relative.parts) > 1 else "."
        lines, files = sizes.get(part, Size(0, 0))
        sizes[part] = Size(lines + count_lines(file), files + 1)
    everything = list(sizes.values())
    core = [size for part, size in sizes.items() if part in CORE]
    found = {part: sizes[part] for part in sorted(sizes)}
    return found | {"core": total(core), "src": total(everything)}


def sources(package: Path) -> list[Path]:
    """Return every file of a package that is counted."""
    return sorted(file for file in package.rglob("*") if file.suffix in SOURCES and file.is_file())


def count_lines(file: Path) -> int:
    """Return the lines of a file, blank ones and comments included."""
    return len(file.read_text(encoding="utf-8").splitlines())


def total(sizes: Sequence[Size]) -> Size:
    """Return the sum."""
    return Size(sum(size.lines for size in sizes), sum(size.files for size in sizes))


def table(sizes: Mapping[str, Size]) -> str:
    """Return a line per package, and what its budget leaves."""
    lines = [f"{'package':<12}{'lines':>8}{'files':>7}{'limit':>8}{'target':>8}"]
    for name, size in sizes.items():
        mark = "*" if name in CORE else ""
        line = f"{name + mark:<12}{size.lines:>8,}{size.files:>7}"
        if budget := BUDGETS.get(name):
            line += f"{budget.limit:>8,}{budget.target:>8,}"
            left = budget.limit - size.lines
            line += f"   {-left:,} over the limit" if left < 0 else ""
            line += f"   {size.lines - budget.target:,} to go" if size.lines > budget.target else ""
        lines.append(line)
    return "\n".join([*lines, "* part of the core"])


def over_budget(sizes: Mapping[str, Size]) -> list[str]:
    """Return the names whose limit is exceeded."""
    return [name for name, budget in BUDGETS.items() if sizes[name].lines > budget.limit]


def claim(sizes: Mapping[str, Size]) -> str:
    """Return the sentence about the core, rounded up to hundreds of lines, so that it is true for a while."""
    core, src = sizes["core"], sizes["src"]
    packages = ", ".join(f"`{name}/`" for name in CORE)
    return (
        f"The core ({packages}) is {-(-core.lines // 100) * 100:,} lines in {core.files} files; "
        f"all of `src/`, C and CUDA counted, is {-(-src.lines // 1000)} thousand lines in {src.files} files."
    )


def longest_function(tree: ast.AST) -> tuple[int, str]:
    """Return the length in lines and the name of the longest function of a file."""
    lengths = [
        ((node.end_lineno or node.lineno) - node.lineno + 1, node.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return max(lengths, default=(0, ""))


def files_table(package: Path = PACKAGE) -> str:
    """Return a line per file, the longest first in each package, with marks for what is long."""
    parts: dict[str, list[tuple[int, str]]] = {}
    for file in sources(package):
        lines = count_lines(file)
        marks = " <- long" if lines > LONG_FILE else ""
        if file.suffix == ".py":
            length, name = longest_function(ast.parse(file.read_text(encoding="utf-8")))
            marks += f" <- {name}() has {length} lines" if length > LONG_FUNCTION else ""
        relative = file.relative_to(package)
        part = relative.parts[0] if len(relative.parts) > 1 else "."
        parts.setdefault(part, []).append((lines, f"{relative}{marks}"))
    made = []
    for part, files in sorted(parts.items()):
        made.append(f"{sum(lines for lines, _ in files):6}  {part}")
        made += [f"        {lines:5}  {label}" for lines, label in sorted(files, reverse=True)]
    return "\n".join(made)


def main() -> int:
    """Print what was asked for; exit code 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description="Lines per package of src/infer, beside their budgets.")
    parser.add_argument("--files", action="store_true", help="list the files of every package too")
    parser.add_argument(
        "--claim", action="store_true", help="print the sentence about the core and nothing else"
    )
    args = parser.parse_args()
    sizes = measure()
    if args.claim:
        print(claim(sizes))
        return 0
    print(table(sizes))
    tests = sum(count_lines(file) for file in (ROOT / "tests").rglob("*.py"))
    print(f"tests/ has {tests:,} lines")
    if args.files:
        print(files_table())
    return 1 if over_budget(sizes) else 0


if __name__ == "__main__":
    raise SystemExit(main())
