"""The architecture as a test: which part may import which.

The table below is the diagram of docs/architecture.md. An arrow that is not in it is a mistake, or a
decision that belongs in the table, in the diagram and in a commit message.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "infer"

EVERYONE_MAY_IMPORT = {"errors", "config", "finish_reason", "log"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "config": set(),
    "finish_reason": set(),
    "log": set(),
    "kernels": set(),
    "quant": {"kernels"},
    "layers": {"kernels", "quant"},
    "models": {"layers", "quant", "kernels"},
    "loader": {"models", "layers", "quant", "kernels"},
    "tokenizer": set(),
    "dialects": {"constraints", "sampling", "tokenizer"},
    "sampling": {"constraints", "kernels"},
    "constraints": {"tokenizer"},
    "cache": {"kernels"},
    "scheduling": {"cache", "sampling"},
    "execution": {"cache", "kernels", "layers", "models", "sampling"},  # it is told orders, not plans
    "speculative": {"execution", "models", "layers", "kernels"},  # it knows texts and orders, no requests
    "engine": {
        "scheduling", "execution", "cache", "kernels", "layers", "loader", "models", "sampling",
        "constraints", "speculative",
    },
    "tools": {
        "engine", "scheduling", "execution", "cache", "kernels", "layers", "loader", "models", "quant",
        "sampling", "constraints", "speculative", "tokenizer",
    },
    "client": {"engine", "scheduling", "loader", "tools"},
    "frontend": {"client", "engine", "scheduling", "loader", "sampling", "tokenizer", "dialects", "tools"},
    "server": {
        "frontend", "client", "engine", "scheduling", "loader", "sampling", "constraints", "tokenizer",
        "dialects", "tools",
    },
    "cluster": {"server", "client"},  # servers on other machines: it forwards HTTP, and knows no engine
    "ray": {"cluster", "server"},  # what Ray Serve imports
    "bench": {
        "frontend", "tools", "client", "engine", "scheduling", "execution", "cache", "kernels", "loader",
        "models", "sampling", "speculative",
    },
    "learn": {
        "bench", "engine", "scheduling", "execution", "cache", "kernels", "layers", "sampling", "speculative",
        "tools",
    },
    "cli": {
        "frontend", "bench", "learn", "tools", "client", "engine", "scheduling", "loader", "sampling",
        "constraints", "server", "cluster", "tokenizer", "dialects",
    },
    "__init__": {"frontend", "sampling", "constraints"},  # imported when a name is first used
    "__main__": {"cli"},
}  # fmt: skip

# Packages of kernels: operations do not know each other, but for what they are made of.
KERNELS: dict[str, set[str]] = {
    "runtime": {"cpu", "linear"},  # ranks add to the residual stream, whose form is linear's
    "cpu": {"elementwise", "runtime"},  # the scales of keys and values; what joins ranks
    "elementwise": {"runtime", "cpu", "sampling"},  # a row of a step's state has its sampling parameters
    "sampling": {"runtime", "cpu"},
    "attention": {"runtime", "elementwise"},
    "delta": {"runtime", "attention"},  # both read the chunks of a step
    "linear": {"runtime", "elementwise"},
    "moe": {"runtime", "elementwise", "linear"},  # experts are linears of codes and cuts that are linear's
}

INTEGERS_ONLY = [
    "cache/block_allocator.py",
    "cache/prefix_tree.py",
    "cache/layout.py",
    "cache/paged_pool.py",
    "cache/sequence_books.py",
    *(f"scheduling/{file.name}" for file in sorted((PACKAGE / "scheduling").glob("[!_]*.py"))),
]


# Files of one package that import each other, directly or through others. A new one is a mistake: what both
# files need belongs in the lower one. An entry goes when its circle is opened.
CIRCLES: set[frozenset[str]] = {
    # an answer's format is bound to a grammar, which is written from the format's tools
    frozenset({"dialects/answer.py", "dialects/grammar.py"}),
}


def part_of(file: Path) -> str:
    if file.name == "__main__.py":  # a second door to the command line, wherever it stands
        return "__main__"
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache  # several tests ask, here and elsewhere
def import_statements(file: Path) -> list[ast.Import | ast.ImportFrom]:
    """The imports of a file, inside functions and type-checking blocks too."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def imported_modules(file: Path) -> list[tuple[int, str]]:
    """Every module a file imports, with its line."""
    found: list[tuple[int, str]] = []
    for node in import_statements(file):
        if isinstance(node, ast.Import):
            found += ((node.lineno, alias.name) for alias in node.names)
        else:
            assert node.level == 0, f"line {node.lineno}: only absolute imports"
            assert node.module is not None
            if node.module == "infer":  # `from infer import llm` is an import of infer.frontend.llm
                found += ((node.lineno, f"infer.{alias.name}") for alias in node.names)
            else:
                found.append((node.lineno, node.module))
    return found


