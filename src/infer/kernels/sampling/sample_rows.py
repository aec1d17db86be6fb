"""Sample every row of a batch on the device: no copy to the host, no sort, nothing of size [S, V] written.

The result is that of sampling/sampler.py for rows without bias, bans, penalties or logprobs, id for id:
the same noise (kernels/sampling/sample.py), the same temperature, the same filters (sampling/filters.py).

    survey ──► candidates ──► buckets ──► wide
      │            │                        │
      │            │                        └── rows that keep thousands of tokens
      │            └── rows with top-k, top-p or min-p
      └── greedy rows, rows without a filter

Every kernel is launched over all rows, for the host does not know which rows need it; one that a row does
not need costs that row almost nothing.

Everything a filter decides is said in *depths*: with s = (logit - peak) / temperature <= 0, the depth is
|s|, and its bits as an integer, the *key*, grow with it. A filter keeps the tokens up to an *edge* key:

    top-k    the smallest key with at least k tokens up to it
    top-p    the smallest key with at least p of the mass up to it (mass: exp(s) * 2^44, an integer)
    min-p    the key of log(min_p)

A row of a trained model keeps few tokens. So the largest logit of each group of 512 is looked at first: k
groups with a peak up to some key have at least k tokens up to it. Only the tokens up to that *threshold*
are gathered (a few hundred), and both the edge and the token are found among them. Where the candidates do
not suffice, because the row is nearly flat, k is huge or the large logits are crowded into few groups, the
row is *wide*: its tokens are counted or weighed in buckets of 1/64 of depth, and only the bucket with the
edge in it is gathered. The sums are of integers, so it does not matter who adds first.

A draw needs two logarithms per token if the noise is to be exact, which costs more than reading the logits
does. So every token gets an upper bound of its score, by one rough logarithm, and each group the largest of
them; then groups are scored exactly, best bound first, until no bound left exceeds the best score.

Shapes:  S sampled rows, V vocabulary, R rows of state, C candidates.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from infer.kernels.runtime.dispatch import INTERPRETED, next_power_of_two, triton, use_triton
from infer.kernels.sampling.sample import argmax_rows, gumbel_noise, noise_keys
from infer.kernels.sampling.sample_kernels import (
    NUM_BUCKETS,
    buckets_kernel,
    candidates_kernel,
    survey_kernel,
    wide_kernel,
)

logger = logging.getLogger(__name__)

NO_TOKEN = -1  # the id of a row whose largest logit is not finite, as in sampling/sampler.py
GROUP = 512  # tokens of a group, whose peak is known
TILE = 4096  # tokens of one program
MAX_CANDIDATES = 2048
SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny  # below, float32 would divide by zero
COMPILING = "compile-sample-rows"  # the thread that does
_ROWS_PER_TILE = 16  # so many rows, and a program of the kernels after the survey takes one more tile


@dataclass(frozen=True, slots=True)
class SampleState:
    """How each row of state is sampled; a captured step reads it anew in every replay."""

    temperature_R: torch.Tensor  # float32; 0: greedy
    top_k_R: torch.Tensor  # int32; 0: off
    top_p_R: torch.Tensor  # float64, for the edge must not move by a rounding; 1: off
    min_p_R: torch.Tensor  # float64; 0: off
    seed_R: torch.Tensor  # int64: the seed modulo 2^64, as two's complement

    @classmethod
    def empty(cls, num_rows: int, device: torch.device | str) -> SampleState:
        """Greedy rows."""
        return cls(
            torch.zeros(num_rows, dtype=torch.float32, device=device),
            torch.zeros(num_rows, dtype=torch.int32, device=device),
            torch.ones(num_rows, dtype=torch.float64, device=device),
            torch.zeros(num_rows, dtype=torch.float64, device=device),
            torch.zeros(num_rows, dtype=torch.int64, device=device),
        )


class SampleScratch:
    """Memory for the steps between logits and ids, at fixed addresses; `ids_S` is the result."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device | str) -> None:
        self.vocab_size, self.max_rows = vocab_size, max_rows
        self.num_tiles = -(-vocab_size // TILE)
        self.num_groups = self.num_tiles * (TILE // GROUP)

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros((max_rows, *shape), dtype=dtype, device=device)

        self.num_done_S = empty()  # programs of the running kernel that are done; 0 between kernels
        self.peaks_SG = empty(self.num_groups, dtype=torch.float32)  # infinite where a logit is not a number
        self.bounds_SG = empty(self.num_groups, dtype=torch.float32)  # no score of the group is larger
        self.peak_S = empty(dtype=torch.float32)
        self.threshold_S = empty()  # key up to which candidates are gathered; -1: none needed
        self.num_candidates_S = empty()
        self.values_SC = empty(MAX_CANDIDATES, dtype=torch.float32)  # logits
        self.candidate_ids_SC = empty(MAX_CANDIDATES)
        self.mass_S = empty(dtype=torch.int64)  # of all tokens
        self.is_wide_S = empty()
        self.buckets_SB = empty(NUM_BUCKETS, dtype=torch.int64)
        self.low_S, self.high_S = empty(), empty()  # the edge of a wide row is one of these keys
        self.base_S = empty(dtype=torch.int64)  # what the tokens before count or weigh
        self.ids_S = empty(dtype=torch.int64)


def sample_rows_reference(
    logits_SV: torch.Tensor, state: SampleState, rows_S: torch.Tensor, positions_S: torch.Tensor
) -> torch.Tensor:
    """The specification, one row at a time."""
    ids = [
        _sample_row(logits_V.float(), state, row, position) if row >= 0 else 0
        for logits_V, row, position in zip(logits_SV, rows_S.tolist(), positions_S.tolist(), strict=True)
    ]
    return torch.tensor(ids, dtype=torch.int64, device=logits_SV.device)


def _sample_row(logits_V: torch.Tensor, state: SampleState, row: int, position: int) -> int:
    peak = logits_V.amax()
    if not peak.isfinite():
        return NO_TOKEN
    temperature, top_k = state.temperature_R[row], int(state.top_k_R[row])
    if temperature == 0.0 or top_k == 1:
        return int(argmax_rows(logits_V.unsqueeze(0)))
    scaled_V = (logits_V - peak) / temperature.clamp(min=SMALLEST_TEMPERATURE)
    sorted_V = scaled_V.sort(descending=True).values
    floor = state.min_p_R[row].log().float()
    if 0 < top_k < len(logits_V):
        floor = torch.maximum(floor, sorted_V[top_k - 1])
        sorted_V = sorted_V[sorted_V >= sorted_V[top_k - 1]]
    if state.top_p_R[row] < 1.0:
        reach_V = sorted_V.exp().mul(2.0**44).to(torch.int64).cumsum(0)
        last = int((reach_V.double() < state.top_p_R[row] * reach_V[-1].double()).sum())
        floor = torch.maximum(floor, sorted_V[last])
    keys_12 = torch.tensor([noise_keys(int(state.seed_R[row]), position)], dtype=torch.int32)
    ids_1V = torch.arange(len(logits_V), device=logits_V.device).unsqueeze(0)
    score_1V = gumbel_noise(keys_12.to(logits_V.device), ids_1V) + scaled_V
    return int(argmax_rows(score_1V.masked_fill(scaled_V < floor, -torch.inf)))


def sample_rows(
    logits_SV: torch.Tensor,
    state: SampleState,
    rows_S: torch.Tensor,
    positions_S: torch.Tensor,
    scratch: SampleScratch,
) -> torch.Tensor:
    """One id per row, int64, in `scratch.ids_S`: the next call overwrites it.

    `rows_S` are the rows' places in the state, negative for padding (whose id is 0); `positions_S` the
    places in their sequences that the sampled tokens will take. Logits are float32 or anything smaller.
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
    for kernel, grid, arguments, constants in _launches(logits_SV, state, rows_S, positions_S, scratch):
        kernel[grid](*arguments, **constants)
    return ids_S


def compile_sample_rows(state: SampleState, scratch: SampleScratch, dtype: torch.dtype) -> None:
    """Begin to compile the kernels, each in a thread of its own; `sample_rows` waits for what it needs.

    They are the longest of all that a first token needs, and the last of it that is needed.
    """
    device = scratch.ids_S.device
    if INTERPRETED or device.type != "cuda" or not hasattr(triton, "AsyncCompileMode"):
        return
    logits_1V = torch.empty((1, scratch.vocab_size), dtype=dtype, device=device)
    rows_1 = torch.full((1,), -1, dtype=torch.int32, device=device)
    launches = _launches(logits_1V, state, rows_1, rows_1.long(), scratch)

    def compile_all() -> None:
        pool = ThreadPoolExecutor(len(launches))
        try:
            with torch.cuda.device(device), pool, triton.AsyncCompileMode(pool, ignore_errors=True):
                for kernel, grid, arguments, constants in launches:
                    kernel.warmup(*arguments, grid=grid, **constants)
        except Exception:  # it happens again to whoever needs the kernel
            logger.debug("the sampler could not be compiled ahead", exc_info=True)

    threading.Thread(target=compile_all, name=COMPILING, daemon=True).start()


class _Launch(NamedTuple):
    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, int]


def _launches(
    logits_SV: torch.Tensor,
    state: SampleState,
    rows_S: torch.Tensor,
    positions_S: torch.Tensor,
    scratch: SampleScratch,
) -> list[_Launch]:
    """What `sample_rows` launches, in order."""
    S, V = logits_SV.shape
    ids_S = scratch.ids_S[:S]
    stride = logits_SV.stride(0)
    tiles_per_program = min(max(S // _ROWS_PER_TILE, 1), 8)
    over_tiles = (-(-scratch.num_tiles // tiles_per_program), S)
    draws = (positions_S, state.seed_R)
    how = (state.temperature_R, state.top_k_R, state.top_p_R)
    done, peaks, bounds, peak = scratch.num_done_S, scratch.peaks_SG, scratch.bounds_SG, scratch.peak_S
    threshold, is_wide, mass = scratch.threshold_S, scratch.is_wide_S, scratch.mass_S
    candidates = (scratch.values_SC, scratch.candidate_ids_SC)
    edges = (scratch.low_S, scratch.high_S, scratch.base_S)
    num_groups, num_real_groups = scratch.num_groups, -(-V // GROUP)
    usual_rank = max(1, num_real_groups * 7 // 8)  # about two candidates per group of a shuffled vocabulary
    survey = (
        logits_SV, rows_S, *draws, *how, state.min_p_R, done, peaks, bounds, peak, threshold, is_wide,
        scratch.num_candidates_S, mass, ids_S, stride, V, num_groups, num_real_groups, usual_rank,
    )  # fmt: skip
    gather = (
        logits_SV, rows_S, *draws, *how, state.min_p_R, done, peaks, peak, threshold, is_wide,
        scratch.num_candidates_S, mass, *candidates, scratch.buckets_SB, *edges, ids_S, stride, V, num_groups,
        tiles_per_program,
    )  # fmt: skip
    weigh = (
        logits_SV, rows_S, *how, done, peaks, peak, is_wide, mass, scratch.buckets_SB, *edges,
        stride, V, num_groups, tiles_per_program,
    )  # fmt: skip
    widen = (
        logits_SV, rows_S, *draws, *how, state.min_p_R, done, bounds, peak, is_wide, scratch.num_candidates_S,
        mass, *candidates, *edges, ids_S, stride, V, num_groups, tiles_per_program,
    )  # fmt: skip
    tile = {"GROUPS": TILE // GROUP, "GROUP": GROUP}
    tiles = {**tile, "num_warps": 8}
    gathered = {**tiles, "MAX_CANDIDATES": MAX_CANDIDATES, "BLOCK": GROUP}
    all_groups = {"BLOCK_GROUPS": next_power_of_two(num_groups)}
    return [
        _Launch(survey_kernel, (scratch.num_tiles, S), survey, {**tile, **all_groups, "NO_TOKEN": NO_TOKEN}),
        _Launch(candidates_kernel, over_tiles, gather, gathered),
        _Launch(buckets_kernel, over_tiles, weigh, tiles),
        _Launch(wide_kernel, over_tiles, widen, {**gathered, **all_groups}),
    ]
