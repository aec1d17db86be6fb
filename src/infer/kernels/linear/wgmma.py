"""Linears of 2 to 128 tokens on Hopper, in CUDA C++ (wgmma.cu): TMA and wgmma.

`small.py` allocates its outputs and chooses its prologue and epilogue, as for its own kernels. It supports
bfloat16 and matrices of any size; up to 8 tokens, pdl.py holds the weights of small models in registers.
Above 64 tokens, cuBLAS is as fast if attention reads the result; gates, whose activation cuBLAS leaves to
another kernel, and matrices that write into the residual stream are still multiplied here.

A block keeps as much of W in flight as the shared memory of an SM holds, which keeps the memory busy. The
number of blocks:

    a layer's matrices    about three quarters of the SMs have one: the next kernel loads its first weights on
                          the others
    long rows             (of `down` in a large model) take long, so all SMs are used
    many rows             (of gate and up) enough rows per block that one block per SM suffices: a second wave
                          with a few blocks would take as long as the first
    more than that        (a head) small blocks, two or three per SM, in several waves

Clusters of more than two blocks do not fit everywhere: only 30 clusters of four run at once.

Weights of 8 or 4 bits (coded.py) are multiplied by the same kernel from one token on. They have fewer bytes
to wait for and more arithmetic per byte, so several blocks share an SM. With more than 32 tokens, x is the
larger part of the reads: taller tiles, or one block per SM. A matrix of a small model has few stages, and
unpacking the first ones is most of its time, so teams of warps share the stages of a block. With more than
64 tokens, the tiling with the shortest waves of blocks is chosen; each 96 or 128 tokens have their own
blocks, adjacent ones that read the same W from L2, and weights of groups are scaled before the product,
since the sums of groups would double the registers. With more than 128 tokens, arithmetic takes longer than
reading W: tokens of FP8 weights with one scale per row are then rounded to FP8, too.

The next kernel may start early, except attention of more than 32 rows after a projection whose blocks are on
most SMs. An SM divides one memory into shared memory and L1, and can change the division only while it is
empty: attention, which reads through L1, would have only the L1 that the block left over.

docs/log.md has the experiments and measurements.

Shapes:  M tokens, N outputs (of the gate half when gated), K inputs.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from infer.config.profiles.hopper_h200 import H200
from infer.config.profiles.profile import DeviceProfile, LinearProfile
from infer.kernels.linear import cuda, pdl
from infer.kernels.linear.coded import BAND, CELL_COLUMNS, CodedForm, CodedWeights
from infer.kernels.linear.coded_triton import quantize_rows
from infer.kernels.linear.cuda import (
    CODES,
    CudaLinear,
    Defines,
    Matrix,
    Variant,
    form_defines,
    outer_arguments,
    outer_defines,
)
from infer.kernels.linear.residual import Epilogue, LowRankTerm
from infer.kernels.runtime import cuda_build as build
from infer.kernels.runtime import dispatch
from infer.kernels.runtime.choice import Declined
from infer.kernels.runtime.dispatch import compiles_only
from infer.kernels.runtime.profiles import device_profile
from infer.kernels.runtime.tensor_map import BOX_BYTES, BOX_COLUMNS, Boxes, TensorMap

MAX_TOKENS = 128

_WIDTHS = (16, 32, 48, 64, 96, 128)  # tokens per block, each compiled separately
_CHUNK = 64  # columns of a stage
_KV_HEADS = 8  # kv heads of the models with which `_lets_attention_in` was measured
_LONG = 128  # chunks of a long row
_MIN_CHUNKS = 4  # fewest chunks per block of a cluster
_MIN_TILES = 16
_MAX_NARROW = 64  # tokens; with more, x is as large as 128 rows of W, and larger tiles read it less often
_SHARED_BYTES = 227 << 10  # shared memory of an SM, for all its blocks
_RESERVED_BYTES = 1 << 10  # shared memory that the system reserves per block

# codes with one table for all rows: 16 copies of the pairs of its numbers
ONE_TABLE, TABLE_BYTES = ("nf4", "fp4"), 16 << 10

SOURCE = Path(__file__).with_name("wgmma.cu")
ARCH = "sm_90a"  # a: features that only Hopper has, such as wgmma
_MANY = (192, 256, 384, 512, 768, 1024)  # buckets of tokens with the same tiling
_ROWS_COST = {64: 0.62, 128: 1.0, 192: 1.35}  # block rows -> time per cell: two warpgroups fill gaps
_MAX_STAGES = 8  # stages with many tokens, independent of K, so that matrices of any length share a kernel
_BLOCK_COST = 4.0  # cost of a block, in cells: its start, and the work after the product
_FEW_TOKENS = 16  # most tokens that single warps read from shared memory
_LONG_CODED, _SHORT_CODED = 4096, 2048  # columns of long and short rows
_FEW_CELLS = 24  # most cells of a row of a small matrix
_OUTER_TYPES = (
    TensorMap,
    *(ctypes.c_void_p,) * 6,
    ctypes.c_longlong,
    *(ctypes.c_int,) * 4,
    *(ctypes.c_float,) * 2,
    ctypes.c_int,
)
_TYPES = (TensorMap, *_OUTER_TYPES)
_CODED_TYPES = (*(ctypes.c_void_p,) * 4, *_OUTER_TYPES)
_LOW_RANK_TYPES = (*(TensorMap,) * 4, *(ctypes.c_void_p,) * 2, *(ctypes.c_int,) * 4)


@dataclass(frozen=True, slots=True)
class WgmmaConfig:
    """The tiling of a matrix, for a range of token counts."""

    width: int  # most tokens per block
    rows: int  # rows of W per block; in a gated layer, half of them belong to the gate
    stages: int
    split: int = 1  # blocks that split K
    blocks: int = 1  # blocks that an SM holds
    form: CodedForm | None = None  # form of coded weights
    columns: int = _CHUNK  # columns of a stage; 128 or 256 with coded weights
    by_warps: bool = False  # coded weights: no warpgroups, whose instructions are slow for few tokens
    rounds: bool = False  # coded weights: scale and round weights before the product, not sums after it
    many: bool = False  # coded weights: more than `width` tokens, with one block per `width` tokens
    teams: int = 1  # coded weights: teams of warps, which take the stages of a block in turn
    fp8_tokens: bool = False  # coded weights: tokens are rounded to FP8, and codes are multiplied by codes
    low_rank: bool = False  # tokens have adapters, which add their own products

    def num_tiles(self, N: int, *, gated: bool) -> int:
        """The number of tiles for the N outputs of a matrix."""
        return -(-N // self.box_rows(gated=gated))

    def num_parts(self, N: int) -> int:
        """The number of partial sums of squares for N outputs, one per tile."""
        return self.num_tiles(N, gated=False)

    def box_rows(self, *, gated: bool) -> int:
        """The rows of W per copy: in a gated layer, first rows of `gate`, then of `up`."""
        return self.rows // 2 if gated else self.rows

    def num_blocks(self, M: int, N: int, *, gated: bool) -> int:
        """The number of blocks in a launch with M tokens."""
        return self.num_tiles(N, gated=gated) * self.split * -(-M // self.width)

    def leaves_little(self, num_blocks: int, profile: LinearProfile) -> bool:
        """Return True if `num_blocks` blocks take more than half of the shared memory of most SMs."""
        of_sm = min(self.blocks, -(-num_blocks // profile.num_sms)) * self.shared_bytes
        return num_blocks >= profile.crowded and of_sm > _SHARED_BYTES // 2

    @property
    def num_threads(self) -> int:
        """Threads per block: four warps per 64 rows and team, one that loads, three that add up squares."""
        return 2 * self.rows * self.teams + 128

    @property
    def shared_bytes(self) -> int:
        """The shared memory of a block, including the alignment to a multiple of 1,024."""
        stages = self.stages * stage_bytes(self)
        sums = self.teams * self.width * (self.rows + 4) * 4
        table = TABLE_BYTES if self.form is not None and self.form.codes in ONE_TABLE else 0
        barriers = (16 if self.form is None else 24) * self.stages
        squares = 3 * 8 * -(-self.width // self.split)
        return max(stages, sums) + table + barriers + squares + 2 * 1024


def stage_bytes(config: WgmmaConfig) -> int:
    """The bytes of a stage: some columns of W and of x, and their scales."""
    form, columns, rows = config.form, config.columns, config.rows
    if form is None:
        return (rows + config.width) * columns * 2
    cells = rows // BAND * (columns // CELL_COLUMNS) * form.cell_bytes
    token_bytes = 1 if config.fp8_tokens else 2
    return -(-(cells + config.width * columns * token_bytes) // 1024) * 1024


def token_width(num_tokens: int) -> int:
    """The width of a block that multiplies this many tokens."""
    return next(width for width in _WIDTHS if num_tokens <= width)


def coded_width(num_tokens: int) -> int:
    """The largest token count that has the same tiling as `num_tokens`, with coded weights."""
    if num_tokens > MAX_TOKENS:
        return next(most for most in _MANY if num_tokens <= most)
    return 8 if num_tokens <= 8 else token_width(num_tokens)


def choose_config(
    M: int, N: int, K: int, *, gated: bool, profile: LinearProfile = H200.linear
) -> WgmmaConfig | None:
    """The tiling by the rule; None: the matrix is not supported."""
    if not 0 < M <= MAX_TOKENS or N % 8 or K % 8:
        return None
    width, num_chunks, num_sms = token_width(M), -(-K // _CHUNK), profile.num_sms
    num_tiles = {rows: -(-N // (rows // 2 if gated else rows)) for rows in (64, 128, 192)}

    def split_of(rows: int, most: int) -> int:
        """The largest number of splits of K with at most `most` blocks."""
        fitting = [
            split
            for split, resident in profile.resident.items()
            if num_tiles[rows] * split <= min(most, resident)
            and num_chunks >= split * _MIN_CHUNKS
            and (split != 3 or num_chunks >= _LONG // 2)  # thirds of few chunks are uneven
        ]
        return max(fitting, default=1)

    rows = 128 if num_tiles[128] >= _MIN_TILES else 64
    if width > _MAX_NARROW and not gated and num_tiles[192] >= _MIN_TILES:
        rows = 192
    split, blocks = split_of(rows, profile.most_sms), 1
    if num_chunks >= _LONG:
        splits = {rows: split_of(rows, num_sms) for rows in (64, 128) if num_tiles[rows] <= num_sms}
        rows = max(splits, key=lambda rows: num_tiles[rows] * splits[rows], default=rows)
        split = splits.get(rows, 1)
    if num_tiles[rows] > num_sms:
        one_round = [rows for rows, tiles in num_tiles.items() if tiles <= num_sms]
        if one_round:
            rows = min(one_round)
        else:
            rows, blocks = (64, 3) if width <= 32 else (128, 2 if width <= 64 else 1)
    return _with_stages(WgmmaConfig(width, rows, -(-num_chunks // split), split, blocks))


def has_fp8_tokens(M: int, K: int, form: CodedForm) -> bool:
    """Return True if M tokens are rounded to FP8: for few tokens, reading W dominates anyway."""
    return M > MAX_TOKENS and form == CodedForm("fp8") and K % CELL_COLUMNS == 0


def max_coded(K: int, form: CodedForm, profile: LinearProfile = H200.linear) -> int:
    """The most tokens for codes of this form; with more, the library multiplies (FP8 on FP8 tensor cores)."""
    if form.codes != "fp8":
        return profile.coded_tokens
    most = profile.fp8_tokens
    return most if has_fp8_tokens(most, K, form) else profile.fp8_group_tokens


def choose_coded(
    M: int, N: int, K: int, form: CodedForm, *, gated: bool, profile: LinearProfile = H200.linear
) -> WgmmaConfig | None:
    """The tiling of a matrix of coded weights; None: the matrix is not supported."""
    if form.codes not in CODES or not 0 < M <= max_coded(K, form, profile):
        return None
    if N % (BAND if gated else 8) or K % BOX_COLUMNS:
        return None  # x is copied in whole boxes
    if M > _MAX_NARROW:
        return _choose_wide(M, N, K, form, profile.resident, gated=gated)
    width, num_cells, num_sms = coded_width(M), -(-K // CELL_COLUMNS), profile.num_sms
    num_tiles = {rows: -(-N // (rows // 2 if gated else rows)) for rows in (64, 128, 192)}
    by_warps = width <= _FEW_TOKENS
    columns = (
        2 * CELL_COLUMNS
        if by_warps and form.bits == 4 and K >= _LONG_CODED and K % 256 == 0
        else CELL_COLUMNS
    )

    def split_of(rows: int, most: int, min_cells: int = _MIN_CHUNKS) -> int:
        return max(
            s for s in (1, 2, 4) if s == 1 or (num_tiles[rows] * s <= most and num_cells >= s * min_cells)
        )

    rows, teams, is_short = 64, 1, gated and num_cells * CELL_COLUMNS <= _SHORT_CODED
    keeps_sums = form.group > 0 and width > 32  # sums of groups take the registers of additional teams
    is_small = num_cells <= _FEW_CELLS and num_tiles[64] <= profile.most_sms and not (gated and keeps_sums)
    if is_small and not by_warps and not form.has_minima:
        split, blocks = split_of(64, profile.most_sms), 1
        if split == 1 and keeps_sums:
            split = min(2, split_of(64, num_sms))
        teams = 4 if split == 1 and not keeps_sums else 2
    elif width <= 32:
        split = split_of(64, 2 * num_sms)
        has_tables = form.codes == "lut4" and not by_warps  # three blocks would not have the registers
        blocks = 2 if split == 2 or has_tables else 3
        if is_short and num_tiles[128] * 4 <= 2 * num_sms:
            rows, split, blocks = 128, split_of(128, 2 * num_sms, 2), 2
        elif form.bits == 8 and num_tiles[64] > 2 * num_sms and num_tiles[192] <= num_sms:
            rows, blocks = 192, 1
    else:
        split = max(split_of(64, num_sms), min(2, split_of(64, 2 * num_sms)))
        if is_short or num_tiles[128] > num_sms:
            fits = form.group != 64  # groups of 64 need two sums, more registers than 192 rows leave
            rows = 192 if fits and num_tiles[128] > num_sms >= num_tiles[192] else 128
            split = split_of(rows, num_sms)
        is_alone = form.group or num_tiles[rows] * split <= num_sms
        blocks = 1 if is_alone and (rows > 64 or num_tiles[rows] * split <= num_sms) else 2
        if rows == 64 and blocks == 1:
            blocks, teams = (2, 1) if split == 4 else (1, 2 if form.group else 1)
    if form.has_minima and not by_warps:  # minima need sums of x, which take more registers
        rows, blocks, teams = 64, 2 if width <= 32 else 1, 1
    stages, teams = -(-K // columns // split), max(1, min(teams, num_cells // split))
    return _with_stages(WgmmaConfig(width, rows, stages, split, blocks, form, columns, by_warps, teams=teams))


def _choose_wide(
    M: int, N: int, K: int, form: CodedForm, resident: Mapping[int, int], *, gated: bool
) -> WgmmaConfig:
    """The tiling with the shortest waves of blocks, for which x is the larger part of the reads."""
    width = 96 if M <= 96 or MAX_TOKENS < M <= 192 else MAX_TOKENS
    rounds, num_cells = form.group > 0, -(-K // CELL_COLUMNS)
    costs: dict[WgmmaConfig, float] = {}
    heights = (64,) if form.has_minima and not rounds else (128, 192, 64)
    for rows, split in itertools.product(heights, (1, 2, 4)):
        config = WgmmaConfig(
            width, rows, _MAX_STAGES, split, 1, form, CELL_COLUMNS, rounds=rounds, many=width < M,
            fp8_tokens=has_fp8_tokens(M, K, form),
        )  # fmt: skip
        if split == 1 or num_cells >= split * _MIN_CHUNKS:
            num_rounds = -(-config.num_blocks(M, N, gated=gated) // resident[split])
            costs[config] = num_rounds * (num_cells / split * _ROWS_COST[rows] + _BLOCK_COST)
    return _with_stages(min(costs, key=lambda config: costs[config]))


def _with_stages(config: WgmmaConfig) -> WgmmaConfig:
    """The tiling with as many stages as fit."""
    room = _SHARED_BYTES // config.blocks - _RESERVED_BYTES
    config = replace(config, stages=max(min(config.stages, room // stage_bytes(config)), 1))
    while config.stages > 1 and config.shared_bytes > room:
        config = replace(config, stages=config.stages - 1)
    return config


def defines_of(
    config: WgmmaConfig, dtype: torch.dtype = torch.bfloat16, activation: str = "", bias: bool = False,
    adds: bool = False, parts: bool = False,
) -> Defines:  # fmt: skip
    """The defines of a kernel."""
    coded = (
        ()
        if config.form is None
        else (
            *form_defines(config.form),
            ("COLUMNS", config.columns),
            ("BY_WARPS", int(config.by_warps)),
            ("ROUNDS", int(config.rounds)),
            ("MANY", int(config.many)),
            ("TEAMS", config.teams),
            ("FP8_TOKENS", int(config.fp8_tokens)),
        )
    )
    return (
        ("IS_BFLOAT16", int(dtype is torch.bfloat16)),
        ("TOKENS", config.width),
        ("ROWS", config.rows),
        ("STAGES", config.stages),
        ("SPLIT", config.split),
        ("BLOCKS", config.blocks),
        *coded,
        *((("LOW_RANK", 1),) if config.low_rank else ()),
        *outer_defines(activation, bias, adds, parts),
    )


def launch(
    config: WgmmaConfig, x_MK: torch.Tensor, w: torch.Tensor | CodedWeights, y_MN: torch.Tensor,
    epilogue: Epilogue,
) -> None:  # fmt: skip
    """Compute `y_MN` and the sum of `epilogue.add`, which `small.py` has allocated."""
    (M, K), N, gated = x_MK.shape, y_MN.shape[1], bool(epilogue.activation)
    assert config.width >= M or config.many, f"{M} tokens with {config}"
    outer = outer_arguments(x_MK, w, y_MN, epilogue)
    tokens, token_scales = quantize_rows(x_MK, as_cells=True) if config.fp8_tokens else (x_MK, x_MK)
    if compiles_only():  # the kernel is already being compiled
        return
    kernel = _kernel(
        x_MK.get_device(), dispatch.PDL, config, x_MK.dtype, epilogue.activation,
        epilogue.bias_N is not None, epilogue.add is not None, epilogue.prologue is not None,
    )  # fmt: skip
    weights: tuple[Boxes | int, ...]
    num_boxes = 0
    if isinstance(w, CodedWeights):
        assert w.form == config.form, f"{w.form} with {config}"
        num_boxes = config.columns * tokens.element_size() // BOX_BYTES
        others = w.tables if w.tables.numel() else w.minima
        weights = tuple(each.data_ptr() for each in (w.cells, w.scales, others, token_scales))
    else:
        weights = (Boxes(w.data_ptr(), w.dtype, len(w), K, K * 2, config.box_rows(gated=gated)),)
    num_blocks = config.num_blocks(M, N, gated=gated)
    is_for_attention = not gated and epilogue.add is None
    lets_in = not is_for_attention or _lets_attention_in(config, num_blocks, M, device_profile(x_MK.device))
    kernel(
        num_blocks,
        *weights,
        Boxes(
            tokens.data_ptr(), tokens.dtype, M, K, tokens.stride(0) * tokens.element_size(), config.width,
            num_boxes,
        ),
        *outer.addresses, outer.residual_bytes, M, N, K, outer.num_parts, epilogue.eps, outer.offset,
        int(lets_in), *_low_rank_arguments(config, epilogue.low_rank, gated=gated),
    )  # fmt: skip


def _low_rank_arguments(
    config: WgmmaConfig, term: LowRankTerm | None, *, gated: bool
) -> tuple[Boxes | int, ...]:
    """The arguments of a product with adapters: boxes of each part's B and of h, and bits of chunks."""
    assert config.low_rank == (term is not None), config
    if term is None:
        return ()
    b_NC, h_TC, (T, num_columns) = term.b_NC, term.h_TC, term.h_TC.shape
    ends, maps, box_rows = list(itertools.accumulate(term.parts)), list[Boxes](), config.box_rows(gated=gated)
    for end, rows in zip(ends, term.parts, strict=True):
        b_PC = b_NC[end - rows : end]
        maps.append(Boxes(b_PC.data_ptr(), b_PC.dtype, rows, b_PC.shape[1], b_PC.stride(0) * 2, box_rows))
    missing = 3 - len(maps)
    return (
        *maps, *maps[:1] * missing,
        Boxes(h_TC.data_ptr(), h_TC.dtype, T, num_columns, h_TC.stride(0) * 2, config.width),
        term.active.data_ptr(), term.used.data_ptr(), *ends, *[0] * missing, term.columns,
    )  # fmt: skip


