"""The worked examples of the pages on scheduling and preemption are true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FEATURES = Path(__file__).parents[3] / "docs" / "features"


@pytest.mark.parametrize("page", ["scheduling.md", "preemption.md"])
def test_the_worked_example_runs(page: str) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (FEATURES / page).read_text("utf-8"), re.M | re.S)
    assert blocks
    for code in blocks:
        exec(compile(code, page, "exec"), {})
