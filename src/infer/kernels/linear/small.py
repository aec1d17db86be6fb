"""Linear layers for few tokens, where decoding spends most of its time.

    linear           y = x WT + bias;  gated: y = act(x WgT) * (x WuT), where W stacks the gate's rows on up's
    norm_linear      r = x + residual;  y = linear(rms_norm(r));  both are returned
    split_linear     y in parts, for the norm that reads it                      linear/split.py
    linear_add       r = linear(x) + residual, prepared for the norm that reads it: a `ResidualSum`
    linear_of_sum    the linear of the normalised sum, for a sum that was prepared this way

A step that decodes M sequences reads every weight once and uses it M times. For small M, the time of a layer
is the time to read its weights, so the target is the bandwidth of memory. A general matrix product is built
for large M and reaches a third of this bandwidth on small models.

    Hopper      CUDA C++, for matrices with a compiled kernel      compiled.py
    M = 1       dot products, the norm folded in                   triton_kernels.gemv_kernel
    M <= 4      the same without the norm if that is faster, or
    M <= 128    tensor cores, W on the left, K split in order      triton_kernels.skinny_kernel
    above       cuBLAS (F.linear), then `gated_activation`

A table by number of tokens and shape of W selects among the Triton kernels (triton_configs.py). From two
tokens on, a norm in every program costs more than a separate launch for it. The norm is cheapest where the
sum is made: the epilogue of a matrix that writes into the residual stream (`linear_add`) adds and multiplies
by the norm's gain before it stores. The matrix that reads the stream next applies the remaining factor, one
number per token. Both must run on the tensor cores for this; a layer then takes two launches fewer:

    o ─► norm ─► gate_up ─► down ─► norm ─► qkv         o ─► gate_up ─► down ─► qkv

Fused or not, sums are taken in float32. The fused forms round less often: gate, up and their product stay in
float32 until y, and the norm's scale is applied to the finished sum. Only r is rounded to the type of x
before it is used, because the next layer adds to the stored value. Before the division, r * gain may exceed
the largest float16, 65,504, so with float16 the norm stays a separate launch.

With one tile shape, a row's bits do not depend on M; they may differ between buckets of M and between
kernels, cuBLAS included. The kernel of pdl.py has one bucket: a row has the same bits with 1 to 8 tokens.

`linear` may be captured into a CUDA graph once it has been called with the same shapes outside of one.
Calls on one device must be on one stream: programs that split K synchronize through counters that belong
to the device (a ring of them, so that consecutive calls do not share any).

Shapes:  M tokens, N outputs, F outputs of a gated layer (W has 2F rows), K inputs, P tiles of N.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import count

import torch
import torch.nn.functional as F

from infer.kernels.elementwise.gated_activation import check_gate, gated_activation
from infer.kernels.elementwise.rms_norm import add_rms_norm, rms_norm
from infer.kernels.linear import pdl, problems, wgmma
from infer.kernels.linear.coded import CodedWeights
from infer.kernels.linear.compiled import CompiledLinears, CudaConfig
from infer.kernels.linear.cuda import are_pieces
from infer.kernels.linear.pdl import PdlConfig
from infer.kernels.linear.residual import Epilogue, LowRankTerm, ResidualInput, ResidualSum
from infer.kernels.linear.split import multiply_in_parts, num_parts
from infer.kernels.linear.triton_configs import (
    GEMV_MAX_M,
    MAX_SMALL_M,
    GemvConfig,
    SkinnyConfig,
    bucket,
    gemv_config,
    skinny_config,
)
from infer.kernels.linear.triton_kernels import gemv_kernel, skinny_kernel
from infer.kernels.linear.wgmma import WgmmaConfig
from infer.kernels.runtime.choice import Declined, Way, choose
from infer.kernels.runtime.dispatch import INTERPRETED, is_gpu, launch_options, use_triton
from infer.kernels.runtime.profiles import device_profile, gpu_of

MAX_SQUARES = 4096  # most parts times tokens that fit the registers of the program that reads them

_MAX_TILES = 1024  # most tiles of a layer whose K is split; with more, splitting is not needed
_NUM_COUNTER_SLOTS = 64
_next_call = count()

TilePlan = SkinnyConfig | PdlConfig | WgmmaConfig  # plans that use the tensor cores
Plan = GemvConfig | TilePlan | problems.SplitConfig


def linear_reference(x_MK: torch.Tensor, w_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
    """The specification of the kernels, which also runs on the CPU and for many tokens.

    The fused forms combine it with the functions of `rms_norm.py` and `gated_activation.py`.
    """
    return F.linear(x_MK, w_NK, bias_N)


def linear(
    x_MK: torch.Tensor, w: torch.Tensor, bias_N: torch.Tensor | None = None, *, activation: str = "",
    compiled: CompiledLinears | None = None,
) -> torch.Tensor:  # fmt: skip
    """The product of every row of `x_MK` with every row of `w`; with an activation, of gate and up rows."""
    if activation:
        check_gate(activation)
        if bias_N is not None:  # no kernel supports both
            return gated_activation(linear(x_MK, w, bias_N, compiled=compiled), activation=activation)
    plan = _plan(x_MK, w, gated=bool(activation), compiled=compiled)
    if plan is not None:
        return launch(plan, x_MK, w, bias_N=bias_N, activation=activation)
    y_MN = linear_reference(x_MK, w, bias_N)
    return gated_activation(y_MN, activation=activation) if activation else y_MN


def norm_linear(
    x_MK: torch.Tensor, residual_MK: torch.Tensor | None, norm_weight_K: torch.Tensor, eps: float,
    offset: float, w: torch.Tensor, bias_N: torch.Tensor | None = None, *, activation: str = "",
    compiled: CompiledLinears | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`linear` of the normalised sum of `x_MK` and the stream; also returns the sum, or `x_MK` itself."""
    if activation:
        check_gate(activation)
    gated = bool(activation) and bias_N is None
    plan = _plan_with_norm(x_MK, w, gated=gated, compiled=compiled)
    if plan is None:
        normed_MK, new_residual_MK = _norm(x_MK, residual_MK, norm_weight_K, eps, offset)
        return linear(normed_MK, w, bias_N, activation=activation, compiled=compiled), new_residual_MK
    norm = _Norm(x_MK, residual_MK, norm_weight_K, eps, offset)
    y_MN = launch(plan, x_MK, w, bias_N=bias_N, activation=activation if gated else "", norm=norm)
    return gated_activation(
        y_MN, activation=activation
    ) if activation and not gated else y_MN, norm.new_residual


