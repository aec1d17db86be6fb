"""Checks of a regular expression before it is compiled: that all of it is supported, and its size.

A compiler writes repetitions out, so the size of `(a{999}){999}` is not its length. The size is computed here
without writing anything out, and all expressions of a request share a limit.
"""

from __future__ import annotations

import re

from infer.errors import RequestError

MAX_PATTERN_LEN = 10_000  # characters
MAX_PATTERN_SIZE = 20_000  # characters and classes, once repetitions are written out
OPTIONAL_SIZE = 40  # characters that an optional part counts as; 500 in a row take 0.1 s to compile
MAX_PATTERNS_SIZE = 1_000_000  # characters of all the expressions of a grammar
_LOOK_AROUND = ("(?=", "(?!", "(?<=", "(?<!")
_ESCAPE = re.compile(r"\\(?:[pPuUx]\{[^}]{0,40}\}|.)", re.DOTALL)  # braces of \p{Greek} repeat nothing
_REPEAT = re.compile(r"\{\s*+([0-9]*+)\s*+(?:,\s*+([0-9]*+)\s*+)?\}")
HUGE = 10**12  # characters at which counting stops
_VERBOSE = re.compile(r"\(\?[a-wyzA-Z]*x")  # (?x): blanks and comments between any two characters


def constraint_error(message: str, param: str) -> RequestError:
    """Return the error of a constraint; its message begins with `param`, the client's field."""
    return RequestError(f"{param}: {message}", param=param)


def check_pattern(pattern: str, *, param: str, where: str = "") -> int:
    """Refuse a regular expression that is not supported or too large; return its size.

    `where` is its place in a schema. The compiler checks whether it is well formed.
    """
    place = f" at {where}" if where else ""
    if len(pattern) > MAX_PATTERN_LEN:
        raise constraint_error(
            f"the pattern{place} has {len(pattern)} characters; at most {MAX_PATTERN_LEN} are allowed", param
        )
    if found := _unsupported_in(pattern):
        raise constraint_error(
            f"the pattern{place} uses {found}, which is not supported; write it without", param
        )
    size = _written_out(pattern)
    check_size(size, MAX_PATTERN_SIZE, f"the pattern{place}", param)
    return size


def check_size(size: int, limit: int, what: str, param: str) -> None:
    """Refuse expressions that are larger than `limit`, written out."""
    if size > limit:
        raise constraint_error(
            f"the repetitions of {what}, written out, are {size} characters long (with {OPTIONAL_SIZE} for "
            f"each part that may be left out), at most {limit} are allowed; repeat less often",
            param,
        )


def _unsupported_in(pattern: str) -> str | None:
    """Find a part of a regular expression that needs text outside its match or matched earlier."""
    i = 0
    while i < len(pattern):
        if pattern[i] == "\\":
            if pattern[i + 1 : i + 2] in ("b", "B"):
                return f"the word boundary \\{pattern[i + 1]}"
            if pattern[i + 1 : i + 2] in tuple("123456789"):
                return f"the back-reference \\{pattern[i + 1]}"
            i += 2
            continue
        if pattern.startswith(_LOOK_AROUND, i):
            return f"look-around ({pattern[i : i + 3]}...)"
        if _VERBOSE.match(pattern, i):
            return "the flag x"
        i = _class_end(pattern, i) if pattern[i] == "[" else i + 1
    return None


def _written_out(pattern: str) -> int:
    """Return the number of characters and classes of an expression with its repetitions written out.

    A part that may be left out (`*`, `?`, `{0,9}`) adds OPTIONAL_SIZE once: the compiler merges its repeats.
    """
    sizes, last, i = [0], 0, 0  # sizes of open groups; the size of the part before `i`
    num_optional = 0
    while i < len(pattern):
        char, end = pattern[i], i + 1
        if char == "(":
            sizes.append(0)
            last = 0
        elif char == "{" and (found := _REPEAT.match(pattern, i)):
            most = max(count_of(found[1]), count_of(found[2]), 1)
            sizes[-1] = min(sizes[-1] + last * (most - 1), HUGE)
            last, end = min(last * most, HUGE), found.end()
            num_optional += not count_of(found[1])
        elif char not in "*+?|^$":
            last = sizes.pop() if char == ")" and len(sizes) > 1 else 1
            sizes[-1] += last
            if char == "\\" and (escape := _ESCAPE.match(pattern, i)):
                end = escape.end()
            elif char == "[":
                end = _class_end(pattern, i)
        else:
            num_optional += char in "*?" and pattern[i - 1 : i] != "("  # not (?:
        i = end
    return sum(sizes) + OPTIONAL_SIZE * num_optional


def _class_end(pattern: str, start: int) -> int:
    """Return the index after a class in brackets, such as `[^]a-z\\]]` or `[a[bc]]`."""
    i, depth = start, 0
    while i < len(pattern):
        if pattern[i] == "[":
            depth += 1
            i += pattern.startswith("^", i + 1)
            i += pattern.startswith("]", i + 1)
        elif pattern[i] == "]":
            depth -= 1
            if depth == 0:
                return i + 1
        i += 2 if pattern[i] == "\\" else 1
    return i


def count_of(digits: str | None) -> int:
    """Return the number of repetitions; a number that is far too large anyway is cut to its first digits."""
    return int((digits or "").lstrip("0")[:12] or 0)
