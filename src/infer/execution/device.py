"""The interface of a device, which executes orders synchronously or asynchronously.

    run      moves blocks, updates the rows' state, runs the model and samples; an asynchronous device returns
             at once; if the order awaits masks, nothing is sampled yet
    masks    returns memory for the host to fill, a mask for each position that has one
    sample   samples under these masks
    wait     returns the `StepResult`

`masks`, `sample` and `wait` are methods of the `PendingStep` that `run` returns on every device:

    order ──► run ──┬──────────────────────► wait ──► StepResult
                    └──► masks ──► sample ──► wait

For constrained sequences, the host fills masks from the ids of the last step while the model runs.

A device half owns tensors and makes no decisions: the same orders give the same ids in any process. The
device half for CPUs and for plain PyTorch on any device is in torch_device.py, the one for GPUs in
gpu/device.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from infer.execution.order import AWAITS_MASKS, NO_MASKS, StepMasks, StepOrder
from infer.sampling.params import RowLogprobs


class StateShape(NamedTuple):
    """The size of the state that a device keeps."""

    num_rows: int  # rows of state: running sequences, and beams forked before old ones are dropped
    max_blocks: int  # blocks of a row's longest table
    block_size: int  # tokens of a block
    num_tables: int = 1  # block tables of each row


class StepResult(NamedTuple):
    """The results of a step, by row of its order."""

    ids: list[tuple[int, ...]]  # sampled ids; empty if the row samples nothing
    logprobs: list[tuple[RowLogprobs | None, ...]]
    prompt_logprobs: dict[int, list[RowLogprobs]]  # logprobs of following prompt tokens, by row number
    is_whole: bool = False  # True: none of the ids is NO_TOKEN; False: not checked
    pooled: Mapping[int, np.ndarray] = {}  # pooled states of an embedding's chunk, by row number


Pending = Callable[[], StepResult]  # call it to wait for the result
Sampler = Callable[[StepMasks], Pending]  # launches the second part of a step, after its forward


def no_rows() -> StepResult:
    """Return the result of a step in which no row samples on this device."""
    return StepResult([], [], {})


class PendingStep:
    """A launched step. If its order awaits masks, call `sample` before `wait`; otherwise only `wait`.

    `launch` samples the step under given masks; it is called at once if the order awaits none. `memory`
    returns memory for masks.
    """

    __slots__ = ("_launch", "_lines_KW", "_memory", "_result", "in_graph")

    def __init__(
        self,
        flags: int,
        launch: Callable[[StepMasks], Pending],
        memory: Callable[[int], np.ndarray],
        *,
        in_graph: bool = False,
    ) -> None:
        self._launch, self._memory = launch, memory
        self.in_graph = in_graph  # True: the model runs in a captured graph; for pictures only
        self._result = None if flags & AWAITS_MASKS else launch(NO_MASKS)

    def masks(self, count: int) -> np.ndarray:
        """Return memory for `count` masks, to be overwritten: int32 [count, ceil(vocabulary / 32)]."""
        self._lines_KW = self._memory(count)
        return self._lines_KW

    def sample(self, numbers: Sequence[int], positions: Sequence[int]) -> StepMasks:
        """Sample the step: mask k is for the row `numbers[k]` of the order, at `positions[k]`.

        Call it after `masks` and before the next order. Other rows and positions have no mask. Returns the
        masks, whose memory the next step reuses.
        """
        masks = StepMasks(numbers, positions, self._lines_KW)
        self._result = self._launch(masks)
        return masks

    def wait(self) -> StepResult:
        """Wait for the result and return it; raises `DeviceLost` if the device failed."""
        assert self._result is not None, "call sample before wait: the step awaits masks"
        return self._result()


class DeviceHalf(Protocol):
    """Executes orders: a model on a device, or a substitute for tests and simulations.

    The memory of an order may be reused after its step has been waited for.
    """

    @property
    def can_embed(self) -> bool:
        """True if the device can pool hidden states for embeddings."""

    @property
    def window_tokens(self) -> int:
        """The most tokens of a step with drafts for which penalties and masks are applied on the device."""

    def run(self, order: StepOrder) -> PendingStep:
        """Launch a step; raises `DeviceLost` if every further step would fail too."""

    def path_of(self, order: StepOrder) -> str:
        """Describe in words how this order is computed."""


class SyncDevice(ABC):
    """A device half whose steps are finished when `run` or `sample` returns."""

    can_embed = False
    window_tokens = 0
    vocab_size: int = 0  # number of logits of a row; needed for constrained sequences

    @abstractmethod
    def compute(self, order: StepOrder, masks: StepMasks) -> StepResult:
        """Execute an order and sample under these masks."""

    def run(self, order: StepOrder) -> PendingStep:
        """Execute an order at once, or in `sample` if it awaits masks."""

        def launch(masks: StepMasks) -> Pending:
            result = self.compute(order, masks)
            return lambda: result

        return PendingStep(order.flags, launch, self._memory)

    def path_of(self, order: StepOrder) -> str:
        """Describe in words how this order is computed."""
        return "on the host"

    def _memory(self, count: int) -> np.ndarray:
        return np.empty((count, -(-self.vocab_size // 32)), dtype=np.int32)
