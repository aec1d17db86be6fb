"""The worked example of the page on speculative decoding is true, and its table has every knob."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from infer.config.speculation import SpeculationConfig

PAGE = Path(__file__).parents[3] / "docs" / "features" / "speculative-decoding.md"


def test_the_worked_example_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    assert blocks
    for code in blocks:
        exec(compile(code, PAGE.name, "exec"), {})


def test_every_knob_has_its_row() -> None:
    table = PAGE.read_text("utf-8").partition("## The knobs")[2].partition("\n## ")[0]
    rows = "".join(line.split("|")[1] for line in table.splitlines() if line.startswith("|"))
    assert set(re.findall(r"`(\w+)`", rows)) == {f.name for f in fields(SpeculationConfig)}
