"""An EAGLE-3 head that follows its model's steps: its inputs from each step, and how it drafts.

At position p, the head takes g_p, the model's hidden states of position p, and token p + 1; it guesses token
p + 2 (models/eagle3.py). So the head's position is one before the token it is given, and for a step's last
position that token is the one that the step samples:

    position                 7      8      9      10     11
    the model computes       t7     t8     t9                       a step, which samples t10
    hidden states            g7     g8     g9
    tokens for the head      t8     t9     t10                      it *follows*: keys and values of 7, 8, 9

    draft, turn 0            t10 at position 9, with g9                        guesses d11, outputs y9
    turn 1                   d11 at position 10, with y9 in place of g10       guesses d12, outputs y10
    the model verifies       t10 d11 d12                                       hidden states g10 g11 g12

The head follows a step of the model as soon as it is sampled, for prompts and windows alike, so both caches
have the same length. On a GPU this is one of the step's graphs (gpu/launcher.py). The head's keys and values
are in a separate store with the same block numbers, and every transfer of a model's block also moves the
head's: prefix hits, swaps, forks and preemption need nothing else, unless steps were skipped
(engine/draft_head.py). Entries after a rejected draft were computed with a wrong token; the next step
overwrites them, as it does the model's.

One entry may belong to another text: the last position of a cached prefix was computed with the token that
came next *then*. It stays, and makes guesses a little worse until the text is longer; to compute it again,
g of that position would be needed, which is not kept.

g is kept only for the positions at which a step samples, because drafts begin at one of them. Each row has a
ring in which position p has the place p mod P. A turn reads its state there and writes y for the next turn.
In a graph of several turns (gpu/draft_device.py) only the first turn reads the ring; y is passed on directly.

Shapes:  T tokens, S of them sampled at, R rows of state, P places of a ring, D width of the head,
F width of the model's states, V vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from infer.execution.order import DECODE, StepOrder
from infer.layers.attention import StepContext
from infer.models.config import ModelConfig
from infer.models.eagle3 import Eagle3, Guess


class HeadModel(nn.Module):
    """A head with the interface of a model: tokens in, hidden states out, logits of the model's vocabulary.

    `step.rows` has the row of state of each token of a turn; padding has row -1.
    """

    ring_RPD: torch.Tensor

    def __init__(self, head: Eagle3, num_rows: int, num_drafts: int) -> None:
        super().__init__()
        self.config: ModelConfig = head.config.block
        self.head, self.captured_layers = head, head.config.captured_layers
        shape = num_rows + 1, num_drafts + 1, head.config.block.hidden_size  # the last row is for padding
        weight = head.norm.weight
        ring_RPD = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self.register_buffer("ring_RPD", ring_RPD, persistent=False)

    def forward(self, tokens_T: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Run one turn: guess from the newest token of each row, at the position before the token's."""
        assert step.rows is not None
        guess = self.guess(tokens_T, step)
        self.ring_RPD[step.rows.long(), (step.positions + 1) % self.ring_RPD.shape[1]] = guess.states_SD
        return guess.hidden_SD

    def guess(
        self, tokens_T: torch.Tensor, step: StepContext, states_TD: torch.Tensor | None = None
    ) -> Guess:
        """Run one turn without writing the ring; `states_TD`: the last turn's, None: read from the ring."""
        if states_TD is None:
            assert step.rows is not None
            states_TD = self.ring_RPD[step.rows.long(), step.positions % self.ring_RPD.shape[1]]
        guess: Guess = self.head(tokens_T, states_TD, step)
        return guess

    def follow(
        self,
        next_tokens_T: torch.Tensor,
        states_TF: torch.Tensor,
        step: StepContext,
        places_S: torch.Tensor | slice,
        rows_S: torch.Tensor,
    ) -> None:
        """Process a step of the model, which has sampled at `places_S` for these rows of state."""
        g_TD = self.head.combine(states_TF)
        self.ring_RPD[rows_S.long(), step.positions[places_S] % self.ring_RPD.shape[1]] = g_TD[places_S]
        # NO_TOKEN has no embedding
        self.head.remember(next_tokens_T.clamp(0, self.config.vocab_size - 1), g_TD, step)

    def logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Return [S, V]; tokens outside the draft vocabulary get -inf."""
        logits_SW = self.head.logits(hidden_SD)
        if logits_SW.shape[1] == self.config.vocab_size:
            return logits_SW
        logits_SV = logits_SW.new_full((len(logits_SW), self.config.vocab_size), -torch.inf)
        return logits_SV.index_copy_(1, self.head.token_ids_W, logits_SW)


def drawn_places(order: StepOrder) -> np.ndarray:
    """Return the indices of the order's tokens at which a step samples."""
    sampled = order.num_sampled.astype(np.int64)
    ends = order.counts.cumsum(dtype=np.int64)
    places: np.ndarray = np.arange(sampled.sum()) + (ends - sampled.cumsum()).repeat(sampled)
    return places


def following_tokens(order: StepOrder, numbers: np.ndarray | None = None) -> np.ndarray:
    """Return the token after each of an order's tokens; -1 - s: the sampled id with the number s.

    Every place of a window is followed by the id that is sampled there: it equals the draft or rejects it.
    `numbers`: numbers of the sampled ids, place by place; None: 0, 1, 2, ...
    """
    ends = order.counts.cumsum(dtype=np.int64)
    tokens = np.zeros(int(ends[-1]) + 1, dtype=np.int64)
    tokens[:-1][(order.kinds != DECODE).repeat(order.counts)] = order.tokens
    following = tokens[1:]
    following[ends - 1] = order.next_tokens if len(order.next_tokens) else 0
    places = drawn_places(order)
    following[places] = -1 - (np.arange(len(places)) if numbers is None else numbers)
    return following


def with_drawn(following_T: torch.Tensor, ids_S: torch.Tensor) -> torch.Tensor:
    """Return the tokens of `following_tokens`, with the sampled ids filled in."""
    if not len(ids_S):
        return following_T
    return torch.where(following_T < 0, ids_S[(-1 - following_T).clamp(min=0)], following_T)


def kept_ids(order: StepOrder, ids: list[tuple[int, ...]]) -> np.ndarray:
    """Return the id at each place where a step samples, given its accepted ids; 0: after a rejected draft.

    If several ids are sampled at one place, the row continues from the first.
    """
    rows = zip(order.num_sampled.tolist(), ids, strict=True)
    found = [(*kept[:count], *[0] * (count - len(kept))) for count, kept in rows]
    return np.array([token_id for row in found for token_id in row], dtype=np.int64)