def _lets_attention_in(config: WgmmaConfig, num_blocks: int, num_rows: int, profile: DeviceProfile) -> bool:
    """Return True if attention may start early: it does not read through L1, or enough L1 is left."""
    reads_l1 = num_rows * _KV_HEADS > profile.attention.projected_heads
    return not (reads_l1 and config.leaves_little(num_blocks, profile.linear))


@functools.cache
def _kernel(device: int, with_pdl: bool, *variant: Any) -> build.PreparedLaunch:
    """The kernel for some constants, with a fast lookup; compiled on its first call if not prepared."""
    return cuda.load_variant(variant_of(*variant), device, with_pdl)


def variant_of(config: WgmmaConfig, *outer: Any) -> Variant:
    """The variant for a tiling; `outer` as for `defines_of`."""
    types = _TYPES if config.form is None else _CODED_TYPES
    types = (*types, *_LOW_RANK_TYPES) if config.low_rank else types
    defines = defines_of(config, *outer)
    return Variant(SOURCE, ARCH, defines, "linear_wgmma", config.num_threads, types, config.shared_bytes)


def _choose(num_tokens: int, matrix: Matrix, profile: LinearProfile) -> WgmmaConfig | None:
    gated = bool(matrix.activation)
    if matrix.form is not None:
        is_few = num_tokens <= profile.coded_pdl_tokens
        if is_few and not isinstance(pdl.choose(num_tokens, matrix, profile), Declined):
            return None
        return choose_coded(num_tokens, matrix.N, matrix.K, matrix.form, gated=gated, profile=profile)
    return choose_config(num_tokens, matrix.N, matrix.K, gated=gated, profile=profile)


def variant_for(config: WgmmaConfig, matrix: Matrix, width: int, adds: bool, parts: bool) -> Variant:
    """The variant for a matrix of a model."""
    return variant_of(config, torch.bfloat16, matrix.activation, matrix.bias, adds, parts)


def _choose_with_adapters(num_tokens: int, matrix: Matrix, profile: LinearProfile) -> WgmmaConfig | None:
    config = _choose(num_tokens, matrix, profile)
    return None if config is None else replace(config, low_rank=True)


def make_kernel(
    profile: LinearProfile, tokens: range, *, coded: bool = False, low_rank: bool = False
) -> CudaLinear[WgmmaConfig]:
    """Make the kernel for these token counts, not compiled for any matrix yet."""
    width = coded_width if coded else token_width
    choose = functools.partial(_choose_with_adapters if low_rank else _choose, profile=profile)
    return CudaLinear(SOURCE, tokens, width, choose, variant_for, is_for_each=coded)
