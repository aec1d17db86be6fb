"""Numbers of JSON that end: a schema without bounds allows any number of digits, and weak models write them.

A grammar could bound every number by itself, at a millisecond of compiling for each field of a schema. Here
the digits of the number at the end of the output are counted instead, and a mask loses the tokens that would
make more than `MAX_DIGITS` of them, if it allows anything else:

    {"a": 1234567890123456        , } . e and blanks may follow, no digit
    {"a": 123456789012345         a token of one digit may follow, none of two
    {"a": "1234567890123456       inside quotes nothing is taken away

A constraint that itself has a number of more digits, in an enum say, is left alone. So every output is one
that the grammar allows, and a number is at most two digits longer than that: a point or an exponent is
followed by one.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_DIGITS = 16  # all that a 64-bit float keeps apart
_NUMBER = re.compile(rb"[0-9.eE+-]*\Z")
_BEGIN_WITH_DIGIT = r"[0-9](.|\n)*"


OUTSIDE, INSIDE, ESCAPED = range(3)  # states of quotes; ESCAPED: after a backslash inside them


TokenDigits = tuple[bool, int, tuple[int, ...]]  # nothing but a number? digits at its end; quotes after it
PLAIN: TokenDigits = (False, 0, (OUTSIDE, INSIDE, INSIDE))  # most tokens, told from others by identity


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
        """Return what a token adds to a text of JSON; `known` has it from now on."""
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
        """Take tokens of too many digits out of the mask after a number, if others are left.

        A mask that allows letters belongs to a text, whatever its quotes.
        """
        if self._probes and all(mask_W[each // 32] >> each % 32 & 1 for each in self._probes):
            return
        rest_W = mask_W & ~self._longer[max(0, MAX_DIGITS - num_digits)][: len(mask_W)]
        if rest_W.any():
            mask_W[:] = rest_W


def _quotes_after(text: bytes, quotes: int) -> int:
    """The state of quotes at the end of a text of JSON, given the state at its beginning."""
    for byte in text if b'"' in text or b"\\" in text or quotes == ESCAPED else b"":
        if quotes == ESCAPED:
            quotes = INSIDE
        elif byte == ord('"'):
            quotes = OUTSIDE if quotes == INSIDE else INSIDE
        elif byte == ord("\\") and quotes == INSIDE:
            quotes = ESCAPED
    return quotes
