"""The steps of a model on a CPU that has the C kernels.

A step's inputs are five small tables of integers at fixed addresses, overwritten for each step:

    rows        A[5:6]   B[17:18]   C[0:4]
    tokens      a5       b17        c0 c1 c2 c3
    positions   5        17         0  1  2  3
    slots       the slots that each row's block tables give these positions: a line for each table
    items       (0, 1, row of A, 5)   (1, 1, row of B, 17)   (2, 4, row of C, 0)        csrc/attention.c

If few rows have long contexts, each segment of a context is a separate item: with three kv heads and no
segments, two threads would be busy for only three quarters of the time, and more threads for less.

Because the addresses are fixed, the operations of a whole step can be recorded once and replayed in one call
(kernels/cpu/program.py), for any number of rows up to the batch size or the length of a short prompt. Decode
steps run this way, and so does the first step of a short prompt. The head for few rows is a separate program.
Steps of long prompts run the model's Python code: their operations take long enough to hide its cost, and the
last layer computes only the needed tokens (models/model.py).

Both ways give bitwise equal results, because each operation works row by row.

Shapes:  T tokens, I items, K tables, R rows of each, B blocks of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from infer.cache.kv_store import KVStore
from infer.execution.layout import HostRows, lay_out, needed_tokens
from infer.execution.order import DECODE, StepOrder
from infer.kernels.cpu import operations
from infer.kernels.cpu.library import Library, library
from infer.kernels.cpu.program import Program, ProgramRecorder
from infer.kernels.runtime.dispatch import device_kind
from infer.layers.attention import AttentionLayer, LayerInputs, StepContext
from infer.models.model import Network

MAX_PARTS = 64  # most items of a step with split contexts
LOGIT_ROWS = 8  # most rows of the recorded head; with more rows, Python's overhead does not matter
RECORDED_ROWS = 256  # tokens of a recorded step; above, computing unneeded tokens costs more than Python


class CpuInputs:
    """The tables of one step, with room for `capacity` tokens, at fixed addresses.

    Long contexts of decoding rows are split into segments if there are at most `max_split` rows.
    """

    def __init__(self, capacity: int, num_tables: int, max_split: int = 0) -> None:
        self.capacity, self._max_split = capacity, max_split
        self.tokens, self.positions = np.zeros((2, capacity), dtype=np.int64)
        self.slots = np.zeros((num_tables, capacity), dtype=np.int64)
        self.items = np.zeros((max(capacity, MAX_PARTS), 6), dtype=np.int64)
        self._places = np.arange(capacity)
        self.num_rows = self.num_items = 0

    def fill(self, order: StepOrder, rows: HostRows) -> list[int]:
        """Write the tables of an order; return the index of each row's last token."""
        layout = lay_out(order, rows)
        self.num_rows = num_rows = len(layout.tokens)
        self.tokens[:num_rows] = layout.tokens
        self.positions[:num_rows] = layout.positions
        self.slots[:, :num_rows] = layout.slots
        if (order.kinds == DECODE).all():
            items = self.items[:num_rows]
            items[:, 0], items[:, 1] = self._places[:num_rows], 1
            items[:, 2], items[:, 3], items[:, 4] = order.rows, order.starts, -1
            self.num_items = num_rows
            if num_rows <= self._max_split:
                self._split()
            return list(range(num_rows))
        num_items = -(-order.counts // operations.ITEM_TOKENS)  # items that attention makes of each row
        last_items = num_items.cumsum()
        self.num_items = int(last_items[-1])
        offsets = operations.ITEM_TOKENS * (
            np.arange(self.num_items) - (last_items - num_items).repeat(num_items)
        )
        items = self.items[: self.num_items]
        items[:, 0] = (layout.ends - order.counts).repeat(num_items) + offsets
        items[:, 1] = np.minimum(order.counts.repeat(num_items) - offsets, operations.ITEM_TOKENS)
        items[:, 2] = order.rows.repeat(num_items)
        items[:, 3] = order.starts.repeat(num_items) + offsets
        items[:, 4] = -1
        last_places: list[int] = (layout.ends - 1).tolist()
        return last_places

    def _split(self) -> None:
        items = self.items[: self.num_items]
        num_segments = items[:, 3] // operations.SEGMENT + 1
        num_parts = int(num_segments.sum())
        if not self.num_items < num_parts <= MAX_PARTS:
            return
        self.items[:num_parts] = items.repeat(num_segments, axis=0)
        firsts = num_segments.cumsum() - num_segments
        self.items[:num_parts, 5] = np.arange(num_parts)
        self.items[:num_parts, 4] = np.arange(num_parts) - firsts.repeat(num_segments)
        self.num_items = num_parts


class CpuStep(StepContext):
    """A `StepContext` whose attention reads the paged store in place."""

    def __init__(
        self,
        library: Library,
        store: KVStore,
        inputs: CpuInputs,
        rows: HostRows,
        num_rows: int,
        parts: torch.Tensor | None = None,
    ) -> None:
        self._library, self._store, self._block_size = library, store, rows.block_size
        self._parts = parts
        self.positions = torch.from_numpy(inputs.positions)[:num_rows]
        self.tokens_T = torch.from_numpy(inputs.tokens)[:num_rows]
        self._slots_KT = torch.from_numpy(inputs.slots)[:, :num_rows]
        self._items_I6 = torch.from_numpy(inputs.items)[: inputs.num_items]
        self._tables_KRB = torch.from_numpy(rows.tables)

    def attend(
        self, layer: AttentionLayer, q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGH: torch.Tensor
    ) -> torch.Tensor:
        """Cache the keys and values of this step, then attend; see layers/attention.py."""
        store, (number, scale, window, softcap, sinks_N, is_shared) = self._store, layer
        keys, values, slots_T, _, scales, fixed = store.slots(number, self._slots_KT)
        if not is_shared:
            operations.write_cache(self._library, k_TGH, v_TGH, keys, values, slots_T, scales, fixed)
        return operations.attend(
            self._library,
            q_TNH,
            keys,
            values,
            self._tables_KRB[store.tables[number]],
            self._items_I6,
            block_size=self._block_size,
            scale=scale,
            window=window,
            parts=self._parts,
            scales=scales,
            softcap=softcap,
            sinks_N=sinks_N,
        )


class CpuSteps:
    """Runs the steps of one model: short steps as a recorded program, longer ones with Python calls."""

    def __init__(
        self,
        library: Library,
        model: Network,
        store: KVStore,
        rows: HostRows,
        max_batch_size: int,
        *,
        record: bool,
        captured_layers: Sequence[int],
    ) -> None:
        """`captured_layers`: layers whose inputs are kept (`layer_inputs`) for a draft head."""
        self._library, self._model, self._store, self._rows = library, model, store, rows
        library.set_threads(torch.get_num_threads())  # the number may have changed since loading
        max_rows = max(max_batch_size, RECORDED_ROWS)
        N, (_, G, H) = model.config.num_heads, store.keys[0].shape
        can_split = operations.can_split(N, G, H) and not model.config.layer_specs  # parts need equal heads
        max_split = 4 * library.num_threads // G if can_split else 0
        self._parts = torch.zeros(operations.parts_shape(MAX_PARTS, N, G, H)) if max_split else None
        self._inputs = CpuInputs(max_rows, len(rows.tables), max_split)
        self._captured_layers = captured_layers
        self.layer_inputs = LayerInputs(captured_layers)  # inputs of layers in the last step
        self._recorded_inputs = LayerInputs(captured_layers)  # inputs in recorded steps, at fixed addresses
        self._program: Program | None = None
        self._head: Program | None = None
        self._hidden_TD = self._logits_SV = torch.empty(0)
        if record:
            self._record(max_rows)

    def run(
        self, order: StepOrder, on_select: Callable[[torch.Tensor], None] | None = None
    ) -> tuple[torch.Tensor, list[int]]:
        """Return the hidden states that an order needs, and the index of each row's last token in them.

        The next recorded step overwrites the states of a recorded step.
        """
        num_rows = order.num_tokens
        inputs = (
            self._inputs if num_rows <= self._inputs.capacity else CpuInputs(num_rows, len(self._rows.tables))
        )
        last_rows = inputs.fill(order, self._rows)
        if self._program is not None and self.is_recorded(order):
            self._program.run(num_rows, inputs.num_items)
            self.layer_inputs = self._recorded_inputs
            return self._hidden_TD[:num_rows], last_rows
        step = CpuStep(self._library, self._store, inputs, self._rows, num_rows, self._parts)
        step.on_select = on_select
        step.layer_inputs = self.layer_inputs = LayerInputs(self._captured_layers)
        places, last_rows = needed_tokens(order, last_rows)
        step.logit_indices = None if places is None else torch.tensor(places)
        return self._model(step.tokens_T, step), last_rows

    def is_recorded(self, order: StepOrder) -> bool:
        """True if this step runs as a recorded program, which has no products of adapters."""
        fits = self._program is not None and order.num_tokens <= self._inputs.capacity
        return fits and not order.adapters.any()

    def logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Return the logits of hidden states; the next recorded step overwrites those in its memory."""
        num_rows = hidden_SD.shape[0]
        is_step = hidden_SD.data_ptr() == self._hidden_TD.data_ptr()
        if self._head is None or num_rows > LOGIT_ROWS or not is_step:
            return self._model.logits(hidden_SD)
        self._head.run(num_rows, 0)
        return self._logits_SV[:num_rows]

    def context(self, order: StepOrder) -> CpuStep:
        """Return the `StepContext` of an order or a part of an order; it is not recorded."""
        inputs = CpuInputs(order.num_tokens, len(self._rows.tables))
        inputs.fill(order, self._rows)
        return CpuStep(self._library, self._store, inputs, self._rows, order.num_tokens)

    @torch.inference_mode()
    def _record(self, max_rows: int) -> None:
        self._inputs.num_items = max_rows
        step = CpuStep(self._library, self._store, self._inputs, self._rows, max_rows, self._parts)
        step.layer_inputs = self._recorded_inputs
        with ProgramRecorder(self._library) as recording:
            self._hidden_TD = self._model(step.tokens_T, step)
        self._program = recording.program
        if self._program is not None:
            with ProgramRecorder(self._library) as recording:
                self._logits_SV = self._model.logits(self._hidden_TD[:LOGIT_ROWS])
            self._head = recording.program


def attention_library(device: torch.device, dtype: torch.dtype, head_dim: int) -> Library | None:
    """Return the C kernels if attention.c can read this cache in place; None: it cannot, or is not built.

    It can on a CPU in float32, for heads of up to MAX_HEAD.
    """
    can_read = device_kind(device) == "cpu" and dtype is torch.float32 and head_dim <= operations.MAX_HEAD
    return library() if can_read else None
