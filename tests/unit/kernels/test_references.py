"""Every kernel has a PyTorch reference beside it, and a test that holds the kernel to it.

Derived from the code: a public function of kernels/ that asks whether Triton or C may compute (`use_triton`,
`use_c`), or that is a second implementation in CUDA C++ (`*_cuda`), needs a function of the same name with
`_reference` behind it in its folder, and a test of this folder or of tests/kernels must call it.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
KERNELS = ROOT / "src" / "infer" / "kernels"
TESTS = sorted(
    file for folder in ("unit/kernels", "kernels") for file in (ROOT / "tests" / folder).glob("*.py")
)

WITHOUT_REFERENCE = {
    "plan": "writes a schedule, not a function of numbers: attention over it is held to its own reference",
    "activate": "elementwise form of gated_activation; the table ACTIVATIONS is its reference",
    "linear_invariant": "F.linear is its reference",
    "add_to_matrix": "its other half, in PyTorch, is its reference, which it takes without Triton",
    "look_up": "CodedWeights.dequantized is its reference",
    "recur_paged": "run_spans of delta/reference.py is its reference, which it calls without Triton",
}


@functools.cache
def functions(file: Path) -> list[ast.FunctionDef]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


@functools.cache
def calls(function: ast.FunctionDef) -> set[str]:
    found = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
    return {name.id for name in found if isinstance(name, ast.Name)}


@functools.cache
def names(file: Path) -> set[str]:
    """The names that the functions of a file use."""
    nodes = (node for function in functions(file) for node in ast.walk(function))
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def launchers() -> Iterator[tuple[Path, str]]:
    """The public functions that run a kernel where one can run, with the file each stands in."""
    for file in sorted(KERNELS.rglob("*.py")):
        if file.parent.name in ("runtime", "cpu"):
            continue
        for function in functions(file):
            is_public = not function.name.startswith("_")
            if is_public and (calls(function) & {"use_triton", "use_c"} or function.name.endswith("_cuda")):
                yield file, function.name


LAUNCHERS = [
    pytest.param(file, name, id=f"{file.parent.name}/{file.name}:{name}") for file, name in launchers()
]


def test_kernels_are_found() -> None:
    assert {"rms_norm", "attend_decode", "attend_decode_cuda", "sample_rows", "scaled"} <= {
        name for _, name in launchers()
    }


@pytest.mark.parametrize(("file", "name"), LAUNCHERS)
def test_a_kernel_has_a_reference_and_a_test(file: Path, name: str) -> None:
    if name in WITHOUT_REFERENCE:
        return
    reference = f"{name.removesuffix('_cuda')}_reference"
    defined = {function.name for sibling in file.parent.glob("*.py") for function in functions(sibling)}
    assert reference in defined, f"{file.name}: {name} has no {reference} in {file.parent.name}/"
    tests = [test.name for test in TESTS if name in names(test)]
    assert tests, f"no test of tests/unit/kernels or tests/kernels uses {name}"


def test_every_exception_is_still_one() -> None:
    assert not (gone := WITHOUT_REFERENCE.keys() - {name for _, name in launchers()}), gone
