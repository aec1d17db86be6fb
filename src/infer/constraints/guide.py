"""The guide of one sequence, which knows what may follow: reasoning, free text, its grammar, or its end.

    REASONING ──end_id──► FREE ──trigger──► CONSTRAINED ──match ends──► FREE          with triggers
    REASONING ──end_id──► CONSTRAINED ──match ends──► ENDED                           without

Only CONSTRAINED has a mask, unless ids are banned (bans.py), which holds everywhere. Free text is watched for
triggers and costs next to nothing: running a grammar through it would cost a hundred times as much as through
JSON.

A guide's state depends only on the output's ids, so a sequence may be preempted, swapped and computed again
without it. Every id is consumed exactly once, in order. A forbidden id would break a matcher for good, so
only masked or validated ids are consumed.

Drafts of a sequence need a mask for each position of a window: `fill_window` walks along them and back.

Forced ids need no model (`forced`): for example the rest of a key, or the end of reasoning that has used up
its tokens. Forced text can often be split into tokens in several ways; the tokenizer's own way is used,
whether the ids are appended or drawn under a mask.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

import numpy as np

from infer.constraints.bans import Bans
from infer.constraints.compiler import Grammar, Lexer, MaskCost
from infer.constraints.description import Reasoning
from infer.constraints.numbers import ESCAPED, MAX_DIGITS, OUTSIDE, PLAIN

if TYPE_CHECKING:
    from llguidance import LLMatcher

REASONING, FREE, CONSTRAINED, ENDED = "reasoning", "free", "constrained", "ended"
MAX_DUE = 1024  # ids asked for at once: a grammar without an end has no last one
LOOKED_TOO_FAR = "; ff_tokens)"  # error of a limit that a matcher reached by looking for forced ids
NOTHING_LEFT = "allowed_token_ids, bad_words and the constraint leave no token that may come next"
AT_LIMIT = "the output reached a limit of its constraint, which is too complex there: "


class Guide:
    """The state of one sequence's constraint."""

    __slots__ = (
        "_due", "_enough", "_is_early_end", "_lexer", "_matched", "_num_digits", "_num_reasoned", "_quotes",
        "_recent", "_tail", "_taken", "bans", "error", "grammar", "is_wide", "matcher", "reasoning", "state",
    )  # fmt: skip

    def __init__(
        self, grammar: Grammar | None, reasoning: Reasoning | None = None, bans: Bans | None = None
    ) -> None:
        self.grammar, self.reasoning, self.bans = grammar, reasoning, bans
        self._num_digits = 0  # digits of the number that the matched text ends with
        self._quotes = OUTSIDE  # state of quotes at its end
        digits = None if grammar is None else grammar.digits
        self._enough = MAX_DIGITS if digits is None else digits.enough  # digits from which masks are narrowed
        self._recent: tuple[int, ...] = ()  # the last ids of the output, as many as bans ask for
        self.matcher: LLMatcher | None = None  # while it is CONSTRAINED
        self._lexer: Lexer | None = None  # the matcher's
        self._matched: list[int] = []  # ids that it was given
        self.error: str | None = None  # the reason why it cannot go on
        self._num_reasoned = 0  # tokens
        self._due: tuple[int, ...] | None = ()  # ids that must come next; None: the grammar was not asked yet
        self._is_early_end = False  # they end a reasoning, and are not the grammar's
        self._tail = b""  # the end of the free text, in which a trigger may have begun
        self._taken: tuple[int, bool] | None = None  # the result of `advance`, until `take` asks for it
        self.is_wide = False  # its last mask allowed any letter, and the next is probably as soon filled
        self.state = REASONING
        if reasoning is None:
            self._begin()
        else:
            self._check_budget()

    def copy(self) -> Guide:
        """A guide of its own for a sequence that forks off here."""
        made: Guide = Guide.__new__(Guide)
        for name in Guide.__slots__:
            setattr(made, name, getattr(self, name))
        made.matcher = None if self.matcher is None else self.matcher.deep_copy()
        made._matched = list(self._matched)
        return made

    @property
    def has_mask(self) -> bool:
        """True if the next id is not free."""
        return self.matcher is not None or self._is_early_end or self.bans is not None

    @property
    def mask_cost(self) -> MaskCost:
        """The expected cost of its next mask. Only where it has a matcher."""
        assert self._lexer is not None
        return self._lexer.costs[self.is_wide]

    @property
    def known(self) -> tuple[int, ...]:
        """The ids that must come next, as far as they are known without asking the grammar."""
        return self._due or ()

    def forced(self) -> tuple[int, ...]:
        """Ids that must come next, whatever the model says; none: it has a choice."""
        if self._due is None and self.bans is not None:
            self._due = ()  # ids that the grammar wants may be banned: a mask says
        elif self._due is None:
            assert self.matcher is not None
            self._due = tuple(self.matcher.compute_ff_tokens()[:MAX_DUE])
        return self._due

    def fill(self, mask_W: np.ndarray) -> None:
        """Write which ids may come next; a bit each, the lowest first. Only where `has_mask` is true.

        If ids must come, only the first is allowed, as in the grammar's own mask.
        """
        if known := self.known:
            mask_W[:] = 0
            mask_W.view(np.uint32)[known[0] // 32] = 1 << known[0] % 32
            return
        if self.matcher is None:
            assert self.bans is not None, f"a guide that is {self.state} has no mask"
            mask_W[:] = -1
        else:
            self.matcher.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)
            if self.matcher.is_error():
                self.refill(mask_W)
        if self.narrows:
            self.narrow(mask_W)

    @property
    def narrows(self) -> bool:
        """True if the grammar's mask of the next id must be narrowed."""
        return (self._num_digits >= self._enough and self._quotes == OUTSIDE) or self.bans is not None

    def narrow(self, mask_W: np.ndarray) -> None:
        """End a long number, and clear the bits of banned ids; a mask that an error left open stays."""
        if self.error is not None:
            return
        if self._num_digits >= self._enough and self._quotes == OUTSIDE:
            assert self.grammar is not None and self.grammar.digits is not None
            self.grammar.digits.end_number(self._num_digits, mask_W)
        if self.bans is not None:
            self.bans.apply(self._recent, mask_W)
            if not mask_W.any():
                self.error, mask_W[:] = NOTHING_LEFT, -1

    def fill_window(self, drafts: Sequence[int], masks_PW: np.ndarray) -> int:
        """Write the mask of the next id and of the one after each draft; returns how many drafts may follow.

        The guide stays as it is. Positions without a mask, and those after a draft that may not follow,
        allow everything.
        """
        masks_PW[:] = -1
        before = [(name, getattr(self, name)) for name in Guide.__slots__]
        matcher, matched, num_matched = self.matcher, self._matched, len(self._matched)
        num_valid = 0
        for mask_W, draft in zip(masks_PW, [*drafts, None], strict=True):
            if self.has_mask:
                self.forced()
                self.fill(mask_W)
            is_allowed = draft is not None and mask_W[draft // 32] >> draft % 32 & 1
            has_ended = self.state == ENDED and self.bans is None
            if not is_allowed or has_ended or self.error is not None:
                break
            assert draft is not None
            self._consume(draft)
            num_valid += 1
        for name, value in before:
            setattr(self, name, value)
        num_walked = len(matched) - num_matched
        del matched[num_matched:]
        if matcher is not None and not matcher.rollback(num_walked):  # it has reached a limit on the way
            assert self.grammar is not None
            self._replay(self.grammar.lexer)
        return num_valid

    def refill(self, mask_W: np.ndarray) -> bool:
        """Fill the mask after all where the matcher has reached a limit; return True if that worked."""
        if self._starts_over():
            self.fill(mask_W)
        return self.error is None

    def note_mask(self, *, is_wide: bool) -> tuple[int, ...]:
        """Take note of the mask that was filled last, which is for the next id; returns what is forced.

        One that allows several letters leaves a choice: none must come, and the grammar need not be asked.
        """
        self.is_wide = is_wide
        if is_wide and self._due is None:
            self._due = ()
        return self.forced() if self._due is None else self._due

    def _starts_over(self) -> bool:
        """Replace a matcher that reached a limit which others have used up; return True if it was replaced.

        A limit that this sequence has reached itself is its `error`.
        """
        if self.matcher is None or not self.matcher.is_error():
            return False
        assert self.grammar is not None and self._lexer is not None
        full, lexer = self.matcher, self.grammar.lexer_after(self._lexer)
        if lexer is not None and self._replay(lexer):
            return True
        self.error = AT_LIMIT + full.get_error().splitlines()[0]
        return False

    def _replay(self, lexer: Lexer) -> bool:
        """Replace the matcher by a new one; return True if that allows what the last one was given."""
        self.matcher, self._lexer = lexer.matcher(), lexer
        return self.matcher.consume_tokens(self._matched)

    def advance(self, ids: Sequence[int], stop_ids: Container[int]) -> None:
        """Consume ids that a step has drawn before they are appended; `take` is asked for them then."""
        self._taken = self._take(ids, stop_ids)

    def take(self, ids: Sequence[int], stop_ids: Container[int]) -> tuple[int, bool]:
        """Consume ids, unless `advance` has: how many of them are the output's, and whether it is complete.

        No id after the first that stops it, completes it, or was not possible is consumed.
        """
        taken, self._taken = self._taken, None
        return self._take(ids, stop_ids) if taken is None else taken

    def _take(self, ids: Sequence[int], stop_ids: Container[int]) -> tuple[int, bool]:
        for count, token_id in enumerate(ids, 1):
            if token_id in stop_ids:
                return count, False
            self._consume(token_id)
            if self.error is not None:
                return count, False
            if self.state == ENDED and self.grammar is not None:
                return count, True
        return len(ids), False

    def consume(self, ids: Sequence[int]) -> None:
        """Take note of ids that were appended to the output; `error` says if that was not possible."""
        for token_id in ids:
            self._consume(token_id)

    def _consume(self, token_id: int) -> None:
        if self.bans is not None and self.bans.num_remembered:
            self._recent = (*self._recent, token_id)[-self.bans.num_remembered :]
        if self.matcher is not None:
            self._match(token_id)
        elif self._is_early_end:
            self._due = (self._due or ())[1:]
            if not self._due:
                self._begin()
        elif self.state == REASONING:
            self._reason(token_id)
        elif self.state == FREE:
            self._watch(token_id)

    def _reason(self, token_id: int) -> None:
        assert self.reasoning is not None
        later = self.reasoning.later
        has_begun_later = token_id in later[:1]  # the model has left out the end
        if has_begun_later or token_id == self.reasoning.end_id:
            due = later[has_begun_later:]
            if due:
                self._due, self._is_early_end = due, True
            else:
                self._begin()
            return
        self._num_reasoned += 1
        self._check_budget()

    def _check_budget(self) -> None:
        assert self.reasoning is not None
        limit = self.reasoning.max_tokens
        if limit is not None and self._num_reasoned >= limit:
            self._due, self._is_early_end = self.reasoning.forced + self.reasoning.later, True

    def _begin(self) -> None:
        """Let the constraint hold from here on, or watch for the trigger that starts it."""
        self._due, self._is_early_end = (), False
        if self.grammar is None:
            self.state = ENDED
        elif self.grammar.triggers:
            self.state, self._tail = FREE, b""
        else:
            self._start(self.grammar.lexer.matcher())

    def _start(self, matcher: LLMatcher) -> None:
        assert self.grammar is not None
        self.state, self.matcher, self._lexer = CONSTRAINED, matcher, self.grammar.lexer
        self._due, self._matched, self._tail = None, [], b""
        self._num_digits, self._quotes = 0, OUTSIDE

    def _watch(self, token_id: int) -> None:
        """Look for a trigger that ends in this token, even in the middle of it."""
        assert self.grammar is not None
        tokenizer, triggers = self.grammar.tokenizer, self.grammar.triggers
        text = self._tail + tokenizer.decode_bytes([token_id])
        longest = max(map(len, triggers))
        self._tail = text[-(longest - 1) :] if longest > 1 else b""
        for end in range(len(text) + 1) if any(trigger in text for trigger in triggers) else ():
            if not text.endswith(triggers, 0, end):
                continue
            ids = tokenizer.tokenize_bytes(text[end:]) if text[end:] else []
            matcher = self._matcher_for(ids)
            if matcher is None:  # the model has written on already, and not this
                continue
            self._start(matcher)
            for each in ids:
                self._match(each)
            return

    def _matcher_for(self, ids: list[int]) -> LLMatcher | None:
        """A matcher that allows these ids at its start; None: the grammar does not, or it has an `error`."""
        assert self.grammar is not None
        lexer: Lexer | None = self.grammar.lexer
        while lexer is not None:
            matcher = lexer.matcher()
            if matcher.validate_tokens(ids) == len(ids):
                return matcher
            matcher.compute_bitmask()  # it says whether a limit was reached; validating does not
            if not matcher.is_error():
                return None
            lexer = self.grammar.lexer_after(lexer)
        self.error = AT_LIMIT + matcher.get_error().splitlines()[0]
        return None

    def _match(self, token_id: int) -> None:
        matcher, due = self.matcher, self._due
        assert matcher is not None and self.grammar is not None and self._lexer is not None
        self._due = due[1:] or None if due and due[0] == token_id else None  # the rest still comes first
        self._matched.append(token_id)
        if (digits := self.grammar.digits) is not None:
            known = digits.known.get(token_id) or digits.learn(token_id)
            if known is PLAIN and self._quotes != ESCAPED:
                self._num_digits = 0
            else:
                is_number, num_digits, after = known
                self._num_digits = self._num_digits + num_digits if is_number else num_digits
                self._quotes = after[self._quotes]
        if matcher.consume_token(token_id) and not matcher.is_stopped():
            return
        if LOOKED_TOO_FAR in matcher.get_error():
            self._replay(self._lexer)
        self._starts_over()
        if self.matcher is not None and self.matcher.is_stopped():
            self.matcher, self._due, self._tail, self._num_digits = None, (), b"", 0
            self.state = FREE if self.grammar.triggers else ENDED
