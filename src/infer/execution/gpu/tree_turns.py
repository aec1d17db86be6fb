"""The turns of a tree of drafts, as tensors for one graph of all turns (kernels/elementwise/tree_nodes.py).

The number of drafts decides the shape of a tree (speculative/tree.py), so everything that a turn needs to
know about the shape is computed beforehand.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from infer.config.speculation import MAX_DRAFTS
from infer.execution.trees import DraftTree
from infer.kernels.sampling.sample_rows import SampleScratch, sample_rows
from infer.kernels.sampling.sample_state import SampleState


class TreeTurn(NamedTuple):
    """The nodes at one depth, which come from the ids that this turn draws at their parents."""

    links_3C: torch.Tensor  # int64: node, place among the ids, and a bit for each node that it sees
    num_next: int  # nodes with children, which come first; the next turn computes them
    num_best: int  # ids drawn at each parent
    depth: int


@lru_cache(maxsize=MAX_DRAFTS)
def tree_turns(tree: DraftTree, device: torch.device) -> tuple[TreeTurn, ...]:
    """The turns that make the drafts of a tree."""
    parents = [node - back for node, back in enumerate(tree.backs, 1)]
    ranks, seen = (0, *tree.ranks), [1]
    for node, parent in enumerate(parents, 1):
        seen.append(seen[parent] | 1 << node)
    computed, turns = [0], list[TreeTurn]()
    for depth in range(1, tree.depth + 1):
        nodes = [node for node, each in enumerate(tree.depths, 1) if each == depth]
        nodes.sort(key=lambda node: node not in parents)
        places = [ranks[n] * len(computed) + computed.index(parents[n - 1]) for n in nodes]
        links_3C = torch.tensor([nodes, places, [seen[node] for node in nodes]], device=device)
        computed = [node for node in nodes if node in parents]
        turns.append(TreeTurn(links_3C, len(computed), 1 + max(ranks[node] for node in nodes), depth))
    return tuple(turns)


def best_ids(
    logits_MV: torch.Tensor,
    state: SampleState,
    rows_M: torch.Tensor,
    positions_M: torch.Tensor,
    scratch: SampleScratch,
    count: int,
) -> torch.Tensor:
    """Return [count, M]: the id that each row draws, the id that it draws without the first, and so on.

    The logits are overwritten.
    """
    best_WM = torch.empty((count, len(rows_M)), dtype=torch.int64, device=logits_MV.device)
    for rank, ids_M in enumerate(best_WM):
        ids_M.copy_(sample_rows(logits_MV, state, rows_M, positions_M, scratch))
        if rank + 1 < count:
            logits_MV.scatter_(1, ids_M.clamp(min=0)[:, None], -torch.inf)
    return best_WM
