"""The text index finds where the end of a text has occurred before.

Every run of `size` tokens is a key of a dict, whose value is the *place* after the run's newest occurrence.
An array links each place to the previous place of the same run (size 2 below):

    place      0   1   2   3   4   5   6   7   8   9
    token      a   b   c   x   b   c   y   b   c          newest[b c] = 6: the text's own end has no place yet
    older                  -           3                  newest[a b] = 2, newest[c x] = 4, ...

To match the end `.. y b c`, the chain of `b c` is followed from the newest place back, and the text before
each place is compared with the end. Chains of common runs are long, so only the newest CANDIDATES places are
compared; on edits of real code this limit costs less than 1 % more steps. A suffix tree would find every
place, but needs several Python objects per token.

A run gets its place when the token after it is known, so the end of a text never matches itself. Keys are the
ids as bytes. Python hashes bytes with a secret seed, so no client can choose a text whose runs all collide.
The dict is never iterated, so results do not depend on that seed.
"""

from __future__ import annotations

from array import array
from typing import Final

import numpy as np

ID_BYTES: Final = array("I").itemsize
CANDIDATES: Final = 32  # places that are compared with the end of a text, newest first


class TextIndex:
    """The places after each run of `size` ids of 32 bits, in a text that grows and may lose its start."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._run_type = np.dtype((np.void, size * ID_BYTES))
        self._newest: dict[bytes, int] = {}  # run -> place, counted from the first token ever, dropped or not
        self._older = array("q")  # place -> the place of the run's previous occurrence, or -1
        self._num_dropped = 0
        self._last_token = -1

    def continues_in(self, text: array[int]) -> bool:
        """True if `text` seems to be the indexed text with more tokens at its end; a quick check."""
        known = len(self._older)
        return known == 0 or (known <= len(text) and text[known - 1] == self._last_token)

    def extend(self, text: array[int]) -> None:
        """Index the tokens of `text` after the indexed ones."""
        size, older, newest = self.size, self._older, self._newest
        if len(older) == len(text):
            return
        self._last_token = text[-1]
        older.extend([-1] * (min(size, len(text)) - len(older)))  # no run ends before these
        first = len(older)
        if first == len(text):
            return
        known = text[first - size : -1]
        runs = np.ndarray((len(text) - first,), self._run_type, known, strides=(ID_BYTES,))
        for place, run in enumerate(runs.tolist(), first + self._num_dropped):
            older.append(newest.get(run, -1))
            newest[run] = place

    def drop(self, text: array[int], count: int) -> None:
        """Remove the first `count` tokens from `text` and from its index."""
        size, newest = self.size, self._newest
        runs = text[: count + size].tobytes()
        for start in range(count):
            run = runs[start * ID_BYTES : (start + size) * ID_BYTES]
            if newest.get(run) == start + size + self._num_dropped:
                del newest[run]
        del self._older[:count]
        del text[:count]
        self._num_dropped += count

    def has(self, tail: array[int]) -> bool:
        """True if the run at the end of `tail` has a place."""
        return tail[-self.size :].tobytes() in self._newest

    def match(self, text: array[int], tail: array[int]) -> tuple[int, list[int]]:
        """Find the longest match of the end of `tail`: its length, and the places in `text` after it.

        The newest place comes first. Without a match, the length is 0 and there are no places.
        """
        older, dropped, most = self._older, self._num_dropped, len(tail)
        places: list[int] = []
        length = self.size
        place = self._newest.get(tail[-length:].tobytes(), -1) - dropped
        end = tail[-length:]
        for _ in range(CANDIDATES):
            if place < 0:
                break
            if place >= length and text[place - length : place] == end:
                longer = length
                while longer < most and longer < place and text[place - longer - 1] == tail[-longer - 1]:
                    longer += 1
                if longer > length:
                    length, end = longer, tail[-longer:]
                    places.clear()
                places.append(place)
            place = older[place] - dropped
        return (length, places) if places else (0, places)
