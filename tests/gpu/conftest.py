"""A run on a borrowed GPU may be cut off at any time: what fails says why at once, not at the end."""

from __future__ import annotations

import os

import pytest


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
