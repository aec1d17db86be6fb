"""The commands in the feature pages are understood by the parser, and shown files are what is read."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from infer.bench.traces import read_trace
from infer.cli.main import build_parser

FEATURES = Path(__file__).parents[3] / "docs" / "features"


@pytest.mark.parametrize("page", ["record-replay.md", "simulator.md", "memory-plan.md"])
def test_every_command_of_the_page_is_understood(page: str) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```", (FEATURES / page).read_text("utf-8"), re.M | re.S)
    commands = [line for block in blocks for line in block.splitlines()]
    assert commands
    for command in commands:
        name, *arguments = shlex.split(command)
        assert name == "infer"
        assert build_parser().parse_args(arguments).run is not None


def test_the_trace_of_the_page_can_be_read(tmp_path: Path) -> None:
    [lines] = re.findall(r"^```json\n(.*?)^```", (FEATURES / "simulator.md").read_text("utf-8"), re.M | re.S)
    (tmp_path / "t.jsonl").write_text(lines)
    assert [item.output_len for item in read_trace(tmp_path / "t.jsonl")] == [10, 2]
