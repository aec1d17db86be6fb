"""What a step of the device runner reads, at addresses that never change.

    tokens, positions, slots    [rows that decode ........ | tokens of prompts ........ ]
    rows                        of state, one per row that decodes; -1: padding
    tiles                       the work of prefill attention; no tokens: padding
    samples                     place among the tokens, row of state, position of the token to come

The decode part is made on the device from the rows' state. The host fills in the rest, one copy for the
prompts' tokens and one for the samples, and pads it up to the size that the step was captured for.

Shapes:  T tokens, S rows that decode, W tiles, C tokens sampled.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from infer.cache.kv_pool import KVCachePool
from infer.execution.gpu.rows import send, send_into
from infer.kernels.attention.prefill import PrefillChunk, build_prefill_chunks
from infer.kernels.elementwise.step_state import StepInputs
from infer.scheduling.plan import StepPlan
from infer.scheduling.sequence import Sequence as TokenSequence

MAX_CHUNKS = 16  # of prompts, in a step that is captured


class Prompts:
    """The prompt chunks of a plan as arrays: what the host knows about a step."""

    def __init__(
        self,
        plan: StepPlan,
        sequences: Sequence[TokenSequence],
        rows: Sequence[int],
        pool: KVCachePool,
        *,
        first: int | None = None,
    ) -> None:
        """`first` is the place of the first prompt token; without it they follow the rows that decode."""
        chunks = plan.chunks
        self.numbers = [n for n, chunk in enumerate(chunks) if chunk.stop - chunk.start > 1]
        self.decoding = [*range(len(chunks))]  # the others
        for number in reversed(self.numbers):
            del self.decoding[number]
        self.last_places = [*range(len(self.decoding))]  # of each chunk: where its last token is
        self.first = place = len(self.decoding) if first is None else first
        tokens: list[np.ndarray] = []
        positions: list[np.ndarray] = []
        slots: list[np.ndarray] = []
        self.chunks: list[PrefillChunk] = []
        size = pool.block_size
        for number in self.numbers:
            start, stop = chunks[number].start, chunks[number].stop
            tokens.append(np.frombuffer(sequences[number].tokens[start:stop], dtype=np.uintc))
            where = np.arange(start, stop)
            table = np.array(pool.block_table(chunks[number].seq_id)[: -(-stop // size)])
            positions.append(where)
            slots.append(table[where // size] * size + where % size)
            self.chunks.append(PrefillChunk(place, stop - start, rows[number], start))
            place += stop - start
            self.last_places.insert(number, place - 1)
        self.end = place
        self.table_3P = np.zeros((3, 0), dtype=np.int64)
        if self.numbers:
            self.table_3P = np.stack([*map(np.concatenate, (tokens, positions, slots))])

    @property
    def num_tokens(self) -> int:
        """Of prompts, in all."""
        return self.end - self.first


class DeviceInputs:
    """The buffers of one runner."""

    def __init__(
        self, max_rows: int, max_tokens: int, max_graph_tokens: int, tile_len: int, device: torch.device
    ) -> None:
        self.device, self.tile_len = device, tile_len
        num_tokens = max(max_tokens, max_rows + max_graph_tokens)
        self.table_3T = torch.zeros((3, num_tokens), dtype=torch.int64, device=device)
        self.lens_S = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.rows_S = torch.full((max_rows,), -1, dtype=torch.int32, device=device)
        self.tiles_W4 = torch.zeros((self.num_tiles(max_graph_tokens), 4), dtype=torch.int32, device=device)
        self.samples_3C = torch.full((3, max_rows + MAX_CHUNKS), -1, dtype=torch.int64, device=device)
        tokens_T, positions_T, slots_T = self.table_3T.unbind()
        self._decode = StepInputs(tokens_T, positions_T, slots_T, self.lens_S)
        self._rows_sent: tuple[list[int], int] = ([], 0)  # those of the last step, and padded to what size

    def num_tiles(self, num_tokens: int) -> int:
        """The most tiles that chunks with this many tokens make."""
        return num_tokens // self.tile_len + MAX_CHUNKS

    def decode(self, num_rows: int) -> StepInputs:
        """Tokens, positions, slots and lengths of the rows that decode."""
        return self._decode.first(num_rows)

    def blank(self) -> None:
        """Make everything padding."""
        self.table_3T[:2] = 0
        self.table_3T[2] = -1
        self.rows_S.fill_(-1)
        self.tiles_W4.zero_()
        self.samples_3C[0] = 0
        self.samples_3C[1:] = -1
        self._rows_sent = ([], 0)

    def send_rows(self, rows: list[int], size: int) -> None:
        """The rows that decode, padded to `size`; those of the last step need not be sent again."""
        if self._rows_sent != (rows, size):
            padded = rows + [-1] * (size - len(rows))
            send_into(self.rows_S[:size], torch.tensor(padded, dtype=torch.int32))
            self._rows_sent = (rows, size)

    def send_prompts(self, prompts: Prompts, size: int) -> None:
        """The tokens of prompts and their tiles, padded to `size` tokens."""
        table_3P = np.zeros((3, size), dtype=np.int64)
        table_3P[2] = -1
        table_3P[:, : prompts.num_tokens] = prompts.table_3P
        self.table_3T[:, prompts.first : prompts.first + size].copy_(
            send(torch.from_numpy(table_3P), self.device)
        )
        tiles_W4 = build_prefill_chunks(
            prompts.chunks, tokens_per_tile=self.tile_len, max_tiles=self.num_tiles(size)
        )
        send_into(self.tiles_W4[: len(tiles_W4)], torch.from_numpy(tiles_W4))

    def send_samples(
        self, where: list[int], places: list[int], rows: list[int], positions: list[int], size: int
    ) -> None:
        """Of each token to sample its place, row and position; all but `where` they are is padding."""
        samples_3C = np.full((3, size), -1, dtype=np.int64)
        samples_3C[0] = 0
        if where:
            samples_3C[:, where] = places, rows, positions
        self.samples_3C[:, :size].copy_(send(torch.from_numpy(samples_3C), self.device))
