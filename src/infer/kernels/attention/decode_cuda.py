"""Decode attention in CUDA C++, over the work list that `DecodeWork.plan` writes.

    decode_attention.cu    `attend_decode` of decode.py: many rows, for which it reads faster than Triton's
    decode_projected.cu    `attend_projected` of decode.py: few rows, from the fused projection to the output
    decode.cuh             the code that both share

The contracts and the references are in decode.py, the choice between Triton and CUDA C++ in choice.py;
decode_attention.cu explains the warps. Both kernels support the heads that fit the matrix instruction: 64 or
128 elements of 16 bits (in the cache also of 8), and at most 8 query heads per kv head.

Shapes:  S rows, N query heads, G kv heads, M = N/G query heads per kv head, H head size, X = (N + 2 G) H,
         P slots, R rows of the block tables, B blocks per row.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any, NamedTuple

import torch

from infer.config.profiles.find import Gpu
from infer.errors import ConfigError
from infer.kernels.attention.decode_work import DecodeWork
from infer.kernels.attention.paged import PagedKV
from infer.kernels.attention.reference import LOG2E
from infer.kernels.elementwise.heads import HeadTransform
from infer.kernels.runtime.cuda_build import PreparedLaunch, index_of, load_kernels
from infer.kernels.runtime.dispatch import compiles_only, launch_options
from infer.kernels.runtime.profiles import gpu_of

Defines = tuple[tuple[str, int], ...]

_TILE, _MAX_GROUP = 16, 8  # positions and query heads of one instruction
_OLDEST_FP8 = (8, 9)
_OLDEST = (8, 0)  # first compute capability with the instruction for bfloat16
_WARPS = 4
_BLOCKS_PER_SM = {64: 4, 128: 3}  # head size -> blocks, as many as registers allow
_CODED_BLOCKS_PER_SM = {64: 5, 128: 4}  # the same with 8-bit keys and values, which take half the registers
_CODES = {torch.float8_e4m3fn: 1, torch.int8: 2}
_TURNS = 4  # blocks launched per resident block: the SM that is free first takes the next one
_PROJECTED_BLOCKS_PER_SM = 2  # blocks launched: with few rows, the plan has an item or two for each


class CudaKernel(NamedTuple):
    """A function of the .cu file of the same name."""

    name: str
    types: tuple[Any, ...]  # types of its arguments

    @property
    def source(self) -> Path:
        """Path of the .cu file."""
        return Path(__file__).with_name(f"{self.name}.cu")


DECODE = CudaKernel(
    "decode_attention", (*(ctypes.c_void_p,) * 13, *(ctypes.c_longlong,) * 3, ctypes.c_int, ctypes.c_float)
)
PROJECTED = CudaKernel(
    "decode_projected",
    (*(ctypes.c_void_p,) * 17, *(ctypes.c_longlong,) * 2, ctypes.c_int, *(ctypes.c_float,) * 3),
)


class CachedHeads(NamedTuple):
    """The heads of a model and the cache that stores them, for which both kernels are compiled."""

    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kept_as: torch.dtype | None = None  # the 8-bit type of keys and values (kv_codes.py); None: `dtype`

    def check(self, gpu: Gpu) -> None:
        """Raise ConfigError if the kernels do not support this model on this GPU."""
        group = self.num_heads // self.num_kv_heads
        if self.dtype not in (torch.float16, torch.bfloat16):
            reason = f"16-bit numbers, and the model's are {str(self.dtype).removeprefix('torch.')}"
        elif self.head_dim not in _BLOCKS_PER_SM:
            reason = f"heads of 64 or 128, and this model's have {self.head_dim}"
        elif group > _MAX_GROUP:
            reason = f"at most {_MAX_GROUP} query heads per kv head, and this model has {group}"
        elif self.block_size % _TILE:
            reason = f"block_size to be a multiple of {_TILE}, and it is {self.block_size}"
        elif (capability := gpu.capability) < _OLDEST:
            reason = "an NVIDIA GPU of compute capability 8.0 or later, and this one has {}.{}".format(
                *capability
            )
        elif self.kept_as is torch.float8_e4m3fn and capability < _OLDEST_FP8:
            reason = "compute capability 8.9 for kv_cache_dtype=fp8, and this GPU has {}.{}".format(
                *capability
            )
        else:
            return
        raise ConfigError(f"attention_backend=cuda needs {reason}; use attention_backend=triton")

    @property
    def blocks_per_sm(self) -> int:
        """Resident blocks of decode_attention.cu per SM."""
        return (_BLOCKS_PER_SM if self.kept_as is None else _CODED_BLOCKS_PER_SM)[self.head_dim]

    def defines(self, kernel: CudaKernel, *, pdl: bool, has_norm: bool = False) -> Defines:
        """The constants for compiling a kernel; only decode_projected.cu uses `has_norm`."""
        is_projected = kernel.name == PROJECTED.name
        blocks_per_sm = _PROJECTED_BLOCKS_PER_SM if is_projected else self.blocks_per_sm
        return (
            ("IS_BFLOAT16", int(self.dtype is torch.bfloat16)),
            ("CODES", 0 if self.kept_as is None else _CODES[self.kept_as]),
            ("H", self.head_dim),
            ("G", self.num_kv_heads),
            ("M", self.num_heads // self.num_kv_heads),
            ("BLOCK_SIZE", self.block_size),
            ("WARPS", _WARPS),
            ("PDL", int(pdl)),
            ("BLOCKS_PER_SM", blocks_per_sm),
            *((("HAS_NORM", int(has_norm)),) if is_projected else ()),
        )


def compile_decode(
    kernel: CudaKernel, heads: CachedHeads, device: torch.device, *, has_norm: bool = False
) -> None:
    """Compile now instead of on the first call, so that errors appear when the engine is built."""
    heads.check(gpu_of(device))
    pdl = launch_options(device)["PDL"]
    prepare_launch(kernel, heads.defines(kernel, pdl=pdl, has_norm=has_norm), index_of(device), pdl)


@functools.cache
def prepare_launch(kernel: CudaKernel, defines: Defines, device: int, pdl: bool) -> PreparedLaunch:
    """The kernel with these constants, compiled and loaded on the first call."""
    kernels = load_kernels(kernel.source, defines, device)
    return kernels.prepare(kernel.name, 32 * _WARPS, kernel.types, pdl=pdl)


def attend_decode_cuda(
    q_SNH: torch.Tensor, kv: PagedKV, work: DecodeWork, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Attend with each row's newest query; `work.plan` must have seen rows, lengths and window."""
    assert q_SNH.stride(2) == 1, f"the head dimension must be contiguous, got strides {q_SNH.stride()}"
    assert not (q_SNH.stride(0) % 8 or q_SNH.stride(1) % 8 or q_SNH.data_ptr() % 16), (
        "heads start at 16 bytes"
    )
    if out is None:
        out = torch.empty(q_SNH.shape, dtype=q_SNH.dtype, device=q_SNH.device)
    assert out.is_contiguous() and out.dtype == q_SNH.dtype, (
        "the output must be contiguous, of the queries' type"
    )
    _launch_decode(q_SNH, q_SNH.stride()[:2], kv, work, None, out)
    return out


