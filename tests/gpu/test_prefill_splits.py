"""Attention of few tiles over many keys on a real GPU: its contract, real sizes, graphs."""

from __future__ import annotations

import pytest
import torch

from infer.kernels.attention.paged import PagedKV
from infer.kernels.attention.prefill import (
    PrefillChunk,
    PrefillChunks,
    attend_prefill,
    attend_prefill_reference,
    build_prefill_chunks,
    tokens_per_tile,
)
from tests.gpu.graphs import capture
from tests.kernels.attention_contract import Heads, make_paged
from tests.kernels.prefill_splits_contract import SplitsContract

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")]

MODELS = [Heads(16, 8, 128), Heads(32, 8, 64), Heads(32, 8, 128), Heads(4, 1, 256), Heads(14, 2, 64)]


class TestCompiledSplits(SplitsContract):
    device = "cuda"

    @pytest.mark.parametrize(
        ("heads", "window"), list(zip(MODELS, (None, 1024, 1024, None, None), strict=True)), ids=str
    )
    def test_a_replayed_graph_follows_the_tiles(self, heads: Heads, window: int | None) -> None:
        """Captured with empty tiles; then long contexts, short ones, many, one token, none."""
        num_tokens, max_tiles = 512, 32
        starts = [16_000, 8_064, 3_000, 700, 0]
        paged = make_paged(
            [start + 130 for start in starts], heads, block_size=16, dtype=torch.bfloat16, device="cuda"
        )
        q = torch.randn(num_tokens, heads.num_heads, heads.head_dim, device="cuda").bfloat16()
        tiles_W4 = torch.zeros((max_tiles, 4), dtype=torch.int32, device="cuda")
        scale = heads.head_dim**-0.5
        out = torch.empty_like(q)

        def attend(num_splits: int | None = None) -> None:
            attend_prefill(
                q,
                paged.kv(scale, window),
                PrefillChunks.from_arrays(tiles_W4),
                out=out,
                num_splits=num_splits,
            )

        def step() -> None:
            for _ in range(3):  # layers that share their scratch memory
                attend()

        graph, _ = capture(step)
        assert self.num_split_calls
        for nums in ([0, 128, 0, 0, 0], [100, 128, 1, 130, 64], [1, 0, 0, 0, 0], [0] * 5, [0, 0, 0, 0, 130]):
            chunks, first = [], 3
            for row, num in enumerate(nums):
                if num:
                    chunks.append(PrefillChunk(first, num, row, starts[row]))
                first += num
            per_tile = tokens_per_tile(heads.num_heads, heads.num_kv_heads)
            tiles = build_prefill_chunks(chunks, tokens_per_tile=per_tile, max_tiles=max_tiles)
            tiles_W4.copy_(torch.from_numpy(tiles))
            outs = []
            for _ in range(20):
                out.fill_(7.0)
                graph.replay()
                outs.append(out.clone())
            assert all(torch.equal(other, outs[0]) for other in outs)  # the order of arrival leaves no trace
            out.fill_(7.0)
            attend(num_splits=1)
            torch.testing.assert_close(outs[0], out, rtol=2e-2, atol=2e-2)
            for chunk in chunks:
                place = chunk.first + chunk.num - 1
                last = [
                    PrefillChunk(0, 1, chunk.row, chunk.start + chunk.num - 1)
                ]  # the reference takes its time
                batch = PrefillChunks.from_arrays(tiles_W4, last)
                kv = PagedKV(paged.keys.float(), paged.values.float(), paged.tables, 16, scale, window)
                exact = attend_prefill_reference(q[place : place + 1].float(), kv, batch)
                error = (outs[0][place].float() - exact[0]).abs().max() / exact.abs().max()
                assert error < 1e-2, chunk
