"""What the engine asks of a runner: to execute plans, now or a little later.

    launch   move blocks, run the model, sample; returns at once where a device works by itself
    wait     the object that `launch` returns: call it for the `StepResult`

A runner owns tensors and no decisions: the engine can hand it any plan twice and get the same ids. The one of
a CPU, and of plain PyTorch on any device, is in model_runner.py; the one whose state lives on a GPU in gpu/.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from infer.sampling.params import RowLogprobs
from infer.scheduling.plan import StepPlan
from infer.scheduling.sequence import Sequence as TokenSequence


class StepResult(NamedTuple):
    """What a step produced, chunk by chunk of its plan."""

    ids: list[tuple[int, ...]]  # the sampled ids; empty where the chunk samples nothing
    logprobs: list[tuple[RowLogprobs | None, ...]]
    prompt_logprobs: dict[int, list[RowLogprobs]]  # by seq_id: of the prompt tokens after this chunk's own
    is_whole: bool = False  # True: the runner has made sure that none of the ids is NO_TOKEN
    pooled: Mapping[int, np.ndarray] = {}  # by seq_id: pooled hidden states of this chunk of an embedding


class Runner(Protocol):
    """Executes plans: a model on a device, or a stand-in for tests and simulations."""

    def launch(self, plan: StepPlan, sequences: Sequence[TokenSequence]) -> Callable[[], StepResult]:
        """Begin a plan whose chunks belong to `sequences`, in order; call what it returns to wait for it."""
        ...


class SyncRunner(ABC):
    """A runner that is done when it returns."""

    @abstractmethod
    def run(self, plan: StepPlan, sequences: Sequence[TokenSequence]) -> StepResult:
        """Execute a plan."""

    def launch(self, plan: StepPlan, sequences: Sequence[TokenSequence]) -> Callable[[], StepResult]:
        """Execute the plan at once; nothing is left to wait for."""
        result = self.run(plan, sequences)
        return lambda: result
