"""The order of one step for a device: arrays of numbers, and nothing else.

The host half (engine/host_half.py) turns a plan and its sequences into one `StepOrder`; a device half
(device.py) executes it. A device knows rows, blocks and ids, but no requests and no sequences.

    rows of the step     A           B           C                   D
    row                  3           0           1                   5       its row of the device's state
    kind                 DECODE      DECODE      PROMPT              VERIFY
    start, count         20, 1       5, 1        0, 4                9, 3    positions it computes
    num_sampled          1           1           0                   3       positions sampled, the last ones
    num_draws            1           1           0                   1       ids drawn at each, n for a fork
    adapter              0           0           0                   0       adapter slot; 0: the base model
    tokens               -           -           c0 c1 c2 c3         d9 x y  x and y are drafts

A row that *decodes* computes its last token, which the device sampled itself or gets in `known`. The order
contains the tokens of all other rows, and the slots for their keys and values. A row that *verifies* samples
an id at each of its positions, and keeps ids up to and including the first that differs from its draft: 1 to
`count` ids are returned. A verifying row that samples a single position has no drafts: it is a short piece of
text, computed together with rows that have drafts.

Drafts may be a *tree*: then `backs` has the distance of each given token from its parent, in tokens; in texts
and chains it is 1. The position of a token is one after its parent's. It attends to its ancestors and to the
earlier cache only. Its keys and values are in the slot of its place in the row (trees.py):

    tokens      d9   x    y    z    w             x, y and z follow each other; w is an alternative to x
    backs       1    1    1    1    4
    position    9    10   11   12   10
    slot of     9    10   11   12   13            if w is kept, its keys and values are moved to slot 10

Everything else in an order is a *change* of the state that the device keeps from step to step:

    lines, facts, extras    rows that begin: sampling parameters, requested results, lists of ids
    table_changes           new blocks of tables: row (numbered through all tables), index, block
    known                   last tokens that the device has not sampled: row, id, position
    transfers               blocks to move before anything else: kind, source, destination

So an order for rows that simply continue is small: 256 decoding rows take 5 KB, of which a GPU reads nothing
(`REPEATS`). `to_bytes` packs an order into one buffer, and `read` returns views of it. In this form an order
is sent to another process, and recorded.

Shapes:  N rows of the step, T tokens of rows that do not decode, K block tables, U known tokens, D blocks,
X transfers, A arrivals, E extras, B tokens with a parent: T or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from struct import Struct
from typing import Any, Final, NamedTuple

import numpy as np

from infer.cache.layout import TransferKind

DECODE, PROMPT, VERIFY = 0, 1, 2  # kinds of rows
# flags of an order
AWAITS_MASKS: Final = 1  # sampling waits until the masks of some rows are filled
REPEATS: Final = 2  # the rows of the previous order decode again, one token further, and no row begins
ON_HOST: Final = 4  # the host samples and sends the rows' next tokens: forks, beams, drafts
READS_PROMPTS: Final = 8  # every hidden state of some rows is read: logprobs of prompts, embeddings
DRAWS_BEST: Final = 16  # each position draws its `num_draws` best ids, under the same noise: for a tree
UNSEEN: Final = 32  # a draft head need not follow this step: none of its rows will get drafts

TRANSFERS: Final = tuple(TransferKind)  # kinds of transfers, by number
POOLINGS: Final = (None, "last", "mean")  # poolings of an embedding, by number
NONE: Final = -1  # no logprobs are requested
PADDING: Final = -1  # row of a line of `table_changes` that is padding


class StepOrder(NamedTuple):
    """The order of one step; see the module's docstring."""

    step: int
    flags: int
    starts: np.ndarray
    table_changes: np.ndarray
    transfers: np.ndarray
    rows: np.ndarray  # this and all later fields stay the same while the rows continue to decode
    counts: np.ndarray
    num_sampled: np.ndarray
    num_draws: np.ndarray
    adapters: np.ndarray
    kinds: np.ndarray
    tokens: np.ndarray
    slots: np.ndarray
    backs: np.ndarray  # distance of each given token from its parent; empty: all 1
    next_tokens: np.ndarray  # token after each row's last; empty if every row samples and none is read
    known: np.ndarray
    lines: np.ndarray  # packed `SampleLine`s (kernels/sampling/sample_state.py)
    facts: np.ndarray  # `RowFacts`
    extras: np.ndarray  # lists of each arrival: its tokens, banned ids, biased ids, biases as float32

    @property
    def num_rows(self) -> int:
        """The number of rows of the step."""
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the model computes."""
        return int(self.counts.sum())

    @property
    def stops(self) -> np.ndarray:
        """The position after each row's last token, which is the position of its last sampled id."""
        stops: np.ndarray = self.starts + self.counts
        return stops

    @property
    def has_begun(self) -> bool:
        """True if a row begins with this order."""
        return len(self.facts) > 0

    def repeat(
        self, step: int, flags: int, starts: np.ndarray, table_changes: np.ndarray, transfers: np.ndarray
    ) -> StepOrder:
        """Return the order for the same rows at later positions."""
        return StepOrder(step, flags, starts, table_changes, transfers, *self[5:])

    def moves(self) -> list[tuple[TransferKind, int, int]]:
        """Return the transfers in the form that the KV store takes."""
        return [(TRANSFERS[kind], source, to) for kind, source, to in self.transfers.tolist()]

    def select(self, numbers: np.ndarray) -> StepOrder:
        """Return the part of an order for some rows, in rising order, without changes of state."""
        is_part = np.zeros(self.num_rows, dtype=bool)
        is_part[numbers] = True
        is_given = self.kinds != DECODE
        taken = is_part[is_given].repeat(self.counts[is_given])
        columns = {name: getattr(self, name)[numbers] for name in _COLUMNS}
        following = self.next_tokens[numbers] if len(self.next_tokens) else self.next_tokens
        return EMPTY._replace(
            step=self.step,
            flags=self.flags & ~REPEATS,
            **columns,
            tokens=self.tokens[taken],
            slots=self.slots[:, taken],
            backs=self.backs[taken] if len(self.backs) else self.backs,
            next_tokens=following,
        )

    def cut(self, number: int, num_first: int) -> tuple[StepOrder, StepOrder]:
        """Split the order before token `num_first` of the row `number`; both parts compute the same together.

        The first part has the changes of state. Transfers must not be repeated and are in neither part.
        """
        first = self.select(np.arange(number + (num_first > 0)))
        rest = self.select(np.arange(number, self.num_rows))
        state = {name: getattr(self, name) for name in ("known", "table_changes", "lines", "facts", "extras")}
        first = first._replace(**state)
        if not num_first:
            return first, rest
        assert self.kinds[number] == PROMPT and not len(self.backs), "only a prompt can be cut"
        num_rest = int(self.counts[number]) - num_first
        for part, place, count in ((first, -1, num_first), (rest, 0, num_rest)):
            part.counts[place] = count
        rest.starts[0] += num_first
        first.num_sampled[-1] = first.num_draws[-1] = 0
        following = first.next_tokens if len(first.next_tokens) else np.zeros(number + 1, dtype=np.uint32)
        following[-1] = rest.tokens[num_first]
        return (
            first._replace(
                tokens=first.tokens[:-num_rest], slots=first.slots[:, :-num_rest], next_tokens=following
            ),
            rest._replace(tokens=rest.tokens[num_first:], slots=rest.slots[:, num_first:]),
        )


