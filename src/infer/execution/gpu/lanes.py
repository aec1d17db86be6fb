"""Sampling state for each token of a window, where it differs from one draft to the next.

A penalty counts the drafts before it, and a constraint has a mask for each position. So every token of these
steps gets a *lane*, its own row of sampling state after the sequences' rows:

    rows of state   0 .. R-1 sequences | R     R+1    R+2    R+3
    window of row 4, tokens            | t9    x      y      z         x, y and z are drafts
    uses counted                       | row's  + x    + x y  + x y z
    mask                               | one for each, of the constraint after these tokens

Lanes are copies, made for one step. Ids drawn there advance no row; the host says how the row goes on.

Shapes:  R rows of state, T tokens of the step, P pairs of a token and a draft that it counts.
"""

from __future__ import annotations

import numpy as np
import torch

from infer.execution.gpu.rows import DeviceRows
from infer.execution.gpu.sending import send
from infer.execution.order import StepOrder


def fill_lanes(state: DeviceRows, order: StepOrder) -> np.ndarray:
    """Give a lane to each token of an order in which no row decodes; return the lanes."""
    counts = order.counts.astype(np.int64)
    num_tokens, sampling = int(counts.sum()), state.sampling
    places, rows = np.arange(num_tokens), order.rows.repeat(counts).astype(np.int64)
    lanes = state.first_lane + places
    sent_2T = send(torch.from_numpy(np.stack([rows, lanes])), state.device)
    lines_TF = sampling.lines_RF[sent_2T[0]]
    lines_TF[:, 0] = sent_2T[1]
    mine = slice(state.first_lane, state.first_lane + num_tokens)
    sampling.lines_RF[mine] = lines_TF
    if state.has_biases[order.rows].any():
        sampling.biases_R2E[mine] = sampling.biases_R2E[sent_2T[0]]
    if state.has_uses[order.rows].any():
        sampling.uses_RV[mine] = sampling.uses_RV[sent_2T[0]]
        firsts = _starts(counts)  # the first token of a window is counted already
        before = places - firsts
        counting = lanes.repeat(before)
        drafts = order.tokens[firsts.repeat(before) + 1 + np.arange(len(counting)) - _starts(before)]
        if len(counting):
            lanes_P, drafts_P = send(torch.from_numpy(np.stack([counting, drafts])), state.device)
            ones_P = torch.ones(len(counting), dtype=sampling.uses_RV.dtype, device=state.device)
            sampling.uses_RV.index_put_((lanes_P, drafts_P), ones_P, accumulate=True)
    return lanes


def _starts(counts: np.ndarray) -> np.ndarray:
    """Return where the run of each element begins, for runs of these lengths laid end to end."""
    starts: np.ndarray = (counts.cumsum() - counts).repeat(counts)
    return starts
