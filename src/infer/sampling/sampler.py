"""From logits to the next token of every row of a batch.

Rows are independent: parameters are columns of a `SamplingBatch`, and a row's draw depends only on its
own logits, parameters, seed and position (kernels/sample.py says how). The order of operations is
the one documented in sampling/params.py.

    logits_SV ── bias, bans ── penalties ──┬── temperature 0 ──────────────────────► argmax
                                           └── / temperature ── top-k, top-p, min-p ─► Gumbel-max

Filters never need the whole row sorted unless the distribution is flat: the largest candidates are
taken first, and only rows whose kept probability reaches beyond them are sorted in full.

Shapes:  S sampled rows, V vocabulary, K candidates of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infer.kernels.sample import draw, noise_keys
from infer.sampling.logprobs import top_logprobs
from infer.sampling.params import RowLogprobs, SamplingParams
from infer.sampling.penalties import apply_penalties

FIRST_CANDIDATES = 256  # top-p of a trained model's distribution rarely reaches further


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One token to be sampled: whose, with which parameters, after which tokens."""

    params: SamplingParams
    seed: int
    position: int  # the place in its sequence that the sampled token will take
    num_prompt: int
    tokens: Sequence[int]  # prompt and output so far; read only where a penalty needs it
    banned: tuple[int, ...] = ()  # ids that must not come now: the stops, before min_tokens
    num_logprobs: int | None = None  # how many alternatives to report; None: no logprobs at all


@dataclass(frozen=True, slots=True)
class Samples:
    """What came out: one id per row, and the logprobs of the rows that asked."""

    ids: list[int]
    logprobs: list[RowLogprobs | None]


def sample(logits_SV: torch.Tensor, rows: Sequence[SampleRow]) -> Samples:
    """Sample one token per row. Logprobs are those of the model itself, before any adjustment."""
    assert logits_SV.shape[0] == len(rows), f"{logits_SV.shape[0]} rows of logits for {len(rows)} rows"
    raw = logits_SV.float()
    adjusted = _adjust(raw, rows)
    greedy = [i for i, row in enumerate(rows) if row.params.is_greedy]
    if len(greedy) == len(rows):
        ids_S = torch.argmax(adjusted, dim=-1)
    else:
        ids_S = torch.empty(len(rows), dtype=torch.int64, device=raw.device)
        if greedy:
            ids_S[greedy] = torch.argmax(adjusted[greedy], dim=-1)
        random_rows = [i for i, row in enumerate(rows) if not row.params.is_greedy]
        ids_S[random_rows] = _draw_rows(adjusted[random_rows], [rows[i] for i in random_rows])
    ids = ids_S.tolist()  # the step's one device-to-host copy
    return Samples(ids, top_logprobs(raw, ids, [row.num_logprobs for row in rows]))


def _adjust(raw_SV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Bias, bans and penalties; a copy only if some row asks for any of them."""
    touched = [i for i, row in enumerate(rows) if _needs_adjusting(row)]
    if not touched:
        return raw_SV
    adjusted = raw_SV.clone()
    for i in touched:
        row, logits_V = rows[i], adjusted[i]
        if row.params.logit_bias:
            biased = torch.tensor(list(row.params.logit_bias), device=raw_SV.device)
            logits_V[biased] += torch.tensor(list(row.params.logit_bias.values()), device=raw_SV.device)
        if row.banned:
            logits_V[list(row.banned)] = float("-inf")
        apply_penalties(logits_V, row.params, row.tokens, row.num_prompt)
    return adjusted


def _needs_adjusting(row: SampleRow) -> bool:
    params = row.params
    return bool(params.logit_bias or row.banned) or params.has_penalties


def _draw_rows(logits_SV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    device = logits_SV.device
    temperature_S1 = torch.tensor([[row.params.temperature] for row in rows], device=device)
    keys_S2 = torch.tensor(
        [noise_keys(row.seed, row.position) for row in rows], dtype=torch.int32, device=device
    )
    scaled = logits_SV / temperature_S1
    filtered = [i for i, row in enumerate(rows) if row.params.has_filters]
    ids_S = torch.empty(len(rows), dtype=torch.int64, device=device)
    if len(filtered) < len(rows):
        plain = [i for i, row in enumerate(rows) if not row.params.has_filters]
        every_id = torch.arange(scaled.shape[1], device=device).unsqueeze(0)
        ids_S[plain] = draw(scaled[plain], keys_S2[plain], every_id)
    if filtered:
        candidates, candidate_ids = filter_candidates(scaled[filtered], [rows[i].params for i in filtered])
        columns = draw(candidates, keys_S2[filtered], candidate_ids)
        ids_S[filtered] = candidate_ids.gather(1, columns.unsqueeze(1)).squeeze(1)
    return ids_S


def filter_candidates(
    scaled_SV: torch.Tensor, params: Sequence[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k, then top-p of what is left, then min-p; the removed candidates are -inf.

    Returns logits and token ids, largest first. Of equal logits at the edge of top-k only k are kept.
    """
    vocab_size, device = scaled_SV.shape[1], scaled_SV.device
    top_k = [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params]
    width = min(vocab_size, max(FIRST_CANDIDATES, *(k for k in top_k if k < vocab_size), 0))
    candidates, kept = _filter_within(scaled_SV, params, top_k, width)
    # The last candidate was kept and more might follow it: this row needs all of its logits in order.
    if width < vocab_size and bool((kept[:, -1] & (torch.tensor(top_k, device=device) > width)).any()):
        candidates, kept = _filter_within(scaled_SV, params, top_k, vocab_size)
    values, ids = candidates
    return values.masked_fill(~kept, float("-inf")), ids


def _filter_within(
    scaled_SV: torch.Tensor, params: Sequence[SamplingParams], top_k: list[int], width: int
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Judge the `width` largest logits of each row; a row without top-k is normalised over all of it."""
    device, vocab_size = scaled_SV.device, scaled_SV.shape[1]
    values_SK, ids_SK = torch.topk(scaled_SV, width, dim=-1, sorted=True)
    top_k_S1 = torch.tensor(top_k, device=device).unsqueeze(1)
    kept = torch.arange(width, device=device).unsqueeze(0) < top_k_S1
    masked = values_SK.masked_fill(~kept, float("-inf"))
    whole = torch.logsumexp(scaled_SV, dim=-1, keepdim=True)
    total_S1 = torch.where(top_k_S1 < vocab_size, torch.logsumexp(masked, dim=-1, keepdim=True), whole)
    probs_SK = torch.exp(masked - total_S1)
    top_p_S1 = torch.tensor([[p.top_p] for p in params], device=device)
    mass_before = torch.cumsum(probs_SK, dim=-1) - probs_SK
    kept &= (mass_before < top_p_S1) | (top_p_S1 >= 1.0)
    min_p_S1 = torch.tensor([[p.min_p] for p in params], device=device)
    kept &= probs_SK >= min_p_S1 * probs_SK[:, 0:1]
    kept[:, 0] = True  # the likeliest token always stays
    return (values_SK, ids_SK), kept
