from __future__ import annotations

from collections.abc import Iterator

from infer.cli.answer import show_answer
from infer.outputs import TextDelta


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
    answer = show_answer(deltas, lambda text: None, lambda: deltas.num_read == 4)
    assert (answer.first_token_s, answer.total_s, answer.tokens_per_s) == (2.0, 5.0, 1.0)


def test_stopping_an_answer_ends_its_request_at_once() -> None:
    deltas, shown = Deltas(), list[str]()
    answer = show_answer(deltas, shown.append, lambda: len(shown) == 3)
    assert deltas.is_closed
    assert answer.token_ids == (1, 2, 3)
    assert answer.finish_reason is None
