"""Execute orders in plain PyTorch, or with the C kernels of a CPU: copy blocks, run the model, sample.

transfers ── the store moves the blocks of the order's transfers
state     ── block tables, last tokens and facts of rows are updated              (layout.py, row_book.py)
layout    ── the order's numbers become tensors                                   (layout.py)
model     ── hidden states; after the last attention, only of the tokens that are read
logits    ── only of positions that are sampled or need logprobs
sample    ── one id per position, several for a row about to fork                 (host_sampling.py)
pool      ── hidden states of embeddings                                          (embedding.py)
follow    ── a draft head processes the computed and sampled tokens               (head_model.py)
compact   ── keys and values of a tree's accepted drafts are moved                (trees.py)

If decoding rows and prompts have different backends, the step is split in two (split_step.py).

If several ranks share a model, rank 0 has the engine and samples. It sends each order to the other ranks
before it executes it. The order then includes the last tokens of decoding rows, because other ranks do not
sample. They do nothing after `follow`.

With pipeline stages, rank 0 has the last stage. A step is computed in as many parts as there are stages, so
that all stages work at the same time. `wait` computes a step, so the next step may be sent before; its ids
follow part by part as they are sampled:

    stage 0    step 1: A   B │ step 2: A   B │ ...
                        ╲   ╲    ╱  ╲   ╲               hidden states, ids of A, ids of B
    stage 1             A   B      A   B                samples
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Final

import numpy as np
import torch

from infer.cache.kv_store import KVStore
from infer.config.backends import REFERENCE
from infer.errors import DeviceLost
from infer.execution.cpu_step import CpuSteps, attention_library
from infer.execution.device import Pending, PendingStep, StateShape, StepResult, SyncDevice, no_rows
from infer.execution.embedding import pool_hidden
from infer.execution.halves import MAX_PARTS, SmallerSteps, parts_of, run_parts
from infer.execution.head_model import HeadModel, drawn_places, following_tokens, kept_ids, with_drawn
from infer.execution.host_sampling import HostSampler, Judge
from infer.execution.layout import HostRows, PagedStep, needed_tokens
from infer.execution.order import (
    DECODE,
    EMPTY,
    NO_MASKS,
    READS_PROMPTS,
    REPEATS,
    UNSEEN,
    StepMasks,
    StepOrder,
    to_bytes,
)
from infer.execution.rank_ring import RankMessage, whole_group
from infer.execution.row_book import RowBook
from infer.execution.split_step import split_step
from infer.execution.trees import moved_slots
from infer.kernels.runtime.communicator import Pipe, RankGroup
from infer.layers.adapted import AdapterBank
from infer.layers.attention import LayerInputs, StepContext
from infer.models.model import Network

SHORT_MESSAGE: Final = 1 << 14  # most bytes of an order that may be sent ahead


class _StagedStep:
    """A step of pipeline stages; rank 0 computes the last stage in `wait`."""

    def __init__(self, order: StepOrder, finish: Callable[[_StagedStep], None]) -> None:
        self.order, self.is_sent, self._finish = order, False, finish
        self.masks, self.result = NO_MASKS, no_rows()
        self.is_done = False

    def sampled_with(self, masks: StepMasks) -> Pending:
        """Set the masks under which the step is sampled; returns its pending result."""
        self.masks = masks
        return self._wait

    def _wait(self) -> StepResult:
        if not self.is_done:
            self._finish(self)
        return self.result


class TorchDevice(SyncDevice):
    """The synchronous device half: a model, a store and the state of the rows."""

    can_embed = True

    def __init__(
        self, model: Network, store: KVStore, shape: StateShape, *, max_batch_size: int,
        attention_backend: str, decode_attention_backend: str | None = None, record_cpu_step: bool = True,
        ranks: RankGroup | None = None, pipe: Pipe | None = None, head: TorchHead | None = None,
        adapters: AdapterBank | None = None,
    ) -> None:  # fmt: skip
        """`ranks`: the other ranks, which get each order; `head`: a draft head that follows the steps.

        `pipe`: connects pipeline stages, None: there are none. `adapters`: the model's LoRA adapters.
        """
        self._adapters, self._pipe = adapters, pipe
        self._staged: deque[_StagedStep] = deque()  # steps in flight (rank 0 of several stages)
        self._drawn: list[int] = []  # rows that the last order samples (other ranks)
        self._awaited: set[int] = set()  # rows whose sampled ids have not arrived
        self.step_s = 0.0  # seconds of all steps (rank 0 of several ranks)
        self.model, self.store, self._book = model, store, RowBook()
        self._rows = rows = HostRows(shape)
        self.vocab_size, self._ranks = model.config.vocab_size, ranks
        self._smaller = SmallerSteps(self.compute, can_repeat=model.config.delta is None)
        self._backend, self._decode_backend = attention_backend, decode_attention_backend or attention_backend
        self._is_split = self._backend != self._decode_backend
        self._head, self._captured_layers = head, () if head is None else head.head_model.captured_layers
        self._cpu: CpuSteps | None = None
        if "c" in (self._backend, self._decode_backend):
            c = attention_library(store.device, store.dtype, model.config.head_dim)
            assert c is not None, "resolve.py chooses the C kernel only if it can be used"
            records = record_cpu_step and not self._is_split
            self._cpu = CpuSteps(
                c, model, store, rows, max_batch_size, record=records, captured_layers=self._captured_layers
            )
        logits = None if self._cpu is None else self._cpu.logits
        self._sampler = HostSampler(model, self._book, logits=logits)

    def use_judge(self, judge: Judge) -> None:
        """Replace how drafts are accepted, for benchmarks."""
        self._sampler.judge = judge

    @property
    def attention(self) -> tuple[str, str]:
        """The attention backends for prompts, and for decoding rows."""
        return self._backend, self._decode_backend

    def path_of(self, order: StepOrder) -> str:
        """Describe in words how this order is computed."""
        if self._cpu is None or self._is_split or len(order.backs):
            return "PyTorch, eager"
        return "C program" if self._cpu.is_recorded(order) else "C kernels, one by one"

    def compute(self, order: StepOrder, masks: StepMasks) -> StepResult:
        """Execute an order; the module's docstring lists the phases."""
        if self._ranks is not None:
            return self._compute_together(order, masks, self._ranks)
        try:
            with torch.inference_mode():
                self._enter(order)
                if not order.num_rows:  # beams that were swapped in wait until all beams are back
                    return no_rows()
                try:
                    return self._compute(order, masks)
                except torch.OutOfMemoryError as error:
                    return self._smaller.run(order, masks, error)
        except torch.AcceleratorError as error:
            raise DeviceLost.of(f"in step {order.step}", error) from error

    def _enter(self, order: StepOrder) -> None:
        """Make the order's transfers and apply its changes of state."""
        self.store.transfer(order.moves())
        self._rows.apply(order)
        self._book.enter(order)
        if self._head is not None:
            self._head.mirror(order)

    def _compute_together(self, order: StepOrder, masks: StepMasks, ranks: RankGroup) -> StepResult:
        """Execute an order as rank 0 of several ranks."""
        start = perf_counter()
        with whole_group(ranks, order.step), torch.inference_mode():
            self._enter(order)
            ranks.send(RankMessage.ORDER, to_bytes(self._with_last_tokens(order)))
            result = self._compute(order, masks) if order.num_rows else no_rows()
            ranks.check()
        self.step_s += perf_counter() - start
        return result

    def run(self, order: StepOrder) -> PendingStep:
        """Execute an order at once; with stages, send it to other ranks, ahead of its turn if possible."""
        if self._pipe is None or self._ranks is None:
            return super().run(order)
        step = _StagedStep(order, self._finish)
        with whole_group(self._ranks, order.step), torch.inference_mode():
            if not self._staged:
                self._begin(step)
            elif len(self._staged) == 1 and order.num_rows and (order.kinds == DECODE).all():
                last = self._staged[0].order
                ahead = to_bytes(self._with_last_tokens(order, but=last.rows[last.num_sampled > 0]))
                step.is_sent = len(ahead) <= SHORT_MESSAGE
                if step.is_sent:
                    self._ranks.send(RankMessage.AHEAD, ahead)
        self._staged.append(step)
        return PendingStep(order.flags, step.sampled_with, self._memory)

    def _begin(self, step: _StagedStep) -> None:
        """Apply the changes of the first step in flight, and send it if that is not done yet."""
        assert self._ranks is not None
        self._enter(step.order)
        if not step.is_sent:
            step.is_sent = True
            self._ranks.send(RankMessage.ORDER, to_bytes(self._with_last_tokens(step.order)))

    def _finish(self, step: _StagedStep) -> None:
        """Compute the last stage of the steps up to this one, as rank 0."""
        assert self._ranks is not None and self._pipe is not None
        ranks = self._ranks
        while not step.is_done:
            start, first = perf_counter(), self._staged[0]
            order, is_followed = first.order, len(self._staged) > 1 and self._staged[1].is_sent

            def compute(part: StepOrder, masks: StepMasks, is_followed: bool = is_followed) -> StepResult:
                result = self._compute(part, masks)
                if is_followed:
                    rows = part.rows[part.num_sampled > 0]
                    ranks.send(
                        RankMessage.IDS,
                        np.array([rows, self._rows.last_token[rows]], dtype=np.int64).tobytes(),
                    )
                return result

            with whole_group(ranks, order.step), torch.inference_mode():
                first.result = run_parts(self._parts(order), order.num_rows, first.masks, compute)
                first.is_done = True
                self._staged.popleft()
                if self._staged:
                    self._begin(self._staged[0])
                ranks.check(is_idle=not self._staged)
            self.step_s += perf_counter() - start

    def _parts(self, order: StepOrder) -> list[tuple[int, StepOrder]]:
        """Return the parts in which an order is computed, the same on every rank."""
        count = 1 if self._pipe is None else min(self._pipe.num_stages, MAX_PARTS)
        return parts_of(order, count, cuts_rows=self.model.config.delta is None)

    def _with_last_tokens(self, order: StepOrder, but: np.ndarray | None = None) -> StepOrder:
        """Return the order with the last tokens of all decoding rows, for ranks that do not sample.

        `but`: rows whose tokens a step in flight samples; they are left out, and `order` is not applied yet.
        """
        is_said, known = order.kinds == DECODE, EMPTY.known
        if but is not None:
            known = order.known
            is_said &= ~np.isin(order.rows, np.concatenate([but, known[0]]))
        rows, starts = order.rows[is_said], order.starts[is_said]
        known = np.concatenate([known, np.array([rows, self._rows.last_token[rows], starts])], axis=1)
        return order._replace(known=known.astype(np.int64), flags=order.flags & ~REPEATS)

    def compute_part(self, order: StepOrder, receive: Callable[[], None] | None = None) -> None:
        """Execute an order as a rank other than 0: compute this rank's parts and sample nothing.

        `receive` waits for ids of the previous order, if this order was sent before them.
        """
        is_first = self._pipe is None or self._pipe.stage == 0
        is_last = self._pipe is None or self._pipe.stage == self._pipe.num_stages - 1
        self._awaited = set(self._drawn) - set(order.known[0].tolist()) if receive is not None else set()
        self._drawn = order.rows[order.num_sampled > 0].tolist()
        with torch.inference_mode():
            self._enter(order)
            for _, part in self._parts(order):
                while receive is not None and is_first and not self._awaited.isdisjoint(part.rows.tolist()):
                    receive()
                hidden_TD, last_rows, _ = self._hidden(part)
                if is_last:
                    self._sampler.follow(part, last_rows, hidden_TD)

    def learn(self, body: bytearray) -> None:
        """Take over ids that rank 0 has sampled, unless a later order has replaced them."""
        for row, token in np.frombuffer(body, dtype=np.int64).reshape(2, -1).T.tolist():
            if row in self._awaited:
                self._awaited.remove(row)
                self._rows.last_token[row] = token

    def _compute(self, order: StepOrder, masks: StepMasks) -> StepResult:
        hidden_TD, last_rows, inputs = self._hidden(order)
        pooled = None
        if order.flags & READS_PROMPTS:  # before sampling: if memory runs out, the step is run again
            pooled = pool_hidden(
                order, self._book, last_rows, hidden_TD[:, : self.model.config.hidden_size]
            ).by_number()
        result = self._sampler.sample(order, last_rows, hidden_TD, masks)
        if self._head is not None and not order.flags & UNSEEN:
            self._head.follow(order, inputs.states(order.num_tokens), result.ids)
        if (moves_2M := moved_slots(order, result.ids)).size:
            self.store.move_slots(torch.from_numpy(moves_2M).to(self.store.device))
        for row, ids in zip(order.rows.tolist(), result.ids, strict=True):
            if ids:
                self._rows.last_token[row] = max(ids[-1], 0)  # a step in flight may read it, even NO_TOKEN
                entry = self._book[row]
                if entry.facts.num_tokens:
                    entry.tokens.extend(id_ for id_ in ids if id_ >= 0)
        return result if pooled is None else result._replace(pooled=pooled)

    def _hidden(self, order: StepOrder) -> tuple[torch.Tensor, list[int], LayerInputs]:
        """Return the needed hidden states, the index of each row's last token, and captured layer inputs."""
        on_select = None
        if self._adapters is not None:
            self._adapters.begin(self._slots(order))
            on_select = self._adapters.select
        if self._cpu is not None and not self._is_split and not len(order.backs):  # C has no trees
            return *self._cpu.run(order, on_select), self._cpu.layer_inputs
        paged = self._paged(order, self._backend)
        step: StepContext = paged
        if self._is_split and not len(order.backs):
            backends = self._decode_backend, self._backend
            step = split_step(order, paged.positions, self._context, backends)
        places, last_rows = needed_tokens(order, paged.last_places)
        step.logit_indices = None if places is None else torch.tensor(places, device=self.store.device)
        step.on_select, step.layer_inputs = on_select, (inputs := LayerInputs(self._captured_layers))
        return self.model(paged.tokens_T, step), last_rows, inputs

    def _slots(self, order: StepOrder) -> torch.Tensor | None:
        """Return the adapter slot of each token; None: no row has an adapter."""
        if not order.adapters.any():
            return None
        return torch.from_numpy(order.adapters.repeat(order.counts).astype(np.int32)).to(self.store.device)

    def _paged(self, order: StepOrder, backend: str) -> PagedStep:
        """Return the step of some rows in plain PyTorch."""
        return PagedStep(order, self._rows, self.store, use_reference=backend == REFERENCE)

    def _context(self, order: StepOrder, backend: str) -> StepContext:
        """Return the step of some of an order's rows with one backend."""
        if backend == "c":
            assert self._cpu is not None
            return self._cpu.context(order)
        return self._paged(order, backend)


