"""The sources compile, and the package is imported, under every version of Python that it is for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SUPPORTED = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))

COMPILE = """
import pathlib, sys, warnings
warnings.simplefilter("error")
for path in sorted(pathlib.Path("src").rglob("*.py")):
    compile(path.read_text(encoding="utf-8"), str(path), "exec")
import infer, infer.errors
print("%d.%d" % sys.version_info[:2], infer.__version__)
"""


def interpreter(version: str) -> str | None:
    """Find a Python of this version: on the PATH, or among those that pyenv keeps."""
    kept = sorted(
        Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{version}.*/bin/python")
    )
    for python in (f"python{version}", *map(str, kept)):
        try:
            done = subprocess.run([python, "-c", ""], capture_output=True)
        except OSError:
            continue
        if done.returncode == 0:
            return python
    return None


def test_the_versions_that_are_named_begin_with_the_lowest_that_is_allowed() -> None:
    assert PROJECT["requires-python"] == f">={SUPPORTED[0]}"
    assert [f"3.{minor}" for minor in range(11, 11 + len(SUPPORTED))] == SUPPORTED
    assert f"({SUPPORTED[0].replace('.', ', ')})" in (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.parametrize("version", SUPPORTED)
def test_the_sources_compile_and_the_package_is_imported(version: str) -> None:
    python = sys.executable if sys.version.startswith(f"{version}.") else interpreter(version)
    if python is None:
        pytest.skip(f"no python{version} here")
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": "src", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([python, "-c", COMPILE], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(version)
