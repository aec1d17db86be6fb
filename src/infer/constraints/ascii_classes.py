r"""Rewrites the classes of regular expressions to ASCII: `\d` is 0 to 9, not a digit of any script.

The compiler takes `\d`, `\w` and `\s` from Unicode, where hundreds of characters are digits. People who write
`\d{3}` mean ASCII, as in xgrammar and in Python with `re.ASCII`. The compiler's own flag, `(?-u:\d)`, does
not help: it works on bytes, so the compiler refuses `\D` and every `[^...]`. Patterns in JSON schemas are not
rewritten: there the compiler takes `\d` and `\w` from ECMAScript.

    \d  [0-9]               \D  [^0-9]           also inside a class, where the compiler lets classes nest:
    \w  [0-9A-Za-z_]        \W  [^0-9A-Za-z_]        [\D.]  ->  [[^0-9].]
    \s  [\t\n\v\f\r\x20]    \S  [^\t\n...]           [\b]   ->  [\x08]

Next to one of these inside a class, a hyphen is a literal: `[A-\d]` has no range, as in ECMAScript. If case
is ignored, `[\w]` also has U+017F and U+212A, which are other cases of s and k.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left

from infer.constraints.grammar_checks import LARK_TOKEN

_MEMBERS = {"d": "0-9", "w": "0-9A-Za-z_", "s": r"\t\n\v\f\r\x20"}
_CLASSES = {rf"\{name}": f"[{members}]" for name, members in _MEMBERS.items()}
_CLASSES |= {rf"\{name.upper()}": f"[^{members}]" for name, members in _MEMBERS.items()}
_USES_CLASS = re.compile(r"\\[dDwWsSb]")
_PART = re.compile(r"\\.|\[\^?\]?|--|.", re.DOTALL)  # `]` at the start of a class is a character
_BLANKS = re.compile(r"\s*")
_DECODER = json.JSONDecoder()


def rewrite_pattern(pattern: str) -> str:
    """Return the regular expression with classes of ASCII characters."""
    if not _USES_CLASS.search(pattern):
        return pattern
    parts: list[str] = []
    depth = 0  # number of open classes
    for part in _PART.findall(pattern):
        if part[0] == "[":
            depth += 1
        elif part == "]":
            depth = max(depth - 1, 0)
        elif part in _CLASSES and depth:
            if parts[-1] == "-":
                parts[-1] = r"\-"
            part = _CLASSES[part]
        elif part in _CLASSES:
            part = f"(?-i:{_CLASSES[part]})" if part in (r"\w", r"\W") else _CLASSES[part]
        elif part == r"\b" and depth:
            part = r"\x08"
        parts.append(part)
    return "".join(parts)


def rewrite_grammar(grammar: str) -> str:
    """Return a grammar in Lark's notation with classes of ASCII characters in its expressions."""
    if not _USES_CLASS.search(grammar):
        return grammar
    parts: list[str] = []
    i = 0
    while found := LARK_TOKEN.match(grammar, i):
        text, end = found[0], found.end()
        if text in ("%json", "%regex"):
            end = _json_end(grammar, end)
        parts.append(rewrite_pattern(text) if found.lastgroup == "pattern" else grammar[i:end])
        i = end
    return "".join(parts)


def column_before(line: str, column: int) -> int:
    """Return the column before rewriting of what is at `column` in the rewritten line; both count from 1."""
    if rewrite_grammar(line) == line:
        return column
    return 1 + bisect_left(range(len(line) + 1), column - 1, key=lambda n: len(rewrite_grammar(line[:n])))


def _json_end(grammar: str, start: int) -> int:
    """Return the end of the JSON after a directive; `start` if there is none: the compiler refuses it."""
    try:
        return _DECODER.raw_decode(grammar, _BLANKS.match(grammar, start).end())[1]  # type: ignore[union-attr]
    except (ValueError, RecursionError):
        return start
