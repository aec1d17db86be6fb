"""What may follow, state by state: reasoning, free text, grammar, end."""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from infer.constraints import compiler as compiler_module
from infer.constraints import masks as filler_module
from infer.constraints.compiler import Compiler, Grammar
from infer.constraints.description import Reasoning, Structured
from infer.constraints.guide import CONSTRAINED, ENDED, FREE, REASONING, Guide
from infer.constraints.masks import MAX_THREADS, TRY_AGAIN, MaskFiller, num_threads
from tests.support.walks import num_valid
from tests.support.words import (
    EOS_IDS,
    PIECES,
    THINK_END,
    TOOL,
    VOCAB_SIZE,
    compiled,
    ids_of,
    text_of,
    token_bytes,
    token_of,
)

NUMBER = Structured.regex("[0-9]{3}")
PERSON = Structured.json_schema(
    {"properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name", "age"]}
)
CALL = Structured.grammar('start: %json {"type": "object"} "</tc>"', triggers=("<tc>",))


def allowed(guide: Guide) -> set[int]:
    mask_W = np.zeros(-(-VOCAB_SIZE // 32), dtype=np.int32)
    guide.fill(mask_W)
    bits = np.unpackbits(mask_W.view(np.uint8), bitorder="little")
    assert not bits[VOCAB_SIZE:].any()
    return set(bits.nonzero()[0].tolist())


def texts(ids: set[int]) -> set[str]:
    return {text_of([token_id]) for token_id in ids}


def test_a_constraint_holds_from_the_start_and_ends_the_output() -> None:
    guide = Guide(compiled(NUMBER))
    assert texts(allowed(guide)) == {*"0123456789", "12"}
    guide.consume(ids_of("1"))
    guide.consume(ids_of("12"))
    assert guide.state == ENDED and not guide.has_mask


def test_an_end_that_is_not_the_only_way_on_is_one_of_them() -> None:
    guide = Guide(compiled(Structured.regex("a+")))
    guide.consume(ids_of("a"))
    assert guide.state == CONSTRAINED
    assert allowed(guide) == {*ids_of("a"), *EOS_IDS}


def test_reasoning_is_free_and_the_constraint_begins_behind_its_end() -> None:
    guide = Guide(compiled(NUMBER), Reasoning(end_id=THINK_END))
    for text in ("any", '{"', "12"):
        guide.consume(ids_of(text))
        assert guide.state == REASONING and not guide.has_mask
    guide.consume([THINK_END, *ids_of("1")])
    assert texts(allowed(guide)) == {*"0123456789", "12"}


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_reasoning_that_is_used_up_is_ended(limit: int) -> None:
    forced = (*ids_of("no"), THINK_END, *ids_of("\n\n"))
    guide = Guide(compiled(NUMBER), Reasoning(end_id=THINK_END, max_tokens=limit, forced=forced))
    for _ in range(limit):
        assert not guide.has_mask
        guide.consume(ids_of("a"))
    for number, token_id in enumerate(forced):
        assert guide.forced() == forced[number:] and allowed(guide) == {token_id}
        guide.consume([token_id])
    assert guide.state == CONSTRAINED and not guide.forced()


@pytest.mark.parametrize("limit", [None, 2])
def test_what_comes_after_reasoning_comes_before_the_constraint(limit: int | None) -> None:
    later = tuple(ids_of("no"))
    guide = Guide(compiled(NUMBER), Reasoning(end_id=THINK_END, max_tokens=limit, later=later))
    guide.consume(ids_of("ab"))
    guide.consume([THINK_END])
    assert guide.forced() == later and allowed(guide) == {later[0]}
    guide.consume(later)
    assert guide.state == CONSTRAINED and texts(allowed(guide)) >= {*"123"}


def test_what_comes_after_reasoning_may_begin_without_its_end() -> None:
    """gpt-oss may open its next message without closing the one it is in."""
    later = tuple(ids_of("no")) if len(ids_of("no")) > 1 else (*ids_of("no"), *ids_of("a"))
    guide = Guide(compiled(NUMBER), Reasoning(end_id=THINK_END, later=later))
    guide.consume([*ids_of("b"), later[0]])
    assert guide.forced() == later[1:] and allowed(guide) == {later[1]}
    guide.consume(later[1:])
    assert guide.state == CONSTRAINED and texts(allowed(guide)) >= {*"123"}


def test_without_a_constraint_the_end_of_reasoning_is_the_end_of_guiding() -> None:
    guide = Guide(None, Reasoning(end_id=THINK_END, max_tokens=5))
    guide.consume([*ids_of("a"), THINK_END])
    assert guide.state == ENDED


@pytest.mark.parametrize(
    "pieces",
    [
        ["<t", "c", ">"],  # over several tokens
        ["<tc>"],  # one token of its own
        ["<", "<t", "<tc>"],  # a false start
        ["a<", "tc>"],
        ["<tc>\n"],  # it ends inside a token, whose rest fits
        ["<t", "c>", " {"],
    ],
)
def test_a_trigger_is_found_however_it_is_cut(pieces: list[str]) -> None:
    spaced = Structured.regex(r"\s*\{[a-z]\}", triggers=("<tc>",))
    guide = Guide(compiled(spaced))
    assert guide.state == FREE
    for piece in pieces:
        assert not guide.has_mask or "{" in piece
        guide.consume([token_of(piece)] if piece in PIECES else ids_of(piece))
    assert guide.state == CONSTRAINED
    guide.consume(ids_of("{") if "{" not in pieces[-1] else [])
    assert "{" not in texts(allowed(guide)) and "x" in texts(allowed(guide))


def test_text_goes_on_freely_behind_each_match() -> None:
    guide = Guide(compiled(CALL))
    for _ in range(2):
        guide.consume(ids_of("some <tc"))
        assert guide.state == FREE
        guide.consume(ids_of(">"))
        assert guide.state == CONSTRAINED
        guide.consume(ids_of('{"a": 1}'))
        guide.consume(ids_of("</tc>"))
        assert guide.state == FREE and guide.error is None


def test_a_special_token_may_be_a_trigger() -> None:
    guide = Guide(compiled(Structured.regex("[0-9]", triggers=("<tool>",))))
    guide.consume([TOOL])
    assert guide.state == CONSTRAINED


def test_what_was_written_behind_a_trigger_and_does_not_fit_stays_text() -> None:
    guide = Guide(compiled(Structured.regex("[0-9]+;", triggers=("<tc>",))))
    guide.consume([token_of("<tc>\n")])
    assert guide.state == FREE and guide.error is None
    guide.consume(ids_of("<tc>"))
    assert guide.state == CONSTRAINED


def test_a_trigger_behind_one_that_does_not_fit_is_found() -> None:
    guide = Guide(compiled(Structured.regex("[0-9]", triggers=("\n",))))
    guide.consume([token_of("\n\n")])
    assert guide.state == CONSTRAINED, "the second of one token"
    guide = Guide(compiled(Structured.regex("[0-9]", triggers=("<tc", "\nx"))))
    guide.consume([token_of("<tc>\n")])
    assert guide.state == FREE
    guide.consume(ids_of("x"))
    assert guide.state == CONSTRAINED, "one that began in the token of the first"


def filled_by_others(monkeypatch: pytest.MonkeyPatch) -> Grammar:
    """The grammar of a request whose lexer another has filled."""
    monkeypatch.setattr(compiler_module, "MAX_KEPT_STATES", 200)
    monkeypatch.setattr(compiler_module, "MAX_KEPT", 1)
    structured = Structured(kind="regex", text=r"\s*\{(a|b)*a(a|b){14}c", triggers=("<tc>",))
    own, rng = Compiler(token_bytes()), random.Random(1)
    grammar, other = own.compile(structured), own.compile(structured)
    assert other.lexer is grammar.lexer
    matcher = other.lexer.matcher()
    matcher.consume_tokens(ids_of("{"))
    for _ in range(300):
        matcher.compute_bitmask()
        if not matcher.consume_tokens(ids_of(rng.choice("ab"))):
            break
    assert "too many states" in matcher.get_error()
    return grammar


def test_a_trigger_is_found_where_others_have_filled_the_lexer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full lexer validates nothing, which is not to be taken for text that does not fit."""
    guide = Guide(filled_by_others(monkeypatch))
    guide.consume([token_of("<tc>\n")])
    assert guide.state == CONSTRAINED and guide.error is None
    assert texts(allowed(guide)) >= {"{", "\n"} and "x" not in texts(allowed(guide))


def test_text_behind_a_trigger_that_cannot_be_checked_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    guide = Guide(filled_by_others(monkeypatch))
    monkeypatch.setattr(Grammar, "lexer_after", lambda self, full: None)
    guide.consume([token_of("<tc>\n")])
    assert guide.error is not None and "too complex" in guide.error


def test_forced_ids_come_in_their_order_however_they_are_taken() -> None:
    schema = {"type": "object", "properties": {"name": {"const": "abc"}}, "required": ["name"]}
    structured = Structured.json_schema(schema | {"additionalProperties": False})
    one, many = Guide(compiled(structured)), Guide(compiled(structured))
    while many.state != ENDED:
        forced = many.forced()
        for number, token_id in enumerate(forced):
            assert one.forced()[: len(forced) - number] == forced[number:] and allowed(one) == {token_id}
            one.consume([token_id])
        many.consume(forced)
        if many.state != ENDED and not many.forced():
            (least, *_) = sorted(allowed(many))
            one.consume([least])
            many.consume([least])
    assert one.state == ENDED


def test_ids_that_were_shown_ahead_are_taken_once() -> None:
    stops = {token_of("x")}
    for ids, taken in (("12", (2, False)), ("1x3", (2, False)), ("1234", (3, True))):
        ahead, late = Guide(compiled(NUMBER)), Guide(compiled(NUMBER))
        given = [token_of(text) for text in ids]
        ahead.advance(given, stops)
        assert ahead.take(given, stops) == late.take(given, stops) == taken
        assert ahead.state == late.state == (ENDED if taken[1] else CONSTRAINED)
        if not taken[1]:
            assert allowed(ahead) == allowed(late)


def test_an_id_that_was_not_expected_among_forced_ones_is_asked_about_anew() -> None:
    guide = Guide(compiled(Structured.choice(["abc"])))
    guide._due = (token_of("12"), token_of("1"))  # as if a grammar had said what its mask does not
    assert guide.matcher is not None
    first = guide.matcher.compute_ff_tokens()[0]
    guide.consume([first])
    assert guide.error is None and guide.known == ()


def test_a_copy_says_how_many_ids_fit_and_changes_nothing() -> None:
    guide = Guide(compiled(NUMBER), Reasoning(end_id=THINK_END))
    digits = ids_of("9") * 4
    assert num_valid(guide, [*ids_of("a"), THINK_END, *digits]) == 5, "three digits, then the end"
    assert num_valid(guide, [THINK_END, *ids_of("1a")]) == 2
    assert guide.state == REASONING
    calls = Guide(compiled(CALL))
    assert num_valid(calls, ids_of("x <tc>[")) == len(ids_of("x <tc>[")) - 1
    assert calls.state == FREE


def test_a_copy_goes_its_own_way() -> None:
    guide = Guide(compiled(NUMBER))
    guide.consume(ids_of("1"))
    copy = guide.copy()
    copy.consume(ids_of("12"))
    assert copy.state == ENDED and guide.state == CONSTRAINED
    guide.consume(ids_of("9"))
    assert guide.error is None and "12" not in texts(allowed(guide))


def test_an_id_that_does_not_fit_is_an_error_and_no_other_guide_has_it() -> None:
    guide, other = Guide(compiled(NUMBER)), Guide(compiled(NUMBER))
    guide.consume(ids_of("a"))
    assert guide.error is not None
    other.consume(ids_of("1"))
    assert other.error is None


def test_threads_are_as_many_as_the_cores_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 8, 9}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert num_threads() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    assert num_threads() == MAX_THREADS
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert num_threads() == 1


@pytest.fixture
def _cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which threads may help."""
    monkeypatch.setattr(filler_module, "num_threads", lambda: 2)


@pytest.mark.usefixtures("_cores")
def test_masks_of_several_rows_are_those_of_each() -> None:
    others = Structured.regex("[abc]+"), Structured.choice(["abc"])
    guides = [Guide(compiled(each)) for each in (NUMBER, *others)]
    guides.append(Guide(None, Reasoning(end_id=THINK_END, max_tokens=0)))
    assert guides[2].forced(), "one way to write it"
    masks_KW = np.zeros((4, -(-VOCAB_SIZE // 32)), dtype=np.int32)
    filler = MaskFiller()
    ways = set()
    for _ in range(3):  # in this thread, then in others, then whichever was quicker
        before = guides[0].mask_cost.seconds, len(filler._in_threads)
        masks_KW[:] = 0
        assert filler.fill([(guide, ()) for guide in guides], masks_KW) == []
        filler.look_back()
        ways |= {
            way
            for way in (0, 1)
            if (guides[0].mask_cost.seconds, len(filler._in_threads))[way] != before[way]
        }
        for guide, mask_W in zip(guides, masks_KW, strict=True):
            bits = np.unpackbits(mask_W.view(np.uint8), bitorder="little")
            assert set(bits.nonzero()[0].tolist()) == allowed(guide)
    assert ways == {0, 1}


@pytest.mark.usefixtures("_cores")
def test_threads_are_used_where_masks_are_expected_to_take_long() -> None:
    free, number = Structured.regex(r"(?s:.*)"), Structured.regex("[0-9]{1,9}")
    guides = [Guide(compiled(each)) for each in (free, free, number, number)]
    masks_KW = np.zeros((4, -(-VOCAB_SIZE // 32)), dtype=np.int32)
    filler = MaskFiller()
    filler.fill([(guide, ()) for guide in guides], masks_KW)
    filler.look_back()
    assert [guide.is_wide for guide in guides] == [True, True, False, False]
    assert guides[0].copy().is_wide
    assert guides[0].mask_cost is guides[1].mask_cost is not guides[2].mask_cost is guides[3].mask_cost
    assert all(guide.mask_cost.seconds == 0 for guide in guides[:2]), "none was filled after a wide one"
    assert filler._prefers_threads(8, 300e-6), "it was never tried"
    for seconds in (300e-6, 200e-6):
        filler._in_threads[filler_module._size_of(seconds)].note(250e-6)
    assert filler._prefers_threads(8, 300e-6) and not filler._prefers_threads(8, 200e-6)
    assert not filler._prefers_threads(1, 300e-6), "one mask"
    assert not filler._prefers_threads(8, 0.0), "what they take is not known yet"
    filler._num_fills = TRY_AGAIN - 1
    assert not filler._prefers_threads(8, 300e-6), "the other way is tried again"
    filler._has_cores = False
    assert not any(filler._prefers_threads(8, 300e-6) for _ in range(TRY_AGAIN + 1)), "there are none to help"


def test_what_masks_take_is_known_of_each_constraint() -> None:
    """One whose masks take long does not make those of others look as if they did."""
    slow, quick = Structured.regex("[0-9]{1,9};"), Structured.regex("[0-9]{1,8};")
    guides = [Guide(compiled(each)) for each in (slow, quick)]
    guides[0].mask_cost.seconds, guides[1].mask_cost.seconds = 1.0, 2e-6
    assert Guide(compiled(slow)).mask_cost.seconds == 1.0 and Guide(compiled(quick)).mask_cost.seconds == 2e-6


@pytest.mark.parametrize(
    "text", ['{"type": "object"}', "[ab]{2}x[xz]+", "(zhx )?(zxa|xaz)", "(?s:.{1,9})", "zx|zz"]
)
def test_a_grammar_is_not_asked_what_must_follow_where_a_mask_says_it(text: str) -> None:
    """Where two bytes may come, none must: what is said without asking is what the grammar would say."""
    structured = Structured.json_object() if text.startswith("{") else Structured.regex(text)
    rng, seen = np.random.default_rng(3), Counter[bool]()
    masks_KW = np.zeros((1, -(-VOCAB_SIZE // 32)), dtype=np.int32)
    for _ in range(8):
        guide, filler = Guide(compiled(structured)), MaskFiller()
        for _ in range(12):
            filler.fill([(guide, ())], masks_KW)
            filler.look_back()
            assert guide.matcher is not None
            seen[guide.is_wide] += 1
            forced = tuple(guide.matcher.compute_ff_tokens())
            assert guide.forced() == forced
            bits = np.unpackbits(masks_KW.view(np.uint8), bitorder="little").nonzero()[0]
            guide.consume(forced or [int(rng.choice(bits))])
            if guide.matcher is None:
                break
    assert seen[True], "it was not asked"


def window_of(guide: Guide, drafts: list[int]) -> tuple[list[set[int]], int]:
    masks_PW = np.zeros((len(drafts) + 1, -(-VOCAB_SIZE // 32)), dtype=np.int32)
    num_valid = guide.fill_window(drafts, masks_PW)
    bits = np.unpackbits(masks_PW.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB_SIZE]
    return [set(row.nonzero()[0].tolist()) for row in bits], num_valid


WINDOWS = {
    "schema": Guide(compiled(PERSON)),
    "free text with calls": Guide(compiled(CALL)),
    "reasoning": Guide(compiled(NUMBER), Reasoning(end_id=THINK_END)),
    "reasoning with a header behind it": Guide(
        compiled(NUMBER), Reasoning(end_id=THINK_END, later=tuple(ids_of("no")))
    ),
    "reasoning that ends early": Guide(compiled(NUMBER), Reasoning(end_id=THINK_END, max_tokens=2)),
    "keys that must come": Guide(compiled(Structured.choice(["abcab", "abcno"]))),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_masks_of_a_window_are_those_of_a_guide_that_consumed_its_drafts(name: str) -> None:
    rng, everything = np.random.default_rng(11), set(range(VOCAB_SIZE))
    start, num_drafts = WINDOWS[name], 0
    calls = ids_of("a <tc>{}")
    for trial in range(12):
        guide, seen = start.copy(), list[int]()
        for place in range(20):
            ahead, drafts, wanted = guide.copy(), list[int](), list[set[int]]()
            for position in range(5):  # what a guide says that has seen nothing else
                fresh = start.copy()
                fresh.consume(seen + drafts)
                wanted.append(allowed(fresh) if fresh.has_mask else everything)
                if ahead.state == ENDED:
                    break
                choices = sorted(wanted[-1])
                if not ahead.has_mask:  # a token that means something, or any
                    choices = [THINK_END, *ids_of("x"), calls[(place + position) % len(calls)]]
                drafts.append(int(rng.choice(choices)))
                ahead.consume(drafts[-1:])
            wanted, drafts = wanted[: len(drafts) + 1], drafts[: len(wanted) - 1]
            found, num_valid = window_of(guide, drafts)
            assert (found, num_valid) == (wanted, len(drafts)), (trial, seen, drafts)
            wrong = sorted(everything - wanted[0])
            if wrong and drafts:
                found, num_valid = window_of(guide, [wrong[0], *drafts[1:]])
                assert found == [wanted[0], *[everything] * len(drafts)] and num_valid == 0
            num_drafts += len(drafts)
            if not drafts:
                break
            guide.consume(drafts[:1])
            seen += drafts[:1]
    assert num_drafts > 40 or name == "keys that must come"


def test_a_window_equals_a_fresh_matcher_that_consumed_the_prefix() -> None:
    grammar, output = compiled(PERSON), ids_of('{"name":"ab","age":12}')
    found, num_valid = window_of(Guide(grammar), output)
    assert num_valid == len(output)
    for position, mask in enumerate(found[:-1]):
        matcher = grammar.lexer.matcher()
        assert matcher.consume_tokens(output[:position])
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        assert mask == set(bits[:VOCAB_SIZE].nonzero()[0].tolist())


def test_a_window_goes_on_where_a_lexer_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that others have used up on the way leaves the guide able to go on."""
    guide, plain = Guide(compiled(PERSON)), Guide(compiled(PERSON))
    output = ids_of('{"name":"ab"')
    assert guide.matcher is not None
    monkeypatch.setattr(guide, "matcher", Stubborn(guide.matcher))
    assert window_of(guide, output) == window_of(plain, output)
    assert window_of(guide, output) == window_of(plain, output)


class Stubborn:
    """A matcher that does not roll back."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def rollback(self, num_tokens: int) -> bool:
        return False
