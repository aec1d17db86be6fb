"""The commands in the feature pages are understood by the parser, and shown files are what is read."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from infer.bench.traces import read_trace
from infer.cli.chat_tools import read_tools
from infer.cli.main import build_parser

FEATURES = Path(__file__).parents[3] / "docs" / "features"


@pytest.mark.parametrize("page", ["record-replay.md", "simulator.md", "memory-plan.md", "chat.md"])
def test_every_command_of_the_page_is_understood(page: str) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```", (FEATURES / page).read_text("utf-8"), re.M | re.S)
    commands = [line for block in blocks for line in block.splitlines()]
    assert commands
    parser = build_parser()
    for command in commands:
        name, *arguments = shlex.split(command)
        assert name == "infer"
        assert parser.parse_args(arguments).run is not None


def test_the_trace_of_the_page_can_be_read(tmp_path: Path) -> None:
    [lines] = re.findall(r"^```json\n(.*?)^```", (FEATURES / "simulator.md").read_text("utf-8"), re.M | re.S)
    (tmp_path / "t.jsonl").write_text(lines)
    assert [item.output_len for item in read_trace(tmp_path / "t.jsonl")] == [10, 2]


def test_the_functions_of_the_page_are_tools_and_run(tmp_path: Path) -> None:
    [source] = re.findall(r"^```python\n(.*?)^```", (FEATURES / "chat.md").read_text("utf-8"), re.M | re.S)
    (tmp_path / "functions.py").write_text(source)
    tools = {tool.name: tool for tool in read_tools(tmp_path / "functions.py")}
    assert list(tools) == ["get_time", "roll_dice", "convert"]
    convert = tools["convert"]
    given = convert.read('{"value": 10, "source": "km", "target": "mile"}')
    assert convert.call(given) == "6.2137119223733395"
    assert len(tools["roll_dice"].call({"count": 3}).split(",")) == 3
    assert tools["get_time"].call({}).endswith("+00:00")
