"""Sampling on the host: tokens and logprobs from hidden states, row by row.

    hidden [T]  ──►  rows that sample  ──►  logits  ──►  one id per row, several for a chunk about to fork
                └──►  rows of a prompt whose logprobs were asked for, a few logits at a time

A part that runners are given. The CPU's runner samples every step with it, a GPU's those that need ids or
logits on the host: penalties, a logit bias, logprobs, forks, beams.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infer.execution.batch import reads_prompt
from infer.execution.runner import StepResult
from infer.kernels.runtime.torch_threads import threads_for
from infer.models.model import Model
from infer.sampling.logprobs import top_logprobs
from infer.sampling.params import RowLogprobs
from infer.sampling.sampler import SampleRow, sample
from infer.scheduling.beam import num_offers
from infer.scheduling.plan import StepPlan
from infer.scheduling.sequence import Sequence as TokenSequence

LOGPROB_ROWS = 64  # rows of logits held at once for prompt logprobs: 64 * 150k * 4 bytes = 38 MB


class HostSampler:
    """Draws the tokens of a step from the hidden states of a model."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def sample(
        self,
        plan: StepPlan,
        sequences: Sequence[TokenSequence],
        last_rows: list[int],
        hidden_TD: torch.Tensor,
        prompt_logprobs: dict[int, list[RowLogprobs]] | None = None,
    ) -> StepResult:
        """The result of a step, given the row of `hidden_TD` that belongs to each chunk's last token."""
        places: list[int] = []
        rows: list[SampleRow] = []
        counts: list[int] = plan.chunks.num_samples.tolist()
        for count, seq, last_row in zip(counts, sequences, last_rows, strict=True):
            for index in range(count):
                places.append(last_row)
                rows.append(sample_row(seq, seq.index + index))
        ids: list[tuple[int, ...]] = [()] * len(counts)
        logprobs: list[tuple[RowLogprobs | None, ...]] = [()] * len(counts)
        if prompt_logprobs is None:
            prompt_logprobs = self.prompt_logprobs(plan, sequences, last_rows, hidden_TD)
        if not rows:
            return StepResult(ids, logprobs, prompt_logprobs)
        # Decoding: every token is its chunk's last. Equal counts alone could be one chunk about to fork.
        all_sample = len(places) == hidden_TD.shape[0] and places == list(range(len(places)))
        logits_SV = self._model.logits(hidden_TD if all_sample else hidden_TD[places])
        with threads_for(len(rows)):
            samples = sample(logits_SV, rows)
        first = 0
        for number, count in enumerate(counts):
            last = first + count
            ids[number] = tuple(samples.ids[first:last])
            logprobs[number] = tuple(samples.logprobs[first:last])
            first = last
        return StepResult(ids, logprobs, prompt_logprobs)

    def prompt_logprobs(
        self,
        plan: StepPlan,
        sequences: Sequence[TokenSequence],
        last_rows: list[int],
        hidden_TD: torch.Tensor,
    ) -> dict[int, list[RowLogprobs]]:
        """Logprobs of the prompt tokens that follow this step's tokens, a few rows of logits at a time."""
        found: dict[int, list[RowLogprobs]] = {}
        if all(seq.group.request.params.prompt_logprobs is None for seq in sequences):
            return found
        for chunk, seq, last_row in zip(plan.chunks, sequences, last_rows, strict=True):
            count = seq.group.request.params.prompt_logprobs
            if count is None or not reads_prompt(chunk.start, seq):
                continue
            stop = min(chunk.stop, seq.num_prompt - 1)
            place = last_row + 1 - (chunk.stop - chunk.start) - chunk.start  # of position 0, were it here
            rows: list[RowLogprobs] = []
            for first in range(chunk.start, stop, LOGPROB_ROWS):
                last = min(first + LOGPROB_ROWS, stop)
                logits = self._model.logits(hidden_TD[place + first : place + last])
                chosen = seq.tokens[first + 1 : last + 1]
                rows += [
                    row for row in top_logprobs(logits, chosen, [count] * len(chosen)) if row is not None
                ]
            found[seq.seq_id] = rows
        return found


def sample_row(seq: TokenSequence, index: int) -> SampleRow:
    """How to sample the next token of a sequence, or of the `index`-th sequence it is about to become."""
    params = seq.group.request.params
    num_logprobs = params.logprobs
    if params.use_beam_search:
        num_logprobs = num_offers(seq.group)
    elif num_logprobs is None and params.num_sequences > params.n:
        num_logprobs = 0  # ranking needs the chosen token's logprob
    return SampleRow(
        params=params,
        seed=sequence_seed(seq.group.seed, index),
        position=seq.num_tokens,
        num_prompt=seq.num_prompt,
        tokens=seq.tokens,
        banned=seq.group.stop_ids if seq.num_output < params.min_tokens else (),
        num_logprobs=num_logprobs,
    )


def sequence_seed(seed: int, index: int) -> int:
    """The seed of a request's `index`-th sequence; the first one has the request's own."""
    return seed + index * 0x5851F42D4C957F2D
