"""The layout of the KV cache: which layers share a block, and how many blocks a sequence needs.

A layer with a sliding window of w tokens never reads a token that lies w or more before the newest one, so
blocks outside the window can be freed while the sequence grows. Layers with the same window make a *group*. A
group may need blocks that another has freed, so each has its own block tables:

    layers      0 1 2 3 4   6 7 8 9 10    5 11           Gemma 3: five local layers, then a global one
    table       1 1 2 2 3   3 4 4 5 5     0  0           here with two layers to a block
    plane       0 1 0 1 0   1 0 1 0 1     0  1           where a layer lies within the blocks of its table

All tables take their blocks from one pool: a block holds the keys and values of `block_size` tokens in
`num_planes` layers, whichever. So memory that long sequences free in the local layers serves global layers,
and nothing is divided in advance. Groups seldom have the same number of layers, so the last table of a group
leaves part of each block unused (docs/decisions/0008-groups-of-layers-share-one-pool.md).

A layer of linear attention has a state in place of keys and values: a few matrices, as large after a thousand
tokens as after one. Its table has a window of two tokens, a token and the one before it, and a block holds
the state after the tokens of that block. The next token reads the newest state and writes its own:

    tokens      0  1  2  3 | 4  5  6  7 | 8  9               block size 4
    blocks      freed        after 7      after 9            the next token reads "after 9" and writes there

So freeing, forks, swapping and prefixes work as for any window. A full block is the state of a prefix, and a
prompt continues from its end, because there is no state within a block (docs/features/hybrid.md).

Layers may differ in the size of a token's keys (Gemma 4). Then a plane is as wide as a common multiple of all
sizes, and narrower layers divide it: a table of layers of half the width has two of them to a plane.

    a block of a plane      | layer 0, block_size tokens | layer 2, block_size tokens |

In slots of half the width, block b of this plane begins at slot 2 b * block_size. So the tables that a device
gets have 2 b in place of b, and nothing else there needs to know (`KVLayout.spans`).

A model whose layers have the same window has one table and one block for all layers.

Layers in stages are in the memory of different ranks, which have the same tables: the planes of each stage
are counted from 0, and a block has room for the stage that needs most.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple


class TransferKind(StrEnum):
    """The two ends of a block's move."""

    COPY = "copy"  # both ends on the device
    SWAP_OUT = "swap_out"  # the source on the device, the destination in host memory
    SWAP_IN = "swap_in"  # the other way round


COPY, SWAP_OUT, SWAP_IN = TransferKind


class Transfer(NamedTuple):
    """Move one block; the books have moved it already."""

    kind: TransferKind
    source: int
    destination: int


MAX_TABLES: Final = 8  # more of them waste fewer bytes, and cost the host more time
ENDLESS: Final = 1 << 40  # blocks: more than any memory has
STATE: Final = 0  # stands where a window would: the layers of the table have a state
STATE_WINDOW: Final = 2  # tokens whose blocks a layer with a state needs: a token and the one before it
STATE_TOKENS: Final = 16  # tokens that a kernel computes at once, all of one block


class StateSize(NamedTuple):
    """The size of the state that a layer keeps in one block in place of keys and values."""

    num_heads: int  # an even number: half of them lie where keys would lie, half where values would
    shape: tuple[int, int]  # shape of a head's matrix, in float32
    tail: tuple[int, int]  # shape of the last inputs of its convolution, in the dtype of the model

    def min_block_size(self, bytes_per_token: int) -> int:
        """Tokens of the smallest block with room for a state, given the bytes of one token's keys."""
        num_bytes = 4 * self.num_heads // 2 * self.shape[0] * self.shape[1]
        return max(STATE_TOKENS, 1 << (-(-num_bytes // bytes_per_token) - 1).bit_length())

    @property
    def num_tail(self) -> int:
        """The number of elements of the tail."""
        return self.tail[0] * self.tail[1]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The blocks and planes in which the layers of a model keep their keys and values."""

    windows: tuple[int | None, ...]  # tokens that the layers of each table see back; the tables of one
    # group follow each other, and groups without a window come first
    tables: tuple[int, ...]  # the table of each layer, which says where its blocks are
    planes: tuple[int, ...]  # the place of each layer within a block
    num_planes: int  # layers to a block
    spans: tuple[int, ...] = ()  # layers of each table that divide a plane; (): one has all of it
    heads: tuple[tuple[int, int], ...] = ()  # number and size of the kv heads of each layer; (): all alike
    parts: tuple[int, ...] = ()  # the part of its plane that each layer has

    @classmethod
    def whole(cls, num_layers: int) -> KVLayout:
        """One table for all layers, nothing freed before the end."""
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
        """The layout of layers with these windows; a window that no sequence outgrows counts as none.

        `heads`: as in the layout. `sources`: the layer whose keys and values each layer reads; (): its own.
        `stages`: the layers of each stage, where other ranks have the other ones.
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
        """The number and size of kv heads of a plane, given a layer's where all are alike."""
        widths = map(math.prod, self.heads)
        return (1, math.lcm(*widths)) if self.heads else (num_kv_heads, head_dim)

    @property
    def num_layers(self) -> int:
        """Layers that the blocks of all tables have room for."""
        return self.num_planes * len(self.windows)


def window_blocks(window: int | None, block_size: int, max_chunk: int | None) -> int:
    """The most blocks a table holds of a sequence, however long: blocks of a window and of a step's tokens.

    At most `max_chunk` tokens of a sequence are computed in a step; None: all there are.
    """
    if window is None or max_chunk is None:
        return ENDLESS
    return -(-((window or STATE_WINDOW) - 1 + max_chunk) // block_size) + 1


def blocks_of_sequence(
    windows: Sequence[int | None], num_tokens: int, block_size: int, max_chunk: int | None
) -> int:
    """The most blocks, in tables with these windows, that a sequence holds until it has this length."""
    table_len = -(-num_tokens // block_size)
    return sum(min(table_len, window_blocks(window, block_size, max_chunk)) for window in windows)


def longest_sequence(
    windows: Sequence[int | None], num_blocks: int, block_size: int, max_chunk: int | None
) -> int:
    """The number of tokens of one sequence, in whole blocks, that this many blocks hold."""

    def num_held(table_len: int) -> int:
        return blocks_of_sequence(windows, table_len * block_size, block_size, max_chunk)

    return block_size * (bisect_right(range(ENDLESS), num_blocks, key=num_held) - 1)


def _choose_planes(group_sizes: dict[tuple[int | None, int], int]) -> int:
    """The number of planes that wastes least, first of blocks that are never freed early.

    `group_sizes`: the planes that the layers of each group fill.
    """
    max_tables = max(MAX_TABLES, len(group_sizes))

    def waste(num_planes: int) -> tuple[int, int, int]:
        unused = {group: -size % num_planes for group, size in group_sizes.items()}
        num_tables = sum(-(-size // num_planes) for size in group_sizes.values())
        endless = sum(count for (window, _), count in unused.items() if window is None)
        return endless, sum(unused.values()), num_tables

    sizes = range(1, max(group_sizes.values()) + 1)
    return min((size for size in sizes if waste(size)[2] <= max_tables), key=waste)
