"""Where no NVIDIA GPU is, the files of this folder are skipped without being imported.

A run on a borrowed GPU may be cut off at any time: what fails says why at once, not at the end.

    python -m pytest tests/gpu -n 14            everything but the tests that take all memory of the GPU
    python -m pytest tests/gpu -m whole_card    those, one at a time
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


@pytest.fixture(autouse=True)
def _no_neighbours(request: pytest.FixtureRequest) -> None:
    """Skip a test that takes all memory of the GPU where other tests run at the same time."""
    if request.node.get_closest_marker("whole_card") and "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("it takes all memory of the GPU; run it with -m whole_card and without -n")


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
