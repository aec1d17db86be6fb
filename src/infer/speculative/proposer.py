"""Proposers of drafts: guesses of a sequence's next tokens, cheap to make and judged by the model.

    tokens so far     the  cat  sat  on  the
    drafts                                     cat  sat  down          made by a proposer
    drawn                                      cat  sat  on   (..)     by one step of the model
    kept                                       cat  sat  on            drafts up to the first that differs,
                                                                       and what was drawn in its place

A step computes the last token and the drafts after it together. This costs little more than the last token
alone, because a small batch waits for the weights, not for the arithmetic. At each position it draws the same
token as without drafts (execution/host_sampling.py), so a proposer changes the speed of a text, never the
text. A proposer may be wrong, or silent; it must be deterministic, so that a recorded run can be repeated.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Wish(NamedTuple):
    """A sequence that may get drafts."""

    seq_id: int
    tokens: array[int]  # prompt and output so far, to be read only
    num_prompt: int
    salt: str  # texts of different salts must not meet, as in the prefix cache
    num_drafts: int  # the most drafts that it can use


class Proposer(Protocol):
    """Proposes drafts for sequences, whose text it may keep between calls under their `seq_id`."""

    def propose(self, wishes: Sequence[Wish]) -> list[Sequence[int]]:
        """The drafts of each wish, at most its `num_drafts`; an empty list where it has no guess."""

    def has_match(self, wish: Wish) -> bool:
        """True if drafts are likely, so that it is worth waiting for ids of the sequence still on the device.

        `tokens` lack those newest ids. The answer is cheap and may be wrong; a model that drafts says True.
        """

    def finish(self, wish: Wish) -> None:
        """Forget a sequence that has ended or was aborted; `tokens` are its last."""
