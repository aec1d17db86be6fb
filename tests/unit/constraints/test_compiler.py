"""Constraints of other kinds than schemas, and what no constraint may take."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from typing import Any

import pytest

from infer.constraints import compiler as compiler_module
from infer.constraints.compiler import Compiler
from infer.constraints.description import MAX_CHOICES, Structured
from infer.constraints.guide import ENDED, Guide
from infer.errors import RequestError
from tests.support.walks import allowed_ids
from tests.support.words import compiled, ids_of, token_bytes

TEXTS = [
    "yes",
    "no",
    "a b",
    'quo"te',
    "back\\slash",
    "new\nline",
    "ü€😀",
    "a.*b",
    "[x](y){z}",
    "\x07",
    " lead",
    "/",
]


def accepts(structured: Structured, text: str) -> bool:
    matcher, ids = compiled(structured).lexer.matcher(), ids_of(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_a_choice_is_exactly_one_of_its_texts() -> None:
    structured = Structured.choice(TEXTS)
    for text in TEXTS:
        assert accepts(structured, text), text
    for text in ("", "ye", "yes ", "axxb", "x(y)"):
        assert not accepts(structured, text), text


def test_a_choice_of_many_texts() -> None:
    structured = Structured.choice([f"option {number}" for number in range(MAX_CHOICES)])
    assert accepts(structured, "option 999") and not accepts(structured, "option 1000")


def test_a_regex_matches_the_whole_output() -> None:
    structured = Structured.regex(r"[0-9]+(\.[0-9]{1,2})?/")
    assert (
        accepts(structured, "12.5/")
        and not accepts(structured, "x12.5/")
        and not accepts(structured, "12.555/")
    )


def test_a_grammar_has_rules_and_json() -> None:
    structured = Structured.grammar('start: "<" word ">" body\nword: /[a-z]+/\nbody: %json {"type": "array"}')
    assert accepts(structured, "<abc>[1, {}]") and not accepts(structured, "<abc>{}")


@pytest.mark.parametrize(
    ("structured", "words"),
    [
        (Structured(kind="regex", text="("), "the regex cannot be compiled: unclosed group"),
        (Structured(kind="regex", text="(?=a)b"), "look-around"),
        (Structured.grammar("start: missing"), 'the grammar cannot be compiled: .*"missing"'),
        (
            Structured.grammar("zz"),
            "line 1, column 3: expected token ':', found the end of the line; rules look like start: ",
        ),
        (Structured.grammar('start: "a"\n\nw ((('), "line 3, column 3: expected token ':', found \"\\(\";"),
        (
            Structured.grammar("start: /[/"),
            "line 1, column 8: unclosed character class; rules look like start: ",
        ),
        (Structured.grammar('x: "a"'), "no start rule found; rules look like start: "),
        (Structured(kind="grammar", text='start: %json {"not": {}}'), "not"),
        (Structured.json_object(whitespace="("), "unclosed group"),
        (Structured.grammar("start: start"), "no text matches it: a reference or rule leads back to itself"),
        (Structured(kind="json_schema", text='{"$ref": "#"}'), "no text matches it: a reference or rule"),
        (
            Structured(kind="json_schema", text="false"),
            "the schema cannot be compiled: false allows no value",
        ),
    ],
)
def test_what_cannot_be_compiled_says_why_in_one_line(structured: Structured, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        compiled(structured)
    assert "\n" not in str(caught.value)
    assert caught.value.param == "structured"


def test_no_output_meets_a_limit_that_others_have_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lexers are shared, and the states that one output has made fill them; it does not fail another."""
    monkeypatch.setattr(compiler_module, "MAX_LEXER_STATES", 200)
    monkeypatch.setattr(compiler_module, "MAX_KEPT_STATES", 200)
    rng = random.Random(1)
    for _ in range(40):
        guide = Guide(compiled(Structured(kind="regex", text="(a|b)*a(a|b){14}c")))
        for _ in range(20):
            allowed_ids(guide)
            assert guide.error is None, guide.error
            guide.consume(ids_of(rng.choice("ab")))


