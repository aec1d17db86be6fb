"""A step's inputs as tensors: the tokens of an order's rows, concatenated.

    rows        A[5:6]   B[17:18]   C[0:4]
    tokens_T    a5       b17        c0 c1 c2 c3
    positions   5        17         0  1  2  3
    slots       the slots that each row's block tables give these positions: a line for each table

A device half on a CPU keeps the rows' block tables and last tokens in `HostRows`, like a GPU on the device;
orders contain only changes.

`PagedStep` is the model's `StepContext`. Decoding rows attend together, grouped by length so that padding
never more than doubles the work; each other row attends alone.

Shapes:  T tokens, S rows that decode together, L positions (padded), K tables, R rows of them, B blocks of a
row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from infer.cache.kv_store import KVStore
from infer.execution.device import StateShape
from infer.execution.order import DECODE, PADDING, READS_PROMPTS, VERIFY, StepOrder
from infer.execution.trees import nodes_of
from infer.kernels.attention.paged import attend_paged, attend_paged_reference
from infer.kernels.attention.reference import attend_naive, attend_sdpa
from infer.kernels.delta.reference import DeltaRule, StateSpan, pieces_of, run_spans
from infer.kernels.elementwise.heads import write_slots_reference
from infer.kernels.elementwise.kv_codes import read_both
from infer.kernels.elementwise.no_tree import NO_TREE
from infer.layers.attention import AttentionLayer, StepContext

MIN_GROUP_LEN = 64  # shorter rows share a group: padding is cheaper than another call


class HostRows:
    """The block tables and the last token of each row, in host memory."""

    def __init__(self, shape: StateShape) -> None:
        self.block_size = shape.block_size
        self.tables = np.zeros((shape.num_tables, shape.num_rows, shape.max_blocks), dtype=np.int64)
        self.last_token = np.zeros(shape.num_rows, dtype=np.int64)
        self._lines = self.tables.reshape(-1, shape.max_blocks)  # rows of all tables, numbered through

    def apply(self, order: StepOrder) -> None:
        """Apply the changes of an order."""
        if len(order.table_changes):
            rows, indices, blocks = order.table_changes[order.table_changes[:, 0] != PADDING].T
            self._lines[rows, indices] = blocks
        if order.known.size:
            rows, tokens, _ = order.known
            self.last_token[rows] = tokens

    def slots(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the slots of one position of each row, for each table: [K, S]."""
        blocks, offsets = np.divmod(positions, self.block_size)
        slots: np.ndarray = self.tables[:, rows, blocks] * self.block_size + offsets
        return slots


class NeededTokens(NamedTuple):
    """The tokens of a step whose hidden states are read."""

    places: list[int] | None  # indices among the T tokens; None: all of them
    last_rows: list[int]  # index of each row's last token among the needed ones


def needed_tokens(order: StepOrder, last_places: list[int]) -> NeededTokens:
    """Return the sampled tokens of each row, or all tokens if prompts are read.

    There is always at least one, even if nothing is sampled: kernels need a row to compute.
    """
    sampled: list[int] = order.num_sampled.tolist()
    if order.flags & READS_PROMPTS or sum(sampled) == order.num_tokens:
        return NeededTokens(None, last_places)
    places = [
        place
        for last, count in zip(last_places, sampled, strict=True)
        for place in range(last - count + 1, last + 1)
    ]
    rows = [end - 1 if count else end for end, count in zip(accumulate(sampled), sampled, strict=True)]
    return NeededTokens(places or last_places[:1], rows)


class TokenLayout(NamedTuple):
    """The tokens of a step, concatenated."""

    tokens: np.ndarray  # ids
    positions: np.ndarray  # positions in their sequences
    slots: np.ndarray  # slots of their keys and values in each table: [K, T]
    ends: np.ndarray  # index after each row's last token


def positions_of(order: StepOrder, ends: np.ndarray) -> np.ndarray:
    """Return the positions of all tokens, given the index after each row's last token."""
    if len(order.backs):
        nodes: np.ndarray = order.starts.repeat(order.counts) + nodes_of(order).depths_T
        return nodes
    positions: np.ndarray = np.arange(ends[-1] if len(ends) else 0) + (order.stops - ends).repeat(
        order.counts
    )
    return positions


