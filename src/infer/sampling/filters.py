"""Which tokens top-k, top-p and min-p leave to be drawn.

Each filter is a *floor*: the smallest logit that stays. Tokens with equal logits stay or go together.

    top-k    the k-th largest logit
    top-p    the largest logit such that what lies above it has less than p of the mass top-k left
    min-p    the largest logit + log(min_p)

and the highest floor decides, because min-p compares with the likeliest token, which no filter removes.

A trained model rarely keeps more than a few dozen tokens, so only the largest logits, the *candidates*,
are put in order. If the floor lies above the last candidate, nothing beyond them can matter and the row
is complete; otherwise it is filtered again with every token as a candidate.

Mass is counted in integers, exp(logit) * 2^44 rounded down: integers add up to the same sum in any
order, on any device and beside any neighbours, so the edge of top-p cannot wander.

Shapes:  S sampled rows, V vocabulary, K candidates of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from infer.kernels.sample import row_blocks
from infer.sampling.params import SamplingParams

FIRST_CANDIDATES = 256
_MASS_OF_LARGEST = 2.0**44  # 2^19 tokens as likely as the largest still fit into 63 bits


def filter_candidates(
    scaled_SV: torch.Tensor, params: Sequence[SamplingParams], *, width: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The candidates of each row: logits (-inf if removed), ids, and whether the row is complete.

    The rows are tempered already and their largest logit is 0. `width` is the number of candidates;
    the default suits trained models.
    """
    vocab_size = scaled_SV.shape[1]
    top_k = [p.top_k if 0 < p.top_k < vocab_size else 0 for p in params]
    if width is None:
        width = min(vocab_size, max(FIRST_CANDIDATES, max(top_k) + 1))
    values_SK, ids_SK = torch.topk(scaled_SV, width, dim=-1)
    by_k_S1 = _top_k_floor(values_SK, top_k)
    by_p_S1 = _top_p_floor(scaled_SV, values_SK, by_k_S1, top_k, params)
    min_p = [[math.log(p.min_p) if p.min_p else -math.inf] for p in params]
    floor_S1 = torch.maximum(torch.maximum(by_k_S1, by_p_S1), torch.tensor(min_p, device=by_k_S1.device))
    last_S1 = values_SK[:, -1:]
    # Top-p of a top-k needs the whole top-k, ties included, to know its mass.
    needed_S1 = torch.where(by_k_S1 == -math.inf, floor_S1, by_k_S1)
    is_complete_S = ((last_S1 < needed_S1) | (last_S1 == -math.inf)).squeeze(1) | (width == vocab_size)
    return values_SK.masked_fill(values_SK < floor_S1, -math.inf), ids_SK, is_complete_S


def _top_k_floor(values_SK: torch.Tensor, top_k: Sequence[int]) -> torch.Tensor:
    """The k-th largest logit of each row, -inf where top-k is off (0)."""
    k_S1 = torch.tensor(top_k, device=values_SK.device).unsqueeze(1)
    return values_SK.gather(1, (k_S1 - 1).clamp(min=0)).masked_fill(k_S1 == 0, -math.inf)


def _top_p_floor(
    scaled_SV: torch.Tensor,
    values_SK: torch.Tensor,
    by_k_S1: torch.Tensor,
    top_k: Sequence[int],
    params: Sequence[SamplingParams],
) -> torch.Tensor:
    """The smallest logit with less than p of the mass above it, -inf where top-p is off (1)."""
    if all(p.top_p >= 1.0 for p in params):
        return torch.full_like(by_k_S1, -math.inf)
    top_p_S1 = torch.tensor([[p.top_p] for p in params], dtype=torch.float64, device=values_SK.device)
    mass_SK = _mass(values_SK).masked_fill_(values_SK < by_k_S1, 0)
    total_S1 = mass_SK.sum(dim=-1, keepdim=True)
    unlimited = [i for i, p in enumerate(params) if p.top_p < 1.0 and not top_k[i]]
    if unlimited and values_SK.shape[1] < scaled_SV.shape[1]:
        total_S1[unlimited] = _whole_mass(scaled_SV, unlimited)
    above_SK = torch.cumsum(mass_SK, dim=-1) - mass_SK
    is_below = above_SK.double() >= top_p_S1 * total_S1.double()
    floor_S1 = values_SK.masked_fill(is_below, math.inf).amin(dim=-1, keepdim=True)
    return floor_S1.masked_fill_(top_p_S1 >= 1.0, -math.inf)


def _mass(scaled: torch.Tensor) -> torch.Tensor:
    """Probability, not normalised, as integers."""
    return scaled.exp().mul_(_MASS_OF_LARGEST).to(torch.int64)


def _whole_mass(scaled_SV: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """The mass of all tokens of some rows, taken a few rows at a time to stay in the cache."""
    chosen = scaled_SV if len(rows) == scaled_SV.shape[0] else scaled_SV[rows]
    return torch.cat([_mass(chosen[b]).sum(dim=-1, keepdim=True) for b in row_blocks(*chosen.shape)])
