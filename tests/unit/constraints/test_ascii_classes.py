r"""`\d`, `\w` and `\s` are ASCII: what is compiled accepts what Python's `re` accepts with `re.ASCII`."""

from __future__ import annotations

import random
import re

import pytest

from infer.constraints.ascii_classes import column_before, rewrite_grammar, rewrite_pattern
from infer.constraints.description import Structured
from infer.errors import RequestError
from tests.support.words import compiled, ids_of

PATTERNS = [
    r"\d{3}", r"\w+", r"\s*\S", r"\D\W?", r"[\d.]+", r"[^\d]+", r"[\D]", r"[^\D]+", r"[\w-]+", r"[-\w]+",
    r"[^-\w]+", r"[a-c-\d]+", r"[\S]", r"[\W\d]*", r"[^\W_]+", r"[^\s\d]{2}", r"[]\d]+", r"[^]\w]+",
    r"\\d", r"\\\d", r"[\\d]+", r"[\\\d]+", r"\[\d]+", r"[\]\d]+", r"(\d|é)+", r"\d*?x|\w\s\w", r"[\b\d]+",
    r"[\-\d]+", r"[+-\-\d]+", r"(?P<d>\d)-\d", r"(?i)\w+", r"(?i:x\w)\W", r"\d\D\w\W\s\S", r"[\s\S]",
    r"[^\w\s]+", r"\.\d+", r"[\d\D]\$", r"\x64\d", r"[\x00-\x2f\d]+",
]  # fmt: skip
CHARS = (
    "0123459abckxzdDwWsS_-.\\[]^$+é \t\n\r\f\v\x08\x1c"
    "\u00a0\u0085\u2003\u0663\uff11\u212a\u017f\u00b2\u4e2d\u0130\U0001fbf8\U0001d7d9😀"
)


def accepts(structured: Structured, text: str) -> bool:
    matcher, ids = compiled(structured).lexer.matcher(), ids_of(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_regex_and_a_terminal_accept_what_python_accepts_in_ascii(pattern: str) -> None:
    rng = random.Random(pattern)
    expected = re.compile(pattern, re.ASCII)
    regex, grammar = Structured.regex(pattern), Structured.grammar(f"start: T\nT: /{pattern}/")
    texts = [*CHARS, "1a_. x", "\\d", "\\5", "[5]", "5-5", "d5"]
    for _ in range(300):
        few = rng.choices(rng.choice((CHARS, "0a-_.\\d] +éx")), k=3)
        texts.append("".join(rng.choices(few, k=rng.randint(1, 4))))
    assert any(map(expected.fullmatch, texts))
    for text in texts:
        is_match = expected.fullmatch(text) is not None
        assert accepts(regex, text) == is_match, text
        assert accepts(grammar, text) == is_match, text


@pytest.mark.parametrize("digit", ["\u0663", "\uff11", "\U0001fbf8"])
@pytest.mark.parametrize(
    "structured",
    [
        Structured.regex(r"\d"),
        Structured(kind="regex", text=r"[\d]"),
        Structured.grammar(r"start: /\d/"),
        Structured.grammar("start: X\n%ignore /\\s+/\nX: /[\\d]/i // a \\d"),
        Structured.grammar('start: "\\\\d" | /\\d/ | %json {"type": "string", "pattern": "^/\\\\d/$"}'),
        Structured(kind="json_schema", text=r'{"type": "string", "pattern": "^\\d$"}'),
    ],
)
def test_a_digit_of_another_script_is_not_a_digit(structured: Structured, digit: str) -> None:
    is_json = structured.kind == "json_schema"
    assert accepts(structured, '"7"' if is_json else "7")
    assert not accepts(structured, f'"{digit}"' if is_json else digit)


def test_a_hyphen_next_to_a_class_is_a_hyphen() -> None:
    for pattern in (r"[A-\d]", r"[\d-A]", r"[\w-\d]", r"[!-\d]"):
        structured = Structured.regex(pattern)
        assert accepts(structured, "-") and accepts(structured, "5")
        assert not any(accepts(structured, text) for text in ("]", "B]", "\u0663", "-]"))


def test_set_operations_of_classes_are_kept() -> None:
    for pattern in (r"[\w--\d]", r"[\w&&\D]", r"[[\w]--[\d]]"):
        structured = Structured.regex(pattern)
        assert accepts(structured, "a") and not accepts(structured, "5") and not accepts(structured, "-")


def test_only_the_expressions_of_a_grammar_are_rewritten() -> None:
    kept = 'start: "\\d" a // /\\d/\na: %json {"pattern": "/\\\\d/ \\\\w"}\n# /\\w/\nb: '
    assert rewrite_grammar(kept + r"/\d\/\\d/i") == kept + r"/[0-9]\/\\d/i"
    assert rewrite_grammar(kept) == kept
    assert rewrite_grammar("start: %json {\n a: /\\d") == "start: %json {\n a: /[0-9]"


def test_the_end_of_a_pattern_may_be_an_escape() -> None:
    for pattern in ("", "\\", "[\\", "[", "]", "a]\\"):
        assert rewrite_pattern(pattern) == pattern


def test_an_error_in_a_grammar_names_the_column_that_the_client_wrote() -> None:
    with pytest.raises(RequestError, match=r"line 2, column 10: expecting"):
        compiled(Structured.grammar("start: a\na: /\\w\\d/)"))
    assert column_before(r"a: /\w\d/ b", len(rewrite_grammar(r"a: /\w\d/ ")) + 1) == 11
    assert column_before("a: b", 3) == 3 and column_before("a", 9) == 9
