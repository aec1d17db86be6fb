"""Trees of drafts: several guesses of the next token, and guesses of what follows each of them.

A chain is worth nothing after its first wrong draft. A tree also has the second and third best guesses of a
small model, and continues from them as well; the target judges all nodes in one step. A tree of 8 drafts:

    text        "the"
                 ├─ 1 cat ─┬─ 2 sat ── 3 on ── 4 a     nodes 1 to 4 are the main line: best guesses all along
                 │         └─ 7 ate                    its parent is node 1, 6 back
                 ├─ 5 dog ─── 8 ran                    its parent is node 5, 3 back
                 └─ 6 man                              its parent is the text's last token, node 0, 6 back

    drawn       dog at the text's end, ran at node 5, off at node 8: the text goes on with "dog ran off"

The chance of a node is the product of the chances along its path. The best guess of a node is right at a rate
r, and the next two with a half and then a quarter of the rest. `tree_of` takes the likeliest nodes at one
rate. So there is one tree for each number of nodes, the same for every text, and an order need say little
about it. The main line comes first, in the slots of a chain: if it is kept, nothing moves in the cache.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from infer.config.speculation import MAX_DRAFTS
from infer.execution.trees import DraftTree

WIDTH: Final = 3  # children of a node, at most
RATE: Final = 0.6  # rate of the best guesses that trees are made for


def chance(ranks: tuple[int, ...], rate: float) -> float:
    """The probability that a node is right, given the ranks along its path."""
    found = 1.0
    for rank in ranks:
        found *= (1 - rate) / 2**rank if rank else rate
    return found


@cache
def grown(num_drafts: int) -> tuple[tuple[int, ...], ...]:
    """The paths of the likeliest drafts as ranks, the likeliest first: each comes after its parent."""
    taken, open_ = list[tuple[int, ...]](), list[tuple[int, ...]]([(0,)])
    while len(taken) < num_drafts:
        best = max(open_, key=lambda path: (chance(path, RATE), -len(path)))
        open_.remove(best)
        taken.append(best)
        open_.append((*best, 0))
        if best[-1] + 1 < WIDTH:
            open_.append((*best[:-1], best[-1] + 1))
    return tuple(taken)


@cache
def tree_of(num_drafts: int) -> DraftTree:
    """The tree of this many drafts, its main line first, then the others by depth."""
    taken = grown(num_drafts)
    paths = [(), *sorted(taken, key=lambda path: (any(path), len(path), path))]
    backs = [place - paths.index(path[:-1]) for place, path in enumerate(paths) if path]
    return DraftTree(
        tuple(backs), tuple(path[-1] for path in paths[1:]), tuple(len(path) for path in paths[1:])
    )


@cache
def chain_of(num_drafts: int) -> DraftTree:
    """A tree without branches."""
    return DraftTree((1,) * num_drafts, (0,) * num_drafts, tuple(range(1, num_drafts + 1)))


def survival(before: float, rate: float, place: int) -> float:
    """The probability that the draft that a tree grows by at a place is right; not more than the one before.

    `rate`: how often best guesses are right.
    """
    return min(before, chance(grown(MAX_DRAFTS)[place], rate))


def turns_of(num_drafts: int) -> int:
    """The passes of a small model that make this many drafts: the depth of their tree."""
    return tree_of(num_drafts).depth
