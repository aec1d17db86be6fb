"""Lesson 11: a mask over the vocabulary, so that the text can only become what was requested."""

from __future__ import annotations

import random
import re

from infer.learn.student import Student, Wrong, expect

TITLE = "Structured output"
STARTER = '''\
"""Lesson 11: which tokens may come next in a list of whole numbers, such as [1,22,303]?"""


def allowed(text, vocabulary):
    """Return the set of tokens of the vocabulary (strings) that may follow the text.

    A finished text is [, then one or more whole numbers separated by commas, then ]. A number has no leading
    zero, but may be 0. There are no spaces, and nothing follows the ]. A token may have several characters:
    it is allowed if the text with it is finished, or can still be continued to a finished text.
    """
    raise NotImplementedError
'''

VOCABULARY = (
    "[", "]", ",", "0", "1", "7", "42", "10", "00", "01", "[1", "],", ",0", ",3", "0,", "5]", "]]", " ", "a",
)  # fmt: skip
BEGUN = re.compile(r"(\[((0|[1-9][0-9]*),)*(0|[1-9][0-9]*)?)?|\[(0|[1-9][0-9]*)(,(0|[1-9][0-9]*))*\]")


def check(student: Student) -> None:
    """Walk through random texts, and compare each mask with the rule."""
    allowed, rng = student.get("allowed"), random.Random(6)
    for _ in range(60):
        text = ""
        for _ in range(12):
            right = {token for token in VOCABULARY if _can_be(text + token)}
            student.doing = f"asking what may follow {text!r}"
            try:
                got = set(allowed(text, list(VOCABULARY)))
            except TypeError as error:
                raise Wrong(f"allowed({text!r}, ...) must return a set of tokens ({error})") from error
            if missing := sorted(right - got):
                raise Wrong(f"after {text!r} the token {missing[0]!r} may come, but allowed leaves it out")
            if extra := sorted(got - right):
                raise Wrong(f"after {text!r} the token {extra[0]!r} must not come, but allowed has it")
            if not right:
                break
            text += rng.choice(sorted(right))
        expect(_can_be(text), "a walk through masks ended in a text that cannot be finished")


def _can_be(text: str) -> bool:
    """Return True if a text is a finished list, or can become one."""
    return BEGUN.fullmatch(text) is not None
