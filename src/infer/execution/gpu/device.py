"""The device half of a GPU: state stays on the device, steps are launched now and waited for later.

    run      transfers, differences of state, then one of
               sized     rows that decode and few given tokens, padded: a CUDA graph          (graphs.py)
               windows   rows that verify drafts: each token is a row that decodes, also in a graph
               ragged    anything else: the same kernels, launched one by one
             and a copy of the sampled ids to pinned memory, followed by an event;
             an order that awaits masks is sampled when the masks are there                   (masks.py)
             a step that runs out of memory is run in halves                                  (halves.py)
             a draft head sees what was computed and sampled, unless it may skip the step  (head_model.py)
    wait     for that event; ids become a `StepResult`                                        (readback.py)

No step reads anything back, so the engine may plan and launch the next steps before it waits for this one:
their tokens are on the device. If ids decide what runs next (forks, beams), the host samples the step, and
the engine does not overlap steps. For drafts, the device draws the ids and the host judges them. The number
of accepted ids decides what the next step computes, so the host says how a verifying row goes on. Only its
drafter goes on from the device's state: the device judges, too, and the next turns of drafting begin before
the host has read the step (engine/draft_model.py).

warm_up.py prepares what the first step needs: compiled kernels, captured graphs.

If several ranks share a model, rank 0 has the engine. It sends each order before it launches it, and the
other ranks launch their parts (`compute_part`). Only rank 0 samples. The ids go to the other ranks on the
device, in the same graph, so the other ranks run ahead, too. Padding is computed without communication. If
layers are in stages, only the last stage has logits; other stages end with the hidden states that they pass
on. A step with many tokens is split into as many parts as there are stages, so that all stages work at the
same time. A stage receives the ids of a part only when its rows need them, in the next step.

On a CPU the same code runs on the kernels' references, which is how it is tested without a GPU.

Shapes:  T tokens, S rows that decode, C tokens whose hidden states are needed.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from infer.cache.kv_store import KVStore
from infer.config.speculation import WINDOW_TOKENS
from infer.errors import DeviceLost
from infer.execution.device import Pending, PendingStep, StateShape, StepResult, no_rows
from infer.execution.embedding import Pooled, pool_hidden
from infer.execution.gpu.graphs import StepGraphs, StepSize, captured_tokens, most_tokens, short_step
from infer.execution.gpu.lanes import fill_lanes
from infer.execution.gpu.late_drafts import LateDrafts
from infer.execution.gpu.rare_orders import rare_orders
from infer.execution.gpu.readback import Asked, Drawn, PendingIds, PendingTensor, Readback, drawn_by
from infer.execution.gpu.rows import DeviceRows, padded_tokens
from infer.execution.gpu.sending import send
from infer.execution.gpu.step import DeviceStep, FollowedStep, choose_backend, compile_backend
from infer.execution.gpu.step_inputs import DeviceInputs, Prompts, mark_ends
from infer.execution.halves import MAX_PARTS, SmallerSteps, parts_of, run_parts
from infer.execution.head_model import HeadModel, drawn_places, following_tokens, kept_ids, with_drawn
from infer.execution.host_sampling import HostSampler, Judge, PromptTable
from infer.execution.layout import needed_tokens
from infer.execution.order import (
    AWAITS_MASKS,
    DECODE,
    NO_MASKS,
    NONE,
    ON_HOST,
    READS_PROMPTS,
    REPEATS,
    UNSEEN,
    VERIFY,
    StepMasks,
    StepOrder,
    to_bytes,
)
from infer.execution.rank_ring import RankMessage, whole_group
from infer.execution.trees import branched_rows, main_line, nodes_of
from infer.kernels.attention.choice import PROMPT_WAYS, PromptProblem
from infer.kernels.attention.decode_work import DecodeWork
from infer.kernels.attention.dense import Batch, DenseAttention
from infer.kernels.attention.prefill import PrefillChunk, PrefillChunks, tokens_per_tile
from infer.kernels.elementwise.step_state import advance_rows, gather_step
from infer.kernels.elementwise.windows import FIRST_CODE, DraftedRows, judge_windows
from infer.kernels.runtime.choice import choose
from infer.kernels.runtime.communicator import Pipe, RankGroup
from infer.kernels.runtime.device_ranks import DeviceRanks
from infer.kernels.runtime.dispatch import is_gpu
from infer.kernels.runtime.profiles import device_profile
from infer.kernels.sampling.sample_rows import SampleScratch, compile_sample_rows, sample_rows
from infer.layers.adapted import AdapterBank
from infer.layers.attention import LayerInputs
from infer.models.model import Network

logger = logging.getLogger(__name__)

DRAFTING = "while drafts were made"  # the place, besides a step, where a device may fail
MIN_PART = 64  # fewest tokens of a part of a step: fewer tokens take as long

Sampler = Callable[[StepMasks], Pending]  # launches the second part of a step, after its forward


class Followed(NamedTuple):
    """The facts about a sampled step that a draft head gets."""

    next_tokens_T: torch.Tensor  # the token after each token of the step
    places_C: torch.Tensor | slice  # places of the tokens at which ids were drawn
    rows_C: torch.Tensor  # rows of state of these tokens; -1: padding


class DecodedRows(NamedTuple):
    """The rows of a step in which all rows decode."""

    rows: np.ndarray
    size: StepSize
    ids_S: torch.Tensor  # memory of their sampled ids
    has_logprobs: bool  # True: some rows ask for logprobs


class EarlyWindow(NamedTuple):
    """A step that verifies drafts, launched before the host knew the tokens before them."""

    rows: list[int]
    num_sampled: list[int]  # ids of each row
    ids_KS: PendingTensor  # drafts that it verifies
    decided: dict[int, int]  # number of kept ids by row, if chance decides
    ids: PendingIds


class AwaitedIds(NamedTuple):
    """The ids of a step that a later stage draws, and the rows that go on from them."""

    rows: np.ndarray
    positions: np.ndarray  # positions of the ids in their sequences
    places: np.ndarray  # places of the rows' ids among the ids that arrive
    num_ids: int  # ids that arrive, including padding


class GpuDevice:
    """A model whose decode state lives on its device."""

    can_embed = True

    def __init__(
        self,
        model: Network,
        store: KVStore,
        shape: StateShape,
        *,
        max_batch_size: int,
        max_tokens: int,
        max_seq_len: int,
        use_cuda_graphs: bool,
        attention_backend: str = "triton",
        decode_attention_backend: str = "triton",
        steps_ahead: int = 1,
        graph_bytes: int = 0,
        busy_tokens: int = 0,
        window_tokens: int = 0,
        num_drafts: int = 0,
        drafter: GpuDevice | None = None,
        has_trees: bool = False,
        adapters: AdapterBank | None = None,
        ranks: RankGroup | None = None,
        communicator: DeviceRanks | None = None,
        pipe: Pipe | None = None,
    ) -> None:
        """`window_tokens`: the most tokens of rows that verify drafts in a captured step.

        `num_drafts`: the most drafts of a sequence, if this device drafts. `drafter`: the device that drafts
        for it, with the same block tables; a draft head also follows its steps. `has_trees`: drafts may be
        trees. `communicator` joins the ranks that share the model; `ranks` get each order from rank 0. With
        a `pipe`, the layers are in stages.
        """
        self._adapters, self._has_trees = adapters, has_trees
        self._ranks, self._communicator = ranks, communicator
        self._num_parts = 1 if pipe is None else min(pipe.num_stages, MAX_PARTS)
        self._awaited: deque[AwaitedIds] = deque()  # ids on their way from the last stage
        self._begun: set[StepSize] = set()  # sizes that ranks have launched before
        self._has_logits = pipe is None or pipe.stage == pipe.num_stages - 1
        self._samples = self._has_logits and (communicator is None or communicator.rank == 0)
        config, device, block_size = model.config, store.device, shape.block_size
        self.model, self.store, self.device, self._block_size = model, store, device, block_size
        self.max_tokens, self.backend = max_tokens, attention_backend
        self.profile = profile = device_profile(device).graphs
        max_blocks = -(-max_seq_len // block_size)
        # a recurrent state takes the tokens of a row in order: they cannot be separate rows that decode
        self.window_tokens = window_tokens if config.delta is None else 0
        is_head = isinstance(model, HeadModel)
        self.drafter = drafter
        self.head = drafter if drafter is not None and isinstance(drafter.model, HeadModel) else None
        self._layer_inputs = LayerInputs(())  # inputs of a step that the draft head has not seen
        self.rows: DeviceRows = DeviceRows(
            shape.num_rows,
            max_blocks,
            config.vocab_size,
            device,
            shape.num_tables,
            window_tokens,
            None if drafter is None else drafter.rows.tables_KRB,
        )
        self._sampler = HostSampler(model, self.rows.book, send)
        # the first turn of a draft model computes two tokens of each row
        max_rows = max_batch_size * (1 + (num_drafts > 0 and not is_head))
        max_rows = max(max_rows, WINDOW_TOKENS if num_drafts and has_trees else window_tokens)
        self.drafts_KS = torch.zeros((num_drafts, max_batch_size), dtype=torch.int64, device=device)
        self._scratch = SampleScratch(max_rows + profile.max_chunks, config.vocab_size, device)
        backends = attention_backend, decode_attention_backend
        chosen = choose_backend(backends, config, store, block_size)
        # compilers start here, and run in the background until `wait_for_compilers`
        pool = ThreadPoolExecutor(1, "compile-attention")
        self._decode_backend = pool.submit(compile_backend, chosen, config, store, block_size, max_rows)
        pool.shutdown(wait=False)
        self._wait_for_sampler = compile_sample_rows(self.rows.sampling, self._scratch, store.dtype)
        attending = [layer for layer in range(config.num_layers) if not config.has_state(layer)]
        self._windows = tuple(dict.fromkeys(map(config.window, attending)))
        self.work = DecodeWork(
            max_rows=max_rows,
            max_len=max_seq_len,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            device=device,
            backend=chosen,
        )
        fewest = min((count for count, _ in config.kv_heads), default=config.num_kv_heads)
        tile_len = tokens_per_tile(config.num_heads, fewest)
        largest = captured_tokens(config, max_tokens, busy_tokens, profile) if use_cuda_graphs else 0
        self.inputs = DeviceInputs(
            max_rows,
            max_tokens,
            largest,
            tile_len,
            device,
            num_tables=shape.num_tables,
            max_chunks=profile.max_chunks,
        )
        self._readback = Readback(
            max_rows + profile.max_chunks,
            device,
            steps_ahead=(steps_ahead + 2) * self._num_parts - 2,
            drafts_KS=self.drafts_KS,
        )
        self._late: LateDrafts | None = None  # drafts of the next order, not yet on the host
        self._early: EarlyWindow | None = None  # a step that ran early, if the next order turns out to be it
        self._has_chance = False  # True: chance decides which drafts are kept
        self.has_judged = False  # True: the drafter can go on from the last step without the host
        self._decoded: DecodedRows | None = None  # rows of the last step, if all of them decoded
        self.dense: DenseAttention | None = None
        sees_all = self._windows == (None,) and config.delta is None and config.has_plain_scores
        longest = PromptProblem(
            min(max_tokens, max_seq_len), config.num_heads, config.head_dim, store.dtype, attention_backend,
            device_profile(device).attention,
            no_cudnn="" if sees_all else "for models whose layers all see all positions, with plain scores",
        )  # fmt: skip
        if choose(PROMPT_WAYS, longest) == "cudnn":
            self.dense = DenseAttention(
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                scale=config.scale,
                dtype=store.dtype,
                device=device,
                max_tokens=max_tokens,
                max_len=max_seq_len,
            )
        self._smaller = SmallerSteps(self.run_half, can_repeat=config.delta is None)
        self.arena: object = None  # the owner of the memory of steps, if there is one
        self._host_chunks: tuple[PrefillChunk, ...] = ()  # chunks for the reference of prefill attention
        self.graphs = StepGraphs(
            partial(self.compute_logits, model),
            self.sample_logits,
            self.inputs.blank,
            follow=None if self.head is None else self.follow_sized,
            max_rows=max_batch_size,
            max_tokens=most_tokens(config, max_tokens, profile) if use_cuda_graphs else 0,
            short_step=short_step(config, max_tokens, busy_tokens, profile) if use_cuda_graphs else 0,
            pool_bytes=graph_bytes,
            captures=use_cuda_graphs and is_gpu(device),
            window_tokens=self.window_tokens,
            has_adapters=adapters is not None,
            num_drafts=num_drafts,
            drafts_trees=bool(num_drafts) and has_trees,
            profile=profile,
        )
        self.graphs.is_agreed = communicator is None

    def wait_for_compilers(self) -> None:
        """Wait for the compilers; raise ConfigError if the attention asked for cannot be compiled."""
        self.work.backend = self._decode_backend.result()
        self._wait_for_sampler()

    def expect(self, late: LateDrafts | None) -> None:
        """Set the drafts of the next order, which lacks them; None: the order has its drafts."""
        self._late = late

    def use_judge(self, judge: Judge) -> None:
        """Replace the rule that judges drafts by one that ignores the drawn ids, for benchmarks."""
        self._sampler.judge = self._readback.judge = judge
        self._has_chance = True

    def _decided(self, num_sampled: list[int]) -> dict[int, int]:
        """Return the number of ids that each row with drafts keeps, if chance decides, for the device."""
        if not self._has_chance:
            return {}
        judge = self._readback.judge
        return {n: judge((), range(count - 1)) for n, count in enumerate(num_sampled) if count > 1}

    @property
    def attention(self) -> tuple[str, str]:
        """The backends that compute attention of prompts, and of rows that decode."""
        prompts = "cudnn+triton" if self.dense is not None else self.backend.replace("auto", "triton")
        return prompts, self.work.backend.replace("auto", "cuda+triton")

    # -- one step -----------------------------------------------------------------------------------

    def run(self, order: StepOrder) -> PendingStep:
        """Launch a step, as the module's docstring describes."""
        if self._ranks is None:
            return self._run(order)
        with whole_group(self._ranks, order.step):
            if self._late is not None:  # the other ranks need all drafts in the order
                self._late.read(order)
                self._late = None
            self._ranks.send(RankMessage.ORDER, to_bytes(order))
            parts = self._parts(order)
            if len(parts) == 1:
                return self._run(order)
            steps = [self._run(part, is_part=True) for _, part in parts]
            self._decoded = None  # rows of a part
            pending = self._joined(order.step, partial(_wait_for_parts, parts, steps, order.num_rows))
            return PendingStep(order.flags, lambda masks: pending, self._mask_memory)

    def compute_part(self, order: StepOrder) -> None:
        """Launch an order as a rank other than 0."""
        parts = self._parts(order)
        for _, part in parts:
            step = self._run(part)
            if order.flags & AWAITS_MASKS:  # rank 0 has the masks
                step.masks(0)
                step.sample((), ())
        if len(parts) > 1:
            self._decoded = None  # rows of a part

    def _parts(self, order: StepOrder) -> list[tuple[int, StepOrder]]:
        """Split an order into parts, which stages compute at the same time; all ranks split alike.

        Half of a small step takes as long as all of it. Masks, drafts and ids of the host need a whole step.
        """
        is_plain = not order.flags & (AWAITS_MASKS | ON_HOST | READS_PROMPTS) and VERIFY not in order.kinds
        count = min(self._num_parts, order.num_tokens // MIN_PART)
        if not is_plain or count < 2:
            return [(0, order)]
        (_, first), *rest = parts_of(order, count, cuts_rows=self.model.config.delta is None)
        return [(0, first._replace(transfers=order.transfers)), *rest]

    def agree(self) -> None:
        """Keep the captured steps that all ranks have; every rank must call this."""
        if self._communicator is not None:
            self.graphs.agree(self._communicator.gather_bytes)

    def alone(self) -> AbstractContextManager[None]:
        """Let this rank compute padding without the other ranks."""
        return nullcontext() if self._communicator is None else self._communicator.alone()

    def _run(self, order: StepOrder, *, is_part: bool = False) -> PendingStep:
        late, self._late = self._late, None  # these drafts are for this order only, even if it fails
        early, self._early = self._early, None
        self.graphs.is_replaying = self.has_judged = False
        try:
            if len(order.transfers):
                self.store.transfer(order.moves())
                if self.head is not None:
                    self.head.store.transfer(order.moves())
            try:
                sample = self._start(order, late, None if len(order.transfers) else early)
            except torch.OutOfMemoryError as error:  # halves run later, when the masks are there
                sample = _raising(error.with_traceback(None))
        except torch.AcceleratorError as error:
            raise DeviceLost.of(f"in step {order.step}", error) from error
        memory = self._host_memory if order.flags & ON_HOST else self._mask_memory
        launch = partial(self._launch_own if is_part else self._launch_sampler, order, late, sample)
        return PendingStep(order.flags, launch, memory, in_graph=self.graphs.is_replaying)

    def path_of(self, order: StepOrder) -> str:
        """Describe how this order is computed, for people."""
        size = None
        if not order.flags & (ON_HOST | READS_PROMPTS):
            size = self._window_of(order) if VERIFY in order.kinds else self._size_of(order)
        if size is None or not self.graphs.is_captured(size):
            return "kernel by kernel"
        tokens = f" and {size.num_tokens} prompt tokens" if size.num_tokens else ""
        return f"CUDA graph for {size.num_rows} rows{tokens}"

    def _launch_sampler(
        self, order: StepOrder, late: LateDrafts | None, sample: Sampler, masks: StepMasks
    ) -> Pending:
        """Launch the second part of a step; if memory runs out, run the step in halves instead."""
        if self._ranks is None:
            return self._launch_own(order, late, sample, masks)
        with whole_group(self._ranks, order.step):
            pending = self._launch_own(order, late, sample, masks)
        return self._joined(order.step, pending)

    def _joined(self, step: int, pending: Pending) -> Pending:
        """Return the result of a step for rank 0, which waits until all ranks have computed it."""

        def wait() -> StepResult:
            assert self._ranks is not None
            with whole_group(self._ranks, step):
                self._ranks.expect()
                result = pending()
                self._ranks.check()
            return result

        return wait

    def _launch_own(
        self, order: StepOrder, late: LateDrafts | None, sample: Sampler, masks: StepMasks
    ) -> Pending:
        try:
            try:
                if order.flags & AWAITS_MASKS and not order.flags & ON_HOST and VERIFY not in order.kinds:
                    self.rows.masks.send(order.rows[np.asarray(masks.numbers, dtype=np.int64)])
                return sample(masks)
            except torch.OutOfMemoryError as error:  # nothing of it has been sampled
                if self._communicator is not None:  # the other ranks do not know of halves
                    raise
                if late is not None:
                    late.read(order)  # the halves need their drafts
                self._readback.settle()  # the halves reuse the buffers of steps that have not been read
                kept = masks._replace(lines_KW=masks.lines_KW.copy())  # the halves reuse the masks' memory
                result = self._smaller.run(order, kept, error)
                self._decoded = None  # rows of a half, and the next order may repeat the whole
                masks.lines_KW[:] = kept.lines_KW  # the engine still reads them
                return lambda: result
        except torch.AcceleratorError as error:
            raise DeviceLost.of(f"in step {order.step}", error) from error

    def rare_orders(self) -> Iterator[tuple[StepOrder, StepMasks]]:
        """Yield orders of padding that use what few requests ask for.

        Several ranks get none, because they sample together, and neither do draft models, which only draft.
        """
        if self._ranks is None and self._communicator is None and not len(self.drafts_KS):
            num_tables, num_rows, _ = self.rows.tables_KRB.shape
            found = zip(self.store.tables, self.store.states, strict=True)
            state_rows = sorted({table * num_rows for table, state in found if state is not None})
            yield from rare_orders(num_tables, state_rows, self.rows.masks.num_words)

    def run_half(self, order: StepOrder, masks: StepMasks) -> StepResult:
        """Run a part of a step, or an order of padding, and wait for it."""
        step = self.run(order)
        if order.flags & AWAITS_MASKS:
            step.masks(len(masks.numbers))[:] = masks.lines_KW
            step.sample(masks.numbers, masks.positions)
        return step.wait()

    def _mask_memory(self, count: int) -> np.ndarray:
        """Return pinned memory for masks; wait for earlier steps, whose samplers fetch the same lines."""
        with losing_device("before masks were filled"):
            self._readback.arrive()
        return self.rows.masks.take(count)

    def _host_memory(self, count: int) -> np.ndarray:
        """Return memory for the masks of a step that the host samples, with up to one for each position."""
        return np.empty((count, self.rows.masks.num_words), dtype=np.int32)

    def _start(self, order: StepOrder, late: LateDrafts | None, early: EarlyWindow | None) -> Sampler:
        """Launch a step up to its logits; return the function that launches the rest."""
        decoded, self._decoded = self._decoded, None
        if decoded is not None and order.flags & REPEATS:
            if self._awaited:
                self._go_on(order)
            self.rows.apply_tables(order)
            self._clear_masks(order)
            return self._start_decode(order, decoded, are_sent=self.inputs.has_rows)
        with torch.inference_mode():
            if self._awaited:
                self._go_on(order)
            self.rows.apply(order)
            if not order.num_rows:  # returning beams compute their next tokens together, when all are back
                return lambda masks: no_rows
            self._clear_masks(order)
            is_verified, runs_plain = VERIFY in order.kinds, not order.flags & (ON_HOST | READS_PROMPTS)
            window = self._window_of(order) if is_verified and runs_plain else None
            if window is not None:
                found = self._find_early(order, window, late, early)
                return self._start_window(order, window, late) if found is None else found
            assert not len(order.backs), "trees are windows"
            if late is not None:
                late.read(order)
            size = None if is_verified or not runs_plain else self._size_of(order)
            if size is None:
                return self._start_ragged(order)
            if size.num_tokens:
                return self._start_mixed(order, size)
            has_logprobs = int(self.rows.num_logprobs[order.rows].max()) != NONE
            rows = order.rows.copy()  # the next order may overwrite this one
            decoded = DecodedRows(rows, size, self._scratch.ids_S[: order.num_rows], has_logprobs)
            return self._start_decode(order, decoded, are_sent=False)

    def _await_ids(
        self, rows: np.ndarray, positions: np.ndarray, places: np.ndarray, num_ids: int
    ) -> Pending:
        """Remember rows that go on from ids of a later stage, which are received when a row needs them."""
        assert self._communicator is not None
        self._awaited.append(AwaitedIds(rows, positions, places, num_ids))
        self._communicator.pass_ids(self._scratch.ids_S)
        return no_rows

    def _read_back(
        self, order: StepOrder, ids_S: torch.Tensor, num_rows: int, asked: Asked | None
    ) -> PendingIds:
        """Start to copy the ids of a step to the host, and to the stages that await them."""
        if self._communicator is not None:
            self._communicator.pass_ids(self._scratch.ids_S)
        return self._readback.take(order.step, ids_S, num_rows, asked)

    @torch.inference_mode()
    def _go_on(self, order: StepOrder) -> None:
        """Receive the awaited ids that the rows of an order go on from, and all earlier ones."""
        takes_all = order.has_begun or order.known.size or VERIFY in order.kinds
        num_due = len(self._awaited) - self._num_parts + 1
        for number, each in enumerate(self._awaited, 1):
            if takes_all or np.isin(each.rows, order.rows).any():
                num_due = max(num_due, number)
        for _ in range(num_due):
            rows, positions, places, num_ids = self._awaited.popleft()
            packed = padded_tokens(np.stack([rows, places, positions]))  # sent before the wait
            rows_N, places_N, positions_N = send(torch.from_numpy(packed), self.device).unbind()
            assert self._communicator is not None
            self._communicator.first(ids_S := self._scratch.ids_S[:num_ids])
            if len(rows):
                state = self.rows
                advance_rows(rows_N, ids_S[places_N], positions_N, state.last_token_R, state.position_R)

    def _clear_masks(self, order: StepOrder) -> None:
        """Clear the masks of earlier steps before a step without masks."""
        if not order.flags & AWAITS_MASKS and self.rows.masks.has_any:
            self.rows.masks.clear()

    def _size_of(self, order: StepOrder) -> StepSize | None:
        """Return the size with room for a step; None: there is none, or it is faster without a graph."""
        num_decoding = int(np.count_nonzero(order.kinds == DECODE))
        if order.num_rows - num_decoding > self.profile.max_chunks:
            return None
        if not order.adapters.any():
            return self.graphs.size_for(num_decoding, len(order.tokens))
        if len(order.tokens):  # prompts with adapters are launched kernel by kernel
            return None
        size = self.graphs.size_for(num_decoding, 0)
        return None if size is None else size._replace(has_adapters=True)

    def _window_of(self, order: StepOrder) -> StepSize | None:
        """Return the size with room for a step whose rows verify drafts; None: there is none."""
        size = self.graphs.window_size_for(order.num_tokens)
        return None if size is None else size._replace(has_adapters=bool(order.adapters.any()))

    def _asked(self, logits_SV: torch.Tensor, rows: np.ndarray, where: np.ndarray | None) -> Asked | None:
        """Return the rows that ask for logprobs; their logits are at their own places or at `where`."""
        counts = self.rows.num_logprobs[rows]
        if not (len(rows) and self._samples) or counts.max() == NONE:
            return None
        (asking,) = (counts != NONE).nonzero()
        places = asking if where is None else where[asking]
        return Asked(places.tolist(), counts[asking].tolist(), logits_SV)

    # -- steps of a size that is, or could be, a graph ------------------------------------------------

    def _ensure(self, size: StepSize) -> bool:
        """Capture a size if it is not captured yet, and meet the other ranks before its first step.

        On a shared GPU, the driver may load no kernels for a rank while another rank's kernel waits for it.
        """
        is_captured = self.graphs.ensure(size)
        if self._communicator is not None and size not in self._begun:
            self._begun.add(size)
            self._communicator.gather_bytes(bytes(1))
        return is_captured

    def _start_decode(self, order: StepOrder, decoded: DecodedRows, *, are_sent: bool) -> Sampler:
        """Launch a step in which all rows decode, as in most steps."""
        rows, size, ids_S, has_logprobs = decoded
        ensure = self.graphs.ensure if self._communicator is None else self._ensure  # one call less
        if ensure(size) or not are_sent:  # a capture leaves padding in the inputs
            self.inputs.send_rows(rows, size.num_rows)
            if size.has_adapters:
                self.inputs.send_adapters(order.adapters, size.num_rows)
        self.graphs.forward(size)

        def sample(masks: StepMasks) -> Pending:
            self._decoded = decoded
            if not self._has_logits:
                return self._await_ids(rows, order.stops, np.arange(len(rows)), size.num_rows)
            logits_SV = self.graphs.sample(size)
            asked = self._asked(logits_SV, rows, None) if has_logprobs else None
            if self._communicator is not None:  # `_read_back` would be a call in most steps
                self._communicator.pass_ids(self._scratch.ids_S)
            pending = self._readback.take(order.step, ids_S, len(rows), asked)
            if self.head is not None and not order.flags & UNSEEN:
                self.graphs.follow(size)
            return pending.wait

        return sample

    def _start_mixed(self, order: StepOrder, size: StepSize) -> Sampler:
        """Launch few given tokens together with the rows that decode."""
        inputs = self.inputs
        self._ensure(size)
        prompts = Prompts(order, first=size.num_rows)
        inputs.send_rows(order.rows[prompts.decoding], size.num_rows)
        inputs.send_prompts(prompts, size.num_tokens)
        # rows that decode are sampled where they stand, others after them
        drawn = prompts.numbers[order.num_sampled[prompts.numbers] > 0]
        sampling = np.concatenate([prompts.decoding, drawn])
        where = np.concatenate([np.arange(len(prompts.decoding)), size.num_rows + np.arange(len(drawn))])
        rows = order.rows[sampling]
        inputs.send_samples(
            where,
            prompts.last_places[sampling],
            rows,
            order.stops[sampling],
            size.num_rows + self.profile.max_chunks,
        )
        if self.head is not None:
            ids = np.empty(order.num_rows, dtype=np.int64)
            ids[sampling] = where
            following = following_tokens(order, ids[order.num_sampled > 0])
            inputs.send_following(following[prompts.is_given], prompts.first, size.num_tokens)
        if not is_gpu(self.device):
            self._host_chunks = tuple(prompts.chunks)
        self.graphs.forward(size)

        def sample(masks: StepMasks) -> Pending:
            if not self._has_logits:
                num_ids = size.num_rows + self.profile.max_chunks
                return self._await_ids(rows, order.stops[sampling], where, num_ids)
            logits_SV = self.graphs.sample(size)
            ids_S = self._scratch.ids_S[: int(where[-1]) + 1 if len(where) else 0]
            asked = self._asked(logits_SV, rows, where)
            pending = self._read_back(order, ids_S, order.num_rows, asked)
            self.graphs.follow(size)
            return pending.scatter(lambda: [*map(Drawn, sampling.tolist(), where.tolist())]).wait

        return sample

    def _start_window(self, order: StepOrder, size: StepSize, late: LateDrafts | None) -> Sampler:
        """Launch rows that verify drafts, each of their tokens as a separate row that decodes."""
        counts, stops = order.counts.astype(np.int64), order.stops
        ends = counts.cumsum()
        positions = np.arange(order.num_tokens) + (stops - ends).repeat(counts)
        rows = order.rows.repeat(counts)
        is_judged, nodes = order.num_sampled > 1, nodes_of(order) if len(order.backs) else None
        lens = positions + 1
        if nodes is not None:  # slots follow from places; rotation and noise follow from depths
            positions = order.starts.repeat(counts) + nodes.depths_T
        has_lanes = bool(order.flags & AWAITS_MASKS or self.rows.has_uses[order.rows[is_judged]].any())
        if has_lanes and late is not None:  # lanes need the drafts on the host
            late.read(order)
            late = None
        self._ensure(size)
        lines_YS = self.inputs.blank_window(size.num_rows)
        lines_YS[:3, : len(rows)] = rows
        lines_YS[4, : len(rows)] = order.tokens if late is None else late.codes(order)
        lines_YS[5, : len(rows)] = positions
        lines_YS[6:-1, : len(rows)] = order.slots
        lengths, backs = order.num_sampled.tolist(), dict(branched_rows(order))
        for number, each in backs.items():
            lengths[number] = 1 + main_line(each[1:])
        decided = self._decided(lengths)
        mark_ends(lines_YS[-1], decided, counts, ends)
        lines_YS[1], lines_YS[1, : len(rows)] = 0, lens
        lines_YS[3, (ends - 1)[~is_judged]] = order.rows[~is_judged]  # these rows go on from their id
        if has_lanes:
            lines_YS[2, : len(rows)] = fill_lanes(self.rows, order)
        self.inputs.send_window(size.num_rows)
        if self._has_trees:
            self.inputs.send_tree(nodes, size.num_rows)
        if size.has_adapters:
            self.inputs.send_adapters(order.adapters.repeat(counts), size.num_rows)
        self.graphs.forward(size)
        # called when the ids have arrived, because drafts may be late
        windows = partial(drawn_by, order, ends - 1, decided, backs)

        def sample(masks: StepMasks) -> Pending:
            if not self._has_logits:
                goes_on, num_ids = ~is_judged, size.num_rows  # rows with drafts wait to be judged
                return self._await_ids(order.rows[goes_on], stops[goes_on], (ends - 1)[goes_on], num_ids)
            self.has_judged = True
            if order.flags & AWAITS_MASKS:
                numbers = np.asarray(masks.numbers, dtype=np.int64)
                places = (ends - stops)[numbers] + np.asarray(masks.positions, dtype=np.int64) - 1
                self.rows.masks.send(self.rows.first_lane + places)
            logits_SV = self.graphs.sample(size)
            asked = self._asked(logits_SV, rows, None)
            pending = self._read_back(order, self._scratch.ids_S[: len(rows)], order.num_rows, asked)
            self.graphs.follow(size)
            return pending.scatter(windows).wait

        return sample

    @torch.inference_mode()
    def verify_early(self, rows: np.ndarray, counts: np.ndarray, ids_KS: PendingTensor) -> None:
        """Launch the next windows of some rows, whose drafts are being made; the device knows their start.

        If the next order turns out to be this step, it has already run; any other order recomputes what it
        needs. Rows with penalties or logprobs wait for their order.
        """
        assert self.drafter is not None
        lengths, width = counts + 1, self.drafter.drafts_KS.shape[1]
        num_tokens = int(lengths.sum())
        size = self.graphs.window_size_for(num_tokens)
        is_plain = self.rows.num_logprobs[rows].max() == NONE and not self.rows.has_uses[rows].any()
        is_alone = self._adapters is None and self._ranks is None and not self.rows.masks.has_any
        if size is None or not (is_plain and is_alone):
            return
        with losing_device(DRAFTING), suppress(torch.OutOfMemoryError):
            self.graphs.ensure(size)
            lines_YS, ends = self.inputs.blank_window(size.num_rows), lengths.cumsum()
            turns = np.arange(num_tokens) - (ends - lengths).repeat(lengths)
            lines_YS[:3, :num_tokens] = rows.repeat(lengths)
            columns = np.arange(len(rows)).repeat(lengths)
            lines_YS[4, :num_tokens] = np.where(turns, FIRST_CODE - ((turns - 1) * width + columns), 0)
            lines_YS[5, :num_tokens] = FIRST_CODE - turns
            num_sampled = lengths.tolist()
            decided = self._decided(num_sampled)
            mark_ends(lines_YS[-1], decided, lengths, ends)
            self.inputs.send_window(size.num_rows)
            self.graphs.forward(size)
            self.graphs.sample(size)
            ids = self._readback.take(0, self._scratch.ids_S[:num_tokens], len(rows))
            self.graphs.follow(size)
            self._early = EarlyWindow(rows.tolist(), num_sampled, ids_KS, decided, ids)

    def _find_early(
        self, order: StepOrder, size: StepSize, late: LateDrafts | None, early: EarlyWindow | None
    ) -> Sampler | None:
        """Return the second part of the step that ran early, if the order is that step."""
        if early is None or late is None or late.ids_KS is not early.ids_KS or not late.are_all:
            return None
        is_same = early.rows == order.rows.tolist() and early.num_sampled == order.num_sampled.tolist()
        if not is_same or order.flags & AWAITS_MASKS or size.has_adapters:
            return None
        self.graphs.is_replaying = True
        pending = early.ids.scatter(partial(drawn_by, order, order.counts.cumsum() - 1, early.decided))

        def sample(masks: StepMasks) -> Pending:
            self.has_judged = True
            return pending.wait

        return sample

    @torch.inference_mode()
    def compute_logits(self, model: Network, size: StepSize) -> torch.Tensor:
        """Launch the kernels of a step of this size up to its logits; all inputs are on the device."""
        inputs, num_rows = self.inputs, size.num_rows
        if size.has_windows:
            state = (self.drafter or self).rows
            drafted = DraftedRows(
                state.last_token_R, state.position_R, self.rows.tables_KRB, self._block_size
            )
            inputs.unpack_window(num_rows, self._drafts_D, drafted)
            rows_S, has_adapters = inputs.rows_S[:num_rows], size.has_adapters
            return self.logits(
                model,
                self.forward(model, num_rows, rows_S, None, has_windows=True, has_adapters=has_adapters),
            )
        rows_S, num_tokens = inputs.rows_S[:num_rows], num_rows + size.num_tokens
        self.gather(rows_S)
        if not size.num_tokens:
            hidden_SD = self.forward(model, num_tokens, rows_S, None, has_adapters=size.has_adapters)
            return self.logits(model, hidden_SD)
        tiles = inputs.tiles(size.num_tokens, self._host_chunks)
        places_C = inputs.samples_3C[0, : num_rows + self.profile.max_chunks]
        return self.logits(model, self.forward(model, num_tokens, rows_S, tiles, (), places_C))

    @property
    def _drafts_D(self) -> torch.Tensor:
        """The drafts that the codes in windows stand for."""
        return self.inputs.following_T if self.drafter is None else self.drafter.drafts_KS.flatten()

    def logits(self, model: Network, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Return the logits [S, V]; if a later stage has them, the hidden states, which nothing reads."""
        return model.logits(hidden_SD) if self._has_logits else hidden_SD

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

    def _judge(self, drafter: GpuDevice, rows_S: torch.Tensor, ids_S: torch.Tensor) -> None:
        """Advance the drafter's rows to the accepted ids, and move the accepted paths of trees."""
        inputs, state = self.inputs, drafter.rows
        tokens_S, positions_S, slots_S = inputs.table_XT[:3, : len(ids_S)]
        decided_S, tree_2S = inputs.window(len(ids_S))[-1], inputs.tree_2S[:, : len(ids_S)]
        sources_S = places_S = slots_S
        if self._has_trees:  # padding copies the first token, which never moves, onto itself
            places_S = torch.where(slots_S < 0, slots_S[:1], slots_S).clamp(min=0)
            sources_S = places_S.clone()
        judge_windows(
            rows_S, tokens_S, positions_S, ids_S, decided_S, tree_2S, slots_S,
            state.last_token_R, state.previous_R, state.position_R, sources_S,
        )  # fmt: skip
        for store in (self.store, drafter.store) if self._has_trees else ():
            store.move_slots(torch.stack([sources_S, places_S]))

    @torch.inference_mode()
    def follow_sized(self, size: StepSize) -> None:
        """Launch the kernels that let a draft head see the last sampled step, which has this size."""
        inputs, num_rows = self.inputs, size.num_rows
        if not size.num_tokens:
            self._follow(
                lambda: Followed(self._scratch.ids_S[:num_rows], slice(None), inputs.rows_S[:num_rows])
            )
            return
        places_C, rows_C, _ = inputs.samples_3C[:, : num_rows + self.profile.max_chunks].unbind()
        ids_C, given_P = self._scratch.ids_S[: len(rows_C)], inputs.following_T[num_rows:][: size.num_tokens]
        self._follow(
            lambda: Followed(torch.cat([ids_C[:num_rows], with_drawn(given_P, ids_C)]), places_C, rows_C)
        )

    def _follow(self, followed: Callable[[], Followed]) -> None:
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
        self._follow(lambda: Followed(zeros_T, zeros_T[:1], zeros_T[:1] - 1))

    def gather(self, rows_S: torch.Tensor) -> None:
        """Gather the tokens, positions, slots and lengths of rows that decode from their state."""
        state, size, decode = self.rows, self._block_size, self.inputs.decode(len(rows_S))
        if len(rows_S):
            tokens_R, position_R = state.last_token_R, state.position_R
            for tables_RB, out in zip(state.tables_KRB, decode, strict=True):
                gather_step(rows_S, tokens_R, position_R, tables_RB, block_size=size, out=out)

    def sample_rows(
        self,
        logits_SV: torch.Tensor,
        rows_S: torch.Tensor,
        positions_S: torch.Tensor,
        advanced_S: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sample a token for each row at its position, and advance the state of the rows.

        `advanced_S`: the rows to advance instead; -1: none.
        """
        state, rows_S, positions_S = self.rows, rows_S.int(), positions_S.contiguous()
        ids_S = self._scratch.ids_S[: len(rows_S)]
        if self._samples:
            ids_S = sample_rows(logits_SV, state.sampling, rows_S, positions_S, self._scratch)
        if self._communicator is not None and self._has_logits:  # other stages await them
            self._communicator.first(ids_S)
        advanced_S = rows_S if advanced_S is None else advanced_S
        advance_rows(advanced_S, ids_S, positions_S, state.last_token_R, state.position_R, state.sampling)
        return ids_S

    def forward(
        self,
        model: Network,
        num_tokens: int,
        rows_S: torch.Tensor,
        tiles: PrefillChunks | None,
        batches: Sequence[Batch] = (),
        places_C: torch.Tensor | None = None,
        *,
        has_windows: bool = False,
        has_adapters: bool = False,
    ) -> torch.Tensor:
        """Return the hidden states of all tokens, or of the tokens at `places_C`."""
        step = self._context(num_tokens, rows_S, tiles, batches, has_windows=has_windows)
        step.logit_indices = places_C
        if self.head is not None:
            assert isinstance(self.head.model, HeadModel)
            layers = self.head.model.captured_layers
            if model is not self.model:  # a view with few layers, which computes padding
                layers = (0,) * len(layers)
            self._layer_inputs = step.layer_inputs = LayerInputs(layers)
        if self._adapters is not None:
            self._adapters.begin(self.inputs.adapters_T[:num_tokens] if has_adapters else None)
            step.on_select = self._adapters.select
        hidden_CD: torch.Tensor = model(self.inputs.table_XT[0, :num_tokens], step)
        return hidden_CD

    def _context(
        self,
        num_tokens: int,
        rows_S: torch.Tensor,
        tiles: PrefillChunks | None = None,
        batches: Sequence[Batch] = (),
        *,
        has_windows: bool = False,
    ) -> DeviceStep:
        """Return the context of a step over the current inputs."""
        table_XT = self.inputs.table_XT
        step = DeviceStep(
            self.store,
            self.rows.tables_KRB,
            self.work,
            block_size=self._block_size,
            positions_T=table_XT[1, :num_tokens],
            slots_KT=table_XT[2:, :num_tokens],
            rows_S=rows_S,
            lens_S=self.inputs.lens_S[: len(rows_S)],
            chunks=tiles,
            windows=self._windows,
            dense=(self.dense, batches) if self.dense and batches else None,
            backend=self.backend,
            has_shared_rows=has_windows,
            tree_2S=self.inputs.tree_2S[:, : len(rows_S)] if has_windows and self._has_trees else None,
        )
        step.rows = rows_S
        return step

    # -- any other step -----------------------------------------------------------------------------

    def _start_ragged(self, order: StepOrder) -> Sampler:
        """Launch a step kernel by kernel, whatever its rows are."""
        num_decoding = int(np.count_nonzero(order.kinds == DECODE))
        prompts = Prompts(order, first=self.graphs.padded_rows(num_decoding))
        places, last_rows = needed_tokens(order, prompts.last_places.tolist())
        hidden_CD = self._hidden_of(order, prompts, places)
        if not self._has_logits:
            return partial(self._sample_elsewhere, order)
        pooled: Pooled | None = None
        if order.flags & READS_PROMPTS:  # results arrive before the ids, whose event is waited for
            states_CD = hidden_CD[:, : self.model.config.hidden_size]
            pooled = pool_hidden(order, self.rows.book, last_rows, states_CD)
            pooled = pooled._replace(states_ED=self._readback.fetch(pooled.states_ED))
        if order.flags & ON_HOST:
            return lambda masks: self._sample_on_host(order, prompts, last_rows, hidden_CD, pooled, masks)
        asked = [
            each._replace(table=self._readback.fetch(each.table))
            for each in self._sampler.prompt_tables(order, last_rows, hidden_CD)
        ]
        if not order.num_sampled.any():
            return lambda masks: self._sample_none(order, prompts, asked, pooled)
        sampled = order.num_sampled.astype(np.int64)
        ends = sampled.cumsum()
        assert ends[-1] <= self._scratch.max_rows, f"{ends[-1]} positions are sampled at once"
        back = (ends.repeat(sampled) - 1) - np.arange(ends[-1])  # places before each row's last
        rows = order.rows.repeat(sampled)
        lasts = np.array(last_rows, dtype=np.int64).repeat(sampled) - back
        advanced = np.where(sampled.repeat(sampled) == 1, rows, -1)
        packed = np.stack([lasts, rows, order.stops.repeat(sampled) - back, advanced])
        last_S, rows_S, positions_S, advanced_S = send(torch.from_numpy(packed), self.device).unbind()
        logits_SV = self.model.logits(hidden_CD[last_S] if places is None else hidden_CD)
        windows = partial(drawn_by, order, ends - 1)

        @torch.inference_mode()
        def sample(masks: StepMasks) -> Pending:
            ids_S = self.sample_rows(logits_SV, rows_S, positions_S, advanced_S.int())
            self._follow(partial(self._followed, order, prompts, ids_S))
            of_outputs = self._asked(logits_SV, rows, None)
            pending = self._read_back(order, ids_S, order.num_rows, of_outputs)
            return pending.scatter(windows, asked, pooled).wait

        return sample

    def _sample_elsewhere(self, order: StepOrder, masks: StepMasks) -> Pending:
        """End a ragged step whose logits another stage has."""
        if order.flags & ON_HOST or not order.num_sampled.any():
            return no_rows
        ends, goes_on = order.num_sampled.cumsum(), order.num_sampled == 1  # drafts wait to be judged
        places, num_ids = ends[goes_on] - 1, int(ends[-1])
        return self._await_ids(order.rows[goes_on], order.stops[goes_on], places, num_ids)

    def _followed(self, order: StepOrder, prompts: Prompts, ids_S: torch.Tensor) -> Followed:
        """Return the facts about a ragged step that a draft head gets, given all drawn ids, row by row."""
        places, drawn = prompts.places, drawn_places(order)
        following = np.zeros(prompts.end, dtype=np.int64)  # tokens that follow, padding included
        following[places] = following_tokens(order)
        packed = np.concatenate([following, places[drawn], order.rows.repeat(order.num_sampled)])
        sent = send(torch.from_numpy(packed), self.device)
        places_C, rows_C = sent[len(following) :].view(2, -1)
        return Followed(with_drawn(sent[: len(following)], ids_S), places_C, rows_C)

    @torch.inference_mode()
    def _sample_none(
        self, order: StepOrder, prompts: Prompts, asked: list[PromptTable], pooled: Pooled | None
    ) -> Pending:
        """End a ragged step without an id to sample; there may be results of prompts to wait for."""
        self._follow(partial(self._followed, order, prompts, self._scratch.ids_S[:0]))
        if not (asked or pooled):  # the middle of a prompt
            return lambda: StepResult([()] * order.num_rows, [()] * order.num_rows, {})
        pending = self._readback.take(order.step, self._scratch.ids_S[:0], order.num_rows)
        return pending.scatter(list, asked, pooled).wait

    @torch.inference_mode()
    def _sample_on_host(
        self,
        order: StepOrder,
        prompts: Prompts,
        last_rows: list[int],
        hidden_CD: torch.Tensor,
        pooled: Pooled | None,
        masks: StepMasks,
    ) -> Pending:
        if not self._samples:
            self._sampler.follow(order, last_rows, hidden_CD)
            return no_rows
        result = self._sampler.sample(order, last_rows, hidden_CD, masks)
        self._follow(
            lambda: self._followed(
                order, prompts, send(torch.from_numpy(kept_ids(order, result.ids)), self.device)
            )
        )
        if pooled is not None:
            arrival = self._readback.take(order.step, self._scratch.ids_S[:0], 0).scatter(list, pooled=pooled)
            result = result._replace(pooled=arrival.wait().pooled)
        return lambda: result

    def _hidden_of(self, order: StepOrder, prompts: Prompts, places: list[int] | None) -> torch.Tensor:
        """Compute the hidden states of a ragged step: of all tokens, or of the tokens at `places`."""
        inputs, slots = self.inputs, order.adapters
        inputs.send_rows(order.rows[prompts.decoding], prompts.first)
        if slots.any():
            slots_T = np.zeros(prompts.end, dtype=np.int32)
            slots_T[: len(prompts.decoding)] = slots[prompts.decoding]
            slots_T[prompts.first :] = slots[prompts.numbers].repeat(order.counts[prompts.numbers])
            inputs.send_adapters(slots_T, prompts.end)
        rows_S = inputs.rows_S[: prompts.first]
        self.gather(rows_S)
        batches, chunks = self.dense.split(prompts.chunks) if self.dense else ([], prompts.chunks)
        if len(prompts.numbers):
            inputs.table_XT[:, prompts.first : prompts.end].copy_(
                send(torch.from_numpy(prompts.table_XP), self.device)
            )
        has_states = self.model.config.delta is not None
        tiles = prompts.tiles(chunks, inputs.tile_len, self.device, has_states=has_states) if chunks else None
        places_C = None if places is None else send(torch.tensor(places), self.device)
        has_adapters = bool(slots.any())
        return self.forward(
            self.model, prompts.end, rows_S, tiles, batches, places_C, has_adapters=has_adapters
        )


def _wait_for_parts(
    parts: list[tuple[int, StepOrder]], steps: Sequence[PendingStep], num_rows: int
) -> StepResult:
    """Wait for all parts of a step and join their results."""
    following = iter(steps)
    return run_parts(parts, num_rows, NO_MASKS, lambda part, masks: next(following).wait())


@contextmanager
def losing_device(where: str) -> Iterator[None]:
    """Raise `DeviceLost` if the device fails."""
    try:
        yield
    except torch.AcceleratorError as error:
        raise DeviceLost.of(where, error) from error


def _raising(error: torch.OutOfMemoryError) -> Sampler:
    """Return the second part of a step whose first part ran out of memory: it raises the error."""

    def sample(masks: StepMasks) -> Pending:
        raise error

    return sample
