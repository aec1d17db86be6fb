"""The search for tiles, on a machine that exists only in this file: what it picks and what it keeps to."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.kernels import linear_pairs
from benchmarks.kernels.linear_pairs import BUCKETS, PairSweep, Plan, TimeIsUp, key, pairs_of, tiles_of
from benchmarks.kernels.linear_small import MODELS, Matrix, Model
from infer.config.profiles.hopper_h200 import H200
from infer.kernels.linear.triton_configs import GemvConfig, SkinnyConfig, by_bucket

SMALL, *_, LARGE = MODELS


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with a liking for 16 rows of the first matrix, 128 of the second, the library for 64 tokens."""

    def seconds(num_tokens: int, first: Plan, second: Plan) -> float:
        if first is None or second is None:
            return 1.0 if num_tokens == 64 else 10.0
        cost = 2.0
        for plan, block_n in ((first, 16), (second, 128)):
            if isinstance(plan, GemvConfig):
                cost += 0.5 if num_tokens == 2 else 4.0
            else:
                cost += 1.0 + abs(math.log2(plan.block_n / block_n)) + 0.1 * plan.split_k
        return cost

    def small_weights(matrix: Matrix) -> list[torch.Tensor]:
        return [torch.zeros(matrix.num_rows, matrix.num_inputs, device="meta")] * 2

    monkeypatch.setattr(linear_pairs, "make_weights", small_weights)
    monkeypatch.setattr(linear_pairs, "pair_call", lambda _, *plans: plans)
    monkeypatch.setattr(linear_pairs, "time_calls", lambda plans, *_: seconds(*plans))


def test_both_matrices_get_the_best_tiles_and_the_library_what_it_is_faster_at() -> None:
    pair = pairs_of(SMALL)[0]
    sweep = PairSweep(pair, math.inf)
    sweep.search()
    sweep.decide()
    for block_m in (16, 32):
        first, second = sweep.skinny[key(pair.first, block_m)], sweep.skinny[key(pair.second, block_m)]
        assert first is not None and (first.block_n, first.split_k) == (16, 1)
        assert second is not None and (second.block_n, second.split_k) == (128, 1)
    assert None in (sweep.skinny[key(pair.first, 64)], sweep.skinny[key(pair.second, 64)])
    for matrix in (pair.first, pair.second):
        assert sweep.gemv[key(matrix, 2)] == by_bucket(GemvConfig, H200.linear.gemv)[key(matrix, 2)]
        assert sweep.gemv[key(matrix, 4)] is None


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_every_bucket_has_a_tile_that_fits_it(model: Model) -> None:
    for pair in pairs_of(model):
        sweep = PairSweep(pair, math.inf)
        sweep.search()
        sweep.decide()
        for matrix in (pair.first, pair.second):
            for block_m in (16, 32, 64, 128):
                tile = sweep.skinny[key(matrix, block_m)]
                assert tile is None or linear_pairs.fits(tile, matrix, block_m)


def test_what_is_not_decided_in_time_is_left_alone() -> None:
    sweep = PairSweep(pairs_of(SMALL)[1], -math.inf)
    with pytest.raises(TimeIsUp):
        sweep.search()
    assert not sweep.skinny and not sweep.gemv


def test_narrow_tiles_are_tried_where_wide_ones_are_too_few() -> None:
    def narrow(matrix: Matrix) -> list[SkinnyConfig]:
        return [tile for tile in tiles_of(matrix, BUCKETS[0]) if not tile.is_wide]

    assert {tile.block_n for tile in narrow(SMALL.layer[0])} == {16, 32}
    assert {tile.num_warps for tile in narrow(SMALL.layer[0])} == {2, 4}
    assert not narrow(SMALL.head)
    assert all(tile.block_n > 16 for tile in narrow(LARGE.layer[1]))  # 256 tiles leave too many squares
