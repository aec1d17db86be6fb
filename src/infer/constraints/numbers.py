"""Limits the digits of JSON numbers: a schema without bounds allows any number, and weak models never stop.

A grammar could bound the digits, at a millisecond of compiling for each field of a schema. Instead, the
digits of the number at the end of the output are counted, and tokens that would make them more than
`MAX_DIGITS` are removed from the mask, unless it allows nothing else:

    {"a": 1234567890123456        , } . e and blanks may follow, no digit
    {"a": 123456789012345         a token of one digit may follow, none of two
    {"a": "1234567890123456       inside quotes nothing is removed

A constraint that itself contains a longer number, for example in an enum, is left alone. Every output is one
that the grammar allows, so a number may have up to two more digits: a point or an exponent must be followed
by one.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_DIGITS = 16  # digits of a number; a 64-bit float cannot tell more apart
_NUMBER = re.compile(rb"[0-9.eE+-]*\Z")
_BEGIN_WITH_DIGIT = r"[0-9](.|\n)*"


OUTSIDE, INSIDE, ESCAPED = range(3)  # states of quotes; ESCAPED: after a backslash inside them


TokenDigits = tuple[bool, int, tuple[int, ...]]  # is it all a number? digits at its end; quotes after it
PLAIN: TokenDigits = (False, 0, (OUTSIDE, INSIDE, INSIDE))  # value of most tokens, compared by identity


class Digits:
    """The digits in the tokens of one vocabulary."""

    def __init__(self, tokenizer: LLTokenizer, probes: tuple[int, ...]) -> None:
        from llguidance import LLMatcher

        self._tokenizer, self._probes = tokenizer, probes
        self.known: dict[int, TokenDigits] = {}
        matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_regex(_BEGIN_WITH_DIGIT), log_level=0)
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        sizes = np.zeros(len(bits), dtype=np.int64)  # digits that each token begins with
        for token_id in bits[: tokenizer.vocab_size].nonzero()[0].tolist():
            text = tokenizer.decode_bytes([token_id])
            sizes[token_id] = len(text) - len(text.lstrip(b"0123456789"))
        longest = min(int(sizes.max()), MAX_DIGITS)
        # masks of tokens that begin with more than 0, 1, 2, ... digits
        packed = (np.packbits(sizes > size, bitorder="little") for size in range(max(longest, 1)))
        self._longer = [each.view(np.int32) for each in packed]
        self.enough = MAX_DIGITS - len(self._longer) + 1  # digits after which some token has too many

    def learn(self, token_id: int) -> TokenDigits:
        """Return what a token adds to a JSON text, and store it in `known`."""
        text = self._tokenizer.decode_bytes([token_id])
        found = _NUMBER.search(text)
        end = found[0] if found is not None else b""
        made: TokenDigits = PLAIN
        if end or b'"' in text or b"\\" in text:
            after = tuple(_quotes_after(text, before) for before in (OUTSIDE, INSIDE, ESCAPED))
            made = len(end) == len(text), sum(48 <= byte <= 57 for byte in end), after
        self.known[token_id] = made
        return made

    def end_number(self, num_digits: int, mask_W: np.ndarray) -> None:
        """Remove the tokens with too many digits from the mask after a number, if other tokens are left.

        A mask that allows letters is inside a string, whatever the quotes say.
        """
        if self._probes and all(mask_W[each // 32] >> each % 32 & 1 for each in self._probes):
            return
        rest_W = mask_W & ~self._longer[max(0, MAX_DIGITS - num_digits)][: len(mask_W)]
        if rest_W.any():
            mask_W[:] = rest_W


def _quotes_after(text: bytes, quotes: int) -> int:
    """Return the state of quotes at the end of a piece of JSON, given the state at its beginning."""
    for byte in text if b'"' in text or b"\\" in text or quotes == ESCAPED else b"":
        if quotes == ESCAPED:
            quotes = INSIDE
        elif byte == ord('"'):
            quotes = OUTSIDE if quotes == INSIDE else INSIDE
        elif byte == ord("\\") and quotes == INSIDE:
            quotes = ESCAPED
    return quotes
