"""Drafts that are a tree, as a step computes and judges them (speculative/tree.py has a picture).

    order      tokens of a row, and how many tokens before it each one's parent is                (order.py)
    nodes      depth of each token, by which it is rotated and drawn, and a bit for each token that it sees
    judge      from the first token on, go to the child that is the id drawn there, as long as there is one
    compact    keys and values of the kept path go to the slots after the text, as if there had been no other

All nodes at a depth are drawn with the noise of their position. So if the path of a node is the text, the
node draws the same id as the row without drafts. Chains and trees follow the same rule.

Shapes:  T tokens of an order, M tokens whose keys and values are moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from infer.execution.order import DRAWS_BEST, StepOrder
from infer.kernels.elementwise.no_tree import NO_TREE


class DraftTree(NamedTuple):
    """The shape of some drafts; node 0 is the last token of the text, and drafts are numbered from 1."""

    backs: tuple[int, ...]  # how many nodes before it each draft's parent is
    ranks: tuple[int, ...]  # place of each draft among the guesses of its parent, from 0
    depths: tuple[int, ...]  # drafts from the text to each, itself included

    @property
    def depth(self) -> int:
        """The drafts of the main line, which is the longest path."""
        return max(self.depths, default=0)

    def cut(self, depth: int) -> DraftTree:
        """The part of the tree up to a depth, its nodes in the same order."""
        kept = [0, *(node for node, each in enumerate(self.depths, 1) if each <= depth)]
        backs = [place - kept.index(node - self.backs[node - 1]) for place, node in enumerate(kept) if node]
        ranks, depths = ([column[node - 1] for node in kept[1:]] for column in (self.ranks, self.depths))
        return DraftTree(tuple(backs), tuple(ranks), tuple(depths))


class TreeNodes(NamedTuple):
    """The tokens of an order as nodes of trees, row by row."""

    depths_T: np.ndarray  # tokens from the first one of the row to each, along its path
    starts_T: np.ndarray  # position at which the tree of its row begins; NO_TREE: it sees all before it
    seen_T: np.ndarray  # int64, bit n: it sees the token with the number n of its row, itself included


def nodes_of(order: StepOrder) -> TreeNodes:
    """The nodes of an order in which no row decodes."""
    counts = order.counts.astype(np.int64)
    ends = counts.cumsum()
    depths_T = np.arange(ends[-1]) - (ends - counts).repeat(counts)
    starts_T, seen_T = np.full((2, ends[-1]), NO_TREE, dtype=np.int64)
    for number, backs in branched_rows(order):
        first, seen = int(ends[number] - counts[number]), [1]
        depths = [0]
        for place, back in enumerate(backs[1:], 1):
            depths.append(depths[place - back] + 1)
            seen.append(seen[place - back] | 1 << place)
        row = slice(first, first + len(backs))
        depths_T[row], starts_T[row], seen_T[row] = depths, order.starts[number], seen
    return TreeNodes(depths_T, starts_T, seen_T)


def branched_rows(order: StepOrder) -> Iterator[tuple[int, list[int]]]:
    """The rows whose drafts have branches: their numbers, and the distances to parents."""
    if not len(order.backs):
        return
    for number, backs in enumerate(np.split(order.backs, order.counts.cumsum()[:-1])):
        if (backs != 1).any():
            yield number, backs.tolist()


def main_line(backs: Sequence[int]) -> int:
    """The number of drafts at the start of a window that follow each other: the depth of its tree."""
    return next((place for place, back in enumerate(backs) if back != 1), len(backs))


def kept_path(drawn: Sequence[int], drafts: Sequence[int], backs: Sequence[int]) -> list[int]:
    """The nodes whose ids are kept: the first token of a row, and drafts as long as they are what was drawn.

    `drawn` has an id for each node, `drafts` the tokens of all but the first, and `backs` all distances.
    """
    path = [0]
    while (child := _child_of(path[-1], drawn[path[-1]], drafts, backs)) is not None:
        path.append(child)
    return path


def moved_slots(order: StepOrder, ids: Sequence[Sequence[int]]) -> np.ndarray:
    """The slots that keys and values of kept drafts move from and to, given the ids of each row: [2, M]."""
    sources, places = list[int](), list[int]()  # tokens of the order
    ends = order.counts.cumsum()
    for number, backs in () if order.flags & DRAWS_BEST else branched_rows(order):  # it keeps none
        first = int(ends[number]) - len(backs)
        tokens = order.tokens[first + 1 : first + len(backs)].tolist()
        for place, node in enumerate(_path_of(ids[number], tokens, backs)):
            if node != place:
                sources.append(first + node)
                places.append(first + place)
    moves: np.ndarray = order.slots[0, [sources, places]].astype(np.int64)
    return moves


def _path_of(kept: Sequence[int], drafts: Sequence[int], backs: Sequence[int]) -> list[int]:
    """The nodes at which some ids were drawn: the first token, then the child that is the last id, and so on.

    The last id stands at no node yet. Where chance decides what is kept, ids need not be drafts: it keeps the
    main line, of which nothing is moved.
    """
    path = [0]
    for token_id in kept[:-1]:
        child = _child_of(path[-1], token_id, drafts, backs)
        if child is None:
            return []
        path.append(child)
    return path


def _child_of(node: int, token_id: int, drafts: Sequence[int], backs: Sequence[int]) -> int | None:
    """The first child of a node that has this id; None: it has none."""
    later = range(node + 1, len(backs))
    return next((n for n in later if n - backs[n] == node and drafts[n - 1] == token_id), None)
