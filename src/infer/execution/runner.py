"""What the engine asks of a runner: to execute plans, now or a little later.

    launch   move blocks, run the model, sample; returns at once where a device works by itself
    wait     the object that `launch` returns: call it for the `StepResult`

Where sequences are constrained, what may come next is known only when the ids of the last step are, and takes
the host some time to find out. The model runs meanwhile:

    begin    move blocks, run the model; returns an `UnsampledStep`
    masks    memory that the host fills, a mask for each constrained row of the step
    sample   sample under the masks; returns what `launch` returns

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


class StepResult(NamedTuple):
    """What a step produced, chunk by chunk of its plan."""

    ids: list[tuple[int, ...]]  # the sampled ids; empty where the chunk samples nothing
    logprobs: list[tuple[RowLogprobs | None, ...]]
    prompt_logprobs: dict[int, list[RowLogprobs]]  # by seq_id: of the prompt tokens after this chunk's own
    is_whole: bool = False  # True: the runner has made sure that none of the ids is NO_TOKEN
    pooled: Mapping[int, np.ndarray] = {}  # by seq_id: pooled hidden states of this chunk of an embedding


Launch = Callable[[StepPlan], Callable[[], StepResult]]


class UnsampledStep(Protocol):
    """A step whose model runs, and which samples later: `masks`, then `sample`, before any other launch."""

    def masks(self, num_rows: int) -> np.ndarray:
        """Memory for so many masks, all of it to be overwritten: int32 [num_rows, ceil(vocabulary / 32)].

        A mask is a bit for every id, the lowest in the lowest bit of the first word; 1: it may come next.
        """
        ...

    def sample(self, numbers: Sequence[int]) -> Callable[[], StepResult]:
        """Sample the step: mask k is that of the chunk `numbers[k]`, and other chunks have none.

        A chunk that draws several ids draws each under its mask. Call what it returns to wait for the result.
        """
        ...


class Runner(Protocol):
    """Executes plans: a model on a device, or a stand-in for tests and simulations."""

    @property
    def can_embed(self) -> bool:
        """Whether steps pool the hidden states of embeddings."""
        ...

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin a plan; call what it returns to wait for it."""
        ...

    def begin(self, plan: StepPlan) -> UnsampledStep:
        """Begin a plan, and let the caller say later what it may sample.

        By then the counts of its sequences have moved on: a chunk's `stop` is where its sampled token stands.
        """
        ...


class SyncRunner(ABC):
    """A runner that is done when it returns. The masks of a plan's sequences are in `plan.masks`."""

    can_embed = False
    vocab_size: int = 0  # the number of logits of a row; to be given where sequences are constrained

    @abstractmethod
    def run(self, plan: StepPlan) -> StepResult:
        """Execute a plan."""

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Execute the plan at once; nothing is left to wait for."""
        result = self.run(plan)
        return lambda: result

    def begin(self, plan: StepPlan) -> UnsampledStep:
        """Wait for the masks, then execute the plan: there is nothing that could work meanwhile."""
        return LateStep(self.launch, plan, self.vocab_size)


class LateStep:
    """A step that is launched when its masks are there: they are in `plan.masks`."""

    def __init__(self, launch: Launch, plan: StepPlan, vocab_size: int) -> None:
        self._launch, self._plan = launch, plan
        self._num_words = -(-vocab_size // 32)
        self._masks_KW = np.empty((0, self._num_words), dtype=np.int32)

    def masks(self, num_rows: int) -> np.ndarray:
        """Memory for so many masks."""
        self._masks_KW = np.empty((num_rows, self._num_words), dtype=np.int32)
        return self._masks_KW

    def sample(self, numbers: Sequence[int]) -> Callable[[], StepResult]:
        """Run the step and sample it."""
        seq_ids = [self._plan.chunks.sequences[number].seq_id for number in numbers]
        self._plan.masks = dict(zip(seq_ids, self._masks_KW, strict=True))
        return self._launch(self._plan)
