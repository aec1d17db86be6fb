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
from collections.abc import Callable
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


def needed_tokens(plan: StepPlan, last_places: list[int]) -> NeededTokens:
    """The ends, at `last_places`, of the chunks that sample; all tokens where a prompt's states are read.

    There is always one, though the middle of a long prompt samples nothing: a kernel wants a row to compute.
    """
    chunks = plan.chunks
    draws: list[bool] = chunks.draws.tolist()
    num_drawn = sum(draws)
    if num_drawn == chunks.num_tokens or any(map(reads_prompt, chunks.starts.tolist(), chunks.sequences)):
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


def has_embeddings(plan: StepPlan) -> bool:
    """Whether the hidden states of a step's chunks are to be pooled."""
    return any(seq.group.request.pooling is not None for seq in plan.chunks.sequences)


class TokenLayout(NamedTuple):
    """The tokens of a step, end to end."""

    tokens: np.ndarray  # their ids
    positions: np.ndarray  # where each stands in its sequence
    slots: np.ndarray  # of each table, where its key and value go: [K, T]
    lens: np.ndarray  # tokens of each chunk
    ends: np.ndarray  # of each chunk: the place behind its last token


def lay_out(chunks: Chunks, tables_KRB: np.ndarray, block_size: int) -> TokenLayout:
    """Lay the tokens of chunks end to end, and look up their slots in the block tables."""
    starts, stops, sequences = chunks.starts, chunks.stops, chunks.sequences
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


class _TokenGroup(NamedTuple):
    """Tokens that attend together: those of one chunk, or one token each of sequences of about one length."""

    tokens: slice | torch.Tensor  # which of the T tokens
    num_new: int  # of each sequence
    table_rows_S: np.ndarray  # of the block tables
    stops_S: np.ndarray  # positions of each in the cache after this step


def _group(layout: TokenLayout, chunks: Chunks, device: torch.device) -> list[_TokenGroup]:
    """Each chunk by itself, but single tokens together: the longest at most about twice the shortest."""
    firsts, lens, stops = layout.ends - layout.lens, layout.lens, chunks.stops
    groups, longest = [[number] for number in (lens > 1).nonzero()[0].tolist()], 0
    for number in sorted((lens == 1).nonzero()[0].tolist(), key=stops.__getitem__):
        if stops[number] > longest:
            groups.append([])
            longest = 2 * max(int(stops[number]), MIN_GROUP_LEN)
        groups[-1].append(number)
    made = []
    for group in groups:
        first, num_new = int(firsts[group[0]]), int(lens[group[0]])
        is_chunk = num_new > 1
        tokens = slice(first, first + num_new) if is_chunk else torch.from_numpy(firsts[group]).to(device)
        made.append(_TokenGroup(tokens, num_new, chunks.rows[group], stops[group]))
    return made


class PagedStep(StepContext):
    """A `StepContext` over the paged store: write K and V to their slots, attend through the tables."""

    def __init__(self, plan: StepPlan, state: BatchState, store: KVStore, *, use_reference: bool) -> None:
        layout, device = lay_out(plan.chunks, state.tables, state.block_size), store.device
        self._state, self._store = state, store
        self._attend_one: Callable[..., torch.Tensor] = attend_naive if use_reference else attend_sdpa
        self._attend_rows = attend_paged_reference if use_reference else attend_paged
        self.tokens_T = torch.from_numpy(layout.tokens.astype(np.int64)).to(device)
        self.positions = torch.from_numpy(layout.positions).to(device)
        self.slots_KT = torch.from_numpy(layout.slots).to(device)
        self.last_rows: list[int] = (layout.ends - 1).tolist()  # of each chunk: the place of its last token
        self.groups = _group(layout, plan.chunks, device)
        self._slots: dict[tuple[int, int | None, int], tuple[torch.Tensor, torch.Tensor | None]] = {}

    def attend(
        self, layer: AttentionLayer, q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGH: torch.Tensor
    ) -> torch.Tensor:
        """Cache the keys and values of this step, then attend; see layers/attention.py."""
        number, scale, window = layer
        cache, table = self._store.slots(number, self.slots_KT), self._store.tables[number]
        keys, values, scales = cache.keys_PGH, cache.values_PGH, cache.scales
        write_slots_reference(k_TGH, v_TGH, cache)
        out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
        for place, group in enumerate(self.groups):
            slots_SL, is_seen_SL = self._slots_of(place, group, window, table)
            q = q_TNH[group.tokens]
            if group.num_new == 1:
                out = self._attend_rows(q, keys, values, slots_SL, is_seen_SL, scale=scale, scales=scales)
            else:
                seen = read_both(keys, values, scales, slots_SL[0], q.dtype)
                out = self._attend_one(q, *seen, scale=scale, window=window)
            out_TNH[group.tokens] = out
        return out_TNH

    def _slots_of(
        self, place: int, group: _TokenGroup, window: int | None, table: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Slots [S, L] of what any token of each sequence may see, and which count; once for a table."""
        key = (place, window, table)
        if key not in self._slots:
            stops_S, block_size, device = group.stops_S, self._state.block_size, self._store.device
            first_S = stops_S * 0 if window is None else np.maximum(stops_S - group.num_new - window + 1, 0)
            offsets = np.arange((stops_S - first_S).max())
            # Padding repeats the last position: it has been written, so nothing uninitialised is read.
            positions = np.minimum(first_S[:, None] + offsets, stops_S[:, None] - 1)
            blocks = self._state.tables[table, group.table_rows_S[:, None], positions // block_size]
            is_seen = offsets < (stops_S - first_S)[:, None]
            slots = torch.from_numpy(blocks * block_size + positions % block_size).to(device)
            mask = None if is_seen.all() else torch.from_numpy(is_seen).to(device)
            self._slots[key] = (slots, mask)
        return self._slots[key]
