"""What the kernels of the gated delta rule promise: the numbers of the reference, wherever blocks end."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from infer.kernels.attention.prefill import PrefillChunk, PrefillChunks
from infer.kernels.delta.paged import recur_paged
from infer.kernels.delta.reference import DeltaRule, StateCache, StateSpan, pieces_of, run_spans

BLOCK_SIZE, NUM_BLOCKS = 16, 24
# key heads, value heads, key size, value size
SHAPES = [(2, 4, 16, 16), (1, 2, 24, 40), (3, 6, 8, 12)]


def make_layer(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: str, num_blocks: int = NUM_BLOCKS
) -> tuple[DeltaRule, StateCache]:
    num_keys, num_values, key_dim, value_dim = shape
    num_channels = 2 * num_keys * key_dim + num_values * value_dim
    rule = DeltaRule(
        0.5 * torch.randn(num_channels, 4, device=device).to(dtype),
        torch.randn(num_values, device=device) - 2,
        torch.randn(num_values, device=device),
        num_keys,
        key_dim,
        value_dim,
    )
    # states lie in larger blocks, as they do in a cache
    numbers = torch.randn(2, num_blocks, num_values // 2 * key_dim * value_dim + 64, device=device)
    states = numbers[:, :, :-64].view(2, num_blocks, num_values // 2, key_dim, value_dim)
    tails = torch.randn(num_blocks, 3, num_channels, device=device).to(dtype)
    return rule, StateCache(states, tails)


def spans_of(
    tables_RB: torch.Tensor, block_size: int, lens: list[int], rows: list[int], chunks: list[PrefillChunk],
    drafts: list[int],
) -> list[StateSpan]:  # fmt: skip
    """The same work for the reference, one row after the other."""
    found = []
    runs = [(place, 1, row, length - 1) for place, (row, length) in enumerate(zip(rows, lens, strict=True))]
    runs = [run for run in runs if run[3] >= 0]
    counts = [0] * len(runs) + drafts
    for (first, num, row, start), count in zip([*runs, *chunks], counts, strict=True):
        known = start + num - count
        for begin, end in pieces_of(start, known, block_size):
            read = tables_RB[row, (begin - 1) // block_size] if begin else torch.tensor(-1)
            blocks = torch.stack([read.to(tables_RB.device), tables_RB[row, begin // block_size]]).long()
            tokens = slice(first - start + begin, first - start + end)
            found.append(StateSpan(tokens, blocks[:1], blocks[1:]))
        if count:
            tokens = slice(first + num - count, first + num)
            found.append(StateSpan(tokens, tables_RB[row, (known - 1) // block_size].long()[None], None))
    return found


def check(
    device: str, shape: tuple[int, int, int, int], dtype: torch.dtype, lens: list[int],
    chunks: list[PrefillChunk], *, drafts: list[int] | None = None, block_size: int = BLOCK_SIZE,
    num_blocks: int = NUM_BLOCKS,
) -> None:  # fmt: skip
    """Compare outputs, states and tails; rows that decode come first, then chunks, perhaps with drafts."""
    torch.manual_seed(0)
    rule, cache = make_layer(shape, dtype, device, num_blocks)
    num_rows = len(lens) + len(chunks)
    tables_RB = torch.randperm(num_blocks, device=device).int()[: num_rows * (num_blocks // num_rows)]
    tables_RB = tables_RB.view(num_rows, -1)
    rows = [row if length else -1 for row, length in enumerate(lens)]
    num_tokens = len(lens) + sum(chunk.num for chunk in chunks)
    num_channels, num_values = rule.conv_CW.shape[0], len(rule.decay_V)
    whole_TX = torch.randn(num_tokens, num_channels + 2 * num_values, device=device).to(dtype)
    inputs = torch.split(whole_TX, [num_channels, num_values, num_values], dim=-1)
    counts = [0] * len(chunks) if drafts is None else drafts
    spans = spans_of(tables_RB, block_size, lens, rows, chunks, counts)
    expected_cache = StateCache(cache.states.clone(), cache.tails.clone())
    expected = run_spans(rule, expected_cache, spans, *inputs)
    rows_S, lens_S = (torch.tensor(each, dtype=torch.int32, device=device) for each in (rows, lens))
    padding = [PrefillChunk(0, 0, 0, 0)]
    whole_C4 = torch.tensor([*chunks, *padding], dtype=torch.int32, device=device)
    tiles = PrefillChunks.from_arrays(whole_C4, chunks, whole_C4)
    if drafts is not None:
        both = list(zip(chunks, drafts, strict=True))
        known = [chunk._replace(num=chunk.num - count) for chunk, count in both]
        last = [
            PrefillChunk(chunk.first + chunk.num - count, count, chunk.row, chunk.start + chunk.num - count)
            for chunk, count in both
        ]
        known_C4, drafts_C4 = (
            torch.tensor([*each, *padding], dtype=torch.int32, device=device) for each in (known, last)
        )
        tiles = replace(tiles, whole_C4=known_C4, num_drafts=tuple(drafts), drafts_C4=drafts_C4)
    runs_S4 = PrefillChunks.from_rows(rows_S, lens_S).tiles_W4
    out = recur_paged(rule, cache, tables_RB, block_size, (rows_S, lens_S), runs_S4, tiles, *inputs)
    bound = 5e-2 if dtype == torch.bfloat16 else 2e-5 if device == "cpu" else 3e-4
    torch.testing.assert_close(out, expected, rtol=bound, atol=bound)
    torch.testing.assert_close(cache.states, expected_cache.states, rtol=bound, atol=bound)
    assert torch.equal(cache.tails, expected_cache.tails)


class DeltaContract:
    device = "cpu"

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_rows_that_decode(self, shape: tuple[int, int, int, int]) -> None:
        """At the first position, within a block, at its end and behind it; and padding."""
        check(self.device, shape, torch.float32, [1, 7, 16, 17, 0, 33], [])

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_chunks_from_state_to_state(self, shape: tuple[int, int, int, int]) -> None:
        """From nothing, from within a block across its end, and of one token."""
        chunks = [PrefillChunk(0, 21, 0, 0), PrefillChunk(21, 35, 1, 15), PrefillChunk(56, 1, 2, 31)]
        check(self.device, shape, torch.float32, [], chunks)

    def test_both_and_short_chunks_behind_each_other(self) -> None:
        chunks = [PrefillChunk(3, 2, 3, 14), PrefillChunk(5, 16, 4, 16), PrefillChunk(21, 3, 5, 30)]
        check(self.device, SHAPES[0], torch.float32, [5, 0, 18], chunks)

    def test_two_tokens_on_both_sides_of_a_block_end(self) -> None:
        """The tails of both blocks need inputs of the chunk before, which the first of them replaces."""
        check(
            self.device, SHAPES[0], torch.float32, [], [PrefillChunk(0, 2, 0, 15), PrefillChunk(2, 3, 1, 30)]
        )

    def test_drafts_see_the_states_before_them_and_leave_them_alone(self) -> None:
        """After one token: within a block, across its end, at the first of a block; and none."""
        chunks = [
            PrefillChunk(1, 6, 1, 4), PrefillChunk(7, 9, 2, 13), PrefillChunk(16, 4, 3, 15),
            PrefillChunk(20, 1, 4, 7),
        ]  # fmt: skip
        check(self.device, SHAPES[0], torch.float32, [5], chunks, drafts=[5, 8, 3, 0])

    def test_bfloat16(self) -> None:
        check(self.device, SHAPES[0], torch.bfloat16, [9, 16], [PrefillChunk(2, 19, 2, 5)])

    def test_a_state_that_has_no_block_is_written_nowhere(self) -> None:
        """Rows that begin, one that decodes and one with a chunk across the end of a block."""
        torch.manual_seed(0)
        rule, cache = make_layer(SHAPES[0], torch.float32, self.device)
        before = cache.states.clone(), cache.tails.clone()
        tables_RB = torch.full((2, 4), -1, dtype=torch.int32, device=self.device)
        num_channels, num_values = rule.conv_CW.shape[0], len(rule.decay_V)
        whole_TX = torch.randn(20, num_channels + 2 * num_values, device=self.device)
        inputs = torch.split(whole_TX, [num_channels, num_values, num_values], dim=-1)
        rows_S, lens_S = (torch.tensor([n], dtype=torch.int32, device=self.device) for n in (0, 1))
        chunks = [PrefillChunk(1, 19, 1, 0)]
        whole_C4 = torch.tensor(chunks, dtype=torch.int32, device=self.device)
        tiles = PrefillChunks.from_arrays(whole_C4, chunks, whole_C4)
        runs_S4 = PrefillChunks.from_rows(rows_S, lens_S).tiles_W4
        recur_paged(rule, cache, tables_RB, BLOCK_SIZE, (rows_S, lens_S), runs_S4, tiles, *inputs)
        assert torch.equal(cache.states, before[0]) and torch.equal(cache.tails, before[1])
