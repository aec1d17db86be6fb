"""What a step of the device runner reads, at addresses that never change.

    tokens, positions, slots    [rows that decode ........ | tokens of prompts ........ ]    slots: per table
    rows                        of state, one per row that decodes; -1: padding
    tiles                       the work of prefill attention; no tokens: padding
    samples                     place among the tokens, row of state, position of the token to come

The decode part is made on the device from the rows' state. The host fills in the rest, one copy for the
prompts' tokens and one for the samples, and pads it up to the size that the step was captured for.

Shapes:  T tokens, P of them of prompts, S rows that decode, W tiles, C tokens sampled, X lines: 2 and one per
block table.
"""

from __future__ import annotations

import numpy as np
import torch

from infer.execution.batch import lay_out
from infer.execution.gpu.sending import send, send_into
from infer.kernels.attention.prefill import PrefillChunk, build_prefill_chunks
from infer.kernels.elementwise.step_state import StepInputs
from infer.scheduling.batch_state import BatchState
from infer.scheduling.plan import StepPlan

MAX_CHUNKS = 16  # of prompts, in a step that is captured


class Prompts:
    """The prompt chunks of a plan as arrays: what the host knows about a step."""

    def __init__(self, plan: StepPlan, state: BatchState, *, first: int) -> None:
        """`first` is the place of the first prompt token, behind the rows that decode and their padding."""
        lens = plan.chunks.stops - plan.chunks.starts
        self.numbers = (lens > 1).nonzero()[0]
        self.decoding = (lens == 1).nonzero()[0]  # the other chunks
        self.first = first
        chunks = plan.chunks.select(self.numbers)
        layout = lay_out(chunks, state.tables, state.block_size)
        self.num_tokens = len(layout.tokens)  # of all prompts together
        self.end = self.first + self.num_tokens
        last_places = np.empty(len(lens), dtype=np.int64)
        last_places[self.decoding] = np.arange(len(self.decoding))
        last_places[self.numbers] = self.first + layout.ends - 1
        self.last_places: list[int] = last_places.tolist()  # of each chunk: where its last token is
        places = self.first + layout.ends - layout.lens
        columns = places, layout.lens, chunks.rows, chunks.starts
        self.chunks = [*map(PrefillChunk, *(column.tolist() for column in columns))]
        self.table_XP = np.vstack([layout.tokens.astype(np.int64), layout.positions, layout.slots])


class DeviceInputs:
    """The buffers of one runner."""

    def __init__(
        self,
        max_rows: int,
        max_tokens: int,
        max_graph_tokens: int,
        tile_len: int,
        device: torch.device,
        num_tables: int = 1,
    ) -> None:
        self.device, self.tile_len = device, tile_len
        num_tokens = max_rows + max(max_tokens, max_graph_tokens)
        self.table_XT = torch.zeros((2 + num_tables, num_tokens), dtype=torch.int64, device=device)
        self.lens_S = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.rows_S = torch.full((max_rows,), -1, dtype=torch.int32, device=device)
        self.tiles_W4 = torch.zeros((self.num_tiles(max_graph_tokens), 4), dtype=torch.int32, device=device)
        self.samples_3C = torch.full((3, max_rows + MAX_CHUNKS), -1, dtype=torch.int64, device=device)
        tokens_T, positions_T, *slots = self.table_XT.unbind()
        self._decode = [StepInputs(tokens_T, positions_T, slots_T, self.lens_S) for slots_T in slots]
        # of the last step, and padded to what size
        self._rows_sent: tuple[np.ndarray | None, int] = (None, 0)

    def num_tiles(self, num_tokens: int) -> int:
        """The most tiles that chunks with this many tokens make."""
        return num_tokens // self.tile_len + MAX_CHUNKS

    def decode(self, num_rows: int) -> list[StepInputs]:
        """Tokens, positions, slots and lengths of the rows that decode; for each block table its slots."""
        return [inputs.first(num_rows) for inputs in self._decode]

    def blank(self) -> None:
        """Make everything padding."""
        self.table_XT[:2] = 0
        self.table_XT[2:] = -1
        self.rows_S.fill_(-1)
        self.tiles_W4.zero_()
        self.samples_3C[0] = 0
        self.samples_3C[1:] = -1
        self._rows_sent = (None, 0)

    def send_rows(self, rows: np.ndarray, size: int) -> None:
        """Send the rows that decode, padded to `size`; the array of the last step need not be sent again."""
        if self._rows_sent[0] is not rows or self._rows_sent[1] != size:
            padded = np.full(size, -1, dtype=np.int32)
            padded[: len(rows)] = rows
            send_into(self.rows_S[:size], torch.from_numpy(padded))
            self._rows_sent = (rows, size)

    def send_prompts(self, prompts: Prompts, size: int) -> None:
        """The tokens of prompts and their tiles, padded to `size` tokens."""
        table_XP = np.zeros((len(prompts.table_XP), size), dtype=np.int64)
        table_XP[2:] = -1
        table_XP[:, : prompts.num_tokens] = prompts.table_XP
        self.table_XT[:, prompts.first : prompts.first + size].copy_(
            send(torch.from_numpy(table_XP), self.device)
        )
        tiles_W4 = build_prefill_chunks(
            prompts.chunks, tokens_per_tile=self.tile_len, max_tiles=self.num_tiles(size)
        )
        send_into(self.tiles_W4[: len(tiles_W4)], torch.from_numpy(tiles_W4))

    def send_samples(
        self, where: np.ndarray, places: np.ndarray, rows: np.ndarray, positions: np.ndarray, size: int
    ) -> None:
        """Send the place, row and position of each token to sample, to `where` it is; the rest is padding."""
        samples_3C = np.full((3, size), -1, dtype=np.int64)
        samples_3C[0] = 0
        samples_3C[:, where] = places, rows, positions
        self.samples_3C[:, :size].copy_(send(torch.from_numpy(samples_3C), self.device))
