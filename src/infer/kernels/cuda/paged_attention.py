"""Decode attention through `paged_attention.cu`, for rows and lengths that the device alone knows.

The grid follows from the number of rows S and not from their lengths, so a CUDA graph may hold the launch:

    blocks   (N / HEADS) x splits x S       splits: as many as it takes to fill the GPU, 1 where S is large

A context shorter than its splits leaves some blocks without work; they read one length and end.

Shapes:  S rows, N query heads, G kv heads, M = N/G query heads per kv head, H head size, P slots, R rows of
         the block tables, B blocks per row.
"""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path

import torch

from infer.errors import ConfigError
from infer.kernels.cuda.build import Kernels, load_kernels

SOURCE = Path(__file__).with_name("paged_attention.cu")

_THREADS = 128  # as in the source
_MAX_HEADS = 8  # of a block: 8 floats of the query and 8 of the sum for each, of 255 registers
_BLOCKS_PER_SM = 4  # wanted, to have enough loads under way
_MAX_SPLITS = 32  # more cost the merge what they save
_ELEMENTS = {torch.float32: (4, 0), torch.float16: (2, 0), torch.bfloat16: (2, 1)}


def defines_of(
    dtype: torch.dtype, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> tuple[tuple[str, int], ...]:
    """The constants a model's kernel is compiled with; ConfigError if there can be none."""
    if dtype not in _ELEMENTS:
        raise ConfigError(
            f"attention_backend=cuda knows float32, float16 and bfloat16, not {dtype}; "
            "use attention_backend=triton"
        )
    element_bytes, is_bfloat16 = _ELEMENTS[dtype]
    if head_dim * element_bytes % 16 or head_dim > 256:
        raise ConfigError(
            "attention_backend=cuda reads heads in pieces of 16 bytes, up to 256 elements, and this model's "
            f"have {head_dim} of {element_bytes} bytes; use attention_backend=triton"
        )
    group = num_heads // num_kv_heads
    return (
        ("ELEMENT_BYTES", element_bytes),
        ("IS_BFLOAT16", is_bfloat16),
        ("H", head_dim),
        ("G", num_kv_heads),
        ("M", group),
        ("HEADS", max(heads for heads in range(1, _MAX_HEADS + 1) if group % heads == 0)),
        ("BLOCK_SIZE", block_size),
    )


def compile_attend_decode(
    dtype: torch.dtype,
    device: torch.device,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
) -> None:
    """Compile now what `attend_decode_cuda` would on its first call, so that an error comes at the start."""
    defines = defines_of(
        dtype, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size
    )
    load_kernels(SOURCE, defines, _index(device))


def attend_decode_cuda(
    q_SNH: torch.Tensor,
    keys_PGH: torch.Tensor,
    values_PGH: torch.Tensor,
    tables_RB: torch.Tensor,
    rows_S: torch.Tensor,
    lens_S: torch.Tensor,
    *,
    block_size: int,
    scale: float,
    window: int | None,
    out: torch.Tensor | None = None,
    kernels: Kernels | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Attend with each row's newest query, as `attend_decode_reference` does; no plan is needed.

    `kernels` replaces those compiled for the GPU (tests), `num_splits` the number chosen for S.
    """
    S, N, H = q_SNH.shape
    G = keys_PGH.shape[1]
    assert q_SNH.stride(2) == 1, f"the head dimension must be contiguous, got strides {q_SNH.stride()}"
    assert keys_PGH.is_contiguous() and values_PGH.is_contiguous(), "the store must be contiguous"
    assert keys_PGH.dtype == values_PGH.dtype == q_SNH.dtype, "queries, keys and values must be of one type"
    assert tables_RB.dtype == rows_S.dtype == lens_S.dtype == torch.int32, (
        "tables, rows, lengths must be int32"
    )
    assert tables_RB.stride(1) == rows_S.stride(0) == lens_S.stride(0) == 1, "tables, rows, lengths: no gaps"
    if out is None:
        out = torch.empty((S, N, H), dtype=q_SNH.dtype, device=q_SNH.device)
    assert out.is_contiguous() and out.dtype == q_SNH.dtype, (
        "the output must be contiguous, of the queries' type"
    )
    if S == 0:
        return out
    defines = defines_of(q_SNH.dtype, num_heads=N, num_kv_heads=G, head_dim=H, block_size=block_size)
    num_blocks = N // dict(defines)["HEADS"]
    if kernels is None:
        kernels = load_kernels(SOURCE, defines, _index(q_SNH.device))
    if num_splits is None:
        num_splits = splits_for(S * num_blocks, _num_sms(_index(q_SNH.device)))
    # Taken anew by every call: within a graph from its pool, and a launch later on the stream may reuse it.
    num_parts = S * num_splits * N if num_splits > 1 else 0
    sums = torch.empty(num_parts * H, dtype=torch.float32, device=q_SNH.device)
    stats = torch.empty(num_parts * 2, dtype=torch.float32, device=q_SNH.device)
    width = ctypes.c_int(window or 2**30)
    kernels.launch(
        "paged_attention",
        (num_blocks, num_splits, S),
        _THREADS,
        (
            *(
                _address(x)
                for x in (q_SNH, keys_PGH, values_PGH, tables_RB, rows_S, lens_S, out, sums, stats)
            ),
            ctypes.c_longlong(q_SNH.stride(0)),
            ctypes.c_longlong(q_SNH.stride(1)),
            ctypes.c_longlong(tables_RB.stride(0)),
            width,
            ctypes.c_float(scale * math.log2(math.e)),
        ),
    )
    if num_splits > 1:
        parts = tuple(_address(x) for x in (sums, stats, lens_S, out))
        kernels.launch("merge_splits", (N, S, 1), H, (*parts, width, ctypes.c_int(num_splits)))
    return out


def splits_for(num_blocks: int, num_sms: int) -> int:
    """Splits per row, a power of two, that give each multiprocessor some blocks."""
    splits = 1
    while splits < _MAX_SPLITS and 2 * splits * num_blocks <= num_sms * _BLOCKS_PER_SM:
        splits *= 2
    return splits


def _address(x: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache
def _num_sms(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
