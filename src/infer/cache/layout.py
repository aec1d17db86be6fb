"""The layout of the KV cache: which layers share a block, and how many blocks a sequence needs.

A layer with a sliding window of w tokens never reads a token w or more positions before the newest one, so
blocks outside the window can be freed while the sequence grows. Layers with the same window form a *group*.
A group may still need a block that another group has freed, so each group has its own block tables:

    layers      0 1 2 3 4   6 7 8 9 10    5 11           Gemma 3: five local layers, then a global one
    table       1 1 2 2 3   3 4 4 5 5     0  0           here with two layers to a block
    plane       0 1 0 1 0   1 0 1 0 1     0  1           a layer's place within the blocks of its table

All tables take their blocks from one pool: a block stores the keys and values of `block_size` tokens in any
`num_planes` layers. So memory that long sequences free in the local layers is available to global layers, and
nothing is divided in advance. Groups rarely have the same number of layers, so the last table of a group
leaves part of each block unused (docs/decisions/0008-groups-of-layers-share-one-pool.md).

A layer of linear attention has a state in place of keys and values: a few matrices of constant size, whatever
the number of tokens. Its table has a window of two tokens, a token and its predecessor, and a block stores
the state after the last token of that block. The next token reads the newest state and writes its own:

    tokens      0  1  2  3 | 4  5  6  7 | 8  9               block size 4
    blocks      freed        after 7      after 9            the next token reads "after 9" and writes there

So freeing, forks, swapping and prefixes work as for any window. A full block is the state of a prefix, and a
prompt continues only from the end of a block, because no state within it is kept (docs/features/hybrid.md).

Layers may differ in the size of a token's keys (Gemma 4). Then the width of a plane is a common multiple of
all sizes, and narrower layers share it: layers of half the width lie two to a plane.

    a block of a plane      | layer 0, block_size tokens | layer 2, block_size tokens |

In slots of half the width, block b of this plane begins at slot 2 b * block_size. So the device's tables have
2 b in place of b; nothing else on the device depends on it (`KVLayout.spans`).

A model whose layers all have the same window has one table and one block for all layers.

Pipeline stages are in the memory of different ranks, which have the same tables: the planes of each stage are
numbered from 0, and a block has room for the stage that needs the most planes.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple


class TransferKind(StrEnum):
    """The source and the destination of a block transfer."""

    COPY = "copy"  # device to device
    SWAP_OUT = "swap_out"  # device to host memory
    SWAP_IN = "swap_in"  # host memory to device


COPY, SWAP_OUT, SWAP_IN = TransferKind


class Transfer(NamedTuple):
    """A copy of one block; the pool's records already show it as done."""

    kind: TransferKind
    source: int
    destination: int


MAX_TABLES: Final = 8  # more tables waste fewer bytes, but cost more host time
ENDLESS: Final = 1 << 40  # blocks: more than any memory has
STATE: Final = 0  # used in place of a window: the layers of the table have a state
STATE_WINDOW: Final = 2  # window of a layer with a state: a token and its predecessor
STATE_TOKENS: Final = 16  # tokens of one block that a kernel computes at once


