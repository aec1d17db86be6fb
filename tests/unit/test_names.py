"""A public class name stands for one thing in the whole package."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "infer"

SHARED = {"Block": "the block of a family of models; each has its own"}


@functools.cache
def files_by_class() -> dict[str, list[str]]:
    """Where each public class of the package is defined."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in sorted(PACKAGE.rglob("*.py")):
        for name in re.findall(r"^class ([^_]\w*)", file.read_text(encoding="utf-8"), re.MULTILINE):
            found[name].append(file.relative_to(PACKAGE).as_posix())
    return found


def test_no_two_files_define_a_class_of_the_same_name() -> None:
    twice = {name: files for name, files in files_by_class().items() if len(files) > 1}
    assert twice.keys() <= SHARED.keys(), {name: twice[name] for name in twice.keys() - SHARED.keys()}


def test_the_exceptions_are_still_needed() -> None:
    assert all(len(files_by_class()[name]) > 1 for name in SHARED)
