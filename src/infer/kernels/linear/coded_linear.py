"""Products with coded weights (coded.py), and the kernel for each number of tokens.

    up to 1,024 tokens, Hopper    one kernel with prologue and epilogue, as for dense weights    compiled.py
    up to 64 tokens               unpacked tile by tile                                        coded_triton.py
    above, fp8 on Hopper or Ada   tokens are quantised as well, the codes are laid out in plain rows,
                                  and the library multiplies on FP8 tensor cores
    above, W8A8, Ampere to Hopper the same with int8, if the file's scheme rounds tokens to 8 bits
    above                         W is unpacked to the type of x, and the library multiplies
    CPU                           the specification, in float32

Shapes:  M tokens, N outputs, F outputs of a gated layer (W has 2F rows), K inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from infer.kernels.elementwise.gated_activation import check_gate, gated_activation
from infer.kernels.linear.coded import FLOATS, CodedForm, CodedWeights
from infer.kernels.linear.coded_triton import (
    coded_skinny_kernel,
    expand_kernel,
    lookup_kernel,
    quantize_blocks_kernel,
    quantize_rows,
    scale_sums_kernel,
)
from infer.kernels.linear.compiled import CompiledLinears, CudaConfig
from infer.kernels.linear.cuda import are_pieces
from infer.kernels.linear.problems import LinearProblem
from infer.kernels.linear.small import launch
from infer.kernels.runtime.choice import Declined, Way, choose
from infer.kernels.runtime.dispatch import INTERPRETED, use_triton
from infer.kernels.runtime.launch import launch_triton
from infer.kernels.runtime.profiles import gpu_of

Multiply = Callable[[torch.Tensor, CodedWeights, torch.Tensor | None], torch.Tensor]

_CODE_TYPES = {**FLOATS, "int8": torch.int8}
_FP8_UNITS = (8, 9)  # first compute capability with FP8 tensor cores
_INT8_UNITS, _NO_INT8_UNITS = (8, 0), (10, 0)  # int8 is as fast as FP8 from the first, before the second
INT8_TOKENS = 2048  # tokens multiplied at a time: their sums have 32 bits each


def coded_linear_reference(
    x_MK: torch.Tensor, w: CodedWeights, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """The specification: weights as float32, and a float32 product."""
    y_MN = F.linear(x_MK.float(), w.dequantized())
    return (y_MN if bias_N is None else y_MN + bias_N).to(x_MK.dtype)


def plan_of(
    x_MX: torch.Tensor, w: CodedWeights, *, gated: bool, compiled: CompiledLinears | None
) -> CudaConfig | None:
    """The configuration of the CUDA C++ kernel for the tokens in `x_MX`; None: another kernel multiplies."""
    if compiled is None or x_MX.dim() != 2:
        return None
    plan = _plan(x_MX, w, gated, compiled)
    return plan if isinstance(plan, CudaConfig) else None


def _plan(
    x_MX: torch.Tensor, w: CodedWeights, gated: bool, compiled: CompiledLinears | None,
    int8_tokens: bool = False,
) -> CudaConfig | Multiply:  # fmt: skip
    N, gpu = w.num_rows // 2 if gated else w.num_rows, gpu_of(x_MX.device)
    if w.outliers is not None and len(x_MX) > gpu.profile.linear.few_coded_tokens:
        return _multiply_unpacked  # otherwise each token would read a column of x for each outlier
    problem = LinearProblem(
        len(x_MX), N, w.size, gated, x_MX.dtype, gpu, form=w.form, int8_tokens=int8_tokens
    )
    plan = choose(ways := coded_ways(compiled), problem)
    if isinstance(plan, CudaConfig) and not are_pieces(x_MX, w):
        return choose(ways, problem._replace(is_aligned=False))
    return plan


def coded_linear(
    x_MK: torch.Tensor, w: CodedWeights, bias_N: torch.Tensor | None = None, *, activation: str = "",
    compiled: CompiledLinears | None = None, int8_tokens: bool = False,
) -> torch.Tensor:  # fmt: skip
    """The product of every row of `x_MK` with every row of W; with an activation, W is a gate and up matrix.

    With `int8_tokens`, large batches are rounded to 8 bits, with one scale per token.
    """
    if activation:
        check_gate(activation)
    gated = bool(activation) and bias_N is None and w.outliers is None
    plan = _plan(x_MK, w, gated, compiled, int8_tokens)
    if isinstance(plan, CudaConfig):
        y_MN = launch(plan, x_MK, w, bias_N=bias_N, activation=activation if gated else "")
        y_MN = y_MN if w.outliers is None else w.outliers.add_to_product(x_MK, y_MN)
        return y_MN if gated or not activation else gated_activation(y_MN, activation=activation)
    y_MN = plan(x_MK, w, bias_N) if use_triton(x_MK) else coded_linear_reference(x_MK, w, bias_N)
    return gated_activation(y_MN, activation=activation) if activation else y_MN


def expand(w: CodedWeights, dtype: torch.dtype) -> torch.Tensor:
    """Unpack W to plain rows, [N, K]; if `dtype` is the type of its codes, without scales."""
    raw = dtype is _CODE_TYPES.get(w.form.codes)
    out_NK = torch.empty(w.shape, dtype=torch.uint8 if raw else dtype, device=w.cells.device)
    launch_triton(
        expand_kernel, tuple(w.cells.shape[:2]), (*stored_parts(w), out_NK), (*w.shape, *tile_sizes(w)),
        **tile_constants(w), RAW=raw,
    )  # fmt: skip
    return out_NK.view(dtype) if w.outliers is None else w.outliers.add_to_matrix(out_NK)


def look_up(w: CodedWeights, ids_T: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Look up rows of W, which must not have outliers."""
    assert w.outliers is None, "loader/weight_plan.py gives them to no embedding"
    if not use_triton(w.cells):
        return w.dequantized()[ids_T].to(dtype)
    out_TK = torch.empty((*ids_T.shape, w.size), dtype=dtype, device=w.cells.device)
    if ids_T.numel():
        launch_triton(
            lookup_kernel, (ids_T.numel(), -(-w.size // 512)), (ids_T.contiguous(), *stored_parts(w), out_TK),
            (w.size, *tile_sizes(w)), **tile_constants(w), BLOCK=512,
        )  # fmt: skip
    return out_TK


def stored_parts(w: CodedWeights) -> tuple[torch.Tensor, ...]:
    """The tensors that a kernel reads: cells as bytes and as floats, outer scales, minima or tables."""
    return w.cells, w.cells.view(torch.float32), w.scales, w.tables if w.tables.numel() else w.minima


def tile_sizes(w: CodedWeights) -> tuple[int, int]:
    """Cells per band and groups per row, for one matrix or the matrices of all experts."""
    return w.cells.shape[-2], max(w.scales.shape[-1], 1)


def tile_constants(w: CodedWeights) -> dict[str, Any]:
    codes, group, has_minima, scale_rows = form = w.form
    return {
        "FORM": "nf4" if codes == "fp4" else codes,
        "GROUP": group,
        "SPANS": form.spans,
        "MINIMA": has_minima,
        "BY_BAND": scale_rows > 1 and group > 0,
        "CELL_BYTES": form.cell_bytes,
    }


def _multiply_few(x_MK: torch.Tensor, w: CodedWeights, bias_N: torch.Tensor | None) -> torch.Tensor:
    (M, K), N = x_MK.shape, w.num_rows
    assert w.size == K and x_MK.stride(1) == 1, (w.shape, x_MK.shape, x_MK.stride())
    y_MN = torch.empty((M, N), dtype=x_MK.dtype, device=x_MK.device)
    block_m = 16 if M <= 16 else 64
    launch_triton(
        coded_skinny_kernel, (len(w.cells), -(-M // block_m)),
        (x_MK, *stored_parts(w), x_MK if bias_N is None else bias_N, y_MN),
        (x_MK.stride(0), N, K, *tile_sizes(w)), (M,), **tile_constants(w), BIAS=bias_N is not None,
        WIDEN=INTERPRETED, BLOCK_M=block_m,
    )  # fmt: skip
    return y_MN if w.outliers is None else w.outliers.add_to_product(x_MK, y_MN)


def _multiply_unpacked(x_MK: torch.Tensor, w: CodedWeights, bias_N: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x_MK, expand(w, x_MK.dtype), bias_N)


def _covers_few(problem: LinearProblem) -> Multiply | Declined:
    most = problem.gpu.profile.linear.few_coded_tokens
    if problem.num_tokens > most or problem.dtype.itemsize != 2:
        return Declined(f"only for up to {most} tokens of 16 bits")
    return _multiply_few


def _covers_fp8(problem: LinearProblem) -> Multiply | Declined:
    """Cover codes that the library multiplies directly: one scale per row, or (Hopper) per 128x128."""
    assert problem.form is not None, problem
    codes, group, _, scale_rows = problem.form
    if codes != "fp8" or problem.dtype is not torch.bfloat16:
        return _NOT_FP8
    sizes = (problem.num_rows, problem.K)
    if group and ((group, scale_rows) != (128, 128) or any(size % 128 for size in sizes)):
        return _NO_FP8_LAYOUT
    if not group and any(size % 16 for size in sizes):
        return _NO_FP8_LAYOUT
    has_units = problem.gpu.capability == (9, 0) if group else problem.gpu.capability >= _FP8_UNITS
    return _multiply_in_fp8 if has_units else _NO_FP8_UNITS


def _covers_int8(problem: LinearProblem) -> Multiply | Declined:
    """Cover integers that the library multiplies directly and fast."""
    if not problem.int8_tokens or problem.form != CodedForm("int8") or problem.dtype.itemsize != 2:
        return _NOT_W8A8
    if problem.num_rows % 16 or problem.K % 16:
        return Declined("only for sizes that are multiples of 16")
    has_units = _INT8_UNITS <= problem.gpu.capability < _NO_INT8_UNITS
    return multiply_in_int8 if has_units else _NO_INT8


def quantize_blocks(x_MK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize tokens to FP8, with scales [M, K / 128] per 128 columns; M is padded to a multiple of 16."""
    (M, K), device = x_MK.shape, x_MK.device
    padded = -(-M // 16) * 16  # the library rejects other numbers of rows
    codes_MK = torch.empty((padded, K), dtype=torch.float8_e4m3fn, device=device)
    scales_GM = torch.empty((K // 128, padded), dtype=torch.float32, device=device)
    launch_triton(
        quantize_blocks_kernel, (M, -(-K // 128 // 8)), (x_MK, codes_MK, scales_GM), (x_MK.stride(0), K),
        (padded,), BLOCKS=8,
    )  # fmt: skip
    return codes_MK, scales_GM.t()


def _multiply_in_fp8(x_MK: torch.Tensor, w: CodedWeights, bias_N: torch.Tensor | None) -> torch.Tensor:
    if w.form.group:
        codes_MK, scales_a = quantize_blocks(x_MK)
        scales_b = w.scales[::4].contiguous().t()  # scales of 128 rows; bands have 32
    else:
        codes_MK, scales_a = quantize_rows(x_MK)
        scales_b = w.scales.view(1, -1)[:, : w.num_rows]
    y_MN = torch._scaled_mm(
        codes_MK, expand(w, torch.float8_e4m3fn).t(), scale_a=scales_a, scale_b=scales_b,
        out_dtype=x_MK.dtype, use_fast_accum=not w.form.group,
    )[: len(x_MK)]  # fmt: skip
    return y_MN if bias_N is None else y_MN + bias_N


def multiply_in_int8(x_MK: torch.Tensor, w: CodedWeights, bias_N: torch.Tensor | None) -> torch.Tensor:
    """Multiply tokens rounded to 8 bits; the library needs more than 16 of them."""
    N, weight = w.num_rows, expand(w, torch.int8)
    y_MN = torch.empty((len(x_MK), N), dtype=x_MK.dtype, device=x_MK.device)
    count = -(-len(x_MK) // INT8_TOKENS)
    for x, y in zip(x_MK.chunk(count), y_MN.chunk(count), strict=True):
        codes, scales = quantize_rows(x, torch.int8)
        sums = torch._int_mm(codes, weight.t())
        launch_triton(
            scale_sums_kernel, (len(x), -(-N // 1024)),
            (sums, scales, w.scales, x if bias_N is None else bias_N, y), (N,), BIAS=bias_N is not None,
            BLOCK=1024,
        )  # fmt: skip
        del codes, sums  # freed before the next ones are allocated: `scratch_bytes` counts one of each
    return y_MN


_NOT_FP8 = Declined("only for codes in fp8 and tokens in bfloat16")
_NO_FP8_LAYOUT = Declined("the library has no layout for these sizes or groups")
_NO_FP8_UNITS = Declined("needs FP8 tensor cores: compute capability 8.9, or 9.0 for scales of blocks")
_NOT_W8A8 = Declined("only for files whose scheme rounds tokens to 8 bits")
_NO_INT8 = Declined("only for compute capability 8.0 to 9.x: other GPUs have no fast int8 tensor cores")
_WAYS: tuple[Way[LinearProblem, CudaConfig | Multiply], ...] = (
    Way("Triton, unpacked tile by tile", _covers_few),
    Way("library, fp8", _covers_fp8),
    Way("library, int8", _covers_int8),
    Way("library, after unpacking", lambda problem: _multiply_unpacked),
)


def coded_ways(compiled: CompiledLinears | None) -> tuple[Way[LinearProblem, CudaConfig | Multiply], ...]:
    """The ways to multiply with coded weights, fastest first."""
    return _WAYS if compiled is None else (*compiled.coded_ways, *_WAYS)
