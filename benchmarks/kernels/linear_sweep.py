"""Find the best tiles for the linears of few tokens, and write them into the engine's table.

Run by `python -m benchmarks.kernels.linear_small --sweep`. The matrices of a layer are tried two by two, as
they stand around the residual stream (linear_pairs.py). With `--all`, what stands alone follows while there
is time: the head, and the dot products of one token.

Of those, part of the shape is chosen at one typical number of tokens and then held; the search stays short:

    tensor cores    block_k and split_k at M = 32;      then block_n, warps and stages for each bucket (head)
    dot products    block_k and num_warps at M = 1;     then block_n and unroll for each bucket

Where tensor cores are faster than dot products, or the library than either, by 3 %, the table gets a None.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F

from benchmarks.kernels.linear_pairs import PairSweep, TimeIsUp, pairs_of
from benchmarks.kernels.linear_small import EPS, Call, Matrix, Model, make_inputs, make_weights
from benchmarks.kernels.timing import time_calls
from infer.config.profiles import hopper_h200
from infer.kernels.elementwise.gated_activation import gated_activation
from infer.kernels.linear.small import _Norm, launch
from infer.kernels.linear.triton_configs import GemvConfig, Key, SkinnyConfig, bucket, by_bucket, fit_stages
from infer.kernels.runtime import dispatch
from infer.kernels.runtime.dispatch import triton

TABLE_FILE = Path(hopper_h200.__file__)
MEASURED = hopper_h200.H200.linear  # profile whose tables are rewritten
_BEGIN, _END = "# table: begin\n", "# table: end\n"

GEMV_TILES = (
    *(GemvConfig(rows, *shape) for shape in ((512, 2), (1024, 4), (2048, 4)) for rows in (1, 2, 4)),
    GemvConfig(8, 512, 2),
    GemvConfig(2, 1024, 4, unroll=2),
    GemvConfig(4, 1024, 4, unroll=2),
)
SKINNY_TILES = (  # block_n, block_k, split_k (filled in), num_warps, num_stages
    SkinnyConfig(64, 64, 1, 4, 6),
    SkinnyConfig(64, 128, 1, 4, 4),
    SkinnyConfig(64, 256, 1, 4, 3),
    SkinnyConfig(128, 64, 1, 4, 4),
    SkinnyConfig(128, 128, 1, 8, 4),
)
SPLITS = (1, 2, 4, 8, 16)

Tile = TypeVar("Tile", GemvConfig, SkinnyConfig)
Gemv = dict[Key, GemvConfig | None]
Skinny = dict[Key, SkinnyConfig | None]


class Sweep:
    """The search over one list of matrices, until the time is up."""

    def __init__(self, budget: float) -> None:
        self.deadline = time.monotonic() + budget
        self.gemv: Gemv = {}
        self.skinny: Skinny = {}

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self.deadline

    def visit(self, matrix: Matrix) -> None:
        """Fill the table's rows of one matrix; of one that has a partner, only that for one token."""
        weights = make_weights(matrix)
        if matrix.name == "head":
            self._visit_skinny(matrix, weights)
        if not self.is_over:
            self._visit_gemv(matrix, weights)

    def _visit_gemv(self, matrix: Matrix, weights: list[torch.Tensor]) -> None:
        tiles = GEMV_TILES
        if matrix.name != "head":  # its rows for two and four tokens were decided on
            orders = {(tile.block_k, tile.num_warps) for tile in self._dots_of(matrix) if tile}
            tiles = tuple(tile for tile in tiles if not orders or (tile.block_k, tile.num_warps) in orders)
        best = self._fastest(matrix, weights, 1, tiles)
        if best is None:
            return
        self.gemv[_key(matrix, 1)] = best
        if matrix.name != "head":
            return
        same_order = [
            tile
            for tile in GEMV_TILES
            if (tile.block_k, tile.num_warps, tile.unroll) == (best.block_k, best.num_warps, 1)
        ]
        for block_m in (2, 4):
            tile = self._fastest(matrix, weights, block_m, same_order) or best
            rival = self.skinny.get(_key(matrix, 16), "unknown")
            if isinstance(rival, str) or self.is_over:
                continue
            ours = _time(matrix, weights, block_m, tile)
            theirs = _time(matrix, weights, block_m, rival)
            self.gemv[_key(matrix, block_m)] = tile if ours <= 1.03 * theirs else None
            print(f"  M={block_m:<4} dots {ours * 1e6:.1f} us, {rival} {theirs * 1e6:.1f} us", flush=True)

    def _dots_of(self, matrix: Matrix) -> list[GemvConfig | None]:
        table = by_bucket(GemvConfig, MEASURED.gemv) | self.gemv
        return [table.get(_key(matrix, num_tokens)) for num_tokens in (2, 4)]

    def _visit_skinny(self, matrix: Matrix, weights: list[torch.Tensor]) -> None:
        best = self._fastest(matrix, weights, 32, _split_tiles(matrix))
        if best is None:
            return
        same_order = [
            replace(tile, split_k=best.split_k) for tile in SKINNY_TILES if tile.block_k == best.block_k
        ]
        for block_m in (32, 16, 64, 128):
            tiles = [best] if block_m == 32 else [tile for tile in same_order if _fits(tile, matrix, block_m)]
            tile = self._fastest(matrix, weights, block_m, tiles)
            if tile is None:
                if not self.is_over:  # no tile fits
                    self.skinny[_key(matrix, block_m)] = None
                continue
            ours, theirs = _time(matrix, weights, block_m, tile), _time(matrix, weights, block_m, None)
            self.skinny[_key(matrix, block_m)] = tile if ours <= 1.03 * theirs else None
            print(
                f"  M={block_m:<4} ours {ours * 1e6:.1f} us, library {theirs * 1e6:.1f} us, {tile}",
                flush=True,
            )

    def _fastest(
        self, matrix: Matrix, weights: list[torch.Tensor], num_tokens: int, tiles: Iterable[Tile]
    ) -> Tile | None:
        """The best of those that could be tried in time; None if that is none of them."""
        times: dict[Tile, float] = {}
        for tile in tiles:
            if self.is_over:
                break
            try:
                times[tile] = _time(matrix, weights, num_tokens, tile)
            except triton.runtime.errors.OutOfResources:
                continue  # too much shared memory, or too many registers
        if not times:
            return None
        best = min(times, key=times.__getitem__)
        print(f"  M={num_tokens:<4} {times[best] * 1e6:8.1f} us  {best}  (of {len(times)})", flush=True)
        return best


