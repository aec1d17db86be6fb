from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest

from infer.errors import ConfigError
from infer.speculative import text_index
from infer.speculative.proposer import Proposer, Wish
from infer.speculative.suffix import (
    DEPTH,
    DRAFTS_PER_MATCHED,
    LEAST_PROBABILITY,
    RUN,
    SEPARATOR,
    SuffixProposer,
)
from tests.support.thinned import thinned

Place = tuple[list[int], int]  # a text and where in it a match ends


def wish(
    tokens: Sequence[int], num_drafts: int = 4, *, seq_id: int = 1, num_prompt: int = 0, salt: str = ""
) -> Wish:
    return Wish(seq_id, array("I", tokens), num_prompt, salt, num_drafts)


def drafts_of(proposer: Proposer, asked: Wish) -> list[int]:
    (drafts,) = proposer.propose([asked])
    return list(drafts)


def agreement(place: Place, text: list[int]) -> int:
    """How many tokens before a place are also at the end of the text."""
    source, end = place
    return max(
        n for n in range(min(DEPTH, end, len(text)) + 1) if source[end - n : end] == text[len(text) - n :]
    )


def vote(places: list[Place], text: list[int], num_drafts: int) -> tuple[list[int], float]:
    """Walk along the most frequent continuation of the longest match."""
    places = [place for place in places if agreement(place, text) >= RUN][: text_index.CANDIDATES]
    longest = max([agreement(place, text) for place in places], default=0)
    places = [place for place in places if agreement(place, text) == longest]
    drafts: list[int] = []
    probability, expected = 1.0, 0.0
    while len(drafts) < min(num_drafts, int(longest * DRAFTS_PER_MATCHED)):
        following = []
        for source, end in places:
            grown = source + drafts if source is text else source
            following.append(grown[end + len(drafts)] if end + len(drafts) < len(grown) else None)
        tokens = [token for token in following if token is not None]
        if not tokens:
            break
        best = max(tokens, key=lambda token: (tokens.count(token), -tokens.index(token)))
        probability *= tokens.count(best) / len(places)
        if probability < LEAST_PROBABILITY:
            break
        places = [place for place, token in zip(places, following, strict=True) if token == best]
        drafts.append(best)
        expected += probability
    return drafts, expected


def brute_force(text: list[int], past: list[list[int]], num_drafts: int) -> list[int]:
    """What the module's docstring says, by looking at every place of every text."""
    own, expected = vote([(text, end) for end in range(len(text) - 1, -1, -1)], text, num_drafts)
    answers = [(answer, end) for answer in reversed(past) for end in range(len(answer), -1, -1)]
    others, expected_of_others = vote(answers, text, num_drafts)
    return others if expected_of_others > expected + 1e-9 else own


def held(proposer: SuffixProposer) -> list[tuple[str, list[int]]]:
    """All past answers, by salt."""
    return [(salt, past.text.tolist()) for salt, past in proposer._past.items()]


@pytest.mark.parametrize("seed", thinned(range(40), keep=4))
def test_drafts_equal_a_quadratic_scan(seed: int) -> None:
    rng = random.Random(seed)
    alphabet = rng.choice([2, 3, 5, 12])
    proposer = SuffixProposer(max_answers=4)
    past: list[list[int]] = []
    for seq_id in range(8):
        text = [rng.randrange(alphabet) for _ in range(rng.randint(0, 8))]
        num_prompt = len(text)
        fresh = SuffixProposer(max_answers=4)
        for answer in past:
            fresh.finish(wish(answer))
        while len(text) < 40:
            text += [rng.randrange(alphabet) for _ in range(rng.randint(1, 6))]
            asked = wish(text, rng.randint(1, 9), seq_id=seq_id, num_prompt=num_prompt)
            expected = brute_force(text, past, asked.num_drafts)
            assert drafts_of(proposer, asked) == expected
            assert drafts_of(fresh, asked) == expected  # incremental, with evictions, as built anew
            assert proposer.has_match(asked) or not expected
        proposer.finish(wish(text, seq_id=seq_id, num_prompt=num_prompt))
        past = [*past, text[num_prompt:]][-4:]


