"""The oracle's law of what follows a text, and a device that answers by it.

Neither needs PyTorch, so a process around them starts in a tenth of the time. The device in oracle.py reads
what a sequence sees out of a fake store of blocks, which is the test of every book; this one asks the
scheduler's sequences, for tests of all that is around an engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np

from infer.execution.device import StepResult, SyncDevice
from infer.execution.order import StepMasks, StepOrder
from infer.kernels.sampling.sample_line import SampleLine
from infer.sampling.params import RowLogprobs, sequence_seed
from infer.scheduling.batch_state import BatchState

VOCAB_SIZE = 997


def next_token(tokens: Seq[int], seed: int) -> int:
    """The oracle: what follows these tokens in a sequence seeded like this."""
    return (hash_of(tokens, seed) >> 7) % VOCAB_SIZE


def offers(tokens: Seq[int], count: int) -> tuple[tuple[int, float], ...]:
    """The oracle for beams: the likeliest next tokens with their logprobs, no two sums of them alike."""
    state = hash_of(tokens, 0)
    found = []
    logprob = -0.05
    for rank in range(count):
        found.append(((state * 7 + rank * 13) % VOCAB_SIZE, logprob))
        state_of_rank = (state * 0x9E3779B1 + rank * 0x85EBCA6B) & 0xFFFFFFFF
        logprob -= 0.01 + (state_of_rank >> 8) / 2**24
    return tuple(found)


def expected_output(
    prompt: Seq[int], num_tokens: int, *, seed: int = 0, index: int = 0, stop_ids: Iterable[int] = ()
) -> list[int]:
    """What a request must get, made without any cache."""
    stops, own_seed = frozenset(stop_ids), sequence_seed(seed, index)
    state, output = hash_of(prompt, own_seed), list[int]()
    while len(output) < num_tokens and not (output and output[-1] in stops):
        output.append((state >> 7) % VOCAB_SIZE)
        state = extend_hash(state, output[-1])
    return output


def hash_of(tokens: Seq[int], seed: int) -> int:
    """The hash of a text."""
    state = (seed * 31 + 7) & 0xFFFFFFFF
    for token in tokens:
        state = extend_hash(state, token)
    return state


def extend_hash(state: int, token: int) -> int:
    """The hash of a text with one more token."""
    return (state * 1_000_003 ^ (int(token) + 1)) & 0xFFFFFFFF


class TextDevice(SyncDevice):
    """A device half that draws ids without logprobs, each from the whole text before it."""

    can_embed = True

    def __init__(self, state: BatchState) -> None:
        self._state = state
        self._seeds: dict[int, int] = {}  # by row

    def compute(self, order: StepOrder, masks: StepMasks) -> StepResult:
        """Draw what follows each row's text."""
        for line_F in order.lines:
            line = SampleLine.unpack(line_F.tobytes())
            self._seeds[line.row] = line.seed
        sequences = {seq.row: seq for seq in self._state.sequences}
        ids, pooled = list[tuple[int, ...]](), dict[int, np.ndarray]()
        columns = (order.rows, order.stops, order.num_sampled, order.num_draws)
        rows = zip(*(each.tolist() for each in columns), strict=True)
        for number, (row, stop, num_sampled, num_draws) in enumerate(rows):
            seen, pooling = sequences[row].tokens[:stop], sequences[row].group.request.pooling
            assert len(seen) == stop and num_sampled <= 1, "no step is ahead of its tokens, and no draft here"
            seeds = [sequence_seed(self._seeds[row], index) for index in range(num_draws * num_sampled)]
            ids.append(tuple(next_token(seen, seed) for seed in seeds))
            if pooling is not None:
                pooled[number] = np.array([next_token(seen, 0), stop], dtype=float)
        none: list[tuple[RowLogprobs | None, ...]] = [(None,) * len(drawn) for drawn in ids]
        return StepResult(ids, none, {}, pooled=pooled)

    def first_tokens(self, order: StepOrder) -> set[int]:
        """The first tokens of the texts in a step."""
        rows = set(order.rows.tolist())
        return {seq.tokens[0] for seq in self._state.sequences if seq.row in rows}
