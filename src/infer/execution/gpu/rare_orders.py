"""Orders of padding that use what few requests ask for: logprobs, penalties, masks, forks, embeddings.

CUDA loads a kernel from its library when it is first launched, and the driver needs device memory for that.
If another process holds all the rest by then, the server fails in the middle of a step. So the warm-up runs
these orders: together they launch the kernels that usual steps do not.

Each order is a prompt of a few tokens in the first row of state. Its tokens have no slots and its states no
block, so the cache does not change, not even if requests came before the warm-up was done. A sequence that
gets the row later replaces everything that the order has left in the row's state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from infer.execution.order import (
    AWAITS_MASKS,
    EMPTY,
    NO_MASKS,
    NONE,
    ON_HOST,
    POOLINGS,
    PROMPT,
    READS_PROMPTS,
    RowFacts,
    StepMasks,
    StepOrder,
)
from infer.kernels.sampling.sample_line import NUM_FIELDS, SampleLine

NUM_TOKENS = 4
NO_SLOT = -1

_PLAIN = SampleLine(0, temperature=1.0)
_FULL = SampleLine(
    0, has_uses=1, top_k=2, ban_end=NUM_TOKENS + 1, num_biased=1, temperature=1.0, top_p=0.5, min_p=0.1,
    repetition=1.1, presence=0.1, frequency=0.1,
)  # fmt: skip


def rare_orders(
    num_tables: int, state_rows: Sequence[int], num_mask_words: int
) -> Iterator[tuple[StepOrder, StepMasks]]:
    """Yield orders, each with its masks; `state_rows`: the first row of each table of states."""
    order = partial(_order, num_tables, [(row, 0, NO_SLOT) for row in state_rows])
    masks = StepMasks([0], [NUM_TOKENS], np.full((1, num_mask_words), -1, dtype=np.int32))
    for flags, given in ((0, NO_MASKS), (AWAITS_MASKS, masks), (ON_HOST, NO_MASKS)):
        yield order(flags, _PLAIN), given
        yield order(READS_PROMPTS | flags, _FULL, num_logprobs=1), given
    for pooling in range(1, len(POOLINGS)):
        yield order(READS_PROMPTS, _PLAIN, pooling=pooling), NO_MASKS


def _order(
    num_tables: int, changes: Sequence[tuple[int, int, int]], flags: int, line: SampleLine, *,
    num_logprobs: int = NONE, pooling: int = 0,
) -> StepOrder:  # fmt: skip
    """Return an order with one new row, which draws two ids if the host draws, and none for an embedding."""
    one = int(np.float32(1.0).view(np.uint32))
    extras = [0] * (NUM_TOKENS + 2) + [one] if line.has_uses else []  # tokens, a banned id, a bias
    facts = RowFacts(
        NUM_TOKENS, num_logprobs, num_logprobs, pooling,
        num_tokens=NUM_TOKENS if line.has_uses else 0, num_banned=line.has_uses,
    )  # fmt: skip
    num_sampled = int(not pooling)
    num_draws = num_sampled * (2 if flags & ON_HOST else 1)
    return EMPTY._replace(
        flags=flags,
        table_changes=np.array(changes, dtype=np.int32).reshape(-1, 3),
        rows=np.array([line.row], dtype=np.int32),
        starts=np.zeros(1, dtype=np.int32),
        counts=np.array([NUM_TOKENS], dtype=np.int32),
        num_sampled=np.array([num_sampled], dtype=np.int16),
        num_draws=np.array([num_draws], dtype=np.int16),
        adapters=np.zeros(1, dtype=np.int16),
        kinds=np.array([PROMPT], dtype=np.int8),
        tokens=np.zeros(NUM_TOKENS, dtype=np.uint32),
        slots=np.full((num_tables, NUM_TOKENS), NO_SLOT, dtype=np.int32),
        next_tokens=np.zeros(1 if flags & READS_PROMPTS else 0, dtype=np.uint32),
        lines=np.frombuffer(bytearray(line.pack()), dtype=np.int64).reshape(1, NUM_FIELDS),
        facts=np.array([facts], dtype=np.int32),
        extras=np.array(extras, dtype=np.uint32),
    )
