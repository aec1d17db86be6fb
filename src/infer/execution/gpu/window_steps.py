"""Steps whose rows verify drafts: each token of a window is a row that decodes.

    row 4: t9 x y    row 7: t3       ──►  4 4 4 7      rows of one graph; x and y are drafts

The device draws an id after each token, and the host judges the drafts by them. Their number decides what the
next step computes, so the host says how a row goes on. Only the drafter goes on from the device's state: the
device judges, too, and the next turns of drafting begin before the host has read the step
(engine/draft_model.py). The step after these turns may also begin early, if the batch stays as it is.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from infer.execution.device import Pending, Sampler
from infer.execution.gpu.graphs import StepSize
from infer.execution.gpu.lanes import fill_lanes
from infer.execution.gpu.late_drafts import LateDrafts
from infer.execution.gpu.launcher import StepLauncher
from infer.execution.gpu.readback import DRAFTING, PendingIds, PendingTensor, drawn_by, losing_device
from infer.execution.gpu.step_ids import StepIds
from infer.execution.gpu.step_inputs import mark_ends
from infer.execution.host_sampling import num_kept
from infer.execution.order import AWAITS_MASKS, NONE, StepMasks, StepOrder
from infer.execution.trees import branched_rows, main_line, nodes_of
from infer.kernels.elementwise.windows import FIRST_CODE


class EarlyWindow(NamedTuple):
    """A step that verifies drafts, launched before the host knew the tokens before them."""

    rows: list[int]
    num_sampled: list[int]  # ids of each row
    ids_KS: PendingTensor  # drafts that it verifies
    decided: dict[int, int]  # number of kept ids by row, if chance decides
    ids: PendingIds


class WindowSteps:
    """Launches steps that verify drafts."""

    def __init__(self, launcher: StepLauncher, ids: StepIds) -> None:
        self._launcher, self._ids, self.graphs = launcher, ids, launcher.graphs
        self._inputs, self._rows, self._scratch = launcher.inputs, launcher.rows, launcher.scratch
        self.early: EarlyWindow | None = None  # a step that ran early, if the next order turns out to be it
        self.has_judged = False  # True: the drafter can go on from the last step without the host

    def size_of(self, order: StepOrder) -> StepSize | None:
        """Return the size with room for a step whose rows verify drafts; None: there is none."""
        size = self.graphs.window_size_for(order.num_tokens)
        return None if size is None else size._replace(has_adapters=bool(order.adapters.any()))

    def start(self, order: StepOrder, size: StepSize, late: LateDrafts | None) -> Sampler:
        """Launch rows that verify drafts, each of their tokens as a separate row that decodes."""
        counts, stops = order.counts.astype(np.int64), order.stops
        ends = counts.cumsum()
        positions = np.arange(order.num_tokens) + (stops - ends).repeat(counts)
        rows = order.rows.repeat(counts)
        is_judged, nodes = order.num_sampled > 1, nodes_of(order) if len(order.backs) else None
        lens = positions + 1
        if nodes is not None:  # slots follow from places; rotation and noise follow from depths
            positions = order.starts.repeat(counts) + nodes.depths_T
        has_lanes = bool(order.flags & AWAITS_MASKS or self._rows.has_uses[order.rows[is_judged]].any())
        if has_lanes and late is not None:  # lanes need the drafts on the host
            late.read(order)
            late = None
        self._launcher.ensure(size)
        lines_YS = self._inputs.blank_window(size.num_rows)
        lines_YS[:3, : len(rows)] = rows
        lines_YS[4, : len(rows)] = order.tokens if late is None else late.codes(order)
        lines_YS[5, : len(rows)] = positions
        lines_YS[6:-1, : len(rows)] = order.slots
        lengths, backs = order.num_sampled.tolist(), dict(branched_rows(order))
        for number, each in backs.items():
            lengths[number] = 1 + main_line(each[1:])
        decided = self._decided(lengths)
        mark_ends(lines_YS[-1], decided, counts, ends)
        lines_YS[1], lines_YS[1, : len(rows)] = 0, lens
        lines_YS[3, (ends - 1)[~is_judged]] = order.rows[~is_judged]  # these rows go on from their id
        if has_lanes:
            lines_YS[2, : len(rows)] = fill_lanes(self._rows, order)
        self._inputs.send_window(size.num_rows)
        if self._launcher.has_trees:
            self._inputs.send_tree(nodes, size.num_rows)
        if size.has_adapters:
            self._inputs.send_adapters(order.adapters.repeat(counts), size.num_rows)
        self.graphs.forward(size)
        # called when the ids have arrived, because drafts may be late
        windows = partial(drawn_by, order, ends - 1, decided, backs)

        def sample(masks: StepMasks) -> Pending:
            if not self._launcher.has_logits:
                goes_on, num_ids = ~is_judged, size.num_rows  # rows with drafts wait to be judged
                return self._ids.await_ids(order.rows[goes_on], stops[goes_on], (ends - 1)[goes_on], num_ids)
            self.has_judged = True
            if order.flags & AWAITS_MASKS:
                numbers = np.asarray(masks.numbers, dtype=np.int64)
                places = (ends - stops)[numbers] + np.asarray(masks.positions, dtype=np.int64) - 1
                self._rows.masks.send(self._rows.first_lane + places)
            logits_SV = self.graphs.sample(size)
            pending = self._ids.read_back(order, self._scratch.ids_S[: len(rows)], logits_SV, rows)
            self.graphs.follow(size)
            return pending.scatter(windows).wait

        return sample

    @torch.inference_mode()
    def verify_early(self, rows: np.ndarray, counts: np.ndarray, ids_KS: PendingTensor) -> None:
        """Launch the next windows of some rows, whose drafts are being made; the device knows their start.

        If the next order turns out to be this step, it has already run; any other order recomputes what it
        needs. Rows with penalties or logprobs wait for their order.
        """
        launcher = self._launcher
        assert launcher.drafter is not None
        lengths, width = counts + 1, launcher.drafter.drafts_KS.shape[1]
        num_tokens = int(lengths.sum())
        size = self.graphs.window_size_for(num_tokens)
        is_plain = self._rows.num_logprobs[rows].max() == NONE and not self._rows.has_uses[rows].any()
        is_alone = (
            launcher.adapters is None and launcher.communicator is None and not self._rows.masks.has_any
        )
        if size is None or not (is_plain and is_alone):
            return
        with losing_device(DRAFTING), suppress(torch.OutOfMemoryError):
            self.graphs.ensure(size)
            lines_YS, ends = self._inputs.blank_window(size.num_rows), lengths.cumsum()
            turns = np.arange(num_tokens) - (ends - lengths).repeat(lengths)
            lines_YS[:3, :num_tokens] = rows.repeat(lengths)
            columns = np.arange(len(rows)).repeat(lengths)
            lines_YS[4, :num_tokens] = np.where(turns, FIRST_CODE - ((turns - 1) * width + columns), 0)
            lines_YS[5, :num_tokens] = FIRST_CODE - turns
            num_sampled = lengths.tolist()
            decided = self._decided(num_sampled)
            mark_ends(lines_YS[-1], decided, lengths, ends)
            self._inputs.send_window(size.num_rows)
            self.graphs.forward(size)
            self.graphs.sample(size)
            ids = self._ids.readback.take(0, self._scratch.ids_S[:num_tokens], len(rows))
            self.graphs.follow(size)
            self.early = EarlyWindow(rows.tolist(), num_sampled, ids_KS, decided, ids)

    def find_early(
        self, order: StepOrder, size: StepSize, late: LateDrafts | None, early: EarlyWindow | None
    ) -> Sampler | None:
        """Return the second part of the step that ran early, if the order is that step."""
        if early is None or late is None or late.ids_KS is not early.ids_KS or not late.are_all:
            return None
        is_same = early.rows == order.rows.tolist() and early.num_sampled == order.num_sampled.tolist()
        if not is_same or order.flags & AWAITS_MASKS or size.has_adapters:
            return None
        self.graphs.is_replaying = True
        pending = early.ids.scatter(partial(drawn_by, order, order.counts.cumsum() - 1, early.decided))

        def sample(masks: StepMasks) -> Pending:
            self.has_judged = True
            return pending.wait

        return sample

    def _decided(self, num_sampled: list[int]) -> dict[int, int]:
        """Return the number of ids that each row with drafts keeps, if chance decides, for the device."""
        judge = self._ids.readback.judge
        if judge is num_kept:
            return {}
        return {n: judge((), range(count - 1)) for n, count in enumerate(num_sampled) if count > 1}
