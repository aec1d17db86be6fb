"""Linears of small models for up to 8 tokens, in CUDA C++ (pdl.cu), with programmatic dependent launch (PDL).

A kernel launched this way starts while the previous one still runs, and loads weights into registers before
it waits for its input. `small.py` allocates its outputs and chooses its prologue and epilogue, as for its own
kernels.

It supports bfloat16 on Hopper, few tokens (`pdl_tokens` of the profile), and models with a narrow residual
stream: with wider streams, the time is dominated by reads and is the same for all kernels, and with more
tokens, x is read more cheaply through shared memory (wgmma.py).

The tiling of a matrix decides how much of W is in flight before the wait. The rule:

    rows        16 per block, or 32, so that N has no more blocks than the GPU has SMs: all of them load at
                once, and each leaves room for a block of the next kernel, which is already loading
    warps       enough that each has two chunks of K, both in registers before the wait; 16 at most
    many rows   gate and up of a wider model do not fit at once: small blocks of 4 warps, several
                per SM, and the next ones load while these compute
    codes       weights of 8 or 4 bits (coded.py) have half the bytes or less: 16 rows and 8 or 16 warps,
                or 32 rows if there are many; also for one token with the long rows of a large model

Shapes:  M tokens, N outputs (of the gate half when gated), F outputs of a gated layer (W has 2F rows),
K inputs, P parts.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infer.config.profiles.hopper_h200 import H200
from infer.config.profiles.profile import LinearProfile
from infer.kernels.linear import cuda
from infer.kernels.linear.coded import BAND, CodedForm, CodedWeights
from infer.kernels.linear.cuda import (
    CudaLinear,
    Defines,
    Matrix,
    Variant,
    form_defines,
    outer_arguments,
    outer_defines,
)
from infer.kernels.linear.residual import Epilogue
from infer.kernels.runtime import cuda_build as build
from infer.kernels.runtime import dispatch
from infer.kernels.runtime.choice import Declined
from infer.kernels.runtime.dispatch import compiles_only

MAX_TOKENS = 64  # most tokens that the kernel can be compiled for

_CHUNK = 64  # columns
_DEPTHS = (4, 3, 2, 1)
_MAX_WARPS = 16
_MAX_REGISTERS = 212  # estimated registers per thread; with more, addresses spill
_REGISTERS_PER_SM = 65536
_SHARED_BYTES = 48 << 10  # shared memory that a block may use without opting in

SOURCE = Path(__file__).with_name("pdl.cu")
ARCH = "sm_90"
_UNPACKED = ("fp8", "int8", "int4", "e5m2")  # supported codes: tables would need too many registers
_LONG, _MANY_ROWS = 12288, 3840  # coded weights of one token: columns and rows of `down` of a large model
_NUMBERS = (ctypes.c_longlong, ctypes.c_longlong, *(ctypes.c_int,) * 2, *(ctypes.c_float,) * 2)
_TYPES = (*(ctypes.c_void_p,) * 8, *_NUMBERS)
_EXPERT_TYPES = (ctypes.c_void_p, ctypes.c_longlong, ctypes.c_longlong)
_ROW_TYPES = (*(ctypes.c_void_p,) * 3, *(ctypes.c_int,) * 2)


@dataclass(frozen=True, slots=True)
class PdlConfig:
    """The tiling of a matrix, and how much of its share a warp holds before the wait."""

    rows_tiles: int  # tiles of 16 rows per block; a gated layer has twice as many
    warps: int
    depth: int = 2  # chunks of 64 columns in registers
    form: CodedForm | None = None  # form of coded weights
    by_words: bool = False  # True (coded weights, one token): x is read in the order of the codes, by 4 bytes

    @property
    def rows(self) -> int:
        """Outputs per block."""
        return 16 * self.rows_tiles

    def num_parts(self, N: int) -> int:
        """The number of partial sums of squares for N outputs, one per block."""
        return -(-N // self.rows)

    def num_turns(self, K: int) -> int:
        """The number of chunks that a warp processes in sequence."""
        return -(-K // _CHUNK // self.warps)


def token_tiles(num_tokens: int) -> int:
    """The number of tiles of 8 tokens: 1, 2, 4 or 8, each of which is compiled separately."""
    tiles = 1
    while 8 * tiles < num_tokens:
        tiles *= 2
    return tiles


def choose_config(
    M: int, N: int, K: int, *, gated: bool, form: CodedForm | None = None, num_sms: int = H200.linear.num_sms
) -> PdlConfig | None:
    """The tiling by the rule, with fewer warps if it does not fit; None: the matrix is not supported."""
    for config in _by_preference(M, N, K, form, num_sms):
        if can_launch(config, M, N, K, gated=gated, adds=not gated):
            return config
    return None


def _by_preference(M: int, N: int, K: int, form: CodedForm | None, num_sms: int) -> Iterator[PdlConfig]:
    num_chunks, by_words = K // _CHUNK, form is not None and M == 1
    if form is not None and form.bits == 8 and M > 1 and 16 * num_sms < N and num_chunks == _MAX_WARPS:
        yield PdlConfig(2, _MAX_WARPS, 1, form)  # x is read by half as many blocks
    rows_tiles, warps = (1 if 16 * num_sms >= N else 2), _MAX_WARPS
    if 32 * num_sms < N:
        rows_tiles, warps = 1, 4
    if form is not None:  # half the bytes or less: smaller blocks, two per SM
        rows_tiles, warps = (2, 8) if 32 * num_sms < N or K >= _LONG else (1, _MAX_WARPS)
    while warps > 4 and warps >= num_chunks:  # two chunks per warp, if K has enough
        warps //= 2
    while warps >= 1:
        turns = PdlConfig(rows_tiles, warps).num_turns(K)
        most = turns if form is None or turns > 8 else min(turns, 3)
        depths = [depth for depth in _DEPTHS if depth <= most]
        depths.sort(key=lambda depth: depth == 1 or turns % depth != 0)  # depths that divide the turns first
        yield from (PdlConfig(rows_tiles, warps, depth, form, by_words) for depth in depths)
        warps //= 2


def registers_of(config: PdlConfig, M: int, K: int, *, gated: bool) -> int:
    """The estimated registers per thread: its share of W, of x and of the sums, and some for addresses."""
    tiles, num_token_tiles = config.rows_tiles * (2 if gated else 1), token_tiles(M)
    turns = config.num_turns(K)
    held_x = min(turns, 4 if num_token_tiles == 1 else 2 if num_token_tiles < 8 else 1)
    of_tile, spare = (16, 40) if config.form is None else (_coded_registers(config.form), 64)
    return of_tile * tiles * min(config.depth, turns) + (4 * tiles + 8 * held_x) * num_token_tiles + spare


def _coded_registers(form: CodedForm) -> int:
    """Registers per thread for the codes of 16 rows and a chunk of columns, and the scales of groups."""
    num_words = 0 if not form.group else 4 if form.group == 32 else 2
    return form.bits + num_words


def can_launch(config: PdlConfig, M: int, N: int, K: int, *, gated: bool, adds: bool = False) -> bool:
    """Return True if a kernel with this tiling fits the registers and shared memory."""
    tiles = config.rows_tiles * (2 if gated else 1)
    tokens = 8 * token_tiles(M)
    registers = registers_of(config, M, K, gated=gated)
    shared = config.warps * tokens * ((16 * tiles + 4) * 4 + 8)
    pairs, form = config.rows // 2, config.form
    if form is not None and (form.codes not in _UNPACKED or form.has_minima or (gated and N % BAND)):
        return False
    return (
        0 < M <= MAX_TOKENS
        and K % _CHUNK == 0
        and N % 8 == 0
        and config.warps <= K // _CHUNK  # otherwise some warps are idle
        and (not adds or (pairs & (pairs - 1) == 0 and pairs <= 32))
        and 32 * config.warps >= tokens
        and registers <= _MAX_REGISTERS
        and registers * 32 * config.warps <= _REGISTERS_PER_SM
        and shared <= _SHARED_BYTES
    )


def defines_of(
    config: PdlConfig, dtype: torch.dtype, tiles: int, N: int, K: int, activation: str = "",
    bias: bool = False, adds: bool = False, parts: bool = False,
) -> Defines:  # fmt: skip
    """The defines for the kernel of one matrix."""
    assert dtype in (torch.bfloat16, torch.float16), f"{dtype} has no matrix instruction here"
    assert K % 64 == 0 and N % 8 == 0, f"{N} rows of {K} are not whole chunks"
    return (
        ("IS_BFLOAT16", int(dtype is torch.bfloat16)),
        ("N", N),
        ("K", K),
        ("MT", tiles),
        ("RT", config.rows_tiles),
        ("WARPS", config.warps),
        ("DEPTH", config.depth),
        *form_defines(config.form),
        *(() if config.form is None else (("BY_WORDS", int(config.by_words)),)),
        *outer_defines(activation, bias, adds, parts),
    )


def launch(
    config: PdlConfig, x_MK: torch.Tensor, w: torch.Tensor | CodedWeights, y_MN: torch.Tensor,
    epilogue: Epilogue,
) -> None:  # fmt: skip
    """Compute `y_MN` and the sum of `epilogue.add`, which `small.py` has allocated."""
    (M, K), N = x_MK.shape, y_MN.shape[1]
    outer = outer_arguments(x_MK, w, y_MN, epilogue)
    if compiles_only():  # the kernel is already being compiled
        return
    kernel = _kernel(
        x_MK.get_device(), dispatch.PDL, config, x_MK.dtype, token_tiles(M), N, K, epilogue.activation,
        epilogue.bias_N is not None, epilogue.add is not None, epilogue.prologue is not None,
    )  # fmt: skip
    weights: tuple[int, ...]
    if isinstance(w, CodedWeights):
        assert w.form == config.form, f"{w.form} with {config}"
        weights = (w.cells.data_ptr(), w.scales.data_ptr())
    else:
        weights = (w.data_ptr(),)
    kernel(
        config.num_parts(N),
        x_MK.data_ptr(), *weights, *outer.addresses,
        x_MK.stride(0) * 2, outer.residual_bytes, M, outer.num_parts, epilogue.eps, outer.offset,
    )  # fmt: skip


@functools.cache
def _kernel(device: int, with_pdl: bool, *variant: Any) -> build.PreparedLaunch:
    """The kernel for some constants, with a fast lookup; compiled on its first call if not prepared."""
    return cuda.load_variant(variant_of(defines_of(*variant)), device, with_pdl)


def variant_of(defines: Defines) -> Variant:
    """The variant with these defines."""
    known = dict(defines)
    coded = (ctypes.c_void_p,) if "WEIGHTS" in known else ()
    experts = known.get("EXPERTS", 0)
    types = (*coded, *_TYPES, *(_EXPERT_TYPES if experts else ()), *(_ROW_TYPES if experts == 3 else ()))
    return Variant(SOURCE, ARCH, defines, "linear_pdl", 32 * known["WARPS"], types)


def choose(num_tokens: int, matrix: Matrix, profile: LinearProfile = H200.linear) -> PdlConfig | Declined:
    """The tiling of a matrix of a model."""
    N, K, activation, *_, form = matrix
    num_rows = N * (2 if activation else 1)
    # one side of every matrix of a layer is the residual stream's width
    most = profile.pdl_stream if num_tokens <= profile.pdl_tokens else profile.pdl_narrow_stream
    is_wanted = min(N, K) <= most and num_rows * K * 2 <= profile.pdl_bytes
    if form is not None and num_tokens == 1 and not activation:
        is_wanted |= K >= _LONG and _MANY_ROWS <= N <= 2 * _MANY_ROWS
    if not is_wanted:
        return Declined(
            f"more than {most:,} columns and rows, or {profile.pdl_bytes >> 20} MiB: wgmma.cu is faster"
        )
    config = choose_config(num_tokens, N, K, gated=bool(activation), form=form, num_sms=profile.num_sms)
    return config or Declined("unsupported sizes or codes")


def variant_for(config: PdlConfig, matrix: Matrix, num_tokens: int, adds: bool, parts: bool) -> Variant:
    """The variant for a matrix of a model and `num_tokens` tokens."""
    sizes, outer = (token_tiles(num_tokens), matrix.N, matrix.K), (matrix.activation, matrix.bias)
    return variant_of(defines_of(config, torch.bfloat16, *sizes, *outer, adds, parts))


def _coded_bucket(num_tokens: int) -> int:
    """The largest token count that has the same tiling as `num_tokens`; one token has its own."""
    return 1 if num_tokens == 1 else 8 * token_tiles(num_tokens)


def make_kernel(profile: LinearProfile, *, coded: bool = False) -> CudaLinear[PdlConfig]:
    """Make the kernel, not compiled for any matrix yet."""
    tokens = range(1, (profile.coded_pdl_tokens if coded else profile.pdl_tokens) + 1)
    return CudaLinear(
        SOURCE, tokens, _coded_bucket if coded else token_tiles, functools.partial(choose, profile=profile),
        variant_for, is_for_each=coded,
    )  # fmt: skip
