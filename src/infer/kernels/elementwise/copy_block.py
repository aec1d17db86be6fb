"""Copy one block of the KV cache to another, in all layers at once.

A sequence about to write into a block that others read gets its own copy first (copy on write). To the cache,
the block is one number; in memory it is 2 * L pieces, one for the keys and one for the values of each layer,
each in a separate plane of all blocks:

    plane     layer 0 keys    layer 0 values    layer 1 keys    ...
              [..s...d..]     [..s...d..]       [..s...d..]            s ──► d in each

    element   (plane * num_blocks + block) * (elements of a block) + offset

The specification is one line of PyTorch. But in a cache of many GiB, offsets between planes exceed 31 bits,
and PyTorch then splits the copy until they fit, down to one launch per plane: 56 launches for a model of 28
layers, although the bytes, two or three MiB, take a few microseconds. The kernel is one launch with 64-bit
offsets. The elements of a block are a compile-time constant, so the compiler sees that every piece begins at
a multiple of 16 bytes and loads that many at a time; the block numbers are arguments, since another variant
would mean a compilation in the middle of a request.

With another tensor as destination, it gathers a block into one piece, or scatters it: this is how blocks move
to host memory and back (cache/kv_store.py).

Shapes:  L layers, N and M blocks, P tokens of a block, G kv heads, H head size; 2: keys, values.
"""

from __future__ import annotations

import math

import torch

from infer.kernels.runtime.dispatch import jit_for_any, tl, use_triton
from infer.kernels.runtime.launch import launch_triton

PIECE_BYTES = 8192  # bytes per program: four loads of 16 bytes for each of its 128 threads


def copy_block_reference(
    cache_L2NPGH: torch.Tensor, source: int, destination: int, to_L2MPGH: torch.Tensor | None = None
) -> None:
    """The specification of `copy_block`."""
    to_L2MPGH = cache_L2NPGH if to_L2MPGH is None else to_L2MPGH
    to_L2MPGH[:, :, destination].copy_(cache_L2NPGH[:, :, source], non_blocking=True)


@jit_for_any("source", "destination", "num_here", "num_there")
def _copy_block_kernel(
    here_ptr, there_ptr, source, destination, num_here, num_there, SIZE: tl.constexpr, PIECE: tl.constexpr
):
    plane = tl.program_id(0).to(tl.int64)
    offset = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    is_inside = offset < SIZE
    values = tl.load(here_ptr + (plane * num_here + source) * SIZE + offset, mask=is_inside)
    tl.store(there_ptr + (plane * num_there + destination) * SIZE + offset, values, mask=is_inside)


def copy_block(
    cache_L2NPGH: torch.Tensor, source: int, destination: int, to_L2MPGH: torch.Tensor | None = None
) -> None:
    """Copy block `source` in every layer to block `destination` of the same or another cache."""
    to_L2MPGH = cache_L2NPGH if to_L2MPGH is None else to_L2MPGH
    if not use_triton(cache_L2NPGH):
        copy_block_reference(cache_L2NPGH, source, destination, to_L2MPGH)
        return
    assert cache_L2NPGH.is_contiguous() and to_L2MPGH.is_contiguous(), "the caches must be contiguous"
    num_layers, num_sides, num_blocks, *shape = cache_L2NPGH.shape
    num_there = to_L2MPGH.shape[2]
    assert 0 <= source < num_blocks and 0 <= destination < num_there, f"no block {source} or {destination}"
    size = math.prod(shape)
    piece = PIECE_BYTES // cache_L2NPGH.element_size()
    launch_triton(
        _copy_block_kernel, (num_layers * num_sides, -(-size // piece)), (cache_L2NPGH, to_L2MPGH), (),
        (source, destination, num_blocks, num_there), SIZE=size, PIECE=piece, num_warps=4,
    )  # fmt: skip
