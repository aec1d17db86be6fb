"""A step's inputs as tensors: the plan's integers, laid end to end.

    chunks      A[5:6]   B[17:18]   C[0:4]
    tokens_T    a5       b17        c0 c1 c2 c3
    positions   5        17         0  1  2  3
    slots       where the block tables of each sequence put these positions: a line for each table

The block tables lie in the batch state, a row for each running sequence (scheduling/batch_state.py); the
rest is made anew every step from the plan's columns.

`PagedStep` is the `StepContext` the model sees. Sequences that compute one token attend together, grouped by
length so that padding never more than doubles the work; each longer chunk attends alone.

Shapes:  T tokens, S rows that decode together, L positions (padded), K tables, R rows of them, B blocks of a
row.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from infer.cache.kv_store import KVStore
from infer.kernels.attention.paged import attend_paged, attend_paged_reference
from infer.kernels.attention.reference import attend_naive, attend_sdpa
from infer.kernels.elementwise.heads import write_slots_reference
from infer.kernels.elementwise.kv_codes import read_both
from infer.layers.attention import AttentionLayer, StepContext
from infer.scheduling.batch_state import BatchState
from infer.scheduling.plan import Chunks, StepPlan
from infer.scheduling.sequence import Sequence as TokenSequence

MIN_GROUP_LEN = 64  # below this length padding is cheaper than another call


class NeededTokens(NamedTuple):
    """The tokens of a step whose hidden states are read."""

    places: list[int] | None  # among the T tokens; None: all of them
    last_rows: list[int]  # of each chunk that samples: which of these rows is its last token's


def needed_tokens(plan: StepPlan, sequences: Sequence[TokenSequence], last_places: list[int]) -> NeededTokens:
    """The ends, at `last_places`, of the chunks that sample; all tokens where a prompt's states are read.

    There is always one, though the middle of a long prompt samples nothing: a kernel wants a row to compute.
    """
    chunks = plan.chunks
    draws: list[bool] = chunks.draws.tolist()
    num_drawn = sum(draws)
    if num_drawn == chunks.num_tokens or any(map(reads_prompt, chunks.starts.tolist(), sequences)):
        return NeededTokens(None, last_places)
    places = [place for place, is_drawn in zip(last_places, draws, strict=True) if is_drawn]
    rows = [*accumulate(draws, initial=0)][:-1]
    return NeededTokens(places or last_places[:1], rows)


def reads_prompt(start: int, seq: TokenSequence) -> bool:
    """Whether the hidden states of all tokens of a chunk that begins at `start` are read.

    They are for an embedding, and for logprobs of a prompt, whose last token predicts the output.
    """
    request = seq.group.request
    has_logprobs = request.params.prompt_logprobs is not None and start < seq.num_prompt - 1
    return has_logprobs or request.pooling is not None


def has_embeddings(sequences: Sequence[TokenSequence]) -> bool:
    """Whether the hidden states of a step's chunks are to be pooled."""
    return any(seq.group.request.pooling is not None for seq in sequences)


class TokenLayout(NamedTuple):
    """The tokens of a step, end to end."""

    tokens: np.ndarray  # their ids
    positions: np.ndarray  # where each stands in its sequence
    slots: np.ndarray  # of each table, where its key and value go: [K, T]
    lens: np.ndarray  # tokens of each chunk
    ends: np.ndarray  # of each chunk: the place behind its last token


