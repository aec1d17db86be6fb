"""Draw tokens by Gumbel-max on a counter-based random number generator.

Drawing token i with probability softmax(logits)_i is the same as

    argmax_i ( logits_i + g_i ),    g_i = -log(-log(1 - w_i)),    w_i uniform in (0, 1)

(Gumbel 1954; Maddison et al. 2014). The noise here is a *hash* of (seed, position, token id), not a
stream: nothing is consumed, so a request's draw at a position does not depend on the rest of the
batch, on chunking, on preemption or on the tokens that a filter has removed. Two 32-bit keys
derived from (seed, position) enter an integer mixer together with the token id:

    x = id * odd + key0;  x ^= x >> 16;  x *= a;  x ^= x >> 15;  x += key1;  x *= b;  x ^= x >> 16

and 31 bits of x become w. Large noise comes from small w, where floats are dense: among 10^5 equally
likely tokens, the best two practically never tie. g is between -2.9 and 22.2, always finite.
tests/unit/kernels/test_sample.py checks the distribution by counting.

Shapes:  S sampled rows, V vocabulary, K candidates of a row.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from infer.kernels.cpu import operations
from infer.kernels.cpu.library import library
from infer.kernels.runtime.dispatch import on_cpu

_MASK_64 = (1 << 64) - 1
_GROUP_LEN = 16  # columns per group in topk_rows
_BLOCK_ELEMENTS = 1 << 19  # numbers in a temporary of one block of rows: 2 MiB, about a core's cache


def _to_int32(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


_ODD = _to_int32(0x9E3779B1)
_A = _to_int32(0x7FEB352D)
_B = _to_int32(0x846CA68B)
# 2^-31, less one bit: the largest 31-bit number rounds up to 2^31 in float32, and w must stay below 1
_TO_UNIFORM = 2.0**-31 * (1 - 2.0**-24)


def noise_keys(seed: int, position: int) -> tuple[int, int]:
    """Two signed 32-bit keys for the draw at `position` of a sequence seeded with `seed`."""
    state = (seed * 0xD1342543DE82EF95 + position * 0x9E3779B97F4A7C15 + 0x2545F4914F6CDD1D) & _MASK_64
    state ^= state >> 30
    state = (state * 0xBF58476D1CE4E5B9) & _MASK_64
    state ^= state >> 27
    state = (state * 0x94D049BB133111EB) & _MASK_64
    state ^= state >> 31
    return _to_int32(state), _to_int32(state >> 32)


def gumbel_noise(keys_S2: torch.Tensor, ids_SK: torch.Tensor) -> torch.Tensor:
    """Gumbel noise for the token ids of each row (ids may be [1, V] and broadcast); float32 [S, K]."""
    key0, key1 = keys_S2[:, 0:1], keys_S2[:, 1:2]
    x = ids_SK.to(torch.int32) * _ODD + key0  # int32 wraps around, as the mixer needs
    x ^= (x >> 16).bitwise_and_(0xFFFF)  # torch shifts arithmetically: mask the sign bits away
    x *= _A
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x += key1
    x *= _B
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    w = x.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(_TO_UNIFORM)
    return w.neg_().log1p_().neg_().log_().neg_()


def draw_rows(
    logits_SV: torch.Tensor, best_S: torch.Tensor, temperature_S: torch.Tensor, keys_S2: torch.Tensor
) -> torch.Tensor:
    """Draw an id in each row at its temperature, given the row's likeliest id; int64 [S].

    On a CPU, hashing every id and taking two logarithms of each takes longer than the rest of a small batch,
    so C picks the few ids that can win (csrc/sampling.c), and only these get noise.
    """
    peak_S1 = logits_SV.gather(1, best_S.unsqueeze(1))
    found = None
    if on_cpu(logits_SV) and (c := library()) is not None:
        found = operations.likely(c, logits_SV, best_S, peak_S1, temperature_S, keys_S2)
    if found is not None:
        ids_SK, values_SK = found
        winners_S1 = argmax_rows(gumbel_noise(keys_S2, ids_SK).add_(values_SK)).unsqueeze(1)
        return ids_SK.gather(1, winners_S1).squeeze(1).long()
    every_id = torch.arange(logits_SV.shape[1], dtype=torch.int32, device=logits_SV.device)
    return draw((logits_SV - peak_S1).div_(temperature_S.unsqueeze(1)), keys_S2, every_id.unsqueeze(0))


def draw(logits_SK: torch.Tensor, keys_S2: torch.Tensor, ids_SK: torch.Tensor) -> torch.Tensor:
    """Draw a column in each row with probability softmax(logits); -inf is never drawn. int64 [S].

    `ids_SK` are the token ids of the columns, or [1, K] if every row has the same.
    """
    columns_S = torch.empty(logits_SK.shape[0], dtype=torch.int64, device=logits_SK.device)
    for rows in row_blocks(logits_SK):
        ids = ids_SK if ids_SK.shape[0] == 1 else ids_SK[rows]
        columns_S[rows] = argmax_rows(gumbel_noise(keys_S2[rows], ids).add_(logits_SK[rows]))
    return columns_S


def argmax_rows(x_SK: torch.Tensor) -> torch.Tensor:
    """The column of each row's largest value, the first of several; NaN counts as the largest. int64 [S].

    On the CPU, `torch.argmax` compares one element at a time, and NumPy's argmax a vector of them.
    """
    if on_cpu(x_SK) and x_SK.dtype is torch.float32:
        return torch.from_numpy(x_SK.numpy().argmax(axis=1))
    return torch.argmax(x_SK, dim=-1)


def where_finite(x_SK: torch.Tensor, best_S: torch.Tensor, ids_S: torch.Tensor, other: int) -> list[int]:
    """The id of each row if its largest value, at `best_S`, is finite; otherwise `other`.

    The largest value is NaN if any is. From a device, one copy fetches the result; for a few rows on the CPU,
    NumPy takes a quarter of the time that PyTorch needs to dispatch its operations.
    """
    if on_cpu(x_SK):
        peak_S = x_SK.numpy()[np.arange(len(ids_S)), best_S.numpy()]
        ids: list[int] = np.where(np.isfinite(peak_S), ids_S.numpy(), other).tolist()
        return ids
    peak_S = x_SK.gather(1, best_S.unsqueeze(1)).squeeze(1)
    found: list[int] = torch.where(peak_S.isfinite(), ids_S, other).tolist()
    return found


def topk_rows(x_SK: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest values of each row in order, and their columns; of equal values, any.

    `torch.topk` scans the whole row one element at a time on the CPU. Here columns are dealt into groups,
    a vectorised pass finds each group's maximum, and only the k groups with the largest maxima are
    searched: each of the k largest values is in one of them, or they have k values at least as large.
    """
    num_columns = x_SK.shape[1]
    num_groups = num_columns // _GROUP_LEN
    if k * 4 > num_groups:
        return torch.topk(x_SK, k, dim=-1)
    dealt, rest = x_SK.split((num_groups * _GROUP_LEN, num_columns % _GROUP_LEN), dim=1)
    peaks = dealt.unflatten(1, (_GROUP_LEN, num_groups)).amax(dim=1)
    groups = torch.topk(peaks, k, dim=-1, sorted=False).indices
    offsets = torch.arange(0, num_groups * _GROUP_LEN, num_groups, device=x_SK.device)
    columns = (groups.unsqueeze(1) + offsets.unsqueeze(1)).flatten(1)
    if rest.shape[1]:
        tail = torch.arange(num_groups * _GROUP_LEN, num_columns, device=x_SK.device)
        columns = torch.cat((columns, tail.expand(x_SK.shape[0], -1)), dim=1)
    values, places = torch.topk(x_SK.gather(1, columns), k, dim=-1)
    return values, columns.gather(1, places)


def row_blocks(x_SK: torch.Tensor) -> Iterator[slice]:
    """Slices of rows small enough that the results of one pass are still in the CPU's cache for the next.

    On other devices, all rows are one slice: a GPU is faster with few large passes.
    """
    num_rows, row_len = x_SK.shape
    height = max(1, _BLOCK_ELEMENTS // max(1, row_len)) if on_cpu(x_SK) else max(1, num_rows)
    for start in range(0, num_rows, height):
        yield slice(start, min(start + height, num_rows))
