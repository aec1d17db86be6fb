"""Bans of ids, besides any constraint: ids outside of a list, and ids that would complete a banned word.

A banned word is a sequence of ids. Its last id is banned when the output ends with the ids before it. So a
word of one id is always banned, a word of three ids only when its third id would complete it:

    banned (7, 8, 9)      output ... 7 8  ->  9 is not allowed        output ... 8  ->  9 is allowed
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Bans:
    """The bans of one request; its sequences share them."""

    __slots__ = ("_allowed_W", "_allowed_ids", "_words", "num_remembered")

    def __init__(self, allowed_ids: Sequence[int], words: Sequence[tuple[int, ...]]) -> None:
        self._allowed_ids = allowed_ids  # empty: all ids
        self._allowed_W: np.ndarray | None = None  # mask of the allowed ids, made on first use
        self._words = [(word[:-1], word[-1]) for word in words]
        self.num_remembered = max((len(before) for before, _ in self._words), default=0)  # ids of `recent`

    def apply(self, recent: tuple[int, ...], mask_W: np.ndarray) -> None:
        """Clear the bits of a mask whose ids may not follow an output that ends with `recent`."""
        bits_W = mask_W.view(np.uint32)
        if self._allowed_ids:
            if self._allowed_W is None:
                self._allowed_W = np.zeros_like(bits_W)
                for token_id in self._allowed_ids:
                    self._allowed_W[token_id // 32] |= np.uint32(1 << token_id % 32)
            bits_W &= self._allowed_W
        for before, last in self._words:
            if recent[len(recent) - len(before) :] == before:
                bits_W[last // 32] &= np.uint32(~(1 << last % 32) & 0xFFFFFFFF)
