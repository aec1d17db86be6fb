"""The interface of a device: it executes orders, now or a little later.

    run      move blocks, update the rows' state, run the model, sample; an asynchronous device returns at
             once, and if the order awaits masks, nothing is sampled yet
    masks    memory that the host fills, a mask for each position that has one
    sample   sample under these masks
    wait     the `StepResult`

`masks`, `sample` and `wait` are methods of the `PendingStep` that `run` returns on every device:

    order ──► run ──┬──────────────────────► wait ──► StepResult
                    └──► masks ──► sample ──► wait

For constrained sequences, the host needs the ids of the last step, and some time, to fill masks. The model
runs meanwhile.

A device half owns tensors and makes no decisions: the same orders give the same ids in any process.
torch_device.py has the device half for CPUs and for plain PyTorch on any device, gpu/device.py the one for
GPUs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from infer.execution.order import AWAITS_MASKS, NO_MASKS, StepMasks, StepOrder
from infer.sampling.params import RowLogprobs


class StateShape(NamedTuple):
    """The size of the state that orders speak of."""

    num_rows: int  # rows of state: sequences that may run, and new ones that begin before others end
    max_blocks: int  # blocks of a row's longest table
    block_size: int  # tokens of a block
    num_tables: int = 1  # block tables of each row


class StepResult(NamedTuple):
    """The results of a step, row by row of its order."""

    ids: list[tuple[int, ...]]  # the sampled ids; empty where the row samples nothing
    logprobs: list[tuple[RowLogprobs | None, ...]]
    prompt_logprobs: dict[int, list[RowLogprobs]]  # prompt tokens after the row's own, by its number
    is_whole: bool = False  # True: the device has made sure that none of the ids is NO_TOKEN
    pooled: Mapping[int, np.ndarray] = {}  # pooled states of this part of an embedding, by number


Pending = Callable[[], StepResult]  # a result that arrives later: the call waits for it


def no_rows() -> StepResult:
    """The result of a step in which no row draws anything here."""
    return StepResult([], [], {})


class PendingStep:
    """A step under way. `sample` comes before `wait` if the order awaits masks, and is not called otherwise.

    `launch` samples the step under the masks that it is given: at once, where the order awaits none. `memory`
    has room for masks.
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
        self.in_graph = in_graph  # whether its model runs in a captured graph, for pictures
        self._result = None if flags & AWAITS_MASKS else launch(NO_MASKS)

    def masks(self, count: int) -> np.ndarray:
        """Memory for `count` masks, all of it to be overwritten: int32 [count, ceil(vocabulary / 32)]."""
        self._lines_KW = self._memory(count)
        return self._lines_KW

    def sample(self, numbers: Sequence[int], positions: Sequence[int]) -> StepMasks:
        """Sample the step: mask k is for the row `numbers[k]` of the order, at `positions[k]`.

        It comes after `masks`, and before the next order. Other rows and positions have no mask. Returns the
        masks, whose memory belongs to the next step as soon as it begins.
        """
        masks = StepMasks(numbers, positions, self._lines_KW)
        self._result = self._launch(masks)
        return masks

    def wait(self) -> StepResult:
        """The result, once it is there; raises `DeviceLost` where the device failed."""
        assert self._result is not None, "a step that awaits masks is sampled before it is waited for"
        return self._result()


class DeviceHalf(Protocol):
    """Executes orders: a model on a device, or a stand-in for tests and simulations.

    The memory of an order may be used again when its step has been waited for.
    """

    @property
    def can_embed(self) -> bool:
        """True if steps pool the hidden states of embeddings."""

    @property
    def window_tokens(self) -> int:
        """The most tokens of a step with drafts for which penalties and masks are applied on the device."""

    def run(self, order: StepOrder) -> PendingStep:
        """Begin a step; `DeviceLost`: every further one would fail as well."""

    def path_of(self, order: StepOrder) -> str:
        """The way in which this order is computed, in words for people."""


class SyncDevice(ABC):
    """A device half that is done when it returns."""

    can_embed = False
    window_tokens = 0
    vocab_size: int = 0  # number of logits of a row; needed where sequences are constrained

    @abstractmethod
    def compute(self, order: StepOrder, masks: StepMasks) -> StepResult:
        """Execute an order, sampled under these masks."""

    def run(self, order: StepOrder) -> PendingStep:
        """Execute an order at once; one that awaits masks, when these are there."""

        def launch(masks: StepMasks) -> Pending:
            result = self.compute(order, masks)
            return lambda: result

        return PendingStep(order.flags, launch, self._memory)

    def path_of(self, order: StepOrder) -> str:
        """The way in which this order is computed, in words for people."""
        return "on the host"

    def _memory(self, count: int) -> np.ndarray:
        return np.empty((count, -(-self.vocab_size // 32)), dtype=np.int32)
