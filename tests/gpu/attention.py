"""What the tests of all kernels of attention on a GPU share."""

from __future__ import annotations

from collections.abc import Callable

import torch

from infer.kernels.attention.decode import attend_decode_reference
from infer.kernels.attention.decode_work import DecodeWork
from tests.gpu.graphs import capture
from tests.kernels.attention_contract import Heads, make_paged


def decode_work(heads: Heads, max_rows: int, max_len: int) -> DecodeWork:
    return DecodeWork(
        max_rows=max_rows,
        max_len=max_len,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        device="cuda",
    )


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return float((actual.float() - exact).abs().max() / exact.abs().max())


def check_that_a_graph_follows_the_lengths(attend: Callable[..., torch.Tensor], heads: Heads) -> None:
    """Captured with rows of one token; then long ones, short ones, none. `attend`: as in `DecodeContract`."""
    block_size = 32
    paged = make_paged([3000] * 8, heads, block_size=block_size, dtype=torch.bfloat16, device="cuda")
    rows = torch.arange(8, dtype=torch.int32, device="cuda")
    lens_S = torch.ones(8, dtype=torch.int32, device="cuda")
    q = torch.randn(8, heads.num_heads, heads.head_dim, device="cuda").bfloat16()
    work = decode_work(heads, 8, 3000)
    inputs = (q, paged.kv(0.1), rows, lens_S)

    def step() -> list[torch.Tensor]:
        work.plan(rows, lens_S)
        return [attend(*inputs, work) for _ in range(3)]

    graph, outs = capture(step)
    for lens in ([3000] * 8, [0, 1, 2, 700, 0, 2999, 31, 33], [1] * 8, [2048, 0, 0, 0, 0, 0, 0, 1]):
        lens_S.copy_(torch.tensor(lens, dtype=torch.int32))
        graph.replay()
        eager = step()[0]
        expected = attend_decode_reference(*inputs)
        torch.testing.assert_close(eager, expected, rtol=2e-2, atol=2e-2)
        assert all(torch.equal(out, eager) for out in outs)
