"""Find the text of special tokens in a text.

Special tokens tell a model whose turn it is, so only a template may write them. `SpecialText` finds their
spelling in a text, leftmost and longest first, as the `tokenizers` library does. The search must be linear,
because a client may send a megabyte of "<", and a vocabulary may hold a thousand special tokens. So the
alternatives share their beginnings, as in a trie:

    <s>  <start>  <stop>    ──►    <s(?:>|t(?:art>|op>))
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tokenizers import AddedToken

from infer.errors import CheckpointError

_MAX_LEVELS = 32


class Occurrence(NamedTuple):
    """text[start:stop] is replaced by the token; `content` is its spelling."""

    start: int
    stop: int
    content: str


class SpecialText:
    """The spellings of a vocabulary's special tokens, and how to find them."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        self._tokens = {token.content: token for token in tokens if token.content}
        self._pattern = re.compile(_trie_pattern(sorted(self._tokens))) if self._tokens else None

    def find(self, text: str, mark: str = "") -> Iterator[Occurrence]:
        """Yield each occurrence from left to right, never overlapping, except what `guard` marked."""
        if self._pattern is None:
            return
        end = 0
        for match in self._pattern.finditer(text):
            if match.start() < end:  # swallowed by the white space rule of the one before
                continue
            if mark and text.startswith(mark, match.end()):  # a token of one character: nothing to cut
                continue
            token = self._tokens[match[0]]  # may swallow the white space to its left or right
            start, stop = match.span()
            while token.lstrip and start > end and text[start - 1].isspace():
                start -= 1
            while token.rstrip and stop < len(text) and text[stop].isspace():
                stop += 1
            yield Occurrence(start, stop, match[0])
            end = stop

    def guard(self, text: str, mark: str) -> str:
        """Put `mark` after each character of each occurrence, so that it no longer is one.

        After each, not just once: a special token may be spelled inside another, or begin in one.
        """
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: "".join(char + mark for char in match[0]), text)


def _trie_pattern(words: list[str], levels: int = _MAX_LEVELS) -> str:
    """A pattern that matches any of these sorted words, the longest that fits."""
    if levels == 0:  # each of them holds a copy of the words
        raise CheckpointError(
            f"more than {_MAX_LEVELS} special tokens begin with one another, as in no real vocabulary"
        )
    groups: dict[str, list[str]] = {}
    for word in words:
        if word:
            groups.setdefault(word[0], []).append(word)
    branches = []
    for group in groups.values():
        shared = os.path.commonprefix(group)
        rest = [word[len(shared) :] for word in group]
        branches.append(re.escape(shared) + _trie_pattern(rest, levels - 1))
    if not branches:
        return ""
    pattern = branches[0] if len(branches) == 1 else "(?:" + "|".join(branches) + ")"
    return f"(?:{pattern})?" if "" in words else pattern
