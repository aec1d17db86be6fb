"""Proposers of drafts: guesses of a sequence's next tokens, cheap to make and judged by the model.

    tokens so far     the  cat  sat  on  the
    drafts                                     cat  sat  down          made by a proposer
    drawn                                      cat  sat  on   (..)     by one step of the model
    kept                                       cat  sat  on            drafts up to the first that differs,
                                                                       and what was drawn in its place

A step computes the last token and the drafts after it together. This costs little more than the last token
alone, because a small batch waits for the weights, not for the arithmetic. At each position it draws the same
token as without drafts (execution/host_sampling.py), so a proposer changes the speed of a text, never the
text. A proposer may be wrong or propose nothing. It must be deterministic, so that a run can be replayed.
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
    salt: str  # the prefix cache's salt; no draft may come from a text with another salt
    num_drafts: int  # the most drafts that the sequence can use


class Proposer(Protocol):
    """Proposes drafts for sequences; it may keep their texts between calls, by `seq_id`."""

    def propose(self, wishes: Sequence[Wish]) -> list[Sequence[int]]:
        """Return at most `num_drafts` drafts for each wish, and an empty list where there is no guess."""

    def has_match(self, wish: Wish) -> bool:
        """True if drafts are likely, so that it is worth waiting for the newest ids, still on the device.

        `tokens` does not have these ids. The check is cheap and may be wrong; draft models return True.
        """

    def finish(self, wish: Wish) -> None:
        """Forget a sequence that has ended or was aborted; `tokens` is its final text."""
