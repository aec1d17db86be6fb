"""Attention of few rows that decode through `decode_projected.cu`, over the work list of `DecodeWork.plan`.

The contract of `attend_projected` in `decode.py`: from the fused projection to the output, with the
new keys and values put into the cache on the way. It serves the models and GPUs that `decode_cuda.py`
serves, and its source is the sequel of that one's.

Shapes:  S rows, N query heads, G kv heads, M = N/G query heads per kv head, H head size, X = (N + 2 G) H.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from infer.kernels.attention.decode import LOG2E, PROJECTED_HEADS, DecodeWork
from infer.kernels.attention.decode_cuda import WARPS, CachedHeads, Defines
from infer.kernels.elementwise.heads import HeadTransform
from infer.kernels.runtime.cuda_build import PreparedLaunch, index_of, load_kernels
from infer.kernels.runtime.dispatch import launch_options

SOURCE = Path(__file__).with_name("decode_projected.cu")

_TYPES = (*(ctypes.c_void_p,) * 15, *(ctypes.c_longlong,) * 2, ctypes.c_int, *(ctypes.c_float,) * 3)
_BLOCKS_PER_SM = 2  # and no more are launched: with few rows the plan has an item or two for each

# Up to so many S * G, by the head size, it was measured to be faster than Triton's `attend_projected`.
FASTER_UP_TO = {64: PROJECTED_HEADS, 128: 64}


def compile_attend_projected(heads: CachedHeads, device: torch.device, *, has_norm: bool) -> None:
    """Compile now what `attend_projected_cuda` would on its first call."""
    heads.check(device)
    pdl = launch_options(device)["PDL"]
    prepare_launch(defines_of(heads, has_norm=has_norm, pdl=pdl), index_of(device), pdl)


def defines_of(heads: CachedHeads, *, has_norm: bool, pdl: bool) -> Defines:
    """The constants of this kernel."""
    return (*heads.defines(pdl=pdl), ("BLOCKS_PER_SM", _BLOCKS_PER_SM), ("HAS_NORM", int(has_norm)))


@functools.cache
def prepare_launch(defines: Defines, device: int, starts_early: bool) -> PreparedLaunch:
    """The kernel with these constants, compiled and loaded on the first call."""
    kernels = load_kernels(SOURCE, defines, device)
    return kernels.prepare("decode_projected", 32 * WARPS, _TYPES, starts_early=starts_early)


def attend_projected_cuda(
    qkv_SX: torch.Tensor,
    transform: HeadTransform,
    keys_PGH: torch.Tensor,
    values_PGH: torch.Tensor,
    tables_RB: torch.Tensor,
    work: DecodeWork,
    *,
    block_size: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Norm and rotate the heads of each row's newest token, put its key and value into the cache, attend.

    `work.plan` must have seen rows, lengths and window.
    """
    S, N, G = qkv_SX.shape[0], transform.num_heads, transform.num_kv_heads
    H = qkv_SX.shape[1] // (N + 2 * G)
    cos_PR, sin_PR = transform.cos_PR, transform.sin_PR
    assert qkv_SX.stride(1) == 1, "the elements of a token must be contiguous"
    assert not (qkv_SX.stride(0) % 8 or qkv_SX.data_ptr() % 16), "tokens start at 16 bytes"
    assert cos_PR.dtype == sin_PR.dtype == torch.float32, "angles are float32"
    assert cos_PR.shape == sin_PR.shape and 2 * cos_PR.shape[1] == H, f"tables {cos_PR.shape}, heads of {H}"
    assert cos_PR.is_contiguous() and sin_PR.is_contiguous(), "the tables of angles must be contiguous"
    assert keys_PGH.is_contiguous() and values_PGH.is_contiguous(), "the store must be contiguous"
    assert keys_PGH.shape[1:] == values_PGH.shape[1:] == (G, H), f"keys are {tuple(keys_PGH.shape)}"
    assert keys_PGH.dtype == values_PGH.dtype == qkv_SX.dtype, "projection, keys and values: one type"
    assert tables_RB.dtype == torch.int32 and tables_RB.stride(1) == 1, "tables must be int32, without gaps"
    out_SNH = torch.empty((S, N, H), dtype=qkv_SX.dtype, device=qkv_SX.device)
    if S == 0:
        return out_SNH
    q_gain, k_gain = transform.norm_weights or (qkv_SX, qkv_SX)  # without a norm nobody looks
    assert q_gain.dtype == k_gain.dtype == qkv_SX.dtype, "gains are of the projection's type"
    pdl = launch_options(qkv_SX.device)["PDL"]
    heads = CachedHeads(qkv_SX.dtype, N, G, H, block_size)
    defines = defines_of(heads, has_norm=transform.norm_weights is not None, pdl=pdl)
    # the list is read before the kernel waits: its author must not be the kernel before
    launch = prepare_launch(defines, index_of(qkv_SX.device), pdl and not work.is_fresh)
    work.is_fresh = False
    items_W8, num_items = work.work_list(window)
    max_splits = work.max_splits(S)
    tensors = (
        qkv_SX, keys_PGH, values_PGH, tables_RB, out_SNH, items_W8, num_items,
        work.sums, work.maxima, work.denominators, work.tickets, q_gain, k_gain, cos_PR, sin_PR,
    )  # fmt: skip
    launch(
        min(work.num_sms * _BLOCKS_PER_SM, S * max_splits * G),
        *(x.data_ptr() for x in tensors),
        qkv_SX.stride(0), tables_RB.stride(0), max_splits,
        scale * LOG2E, transform.eps, transform.offset,
    )  # fmt: skip
    return out_SNH
