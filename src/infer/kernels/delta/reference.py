"""The gated delta rule in PyTorch, over states in blocks of the cache.

A layer of linear attention has one matrix S per head, independent of the length of the text. A token decays
it a little, corrects the value that S has for the token's key, and reads it with the token's query:

    S  <-  e^g S                    g <= 0: decay of the earlier tokens
    u   =  beta (v - S^T k)         error of S for k, times the weight of the update
    S  <-  S + k u^T
    o   =  S^T q

Before that, q, k and v of a token are mixed with q, k and v of the W - 1 previous tokens, by channel (a
causal convolution), so the last W - 1 inputs are also part of a sequence's state: its *tail*.

A single token is computed as written. Several tokens of a row are computed in pieces of `PIECE` tokens:
within a piece, all u are the solution of one triangular system, and S is read and written once.

A block of the cache holds the state after the last token of the block so far (cache/layout.py). So a run of
tokens within one block reads the state from the block of the previous token, which is the same block or the
one before it, and writes to its own. A full block is never written again: its state serves every sequence
that begins with the same tokens.

Shapes:  S rows, T tokens of each, C channels of q, k and v, W taps, V value heads, K key size, H value size,
N blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

PIECE = 64  # tokens that are solved together
NORM_EPS = 1e-6  # added to the squared length of queries and keys


class DeltaRule(NamedTuple):
    """The weights of one layer, apart from its projections, and its sizes."""

    conv_CW: torch.Tensor
    decay_V: torch.Tensor  # logarithm of each head's decay rate; float32
    dt_bias_V: torch.Tensor  # float32
    num_key_heads: int  # key heads, each shared by an equal run of consecutive value heads
    key_dim: int
    value_dim: int


class StateCache(NamedTuple):
    """The states of one layer in all blocks."""

    # float32 [2, N, V / 2, K, H]: half of the heads takes the place of keys, the other of values
    states: torch.Tensor
    tails: torch.Tensor  # [N, W - 1, C], in the dtype of the model

    def read(self, blocks_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the states [S, V, K, H] and tails [S, W - 1, C] of blocks; zeros for a negative block."""
        held_S = blocks_S.clamp(min=0)
        state, tail = self.states[:, held_S].transpose(0, 1).flatten(1, 2), self.tails[held_S]
        is_new_S = (blocks_S < 0).view(-1, 1, 1)
        return state.masked_fill(is_new_S[..., None], 0.0), tail.masked_fill(is_new_S, 0.0)

    def write(self, blocks_S: torch.Tensor, state_SVKH: torch.Tensor, tail_SWC: torch.Tensor) -> None:
        """Write states and tails to blocks; rows with a negative block are dropped."""
        held_S = blocks_S >= 0
        self.states[:, blocks_S[held_S]] = state_SVKH[held_S].unflatten(1, (2, -1)).transpose(0, 1)
        self.tails[blocks_S[held_S]] = tail_SWC[held_S]


class StateSpan(NamedTuple):
    """Tokens that advance states, the same number of tokens for each of some rows."""

    tokens: slice | torch.Tensor  # places of the tokens of one row, or of one token per row
    reads_S: torch.Tensor  # block with the state before the first token; -1: none
    writes_S: torch.Tensor | None  # block for the state after the last token; -1: none; None: drafts


def pieces_of(start: int, stop: int, block_size: int) -> Iterator[tuple[int, int]]:
    """Split the tokens of a row from `start` to `stop` at the ends of blocks."""
    while start < stop:
        end = min(stop, start - start % block_size + block_size)
        yield start, end
        start = end


def run_spans(
    rule: DeltaRule, cache: StateCache, spans: Sequence[StateSpan], qkv_TC: torch.Tensor, b_TV: torch.Tensor,
    a_TV: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Advance the state of every span, in order; returns [T, V, H]."""
    out_TVH = qkv_TC.new_zeros((*b_TV.shape, rule.value_dim))  # zeros for padding, which is in no span
    for tokens, reads_S, writes_S in spans:
        batch = len(reads_S)
        qkv, b, a = (each[tokens].view(batch, -1, each.shape[1]) for each in (qkv_TC, b_TV, a_TV))
        state, tail = cache.read(reads_S)
        out_STVH, state, tail = delta_rule(rule, qkv, b, a, state, tail)
        if writes_S is not None:
            cache.write(writes_S, state, tail)
        out_TVH[tokens] = out_STVH.flatten(0, 1)
    return out_TVH


def delta_rule(
    rule: DeltaRule, qkv_STC: torch.Tensor, b_STV: torch.Tensor, a_STV: torch.Tensor,
    state_SVKH: torch.Tensor, tail_SWC: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the outputs [S, T, V, H] in the dtype of the input, the new states, and the new tails."""
    num_tokens, num_heads = b_STV.shape[1:]
    past = torch.cat([tail_SWC, qkv_STC], dim=1)
    taps = [
        past[:, tap : tap + num_tokens].float() * rule.conv_CW[:, tap] for tap in range(rule.conv_CW.shape[1])
    ]
    mixed = functional.silu(torch.stack(taps).sum(0)).to(qkv_STC.dtype).float()
    key_size = rule.num_key_heads * rule.key_dim
    q, k, v = mixed.split([key_size, key_size, num_heads * rule.value_dim], dim=-1)
    q, k = (_unit(each.unflatten(-1, (-1, rule.key_dim))) for each in (q, k))
    q, k = (
        each.repeat_interleave(num_heads // rule.num_key_heads, dim=2).transpose(1, 2)
        for each in (q * rule.key_dim**-0.5, k)
    )
    v = v.unflatten(-1, (num_heads, -1)).transpose(1, 2)
    beta = b_STV.float().sigmoid().transpose(1, 2)
    g = (-rule.decay_V.exp() * functional.softplus(a_STV.float() + rule.dt_bias_V)).transpose(1, 2)
    outputs = []
    for start in range(0, num_tokens, PIECE):
        piece = slice(start, start + PIECE)
        solve = _solve_piece if num_tokens > 1 else _one_token
        out, state_SVKH = solve(
            q[:, :, piece], k[:, :, piece], v[:, :, piece], g[:, :, piece], beta[:, :, piece], state_SVKH
        )
        outputs.append(out)
    out_STVH = torch.cat(outputs, dim=2).transpose(1, 2).to(qkv_STC.dtype)
    return out_STVH, state_SVKH, past[:, num_tokens:]


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def _one_token(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    state = state * g.exp()[..., None]
    u = (v - k @ state) * beta[..., None]
    state = state + k.transpose(-1, -2) * u
    return q @ state, state


def _solve_piece(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Solve a piece at once: each u depends on the earlier ones, which is a triangular system."""
    total = g.cumsum(-1)
    length = g.shape[-1]
    is_later = torch.ones(length, length, dtype=torch.bool, device=g.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(is_later, -torch.inf).exp()
    since = total.exp()[..., None]
    k_beta = k * beta[..., None]
    system = (k_beta @ k.transpose(-1, -2)) * between
    known = torch.cat([v * beta[..., None], k_beta * since], dim=-1)
    found = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    of_v, of_k = found.split([v.shape[-1], k.shape[-1]], dim=-1)
    u = of_v - of_k @ state
    out = (q * since) @ state + ((q @ k.transpose(-1, -2)) * between) @ u
    left = (total[..., -1:] - total).exp()[..., None]
    return out, state * since[..., -1:, :] + (k * left).transpose(-1, -2) @ u
