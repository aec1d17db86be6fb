"""Execute orders in plain PyTorch, or with the C kernels of a CPU: copy blocks, run the model, sample.

transfers ── the store moves blocks the books have already moved
state     ── block tables, last tokens and facts of rows are brought up to date   (layout.py, row_book.py)
layout    ── the order's numbers become tensors                                   (layout.py)
model     ── hidden states of the tokens that are read: after the last attention there are no others
logits    ── only of the positions that are sampled, or whose logprobs were asked for
sample    ── one id per position, several for a row about to fork                 (host_sampling.py)
pool      ── hidden states of embeddings                                          (embedding.py)
follow    ── where a head drafts, it sees what was computed and drawn             (head_model.py)

Where rows that decode and prompts have different backends, the step is split into one for each
(split_step.py).

Where several ranks share a model, rank 0 has the engine and samples. It sends each order on before it
executes it, with the last tokens of the rows that decode: the others have drawn none, and do no more than
`follow`.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from infer.cache.kv_store import KVStore
from infer.config.backends import REFERENCE
from infer.errors import DeviceLost
from infer.execution.cpu_step import CpuSteps, attention_library
from infer.execution.device import StateShape, StepResult, SyncDevice
from infer.execution.embedding import pool_hidden
from infer.execution.halves import SmallerSteps
from infer.execution.head_model import HeadModel, drawn_places, following_tokens, kept_ids, with_drawn
from infer.execution.host_sampling import HostSampler, Judge
from infer.execution.layout import HostRows, PagedStep, needed_tokens
from infer.execution.order import DECODE, READS_PROMPTS, REPEATS, StepMasks, StepOrder, to_bytes
from infer.execution.row_book import RowBook
from infer.execution.split_step import split_step
from infer.layers.adapted import AdapterBank
from infer.layers.attention import LayerInputs, StepContext
from infer.models.model import Network

ORDER = 1  # kind of the message in which an order travels to other ranks


class OtherRanks(Protocol):
    """The other ranks of a model (loader/load.py)."""

    def send(self, kind: int, body: bytearray) -> None:
        """Send them a message."""
        ...

    def check(self) -> None:
        """Raise `DeviceLost` if one of them is gone."""
        ...

    def close(self, reason: str) -> None:
        """End them all."""
        ...


class TorchDevice(SyncDevice):
    """A model, a store, the state of the rows, and one device that is waited for."""

    can_embed = True

    def __init__(
        self,
        model: Network,
        store: KVStore,
        shape: StateShape,
        *,
        max_batch_size: int,
        attention_backend: str,
        decode_attention_backend: str | None = None,
        record_cpu_step: bool = True,
        ranks: OtherRanks | None = None,
        head: TorchHead | None = None,
        adapters: AdapterBank | None = None,
    ) -> None:
        """`ranks` are told each order, and compute their parts of it; `head` follows its steps, to draft.

        `adapters` are those of the model.
        """
        self._adapters = adapters
        self.model, self.store, self._book = model, store, RowBook()
        self._rows = rows = HostRows(shape)
        self.vocab_size, self._ranks = model.config.vocab_size, ranks
        self._smaller = SmallerSteps(self.compute, can_repeat=model.config.delta is None)
        self._backend, self._decode_backend = attention_backend, decode_attention_backend or attention_backend
        self._is_split = self._backend != self._decode_backend
        self._head, self._captured_layers = head, () if head is None else head.captured_layers
        self._cpu: CpuSteps | None = None
        if "c" in (self._backend, self._decode_backend):
            c = attention_library(store.device, store.dtype, model.config.head_dim)
            assert c is not None, "resolve.py has asked whether the C kernel can"
            records = record_cpu_step and not self._is_split
            self._cpu = CpuSteps(
                c, model, store, rows, max_batch_size, record=records, captured_layers=self._captured_layers
            )
        logits = None if self._cpu is None else self._cpu.logits
        self._sampler = HostSampler(model, self._book, logits=logits)

    def use_judge(self, judge: Judge) -> None:
        """Let drafts be judged in another way: for benchmarks."""
        self._sampler.judge = judge

    @property
    def attention(self) -> tuple[str, str]:
        """The backends that compute attention of prompts, and of rows that decode."""
        return self._backend, self._decode_backend

    def path_of(self, order: StepOrder) -> str:
        """The way in which this order is computed, in words for people."""
        if self._cpu is None or self._is_split:
            return "PyTorch, eager"
        return "C program" if self._cpu.is_recorded(order) else "C kernels, one by one"

    def compute(self, order: StepOrder, masks: StepMasks) -> StepResult:
        """Execute an order; see the module's docstring for the order of things."""
        if self._ranks is not None:
            return self._compute_together(order, masks, self._ranks)
        try:
            with torch.inference_mode():
                self._enter(order)
                if not order.num_rows:  # beams coming back compute their next tokens once all are here
                    return StepResult([], [], {})
                try:
                    return self._compute(order, masks)
                except torch.OutOfMemoryError as error:
                    return self._smaller.run(order, masks, error)
        except torch.AcceleratorError as error:
            raise DeviceLost(f"the device failed in step {order.step}") from error

    def _enter(self, order: StepOrder) -> None:
        """Bring blocks and the rows' state up to date."""
        self.store.transfer(order.moves())
        self._rows.apply(order)
        self._book.enter(order)
        if self._head is not None:
            self._head.mirror(order)

    def _compute_together(self, order: StepOrder, masks: StepMasks, ranks: OtherRanks) -> StepResult:
        """Execute an order as rank 0 of several; whatever ends it halfway ends them all."""
        try:
            with torch.inference_mode():
                self._enter(order)
                ranks.send(ORDER, to_bytes(self._with_last_tokens(order)))
                result = self._compute(order, masks) if order.num_rows else StepResult([], [], {})
            ranks.check()
        except BaseException as error:  # Ctrl-C, too: the others wait for what does not come
            ranks.check()
            ranks.close(f"step {order.step} was not finished: {type(error).__name__}")
            if not isinstance(error, Exception):
                raise
            raise DeviceLost(f"the device failed in step {order.step}") from error
        return result

    def _with_last_tokens(self, order: StepOrder) -> StepOrder:
        """The order for a device that has drawn no ids: it says the last tokens of all rows that decode."""
        is_decode = order.kinds == DECODE
        rows, starts = order.rows[is_decode], order.starts[is_decode]
        known = np.array([rows, self._rows.last_token[rows], starts], dtype=np.int64)
        return order._replace(known=known, flags=order.flags & ~REPEATS)

    def compute_part(self, order: StepOrder) -> None:
        """Execute an order as a rank other than 0: compute the parts of this rank, and sample nothing."""
        with torch.inference_mode():
            self._enter(order)
            if order.num_rows:
                hidden_TD, last_rows, _ = self._hidden(order)
                self._sampler.follow(order, last_rows, hidden_TD)

    def _compute(self, order: StepOrder, masks: StepMasks) -> StepResult:
        hidden_TD, last_rows, inputs = self._hidden(order)
        pooled = None
        if order.flags & READS_PROMPTS:  # while nothing is drawn: without memory, the step is run again
            pooled = pool_hidden(
                order, self._book, last_rows, hidden_TD[:, : self.model.config.hidden_size]
            ).by_number()
        result = self._sampler.sample(order, last_rows, hidden_TD, masks)
        if self._head is not None:
            self._head.follow(order, inputs.states(order.num_tokens), result.ids)
        for row, ids in zip(order.rows.tolist(), result.ids, strict=True):
            if ids:
                self._rows.last_token[row] = ids[-1]
                entry = self._book[row]
                if entry.facts.num_tokens:
                    entry.tokens.extend(id_ for id_ in ids if id_ >= 0)
        return result if pooled is None else result._replace(pooled=pooled)

    def _hidden(self, order: StepOrder) -> tuple[torch.Tensor, list[int], LayerInputs]:
        """Hidden states of the needed tokens, the place of each row's last one, and the inputs of layers."""
        on_select = None
        if self._adapters is not None:
            self._adapters.begin(self._slots(order))
            on_select = self._adapters.select
        if self._cpu is not None and not self._is_split:
            return *self._cpu.run(order, on_select), self._cpu.layer_inputs
        paged = self._paged(order, self._backend)
        step: StepContext = paged
        if self._is_split:
            backends = self._decode_backend, self._backend
            step = split_step(order, paged.positions, self._context, backends)
        places, last_rows = needed_tokens(order, paged.last_places)
        step.logit_indices = None if places is None else torch.tensor(places, device=self.store.device)
        step.on_select, step.layer_inputs = on_select, (inputs := LayerInputs(self._captured_layers))
        return self.model(paged.tokens_T, step), last_rows, inputs

    def _slots(self, order: StepOrder) -> torch.Tensor | None:
        """The adapter slot of each token; None: no row has one."""
        if not order.adapters.any():
            return None
        return torch.from_numpy(order.adapters.repeat(order.counts).astype(np.int32)).to(self.store.device)

    def _paged(self, order: StepOrder, backend: str) -> PagedStep:
        """The step of some rows in plain PyTorch."""
        return PagedStep(order, self._rows, self.store, use_reference=backend == REFERENCE)

    def _context(self, order: StepOrder, backend: str) -> StepContext:
        """The step of some of an order's rows, with one backend for all of them."""
        if backend == "c":
            assert self._cpu is not None
            return self._cpu.context(order)
        return self._paged(order, backend)


