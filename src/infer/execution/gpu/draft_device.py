"""The device of a draft model or a draft head, whose turns are one captured step.

    inputs    rows, and the number of drafts of each
    turn 1    the last token of each row ──► d1      a model computes the token before it as well
    turn 2    d1 ──► d2                              a head goes on from its own output for the last token
     ...      the ids of a turn are the tokens of the next, without the host
    drafts    drafts_KS [K, S], which the next window reads in place

The turns of a tree compute all nodes at a depth together (tree_turns.py). Rows go on from the state that the
judged windows leave on the device, so turns may begin before the host has read the last window. Drafts are
guesses: no turn changes that state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from infer.cache.kv_store import KVStore
from infer.execution.device import StateShape
from infer.execution.gpu.device import GpuDevice
from infer.execution.gpu.graphs import StepSize
from infer.execution.gpu.launcher import StepLauncher
from infer.execution.gpu.readback import DRAFTING, PendingTensor, losing_device
from infer.execution.gpu.sending import send
from infer.execution.gpu.tree_turns import TreeTurn, best_ids, tree_turns
from infer.execution.head_model import HeadModel
from infer.execution.order import StepOrder
from infer.execution.trees import DraftTree
from infer.kernels.elementwise.no_tree import NO_TREE
from infer.kernels.elementwise.step_state import gather_step
from infer.kernels.elementwise.tree_nodes import next_nodes
from infer.kernels.elementwise.windows import next_turn
from infer.kernels.sampling.sample_rows import sample_rows
from infer.models.eagle3 import Guess
from infer.models.model import Network


class TurnLauncher(StepLauncher):
    """Launches the turns of rows that draft, and the steps of a draft model."""

    def __init__(
        self, model: Network, store: KVStore, shape: StateShape, *, max_batch_size: int, max_tokens: int,
        max_seq_len: int, use_cuda_graphs: bool, attention_backend: str, decode_attention_backend: str,
        num_drafts: int, tree_of: Callable[[int], DraftTree] | None,
    ) -> None:  # fmt: skip
        """`num_drafts`: the most drafts of a sequence; `tree_of`: the tree of a number; None: chains."""
        super().__init__(
            model, store, shape, max_batch_size=max_batch_size, max_tokens=max_tokens,
            max_seq_len=max_seq_len, use_cuda_graphs=use_cuda_graphs, attention_backend=attention_backend,
            decode_attention_backend=decode_attention_backend, num_drafts=num_drafts,
            has_trees=tree_of is not None,
        )  # fmt: skip
        self._tree_of = tree_of
        self._behind = int(isinstance(model, HeadModel))  # positions by which a head's row lags its token
        self._places = torch.arange(max_batch_size, device=self.device)

    @torch.inference_mode()
    def compute_logits(self, model: Network, size: StepSize) -> torch.Tensor:
        """Launch the kernels of all turns up to the last logits, or of a step that does not draft."""
        return self._compute_turns(model, size) if size.num_drafts else super().compute_logits(model, size)

    @torch.inference_mode()
    def sample_logits(self, size: StepSize, logits_SV: torch.Tensor) -> None:
        """Launch the kernels after the logits."""
        if size.has_trees:
            self._end_tree_turn(logits_SV, self._tree_turns(size)[-1], size.num_rows)
        elif size.num_drafts:
            self._end_turn(logits_SV, size.num_drafts - 1)
        else:
            super().sample_logits(size, logits_SV)

    def _compute_turns(self, model: Network, size: StepSize) -> torch.Tensor:
        """Compute all turns of rows that draft, up to the last logits."""
        rows_S = self.inputs.rows_S[: size.num_rows]
        if self.has_trees:  # tokens of the text see all earlier tokens
            self.inputs.tree_2S[:, : 2 * len(rows_S)] = NO_TREE
        hidden_SD, states_SD = self._first_turn(model, rows_S)
        logits_SV = model.logits(hidden_SD)
        for grown in self._tree_turns(size)[:-1]:
            self._end_tree_turn(logits_SV, grown, len(rows_S))
            rows_M = rows_S.repeat(grown.num_next)
            logits_SV = model.logits(self.forward(model, len(rows_M), rows_M, None, has_windows=True))
        if size.has_trees:
            return logits_SV
        for turn in range(1, size.num_drafts):
            self._end_turn(logits_SV, turn - 1)
            if isinstance(model, HeadModel):
                hidden_SD, states_SD = self._guess(model, rows_S, states_SD)
            else:
                hidden_SD = self.forward(model, len(rows_S), rows_S, None)
            logits_SV = model.logits(hidden_SD)
        return logits_SV

    def _first_turn(self, model: Network, rows_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the first turn from the state of rows: hidden states, and states for a head's next turn.

        A head has seen all tokens but the last. A model may also lack the token before the last, if all
        drafts of the last window were accepted, so it computes both.
        """
        state, num_rows, size = self.rows, len(rows_S), self.block_size
        tables_RB, before_R = state.tables_KRB[0], state.position_R - 1
        last, previous = self.inputs.turn(0, num_rows), self.inputs.turn(num_rows, 2 * num_rows)
        if isinstance(model, HeadModel):
            gather_step(rows_S, state.last_token_R, before_R, tables_RB, block_size=size, out=last)
            return self._guess(model, rows_S, None)
        gather_step(rows_S, state.last_token_R, state.position_R, tables_RB, block_size=size, out=last)
        gather_step(rows_S, state.previous_R, before_R, tables_RB, block_size=size, out=previous)
        both_S, places_C = torch.cat([rows_S, rows_S]), self._places[:num_rows]
        return self.forward(model, 2 * num_rows, both_S, None, (), places_C, has_windows=True), None

    def _guess(self, model: HeadModel, rows_S: torch.Tensor, states_SD: torch.Tensor | None) -> Guess:
        """Compute a turn of a head over the current inputs."""
        return model.guess(
            self.inputs.table_XT[0, : len(rows_S)], self.context(len(rows_S), rows_S), states_SD
        )

    def _end_turn(self, logits_SV: torch.Tensor, turn: int) -> None:
        """Sample a turn, and make its ids the tokens of the next."""
        state, num_rows = self.rows, len(logits_SV)
        rows_S, inputs = self.inputs.rows_S[:num_rows], self.inputs.turn(0, num_rows)
        positions_S = inputs.positions_S + (1 + self._behind)
        ids_S = sample_rows(logits_SV, state.sampling, rows_S, positions_S, self.scratch)
        drafts_S, size = self.drafts_KS[turn, :num_rows], self.block_size
        next_turn(rows_S, ids_S, state.tables_KRB[0], inputs, drafts_S, block_size=size)

    def _tree_turns(self, size: StepSize) -> Sequence[TreeTurn]:
        """Return the turns of trees; chains have none."""
        tree_of = self._tree_of if size.has_trees else None
        return () if tree_of is None else tree_turns(tree_of(size.num_drafts), self.device)

    def _end_tree_turn(self, logits_MV: torch.Tensor, turn: TreeTurn, num_rows: int) -> None:
        """Sample a turn of trees, and make its ids the nodes of the next."""
        state, inputs, num_next = self.rows, self.inputs, turn.num_next * num_rows
        rows_S, positions_M = inputs.rows_S[:num_rows], inputs.table_XT[1, : len(logits_MV)] + 1
        rows_M = rows_S.repeat(len(logits_MV) // num_rows)
        best_WM = best_ids(logits_MV, state.sampling, rows_M, positions_M, self.scratch, turn.num_best)
        next_nodes(
            rows_S, best_WM, turn.links_3C, state.position_R, state.tables_KRB[0], inputs.turn(0, num_next),
            inputs.tree_2S[:, :num_next], self.drafts_KS, block_size=self.block_size, depth=turn.depth,
        )  # fmt: skip


class DraftDevice(GpuDevice):
    """A model or a head that drafts for another model's device."""

    @torch.inference_mode()
    def enter(self, order: StepOrder, previous: np.ndarray) -> None:
        """Enter the rows of an order, all of which decode, and the tokens before theirs; nothing runs."""
        with losing_device(DRAFTING):
            self.rows.apply(order)
            rows_2K = send(
                torch.from_numpy(np.stack([order.rows, previous]).astype(np.int64)), self.launcher.device
            )
            self.rows.previous_R[rows_2K[0]] = rows_2K[1]

    @torch.inference_mode()
    def draft(self, rows: np.ndarray, counts: np.ndarray, are_trees: np.ndarray) -> PendingTensor:
        """Launch the turns that make `counts` drafts of the rows, each in a chain or a tree.

        Rows go on from their state, which does not change. Return the ids, a column for each row; they are
        also in `drafts_KS` until the next call. Rows with different counts, or chains next to trees, take
        several launches.
        """
        with losing_device(DRAFTING):
            parts = list[tuple[torch.Tensor, torch.Tensor]]()
            kinds = [*zip(counts.tolist(), are_trees.tolist(), strict=True)]
            for kind in sorted({*kinds}):
                group = np.array([number for number, each in enumerate(kinds) if each == kind])
                ids_KS = self._draft(rows[group], kind[0], is_tree=bool(kind[1]))
                if len(group) < len(rows):
                    parts.append((send(torch.from_numpy(group), self.launcher.device), ids_KS.clone()))
            for group_G, ids_KG in parts:
                self.drafts_KS[: len(ids_KG)].index_copy_(1, group_G, ids_KG)
            return self._readback.fetch_drafts(self.drafts_KS)

    def _draft(
        self, rows: np.ndarray, num_drafts: int, *, is_tree: bool, is_last_try: bool = False
    ) -> torch.Tensor:
        """Launch the turns of some rows; if memory runs out, of one half after the other.

        The turns of a single row are tried twice.
        """
        size = self.graphs.draft_size_for(len(rows), num_drafts, is_tree=is_tree)
        ids_KS = self.drafts_KS[:num_drafts]
        try:
            self.graphs.ensure(size)
            self.inputs.send_rows(rows, size.num_rows)
            self.graphs.forward(size)
            self.graphs.sample(size)
        except torch.OutOfMemoryError:
            if is_last_try:
                raise
            if len(rows) == 1:
                return self._draft(rows, num_drafts, is_tree=is_tree, is_last_try=True)
            half = len(rows) // 2
            second_KS = self._draft(rows[half:], num_drafts, is_tree=is_tree).clone()
            self._draft(rows[:half], num_drafts, is_tree=is_tree)
            ids_KS[:, half : len(rows)] = second_KS
        return ids_KS[:, : len(rows)]
