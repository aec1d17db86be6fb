"""A sequence of tokens being generated, and the group of sequences that serve one request.

A few counts describe a sequence, and its state is derived from them:

    tokens    [ prompt ........ | output ........ ]
               <-- num_computed --><- num_pending ->
                                                   ^ num_tokens

    WAITING   not running            PREFILL   running, num_pending > 1 (or the prompt's last token)
    DECODE    running, one pending   FINISHED / FAILED   has a finish_reason

`num_tokens` may be larger than `len(tokens)`: it already counts a token that was sampled on the device but
has not reached the CPU, so the next step can be planned before the token is known.

The counts are a column of integers (`LINES`). While a sequence runs, its column belongs to the batch
(`batch_state.py`), which plans and counts all sequences together; otherwise the sequence keeps the column
itself. Properties such as `num_computed` read this column; there is no second copy.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, overload

import numpy as np

from infer.finish_reason import FinishReason
from infer.sampling.params import RowLogprobs
from infer.scheduling.request import DraftCounts, Request

LINES: Final = (
    "num_tokens",  # tokens, including sampled ones whose ids are still on the device
    "num_computed",  # tokens whose keys and values are in the cache
    "num_reserved",  # tokens for which slots are reserved
    "limit",  # most tokens ever computed: the last token of an output is not
    "next_commit",  # the num_computed at which the pool must commit the sequence's next block
    "decode_len",  # tokens a decode step computes: 1, and more with drafts
    "num_planned",  # tokens that the plan being made computes
    "turn",  # order of the chunks of a plan; equal turns are ordered by column
    "num_samples",  # tokens sampled after the last pending one: n if the sequence is about to fork
    "row",  # row of its block tables, on the host and on the device
    "seq_id",
    "left_out",  # consecutive steps in which it was ready to decode but not planned
)
NUM_TOKENS, NUM_COMPUTED, NUM_RESERVED, LIMIT, NEXT_COMMIT, DECODE_LEN = range(6)
NUM_PLANNED, TURN, NUM_SAMPLES, ROW, SEQ_ID, LEFT_OUT = range(6, 12)
NO_ROW: Final = -1


def cells_of(columns: np.ndarray) -> tuple[memoryview, ...]:
    """Return the lines of some columns as memoryviews: much faster than numpy for single numbers."""
    return tuple(line.data for line in columns)


class _Count:
    """A descriptor for a number in a sequence's column, wherever the column is stored."""

    def __set_name__(self, owner: type[Sequence], name: str) -> None:
        self._line = LINES.index(name)

    @overload
    def __get__(self, seq: None, owner: type[Sequence]) -> _Count: ...
    @overload
    def __get__(self, seq: Sequence, owner: type[Sequence]) -> int: ...
    def __get__(self, seq: Sequence | None, owner: type[Sequence]) -> int | _Count:
        return self if seq is None else seq.cells[self._line][seq.place]

    def __set__(self, seq: Sequence, count: int) -> None:
        seq.cells[self._line][seq.place] = count


