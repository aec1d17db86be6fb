"""Facts about each row of a device half's state, kept on the host.

A row is described once, in the order with which it begins (`order.py`): its sampling parameters, the other
requested results, and its lists of ids, if any. A GPU keeps the sampler's numbers on the device
(gpu/rows.py). The book has the same facts for work on the host: sampling, logprobs of prompts, pooling.
"""

from __future__ import annotations

from array import array
from functools import cached_property

import numpy as np
import torch

from infer.execution.order import NONE, POOLINGS, RowFacts, StepOrder
from infer.kernels.sampling.sample_line import SampleLine
from infer.sampling.params import SamplingParams, sequence_seed
from infer.sampling.sampler import SampleRow


class RowEntry:
    """One row: its sampling line, its facts and its lists."""

    def __init__(self, line: SampleLine, facts: RowFacts, extras: np.ndarray) -> None:
        self.line, self.facts = line, facts
        ends = np.cumsum([facts.num_tokens, facts.num_banned, line.num_biased])
        tokens, banned, biased, biases = np.split(extras, ends)
        self.tokens = array("I", tokens.tobytes())  # prompt and output so far, if penalties count them
        self.banned: tuple[int, ...] = tuple(banned.tolist())
        self.biases: dict[int, float] = dict(zip(biased.tolist(), biases.view("<f4").tolist(), strict=True))

    @property
    def num_logprobs(self) -> int | None:
        """The number of alternatives reported with each sampled id; None: no logprobs."""
        return None if self.facts.num_logprobs == NONE else self.facts.num_logprobs

    @property
    def pooling(self) -> str | None:
        """The pooling of an embedding's hidden states; None: the row is not an embedding."""
        return POOLINGS[self.facts.pooling]

    @cached_property
    def params(self) -> SamplingParams:
        """The sampling parameters in its line."""
        line = self.line
        return SamplingParams(
            temperature=line.temperature,
            top_k=line.top_k,
            top_p=line.top_p,
            min_p=line.min_p,
            repetition_penalty=line.repetition,
            presence_penalty=line.presence,
            frequency_penalty=line.frequency,
            logit_bias=self.biases,
        )

    def sample_row(self, position: int, index: int = 0, mask_W: np.ndarray | None = None) -> SampleRow:
        """Return the facts for sampling at a position: for the row itself, or for its `index`-th fork."""
        return SampleRow(
            params=self.params,
            seed=sequence_seed(self.line.seed, index),
            position=position,
            num_prompt=self.facts.num_prompt,
            tokens=self.tokens,
            banned=self.banned if position < self.line.ban_end else (),
            num_logprobs=self.num_logprobs,
            mask_W=None if mask_W is None else torch.from_numpy(mask_W),
        )


class RowBook:
    """The entries of rows that have begun, by row; a row that begins again replaces its entry."""

    def __init__(self) -> None:
        self._entries: dict[int, RowEntry] = {}

    def __getitem__(self, row: int) -> RowEntry:
        return self._entries[row]

    def enter(self, order: StepOrder) -> list[RowEntry]:
        """Add the rows that begin with an order; returns their entries."""
        made, start = [], 0
        for line_F, facts in zip(order.lines, order.facts.tolist(), strict=True):
            line, fact = SampleLine.unpack(line_F.tobytes()), RowFacts(*facts)
            stop = start + fact.num_tokens + fact.num_banned + 2 * line.num_biased
            entry = RowEntry(line, fact, order.extras[start:stop])
            self._entries[line.row] = entry
            made.append(entry)
            start = stop
        return made

    def entries(self, rows: np.ndarray) -> list[RowEntry]:
        """Return the entries of some rows, in order."""
        return [self._entries[row] for row in rows.tolist()]
