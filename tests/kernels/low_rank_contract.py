"""What the kernels of LoRA adapters promise, under Triton's interpreter and on a GPU.

Products are compared with float64. Rows without an adapter, and slots without weights, keep every bit.
"""

from __future__ import annotations

import pytest
import torch

from infer.kernels.linear.low_rank import (
    LowRankStack,
    RowSlots,
    RowTiles,
    add_low_rank,
    add_low_rank_reference,
    make_tiles,
)
from tests.support.thinned import thinned

TOLERANCE = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
NUM_SLOTS, SIZE, PARTS, RANK = 3, 150, [70, 33, 33], 48  # multiples of few blocks
RANKS = {1: [8, 8, 8], 3: [40, 0, 17]}  # by slot, for each part; slot 2 adapts nothing


def make_stack(dtype: torch.dtype, device: str) -> LowRankStack:
    stack = LowRankStack(
        PARTS, SIZE, num_slots=NUM_SLOTS, rank=RANK, dtype=dtype, device=torch.device(device)
    )
    generator = torch.Generator().manual_seed(0)
    for slot, ranks in RANKS.items():
        for part, rank in enumerate(ranks):
            if rank:
                a = torch.randn(rank, SIZE, generator=generator) * SIZE**-0.5
                stack.fill(slot, part, a, torch.randn(PARTS[part], rank, generator=generator))
    return stack


def exact(y: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, stack: LowRankStack) -> torch.Tensor:
    """The sum in float64, row by row."""
    out = y.double()
    for row, slot in enumerate(slots.tolist()):
        if not slot:
            continue
        h = stack.a[slot - 1].double() @ x[row].double()
        at = 0
        for part, count in enumerate(PARTS):
            out[row, at : at + count] += (
                stack.b_parts(slot)[part].double() @ h[part * RANK : (part + 1) * RANK]
            )
            at += count
    return out


class LowRankContract:
    device: str

    @pytest.mark.parametrize(
        ("num_rows", "dtype"), thinned((1, 5, 33, 530), (torch.float32, torch.bfloat16), keep=2), ids=str
    )
    def test_every_row_gets_its_own_adapter(self, num_rows: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(num_rows)
        stack = make_stack(dtype, self.device)
        slots = torch.randint(0, NUM_SLOTS + 1, (num_rows,), generator=generator).int().to(self.device)
        x = torch.randn(num_rows, SIZE, generator=generator).to(self.device, dtype)
        y = torch.randn(num_rows, sum(PARTS), generator=generator).to(self.device, dtype)
        expected = exact(y, x, slots, stack)
        for add in (add_low_rank, add_low_rank_reference):
            made = add(y.clone(), x, RowSlots(slots), stack)
            error = (made.double() - expected).abs().max() / expected.abs().max()
            assert error < TOLERANCE[dtype], f"{error:.1e}"
            is_plain = (slots == 0) | (slots == 2)
            assert torch.equal(made[is_plain], y[is_plain])

    def test_a_strided_input_and_output(self) -> None:
        stack = make_stack(torch.float32, self.device)
        slots = torch.tensor([1, 0, 3, 3, 1], dtype=torch.int32, device=self.device)
        x = torch.randn(5, SIZE + 10, device=self.device)[:, :SIZE]
        y = torch.randn(5, sum(PARTS) + 6, device=self.device)[:, : sum(PARTS)]
        expected = exact(y, x, slots, stack)
        torch.testing.assert_close(
            add_low_rank(y, x, RowSlots(slots), stack).double(), expected, atol=1e-4, rtol=1e-4
        )

    def test_a_slot_that_is_cleared_adds_nothing(self) -> None:
        stack = make_stack(torch.float32, self.device)
        for slot in (1, 2, 3):
            stack.clear(slot)
        slots = torch.tensor([1, 2, 3], dtype=torch.int32, device=self.device)
        x, y = torch.randn(3, SIZE, device=self.device), torch.randn(3, sum(PARTS), device=self.device)
        assert torch.equal(add_low_rank(y.clone(), x, RowSlots(slots), stack), y)

    @pytest.mark.parametrize("num_rows", [1, 13, 32, 128])
    def test_rows_with_one_slot_share_tiles(self, num_rows: int) -> None:
        generator = torch.Generator().manual_seed(num_rows)
        slots = torch.randint(0, 6, (num_rows,), generator=generator).int()
        tiles, wanted = make_tiles(slots.to(self.device), 5, 16), tiles_by_hand(slots, 5, 16)
        assert torch.equal(tiles.table.cpu(), wanted.table)
        assert tiles.h_TC.shape == wanted.h_TC.shape and not tiles.h_TC.any()


def tiles_by_hand(slots_T: torch.Tensor, num_slots: int, rank: int) -> RowTiles:
    """What `make_tiles` promises, row by row."""
    T, columns = len(slots_T), -(-num_slots * rank // 64) * 64
    table = torch.zeros((1 + min(T, num_slots + T // 8), 16), dtype=torch.int32)
    rows: dict[int, list[int]] = {}
    tiles: list[list[int]] = []
    for row, slot in enumerate(slots_T.tolist()):
        if slot and len(rows.get(slot, range(8))) == 8:
            rows[slot] = []
            tiles.append(rows[slot])
            table[len(tiles), 0] = slot
        if slot:
            rows[slot].append(row + 1)
            for column in range((slot - 1) * rank, slot * rank):
                table[0, 0] |= 1 << column // 64
    for number, tile in enumerate(tiles, 1):
        table[number, 1 : 1 + len(tile)] = torch.tensor(tile)
    return RowTiles(table, torch.zeros((T, 3 * columns), dtype=torch.bfloat16), columns)
