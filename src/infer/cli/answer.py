"""One answer, shown piece by piece as it comes, and what it cost.

    command --load_s--> model ready --first_token_s--> first token ... last token
                                    |--------------- total_s ------------------|

Both `generate` and `chat` load a model, pass its stream of text to standard output and then know the
whole answer; this file is what they share.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from infer.cli.flags import knobs_from
from infer.cli.interrupts import importing
from infer.config.settings import EngineConfig

if TYPE_CHECKING:
    from infer.cli.remote import RemoteDelta
    from infer.engine.observer import EngineObserver
    from infer.frontend.llm import LLM, TextDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownAnswer:
    """The text and tokens of one answer, why it ended, and its times in seconds."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None  # None: stopped by the user
    first_token_s: float
    total_s: float
    stop_reason: str | int | None = None  # the stop string or stop token that ended it

    @property
    def tokens_per_s(self) -> float:
        """The speed after the first token, whose time is mostly the prompt's."""
        decode_s = self.total_s - self.first_token_s
        return (len(self.token_ids) - 1) / decode_s if decode_s > 0 and len(self.token_ids) > 1 else 0.0

    def stats(self) -> str:
        """The line of `--stats`."""
        if not self.token_ids:
            return f"no token in {self.total_s:.2f} s, finish: {self.finish_reason or 'stopped'}"
        return (
            f"first token {self.first_token_s:.2f} s, {len(self.token_ids)} tokens in {self.total_s:.2f} s, "
            f"{self.tokens_per_s:.1f} tokens/s after the first, finish: {self.finish_reason or 'stopped'}"
        )


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in the middle of an answer."""

    def __init__(self, answer: ShownAnswer) -> None:
        super().__init__()
        self.answer = answer  # as far as it came


def open_llm(args: argparse.Namespace, observer: EngineObserver | None = None) -> LLM:
    """Load the model the flags ask for; torch is imported here and not before."""
    knobs = knobs_from(args)
    EngineConfig.from_knobs(**knobs)  # knobs that contradict each other are refused at once
    with importing():
        from infer.frontend.llm import LLM

    return LLM(**knobs, show_progress=True, observer=observer)


def show_answer(
    deltas: Iterator[TextDelta] | Iterator[RemoteDelta],
    show: Callable[[str], None],
    is_stopped: Callable[[], bool] = lambda: False,
) -> ShownAnswer:
    """Pass each piece of text to `show` as it comes, until the end or until `is_stopped` says so."""
    started = perf_counter()
    first_token_s = 0.0
    pieces: list[str] = []
    token_ids: list[int] = []
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    is_interrupted = False
    try:
        for delta in deltas:
            if delta.token_ids and not token_ids:
                first_token_s = perf_counter() - started
            token_ids += delta.token_ids
            finish_reason, stop_reason = delta.finish_reason, delta.stop_reason
            if delta.text:
                pieces.append(delta.text)
                show(delta.text)
            if is_stopped():
                break
    except KeyboardInterrupt:
        is_interrupted = True
    total_s = perf_counter() - started
    if hasattr(deltas, "seconds") and token_ids:  # it ran before this began to read
        first_token_s, total_s = deltas.seconds
    if hasattr(deltas, "close"):
        deltas.close()  # ends the request now, not when the stream happens to be collected
    answer = ShownAnswer(
        text="".join(pieces),
        token_ids=tuple(token_ids),
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        first_token_s=first_token_s,
        total_s=total_s,
    )
    if is_interrupted:
        raise Interrupted(answer)
    return answer


def write_out(text: str) -> None:
    """Put text on standard output now, without waiting for the end of the line."""
    sys.stdout.write(text)
    sys.stdout.flush()


def notice(text: str) -> None:
    """Tell the user something that is not part of the answer."""
    print(text, file=sys.stderr, flush=True)