def writes_parts(
    x_MK: torch.Tensor, w_NK: torch.Tensor, *, compiled: CompiledLinears | None = None
) -> int | None:
    """The number of parts in the `ResidualSum` of `linear_add`; None: no kernel can add this product."""
    if x_MK.dim() != 2 or x_MK.shape[0] > MAX_SMALL_M or x_MK.dtype == torch.float16:
        return None
    plan = _plan(x_MK, w_NK, gated=False, compiled=compiled)
    return plan.num_parts(len(w_NK)) if isinstance(plan, TilePlan) else None


def reads_parts(
    x_MK: torch.Tensor, w: torch.Tensor, num_parts: int, *, gated: bool,
    compiled: CompiledLinears | None = None,
) -> bool:  # fmt: skip
    """Return True if `linear_of_sum` can read a sum in `num_parts` parts, for the tokens of `x_MK`."""
    plan = _plan(x_MK, w, gated=gated, compiled=compiled)
    if not isinstance(plan, SkinnyConfig):
        return isinstance(plan, TilePlan)  # CUDA C++ kernels read any number of parts
    return block_of_parts(num_parts) * max(bucket(len(x_MK)), 16) <= MAX_SQUARES


def can_add(
    x_MK: torch.Tensor, w_NK: torch.Tensor, reader_w: torch.Tensor, *, gated: bool,
    compiled: CompiledLinears | None = None,
) -> bool:  # fmt: skip
    """Return True if `linear_add` can add the outputs of `w_NK` to the stream that `reader_w` reads next."""
    parts = writes_parts(x_MK, w_NK, compiled=compiled)
    return parts is not None and reads_parts(x_MK, reader_w, parts, gated=gated, compiled=compiled)


def _covers_dots(problem: problems.LinearProblem) -> GemvConfig | Declined:
    M, N, K, gated, _, gpu, *_ = problem
    if M > GEMV_MAX_M:
        return _MORE_THAN_DOTS
    return gemv_config(N, K, gated, bucket(M), gpu) or _TENSOR_CORES_WIN


def _covers_tiles(problem: problems.LinearProblem) -> SkinnyConfig | Declined:
    M, N, K, gated, dtype, gpu, *_ = problem
    if M > MAX_SMALL_M:
        return _MORE_THAN_SMALL
    return skinny_config(N, K, gated, max(bucket(M), 16), gpu, dtype.itemsize) or _LIBRARY_WINS


