"""The four kernels behind kernels/sampling/sample_rows.py, which tells how they work together.

Each is launched over tiles and rows; a program that has nothing to do for its row leaves at once. Thousands
that leave at once take time, too: with many rows a program of the last three has several tiles. The last
program of a row to finish, whichever it is, sees what the others wrote and goes on with the row alone: it
samples the token, or says what the next kernel has to look for. Sums across programs are of integers, and
candidates may lie in any order: nothing depends on who came first.

Shapes:  S sampled rows, V vocabulary, R rows of state.
"""

from __future__ import annotations

from infer.kernels.runtime.dispatch import jit, jit_for_any, tl
from infer.kernels.sampling.sample_parts import (
    DEEPEST_KEY,
    INFINITE_KEY,
    SMALLEST_TEMPERATURE,
    collect,
    constant,
    draw_from_candidates,
    draw_from_groups,
    edge_of,
    is_last,
    key_of,
    limits_top_k,
    load_logits,
    mass_of,
    mass_up_to,
    min_p_edge,
    noise_bound,
    noise_keys,
    search_edge,
)

NUM_BUCKETS = 2048
_SLACK = constant(1 << 17)  # of a threshold: at most 1.6 % deeper than it had to be
_BUCKETS = constant(NUM_BUCKETS)
_BUCKETS_PER_DEPTH = constant(64.0)  # a power of two: the multiplication does not round


@jit
def _has_peak(peak):
    return (peak > float("-inf")) & (peak < float("inf"))


