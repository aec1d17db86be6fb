"""`infer chat --tools` and `LLM.chat(tools=[function])`: the text between the model and the function is real.

A server's answers are played (tests/support/actor.py), so that they are exact. An engine here has random
weights, and a function whose parameters have a few values each: whatever it is made to call, it ends.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Literal

import pytest

from infer.cli.main import main
from infer.frontend.functions import PythonTool
from infer.frontend.llm import LLM
from infer.sampling.params import SamplingParams
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.support.actor import Actor, read_encoder, serve_actor
from tests.support.fetched import fetched_model

TOOLS = '''
from typing import Literal

def switch(lamp: Literal["red", "green", "blue"], on: bool) -> str:
    """Switch a lamp."""
    return f"{lamp} is {'on' if on else 'off'}"
'''


def switch(lamp: Literal["red", "green", "blue"], on: bool) -> str:
    """Switch a lamp."""
    return f"{lamp} is {'on' if on else 'off'}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tools") / "qwen2"
    make_checkpoint("qwen2", directory, sizes=Sizes(context_len=2048))
    return directory


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "functions.py").write_text(TOOLS)
    return str(tmp_path / "functions.py")


def play(prompt: str) -> str:
    """Switch two lamps, then say what came of it."""
    if "<tool_response>" in prompt:
        return "Done." if "red is on" in prompt and "blue is off" in prompt else "Nothing came back."
    calls = [{"lamp": "red", "on": True}, {"lamp": "blue", "on": False}]
    written = [
        f"<tool_call>\n{json.dumps({'name': 'switch', 'arguments': call})}\n</tool_call>" for call in calls
    ]
    return "<think>\nTwo lamps.\n</think>\n\nOne moment.\n" + "\n".join(written)


def test_calls_of_a_servers_model_are_made_and_answered(
    tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    encoder = read_encoder("qwen3", tmp_path / "qwen3")
    actor = Actor(encoder, play)
    monkeypatch.setattr("sys.stdin", io.StringIO("Only red light!\n"))
    flags = ["--tools", file, "--yes-to-tools", "--show-reasoning", "--max-tokens", "200"]
    with serve_actor(actor, encoder) as url:
        assert main(["chat", "--url", url, *flags]) == 0
    told = capsys.readouterr()
    assert [line for line in told.out.splitlines() if line] == ["One moment.", "Done."]
    assert [line for line in told.err.splitlines() if line] == [
        "Two lamps.",
        "[the model calls switch(lamp='red', on=True)]",
        "[switch: red is on]",
        "[the model calls switch(lamp='blue', on=False)]",
        "[switch: blue is off]",
    ]


@pytest.mark.parametrize("choice", ["required", "switch"])
def test_a_model_here_is_made_to_call_and_the_call_is_made(
    checkpoint: Path,
    file: str,
    choice: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Light!\n"))
    knobs = [
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--num-blocks",
        "256",
        "--max-tokens",
        "150",
        "--seed",
        "1",
    ]
    flags = ["--tools", file, "--yes-to-tools", "--tool-choice", choice, *knobs]
    assert main(["chat", "--model", str(checkpoint), *flags]) == 0
    err = capsys.readouterr().err
    assert "[the model calls switch(" in err
    assert "[switch: " in err


def test_a_function_is_a_tool_of_the_library(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), dtype="float32", device="cpu", num_blocks=256)
    params = SamplingParams(temperature=1, seed=3, max_tokens=150)
    [answer] = llm.chat("Light!", params, tools=[switch], tool_choice="required")
    calls = answer.outputs[0].tool_calls
    assert calls
    tool = PythonTool(switch)
    for call in calls:
        given = json.loads(call.arguments)
        assert call.name == "switch"
        assert tool.call(tool.read(call.arguments)) == switch(**given)


@pytest.mark.slow
def test_the_default_model_calls_the_functions_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fetched_model()
    page = Path(__file__).parents[2] / "docs" / "features" / "chat.md"
    [source] = re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
    (tmp_path / "functions.py").write_text(source)
    monkeypatch.setattr("sys.stdin", io.StringIO("How many miles are 10 km?\n"))
    flags = ["--tools", str(tmp_path / "functions.py"), "--yes-to-tools", "--temperature", "0"]
    assert main(["chat", "--device", "cpu", "--tool-choice", "convert", "--max-tokens", "60", *flags]) == 0
    told = capsys.readouterr()
    assert re.search(r"\[the model calls convert\(value=\S+, source='\w+', target='\w+'\)\]", told.err)
    assert re.search(r"\[convert: [\d.e+-]+\]", told.err)
    assert told.out.strip(), "and it goes on from the result"