class TorchHead(TorchDevice):
    """The device half of a draft head: its orders are turns of decoding rows (head_model.py)."""

    can_embed = False

    @property
    def head_model(self) -> HeadModel:
        """The network, which is a head."""
        assert isinstance(self.model, HeadModel)
        return self.model

    def mirror(self, order: StepOrder) -> None:
        """Make the transfers and table changes of an order of the model."""
        self.store.transfer(order.moves())
        self._rows.apply(order)

    def follow(self, order: StepOrder, states_TF: torch.Tensor, ids: list[tuple[int, ...]]) -> None:
        """Process the hidden states and the kept ids of a step of the model."""
        rows = order.rows.repeat(order.num_sampled)
        numbers = following_tokens(order), kept_ids(order, ids), drawn_places(order), rows
        following_T, ids_S, places_S, rows_S = (torch.from_numpy(x).to(self.store.device) for x in numbers)
        step = self._context(order, self._backend)
        self.head_model.follow(with_drawn(following_T, ids_S), states_TF, step, places_S, rows_S)

    def _hidden(self, order: StepOrder) -> tuple[torch.Tensor, list[int], LayerInputs]:
        """Run a turn: each row is computed one position before its token's."""
        assert (order.kinds == DECODE).all(), "a head runs only turns of decoding rows"
        step = self._context(order._replace(starts=order.starts - 1), self._decode_backend)
        step.rows = torch.from_numpy(order.rows).to(self.store.device)
        tokens_T = torch.from_numpy(self._rows.last_token[order.rows]).to(self.store.device)
        return self.model(tokens_T, step), list(range(order.num_rows)), LayerInputs(())