def lay_out(order: StepOrder, rows: HostRows) -> TokenLayout:
    """Concatenate the tokens of all rows."""
    is_decode = order.kinds == DECODE
    ends = order.counts.cumsum()
    if is_decode.all():
        tokens, positions = rows.last_token[order.rows], order.starts
        return TokenLayout(tokens, positions, rows.slots(order.rows, positions), ends)
    positions, is_given = positions_of(order, ends), (~is_decode).repeat(order.counts)
    tokens, decoding = np.empty(len(positions), dtype=np.int64), order.rows[is_decode]
    slots = np.empty((len(rows.tables), len(positions)), dtype=np.int64)
    tokens[is_given], slots[:, is_given] = order.tokens, order.slots
    tokens[~is_given] = rows.last_token[decoding]
    slots[:, ~is_given] = rows.slots(decoding, order.starts[is_decode])
    return TokenLayout(tokens, positions, slots, ends)


class _TokenGroup(NamedTuple):
    """Tokens that attend together: all of one row, or one of each decoding row of similar length."""

    tokens: slice | torch.Tensor  # indices among the T tokens
    num_new: int  # tokens of each row
    table_rows_S: np.ndarray  # rows of the block tables
    stops_S: np.ndarray  # length of each row in the cache after this step
    decodes: bool
    num_drafts: int = 0  # last tokens that are drafts
    sees_QQ: torch.Tensor | None = None  # True: a token of a tree attends to another token of its row


def _group(layout: TokenLayout, order: StepOrder, device: torch.device) -> list[_TokenGroup]:
    """Group decoding rows whose lengths differ by at most about a factor of two; others are alone."""
    firsts, stops, is_decode = layout.ends - order.counts, order.stops, order.kinds == DECODE
    made = []
    nodes = nodes_of(order) if len(order.backs) else None
    for number in (~is_decode).nonzero()[0].tolist():
        first, count = int(firsts[number]), int(order.counts[number])
        rows, ends = order.rows[[number]], stops[[number]]
        drafts = int(order.num_sampled[number]) - 1 if order.kinds[number] == VERIFY else 0
        own, sees_QQ = slice(first, first + count), None
        if nodes is not None and nodes.starts_T[first] != NO_TREE:
            seen_QQ = nodes.seen_T[own, None] >> np.arange(count) & 1
            sees_QQ = torch.from_numpy(seen_QQ.astype(bool)).to(device)
        made.append(_TokenGroup(own, count, rows, ends, False, drafts, sees_QQ))
    groups, longest = list[list[int]](), 0
    for number in sorted(is_decode.nonzero()[0].tolist(), key=stops.__getitem__):
        if stops[number] > longest:
            groups.append([])
            longest = 2 * max(int(stops[number]), MIN_GROUP_LEN)
        groups[-1].append(number)
    for group in groups:
        tokens = torch.from_numpy(firsts[group]).to(device)
        made.append(_TokenGroup(tokens, 1, order.rows[group], stops[group], decodes=True))
    return made


