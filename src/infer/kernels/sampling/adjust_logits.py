"""Adjustments of a request's logits before they are sampled: bias, bans, a mask, penalties.

    logit + bias ── -inf where banned or masked ── repetition ── presence and frequency

in float32 and in this order, with the same results as sampling/sampler.py. The sampler's first kernel calls
`adjust_tile`: rows without adjustments cost nothing, and for the others, the adjusted logits are written to a
separate buffer, where the other kernels find them.

Shapes:  V vocabulary, E ids of a bias, W words of a mask.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch

from infer.kernels.runtime.dispatch import INTERPRETED, is_amd, jit, tl, triton
from infer.kernels.sampling.sample_line import SampleLine
from infer.kernels.sampling.sample_state import (
    IN_PROMPT,
    IS_BANNED,
    MAX_BIASED,
    MAX_COUNT,
    SampleState,
    constant,
    field,
)

libdevice: Any = None if triton is None else importlib.import_module("triton.language.extra.libdevice")

_HAS_USES, _BAN_END, _NUM_BIASED = field("has_uses"), field("ban_end"), field("num_biased")
_REPETITION, _PRESENCE, _FREQUENCY = field("repetition"), field("presence"), field("frequency")
_STRETCH = constant(512)  # ids that are processed together
_MAX_BIASED, _IN_PROMPT, _COUNT = constant(MAX_BIASED), constant(IN_PROMPT), constant(MAX_COUNT)


def adjust_row_reference(
    logits_V: torch.Tensor, state: SampleState, line: SampleLine, position: int
) -> torch.Tensor:
    """The specification: a row's logits in float32, adjusted by its line, at a position."""
    x_V = logits_V.float().clone()
    if line.num_biased:
        ids_E, amounts_E = state.biases_R2E[line.row, :, : line.num_biased].unbind()
        x_V[ids_E.long()] += amounts_E.view(torch.float32)
    mask_row = int(state.mask_row_R[line.row])
    if mask_row >= 0:
        x_V.masked_fill_(forbidden_by(state.masks_RW[mask_row], len(x_V)).to(x_V.device), -torch.inf)
    if not line.has_uses:
        return x_V
    uses_V = state.uses_RV[line.row].int()
    if position < line.ban_end:
        x_V[(uses_V & IS_BANNED) != 0] = -torch.inf
    count_V, repetition = uses_V & MAX_COUNT, torch.tensor(line.repetition, device=x_V.device)
    penalized_V = torch.where(x_V > 0, x_V / repetition, x_V * repetition)
    x_V = torch.where((uses_V & (IN_PROMPT | MAX_COUNT)) != 0, penalized_V, x_V)
    return torch.where(count_V > 0, x_V - (line.presence + line.frequency * count_V.float()), x_V)


def forbidden_by(mask_W: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The ids that a mask on the host forbids, as one bool per id."""
    bits_V = np.unpackbits((~mask_W.numpy()).view(np.uint8), count=vocab_size, bitorder="little")
    return torch.from_numpy(bits_V.view(np.bool_))


if INTERPRETED or is_amd():  # `mul_rn` is missing in both

    @jit
    def _times(x, y):
        return x * y
else:

    @jit
    def _times(x, y):
        return libdevice.mul_rn(x, y)  # never fused into a multiply-add, which would round only once


@jit
def float_field(line_ptr, FIELD: tl.constexpr):
    """Load a fractional field of a line, in float64."""
    return tl.load(line_ptr + FIELD).to(tl.float64, bitcast=True)


@jit
def is_adjusted(line_ptr, mask_row):
    """Return True if the settings of a row change its logits."""
    return ((tl.load(line_ptr + _HAS_USES) | tl.load(line_ptr + _NUM_BIASED)) > 0) | (mask_row >= 0)


@jit
def _add_biases(x_ptr, first, end, V, num_biased, biases_ptr, out_ptr):
    """Copy the logits from `first` to `end` in float32, and add the biases of these ids."""
    for start in range(first, end, _STRETCH):
        ids = start + tl.arange(0, _STRETCH)
        tl.store(out_ptr + ids, tl.load(x_ptr + ids, mask=ids < V).to(tl.float32), mask=ids < V)
    tl.debug_barrier()
    for start in range(0, num_biased, _STRETCH):
        entries = start + tl.arange(0, _STRETCH)
        biased = tl.load(biases_ptr + entries, mask=entries < num_biased, other=-1)
        is_own = (biased >= first) & (biased < end)
        amounts = tl.load(biases_ptr + _MAX_BIASED + entries, mask=is_own, other=0)
        values = tl.load(out_ptr + biased, mask=is_own, other=0.0)
        tl.store(out_ptr + biased, values + amounts.to(tl.float32, bitcast=True), mask=is_own)
    tl.debug_barrier()


@jit
def adjust_tile(
    x_ptr, first, end, V, line_ptr, mask_row, position, uses_ptr, biases_ptr, masks_ptr, words_ptr, out_ptr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Write the logits of a row from id `first` to `end` to `out_ptr`, adjusted by the row's line.

    `uses_ptr` and `biases_ptr` belong to the row; `masks_ptr` has the masks of all rows, on the host. The
    words of the tile, `WORDS` at most, are fetched to `words_ptr` at once. The rest is done in stretches, so
    that rows without adjustments do not pay for the registers.
    """
    num_biased = tl.load(line_ptr + _NUM_BIASED).to(tl.int32)
    has_uses = tl.load(line_ptr + _HAS_USES) > 0
    bans = position < tl.load(line_ptr + _BAN_END)
    repetition = float_field(line_ptr, _REPETITION).to(tl.float32)
    presence = float_field(line_ptr, _PRESENCE).to(tl.float32)
    frequency = float_field(line_ptr, _FREQUENCY).to(tl.float32)
    if mask_row >= 0:
        num_words = (V + 31) // 32
        words = first // 32 + tl.arange(0, WORDS)
        fetched = tl.load(masks_ptr + mask_row.to(tl.int64) * num_words + words, mask=words < num_words)
        tl.store(words_ptr + words, fetched, mask=words < num_words)
        tl.debug_barrier()
    if num_biased > 0:
        _add_biases(x_ptr, first, end, V, num_biased, biases_ptr, out_ptr)
    for start in range(first, end, _STRETCH):
        ids = start + tl.arange(0, _STRETCH)
        inside = ids < V
        x = tl.load(x_ptr + ids, mask=inside & (num_biased == 0), other=0.0).to(tl.float32)
        x = tl.where(num_biased > 0, tl.load(out_ptr + ids, mask=inside & (num_biased > 0), other=0.0), x)
        bits = tl.load(words_ptr + ids // 32, mask=inside & (mask_row >= 0), other=-1) >> (ids % 32)
        x = tl.where((bits & 1) == 0, float("-inf"), x)
        if has_uses:
            uses = tl.load(uses_ptr + ids, mask=inside, other=0).to(tl.int32)
            x = tl.where((uses < 0) & bans, float("-inf"), x)
            count = uses & _COUNT
            repeated = tl.where(x > 0.0, tl.div_rn(x, repetition), _times(x, repetition))
            x = tl.where((uses & (_IN_PROMPT | _COUNT)) != 0, repeated, x)
            x = tl.where(count > 0, x - (presence + _times(frequency, count.to(tl.float32))), x)
        tl.store(out_ptr + ids, x, mask=inside)
    tl.debug_barrier()