class RowFacts(NamedTuple):
    """The facts that a device knows about a row besides its `SampleLine`, ordered as `StepOrder.facts`."""

    num_prompt: int
    num_logprobs: int = NONE  # alternatives reported with each sampled id
    prompt_logprobs: int = NONE  # alternatives reported with each prompt token
    pooling: int = 0  # index into POOLINGS
    num_tokens: int = 0  # tokens among the extras: prompt and output, if penalties count them
    num_banned: int = 0  # ids among the extras that must not be sampled before the line's `ban_end`


# -- an order in a buffer ---------------------------------------------------------------------------------

# name, type and shape of every array; arrays of 8-byte elements come first, so that all are aligned
_ARRAYS: Final = (
    ("known", "<i8", "3U"), ("lines", "<i8", "AL"), ("rows", "<i4", "N"), ("starts", "<i4", "N"),
    ("counts", "<i4", "N"), ("tokens", "<u4", "T"), ("slots", "<i4", "KT"), ("next_tokens", "<u4", "M"),
    ("table_changes", "<i4", "D3"), ("transfers", "<i4", "X3"), ("facts", "<i4", "AF"),
    ("extras", "<u4", "E"), ("num_sampled", "<i2", "N"), ("num_draws", "<i2", "N"),
    ("adapters", "<i2", "N"), ("kinds", "<i1", "N"), ("backs", "<i1", "B"),
)  # fmt: skip
_COLUMNS: Final = tuple(name for name, _, shape in _ARRAYS if shape == "N")
_LENGTHS: Final = "NTKMUDXALFEB"  # lengths in the header, in this order
_PLACES: Final = _LENGTHS + "31"  # lengths by index; the second length of a one-dimensional array is 1