def _time(
    matrix: Matrix, weights: list[torch.Tensor], num_tokens: int, tile: GemvConfig | SkinnyConfig | None
) -> float:
    """Seconds of one call, of the library without a tile; with the norm where the engine folds it in."""
    if tile is None:
        return time_calls(_library(matrix), make_inputs(matrix, num_tokens, weights), weights[0].device)
    activation = "silu" if matrix.gated else ""
    folds_norm = matrix.norm and num_tokens <= MEASURED.fold_norm_tokens
    if isinstance(tile, SkinnyConfig):
        tile = fit_stages(tile, max(bucket(num_tokens), 16), matrix.gated)  # as the engine will
    tile_to_time = tile

    def call(x: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        norm = _Norm(x, residual, gain, EPS, 0.0) if folds_norm else None
        return launch(tile_to_time, x, w, activation=activation, norm=norm)

    return time_calls(call, make_inputs(matrix, num_tokens, weights), weights[0].device)


def _library(matrix: Matrix) -> Call:
    """What the engine does where the table says None; the norm is its own launch either way."""

    def call(x: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, w)
        return gated_activation(y, activation="silu") if matrix.gated else y

    return call


def _split_tiles(matrix: Matrix) -> Iterator[SkinnyConfig]:
    """Every tile with every split that leaves each program two steps along K, in not too many programs."""
    for tile in SKINNY_TILES:
        if not _fits(tile, matrix, 32):
            continue
        num_tiles = -(-matrix.num_outputs // tile.block_n)
        for split_k in SPLITS:
            if split_k == 1 or (
                split_k * tile.block_k * 2 <= matrix.num_inputs and num_tiles * split_k <= 8 * 132
            ):
                yield replace(tile, split_k=split_k)


def _fits(tile: SkinnyConfig, matrix: Matrix, block_m: int) -> bool:
    """Whether at least three stages fit the shared memory, and the sums the registers."""
    sums_per_thread = tile.block_n * block_m * (2 if matrix.gated else 1) // (32 * tile.num_warps)
    return fit_stages(tile, block_m, matrix.gated).num_stages >= 3 and sums_per_thread <= 128


def _key(matrix: Matrix, block_m: int) -> Key:
    return matrix.num_outputs, matrix.num_inputs, matrix.gated, block_m


def render_table(gemv: Gemv, skinny: Skinny) -> str:
    """The two dictionaries as Python, a line for each matrix."""
    gemv_lines = _render(gemv, lambda tile: (tile.block_n, tile.block_k, tile.num_warps, tile.unroll))
    skinny_lines = _render(
        skinny, lambda tile: (tile.block_n, tile.block_k, tile.split_k, tile.num_warps, tile.num_stages)
    )
    return "\n".join(
        [
            "# fmt: off", "_GEMV: TileTable = {", *gemv_lines, "}",
            "_SKINNY: TileTable = {", *skinny_lines, "}", "# fmt: on", "",
        ]
    )  # fmt: skip


def _render(table: dict[Key, Tile | None], sizes: Callable[[Tile], tuple[int, ...]]) -> list[str]:
    matrices: dict[tuple[int, int, bool], list[str]] = {}
    for (N, K, gated, block_m), tile in sorted(table.items(), key=lambda item: item[0]):
        value = "None" if tile is None else str(sizes(tile)).replace(" ", "")
        matrices.setdefault((N, K, gated), []).append(f"{block_m}: {value}")
    return [f"    {matrix}: {{{', '.join(tiles)}}}," for matrix, tiles in matrices.items()]


def apply_table(gemv: Gemv, skinny: Skinny, file: Path = TABLE_FILE) -> None:
    """Put what was measured into the table; rows of other shapes stay."""
    text = file.read_text()
    before, rest = text.split(_BEGIN)
    _, after = rest.split(_END)
    old_gemv, old_skinny = by_bucket(GemvConfig, MEASURED.gemv), by_bucket(SkinnyConfig, MEASURED.skinny)
    table = render_table(old_gemv | gemv, old_skinny | skinny)
    file.write_text(before + _BEGIN + table + _END + after)


def run_sweep(models: list[Model], budget: float, *, everything: bool, apply: bool, out: Path | None) -> int:
    """Sweep the pairs of all models; `everything` is the rest as well."""
    sweep = Sweep(budget)
    pairs = [PairSweep(pair, sweep.deadline) for model in models for pair in pairs_of(model)]
    try:
        for pair in pairs:
            pair.search()
        for pair in pairs:
            pair.decide()
    except TimeIsUp:
        print("the time is up; the pairs left keep what they had", file=sys.stderr)
    for pair in pairs:
        sweep.gemv |= pair.gemv
        sweep.skinny |= pair.skinny
    del pairs
    dispatch.PDL = False  # a neighbour that is the same kernel again would flatter it
    matrices = [matrix for model in models for matrix in (model.head, *model.layer)] if everything else []
    for matrix in {_key(matrix, 0): matrix for matrix in matrices}.values():
        if sweep.is_over:
            print("the time is up; the matrices left keep what they had", file=sys.stderr)
            break
        print(
            f"{matrix.name} {matrix.num_outputs}x{matrix.num_inputs}{' gated' if matrix.gated else ''}",
            flush=True,
        )
        sweep.visit(matrix)
    report = {
        "gemv": [[list(key), tile and asdict(tile)] for key, tile in sweep.gemv.items()],
        "skinny": [[list(key), tile and asdict(tile)] for key, tile in sweep.skinny.items()],
    }
    print(json.dumps(report))
    print(render_table(sweep.gemv, sweep.skinny))
    if out:
        out.write_text(json.dumps(report, indent=1) + "\n")
    if apply:
        apply_table(sweep.gemv, sweep.skinny)
    return 0
