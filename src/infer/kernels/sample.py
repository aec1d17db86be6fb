"""Draw tokens by Gumbel-max on a counter-based random number generator.

Drawing token i with probability softmax(logits)_i is the same as

    argmax_i ( logits_i + g_i ),    g_i = -log(-log(u_i)),    u_i uniform in (0, 1)

(Gumbel 1954; Maddison et al. 2014). The noise here is a *hash* of (seed, position, token id), not a
stream: nothing is consumed, so a request's draw at a position does not depend on its neighbours in
the batch, on chunking, on preemption or on which tokens a filter has already removed. Two 32-bit
keys made from (seed, position) enter an integer mixer together with the token id:

    x = id * odd + key0;  x ^= x >> 16;  x *= a;  x ^= x >> 15;  x += key1;  x *= b;  x ^= x >> 16

and the top 24 bits become u. tests/unit/kernels/test_sample.py checks the law by counting.

Shapes:  S sampled rows, V vocabulary, K candidates of a row.
"""

from __future__ import annotations

import torch

_MASK_64 = (1 << 64) - 1


def _to_int32(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


_ODD = _to_int32(0x9E3779B1)
_A = _to_int32(0x7FEB352D)
_B = _to_int32(0x846CA68B)


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
    x = ids_SK.to(torch.int32) * _ODD + key0  # int32 wraps around, which is what a mixer wants
    x = x ^ ((x >> 16) & 0xFFFF)  # torch shifts arithmetically: mask the sign bits away
    x = x * _A
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = (x + key1) * _B
    x = x ^ ((x >> 16) & 0xFFFF)
    uniform = (((x >> 8) & 0xFFFFFF).to(torch.float32) + 0.5) * 2.0**-24
    return -torch.log(-torch.log(uniform))


def draw(logits_SK: torch.Tensor, keys_S2: torch.Tensor, ids_SK: torch.Tensor) -> torch.Tensor:
    """The column drawn in each row with probability softmax(logits); -inf is never drawn. int64 [S]."""
    return torch.argmax(logits_SK + gumbel_noise(keys_S2, ids_SK), dim=-1)
