"""Find the best tiles for two matrices with the residual stream between them, timed as a step runs them.

    first, o or down, adds to the stream   ──►   second, gate_up or qkv, reads it         (linear_small.py)

A matrix that stands alone in a graph says little about a step: its own launches follow each other, and the
norm that its tile saves or costs is not there. So a pair is timed as one, again and again with other weights,
launched ahead as the engine does it. Three questions are asked, each with the answers so far:

    search    tiles of the second matrix, then of the first: all of them with 32 tokens, the best with 16 and
              64; with 128 all the wide ones
    decide    for each bucket of tokens: both on the tensor cores and nothing between them; or one or both by
              the library, with a norm between
    dots      for 2 and 4 tokens: dot products, with a norm between, or what 16 tokens have

All pairs are searched before the first is decided on: other processes may compile in the meantime.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from benchmarks.kernels.linear_small import EPS, Matrix, Model, make_weights
from benchmarks.kernels.timing import time_calls
from infer.config.profiles.hopper_h200 import H200
from infer.kernels.elementwise.gated_activation import gated_activation
from infer.kernels.elementwise.rms_norm import add_rms_norm
from infer.kernels.linear.residual import ResidualInput
from infer.kernels.linear.small import MAX_SQUARES, block_of_parts, launch, launch_add, launch_of_sum
from infer.kernels.linear.triton_configs import (
    GemvConfig,
    Key,
    SkinnyConfig,
    bucket,
    by_bucket,
    default_gemv_config,
    default_skinny_config,
    fit_stages,
)
from infer.kernels.runtime.dispatch import triton

PAIR_TILES = (  # block_n, block_k, split_k (filled in), num_warps, num_stages
    SkinnyConfig(64, 64, 1, 4, 6),
    SkinnyConfig(64, 128, 1, 4, 4),
    SkinnyConfig(64, 256, 1, 4, 3),
    SkinnyConfig(128, 64, 1, 4, 4),
    SkinnyConfig(128, 128, 1, 8, 4),
    SkinnyConfig(16, 128, 1, 2, 6),
    SkinnyConfig(16, 256, 1, 2, 4),
    SkinnyConfig(16, 256, 1, 4, 4),
    SkinnyConfig(32, 128, 1, 2, 6),
    SkinnyConfig(32, 128, 1, 4, 6),
    SkinnyConfig(32, 256, 1, 4, 4),
)
SPLITS = (1, 2, 4, 8)
BUCKETS = (32, 16, 64, 128)
_NUM_FINALISTS = 6
# Too much shared memory, too many registers; or a tile that this version of Triton cannot compile.
_DOES_NOT_FIT = (triton.runtime.errors.OutOfResources, RuntimeError) if triton else (RuntimeError,)
_ENOUGH_TILES = 264  # of 64 rows: two for each multiprocessor, narrower ones have nothing to give

Plan = GemvConfig | SkinnyConfig | None
Inputs = list[tuple[torch.Tensor, ...]]
Table = dict[int, SkinnyConfig]  # bucket -> tile


class TimeIsUp(Exception):
    """The sweep has to end; what was decided until now counts."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The matrix that writes and the one that reads."""

    first: Matrix
    second: Matrix

    def __str__(self) -> str:
        names = f"{self.first.name} -> {self.second.name}"
        return f"{names}, {self.first.num_inputs} -> {self.first.num_outputs} -> {self.second.num_outputs}"


def pairs_of(model: Model) -> tuple[Pair, Pair]:
    """The two pairs of a layer; the second one reaches into the next layer."""
    qkv, o, gate_up, down = model.layer
    return Pair(o, gate_up), Pair(down, qkv)


def key(matrix: Matrix, block_m: int) -> Key:
    """Where the table has this matrix."""
    return matrix.num_outputs, matrix.num_inputs, matrix.gated, block_m


