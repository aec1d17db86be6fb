"""Steps that are, or could be, a graph: rows that decode, and few given tokens next to them.

    decode    [rows that decode | padding]                       most steps
    mixed     [rows that decode | padding | given tokens | padding]

The host sends rows and given tokens, padded to a captured size, and the graph finds everything else on the
device. If the next order says that the same rows decode again, it sends nothing but new blocks of tables.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from infer.execution.device import Pending, Sampler
from infer.execution.gpu.graphs import StepSize
from infer.execution.gpu.launcher import StepLauncher
from infer.execution.gpu.readback import Drawn
from infer.execution.gpu.step_ids import StepIds
from infer.execution.gpu.step_inputs import Prompts
from infer.execution.head_model import following_tokens
from infer.execution.order import DECODE, NONE, UNSEEN, StepMasks, StepOrder


class DecodedRows(NamedTuple):
    """The rows of a step in which all rows decode."""

    rows: np.ndarray
    size: StepSize
    ids_S: torch.Tensor  # memory of their sampled ids
    has_logprobs: bool  # True: some rows ask for logprobs


class SizedSteps:
    """Launches steps of a captured size."""

    def __init__(self, launcher: StepLauncher, ids: StepIds) -> None:
        self._launcher, self._ids, self.graphs = launcher, ids, launcher.graphs
        self._inputs, self._rows, self._scratch = launcher.inputs, launcher.rows, launcher.scratch
        self._communicator, self._head = launcher.communicator, launcher.head
        self._has_logits, self._readback, self._profile = launcher.has_logits, ids.readback, launcher.profile
        self.decoded: DecodedRows | None = None  # rows of the last step, if all of them decoded

    def start(self, order: StepOrder, size: StepSize) -> Sampler:
        """Launch a step of this size up to its logits; return the function that launches the rest."""
        if size.num_tokens:
            return self.start_mixed(order, size)
        has_logprobs = int(self._rows.num_logprobs[order.rows].max()) != NONE
        rows = order.rows.copy()  # the next order may overwrite this one
        decoded = DecodedRows(rows, size, self._scratch.ids_S[: order.num_rows], has_logprobs)
        return self.start_decode(order, decoded, are_sent=False)

    def size_of(self, order: StepOrder) -> StepSize | None:
        """Return the size with room for a step; None: there is none, or it is faster without a graph."""
        num_decoding = int(np.count_nonzero(order.kinds == DECODE))
        if order.num_rows - num_decoding > self._profile.max_chunks:
            return None
        if not order.adapters.any():
            return self.graphs.size_for(num_decoding, len(order.tokens))
        if len(order.tokens):  # prompts with adapters are launched kernel by kernel
            return None
        size = self.graphs.size_for(num_decoding, 0)
        return None if size is None else size._replace(has_adapters=True)

    def start_decode(self, order: StepOrder, decoded: DecodedRows, *, are_sent: bool) -> Sampler:
        """Launch a step in which all rows decode, as in most steps."""
        rows, size, ids_S, has_logprobs = decoded
        ensure = self.graphs.ensure if self._communicator is None else self._launcher.ensure  # one call less
        if ensure(size) or not are_sent:  # a capture leaves padding in the inputs
            self._inputs.send_rows(rows, size.num_rows)
            if size.has_adapters:
                self._inputs.send_adapters(order.adapters, size.num_rows)
        self.graphs.forward(size)

        def sample(masks: StepMasks) -> Pending:
            self.decoded = decoded
            if not self._has_logits:
                return self._ids.await_ids(rows, order.stops, np.arange(len(rows)), size.num_rows)
            logits_SV = self.graphs.sample(size)
            asked = self._ids.asked(logits_SV, rows) if has_logprobs else None
            if self._communicator is not None:  # `read_back` would be a call in most steps
                self._communicator.pass_ids(self._scratch.ids_S)
            pending = self._readback.take(order.step, ids_S, len(rows), asked)
            if self._head is not None and not order.flags & UNSEEN:
                self.graphs.follow(size)
            return pending.wait

        return sample

    def start_mixed(self, order: StepOrder, size: StepSize) -> Sampler:
        """Launch few given tokens together with the rows that decode."""
        inputs = self._inputs
        self._launcher.ensure(size)
        prompts = Prompts(order, first=size.num_rows)
        inputs.send_rows(order.rows[prompts.decoding], size.num_rows)
        inputs.send_prompts(prompts, size.num_tokens)
        # rows that decode are sampled where they stand, others after them
        drawn = prompts.numbers[order.num_sampled[prompts.numbers] > 0]
        sampling = np.concatenate([prompts.decoding, drawn])
        where = np.concatenate([np.arange(len(prompts.decoding)), size.num_rows + np.arange(len(drawn))])
        rows, num_ids = order.rows[sampling], size.num_rows + self._profile.max_chunks
        inputs.send_samples(where, prompts.last_places[sampling], rows, order.stops[sampling], num_ids)
        if self._head is not None:
            ids = np.empty(order.num_rows, dtype=np.int64)
            ids[sampling] = where
            following = following_tokens(order, ids[order.num_sampled > 0])
            inputs.send_following(following[prompts.is_given], prompts.first, size.num_tokens)
        self.graphs.forward(size)

        def sample(masks: StepMasks) -> Pending:
            if not self._has_logits:
                return self._ids.await_ids(rows, order.stops[sampling], where, num_ids)
            logits_SV = self.graphs.sample(size)
            ids_S = self._scratch.ids_S[: int(where[-1]) + 1 if len(where) else 0]
            pending = self._ids.read_back(order, ids_S, logits_SV, rows, where)
            self.graphs.follow(size)
            return pending.scatter(lambda: [*map(Drawn, sampling.tolist(), where.tolist())]).wait

        return sample
