"""A draft model that drafts trees: each turn computes all nodes so far and draws the best ids after each.

    turn    computes                     draws, after the newest nodes
    0       the missed tokens: t8 t9     three guesses of t10: a b c          (shapes: speculative/tree.py)
    1       t9 | a b c                   three after a, three after b, ..     as many as the tree has
    2       t9 | a b c, aa ab ba         and so on, until the tree is deep enough

Its orders are windows like the target model's, with the same masks and slots, so a draft model needs no extra
code for trees. Each turn computes the earlier nodes again, which takes hardly longer than the newest alone.
Only the main line of a window stays in its cache: its keys and values lie where a chain's would.

On a GPU all turns are one graph, as for a chain (execution/gpu/tree_turns.py), and a turn computes the newest
nodes alone. The device also verifies trees and moves keys and values of the accepted path in both models, so
turns begin before the host knows which path was accepted. All sequences of a step then use the first nodes of
one tree, as many as they have places for.

Ids are drawn with the noise of the sequence, as in a chain (draft_model.py): where the two models agree, the
best id is the one that the target model samples.

A sequence whose logits depend on all earlier tokens (penalties, masks) gets a chain: devices keep these
counts per row, not per path.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from infer.config.speculation import MAX_DRAFTS, WINDOW_TOKENS
from infer.engine.draft_model import DraftModel
from infer.engine.host_half import HostHalf
from infer.execution.trees import DraftTree, main_line
from infer.scheduling.sequence import Sequence
from infer.speculative.tree import WIDTH, chain_of, tree_of


class TreeModel(DraftModel):
    """Drafts trees with a second model next to the target model. One engine thread owns it."""

    def _new_host(self) -> HostHalf:
        """Return a host half; if each turn is an order, the order draws several ids after each token."""
        return HostHalf(self._state, is_draft=True, num_best=0 if self.is_late else WIDTH)

    def go_on(self, sequences: Seq[Sequence], counts: Seq[int], *, verifies: bool) -> None:
        """Draft for the next window of these sequences; the step that verifies it is not launched yet."""
        super().go_on(sequences, counts, verifies=False)

    def _is_tree(self, seq: Sequence) -> bool:
        """True if the logits of a sequence do not depend on counts of its earlier tokens."""
        params = seq.group.request.params
        return not (params.has_penalties or params.min_tokens > 0 or params.is_guided)

    def _tree_for(self, seq: Sequence, num_drafts: int) -> DraftTree:
        """Return the shape of a sequence's drafts."""
        return (tree_of if self._is_tree(seq) else chain_of)(num_drafts)

    def _shape(self, seq: Sequence, num_drafted: int) -> None:
        """Set the tree shape of a sequence's drafts: the first nodes of a larger tree."""
        seq.draft_backs = self._tree_for(seq, num_drafted).backs[: len(seq.drafts)]

    def _run_turns(self, sequences: Seq[Sequence]) -> None:
        """Launch and read the turns one by one."""
        self._most_behind = min(MAX_DRAFTS, WINDOW_TOKENS // len(sequences))  # a turn is one window
        places = [seq.drafts for seq in sequences]
        trees = [self._tree_for(seq, len(seq.drafts)) for seq in sequences]
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

    def _read_turns(self) -> list[list[int]]:
        """Return the drafts; `_run_turns` has read them already."""
        return [list(seq.drafts) for seq in self._sequences]

    def _note_text(self, seq: Sequence, drafts: list[int]) -> None:
        """Record the main line as computed: its keys and values lie where a chain's would."""
        super()._note_text(seq, drafts[: main_line(seq.draft_backs)])

    def _turn(
        self,
        turn: int,
        sequences: Seq[Sequence],
        trees: Seq[DraftTree],
        starts: Seq[int],
        found: list[list[int]],
    ) -> None:
        """Compute the nodes up to the depth `turn`, and draw the nodes one level deeper."""
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