def test_what_was_compiled_is_used_again_and_shared_by_many_requests_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiler_module, "MAX_KEPT", 8)
    own, structured = Compiler(token_bytes()), Structured.regex("[a-z]+;")
    first = own.compile(structured)
    second = own.compile(Structured.regex("[a-z]+;", param="guided_regex", triggers=("<tc>",)))
    assert second.lexer is not first.lexer, "the first is in use"
    assert (second.param, second.triggers) == ("guided_regex", (b"<tc>",)), "these are the request's"
    free = first.lexer
    del first
    third = own.compile(structured)
    assert third.lexer is free
    many = [own.compile(structured) for _ in range(4 * 8 - 2)]
    users = Counter(grammar.lexer for grammar in [second, third, *many])
    assert len(users) == 8 and set(users.values()) == {4}
    assert own.compile(Structured.regex("[a-z]+.")).lexer not in users


def test_a_request_starts_over_where_others_have_filled_its_lexer() -> None:
    own, structured = Compiler(token_bytes()), Structured.regex("[a-z]+;")
    full = own.compile(structured).lexer
    grammar = own.compile(structured)
    assert grammar.lexer is full
    fresh = grammar.lexer_after(full)
    assert fresh is not None and fresh is not full
    assert grammar.lexer_after(full) is fresh, "of another sequence of this request"
    assert grammar.lexer_after(fresh) is None, "it was its own"
    lexers = [own.compile(structured).lexer for _ in range(4)]
    assert len({full, fresh, *lexers}) == 6, "its requests fill lexers, and each has its own"


def test_a_request_may_have_more_states_than_a_lexer_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept is bounded by states, which grow with the texts of all requests that use it."""
    monkeypatch.setattr(compiler_module, "MAX_KEPT_STATES", 150)
    own, rng = Compiler(token_bytes()), random.Random(1)
    structured = Structured(kind="regex", text="(a|b)*a(a|b){14}c")
    grammar = own.compile(structured)
    guide, kept = Guide(grammar), grammar.lexer
    for _ in range(200):
        allowed_ids(guide)
        guide.consume(ids_of(rng.choice("ab")))
    assert guide.error is None and kept.is_full and not kept.is_own
    assert grammar.lexer.is_own and not grammar.lexer.is_full
    assert own.compile(structured).lexer.is_own and not any(own._kept.values()), "none starts over again"


def test_a_constraint_that_begins_with_more_states_is_compiled_and_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiler_module, "MAX_KEPT_STATES", 10)
    own, structured = Compiler(token_bytes()), Structured.choice(["true", "false", "null", "items"])
    grammar = own.compile(structured)
    assert grammar.lexer.is_own and not any(own._kept.values())
    guide = Guide(grammar)
    guide.consume(ids_of("items"))
    assert guide.state == ENDED and guide.error is None
    monkeypatch.setattr(compiler_module, "MAX_LEXER_STATES", 10)
    with pytest.raises(RequestError, match="too many states"):
        own.compile(structured)


def test_few_compiled_constraints_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_KEPT", 4)
    own = Compiler(token_bytes())
    kept = [own.compile(Structured.regex(f"{letter}+")).lexer for letter in "abcdef"]
    again = [own.compile(Structured.regex(f"{letter}+")).lexer for letter in "fedc"]
    assert again == kept[:1:-1]
    assert own.compile(Structured.regex("a+")).lexer is not kept[0]
    for letter in "ghijkl":  # of constraints that fill lexers, not even their names are kept for long
        own.compile(Structured.regex(f"{letter}+")).lexer.is_full = True
        own.compile(Structured.regex(f"{letter}+"))
    assert len(own._kept) <= 4 and not any(own._kept.values())


def test_lexers_are_dropped_one_by_one_from_the_constraint_asked_for_longest_ago(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiler_module, "MAX_KEPT", 4)
    own = Compiler(token_bytes())
    together = [own.compile(Structured.regex("a+")) for _ in range(4)]
    first, *others = [grammar.lexer for grammar in together]
    own.compile(Structured.regex("b+"))
    assert list(own._kept.values())[0] == others and first not in others
    for letter in "cde":
        own.compile(Structured.regex(f"{letter}+"))
    assert [key[1] for key in own._kept] == ["b+", "c+", "d+", "e+"]


@pytest.mark.parametrize(
    ("where", "name", "error"),
    [
        (threading.Thread, "start", RuntimeError("can't start new thread")),
        (compiler_module, "_compile", RequestError("too large")),
    ],
)
def test_a_request_that_cannot_start_over_fails_alone(
    where: object,
    name: str,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The engine's thread asks for it, in the middle of a step of many requests."""
    own, structured = Compiler(token_bytes()), Structured.regex("[a-z]+;")
    full = own.compile(structured).lexer
    grammar = own.compile(structured)

    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(where, name, fail)
    assert grammar.lexer_after(full) is None
    assert caplog.messages == [f"constraint could not be recompiled error={error!r}"]


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for number in range(depth):
        schema = {"anyOf": [schema, {"type": "array", "items": schema, "maxItems": number}]}
    return schema


