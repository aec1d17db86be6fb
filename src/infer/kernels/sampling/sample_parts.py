"""What the kernels of kernels/sampling/sample_kernels.py are made of: noise, depths and masses, edges, draws.

*Exact* means here: as PyTorch computes it on the same device. A token that a row might lose or win by is
always judged by exact numbers; rough ones only ever say which tokens are worth that effort.

Shapes:  V vocabulary.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from infer.kernels.runtime.dispatch import INTERPRETED, jit, tl, triton

libdevice: Any = None if triton is None else importlib.import_module("triton.language.extra.libdevice")


def constant(value: float) -> float:
    """A global that kernels may read."""
    return value if tl is None else tl.constexpr(value)


# Beyond a depth of 31 a token weighs nothing (exp(-31) * 2^44 < 1), and no noise makes up for it either:
# noise lies between -2.9 and 22.2. So no filter has to look further.
DEEPEST_KEY = constant(0x41F80000)  # the bits of 31.0
INFINITE_KEY = constant(0x7F800000)  # the bits of infinity: the depth of a token that is -inf
SMALLEST_TEMPERATURE = constant(torch.finfo(torch.float32).tiny)
_MASS_OF_LARGEST = constant(2.0**44)
_TO_UNIFORM = constant(2.0**-31 * (1 - 2.0**-24))
_MARGIN = constant(1e-3)  # a hundred times the rounding error of a bound


# Triton's own exp and log need not be PyTorch's on a GPU; its interpreter knows only those, and there they
# are exact.
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

    @jit
    def _rough_log2(x):
        return tl.log2(x)
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
    def _rough_log2(x):
        return libdevice.fast_log2f(x)  # one instruction; tl.log2 is a dozen


# rows ----------------------------------------------------------------------------------------------------


@jit
def is_last(num_done_ptr, num_programs):
    """Whether the other programs of the row are done: what they wrote may now be read.

    The counter is left at 0 for the next launch.
    """
    tl.debug_barrier()  # every thread has written before one of them counts
    are_done = tl.atomic_add(num_done_ptr, 1, sem="acq_rel") == num_programs - 1
    if are_done:
        tl.store(num_done_ptr, 0)
    return are_done


@jit
def limits_top_k(top_k, V):
    return (top_k > 0) & (top_k < V)


@jit
def min_p_edge(min_p):
    """The key of log(min_p); infinity's if the filter is off."""
    edge = tl.full((), INFINITE_KEY, tl.int32)
    if min_p > 0.0:
        edge = tl.abs(_log(min_p).to(tl.float32)).to(tl.int32, bitcast=True)
    return edge


@jit
def load_logits(x_ptr, ids, n):
    return tl.load(x_ptr + ids, mask=ids < n, other=float("-inf")).to(tl.float32)


# depths and masses ---------------------------------------------------------------------------------------


@jit
def key_of(x, peak, temperature):
    """The bits of |(x - peak) / temperature|, correctly rounded: smaller is likelier."""
    return tl.abs(tl.div_rn(x - peak, temperature)).to(tl.int32, bitcast=True)


@jit
def mass_of(keys):
    return (_exp(-(keys.to(tl.float32, bitcast=True))) * _MASS_OF_LARGEST).to(tl.int64)


@jit
def mass_up_to(x_ptr, n, peak, temperature, last, BLOCK: tl.constexpr):
    """The mass of those of n tokens whose key is at most `last`."""
    total = tl.zeros((), tl.int64)
    for start in range(0, n, BLOCK):
        keys = key_of(load_logits(x_ptr, start + tl.arange(0, BLOCK), n), peak, temperature)
        total += tl.sum(tl.where(keys <= last, mass_of(keys), 0), axis=0)
    return total


# edges ---------------------------------------------------------------------------------------------------


