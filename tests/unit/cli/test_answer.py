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


def test_stopping_an_answer_ends_its_request_at_once() -> None:
    deltas, shown = Deltas(), list[str]()
    answer = show_answer(deltas, shown.append, lambda: len(shown) == 3)
    assert deltas.is_closed
    assert answer.token_ids == (1, 2, 3)
    assert answer.finish_reason is None
