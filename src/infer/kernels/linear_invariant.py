"""Linear layers whose rows have the same bits whoever else is in the batch.

A sum of floats depends on the order of its additions, and the fastest order depends on how many rows there
are: libraries and our own kernels (linear_small.py) choose by that number. So a token may come out a last
digit different when a neighbour joins, when its prompt is cut elsewhere, or when part of it was cached. That
is the price of speed and nearly always harmless; `deterministic` refuses to pay it:

    GPU     the one kernel for few tokens, with the way K is cut fixed by the matrix alone; many tokens go
            through it 128 at a time
    CPU     the library, always with 16 rows in fresh memory; missing rows are 0. That a row's place among
            them does not matter is promised by no library: `places_are_alike` tries it out

Both read the weights once for every 128 (16) tokens, which prompts pay for.

Shapes:  M tokens, N outputs, K inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from infer.kernels.dispatch import use_triton
from infer.kernels.linear_configs import MAX_SMALL_M, bucket, invariant_config
from infer.kernels.linear_small import launch

_CPU_ROWS = 16


def places_are_alike(w_NK: torch.Tensor) -> bool:
    """Whether this machine's library gives a row the same bits in all of the 16 places."""
    row_K = torch.linspace(-1.7, 1.3, w_NK.shape[1], dtype=torch.float32).to(w_NK.dtype)
    y_16N = F.linear(row_K.repeat(_CPU_ROWS, 1), w_NK).nan_to_num()
    return torch.equal(y_16N, y_16N[:1].expand_as(y_16N))


def linear_invariant(x: torch.Tensor, w_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
    """The product of every row of `x` with every row of `w_NK`, each row as if it were alone."""
    x_MK = x.reshape(-1, x.shape[-1])
    y_MN = x_MK.new_empty((len(x_MK), len(w_NK)))
    if use_triton(x_MK):
        for first in range(0, len(x_MK), MAX_SMALL_M):
            part_MK = x_MK[first : first + MAX_SMALL_M]
            block_m = max(bucket(len(part_MK)), 16)
            config = invariant_config(*w_NK.shape, block_m, x.device, x.element_size())
            launch(config, part_MK, w_NK, bias_N=bias_N, out=y_MN[first : first + MAX_SMALL_M])
    else:
        rows_16K = x_MK.new_zeros((_CPU_ROWS, x_MK.shape[1]))
        for first in range(0, len(x_MK), _CPU_ROWS):
            part_MK = x_MK[first : first + _CPU_ROWS]
            rows_16K[: len(part_MK)] = part_MK
            y_MN[first : first + _CPU_ROWS] = F.linear(rows_16K, w_NK, bias_N)[: len(part_MK)]
    return y_MN.view(*x.shape[:-1], len(w_NK))
