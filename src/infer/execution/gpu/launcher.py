"""Launches the kernels of a step: everything that a CUDA graph records.

    forward    tokens, positions and slots of the rows ──► the network ──► logits
    sample     logits ──► ids; the state of the rows advances; drafts are judged for the drafter
    follow     a draft head sees what was computed and sampled                          (head_model.py)

The kernels read their inputs at fixed addresses (step_inputs.py) and find the rest in the state of the rows
(rows.py). So a captured step is replayed without any of this code, and a step of another size runs it.

If several ranks share a model, only rank 0 samples. The ids go to the other ranks on the device, in the same
graph. Padding is computed without communication. If layers are in stages, only the last stage has logits;
other stages end with the hidden states that they pass on.

Shapes:  T tokens, S rows that decode, C tokens whose hidden states are needed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch

from infer.cache.kv_store import KVStore
from infer.config.speculation import WINDOW_TOKENS
from infer.execution.device import StateShape
from infer.execution.gpu.graphs import StepGraphs, StepSize, captured_tokens, most_tokens, short_step
from infer.execution.gpu.rows import DeviceRows
from infer.execution.gpu.step import DeviceAttention, DeviceStep, FollowedStep
from infer.execution.gpu.step_inputs import DeviceInputs
from infer.execution.head_model import HeadModel, with_drawn
from infer.kernels.attention.dense import Batch
from infer.kernels.attention.prefill import PrefillChunks, tokens_per_tile
from infer.kernels.elementwise.step_state import advance_rows, gather_step
from infer.kernels.elementwise.windows import DraftedRows, judge_windows
from infer.kernels.runtime.communicator import Pipe
from infer.kernels.runtime.device_ranks import DeviceRanks
from infer.kernels.runtime.dispatch import is_gpu
from infer.kernels.runtime.profiles import device_profile
from infer.kernels.sampling.sample_rows import SampleScratch, compile_sample_rows, sample_rows
from infer.layers.adapted import AdapterBank
from infer.layers.attention import LayerInputs
from infer.models.model import Network

logger = logging.getLogger(__name__)


class Followed(NamedTuple):
    """The facts about a sampled step that a draft head gets."""

    next_tokens_T: torch.Tensor  # the token after each token of the step
    places_C: torch.Tensor | slice  # places of the tokens at which ids were drawn
    rows_C: torch.Tensor  # rows of state of these tokens; -1: padding


class StepLauncher:
    """A model on its device, with the memory that its steps read and write."""

    def __init__(
        self, model: Network, store: KVStore, shape: StateShape, *, max_batch_size: int, max_tokens: int,
        max_seq_len: int, use_cuda_graphs: bool, attention_backend: str = "triton",
        decode_attention_backend: str = "triton", graph_bytes: int = 0, busy_tokens: int = 0,
        window_tokens: int = 0, num_drafts: int = 0, drafter: StepLauncher | None = None,
        has_trees: bool = False, adapters: AdapterBank | None = None, communicator: DeviceRanks | None = None,
        pipe: Pipe | None = None,
    ) -> None:  # fmt: skip
        """`window_tokens`: the most tokens of rows that verify drafts in a captured step.

        `num_drafts`: the most drafts of a sequence, if this device drafts. `drafter`: the device that drafts
        for it, with the same block tables; a draft head also follows its steps. `has_trees`: drafts may be
        trees. `communicator` joins the ranks that share the model; with a `pipe`, the layers are in stages.
        """
        config, device, block_size = model.config, store.device, shape.block_size
        self.model, self.store, self.device, self.block_size = model, store, device, block_size
        self.max_tokens, self.has_trees, self.adapters = max_tokens, has_trees, adapters
        self.communicator, self.pipe = communicator, pipe
        self._begun: set[StepSize] = set()  # sizes that ranks have launched before
        self.has_logits = pipe is None or pipe.stage == pipe.num_stages - 1
        self.samples = self.has_logits and (communicator is None or communicator.rank == 0)
        self.profile = profile = device_profile(device).graphs
        # a recurrent state takes the tokens of a row in order: they cannot be separate rows that decode
        self.window_tokens = window_tokens if config.delta is None else 0
        self.drafter = drafter
        self.head = drafter if drafter is not None and isinstance(drafter.model, HeadModel) else None
        self._layer_inputs = LayerInputs(())  # inputs of a step that the draft head has not seen
        tables_KRB = None if drafter is None else drafter.rows.tables_KRB
        self.rows: DeviceRows = DeviceRows(
            shape.num_rows, -(-max_seq_len // block_size), config.vocab_size, device, shape.num_tables,
            window_tokens, tables_KRB,
        )  # fmt: skip
        # the first turn of a draft model computes two tokens of each row
        max_rows = max_batch_size * (1 + (num_drafts > 0 and not isinstance(model, HeadModel)))
        max_rows = max(max_rows, WINDOW_TOKENS if num_drafts and has_trees else window_tokens)
        self.drafts_KS = torch.zeros((num_drafts, max_batch_size), dtype=torch.int64, device=device)
        self.scratch = SampleScratch(max_rows + profile.max_chunks, config.vocab_size, device)
        self.attention = DeviceAttention(
            config, store, (attention_backend, decode_attention_backend), block_size, max_rows=max_rows,
            max_tokens=max_tokens, max_len=max_seq_len,
        )  # fmt: skip
        self._wait_for_sampler = compile_sample_rows(self.rows.sampling, self.scratch, store.dtype)
        fewest = min((count for count, _ in config.kv_heads), default=config.num_kv_heads)
        tile_len = tokens_per_tile(config.num_heads, fewest)
        graph_tokens = max_tokens if use_cuda_graphs else 0
        largest = captured_tokens(config, graph_tokens, busy_tokens, profile)
        self.inputs = DeviceInputs(
            max_rows, max_tokens, largest, tile_len, device, num_tables=shape.num_tables,
            max_chunks=profile.max_chunks,
        )  # fmt: skip
        self.graphs = StepGraphs(
            partial(self.compute_logits, model), self.sample_logits, self.inputs.blank,
            follow=None if self.head is None else self.follow_sized, max_rows=max_batch_size,
            max_tokens=most_tokens(config, graph_tokens, profile),
            short_step=short_step(config, graph_tokens, busy_tokens, profile),
            pool_bytes=graph_bytes, captures=use_cuda_graphs and is_gpu(device),
            window_tokens=self.window_tokens, has_adapters=adapters is not None, num_drafts=num_drafts,
            drafts_trees=bool(num_drafts) and has_trees, profile=profile,
        )  # fmt: skip
        self.graphs.is_agreed = communicator is None

    def wait_for_compilers(self) -> None:
        """Wait for the compilers; raise ConfigError if the attention asked for cannot be compiled."""
        self.attention.wait()
        self._wait_for_sampler()

    def ensure(self, size: StepSize) -> bool:
        """Capture a size if it is not captured yet, and meet the other ranks before its first step.

        On a shared GPU, the driver may load no kernels for a rank while another rank's kernel waits for it.
        """
        is_captured = self.graphs.ensure(size)
        if self.communicator is not None and size not in self._begun:
            self._begun.add(size)
            self.communicator.gather_bytes(bytes(1))
        return is_captured

    def agree(self) -> None:
        """Keep the captured steps that all ranks have; every rank must call this."""
        if self.communicator is not None:
            self.graphs.agree(self.communicator.gather_bytes)

    def alone(self) -> AbstractContextManager[None]:
        """Let this rank compute padding without the other ranks."""
        return nullcontext() if self.communicator is None else self.communicator.alone()

    @torch.inference_mode()
    def compute_logits(self, model: Network, size: StepSize) -> torch.Tensor:
        """Launch the kernels of a step of this size up to its logits; all inputs are on the device."""
        inputs, num_rows, tiles, places_C = self.inputs, size.num_rows, None, None
        rows_S = inputs.rows_S[:num_rows]
        if size.has_windows:  # codes in windows stand for drafts
            drafts_D = inputs.following_T if self.drafter is None else self.drafter.drafts_KS.flatten()
            state = (self.drafter or self).rows
            drafted = DraftedRows(state.last_token_R, state.position_R, self.rows.tables_KRB, self.block_size)
            inputs.unpack_window(num_rows, drafts_D, drafted)
        else:
            self.gather(rows_S)
        if size.num_tokens:
            tiles = inputs.tiles(size.num_tokens)
            places_C = inputs.samples_3C[0, : num_rows + self.profile.max_chunks]
        hidden_SD = self.forward(
            model, num_rows + size.num_tokens, rows_S, tiles, (), places_C, has_windows=size.has_windows,
            has_adapters=size.has_adapters,
        )  # fmt: skip
        return self.logits(model, hidden_SD)

    def gather(self, rows_S: torch.Tensor) -> None:
        """Gather the tokens, positions, slots and lengths of rows that decode from their state."""
        state, size, decode = self.rows, self.block_size, self.inputs.decode(len(rows_S))
        if len(rows_S):
            tokens_R, position_R = state.last_token_R, state.position_R
            for tables_RB, out in zip(state.tables_KRB, decode, strict=True):
                gather_step(rows_S, tokens_R, position_R, tables_RB, block_size=size, out=out)

    def forward(
        self, model: Network, num_tokens: int, rows_S: torch.Tensor, tiles: PrefillChunks | None,
        batches: Sequence[Batch] = (), places_C: torch.Tensor | None = None, *, has_windows: bool = False,
        has_adapters: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """Return the hidden states of all tokens, or of the tokens at `places_C`."""
        step = self.context(num_tokens, rows_S, tiles, batches, has_windows=has_windows)
        step.logit_indices = places_C
        if self.head is not None:
            assert isinstance(self.head.model, HeadModel)
            layers = self.head.model.captured_layers
            if model is not self.model:  # a view with few layers, which computes padding
                layers = (0,) * len(layers)
            self._layer_inputs = step.layer_inputs = LayerInputs(layers)
        if self.adapters is not None:
            self.adapters.begin(self.inputs.adapters_T[:num_tokens] if has_adapters else None)
            step.on_select = self.adapters.select
        hidden_CD: torch.Tensor = model(self.inputs.table_XT[0, :num_tokens], step)
        return hidden_CD

    def context(
        self, num_tokens: int, rows_S: torch.Tensor, tiles: PrefillChunks | None = None,
        batches: Sequence[Batch] = (), *, has_windows: bool = False,
    ) -> DeviceStep:  # fmt: skip
        """Return the context of a step over the current inputs."""
        inputs, attention, num_rows = self.inputs, self.attention, len(rows_S)
        step = DeviceStep(
            self.store, self.rows.tables_KRB, attention.work, block_size=self.block_size,
            positions_T=inputs.table_XT[1, :num_tokens], slots_KT=inputs.table_XT[2:, :num_tokens],
            rows_S=rows_S, lens_S=inputs.lens_S[:num_rows], chunks=tiles, windows=attention.windows,
            dense=(attention.dense, batches) if attention.dense and batches else None,
            backend=attention.backend, has_shared_rows=has_windows,
            tree_2S=inputs.tree_2S[:, :num_rows] if has_windows and self.has_trees else None,
        )  # fmt: skip
        step.rows = rows_S
        return step

    def logits(self, model: Network, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Return the logits [S, V]; if a later stage has them, the hidden states, which nothing reads."""
        return model.logits(hidden_SD) if self.has_logits else hidden_SD

    @torch.inference_mode()
    def sample_logits(self, size: StepSize, logits_SV: torch.Tensor) -> None:
        """Launch the kernels after the logits: sample the rows of the step and advance their state."""
        inputs, num_rows = self.inputs, size.num_rows
        if size.num_tokens:
            num_samples = num_rows + self.profile.max_chunks
            _, rows_C, positions_C = inputs.samples_3C[:, :num_samples].unbind()
            self.sample_rows(logits_SV, rows_C, positions_C)
            return
        rows_S, positions_S = inputs.rows_S[:num_rows], inputs.table_XT[1, :num_rows]
        if size.has_windows:  # the host says how rows with drafts go on
            sampled_S, advanced_S = inputs.window(num_rows)[2:4].int()
            ids_S = self.sample_rows(logits_SV, sampled_S, positions_S + 1, advanced_S)
            if self.drafter is not None:
                self._judge(self.drafter, rows_S, ids_S)
        else:  # a sampled token's position is one after its input's
            self.sample_rows(logits_SV, rows_S, positions_S + 1)

    def sample_rows(
        self, logits_SV: torch.Tensor, rows_S: torch.Tensor, positions_S: torch.Tensor,
        advanced_S: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Sample a token for each row at its position, and advance the state of the rows.

        `advanced_S`: the rows to advance instead; -1: none.
        """
        state, rows_S, positions_S = self.rows, rows_S.int(), positions_S.contiguous()
        ids_S = self.scratch.ids_S[: len(rows_S)]
        if self.samples:
            ids_S = sample_rows(logits_SV, state.sampling, rows_S, positions_S, self.scratch)
        if self.communicator is not None and self.has_logits:  # other stages await them
            self.communicator.first(ids_S)
        advanced_S = rows_S if advanced_S is None else advanced_S
        advance_rows(advanced_S, ids_S, positions_S, state.last_token_R, state.position_R, state.sampling)
        return ids_S

    def _judge(self, drafter: StepLauncher, rows_S: torch.Tensor, ids_S: torch.Tensor) -> None:
        """Advance the drafter's rows to the accepted ids, and move the accepted paths of trees."""
        inputs, state = self.inputs, drafter.rows
        tokens_S, positions_S, slots_S = inputs.table_XT[:3, : len(ids_S)]
        decided_S, tree_2S = inputs.window(len(ids_S))[-1], inputs.tree_2S[:, : len(ids_S)]
        sources_S = places_S = slots_S
        if self.has_trees:  # padding copies the first token, which never moves, onto itself
            places_S = torch.where(slots_S < 0, slots_S[:1], slots_S).clamp(min=0)
            sources_S = places_S.clone()
        judge_windows(
            rows_S, tokens_S, positions_S, ids_S, decided_S, tree_2S, slots_S,
            state.last_token_R, state.previous_R, state.position_R, sources_S,
        )  # fmt: skip
        for store in (self.store, drafter.store) if self.has_trees else ():
            store.move_slots(torch.stack([sources_S, places_S]))

    @torch.inference_mode()
    def follow_sized(self, size: StepSize) -> None:
        """Launch the kernels that let a draft head see the last sampled step, which has this size."""
        inputs, num_rows = self.inputs, size.num_rows
        if not size.num_tokens:
            self.follow(
                lambda: Followed(self.scratch.ids_S[:num_rows], slice(None), inputs.rows_S[:num_rows])
            )
            return
        places_C, rows_C, _ = inputs.samples_3C[:, : num_rows + self.profile.max_chunks].unbind()
        ids_C, given_P = self.scratch.ids_S[: len(rows_C)], inputs.following_T[num_rows:][: size.num_tokens]
        self.follow(
            lambda: Followed(torch.cat([ids_C[:num_rows], with_drawn(given_P, ids_C)]), places_C, rows_C)
        )

    def follow(self, followed: Callable[[], Followed]) -> None:
        """Let the draft head see the last sampled step; if memory runs out, it only guesses worse."""
        inputs, self._layer_inputs = self._layer_inputs, LayerInputs(())
        if self.head is None:
            return
        network, table_XT = self.head.model, self.inputs.table_XT
        assert isinstance(network, HeadModel)
        try:
            next_tokens_T, places_C, rows_C = followed()
            num_tokens = len(next_tokens_T)
            step = FollowedStep(self.head.store, table_XT[1, :num_tokens], table_XT[2:, :num_tokens])
            network.follow(next_tokens_T, inputs.states(num_tokens), step, places_C, rows_C)
        except torch.OutOfMemoryError:  # the rows have advanced, so the step cannot be run again
            if is_gpu(self.device) and torch.cuda.is_current_stream_capturing():
                raise
            logger.debug("the draft head missed a step: it ran out of memory")

    def follow_padding(self, num_tokens: int) -> None:
        """Let the draft head see a step of padding, whose forward was launched last."""
        zeros_T = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        self.follow(lambda: Followed(zeros_T, zeros_T[:1], zeros_T[:1] - 1))
