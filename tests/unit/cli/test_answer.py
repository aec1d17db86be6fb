from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from infer.cli.answer import Interrupted, Screen, show_answer
from infer.cli.asking import open_llm
from infer.cli.main import build_parser
from infer.dialects.events import TextDelta
from infer.errors import ConfigError


class Deltas(Iterator[TextDelta]):
    """Like the stream of an `LLM`: an iterator with a `close`, and no generator."""

    def __init__(self) -> None:
        self.num_read = 0
        self.is_closed = False

    def __next__(self) -> TextDelta:
        self.num_read += 1
        return TextDelta(text="a", token_ids=(self.num_read,))

    def close(self) -> None:
        self.is_closed = True


def test_the_times_are_those_of_the_stream_if_it_ran_before_it_was_read() -> None:
    deltas = Deltas()
    deltas.seconds = (2.0, 5.0)  # type: ignore[attr-defined]
    answer = show_answer(deltas, None, lambda: deltas.num_read == 4)
    assert (answer.first_token_s, answer.total_s, answer.tokens_per_s) == (2.0, 5.0, 1.0)


def test_stopping_an_answer_ends_its_request_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    deltas = Deltas()
    answer = show_answer(deltas, Screen(shows_reasoning=True), lambda: deltas.num_read == 3)
    assert deltas.is_closed and capsys.readouterr().out == "aaa\n"
    assert answer.token_ids == (1, 2, 3)
    assert answer.finish_reason is None


def test_an_interrupt_brings_what_was_answered_so_far(capsys: pytest.CaptureFixture[str]) -> None:
    deltas = Deltas()

    def press_ctrl_c() -> bool:
        if deltas.num_read == 3:
            raise KeyboardInterrupt
        return False

    with pytest.raises(Interrupted) as caught:
        show_answer(deltas, Screen(shows_reasoning=True), press_ctrl_c)
    assert deltas.is_closed and capsys.readouterr().out == "aaa\n"
    assert caught.value.answer.token_ids == (1, 2, 3)
    assert "3 tokens in" in caught.value.answer.stats()


def test_an_answer_without_a_token_has_no_time_of_the_first() -> None:
    def press_ctrl_c() -> Iterator[TextDelta]:
        raise KeyboardInterrupt
        yield

    with pytest.raises(Interrupted) as caught:
        show_answer(press_ctrl_c(), None)
    assert caught.value.answer.stats().startswith("no token in ")


def test_knobs_that_contradict_each_other_are_refused_before_torch_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "infer.frontend.llm", None)  # to import it is an error
    args = build_parser().parse_args(["generate", "hi", "--preemption", "swap", "--swap-blocks", "0"])
    with pytest.raises(ConfigError, match="preemption=swap needs host memory"):
        open_llm(args)


@pytest.mark.parametrize(
    ("last", "hint"), [("hi", "; if 'hi' is the prompt, write --lora x=/nope before it"), ("y=/nope", "")]
)
def test_a_prompt_that_was_read_as_an_adapter_is_named(last: str, hint: str) -> None:
    args = build_parser().parse_args(["generate", "--lora-modules", "x=/nope", last])
    with pytest.raises(ConfigError) as caught:
        open_llm(args)
    assert str(caught.value) == (f"2 LoRA adapters are named, but this command uses one; give one{hint}")
