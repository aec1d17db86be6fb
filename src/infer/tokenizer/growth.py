"""The factor by which the normalizer of a tokenizer.json can lengthen a text.

A normalizer is a list of steps, each of which may replace one character by many: four steps that each replace
a character by a hundred turn one byte into 10^8 characters. The bound below is a product over the steps, so
it needs no text. A file is checked before the library loads it: that normalizes added tokens while loading.

    Replace "ab" by 10 characters    5        a text can be all "ab"
    Replace a regex by c             2 c + 1  it may match the empty text, on both sides of a character
    Prepend c                        c + 1    before each stretch of text between two added tokens
    NFD, NFC, NFKD, NFKC             18       only once: decomposed text stays decomposed

Patterns need no time limit of their own: the library's regex engine stops a match with an error after 10^7
steps. Decoders are read, but never run.
"""

from __future__ import annotations

import base64
import binascii
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

from infer.errors import CheckpointError, RequestError

MAX_GROWTH = 256  # most characters that a normalizer may make out of one
MAX_NORMALIZED = 2**27  # most characters of a normalized text

_DECOMPOSED = 18  # characters of U+FDFA after decomposition, the longest one
_DECOMPOSES = {"NFC", "NFD", "NFKC", "NFKD", "BertNormalizer"}
_FACTORS = {"BertNormalizer": 9, "ByteLevel": 4, "Lowercase": 3, "Nmt": 1, "Strip": 1, "StripAccents": 1}


def growth_of(normalizer: Any) -> int:
    """Return the most characters that a normalizer, given as JSON, can make out of one."""
    growth = 1
    steps = list(flat_steps(normalizer))
    for step in steps:
        growth *= _factor(step)
    return growth * (_DECOMPOSED if any(step.get("type") in _DECOMPOSES for step in steps) else 1)


def check_growth(normalizer: Any, file: object) -> int:
    """Return the growth of a file's normalizer; raises `CheckpointError` if it is unreasonably large."""
    growth = growth_of(normalizer)
    if growth > MAX_GROWTH:
        shown = f"{growth:,}" if growth < 10**12 else "more than 10^12"
        raise CheckpointError(
            f"the normalizer of {file} can turn one character into {shown}, and at most {MAX_GROWTH} are "
            "allowed; use the tokenizer that the model was published with"
        )
    return growth


def check_normalized(num_chars: int, growth: int) -> None:
    """Refuse a text that the normalizer could make too long."""
    if num_chars * growth > MAX_NORMALIZED:
        raise RequestError(
            f"prompt has {num_chars} characters, and this model's tokenizer accepts at most "
            f"{MAX_NORMALIZED // growth}; shorten it",
            param="prompt",
        )


def flat_steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a normalizer or pre-tokenizer, also in nested lists; JSON bounds the depth."""
    pending = [part]
    while pending:
        step = pending.pop()
        if isinstance(step, Mapping):
            inner = step.get("normalizers", step.get("pretokenizers"))
            if isinstance(inner, list):
                pending += inner
            else:
                yield step


def _factor(step: Mapping[str, Any]) -> int:
    kind = step.get("type")
    if kind == "Replace":
        made = _length(step.get("content"))
        pattern = step.get("pattern")
        found = pattern.get("String") if isinstance(pattern, Mapping) else None
        return max(1, -(-made // len(found))) if isinstance(found, str) and found else 2 * made + 1
    if kind == "Prepend":
        return _length(step.get("prepend")) + 1
    if kind == "Precompiled":
        return _longest_entry(step.get("precompiled_charsmap"))
    return _FACTORS.get(str(kind), 1 if kind in _DECOMPOSES else 4)


def _length(text: Any) -> int:
    """Return the characters of a replacement after decomposition, which a later step may apply."""
    return len(unicodedata.normalize("NFKD", text)) if isinstance(text, str) else 0


def _longest_entry(charsmap: Any) -> int:
    """Return the length of the longest text in a sentencepiece table: a trie, then texts ended by 0."""
    try:
        data = base64.b64decode(charsmap or "")
    except (TypeError, ValueError, binascii.Error):
        return 1  # the library will refuse the table
    texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
    return max(1, *(len(text.decode("utf-8", "replace")) for text in texts))
