"""The guide of one sequence, which knows what may follow: reasoning, free text, constrained text, or the end.

    REASONING ──end_id──► FREE ──trigger──► CONSTRAINED ──match ends──► FREE          with triggers
    REASONING ──end_id──► CONSTRAINED ──match ends──► ENDED                           without

Only CONSTRAINED has a mask, unless ids are banned (bans.py): bans hold in every state. In free text the guide
only looks for triggers, which costs next to nothing: matching free text with a grammar would cost a hundred
times as much as matching JSON.

A guide's state depends only on the output's ids, so preempting, swapping or recomputing a sequence does not
change it. Every id is consumed exactly once, in order. A forbidden id would break a matcher for good, so only
masked or validated ids are consumed.

Drafts of a sequence need a mask for each position of a window: `fill_window` walks along them and back.

Forced ids (`forced`) are known without the model: for example the rest of a key, or the end of reasoning that
has used up its tokens. Forced text can often be split into tokens in several ways; the tokenizer's own way is
used, whether the ids are appended or drawn under a mask.
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
MAX_DUE = 1024  # most forced ids at a time: a grammar without an end may force endless text
LOOKED_TOO_FAR = "; ff_tokens)"  # end of the error of a matcher that looked too far for forced ids
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
        self._quotes = OUTSIDE  # state of quotes at the end of the matched text
        digits = None if grammar is None else grammar.digits
        self._enough = MAX_DIGITS if digits is None else digits.enough  # digits from which masks are narrowed
        self._recent: tuple[int, ...] = ()  # the last ids of the output, as many as bans need
        self.matcher: LLMatcher | None = None  # matcher of the CONSTRAINED state
        self._lexer: Lexer | None = None  # lexer of the matcher
        self._matched: list[int] = []  # ids that the matcher has consumed
        self.error: str | None = None  # the reason why the output cannot go on
        self._num_reasoned = 0  # tokens of reasoning
        self._due: tuple[int, ...] | None = ()  # ids that must come next; None: the grammar was not asked yet
        self._is_early_end = False  # True: `_due` ends a reasoning, and the grammar has not begun
        self._tail = b""  # the end of the free text, in which a trigger may have begun
        self._taken: tuple[int, bool] | None = None  # the result of `advance`, until `take` returns it
        self.is_wide = False  # True: its last mask allowed any letter, and the next is probably as quick
        self.state = REASONING
        if reasoning is None:
            self._begin()
        else:
            self._check_budget()

    def copy(self) -> Guide:
        """Return an independent guide for a sequence that forks here."""
        made: Guide = Guide.__new__(Guide)
        for name in Guide.__slots__:
            setattr(made, name, getattr(self, name))
        made.matcher = None if self.matcher is None else self.matcher.deep_copy()
        made._matched = list(self._matched)
        return made

    @property
    def has_mask(self) -> bool:
        """True if the next id is restricted."""
        return self.matcher is not None or self._is_early_end or self.bans is not None

    @property
    def mask_cost(self) -> MaskCost:
        """The expected cost of its next mask; the guide must have a matcher."""
        assert self._lexer is not None
        return self._lexer.costs[self.is_wide]

    @property
    def known(self) -> tuple[int, ...]:
        """The forced ids, if they are known without asking the grammar."""
        return self._due or ()

    def forced(self) -> tuple[int, ...]:
        """Return the ids that must come next, whatever the model says; empty: it has a choice."""
        if self._due is None and self.bans is not None:
            self._due = ()  # the grammar's forced ids may be banned, so the mask decides
        elif self._due is None:
            assert self.matcher is not None
            self._due = tuple(self.matcher.compute_ff_tokens()[:MAX_DUE])
        return self._due

    def fill(self, mask_W: np.ndarray) -> None:
        """Write the mask of the next id, a bit for each id from the lowest on; `has_mask` must be true.

        If ids are forced, only the first of them is allowed, as in the grammar's own mask.
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
        """End a long number, and clear the bits of banned ids; after an error, the mask stays open."""
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
        """Write the masks of the next id and of the id after each draft; return the number of allowed drafts.

        The guide does not change. Positions without a mask, and positions after a forbidden draft, allow
        everything.
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
        """Fill the mask with a new matcher after the old one reached a limit; return True on success."""
        if self._starts_over():
            self.fill(mask_W)
        return self.error is None

    def note_mask(self, *, is_wide: bool) -> tuple[int, ...]:
        """Note whether the last mask, for the next id, was wide; return the forced ids.

        A wide mask leaves a choice, so nothing is forced and the grammar need not be asked.
        """
        self.is_wide = is_wide
        if is_wide and self._due is None:
            self._due = ()
        return self.forced() if self._due is None else self._due

    def _starts_over(self) -> bool:
        """Replace a matcher that reached a limit which others used up; return True if it was replaced.

        If this sequence has used it up itself, it gets an `error`.
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
        """Replace the matcher by a new one that consumes the same ids; return True if it allows them."""
        self.matcher, self._lexer = lexer.matcher(), lexer
        return self.matcher.consume_tokens(self._matched)

    def advance(self, ids: Sequence[int], stop_ids: Container[int]) -> None:
        """Consume the ids of a step before they are appended; `take` then returns the result."""
        self._taken = self._take(ids, stop_ids)

    def take(self, ids: Sequence[int], stop_ids: Container[int]) -> tuple[int, bool]:
        """Consume ids, unless `advance` has; return how many belong to the output, and if it is complete.

        Nothing is consumed after the first id that stops the output, completes it, or is not allowed.
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
        """Consume ids that were appended to the output; `error` is set if they are not allowed."""
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
        has_begun_later = token_id in later[:1]  # the model has left out `end_id`
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
        """Start the constraint here, or look for the trigger that starts it."""
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
            if matcher is None:  # the text after the trigger breaks the constraint
                continue
            self._start(matcher)
            for each in ids:
                self._match(each)
            return

    def _matcher_for(self, ids: list[int]) -> LLMatcher | None:
        """Return a new matcher if it allows these ids; None: the grammar does not, or there is an `error`."""
        assert self.grammar is not None
        lexer: Lexer | None = self.grammar.lexer
        while lexer is not None:
            matcher = lexer.matcher()
            if matcher.validate_tokens(ids) == len(ids):
                return matcher
            matcher.compute_bitmask()  # reports a limit that was reached, which validating does not
            if not matcher.is_error():
                return None
            lexer = self.grammar.lexer_after(lexer)
        self.error = AT_LIMIT + matcher.get_error().splitlines()[0]
        return None

    def _match(self, token_id: int) -> None:
        matcher, due = self.matcher, self._due
        assert matcher is not None and self.grammar is not None and self._lexer is not None
        self._due = due[1:] or None if due and due[0] == token_id else None  # the rest is still forced
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