@jit
def search_edge(
    x_ptr, n, peak, temperature, low, high, base, limit,
    BY_MASS: tl.constexpr, SLACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The smallest key from `low` to `high` up to which n tokens reach the limit; if none does, the largest.

    A token counts 1 or its mass; `base` is what those before `low` count where they are not among the n.
    Each round asks eight keys evenly spread over what is left, and leaves the eighth with the edge in it.
    The key found may be larger by `SLACK`.
    """
    smallest, largest = tl.full((), INFINITE_KEY, tl.int32), tl.zeros((), tl.int32)
    for start in range(0, n, BLOCK):
        keys = key_of(load_logits(x_ptr, start + tl.arange(0, BLOCK), n), peak, temperature)
        inside = (keys >= low) & (keys <= high)
        smallest = tl.minimum(smallest, tl.min(tl.where(inside, keys, INFINITE_KEY), axis=0))
        largest = tl.maximum(largest, tl.max(tl.where(inside, keys, 0), axis=0))
    low = tl.minimum(tl.maximum(low, smallest), high)
    high = tl.maximum(tl.minimum(high, largest), low)
    while high - low > SLACK:
        step = (high - low) // 8 + 1
        pivots = low + tl.arange(0, 8) * step
        reach = tl.zeros((8,), tl.int64) + base
        for start in range(0, n, BLOCK):
            keys = key_of(load_logits(x_ptr, start + tl.arange(0, BLOCK), n), peak, temperature)
            if BY_MASS:
                weights = mass_of(keys)
                reach += tl.sum(tl.where(keys[:, None] < pivots[None, :], weights[:, None], 0), axis=0)
            else:
                reach += tl.sum((keys[:, None] < pivots[None, :]).to(tl.int32), axis=0)
        num_below = tl.sum((reach.to(tl.float64) < limit).to(tl.int32), axis=0)  # the first one always is
        low += tl.maximum(num_below - 1, 0) * step
        high = tl.minimum(high, low + step - 1)
    return high


@jit
def edge_of(
    x_ptr, n, peak, temperature, low, high, base, mass, by_k, top_k, top_p, BLOCK: tl.constexpr
):  # fmt: skip
    """The key up to which top-k and top-p keep tokens. `mass` is the row's; top-k brings its own."""
    edge = high
    if by_k:
        edge = search_edge(
            x_ptr, n, peak, temperature, low, high, base, top_k.to(tl.float64), False, 0, BLOCK
        )
    if top_p < 1.0:
        if by_k:
            mass = mass_up_to(x_ptr, n, peak, temperature, edge, BLOCK)
        limit = top_p * mass.to(tl.float64)
        edge = search_edge(x_ptr, n, peak, temperature, low, edge, base, limit, True, 0, BLOCK)
    return edge


@jit
def collect(x, ids, is_candidate, num_candidates_ptr, values_ptr, ids_ptr, MAX_CANDIDATES: tl.constexpr):
    """Append the candidates among [groups, tokens], in any order; those that do not fit are only counted."""
    per_group = tl.sum(is_candidate.to(tl.int32), axis=1)
    count = tl.sum(per_group, axis=0)
    if count > 0:
        start = tl.atomic_add(num_candidates_ptr, count, sem="relaxed")
        start_of_group = start + tl.cumsum(per_group, axis=0) - per_group
        places = start_of_group[:, None] + tl.cumsum(is_candidate.to(tl.int32), axis=1) - 1
        fits = is_candidate & (places < MAX_CANDIDATES)
        tl.store(values_ptr + places, x, mask=fits)
        tl.store(ids_ptr + places, ids, mask=fits)


# draws ---------------------------------------------------------------------------------------------------


@jit
def noise_keys(seed, position):
    """The two keys of kernels/sampling/sample.py, in signed arithmetic with its shifts made logical."""
    state = seed * -0x2ECBDABC217D106B - position * 0x61C8864680B583EB + 0x2545F4914F6CDD1D
    state ^= (state >> 30) & 0x3FFFFFFFF
    state *= -0x40A7B892E31B1A47
    state ^= (state >> 27) & 0x1FFFFFFFFF
    state *= -0x6B2FB644ECCEEE15
    state ^= (state >> 31) & 0x1FFFFFFFF
    return state.to(tl.uint32), ((state >> 32) & 0xFFFFFFFF).to(tl.uint32)


@jit
def _uniform(ids, key0, key1):
    """The hash of sample.py as a number between 0 and 1; the noise is large where it is small."""
    x = ids.to(tl.uint32) * 0x9E3779B1 + key0
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x += key1
    x *= 0x846CA68B
    x ^= x >> 16
    return ((x & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * _TO_UNIFORM


@jit
def noise_bound(ids, key0, key1):
    """No less than the noise, and hardly more where the noise is large.

    The noise is -log(w + w^2/2 + w^3/3 + ...) <= -log(w) - w/2, which takes one logarithm instead of two.
    """
    w = _uniform(ids, key0, key1)
    return -0.69314718 * _rough_log2(w) - 0.5 * w


@jit
def _better_of(x, ids, peak, temperature, edge, key0, key1, best, token, V):
    """The best exact score so far and its token, after some more tokens; the lowest of equals."""
    scaled = tl.div_rn(x - peak, temperature)
    score = scaled - _log(-_log_of_one_minus(_uniform(ids, key0, key1)))
    is_kept = tl.abs(scaled).to(tl.int32, bitcast=True) <= edge
    score = tl.where(is_kept, score, float("-inf"))
    top = tl.max(score, axis=0)
    first = tl.min(tl.where(score == top, ids, V), axis=0)
    token = tl.where(top > best, first, tl.where(top == best, tl.minimum(token, first), token))
    return tl.maximum(best, top), token


@jit
def draw_from_groups(
    x_ptr, V, bounds, peak, temperature, edge, key0, key1, GROUP: tl.constexpr, BLOCK_GROUPS: tl.constexpr
):
    """The token with the best score of those up to the edge. `bounds`: what no score of a group exceeds.

    Groups are scored exactly, the most promising first, until no other can hold the best: one or two.
    """
    groups = tl.arange(0, BLOCK_GROUPS)
    best, token = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.int32) + V
    bound = tl.max(bounds, axis=0)
    while (bound > float("-inf")) & (bound + _MARGIN >= best):
        group = tl.min(tl.where(bounds == bound, groups, BLOCK_GROUPS), axis=0)
        ids = group * GROUP + tl.arange(0, GROUP)
        x = load_logits(x_ptr, ids, V)
        best, token = _better_of(x, ids, peak, temperature, edge, key0, key1, best, token, V)
        bounds = tl.where(groups == group, float("-inf"), bounds)
        bound = tl.max(bounds, axis=0)
    return token


@jit
def draw_from_candidates(
    values_ptr, ids_ptr, count, V, peak, temperature, edge, key0, key1, BLOCK: tl.constexpr
):
    """The candidate with the best score of those up to the edge."""
    best, token = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.int32) + V
    for start in range(0, count, BLOCK):
        places = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + places, mask=places < count, other=V)
        x = load_logits(values_ptr, places, count)
        best, token = _better_of(x, ids, peak, temperature, edge, key0, key1, best, token, V)
    return token
