"""A guard around a user's proposer, whose errors cost drafts and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from infer.speculative.proposer import Proposer, Wish

logger = logging.getLogger(__name__)


class CarefulProposer:
    """Calls a user's proposer; if it raises, or returns anything but drafts, there are no drafts."""

    def __init__(self, proposer: Proposer, name: str) -> None:
        self._proposer, self._name = proposer, name
        self._has_logged = False

    def propose(self, wishes: Sequence[Wish]) -> list[Sequence[int]]:
        """The drafts of each wish."""
        try:
            found = [[int(draft) for draft in drafts] for drafts in self._proposer.propose(wishes)]
            if len(found) != len(wishes):
                raise ValueError(f"{len(found)} lists of drafts for {len(wishes)} sequences")
        except Exception as error:
            self._log(error)
            return [()] * len(wishes)
        return [*found]

    def has_match(self, wish: Wish) -> bool:
        """True if drafts are likely."""
        try:
            return bool(self._proposer.has_match(wish))
        except Exception as error:
            self._log(error)
            return False

    def finish(self, wish: Wish) -> None:
        """Forget a sequence."""
        try:
            self._proposer.finish(wish)
        except Exception as error:
            self._log(error)

    def _log(self, error: Exception) -> None:
        if not self._has_logged:
            self._has_logged = True
            logger.error("no drafts: speculative_method=%s failed; logged once", self._name, exc_info=error)
