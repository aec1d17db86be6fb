"""Batch-invariant linear layers: a row has the same bits whatever else is in the batch.

A sum of floats depends on the order of its additions, and the fastest order depends on the number of rows:
libraries and our own kernels (small.py) choose by that number. So the last digit of a token's result may
change when another request joins the batch, when its prompt is chunked differently, or when part of it was
cached. This is nearly always harmless; `deterministic` avoids it at the cost of speed:

    GPU     the one kernel for few tokens, with splits of K that depend on the matrix alone; for more than
            128 tokens, a kernel with large tiles that adds the same pieces in the same order
    CPU     the library, always with 16 rows in fresh memory; missing rows are 0. No library guarantees
            that a row's place among them does not matter: `places_are_alike` tests it

The two GPU kernels agree because a matrix instruction adds 16 products at a time to a sum, in the order of
the columns, independent of the tile: a piece of K is one of these sums, and the pieces are added in their
order.

    few tokens     a program per piece, in parallel; the last one to finish adds   ((0 + p0) + p1) + ...
    many tokens    a program takes one piece after the other and adds              ((0 + p0) + p1) + ...

Shapes:  M tokens, N outputs, K inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from infer.kernels.linear.small import launch
from infer.kernels.linear.triton_configs import MAX_SMALL_M, SkinnyConfig, bucket, invariant_config
from infer.kernels.runtime.dispatch import INTERPRETED, jit_for_any, tl, use_triton
from infer.kernels.runtime.profiles import gpu_of

_CPU_ROWS = 16
_BLOCK_N, _BLOCK_M, _BLOCK_K = 128, 128, 64  # tile of the kernel for many rows: two warp groups, four stages
_GROUP = 8  # tiles of tokens that adjacent programs process with one tile of W, so that both stay in L2


@jit_for_any("M")
def _many_kernel(
    x_ptr, w_ptr, bias_ptr, y_ptr, x_row_stride, w_row_stride, M, N, K, split_len, BIAS: tl.constexpr,
    WIDEN: tl.constexpr,  # Triton's interpreter cannot multiply matrices of bfloat16
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // (GROUP * num_n)
    group_len = tl.minimum(num_m - group * GROUP, GROUP)
    in_group = tl.program_id(0) % (GROUP * num_n)
    tokens = ((group * GROUP + in_group % group_len) * BLOCK_M + tl.arange(0, BLOCK_M))[None, :]
    rows = (in_group // group_len * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    w_rows = w_ptr + tl.minimum(rows, N - 1).to(tl.int64) * w_row_stride
    x_rows = x_ptr + tl.minimum(tokens, M - 1).to(tl.int64) * x_row_stride

    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, K, split_len):
        piece = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for k in range(start, tl.minimum(start + split_len, K), BLOCK_K):
            cols = k + tl.arange(0, BLOCK_K)
            w = tl.load(w_rows + cols[None, :], mask=cols[None, :] < K, other=0.0)
            x = tl.load(x_rows + cols[:, None], mask=cols[:, None] < K, other=0.0)
            if WIDEN:
                w, x = w.to(tl.float32), x.to(tl.float32)
            piece = tl.dot(w, x, piece, input_precision="ieee")
        total += piece
    if BIAS:
        total += tl.load(bias_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)
    y_ptrs = y_ptr + tokens.to(tl.int64) * N + rows
    tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=(rows < N) & (tokens < M))


def _multiply_many(
    config: SkinnyConfig, x_MK: torch.Tensor, w_NK: torch.Tensor, bias_N: torch.Tensor | None,
    y_MN: torch.Tensor,
) -> None:  # fmt: skip
    """Multiply many tokens, with K in the same pieces as `config` has for few tokens."""
    (M, K), N = x_MK.shape, len(w_NK)
    assert x_MK.stride(1) == w_NK.stride(1) == 1, (
        f"columns must be contiguous: {x_MK.stride()}, {w_NK.stride()}"
    )
    split_len = -(-K // config.block_k // config.split_k) * config.block_k
    _many_kernel[(-(-M // _BLOCK_M) * -(-N // _BLOCK_N),)](
        x_MK, w_NK, x_MK if bias_N is None else bias_N, y_MN,
        x_MK.stride(0), w_NK.stride(0), M, N, K, split_len,
        BIAS=bias_N is not None, WIDEN=INTERPRETED, GROUP=_GROUP,
        BLOCK_M=_BLOCK_M, BLOCK_N=_BLOCK_N, BLOCK_K=min(_BLOCK_K, config.block_k), num_warps=8, num_stages=4,
    )  # fmt: skip


def places_are_alike(w_NK: torch.Tensor) -> bool:
    """Return True if this machine's library gives a row the same bits in all 16 places."""
    row_K = torch.linspace(-1.7, 1.3, w_NK.shape[1], dtype=torch.float32).to(w_NK.dtype)
    y_16N = F.linear(row_K.repeat(_CPU_ROWS, 1), w_NK).nan_to_num()
    return torch.equal(y_16N, y_16N[:1].expand_as(y_16N))


def linear_invariant(x: torch.Tensor, w_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
    """The product of every row of `x` with every row of `w_NK`, each computed as if it were alone."""
    x_MK, (N, K) = x.reshape(-1, x.shape[-1]), w_NK.shape
    y_MN = x_MK.new_empty((len(x_MK), N))
    if use_triton(x_MK) and len(x_MK) > MAX_SMALL_M and x.dtype != torch.float32:  # it has no matrix units
        config = invariant_config(N, K, MAX_SMALL_M, gpu_of(x.device), x.element_size())
        _multiply_many(config, x_MK, w_NK, bias_N, y_MN)
    elif use_triton(x_MK):
        for first in range(0, len(x_MK), MAX_SMALL_M):
            part_MK = x_MK[first : first + MAX_SMALL_M]
            block_m = max(bucket(len(part_MK)), 16)
            config = invariant_config(N, K, block_m, gpu_of(x.device), x.element_size())
            launch(config, part_MK, w_NK, bias_N=bias_N, out=y_MN[first : first + MAX_SMALL_M])
    else:
        rows_16K = x_MK.new_zeros((_CPU_ROWS, x_MK.shape[1]))
        for first in range(0, len(x_MK), _CPU_ROWS):
            part_MK = x_MK[first : first + _CPU_ROWS]
            rows_16K[: len(part_MK)] = part_MK
            y_MN[first : first + _CPU_ROWS] = F.linear(rows_16K, w_NK, bias_N)[: len(part_MK)]
    return y_MN.view(*x.shape[:-1], len(w_NK))
