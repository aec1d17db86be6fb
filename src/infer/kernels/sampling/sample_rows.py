"""Sample every row of a batch on the device: no copy to the host, no sort, no temporary of size [S, V].

The result equals sampling/sampler.py's, id for id: the same bias, bans and penalties (adjust_logits.py),
the same temperature, the same filters (sampling/filters.py), the same noise (gumbel.py).

    survey ──► candidates ──► buckets ──► wide
      │            │                        │
      │            │                        └── rows that keep thousands of tokens
      │            └── rows with top-k, top-p or min-p
      └── greedy rows, rows without a filter

Every kernel is launched over all rows, because the host does not know which rows need it; for a row that
does not need it, a kernel costs almost nothing.

Filters are expressed in *depths*: with s = (logit - peak) / temperature <= 0, the depth is |s|, and its bits
as an integer, the *key*, grow with it. A filter keeps the tokens up to an *edge* key:

    top-k    the smallest key with at least k tokens up to it
    top-p    the smallest key with at least p of the mass up to it (mass: exp(s) * 2^44, an integer)
    min-p    the key of log(min_p)

A row of a trained model keeps few tokens. So the largest logit of each group of 512 is examined first: if k
groups have a peak up to some key, at least k tokens are up to it. Only the tokens up to this *threshold* are
gathered (a few hundred), and both the edge and the token are found among them. If the candidates are not
enough, because the row is nearly flat, k is huge or the large logits are concentrated in few groups, the row
is *wide*: its tokens are counted or weighed in buckets of 1/64 of depth, and only the bucket that contains
the edge is gathered.

A draw with exact noise needs two logarithms per token, which cost more than reading the logits. So every
token gets an upper bound of its score, with one approximate logarithm, and each group the largest bound; then
groups are scored exactly, best bound first, until no remaining bound exceeds the best score.

The kernels are launched over tiles and rows; a program with no work for its row exits immediately. Thousands
of them take time, too, so with many rows, a program of the last three kernels processes several tiles. The
last program of a row to finish, whichever it is, sees the results of the others and completes the row: it
samples the token, or sets the parameters of the next kernel. Sums across programs are of integers, and
candidates may have any order: nothing depends on the order of the programs.

*Exact* means: as PyTorch computes it on the same device. The choice between tokens always uses exact numbers;
approximate ones only decide which tokens are worth the effort.

Shapes:  S sampled rows, V vocabulary, R rows of state, C candidates, B buckets.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from infer.kernels.runtime.compile_ahead import compiling_ahead
from infer.kernels.runtime.dispatch import (
    INTERPRETED,
    async_compile_mode,
    is_amd,
    is_gpu,
    jit,
    jit_for_any,
    next_power_of_two,
    tl,
    use_triton,
)
from infer.kernels.sampling.adjust_logits import (
    adjust_row_reference,
    adjust_tile,
    float_field,
    is_adjusted,
    libdevice,
)
from infer.kernels.sampling.gumbel import argmax_rows, gumbel_noise
from infer.kernels.sampling.gumbel import noise_keys as noise_keys_on_host
from infer.kernels.sampling.logprob_table import logprob_table
from infer.kernels.sampling.sample_line import NUM_FIELDS, SMALLEST_TEMPERATURE
from infer.kernels.sampling.sample_state import MAX_BIASED, SampleState, constant, field, num_mask_words

NO_TOKEN = -1  # the id of a row whose largest logit is not finite, as in sampling/params.py
GROUP = 512  # tokens per group, each with a known peak
TILE = 4096  # tokens per program
MAX_CANDIDATES = 2048
NUM_BUCKETS = 2048
_ROWS_PER_TILE = 16  # number of rows per tile that a program takes in the kernels after the survey


class SampleScratch:
    """Memory for the intermediate results of sampling, at fixed addresses; `ids_S` is the result."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device | str) -> None:
        self.vocab_size, self.max_rows = vocab_size, max_rows
        self.num_tiles = -(-vocab_size // TILE)
        self.num_groups = self.num_tiles * (TILE // GROUP)
        self.block_groups = next_power_of_two(self.num_groups)

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros((max_rows, *shape), dtype=dtype, device=device)

        self.ids_S = empty(dtype=torch.int64)
        self.tensors = (  # tensors in the order of the kernels' arguments
            empty(),  # num_done: finished programs of the running kernel; 0 between kernels
            empty(self.num_groups, dtype=torch.float32),  # peaks of the groups; infinite: contains a NaN
            empty(self.num_groups, dtype=torch.float32),  # bounds: upper bounds of the groups' scores
            empty(dtype=torch.float32),  # peak of the row
            empty(),  # threshold: key up to which candidates are gathered; -1: none needed
            empty(),  # num_candidates
            empty(MAX_CANDIDATES, dtype=torch.float32),  # values: logits of the candidates
            empty(MAX_CANDIDATES),  # ids of the candidates
            empty(dtype=torch.int64),  # mass of all tokens
            empty(),  # is_wide
            empty(NUM_BUCKETS, dtype=torch.int64),  # buckets
            empty(),  # low and
            empty(),  # high: the edge of a wide row is one of these keys
            empty(dtype=torch.int64),  # base: count or mass of the tokens before `low`
            empty(num_mask_words(vocab_size)),  # words of the mask
            torch.empty((max_rows, vocab_size), dtype=torch.float32, device=device),  # adjusted logits
            self.ids_S,
        )


def sample_rows_reference(
    logits_SV: torch.Tensor, state: SampleState, rows_S: torch.Tensor, positions_S: torch.Tensor
) -> torch.Tensor:
    """The specification of `sample_rows`, one row at a time."""
    ids = [
        _sample_row(logits_V, state, row, position) if row >= 0 else 0
        for logits_V, row, position in zip(logits_SV, rows_S.tolist(), positions_S.tolist(), strict=True)
    ]
    return torch.tensor(ids, dtype=torch.int64, device=logits_SV.device)


def _sample_row(logits_V: torch.Tensor, state: SampleState, row: int, position: int) -> int:
    line = state.line(row)._replace(row=row)
    logits_V = adjust_row_reference(logits_V, state, line, position)
    peak, device = logits_V.amax(), logits_V.device
    if not peak.isfinite():
        return NO_TOKEN
    if line.temperature == 0.0 or line.top_k == 1:
        return int(argmax_rows(logits_V.unsqueeze(0)))
    scaled_V = (logits_V - peak) / torch.tensor(max(line.temperature, SMALLEST_TEMPERATURE), device=device)
    sorted_V = scaled_V.sort(descending=True).values
    floor = torch.tensor(line.min_p, dtype=torch.float64, device=device).log().float()
    if 0 < line.top_k < len(logits_V):
        floor = torch.maximum(floor, sorted_V[line.top_k - 1])
        sorted_V = sorted_V[sorted_V >= sorted_V[line.top_k - 1]]
    if line.top_p < 1.0:
        reach_V = sorted_V.exp().mul(2.0**44).to(torch.int64).cumsum(0)
        last = int((reach_V.double() < line.top_p * reach_V[-1].double()).sum())
        floor = torch.maximum(floor, sorted_V[last])
    keys_12 = torch.tensor([noise_keys_on_host(line.seed, position)], dtype=torch.int32, device=device)
    ids_1V = torch.arange(len(logits_V), device=device).unsqueeze(0)
    score_1V = gumbel_noise(keys_12, ids_1V) + scaled_V
    return int(argmax_rows(score_1V.masked_fill(scaled_V < floor, -torch.inf)))


# -- constants of the kernels -----------------------------------------------------------------------

# Beyond a depth of 31, a token has no mass (exp(-31) * 2^44 < 1), and noise cannot make up for it either:
# noise is between -2.9 and 22.2. So no filter has to look further.
_DEEPEST_KEY = constant(0x41F80000)  # the bits of 31.0
_INFINITE_KEY = constant(0x7F800000)  # the bits of infinity: the depth of a token that is -inf
_TINY = constant(SMALLEST_TEMPERATURE)
_MASS_OF_LARGEST = constant(2.0**44)
_TO_UNIFORM = constant(2.0**-31 * (1 - 2.0**-24))
_MARGIN = constant(1e-3)  # a hundred times the rounding error of a bound
_SLACK = constant(1 << 17)  # slack of a threshold: at most 1.6 % deeper than necessary
_BUCKETS = constant(NUM_BUCKETS)
_MAX_CANDIDATES = constant(MAX_CANDIDATES)
_GROUP = constant(GROUP)
_GROUPS = constant(TILE // GROUP)  # groups of a tile
_NO_TOKEN = constant(NO_TOKEN)
_FIELDS, _MAX_BIASED = constant(NUM_FIELDS), constant(MAX_BIASED)
_TOP_K, _SEED, _TEMPERATURE = field("top_k"), field("seed"), field("temperature")
_TOP_P, _MIN_P = field("top_p"), field("min_p")
_BUCKETS_PER_DEPTH = constant(64.0)  # a power of two: the multiplication does not round

# On a GPU, Triton's own exp and log may differ from PyTorch's; its interpreter supports only these, and there
# they are exact.
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
        return libdevice.fast_log2f(x)  # one instruction; tl.log2 takes a dozen


# -- rows -------------------------------------------------------------------------------------------


@jit
def _is_last(num_done_ptr, num_programs):
    """Return True if all other programs of the row are done, so that their results can be read.

    The counter is reset to 0 for the next launch.
    """
    tl.debug_barrier()  # every thread has written before one of them increments the counter
    are_done = tl.atomic_add(num_done_ptr, 1, sem="acq_rel") == num_programs - 1
    if are_done:
        tl.store(num_done_ptr, 0)
    return are_done


@jit
def _line_of(lines_ptr, mask_rows_ptr, row_ptr):
    """The line of a row, and a flag that is True if its logits are adjusted."""
    row = tl.load(row_ptr).to(tl.int64)
    line_ptr = lines_ptr + row * _FIELDS
    return line_ptr, is_adjusted(line_ptr, tl.load(mask_rows_ptr + row))


@jit
def _temperature(line_ptr):
    return tl.maximum(float_field(line_ptr, _TEMPERATURE).to(tl.float32), _TINY)


@jit
def _filters(line_ptr):
    """Top-k, top-p and min-p of a row."""
    top_k = tl.load(line_ptr + _TOP_K).to(tl.int32)
    return top_k, float_field(line_ptr, _TOP_P), float_field(line_ptr, _MIN_P)


@jit
def _limits_top_k(top_k, V):
    return (top_k > 0) & (top_k < V)


@jit
def _min_p_edge(min_p):
    """The key of log(min_p); the key of infinity if the filter is off."""
    edge = tl.full((), _INFINITE_KEY, tl.int32)
    if min_p > 0.0:
        edge = tl.abs(_log(min_p).to(tl.float32)).to(tl.int32, bitcast=True)
    return edge


@jit
def _load_logits(x_ptr, own_ptr, is_own, ids, n):
    """Load logits of a row, from `own_ptr` if they are adjusted; or numbers from any list of n."""
    if is_own:
        x = tl.load(own_ptr + ids, mask=ids < n, other=float("-inf"))
    else:
        x = tl.load(x_ptr + ids, mask=ids < n, other=float("-inf")).to(tl.float32)
    return x


# -- depths and masses ------------------------------------------------------------------------------


@jit
def _key_of(x, peak, temperature):
    """The bits of |(x - peak) / temperature|, correctly rounded: smaller is likelier."""
    return tl.abs(tl.div_rn(x - peak, temperature)).to(tl.int32, bitcast=True)


@jit
def _keys(x_ptr, own_ptr, is_own, ids, n, peak, temperature):
    return _key_of(_load_logits(x_ptr, own_ptr, is_own, ids, n), peak, temperature)


@jit
def _mass_of(keys):
    return (_exp(-(keys.to(tl.float32, bitcast=True))) * _MASS_OF_LARGEST).to(tl.int64)


@jit
def _mass_up_to(x_ptr, own_ptr, is_own, n, peak, temperature, last):
    """The mass of the tokens, among n, whose key is at most `last`."""
    total = tl.zeros((), tl.int64)
    for start in range(0, n, _GROUP):
        keys = _keys(x_ptr, own_ptr, is_own, start + tl.arange(0, _GROUP), n, peak, temperature)
        total += tl.sum(tl.where(keys <= last, _mass_of(keys), 0), axis=0)
    return total


# -- edges ------------------------------------------------------------------------------------------


@jit
def _search_edge(
    x_ptr, own_ptr, is_own, n, peak, temperature, low, high, base, limit,
    BY_MASS: tl.constexpr, SLACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The smallest key from `low` to `high` up to which n tokens reach the limit; if none does, the largest.

    A token counts 1 or its mass; `base` is the count of the tokens before `low` if they are not among the n.
    Each round evaluates eight keys, evenly spread over the remaining range, and keeps the eighth of the range
    that contains the edge. The returned key may be larger by `SLACK`.
    """
    smallest, largest = tl.full((), _INFINITE_KEY, tl.int32), tl.zeros((), tl.int32)
    for start in range(0, n, BLOCK):
        keys = _keys(x_ptr, own_ptr, is_own, start + tl.arange(0, BLOCK), n, peak, temperature)
        inside = (keys >= low) & (keys <= high)
        smallest = tl.minimum(smallest, tl.min(tl.where(inside, keys, _INFINITE_KEY), axis=0))
        largest = tl.maximum(largest, tl.max(tl.where(inside, keys, 0), axis=0))
    low = tl.minimum(tl.maximum(low, smallest), high)
    high = tl.maximum(tl.minimum(high, largest), low)
    while high - low > SLACK:
        step = (high - low) // 8 + 1
        pivots = low + tl.arange(0, 8) * step
        reach = tl.zeros((8,), tl.int64) + base
        for start in range(0, n, BLOCK):
            keys = _keys(x_ptr, own_ptr, is_own, start + tl.arange(0, BLOCK), n, peak, temperature)
            if BY_MASS:
                weights = _mass_of(keys)
                reach += tl.sum(tl.where(keys[:, None] < pivots[None, :], weights[:, None], 0), axis=0)
            else:
                reach += tl.sum((keys[:, None] < pivots[None, :]).to(tl.int32), axis=0)
        num_below = tl.sum((reach.to(tl.float64) < limit).to(tl.int32), axis=0)  # the first one always is
        low += tl.maximum(num_below - 1, 0) * step
        high = tl.minimum(high, low + step - 1)
    return high


@jit
def _edge_of(x_ptr, own_ptr, is_own, n, peak, temperature, low, high, base, mass, by_k, top_k, top_p):
    """The edge key of top-k and top-p. `mass` is the mass of the row; with top-k, it is recomputed."""
    edge = high
    if by_k:
        edge = _search_edge(
            x_ptr, own_ptr, is_own, n, peak, temperature, low, high, base, top_k.to(tl.float64),
            False, 0, _GROUP,
        )  # fmt: skip
    if top_p < 1.0:
        if by_k:
            mass = _mass_up_to(x_ptr, own_ptr, is_own, n, peak, temperature, edge)
        limit = top_p * mass.to(tl.float64)
        edge = _search_edge(
            x_ptr, own_ptr, is_own, n, peak, temperature, low, edge, base, limit, True, 0, _GROUP
        )
    return edge


@jit
def _collect(x, ids, is_candidate, num_candidates_ptr, values_ptr, ids_ptr):
    """Append the candidates among [groups, tokens], in any order, as far as they fit; count all of them."""
    per_group = tl.sum(is_candidate.to(tl.int32), axis=1)
    count = tl.sum(per_group, axis=0)
    if count > 0:
        start = tl.atomic_add(num_candidates_ptr, count, sem="relaxed")
        start_of_group = start + tl.cumsum(per_group, axis=0) - per_group
        places = start_of_group[:, None] + tl.cumsum(is_candidate.to(tl.int32), axis=1) - 1
        fits = is_candidate & (places < _MAX_CANDIDATES)
        tl.store(values_ptr + places, x, mask=fits)
        tl.store(ids_ptr + places, ids, mask=fits)


# -- draws ------------------------------------------------------------------------------------------


@jit
def _noise_keys(seed, position):
    """The two keys of gumbel.py, in signed arithmetic with its shifts made logical."""
    state = seed * -0x2ECBDABC217D106B - position * 0x61C8864680B583EB + 0x2545F4914F6CDD1D
    state ^= (state >> 30) & 0x3FFFFFFFF
    state *= -0x40A7B892E31B1A47
    state ^= (state >> 27) & 0x1FFFFFFFFF
    state *= -0x6B2FB644ECCEEE15
    state ^= (state >> 31) & 0x1FFFFFFFF
    return state.to(tl.uint32), ((state >> 32) & 0xFFFFFFFF).to(tl.uint32)


@jit
def _uniform(ids, key0, key1):
    """The hash of gumbel.py as a number between 0 and 1; small numbers give large noise."""
    x = ids.to(tl.uint32) * 0x9E3779B1 + key0
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x += key1
    x *= 0x846CA68B
    x ^= x >> 16
    return ((x & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * _TO_UNIFORM


@jit
def _noise_bound(ids, key0, key1):
    """An upper bound of the noise, which is tight if the noise is large.

    The noise is -log(w + w^2/2 + w^3/3 + ...) <= -log(w) - w/2, which takes one logarithm instead of two.
    """
    w = _uniform(ids, key0, key1)
    return -0.69314718 * _rough_log2(w) - 0.5 * w


@jit
def _better_of(x, ids, peak, temperature, edge, key0, key1, best, token, V):
    """Update the best exact score and its token with more tokens; ties go to the lowest id."""
    scaled = tl.div_rn(x - peak, temperature)
    score = scaled - _log(-_log_of_one_minus(_uniform(ids, key0, key1)))
    is_kept = tl.abs(scaled).to(tl.int32, bitcast=True) <= edge
    score = tl.where(is_kept, score, float("-inf"))
    top = tl.max(score, axis=0)
    first = tl.min(tl.where(score == top, ids, V), axis=0)
    token = tl.where(top > best, first, tl.where(top == best, tl.minimum(token, first), token))
    return tl.maximum(best, top), token


@jit
def _draw_from_groups(
    x_ptr, own_ptr, is_own, V, bounds, peak, temperature, edge, key0, key1, BLOCK_GROUPS: tl.constexpr,
):  # fmt: skip
    """The token with the best score up to the edge. `bounds`: upper bounds of each group's scores.

    Groups are scored exactly, most promising first, until no other can contain the best: one or two.
    """
    groups = tl.arange(0, BLOCK_GROUPS)
    best, token = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.int32) + V
    bound = tl.max(bounds, axis=0)
    while (bound > float("-inf")) & (bound + _MARGIN >= best):
        group = tl.min(tl.where(bounds == bound, groups, BLOCK_GROUPS), axis=0)
        ids = group * _GROUP + tl.arange(0, _GROUP)
        x = _load_logits(x_ptr, own_ptr, is_own, ids, V)
        best, token = _better_of(x, ids, peak, temperature, edge, key0, key1, best, token, V)
        bounds = tl.where(groups == group, float("-inf"), bounds)
        bound = tl.max(bounds, axis=0)
    return token


@jit
def _draw_from_candidates(values_ptr, ids_ptr, count, V, peak, temperature, edge, key0, key1):
    """The candidate with the best score up to the edge."""
    best, token = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.int32) + V
    for start in range(0, count, _GROUP):
        places = start + tl.arange(0, _GROUP)
        ids = tl.load(ids_ptr + places, mask=places < count, other=V)
        x = _load_logits(values_ptr, values_ptr, False, places, count)
        best, token = _better_of(x, ids, peak, temperature, edge, key0, key1, best, token, V)
    return token


# -- kernels ----------------------------------------------------------------------------------------


@jit
def _has_peak(peak):
    return (peak > float("-inf")) & (peak < float("inf"))


@jit
def _tile_ids(tile):
    """The groups of a tile, and the tokens of each."""
    groups = tile * _GROUPS + tl.arange(0, _GROUPS)
    return groups, groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]


@jit
def _own_tiles(tiles_per_program, num_groups):
    """The first tile of this program, and the one after its last."""
    first = tl.program_id(0) * tiles_per_program
    return first, tl.minimum(first + tiles_per_program, num_groups // _GROUPS)


@jit_for_any("tiles_per_program")
def _survey_kernel(
    logits_ptr, rows_ptr, positions_ptr, lines_ptr, mask_rows_ptr, uses_ptr, biases_ptr, masks_ptr,
    num_done_ptr, peaks_ptr, bounds_ptr, peak_ptr, threshold_ptr, num_candidates_ptr, values_ptr,
    candidate_ids_ptr, mass_ptr, is_wide_ptr, buckets_ptr, low_ptr, high_ptr, base_ptr, words_ptr, own_ptr,
    ids_ptr, stride, V, num_groups, num_real_groups, usual_rank, tiles_per_program,
    BLOCK_GROUPS: tl.constexpr,
):  # fmt: skip
    """Find the largest logit of each group, and sample greedy rows and rows without a filter.

    A group's peak is infinite if one of its logits is NaN: the row has no token. A row without a filter needs
    a second number per group, a bound on its scores, here relative to the group's own peak.
    """
    s = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + s).to(tl.int64)
    if row < 0:
        if tl.program_id(0) == 0:
            tl.store(ids_ptr + s, tl.zeros((), tl.int64))
            tl.store(threshold_ptr + s, -1)
            tl.store(is_wide_ptr + s, 0)
    else:
        line_ptr, x_ptr, own_ptr = lines_ptr + row * _FIELDS, logits_ptr + s * stride, own_ptr + s * V
        top_k, top_p, min_p = _filters(line_ptr)
        temperature, position = float_field(line_ptr, _TEMPERATURE), tl.load(positions_ptr + s).to(tl.int64)
        by_k = _limits_top_k(top_k, V)
        is_greedy = (temperature <= 0.0) | (top_k == 1)
        is_filtered = by_k | (top_p < 1.0) | (min_p > 0.0)
        temperature = tl.maximum(temperature.to(tl.float32), _TINY)
        key0, key1 = _noise_keys(tl.load(line_ptr + _SEED), position)

        groups, ids = _tile_ids(tl.program_id(0))
        mask_row = tl.load(mask_rows_ptr + row)
        is_own = is_adjusted(line_ptr, mask_row)
        if is_own:
            first = tl.program_id(0) * _GROUPS * _GROUP
            adjust_tile(
                x_ptr, first, first + _GROUPS * _GROUP, V, line_ptr, mask_row, position, uses_ptr + row * V,
                biases_ptr + row * 2 * _MAX_BIASED, masks_ptr, words_ptr + s * ((V + 31) // 32), own_ptr,
                _GROUPS * _GROUP // 32,
            )  # fmt: skip
        x = _load_logits(x_ptr, own_ptr, is_own, ids, V)
        x = tl.where(x != x, float("inf"), x)
        peaks = tl.max(x, axis=1)
        tl.store(peaks_ptr + s * num_groups + groups, peaks)
        if (is_greedy | is_filtered) == 0:
            below = x - tl.where(_has_peak(peaks), peaks, 0.0)[:, None]
            bounds = tl.max(below * (1.0 / temperature) + _noise_bound(ids, key0, key1), axis=1)
            tl.store(bounds_ptr + s * num_groups + groups, bounds)

        if _is_last(num_done_ptr + s, tl.num_programs(0)):
            all_groups = tl.arange(0, BLOCK_GROUPS)
            in_row = all_groups < num_groups
            peaks_ptr += s * num_groups
            all_peaks = tl.load(peaks_ptr + all_groups, mask=in_row, other=float("-inf"))
            peak = tl.max(all_peaks, axis=0)
            token = tl.full((), _NO_TOKEN, tl.int32)
            threshold = tl.full((), -1, tl.int32)
            if _has_peak(peak):
                if is_greedy:
                    group = tl.min(tl.where(all_peaks == peak, all_groups, num_groups), axis=0)
                    best_ids = group * _GROUP + tl.arange(0, _GROUP)
                    best = _load_logits(x_ptr, own_ptr, is_own, best_ids, V)
                    token = tl.min(tl.where(best == peak, best_ids, V), axis=0)
                elif is_filtered:
                    threshold = tl.minimum(_min_p_edge(min_p), _DEEPEST_KEY)
                    if by_k | (top_p < 1.0):
                        rank = tl.where(by_k, tl.minimum(top_k, num_real_groups), usual_rank).to(tl.float64)
                        low, high = tl.zeros((), tl.int32), tl.full((), _DEEPEST_KEY, tl.int32)
                        threshold = _search_edge(
                            peaks_ptr, peaks_ptr, False, num_groups, peak, temperature, low, high,
                            low.to(tl.int64), rank, False, _SLACK, BLOCK_GROUPS,
                        )  # fmt: skip
                        is_reached = _key_of(all_peaks, peak, temperature) <= threshold
                        if tl.sum(is_reached.to(tl.int32), axis=0).to(tl.float64) < rank:
                            threshold = high  # too few groups matter, so all tokens that matter are taken
                else:
                    all_bounds = tl.load(
                        bounds_ptr + s * num_groups + all_groups, mask=in_row, other=float("-inf")
                    )
                    all_bounds += (all_peaks - peak) * (1.0 / temperature)
                    edge = tl.full((), _INFINITE_KEY, tl.int32)
                    token = _draw_from_groups(
                        x_ptr, own_ptr, is_own, V, all_bounds, peak, temperature, edge, key0, key1,
                        BLOCK_GROUPS,
                    )  # fmt: skip
            tl.store(ids_ptr + s, token.to(tl.int64))
            tl.store(peak_ptr + s, peak)
            tl.store(threshold_ptr + s, threshold)
            tl.store(is_wide_ptr + s, 0)
            tl.store(num_candidates_ptr + s, 0)
            tl.store(mass_ptr + s, tl.zeros((), tl.int64))


@jit_for_any("tiles_per_program")
def _candidates_kernel(
    logits_ptr, rows_ptr, positions_ptr, lines_ptr, mask_rows_ptr, uses_ptr, biases_ptr, masks_ptr,
    num_done_ptr, peaks_ptr, bounds_ptr, peak_ptr, threshold_ptr, num_candidates_ptr, values_ptr,
    candidate_ids_ptr, mass_ptr, is_wide_ptr, buckets_ptr, low_ptr, high_ptr, base_ptr, words_ptr, own_ptr,
    ids_ptr, stride, V, num_groups, num_real_groups, usual_rank, tiles_per_program,
    BLOCK_GROUPS: tl.constexpr,
):  # fmt: skip
    """Gather the tokens up to the threshold and weigh the row; if they are enough, sample one of them."""
    s = tl.program_id(1).to(tl.int64)
    threshold = tl.load(threshold_ptr + s)
    if threshold >= 0:
        line_ptr, is_own = _line_of(lines_ptr, mask_rows_ptr, rows_ptr + s)
        temperature = _temperature(line_ptr)
        top_k, top_p, min_p = _filters(line_ptr)
        by_k = _limits_top_k(top_k, V)
        weighs_row = (top_p < 1.0) & (by_k == 0)  # top-k uses the mass of its candidates
        peak = tl.load(peak_ptr + s)
        x_ptr, own_ptr = logits_ptr + s * stride, own_ptr + s * V
        values_ptr += s * _MAX_CANDIDATES
        candidate_ids_ptr += s * _MAX_CANDIDATES

        first_tile, end_tile = _own_tiles(tiles_per_program, num_groups)
        for tile in range(first_tile, end_tile):
            groups, ids = _tile_ids(tile)
            nearest = tl.min(_key_of(tl.load(peaks_ptr + s * num_groups + groups), peak, temperature), axis=0)
            if nearest <= tl.where(weighs_row, _DEEPEST_KEY, threshold):
                x = _load_logits(x_ptr, own_ptr, is_own, ids, V)
                keys = _key_of(x, peak, temperature)
                if weighs_row:
                    tl.atomic_add(mass_ptr + s, tl.sum(tl.sum(_mass_of(keys), axis=1), axis=0), sem="relaxed")
                _collect(x, ids, keys <= threshold, num_candidates_ptr + s, values_ptr, candidate_ids_ptr)

        if _is_last(num_done_ptr + s, tl.num_programs(0)):
            count = tl.load(num_candidates_ptr + s)
            mass = tl.load(mass_ptr + s)
            by_p = top_p < 1.0
            is_enough = count <= _MAX_CANDIDATES
            if is_enough & by_k:
                is_enough = (count >= top_k) | (threshold >= _DEEPEST_KEY)
            if is_enough & weighs_row:
                reach = _mass_up_to(values_ptr, values_ptr, False, count, peak, temperature, threshold)
                is_enough = reach.to(tl.float64) >= top_p * mass.to(tl.float64)
            edge = _min_p_edge(min_p)
            zero = tl.zeros((), tl.int32)
            if is_enough:
                if by_k | by_p:
                    by_filters = _edge_of(
                        values_ptr, values_ptr, False, count, peak, temperature, zero, threshold,
                        zero.to(tl.int64), mass, by_k, top_k, top_p,
                    )  # fmt: skip
                    edge = tl.minimum(edge, by_filters)
                key0, key1 = _noise_keys(tl.load(line_ptr + _SEED), tl.load(positions_ptr + s).to(tl.int64))
                token = _draw_from_candidates(
                    values_ptr, candidate_ids_ptr, count, V, peak, temperature, edge, key0, key1
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
def _buckets_kernel(
    logits_ptr, rows_ptr, positions_ptr, lines_ptr, mask_rows_ptr, uses_ptr, biases_ptr, masks_ptr,
    num_done_ptr, peaks_ptr, bounds_ptr, peak_ptr, threshold_ptr, num_candidates_ptr, values_ptr,
    candidate_ids_ptr, mass_ptr, is_wide_ptr, buckets_ptr, low_ptr, high_ptr, base_ptr, words_ptr, own_ptr,
    ids_ptr, stride, V, num_groups, num_real_groups, usual_rank, tiles_per_program,
    BLOCK_GROUPS: tl.constexpr,
):  # fmt: skip
    """For wide rows: count or weigh buckets of similar depths, and find the bucket with the edge."""
    s = tl.program_id(1).to(tl.int64)
    if tl.load(is_wide_ptr + s) > 0:
        line_ptr, is_own = _line_of(lines_ptr, mask_rows_ptr, rows_ptr + s)
        top_k, top_p, min_p = _filters(line_ptr)
        by_k, by_p = _limits_top_k(top_k, V), top_p < 1.0
        if by_k | by_p:
            temperature = _temperature(line_ptr)
            peak = tl.load(peak_ptr + s)
            buckets_ptr, x_ptr = buckets_ptr + s * _BUCKETS, logits_ptr + s * stride
            first_tile, end_tile = _own_tiles(tiles_per_program, num_groups)
            for tile in range(first_tile, end_tile):
                groups, ids = _tile_ids(tile)
                nearest = tl.min(
                    _key_of(tl.load(peaks_ptr + s * num_groups + groups), peak, temperature), axis=0
                )
                if nearest <= _DEEPEST_KEY:
                    keys = _keys(x_ptr, own_ptr + s * V, is_own, ids, V, peak, temperature)
                    is_near = keys <= _DEEPEST_KEY
                    depths = tl.where(is_near, keys, 0).to(tl.float32, bitcast=True)
                    places = (depths * _BUCKETS_PER_DEPTH).to(tl.int32)
                    ones = tl.full((_GROUPS, _GROUP), 1, tl.int64)
                    weights = tl.where(by_k, ones, _mass_of(keys))
                    tl.atomic_add(buckets_ptr + places, weights, mask=is_near & (weights > 0), sem="relaxed")

            if _is_last(num_done_ptr + s, tl.num_programs(0)):
                buckets = tl.arange(0, _BUCKETS)
                weights = tl.load(buckets_ptr + buckets)
                reach = tl.cumsum(weights, axis=0)
                limit = top_p * tl.load(mass_ptr + s).to(tl.float64)
                if by_k:
                    limit = top_k.to(tl.float64)
                bucket = tl.sum((reach.to(tl.float64) < limit).to(tl.int32), axis=0)
                base = tl.sum(tl.where(buckets < bucket, weights, 0), axis=0)
                low = tl.minimum(_key_of_bucket(bucket), _DEEPEST_KEY)
                high = tl.minimum(_key_of_bucket(bucket + 1) - 1, _DEEPEST_KEY)
                if by_k & by_p:  # the mass of the top-k follows, which needs all of its tokens
                    low, base = tl.zeros((), tl.int32), tl.zeros((), tl.int64)
                tl.store(low_ptr + s, low)
                tl.store(high_ptr + s, high)
                tl.store(base_ptr + s, base)


@jit_for_any("tiles_per_program")
def _wide_kernel(
    logits_ptr, rows_ptr, positions_ptr, lines_ptr, mask_rows_ptr, uses_ptr, biases_ptr, masks_ptr,
    num_done_ptr, peaks_ptr, bounds_ptr, peak_ptr, threshold_ptr, num_candidates_ptr, values_ptr,
    candidate_ids_ptr, mass_ptr, is_wide_ptr, buckets_ptr, low_ptr, high_ptr, base_ptr, words_ptr, own_ptr,
    ids_ptr, stride, V, num_groups, num_real_groups, usual_rank, tiles_per_program,
    BLOCK_GROUPS: tl.constexpr,
):  # fmt: skip
    """For wide rows: gather the tokens that may be the edge, bound the scores of each group, and sample."""
    s = tl.program_id(1).to(tl.int64)
    if tl.load(is_wide_ptr + s) > 0:
        line_ptr, is_own = _line_of(lines_ptr, mask_rows_ptr, rows_ptr + s)
        temperature = _temperature(line_ptr)
        top_k, top_p, min_p = _filters(line_ptr)
        by_k = _limits_top_k(top_k, V)
        has_edge = by_k | (top_p < 1.0)
        edge = _min_p_edge(min_p)
        low, high = tl.load(low_ptr + s), tl.load(high_ptr + s)
        peak = tl.load(peak_ptr + s)
        key0, key1 = _noise_keys(tl.load(line_ptr + _SEED), tl.load(positions_ptr + s).to(tl.int64))
        x_ptr, own_ptr = logits_ptr + s * stride, own_ptr + s * V
        values_ptr += s * _MAX_CANDIDATES
        candidate_ids_ptr += s * _MAX_CANDIDATES

        first_tile, end_tile = _own_tiles(tiles_per_program, num_groups)
        for tile in range(first_tile, end_tile):
            groups, ids = _tile_ids(tile)
            x = _load_logits(x_ptr, own_ptr, is_own, ids, V)
            keys = _key_of(x, peak, temperature)
            bounds = _noise_bound(ids, key0, key1) - keys.to(tl.float32, bitcast=True)
            bounds = tl.where(keys <= tl.minimum(high, edge), bounds, float("-inf"))
            tl.store(bounds_ptr + s * num_groups + groups, tl.max(bounds, axis=1))
            if has_edge:
                is_near = (keys >= low) & (keys <= high)
                _collect(x, ids, is_near, num_candidates_ptr + s, values_ptr, candidate_ids_ptr)

        if _is_last(num_done_ptr + s, tl.num_programs(0)):
            if has_edge:
                count = tl.load(num_candidates_ptr + s)
                base, mass = tl.load(base_ptr + s), tl.load(mass_ptr + s)
                by_filters = high
                if count <= _MAX_CANDIDATES:
                    by_filters = _edge_of(
                        values_ptr, values_ptr, False, count, peak, temperature, low, high, base, mass,
                        by_k, top_k, top_p,
                    )  # fmt: skip
                else:  # thousands of equal tokens: search the whole row
                    by_filters = _edge_of(
                        x_ptr, own_ptr, is_own, V, peak, temperature, low, high, tl.zeros((), tl.int64), mass,
                        by_k, top_k, top_p,
                    )  # fmt: skip
                edge = tl.minimum(edge, by_filters)
            all_groups = tl.arange(0, BLOCK_GROUPS)
            in_row = all_groups < num_groups
            all_bounds = tl.load(bounds_ptr + s * num_groups + all_groups, mask=in_row, other=float("-inf"))
            token = _draw_from_groups(
                x_ptr, own_ptr, is_own, V, all_bounds, peak, temperature, edge, key0, key1, BLOCK_GROUPS
            )
            tl.store(ids_ptr + s, token.to(tl.int64))


# -- launching --------------------------------------------------------------------------------------


def sample_rows(
    logits_SV: torch.Tensor, state: SampleState, rows_S: torch.Tensor, positions_S: torch.Tensor,
    scratch: SampleScratch,
) -> torch.Tensor:  # fmt: skip
    """Sample one id per row, int64, into `scratch.ids_S`, which the next call overwrites.

    `rows_S` are the indices of the rows in the state, negative for padding (whose id is 0); `positions_S`
    are the positions of the sampled tokens in their sequences. Logits are float32 or a smaller type.
    """
    S, V = logits_SV.shape
    assert scratch.max_rows >= S and scratch.vocab_size == V, f"{S} rows of {V} do not fit the scratch memory"
    ids_S = scratch.ids_S[:S]
    if not use_triton(logits_SV):
        return ids_S.copy_(sample_rows_reference(logits_SV, state, rows_S, positions_S))
    assert logits_SV.stride(1) == 1, "the logits of a row must be contiguous"
    assert rows_S.is_contiguous() and positions_S.is_contiguous(), "rows and positions must be contiguous"
    if S == 0:
        return ids_S
    num_real_groups = -(-V // GROUP)
    usual_rank = max(1, num_real_groups * 7 // 8)  # about two candidates per group of a shuffled vocabulary
    tiles_per_program = _tiles_per_program(S)
    over_tiles = -(-scratch.num_tiles // tiles_per_program), S
    for kernel, grid, num_warps in (
        (_survey_kernel, (scratch.num_tiles, S), 4),
        (_candidates_kernel, over_tiles, 8),
        (_buckets_kernel, over_tiles, 8),
        (_wide_kernel, over_tiles, 8),
    ):
        kernel[grid](  # all kernels have the same arguments, though none needs all of them
            logits_SV, rows_S, positions_S, *state.tensors, *scratch.tensors, logits_SV.stride(0), V,
            scratch.num_groups, num_real_groups, usual_rank, tiles_per_program,
            BLOCK_GROUPS=scratch.block_groups, num_warps=num_warps, **_register_limit(num_warps),
        )  # fmt: skip
    return ids_S


def compile_sample_rows(state: SampleState, scratch: SampleScratch, dtype: torch.dtype) -> Callable[[], None]:
    """Start to compile these and the logprob kernels; calling the result waits for all of them."""
    device = scratch.ids_S.device
    if async_compile_mode is None or not is_gpu(device):
        return lambda: None
    logits_1V = torch.empty((1, scratch.vocab_size), dtype=dtype, device=device)
    rows_1 = torch.full((1,), -1, dtype=torch.int32, device=device)
    positions_1 = rows_1.long()

    def compile_all() -> None:
        with compiling_ahead(device):
            sample_rows(logits_1V, state, rows_1, positions_1, scratch)
            logprob_table(logits_1V, positions_1, 0)
            logprob_table(logits_1V.float(), positions_1, 0)  # beams, and sequences about to fork

    thread = threading.Thread(target=compile_all, name="compile-sample-rows", daemon=True)
    thread.start()
    return thread.join


def _register_limit(num_warps: int) -> dict[str, int]:
    """A launch option: with more registers per thread, fewer programs would run at the same time.

    Each kernel has paths that use many registers, for rows with filters; all rows would pay for them.
    """
    return {} if INTERPRETED or is_amd() else {"maxnreg": 16 * num_warps}


def _tiles_per_program(num_rows: int) -> int:
    return min(max(num_rows // _ROWS_PER_TILE, 1), 8)
