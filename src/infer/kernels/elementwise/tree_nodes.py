"""Trees of drafts on the device: the ids of one turn become the nodes of the next, without the host.

A tree takes as many turns as it is deep. A turn computes the nodes at its depth that have children, for all
rows, and picks the best next ids for each. The nodes of these ids follow from the shape of the tree alone,
which depends on the number of drafts (speculative/tree.py):

    turn 0    computes the text's end            draws a b c     nodes 1, 5, 6       1 and 5 have children
    turn 1    computes nodes 1 and 5, row by row draws d e | f   nodes 2, 7 | 8      2 has a child
    turn 2    computes node 2                    draws g         node 3

    links     a line per node at a depth, those with children first: node, place among the ids, nodes it sees

Node n has the n-th slot after the text's end, is rotated by its depth, and sees the text and its ancestors,
as in the step that verifies it (execution/trees.py).

Shapes:  S rows, M tokens of a turn, W best ids of each, C nodes at a depth, R rows of state, B blocks of the
longest table, N drafts.
"""

from __future__ import annotations

import torch

from infer.kernels.elementwise.step_state import StepInputs
from infer.kernels.runtime.dispatch import jit, tl, use_triton
from infer.kernels.runtime.launch import launch_triton


def next_nodes_reference(
    rows_S: torch.Tensor, best_WM: torch.Tensor, links_3C: torch.Tensor, position_R: torch.Tensor,
    tables_RB: torch.Tensor, inputs: StepInputs, tree_2M: torch.Tensor, drafts_NS: torch.Tensor, *,
    block_size: int, depth: int,
) -> None:  # fmt: skip
    """The specification of `next_nodes`."""
    num_rows, num_next = len(rows_S), len(inputs.tokens_S) // len(rows_S)
    node_C, from_C, seen_C = links_3C
    ids_CS = best_WM.reshape(-1, num_rows)[from_C].clamp(min=0)
    drafts_NS[node_C - 1, :num_rows] = ids_CS
    is_real_S, row_S, size = rows_S >= 0, rows_S.long().clamp(min=0), block_size
    start_S = torch.where(is_real_S, position_R[row_S], 0)
    place_GS = start_S + node_C[:num_next, None]
    block_GS = tables_RB[row_S, (place_GS // size).clamp(max=tables_RB.shape[1] - 1)].long()
    shape = num_next, num_rows
    inputs.tokens_S.view(shape).copy_(torch.where(is_real_S, ids_CS[:num_next], 0))
    inputs.positions_S.view(shape).copy_(start_S + depth)
    inputs.slots_S.view(shape).copy_(torch.where(is_real_S, block_GS * size + place_GS % size, -1))
    inputs.lens_S.view(shape).copy_(torch.where(is_real_S, place_GS + 1, 0))
    tree_2M[0] = start_S.repeat(num_next)
    tree_2M[1] = seen_C[:num_next].repeat_interleave(num_rows)


@jit
def _next_nodes_kernel(
    rows_ptr, best_ptr, links_ptr, position_ptr, tables_ptr, tokens_ptr, positions_ptr, slots_ptr, lens_ptr,
    tree_ptr, drafts_ptr,
    num_rows, num_links, num_next, table_stride, num_blocks, block_size, tree_stride, drafts_stride, depth,
):  # fmt: skip
    index = tl.program_id(0)
    link, place = index // num_rows, index % num_rows
    node, source = tl.load(links_ptr + link), tl.load(links_ptr + num_links + link)
    seen = tl.load(links_ptr + 2 * num_links + link)
    row = tl.load(rows_ptr + place).to(tl.int64)
    is_real = row >= 0
    token = tl.maximum(tl.load(best_ptr + source * num_rows + place), 0)
    tl.store(drafts_ptr + (node - 1) * drafts_stride + place, token)
    is_next = link < num_next
    start = tl.load(position_ptr + row, mask=is_real, other=0)
    slot_place = start + node
    number = slot_place // block_size
    has_block = is_real & (number < num_blocks)
    block = tl.load(tables_ptr + row * table_stride + number, mask=has_block, other=0).to(tl.int64)
    slot = tl.where(has_block, block * block_size + slot_place % block_size, -1)
    tl.store(tokens_ptr + index, tl.where(is_real, token, 0), mask=is_next)
    tl.store(positions_ptr + index, start + depth, mask=is_next)
    tl.store(slots_ptr + index, slot, mask=is_next)
    tl.store(lens_ptr + index, tl.where(is_real, slot_place + 1, 0).to(tl.int32), mask=is_next)
    tl.store(tree_ptr + index, start, mask=is_next)
    tl.store(tree_ptr + tree_stride + index, seen, mask=is_next)


def next_nodes(
    rows_S: torch.Tensor, best_WM: torch.Tensor, links_3C: torch.Tensor, position_R: torch.Tensor,
    tables_RB: torch.Tensor, inputs: StepInputs, tree_2M: torch.Tensor, drafts_NS: torch.Tensor, *,
    block_size: int, depth: int,
) -> None:  # fmt: skip
    """Store the nodes at a depth as drafts, and set the inputs of the next turn for as many as it computes.

    `best_WM` are the best next ids for the tokens of the previous turn, best first; `position_R` the
    positions at which trees begin. A row without a next token drafts token 0.
    """
    if not use_triton(rows_S):
        next_nodes_reference(
            rows_S, best_WM, links_3C, position_R, tables_RB, inputs, tree_2M, drafts_NS,
            block_size=block_size, depth=depth,
        )  # fmt: skip
        return
    assert best_WM.is_contiguous() and links_3C.is_contiguous(), "ids and links must be contiguous"
    assert tree_2M.stride(1) == 1 and drafts_NS.stride(1) == 1, "lines must be contiguous"
    num_rows, num_links = len(rows_S), links_3C.shape[1]
    launch_triton(
        _next_nodes_kernel, (num_links * num_rows,),
        (rows_S, best_WM, links_3C, position_R, tables_RB, *inputs, tree_2M, drafts_NS),
        (num_rows, num_links, len(inputs.tokens_S) // num_rows, tables_RB.stride(0), tables_RB.shape[1],
         block_size, tree_2M.stride(0), drafts_NS.stride(0), depth), num_warps=1,
    )  # fmt: skip
