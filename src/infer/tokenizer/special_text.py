"""Find the spellings of special tokens in a text.

Special tokens tell a model whose turn it is, so only a template may write them. `SpecialText` finds their
spellings in a text, leftmost and longest first, as the `tokenizers` library does. The search must be linear,
because a client may send a megabyte of "<", and a vocabulary may have a thousand special tokens. So the
alternatives of the regex share their prefixes, as in a trie:

    <s>  <start>  <stop>    ──►    <s(?:>|t(?:art>|op>))
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tokenizers import AddedToken

from infer.errors import CheckpointError

_MAX_LEVELS = 32


class Occurrence(NamedTuple):
    """A special token at text[start:stop]; `content` is its spelling."""

    start: int
    stop: int
    content: str


class SpecialText:
    """Finds the spellings of a vocabulary's special tokens."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        self._tokens = {token.content: token for token in tokens if token.content}
        self._pattern = re.compile(_trie_pattern(sorted(self._tokens))) if self._tokens else None

    def find(self, text: str, mark: str = "") -> Iterator[Occurrence]:
        """Yield occurrences from left to right, without overlaps, skipping what `guard` marked."""
        if self._pattern is None:
            return
        end = 0
        for match in self._pattern.finditer(text):
            if match.start() < end:  # part of the white space that the previous token took
                continue
            if mark and text.startswith(mark, match.end()):  # a guarded token of one character
                continue
            token = self._tokens[match[0]]  # some tokens include the white space to their left or right
            start, stop = match.span()
            if token.single_word and any(
                map(_in_word, text[max(start - 1, 0) : start] + text[stop : stop + 1])
            ):
                continue
            while token.lstrip and start > end and _is_space(text[start - 1]):
                start -= 1
            while token.rstrip and stop < len(text) and _is_space(text[stop]):
                stop += 1
            yield Occurrence(start, stop, match[0])
            end = stop

    def guard(self, text: str, mark: str) -> str:
        """Insert `mark` after each character of each occurrence, so that it no longer matches.

        One mark is not enough: a special token may contain another, or overlap one.
        """
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: "".join(char + mark for char in match[0]), text)


def _in_word(char: str) -> bool:
    r"""Return True for a character of a word: `\w` of the library, which counts marks and circled letters."""
    kind, code = unicodedata.category(char), ord(char)
    is_circled = 0x24B6 <= code <= 0x24E9 or (0x1F130 <= code <= 0x1F189 and kind == "So")
    return kind[0] in "LM" or kind in ("Nd", "Nl", "Pc") or char in "\u200c\u200d" or is_circled


def _is_space(char: str) -> bool:
    r"""Return True for white space: `\s` of the library, which does not count separators of data."""
    return char.isspace() and not "\x1c" <= char <= "\x1f"


def _trie_pattern(words: list[str], levels: int = _MAX_LEVELS) -> str:
    """Return a pattern that matches the longest of these sorted words that fits."""
    if levels == 0:  # each level holds a copy of the words
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
