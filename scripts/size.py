"""How much there is to read: lines of code and of words, per file and part.

    python scripts/size.py            a table of src/infer, the longest files first in each part

Long files and functions are smells to notice, not errors: anything past 400 and 60 lines is marked.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONG_FILE, LONG_FUNCTION = 400, 60


def longest_function(tree: ast.AST) -> tuple[int, str]:
    """The length in lines and the name of the longest function of a file."""
    lengths = [
        ((node.end_lineno or node.lineno) - node.lineno + 1, node.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return max(lengths, default=(0, ""))


def main() -> None:
    """Print the table."""
    package = ROOT / "src" / "infer"
    total = 0
    parts: dict[str, list[tuple[int, str]]] = {}
    for file in package.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        lines = len(text.splitlines())
        total += lines
        length, name = longest_function(ast.parse(text))
        marks = " <- long" if lines > LONG_FILE else ""
        marks += f" <- {name}() has {length} lines" if length > LONG_FUNCTION else ""
        relative = file.relative_to(package)
        part = relative.parts[0] if len(relative.parts) > 1 else "."
        parts.setdefault(part, []).append((lines, f"{relative}{marks}"))
    for part, files in sorted(parts.items()):
        print(f"{sum(lines for lines, _ in files):6}  {part}")
        for lines, label in sorted(files, reverse=True):
            print(f"        {lines:5}  {label}")
    tests = sum(len(f.read_text(encoding="utf-8").splitlines()) for f in (ROOT / "tests").rglob("*.py"))
    print(f"{total:6}  src/infer in all; {tests} lines of tests")


if __name__ == "__main__":
    main()
