"""Draws the next token of every row of a batch from its logits.

Rows are independent: a row's token depends only on its own logits, parameters, seed and position, bit for
bit, whatever the other rows are. Noise is a hash (kernels/sampling/gumbel.py), and filters decide by maxima
and sums of integers, which are the same in any order of summation. The order of operations is documented in
sampling/params.py.

    logits_SV ─ bias, bans, mask ─ penalties ─┬── greedy ───────────────────────────────► argmax
                                              └── / temperature ── top-k, top-p, min-p ─► Gumbel-max

A row whose largest logit is NaN or infinite has no next token: the model is broken, or the request forbids
every token. Its id is NO_TOKEN and its request must fail; other rows are not affected.

Shapes:  S sampled rows, V vocabulary, K candidates of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from infer.kernels.runtime.dispatch import on_cpu
from infer.kernels.sampling.adjust_logits import forbidden_by
from infer.kernels.sampling.gumbel import argmax_rows, draw, draw_rows, gumbel_noise, noise_keys, where_finite
from infer.sampling.filters import filter_candidates, filter_rows
from infer.sampling.logprobs import top_logprobs
from infer.sampling.params import NO_TOKEN, RowLogprobs, SamplingParams
from infer.sampling.penalties import apply_penalties

_SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny  # below, float32 would divide by zero


class SampleRow(NamedTuple):
    """One token to be sampled: its parameters, seed and position, and the tokens before it."""

    params: SamplingParams
    seed: int
    position: int  # the place in its sequence that the sampled token will take
    num_prompt: int
    tokens: Sequence[int]  # prompt and output so far; read only for penalties
    banned: tuple[int, ...] = ()  # ids that may not come now: stop ids before min_tokens
    num_logprobs: int | None = None  # number of alternatives to report; None: no logprobs at all
    mask_W: torch.Tensor | None = None  # int32 words with a bit for every id; 1: the id is allowed


@dataclass(frozen=True, slots=True)
class Samples:
    """The result: one id per row (or NO_TOKEN), and the logprobs of the rows that asked."""

    ids: list[int]
    logprobs: list[RowLogprobs | None]


def sample(logits_SV: torch.Tensor, rows: Sequence[SampleRow], *, overwrites: bool = False) -> Samples:
    """Sample one token per row. Logprobs are the model's own, before any adjustment.

    `overwrites`: the logits may be adjusted in place.
    """
    assert logits_SV.shape[0] == len(rows), f"{logits_SV.shape[0]} rows of logits for {len(rows)} rows"
    raw = logits_SV.float()
    overwrites = overwrites and all(row.num_logprobs is None for row in rows)
    adjusted = _adjust(raw, rows, overwrites)
    best_S = ids_S = argmax_rows(adjusted)
    drawn = [i for i, row in enumerate(rows) if not row.params.is_greedy]
    if drawn and len(drawn) == len(rows):
        ids_S = _draw_rows(adjusted, ids_S, rows)
    elif drawn:
        ids_S = best_S.clone()
        ids_S[drawn] = _draw_rows(adjusted[drawn], best_S[drawn], [rows[i] for i in drawn])
    ids = where_finite(adjusted, best_S, ids_S, NO_TOKEN)
    asked = [
        row.num_logprobs if token_id != NO_TOKEN else None for row, token_id in zip(rows, ids, strict=True)
    ]
    return Samples(ids, top_logprobs(raw, ids, asked))


def best_ids(logits_SV: torch.Tensor, rows: Sequence[SampleRow], count: int) -> list[list[int]]:
    """Return the ids that `sample` would draw first, second and so on in each row, if it forbade drawn ids.

    They are guesses: rows that can draw fewer than `count` ids end with arbitrary ones, and for rows with
    filters only the candidates are considered.
    """
    adjusted_SV, device = _adjust(logits_SV.float(), rows, overwrites=False), logits_SV.device
    best_SK = adjusted_SV.nan_to_num(-torch.inf).topk(count, dim=1).indices
    drawn = [place for place, row in enumerate(rows) if not row.params.is_greedy]
    for has_filters in (False, True):
        some = [place for place in drawn if rows[place].params.has_filters is has_filters]
        if not some:
            continue
        params = [rows[place].params for place in some]
        temperatures = [max(each.temperature, _SMALLEST_TEMPERATURE) for each in params]
        scaled_SV = _rows_of(adjusted_SV, some)
        scaled_SV = scaled_SV - scaled_SV.amax(dim=1, keepdim=True)
        scaled_SV /= torch.tensor(temperatures, device=device).unsqueeze(1)
        values_SK, ids_SK = scaled_SV, torch.arange(scaled_SV.shape[1], device=device).unsqueeze(0)
        if has_filters:
            values_SK, ids_SK, _ = filter_candidates(scaled_SV, params)
        keys = [noise_keys(rows[place].seed, rows[place].position) for place in some]
        noisy_SK = values_SK + gumbel_noise(torch.tensor(keys, dtype=torch.int32, device=device), ids_SK)
        places_SK = noisy_SK.nan_to_num(-torch.inf).topk(min(count, noisy_SK.shape[1]), dim=1).indices
        found_SK = ids_SK.expand(len(some), -1).gather(1, places_SK).long()
        best_SK[some, : found_SK.shape[1]] = found_SK
    ids: list[list[int]] = best_SK.tolist()
    return ids


def _rows_of(x: torch.Tensor, indices: list[int]) -> torch.Tensor:
    """Return the rows at `indices`, which ascend; all rows are not copied."""
    return x if len(indices) == x.shape[0] else x[indices]


def _adjust(raw_SV: torch.Tensor, rows: Sequence[SampleRow], overwrites: bool) -> torch.Tensor:
    """Apply bias, bans, masks and penalties, to a copy if any row needs them."""
    touched = [i for i, row in enumerate(rows) if _needs_adjusting(row)]
    if not touched:
        return raw_SV
    adjusted, vocab_size = raw_SV if overwrites else raw_SV.clone(), raw_SV.shape[1]
    for i in touched:
        row, logits_V = rows[i], adjusted[i]
        if row.params.logit_bias:
            _check_ids("logit_bias", row.params.logit_bias, vocab_size)
            biased = torch.tensor(list(row.params.logit_bias), device=raw_SV.device)
            logits_V[biased] += torch.tensor(list(row.params.logit_bias.values()), device=raw_SV.device)
        if row.banned:
            _check_ids("banned", row.banned, vocab_size)
            logits_V[list(row.banned)] = float("-inf")
        if row.mask_W is not None:
            _apply_mask(logits_V, row.mask_W)
        apply_penalties(logits_V, row.params, row.tokens, row.num_prompt)
    return adjusted


def _apply_mask(logits_V: torch.Tensor, mask_W: torch.Tensor) -> None:
    """Set forbidden logits to -inf; if few are allowed, a CPU sets all logits and restores the allowed."""
    if not on_cpu(logits_V):
        logits_V.masked_fill_(forbidden_by(mask_W, len(logits_V)).to(logits_V.device), float("-inf"))
        return
    row_V, words_W = logits_V.numpy(), mask_W.numpy()
    (places,) = words_W.nonzero()
    if len(places) * 16 > len(words_W):
        np.copyto(row_V, -np.inf, where=forbidden_by(mask_W, len(row_V)).numpy())
        return
    bits = np.unpackbits(words_W[places].view(np.uint8), bitorder="little").reshape(-1, 32).nonzero()
    ids = places[bits[0]] * 32 + bits[1]
    ids = ids[ids < len(row_V)]  # ignores bits after the vocabulary
    allowed = row_V[ids]
    row_V.fill(-np.inf)
    row_V[ids] = allowed


def _needs_adjusting(row: SampleRow) -> bool:
    params = row.params
    return bool(params.logit_bias or row.banned) or row.mask_W is not None or params.has_penalties


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Check ids again after admission: a wrong one would wrap around here, or crash the device."""
    wrong = [token_id for token_id in ids if not 0 <= token_id < vocab_size]
    assert not wrong, f"{name} has token ids {wrong} but the vocabulary has {vocab_size}"


