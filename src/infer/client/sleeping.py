"""An engine that sleeps: everything of it is freed, and its weights wait in host memory, or where they are.

    Engine ──► SleepingEngine ──► keep_weights ──► wake ──► another Engine, on the same weights

The loop of the engine's process treats it as an engine without work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from infer.engine.engine import Engine
from infer.engine.stats import EngineStats
from infer.errors import EngineError

if TYPE_CHECKING:
    from infer.engine.weights_aside import WeightsAside


class SleepingEngine:
    """Stands in for an engine that was freed; its weights are in host memory if they fit there."""

    has_work = False
    ranks = None

    def __init__(self, engine: Engine, weights: WeightsAside | None = None) -> None:
        """`weights`: the weights of an earlier sleep, whose pinned memory is used again."""
        if engine.remake is None or engine.has_work:
            raise EngineError("an engine with ranks, adapters or requests cannot sleep; close it")
        self._stats = engine.stats()
        self._remake = engine.remake
        self.weights = weights
        self._is_found = self._has_left = False

    def keep_weights(self, max_bytes: int) -> int:
        """Move the weights to host memory if they fit into `max_bytes`; returns their size."""
        from infer.engine.weights_aside import WeightsAside

        self.weights = weights = self.weights or WeightsAside()
        if not self._is_found:
            weights.find()
            self._is_found = True
        if weights.num_bytes <= max_bytes and not self._has_left:
            weights.leave_device()
            self._has_left = True
        return weights.num_bytes

    def wake(self) -> Engine:
        """Rebuild the engine."""
        if self.weights is not None and self._has_left:
            self.weights.come_back()
        engine = self._remake()
        engine.remake = self._remake
        return engine

    def stats(self) -> EngineStats:
        """Return the statistics of the engine at the time it was freed."""
        return self._stats

    def take_prefix_news(self) -> dict[int, bool]:
        """Return nothing: no prefix is cached."""
        return {}

    def prepare(self) -> bool:
        """Return False: there is nothing to prepare."""
        return False

    def use_idle_time(self) -> None:
        """Do nothing: no idle work is left."""
