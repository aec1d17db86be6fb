"""Drafts from the sequence's own text and from recent answers: the most frequent continuation of its end.

The end of the text is looked up in both. All places after the longest match (at most DEPTH tokens) vote:

    own text      .. f ( x ) + g ( y ) .. h ( x )          end   ( x )
    past answers  .. ( x ) - 1 | .. ( x ) - 2 | .. ( x ) + 3

                              ┌─ - (2 of 3)  ┬─ 1 (1 of 2)
    past: after ( x ) ────────┤              └─ 2 (1 of 2)        drafts `- 2`, probability 2/3 · 1/2
                              └─ + (1 of 3)  ── 3

The most frequent token is taken at each fork, the newest of equally frequent ones, until the estimated
probability falls below LEAST_PROBABILITY. A short match may be chance, so there are at most
DRAFTS_PER_MATCHED drafts per matched token. The source with more expected accepted drafts (the sum of their
probabilities) wins; in a tie, the own text does.

A suffix tree with counts in its nodes would give the same votes, but need up to DEPTH nodes per token. Here
the answers are stored one after the other, and text_index.py finds the newest places, which vote. An answer
that is evicted takes its votes with it.

    past answers of one salt      |  answer 1  |  answer 2  |  answer 3  |        | is SEPARATOR, not an id
                                    oldest: evicted first     newest

Each salt has its own text, so no salt drafts for another. The limits are totals over all salts. Prompts are
not stored: they are usually longer than answers, and the prompt that an answer repeats is in the sequence's
own text already. Storing them saved at most 1 % of the steps.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Final

from infer.errors import ConfigError
from infer.speculative.ngram import NOTHING, OwnTexts, repeat_from
from infer.speculative.proposer import Wish
from infer.speculative.text_index import TextIndex

RUN: Final = 2  # tokens of the shortest match
LONGEST_ANSWER: Final = 8192  # tokens kept of one answer; indexing more at once would delay a step
DEPTH: Final = 24  # tokens of the longest match
DRAFTS_PER_MATCHED: Final = 1.5
LEAST_PROBABILITY: Final = 0.1
ROUNDING: Final = 1e-9  # rounding error of sums of probabilities, within which sources are equal
SEPARATOR: Final = 0xFFFFFFFF


class PastAnswers:
    """The recent answers of one salt, oldest first."""

    def __init__(self) -> None:
        self.text = array("I", [SEPARATOR])
        self.index = TextIndex(RUN)

    def add(self, answer: array[int]) -> None:
        """Append an answer."""
        self.text.extend(answer)
        self.text.append(SEPARATOR)
        self.index.extend(self.text)

    def after(self, place: int, count: int) -> array[int]:
        """Return at most `count` tokens from `place` on, up to the end of that answer."""
        found = self.text[place : place + count]
        return found[: found.index(SEPARATOR)] if SEPARATOR in found else found


class SuffixProposer:
    """Proposes the most frequent continuation of a text's end, in the text itself or in recent answers."""

    def __init__(self, max_answers: int = 4096, max_tokens: int = 1 << 18) -> None:
        if max_answers < 0 or max_tokens < 0:
            raise ConfigError(
                f"{max_answers} answers of {max_tokens} tokens cannot be kept; neither may be less than 0"
            )
        self._max_answers = max_answers
        self._max_tokens = max_tokens
        self._texts = OwnTexts(RUN)
        self._past: dict[str, PastAnswers] = {}  # answers by salt
        self._answers = deque[tuple[str, int]]()  # salt and length of each kept answer, oldest first
        self._num_tokens = 0  # tokens in all kept answers

    def propose(self, wishes: Sequence[Wish]) -> list[Sequence[int]]:
        """Return the drafts of each wish; empty if its end is new or no continuation is probable."""
        return [self._drafts_of(wish) for wish in wishes]

    def _drafts_of(self, wish: Wish) -> array[int]:
        if wish.num_drafts < 1:
            return NOTHING
        text = wish.tokens
        tail = text[-DEPTH:]
        length, places = self._texts.index_of(wish).match(text, tail)
        count = min(wish.num_drafts, int(DRAFTS_PER_MATCHED * length))
        drafts, expected = most_frequent([repeat_from(text, place, count) for place in places])
        past = self._past.get(wish.salt)
        if past is not None:
            length, places = past.index.match(past.text, tail)
            count = min(wish.num_drafts, int(DRAFTS_PER_MATCHED * length))
            others, expected_of_others = most_frequent([past.after(place, count) for place in places])
            if expected_of_others > expected + ROUNDING:
                return others
        return drafts

    def has_match(self, wish: Wish) -> bool:
        """True if the text's end has occurred before, in the sequence or in an answer of its salt."""
        if wish.num_drafts < 1:
            return False
        if self._texts.index_of(wish).has(wish.tokens):
            return True
        past = self._past.get(wish.salt)
        return past is not None and past.index.has(wish.tokens)

    def finish(self, wish: Wish) -> None:
        """Forget the sequence's text, and keep its answer for other sequences with its salt."""
        self._texts.forget(wish.seq_id)
        answer = wish.tokens[wish.num_prompt : wish.num_prompt + LONGEST_ANSWER]
        if not answer or len(answer) > self._max_tokens or not self._max_answers:
            return
        past = self._past.get(wish.salt)
        if past is None:
            past = self._past[wish.salt] = PastAnswers()
        past.add(answer)
        self._answers.append((wish.salt, len(answer)))
        self._num_tokens += len(answer)
        while len(self._answers) > self._max_answers or self._num_tokens > self._max_tokens:
            salt, length = self._answers.popleft()
            past = self._past[salt]
            past.index.drop(past.text, length + 1)
            self._num_tokens -= length
            if len(past.text) == 1:  # the separator before the first answer
                del self._past[salt]


def most_frequent(continuations: list[array[int]]) -> tuple[array[int], float]:
    """Return the tokens that most `continuations` vote for, and how many are expected to be right.

    In a tie, the first continuation decides. A continuation that has ended still counts as a vote against
    going on.
    """
    drafts, expected, probability = array("I"), 0.0, 1.0
    while continuations:
        first, num_voters, depth = continuations[0], len(continuations), len(drafts)
        if continuations.count(first) == num_voters:  # they agree to the end
            drafts.extend(first[depth:])
            return drafts, expected + probability * (len(first) - depth)
        votes: dict[int, int] = {}
        for continuation in continuations:
            if depth < len(continuation):
                votes[continuation[depth]] = votes.get(continuation[depth], 0) + 1
        token = max(votes, key=votes.__getitem__)
        probability *= votes[token] / num_voters
        if probability < LEAST_PROBABILITY:
            break
        drafts.append(token)
        expected += probability
        continuations = [each for each in continuations if depth < len(each) and each[depth] == token]
    return drafts, expected