class PairSweep:
    """The search for one pair and what became of it."""

    def __init__(self, pair: Pair, deadline: float) -> None:
        self.pair, self.deadline = pair, deadline
        firsts, seconds = make_weights(pair.first), make_weights(pair.second)
        count = min(len(firsts), len(seconds))  # of the larger one as many as overflow the cache
        self.weights = list(zip(firsts[:count], seconds[:count], strict=True))
        self.tiles: tuple[Table, Table] = ({}, {})
        self.gemv: dict[Key, GemvConfig | None] = {}
        self.skinny: dict[Key, SkinnyConfig | None] = {}
        self._inputs: dict[int, Inputs] = {}

    def search(self) -> None:
        """Choose tiles for both matrices, as if every number of tokens had nothing between them."""
        print(self.pair, flush=True)
        start = {block_m: self._start(self.pair.first, block_m) for block_m in BUCKETS}
        second = self._best(self.pair.second, lambda tile, block_m: self._time(block_m, start[block_m], tile))
        first = self._best(
            self.pair.first, lambda tile, block_m: self._time(block_m, tile, second.get(block_m))
        )
        self.tiles = first, second

    def decide(self) -> None:
        """Fill the table's rows of both matrices."""
        print(self.pair, flush=True)
        sides = self.pair.first, self.pair.second
        skinny: dict[Key, SkinnyConfig | None] = {}
        gemv: dict[Key, GemvConfig | None] = {}
        chosen: tuple[Plan, Plan] = (None, None)
        for block_m in (128, 64, 32, 16):
            first, second = (tiles.get(block_m) for tiles in self.tiles)
            options = {(first, second), (first, None), (None, second), (None, None)}
            chosen = self._choose(block_m, options)
            for matrix, plan in zip(sides, chosen, strict=True):
                assert not isinstance(plan, GemvConfig)
                skinny[key(matrix, block_m)] = plan
        for num_tokens in (2, 4):
            dots = [self._dots(matrix, num_tokens) for matrix in sides]
            plans = [{rival, own or rival} for rival, own in zip(chosen, dots, strict=True)]
            best = self._choose(num_tokens, {(first, second) for first in plans[0] for second in plans[1]})
            for matrix, plan in zip(sides, best, strict=True):
                gemv[key(matrix, num_tokens)] = plan if isinstance(plan, GemvConfig) else None
        self.gemv, self.skinny = gemv, skinny

    def _choose(self, num_tokens: int, options: Iterable[tuple[Plan, Plan]]) -> tuple[Plan, Plan]:
        times = {option: self._time(num_tokens, *option) for option in options}
        best = min(times, key=times.__getitem__)
        for (first, second), seconds in sorted(times.items(), key=lambda item: item[1]):
            print(f"  M={num_tokens:<3} {seconds * 1e6:7.1f} us  {first}, {second}", flush=True)
        return best

    def _dots(self, matrix: Matrix, num_tokens: int) -> GemvConfig | None:
        rule = default_gemv_config(matrix.num_outputs, matrix.num_inputs, matrix.gated)
        return by_bucket(GemvConfig, H200.linear.gemv).get(key(matrix, num_tokens), rule)

    def _start(self, matrix: Matrix, block_m: int) -> SkinnyConfig:
        """What the table has, or else the rule; a tall tile where those would leave too many squares."""
        table = by_bucket(SkinnyConfig, H200.linear.skinny)
        tiles = (table.get(key(matrix, size)) for size in (block_m, *BUCKETS))
        rule = default_skinny_config(matrix.num_outputs, matrix.num_inputs, matrix.gated)
        tall = SkinnyConfig(128, 128, 1, 8, 4)
        return next((tile for tile in (*tiles, rule) if tile and fits(tile, matrix, block_m)), tall)

    def _best(self, matrix: Matrix, seconds_of: Callable[[SkinnyConfig, int], float]) -> Table:
        """The tile of each bucket."""
        times: dict[int, dict[SkinnyConfig, float]] = {block_m: {} for block_m in BUCKETS}
        tiles = list(tiles_of(matrix, BUCKETS[0]))
        for block_m in BUCKETS:
            if block_m == 128:
                tiles = [tile for tile in tiles_of(matrix, block_m) if tile.is_wide]
            for tile in tiles:
                if fits(tile, matrix, block_m):
                    try:
                        times[block_m][tile] = seconds_of(tile, block_m)
                    except _DOES_NOT_FIT as error:
                        print(f"  {tile} with {block_m} tokens: {error}", flush=True)
            if block_m == BUCKETS[0]:
                tiles = sorted(times[block_m], key=times[block_m].__getitem__)[:_NUM_FINALISTS]
        for block_m, of_bucket in times.items():
            for tile, seconds in sorted(of_bucket.items(), key=lambda item: item[1])[:3]:
                print(f"  {matrix.name:8} M={block_m:<3} {seconds * 1e6:7.1f} us  {tile}", flush=True)
        return {block_m: min(found, key=found.__getitem__) for block_m, found in times.items() if found}

    def _time(self, num_tokens: int, first: Plan, second: Plan) -> float:
        if time.monotonic() > self.deadline:
            raise TimeIsUp
        inputs = self._inputs.get(num_tokens)
        if inputs is None:
            inputs = self._inputs[num_tokens] = make_pair_inputs(self.pair, num_tokens, self.weights)
        return time_calls(pair_call(self.pair, num_tokens, first, second), inputs, inputs[0][0].device)


