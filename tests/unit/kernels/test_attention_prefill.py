"""Attention of chunks: the reference, and the list of tiles."""

from __future__ import annotations

import pytest
import torch

from infer.errors import ConfigError
from infer.kernels.attention.prefill import (
    PrefillChunk,
    PrefillChunks,
    attend_prefill,
    build_prefill_chunks,
    check_flash,
    tokens_per_tile,
)
from infer.kernels.attention.reference import attend_naive
from tests.kernels.attention_contract import Heads, make_paged


@pytest.mark.parametrize("window", [None, 4])
def test_a_chunk_attends_to_its_row_up_to_each_token(window: int | None) -> None:
    torch.manual_seed(0)
    paged = make_paged([5, 11], Heads(4, 2, 8), block_size=4, dtype=torch.float32, device="cpu")
    chunks = [PrefillChunk(first=0, num=5, row=0, start=0), PrefillChunk(first=6, num=3, row=1, start=8)]
    tiles = build_prefill_chunks(chunks, tokens_per_tile=tokens_per_tile(4, 2))
    q = torch.randn(10, 4, 8)
    got = attend_prefill(q, paged.kv(0.3, window), PrefillChunks.from_arrays(torch.from_numpy(tiles), chunks))
    for first, num, row, start in chunks:
        slots = [int(paged.tables[row, p // 4]) * 4 + p % 4 for p in range(start + num)]
        expected = attend_naive(
            q[first : first + num], paged.keys[slots], paged.values[slots], scale=0.3, window=window
        )
        torch.testing.assert_close(got[first : first + num], expected)


def test_tiles_cover_each_chunk_longest_first_and_end_in_empty_ones() -> None:
    chunks = [PrefillChunk(first=0, num=70, row=3, start=0), PrefillChunk(first=70, num=33, row=1, start=100)]
    tiles = build_prefill_chunks(chunks, tokens_per_tile=32, max_tiles=7)
    assert tiles.tolist() == [
        [102, 1, 1, 132],
        [70, 32, 1, 100],
        [64, 6, 3, 64],
        [32, 32, 3, 32],
        [0, 32, 3, 0],
        [0, 0, 0, 0],
        [0, 0, 0, 0],
    ]
    assert build_prefill_chunks([], tokens_per_tile=32).shape == (0, 4)
    with pytest.raises(AssertionError, match="5 tiles, room for 4"):
        build_prefill_chunks(chunks, tokens_per_tile=32, max_tiles=4)


def test_seven_heads_per_kv_head_leave_two_rows_of_a_tile_empty() -> None:
    assert tokens_per_tile(28, 4) == 18
    assert tokens_per_tile(8, 8) == 128


@pytest.mark.parametrize(
    ("chunks", "are_fresh"),
    [
        ([PrefillChunk(2, 3, 0, 0), PrefillChunk(5, 1, 1, 0)], True),
        ([PrefillChunk(2, 3, 0, 0), PrefillChunk(6, 1, 1, 0)], False),  # a gap
        ([PrefillChunk(2, 3, 0, 0), PrefillChunk(5, 1, 1, 16)], False),  # a prefix in the cache
        ([], False),
    ],
)
def test_chunks_are_fresh_if_they_lie_end_to_end_and_start_their_rows(
    chunks: list[PrefillChunk], are_fresh: bool
) -> None:
    tiles = torch.from_numpy(build_prefill_chunks(chunks, tokens_per_tile=64))
    assert PrefillChunks.from_arrays(tiles, chunks).are_fresh is are_fresh


@pytest.mark.parametrize(
    ("is_built", "capability", "head_dim", "reason"),
    [
        (False, (9, 0), 128, "this build of PyTorch has none"),
        (True, (7, 5), 128, "it needs a GPU of compute capability 8.0 or later"),
        (True, (8, 0), 100, "this model's have 100"),
        (True, (9, 0), 512, "this model's have 512"),
        (True, (8, 0), 256, None),
    ],
)
def test_flash_attention_that_could_not_run_is_refused_at_the_start(
    is_built: bool,
    capability: tuple[int, int],
    head_dim: int,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: is_built)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if reason is None:
        check_flash(torch.device("cuda"), head_dim)
        return
    with pytest.raises(
        ConfigError, match=f"^attention_backend=flash .*{reason}; use attention_backend=triton$"
    ):
        check_flash(torch.device("cuda"), head_dim)
