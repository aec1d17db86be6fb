"""A small model that drafts trees: in each turn it computes all nodes so far, and draws the best ids of each.

    turn    computes                     draws, next to the newest nodes
    0       what it has missed: t8 t9    three guesses of t10: a b c          (its nodes: speculative/tree.py)
    1       t9 | a b c                   three after a, three after b, ..     as many as the tree has
    2       t9 | a b c, aa ab ba         and so on, until the tree is as deep as it should be

Its orders are windows like those of the model that judges, with the same masks and slots, so a draft model
needs nothing of its own to see a tree. It computes nodes again in each turn: that takes hardly longer than
the newest alone. What it keeps of a window is the main line, whose keys and values lie where a text's would.

Ids are drawn with the noise of the sequence, as in a chain (draft_model.py), so the best of them is the one
that the model draws as well where the two agree.

Where all tokens before a position count, for penalties or for a mask, a sequence gets a chain: devices keep
such counts along a row and not along a path.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from infer.config.speculation import MAX_DRAFTS, WINDOW_TOKENS
from infer.engine.draft_model import DraftModel
from infer.engine.host_half import HostHalf
from infer.scheduling.sequence import Sequence
from infer.speculative.tree import WIDTH, DraftTree, chain_of, tree_of


class TreeModel(DraftModel):
    """Drafts trees with a second model next to the sequences' own. One engine thread owns it."""

    def _new_host(self) -> HostHalf:
        """The maker of its orders, which draw several ids next to each token."""
        return HostHalf(self._state, is_draft=True, num_best=WIDTH)

    def begin(self, sequences: Seq[Sequence]) -> None:
        """Draft a tree for each of these sequences, with as many drafts as it has places for."""
        self._sequences = sequences
        self._most_behind = min(MAX_DRAFTS, WINDOW_TOKENS // len(sequences))  # a turn is one window
        places, trees = [seq.drafts for seq in sequences], [_tree_for(seq) for seq in sequences]
        found: list[list[int]] = [[0] * len(each) for each in places]
        try:
            starts = self._catch_up(sequences)
            for turn in range(max(tree.depth for tree in trees)):
                self._turn(turn, sequences, trees, starts, found)
        except BaseException:
            for seq, each in zip(sequences, places, strict=True):
                seq.drafts = each
            raise
        for seq, tree, drafts in zip(sequences, trees, found, strict=True):
            seq.drafts, seq.draft_backs = tuple(drafts), tree.backs

    def collect(self) -> list[list[int]]:
        """The drafts of each sequence; the main line of each is what is computed of a text."""
        drafts = [list(seq.drafts) for seq in self._sequences]
        for seq, found in zip(self._sequences, drafts, strict=True):
            self._note_text(seq, found[: _tree_for(seq).depth])
        self._sequences = ()
        return drafts

    def _turn(
        self,
        turn: int,
        sequences: Seq[Sequence],
        trees: Seq[DraftTree],
        starts: Seq[int],
        found: list[list[int]],
    ) -> None:
        """Compute the nodes up to a depth, and find those one deeper."""
        numbers = [number for number, tree in enumerate(trees) if tree.depth > turn]
        known = np.array([len(sequences[number].tokens) for number in numbers])
        begins, counts = known - 1 if turn else np.array(starts)[numbers], 0 * known
        for place, number in enumerate(numbers):
            seq, tree = sequences[number], trees[number]
            shown = [draft for draft, depth in zip(found[number], tree.depths, strict=True) if depth <= turn]
            seq.drafts, seq.draft_backs = tuple(shown), tree.cut(turn).backs
            counts[place] = len(shown)
        chunks = self._chunks([sequences[number] for number in numbers])
        step = self._run(chunks.at(begins, known + counts, is_repeated=False))
        for number, ids in zip(numbers, step.wait().ids, strict=True):
            tree = trees[number]
            nodes = [0, *(node for node, depth in enumerate(tree.depths, 1) if depth <= turn)]
            first_of = {node: WIDTH * place for place, node in enumerate(nodes)}  # its guesses among the ids
            for node, (back, rank, depth) in enumerate(zip(*tree, strict=True), 1):
                if depth == turn + 1:
                    found[number][node - 1] = ids[first_of[node - back] + rank]


def _tree_for(seq: Sequence) -> DraftTree:
    """The tree that the drafts of a sequence are."""
    params = seq.group.request.params
    counts_tokens = params.has_penalties or params.min_tokens > 0 or params.is_guided
    return chain_of(len(seq.drafts)) if counts_tokens else tree_of(len(seq.drafts))
