"""The attention kernels on a real GPU: their contract, and real sizes."""

from __future__ import annotations

import pytest
import torch

from infer.kernels.attention.decode import (
    attend_decode_reference,
    attend_projected,
    attend_projected_reference,
)
from infer.kernels.attention.paged import PagedKV
from infer.kernels.attention.prefill import (
    PrefillChunk,
    PrefillChunks,
    attend_fresh,
    attend_prefill,
    attend_prefill_reference,
    build_prefill_chunks,
    tokens_per_tile,
)
from tests.gpu.attention import check_that_a_graph_follows_the_lengths, decode_work, relative_error
from tests.kernels.attention_contract import DecodeContract, Heads, PrefillContract, make_paged
from tests.kernels.projected_contract import ProjectedContract, make_transform, newest_slots

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")]

MODELS = [Heads(16, 8, 128), Heads(32, 8, 64), Heads(28, 4, 128), Heads(8, 4, 256), Heads(32, 32, 96)]
# Every model with a window or without, one after the other, and the first one with both.
every_model = pytest.mark.parametrize(
    ("heads", "window"),
    [(MODELS[0], 1024), *((heads, (None, 1024)[place % 2]) for place, heads in enumerate(MODELS))],
    ids=str,
)


class TestCompiledDecode(DecodeContract):
    device = "cuda"

    @every_model
    def test_decode_at_real_sizes(self, heads: Heads, window: int | None) -> None:
        lens = [32768, 4096, 1, 800, 0, 257, 16, 5000]
        paged = make_paged(lens, heads, block_size=16, dtype=torch.bfloat16, device="cuda")
        rows = torch.arange(len(lens), dtype=torch.int32, device="cuda")
        lens_S = torch.tensor(lens, dtype=torch.int32, device="cuda")
        q = torch.randn(len(lens), heads.num_heads, heads.head_dim, device="cuda").bfloat16()
        work = decode_work(heads, len(lens), 32768)
        scale = heads.head_dim**-0.5

        def attend() -> torch.Tensor:
            return self.attend(q, paged.kv(scale, window), rows, lens_S, work)

        work.plan(rows, lens_S, window=window)
        first = attend()
        kv = PagedKV(paged.keys.float(), paged.values.float(), paged.tables, 16, scale, window)
        exact = attend_decode_reference(q.float(), kv, rows, lens_S)
        for index in range(len(lens)):
            if lens[index]:
                assert relative_error(first[index], exact[index]) < 1e-2, f"length {lens[index]}"
        assert not first[4].any()
        assert all(torch.equal(attend(), first) for _ in range(50))  # the order of arrival leaves no trace

    def test_a_replayed_graph_follows_the_lengths(self) -> None:
        check_that_a_graph_follows_the_lengths(self.attend, MODELS[0])