class Sequence:
    """The tokens of one output, and a column of counts about them."""

    __slots__ = (
        "arrival", "bare_until", "cells", "column", "cumulative_logprob", "draft_backs", "draft_counts",
        "drafts", "finish_reason", "group", "index", "is_beam", "is_running", "is_swapped", "max_total",
        "num_cached", "num_from_host", "num_prompt", "num_slots", "num_tokens_then", "place",
        "request_id", "seq_id", "sort_key", "stop_ids", "stop_reason", "ticket", "tokens",
        "waiting_since", "was_admitted",
    )  # fmt: skip

    num_tokens, num_computed, num_reserved = _Count(), _Count(), _Count()  # meanings: see `LINES`
    next_commit, num_planned, turn = _Count(), _Count(), _Count()
    num_samples, row = _Count(), _Count()

    def __init__(self, seq_id: int, group: SequenceGroup, index: int, tokens: Iterable[int]) -> None:
        request = group.request
        self.seq_id = seq_id
        self.request_id = request.request_id
        self.group = group
        self.index = index
        self.tokens = array("I", tokens)  # a copy of 32-bit ids, which are read in whole blocks
        self.draft_counts: DraftCounts | None = None  # None: it has had no drafts
        self.drafts: tuple[int, ...] = ()  # drafts that follow `tokens`, until a step has verified them
        self.draft_backs: tuple[int, ...] = ()  # distance of each draft from its parent, if they are a tree
        self.num_prompt = len(request.prompt)
        self.max_total = group.max_total
        self.stop_ids = group.stop_ids
        self.column = np.zeros((len(LINES), 1), dtype=np.int64)  # its counts while it does not run
        self.column[:, 0] = (len(self.tokens), 0, 0, self.max_total - 1, 0, 1, 0, 0, 1, NO_ROW, seq_id, 0)
        self.cells = cells_of(self.column)  # its current counts: in `column`, or in the batch state
        self.place = 0  # index of its column in `cells`
        self.bare_until = 0  # outputs contain only ids while it has fewer tokens than this
        self.num_slots = 1  # batch places it takes, including the sequences it will fork into
        self.num_cached = 0  # prompt tokens found in the prefix cache when first admitted
        self.num_from_host = 0  # cached tokens that were in host memory
        self.is_beam = request.params.use_beam_search
        self.is_running = False
        self.is_swapped = False
        self.was_admitted = False  # True: it has been admitted before
        self.arrival = 0
        self.sort_key: tuple[float, int] = (0.0, 0)
        self.ticket = 0  # its number in the waiting queue; 0: it does not wait
        self.waiting_since = 0  # the step in which it began to wait for its next token
        self.num_tokens_then = 0  # its num_tokens in that step; 0: it has never waited
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None
        self.cumulative_logprob = 0.0

    @property
    def num_pending(self) -> int:
        """The number of tokens that are not computed yet."""
        return self.num_tokens - self.num_computed

    @property
    def num_output(self) -> int:
        """The number of sampled tokens, including ids that are still on the device."""
        return self.num_tokens - self.num_prompt

    @property
    def state(self) -> str:
        """The name of the state, for logs, the API and the UI."""
        if self.finish_reason is not None:
            return "FAILED" if self.finish_reason == FinishReason.ERROR else "FINISHED"
        if not self.is_running:
            return "WAITING"
        return "DECODE" if self.num_pending == 1 and self.num_output > 0 else "PREFILL"

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.seq_id} of {self.group.request.request_id!r} {self.state} "
            f"computed {self.num_computed}/{self.num_tokens}>"
        )


class SequenceGroup:
    """The sequences of one request: one, or n that share their prompt, or the beams of a beam search."""

    def __init__(self, request: Request, *, max_total: int, stop_ids: tuple[int, ...], seed: int) -> None:
        self.request = request
        self.max_total = max_total  # most tokens of each sequence, prompt and output
        self.stop_ids = stop_ids  # tokens that end a sequence: the model's EOS ids and the request's
        self.seed = seed
        self.adapter_slot = 0  # slot of the request's adapter; 0: no adapter
        self.sequences: list[Sequence] = []
        self.added_at = 0.0  # engine-clock seconds, for metrics only, never for decisions
        self.queue_s: float | None = None  # seconds in the queue; None: not in any step yet
        self.num_made = 0  # sequences ever made for it, including dropped beams
        self.prompt_logprobs: list[RowLogprobs | None] = []
        self.finished_beams: list[FinishedBeam] = []
        self.pooled_D: np.ndarray | None = None  # sum of an embedding's hidden states so far

    @property
    def is_beam(self) -> bool:
        """True if its sequences advance together and replace each other."""
        return self.request.params.use_beam_search

    @property
    def has_joint_sequence(self) -> bool:
        """True if one sequence stands for several outputs: before the fork, or in a beam search."""
        return self.is_beam or self.sequences[0].num_samples > 1

    @property
    def asked_prompt_logprobs(self) -> tuple[RowLogprobs | None, ...] | None:
        """The logprobs of the prompt's tokens, with None for the first; None if they were not requested."""
        is_asked = self.request.params.prompt_logprobs is not None
        return (None, *self.prompt_logprobs) if is_asked else None

    @property
    def unfinished(self) -> list[Sequence]:
        """The sequences that have not ended."""
        return [seq for seq in self.sequences if seq.finish_reason is None]

    @property
    def is_finished(self) -> bool:
        """True if all its sequences have ended."""
        return all(seq.finish_reason is not None for seq in self.sequences)


@dataclass(frozen=True, slots=True)
class FinishedBeam:
    """A finished hypothesis of a beam search."""

    output: list[int]
    score: float  # mean logprob per token, by which hypotheses are ranked
    cumulative_logprob: float
    finish_reason: FinishReason
    stop_reason: int | None
