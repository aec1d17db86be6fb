"""The device half of a GPU: state stays on the device, steps are launched now and waited for later.

    run      transfers, differences of state, then one of
               sized     rows that decode and few given tokens, padded: a CUDA graph    (sized_steps.py)
               windows   rows that verify drafts: each token is a row that decodes,
                         also in a graph                                                (window_steps.py)
               ragged    anything else: the same kernels, launched one by one           (ragged_steps.py)
             and a copy of the sampled ids to pinned memory, followed by an event;
             an order that awaits masks is sampled when the masks are there             (masks.py)
             a step that runs out of memory is run in halves                            (halves.py)
             a draft head sees what was computed and sampled, unless it may skip the step
    wait     for that event; ids become a `StepResult`                                  (readback.py)

No step reads anything back, so the engine may plan and launch the next steps before it waits for this one:
their tokens are on the device. If ids decide what runs next (forks, beams), the host samples the step, and
the engine does not overlap steps.

warm_up.py prepares what the first step needs: compiled kernels, captured graphs.

If several ranks share a model, rank 0 has the engine. It sends each order before it launches it, and the
other ranks launch their parts (`compute_part`). The ids reach them on the device, so they run ahead, too. If
layers are in stages, a step with many tokens is split into as many parts as there are stages, so that all
stages work at the same time.

On a CPU the same code runs on the kernels' references, which is how it is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch

from infer.errors import DeviceLost
from infer.execution.device import Pending, PendingStep, Sampler, StepResult, no_rows
from infer.execution.gpu.late_drafts import LateDrafts
from infer.execution.gpu.launcher import StepLauncher
from infer.execution.gpu.ragged_steps import RaggedSteps
from infer.execution.gpu.rare_orders import rare_orders
from infer.execution.gpu.readback import Readback, losing_device
from infer.execution.gpu.sending import send
from infer.execution.gpu.sized_steps import SizedSteps
from infer.execution.gpu.step_ids import StepIds
from infer.execution.gpu.window_steps import EarlyWindow, WindowSteps
from infer.execution.halves import MAX_PARTS, SmallerSteps, parts_of, run_parts
from infer.execution.host_sampling import HostSampler, Judge
from infer.execution.order import (
    AWAITS_MASKS,
    NO_MASKS,
    ON_HOST,
    READS_PROMPTS,
    REPEATS,
    VERIFY,
    StepMasks,
    StepOrder,
    to_bytes,
)
from infer.execution.rank_ring import RankMessage, whole_group
from infer.kernels.runtime.communicator import RankGroup

MIN_PART = 64  # fewest tokens of a part of a step: fewer tokens take as long


class GpuDevice:
    """A model whose decode state lives on its device."""

    can_embed = True

    def __init__(
        self, launcher: StepLauncher, *, steps_ahead: int = 1, ranks: RankGroup | None = None
    ) -> None:
        """`steps_ahead`: the most steps launched before one is read; `ranks` get each order from rank 0."""
        self.launcher, self._ranks, self.graphs = launcher, ranks, launcher.graphs
        self.model, self.store, self.rows = launcher.model, launcher.store, launcher.rows
        self.inputs, self.drafts_KS = launcher.inputs, launcher.drafts_KS
        self.window_tokens = launcher.window_tokens
        self._head, self._communicator = launcher.head, launcher.communicator
        num_parts = 1 if launcher.pipe is None else min(launcher.pipe.num_stages, MAX_PARTS)
        most_ahead, most_ids = (steps_ahead + 2) * num_parts - 2, launcher.scratch.max_rows
        self._readback = Readback(most_ids, launcher.device, steps_ahead=most_ahead, drafts_KS=self.drafts_KS)
        self._ids = StepIds(launcher, self._readback, num_parts)
        self._sampler = HostSampler(self.model, self.rows.book, send)
        self._sized, self.windows = SizedSteps(launcher, self._ids), WindowSteps(launcher, self._ids)
        self._ragged = RaggedSteps(launcher, self._ids, self._sampler)
        self._smaller = SmallerSteps(self.run_half, can_repeat=self.model.config.delta is None)
        self._late: LateDrafts | None = None  # drafts of the next order, not yet on the host
        self.arena: object = None  # the owner of the memory of steps, if there is one

    def expect(self, late: LateDrafts | None) -> None:
        """Set the drafts of the next order, which lacks them; None: the order has its drafts."""
        self._late = late

    def use_judge(self, judge: Judge) -> None:
        """Replace the rule that judges drafts by one that ignores the drawn ids, for benchmarks."""
        self._sampler.judge = self._readback.judge = judge

    @property
    def attention(self) -> tuple[str, str]:
        """The backends that compute attention of prompts, and of rows that decode."""
        return self.launcher.attention.names

    def run(self, order: StepOrder) -> PendingStep:
        """Launch a step, as the module's docstring describes."""
        if self._ranks is None:
            return self._run(order)
        with whole_group(self._ranks, order.step):
            if self._late is not None:  # the other ranks need all drafts in the order
                self._late.read(order)
                self._late = None
            self._ranks.send(RankMessage.ORDER, to_bytes(order))
            parts = self._parts(order)
            if len(parts) == 1:
                return self._run(order)
            steps = [self._run(part, is_part=True) for _, part in parts]
            self._sized.decoded = None  # rows of a part
            pending = self._joined(order.step, partial(_wait_for_parts, parts, steps, order.num_rows))
            return PendingStep(order.flags, lambda masks: pending, self._mask_memory)

    def compute_part(self, order: StepOrder) -> None:
        """Launch an order as a rank other than 0."""
        parts = self._parts(order)
        for _, part in parts:
            step = self._run(part)
            if order.flags & AWAITS_MASKS:  # rank 0 has the masks
                step.masks(0)
                step.sample((), ())
        if len(parts) > 1:
            self._sized.decoded = None  # rows of a part

    def _parts(self, order: StepOrder) -> list[tuple[int, StepOrder]]:
        """Split an order into parts, which stages compute at the same time; all ranks split alike.

        Half of a small step takes as long as all of it. Masks, drafts and ids of the host need a whole step.
        """
        is_plain = not order.flags & (AWAITS_MASKS | ON_HOST | READS_PROMPTS) and VERIFY not in order.kinds
        count = min(self._ids.num_parts, order.num_tokens // MIN_PART)
        if not is_plain or count < 2:
            return [(0, order)]
        (_, first), *rest = parts_of(order, count, cuts_rows=self.model.config.delta is None)
        return [(0, first._replace(transfers=order.transfers)), *rest]

    def _run(self, order: StepOrder, *, is_part: bool = False) -> PendingStep:
        late, self._late = self._late, None  # these drafts are for this order only, even if it fails
        early, self.windows.early = self.windows.early, None
        self.graphs.is_replaying = self.windows.has_judged = False
        try:
            if len(order.transfers):
                self.store.transfer(order.moves())
                if self._head is not None:
                    self._head.store.transfer(order.moves())
            try:
                sample = self._start(order, late, None if len(order.transfers) else early)
            except torch.OutOfMemoryError as error:  # halves run later, when the masks are there
                sample = _raising(error.with_traceback(None))
        except torch.AcceleratorError as error:
            raise DeviceLost.of(f"in step {order.step}", error) from error
        memory = self._host_memory if order.flags & ON_HOST else self._mask_memory
        launch = partial(self._launch_own if is_part else self._launch_sampler, order, late, sample)
        return PendingStep(order.flags, launch, memory, in_graph=self.graphs.is_replaying)

    def path_of(self, order: StepOrder) -> str:
        """Describe how this order is computed, for people."""
        size = None
        if not order.flags & (ON_HOST | READS_PROMPTS):
            size = self.windows.size_of(order) if VERIFY in order.kinds else self._sized.size_of(order)
        if size is None or not self.graphs.is_captured(size):
            return "kernel by kernel"
        tokens = f" and {size.num_tokens} prompt tokens" if size.num_tokens else ""
        return f"CUDA graph for {size.num_rows} rows{tokens}"

    def _launch_sampler(
        self, order: StepOrder, late: LateDrafts | None, sample: Sampler, masks: StepMasks
    ) -> Pending:
        """Launch the second part of a step; if memory runs out, run the step in halves instead."""
        if self._ranks is None:
            return self._launch_own(order, late, sample, masks)
        with whole_group(self._ranks, order.step):
            pending = self._launch_own(order, late, sample, masks)
        return self._joined(order.step, pending)

    def _joined(self, step: int, pending: Pending) -> Pending:
        """Return the result of a step for rank 0, which waits until all ranks have computed it."""

        def wait() -> StepResult:
            assert self._ranks is not None
            with whole_group(self._ranks, step):
                self._ranks.expect()
                result = pending()
                self._ranks.check()
            return result

        return wait

    def _launch_own(
        self, order: StepOrder, late: LateDrafts | None, sample: Sampler, masks: StepMasks
    ) -> Pending:
        try:
            try:
                if order.flags & AWAITS_MASKS and not order.flags & ON_HOST and VERIFY not in order.kinds:
                    self.rows.masks.send(order.rows[np.asarray(masks.numbers, dtype=np.int64)])
                return sample(masks)
            except torch.OutOfMemoryError as error:  # nothing of it has been sampled
                if self._communicator is not None:  # the other ranks do not know of halves
                    raise
                if late is not None:
                    late.read(order)  # the halves need their drafts
                self._readback.settle()  # the halves reuse the buffers of steps that have not been read
                kept = masks._replace(lines_KW=masks.lines_KW.copy())  # the halves reuse the masks' memory
                result = self._smaller.run(order, kept, error)
                self._sized.decoded = None  # rows of a half, and the next order may repeat the whole
                masks.lines_KW[:] = kept.lines_KW  # the engine still reads them
                return lambda: result
        except torch.AcceleratorError as error:
            raise DeviceLost.of(f"in step {order.step}", error) from error

    def run_half(self, order: StepOrder, masks: StepMasks) -> StepResult:
        """Run a part of a step, or an order of padding, and wait for it."""
        step = self.run(order)
        if order.flags & AWAITS_MASKS:
            step.masks(len(masks.numbers))[:] = masks.lines_KW
            step.sample(masks.numbers, masks.positions)
        return step.wait()

    def rare_orders(self) -> Iterator[tuple[StepOrder, StepMasks]]:
        """Yield orders of padding that use what few requests ask for.

        Several ranks get none, because they sample together, and neither do draft models, which only draft.
        """
        if self._ranks is None and self._communicator is None and not len(self.drafts_KS):
            num_tables, num_rows, _ = self.rows.tables_KRB.shape
            found = zip(self.store.tables, self.store.states, strict=True)
            state_rows = sorted({table * num_rows for table, state in found if state is not None})
            yield from rare_orders(num_tables, state_rows, self.rows.masks.num_words)

    def _mask_memory(self, count: int) -> np.ndarray:
        """Return pinned memory for masks; wait for earlier steps, whose samplers fetch the same lines."""
        with losing_device("before masks were filled"):
            self._readback.arrive()
        return self.rows.masks.take(count)

    def _host_memory(self, count: int) -> np.ndarray:
        """Return memory for the masks of a step that the host samples, with up to one for each position."""
        return np.empty((count, self.rows.masks.num_words), dtype=np.int32)

    def _start(self, order: StepOrder, late: LateDrafts | None, early: EarlyWindow | None) -> Sampler:
        """Launch a step up to its logits; return the function that launches the rest."""
        decoded, self._sized.decoded = self._sized.decoded, None
        if decoded is not None and order.flags & REPEATS:
            if self._ids.awaited:
                self._ids.go_on(order)
            self.rows.apply_tables(order)
            self._clear_masks(order)
            return self._sized.start_decode(order, decoded, are_sent=self.inputs.has_rows)
        with torch.inference_mode():
            if self._ids.awaited:
                self._ids.go_on(order)
            self.rows.apply(order)
            if not order.num_rows:  # returning beams compute their next tokens together, when all are back
                return lambda masks: no_rows
            self._clear_masks(order)
            is_verified, runs_plain = VERIFY in order.kinds, not order.flags & (ON_HOST | READS_PROMPTS)
            window = self.windows.size_of(order) if is_verified and runs_plain else None
            if window is not None:
                found = self.windows.find_early(order, window, late, early)
                return self.windows.start(order, window, late) if found is None else found
            assert not len(order.backs), "trees are windows"
            if late is not None:
                late.read(order)
            size = None if is_verified or not runs_plain else self._sized.size_of(order)
            return self._ragged.start(order) if size is None else self._sized.start(order, size)

    def _clear_masks(self, order: StepOrder) -> None:
        """Clear the masks of earlier steps before a step without masks."""
        if not order.flags & AWAITS_MASKS and self.rows.masks.has_any:
            self.rows.masks.clear()


def _wait_for_parts(
    parts: list[tuple[int, StepOrder]], steps: Sequence[PendingStep], num_rows: int
) -> StepResult:
    """Wait for all parts of a step and join their results."""
    following = iter(steps)
    return run_parts(parts, num_rows, NO_MASKS, lambda part, masks: next(following).wait())


def _raising(error: torch.OutOfMemoryError) -> Sampler:
    """Return the second part of a step whose first part ran out of memory: it raises the error."""

    def sample(masks: StepMasks) -> Pending:
        raise error

    return sample
