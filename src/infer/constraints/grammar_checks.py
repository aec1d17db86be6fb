"""Checks of a grammar before it is compiled: the number of its rules, and the schemas and expressions in it.

The compiler makes one expression of a terminal and all terminals that it names, so these count toward its
size (pattern_checks.py).
"""

from __future__ import annotations

import json
import re

from infer.constraints.pattern_checks import (
    HUGE,
    MAX_PATTERN_SIZE,
    MAX_PATTERNS_SIZE,
    check_pattern,
    check_size,
    constraint_error,
    count_of,
)
from infer.constraints.schema_checks import check_keywords

MAX_RULES = 1_000  # rules of a grammar; its compiler recurses into rules that a rule names
MAX_EBNF_RULES = 200  # rules of a grammar in EBNF, whose translation takes more than linear time
MAX_EBNF_LEN = 16_384  # characters
_RULE = re.compile(r"^[ \t]*[!?]?\w[^\n\"'/:{]*:", re.MULTILINE)  # rules of a grammar; a rule begins a line
_EBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_BLANKS = re.compile(r"\s*")


def is_ebnf(grammar: str) -> bool:
    """Return True if a grammar is written as `root ::= ...` (EBNF as in GBNF), not as `start: ...` (Lark)."""
    return _EBNF_RULE.search(grammar) is not None


def check_grammar(grammar: str, *, param: str) -> None:
    """Refuse a grammar with too many rules, or with a schema (`%json {...}`) or pattern that is refused."""
    max_rules = MAX_RULES
    if is_ebnf(grammar):
        max_rules = MAX_EBNF_RULES
        if len(grammar) > MAX_EBNF_LEN:
            raise constraint_error(
                f"the grammar has {len(grammar)} characters, at most {MAX_EBNF_LEN} are allowed in EBNF; "
                "write it in Lark's notation",
                param,
            )
    if (num_rules := sum(1 for _ in _RULE.finditer(grammar))) > max_rules:
        raise constraint_error(f"the grammar has {num_rules} rules, at most {max_rules} are allowed", param)
    if not is_ebnf(grammar):
        _check_terminals(_read_lark(grammar, param), param)


_Token = tuple[str, str, int]  # its kind, its text, and how many characters it matches


def _read_lark(grammar: str, param: str) -> list[_Token]:
    """Return the tokens of a grammar in Lark's notation; check its schemas and expressions."""
    tokens: list[_Token] = []
    i = 0
    while found := LARK_TOKEN.match(grammar, i):
        kind, text, size, i = str(found.lastgroup), found[0], 0, found.end()
        if text in ("%json", "%regex"):
            i = _json_end(grammar, i, text, param)
        elif kind == "pattern":
            flags = found["flags"] or ""
            pattern = text[1 : len(text) - len(flags)]
            size = check_pattern(f"(?{flags[1:]})" if "x" in flags else pattern, param=param)
        elif kind == "text":
            size = len(text) - 2
        if kind != "blank":
            tokens.append((kind, text, size))
    return tokens


def _json_end(grammar: str, start: int, directive: str, param: str) -> int:
    """Return the end of the JSON after a directive; check it if it is a schema."""
    try:
        value, end = _DECODER.raw_decode(grammar, _BLANKS.match(grammar, start).end())  # type: ignore[union-attr]
    except (ValueError, RecursionError):
        raise constraint_error(f"{directive} is not followed by a JSON schema", param) from None
    if directive == "%json":
        check_keywords(value, param=param)
        if isinstance(value, dict) and "x-guidance" in value:  # compiler options, which are not checked
            raise constraint_error("x-guidance in a schema of a grammar is not supported", param)
    return end


def _check_terminals(tokens: list[_Token], param: str) -> None:
    """Refuse terminals whose pattern, with the terminals that they name, is too long once written out."""
    bodies: dict[str, list[_Token]] = {}
    body: list[_Token] = []
    for i, token in enumerate(tokens):
        if token[0] == "name" and _begins_rule(tokens, i):
            body = bodies.setdefault(token[1], [])
        body.append(token)
    sizes: dict[str, int] = {}
    opened: set[str] = set()
    stack = [name for name in bodies if _is_terminal(name) or bodies[name][1][1] == "["]
    total = sum(size for kind, _, size in tokens if kind == "pattern")
    check_size(total, MAX_PATTERNS_SIZE, "all expressions", param)
    while stack:
        name = stack[-1]
        if name not in opened:  # the terminals that it names come first
            opened.add(name)
            named = {text for kind, text, _ in bodies[name] if kind == "name" and _is_terminal(text)}
            stack += [text for text in named if text in bodies and text not in opened]
            continue
        stack.pop()
        if name in sizes:
            continue
        sizes[name] = _size_of(bodies[name][1:], sizes)
        check_size(sizes[name], MAX_PATTERN_SIZE, f"the terminal {name[:80]}", param)
        total += sizes[name]
        check_size(total, MAX_PATTERNS_SIZE, "all terminals", param)


def _is_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _begins_rule(tokens: list[_Token], i: int) -> bool:
    """Return True if the name at `i` begins a rule, `name:`, with `.priority` or `[options]` in between."""
    texts = (text for _, text, _ in tokens[i + 1 : i + 4])
    if (sign := next(texts, "")) == ".":
        next(texts, "")
        sign = next(texts, "")
    if sign == "[":
        i += 2
        while i < len(tokens) and tokens[i][1] not in ("[", "]"):
            i += 1
        sign = tokens[i + 1][1] if i + 1 < len(tokens) and tokens[i][1] == "]" else ""
    return sign == ":"


def _size_of(body: list[_Token], sizes: dict[str, int]) -> int:
    """Return the most characters that a terminal matches, counted like `_written_out`."""
    groups, last, most, is_counted = [0], 0, 0, False
    for kind, text, size in (*body, ("sign", "", 0)):
        if is_counted and (kind == "number" or text in (",", ".")):  # the counts of {2,3} or ~2..3
            most = max(most, count_of(text if kind == "number" else ""))
            continue
        if is_counted:
            groups[-1] = min(groups[-1] + last * (max(most, 1) - 1), HUGE)
            last, most, is_counted = min(last * max(most, 1), HUGE), 0, False
        if text in ("{", "~"):
            is_counted = True
        elif text in ("(", "["):
            groups.append(0)
        elif text in (")", "]"):
            last = groups.pop() if len(groups) > 1 else 0
            groups[-1] += last
        elif kind in ("text", "pattern", "name"):
            last = sizes.get(text, 1) if kind == "name" else size
            groups[-1] += last
    return min(sum(groups), HUGE)


def refuse_constant(name: str) -> None:
    """Refuse NaN and Infinity, which Python's JSON parser reads and JSON does not have."""
    raise ValueError(f"{name} is not a JSON number")


LARK_TOKEN = re.compile(  # tokens of a grammar; the compiler refuses unterminated ones
    r"(?P<blank>(?://|\#)[^\n]*|\s+)"
    r'|(?P<text>"(?:\\.|[^"\\\n])*+(?:"i?)?+)'
    r"|(?P<pattern>/(?:\\.|[^/\\])++(?P<flags>/[a-z]*)?+)"
    r"|(?P<name>[A-Za-z_][\w-]*)"
    r"|(?P<directive>%\w+)"
    r"|(?P<number>[0-9]+)"
    r"|(?P<sign>.)",
    re.DOTALL,
)

_DECODER = json.JSONDecoder(parse_constant=refuse_constant)
