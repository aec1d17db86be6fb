"""Decode attention through `decode_attention.cu`, over the work list that `DecodeWork.plan` has written.

The contract of `attend_decode` in `decode.py`, which plans, splits and merges alike; what the two
share is explained there, what a warp does in the source. It reads memory faster than Triton's kernel where
there are many rows, for heads that the matrix instruction fits: 64 or 128 elements of 16 bits, and at most 8
query heads to each kv head.

Shapes:  S rows, N query heads, G kv heads, M = N/G query heads per kv head, H head size, P slots, R rows of
         the block tables, B blocks per row, W work items.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import torch

from infer.errors import ConfigError
from infer.kernels.attention.decode import LOG2E, DecodeWork
from infer.kernels.runtime.cuda_build import PreparedLaunch, index_of, load_kernels
from infer.kernels.runtime.dispatch import launch_options

SOURCE = Path(__file__).with_name("decode_attention.cu")

Defines = tuple[tuple[str, int], ...]

_TILE, _MAX_GROUP = 16, 8  # positions and query heads of one instruction
_OLDEST = (8, 0)  # compute capability: the first with the instruction for bfloat16
WARPS = 4
_BLOCKS_PER_SM = {64: 4, 128: 3}  # by the head size: as many as registers allow
_TURNS = 4  # blocks for each place on a multiprocessor: whoever is done first takes the next
_TYPES = (*(ctypes.c_void_p,) * 11, *(ctypes.c_longlong,) * 3, ctypes.c_int, ctypes.c_float)


class CachedHeads(NamedTuple):
    """The heads of a model, and the cache they lie in: what both kernels are compiled for."""

    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    def check(self, device: torch.device) -> None:
        """ConfigError if the kernels cannot be had for this model on this GPU."""
        group = self.num_heads // self.num_kv_heads
        if self.dtype not in (torch.float16, torch.bfloat16):
            reason = f"16-bit numbers, and the cache holds {str(self.dtype).removeprefix('torch.')}"
        elif self.head_dim not in _BLOCKS_PER_SM:
            reason = f"heads of 64 or 128, and this model's have {self.head_dim}"
        elif group > _MAX_GROUP:
            reason = f"at most {_MAX_GROUP} query heads per kv head, and this model has {group}"
        elif self.block_size % _TILE:
            reason = f"block_size to be a multiple of {_TILE}, and it is {self.block_size}"
        elif (capability := _capability(device)) < _OLDEST:
            reason = "an NVIDIA GPU of compute capability 8.0 or later, and this one has {}.{}".format(
                *capability
            )
        else:
            return
        raise ConfigError(f"attention_backend=cuda needs {reason}; use attention_backend=triton")

    def defines(self, *, pdl: bool) -> Defines:
        """The constants that both kernels are compiled with."""
        return (
            ("IS_BFLOAT16", int(self.dtype is torch.bfloat16)),
            ("H", self.head_dim),
            ("G", self.num_kv_heads),
            ("M", self.num_heads // self.num_kv_heads),
            ("BLOCK_SIZE", self.block_size),
            ("WARPS", WARPS),
            ("PDL", int(pdl)),
        )


def compile_attend_decode(heads: CachedHeads, device: torch.device) -> None:
    """Compile now what `attend_decode_cuda` would on its first call, so that an error comes at the start."""
    heads.check(device)
    pdl = launch_options(device)["PDL"]
    prepare_launch(defines_of(heads, pdl=pdl), index_of(device), pdl)


def defines_of(heads: CachedHeads, *, pdl: bool) -> Defines:
    """The constants of this kernel."""
    return (*heads.defines(pdl=pdl), ("BLOCKS_PER_SM", _BLOCKS_PER_SM[heads.head_dim]))


@functools.cache
def prepare_launch(defines: Defines, device: int, starts_early: bool) -> PreparedLaunch:
    """The kernel with these constants, compiled and loaded on the first call."""
    kernels = load_kernels(SOURCE, defines, device)
    return kernels.prepare("decode_attention", 32 * WARPS, _TYPES, starts_early=starts_early)


def attend_decode_cuda(
    q_SNH: torch.Tensor,
    keys_PGH: torch.Tensor,
    values_PGH: torch.Tensor,
    tables_RB: torch.Tensor,
    work: DecodeWork,
    *,
    block_size: int,
    scale: float,
    window: int | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with each row's newest query; `work.plan` must have seen rows, lengths and window."""
    S, N, H = q_SNH.shape
    G = keys_PGH.shape[1]
    assert q_SNH.stride(2) == 1, f"the head dimension must be contiguous, got strides {q_SNH.stride()}"
    assert not (q_SNH.stride(0) % 8 or q_SNH.stride(1) % 8 or q_SNH.data_ptr() % 16), (
        "heads start at 16 bytes"
    )
    assert keys_PGH.is_contiguous() and values_PGH.is_contiguous(), "the store must be contiguous"
    assert keys_PGH.dtype == values_PGH.dtype == q_SNH.dtype, "queries, keys and values must be of one type"
    assert tables_RB.dtype == torch.int32 and tables_RB.stride(1) == 1, "tables must be int32, without gaps"
    if out is None:
        out = torch.empty((S, N, H), dtype=q_SNH.dtype, device=q_SNH.device)
    assert out.is_contiguous() and out.dtype == q_SNH.dtype, (
        "the output must be contiguous, of the queries' type"
    )
    if S == 0:
        return out
    pdl = launch_options(q_SNH.device)["PDL"]
    defines = defines_of(CachedHeads(q_SNH.dtype, N, G, H, block_size), pdl=pdl)
    # the list is read before the kernel waits: its author must not be the kernel before
    launch = prepare_launch(defines, index_of(q_SNH.device), pdl and not work.is_fresh)
    work.is_fresh = False
    items_W8, num_items = work.work_list(window)
    max_splits = work.max_splits(S)
    tensors = (
        q_SNH, keys_PGH, values_PGH, tables_RB, out, items_W8, num_items,
        work.sums, work.maxima, work.denominators, work.tickets,
    )  # fmt: skip
    launch(
        min(work.num_sms * _BLOCKS_PER_SM[H] * _TURNS, S * max_splits * G),
        *(x.data_ptr() for x in tensors),
        q_SNH.stride(0), q_SNH.stride(1), tables_RB.stride(0), max_splits, scale * LOG2E,
    )  # fmt: skip
    return out


def _capability(device: torch.device) -> tuple[int, int]:
    """What the GPU can do; nothing where it is not one of NVIDIA's."""
    return torch.cuda.get_device_capability(device) if torch.version.hip is None else (0, 0)