def test_the_most_frequent_continuation_is_proposed() -> None:
    proposer = SuffixProposer()
    for last in (6, 6, 7):
        proposer.finish(wish([1, 2, 3, last]))
    assert drafts_of(proposer, wish([1, 2, 3])) == [6]


def test_drafts_stop_where_they_become_unlikely() -> None:
    proposer = SuffixProposer()
    for last in range(11):
        proposer.finish(wish([1, 2, 3, 4, 100 + last, 5]))
    assert drafts_of(proposer, wish([1, 2, 3])) == [4]
    assert drafts_of(proposer, wish([1, 2, 3, 4])) == []


def test_a_short_match_gets_few_drafts() -> None:
    proposer = SuffixProposer()
    proposer.finish(wish(range(20)))
    assert drafts_of(proposer, wish([0, 1], 9)) == [2, 3, 4]
    assert drafts_of(proposer, wish([0, 1, 2, 3], 9)) == [4, 5, 6, 7, 8, 9]


def test_the_better_of_own_text_and_past_answers_wins() -> None:
    proposer = SuffixProposer()
    proposer.finish(wish([1, 2, 3, 4, 5, 6, 7, 8]))
    assert drafts_of(proposer, wish([3, 4, 99, 1, 2, 3, 4])) == [5, 6, 7, 8]
    assert drafts_of(proposer, wish([1, 2, 3, 4, 99, 1, 2, 3, 4])) == [99, 1, 2, 3]  # as good, and its own


@pytest.mark.parametrize("period", range(1, 6))
def test_periodic_text_gets_drafts_of_full_length(period: int) -> None:
    text = list(range(period)) * 12
    assert drafts_of(SuffixProposer(), wish(text, 13)) == (list(range(period)) * 13)[:13]


def test_drafts_never_run_from_one_answer_into_the_next() -> None:
    proposer = SuffixProposer()
    proposer.finish(wish([1, 2, 3, 4]))
    proposer.finish(wish([5, 6, 7, 8]))
    assert drafts_of(proposer, wish([2, 3], 9)) == [4]
    assert drafts_of(proposer, wish([3, 4], 9)) == []
    assert drafts_of(proposer, wish([4, 5], 9)) == []


def test_only_answers_are_kept() -> None:
    proposer = SuffixProposer()
    proposer.finish(wish([1, 2, 3, 4, 5, 6, 7], num_prompt=4))
    assert drafts_of(proposer, wish([1, 2])) == []
    assert drafts_of(proposer, wish([5, 6])) == [7]


SECRET = [11, 12, 13, 14, 15, 16, 17, 18]


@pytest.mark.parametrize("salt", ["", "a", "mallory", "alice ", "ALICE", "alice\0", "\0alice"])
def test_no_other_salt_gets_drafts_from_a_past_answer(salt: str) -> None:
    """An attacker who knows all but the last token of a secret, in every length, learns nothing of it."""
    proposer = SuffixProposer()
    proposer.finish(wish(SECRET, salt="alice"))
    proposer.finish(wish([21, 22, 23], salt=salt))  # it has answers of its own
    for start in range(len(SECRET)):
        for stop in range(start, len(SECRET)):
            probe = wish(SECRET[start:stop], 9, seq_id=1000 + start * 10 + stop, salt=salt)
            assert drafts_of(proposer, probe) == []
            assert not proposer.has_match(probe)
    assert drafts_of(proposer, wish(SECRET[:4], 9, salt="alice")) == SECRET[4:]


