"""The events that an engine reports to observers: everything that decides its plans and ids, in order.

An engine's clock is its step. Requests, aborts and resets are reported with the step after which they came.
The recorder (tools/record.py) writes these events to a file, and the replay (tools/replay.py) repeats them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from infer.engine.run_manifest import RunFacts
from infer.execution.order import StepMasks, StepOrder
from infer.scheduling.plan import StepPlan
from infer.scheduling.request import Request
from infer.scheduling.sequence import SequenceGroup


class EngineObserver:
    """Receives an engine's events in order; the default ignores them."""

    def on_start(self, facts: RunFacts) -> None:
        """The engine was built; the facts and the requests decide everything that follows."""

    def on_add(self, step: int, request: Request) -> None:
        """A request was accepted after this step."""

    def on_abort(self, step: int, request_id: str, index: int | None) -> None:
        """A request, or one sequence of it, was aborted after this step."""

    def on_reset(self, step: int) -> None:
        """All cached prefixes were forgotten after this step."""

    def on_order(self, order: StepOrder) -> None:
        """A device has begun to execute an order."""

    def on_masks(self, step: int, masks: StepMasks) -> None:
        """The order of a step is sampled under these masks, whose memory is reused afterwards."""

    def on_step(self, plan: StepPlan, ids: Sequence[tuple[int, ...]]) -> None:
        """A plan ran and these ids were sampled, chunk by chunk."""

    def on_failure(self, step: int, reason: str) -> None:
        """The plan of this step could not run, and its requests ended with an error."""

    def on_end(self, group: SequenceGroup) -> None:
        """The last sequence of a request has ended, for whatever reason."""


class Observers(EngineObserver):
    """Passes each event to several observers, one after the other."""

    def __init__(self, observers: Iterable[EngineObserver]) -> None:
        told = tuple(observers)
        for name in (name for name in vars(EngineObserver) if name.startswith("on_")):
            setattr(self, name, partial(_tell, [getattr(each, name) for each in told]))


def _tell(observers: Sequence[Callable[..., None]], *what: object) -> None:
    for tell in observers:
        tell(*what)