class PagedStep(StepContext):
    """A `StepContext` over the paged store: writes K and V to their slots, attends through the tables."""

    def __init__(self, order: StepOrder, rows: HostRows, store: KVStore, *, use_reference: bool) -> None:
        layout, device = lay_out(order, rows), store.device
        self._rows, self._store = rows, store
        self._attend_one: Callable[..., torch.Tensor] = attend_naive if use_reference else attend_sdpa
        self._attend_rows = attend_paged_reference if use_reference else attend_paged
        self.tokens_T = torch.from_numpy(layout.tokens).to(device)
        self.positions = torch.from_numpy(layout.positions.astype(np.int64)).to(device)
        self.slots_KT = torch.from_numpy(layout.slots).to(device)
        self.last_places: list[int] = (layout.ends - 1).tolist()  # index of each row's last token
        self.groups = _group(layout, order, device)
        self._slots: dict[tuple[int, int | None, int], tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._spans: dict[int, list[StateSpan]] = {}  # spans by table

    def attend(
        self, layer: AttentionLayer, q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGH: torch.Tensor
    ) -> torch.Tensor:
        """Cache the keys and values of this step, then attend; see layers/attention.py."""
        number, scale, window, softcap, sinks_N, is_shared = layer
        how: dict[str, Any] = {"softcap": softcap, "sinks_N": sinks_N}
        cache, table = self._store.slots(number, self.slots_KT), self._store.tables[number]
        keys, values, scales = cache.keys_PGH, cache.values_PGH, cache.scales
        if not is_shared:
            write_slots_reference(k_TGH, v_TGH, cache)
        out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
        for place, group in enumerate(self.groups):
            slots_SL, is_seen_SL = self._slots_of(place, group, window, table)
            q = q_TNH[group.tokens]
            if group.decodes:
                out = self._attend_rows(
                    q, keys, values, slots_SL, is_seen_SL, scale=scale, scales=scales, **how
                )
            else:
                seen = read_both(keys, values, scales, slots_SL[0], q.dtype)
                sees_QK = None
                if group.sees_QQ is not None:
                    assert window is None, "no model with windows gets trees (engine/speculation_build.py)"
                    before_QL = group.sees_QQ.new_ones(len(q), slots_SL.shape[1] - len(q))
                    sees_QK = torch.cat([before_QL, group.sees_QQ], dim=1)
                out = self._attend_one(q, *seen, scale=scale, window=window, sees_QK=sees_QK, **how)
            out_TNH[group.tokens] = out
        return out_TNH

    def recur(
        self, layer: int, rule: DeltaRule, qkv_TC: torch.Tensor, b_TV: torch.Tensor, a_TV: torch.Tensor
    ) -> torch.Tensor:
        """Advance the recurrent states of all rows; see layers/attention.py."""
        cache, table = self._store.states[layer], self._store.tables[layer]
        assert cache is not None, f"layer {layer} has no states"
        if table not in self._spans:
            self._spans[table] = list(self._spans_of(self._rows.tables[table]))
        return run_spans(rule, cache, self._spans[table], qkv_TC, b_TV, a_TV)

    def _spans_of(self, tables_RB: np.ndarray) -> Iterator[StateSpan]:
        """Yield the tokens of each row block by block, then its drafts; decoding rows together."""
        size = self._rows.block_size

        def span(
            tokens: slice | torch.Tensor, rows: np.ndarray, starts: np.ndarray, *, are_drafts: bool = False
        ) -> StateSpan:
            reads = np.where(starts > 0, tables_RB[rows, np.maximum(starts - 1, 0) // size], -1)
            blocks = torch.from_numpy(np.stack([reads, tables_RB[rows, starts // size]]))
            reads_S, writes_S = blocks.to(self._store.device).unbind()
            return StateSpan(tokens, reads_S, None if are_drafts else writes_S)

        for group in self.groups:
            rows, starts = group.table_rows_S, group.stops_S - group.num_new
            if isinstance(group.tokens, torch.Tensor):
                yield span(group.tokens, rows, starts)
                continue
            first = group.tokens.start - int(starts[0])  # index of position 0
            known = int(group.stops_S[0]) - group.num_drafts
            for start, stop in pieces_of(int(starts[0]), known, size):
                yield span(slice(first + start, first + stop), rows, np.array([start]))
            if group.num_drafts:
                yield span(slice(first + known, group.tokens.stop), rows, np.array([known]), are_drafts=True)

    def _slots_of(
        self, place: int, group: _TokenGroup, window: int | None, table: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the slots [S, L] that each row may see, and a mask of the valid ones; cached per table."""
        key = (place, window, table)
        if key not in self._slots:
            stops_S, block_size, device = group.stops_S, self._rows.block_size, self._store.device
            first_S = stops_S * 0 if window is None else np.maximum(stops_S - group.num_new - window + 1, 0)
            offsets = np.arange((stops_S - first_S).max())
            # padding repeats the last position, which is written, so nothing uninitialized is read
            positions = np.minimum(first_S[:, None] + offsets, stops_S[:, None] - 1)
            blocks = self._rows.tables[table, group.table_rows_S[:, None], positions // block_size]
            is_seen = offsets < (stops_S - first_S)[:, None]
            slots = torch.from_numpy(blocks * block_size + positions % block_size).to(device)
            mask = None if is_seen.all() else torch.from_numpy(is_seen).to(device)
            self._slots[key] = (slots, mask)
        return self._slots[key]
