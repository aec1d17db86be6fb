"""State that lives on the device: a row per running sequence, for as long as it runs.

    row      last token   position   block table            how it is sampled
    0        a6           6          [ 4, 9 ]               temperature, top-k, ..., ids used so far
    1        b18          18         [ 7, 2, 5 ]            ...

The rows are those of the batch state (scheduling/batch_state.py), which has the tables on the host. A decode
step names its rows and finds everything else here; when it has sampled, it writes the new token and position
itself. The host therefore sends *differences*: a new block every `block_size` tokens, a whole row when a
sequence arrives, and nothing at all for a step that goes on as before.

What the host remembers of each row is which sequence it was entered for, and whether the device sampled the
newest token itself; a row that did not gets its token sent before it decodes. Which blocks a table has got
since the last step is said by the plan.

Shapes:  R rows of state, B blocks of the longest table, K changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from infer.execution.gpu.masks import DeviceMasks
from infer.execution.gpu.sending import send, send_into, send_together
from infer.kernels.elementwise.step_state import advance_rows, apply_table_diffs
from infer.kernels.runtime.dispatch import next_power_of_two
from infer.kernels.sampling.sample_state import (
    NUM_FIELDS,
    SampleLine,
    SampleState,
    count_uses,
    enter_rows,
    pack_biases,
)
from infer.sampling.params import sequence_seed
from infer.scheduling.batch_state import BatchState
from infer.scheduling.beam import num_logprobs
from infer.scheduling.plan import StepPlan
from infer.scheduling.sequence import Sequence as TokenSequence

PADDING = -1  # in place of a row
NOBODY = -1  # in place of a tenancy: the row is entered anew
NO_LOGPROBS = -1


class DeviceRows:
    """The rows of the running sequences on the device, brought up to date before each step."""

    def __init__(self, state: BatchState, max_blocks: int, vocab_size: int, device: torch.device) -> None:
        num_tables, max_rows, _ = state.tables.shape
        self.device = device
        self.tables_KRB = torch.zeros((num_tables, max_rows, max_blocks), dtype=torch.int32, device=device)
        self._all_tables = self.tables_KRB.flatten(0, 1)  # their rows counted through, as a plan says them
        self.last_token_R = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.position_R = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.sampling = SampleState.empty(max_rows, device, vocab_size)
        self.masks = DeviceMasks(self.sampling)
        self.is_ragged = np.zeros(max_rows, dtype=bool)  # rows that not every size of a step can serve
        self.num_logprobs = np.full(max_rows, NO_LOGPROBS, dtype=np.int64)  # alternatives asked for
        self._has_uses = np.zeros(max_rows, dtype=bool)  # rows whose tokens are counted on the device
        self.has_newest = np.zeros(max_rows, dtype=bool)  # rows whose newest token the device has sampled
        self._state = state
        self._tenancy = np.zeros(max_rows, dtype=np.int64)  # of the sequence that each row was entered for

    def sync(self, plan: StepPlan) -> None:
        """Send what the rows of a plan lack, in the order of the stream: after every step launched so far."""
        rows, parcels = plan.chunks.rows, list[tuple[np.ndarray, Callable[[torch.Tensor], None]]]()
        new = (self._tenancy[rows] != self._state.tenancy[rows]).nonzero()[0].tolist()
        arrived = [plan.chunks.sequences[number] for number in new]
        if arrived:
            packed = bytearray().join([self._enter(seq) for seq in arrived])
            entries_KF = np.frombuffer(packed, dtype=np.int64).reshape(-1, NUM_FIELDS)
            parcels.append((entries_KF, lambda entries: enter_rows(self.sampling, entries)))
        if arrived or plan.table_changes:
            diffs = _packed_diffs(plan.table_changes, [self._table(seq) for seq in arrived])
            parcels.append((diffs, self._put_blocks))
        tokens_3K = self._unknown_tokens(plan)
        if tokens_3K is not None:
            parcels.append((tokens_3K, self._put_tokens))
        try:
            sent = send_together([array for array, _ in parcels], self.device) if parcels else []
            for (_, unpack), tensor in zip(parcels, sent, strict=True):
                unpack(tensor)
        except torch.OutOfMemoryError:  # what came by itself is overwritten when it is sent again
            self.forget(np.array([seq.row for seq in arrived], dtype=np.int64))
            raise

    def forget(self, rows: np.ndarray) -> None:
        """Let these rows be entered anew."""
        self._tenancy[rows] = NOBODY

    def sync_tables(self, plan: StepPlan) -> None:
        """Send the blocks alone that tables have got: the rows are those of the last step, a token on."""
        self._put_blocks(send(torch.from_numpy(_packed_diffs(plan.table_changes, ())), self.device))

    def send_padding(self) -> None:
        """Send what changes nothing: the kernels that unpack it are then compiled and loaded."""
        entries_KF = torch.full((1, NUM_FIELDS), PADDING, dtype=torch.int64)
        enter_rows(self.sampling, send(entries_KF, self.device))
        self._put_blocks(send(torch.full((1, 3), PADDING, dtype=torch.int32), self.device))
        self._put_tokens(send(torch.full((3, 2), PADDING, dtype=torch.int64), self.device))
        self.masks.send(np.empty(0, dtype=np.int64))

    def sampled_on_host(self, rows: np.ndarray) -> None:
        """Note that the device does not know the newest tokens of these rows; its counts are made anew."""
        self.has_newest[rows] = False
        self.forget(rows[self._has_uses[rows]])

    def _enter(self, seq: TokenSequence) -> bytes:
        """Take a sequence's row for it; returns how it is sampled."""
        row, group, params = seq.row, seq.group, seq.group.request.params
        self._tenancy[row] = self._state.tenancy[row]
        self.has_newest[row] = False
        self.masks.forget(row)
        reads_all = params.prompt_logprobs is not None or group.request.pooling is not None
        self.is_ragged[row] = seq.is_beam or params.num_sequences > 1 or reads_all
        count, banned = num_logprobs(group), group.stop_ids if params.min_tokens else ()
        self.num_logprobs[row] = NO_LOGPROBS if count is None else count
        self._has_uses[row] = has_uses = params.has_penalties or bool(banned)
        if has_uses:
            uses_V, (prompt, output) = self.sampling.uses_RV[row], _split(seq)
            send_into(uses_V, torch.from_numpy(count_uses(len(uses_V), prompt, output, banned)))
        if params.logit_bias:
            send_into(self.sampling.biases_R2E[row], torch.from_numpy(pack_biases(dict(params.logit_bias))))
        return SampleLine(
            row,
            has_uses=int(has_uses),
            top_k=params.top_k,
            seed=sequence_seed(group.seed, seq.index),
            ban_end=seq.num_prompt + params.min_tokens,
            num_biased=len(params.logit_bias),
            temperature=0.0 if params.is_greedy else params.temperature,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
        ).pack()

    def _table(self, seq: TokenSequence) -> np.ndarray:
        """The whole tables of a sequence: a line of (row, index, block) for each block."""
        row, num_blocks = seq.row, seq.num_reserved // self._state.block_size
        num_tables, num_rows, _ = self._state.tables.shape
        lines_KB3 = np.empty((num_tables, num_blocks, 3), dtype=np.int32)
        lines_KB3[:, :, 0] = row + num_rows * np.arange(num_tables)[:, None]
        lines_KB3[:, :, 1] = np.arange(num_blocks)
        lines_KB3[:, :, 2] = self._state.tables[:, row, :num_blocks]
        return lines_KB3.reshape(-1, 3)

    def _unknown_tokens(self, plan: StepPlan) -> np.ndarray | None:
        """Rows that decode, their tokens and their positions, where the device has not sampled them itself.

        Padded to an even number, so that each line begins at a multiple of 16 bytes.
        """
        chunks = plan.chunks
        unknown = ((chunks.stops - chunks.starts == 1) & ~self.has_newest[chunks.rows]).nonzero()[0]
        if not len(unknown):
            return None
        tokens_3K = np.zeros((3, len(unknown) + len(unknown) % 2), dtype=np.int64)
        tokens_3K[0] = PADDING
        tokens_3K[0, : len(unknown)] = chunks.rows[unknown]
        starts = chunks.starts[unknown]
        tokens_3K[1, : len(unknown)] = [
            chunks.sequences[number].tokens[start]
            for number, start in zip(unknown.tolist(), starts.tolist(), strict=True)
        ]
        tokens_3K[2, : len(unknown)] = starts
        return tokens_3K

    def _put_blocks(self, diffs_K3: torch.Tensor) -> None:
        apply_table_diffs(self._all_tables, diffs_K3)

    def _put_tokens(self, tokens_3K: torch.Tensor) -> None:
        rows_K, tokens_K, positions_K = tokens_3K.unbind()
        advance_rows(rows_K, tokens_K, positions_K, self.last_token_R, self.position_R)


def _split(seq: TokenSequence) -> tuple[np.ndarray, np.ndarray]:
    """The prompt and the output so far, as ids."""
    tokens = np.frombuffer(seq.tokens, dtype=np.uintc)
    return tokens[: seq.num_prompt], tokens[seq.num_prompt :]


def _packed_diffs(changes: list[int], tables: Sequence[np.ndarray]) -> np.ndarray:
    """A line of (row, index, block) for each block, padded to a power of two: few numbers of lines in all.

    For every other number of programs a launch is prepared anew (kernels/runtime/launch.py).
    """
    num_lines = len(changes) // 3 + sum(map(len, tables))
    padding = [PADDING] * 3 * (next_power_of_two(num_lines) - num_lines)
    diffs_K3 = np.array(changes + padding, dtype=np.int32).reshape(-1, 3)
    return np.concatenate([diffs_K3, *tables]) if tables else diffs_K3
