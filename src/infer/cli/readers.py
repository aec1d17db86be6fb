"""Readers of flag values; a reader refuses a text with a `ValueError`.

The parser (parser.py) turns the error into a message, and takes the allowed values from the reader's name:

    infer bench serve: error: --timeout must be a number above 0, for example 600, got 'nan'
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

KINDS = {"int": "a whole number", "float": "a number"}  # the readers here have names like these
Number = TypeVar("Number", int, float)


def _number(kind: Callable[[str], Number], least: Number, name: str) -> Callable[[str], Number]:
    def read(text: str) -> Number:
        number = kind(text)
        if not least <= number < math.inf:
            raise ValueError
        return number

    read.__name__ = name
    return read


def one_of(*allowed: str) -> Callable[[str], str]:
    """Return a reader of one of these words."""

    def read(text: str) -> str:
        if text not in allowed:
            raise ValueError
        return text

    read.__name__ = " or ".join(allowed)
    return read


positive = _number(int, 1, "a whole number of 1 or more")
natural = _number(int, 0, "a whole number of 0 or more")
zero_or_more = _number(float, 0.0, "a number of 0 or more")
above_zero = _number(float, math.ulp(0.0), "a number above 0")
gigabytes_per_s = _number(float, math.ulp(0.0), "gigabytes per second above 0")
microseconds = _number(float, math.ulp(0.0), "microseconds above 0")


def rate(text: str) -> float:
    """A number per second; `inf` means everything at once."""
    return math.inf if text == "inf" else above_zero(text)


def numbers(text: str) -> Sequence[int]:
    """Several whole numbers of 1 or more, separated by commas."""
    return [positive(part) for part in text.split(",")]


def int_or_none(text: str) -> int | None:
    """A limit, or the word for no limit."""
    return None if text == "none" else int(text)


def on_or_off(text: str) -> bool:
    """A switch, in one of the words that people use for it."""
    words = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}
    if text.lower() not in words:
        raise ValueError
    return words[text.lower()]


def token_bias(text: str) -> tuple[int, float]:
    """A token's id, and the number to add to its logit."""
    token_id, _, bias = text.partition("=")
    return int(token_id), float(bias)


rate.__name__ = "a number above 0, or 'inf'"
numbers.__name__ = "whole numbers of 1 or more, separated by commas"
int_or_none.__name__ = "a whole number or 'none'"
on_or_off.__name__ = "on or off"
token_bias.__name__ = "ID=BIAS"
