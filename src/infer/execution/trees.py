"""Trees of drafts, as a step computes and verifies them (speculative/tree.py has a picture).

    order      tokens of a row, and the distance of each from its parent                          (order.py)
    nodes      depth of each token, which gives its position, and a bit for each token that it attends to
    judge      from the first token on, go to the child that equals the sampled id, as long as there is one
    compact    move keys and values of the accepted path to the slots of a plain text

All nodes at a depth are sampled with the noise of their position. So if the path of a node is the text, the
node samples the same id as the row without drafts. Chains and trees follow the same rule.

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

    backs: tuple[int, ...]  # distance of each draft from its parent, in nodes
    ranks: tuple[int, ...]  # rank of each draft among the guesses of its parent, from 0
    depths: tuple[int, ...]  # depth of each draft, from 1

    @property
    def depth(self) -> int:
        """The number of drafts on the main line, which is the longest path."""
        return max(self.depths, default=0)

    def cut(self, depth: int) -> DraftTree:
        """Return the part of the tree up to a depth, with its nodes in the same order."""
        kept = [0, *(node for node, each in enumerate(self.depths, 1) if each <= depth)]
        backs = [place - kept.index(node - self.backs[node - 1]) for place, node in enumerate(kept) if node]
        ranks, depths = ([column[node - 1] for node in kept[1:]] for column in (self.ranks, self.depths))
        return DraftTree(tuple(backs), tuple(ranks), tuple(depths))


class TreeNodes(NamedTuple):
    """The tokens of an order as nodes of trees, row by row."""

    depths_T: np.ndarray  # depth of each token below the first token of its row
    starts_T: np.ndarray  # position at which the row's tree begins; NO_TREE: tokens see all before them
    seen_T: np.ndarray  # int64, bit n: the token attends to token n of its row (or is token n)


def nodes_of(order: StepOrder) -> TreeNodes:
    """Return the nodes of an order in which no row decodes."""
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
    """Yield the rows whose drafts have branches: number, and distances to parents."""
    if not len(order.backs):
        return
    for number, backs in enumerate(np.split(order.backs, order.counts.cumsum()[:-1])):
        if (backs != 1).any():
            yield number, backs.tolist()


def main_line(backs: Sequence[int]) -> int:
    """Return the length of the main line: the drafts at the start of a window that follow each other."""
    return next((place for place, back in enumerate(backs) if back != 1), len(backs))


def kept_path(drawn: Sequence[int], drafts: Sequence[int], backs: Sequence[int]) -> list[int]:
    """Return the nodes whose ids are kept: a row's first token, and the path of drafts equal to sampled ids.

    `drawn` has a sampled id for each node, `drafts` the tokens of all nodes but the first, `backs` distances.
    """
    path = [0]
    while (child := _child_of(path[-1], drawn[path[-1]], drafts, backs)) is not None:
        path.append(child)
    return path


def moved_slots(order: StepOrder, ids: Sequence[Sequence[int]]) -> np.ndarray:
    """Return [2, M]: slots from and to which accepted drafts' keys and values move, given each row's ids."""
    sources, places = list[int](), list[int]()  # indices of the order's tokens
    ends = order.counts.cumsum()
    for number, backs in () if order.flags & DRAWS_BEST else branched_rows(order):  # a turn keeps nothing
        first = int(ends[number]) - len(backs)
        tokens = order.tokens[first + 1 : first + len(backs)].tolist()
        for place, node in enumerate(_path_of(ids[number], tokens, backs)):
            if node != place:
                sources.append(first + node)
                places.append(first + place)
    moves: np.ndarray = order.slots[0, [sources, places]].astype(np.int64)
    return moves


def _path_of(kept: Sequence[int], drafts: Sequence[int], backs: Sequence[int]) -> list[int]:
    """Return the nodes at which some ids were sampled: the first token, its child with the first id, ...

    The last id has no node yet. With random acceptance, ids need not equal drafts: then the main line was
    kept, and nothing is moved.
    """
    path = [0]
    for token_id in kept[:-1]:
        child = _child_of(path[-1], token_id, drafts, backs)
        if child is None:
            return []
        path.append(child)
    return path


def _child_of(node: int, token_id: int, drafts: Sequence[int], backs: Sequence[int]) -> int | None:
    """Return the first child of a node with this id; None: there is none."""
    later = range(node + 1, len(backs))
    return next((n for n in later if n - backs[n] == node and drafts[n - 1] == token_id), None)
