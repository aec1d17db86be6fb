"""The filters top-k, top-p and min-p, which decide the tokens that may be drawn.

Each filter is a *floor*: the smallest logit that stays. Tokens with equal logits stay or go together.

    top-k    the k-th largest logit
    top-p    the smallest logit above which lies less than p of the mass that top-k leaves
    min-p    the largest logit + log(min_p)

The highest floor decides: min-p compares with the likeliest token, which no filter removes.

Filters rarely leave more than a few dozen tokens, so `filter_candidates` looks at the largest logits
only, the *candidates*. If the floor lies above the last candidate, no other token can stay and the row
is complete; otherwise `filter_rows` looks at every token. Neither sorts the vocabulary.

Mass is an integer, exp(logit) * 2^44 rounded down: integers add up to the same sum in any order, on any
device and in any batch, so the edge of top-p never moves.

Both expect rows divided by the temperature whose largest logit is 0. A row of NaN counts as complete.

Shapes:  S sampled rows, V vocabulary, K candidates of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from infer.kernels.sampling.gumbel import row_blocks, topk_rows
from infer.sampling.params import SamplingParams

FIRST_CANDIDATES = 256  # fewest candidates of a row
_MASS_OF_LARGEST = 2.0**44  # mass of the likeliest token: the sum of 2^19 such tokens fits into 63 bits
_NUM_BUCKETS = 1 << 15  # values of the upper 16 bits of a float without its sign


def filter_candidates(
    scaled_SV: torch.Tensor, params: Sequence[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the candidates of each row: logits (-inf if removed), ids, and whether the row is complete."""
    vocab_size, device = scaled_SV.shape[1], scaled_SV.device
    top_k = [p.top_k if 0 < p.top_k < vocab_size else 0 for p in params]
    # one more than the largest k, which shows whether a tie at its edge goes on
    width = min(vocab_size, max(FIRST_CANDIDATES, max(top_k) + 1))
    values_SK, ids_SK = topk_rows(scaled_SV, width)

    k_S1 = torch.tensor(top_k, device=device).unsqueeze(1)
    by_k_S1 = values_SK.gather(1, (k_S1 - 1).clamp(min=0)).masked_fill_(k_S1 == 0, -math.inf)
    floor_S1 = torch.maximum(by_k_S1, _min_p_floor(params, device))
    if any(p.top_p < 1.0 for p in params):
        mass_SK = _mass(values_SK).masked_fill_(values_SK < by_k_S1, 0)
        total_S1 = mass_SK.sum(dim=-1, keepdim=True)
        unlimited = [i for i, p in enumerate(params) if p.top_p < 1.0 and not top_k[i]]
        if unlimited and width < vocab_size:
            total_S1[unlimited] = _whole_mass(scaled_SV, unlimited)
        top_p_S1 = torch.tensor([[p.top_p] for p in params], dtype=torch.float64, device=device)
        above_SK = torch.cumsum(mass_SK, dim=-1) - mass_SK
        by_p_S1 = _top_p_floor(values_SK, above_SK, top_p_S1 * total_S1.double())
        floor_S1 = torch.maximum(floor_S1, by_p_S1.masked_fill_(top_p_S1 >= 1.0, -math.inf))

    last_S1 = values_SK[:, -1:]
    # Top-p of a top-k needs the whole top-k, ties included, to know its mass.
    needed_S1 = torch.where(k_S1 > 0, by_k_S1, floor_S1)
    is_open_S1 = (last_S1 >= needed_S1) & (last_S1 > -math.inf) & (width < vocab_size)
    return values_SK.masked_fill(values_SK < floor_S1, -math.inf), ids_SK, ~is_open_S1.squeeze(1)


def filter_rows(scaled_SV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return all logits of each row, -inf for removed tokens; filters apply one after the other."""
    return torch.stack([_filter_row(row_V, p) for row_V, p in zip(scaled_SV, params, strict=True)])


def _filter_row(row_V: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    if 0 < params.top_k < row_V.shape[0]:
        row_V = _at_least(row_V, torch.topk(row_V, params.top_k).values[-1])
    if params.top_p < 1.0:
        row_V = _at_least(row_V, _top_p_floor_of_row(row_V, params.top_p))
    return _at_least(row_V, _min_p_floor([params], row_V.device).squeeze())


def _at_least(row_V: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    """Set everything below the floor to -inf, by adding log(0) = -inf there and log(1) = 0 elsewhere."""
    return row_V + (row_V >= floor).to(torch.float32).log_()  # several times faster than torch.where


def _min_p_floor(params: Sequence[SamplingParams], device: torch.device) -> torch.Tensor:
    return torch.tensor([[math.log(p.min_p) if p.min_p else -math.inf] for p in params], device=device)


def _top_p_floor(values_SK: torch.Tensor, above_SK: torch.Tensor, limit_S1: torch.Tensor) -> torch.Tensor:
    """Return the smallest logit above which lies less mass than `limit`."""
    return values_SK.masked_fill(above_SK.double() >= limit_S1, math.inf).amin(dim=-1, keepdim=True)


def _top_p_floor_of_row(row_V: torch.Tensor, top_p: float) -> torch.Tensor:
    """Find the floor in a histogram of logits; only the bucket with the edge is sorted.

    The bits of a positive float grow with it, so the upper half of -logit is a bucket, likeliest first.
    """
    bucket_V = (row_V.abs().view(torch.int32) >> 16).to(torch.int64)
    mass_B = torch.zeros(_NUM_BUCKETS, dtype=torch.int64, device=row_V.device)
    mass_B.scatter_add_(0, bucket_V, _mass(row_V))
    reach_B = torch.cumsum(mass_B, dim=0)
    limit = top_p * reach_B[-1].double()
    edge = (reach_B.double() < limit).sum()  # the first bucket that reaches the limit
    values_K = torch.sort(row_V[bucket_V == edge], descending=True).values
    mass_K = _mass(values_K)
    above_K = reach_B[edge] - mass_B[edge] + torch.cumsum(mass_K, dim=0) - mass_K
    return _top_p_floor(values_K, above_K, limit).squeeze()


def _mass(scaled: torch.Tensor) -> torch.Tensor:
    """Return unnormalised probabilities as integers."""
    return scaled.exp().mul_(_MASS_OF_LARGEST).to(torch.int64)


def _whole_mass(scaled_SV: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Sum the mass of all tokens of some rows, a few rows at a time so that they fit the CPU's cache."""
    chosen = scaled_SV if len(rows) == scaled_SV.shape[0] else scaled_SV[rows]
    return torch.cat([_mass(chosen[b]).sum(dim=-1, keepdim=True) for b in row_blocks(chosen)])
