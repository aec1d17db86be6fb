from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest

from infer.errors import ConfigError
from infer.speculative import text_index
from infer.speculative.ngram import NgramProposer
from infer.speculative.proposer import Proposer, Wish


def wish(tokens: Sequence[int], num_drafts: int = 4, seq_id: int = 1) -> Wish:
    return Wish(seq_id, array("I", tokens), 0, "", num_drafts)


def drafts_of(proposer: Proposer, asked: Wish) -> list[int]:
    (drafts,) = proposer.propose([asked])
    return list(drafts)


def brute_force(text: list[int], shortest: int, longest: int, num_drafts: int) -> list[int]:
    """Look at every earlier place, as the module's docstring says it."""
    ends = [e for e in range(len(text) - 1, shortest - 1, -1) if text[e - shortest : e] == text[-shortest:]]
    best_length, best_end = 0, -1
    for end in ends[: text_index.CANDIDATES]:
        length = max(n for n in range(1, min(longest, end) + 1) if text[end - n : end] == text[-n:])
        if length > best_length:
            best_length, best_end = length, end
    if best_end < 0:
        return []
    grown = list(text)
    for offset in range(num_drafts):
        grown.append(grown[best_end + offset])
    return grown[len(text) :]


@pytest.mark.parametrize("seed", range(40))
def test_drafts_equal_a_quadratic_scan(seed: int) -> None:
    rng = random.Random(seed)
    shortest = rng.randint(1, 3)
    longest = shortest + rng.randint(0, 6)
    alphabet = rng.choice([1, 2, 3, 5, 12])
    growing = NgramProposer(shortest, longest)
    text: list[int] = []
    while len(text) < 160:
        text += [rng.randrange(alphabet) for _ in range(rng.randint(0, 6))]
        asked = wish(text, rng.randint(1, 9))
        expected = brute_force(text, shortest, longest, asked.num_drafts)
        assert drafts_of(growing, asked) == expected
        assert drafts_of(NgramProposer(shortest, longest), asked) == expected
        assert growing.has_match(asked) == bool(expected)


def test_the_longest_match_wins_and_the_newest_of_equals() -> None:
    proposer = NgramProposer()
    assert drafts_of(proposer, wish([1, 2, 3, 7, 2, 3, 8, 1, 2, 3], 1)) == [7]
    assert drafts_of(proposer, wish([9, 2, 3, 7, 4, 2, 3, 8, 1, 2, 3], 1, seq_id=2)) == [8]


@pytest.mark.parametrize("period", range(1, 6))
def test_periodic_text_gets_drafts_of_full_length(period: int) -> None:
    text = list(range(period)) * 5
    assert drafts_of(NgramProposer(), wish(text, 13)) == (list(range(period)) * 13)[:13]


def test_short_texts_and_empty_wishes_get_nothing() -> None:
    proposer = NgramProposer()
    for text in ([], [1], [1, 1], [1, 2, 3, 4]):
        assert drafts_of(proposer, wish(text)) == []
        assert not proposer.has_match(wish(text))
    assert drafts_of(proposer, wish([1, 2, 1, 2, 1, 2], 0)) == []
    assert not proposer.has_match(wish([1, 2, 1, 2, 1, 2], 0))
    assert proposer.propose([]) == []


def test_several_wishes_are_answered_in_order() -> None:
    asked = [
        wish([1, 2, 3, 1, 2], 1, seq_id=1),
        wish([1, 2], 1, seq_id=2),
        wish([1, 2, 4, 1, 2], 1, seq_id=3),
    ]
    assert [list(drafts) for drafts in NgramProposer().propose(asked)] == [[3], [], [4]]


@pytest.mark.parametrize("other", [[1, 2, 9], [4, 5, 6, 4, 5], [5, 6, 7, 5, 6, 8, 5, 6]])
def test_a_text_that_is_not_a_continuation_is_indexed_anew(other: list[int]) -> None:
    proposer = NgramProposer()
    assert drafts_of(proposer, wish([1, 2, 3, 1, 2])) == [3, 1, 2, 3]
    assert drafts_of(proposer, wish(other)) == brute_force(other, 2, 16, 4)


def test_an_unnoticed_change_of_the_text_still_drafts_only_its_ids() -> None:
    proposer = NgramProposer()
    proposer.has_match(wish([1, 2, 3, 1, 2]))
    changed = [8, 1, 2, 8, 2, 3, 1, 2]  # its fifth token is the same
    assert set(drafts_of(proposer, wish(changed))) <= set(changed)


def test_finish_forgets_and_takes_unknown_sequences() -> None:
    proposer = NgramProposer()
    asked = wish([1, 2, 3, 1, 2])
    proposer.finish(asked)
    proposer.propose([asked])
    assert list(proposer._texts._indexes) == [1]
    proposer.finish(asked)
    proposer.finish(asked)
    assert not proposer._texts._indexes


def test_a_step_indexes_only_new_tokens_and_keeps_no_more_entries_than_tokens() -> None:
    rng = random.Random(0)
    text = array("I", [rng.randrange(50) for _ in range(3000)])
    proposer = NgramProposer()
    for length in range(2900, 3001):
        proposer.propose([Wish(1, text[:length], 0, "", 4)])
        index = proposer._texts._indexes[1]
        assert len(index._older) == length
        assert len(index._newest) < length


@pytest.mark.parametrize("bounds", [(0, 4), (3, 2), (-1, -1)])
def test_impossible_lengths_are_refused(bounds: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="cannot be looked up"):
        NgramProposer(*bounds)