@jit
def _tile_ids(tile, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """The groups of a tile and their tokens: [GROUPS], [GROUPS, GROUP]."""
    groups = tile * GROUPS + tl.arange(0, GROUPS)
    return groups, groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@jit
def _own_tiles(tiles_per_program, num_groups, GROUPS: tl.constexpr):
    """The first tile of this program, and the one after its last."""
    first = tl.program_id(0) * tiles_per_program
    return first, tl.minimum(first + tiles_per_program, num_groups // GROUPS)


@jit
def survey_kernel(
    logits_ptr, rows_ptr, positions_ptr, seed_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    num_done_ptr, peaks_ptr, bounds_ptr, peak_ptr, threshold_ptr, is_wide_ptr, num_candidates_ptr, mass_ptr,
    ids_ptr, stride, V, num_groups, num_real_groups, usual_rank,
    NO_TOKEN: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
):  # fmt: skip
    """The largest logit of each group; greedy rows and rows without a filter are sampled from that.

    A group's peak is infinite if one of its logits is not a number: the row has no token. A row without a
    filter needs a second number per group, a bound on its scores, here relative to the group's own peak.
    """
    s = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + s)
    if row < 0:
        if tl.program_id(0) == 0:
            tl.store(ids_ptr + s, tl.zeros((), tl.int64))
            tl.store(threshold_ptr + s, -1)
            tl.store(is_wide_ptr + s, 0)
    else:
        temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
        top_p, min_p = tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
        by_k = limits_top_k(top_k, V)
        is_greedy = (temperature <= 0.0) | (top_k == 1)
        is_filtered = by_k | (top_p < 1.0) | (min_p > 0.0)
        temperature = tl.maximum(temperature, SMALLEST_TEMPERATURE)
        key0, key1 = noise_keys(tl.load(seed_ptr + row), tl.load(positions_ptr + s).to(tl.int64))
        x_ptr = logits_ptr + s * stride

        groups, ids = _tile_ids(tl.program_id(0), GROUPS, GROUP)
        x = load_logits(x_ptr, ids, V)
        x = tl.where(x != x, float("inf"), x)
        peaks = tl.max(x, axis=1)
        tl.store(peaks_ptr + s * num_groups + groups, peaks)
        if (is_greedy | is_filtered) == 0:
            below = x - tl.where(_has_peak(peaks), peaks, 0.0)[:, None]
            bounds = tl.max(below * (1.0 / temperature) + noise_bound(ids, key0, key1), axis=1)
            tl.store(bounds_ptr + s * num_groups + groups, bounds)

        if is_last(num_done_ptr + s, tl.num_programs(0)):
            all_groups = tl.arange(0, BLOCK_GROUPS)
            in_row = all_groups < num_groups
            peaks_ptr += s * num_groups
            all_peaks = tl.load(peaks_ptr + all_groups, mask=in_row, other=float("-inf"))
            peak = tl.max(all_peaks, axis=0)
            token = tl.full((), NO_TOKEN, tl.int32)
            threshold = tl.full((), -1, tl.int32)
            if _has_peak(peak):
                if is_greedy:
                    group = tl.min(tl.where(all_peaks == peak, all_groups, num_groups), axis=0)
                    best_ids = group * GROUP + tl.arange(0, GROUP)
                    token = tl.min(tl.where(load_logits(x_ptr, best_ids, V) == peak, best_ids, V), axis=0)
                elif is_filtered:
                    threshold = tl.minimum(min_p_edge(min_p), DEEPEST_KEY)
                    if by_k | (top_p < 1.0):
                        rank = tl.where(by_k, tl.minimum(top_k, num_real_groups), usual_rank).to(tl.float64)
                        low, high = tl.zeros((), tl.int32), tl.full((), DEEPEST_KEY, tl.int32)
                        threshold = search_edge(
                            peaks_ptr, num_groups, peak, temperature, low, high, low.to(tl.int64), rank,
                            False, _SLACK, BLOCK_GROUPS,
                        )  # fmt: skip
                        is_reached = key_of(all_peaks, peak, temperature) <= threshold
                        if tl.sum(is_reached.to(tl.int32), axis=0).to(tl.float64) < rank:
                            threshold = high  # not that many groups matter: every token that does is taken
                else:
                    all_bounds = tl.load(
                        bounds_ptr + s * num_groups + all_groups, mask=in_row, other=float("-inf")
                    )
                    all_bounds += (all_peaks - peak) * (1.0 / temperature)
                    edge = tl.full((), INFINITE_KEY, tl.int32)
                    token = draw_from_groups(
                        x_ptr, V, all_bounds, peak, temperature, edge, key0, key1, GROUP, BLOCK_GROUPS
                    )
            tl.store(ids_ptr + s, token.to(tl.int64))
            tl.store(peak_ptr + s, peak)
            tl.store(threshold_ptr + s, threshold)
            tl.store(is_wide_ptr + s, 0)
            tl.store(num_candidates_ptr + s, 0)
            tl.store(mass_ptr + s, tl.zeros((), tl.int64))


@jit_for_any("tiles_per_program")
def candidates_kernel(
    logits_ptr, rows_ptr, positions_ptr, seed_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    num_done_ptr, peaks_ptr, peak_ptr, threshold_ptr, is_wide_ptr, num_candidates_ptr, mass_ptr,
    values_ptr, candidate_ids_ptr, buckets_ptr, low_ptr, high_ptr, base_ptr, ids_ptr, stride, V, num_groups,
    tiles_per_program,
    MAX_CANDIDATES: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gather the tokens up to the threshold and weigh the row; if they suffice, sample one of them."""
    s = tl.program_id(1).to(tl.int64)
    threshold = tl.load(threshold_ptr + s)
    if threshold >= 0:
        row = tl.load(rows_ptr + s)
        temperature = tl.maximum(tl.load(temperature_ptr + row), SMALLEST_TEMPERATURE)
        top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        by_k = limits_top_k(top_k, V)
        weighs_row = (top_p < 1.0) & (by_k == 0)  # the mass of a top-k is that of its candidates
        peak = tl.load(peak_ptr + s)
        x_ptr = logits_ptr + s * stride
        values_ptr += s * MAX_CANDIDATES
        candidate_ids_ptr += s * MAX_CANDIDATES

        first_tile, end_tile = _own_tiles(tiles_per_program, num_groups, GROUPS)
        for tile in range(first_tile, end_tile):
            groups, ids = _tile_ids(tile, GROUPS, GROUP)
            nearest = tl.min(key_of(tl.load(peaks_ptr + s * num_groups + groups), peak, temperature), axis=0)
            if nearest <= tl.where(weighs_row, DEEPEST_KEY, threshold):
                x = load_logits(x_ptr, ids, V)
                keys = key_of(x, peak, temperature)
                if weighs_row:
                    tl.atomic_add(mass_ptr + s, tl.sum(tl.sum(mass_of(keys), axis=1), axis=0), sem="relaxed")
                collect(
                    x, ids, keys <= threshold, num_candidates_ptr + s, values_ptr, candidate_ids_ptr,
                    MAX_CANDIDATES,
                )  # fmt: skip

        if is_last(num_done_ptr + s, tl.num_programs(0)):
            count = tl.load(num_candidates_ptr + s)
            mass = tl.load(mass_ptr + s)
            by_p = top_p < 1.0
            is_enough = count <= MAX_CANDIDATES
            if is_enough & by_k:
                is_enough = (count >= top_k) | (threshold >= DEEPEST_KEY)
            if is_enough & weighs_row:
                reach = mass_up_to(values_ptr, count, peak, temperature, threshold, BLOCK)
                is_enough = reach.to(tl.float64) >= top_p * mass.to(tl.float64)
            edge = min_p_edge(tl.load(min_p_ptr + row))
            zero = tl.zeros((), tl.int32)
            if is_enough:
                if by_k | by_p:
                    by_filters = edge_of(
                        values_ptr, count, peak, temperature, zero, threshold, zero.to(tl.int64), mass,
                        by_k, top_k, top_p, BLOCK,
                    )  # fmt: skip
                    edge = tl.minimum(edge, by_filters)
                key0, key1 = noise_keys(tl.load(seed_ptr + row), tl.load(positions_ptr + s).to(tl.int64))
                token = draw_from_candidates(
                    values_ptr, candidate_ids_ptr, count, V, peak, temperature, edge, key0, key1, BLOCK
                )
                tl.store(ids_ptr + s, token.to(tl.int64))
            else:
                tl.store(is_wide_ptr + s, 1)
                tl.store(num_candidates_ptr + s, 0)
                tl.store(low_ptr + s, 0)
                tl.store(high_ptr + s, threshold)
                tl.store(base_ptr + s, zero.to(tl.int64))
                tl.store(buckets_ptr + s * _BUCKETS + tl.arange(0, _BUCKETS), tl.zeros((_BUCKETS,), tl.int64))


@jit
def _key_of_bucket(bucket):
    """The smallest key of a bucket."""
    return (bucket.to(tl.float32) * (1.0 / _BUCKETS_PER_DEPTH)).to(tl.int32, bitcast=True)


@jit_for_any("tiles_per_program")
def buckets_kernel(
    logits_ptr, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, num_done_ptr, peaks_ptr, peak_ptr,
    is_wide_ptr, mass_ptr, buckets_ptr, low_ptr, high_ptr, base_ptr, stride, V, num_groups,
    tiles_per_program,
    GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """For wide rows: what each bucket of similar depths counts or weighs, and the bucket with the edge."""
    s = tl.program_id(1).to(tl.int64)
    if tl.load(is_wide_ptr + s) > 0:
        row = tl.load(rows_ptr + s)
        top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        by_k, by_p = limits_top_k(top_k, V), top_p < 1.0
        if by_k | by_p:
            temperature = tl.maximum(tl.load(temperature_ptr + row), SMALLEST_TEMPERATURE)
            peak = tl.load(peak_ptr + s)
            buckets_ptr += s * _BUCKETS
            first_tile, end_tile = _own_tiles(tiles_per_program, num_groups, GROUPS)
            for tile in range(first_tile, end_tile):
                groups, ids = _tile_ids(tile, GROUPS, GROUP)
                nearest = tl.min(
                    key_of(tl.load(peaks_ptr + s * num_groups + groups), peak, temperature), axis=0
                )
                if nearest <= DEEPEST_KEY:
                    keys = key_of(load_logits(logits_ptr + s * stride, ids, V), peak, temperature)
                    is_near = keys <= DEEPEST_KEY
                    depths = tl.where(is_near, keys, 0).to(tl.float32, bitcast=True)
                    places = (depths * _BUCKETS_PER_DEPTH).to(tl.int32)
                    ones = tl.full((GROUPS, GROUP), 1, tl.int64)
                    weights = tl.where(by_k, ones, mass_of(keys))
                    tl.atomic_add(buckets_ptr + places, weights, mask=is_near & (weights > 0), sem="relaxed")

            if is_last(num_done_ptr + s, tl.num_programs(0)):
                buckets = tl.arange(0, _BUCKETS)
                weights = tl.load(buckets_ptr + buckets)
                reach = tl.cumsum(weights, axis=0)
                limit = top_p * tl.load(mass_ptr + s).to(tl.float64)
                if by_k:
                    limit = top_k.to(tl.float64)
                bucket = tl.sum((reach.to(tl.float64) < limit).to(tl.int32), axis=0)
                base = tl.sum(tl.where(buckets < bucket, weights, 0), axis=0)
                low = tl.minimum(_key_of_bucket(bucket), DEEPEST_KEY)
                high = tl.minimum(_key_of_bucket(bucket + 1) - 1, DEEPEST_KEY)
                if by_k & by_p:  # the mass of a top-k is asked next: all its tokens are needed
                    low, base = tl.zeros((), tl.int32), tl.zeros((), tl.int64)
                tl.store(low_ptr + s, low)
                tl.store(high_ptr + s, high)
                tl.store(base_ptr + s, base)


@jit_for_any("tiles_per_program")
def wide_kernel(
    logits_ptr, rows_ptr, positions_ptr, seed_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    num_done_ptr, bounds_ptr, peak_ptr, is_wide_ptr, num_candidates_ptr, mass_ptr, values_ptr,
    candidate_ids_ptr, low_ptr, high_ptr, base_ptr, ids_ptr, stride, V, num_groups,
    tiles_per_program,
    MAX_CANDIDATES: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For wide rows: gather the tokens that may be the edge, bound the scores of each group, and sample."""
    s = tl.program_id(1).to(tl.int64)
    if tl.load(is_wide_ptr + s) > 0:
        row = tl.load(rows_ptr + s)
        temperature = tl.maximum(tl.load(temperature_ptr + row), SMALLEST_TEMPERATURE)
        top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        by_k = limits_top_k(top_k, V)
        has_edge = by_k | (top_p < 1.0)
        edge = min_p_edge(tl.load(min_p_ptr + row))
        low, high = tl.load(low_ptr + s), tl.load(high_ptr + s)
        peak = tl.load(peak_ptr + s)
        key0, key1 = noise_keys(tl.load(seed_ptr + row), tl.load(positions_ptr + s).to(tl.int64))
        x_ptr = logits_ptr + s * stride
        values_ptr += s * MAX_CANDIDATES
        candidate_ids_ptr += s * MAX_CANDIDATES

        first_tile, end_tile = _own_tiles(tiles_per_program, num_groups, GROUPS)
        for tile in range(first_tile, end_tile):
            groups, ids = _tile_ids(tile, GROUPS, GROUP)
            x = load_logits(x_ptr, ids, V)
            keys = key_of(x, peak, temperature)
            bounds = noise_bound(ids, key0, key1) - keys.to(tl.float32, bitcast=True)
            bounds = tl.where(keys <= tl.minimum(high, edge), bounds, float("-inf"))
            tl.store(bounds_ptr + s * num_groups + groups, tl.max(bounds, axis=1))
            if has_edge:
                collect(
                    x, ids, (keys >= low) & (keys <= high), num_candidates_ptr + s,
                    values_ptr, candidate_ids_ptr, MAX_CANDIDATES,
                )  # fmt: skip

        if is_last(num_done_ptr + s, tl.num_programs(0)):
            if has_edge:
                count = tl.load(num_candidates_ptr + s)
                base, mass = tl.load(base_ptr + s), tl.load(mass_ptr + s)
                by_filters = high
                if count <= MAX_CANDIDATES:
                    by_filters = edge_of(
                        values_ptr, count, peak, temperature, low, high, base, mass,
                        by_k, top_k, top_p, BLOCK,
                    )  # fmt: skip
                else:  # thousands of equal tokens: walk over the whole row
                    by_filters = edge_of(
                        x_ptr, V, peak, temperature, low, high, tl.zeros((), tl.int64), mass,
                        by_k, top_k, top_p, BLOCK,
                    )  # fmt: skip
                edge = tl.minimum(edge, by_filters)
            all_groups = tl.arange(0, BLOCK_GROUPS)
            in_row = all_groups < num_groups
            all_bounds = tl.load(bounds_ptr + s * num_groups + all_groups, mask=in_row, other=float("-inf"))
            token = draw_from_groups(
                x_ptr, V, all_bounds, peak, temperature, edge, key0, key1, GROUP, BLOCK_GROUPS
            )
            tl.store(ids_ptr + s, token.to(tl.int64))
