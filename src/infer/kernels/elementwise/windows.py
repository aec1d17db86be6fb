"""Windows of drafts on the device: the transition from turn to turn, and from a window to a step.

    turns       gather_step ─► model ─► ids ─ next_turn ─► the inputs of the next turn, and a line of drafts
    windows     lines of the host, drafts ─ unpack_window ─► the inputs of a step that verifies
    its ids     tokens of the windows, ids ─ judge_windows ─► the start of the next turns, and the moves

Nothing is read back between turns, nor between the last turn and the step that verifies the drafts: in place
of a draft, the host writes a code with its index. Nothing waits between that step and the next turns either:
the device itself judges which drafts are accepted.

    lines of a window     row, length, row sampled as, row that goes on, token, position, slot of each table,
                          and a flag if the row goes on from here: 1 yes, 0 no, -1 to be judged
    token                 -1: padding, which is -1 in all lines; below: draft number -2 - token
    position              below -1: -2 - position tokens after the row's last token, if only the device knows
                          its position; then it also computes the length, the slots and the last token

Shapes:  S rows or tokens, R rows of state, B blocks of the longest table, X lines: 2 and one per block table,
Y lines: 5 more, D drafts.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

import torch

from infer.kernels.elementwise.no_tree import NO_TREE
from infer.kernels.elementwise.step_state import StepInputs
from infer.kernels.runtime.dispatch import jit, tl, use_triton
from infer.kernels.runtime.launch import launch_triton

FIRST_CODE = -2  # code of draft 0, and of the position at which a row's turns begin
MAX_DRAFTS = 16  # most drafts of a row, the number in config/speculation.py


def next_turn_reference(
    rows_S: torch.Tensor, ids_S: torch.Tensor, tables_RB: torch.Tensor, inputs: StepInputs,
    drafts_S: torch.Tensor, *, block_size: int,
) -> None:  # fmt: skip
    """The specification of `next_turn`."""
    is_real_S, row_S = rows_S >= 0, rows_S.long().clamp(min=0)
    position_S = inputs.positions_S + is_real_S
    block_S = tables_RB[row_S, (position_S // block_size).clamp(max=tables_RB.shape[1] - 1)].long()
    tokens_S = ids_S.clamp(min=0)
    drafts_S.copy_(tokens_S)
    inputs.tokens_S.copy_(torch.where(is_real_S, tokens_S, 0))
    inputs.positions_S.copy_(position_S)
    inputs.slots_S.copy_(torch.where(is_real_S, block_S * block_size + position_S % block_size, -1))
    inputs.lens_S.add_(is_real_S)


@jit
def _next_turn_kernel(
    rows_ptr, ids_ptr, tables_ptr, tokens_ptr, positions_ptr, slots_ptr, lens_ptr, drafts_ptr,
    table_stride, num_blocks, block_size,
):  # fmt: skip
    index = tl.program_id(0)
    row = tl.load(rows_ptr + index).to(tl.int64)
    is_real = row >= 0
    token = tl.maximum(tl.load(ids_ptr + index), 0)
    position = tl.load(positions_ptr + index) + is_real.to(tl.int64)
    place = position // block_size
    has_block = is_real & (place < num_blocks)
    block = tl.load(tables_ptr + row * table_stride + place, mask=has_block, other=0)
    slot = block.to(tl.int64) * block_size + position % block_size
    tl.store(drafts_ptr + index, token)
    tl.store(tokens_ptr + index, tl.where(is_real, token, 0))
    tl.store(positions_ptr + index, position)
    tl.store(slots_ptr + index, tl.where(has_block, slot, -1))
    tl.store(lens_ptr + index, tl.load(lens_ptr + index) + is_real.to(tl.int32))


def next_turn(
    rows_S: torch.Tensor, ids_S: torch.Tensor, tables_RB: torch.Tensor, inputs: StepInputs,
    drafts_S: torch.Tensor, *, block_size: int,
) -> None:  # fmt: skip
    """Advance drafting rows to the ids they have drawn, which are also stored as their drafts.

    A row without a next token drafts token 0. After the last turn, nothing reads the inputs anymore, and the
    table of a row need not have room for them.
    """
    if not use_triton(rows_S):
        next_turn_reference(rows_S, ids_S, tables_RB, inputs, drafts_S, block_size=block_size)
        return
    launch_triton(
        _next_turn_kernel, (rows_S.shape[0],), (rows_S, ids_S, tables_RB, *inputs, drafts_S),
        (tables_RB.stride(0), tables_RB.shape[1], block_size), num_warps=1,
    )  # fmt: skip


class DraftedRows(NamedTuple):
    """The state of the rows that drafts belong to."""

    last_token_R: torch.Tensor
    position_R: torch.Tensor  # position of the last token
    tables_KRB: torch.Tensor
    block_size: int


def unpack_window_reference(
    lines_YS: torch.Tensor, drafts_D: torch.Tensor, state: DraftedRows, rows_S: torch.Tensor,
    lens_S: torch.Tensor, table_XS: torch.Tensor,
) -> None:  # fmt: skip
    """The specification of `unpack_window`."""
    last_token_R, position_R, tables_KRB, size = state
    row_S, tokens_S, after_S = lines_YS[0].clamp(min=0), lines_YS[4], FIRST_CODE - lines_YS[5]
    found_S = drafts_D[(FIRST_CODE - tokens_S).clamp(min=0)]
    found_S = torch.where(tokens_S <= FIRST_CODE, found_S, tokens_S.clamp(min=0))
    is_after_S, position_S = after_S >= 0, position_R[row_S] + after_S
    block_S = (position_S // size).clamp(0, tables_KRB.shape[2] - 1)
    rows_S.copy_(lines_YS[0])
    table_XS[0] = torch.where(after_S == 0, last_token_R[row_S], found_S)
    table_XS[1] = torch.where(is_after_S, position_S, lines_YS[5].clamp(min=0))
    lens_S.copy_(torch.where(is_after_S, position_S + 1, lines_YS[1].clamp(min=0)))
    for tables_RB, slots_S, given_S in zip(tables_KRB, table_XS[2:], lines_YS[6:-1], strict=True):
        slots_S.copy_(torch.where(is_after_S, tables_RB[row_S, block_S] * size + position_S % size, given_S))


@jit
def _unpack_window_kernel(
    lines_ptr, drafts_ptr, last_token_ptr, position_ptr, tables_ptr, rows_ptr, lens_ptr, table_ptr,
    num_tokens, table_stride, tables_stride, row_stride, block_size,
    NUM_TABLES: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    line_ptr = lines_ptr + index
    row, token, place = (
        tl.load(line_ptr),
        tl.load(line_ptr + 4 * num_tokens),
        tl.load(line_ptr + 5 * num_tokens),
    )
    is_after = place <= FIRST
    draft = tl.load(drafts_ptr + (FIRST - token), mask=token <= FIRST, other=0)
    token = tl.where(token <= FIRST, draft, tl.maximum(token, 0))
    last = tl.load(last_token_ptr + row, mask=is_after, other=0)
    position = tl.load(position_ptr + row, mask=is_after, other=0) + FIRST - place
    position = tl.where(is_after, position, tl.maximum(place, 0))
    length = tl.where(is_after, position + 1, tl.maximum(tl.load(line_ptr + num_tokens), 0))
    tl.store(rows_ptr + index, row.to(tl.int32))
    tl.store(lens_ptr + index, length.to(tl.int32))
    tl.store(table_ptr + index, tl.where(place == FIRST, last, token))
    tl.store(table_ptr + table_stride + index, position)
    for table in tl.static_range(NUM_TABLES):
        slot = tl.load(line_ptr + (6 + table) * num_tokens)
        block_ptr = tables_ptr + table * tables_stride + row * row_stride + position // block_size
        block = tl.load(block_ptr, mask=is_after, other=0).to(tl.int64)
        slot = tl.where(is_after, block * block_size + position % block_size, slot)
        tl.store(table_ptr + (2 + table) * table_stride + index, slot)


def unpack_window(
    lines_YS: torch.Tensor, drafts_D: torch.Tensor, state: DraftedRows, rows_S: torch.Tensor,
    lens_S: torch.Tensor, table_XS: torch.Tensor,
) -> None:  # fmt: skip
    """Convert the lines of a window to the inputs of a step: rows, lengths, tokens, positions and slots."""
    if not use_triton(rows_S):
        unpack_window_reference(lines_YS, drafts_D, state, rows_S, lens_S, table_XS)
        return
    last_token_R, position_R, tables_KRB, block_size = state
    assert lines_YS.is_contiguous() and table_XS.stride(1) == 1, "lines must be contiguous"
    launch_triton(
        _unpack_window_kernel, (rows_S.shape[0],),
        (lines_YS, drafts_D, last_token_R, position_R, tables_KRB, rows_S, lens_S, table_XS),
        (lines_YS.shape[1], table_XS.stride(0), tables_KRB.stride(0), tables_KRB.stride(1), block_size),
        NUM_TABLES=len(table_XS) - 2, FIRST=FIRST_CODE, num_warps=1,
    )  # fmt: skip


def judge_windows_reference(
    rows_S: torch.Tensor, tokens_S: torch.Tensor, positions_S: torch.Tensor, ids_S: torch.Tensor,
    decided_S: torch.Tensor, tree_2S: torch.Tensor, slots_S: torch.Tensor, last_token_R: torch.Tensor,
    previous_R: torch.Tensor, position_R: torch.Tensor, sources_S: torch.Tensor,
) -> None:  # fmt: skip
    """The specification of `judge_windows`."""
    columns = (x_S.tolist() for x_S in (rows_S, tokens_S, positions_S, ids_S, decided_S, slots_S, *tree_2S))
    lines = enumerate(zip(*columns, strict=True))
    for row, group in groupby(lines, key=lambda line: line[1][0]):
        if row < 0:
            continue
        nodes = [*group]
        first, path, seen = nodes[0][0], [0], [line[-1] for _, line in nodes]
        for node, (_, (_, token, *_, decided, _, start, bits)) in enumerate(nodes[1:], 1):
            now = path[-1]
            is_child = node == now + 1 if start == NO_TREE else bits == seen[now] | 1 << node
            is_right = nodes[now][1][3] == token
            if decided >= 0:
                is_child, is_right = True, any(line[4] == 1 for _, line in nodes[node:])
            if is_child and is_right:
                path.append(node)
        _, (_, token, position, drawn, *_) = nodes[path[-1]]
        last_token_R[row], previous_R[row], position_R[row] = max(drawn, 0), token, position + 1
        for depth, node in enumerate(path):
            sources_S[first + depth] = nodes[node][1][5]


@jit
def _judge_windows_kernel(
    rows_ptr, tokens_ptr, positions_ptr, ids_ptr, decided_ptr, tree_ptr, slots_ptr,
    last_token_ptr, previous_ptr, position_ptr, sources_ptr,
    num_tokens, tree_stride, NO_TREE: tl.constexpr, MAX_DRAFTS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    row = tl.load(rows_ptr + first).to(tl.int64)
    before = tl.load(rows_ptr + first - 1, mask=first > 0, other=-1)
    if (row >= 0) & (row != before):
        nodes = tl.arange(0, 2 * MAX_DRAFTS)
        places = first + nodes
        is_mine = (nodes <= MAX_DRAFTS) & (places < num_tokens)
        is_mine &= tl.load(rows_ptr + places, mask=is_mine, other=-1) == row
        tokens = tl.load(tokens_ptr + places, mask=is_mine, other=0)
        ids = tl.load(ids_ptr + places, mask=is_mine, other=0)
        bits = tl.load(tree_ptr + tree_stride + places, mask=is_mine, other=0)
        slots = tl.load(slots_ptr + places, mask=is_mine, other=0)
        decided = tl.load(decided_ptr + places, mask=is_mine, other=-1)
        last_decided = tl.max(tl.where(decided == 1, nodes, -1), 0)
        is_tree = tl.load(tree_ptr + first) != NO_TREE
        now, depth = first * 0, first * 0
        seen, drawn = tl.load(tree_ptr + tree_stride + first), tl.load(ids_ptr + first)
        for node in tl.static_range(1, MAX_DRAFTS + 1):
            is_node = (nodes == node) & is_mine
            bits_here = tl.sum(tl.where(is_node, bits, 0), 0)
            is_child = tl.where(is_tree, bits_here == (seen | (1 << node)), node == now + 1)
            is_right = is_child & (tl.sum(tl.where(is_node, tokens, 0), 0) == drawn)
            is_right = tl.where(last_decided >= 0, node <= last_decided, is_right)
            is_kept = is_right & (tl.sum(is_node.to(tl.int32), 0) > 0)
            depth += is_kept.to(tl.int32)
            now, seen = tl.where(is_kept, node, now), tl.where(is_kept, bits_here, seen)
            drawn = tl.where(is_kept, tl.sum(tl.where(is_node, ids, 0), 0), drawn)
            tl.store(sources_ptr + first + depth, tl.sum(tl.where(is_node, slots, 0), 0), mask=is_kept)
        tl.store(last_token_ptr + row, tl.maximum(drawn, 0))
        tl.store(previous_ptr + row, tl.load(tokens_ptr + first + now))
        tl.store(position_ptr + row, tl.load(positions_ptr + first + now) + 1)


def judge_windows(
    rows_S: torch.Tensor, tokens_S: torch.Tensor, positions_S: torch.Tensor, ids_S: torch.Tensor,
    decided_S: torch.Tensor, tree_2S: torch.Tensor, slots_S: torch.Tensor, last_token_R: torch.Tensor,
    previous_R: torch.Tensor, position_R: torch.Tensor, sources_S: torch.Tensor,
) -> None:  # fmt: skip
    """Advance the rows of a verifying step to the last token that each accepts, and the id drawn there.

    The tokens of a row are adjacent, at most `MAX_DRAFTS` after the first. From the first token, the walk
    moves to the first child that equals the drawn id: in a chain the next token, in a tree (`tree_2S`) a
    token that sees everything the current token sees, and itself. `sources_S` starts as the slots of all
    tokens; a row's first entries get the slots of the tokens that it accepts.
    """
    tensors = (
        rows_S, tokens_S, positions_S, ids_S, decided_S, tree_2S, slots_S, last_token_R, previous_R,
        position_R, sources_S,
    )  # fmt: skip
    if not use_triton(rows_S):
        judge_windows_reference(*tensors)
        return
    num_tokens = rows_S.shape[0]
    launch_triton(
        _judge_windows_kernel, (num_tokens,), tensors, (num_tokens, tree_2S.stride(0)),
        NO_TREE=NO_TREE, MAX_DRAFTS=MAX_DRAFTS, num_warps=1,
    )  # fmt: skip