class TestCompiledProjected(ProjectedContract):
    device = "cuda"

    @every_model
    def test_projected_at_real_sizes(self, heads: Heads, window: int | None) -> None:
        has_norm = heads.head_dim == 128  # that of Qwen 3, or none
        for lens in ([4000], [32768, 4096, 1, 800, 0, 257, 16, 5000], [300, 65, 1, 0, 1000] * 26):
            self.check_against_exact(lens, heads, window, has_norm)

    def check_against_exact(self, lens: list[int], heads: Heads, window: int | None, has_norm: bool) -> None:
        paged = make_paged(lens, heads, block_size=16, dtype=torch.bfloat16, device="cuda")
        rows = torch.arange(len(lens), dtype=torch.int32, device="cuda")
        lens_S = torch.tensor(lens, dtype=torch.int32, device="cuda")
        transform = make_transform(
            heads, dtype=torch.bfloat16, device="cuda", has_norm=has_norm, offset=0.0, num_positions=32768
        )
        newest = newest_slots(paged, rows, lens_S)
        paged.keys[newest] = paged.values[newest] = torch.nan
        num_heads = heads.num_heads + 2 * heads.num_kv_heads
        qkv = torch.randn(len(lens), num_heads * heads.head_dim, device="cuda").bfloat16()
        work = decode_work(heads, len(lens), 32768)
        scale = heads.head_dim**-0.5
        exact_keys, exact_values = paged.keys.clone(), paged.values.clone()
        kv = PagedKV(exact_keys, exact_values, paged.tables, 16, scale, window)
        expected = attend_projected_reference(qkv, transform, kv, rows, lens_S)

        def attend() -> torch.Tensor:
            return attend_projected(qkv, transform, paged.kv(scale, window), rows, lens_S, work)

        work.plan(rows, lens_S, window=window)
        first = attend()
        torch.testing.assert_close(first, expected, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(paged.keys[newest], exact_keys[newest], rtol=2e-2, atol=2e-2)
        assert torch.equal(paged.values[newest], exact_values[newest])
        assert all(torch.equal(attend(), first) for _ in range(20))  # the order of arrival leaves no trace
        paged.keys[newest] = exact_keys[newest]
        torch.testing.assert_close(paged.keys, exact_keys, rtol=0, atol=0, equal_nan=True)


class TestCompiledPrefill(PrefillContract):
    device = "cuda"

    @every_model
    def test_prefill_at_real_sizes(self, heads: Heads, window: int | None) -> None:
        spans = [(0, 1), (0, 513), (4000, 300), (0, 2048), (31000, 64)]
        lens = [start + num for start, num in spans]
        paged = make_paged(lens, heads, block_size=16, dtype=torch.bfloat16, device="cuda")
        chunks, first = [], 0
        for row, (start, num) in enumerate(spans):
            chunks.append(PrefillChunk(first, num, row, start))
            first += num
        batch = as_batch(chunks, heads)
        q = torch.randn(first, heads.num_heads, heads.head_dim, device="cuda").bfloat16()
        scale = heads.head_dim**-0.5
        actual = attend_prefill(q, paged.kv(scale, window), batch)
        for chunk in chunks:
            last = PrefillChunk(0, 1, chunk.row, chunk.start + chunk.num - 1)  # the reference takes its time
            q_last = q[chunk.first + chunk.num - 1 :][:1].float()
            kv = PagedKV(paged.keys.float(), paged.values.float(), paged.tables, 16, scale, window)
            exact = attend_prefill_reference(q_last, kv, as_batch([last], heads))
            assert relative_error(actual[chunk.first + chunk.num - 1], exact[0]) < 1e-2, chunk

    def test_pytorchs_flash_attention_agrees_on_fresh_chunks(self) -> None:
        heads, lens = MODELS[0], [100, 1, 600]
        paged = make_paged(lens, heads, block_size=16, dtype=torch.bfloat16, device="cuda")
        chunks = [PrefillChunk(0, 100, 0, 0), PrefillChunk(100, 1, 1, 0), PrefillChunk(101, 600, 2, 0)]
        slots = torch.cat([
            paged.tables[row, torch.arange(length, device="cuda") // 16].long() * 16
            + torch.arange(length, device="cuda") % 16
            for row, length in enumerate(lens)
        ])  # fmt: skip
        q = torch.randn(701, heads.num_heads, heads.head_dim, device="cuda").bfloat16()
        batch = as_batch(chunks, heads)
        expected = attend_prefill(q, paged.kv(0.1), batch)
        try:
            actual = attend_fresh(
                q, paged.keys[slots], paged.values[slots], batch,
                scale=0.1, window=None, out=torch.empty_like(q),
            )  # fmt: skip
        except RuntimeError as error:
            pytest.skip(f"this build of PyTorch cannot: {error}")
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)

    @pytest.mark.parametrize("window", [None, 50])
    def test_flash_attention_of_fresh_chunks_behind_rows_that_decode(self, window: int | None) -> None:
        """The first tokens of the step are no chunk's: their output is left alone."""
        heads, lens = MODELS[0], [100, 1, 600]
        paged = make_paged(lens, heads, block_size=16, dtype=torch.bfloat16, device="cuda")
        places = [torch.arange(length, device="cuda") for length in lens]
        slots = torch.cat([paged.tables[r, p // 16].long() * 16 + p % 16 for r, p in enumerate(places)])
        slots = torch.cat([slots[:2], slots])  # of two rows that decode
        batch = as_batch(
            [PrefillChunk(2, 100, 0, 0), PrefillChunk(102, 1, 1, 0), PrefillChunk(103, 600, 2, 0)], heads
        )
        q = torch.randn(703, heads.num_heads, heads.head_dim, device="cuda").bfloat16()
        outs = [
            attend_prefill(
                q, paged.kv(0.1, window), batch, out=torch.full_like(q, 7.0), fresh_slots_T=fresh_slots
            )
            for fresh_slots in (None, slots)
        ]
        torch.testing.assert_close(outs[1], outs[0], rtol=2e-2, atol=2e-2)
        assert not torch.equal(outs[1], outs[0]), "both were computed by the same kernel"


def as_batch(chunks: list[PrefillChunk], heads: Heads) -> PrefillChunks:
    per_tile = tokens_per_tile(heads.num_heads, heads.num_kv_heads)
    tiles = torch.from_numpy(build_prefill_chunks(chunks, tokens_per_tile=per_tile))
    return PrefillChunks.from_arrays(tiles.cuda(), chunks)
