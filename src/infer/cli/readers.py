"""Readers of the numbers that a flag takes; what a reader refuses, it refuses with a `ValueError`.

The parser (parser.py) makes the message of it, and takes what is allowed from the reader's name:

    infer bench serve: error: --timeout must be a number above 0, for example 600, got 'nan'
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def positive(text: str) -> int:
    """A number of things, of which there must be one."""
    return _at_least(1, int(text))


def natural(text: str) -> int:
    """A number of things, of which there may be none."""
    return _at_least(0, int(text))


def numbers(text: str) -> Sequence[int]:
    """Several whole numbers of 1 or more, with commas between."""
    return [positive(part) for part in text.split(",")]


def above_zero(text: str) -> float:
    """A span of time that must pass, or a share that must be something."""
    number = float(text)
    if not 0 < number < math.inf:
        raise ValueError
    return number


def zero_or_more(text: str) -> float:
    """A span of time that may be none."""
    number = float(text)
    if not 0 <= number < math.inf:
        raise ValueError
    return number


def int_or_none(text: str) -> int | None:
    """A limit, or the word for no limit."""
    return None if text == "none" else int(text)


def token_bias(text: str) -> tuple[int, float]:
    """A token's id and what to add to its logit."""
    token_id, _, bias = text.partition("=")
    return int(token_id), float(bias)


def _at_least(least: int, number: int) -> int:
    if number < least:
        raise ValueError
    return number


positive.__name__ = "a whole number of 1 or more"
natural.__name__ = "a whole number of 0 or more"
numbers.__name__ = "whole numbers of 1 or more with commas between"
above_zero.__name__ = "a number above 0"
zero_or_more.__name__ = "a number of 0 or more"
int_or_none.__name__ = "a whole number or 'none'"
token_bias.__name__ = "ID=BIAS"
