"""docs/private-apis.md: each name still exists and is used where the page says, and no other is used."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/private-apis.md").read_text()
ROWS = re.findall(r"^\| `([\w.]+)` \| ([^|]+) \|", PAGE, re.M)
KNOWN = dict(re.findall(r"^\| (\w+) \| ([\d., ]+) \|$", PAGE, re.M))
CUDA_ONLY = {"torch._C._host_emptyCache"}  # names that PyTorch for CPUs does not have
PRIVATE = re.compile(r"\b(?:torch(?:\.\w+)*\.(?!__)_\w+|triton\.(?:runtime|backends|compiler)[\w.]*)")


def find(name: str) -> Any:
    """The object of a dotted name, whichever part of it is a module."""
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[:number]))
        found = getattr(found, part)
    return found


@pytest.mark.parametrize(("name", "files"), ROWS, ids=[name for name, _ in ROWS])
def test_a_private_name_still_exists(name: str, files: str) -> None:
    package = pytest.importorskip(name.partition(".")[0])
    is_there = name not in CUDA_ONLY or package.version.cuda is not None
    assert not is_there or find(name) is not None
    for file in re.findall(r"`([\w/.]+)`", files):
        text = (ROOT / "src/infer" / file).read_text()
        assert name.rpartition(".")[2] in text, f"{file} does not use it any more"


def test_a_connection_of_uvicorn_has_the_attributes_that_are_used() -> None:
    from uvicorn.protocols.http import httptools_impl

    listed = re.search(r"reads or sets: (.*); of a request's cycle: (.*)\.", PAGE)
    assert listed is not None
    classes = (httptools_impl.HttpToolsProtocol, httptools_impl.RequestResponseCycle)
    for names, owner in zip(listed.groups(), classes, strict=True):
        source = inspect.getsource(owner)
        for name in re.findall(r"`(\w+)`", names):
            assert f"self.{name}" in source, f"{owner.__name__}.{name}"


def test_no_other_private_name_is_used() -> None:
    """In PyTorch and Triton, where a name says that it is private."""
    listed = {name for name, _ in ROWS}
    for file in (ROOT / "src").rglob("*.py"):
        for name in PRIVATE.findall(file.read_text()):
            is_listed = any(name.startswith(known) or known.startswith(name) for known in listed)
            assert is_listed, f"{file.relative_to(ROOT)}: {name} is not in docs/private-apis.md"


@pytest.mark.parametrize("package", KNOWN)
def test_the_page_knows_the_installed_version(package: str) -> None:
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    known = [version.strip() for version in KNOWN[package].split(",")]
    assert any(installed.startswith(f"{version}.") for version in known), (installed, known)