def deep_refs() -> dict[str, Any]:
    """Each refers to the next twice: written out, 2^60 objects."""
    refs = [{"$ref": f"#/$defs/d{number + 1}"} for number in range(60)]
    defs: dict[str, Any] = {
        f"d{number}": {"type": "object", "properties": {"a": ref, "b": ref}}
        for number, ref in enumerate(refs)
    }
    return {"$defs": defs | {"d60": {"type": "string"}}, "$ref": "#/$defs/d0"}


BOMBS = {
    "alternatives inside alternatives": lambda: Structured.json_schema(nested(10)),
    "repetitions": lambda: Structured(kind="json_schema", text='{"pattern":"^(a{0,5000}){0,5000}$"}'),
    "repetitions of a regex": lambda: Structured(kind="regex", text="((a{0,999}){0,999}){0,999}"),
    "a state for every suffix": lambda: Structured(kind="regex", text="(a|b)*a(a|b){60}c"),
    "many such": lambda: Structured(kind="regex", text="|".join(f"(a|b)*{c}(a|b){{25}}" for c in "cdefghij")),
    "long strings": lambda: Structured.json_schema({"type": "string", "maxLength": 100_000_000}),
    "long arrays": lambda: Structured.json_schema({"type": "array", "minItems": 1_000_000}),
    "references to itself": lambda: Structured.json_schema(
        {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}
    ),
    "references that double": lambda: Structured.json_schema(deep_refs()),
    "a large enum": lambda: Structured.json_schema({"enum": [f"value {n}" for n in range(100_000)]}),
    "a grammar that counts": lambda: Structured(kind="grammar", text='start: "a"{3,900000}'),
    "an ambiguous grammar": lambda: Structured.grammar('start: start start | "a" | "a" "a"'),
    "products": lambda: Structured.json_schema(
        {"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(8)]} for i in range(8)]}
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_or_stays_within_its_limits(name: str) -> None:
    """Refused when it is made or compiled; otherwise its masks work, or end with an error of their own.

    Time and memory are bounded by the counts in the limits; the clock here only says that it came back.
    """
    begun = time.monotonic()
    try:
        guide = Guide(compiled(BOMBS[name]()))
    except RequestError as error:
        assert str(error)
    else:
        for _ in range(40):
            if guide.state == ENDED or guide.error is not None:
                break
            forced = guide.forced()[:20]
            guide.consume(forced or allowed_ids(guide)[-1:].tolist())
    assert time.monotonic() - begun < 60


def test_a_limit_that_is_reached_while_it_is_used_is_the_error_of_its_guide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiler_module, "MAX_LEXER_STATES", 150)
    monkeypatch.setattr(compiler_module, "MAX_KEPT_STATES", 100)
    own = Compiler(token_bytes())
    grammar = own.compile(Structured(kind="regex", text="(a|b)*a(a|b){14}c"))
    guide, other = Guide(grammar), Guide(compiled(Structured.regex("(a|b)*")))
    rng = random.Random(1)
    for _ in range(200):
        allowed_ids(guide)
        if guide.error is not None:
            break
        token = ids_of(rng.choice("ab"))
        guide.consume(token)
        other.consume(token)
    assert guide.error is not None and "too complex" in guide.error and other.error is None


EBNF = """\
root ::= "SELECT " column " from " [a-c]+ condition?
column ::= "one" | "two"  # a comment
condition ::= " where " column "=" [0-9]{1,2}
"""


def test_a_grammar_may_be_written_in_ebnf() -> None:
    structured = Structured.grammar(EBNF)
    for text in ("SELECT one from abc", "SELECT two from a where one=42"):
        assert accepts(structured, text), text
    for text in ("SELECT three from a", "SELECT one from a where one=", "SELECT one from a where one=123"):
        assert not accepts(structured, text), text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('root ::= ")" (', "cannot be compiled"),
        ("root ::= foo", "'foo' not found"),
        ('foo ::= "a"', "No 'root' rule"),
        ("root ::= " + "(" * 3_000 + '"a"' + ")" * 3_000, "recursion"),
    ],
)
def test_what_is_wrong_with_ebnf_is_said(text: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        compiled(Structured.grammar(text))