def _kind(dtype: str, shape: str) -> tuple[np.dtype[Any], int, int, int, int]:
    first, second = map(_PLACES.index, shape.ljust(2, "1"))
    return np.dtype(dtype), np.dtype(dtype).itemsize, first, second, len(shape)


_KINDS: Final = [_kind(dtype, shape) for _, dtype, shape in _ARRAYS]
_arrays_of: Final = attrgetter(*(name for name, _, _ in _ARRAYS))
_HEADER: Final = Struct(f"<4sIqI{len(_LENGTHS)}I")
_MAGIC: Final = b"STEP"
VERSION: Final = 2


def _empty(dtype: str, shape: str) -> np.ndarray:
    return np.zeros([int(length) if length.isdigit() else 0 for length in shape], dtype=dtype)


EMPTY: Final = StepOrder(step=0, flags=0, **{name: _empty(dtype, shape) for name, dtype, shape in _ARRAYS})


def to_bytes(order: StepOrder) -> bytes:
    """Pack the order into a new buffer."""
    numbers, parts = [0] * len(_PLACES), list[Any]([b""])
    for array, (dtype, _, first, second, num_lengths) in zip(_arrays_of(order), _KINDS, strict=True):
        numbers[first] = len(array)
        if num_lengths == 2:
            numbers[second] = array.shape[1]
        if array.size:
            parts.append(np.ascontiguousarray(array, dtype))
    parts[0] = _HEADER.pack(_MAGIC, VERSION, order.step, order.flags, *numbers[: len(_LENGTHS)])
    return b"".join(parts)


def read(buffer: memoryview) -> StepOrder:
    """Return views of the order at the start of a buffer; raises `ValueError` if it is not a whole order."""
    if len(buffer) < _HEADER.size:
        raise ValueError(f"{len(buffer)} bytes are fewer than an order's header")
    magic, version, step, flags, *numbers = _HEADER.unpack_from(buffer)
    if magic != _MAGIC or version != VERSION:
        raise ValueError(f"not an order of version {VERSION}: it begins with {magic!r}, version {version}")
    numbers += 3, 1
    arrays: dict[str, np.ndarray] = {}
    start = _HEADER.size
    for (name, _, _), (dtype, num_bytes, first, second, num_lengths) in zip(_ARRAYS, _KINDS, strict=True):
        size = numbers[first] * numbers[second]
        if start + num_bytes * size > len(buffer):
            needed = start + num_bytes * size
            raise ValueError(f"the order needs at least {needed} bytes, got {len(buffer)}")
        found = np.frombuffer(buffer, dtype, size, start) if size else np.empty(0, dtype)
        arrays[name] = found if num_lengths == 1 else found.reshape(numbers[first], numbers[second])
        start += num_bytes * size
    return StepOrder(step=step, flags=flags, **arrays)


class StepMasks(NamedTuple):
    """Masks under which some positions of a step are sampled: one bit for every id, 1: allowed.

    Mask k is for the id sampled at `positions[k]` by row `numbers[k]` of the order. If a row draws several
    ids at a position, all have the same mask. A position without a mask allows every id.
    """

    numbers: Sequence[int]
    positions: Sequence[int]
    lines_KW: np.ndarray  # int32 [K, ceil(vocabulary / 32)], the lowest id in the lowest bit

    def by_place(self) -> dict[tuple[int, int], np.ndarray]:
        """Return the masks by (number of the row in the order, position)."""
        return dict(zip(zip(self.numbers, self.positions, strict=True), self.lines_KW, strict=True))

    def select(self, first: int, num_rows: int) -> StepMasks:
        """Return the masks of `num_rows` rows from the number `first` on, numbered from 0."""
        kept = [place for place, number in enumerate(self.numbers) if first <= number < first + num_rows]
        numbers = [self.numbers[k] - first for k in kept]
        return StepMasks(numbers, [self.positions[k] for k in kept], self.lines_KW[kept])


NO_MASKS: Final = StepMasks((), (), np.empty((0, 0), dtype=np.int32))
