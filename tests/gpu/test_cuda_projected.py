"""The CUDA kernel that takes the projection on a real GPU: real sizes, graphs, the same bits again."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from infer.kernels.attention.decode import attend_projected_reference
from infer.kernels.attention.decode_cuda import attend_projected_cuda
from infer.kernels.attention.decode_work import DecodeWork
from tests.gpu.attention import relative_error
from tests.gpu.graphs import capture
from tests.kernels.attention_contract import Heads, assert_close, make_paged
from tests.kernels.projected_contract import make_transform, newest_slots

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")]

MODELS = [Heads(16, 8, 128), Heads(32, 8, 64), Heads(28, 4, 128), Heads(8, 8, 64), Heads(16, 2, 128)]


@pytest.mark.parametrize("heads", MODELS, ids=str)
def test_two_hundred_times_bit_by_bit(heads: Heads) -> None:
    torch.manual_seed(0)
    for window in (None, 100):
        check([1, 15, 16, 17, 33, 70, 0, 31], heads, window, split_len=32)
        check([4096, 1, 800, 0, 257], heads, window)
        check([400] * 32, heads, window)


def check(
    lens: list[int],
    heads: Heads,
    window: int | None,
    *,
    split_len: int | None = None,
) -> None:
    paged = make_paged(lens, heads, block_size=16, dtype=torch.bfloat16, device="cuda")
    rows = torch.randperm(len(lens)).to("cuda", torch.int32)
    lens_S = torch.tensor(lens, dtype=torch.int32, device="cuda")[rows.long()]
    rows = torch.where(lens_S > 0, rows, -1)
    newest = newest_slots(paged, rows, lens_S)
    paged.keys[newest] = paged.values[newest] = torch.nan
    transform = make_transform(
        heads, dtype=torch.bfloat16, device="cuda", has_norm=True, offset=0.0, num_positions=max(lens)
    )
    work = DecodeWork(
        max_rows=len(lens),
        max_len=max(lens),
        device="cuda",
        split_len=split_len,
        **dataclasses.asdict(heads),
    )
    for scratch in (work.sums, work.maxima, work.denominators):
        scratch.fill_(torch.nan)
    width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    qkv = torch.randn(len(lens), width, device="cuda").bfloat16()
    kv = paged.kv(heads.head_dim**-0.5, window)
    stores = [store.clone() for store in (paged.keys, paged.values)]
    own = kv._replace(keys_PGH=stores[0], values_PGH=stores[1])
    expected = attend_projected_reference(qkv, transform, own, rows, lens_S)

    def step() -> list[torch.Tensor]:
        work.plan(rows, lens_S, window=window)
        return [attend_projected_cuda(qkv, transform, kv, work) for _ in range(5)]

    outs = step()
    assert relative_error(outs[0], expected) < 2e-2
    assert_close(paged.keys[newest], stores[0][newest])
    assert torch.equal(paged.values[newest], stores[1][newest])
    graph, replayed = capture(step)
    for _ in range(40):
        graph.replay()
        assert all(torch.equal(out, outs[0]) for out in replayed)
    assert not work.tickets.any()
