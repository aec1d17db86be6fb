"""The same workload for another model or another repeat.

`fit` shortens what a small model cannot hold; `vary` changes every token and keeps every length, so that a
repeat finds nothing of the one before it in the prefix cache.
"""

from __future__ import annotations

from dataclasses import replace

from infer.bench.workloads import DEFAULT_VOCAB, FIRST_ID, WORDS, Turn, Workload


def fit(workload: Workload, *, context_len: int, vocab_size: int | None = None) -> Workload:
    """Return the workload for a model that is too small for it: shorter in proportion, ids in range."""
    scale = min(1.0, context_len / workload.longest)
    if workload.is_chat and scale < 1:
        scale *= 0.25  # a word may be several tokens of a small vocabulary, and a template adds its own
    folds = vocab_size is not None and any(
        max(turn.ids, default=0) >= vocab_size for session in workload.sessions for turn in session.turns
    )
    if scale == 1 and not folds:
        return workload

    def shrink(turn: Turn) -> Turn:
        ids = turn.ids[: max(1, int(len(turn.ids) * scale))] if turn.ids else ()
        if vocab_size is not None:
            ids = tuple(FIRST_ID + token_id % (vocab_size - FIRST_ID) for token_id in ids)
        words = turn.text.split()
        return Turn(
            ids=ids,
            text=" ".join(words[: max(1, int(len(words) * scale))]),
            max_tokens=max(1, int(turn.max_tokens * scale)),
        )

    def shorten(system: str) -> str:
        words = system.split()
        return " ".join(words[: int(len(words) * scale)])

    said = f"; shortened to {scale:.0%} for a context of {context_len}" if scale < 1 else ""
    return replace(workload.change(shrink, shorten), about=workload.about + said)


def vary(workload: Workload, repeat: int, vocab_size: int = DEFAULT_VOCAB) -> Workload:
    """Return the same lengths and times with other tokens, so that no repeat is in the prefix cache.

    Tokens that were equal stay equal: prefixes that are shared within the workload are shared still.
    """
    if repeat == 0:
        return workload
    size = vocab_size - FIRST_ID
    shift = 37 * repeat % len(WORDS)
    other_word = dict(zip(WORDS, WORDS[shift:] + WORDS[:shift], strict=True))

    def change(text: str) -> str:
        return " ".join(other_word.get(word, word) for word in text.split(" "))

    def other(turn: Turn) -> Turn:
        ids = tuple(FIRST_ID + (token_id - FIRST_ID + 7919 * repeat) % size for token_id in turn.ids)
        return replace(turn, ids=ids, text=change(turn.text))

    return workload.change(other, change)
