"""The worked examples of the two feature pages are true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FEATURES = Path(__file__).parents[3] / "docs" / "features"


@pytest.mark.parametrize("page", ["paged-kv-cache.md", "prefix-caching.md"])
def test_the_worked_example_runs(page: str) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (FEATURES / page).read_text("utf-8"), re.M | re.S)
    assert blocks
    for code in blocks:
        exec(compile(code, page, "exec"), {})
