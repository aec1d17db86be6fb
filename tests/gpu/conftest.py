"""A run on a borrowed GPU may be cut off at any time: what fails says why at once, not at the end."""

from __future__ import annotations

import pytest


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
