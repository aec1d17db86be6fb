"""The inputs of a step on a GPU, at addresses that never change.

    tokens, positions, slots    [rows that decode ........ | tokens of other rows ...... ]    slots: per table
    following                                               tokens after them, for draft heads (head_model.py)
    rows                        rows of state, one per row that decodes; -1: padding
    tiles                       the tiles of prefill attention, then whole chunks for layers with a recurrent
                                state; no tokens: padding
    tree                        where the tree of each token of a window begins, and the nodes that the token
                                sees (trees.py); only windows of devices with trees read it
    adapters                    slot of each token's adapter, 0: none; only steps with adapters read it
    samples                     place among the tokens, row of state, position of the id to come
    window                      everything about a step whose rows verify drafts; each token is a row:
                                row of its table, length it attends to, row of its sampling state, row that
                                goes on from its id, its token, position and slots, and whether a judged row
                                goes on there (kernels/elementwise/windows.py)

The device makes the decode part from the rows' state. The host fills in the rest from the order, with one
copy for tokens and one for samples, and pads it to the captured size.

Shapes:  T tokens, P of them given, S rows that decode, W tiles, C tokens sampled, X lines: 2 and one per
block table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from infer.execution.gpu.sending import send, send_into
from infer.execution.order import DECODE, VERIFY, StepOrder
from infer.execution.trees import TreeNodes
from infer.kernels.attention.prefill import PrefillChunk, PrefillChunks, build_prefill_chunks
from infer.kernels.elementwise.no_tree import NO_TREE
from infer.kernels.elementwise.step_state import StepInputs
from infer.kernels.elementwise.windows import DraftedRows, unpack_window
from infer.kernels.runtime.dispatch import is_gpu


class Prompts:
    """The rows of an order that do not decode, as arrays."""

    def __init__(self, order: StepOrder, *, first: int) -> None:
        """`first` is the place of the first given token, after the rows that decode and their padding."""
        is_decode = order.kinds == DECODE
        self.numbers, self.decoding = (~is_decode).nonzero()[0], is_decode.nonzero()[0]
        self.first, self.num_tokens = first, len(order.tokens)
        self.end = first + self.num_tokens
        counts = order.counts[self.numbers].astype(np.int64)
        starts, ends = order.starts[self.numbers], counts.cumsum()
        self.last_places = np.empty(order.num_rows, dtype=np.int64)  # place of each row's last token
        self.last_places[self.decoding] = np.arange(len(self.decoding))
        self.last_places[self.numbers] = first + ends - 1
        self.is_given = (~is_decode).repeat(order.counts)  # tokens of the order that belong to these rows
        columns = first + ends - counts, counts, order.rows[self.numbers], starts
        self.chunks = [*map(PrefillChunk, *(column.tolist() for column in columns))]
        self.num_drafts = np.where(order.kinds == VERIFY, order.num_sampled - 1, 0)[self.numbers]
        self.table_XP = np.empty((2 + len(order.slots), self.num_tokens), dtype=np.int64)
        self.table_XP[0] = order.tokens
        self.table_XP[1] = np.arange(self.num_tokens) + (starts + counts - ends).repeat(counts)
        self.table_XP[2:] = order.slots

    @property
    def places(self) -> np.ndarray:
        """The place of each token of the order."""
        places: np.ndarray = self.is_given.cumsum() + self.first - 1
        places[~self.is_given] = np.arange(len(self.decoding))
        return places

    def tiles(
        self, chunks: Sequence[PrefillChunk], tile_len: int, device: torch.device, *, has_states: bool
    ) -> PrefillChunks:
        """Return the tiles of prefill attention for some chunks; drafts change no state permanently."""
        tiles_W4 = build_prefill_chunks(chunks, tokens_per_tile=tile_len)
        whole_C4 = np.array(chunks, dtype=np.int32)
        if not (has_states and self.num_drafts.any()):
            both = send(torch.from_numpy(np.concatenate([tiles_W4, whole_C4])), device)
            return PrefillChunks.from_arrays(both[: len(tiles_W4)], chunks, both[len(tiles_W4) :])
        counts = self.num_drafts
        drafts_C4 = whole_C4.copy()
        whole_C4[:, 1] -= counts
        drafts_C4[:, 0] += whole_C4[:, 1]
        drafts_C4[:, 1] = counts
        drafts_C4[:, 3] += whole_C4[:, 1]
        packed = send(torch.from_numpy(np.concatenate([tiles_W4, whole_C4, drafts_C4])), device)
        num_tiles, num_chunks = len(tiles_W4), len(whole_C4)
        return PrefillChunks(
            packed[:num_tiles],
            tuple(self.chunks),
            whole_C4=packed[num_tiles : num_tiles + num_chunks],
            num_drafts=tuple(counts.tolist()),
            drafts_C4=packed[num_tiles + num_chunks :],
        )


class DeviceInputs:
    """The buffers of one device half."""

    def __init__(
        self, max_rows: int, max_tokens: int, max_graph_tokens: int, tile_len: int, device: torch.device, *,
        num_tables: int = 1, max_chunks: int,
    ) -> None:  # fmt: skip
        self.device, self.tile_len = device, tile_len
        self._max_chunks = max_chunks  # most rows of a captured step that do not decode
        num_tokens = max_rows + max(max_tokens, max_graph_tokens)
        self.table_XT = torch.zeros((2 + num_tables, num_tokens), dtype=torch.int64, device=device)
        self.following_T = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self.lens_S = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.rows_S = torch.full((max_rows,), -1, dtype=torch.int32, device=device)
        num_tiles = self.num_tiles(max_graph_tokens) + max_chunks
        self.tiles_W4 = torch.zeros((num_tiles, 4), dtype=torch.int32, device=device)
        self._host_chunks: tuple[PrefillChunk, ...] = ()  # chunks for the reference of prefill attention
        self.samples_3C = torch.full((3, max_rows + max_chunks), -1, dtype=torch.int64, device=device)
        self.tree_2S = torch.full((2, max_rows), NO_TREE, dtype=torch.int64, device=device)
        self.adapters_T = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        self._window = torch.zeros((7 + num_tables) * max_rows, dtype=torch.int64, device=device)
        # used in turn: at most two are sent before a later step has been read
        self._host_windows = deque(
            torch.empty(len(self._window), dtype=torch.int64, pin_memory=is_gpu(device)) for _ in range(4)
        )
        tokens_T, positions_T, *slots = self.table_XT.unbind()
        self._decode = [StepInputs(tokens_T, positions_T, slots_T, self.lens_S) for slots_T in slots]
        self._rows_sent = np.empty(0, dtype=np.int32)  # rows of the last step, including padding
        self.has_rows = False  # True: the device still has these rows

    def num_tiles(self, num_tokens: int) -> int:
        """Return the most tiles of rows with `num_tokens` in all."""
        return num_tokens // self.tile_len + self._max_chunks

    def decode(self, num_rows: int) -> list[StepInputs]:
        """Return tokens, positions, slots and lengths of the rows that decode, for each block table."""
        return [inputs.first(num_rows) for inputs in self._decode]

    def turn(self, start: int, stop: int) -> StepInputs:
        """Return the inputs of rows that draft, from one place to another, for the first block table."""
        return StepInputs(*(each[start:stop] for each in self._decode[0]))

    def blank(self) -> None:
        """Fill everything with padding."""
        self.table_XT[:2] = 0
        self.table_XT[2:] = -1
        self.following_T.zero_()
        self.rows_S.fill_(-1)
        self.tiles_W4.zero_()
        self.samples_3C[0] = 0
        self.samples_3C[1:] = -1
        self._window.fill_(-1)
        self.adapters_T.zero_()
        self.tree_2S.fill_(NO_TREE)
        self.has_rows = False

    def window(self, num_tokens: int) -> torch.Tensor:
        """Return the lines of a step whose rows verify drafts, for `num_tokens` including padding."""
        num_lines = 5 + len(self.table_XT)
        return self._window[: num_lines * num_tokens].view(num_lines, num_tokens)

    def blank_window(self, num_tokens: int) -> np.ndarray:
        """Return memory for the lines of a step whose rows verify drafts, all padding, for `send_window`."""
        self._host_windows.rotate()
        num_lines = 5 + len(self.table_XT)
        lines_YS = self._host_windows[0].numpy()[: num_lines * num_tokens].reshape(num_lines, num_tokens)
        lines_YS.fill(-1)
        return lines_YS

    def send_window(self, num_tokens: int) -> None:
        """Send the lines that were filled last, padded to a captured size."""
        target_YS = self.window(num_tokens)
        target_YS.copy_(self._host_windows[0][: target_YS.numel()].view(target_YS.shape), non_blocking=True)
        self.has_rows = False

    def unpack_window(self, num_tokens: int, drafts_D: torch.Tensor, state: DraftedRows) -> None:
        """Copy the lines of a window to where a step reads them, on the device, and resolve their codes."""
        rows_S, lens_S = self.rows_S[:num_tokens], self.lens_S[:num_tokens]
        unpack_window(self.window(num_tokens), drafts_D, state, rows_S, lens_S, self.table_XT[:, :num_tokens])

    def send_rows(self, rows: np.ndarray, size: int) -> None:
        """Send the rows that decode, padded to `size`, unless the last step had the same rows."""
        padded = np.full(size, -1, dtype=np.int32)
        padded[: len(rows)] = rows
        if not (self.has_rows and np.array_equal(padded, self._rows_sent)):
            send_into(self.rows_S[:size], torch.from_numpy(padded))
            self._rows_sent, self.has_rows = padded, True

    def send_adapters(self, slots: np.ndarray, size: int) -> None:
        """Send the adapter slots of a step's tokens; tokens after them, up to `size`, have none."""
        padded = np.zeros(size, dtype=np.int32)
        padded[: len(slots)] = slots
        send_into(self.adapters_T[:size], torch.from_numpy(padded))

    def send_tree(self, nodes: TreeNodes | None, size: int) -> None:
        """Send which nodes the tokens of a window see, padded to `size`; None: all tokens before them."""
        padded = np.full((2, size), NO_TREE, dtype=np.int64)
        if nodes is not None:
            padded[:, : len(nodes.seen_T)] = nodes.starts_T, nodes.seen_T
        self.tree_2S[:, :size].copy_(send(torch.from_numpy(padded), self.device))

    def send_prompts(self, prompts: Prompts, size: int) -> None:
        """Send given tokens and their tiles, padded to `size` tokens."""
        table_XP = np.zeros((len(prompts.table_XP), size), dtype=np.int64)
        table_XP[2:] = -1
        table_XP[:, : prompts.num_tokens] = prompts.table_XP
        self.table_XT[:, prompts.first : prompts.first + size].copy_(
            send(torch.from_numpy(table_XP), self.device)
        )
        tiles_W4 = build_prefill_chunks(
            prompts.chunks, tokens_per_tile=self.tile_len, max_tiles=self.num_tiles(size)
        )
        whole_C4 = np.zeros((self._max_chunks, 4), dtype=np.int32)
        whole_C4[: len(prompts.chunks)] = np.array(prompts.chunks, dtype=np.int32).reshape(-1, 4)
        if not is_gpu(self.device):
            self._host_chunks = tuple(prompts.chunks)
        tiles_W4 = np.concatenate([tiles_W4, whole_C4])
        send_into(self.tiles_W4[: len(tiles_W4)], torch.from_numpy(tiles_W4))

    def send_following(self, following: np.ndarray, first: int, size: int) -> None:
        """Send the tokens that follow given tokens, padded to `size`, to the places from `first` on."""
        padded = np.zeros(size, dtype=np.int64)
        padded[: len(following)] = following
        send_into(self.following_T[first : first + size], torch.from_numpy(padded))

    def tiles(self, num_tokens: int) -> PrefillChunks:
        """Return the tiles of prefill attention in a step with room for `num_tokens` given tokens."""
        num_tiles = self.num_tiles(num_tokens)
        whole_C4 = self.tiles_W4[num_tiles : num_tiles + self._max_chunks]
        return PrefillChunks.from_arrays(self.tiles_W4[:num_tiles], self._host_chunks, whole_C4)

    def send_samples(
        self, where: np.ndarray, places: np.ndarray, rows: np.ndarray, positions: np.ndarray, size: int
    ) -> None:
        """Send the place, row and position of each token to sample to columns `where`; others are padding."""
        samples_3C = np.full((3, size), -1, dtype=np.int64)
        samples_3C[0] = 0
        samples_3C[:, where] = places, rows, positions
        self.samples_3C[:, :size].copy_(send(torch.from_numpy(samples_3C), self.device))


def mark_ends(line_S: np.ndarray, decided: dict[int, int], counts: np.ndarray, ends: np.ndarray) -> None:
    """Mark rows whose number of ids is decided: 1 where the row goes on, 0 at its other places."""
    for number, num_kept in decided.items():
        first, end = int(ends[number] - counts[number]), int(ends[number])
        line_S[first:end] = 0
        line_S[first + num_kept - 1] = 1
