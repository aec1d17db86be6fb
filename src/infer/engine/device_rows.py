"""State that lives on the device: a row per sequence, for as long as the sequence runs.

    row      last token   position   block table            how it is sampled
    0        a6           6          [ 4, 9 ]               temperature, top-k, top-p, min-p, seed
    1        b18          18         [ 7, 2, 5 ]            ...

A decode step names its rows and finds everything else here; when it has sampled, it writes the new token
and position itself. The host therefore sends *differences*: a new block every `block_size` tokens, a
whole row when a sequence arrives, and nothing at all for a step that goes on as before.

The host keeps a mirror of what it has sent. `next_token[row]` is the position whose token the row holds,
as far as the host knows; a row that holds another (or none) gets its token sent before it decodes.

Shapes:  R rows of state, B blocks of the longest table, K changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from infer.engine.sequence import Sequence as TokenSequence
from infer.kernels.sample_rows import SampleState
from infer.kernels.step_state import apply_table_diffs

NO_POSITION = -1


class DeviceRows:
    """The rows of every known sequence, on the device and mirrored on the host."""

    def __init__(self, max_rows: int, max_blocks: int, device: torch.device) -> None:
        self.device = device
        self.tables_RB = torch.zeros((max_rows, max_blocks), dtype=torch.int32, device=device)
        self.last_token_R = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.position_R = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.sampling = SampleState.empty(max_rows, device)
        self.next_token = [NO_POSITION] * max_rows
        self.by_seq: dict[int, int] = {}
        self.on_host: set[int] = set()  # rows whose tokens are not, or not all, sampled on the device
        self._free = list(range(max_rows - 1, -1, -1))
        self._blocks: list[list[int]] = [[] for _ in range(max_rows)]
        self._host_sampling = SampleState.empty(max_rows, "cpu")
        self._diffs: list[tuple[int, int, int]] = []
        self._tokens: dict[int, tuple[int, int]] = {}  # row -> (token, position) to be sent
        self._entered: list[int] = []

    def enter(self, seq: TokenSequence, seed: int) -> int:
        """Give a sequence a row and note how it is sampled."""
        row = self.by_seq[seq.seq_id] = self._free.pop()
        self._blocks[row] = []
        self.next_token[row] = NO_POSITION
        params = seq.group.request.params
        if seq.group.samples_on_host or params.num_sequences > 1 or params.prompt_logprobs is not None:
            self.on_host.add(row)
        self._host_sampling.set_row(
            row,
            temperature=0.0 if params.is_greedy else params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=seed,
        )
        self._entered.append(row)
        return row

    def forget(self, seq_id: int) -> None:
        """Give back the row of a sequence that was preempted or has finished; unknown ones are fine."""
        row = self.by_seq.pop(seq_id, None)
        if row is not None:
            self._free.append(row)
            self.on_host.discard(row)
            self._tokens.pop(row, None)
            if self._diffs:  # of a step that was never launched
                self._diffs = [diff for diff in self._diffs if diff[0] != row]
            if row in self._entered:
                self._entered.remove(row)

    def sync_table(self, row: int, blocks: Sequence[int], first: int) -> None:
        """Note the blocks from place `first` on that differ from what the device has."""
        known = self._blocks[row]
        first = min(first, len(known))
        for index in range(first, len(blocks)):
            block = blocks[index]
            if index < len(known):
                if known[index] == block:
                    continue
                known[index] = block
            else:
                known.append(block)
            self._diffs.append((row, index, block))

    def send_token(self, row: int, token: int, position: int) -> None:
        """Note that a row decodes `token` at `position`, which the device does not know."""
        self._tokens[row] = (token, position)

    def flush(self) -> None:
        """Send all that was noted, in the order of the stream: after every step launched so far."""
        if self._entered:
            rows = self._on_device(np.array(self._entered, dtype=np.int64))
            index = torch.tensor(self._entered)
            host, state = self._host_sampling, self.sampling
            for name in ("temperature_R", "top_k_R", "top_p_R", "min_p_R", "seed_R"):
                values = getattr(host, name)[index]
                getattr(state, name).index_copy_(0, rows, self._sent(values))
            self._entered = []
        if self._diffs:
            apply_table_diffs(self.tables_RB, self._on_device(np.array(self._diffs, dtype=np.int32)))
            self._diffs = []
        if self._tokens:
            packed = self._on_device(
                np.array([(row, *pair) for row, pair in self._tokens.items()], dtype=np.int64).T.copy()
            )
            self.last_token_R.index_copy_(0, packed[0], packed[1])
            self.position_R.index_copy_(0, packed[0], packed[2])
            for row, (_, position) in self._tokens.items():
                self.next_token[row] = position
            self._tokens = {}

    def _on_device(self, values: np.ndarray) -> torch.Tensor:
        return self._sent(torch.from_numpy(values))

    def _sent(self, values: torch.Tensor) -> torch.Tensor:
        return send(values, self.device)


def send(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device; the host does not wait for it, and may forget `values` at once."""
    if device.type != "cuda":
        return values
    return values.pin_memory().to(device, non_blocking=True)  # the allocator keeps it until it has arrived
