"""One line of tokens being generated, and the group of lines that serve one request.

A few counts describe a sequence, and every state is derived from them:

    tokens    [ prompt ........ | output ........ ]
               <-- num_computed --><- num_pending ->
                                                   ^ num_tokens

    WAITING   not running            PREFILL   running, num_pending > 1 (or the prompt's last token)
    DECODE    running, one behind    FINISHED / FAILED   has a finish_reason

`num_tokens` may run ahead of `len(tokens)`: a token that was sampled on the device but has not reached the
CPU already has its place, so the next step can be planned before the token is known.

The counts are a column of integers (`LINES`). While a sequence runs, its column belongs to the batch
(`batch_state.py`), which plans and counts all sequences together; otherwise the sequence keeps the column
itself. `num_computed` and similar properties read this column, and no copy exists.
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
    "num_tokens",  # tokens that have a place, those included whose ids are still on the device
    "num_computed",  # tokens whose keys and values are in the cache
    "num_reserved",  # tokens that may be written without asking the pool
    "limit",  # tokens that are ever computed: the last one of an output is not
    "next_commit",  # the num_computed from which on the pool has to hear of the sequence
    "decode_len",  # tokens a decode step computes: 1, and more with drafts
    "num_planned",  # tokens the step being planned computes
    "turn",  # the chunks of a plan are laid out by this, then by column
    "num_samples",  # tokens drawn after the last pending one: n where the sequence is about to fork
    "row",  # the row of its block tables, here and on the device
    "seq_id",
    "left_out",  # steps in a row in which it was ready to decode and had no turn
)
NUM_TOKENS, NUM_COMPUTED, NUM_RESERVED, LIMIT, NEXT_COMMIT, DECODE_LEN = range(6)
NUM_PLANNED, TURN, NUM_SAMPLES, ROW, SEQ_ID, LEFT_OUT = range(6, 12)
NO_ROW: Final = -1


def cells_of(columns: np.ndarray) -> tuple[memoryview, ...]:
    """The lines of some columns, in the same memory: a single number is read and written much faster."""
    return tuple(line.data for line in columns)


class _Count:
    """A number of a sequence's column, read and written where the column is now."""

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
    """The tokens of one output, and the column of counts that says how far the cache has come with them."""

    __slots__ = (
        "arrival", "bare_until", "cells", "column", "cumulative_logprob", "draft_backs", "draft_counts",
        "drafts", "finish_reason", "group", "index", "is_beam", "is_running", "is_swapped", "max_total",
        "num_cached", "num_from_host", "num_prompt", "num_slots", "num_tokens_then", "place",
        "request_id", "seq_id", "sort_key", "stop_ids", "stop_reason", "ticket", "tokens",
        "waiting_since", "was_admitted",
    )  # fmt: skip

    num_tokens, num_computed, num_reserved = _Count(), _Count(), _Count()  # what each is: `LINES`
    next_commit, num_planned, turn = _Count(), _Count(), _Count()
    num_samples, row = _Count(), _Count()

    def __init__(self, seq_id: int, group: SequenceGroup, index: int, tokens: Iterable[int]) -> None:
        request = group.request
        self.seq_id = seq_id
        self.request_id = request.request_id
        self.group = group
        self.index = index
        self.tokens = array("I", tokens)  # a copy, 32 bits each: long prompts are read by whole blocks
        self.draft_counts: DraftCounts | None = None  # so far, if it has had drafts
        self.drafts: tuple[int, ...] = ()  # proposed ids that follow `tokens`, until a step has judged them
        self.draft_backs: tuple[int, ...] = ()  # distance of each from its parent, if they are a tree
        self.num_prompt = len(request.prompt)
        self.max_total = group.max_total
        self.stop_ids = group.stop_ids
        self.column = np.zeros((len(LINES), 1), dtype=np.int64)  # its counts while it does not run
        self.column[:, 0] = (len(self.tokens), 0, 0, self.max_total - 1, 0, 1, 0, 0, 1, NO_ROW, seq_id, 0)
        self.cells = cells_of(self.column)  # its counts now: in its own column, or in the batch's
        self.place = 0  # the number of the column there
        self.bare_until = 0  # an output that leaves it with fewer tokens says its ids and nothing else
        self.num_slots = 1  # places of the batch it takes, the sequences it will fork into included
        self.num_cached = 0  # prompt tokens found in the prefix cache when first admitted
        self.num_from_host = 0  # tokens of these that were in host memory
        self.is_beam = request.params.use_beam_search
        self.is_running = False
        self.is_swapped = False
        self.was_admitted = False  # whether it has ever run
        self.arrival = 0
        self.sort_key: tuple[float, int] = (0.0, 0)
        self.ticket = 0  # its number in the waiting queue; 0: it does not wait
        self.waiting_since = 0  # the step in which it began to wait for its next token
        self.num_tokens_then = 0  # how many it had in that step; 0: it has never waited
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None
        self.cumulative_logprob = 0.0

    @property
    def num_pending(self) -> int:
        """The number of tokens it is behind."""
        return self.num_tokens - self.num_computed

    @property
    def num_output(self) -> int:
        """The number of tokens it has made, those still on the device included."""
        return self.num_tokens - self.num_prompt

    @property
    def state(self) -> str:
        """The state in the specification's words, for people, the API and the UI."""
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
        self.max_total = max_total  # prompt + output tokens of each sequence, at most
        self.stop_ids = stop_ids  # tokens that end a sequence: the model's EOS set and the request's own
        self.seed = seed
        self.adapter_slot = 0  # the model's slot of the request's adapter; 0: it has none
        self.sequences: list[Sequence] = []
        self.added_at = 0.0  # engine-clock seconds, for metrics only: nothing is decided by them
        self.queue_s: float | None = None  # None: no step has touched it yet
        self.num_made = 0  # sequences ever made for it, dropped beams included
        self.prompt_logprobs: list[RowLogprobs | None] = []
        self.finished_beams: list[FinishedBeam] = []
        self.pooled_D: np.ndarray | None = None  # hidden states of an embedding's chunks so far, added up

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
        """The logprobs of the prompt's tokens, of which the first has none; None unless the request asked."""
        is_asked = self.request.params.prompt_logprobs is not None
        return (None, *self.prompt_logprobs) if is_asked else None

    @property
    def unfinished(self) -> list[Sequence]:
        """The sequences that will make more tokens."""
        return [seq for seq in self.sequences if seq.finish_reason is None]

    @property
    def is_finished(self) -> bool:
        """True if none of its sequences will make another token."""
        return all(seq.finish_reason is not None for seq in self.sequences)


@dataclass(frozen=True, slots=True)
class FinishedBeam:
    """A hypothesis of a beam search that has met its stop."""

    output: list[int]
    score: float  # mean logprob per token: what hypotheses are ranked by
    cumulative_logprob: float
    finish_reason: FinishReason
    stop_reason: int | None
