"""The Triton kernels keep their contracts under Triton's interpreter: a few files of them in each process.

The interpreter is chosen when a kernel is *imported*, so one process can either interpret kernels or behave
like a user's. pytest does not collect the files by themselves, as no name begins with `test_`. By hand:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/attention_interpreted.py
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).parent
FILES = sorted(file.name for file in KERNELS.glob("*interpreted*.py"))
NUM_PROCESSES = 2


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def run(wanted: str, *files: str) -> None:
    plugins = ("-p", "no:cacheprovider", "-p", "tests.kernels.interpreter_plugin")
    command = [sys.executable, "-m", "pytest", "-q", *plugins, "-m", wanted]
    alone = {"TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [*command, *(str(KERNELS / file) for file in files)],
        env=os.environ | alone,
        cwd=KERNELS.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout) and "skipped" not in done.stdout, done.stdout


@needs_triton
@pytest.mark.parametrize(
    "first", range(NUM_PROCESSES), ids=lambda first: "-".join(FILES[first::NUM_PROCESSES])
)
def test_every_test_passes_and_none_is_skipped(first: int) -> None:
    run("not slow", *FILES[first::NUM_PROCESSES])


@needs_triton
@pytest.mark.slow
def test_every_slow_test_passes() -> None:
    run("slow", *FILES)


def test_the_files_are_found() -> None:
    assert {"attention_interpreted.py", "interpreted.py", "interpreted_step.py"} <= set(FILES)
