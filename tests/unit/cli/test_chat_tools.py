"""`infer chat --tools`: calls of a scripted model, asked for, made, and answered."""

from __future__ import annotations

import builtins
import json
import signal
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from infer.cli.chat_tools import MAX_RESULT_LEN, MAX_ROUNDS, escape
from infer.dialects.events import AnswerEvent, CallDelta, CallStart, ReasoningDelta
from infer.sampling.params import SamplingParams
from tests.unit.cli.ctrl_c import press_ctrl_c
from tests.unit.cli.fake_llm import FakeDelta, FakeLLM, FakeStream

Infer = Callable[..., Any]

TOOLS = '''
from pathlib import Path
from tests.unit.cli.ctrl_c import press_ctrl_c

def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    print("adding")
    return a + b

def fail(why: str) -> str:
    """Fail."""
    raise OSError(why)

def leave() -> None:
    """Leave the program."""
    raise SystemExit(3)

def stick() -> str:
    """Never come back."""
    press_ctrl_c()
    return "not reached"

def flood(size: int) -> str:
    """Say a lot."""
    return "x" * size

def _hidden(x) -> None: ...
'''


class Call:
    """A call in a scripted answer."""

    def __init__(self, name: str, arguments: str) -> None:
        self.name, self.arguments = name, arguments


