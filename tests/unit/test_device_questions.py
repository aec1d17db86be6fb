"""Every place in the package that asks which device this is; the list can only get shorter.

`kernels/runtime/dispatch.py` asks and gives the answers names (`device_kind`, `is_gpu`,
`has_pdl`, `use_triton`, `gpu_memory`, ...). Other files take an answer from there, or are told once, when the
engine is built. A file that asks more often than it is listed with, or one that is not listed, fails here.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "infer"

QUESTIONS = {"is_cuda", "hip", "get_device_capability", "get_device_properties"}

ASKING = {*QUESTIONS, ".type", "is_available"}

ALLOWED = {"engine/machine.py": 1, "kernels/runtime/dispatch.py": 9}


def device_questions(source: str) -> Iterator[int]:
    """The lines of a file that ask for the type, the maker or the abilities of a device."""
    if not any(name in source for name in ASKING):  # most files; reading one as a tree takes long
        return
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Attribute):
            continue
        of = {"type": "device", "is_available": "cuda"}.get(node.attr)
        if node.attr in QUESTIONS or (of and ast.unparse(node.value).lower().endswith(of)):
            yield node.lineno


@functools.cache
def count_questions() -> dict[str, int]:
    files = sorted(PACKAGE.rglob("*.py"))
    counts = {
        str(file.relative_to(PACKAGE)): len(list(device_questions(file.read_text(encoding="utf-8"))))
        for file in files
    }
    return {name: count for name, count in counts.items() if count}


def test_no_new_place_asks_for_the_device() -> None:
    counts = count_questions()
    more = {name: count for name, count in counts.items() if count > ALLOWED.get(name, 0)}
    assert not more, f"ask kernels/runtime/dispatch.py instead of the device: {more}"


def test_the_list_names_only_files_that_ask() -> None:
    assert not (gone := ALLOWED.keys() - count_questions().keys()), f"no longer ask, take them out: {gone}"


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("x.is_cuda or y.device.type == 'cpu'", 2),
        ("if self._device.type != 'cuda': pass", 1),
        ("torch.cuda.get_device_capability(device)[0] >= 9", 1),
        ("torch.version.hip is None and torch.cuda.is_available()", 2),
        ("use_triton(x) and error.type == 'cuda' and library.is_available()", 0),
    ],
)
def test_questions_are_found(code: str, count: int) -> None:
    assert len(list(device_questions(code))) == count