def _draw_rows(logits_SV: torch.Tensor, best_S: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    device = logits_SV.device
    temperature_S = torch.tensor(
        [max(row.params.temperature, _SMALLEST_TEMPERATURE) for row in rows], device=device
    )
    keys_S2 = torch.tensor(
        [noise_keys(row.seed, row.position) for row in rows], dtype=torch.int32, device=device
    )
    filtered = [i for i, row in enumerate(rows) if row.params.has_filters]
    plain = [i for i, row in enumerate(rows) if not row.params.has_filters]
    columns = logits_SV, best_S, temperature_S, keys_S2
    if not filtered:
        return draw_rows(*columns)
    ids_S = torch.empty(len(rows), dtype=torch.int64, device=device)
    if plain:
        ids_S[plain] = draw_rows(*(_rows_of(each, plain) for each in columns))
    logits, best, temperature, keys = (_rows_of(each, filtered) for each in columns)
    # the largest becomes 0, which no small temperature can overflow
    scaled = (logits - logits.gather(1, best.unsqueeze(1))).div_(temperature.unsqueeze(1))
    ids_S[filtered] = _draw_filtered(scaled, [rows[i].params for i in filtered], keys)
    return ids_S


def _draw_filtered(
    scaled_SV: torch.Tensor, params: Sequence[SamplingParams], keys_S2: torch.Tensor
) -> torch.Tensor:
    """Draw from the candidates of each row, or from all of its tokens if these are not complete."""
    values_SK, ids_SK, is_complete_S = filter_candidates(scaled_SV, params)
    values_SK += gumbel_noise(keys_S2, ids_SK)
    # equal logits come in no particular order, so of equal sums the lowest id wins, as in a whole row
    is_best = values_SK == values_SK.amax(dim=-1, keepdim=True)
    ids_S = torch.where(is_best, ids_SK, scaled_SV.shape[1]).amin(dim=-1)
    wide = [i for i, is_complete in enumerate(is_complete_S.tolist()) if not is_complete]
    if wide:
        rows_SV = filter_rows(_rows_of(scaled_SV, wide), [params[i] for i in wide])
        every_id = torch.arange(rows_SV.shape[1], dtype=torch.int32, device=rows_SV.device)
        ids_S[wide] = draw(rows_SV, _rows_of(keys_S2, wide), every_id.unsqueeze(0))
    return ids_S