def test_salts_stay_apart_through_evictions() -> None:
    rng = random.Random(0)
    proposer = SuffixProposer(max_answers=6, max_tokens=60)
    for seq_id in range(300):
        tenant = rng.randrange(4)
        ids = range(tenant * 100, tenant * 100 + 3)  # every tenant has ids of its own, but says 1 and 2 too
        text = [rng.choice([1, 2, *ids]) for _ in range(rng.randint(0, 30))]
        asked = wish(text, 8, seq_id=seq_id, salt=f"tenant {tenant}")
        assert set(drafts_of(proposer, asked)) <= {1, 2, *ids}
        proposer.finish(asked)


def test_the_oldest_answer_is_evicted_with_its_votes() -> None:
    proposer = SuffixProposer(max_answers=3)
    for last in (6, 6, 7):
        proposer.finish(wish([1, 2, 3, last]))
    assert drafts_of(proposer, wish([1, 2, 3])) == [6]
    proposer.finish(wish([1, 2, 3, 7], salt="other"))  # the bound counts the answers of all salts
    assert drafts_of(proposer, wish([1, 2, 3])) == [7]
    assert held(proposer) == [
        ("", [SEPARATOR, 1, 2, 3, 6, SEPARATOR, 1, 2, 3, 7, SEPARATOR]),
        ("other", [SEPARATOR, 1, 2, 3, 7, SEPARATOR]),
    ]


@pytest.mark.parametrize(
    ("max_answers", "max_tokens"), [(5, 10**6), (10**6, 100), (5, 100), (0, 100), (5, 0)]
)
def test_memory_is_bounded(max_answers: int, max_tokens: int) -> None:
    rng = random.Random(1)
    proposer = SuffixProposer(max_answers, max_tokens)
    for seq_id in range(500):
        text = [rng.randrange(1000) for _ in range(rng.randint(0, 40))]
        asked = wish(text, seq_id=seq_id, salt=str(rng.randrange(50)))
        proposer.propose([asked])
        proposer.finish(asked)
        pasts = list(proposer._past.values())
        num_separators = sum(past.text.count(SEPARATOR) for past in pasts)
        num_tokens = sum(len(past.text) for past in pasts) - num_separators
        assert num_tokens == proposer._num_tokens <= max_tokens
        assert num_separators - len(pasts) == len(proposer._answers) <= max_answers
        for past in pasts:
            assert len(past.index._older) == len(past.text) > 1
            assert len(past.index._newest) <= len(past.text)
    assert not proposer._texts._indexes


def test_an_answer_larger_than_the_store_evicts_nothing() -> None:
    proposer = SuffixProposer(max_tokens=10)
    proposer.finish(wish([1, 2, 3]))
    proposer.finish(wish(range(100, 111)))
    assert held(proposer) == [("", [SEPARATOR, 1, 2, 3, SEPARATOR])]


def test_a_dropped_text_leaves_no_runs_behind() -> None:
    rng = random.Random(2)
    proposer = SuffixProposer(max_answers=2)
    for _ in range(50):
        proposer.finish(wish([rng.randrange(4) for _ in range(rng.randint(1, 9))]))
        past = proposer._past[""]
        text = past.text.tolist()
        assert len(past.index._newest) <= len({tuple(text[i : i + RUN]) for i in range(len(text) - RUN)})


def test_short_texts_and_empty_wishes_get_nothing() -> None:
    proposer = SuffixProposer()
    proposer.finish(wish([1, 2, 3]))
    proposer.finish(wish([1, 2], num_prompt=2))
    for text in ([], [1], [2]):
        assert drafts_of(proposer, wish(text)) == []
        assert not proposer.has_match(wish(text))
    assert drafts_of(proposer, wish([1, 2], 0)) == []
    assert not proposer.has_match(wish([1, 2], 0))
    assert proposer.has_match(wish([1, 2]))


def test_negative_bounds_are_refused() -> None:
    with pytest.raises(ConfigError, match="may be less than 0"):
        SuffixProposer(max_tokens=-1)