def make_pair_inputs(pair: Pair, num_tokens: int, weights: list[tuple[torch.Tensor, torch.Tensor]]) -> Inputs:
    """x, residual, gain, squares and the two weights, for every call of the graph.

    The squares are as many as tiles of 64 rows leave, whatever the first matrix has: to read them takes as
    long, and a tile of the second need not be compiled for each height of the first.
    """
    K, D = pair.first.num_inputs, pair.first.num_outputs
    device, dtype = weights[0][0].device, weights[0][0].dtype
    x, residual = (torch.randn(num_tokens, size, device=device, dtype=dtype) for size in (K, D))
    gain = torch.rand(D, device=device, dtype=dtype) + 0.5
    squares = torch.ones(-(-D // 64), num_tokens, device=device, dtype=torch.float64)
    return [(x, residual, gain, squares, *both) for both in weights]


def pair_call(pair: Pair, num_tokens: int, first: Plan, second: Plan) -> Callable[..., torch.Tensor]:
    """What the engine does with these plans; None is the library."""
    activation = "silu" if pair.second.gated else ""
    block_m = max(bucket(num_tokens), 16)
    if isinstance(first, SkinnyConfig):
        first = fit_stages(first, block_m, False)
    if isinstance(second, SkinnyConfig):
        second = fit_stages(second, block_m, pair.second.gated)

    def call(
        x: torch.Tensor,
        residual: torch.Tensor,
        gain: torch.Tensor,
        squares: torch.Tensor,
        w: torch.Tensor,
        second_w: torch.Tensor,
    ) -> torch.Tensor:
        if isinstance(first, SkinnyConfig) and isinstance(second, SkinnyConfig):
            added = launch_add(first, ResidualInput(residual, gain, 0.0), x, w)._replace(squares_PM=squares)
            return launch_of_sum(second, added, second_w, eps=EPS, activation=activation)
        y = F.linear(x, w) if first is None else launch(first, x, w)
        normed, _ = add_rms_norm(y, residual, gain, eps=EPS)
        if second is not None:
            return launch(second, normed, second_w, activation=activation)
        y = F.linear(normed, second_w)
        return gated_activation(y, activation=activation) if activation else y

    return call


def tiles_of(matrix: Matrix, block_m: int) -> Iterator[SkinnyConfig]:
    """Every tile with every split that leaves each program two steps along K, in not too many programs."""
    for tile in PAIR_TILES:
        num_tiles = -(-matrix.num_outputs // tile.block_n)
        if not tile.is_wide and matrix.num_outputs >= 64 * _ENOUGH_TILES:
            continue
        for split_k in SPLITS:
            is_filled = split_k * tile.block_k * 2 <= matrix.num_inputs and num_tiles * split_k <= 8 * 132
            if (split_k == 1 or is_filled) and fits(tile, matrix, block_m):
                yield replace(tile, split_k=split_k)


def fits(tile: SkinnyConfig, matrix: Matrix, block_m: int) -> bool:
    """Whether three stages fit the shared memory, and sums and squares the registers."""
    sums_per_thread = tile.block_n * block_m * (2 if matrix.gated else 1) // (32 * tile.num_warps)
    num_parts = 0 if matrix.norm else -(-matrix.num_outputs // tile.block_n)  # the first matrix leaves them
    return (
        fit_stages(tile, block_m, matrix.gated).num_stages >= 3
        and sums_per_thread <= 128
        and (not num_parts or block_of_parts(num_parts) * block_m <= MAX_SQUARES)
    )
