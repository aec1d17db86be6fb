"""The state of running sequences on the device: one row for each.

    row      last token   position   block table            how it is sampled
    0        a6           6          [ 4, 9 ]               temperature, top-k, ..., ids used so far
    1        b18          18         [ 7, 2, 5 ]            ...

A decode step names its rows and finds everything else here; after sampling it writes the new token and
position itself. So orders bring only *differences*: a new block every `block_size` tokens, a whole row when
it begins, and nothing for a step that simply continues.

Shapes:  R rows of state, B blocks of the longest table, K tables, or changes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from infer.execution.gpu.masks import DeviceMasks
from infer.execution.gpu.sending import send, send_into, send_together
from infer.execution.order import NONE, PADDING, StepOrder
from infer.execution.row_book import RowBook, RowEntry
from infer.kernels.elementwise.step_state import advance_rows, apply_table_diffs
from infer.kernels.sampling.sample_line import NUM_FIELDS
from infer.kernels.sampling.sample_state import SampleState, count_uses, enter_rows, pack_biases


class DeviceRows:
    """The rows on the device, brought up to date before each step."""

    def __init__(
        self, max_rows: int, max_blocks: int, vocab_size: int, device: torch.device, num_tables: int = 1,
        num_lanes: int = 0, tables_KRB: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """`num_lanes`: rows of sampling state after the sequences' rows (lanes.py).

        `tables_KRB`: block tables that a model shares with its drafter.
        """
        self.device = device
        if tables_KRB is None:
            tables_KRB = torch.zeros((num_tables, max_rows, max_blocks), dtype=torch.int32, device=device)
        self.tables_KRB = tables_KRB
        self._all_tables = self.tables_KRB.flatten(0, 1)  # rows of all tables, numbered as in an order
        self.last_token_R = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.position_R = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.previous_R = torch.zeros(max_rows, dtype=torch.int64, device=device)  # the token before the last
        self.first_lane = max_rows
        self.sampling = SampleState.empty(max_rows + num_lanes, device, vocab_size)
        self.masks = DeviceMasks(self.sampling)
        self.book = RowBook()
        self.num_logprobs = np.full(max_rows, NONE, dtype=np.int64)  # alternatives asked for
        self.has_uses, self.has_biases = np.zeros((2, max_rows), dtype=bool)

    def apply(self, order: StepOrder) -> None:
        """Send the changes that an order brings; on the stream they come after every step so far.

        If memory runs out, the order is applied again, and overwrites what has arrived.
        """
        parcels = list[tuple[np.ndarray, Callable[[torch.Tensor], None]]]()
        if order.has_begun:
            for entry in self.book.enter(order):
                self._begin(entry)
            parcels.append((order.lines, lambda entries: enter_rows(self.sampling, entries)))
        if len(order.table_changes):
            parcels.append((order.table_changes, self._put_blocks))
        if order.known.size:
            parcels.append((padded_tokens(order.known), self._put_tokens))
        sent = send_together([numbers for numbers, _ in parcels], self.device) if parcels else []
        for (_, unpack), tensor in zip(parcels, sent, strict=True):
            unpack(tensor)

    def apply_tables(self, order: StepOrder) -> None:
        """Send only the new blocks of tables, for the rows of the last step, which go on by one token."""
        if len(order.table_changes):
            self._put_blocks(send(torch.from_numpy(order.table_changes), self.device))

    def send_padding(self) -> None:
        """Send changes without effect, so that the kernels that unpack changes are compiled and loaded."""
        entries_KF = torch.full((1, NUM_FIELDS), PADDING, dtype=torch.int64)
        enter_rows(self.sampling, send(entries_KF, self.device))
        self._put_blocks(send(torch.full((1, 3), PADDING, dtype=torch.int32), self.device))
        self._put_tokens(send(torch.full((3, 2), PADDING, dtype=torch.int64), self.device))
        self.masks.send(np.empty(0, dtype=np.int64))

    def _begin(self, entry: RowEntry) -> None:
        """Store the facts of a new row that are not in its line."""
        row, facts = entry.line.row, entry.facts
        self.masks.forget(row)
        self.num_logprobs[row] = facts.num_logprobs
        self.has_uses[row], self.has_biases[row] = bool(entry.line.has_uses), bool(entry.biases)
        if entry.line.has_uses:
            uses_V, tokens = self.sampling.uses_RV[row], np.frombuffer(entry.tokens, dtype=np.uintc)
            prompt, output = tokens[: facts.num_prompt], tokens[facts.num_prompt :]
            send_into(uses_V, torch.from_numpy(count_uses(len(uses_V), prompt, output, entry.banned)))
        if entry.biases:
            send_into(self.sampling.biases_R2E[row], torch.from_numpy(pack_biases(entry.biases)))

    def _put_blocks(self, diffs_K3: torch.Tensor) -> None:
        apply_table_diffs(self._all_tables, diffs_K3)

    def _put_tokens(self, tokens_3K: torch.Tensor) -> None:
        rows_K, tokens_K, positions_K = tokens_3K.unbind()
        advance_rows(rows_K, tokens_K, positions_K, self.last_token_R, self.position_R)


def padded_tokens(known_3U: np.ndarray) -> np.ndarray:
    """Pad rows, tokens and positions to an even number: each line then begins at a multiple of 16 bytes."""
    num_tokens = known_3U.shape[1]
    padded_3K = np.full((3, num_tokens + num_tokens % 2), PADDING, dtype=np.int64)
    padded_3K[:, :num_tokens] = known_3U
    return padded_3K
