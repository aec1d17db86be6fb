"""The six kernels behind kernels/sample_rows.py, which tells how they work together.

Each is launched over rows, or over rows and tiles of 4096 tokens; a program that has nothing to do for
its row leaves at once. Programs speak to each other only through memory written by an earlier launch, and
through sums of integers, which come out the same in any order.

Shapes:  S sampled rows, V vocabulary, R rows of state.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from infer.kernels.dispatch import INTERPRETED, jit, tl, triton

libdevice: Any = None if triton is None else importlib.import_module("triton.language.extra.libdevice")


def _constant(value: float) -> float:
    """A global that kernels may read."""
    return value if tl is None else tl.constexpr(value)


_INFINITE_KEY = _constant(0x7F800000)  # the bits of infinity: the depth of a token that is -inf
_MASS_OF_LARGEST = _constant(2.0**44)
_TO_UNIFORM = _constant(2.0**-31 * (1 - 2.0**-24))
_SMALLEST_TEMPERATURE = _constant(torch.finfo(torch.float32).tiny)
_MARGIN = _constant(1e-3)  # a hundred times the error of a rough score


# Exact means: as PyTorch computes it on the same device. Triton's own exp and log are approximations on a
# GPU; its interpreter knows only those, and there they are exact.
if INTERPRETED:

    @jit
    def _exp(x):
        return tl.exp(x)

    @jit
    def _log(x):
        return tl.log(x)

    @jit
    def _log_of_one_minus(x):
        return tl.log(1.0 - x.to(tl.float64)).to(tl.float32)
else:

    @jit
    def _exp(x):
        return libdevice.exp(x)

    @jit
    def _log(x):
        return libdevice.log(x)

    @jit
    def _log_of_one_minus(x):
        return libdevice.log1p(-x)


@jit
def _key(x, peak, temperature):
    """The bits of |(x - peak) / temperature|, correctly rounded: smaller is likelier."""
    return tl.abs(tl.div_rn(x - peak, temperature)).to(tl.int32, bitcast=True)


@jit
def _mass(key):
    return (_exp(-(key.to(tl.float32, bitcast=True))) * _MASS_OF_LARGEST).to(tl.int64)


@jit
def _edge_of(keys, weights, limit):
    """The smallest key up to which the weights reach the limit; infinity's if they never do.

    Each round asks eight keys evenly spread over what is left, and leaves the eighth with the edge in it.
    """
    low = tl.zeros((), tl.int32)
    high = tl.full((), _INFINITE_KEY, tl.int32)
    while low < high:
        step = (high - low) // 8 + 1
        pivots = low + tl.arange(0, 8) * step
        reach = tl.sum(tl.where(keys[:, None] < pivots[None, :], weights[:, None], 0), axis=0)
        num_below = tl.sum((reach.to(tl.float64) < limit).to(tl.int32), axis=0)  # the first one always is
        low += (num_below - 1) * step
        high = tl.minimum(high, low + step - 1)
    return low


@jit
def _has_peak(peak):
    return (peak > float("-inf")) & (peak < float("inf"))


@jit
def _is_drawn(temperature, top_k, peak):
    """Whether the row has a next token, and it is not simply the likeliest."""
    return (temperature > 0.0) & (top_k != 1) & _has_peak(peak)


@jit
def peaks_kernel(
    logits_ptr, rows_ptr, peaks_ptr, stride, V, num_groups, GROUP: tl.constexpr, GROUPS: tl.constexpr
):
    """The largest logit of each group of tokens; infinite if one is not a number: the row has no token."""
    s = tl.program_id(0).to(tl.int64)
    if tl.load(rows_ptr + s) >= 0:
        groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = tl.load(logits_ptr + s * stride + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
        x = tl.where(x != x, float("inf"), x)
        tl.store(peaks_ptr + s * num_groups + groups, tl.max(x, axis=1))


@jit
def threshold_kernel(
    rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, peaks_ptr, peak_ptr, threshold_ptr,
    num_candidates_ptr, mass_ptr, V, num_groups, num_real_groups, usual_rank, BLOCK_GROUPS: tl.constexpr,
):  # fmt: skip
    """The largest logit of the row, and the key up to which tokens are candidates; -1 if none is needed."""
    s = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + s)
    threshold = tl.full((), -1, tl.int32)
    if row >= 0:
        groups = tl.arange(0, BLOCK_GROUPS)
        in_row = groups < num_groups
        peaks = tl.load(peaks_ptr + s * num_groups + groups, mask=in_row, other=float("-inf"))
        peak = tl.max(peaks, axis=0)
        tl.store(peak_ptr + s, peak)
        temperature = tl.load(temperature_ptr + row)
        top_k = tl.load(top_k_ptr + row)
        by_k = (top_k > 0) & (top_k < V)
        by_p = tl.load(top_p_ptr + row) < 1.0
        if _is_drawn(temperature, top_k, peak) & (by_k | by_p):
            keys = _key(peaks, peak, tl.maximum(temperature, _SMALLEST_TEMPERATURE))
            rank = tl.where(by_k, tl.minimum(top_k, num_real_groups), usual_rank)
            ones = tl.full((BLOCK_GROUPS,), 1, tl.int32)
            threshold = _edge_of(keys, ones, rank.to(tl.float64))
    tl.store(threshold_ptr + s, threshold)
    tl.store(num_candidates_ptr + s, 0)
    tl.store(mass_ptr + s, tl.zeros((), tl.int64))


@jit
def collect_kernel(
    logits_ptr, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, peak_ptr, threshold_ptr,
    num_candidates_ptr, candidates_ptr, mass_ptr, stride, V,
    MAX_CANDIDATES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copy the keys of the candidates, in any order, and weigh the row."""
    s = tl.program_id(0).to(tl.int64)
    threshold = tl.load(threshold_ptr + s)
    if threshold >= 0:
        row = tl.load(rows_ptr + s)
        temperature = tl.maximum(tl.load(temperature_ptr + row), _SMALLEST_TEMPERATURE)
        ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
        x = tl.load(logits_ptr + s * stride + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
        keys = _key(x, tl.load(peak_ptr + s), temperature)
        top_k = tl.load(top_k_ptr + row)
        if (top_k == 0) | (top_k >= V):  # the mass of a top-k is that of its candidates
            tl.atomic_add(mass_ptr + s, tl.sum(_mass(keys), axis=0), sem="relaxed")
        is_candidate = (keys <= threshold) & (keys < _INFINITE_KEY)
        count = tl.sum(is_candidate.to(tl.int32), axis=0)
        if count > 0:
            start = tl.atomic_add(num_candidates_ptr + s, count, sem="relaxed")
            places = start + tl.cumsum(is_candidate.to(tl.int32), axis=0) - 1
            fits = is_candidate & (places < MAX_CANDIDATES)
            tl.store(candidates_ptr + s * MAX_CANDIDATES + places, keys, mask=fits)


@jit
def _weights_of_tile(x_ptr, start, V, peak, temperature, last, by_mass, BLOCK: tl.constexpr):
    """Keys of some tokens, and what each weighs: its mass or 1; nothing beyond the key `last`."""
    ids = start + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
    keys = _key(x, peak, temperature)
    weights = tl.where(by_mass, _mass(keys), 1)
    return keys, tl.where((ids < V) & (keys <= last), weights, 0)


@jit
def _edge_of_row(x_ptr, V, peak, temperature, low, last, by_mass, limit, BLOCK: tl.constexpr):
    """As `_edge_of`, of all tokens up to the key `last`: each pass over the row leaves an eighth."""
    high = last
    while low < high:
        step = (high - low) // 8 + 1
        pivots = low + tl.arange(0, 8) * step
        reach = tl.zeros((8,), tl.int64)
        for start in range(0, V, BLOCK):
            keys, weights = _weights_of_tile(x_ptr, start, V, peak, temperature, last, by_mass, BLOCK)
            reach += tl.sum(tl.where(keys[:, None] < pivots[None, :], weights[:, None], 0), axis=0)
        num_below = tl.sum((reach.to(tl.float64) < limit).to(tl.int32), axis=0)
        low += (num_below - 1) * step
        high = tl.minimum(high, low + step - 1)
    return low


@jit
def _mass_of_row(x_ptr, V, peak, temperature, last, BLOCK: tl.constexpr):
    total = tl.zeros((), tl.int64)
    for start in range(0, V, BLOCK):
        _, weights = _weights_of_tile(x_ptr, start, V, peak, temperature, last, True, BLOCK)
        total += tl.sum(weights, axis=0)
    return total


@jit
def edge_kernel(
    logits_ptr, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, peak_ptr, threshold_ptr,
    num_candidates_ptr, candidates_ptr, mass_ptr, edge_ptr, stride, V,
    MAX_CANDIDATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The key up to which the filters of a row keep its tokens."""
    s = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + s)
    if row >= 0:
        edge = tl.full((), _INFINITE_KEY, tl.int32)
        threshold = tl.load(threshold_ptr + s)
        if threshold >= 0:
            top_k = tl.load(top_k_ptr + row)
            top_p = tl.load(top_p_ptr + row)
            by_k = (top_k > 0) & (top_k < V)
            count = tl.load(num_candidates_ptr + s)
            places = tl.arange(0, MAX_CANDIDATES)
            found = places < tl.minimum(count, MAX_CANDIDATES)
            keys = tl.load(candidates_ptr + s * MAX_CANDIDATES + places, mask=found, other=_INFINITE_KEY)
            has_all = count <= MAX_CANDIDATES
            is_enough = has_all
            if by_k:
                is_enough = has_all & ((count >= top_k) | (threshold >= _INFINITE_KEY))
                edge = _edge_of(keys, found.to(tl.int32), top_k.to(tl.float64))
            if is_enough & (top_p < 1.0):
                masses = tl.where(keys <= edge, _mass(keys), 0)
                reach = tl.sum(masses, axis=0)
                total = tl.where(by_k, reach, tl.load(mass_ptr + s))
                limit = top_p * total.to(tl.float64)
                is_enough = reach.to(tl.float64) >= limit
                edge = tl.minimum(_edge_of(keys, masses, limit), edge)
            if not is_enough:
                x_ptr = logits_ptr + s * stride
                peak = tl.load(peak_ptr + s)
                temperature = tl.maximum(tl.load(temperature_ptr + row), _SMALLEST_TEMPERATURE)
                # All tokens before the threshold were seen and did not suffice, or there were too many.
                low = tl.where(has_all, threshold, 0)
                edge = tl.full((), _INFINITE_KEY, tl.int32)
                total = tl.load(mass_ptr + s)
                if by_k:
                    limit = top_k.to(tl.float64)
                    edge = _edge_of_row(x_ptr, V, peak, temperature, low, edge, False, limit, BLOCK)
                    low = tl.zeros((), tl.int32)
                    total = _mass_of_row(x_ptr, V, peak, temperature, edge, BLOCK)
                if top_p < 1.0:
                    limit = top_p * total.to(tl.float64)
                    edge = _edge_of_row(x_ptr, V, peak, temperature, low, edge, True, limit, BLOCK)
        min_p = tl.load(min_p_ptr + row)
        if min_p > 0.0:
            edge = tl.minimum(edge, tl.abs(_log(min_p).to(tl.float32)).to(tl.int32, bitcast=True))
        tl.store(edge_ptr + s, edge)


@jit
def _noise_keys(seed, position):
    """`noise_keys` of kernels/sample.py in wrapping 64-bit integers; the masks make shifts logical."""
    state = seed * -0x2ECBDABC217D106B - position * 0x61C8864680B583EB + 0x2545F4914F6CDD1D
    state ^= (state >> 30) & 0x3FFFFFFFF
    state *= -0x40A7B892E31B1A47
    state ^= (state >> 27) & 0x1FFFFFFFFF
    state *= -0x6B2FB644ECCEEE15
    state ^= (state >> 31) & 0x1FFFFFFFF
    return state.to(tl.uint32), ((state >> 32) & 0xFFFFFFFF).to(tl.uint32)


@jit
def _uniform(ids, key0, key1):
    """The hash of kernels/sample.py as a number between 0 and 1; the noise is large where it is small."""
    x = ids.to(tl.uint32) * 0x9E3779B1 + key0
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x += key1
    x *= 0x846CA68B
    x ^= x >> 16
    return ((x & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * _TO_UNIFORM


@jit
def _noise(w):
    return -_log(-_log_of_one_minus(w))


@jit
def _rough_noise(w):
    """The noise within 1e-5, by two base-2 logarithms; near 0 a series replaces log(1 - w)."""
    series = w * (1.0 + w * (0.5 + w * (0.33333333 + w * 0.25)))
    return -0.69314718 * tl.log2(tl.where(w < 0.0625, series, -0.69314718 * tl.log2(1.0 - w)))


@jit
def draw_kernel(
    logits_ptr, rows_ptr, positions_ptr, seed_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, peak_ptr,
    edge_ptr, best_score_ptr, best_id_ptr, stride, V, num_tiles, TILE: tl.constexpr,
):  # fmt: skip
    """The best token of a tile and its exact score.

    A rough score is right within 1e-5 wherever it can matter: the winner of the row has a depth below 26,
    since noise lies between -2.9 and 22.2. So no token more than the margin behind can be the winner.
    """
    s = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + s)
    if row >= 0:
        temperature = tl.load(temperature_ptr + row)
        peak = tl.load(peak_ptr + s)
        if _is_drawn(temperature, tl.load(top_k_ptr + row), peak):
            temperature = tl.maximum(temperature, _SMALLEST_TEMPERATURE)
            seed, position = tl.load(seed_ptr + row), tl.load(positions_ptr + s).to(tl.int64)
            key0, key1 = _noise_keys(seed, position)
            ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
            x = tl.load(logits_ptr + s * stride + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
            below_peak = x - peak
            w = _uniform(ids, key0, key1)
            rough = below_peak * (1.0 / temperature) + _rough_noise(w)
            edge = tl.load(edge_ptr + s)
            if edge < _INFINITE_KEY:
                rough = tl.where(_key(x, peak, temperature) <= edge, rough, float("-inf"))
            is_near = rough >= tl.max(rough, axis=0) - _MARGIN
            best_id = tl.min(tl.where(is_near, ids, V), axis=0)
            is_best = ids == best_id
            best_w = tl.sum(tl.where(is_best, w, 0.0), axis=0)
            best_depth = tl.sum(tl.where(is_best, below_peak, 0.0), axis=0)
            best = tl.div_rn(best_depth, temperature) + _noise(best_w)
            if tl.sum(is_near.to(tl.int32), axis=0) > 1:
                score = tl.div_rn(below_peak, temperature) + _noise(w)
                score = tl.where(rough > float("-inf"), score, float("-inf"))
                best = tl.max(score, axis=0)
                best_id = tl.min(tl.where(score == best, ids, V), axis=0)
            tl.store(best_score_ptr + s * num_tiles + tl.program_id(1), best)
            tl.store(best_id_ptr + s * num_tiles + tl.program_id(1), best_id)


@jit
def pick_kernel(
    logits_ptr, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, peaks_ptr, peak_ptr,
    best_score_ptr, best_id_ptr, ids_ptr, stride, V, num_groups, num_tiles,
    NO_TOKEN: tl.constexpr, GROUP: tl.constexpr, BLOCK_GROUPS: tl.constexpr, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    """The best of the tiles' best; of a greedy row, the first token that equals the peak."""
    s = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + s)
    token = tl.zeros((), tl.int32)
    if row >= 0:
        peak = tl.load(peak_ptr + s)
        token = tl.full((), NO_TOKEN, tl.int32)
        if _is_drawn(tl.load(temperature_ptr + row), tl.load(top_k_ptr + row), peak):
            tiles = tl.arange(0, BLOCK_TILES)
            in_row = tiles < num_tiles
            scores = tl.load(best_score_ptr + s * num_tiles + tiles, mask=in_row, other=float("-inf"))
            ids = tl.load(best_id_ptr + s * num_tiles + tiles, mask=in_row, other=V)
            token = tl.min(tl.where(scores == tl.max(scores, axis=0), ids, V), axis=0)
        elif _has_peak(peak):
            groups = tl.arange(0, BLOCK_GROUPS)
            in_row = groups < num_groups
            peaks = tl.load(peaks_ptr + s * num_groups + groups, mask=in_row, other=float("-inf"))
            group = tl.min(tl.where(peaks == peak, groups, num_groups), axis=0)
            ids = group * GROUP + tl.arange(0, GROUP)
            x = tl.load(logits_ptr + s * stride + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
            token = tl.min(tl.where(x == peak, ids, V), axis=0)
    tl.store(ids_ptr + s, token.to(tl.int64))