class StateSize(NamedTuple):
    """The size of the state that a layer keeps in one block in place of keys and values."""

    num_heads: int  # even: half of the heads take the place of keys, half the place of values
    shape: tuple[int, int]  # shape of a head's matrix, in float32
    tail: tuple[int, int]  # shape of the last inputs of its convolution, in the dtype of the model

    def min_block_size(self, bytes_per_token: int) -> int:
        """Return the smallest block size with room for a state, given the bytes of one token's keys."""
        num_bytes = 4 * self.num_heads // 2 * self.shape[0] * self.shape[1]
        return max(STATE_TOKENS, 1 << (-(-num_bytes // bytes_per_token) - 1).bit_length())

    @property
    def num_tail(self) -> int:
        """The number of elements of the tail."""
        return self.tail[0] * self.tail[1]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The blocks and planes in which the layers of a model keep their keys and values."""

    windows: tuple[int | None, ...]  # window of each table's layers; the tables of one group follow each
    # other, and groups without a window come first
    tables: tuple[int, ...]  # block table of each layer
    planes: tuple[int, ...]  # place of each layer within a block
    num_planes: int  # planes of a block
    spans: tuple[int, ...] = ()  # layers of each table that share a plane; (): one
    heads: tuple[tuple[int, int], ...] = ()  # number and size of the kv heads of each layer; (): all equal
    parts: tuple[int, ...] = ()  # index of each layer among the layers that share its plane

    @classmethod
    def whole(cls, num_layers: int) -> KVLayout:
        """Return a layout with one table for all layers, which frees no block early."""
        return cls((None,), (0,) * num_layers, tuple(range(num_layers)), num_layers)

    @classmethod
    def of(
        cls,
        layer_windows: Sequence[int | None],
        max_seq_len: int,
        heads: Sequence[tuple[int, int]] = (),
        sources: Sequence[int] = (),
        stages: Sequence[range] = (),
    ) -> KVLayout:
        """Return the layout of layers with these windows; a window of `max_seq_len` or more counts as none.

        `heads`: as in the layout. `sources`: the layer whose keys and values each layer reads; (): its own.
        `stages`: the layers of each pipeline stage.
        """
        sources, stages = sources or range(len(layer_windows)), stages or (range(len(layer_windows)),)
        widths = [math.prod(each) for each in heads] or [1] * len(layer_windows)
        groups: dict[tuple[int | None, int], list[list[int]]] = {}  # the layers of each stage
        for number, stage in enumerate(stages):
            for layer in (layer for layer in stage if sources[layer] == layer):
                window = layer_windows[layer]
                seen = None if window is None or window >= max_seq_len else window
                key = seen, math.lcm(*widths) // widths[layer]
                groups.setdefault(key, [[] for _ in stages])[number].append(layer)
        by_window = sorted(groups.items(), key=lambda group: -1 if group[0][0] is None else group[0][0])
        sizes = {key: max(-(-len(layers) // key[1]) for layers in parts) for key, parts in by_window}
        num_planes = _choose_planes(sizes)
        windows, spans = list[int | None](), list[int]()
        found = dict[int, tuple[int, int, int]]()  # table, plane and part of each layer
        for (window, span), parts in by_window:
            for place, layer in (pair for layers in parts for pair in enumerate(layers)):
                table, plane = divmod(place // span, num_planes)
                found[layer] = len(windows) + table, plane, place % span
            num_tables = -(-sizes[window, span] // num_planes)
            windows, spans = windows + [window] * num_tables, spans + [span] * num_tables
        tables, planes, places = zip(*(found[source] for source in sources), strict=True)
        if not heads:
            return cls(tuple(windows), tables, planes, num_planes)
        return cls(tuple(windows), tables, planes, num_planes, tuple(spans), tuple(heads), places)

    def plane_heads(self, num_kv_heads: int, head_dim: int) -> tuple[int, int]:
        """Return the number and size of kv heads of a plane; the arguments hold if all layers are equal."""
        widths = map(math.prod, self.heads)
        return (1, math.lcm(*widths)) if self.heads else (num_kv_heads, head_dim)

    @property
    def num_layers(self) -> int:
        """The number of layers for which the blocks of all tables have room."""
        return self.num_planes * len(self.windows)


def window_blocks(window: int | None, block_size: int, max_chunk: int | None) -> int:
    """Return the most blocks of a table that a sequence of any length holds: for its window and one step.

    A step computes at most `max_chunk` tokens of a sequence; None: any number.
    """
    if window is None or max_chunk is None:
        return ENDLESS
    return -(-((window or STATE_WINDOW) - 1 + max_chunk) // block_size) + 1


def blocks_of_sequence(
    windows: Sequence[int | None], num_tokens: int, block_size: int, max_chunk: int | None
) -> int:
    """Return the most blocks, in tables with these windows, that a sequence holds up to this length."""
    table_len = -(-num_tokens // block_size)
    return sum(min(table_len, window_blocks(window, block_size, max_chunk)) for window in windows)


def longest_sequence(
    windows: Sequence[int | None], num_blocks: int, block_size: int, max_chunk: int | None
) -> int:
    """Return the longest sequence, in whole blocks, that fits into `num_blocks`."""

    def num_held(table_len: int) -> int:
        return blocks_of_sequence(windows, table_len * block_size, block_size, max_chunk)

    return block_size * (bisect_right(range(ENDLESS), num_blocks, key=num_held) - 1)


def _choose_planes(group_sizes: dict[tuple[int | None, int], int]) -> int:
    """Return the number of planes that wastes least, first in blocks of layers without a window.

    `group_sizes`: the number of planes that the layers of each group need.
    """
    max_tables = max(MAX_TABLES, len(group_sizes))

    def waste(num_planes: int) -> tuple[int, int, int]:
        unused = {group: -size % num_planes for group, size in group_sizes.items()}
        num_tables = sum(-(-size // num_planes) for size in group_sizes.values())
        endless = sum(count for (window, _), count in unused.items() if window is None)
        return endless, sum(unused.values()), num_tables

    sizes = range(1, max(group_sizes.values()) + 1)
    return min((size for size in sizes if waste(size)[2] <= max_tables), key=waste)
