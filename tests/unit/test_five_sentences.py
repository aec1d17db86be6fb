"""Sentences 1, 3 and 5 of docs/architecture.md as tests.

The second is held by test_layering.py, the fourth by kernels/test_references.py and test_device_questions.py.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.test_layering import ALLOWED, PACKAGE, imported_files, imported_modules

CORE = ("scheduling", "cache", "execution", "engine", "models", "layers", "quant", "sampling", "kernels")
TOKEN_IDS_ONLY = (*CORE, "loader", "client")

CONTAINERS = {"dict", "list", "set", "deque", "defaultdict", "OrderedDict", "Counter", "WeakKeyDictionary"}
MUTATORS = {"append", "add", "update", "pop", "clear", "setdefault", "extend", "insert", "remove", "discard"}

# Module-level state that functions change, and why it may stay. Shrink this list; never let it grow unseen.
STATE = {
    "kernels/cpu/library.py:_state": "the C library is compiled and loaded once per process",
    "kernels/cpu/program.py:_recorder": "torch calls are recorded by the thread that runs them",
    "kernels/cpu/program.py:_recording_thread": "the same: which thread that is",
    "kernels/runtime/profiles.py:_set": "a test's profile takes the place of the device's",
    "kernels/runtime/profiles.py:_caches": "the same: what was derived from a profile is forgotten with it",
    "kernels/runtime/launch.py:_known": "compiled kernels by their arguments, as Triton's own cache",
}


# -- 1. the engine speaks token ids -----------------------------------------------------------------


@pytest.mark.parametrize("part", TOKEN_IDS_ONLY)
def test_the_core_may_not_import_text(part: str) -> None:
    assert not ALLOWED[part] & {"tokenizer", "frontend", "server", "cli"}


def test_only_constraints_see_the_bytes_of_the_vocabulary() -> None:
    parts = {part for part in (*TOKEN_IDS_ONLY, "constraints") if "tokenizer" in ALLOWED[part]}
    assert parts == {"constraints"}
    files = sorted((PACKAGE / "constraints").glob("*.py"))
    readers = [file.name for file in files if "infer.tokenizer" in file.read_text(encoding="utf-8")]
    assert readers == ["token_bytes.py"]


# -- 3. models are single-device code ----------------------------------------------------------------

PRODUCTS = {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "scaled_dot_product_attention"}
DEVICES = {"cuda", "cpu", "distributed", "all_reduce", "is_cuda", "device_count"}


def foreign_to_models(source: str) -> set[str]:
    """The products, attentions and questions about devices that a model computes or asks by itself."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            found.add("@")
        if isinstance(node, ast.Attribute | ast.Name):
            found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return found & {"@", *PRODUCTS, *DEVICES}


@pytest.mark.parametrize("file", sorted((PACKAGE / "models").glob("*.py")), ids=lambda file: str(file.stem))
def test_models_leave_products_attention_and_devices_to_others(file: Path) -> None:
    """`Linear` multiplies, `step.attend` attends, and what runs where is decided outside."""
    assert not foreign_to_models(file.read_text(encoding="utf-8"))
    assert not {name for name in imported_files(file) if name.startswith("kernels/runtime/")} - {
        "kernels/runtime/communicator.py"  # the type of what stands between two stages
    }


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("y = x @ self.weight.T", "@"),
        ("y = F.linear(x, w)", "linear"),
        ("y = F.scaled_dot_product_attention(q, k, v)", "scaled_dot_product_attention"),
        ("torch.distributed.all_reduce(y)", "all_reduce"),
        ("y = x.cuda()", "cuda"),
    ],
)
def test_what_a_model_must_leave_to_others_is_found(code: str, name: str) -> None:
    assert name in foreign_to_models(code)


# -- 5. one composition root, no global state --------------------------------------------------------


def test_one_file_puts_the_engine_together() -> None:
    """The parts of an engine meet in engine/build.py and nowhere else in the core."""
    parts = {"scheduling/scheduler.py", "cache/paged_pool.py", "engine/device_build.py"}
    assert parts <= imported_files(PACKAGE / "engine" / "build.py")
    others = [
        file.relative_to(PACKAGE).as_posix()
        for part in CORE
        for file in sorted((PACKAGE / part).rglob("*.py"))
        if parts <= imported_files(file)
    ]
    assert others == ["engine/build.py"]


def state_of(file: Path) -> Iterator[str]:
    """The names of a module that its functions rebind or mutate."""
    source = file.read_text(encoding="utf-8")
    tree = ast.parse(source)
    containers: set[str] = set()
    for statement in tree.body:
        targets = [getattr(statement, "target", None), *getattr(statement, "targets", ())]
        if is_container(getattr(statement, "value", None)):
            containers.update(target.id for target in targets if isinstance(target, ast.Name))
    if not containers and "global " not in source:  # most files; walking through functions takes long
        return
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for node in ast.walk(function):
                if isinstance(node, ast.Global):
                    yield from node.names
                name = mutated_name(node)
                if name in containers:
                    yield name


def is_container(value: ast.AST | None) -> bool:
    if isinstance(value, ast.Call):
        called = value.func
        return getattr(called, "id", getattr(called, "attr", "")) in CONTAINERS
    return isinstance(value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp)


def mutated_name(node: ast.AST) -> str:
    """The name whose object a statement changes in place; empty if it changes none."""
    changed: ast.AST | None = None
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        changed = node.value
    elif isinstance(node, ast.AugAssign):
        changed = node.target
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        changed = node.func.value
    return changed.id if isinstance(changed, ast.Name) else ""


def test_the_core_has_no_global_state() -> None:
    found = {
        f"{file.relative_to(PACKAGE).as_posix()}:{name}"
        for part in CORE
        for file in sorted((PACKAGE / part).rglob("*.py"))
        for name in state_of(file)
    }
    assert found <= set(STATE), f"functions change these names of their module: {sorted(found - set(STATE))}"


def test_state_is_found(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "SEEN = {}\nNAMES = list()\nTABLE = {1: 2}\ncount = 0\n"
        "def note(x):\n    global count\n    count += 1\n"
        "    SEEN[x] = 1\n    NAMES.append(x)\n    return TABLE[x]\n"
    )
    assert set(state_of(file)) == {"count", "SEEN", "NAMES"}


# -- no private names of others ----------------------------------------------------------------------

PRIVATE = {
    "kernels/cpu/program.py:torch.utils._python_dispatch": "torch documents it under no public name",
    "server/tls.py:_ssl": "the standard library has no other reader of a certificate's dates",
}


def test_no_private_module_of_another_package_is_imported() -> None:
    found = {
        f"{file.relative_to(PACKAGE).as_posix()}:{module}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for _, module in imported_modules(file)
        if any(part.startswith("_") and not part.startswith("__") for part in module.split("."))
    }
    assert found <= set(PRIVATE), sorted(found - set(PRIVATE))
