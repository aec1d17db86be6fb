"""Run a file of kernel tests under Triton's interpreter, in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def assert_passes_interpreted(file: str, test_class: str = "") -> None:
    """Every test of this file, or of one class in it, passes and none is skipped."""
    tests = "::".join(filter(None, (str(HERE / file), test_class)))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests]
    done = subprocess.run(
        command,
        env=os.environ
        | {"TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout) and "skipped" not in done.stdout, done.stdout