class TorchHead(TorchDevice):
    """The device half of a head that drafts: its orders are turns of rows that decode (head_model.py)."""

    can_embed = False

    def __init__(self, model: HeadModel, store: KVStore, shape: StateShape, **choices: Any) -> None:
        """`choices`: as in `TorchDevice`; no turn is recorded."""
        super().__init__(model, store, shape, **(choices | {"record_cpu_step": False}))
        self.captured_layers, self._head_model = model.captured_layers, model

    def mirror(self, order: StepOrder) -> None:
        """Move the blocks that an order of the model moves, and keep its tables."""
        self.store.transfer(order.moves())
        self._rows.apply(order)

    def follow(self, order: StepOrder, states_TF: torch.Tensor, ids: list[tuple[int, ...]]) -> None:
        """See what a step of the model has computed, and the ids that it has kept."""
        rows = order.rows.repeat(order.num_sampled)
        numbers = following_tokens(order), kept_ids(order, ids), drawn_places(order), rows
        following_T, ids_S, places_S, rows_S = (torch.from_numpy(x).to(self.store.device) for x in numbers)
        step = self._context(order, self._backend)
        self._head_model.follow(with_drawn(following_T, ids_S), states_TF, step, places_S, rows_S)

    def _hidden(self, order: StepOrder) -> tuple[torch.Tensor, list[int], LayerInputs]:
        """A turn: each row is computed one position before its token."""
        assert (order.kinds == DECODE).all(), "a head computes nothing but turns; it follows the rest"
        step = self._context(order._replace(starts=order.starts - 1), self._decode_backend)
        step.rows = torch.from_numpy(order.rows).to(self.store.device)
        tokens_T = torch.from_numpy(self._rows.last_token[order.rows]).to(self.store.device)
        return self.model(tokens_T, step), list(range(order.num_rows)), LayerInputs(())
