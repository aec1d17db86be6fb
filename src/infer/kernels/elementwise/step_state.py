"""What a decode step reads and advances, kept on the device so that a captured step feeds itself.

Each running sequence has a *row* of state: its last token, the position of the token about to be
computed, and its block table. A step names its rows; everything else it needs follows from them.

    rows_S ─ gather_step ─► tokens, positions, slots, lens ─► model ─► ids ─ advance_rows ─► the rows
                                   ▲                                                             │
                                   └──────────────────── next replay, no copy in ────────────────┘

The host only says which rows are new and how they are sampled (`enter_rows`) and when a table grows
(`apply_table_diffs`), and reads the ids, some steps late if it likes.
A row of -1 is padding up to the size a graph was captured for: token 0 at position 0, written to no slot
(-1) and attending to nothing (length 0).

Kernels take no number that differs between steps: one program per row, so the grid says how many.

Shapes:  S rows of a step, R rows of state, B blocks of the longest table, K changes, 6 fields of an entry.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

import torch

from infer.kernels.runtime.dispatch import jit, tl, use_triton
from infer.kernels.runtime.launch import launch_triton
from infer.kernels.sampling.sample_rows import SMALLEST_TEMPERATURE, SampleState

_ENTRY = Struct("=3q3d")  # row, top-k, seed, then temperature, top-p and min-p; eight bytes each
NUM_FIELDS = _ENTRY.size // 8


class StepInputs(NamedTuple):
    """What the model needs to compute one token of each row."""

    tokens_S: torch.Tensor  # int64
    positions_S: torch.Tensor  # int64
    slots_S: torch.Tensor  # int64: where the token's key and value go; -1: nowhere
    lens_S: torch.Tensor  # int32: how many positions it attends to, its own included

    @classmethod
    def empty(cls, num_rows: int, device: torch.device | str) -> StepInputs:
        """Memory for the inputs of `num_rows` rows: a captured step writes to the same addresses again."""
        tokens, positions, slots = torch.zeros((3, num_rows), dtype=torch.int64, device=device).unbind()
        return cls(tokens, positions, slots, torch.zeros(num_rows, dtype=torch.int32, device=device))

    def first(self, num_rows: int) -> StepInputs:
        """The inputs of the first rows, in the same memory."""
        return StepInputs(
            self.tokens_S[:num_rows],
            self.positions_S[:num_rows],
            self.slots_S[:num_rows],
            self.lens_S[:num_rows],
        )


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
    """The inputs of a step over `rows_S`; written to `out` if given, which must have S rows."""
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
    rows_S: torch.Tensor,
    ids_S: torch.Tensor,
    positions_S: torch.Tensor,
    last_token_R: torch.Tensor,
    position_R: torch.Tensor,
) -> None:
    """The specification of `advance_rows`."""
    is_real_S = rows_S >= 0
    real = rows_S[is_real_S].long()
    last_token_R[real] = ids_S[is_real_S].clamp(min=0).to(last_token_R.dtype)
    position_R[real] = positions_S[is_real_S].to(position_R.dtype)


@jit
def _advance_rows_kernel(rows_ptr, ids_ptr, positions_ptr, last_token_ptr, position_ptr):
    index = tl.program_id(0)
    row = tl.load(rows_ptr + index).to(tl.int64)
    is_real = row >= 0
    token = tl.maximum(tl.load(ids_ptr + index), 0)
    position = tl.load(positions_ptr + index)
    tl.store(last_token_ptr + row, token.to(last_token_ptr.dtype.element_ty), mask=is_real)
    tl.store(position_ptr + row, position.to(position_ptr.dtype.element_ty), mask=is_real)


def advance_rows(
    rows_S: torch.Tensor,
    ids_S: torch.Tensor,
    positions_S: torch.Tensor,
    last_token_R: torch.Tensor,
    position_R: torch.Tensor,
) -> None:
    """Make the sampled ids the rows' last tokens, at `positions_S`; no row may come twice, -1 is padding.

    A row that has no next token (its id is negative) goes on with token 0: its request has failed, but a
    step already under way must still find a token in the embedding.
    """
    if not use_triton(rows_S):
        advance_rows_reference(rows_S, ids_S, positions_S, last_token_R, position_R)
    elif rows_S.shape[0]:
        assert rows_S.is_contiguous() and ids_S.is_contiguous(), "rows and ids must be contiguous"
        assert positions_S.is_contiguous(), "positions must be contiguous"
        tensors = rows_S, ids_S, positions_S, last_token_R, position_R
        launch_triton(_advance_rows_kernel, (rows_S.shape[0],), tensors, (), num_warps=1)


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
    """Write `block` into place `index` of `row`'s table for each (row, index, block); row -1: nothing."""
    if not use_triton(tables_RB):
        apply_table_diffs_reference(tables_RB, diffs_K3)
    elif diffs_K3.shape[0]:
        assert diffs_K3.is_contiguous() and tables_RB.stride(1) == 1, "diffs and tables must be contiguous"
        grid, numbers = (diffs_K3.shape[0],), (tables_RB.stride(0),)
        launch_triton(_apply_table_diffs_kernel, grid, (tables_RB, diffs_K3), numbers, num_warps=1)


