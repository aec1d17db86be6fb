"""Drafts from the sequence's own text: the tokens after an earlier occurrence of its end.

    the  cat  sat  on  the  mat  and  the  cat          the end `the cat` has occurred before
    ╰──────╯                          ╰──────╯
              sat  on  the  mat                         the drafts: what followed it there

The longest match wins, up to `max_ngram` tokens. Among equally long matches the newest wins, since a text
that changes (a renamed variable, the current item of a list) repeats its last version. Compared with the
oldest match, answers of a small model got 5 to 7 % more tokens per step, and edits of a file 0.5 % fewer.
Edits need long matches, since many lines of code start alike: with matches of at most 4 tokens, they got 14 %
fewer tokens per step than with at most 16. If what followed the match reaches the end of the text, the drafts
repeat it, so a text with a short period gets all the drafts it can use:

    .. a b c a b      drafts:  c a b c a b c ..
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from infer.errors import ConfigError
from infer.speculative.proposer import Wish
from infer.speculative.text_index import TextIndex

NOTHING: array[int] = array("I")


class OwnTexts:
    """An index of each sequence's text so far, updated by every lookup."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._indexes: dict[int, TextIndex] = {}

    def index_of(self, wish: Wish) -> TextIndex:
        """Return the index of a wish's text, updated to its newest token."""
        index = self._indexes.get(wish.seq_id)
        if index is None or not index.continues_in(wish.tokens):
            index = self._indexes[wish.seq_id] = TextIndex(self._size)
        index.extend(wish.tokens)
        return index

    def forget(self, seq_id: int) -> None:
        """Drop the index of a sequence, if there is one."""
        self._indexes.pop(seq_id, None)


def repeat_from(text: array[int], place: int, count: int) -> array[int]:
    """Return `count` tokens from `place` on; after the end of the text they repeat from `place`."""
    found = text[place : place + count]
    if len(found) == count:
        return found
    return (found * (count // len(found) + 1))[:count]


class NgramProposer:
    """Proposes the tokens after the newest of the longest earlier matches of the text's end."""

    def __init__(self, min_ngram: int = 2, max_ngram: int = 16) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ConfigError(
                f"n-grams of {min_ngram} to {max_ngram} tokens cannot be looked up; "
                "the shortest must have at least 1 token and not be longer than the longest"
            )
        self._max_ngram = max_ngram
        self._texts = OwnTexts(min_ngram)

    def propose(self, wishes: Sequence[Wish]) -> list[Sequence[int]]:
        """Return the drafts of each wish; empty without a match of at least `min_ngram` tokens."""
        return [self._drafts_of(wish) for wish in wishes]

    def _drafts_of(self, wish: Wish) -> array[int]:
        if wish.num_drafts < 1:
            return NOTHING
        text = wish.tokens
        _, places = self._texts.index_of(wish).match(text, text[-self._max_ngram :])
        return repeat_from(text, places[0], wish.num_drafts) if places else NOTHING

    def has_match(self, wish: Wish) -> bool:
        """True if the text's end has occurred before."""
        return wish.num_drafts > 0 and self._texts.index_of(wish).has(wish.tokens)

    def finish(self, wish: Wish) -> None:
        """Forget the sequence's text."""
        self._texts.forget(wish.seq_id)
