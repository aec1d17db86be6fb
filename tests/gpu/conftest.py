"""Where no NVIDIA GPU is, the files of this folder are skipped without being imported.

A run on a borrowed GPU may be cut off at any time: what fails says why at once, not at the end.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest


@functools.cache
def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


class _Skipped(pytest.File):
    """A file of tests that cannot run here: collecting two thousand of them takes each worker seconds."""

    def collect(self) -> list[pytest.Item]:
        """Skip the file."""
        pytest.skip("no NVIDIA GPU")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.File | None:
    """Replace the files of this folder on a machine without a GPU."""
    return None if _has_gpu() else _Skipped.from_parent(parent, path=module_path)


@pytest.fixture(scope="session", autouse=True)
def _one_thread_each() -> None:
    """Workers side by side (pytest -n) leave each other the processors: the CPU's answers take one thread."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        import torch

        torch.set_num_threads(1)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        lines = [line for line in report.longreprtext.splitlines() if line.startswith(("E ", ">"))]
        said = report.capstdout.strip().splitlines()[-8:]
        print(
            f"\nFAILED {report.nodeid} ({report.when}, {report.duration:.1f} s)",
            *lines[-12:],
            *said,
            sep="\n",
        )
