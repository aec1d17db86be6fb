"""A product of 100 to 200 tokens, in parts: K is split, and the next norm adds the parts up (split-K).

    y = x WT        parts[p] = x[:, p-th piece of K]  W[:, p-th piece of K]T,  in float32;   y = sum of parts

For more tokens than our own kernels support (small.py), cuBLAS is the fastest, except for matrices that write
into the residual stream of a small model: a thousand outputs are only 16 tiles, and the other SMs of a GPU
are idle. In these cases, cuBLAS splits K as well, and adds the parts up in a separate kernel. But not always:
192 tokens with 4,096 outputs and 12,288 inputs take it 53 us, and 33 us in two parts. Here the parts are a
batch of products, and they are added up by the kernel that reads y anyway, to add it to the stream and to
normalise it (rms_norm.py). Sums are taken in float32 and in the order of the parts; y itself is never
rounded.

Shapes:  M tokens, N outputs, K inputs, P parts.
"""

from __future__ import annotations

import torch

from infer.kernels.runtime.dispatch import is_gpu

_TILE_TOKENS, _TILE_OUTPUTS = 256, 64  # size of the tile that an SM computes, e.g. as 128 by 128
_PIECE = 64  # elements of a row of W that cuBLAS loads at a time
_MOST_PARTS = 4


def num_parts(M: int, N: int, K: int, num_sms: int) -> int:
    """The number of parts of a product; 1: it is not split.

    The most parts with at most one tile per SM, as long as writing and reading parts (8 P M N bytes)
    costs only a fraction of reading W (2 N K bytes): they stay in L2, which is several times as fast.
    """
    num_tiles = -(-M // _TILE_TOKENS) * -(-N // _TILE_OUTPUTS)
    parts = _MOST_PARTS
    while parts > 1 and (num_tiles * parts > num_sms or 4 * parts * M > K or K % (parts * _PIECE)):
        parts //= 2
    return parts


def multiply_in_parts(x_MK: torch.Tensor, w_NK: torch.Tensor, num_parts: int) -> torch.Tensor:
    """Compute the parts of the product, [P, M, N] in float32."""
    x_PMk = x_MK.unflatten(1, (num_parts, -1)).transpose(0, 1)
    w_PkN = w_NK.unflatten(1, (num_parts, -1)).permute(1, 2, 0)
    if is_gpu(x_MK.device):
        return torch.bmm(x_PMk, w_PkN, out_dtype=torch.float32)
    return torch.bmm(x_PMk.float(), w_PkN.float())
