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

from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch

from infer.kernels.elementwise.step_state import (
    NUM_FIELDS,
    advance_rows,
    apply_table_diffs,
    enter_rows,
    sampling_entry,
)
from infer.kernels.runtime.dispatch import next_power_of_two
from infer.kernels.sampling.sample_rows import SampleState
from infer.scheduling.sequence import Sequence as TokenSequence

NO_POSITION = -1
ALIGNMENT = 16  # bytes
LONG_RUN = 16  # blocks, from which on numpy numbers them faster than Python does


class DeviceRows:
    """The rows of every known sequence, on the device and mirrored on the host."""

    def __init__(self, max_rows: int, max_blocks: int, device: torch.device) -> None:
        self.device = device
        self.tables_RB = torch.zeros((max_rows, max_blocks), dtype=torch.int32, device=device)
        self.last_token_R = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.position_R = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.sampling = SampleState.empty(max_rows, device)
        self.by_seq: dict[int, int] = {}
        self.on_host: set[int] = set()  # rows whose tokens are not, or not all, sampled on the device
        self._next_token = [NO_POSITION] * max_rows
        self._decoding: list[int] = []  # the rows that have gone on,
        self._num_ahead = 0  # so many tokens each, since `_next_token` was written
        self._free = list(range(max_rows - 1, -1, -1))
        self._blocks: list[list[int]] = [[] for _ in range(max_rows)]
        self._diffs: list[int] = []  # in threes: a row, a place in its table, the block that is there now
        self._runs: list[tuple[int, int, Sequence[int]]] = []  # the same of many blocks from a place on
        self._tokens: dict[int, tuple[int, int]] = {}  # row -> (token, position) to be sent
        self._entered: dict[int, bytes] = {}  # row -> how it is sampled, to be sent

    @property
    def next_token(self) -> list[int]:
        """Of each row the position whose token it holds, as far as the host knows."""
        if self._num_ahead:
            self._settle()
        return self._next_token

    def decode(self, rows: list[int]) -> None:
        """These rows go on by a token; step after step the same ones do, and are counted together."""
        if rows is not self._decoding:
            self._settle()
            self._decoding = rows
        self._num_ahead += 1

    def _settle(self) -> None:
        for row in self._decoding:
            self._next_token[row] += self._num_ahead
        self._decoding, self._num_ahead = [], 0

    def is_decoding(self, row: int, position: int) -> bool:
        """Whether a row of the last `decode` holds the token at this position."""
        return self._next_token[row] + self._num_ahead == position

    def enter(self, seq: TokenSequence, seed: int) -> int:
        """Give a sequence a row and note how it is sampled."""
        row = self.by_seq[seq.seq_id] = self._free.pop()
        self._blocks[row] = []
        self.next_token[row] = NO_POSITION
        params = seq.group.request.params
        if seq.group.samples_on_host or params.num_sequences > 1 or params.prompt_logprobs is not None:
            self.on_host.add(row)
        self._entered[row] = sampling_entry(
            row,
            temperature=0.0 if params.is_greedy else params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=seed,
        )
        return row

    def forget(self, seq_id: int) -> None:
        """Give back the row of a sequence that was preempted or has finished; unknown ones are fine."""
        row = self.by_seq.pop(seq_id, None)
        if row is not None:
            self._free.append(row)
            self.on_host.discard(row)
            self._tokens.pop(row, None)
            if diffs := self._diffs:  # of a step that was never launched
                kept = [place for place in range(0, len(diffs), 3) if diffs[place] != row]
                self._diffs = [number for place in kept for number in diffs[place : place + 3]]
            if self._runs:
                self._runs = [run for run in self._runs if run[0] != row]
            self._entered.pop(row, None)

    def sync_table(self, row: int, blocks: Sequence[int], first: int) -> None:
        """Note the blocks from place `first` on that differ from what the device has."""
        known = self._blocks[row]
        num_known = len(known)
        if first < num_known:  # most of these are as they were
            overlap = blocks[first:num_known]
            if overlap != known[first : first + len(overlap)]:
                for index, block in enumerate(overlap, first):
                    if known[index] != block:
                        known[index] = block
                        self._diffs += (row, index, block)
        num_new = len(blocks) - num_known
        if num_new == 1:  # what a row that decodes gets
            known.append(blocks[num_known])
            self._diffs += (row, num_known, blocks[num_known])
        elif num_new > 0:
            new = blocks[num_known:]
            known += new
            if num_new < LONG_RUN:
                for index, block in enumerate(new, num_known):
                    self._diffs += (row, index, block)
            else:
                self._runs.append((row, num_known, new))

    def send_token(self, row: int, token: int, position: int) -> None:
        """Note that a row decodes `token` at `position`, which the device does not know."""
        self._tokens[row] = (token, position)

    def flush(self) -> None:
        """Send all that was noted, in the order of the stream: after every step launched so far."""
        parcels: list[tuple[np.ndarray, Callable[[torch.Tensor], None]]] = []
        if self._entered:
            packed = bytearray().join(self._entered.values())
            entries_K6 = np.frombuffer(packed, dtype=np.int64).reshape(-1, NUM_FIELDS)
            parcels.append((entries_K6, lambda entries: enter_rows(self.sampling, entries)))
            self._entered = {}
        if self._diffs or self._runs:
            diffs_K3 = _packed_diffs(self._diffs, self._runs)
            parcels.append((diffs_K3, lambda diffs: apply_table_diffs(self.tables_RB, diffs)))
            self._diffs, self._runs = [], []
        if self._tokens:
            tokens_3K = _packed_tokens(self._tokens)
            parcels.append((tokens_3K, self._put_tokens))
            next_token = self.next_token
            for row, (_, position) in self._tokens.items():
                next_token[row] = position
            self._tokens = {}
        if parcels:
            sent = send_together([array for array, _ in parcels], self.device)
            for (_, unpack), tensor in zip(parcels, sent, strict=True):
                unpack(tensor)

    def _put_tokens(self, tokens_3K: torch.Tensor) -> None:
        rows_K, tokens_K, positions_K = tokens_3K.unbind()
        advance_rows(rows_K, tokens_K, positions_K, self.last_token_R, self.position_R)


