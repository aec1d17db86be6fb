"""The state that a decode step reads and advances, kept on the device so that a captured step feeds itself.

Each running sequence has a *row* of state: its last token, the position of the token about to be
computed, and its block table. A step names its rows; everything else it needs follows from them.

    rows_S ─ gather_step ─► tokens, positions, slots, lens ─► model ─► ids ─ advance_rows ─► the rows
                                   ▲                                                             │
                                   └──────────────────── next replay, no copy in ────────────────┘

The host only sends new rows with their sampling settings (sample_state.py) and additions to block tables
(`apply_table_diffs`), and reads the ids, possibly some steps late.
A row of -1 is padding up to the size that a graph was captured for: token 0 at position 0, written to no slot
(-1) and attending to nothing (length 0).

Kernels take no number that differs between steps: there is one program per row, so the grid has the number.

Shapes:  S rows of a step, R rows of state, B blocks of the longest table, K changes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from infer.kernels.runtime.dispatch import jit, tl, use_triton
from infer.kernels.runtime.launch import launch_triton
from infer.kernels.sampling.sample_line import NUM_FIELDS, SampleLine
from infer.kernels.sampling.sample_state import MAX_COUNT, SampleState, constant, field

_HAS_USES, _FIELDS, _MAX_COUNT = field("has_uses"), constant(NUM_FIELDS), constant(MAX_COUNT)


class StepInputs(NamedTuple):
    """The inputs that the model needs to compute one token of each row."""

    tokens_S: torch.Tensor  # int64
    positions_S: torch.Tensor  # int64
    slots_S: torch.Tensor  # int64: slots of the tokens' keys and values; -1: not stored
    lens_S: torch.Tensor  # int32: number of positions that the token attends to, its own included

    @classmethod
    def empty(cls, num_rows: int, device: torch.device | str) -> StepInputs:
        """Allocate the inputs of `num_rows` rows; a captured step writes to the same addresses again."""
        tokens, positions, slots = torch.zeros((3, num_rows), dtype=torch.int64, device=device).unbind()
        return cls(tokens, positions, slots, torch.zeros(num_rows, dtype=torch.int32, device=device))

    def first(self, num_rows: int) -> StepInputs:
        """The inputs of the first rows, in the same memory."""
        return StepInputs(*(x[:num_rows] for x in self))


def gather_step_reference(
    rows_S: torch.Tensor, last_token_R: torch.Tensor, position_R: torch.Tensor, tables_RB: torch.Tensor, *,
    block_size: int, out: StepInputs,
) -> None:  # fmt: skip
    """The specification of `gather_step`, in PyTorch."""
    is_real_S = rows_S >= 0
    row_S = rows_S.long().clamp(min=0)
    position_S = position_R[row_S]
    block_S = tables_RB[row_S, (position_S // block_size).clamp(max=tables_RB.shape[1] - 1)].long()
    out.tokens_S.copy_(torch.where(is_real_S, last_token_R[row_S], 0))
    out.positions_S.copy_(torch.where(is_real_S, position_S, 0))
    out.slots_S.copy_(torch.where(is_real_S, block_S * block_size + position_S % block_size, -1))
    out.lens_S.copy_(torch.where(is_real_S, position_S + 1, 0))


@jit
def _gather_step_kernel(
    rows_ptr, last_token_ptr, position_ptr, tables_ptr, tokens_ptr, positions_ptr, slots_ptr, lens_ptr,
    table_stride, block_size,
):  # fmt: skip
    index = tl.program_id(0)
    row = tl.load(rows_ptr + index).to(tl.int64)
    is_real = row >= 0
    token = tl.load(last_token_ptr + row, mask=is_real, other=0).to(tl.int64)
    position = tl.load(position_ptr + row, mask=is_real, other=0).to(tl.int64)
    block = tl.load(tables_ptr + row * table_stride + position // block_size, mask=is_real, other=0)
    slot = block.to(tl.int64) * block_size + position % block_size
    tl.store(tokens_ptr + index, token)
    tl.store(positions_ptr + index, position)
    tl.store(slots_ptr + index, tl.where(is_real, slot, -1))
    tl.store(lens_ptr + index, tl.where(is_real, position + 1, 0).to(tl.int32))


def gather_step(
    rows_S: torch.Tensor, last_token_R: torch.Tensor, position_R: torch.Tensor, tables_RB: torch.Tensor, *,
    block_size: int, out: StepInputs | None = None,
) -> StepInputs:  # fmt: skip
    """Gather the inputs of a step over `rows_S`, into `out` if given, which must have S rows."""
    num_rows = rows_S.shape[0]
    if out is None:
        out = StepInputs.empty(num_rows, rows_S.device)
    assert out.tokens_S.shape[0] == num_rows, f"{out.tokens_S.shape[0]} rows of inputs for {num_rows} rows"
    if not use_triton(rows_S):
        gather_step_reference(rows_S, last_token_R, position_R, tables_RB, block_size=block_size, out=out)
        return out
    assert rows_S.is_contiguous() and tables_RB.stride(1) == 1, "rows and tables must be contiguous"
    if num_rows:
        launch_triton(
            _gather_step_kernel, (num_rows,),
            (rows_S, last_token_R, position_R, tables_RB,
             out.tokens_S, out.positions_S, out.slots_S, out.lens_S),
            (tables_RB.stride(0), block_size), num_warps=1,
        )  # fmt: skip
    return out


def advance_rows_reference(
    rows_S: torch.Tensor, ids_S: torch.Tensor, positions_S: torch.Tensor, last_token_R: torch.Tensor,
    position_R: torch.Tensor, counted: SampleState | None = None,
) -> None:  # fmt: skip
    """The specification of `advance_rows`."""
    is_real_S = rows_S >= 0
    real, ids = rows_S[is_real_S].long(), ids_S[is_real_S]
    tokens = ids.clamp(min=0).to(last_token_R.dtype)
    positions = positions_S[is_real_S].to(position_R.dtype)
    if counted is not None:
        is_counted = (counted.lines_RF[real, SampleLine._fields.index("has_uses")] > 0) & (ids >= 0)
        place = real[is_counted], ids[is_counted]
        uses = counted.uses_RV[place]
        counted.uses_RV[place] = uses + ((uses & MAX_COUNT) < MAX_COUNT).to(uses.dtype)
    last_token_R[real] = tokens  # after all allocations, so that all state is written or none
    position_R[real] = positions


@jit
def _advance_rows_kernel(
    rows_ptr, ids_ptr, positions_ptr, last_token_ptr, position_ptr, lines_ptr, uses_ptr, V,
    COUNTS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    row = tl.load(rows_ptr + index).to(tl.int64)
    is_real = row >= 0
    token = tl.load(ids_ptr + index)
    position = tl.load(positions_ptr + index)
    tl.store(last_token_ptr + row, tl.maximum(token, 0).to(last_token_ptr.dtype.element_ty), mask=is_real)
    tl.store(position_ptr + row, position.to(position_ptr.dtype.element_ty), mask=is_real)
    if COUNTS:
        is_counted = is_real & (tl.load(lines_ptr + row * _FIELDS + _HAS_USES, mask=is_real, other=0) > 0)
        use_ptr, is_counted = uses_ptr + row * V + token, is_counted & (token >= 0)
        use = tl.load(use_ptr, mask=is_counted, other=0)
        is_counted = is_counted & ((use & _MAX_COUNT) < _MAX_COUNT)
        tl.store(use_ptr, (use + 1).to(tl.int16), mask=is_counted)


def advance_rows(
    rows_S: torch.Tensor, ids_S: torch.Tensor, positions_S: torch.Tensor, last_token_R: torch.Tensor,
    position_R: torch.Tensor, counted: SampleState | None = None,
) -> None:  # fmt: skip
    """Make the sampled ids the rows' last tokens, at `positions_S`; rows must be distinct, -1 is padding.

    A row without a next token (its id is negative) goes on with token 0: its request has failed, but a
    step already in flight must still find a token in the embedding.
    With the state of the sampler, the ids are counted there for rows with penalties or bans.
    """
    if not use_triton(rows_S):
        advance_rows_reference(rows_S, ids_S, positions_S, last_token_R, position_R, counted)
    elif rows_S.shape[0]:
        assert rows_S.is_contiguous() and ids_S.is_contiguous(), "rows and ids must be contiguous"
        assert positions_S.is_contiguous(), "positions must be contiguous"
        uses = (position_R, position_R) if counted is None else (counted.lines_RF, counted.uses_RV)
        tensors = rows_S, ids_S, positions_S, last_token_R, position_R, *uses
        launch_triton(
            _advance_rows_kernel, (rows_S.shape[0],), tensors, (uses[1].shape[-1],),
            COUNTS=counted is not None, num_warps=1,
        )  # fmt: skip


def apply_table_diffs_reference(tables_RB: torch.Tensor, diffs_K3: torch.Tensor) -> None:
    """The specification of `apply_table_diffs`."""
    row, index, block = diffs_K3[diffs_K3[:, 0] >= 0].long().unbind(1)
    tables_RB[row, index] = block.to(tables_RB.dtype)


@jit
def _apply_table_diffs_kernel(tables_ptr, diffs_ptr, table_stride):
    diff = diffs_ptr + tl.program_id(0) * 3
    row = tl.load(diff).to(tl.int64)
    index = tl.load(diff + 1)
    block = tl.load(diff + 2).to(tables_ptr.dtype.element_ty)
    tl.store(tables_ptr + row * table_stride + index, block, mask=row >= 0)


def apply_table_diffs(tables_RB: torch.Tensor, diffs_K3: torch.Tensor) -> None:
    """Write `block` to entry `index` of `row`'s table for each (row, index, block); row -1: nothing."""
    if not use_triton(tables_RB):
        apply_table_diffs_reference(tables_RB, diffs_K3)
    elif diffs_K3.shape[0]:
        assert diffs_K3.is_contiguous() and tables_RB.stride(1) == 1, "diffs and tables must be contiguous"
        grid, numbers = (diffs_K3.shape[0],), (tables_RB.stride(0),)
        launch_triton(_apply_table_diffs_kernel, grid, (tables_RB, diffs_K3), numbers, num_warps=1)
