"""What the two attention kernels over the paged cache promise, wherever they run.

Written once and tested twice, as `kernel_contract.py` explains. The trap set here: the store is NaN in every
slot that holds no position of a row, so a kernel that reads one slot too many shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from infer.cache.kv_store import KVStore
from infer.execution.gpu.step import DeviceStep
from infer.kernels.attention.decode import attend_decode, attend_decode_reference
from infer.kernels.attention.decode_work import DecodeWork
from infer.kernels.attention.paged import PagedKV
from infer.kernels.attention.prefill import (
    PrefillChunk,
    PrefillChunks,
    attend_prefill,
    attend_prefill_reference,
    build_prefill_chunks,
    tokens_per_tile,
)
from infer.kernels.elementwise.kv_codes import LARGEST, KVScales, write_codes_reference
from infer.kernels.elementwise.no_tree import NO_TREE
from infer.kernels.runtime.dispatch import use_triton
from infer.layers.attention import AttentionLayer
from infer.speculative.tree import tree_of

codes = pytest.mark.parametrize("kept_as", LARGEST, ids=["fp8", "int8"])
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(slots=True)
class Paged:
    """A store whose blocks lie in random order, and the tables that find them."""

    keys: torch.Tensor
    values: torch.Tensor
    tables: torch.Tensor
    block_size: int
    scales: KVScales | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def bend(self, num_heads: int) -> None:
        """Let scores have a cap that bites, and each head a sink: loud, quiet and ordinary ones."""
        self.softcap, sinks = 1.5, torch.randn(num_heads, device=self.keys.device)
        sinks[:2] = torch.tensor([200.0, -200.0])[: min(num_heads, 2)]
        self.sinks = sinks

    def keep_as(self, dtype: torch.dtype) -> None:
        """Keep keys and values as codes; what was not a number is a code and a scale that are none."""
        num_slots, G, _ = self.keys.shape
        lost = self.keys[:, 0, 0].isnan()
        everywhere = torch.arange(num_slots, device=self.keys.device)
        scales = torch.empty(2, num_slots // self.block_size, G, self.block_size, device=self.keys.device)
        kept = []
        for x, side in zip((self.keys, self.values), scales, strict=True):
            codes = torch.empty(x.shape, dtype=dtype, device=x.device)
            write_codes_reference(x.nan_to_num(), codes, side, everywhere)
            codes.view(torch.uint8)[lost] = 0x7F
            side[everywhere[lost] // self.block_size, :, everywhere[lost] % self.block_size] = torch.nan
            kept.append(codes)
        self.keys, self.values = kept
        self.scales = KVScales(*scales)

    def kv(self, scale: float, window: int | None = None) -> PagedKV:
        """What kernels are given of it."""
        kv = PagedKV(self.keys, self.values, self.tables, self.block_size, scale, window, self.scales)
        return kv._replace(softcap=self.softcap, sinks_N=self.sinks)

    def forget(self, row: int, num_tokens: int) -> None:
        """Put NaN where the first tokens of a row were: behind a window a block may be another sequence's."""
        positions = torch.arange(max(num_tokens, 0), device=self.tables.device)
        blocks = self.tables[row, positions // self.block_size].long()
        slots = blocks * self.block_size + positions % self.block_size
        if self.scales is None:
            self.keys[slots] = self.values[slots] = torch.nan
            return
        for codes, side in zip((self.keys, self.values), self.scales, strict=True):
            codes.view(torch.uint8)[slots] = 0x7F
            side[blocks, :, positions % self.block_size] = torch.nan


def make_paged(
    lens: Sequence[int], heads: Heads, *, block_size: int, dtype: torch.dtype, device: str, num_spare: int = 3
) -> Paged:
    """One row of the tables per length; NaN wherever no row has a position."""
    blocks_of = [-(-length // block_size) for length in lens]
    order = torch.randperm(sum(blocks_of) + num_spare).tolist()
    num_slots = len(order) * block_size
    shape = (num_slots, heads.num_kv_heads, heads.head_dim)
    owned = torch.zeros(num_slots, dtype=torch.bool)
    tables = torch.full((len(lens), max([*blocks_of, 1])), 2**30, dtype=torch.int32)  # beyond the store
    for row, (length, num_blocks) in enumerate(zip(lens, blocks_of, strict=True)):
        blocks = torch.tensor([order.pop() for _ in range(num_blocks)], dtype=torch.int32)
        tables[row, :num_blocks] = blocks
        slots = (blocks.long()[:, None] * block_size + torch.arange(block_size)).flatten()[:length]
        owned[slots] = True
    keys, values = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    keys[~owned.to(device)] = values[~owned.to(device)] = torch.nan
    return Paged(keys, values, tables.to(device), block_size)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


class OnDevice:
    """Subclass it with a `device` on which `use_triton` holds."""

    device: str
    half_precision: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)

    @pytest.fixture(autouse=True)
    def seed(self) -> None:
        torch.manual_seed(0)

    def test_the_kernel_and_not_the_reference_is_under_test(self) -> None:
        assert use_triton(torch.zeros(1, device=self.device))


class DecodeContract(OnDevice):
    """One query per row."""

    def attend(
        self, q: torch.Tensor, kv: PagedKV, rows: torch.Tensor, lens: torch.Tensor, work: DecodeWork
    ) -> torch.Tensor:
        """The kernel under test."""
        return attend_decode(q, kv, rows, lens, work)

    def check(
        self,
        lens: list[int],
        heads: Heads,
        *,
        block_size: int = 16,
        split_len: int | None = 32,
        window: int | None = None,
        dtype: torch.dtype = torch.float32,
        num_layers: int = 1,
        kept_as: torch.dtype | None = None,
        is_bent: bool = False,
    ) -> None:
        """The kernel equals its reference, on scratch that is NaN and then on what the last layer left."""
        paged = make_paged(lens, heads, block_size=block_size, dtype=dtype, device=self.device)
        if kept_as is not None:
            paged.keep_as(kept_as)
        if is_bent:
            paged.bend(heads.num_heads)
        rows = torch.randperm(len(lens)).to(self.device, torch.int32)  # not the order of the tables
        lens_S = torch.tensor(lens, dtype=torch.int32, device=self.device)[rows.long()]
        work = DecodeWork(
            max_rows=len(lens) + 2,
            max_len=max(*lens, 1),
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            device=self.device,
            split_len=split_len,
        )
        for scratch in (work.sums, work.maxima, work.denominators):
            scratch.fill_(torch.nan)
        work.plan(rows, lens_S, window=window)
        for _ in range(num_layers):
            q = torch.randn(len(lens), heads.num_heads, heads.head_dim, device=self.device).to(dtype)
            kv = paged.kv(0.3, window)
            expected = attend_decode_reference(q, kv, rows, lens_S)
            for row, length in enumerate(lens):
                paged.forget(row, 0 if window is None else length - window)
            actual = self.attend(q, kv, rows, lens_S, work)
            assert_close(actual, expected)
        assert not work.tickets.any()

    @pytest.mark.parametrize(
        "heads", [Heads(2, 2, 64), Heads(4, 2, 80), Heads(4, 1, 128), Heads(14, 2, 16)], ids=str
    )
    def test_decode_at_lengths_around_a_block_and_a_split(self, heads: Heads) -> None:
        self.check([1, 15, 17, 32, 33, 70], heads)

    def test_decode_with_a_soft_cap_and_sinks(self) -> None:
        self.check([1, 15, 33, 70, 0], Heads(4, 2, 32), is_bent=True)
        self.check([1, 41, 100], Heads(8, 1, 64), window=40, is_bent=True, kept_as=torch.int8)

    def test_decode_in_half_precision(self) -> None:
        for dtype in self.half_precision:
            self.check([5, 70], Heads(6, 2, 64), dtype=dtype)

    @codes
    def test_decode_over_codes_of_8_bits(self, kept_as: torch.dtype) -> None:
        self.check([1, 17, 33, 0], Heads(4, 2, 80), kept_as=kept_as)
        self.check([1, 41, 60], Heads(7, 1, 128), kept_as=kept_as, window=40)
        for dtype in self.half_precision:
            self.check([5, 70], Heads(4, 4, 64), kept_as=kept_as, dtype=dtype)

    def test_decode_writes_zeros_for_padding_and_reads_nothing(self) -> None:
        self.check([0, 40, 0, 3, 0], Heads(4, 2, 32), num_layers=2)
        self.check([0], Heads(4, 2, 32))

    @pytest.mark.parametrize("window", [1, 40])
    def test_decode_within_a_window(self, window: int) -> None:
        self.check([1, 41, 0, 100], Heads(4, 2, 32), window=window)

    @pytest.mark.parametrize("kept_as", [None, torch.int8], ids=str)
    def test_drafts_of_a_tree_see_their_ancestors(self, kept_as: torch.dtype | None) -> None:
        """Every token of three windows is a row: two trees that begin at different places, and a chain."""
        heads, starts, backs = Heads(2, 1, 32), (37, 63, 20), (1, *tree_of(16).backs)
        paged = make_paged(
            [start + 17 for start in starts], heads, block_size=16, dtype=torch.float32, device=self.device
        )
        if kept_as is not None:
            paged.keep_as(kept_as)
        seen = [1]
        for node in range(1, 17):
            seen.append(seen[node - backs[node]] | 1 << node)
        begins = torch.tensor(starts).repeat_interleave(17)
        tree_2S = torch.stack([begins, torch.tensor(seen).repeat(3)])
        tree_2S[0, 34:] = NO_TREE
        tree_2S, lens = tree_2S.to(self.device), begins + torch.arange(1, 18).repeat(3)
        lens = lens.to(self.device, torch.int32)
        rows = torch.arange(3, dtype=torch.int32, device=self.device).repeat_interleave(17)
        work = DecodeWork(
            max_rows=51,
            max_len=96,
            num_heads=2,
            num_kv_heads=1,
            head_dim=32,
            device=self.device,
            split_len=32,
        )
        work.plan(rows, lens)
        q = torch.randn(51, 2, 32, device=self.device)
        expected = attend_decode_reference(q, paged.kv(0.3), rows, lens, tree_2S)
        assert_close(attend_decode(q, paged.kv(0.3), rows, lens, work, tree_2S=tree_2S), expected)
        plain = attend_decode_reference(q, paged.kv(0.3), rows, lens)
        is_other = (plain - expected).abs().amax(dim=(1, 2)) > 1e-3
        assert not is_other[[0, 1, 2, *range(34, 51)]].any() and is_other[[7, 16, 24, 33]].all()

    def test_decode_with_larger_blocks_and_many_splits(self) -> None:
        self.check([150, 2], Heads(2, 1, 16), block_size=64, split_len=16)

    def test_decode_makes_splits_longer_rather_than_too_many(self) -> None:
        self.check([70, 3], Heads(2, 2, 16), split_len=1)

    def test_decode_with_the_splits_it_would_choose(self) -> None:
        self.check([130, 64, 65], Heads(2, 2, 16), split_len=None)

    def test_a_query_may_be_a_slice_of_a_wider_tensor(self) -> None:
        heads, lens = Heads(4, 2, 32), torch.tensor([50, 9], dtype=torch.int32, device=self.device)
        paged = make_paged(lens.tolist(), heads, block_size=16, dtype=torch.float32, device=self.device)
        qkv = torch.full((2, 8, 32), torch.nan, device=self.device)
        q = qkv[:, 1:5].copy_(torch.randn(2, 4, 32))
        rows = torch.arange(2, dtype=torch.int32, device=self.device)
        work = DecodeWork(
            max_rows=2, max_len=64, num_heads=4, num_kv_heads=2, head_dim=32, device=self.device, split_len=32
        )
        work.plan(rows, lens)
        actual = self.attend(q, paged.kv(0.3), rows, lens, work)
        assert_close(actual, attend_decode_reference(q, paged.kv(0.3), rows, lens))

    def test_a_row_does_not_depend_on_its_neighbours(self) -> None:
        heads, lens = Heads(4, 2, 32), [37, 100, 80, 0]
        paged = make_paged(lens, heads, block_size=16, dtype=torch.float32, device=self.device)
        q = torch.randn(4, 4, 32, device=self.device)
        rows = torch.arange(4, dtype=torch.int32, device=self.device)
        work = DecodeWork(
            max_rows=4,
            max_len=200,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            device=self.device,
            split_len=32,
        )

        def attend(lens: list[int]) -> torch.Tensor:
            lens_S = torch.tensor(lens, dtype=torch.int32, device=self.device)
            work.plan(rows, lens_S)
            return self.attend(q, paged.kv(0.3), rows, lens_S, work)

        together = attend(lens)
        for row in range(3):
            alone = attend([length if index == row else 0 for index, length in enumerate(lens)])
            assert torch.equal(alone[row], together[row])

    def test_the_work_list_names_every_position_once_and_whole_splits_first(self) -> None:
        lens = torch.tensor([100, 0, 32, 33], dtype=torch.int32, device=self.device)
        rows = torch.tensor([5, 7, 2, 0], dtype=torch.int32, device=self.device)
        work = DecodeWork(
            max_rows=4,
            max_len=128,
            num_heads=1,
            num_kv_heads=1,
            head_dim=16,
            device=self.device,
            split_len=32,
        )
        work.plan(rows, lens)
        items, num_items = work.work_list(None)
        assert items[: num_items.item(), :6].tolist() == [
            [0, 5, 0, 32, 0, 4], [0, 5, 32, 64, 1, 4], [0, 5, 64, 96, 2, 4], [3, 0, 0, 32, 0, 2],
            [0, 5, 96, 100, 3, 4], [1, 7, 0, 0, 0, 1], [2, 2, 0, 32, 0, 1], [3, 0, 32, 33, 1, 2],
        ]  # fmt: skip


class PrefillContract(OnDevice):
    """Many queries per row."""

    def check(
        self,
        spans: list[tuple[int, int]],  # (start, num) of a chunk of each row
        heads: Heads,
        *,
        block_size: int = 16,
        window: int | None = None,
        dtype: torch.dtype = torch.float32,
        num_spare_tiles: int = 0,
        kept_as: torch.dtype | None = None,
        is_bent: bool = False,
    ) -> None:
        """The kernel equals its reference and leaves the tokens between the chunks alone."""
        lens = [start + num for start, num in spans]
        paged = make_paged(lens, heads, block_size=block_size, dtype=dtype, device=self.device)
        if kept_as is not None:
            paged.keep_as(kept_as)
        if is_bent:
            paged.bend(heads.num_heads)
        chunks, first = [], 1
        for row, (start, num) in enumerate(spans):
            chunks.append(PrefillChunk(first=first, num=num, row=row, start=start))
            first += num + 1  # a token of no chunk
        per_tile = tokens_per_tile(heads.num_heads, heads.num_kv_heads)
        tiles = build_prefill_chunks(chunks, tokens_per_tile=per_tile)
        max_tiles = len(tiles) + num_spare_tiles
        tiles = build_prefill_chunks(chunks, tokens_per_tile=per_tile, max_tiles=max_tiles)
        batch = PrefillChunks.from_arrays(torch.from_numpy(tiles).to(self.device), chunks)
        q = torch.randn(first, heads.num_heads, heads.head_dim, device=self.device).to(dtype)
        out, kv = torch.full_like(q, torch.nan), paged.kv(0.3, window)
        expected = attend_prefill_reference(q, kv, batch, out=torch.full_like(q, torch.nan))
        for row, (start, _) in enumerate(spans):
            paged.forget(row, 0 if window is None else start - window + 1)
        actual = attend_prefill(q, kv, batch, out=out)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
        assert out.isnan().any() and not out.isnan().all()

    @pytest.mark.parametrize(
        "heads", [Heads(2, 2, 64), Heads(4, 2, 80), Heads(4, 1, 128), Heads(14, 2, 16)], ids=str
    )
    def test_prefill_of_whole_prompts_and_of_chunks(self, heads: Heads) -> None:
        self.check([(0, 1), (0, 17), (15, 20), (130, 3)], heads)

    def test_prefill_with_a_soft_cap_and_sinks(self) -> None:
        self.check([(0, 1), (0, 17), (15, 20), (130, 3)], Heads(4, 2, 32), is_bent=True)
        self.check([(0, 9), (90, 30)], Heads(8, 1, 64), window=20, is_bent=True, kept_as=torch.int8)

    def test_prefill_over_several_tiles(self) -> None:
        self.check([(0, 80), (70, 70)], Heads(2, 1, 16), num_spare_tiles=3)

    def test_prefill_in_half_precision(self) -> None:
        for dtype in self.half_precision:
            self.check([(0, 20), (100, 30)], Heads(4, 2, 32), dtype=dtype)

    @pytest.mark.parametrize("window", [1, 20, 100])
    def test_prefill_within_a_window(self, window: int) -> None:
        self.check([(0, 9), (90, 75)], Heads(4, 1, 16), window=window)

    @codes
    def test_prefill_over_codes_of_8_bits(self, kept_as: torch.dtype) -> None:
        self.check([(0, 17), (15, 20), (130, 3)], Heads(4, 2, 80), kept_as=kept_as)
        self.check([(0, 9), (90, 30)], Heads(7, 1, 128), kept_as=kept_as, window=20)
        for dtype in self.half_precision:
            self.check([(0, 20), (100, 30)], Heads(4, 2, 64), kept_as=kept_as, dtype=dtype)

    def test_prefill_with_larger_blocks(self) -> None:
        self.check([(0, 65), (64, 5)], Heads(2, 1, 32), block_size=64)

    @pytest.mark.parametrize("window", [None, 20])
    def test_an_invariant_token_has_the_same_bits_however_its_prompt_is_cut(self, window: int | None) -> None:
        heads, num = Heads(4, 2, 16), 70
        for dtype in (torch.float32, *self.half_precision[:1]):
            paged = make_paged([7, num], heads, block_size=16, dtype=dtype, device=self.device)
            q = torch.randn(num, heads.num_heads, heads.head_dim, device=self.device).to(dtype)

            def attend(starts: list[int], q: torch.Tensor = q, paged: Paged = paged) -> torch.Tensor:
                ends = [*starts[1:], num]
                chunks = [
                    PrefillChunk(start, end - start, 1, start)
                    for start, end in zip(starts, ends, strict=True)
                ]
                tiles = build_prefill_chunks(chunks, tokens_per_tile=tokens_per_tile(4, 2))
                batch = PrefillChunks.from_arrays(torch.from_numpy(tiles).to(self.device), chunks)
                return attend_prefill(q, paged.kv(0.3, window), batch, invariant=True)

            whole = attend([0])
            assert torch.equal(attend([0, 1, 33, 68, 69]), whole)
            if window is not None:
                paged.forget(1, 68 - window + 1)
                assert torch.equal(attend([68])[68:], whole[68:])
                assert torch.equal(attend([68, 69])[68:], whole[68:])

    def test_an_invariant_step_computes_rows_that_decode_as_if_they_were_prompts(self) -> None:
        heads, dtype = Heads(4, 2, 16), torch.float32
        paged = make_paged([9, 40, 3], heads, block_size=16, dtype=dtype, device=self.device)
        store = SimpleNamespace(keys=[paged.keys], values=[paged.values], tables=[0], scales=[None])
        q = torch.randn(5, 4, 16, device=self.device)
        work = DecodeWork(
            max_rows=5, max_len=64, num_heads=4, num_kv_heads=2, head_dim=16, device=self.device
        )

        def attend(lens: list[int], chunks: list[PrefillChunk]) -> torch.Tensor:
            """The first queries decode rows 0, 1, ...; a length of 0 is padding."""
            tiles = build_prefill_chunks(chunks, tokens_per_tile=tokens_per_tile(4, 2))
            step = DeviceStep(
                cast(KVStore, store), paged.tables[None], work, block_size=16,
                positions_T=q.new_zeros(5), slots_KT=q.new_zeros(1, 5),
                rows_S=torch.arange(len(lens), dtype=torch.int32, device=self.device),
                lens_S=torch.tensor(lens, dtype=torch.int32, device=self.device),
                chunks=PrefillChunks.from_arrays(torch.from_numpy(tiles).to(self.device), chunks),
                backend="invariant",
            )  # fmt: skip
            return step.attend(AttentionLayer(0, 0.3), q, q, q)

        decoded = attend([9, 40, 0], [PrefillChunk(first=3, num=2, row=2, start=1)])
        prompts = attend([], [PrefillChunk(0, 1, 0, 8), PrefillChunk(1, 1, 1, 39), PrefillChunk(3, 2, 2, 1)])
        for place in (0, 1, 3, 4):
            assert torch.equal(decoded[place], prompts[place]), place