def attend_projected_cuda(
    qkv_SX: torch.Tensor, transform: HeadTransform, kv: PagedKV, work: DecodeWork
) -> torch.Tensor:
    """Norm and rotate the heads of each row's newest token, write its key and value to the cache, attend.

    `work.plan` must have seen rows, lengths and window.
    """
    S, N, G = qkv_SX.shape[0], transform.num_heads, transform.num_kv_heads
    H = qkv_SX.shape[1] // (N + 2 * G)
    transform.check(qkv_SX, H)
    assert not (qkv_SX.stride(0) % 8 or qkv_SX.data_ptr() % 16), "tokens start at 16 bytes"
    assert transform.cos_PR.dtype == transform.sin_PR.dtype == torch.float32, "angles are float32"
    q_gain, k_gain = transform.norm_weights or (qkv_SX, qkv_SX)
    assert q_gain.dtype == k_gain.dtype == qkv_SX.dtype, "gains are of the projection's type"
    out_SNH = torch.empty((S, N, H), dtype=qkv_SX.dtype, device=qkv_SX.device)
    _launch_decode(qkv_SX, qkv_SX.stride()[:1], kv, work, transform, out_SNH)
    return out_SNH


def _launch_decode(
    x: torch.Tensor,  # queries [S, N, H], or the projection [S, X] with a transform
    strides: tuple[int, ...],  # strides of the rows; for queries, also of the heads
    kv: PagedKV, work: DecodeWork, transform: HeadTransform | None, out: torch.Tensor,
) -> None:  # fmt: skip
    """Launch a kernel over the work list, with the arguments in the order that both kernels have."""
    keys_PGH, values_PGH, tables_RB, block_size, scale, window, scales, *_ = kv  # scores are plain: decode.py
    (S, N, H), G = out.shape, work.num_kv_heads
    assert keys_PGH.is_contiguous() and values_PGH.is_contiguous(), "the store must be contiguous"
    assert keys_PGH.shape[1:] == values_PGH.shape[1:] == (G, H), f"keys are {tuple(keys_PGH.shape)}"
    if scales is None:
        assert keys_PGH.dtype == values_PGH.dtype == x.dtype, "input, keys and values must be of one type"
    else:
        assert keys_PGH.dtype == values_PGH.dtype in _CODES, f"codes are {keys_PGH.dtype}"
        assert all(side.is_contiguous() for side in scales), "scales must be contiguous"
    assert tables_RB.dtype == torch.int32 and tables_RB.stride(1) == 1, "tables must be int32, without gaps"
    if S == 0 or compiles_only():  # the kernel is already being compiled
        return
    heads = CachedHeads(x.dtype, N, G, H, block_size, None if scales is None else keys_PGH.dtype)
    kernel, blocks_per_sm, has_norm = DECODE, heads.blocks_per_sm * _TURNS, False
    weights: tuple[torch.Tensor, ...] = ()
    numbers: tuple[float, ...] = (scale * LOG2E,)
    if transform is not None:
        kernel, blocks_per_sm = PROJECTED, _PROJECTED_BLOCKS_PER_SM
        has_norm = transform.norm_weights is not None
        gains = transform.norm_weights or (x, x)  # placeholders without a norm, never read
        weights = (*gains, transform.cos_PR, transform.sin_PR)
        numbers += (transform.eps, transform.offset)
    pdl = launch_options(x.device)["PDL"]
    defines = heads.defines(kernel, pdl=pdl, has_norm=has_norm)
    # the list is read before the kernel waits, so the previous kernel must not have written it
    launch = prepare_launch(kernel, defines, index_of(x.device), pdl and not work.is_fresh)
    work.is_fresh = False
    max_splits = work.max_splits(S)
    tensors = x, keys_PGH, values_PGH, *(scales or (keys_PGH, values_PGH)), tables_RB, out
    scratch = work.sums, work.maxima, work.denominators, work.tickets
    launch(
        min(work.num_sms * blocks_per_sm, S * max_splits * G),
        *(each.data_ptr() for each in (*tensors, *work.work_list(window), *scratch, *weights)),
        *strides, tables_RB.stride(0), max_splits, *numbers,
    )  # fmt: skip
