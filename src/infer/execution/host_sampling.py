"""Sampling on the host: tokens and logprobs from hidden states, row by row.

    hidden [T]  ──►  rows that sample  ──►  logits  ──►  one id per row, several for a chunk about to fork
                └──►  rows of a prompt whose logprobs were asked for, a few logits at a time

A part that runners are given. The CPU's runner samples every step with it; a GPU's those in which ids decide
what runs next, forks and beams, and it takes the logprobs of prompts from here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from infer.execution.batch import reads_prompt
from infer.execution.runner import StepResult
from infer.kernels.runtime.torch_threads import threads_for
from infer.kernels.sampling.logprob_table import logprob_table
from infer.models.model import Model
from infer.sampling.logprobs import read_logprobs
from infer.sampling.params import RowLogprobs, sequence_seed
from infer.sampling.sampler import SampleRow, sample
from infer.scheduling.beam import num_logprobs
from infer.scheduling.plan import StepPlan
from infer.scheduling.sequence import Sequence as TokenSequence

LOGPROB_ROWS = 64  # rows of logits held at once for prompt logprobs: 64 * 150k * 4 bytes = 38 MB


class PromptTable(NamedTuple):
    """The logprobs of a stretch of a prompt, maybe still on a device (sampling/logprobs.py)."""

    seq_id: int
    chosen: list[int]  # its tokens
    num_top: int  # of alternatives
    table: torch.Tensor


class HostSampler:
    """Draws the tokens of a step from the hidden states of a model.

    `send` copies ids to its device; `logits` are those of a step's hidden states, by default the model's.
    """

    def __init__(
        self,
        model: Model,
        send: Callable[[torch.Tensor, torch.device], torch.Tensor] = torch.Tensor.to,
        logits: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._model, self._send, self._logits = model, send, logits

    def sample(self, plan: StepPlan, last_rows: list[int], hidden_TD: torch.Tensor) -> StepResult:
        """The result of a step, given the row of `hidden_TD` that belongs to each chunk's last token."""
        places: list[int] = []
        rows: list[SampleRow] = []
        counts: list[int] = plan.chunks.num_samples.tolist()
        stops: list[int] = plan.chunks.stops.tolist()
        for count, stop, seq, last_row in zip(counts, stops, plan.chunks.sequences, last_rows, strict=True):
            mask_W = plan.masks.get(seq.seq_id) if plan.masks else None
            for index in range(count):
                places.append(last_row)
                rows.append(sample_row(seq, seq.index + index, stop, mask_W))
        ids: list[tuple[int, ...]] = [()] * len(counts)
        logprobs: list[tuple[RowLogprobs | None, ...]] = [()] * len(counts)
        prompt_logprobs = read_prompts(self.prompt_tables(plan, last_rows, hidden_TD))
        if not rows:
            return StepResult(ids, logprobs, prompt_logprobs)
        # Decoding: every token is its chunk's last. Equal counts alone could be one chunk about to fork.
        all_sample = len(places) == hidden_TD.shape[0] and places == list(range(len(places)))
        logits_of = self._logits or self._model.logits
        logits_SV = logits_of(hidden_TD if all_sample else hidden_TD[places])
        with threads_for(len(rows)):
            samples = sample(logits_SV, rows, overwrites=True)
        first = 0
        for number, count in enumerate(counts):
            last = first + count
            ids[number] = tuple(samples.ids[first:last])
            logprobs[number] = tuple(samples.logprobs[first:last])
            first = last
        return StepResult(ids, logprobs, prompt_logprobs)

    def prompt_tables(
        self, plan: StepPlan, last_rows: list[int], hidden_TD: torch.Tensor
    ) -> list[PromptTable]:
        """Logprobs of the prompt tokens that follow this step's tokens, a few rows of logits at a time."""
        found, sequences = list[PromptTable](), plan.chunks.sequences
        if all(seq.group.request.params.prompt_logprobs is None for seq in sequences):
            return found
        for chunk, seq, last_row in zip(plan.chunks, sequences, last_rows, strict=True):
            count = seq.group.request.params.prompt_logprobs
            if count is None or not reads_prompt(chunk.start, seq):
                continue
            stop = min(chunk.stop, seq.num_prompt - 1)
            place = last_row + 1 - (chunk.stop - chunk.start) - chunk.start  # of position 0, were it here
            chosen = seq.tokens[chunk.start + 1 : stop + 1].tolist()
            chosen_T = self._send(torch.tensor(chosen), hidden_TD.device)
            parts = []
            for first in range(chunk.start, stop, LOGPROB_ROWS):
                last = min(first + LOGPROB_ROWS, stop)
                logits = self._model.logits(hidden_TD[place + first : place + last])
                ids = chosen_T[first - chunk.start : last - chunk.start]
                parts.append(logprob_table(logits, ids, count))
            found.append(PromptTable(seq.seq_id, chosen, count, torch.cat(parts)))
        return found


def read_prompts(tables: list[PromptTable]) -> dict[int, list[RowLogprobs]]:
    """The logprobs of prompts by seq_id, from tables that are on the host."""
    return {
        each.seq_id: read_logprobs(each.table, each.chosen, [each.num_top] * len(each.chosen))
        for each in tables
    }


def sample_row(seq: TokenSequence, index: int, position: int, mask_W: np.ndarray | None = None) -> SampleRow:
    """How to sample the token at a position of a sequence, or of the `index`-th one it is about to become."""
    params = seq.group.request.params
    return SampleRow(
        params=params,
        seed=sequence_seed(seq.group.seed, index),
        position=position,
        num_prompt=seq.num_prompt,
        tokens=seq.tokens,
        banned=seq.group.stop_ids if position - seq.num_prompt < params.min_tokens else (),
        num_logprobs=num_logprobs(seq.group),
        mask_W=None if mask_W is None else torch.from_numpy(mask_W),
    )