def _packed_diffs(diffs: list[int], runs: Sequence[tuple[int, int, Sequence[int]]]) -> np.ndarray:
    """A line of (row, place, block) for each block, padded to a power of two: few numbers of lines in all.

    For every other number of programs a launch is prepared anew (kernels/runtime/launch.py).
    """
    place = len(diffs) // 3
    num_diffs = place + sum([len(blocks) for _, _, blocks in runs])
    diffs_K3 = np.empty((next_power_of_two(num_diffs), 3), dtype=np.int32)
    diffs_K3[num_diffs:] = -1
    if diffs:
        diffs_K3[:place] = np.array(diffs, dtype=np.int32).reshape(-1, 3)
    for row, first, blocks in runs:
        run_K3 = diffs_K3[place : place + len(blocks)]
        run_K3[:, 0] = row
        run_K3[:, 1] = np.arange(first, first + len(blocks))
        run_K3[:, 2] = array("I", blocks)  # numpy takes twice as long to read a list
        place += len(blocks)
    return diffs_K3


def _packed_tokens(tokens: Mapping[int, tuple[int, int]]) -> np.ndarray:
    """Rows, their tokens and their positions, padded to an even number: each line begins at 16 bytes."""
    lines = [(row, *pair) for row, pair in tokens.items()]
    if len(lines) % 2:
        lines.append((-1, 0, 0))
    return np.array(lines, dtype=np.int64).T.copy()


def send_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copies of small arrays on the device that travel as one, for most of what sending costs is setting out.

    Each begins at a multiple of 16 bytes, as a tensor of its own does: kernels are compiled for that, and
    would be compiled once more without.
    """
    if len(arrays) == 1:
        return [send(torch.from_numpy(arrays[0]), device)]
    sizes = [-(-part.nbytes // ALIGNMENT) * ALIGNMENT for part in arrays]
    packed = bytearray().join([part.tobytes().ljust(size) for part, size in zip(arrays, sizes, strict=True)])
    sent = send(torch.frombuffer(packed, dtype=torch.int64), device)
    views = {np.dtype(np.int64): sent, np.dtype(np.int32): sent.view(torch.int32)}
    return [  # one call each, where slicing, retyping and shaping would be three
        views[part.dtype].as_strided(
            part.shape, [stride // part.itemsize for stride in part.strides], start // part.itemsize
        )
        for part, start in zip(arrays, accumulate(sizes, initial=0), strict=False)
    ]


def send(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device; the host does not wait for it, and may forget `values` at once."""
    if device.type != "cuda":
        return values
    return values.pin_memory().to(device, non_blocking=True)  # the allocator keeps it until it has arrived


def send_into(target: torch.Tensor, values: torch.Tensor) -> None:
    """The same to where it belongs, if that is one piece of memory: without a second copy on the device."""
    assert target.is_contiguous(), "what has gaps is filled by way of a copy without them: send"
    target.copy_(values.pin_memory() if target.is_cuda else values, non_blocking=True)