def sampling_entry(
    row: int, *, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> bytes:
    """How one row is sampled, as the bytes of an entry: what `enter_rows` takes one below the other.

    As the state's types can hold it: a tiny temperature does not become 0, which is greedy.
    """
    temperature = max(temperature, SMALLEST_TEMPERATURE) if temperature else 0.0
    top_k, seed = min(max(top_k, 0), 2**31 - 1), ((seed + 2**63) % 2**64) - 2**63
    return _ENTRY.pack(row, top_k, seed, temperature, top_p, min_p)


def enter_rows_reference(state: SampleState, entries_K6: torch.Tensor) -> None:
    """The specification of `enter_rows`."""
    entries_K6 = entries_K6[entries_K6[:, 0] >= 0]
    row, top_k, seed, *_ = entries_K6.unbind(1)
    *_, temperature, top_p, min_p = entries_K6.view(torch.float64).unbind(1)
    state.temperature_R[row] = temperature.to(state.temperature_R.dtype)
    state.top_k_R[row] = top_k.to(state.top_k_R.dtype)
    state.top_p_R[row] = top_p
    state.min_p_R[row] = min_p
    state.seed_R[row] = seed


@jit
def _enter_rows_kernel(
    entries_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, NUM_FIELDS: tl.constexpr,
):  # fmt: skip
    entry = entries_ptr + tl.program_id(0) * NUM_FIELDS
    row = tl.load(entry)
    is_real = row >= 0
    temperature = tl.load(entry + 3).to(tl.float64, bitcast=True)
    top_p = tl.load(entry + 4).to(tl.float64, bitcast=True)
    min_p = tl.load(entry + 5).to(tl.float64, bitcast=True)
    tl.store(top_k_ptr + row, tl.load(entry + 1).to(tl.int32), mask=is_real)
    tl.store(seed_ptr + row, tl.load(entry + 2), mask=is_real)
    tl.store(temperature_ptr + row, temperature.to(tl.float32), mask=is_real)
    tl.store(top_p_ptr + row, top_p, mask=is_real)
    tl.store(min_p_ptr + row, min_p, mask=is_real)


def enter_rows(state: SampleState, entries_K6: torch.Tensor) -> None:
    """Set how rows are sampled, each by its entry (`sampling_entry`); no row may come twice, -1: nothing."""
    if not use_triton(entries_K6):
        enter_rows_reference(state, entries_K6)
    elif entries_K6.shape[0]:
        assert entries_K6.is_contiguous(), "entries must be contiguous"
        launch_triton(
            _enter_rows_kernel, (entries_K6.shape[0],),
            (entries_K6, state.temperature_R, state.top_k_R, state.top_p_R, state.min_p_R, state.seed_R),
            (), NUM_FIELDS=NUM_FIELDS, num_warps=1,
        )  # fmt: skip
