"""Trees of drafts: several guesses of the next token, and guesses of what follows each of them.

A chain is worth nothing after its first wrong draft. A tree also has the second and third best guesses of a
small model, and continues from them as well; the target judges all nodes in one step. A tree of 8 drafts:

    text        "the"
                 ├─ 1 cat ─┬─ 2 sat ── 3 on ── 4 a     nodes 1 to 4 are the main line: best guesses all along
                 │         └─ 7 ate                    its parent is node 1, 6 back
                 ├─ 5 dog ─── 8 ran                    its parent is node 5, 3 back
                 └─ 6 man                              its parent is the text's last token, node 0, 6 back

    drawn       dog at the text's end, ran at node 5, off at node 8: the text goes on with "dog ran off"

The probability of a node is the product of the probabilities along its path: r for the best guess of a node,
(1 - r) / 2 for the second and (1 - r) / 4 for the third. `tree_of` takes the likeliest nodes at a fixed r. So
a number of drafts has one tree, the same for every text, and orders describe it in few numbers. The main line
comes first, in the slots of a chain: if it is accepted, nothing moves in the cache.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from infer.config.speculation import MAX_DRAFTS
from infer.execution.trees import DraftTree

WIDTH: Final = 3  # most children of a node
RATE: Final = 0.6  # acceptance rate of best guesses for which trees are shaped


def chance(ranks: tuple[int, ...], rate: float) -> float:
    """The probability that a node is right, given the ranks along its path."""
    found = 1.0
    for rank in ranks:
        found *= (1 - rate) / 2**rank if rank else rate
    return found


@cache
def grown(num_drafts: int) -> tuple[tuple[int, ...], ...]:
    """Return the paths of the likeliest drafts as ranks, likeliest first; a parent precedes its children."""
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
    """Return the tree of `num_drafts` drafts: its main line first, then the other nodes by depth."""
    taken = grown(num_drafts)
    paths = [(), *sorted(taken, key=lambda path: (any(path), len(path), path))]
    backs = [place - paths.index(path[:-1]) for place, path in enumerate(paths) if path]
    return DraftTree(
        tuple(backs), tuple(path[-1] for path in paths[1:]), tuple(len(path) for path in paths[1:])
    )


@cache
def chain_of(num_drafts: int) -> DraftTree:
    """Return a tree without branches."""
    return DraftTree((1,) * num_drafts, (0,) * num_drafts, tuple(range(1, num_drafts + 1)))


def survival(before: float, rate: float, place: int) -> float:
    """Return the probability that the draft at a place of `grown` is right, at most `before`.

    `rate`: the acceptance rate of best guesses.
    """
    return min(before, chance(grown(MAX_DRAFTS)[place], rate))


def turns_of(num_drafts: int) -> int:
    """Return the passes in which a draft model makes `num_drafts` drafts: the depth of their tree."""
    return tree_of(num_drafts).depth