def imported_files(file: Path, package: Path = PACKAGE) -> set[str]:
    """The files of the package that a file imports, relative to the package."""
    modules: list[str] = []
    for node in import_statements(file):
        if isinstance(node, ast.Import):
            modules += (alias.name for alias in node.names)
        elif node.module is not None:
            modules += (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    names = [module.partition(".")[2].replace(".", "/") for module in modules if module.startswith("infer.")]
    paths = [path for name in names for path in (f"{name}.py", f"{name}/__init__.py")]
    return {path for path in paths if (package / path).exists()}


def circles(package: Path) -> set[frozenset[str]]:
    """The sets of files inside one part that import each other, directly or through others."""
    files = {str(file.relative_to(package)): file for file in package.rglob("*.py")}
    reached = {
        name: {
            other for other in imported_files(file, package) if Path(other).parts[0] == Path(name).parts[0]
        }
        for name, file in files.items()
    }
    for middle in files:  # Warshall's closure
        for name in files:
            if middle in reached[name]:
                reached[name] = reached[name] | reached[middle]
    return {
        frozenset({name, *(other for other in reached[name] if name in reached[other])})
        for name in files
        if name in reached[name]
    }


def wrong_imports(package: Path) -> list[str]:
    wrong = []
    for file in sorted(package.rglob("*.py")):
        part = part_of(file)
        allowed = ALLOWED.get(part, set()) | EVERYONE_MAY_IMPORT | {part, "__version__"}
        for line, module in imported_modules(file):
            root, _, rest = module.partition(".")
            if root == "infer" and rest.split(".")[0] not in allowed:
                wrong.append(f"{file.relative_to(package)}:{line}: {part} must not import {module}")
    return wrong


def test_imports_follow_the_diagram() -> None:
    wrong = wrong_imports(PACKAGE)
    assert not wrong, "\n".join(wrong)


def test_packages_of_kernels_import_only_what_they_are_made_of() -> None:
    found: dict[str, set[str]] = {}
    for file in (PACKAGE / "kernels").glob("*/*.py"):
        modules = [module.split(".") for _, module in imported_modules(file)]
        parts = {names[2] for names in modules if names[:2] == ["infer", "kernels"] and len(names) > 2}
        found.setdefault(file.parent.name, set()).update(parts - {file.parent.name})
    assert found == KERNELS


def test_every_part_is_in_the_diagram() -> None:
    parts = {part_of(file) for file in PACKAGE.rglob("*.py")}
    assert parts <= set(ALLOWED), f"not in the table: {sorted(parts - set(ALLOWED))}"


def test_the_diagram_has_no_cycle() -> None:
    graphlib.TopologicalSorter(ALLOWED).prepare()


def test_a_wrong_import_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALLOWED, "cli", set())
    assert any("cli must not import" in line for line in wrong_imports(PACKAGE))


def test_scheduling_needs_no_tensors() -> None:
    """Imports the planning files in a fresh interpreter, so that what they import counts as well."""
    missing = [file for file in INTEGERS_ONLY if not (PACKAGE / file).exists()]
    assert not missing, f"renamed or removed: {missing}"
    modules = [f"infer.{file.removesuffix('.py').replace('/', '.')}" for file in INTEGERS_ONLY]
    script = (
        f"import sys, importlib\nfor name in {modules}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_files_of_a_package_import_each_other_only_where_listed() -> None:
    found = circles(PACKAGE)
    assert found <= CIRCLES, f"new circles: {[sorted(circle) for circle in found - CIRCLES]}"
    assert found >= CIRCLES, f"open by now, so not to be listed: {[sorted(c) for c in CIRCLES - found]}"


@pytest.mark.parametrize(
    ("import_of_c", "expected"),
    [
        ("from infer.part.sub.a import f", {frozenset({"part/sub/a.py", "part/b.py", "part/c.py"})}),
        ("def f() -> None:\n    from infer.part import b", {frozenset({"part/b.py", "part/c.py"})}),
        ("import infer.part.b", {frozenset({"part/b.py", "part/c.py"})}),
        ("from infer.part import missing", set()),
        ("from infer.other.d import f", set()),  # between packages, the diagram above decides
    ],
)
def test_a_circle_is_found(tmp_path: Path, import_of_c: str, expected: set[frozenset[str]]) -> None:
    for path, text in {
        "part/sub/a.py": "from infer.part.b import f",
        "part/b.py": "TYPE_CHECKING = False\nif TYPE_CHECKING:\n    from infer.part.c import f",
        "part/c.py": import_of_c,
        "other/d.py": "from infer.part.c import f",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert circles(tmp_path) == expected


def test_templates_hold_no_code() -> None:
    assert not list((PACKAGE / "models" / "templates").rglob("*.py"))
