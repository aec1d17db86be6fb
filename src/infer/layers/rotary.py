"""Rotary positions: turn each pair of a head's channels by an angle that grows with the position.

Pair i of a head (channel i and channel i + H/2) turns by  position * frequency_i  with

    frequency_i = theta ** (-2i / H)         fast for small i, slow for large i

The dot product of a turned query and a turned key then depends only on their distance. Sines and
cosines of all positions are computed once, as two float32 tables that the layers share; the turning is
part of what attention does to its heads (kernels/elementwise/heads.py).

A model can be stretched beyond the context it was trained on by slowing its frequencies down:

    linear    every frequency / factor
    llama3    a pair with many full turns within the trained context keeps its frequency, a pair with hardly
              one turn is divided by `factor`, and pairs in between are blended

                 turns within the trained context
                 ├───── low ─────┼──── blend ────┼──── high ──────►
                  / factor                          unchanged

    yarn      the same idea, blended by the number of the pair and not by its turns
    longrope  every pair has a divisor of its own: one list within the trained context, one beyond it
    dynamic   theta grows with the length, so that the slowest pair is divided by the stretch

longrope and dynamic depend on the length of the sequence. Cached keys stay rotated as they were written, so
the tables are made once, for the longest sequence that is served. With yarn and longrope, cosines and sines
are also multiplied by an attention factor, which makes rotated pairs longer and so sharpens the scores.

Pairs that never turn (a layer without positions, the rest of a partly rotated head) have cosine 1 and sine 0,
whatever the attention factor.

Ministral 3 also scales queries by a factor that grows with the position (`query_factors`), but not keys. The
factor is 1 within the trained context; if nothing longer is served, there is no table.

Shapes:  H head size, P positions, R = H/2 pairs, of which the first ones turn.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from infer.kernels.runtime.dispatch import device_kind
from infer.layers.facts import RopeScaling


def frequencies(head_dim: int, theta: float) -> torch.Tensor:
    """The angle in radians by which each of the R pairs turns from one position to the next."""
    device = torch.get_default_device()
    if device_kind(device) == "meta":  # a small table: it has numbers even in a model that has only shapes
        device = torch.device("cpu")
    # explicitly float32: while a model is built, its dtype is the default
    exponents_R = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    return 1.0 / theta**exponents_R


def stretch(
    frequencies_R: torch.Tensor, theta: float, scaling: RopeScaling, context_len: int
) -> torch.Tensor:
    """Scale frequencies for a longer context than the trained one; `dynamic` changed theta instead."""
    if scaling.kind == "linear":
        return frequencies_R / scaling.factor
    if scaling.kind == "proportional":
        return frequencies_R[: scaling.num_pairs] / scaling.factor
    if scaling.kind == "longrope":  # every frequency has its own factor
        is_long = context_len > scaling.original_context_len
        factors = scaling.long_factors if is_long else scaling.short_factors
        return frequencies_R / torch.tensor(factors, dtype=torch.float32, device=frequencies_R.device)
    if scaling.kind == "llama3":
        return _stretch_llama3(frequencies_R, scaling)
    if scaling.kind == "yarn":
        return _stretch_yarn(frequencies_R, theta, scaling)
    assert scaling.kind == "dynamic", scaling
    return frequencies_R


def _stretch_llama3(frequencies_R: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Slow down the pairs that do not complete enough turns within the trained context."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns_R = scaling.original_context_len * frequencies_R / (2 * math.pi)
    keep_R = ((turns_R - low) / (high - low)).clamp(0.0, 1.0)  # 0: fully stretched, 1: untouched
    return frequencies_R * (keep_R + (1 - keep_R) / scaling.factor)


def _stretch_yarn(frequencies_R: torch.Tensor, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """Slow pairs down by their number: none before the fast bound, all of them after the slow one."""
    size = 2 * len(frequencies_R)

    def pair_of(turns: float) -> float:
        """The number of the pair, with a fraction, that makes this many turns within the trained context."""
        full = scaling.original_context_len / (turns * 2 * math.pi)
        return size * math.log(full) / (2 * math.log(theta))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = high - low or 0.001
    pairs_R = torch.arange(len(frequencies_R), dtype=torch.float32, device=frequencies_R.device)
    slow_R = ((pairs_R - low) / width).clamp(0.0, 1.0)  # 1: fully stretched, 0: untouched
    return frequencies_R / scaling.factor * slow_R + frequencies_R * (1 - slow_R)


def dynamic_theta(theta: float, size: int, scaling: RopeScaling, length: int) -> float:
    """The base for texts of `length` tokens, in heads of which `size` channels turn."""
    factor, original = scaling.factor, scaling.original_context_len
    stretch = factor * max(length, original) / original - (factor - 1)
    return float(theta * stretch ** (size / (size - 2)))


def query_factors(growth: float, original_context_len: int, context_len: int) -> torch.Tensor | None:
    """The factors of the queries at each position, [P]; None: 1 everywhere."""
    if not growth or context_len <= original_context_len:
        return None
    if torch.get_default_device().type == "meta":
        return torch.empty(context_len, dtype=torch.float32)
    positions_P = torch.arange(context_len, dtype=torch.float32)
    return 1 + growth * torch.log(1 + torch.floor(positions_P / original_context_len))


class Rotary(nn.Module):
    """The tables of one set of frequencies, for positions 0 .. context_len - 1.

    `num_pairs`: number of pairs that turn, if not all do. Rotated pairs become `scale` times as long.
    """

    cos_PR: torch.Tensor
    sin_PR: torch.Tensor
    query_P: torch.Tensor | None

    def __init__(
        self,
        frequencies_R: torch.Tensor,
        context_len: int,
        *,
        num_pairs: int | None = None,
        scale: float = 1.0,
        query_P: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("query_P", query_P, persistent=False)
        num_still = 0 if num_pairs is None else num_pairs - len(frequencies_R)
        cos_PR, sin_PR = _tables(frequencies_R.float(), context_len, num_still, scale)
        self.register_buffer("cos_PR", cos_PR, persistent=False)
        self.register_buffer("sin_PR", sin_PR, persistent=False)

    def extra_repr(self) -> str:
        """Table size, for print(model)."""
        return f"{self.cos_PR.shape[0]} positions, {self.cos_PR.shape[1]} pairs"


def _tables(
    frequencies_R: torch.Tensor, context_len: int, num_still: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of all angles; on the meta device, tables without memory."""
    if torch.get_default_device().type == "meta":
        # any computation on the meta device, even `empty_like`, imports PyTorch's compiler: a second
        shape = (context_len, frequencies_R.shape[0] + num_still)
        return torch.empty(shape, dtype=torch.float32), torch.empty(shape, dtype=torch.float32)
    positions_P = torch.arange(context_len, dtype=torch.float32)
    angles_PR = positions_P[:, None] * frequencies_R
    cos_PR, sin_PR = angles_PR.cos() * scale, angles_PR.sin() * scale
    return F.pad(cos_PR, (0, num_still), value=1.0), F.pad(sin_PR, (0, num_still))