def lay_out(
    chunks: Chunks, sequences: Sequence[TokenSequence], tables_KRB: np.ndarray, block_size: int
) -> TokenLayout:
    """Lay the tokens of chunks end to end, and look up their slots in the block tables."""
    starts, stops = chunks.starts, chunks.stops
    lens = stops - starts
    ends = lens.cumsum()
    ids = array("I")
    if (lens == 1).all():  # a token each, or no chunk
        ids.extend([seq.tokens[start] for seq, start in zip(sequences, starts.tolist(), strict=True)])
        rows, positions = chunks.rows, starts
    else:
        for seq, start, stop in zip(sequences, starts.tolist(), stops.tolist(), strict=True):
            ids += seq.tokens[start:stop]
        rows = chunks.rows.repeat(lens)
        positions = np.arange(len(ids)) + (stops - ends).repeat(lens)
    blocks, offsets = np.divmod(positions, block_size)
    slots = tables_KRB[:, rows, blocks] * block_size + offsets
    return TokenLayout(np.frombuffer(ids, dtype=np.uintc), positions, slots, lens, ends)


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Rows of about one length that attend together."""

    rows_S: torch.Tensor  # which of the T tokens
    table_rows_S: np.ndarray  # of the block tables
    lens_S: np.ndarray  # positions each may see


@dataclass(frozen=True, slots=True)
class _LongChunk:
    """A run of tokens of one sequence that attends alone."""

    first: int  # its place among the T tokens
    last: int
    table_row: int  # of the block tables
    stop: int  # positions in the cache after this step


class StepBatch:
    """The tensors of one step: what the model reads, and where attention finds the rest."""

    def __init__(
        self, plan: StepPlan, sequences: Sequence[TokenSequence], state: BatchState, device: torch.device
    ) -> None:
        self.block_size = state.block_size
        self.device = device
        self.tables, chunks = state.tables, plan.chunks
        layout = lay_out(chunks, sequences, state.tables, state.block_size)
        short: list[tuple[int, int, int]] = []  # (kv length, place, table row)
        self.long_chunks: list[_LongChunk] = []
        self.last_rows: list[int] = (layout.ends - 1).tolist()  # of each chunk: the place of its last token
        columns = zip(
            layout.lens.tolist(),
            layout.ends.tolist(),
            chunks.rows.tolist(),
            chunks.stops.tolist(),
            strict=True,
        )
        for length, end, row, stop in columns:
            if length == 1:
                short.append((stop, end - 1, row))
            else:
                self.long_chunks.append(_LongChunk(end - length, end, row, stop))
        self.tokens_T = torch.from_numpy(layout.tokens.astype(np.int64)).to(device)
        self.positions_T = torch.from_numpy(layout.positions).to(device)
        self.slots_KT = torch.from_numpy(layout.slots).to(device)
        self.decode_groups = _group_by_length(short, device)


def _group_by_length(short: list[tuple[int, int, int]], device: torch.device) -> list[_DecodeGroup]:
    """Split rows into groups in which the longest is at most about twice the shortest."""
    groups: list[list[tuple[int, int, int]]] = []
    for item in sorted(short, key=lambda row: row[0]):
        if not groups or item[0] > 2 * max(groups[-1][0][0], MIN_GROUP_LEN):
            groups.append([])
        groups[-1].append(item)
    made = []
    for group in groups:
        rows = torch.tensor([place for _, place, _ in group], device=device)
        lens_S, _, table_rows_S = np.array(group).T
        made.append(_DecodeGroup(rows, table_rows_S, lens_S))
    return made


class PagedStep(StepContext):
    """A `StepContext` over the paged store: write K and V to their slots, attend through the tables."""

    def __init__(self, batch: StepBatch, store: KVStore, *, use_reference: bool) -> None:
        self._batch, self._store = batch, store
        self.positions = batch.positions_T
        self._attend_one: Callable[..., torch.Tensor] = attend_naive if use_reference else attend_sdpa
        self._attend_rows = attend_paged_reference if use_reference else attend_paged
        self._slots: dict[tuple[int, int | None, int], tuple[torch.Tensor, torch.Tensor | None]] = {}

    def attend(
        self, layer: AttentionLayer, q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGH: torch.Tensor
    ) -> torch.Tensor:
        """Cache the keys and values of this step, then attend; see layers/attention.py."""
        number, scale, window = layer
        cache, table = self._store.slots(number, self._batch.slots_KT), self._store.tables[number]
        scales = cache.scales
        write_slots_reference(k_TGH, v_TGH, cache)
        out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
        for place, chunk in enumerate(self._batch.long_chunks):
            slots_L = self._chunk_slots(place, chunk, window, table)
            seen = read_both(cache.keys_PGH, cache.values_PGH, scales, slots_L, q_TNH.dtype)
            out_TNH[chunk.first : chunk.last] = self._attend_one(
                q_TNH[chunk.first : chunk.last], *seen, scale=scale, window=window
            )
        for place, group in enumerate(self._batch.decode_groups):
            slots_SL, is_seen_SL = self._group_slots(place, group, window, table)
            q_SNH = q_TNH[group.rows_S]
            out_TNH[group.rows_S] = self._attend_rows(
                q_SNH, cache.keys_PGH, cache.values_PGH, slots_SL, is_seen_SL, scale=scale, scales=scales
            )
        return out_TNH

    def _chunk_slots(self, number: int, chunk: _LongChunk, window: int | None, table: int) -> torch.Tensor:
        """Slots of the positions that any token of the chunk may see, in order."""
        key = (-1 - number, window, table)
        if key not in self._slots:
            num_new = chunk.last - chunk.first
            first_seen = 0 if window is None else max(chunk.stop - num_new - window + 1, 0)
            positions = np.arange(first_seen, chunk.stop)
            block_size = self._batch.block_size
            blocks = self._batch.tables[table, chunk.table_row, positions // block_size]
            slots = blocks * block_size + positions % block_size
            self._slots[key] = (torch.from_numpy(slots).to(self._batch.device), None)
        return self._slots[key][0]

    def _group_slots(
        self, number: int, group: _DecodeGroup, window: int | None, table: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Slots [S, L] of what each row may see, and which of them count; computed once for a table."""
        key = (number, window, table)
        if key not in self._slots:
            seen_S = group.lens_S if window is None else np.minimum(group.lens_S, window)
            offsets = np.arange(seen_S.max())
            first_S = group.lens_S - seen_S
            # Padding repeats the last position: it has been written, so nothing uninitialised is read.
            positions = np.minimum(first_S[:, None] + offsets, group.lens_S[:, None] - 1)
            block_size = self._batch.block_size
            blocks = self._batch.tables[table, group.table_rows_S[:, None], positions // block_size]
            is_seen = offsets < seen_S[:, None]
            slots = torch.from_numpy(blocks * block_size + positions % block_size).to(self._batch.device)
            mask = None if is_seen.all() else torch.from_numpy(is_seen).to(self._batch.device)
            self._slots[key] = (slots, mask)
        return self._slots[key]