def _covers_parts(problem: problems.LinearProblem) -> problems.SplitConfig | Declined:
    if not problem.adds or problem.gated or problem.dtype.itemsize != 2:
        return _ONE_RESULT
    parts = num_parts(problem.num_tokens, problem.N, problem.K, problem.gpu.num_sms)
    return problems.SplitConfig(parts) if parts > 1 else _FILLS_THE_GPU


_MORE_THAN_DOTS = Declined(f"only for up to {GEMV_MAX_M} tokens")
_MORE_THAN_SMALL = Declined(f"only for up to {MAX_SMALL_M} tokens")
_TENSOR_CORES_WIN = Declined("tensor cores are faster for a matrix of this size")
_LIBRARY_WINS = Declined("the library is faster for a matrix of this size")
_ONE_RESULT = Declined("only for 16-bit results that the next norm adds to the residual stream")
_FILLS_THE_GPU = Declined("the whole product has a tile for each SM, or parts would take longer to add")
_WAYS: tuple[Way[problems.LinearProblem, Plan | None], ...] = (
    Way("Triton, dot products", _covers_dots),
    Way("Triton, tensor cores", _covers_tiles),
    Way("library, in parts", _covers_parts),
    Way("library", lambda problem: None),
)


def dense_ways(compiled: CompiledLinears | None) -> tuple[Way[problems.LinearProblem, Plan | None], ...]:
    """The ways to multiply with plain weights, fastest first."""
    return _WAYS if compiled is None else (*compiled.dense_ways, *_WAYS)


def split_linear(
    x_MK: torch.Tensor, w_NK: torch.Tensor, *, compiled: CompiledLinears | None = None
) -> torch.Tensor | None:
    """`linear` in parts, [P, M, N], if that is faster than cuBLAS on the whole product; else None."""
    if x_MK.dim() != 2:
        return None
    plan = _plan(x_MK, w_NK, gated=False, compiled=compiled, adds=True)
    return multiply_in_parts(x_MK, w_NK, plan.parts) if isinstance(plan, problems.SplitConfig) else None


def linear_add(
    stream: ResidualInput, x_MK: torch.Tensor, w_NK: torch.Tensor, bias_N: torch.Tensor | None = None, *,
    compiled: CompiledLinears | None = None,
) -> ResidualSum:  # fmt: skip
    """Add `linear` to the residual stream and start the norm of the sum; `writes_parts` must allow it."""
    plan = _plan(x_MK, w_NK, gated=False, compiled=compiled)
    assert isinstance(plan, TilePlan), plan
    return launch_add(plan, stream, x_MK, w_NK, bias_N)


def linear_of_sum(
    total: ResidualSum, eps: float, w: torch.Tensor, bias_N: torch.Tensor | None = None, *,
    activation: str = "", compiled: CompiledLinears | None = None,
) -> torch.Tensor:  # fmt: skip
    """`linear` of the norm that `linear_add` started."""
    if activation:
        check_gate(activation)
        if bias_N is not None:
            y_MN = linear_of_sum(total, eps, w, bias_N, compiled=compiled)
            return gated_activation(y_MN, activation=activation)
    plan = _plan(total.scaled_MN, w, gated=bool(activation), compiled=compiled)
    assert isinstance(plan, TilePlan), plan
    return launch_of_sum(plan, total, w, eps=eps, bias_N=bias_N, activation=activation)


class _Norm:
    """The norm that a launch folds in, and the memory for its sum."""

    def __init__(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, offset: float
    ) -> None:
        self.residual, self.weight, self.eps, self.offset = residual, weight, eps, offset
        self.new_residual = x
        if residual is not None:
            _check_sum(x, residual)
            self.new_residual = torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _check_sum(y: torch.Tensor, residual: torch.Tensor) -> None:
    assert y.shape == residual.shape, f"{y.shape} cannot be added to {residual.shape}"
    assert y.dtype == residual.dtype, f"{y.dtype} cannot be added to {residual.dtype}"
    assert residual.stride(1) == 1, f"columns must be contiguous, got strides {residual.stride()}"