class ScriptedLLM(FakeLLM):
    """Gives prepared answers: each a list of texts, calls and reasoning."""

    def __init__(self, *answers: Sequence[str | Call | ReasoningDelta]) -> None:
        super().__init__()
        self.answers = iter(answers)
        self.tools: list[Any] = []
        self.choices: list[Any] = []
        self.budgets: list[int | None] = []

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        *,
        tools: object = None,
        tool_choice: object = None,
        max_reasoning_tokens: int | None = None,
        template_options: Mapping[str, object] | None = None,
    ) -> FakeStream:
        self.chats.append([dict(message) for message in messages])
        self.tools.append(tools)
        self.choices.append(tool_choice)
        self.budgets.append(max_reasoning_tokens)
        return FakeStream(self._play(next(self.answers)), len(messages))

    def _play(self, parts: Sequence[str | Call | ReasoningDelta]) -> Generator[FakeDelta, None, None]:
        calls = [part for part in parts if isinstance(part, Call)]
        for part in parts:
            text, events = part if isinstance(part, str) else "", list[AnswerEvent]()
            if isinstance(part, ReasoningDelta):
                events = [part]
            elif isinstance(part, Call):
                index, half = calls.index(part), len(part.arguments) // 2
                events = [CallStart(index, f"id{len(self.chats)}{index}", part.name)]
                events += [CallDelta(index, part.arguments[:half]), CallDelta(index, part.arguments[half:])]
            yield FakeDelta(text, (1,), None, None, tuple(events))
        yield FakeDelta("", (), "tool_calls" if calls else "stop")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tools.py"
    path.write_text(TOOLS)
    return path


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Make input() return these lines, or raise them, and then the end of the file; returns the prompts."""

    def script(*lines: str | type[BaseException]) -> list[str]:
        prompts: list[str] = []
        rest = iter(lines)

        def fake_input(prompt: str) -> str:
            prompts.append(prompt)
            line = next(rest, EOFError)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr(builtins, "input", fake_input)
        return prompts

    return script


def results(llm: FakeLLM) -> list[str]:
    """The contents of the tool messages that the model saw last."""
    return [message["content"] for message in llm.chats[-1] if message["role"] == "tool"]


def test_a_call_is_shown_asked_for_made_and_its_result_goes_back(
    infer: Infer, file: Path, says: Callable[..., list[str]]
) -> None:
    prompts = says("what is 2 and 3?", "y")
    llm = ScriptedLLM(["Let me see. ", Call("add", '{"a": 2, "b": 3}')], ["It is 5."])
    outcome = infer("chat", "--tools", str(file), is_typed=True, llm=llm)
    assert outcome.code == 0
    assert outcome.out == "Let me see. \nIt is 5.\n", "and nothing that a function printed"
    assert "[the model calls add(a=2, b=3)]\nadding\n[add: 5]\n" in outcome.err
    assert prompts[1] == "call it? [y]es, [n]o, [a]lways call add, then Enter: "
    call = {"id": "id10", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
    assert llm.chats[1] == [
        {"role": "user", "content": "what is 2 and 3?"},
        {"role": "assistant", "content": "Let me see. ", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "id10", "content": "5"},
    ]
    names = [tool["function"]["name"] for tool in llm.tools[0]]
    assert names == ["add", "fail", "leave", "stick", "flood"]


def test_no_is_told_to_the_model_and_always_asks_no_more(
    infer: Infer, file: Path, says: Callable[..., list[str]]
) -> None:
    prompts = says("go", "what?", "no", "a", "go again")
    llm = ScriptedLLM(
        [Call("add", '{"a": 1}'), Call("add", '{"a": 2}'), Call("add", '{"a": 3}')],
        ["done"],
        [Call("add", '{"a": 4}')],
        ["done"],
    )
    infer("chat", "--tools", str(file), is_typed=True, llm=llm)
    assert results(llm) == ['{"error": "the user declined this call"}', "3", "4", "5"]
    assert sum(prompt.startswith("call it?") for prompt in prompts) == 3, "one was not understood"


def test_keys_typed_before_a_call_was_shown_do_not_agree_to_it(
    infer: Infer, file: Path, says: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed_before = ["y"]  # what waits in the terminal while the answer with the call comes
    monkeypatch.setattr("infer.cli.chat_tools.drop_typed", typed_before.clear)
    says("go", "n")
    llm = ScriptedLLM([Call("add", '{"a": 1}')], ["done"])
    infer("chat", "--tools", str(file), is_typed=True, llm=llm)
    assert not typed_before
    assert results(llm) == ['{"error": "the user declined this call"}']


@pytest.mark.parametrize("how", [KeyboardInterrupt, EOFError])
def test_leaving_a_question_ends_the_turn_and_not_the_chat(
    infer: Infer, file: Path, says: Callable[..., list[str]], how: type[BaseException]
) -> None:
    says("go", how, "and now?")
    llm = ScriptedLLM([Call("add", '{"a": 1}'), Call("add", '{"a": 2}')], ["Fine."])
    outcome = infer("chat", "--tools", str(file), is_typed=True, llm=llm)
    assert (outcome.code, outcome.out) == (0, "Fine.\n")
    assert results(llm) == ['{"error": "it was not called"}'] * 2
    assert llm.chats[-1][-1] == {"role": "user", "content": "and now?"}


@pytest.mark.parametrize(
    ("call", "result"),
    [
        (Call("fail", '{"why": "no disk"}'), '{"error": "OSError: no disk"}'),
        (Call("leave", ""), '{"error": "SystemExit: 3"}'),
        (Call("add", '{"a": "x"}'), '{"error": "a must be a whole number, got \\"x\\""}'),
        (
            Call("divide", "{}"),
            '{"error": "there is no such tool; the tools are add, fail, leave, stick, flood"}',
        ),
        (Call("flood", '{"size": 9000}'), "x" * MAX_RESULT_LEN + "\n[cut: 8000 of 9000 characters]"),
    ],
)
def test_what_becomes_of_a_call_is_told_to_the_model(
    infer: Infer, file: Path, call: Call, result: str
) -> None:
    llm = ScriptedLLM([call], ["I see."])
    outcome = infer("chat", "--tools", str(file), "--yes-to-tools", stdin="go\n", llm=llm)
    assert (outcome.code, outcome.out) == (0, "I see.\n")
    assert results(llm) == [result]
    assert call.name in outcome.err
    if call.name == "flood":
        assert "[flood returned more than the model is shown; cut: 8000 of 9000 characters]" in outcome.err
        assert len(outcome.err) < 1000


def test_ctrl_c_in_a_tool_ends_the_tool_and_the_model_is_told(infer: Infer, file: Path) -> None:
    llm = ScriptedLLM([Call("stick", "{}"), Call("add", '{"a": 1}')], ["I see."])
    handler = signal.default_int_handler
    before = signal.signal(signal.SIGINT, handler)  # a shell's background jobs ignore it
    try:
        outcome = infer("chat", "--tools", str(file), "--yes-to-tools", stdin="go\n", llm=llm)
    finally:
        assert signal.signal(signal.SIGINT, before) is handler
    assert (outcome.code, outcome.out) == (0, "I see.\n")
    assert results(llm) == ['{"error": "the user stopped this call"}', "2"]
    assert "[stick was stopped]" in outcome.err


def test_rounds_in_a_row_are_bounded(infer: Infer, file: Path) -> None:
    rounds = [[Call("add", '{"a": 1}')]] * (MAX_ROUNDS + 1)
    llm = ScriptedLLM(*rounds, ["Enough."])
    outcome = infer("chat", "--tools", str(file), "--yes-to-tools", stdin="go\nstop it\n", llm=llm)
    assert outcome.out == "Enough.\n"
    assert f"[the model called tools {MAX_ROUNDS} times in a row; send a message to go on]" in outcome.err
    assert results(llm) == ["2"] * MAX_ROUNDS + ['{"error": "it was not called"}']
    assert outcome.err.count("adding") == MAX_ROUNDS


def test_a_choice_holds_for_the_first_answer_to_a_message(infer: Infer, file: Path) -> None:
    named = {"type": "function", "function": {"name": "add"}}
    for given, sent in (("required", "required"), ("add", named)):
        llm = ScriptedLLM([Call("add", '{"a": 1}')], ["2"], [Call("add", '{"a": 1}')], ["2"])
        flags = ["--tools", str(file), "--yes-to-tools", "--tool-choice", given]
        infer("chat", *flags, stdin="go\ngo\n", llm=llm)
        assert llm.choices == [sent, None, sent, None]


def test_a_call_that_broke_off_is_left_out(infer: Infer, file: Path) -> None:
    llm = ScriptedLLM(["Wait.", Call("add", '{"a": 1}'), Call("add", '{"a": ')], ["2"])
    outcome = infer("chat", "--tools", str(file), "--yes-to-tools", stdin="go\n", llm=llm)
    assert (results(llm), outcome.out) == (["2"], "Wait.\n2\n")
    assert len(llm.chats[-1][1]["tool_calls"]) == 1
    assert "[skipped a call of add: its arguments are incomplete]" in outcome.err


def test_calls_that_were_not_asked_for_are_no_part_of_the_conversation(infer: Infer) -> None:
    llm = ScriptedLLM(["Hm.", Call("add", '{"a": 1}')], ["Hello."])
    outcome = infer("chat", stdin="go\nhi\n", llm=llm)
    assert outcome.out == "Hm.\nHello.\n"
    assert llm.chats[1][1] == {"role": "assistant", "content": "Hm."}


def test_calls_of_an_answer_that_was_stopped_are_not_made(infer: Infer, file: Path) -> None:
    class Stopped(ScriptedLLM):
        def _play(self, parts: Any) -> Generator[FakeDelta, None, None]:
            for delta in super()._play(parts):
                if len(self.chats) == 1:
                    press_ctrl_c()
                yield delta

    llm = Stopped([Call("add", '{"a": 1}')], ["Yes?"])
    outcome = infer("chat", "--tools", str(file), "--yes-to-tools", stdin="go\nhello\n", llm=llm)
    assert outcome.out.endswith("Yes?\n")
    assert "[stopped]" in outcome.err
    assert "adding" not in outcome.err
    assert "tool_calls" not in llm.chats[-1][1]


def test_a_call_cannot_hide_what_it_does_from_the_terminal(infer: Infer, file: Path) -> None:
    why = "\x1b[2K\rharmless\u202e"
    llm = ScriptedLLM([Call("fail", json.dumps({"why": why})), Call("\x1b[2Kadd", "{}")], ["ok"])
    err = infer("chat", "--tools", str(file), "--yes-to-tools", stdin="go\n", llm=llm).err
    assert r"[the model calls fail(why='\x1b[2K\rharmless\u202e')]" in err
    assert not any(each in err for each in "\x1b\r\u202e")
    assert escape("a\nb\x07é") == "a\nb\\x07é"


def test_the_oldest_message_is_forgotten_with_its_calls(infer: Infer, file: Path) -> None:
    class Narrow(ScriptedLLM):
        def stream_chat(self, messages: Any, params: Any, **options: Any) -> FakeStream:
            if len(messages) > 4:
                self.stream([0] * self.context_len, params)  # raises
            return super().stream_chat(messages, params, **options)

    llm = Narrow([Call("add", '{"a": 1}')], ["2"], ["bye"])
    outcome = infer("chat", "--tools", str(file), "--yes-to-tools", stdin="go\nand?\n", llm=llm)
    assert llm.chats[-1] == [{"role": "user", "content": "and?"}]
    assert "forgot your oldest message and its answer: 'go'" in outcome.err


def test_the_command_lists_the_tools(infer: Infer, file: Path) -> None:
    err = infer("chat", "--tools", str(file), "--yes-to-tools", stdin="/tools\n").err
    assert "  add(a: int, b: int = 1) -> int  Add two numbers., called without asking\n" in err
    assert "no tools; --tools FILE gives some" in infer("chat", stdin="/tools\n").err


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "there is no such file; give a Python file of functions"),
        ("x = 1", "holds no public function; write one: def name(city: str) -> str"),
        ("def f(:\n", "line 1: SyntaxError: "),
        ("\nimport nothing_of_that_name\n", "line 2: ModuleNotFoundError: "),
        ("def f():\n    1/0\nf()\n", "line 2: ZeroDivisionError: "),
        ("raise SystemExit('no')", "line 1: SystemExit: no"),
        ("\ndef f(x): ...\n", "tools.py, line 2: f cannot be a tool: parameter 'x' has no type; allowed are"),
        ("__all__ = ['f']", "__all__ names 'f', which is not a function in it"),
    ],
)
def test_a_file_that_gives_no_tools_is_refused_before_a_model_is_loaded(
    infer: Infer, tmp_path: Path, source: str | None, message: str
) -> None:
    path = tmp_path / "tools.py"
    if source is not None:
        path.write_text(source)
    outcome = infer("chat", "--tools", str(path), "--yes-to-tools", stdin="go\n")
    assert outcome.code == 2
    assert message in outcome.err
    assert outcome.llm.num_opened == 0


def test_a_file_may_choose_its_tools_and_import_its_neighbours(infer: Infer, tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_tools.py").write_text("def twice(x: int) -> int:\n    return 2 * x\n")
    path = tmp_path / "tools.py"
    path.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from neighbour_of_tools import twice\n__all__ = ['twice', 'at']\n"
        "@dataclass\nclass Point:\n    x: int\n"
        "def at(point: Point) -> int:\n    return point.x\ndef other(x: int) -> int: ...\n"
    )
    llm = ScriptedLLM([Call("twice", '{"x": 2}'), Call("at", '{"point": {"x": 7}}')], ["ok"])
    infer("chat", "--tools", str(path), "--yes-to-tools", stdin="go\n", llm=llm)
    assert results(llm) == ["4", "7"]
    assert len(llm.tools[0]) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tools", "{file}"], "--yes-to-tools calls without asking"),
        (["--tool-choice", "required"], "--tool-choice is for the functions of --tools FILE"),
        (["--yes-to-tools"], "--yes-to-tools is for the functions of --tools FILE"),
        (
            ["--tools", "{file}", "--yes-to-tools", "--tool-choice", "ad"],
            "--tool-choice must be auto, required or a tool's name, got 'ad'",
        ),
        (
            ["--tools", "{file}", "--choice", "a"],
            "--choice fixes the form of the whole answer, so it could not call",
        ),
        (
            ["--tools", "{file}", "--regex", "a"],
            "--regex fixes the form of the whole answer, so it could not call",
        ),
    ],
)
def test_flags_that_cannot_work_are_refused(infer: Infer, file: Path, flags: list[str], message: str) -> None:
    outcome = infer("chat", *(flag.format(file=file) for flag in flags), stdin="go\n")
    assert outcome.code == 2
    assert message in outcome.err


def test_reasoning_is_no_part_of_the_answer_and_goes_back_into_the_conversation(infer: Infer) -> None:
    script: list[list[str | Call | ReasoningDelta]] = [
        [ReasoningDelta("Hm, "), ReasoningDelta("well."), "Yes."],
        ["No."],
    ]
    llm = ScriptedLLM(*script)
    outcome = infer("chat", stdin="is it?\nreally?\n", llm=llm)
    assert outcome.out == "Yes.\nNo.\n"
    assert outcome.err == "[9 characters of reasoning; --show-reasoning shows them]\n"
    assert llm.chats[1][1] == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm, well."}

    outcome = infer("chat", "--show-reasoning", stdin="is it?\nreally?\n", llm=ScriptedLLM(*script))
    assert (outcome.out, outcome.err) == ("Yes.\nNo.\n", "Hm, well.\n")


def test_reasoning_can_be_bounded(infer: Infer) -> None:
    llm = ScriptedLLM(["Yes."])
    infer("chat", "--max-reasoning-tokens", "40", stdin="is it?\n", llm=llm)
    assert llm.budgets == [40]
    llm = ScriptedLLM(["Yes."])
    infer("generate", "--max-reasoning-tokens", "0", "is it?", llm=llm)
    assert llm.budgets == [0]
    assert infer("generate", "--raw", "--max-reasoning-tokens", "0", "is it?").code == 2
    outcome = infer("chat", "--max-reasoning-tokens", "-1", stdin="is it?\n")
    assert "--max-reasoning-tokens must be a whole number of 0 or more" in outcome.err


def test_what_is_thought_before_an_answer_to_a_prompt_is_no_part_of_it(infer: Infer) -> None:
    script: list[str | Call | ReasoningDelta] = [ReasoningDelta("Hm, "), ReasoningDelta("well."), "Yes."]
    outcome = infer("generate", "is it?", llm=ScriptedLLM(script))
    assert outcome.out == "Yes.\n"
    assert outcome.err == "[9 characters of reasoning; --show-reasoning shows them]\n"
    outcome = infer("generate", "is it?", "--show-reasoning", llm=ScriptedLLM(script))
    assert (outcome.out, outcome.err) == ("Yes.\n", "Hm, well.\n")
    outcome = infer("generate", "is it?", "--json", llm=ScriptedLLM(script))
    data = json.loads(outcome.out)
    assert (data["text"], data["reasoning"], outcome.err) == ("Yes.", "Hm, well.", "")
    assert data["usage"] == {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}


def test_a_call_with_line_ends_in_a_text_is_made(infer: Infer, file: Path) -> None:
    """As models write them, and JSON does not allow; what goes back to the model is JSON."""
    file.write_text("def count(text: str) -> int:\n    return text.count(chr(10))\n")
    llm = ScriptedLLM([Call("count", '{"text": "a\nb\n"}')], ["Two."])
    outcome = infer("chat", "--tools", str(file), "--yes-to-tools", stdin="go\n", llm=llm)
    assert (results(llm), outcome.out) == (["2"], "Two.\n")
    sent: Any = llm.chats[-1][1]["tool_calls"]
    (call,) = sent
    assert json.loads(call["function"]["arguments"]) == {"text": "a\nb\n"}