def _norm(
    x_MK: torch.Tensor, residual_MK: torch.Tensor | None, norm_weight_K: torch.Tensor, eps: float,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The norm as a separate launch."""
    if residual_MK is None:
        return rms_norm(x_MK, norm_weight_K, eps=eps, offset=offset), x_MK
    return add_rms_norm(x_MK, residual_MK, norm_weight_K, eps=eps, offset=offset)


def _plan_with_norm(
    x_MK: torch.Tensor, w: torch.Tensor, *, gated: bool, compiled: CompiledLinears | None
) -> GemvConfig | None:
    """The kernel that folds the norm in; None: the norm gets its own launch."""
    if x_MK.dim() != 2 or x_MK.shape[0] > GEMV_MAX_M:  # x in parts, or too many tokens
        return None
    is_for_few = x_MK.shape[0] <= device_profile(x_MK.device).linear.fold_norm_tokens
    plan = _plan(x_MK, w, gated=gated, compiled=compiled) if is_for_few else None
    return plan if isinstance(plan, GemvConfig) else None


def _plan(
    x_MX: torch.Tensor, w: torch.Tensor, *, gated: bool, compiled: CompiledLinears | None = None,
    adds: bool = False,
) -> Plan | None:  # fmt: skip
    """The kernel and tiling for the tokens of `x_MX` and `w`; None: cuBLAS multiplies."""
    M = x_MX.shape[0]
    if M > MAX_SMALL_M and not adds:  # a shortcut, since prompts in every layer always use the library
        return None
    if not M or not use_triton(x_MX) or x_MX.dtype != w.dtype:
        return None
    N, K = w.shape[0] // 2 if gated else w.shape[0], w.shape[1]
    problem = problems.LinearProblem(M, N, K, gated, x_MX.dtype, gpu_of(x_MX.device), adds=adds)
    plan = choose(ways := dense_ways(compiled), problem)
    if isinstance(plan, CudaConfig) and not are_pieces(x_MX, w):
        return choose(ways, problem._replace(is_aligned=False))
    return plan


def launch(
    plan: Plan, x_MK: torch.Tensor, w: torch.Tensor | CodedWeights, *, bias_N: torch.Tensor | None = None,
    activation: str = "", norm: _Norm | None = None, out: torch.Tensor | None = None,
    low_rank: LowRankTerm | None = None,
) -> torch.Tensor:  # fmt: skip
    """Run the kernel of `plan`; a norm can only be folded into dot products."""
    N = w.shape[0] // 2 if activation else w.shape[0]
    y_MN = torch.empty((len(x_MK), N), dtype=x_MK.dtype, device=x_MK.device) if out is None else out
    assert not isinstance(plan, problems.SplitConfig), "parts are added by the norm that reads them"
    if not isinstance(plan, GemvConfig):
        assert norm is None, "tensor cores take what `linear_add` has left"
        _launch_tiles(plan, x_MK, w, y_MN, Epilogue(bias_N, activation, low_rank=low_rank))
        return y_MN
    assert isinstance(w, torch.Tensor), f"{plan} is not for coded weights"
    M, K = _check_product(x_MK, w)
    residual = x_MK if norm is None or norm.residual is None else norm.residual
    gemv_kernel[(-(-N // plan.block_n),)](
        x_MK, residual, x_MK if norm is None else norm.weight, w, x_MK if bias_N is None else bias_N, y_MN,
        x_MK if norm is None else norm.new_residual,
        x_MK.stride(0), residual.stride(0), w.stride(0), M, N, K,
        0.0 if norm is None else norm.eps, 0.0 if norm is None else norm.offset,
        BLOCK_M=bucket(M), BLOCK_N=plan.block_n, BLOCK_K=plan.block_k,
        VECTOR=16 // x_MK.element_size(), UNROLL=plan.unroll,
        NORM=norm is not None, RESIDUAL=norm is not None and norm.residual is not None,
        BIAS=bias_N is not None, ACTIVATION=activation,
        num_warps=plan.num_warps, **launch_options(x_MK.device),
    )  # fmt: skip
    return y_MN


def launch_add(
    plan: TilePlan, stream: ResidualInput, x_MK: torch.Tensor, w_NK: torch.Tensor | CodedWeights,
    bias_N: torch.Tensor | None = None, *, low_rank: LowRankTerm | None = None,
) -> ResidualSum:  # fmt: skip
    """Run the kernel with the addition in its epilogue."""
    M, N = len(x_MK), len(w_NK)
    scaled_MN = torch.empty((M, N), dtype=x_MK.dtype, device=x_MK.device)
    _check_sum(scaled_MN, stream.residual_MN)
    squares_PM = torch.empty((plan.num_parts(N), M), dtype=torch.float64, device=x_MK.device)
    total = ResidualSum(torch.empty_like(scaled_MN), scaled_MN, squares_PM)
    epilogue = Epilogue(bias_N, add=(stream, total), low_rank=low_rank)
    _launch_tiles(plan, x_MK, w_NK, scaled_MN, epilogue)
    return total


def launch_of_sum(
    plan: TilePlan, total: ResidualSum, w: torch.Tensor | CodedWeights, *, eps: float,
    bias_N: torch.Tensor | None = None, activation: str = "", low_rank: LowRankTerm | None = None,
) -> torch.Tensor:  # fmt: skip
    """Run the kernel with the rest of the norm in its prologue."""
    N = w.shape[0] // 2 if activation else w.shape[0]
    x_MK = total.scaled_MN
    y_MN = torch.empty((len(x_MK), N), dtype=x_MK.dtype, device=x_MK.device)
    epilogue = Epilogue(bias_N, activation, prologue=total, eps=eps, low_rank=low_rank)
    _launch_tiles(plan, x_MK, w, y_MN, epilogue)
    return y_MN


def _launch_tiles(
    plan: TilePlan, x_MK: torch.Tensor, w: torch.Tensor | CodedWeights, y_MN: torch.Tensor, epilogue: Epilogue
) -> None:
    """Launch the planned kernel, in Triton or CUDA C++."""
    if isinstance(plan, WgmmaConfig):
        wgmma.launch(plan, x_MK, w, y_MN, epilogue)
        return
    if isinstance(plan, PdlConfig):
        pdl.launch(plan, x_MK, w, y_MN, epilogue)
        return
    assert isinstance(w, torch.Tensor), f"{plan} is not for coded weights"
    bias_N, activation, add, prologue, eps, _ = epilogue
    (M, K), N = _check_product(x_MK, w), y_MN.shape[1]
    stream, result = add or (ResidualInput(x_MK, x_MK, 0.0), prologue or ResidualSum(x_MK, x_MK, x_MK))
    split_len = -(-K // plan.block_k // plan.split_k) * plan.block_k
    num_tiles, num_splits = -(-N // plan.block_n), -(-K // split_len)  # excludes idle splits
    num_parts = 0 if prologue is None else len(prologue.squares_PM)
    block_m = max(bucket(M), 16)
    partial, counters = _workspace(
        x_MK.device, num_tiles, num_splits, plan.block_n * block_m * (2 if activation else 1)
    )
    skinny_kernel[(num_tiles, num_splits)](
        x_MK, stream.residual_MN, stream.norm_weight_N, result.sum_MN, result.squares_PM,
        w, x_MK if bias_N is None else bias_N, y_MN, partial, counters,
        x_MK.stride(0), stream.residual_MN.stride(0), w.stride(0),
        M, N, K, split_len, num_splits, num_parts, eps, stream.offset,
        BLOCK_M=block_m, BLOCK_N=plan.block_n, BLOCK_K=plan.block_k,
        SPLIT=num_splits > 1, WIDEN=INTERPRETED, ADDS=add is not None,
        PARTS=block_of_parts(num_parts) if num_parts else 0,
        BIAS=bias_N is not None, ACTIVATION=activation,
        num_warps=plan.num_warps, num_stages=plan.num_stages, **launch_options(x_MK.device),
    )  # fmt: skip


def block_of_parts(num_parts: int) -> int:
    """The block size for this many parts: 16, 64 or 256, each of which is compiled separately."""
    block = 16
    while block < num_parts:
        block *= 4
    return block


def _check_product(x_MK: torch.Tensor, w: torch.Tensor) -> tuple[int, int]:
    M, K = x_MK.shape
    assert w.shape[1] == K, f"rows of {K} cannot be multiplied with rows of {w.shape[1]}"
    assert x_MK.stride(1) == w.stride(1) == 1, f"columns must be contiguous: {x_MK.stride()}, {w.stride()}"
    return M, K


def _workspace(
    device: torch.device, num_tiles: int, num_splits: int, tile_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the partial sums of one call, and the counters that synchronize its programs."""
    counters = _counters(device)  # allocated by the first call, split or not, before any graph is captured
    if num_splits == 1:
        return counters, counters
    assert num_tiles <= _MAX_TILES, f"K is split although there are {num_tiles} tiles"
    partial = torch.empty(num_tiles * num_splits * tile_len, dtype=torch.float32, device=device)
    return partial, counters[next(_next_call) % _NUM_COUNTER_SLOTS]


@lru_cache(maxsize=16)
def _counters(device: torch.device) -> torch.Tensor:
    """Counters, one per tile, that are zero before and after each call."""
    if is_gpu(device) and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("call the linear once before it is captured into a graph")
    return torch.zeros((_NUM_COUNTER_SLOTS, _MAX_TILES), dtype=torch.int32, device=device)
