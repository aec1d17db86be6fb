"""Run plans on a GPU: state stays there, steps are launched and waited for later.

    launch   transfers, differences of state, then one of
               sized     rows that decode and few tokens of prompts, padded: a CUDA graph    (graphs.py)
               ragged    anything else: the same kernels, launched one by one
             and a copy of the sampled ids to pinned memory, with an event behind it;
             a step for which there is no memory is run in halves                            (halves.py)
    begin    the same up to the logits; what samples them is launched when masks are there   (masks.py)
    wait     for that event; ids become a `StepResult`                                       (readback.py)

No launch reads anything back, so the engine may plan and launch the next steps before it waits for this
one: the tokens they continue with are on the device. Where ids decide what runs next (the step that forks,
beams) a step is sampled on the host; the engine does not overlap steps while there is such a request.

On a CPU the same code runs on the kernels' references, which is how it is tested without a GPU.

Shapes:  T tokens, S rows that decode, C tokens whose hidden states are needed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from infer.cache.kv_store import KVStore
from infer.errors import DeviceLost
from infer.execution.batch import has_embeddings, needed_tokens, reads_prompt
from infer.execution.embedding import Pooled, pool_hidden
from infer.execution.gpu.graphs import StepGraphs, StepSize, captured_tokens, most_tokens, short_step
from infer.execution.gpu.masks import DeviceMasks
from infer.execution.gpu.readback import Asked, Readback
from infer.execution.gpu.rows import NO_LOGPROBS, DeviceRows
from infer.execution.gpu.sending import send
from infer.execution.gpu.step import DeviceStep, choose_backend, compile_backend
from infer.execution.gpu.step_inputs import MAX_CHUNKS, DeviceInputs, Prompts
from infer.execution.halves import SmallerSteps
from infer.execution.host_sampling import HostSampler, PromptTable
from infer.execution.runner import StepResult, UnsampledStep
from infer.kernels.attention.decode_work import DecodeWork
from infer.kernels.attention.dense import Batch, DenseAttention
from infer.kernels.attention.prefill import PrefillChunk, PrefillChunks, build_prefill_chunks, tokens_per_tile
from infer.kernels.elementwise.step_state import advance_rows, gather_step
from infer.kernels.runtime.compile_ahead import compile_once, compiling_ahead
from infer.kernels.runtime.dispatch import is_gpu
from infer.kernels.sampling.logprob_table import logprob_table
from infer.kernels.sampling.sample_rows import SampleScratch, compile_sample_rows, sample_rows
from infer.models.model import Model
from infer.scheduling.batch_state import BatchState
from infer.scheduling.plan import COPY, StepPlan, Transfer

logger = logging.getLogger(__name__)

_FEW_TOKENS = 512  # of a ragged step: with fewer, steps are captured

WaitForStep = Callable[[], StepResult]
Sample = Callable[[], WaitForStep]  # launches the second part of a step, of which the first was launched


class DecodedRows(NamedTuple):
    """The rows of a step that decodes and nothing else."""

    rows: np.ndarray
    size: StepSize
    ids_S: torch.Tensor  # where their ids are sampled
    has_logprobs: bool  # whether any of them asks for logprobs


class DeviceRunner:
    """A model whose decode state lives beside it."""

    can_embed = True

    def __init__(
        self,
        model: Model,
        store: KVStore,
        state: BatchState,
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
    ) -> None:
        config, device = model.config, store.device
        self._model, self._store, self._state, self._device = model, store, state, device
        self._sampler = HostSampler(model, send)
        self._rows = DeviceRows(state, -(-max_seq_len // state.block_size), config.vocab_size, device)
        self._scratch = SampleScratch(max_batch_size + MAX_CHUNKS, config.vocab_size, device)
        self._backend = attention_backend
        backends = attention_backend, decode_attention_backend
        chosen = choose_backend(backends, config, store, state.block_size)
        # compilers begin here, and go on beside what follows (`wait_for_compilers`)
        pool = ThreadPoolExecutor(1, "compile-attention")
        self._decode_backend = pool.submit(
            compile_backend, chosen, config, store, state.block_size, max_batch_size
        )
        pool.shutdown(wait=False)
        self._wait_for_sampler = compile_sample_rows(self._rows.sampling, self._scratch, store.dtype)
        self._windows = tuple(dict.fromkeys(config.window(layer) for layer in range(config.num_layers)))
        self._work = DecodeWork(
            max_rows=max_batch_size,
            max_len=max_seq_len,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            device=device,
            backend=chosen,
        )
        tile_len = tokens_per_tile(config.num_heads, config.num_kv_heads)
        max_graph_tokens = captured_tokens(config, max_tokens, busy_tokens) if use_cuda_graphs else 0
        self._inputs = DeviceInputs(
            max_batch_size, max_tokens, max_graph_tokens, tile_len, device, len(state.tables)
        )
        self._readback = Readback(max_batch_size + MAX_CHUNKS, device, steps_ahead=steps_ahead)
        self._decoded: DecodedRows | None = None  # of the last step: the next is often the same, one token on
        self._dense: DenseAttention | None = None
        if attention_backend == "auto" and self._windows == (None,):
            self._dense = DenseAttention(
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                scale=config.scale,
                dtype=store.dtype,
                device=device,
                max_tokens=max_tokens,
                max_len=max_seq_len,
            )
        self._pads, self._max_tokens = is_gpu(device) and self._backend != "flash", max_tokens
        self.phases: dict[str, float] = {}  # seconds that `prepare` has taken, by what was prepared
        self._preparations = self._prepare()
        self._smaller = SmallerSteps(self.run)
        self.arena: object = None  # what holds the memory of its steps, if anything does
        self._host_chunks: tuple[PrefillChunk, ...] = ()  # for the reference of prefill attention alone
        self._graphs = StepGraphs(
            self._compute_logits,
            self._sample_logits,
            self._inputs.blank,
            warm_up=self._warm_up,
            max_rows=max_batch_size,
            max_tokens=most_tokens(config, max_tokens) if use_cuda_graphs else 0,
            short_step=short_step(config, max_tokens, busy_tokens) if use_cuda_graphs else 0,
            pool_bytes=graph_bytes,
            captures=use_cuda_graphs and is_gpu(device),
        )

    def wait_for_compilers(self) -> None:
        """Wait for what is being compiled; ConfigError where attention that was asked for cannot be."""
        self._work.backend = self._decode_backend.result()
        self._wait_for_sampler()

    @property
    def attention(self) -> tuple[str, str]:
        """What computes attention of prompts, and of rows that decode."""
        prompts = "cudnn+triton" if self._dense is not None else self._backend.replace("auto", "triton")
        return prompts, self._work.backend.replace("auto", "cuda+triton")

    @torch.inference_mode()
    def prepare(self) -> bool:
        """Do one piece of what steps need before they can run without waiting; False: all is done.

        A server calls it until all is done before it says that it is ready. In a program that generates once,
        each step makes what it needs itself.
        """
        start = time.perf_counter()
        phase = next(self._preparations, None)
        if phase is not None:
            self.phases[phase] = self.phases.get(phase, 0.0) + time.perf_counter() - start
        return phase is not None

    def _prepare(self) -> Iterator[str]:
        """Make everything that a step can need; yields the name of the phase after each piece."""
        if self._pads:
            self.compile()
            yield "compile"
            self._rows.send_padding()
            self._store.transfer((Transfer(COPY, 0, 0),))
            for num_tokens, num_rows in self._ragged_sizes():
                self._try(partial(self._run_ragged_padding, num_tokens, num_rows))
                yield "try"
            self._try(partial(self.sample_padding, self._output_sizes()))
            yield "try"
        self._capture_beside_plans()
        yield "capture"
        seconds = " ".join(f"{phase}_s={seconds:.2f}" for phase, seconds in self.phases.items())
        logger.info("steps prepared %s", seconds)

    def _capture_beside_plans(self) -> None:
        """Capture all sizes in a thread, while this one makes cuDNN's plans: PyTorch keeps them by thread.

        A plan is made without Python's lock; a capture holds it nearly all the time.
        """
        with ThreadPoolExecutor(1, "capture-steps") as pool:
            captured = pool.submit(self._capture_all)
            while self._dense is not None and self._dense.prepare():
                pass
            captured.result()

    @torch.inference_mode()
    def _capture_all(self) -> None:
        if is_gpu(self._device):
            torch.cuda.set_device(self._device)  # of this thread
        while self._graphs.prepare():
            pass

    @torch.inference_mode()
    def step_seconds(self, num_tokens: int) -> float:
        """How long a step with so many tokens of prompts and a few decoding rows takes, the best of three.

        It is a step of padding: nothing is read from the cache.
        """
        num_rows = self._graphs.decode_rows[min(7, len(self._graphs.decode_rows) - 1)]
        size, seconds = self._graphs.size_for(num_rows, num_tokens), []
        for _ in range(3):
            self._inputs.blank()
            self._synchronize()
            start = time.perf_counter()
            if size is None:
                self._run_ragged_padding(num_tokens, num_rows)
            else:
                self._graphs.forward(size)
                self._graphs.sample(size)
            self._synchronize()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    def _synchronize(self) -> None:
        if self._pads:
            torch.cuda.synchronize(self._device)

    def _ragged_sizes(self) -> list[tuple[int, int]]:
        """Steps that are not captured, of all sizes: tokens of prompts, and rows that decode beside them.

        Libraries choose and load kernels by that number. Every other of each kind is no multiple of 16.
        """
        most, num_rows = self._max_tokens, self._graphs.decode_rows[-1]
        sizes = [*range(_FEW_TOKENS, 4096, 256), *range(4096, most, 512), most - 8]
        sizes = [size + 8 * (place // 2 % 2) for place, size in enumerate(sizes) if num_rows < size < most]
        return [(size - num_rows * (place % 2), num_rows * (place % 2)) for place, size in enumerate(sizes)]

    def _output_sizes(self) -> list[int]:
        """Numbers of rows that such a step samples: all that are few, and of each kind of many."""
        most = len(self._inputs.rows_S) + 1
        return sorted({*range(1, min(18, most)), *range(24, most, 8), *range(31, most, 16)})

    @torch.inference_mode()
    def compile(self) -> None:
        """Compile what steps of all sizes need, unless Triton's cache has it; no kernel runs."""
        if self._pads:
            kinds = sorted({str(self._kind(number)) for number in range(len(self._model.layers))})
            facts = self._model.config, kinds, self._backend, self._work.backend, self._graphs.sizes
            compile_once(self._compile_ahead, *facts, self._store.keys[0])

    def _compile_ahead(self) -> bool:
        """Go through all steps that are captured without running them: their kernels are compiled at once.

        False: a step could not be gone through, as one that takes indices from what no kernel has computed.
        Such a step is compiled when it first runs.
        """
        try:
            with self._few_layers(), compiling_ahead(self._device):
                self._rows.send_padding()
                for size in self._graphs.sizes:
                    self._warm_up(size)
                for num_rows in self._graphs.decode_rows:
                    self._run_ragged_padding(_FEW_TOKENS, num_rows)
                self.sample_padding(self._output_sizes())
        except torch.AcceleratorError:
            raise
        except (IndexError, RuntimeError) as error:
            logger.debug("not all steps are compiled ahead of time: %s", error)
            return False
        return True

    @contextmanager
    def _few_layers(self) -> Iterator[None]:
        """Leave the model two layers of each kind, the first and the last: these need what all do.

        A step of padding then takes the kernels and the memory of a whole one, and a fraction of its time.
        """
        layers, self._model.layers = self._model.layers, self._end_layers
        try:
            yield
        finally:
            self._model.layers = layers

    @cached_property
    def _end_layers(self) -> nn.ModuleList:
        """The first and the last layer of each kind; asked for while the model has all its layers."""
        layers = self._model.layers
        kinds = [self._kind(number) for number in range(len(layers))]
        ends = {
            place for kind in kinds for place in (kinds.index(kind), len(kinds) - 1 - kinds[::-1].index(kind))
        }
        return nn.ModuleList(layers[number] for number in sorted(ends))

    def _warm_up(self, size: StepSize) -> None:
        """Run a step of padding of this size: what it needs is loaded when it is captured."""
        with self._few_layers():
            self._inputs.blank()
            self._sample_logits(size, self._compute_logits(size))

    def _kind(self, number: int) -> tuple[object, ...]:
        """What tells layers apart that need other kernels: window, width, parts, how weights are kept."""

        def kept(stored: Any) -> tuple[object, ...]:
            if stored is None:
                return ()
            compiled = getattr(stored, "compiled", None)
            return type(stored), stored.spec.form, stored.bias is not None, compiled and compiled.num_ready

        parts = [
            (type(part), *kept(getattr(part, "stored", None)))
            for part in self._model.layers[number].modules()
        ]
        return self._model.config.window(number), self._model.config.mlp_size(number), *parts

    def _try(self, run: Callable[[], None]) -> None:
        """Run something of padding with few layers; that it cannot be run is no error."""
        try:
            with self._few_layers():
                run()
        except torch.AcceleratorError:
            raise
        except Exception as error:  # out of memory, say: a prompt may still find room
            reason = str(error).partition("\n")[0]
            logger.warning("cannot run a step of padding ahead of time step=%s error=%s", run, reason)

    def _run_ragged_padding(self, num_tokens: int, num_rows: int, num_dense: int = 0) -> None:
        """Run the layers of a step of padding, the last `num_dense` tokens as a fresh prompt of its own."""
        if num_tokens <= 0:
            return
        self._inputs.blank()
        rows_S = self._inputs.rows_S[:num_rows]
        self._gather(rows_S)
        chunk = PrefillChunk(num_rows + num_tokens - num_dense, num_dense, 0, 0)
        batches = self._dense.split([chunk])[0] if self._dense and num_dense else []
        tiles_W4 = torch.zeros((1, 4), dtype=torch.int32, device=self._device)
        tiles = PrefillChunks.from_arrays(tiles_W4, [PrefillChunk(0, 0, 0, 0)])
        self._forward(num_rows + num_tokens, rows_S, tiles, batches)

    @torch.inference_mode()
    def compute_padding(self) -> None:
        """Compute the layers of the largest step there can be, all of it padding."""
        num_rows = min(self._graphs.decode_rows[-1], self._max_tokens - 1)
        with self._few_layers():
            self._run_ragged_padding(self._max_tokens - num_rows, num_rows)
            longest = self._dense.prepare_longest() if self._dense is not None else 0
            if longest:  # less one: what is not a whole shape is copied, which takes the most
                self._run_ragged_padding(self._max_tokens, 0, longest - 1)

    @torch.inference_mode()
    def sample_padding(self, counts: Sequence[int] = ()) -> None:
        """Sample as many rows of padding as a step can have, or so many and so many of them."""
        self._inputs.blank()
        rows_S, width = self._inputs.rows_S, self._model.config.hidden_size
        hidden_SD = torch.zeros((len(rows_S), width), dtype=self._store.dtype, device=self._device)
        places_S = torch.zeros_like(rows_S, dtype=torch.int64)
        for count in counts or (len(rows_S),):
            logits_SV = self._model.logits(hidden_SD[:count])
            self._sample_rows(logits_SV, rows_S[:count], places_S[:count])
            logprob_table(logits_SV, places_S[:count], 0)

    def run(self, plan: StepPlan) -> StepResult:
        """Launch a plan and wait for its result."""
        return self.launch(plan)()

    def launch(self, plan: StepPlan) -> WaitForStep:
        """Begin a plan; see the module's docstring for the order."""
        if plan.masks:
            return _launch_masked(self.begin(plan), plan)
        try:
            if plan.transfers:
                self._store.transfer(plan.transfers)
            try:
                return self._start(plan, has_masks=False)()
            except torch.OutOfMemoryError as error:
                return self._launch_smaller(plan, error)
        except torch.AcceleratorError as error:
            raise DeviceLost(f"the device failed in step {plan.step}") from error

    def begin(self, plan: StepPlan) -> UnsampledStep:
        """Begin a plan up to its logits: it is sampled when the masks of some of its rows are there."""
        try:
            if plan.transfers:
                self._store.transfer(plan.transfers)
            try:
                sample: Sample = self._start(plan, has_masks=True)
            except torch.OutOfMemoryError as error:  # known again when all can be run that the halves need
                lost = error.with_traceback(None)

                def sample() -> WaitForStep:
                    raise lost

        except torch.AcceleratorError as error:
            raise DeviceLost(f"the device failed in step {plan.step}") from error
        return MaskedStep(
            plan,
            sample,
            self._rows.masks,
            wait_for_steps=self._readback.arrive,
            run_smaller=partial(self._launch_smaller, plan),
            is_on_host=self._needs_host(plan),
        )

    def _start(self, plan: StepPlan, *, has_masks: bool) -> Sample:
        """Launch a step up to its logits; returns what launches the rest."""
        decoded, self._decoded = self._decoded, None
        if decoded is not None and decoded.rows is plan.chunks.rows:  # all that decoded last: a token on
            if plan.table_changes:
                self._rows.sync_tables(plan)
            self._clear_masks(has_masks)
            return self._launch_decode(plan, decoded)
        with torch.inference_mode():
            rows = plan.chunks.rows
            if not len(rows):  # beams coming back compute their next tokens together, once all are here
                return lambda: _nothing_of(plan)
            self._rows.sync(plan)
            self._clear_masks(has_masks)
            size = self._size_of(plan)
            if size is None or self._is_ragged(plan):
                return self._launch_ragged(plan)
            if size.num_tokens:
                return self._launch_mixed(plan, size)
            self._rows.has_newest[rows] = True
            has_logprobs = int(self._rows.num_logprobs[rows].max()) != NO_LOGPROBS
            decoded = DecodedRows(rows, size, self._scratch.ids_S[: len(rows)], has_logprobs)
            return self._launch_decode(plan, decoded)

    def _clear_masks(self, has_masks: bool) -> None:
        """Let no row of a step without masks be sampled under one of an earlier step."""
        if not has_masks and self._rows.masks.has_any:
            self._rows.masks.clear()

    def _launch_smaller(self, plan: StepPlan, error: torch.OutOfMemoryError) -> WaitForStep:
        """Run a step that found no memory in halves; nothing of it has been sampled."""
        self._decoded = None
        self._readback.settle()  # the halves take the buffers of steps that have not been read
        result = self._smaller.run(plan, error)
        return lambda: result

    def _size_of(self, plan: StepPlan) -> StepSize | None:
        """The size with room for a step; None: there is none, or it is better launched without."""
        chunks = plan.chunks
        lens = chunks.stops - chunks.starts
        is_prompt = lens > 1
        num_prompts = int(np.count_nonzero(is_prompt))
        # one token of a prompt that goes on is neither a row that decodes nor worth a size of its own
        is_odd = bool((~is_prompt & ~chunks.draws).any())
        if is_odd or num_prompts > MAX_CHUNKS:
            return None
        num_rows = len(lens) - num_prompts
        return self._graphs.size_for(num_rows, int(lens.sum()) - num_rows)

    def _is_ragged(self, plan: StepPlan) -> bool:
        """Whether a chunk of the plan forks, is a beam's, or has all its hidden states read."""
        if not np.count_nonzero(self._rows.is_ragged[plan.chunks.rows]):
            return False
        starts = plan.chunks.starts.tolist()
        return self._needs_host(plan) or any(map(reads_prompt, starts, plan.chunks.sequences))

    def _needs_host(self, plan: StepPlan) -> bool:
        """Whether ids of the plan decide what runs next: a chunk is about to fork, or there are beams."""
        chunks = plan.chunks
        if not np.count_nonzero(self._rows.is_ragged[chunks.rows]):
            return False
        return int(chunks.num_samples.max()) > 1 or any(seq.is_beam for seq in chunks.sequences)

    def _asked(self, logits_SV: torch.Tensor, rows: np.ndarray, where: np.ndarray | None) -> Asked | None:
        """The rows that ask for logprobs, sampled from the logits at their own places or at `where`."""
        counts = self._rows.num_logprobs[rows]
        if not len(rows) or counts.max() == NO_LOGPROBS:
            return None
        (asking,) = (counts != NO_LOGPROBS).nonzero()
        places = asking if where is None else where[asking]
        return Asked(places.tolist(), counts[asking].tolist(), logits_SV)

    # -- steps of a size that is, or could be, a graph ------------------------------------------------

    def _launch_decode(self, plan: StepPlan, decoded: DecodedRows) -> Sample:
        """Launch rows that decode and nothing else, which is what most steps are."""
        rows, size, ids_S, has_logprobs = decoded
        self._graphs.ensure(size)
        self._inputs.send_rows(rows, size.num_rows)
        self._graphs.forward(size)

        def sample() -> WaitForStep:
            logits_SV = self._graphs.sample(size)
            self._decoded = decoded
            asked = self._asked(logits_SV, rows, None) if has_logprobs else None
            return self._readback.take(plan.step, ids_S, len(rows), asked)

        return sample

    def _launch_mixed(self, plan: StepPlan, size: StepSize) -> Sample:
        """Launch few tokens of prompts beside the rows that decode."""
        inputs, chunks = self._inputs, plan.chunks
        self._graphs.ensure(size)
        prompts = Prompts(plan, self._state, first=size.num_rows)
        inputs.send_rows(chunks.rows[prompts.decoding], size.num_rows)
        inputs.send_prompts(prompts, size.num_tokens)
        # decode rows are sampled where they stand, prompts behind them
        drawn = prompts.numbers[chunks.draws[prompts.numbers]]
        sampling = np.concatenate([prompts.decoding, drawn])
        where = np.concatenate([np.arange(len(prompts.decoding)), size.num_rows + np.arange(len(drawn))])
        inputs.send_samples(
            where,
            np.array(prompts.last_places, dtype=np.int64)[sampling],
            chunks.rows[sampling],
            chunks.stops[sampling],
            size.num_rows + MAX_CHUNKS,
        )
        if not is_gpu(self._device):
            self._host_chunks = tuple(prompts.chunks)
        self._graphs.forward(size)

        def sample() -> WaitForStep:
            logits_SV = self._graphs.sample(size)
            self._rows.has_newest[chunks.rows] = chunks.draws
            ids_S = self._scratch.ids_S[: int(where[-1]) + 1 if len(where) else 0]
            asked = self._asked(logits_SV, chunks.rows[sampling], where)
            pending = self._readback.take(plan.step, ids_S, len(chunks), asked)
            return pending.scatter([*zip(sampling.tolist(), where.tolist(), strict=True)])

        return sample

    @torch.inference_mode()
    def _compute_logits(self, size: StepSize) -> torch.Tensor:
        """The kernels of a step of this size up to its logits: everything is read from the device."""
        inputs, num_rows = self._inputs, size.num_rows
        rows_S, num_tokens = inputs.rows_S[:num_rows], num_rows + size.num_tokens
        self._gather(rows_S)
        if not size.num_tokens:
            return self._model.logits(self._forward(num_tokens, rows_S, None))
        num_tiles = inputs.num_tiles(size.num_tokens)
        tiles = PrefillChunks.from_arrays(inputs.tiles_W4[:num_tiles], self._host_chunks)
        places_C = inputs.samples_3C[0, : num_rows + MAX_CHUNKS]
        return self._model.logits(self._forward(num_tokens, rows_S, tiles, (), places_C))

    @torch.inference_mode()
    def _sample_logits(self, size: StepSize, logits_SV: torch.Tensor) -> None:
        """The kernels behind them: the rows of the step are sampled, and advanced on the device."""
        inputs, num_rows = self._inputs, size.num_rows
        if not size.num_tokens:  # the sampled token's place is the one after its input's
            rows_S, positions_S = inputs.rows_S[:num_rows], inputs.decode(num_rows)[0].positions_S + 1
        else:
            _, rows_S, positions_S = inputs.samples_3C[:, : num_rows + MAX_CHUNKS].unbind()
        self._sample_rows(logits_SV, rows_S, positions_S)

    def _gather(self, rows_S: torch.Tensor) -> None:
        """Tokens, positions, slots and lengths of rows that decode, from their state."""
        state, decode = self._rows, self._inputs.decode(len(rows_S))
        if len(rows_S):
            for tables_RB, out in zip(state.tables_KRB, decode, strict=True):
                gather_step(
                    rows_S,
                    state.last_token_R,
                    state.position_R,
                    tables_RB,
                    block_size=self._state.block_size,
                    out=out,
                )

    def _sample_rows(
        self, logits_SV: torch.Tensor, rows_S: torch.Tensor, positions_S: torch.Tensor
    ) -> torch.Tensor:
        """Sample a token for each row at its position; the rows' state goes on from there."""
        state, rows_S, positions_S = self._rows, rows_S.int(), positions_S.contiguous()
        ids_S = sample_rows(logits_SV, state.sampling, rows_S, positions_S, self._scratch)
        advance_rows(rows_S, ids_S, positions_S, state.last_token_R, state.position_R, state.sampling)
        return ids_S

    def _forward(
        self,
        num_tokens: int,
        rows_S: torch.Tensor,
        tiles: PrefillChunks | None,
        batches: Sequence[Batch] = (),
        places_C: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states of all tokens, or of those at `places_C`."""
        table_XT = self._inputs.table_XT
        step = DeviceStep(
            self._store,
            self._rows.tables_KRB,
            self._work,
            block_size=self._state.block_size,
            positions_T=table_XT[1, :num_tokens],
            slots_KT=table_XT[2:, :num_tokens],
            rows_S=rows_S,
            lens_S=self._inputs.lens_S[: len(rows_S)],
            chunks=tiles,
            windows=self._windows,
            dense=(self._dense, batches) if self._dense and batches else None,
            backend=self._backend,
        )
        step.logit_indices = places_C
        hidden_CD: torch.Tensor = self._model(table_XT[0, :num_tokens], step)
        return hidden_CD

    # -- any other step -----------------------------------------------------------------------------

    def _launch_ragged(self, plan: StepPlan) -> Sample:
        chunks = plan.chunks
        num_decoding = int(np.count_nonzero(chunks.stops - chunks.starts == 1))
        prompts = Prompts(plan, self._state, first=self._graphs.padded_rows(num_decoding))
        places, last_rows = needed_tokens(plan, prompts.last_places)
        hidden_CD = self._hidden_of(prompts, chunks.rows, places)
        pooled: Pooled | None = None
        if has_embeddings(plan):  # they arrive before the ids, whose event is waited for
            pooled = pool_hidden(plan, last_rows, hidden_CD)
            pooled = pooled._replace(states_ED=self._readback.fetch(pooled.states_ED))
        if self._needs_host(plan):
            return lambda: self._sample_on_host(plan, last_rows, hidden_CD, pooled)
        asked = [
            each._replace(table=self._readback.fetch(each.table))
            for each in self._sampler.prompt_tables(plan, last_rows, hidden_CD)
        ]
        drawn = chunks.draws.nonzero()[0]
        if not len(drawn):
            self._rows.has_newest[chunks.rows] = False
            return lambda: self._sample_none(plan, asked, pooled)
        packed = np.stack(
            [np.array(last_rows, dtype=np.int64)[drawn], chunks.rows[drawn], chunks.stops[drawn]]
        )
        last_S, rows_S, positions_S = send(torch.from_numpy(packed), self._device).unbind()
        logits_SV = self._model.logits(hidden_CD[last_S] if places is None else hidden_CD)

        @torch.inference_mode()
        def sample() -> WaitForStep:
            ids_S = self._sample_rows(logits_SV, rows_S, positions_S)
            self._rows.has_newest[chunks.rows] = chunks.draws
            of_outputs = self._asked(logits_SV, chunks.rows[drawn], None)
            pending = self._readback.take(plan.step, ids_S, len(chunks), of_outputs)
            places = [(number, place) for place, number in enumerate(drawn.tolist())]
            return pending.scatter(places, asked, pooled)

        return sample

    def _sample_none(self, plan: StepPlan, asked: list[PromptTable], pooled: Pooled | None) -> WaitForStep:
        """The end of a ragged step without a token to sample: there may be something to wait for."""
        if not (asked or pooled):  # the middle of a prompt
            return _nothing_of(plan)
        pending = self._readback.take(plan.step, self._scratch.ids_S[:0], len(plan.chunks))
        return pending.scatter([], asked, pooled)

    @torch.inference_mode()
    def _sample_on_host(
        self, plan: StepPlan, last_rows: list[int], hidden_CD: torch.Tensor, pooled: Pooled | None
    ) -> WaitForStep:
        result = self._sampler.sample(plan, last_rows, hidden_CD)
        self._rows.sampled_on_host(plan.chunks.rows)
        if pooled is None:
            return lambda: result
        arrival = self._readback.take(plan.step, self._scratch.ids_S[:0], 0).scatter([], pooled=pooled)
        return lambda: result._replace(pooled=arrival().pooled)

    def _hidden_of(self, prompts: Prompts, rows: np.ndarray, places: list[int] | None) -> torch.Tensor:
        """Hidden states of a ragged step: of all tokens, or of those at `places`."""
        inputs = self._inputs
        inputs.send_rows(rows[prompts.decoding], prompts.first)
        rows_S = inputs.rows_S[: prompts.first]
        self._gather(rows_S)
        batches, chunks = self._dense.split(prompts.chunks) if self._dense else ([], prompts.chunks)
        tiles: PrefillChunks | None = None
        if len(prompts.numbers):
            inputs.table_XT[:, prompts.first : prompts.end].copy_(
                send(torch.from_numpy(prompts.table_XP), self._device)
            )
        if chunks:
            tiles_W4 = build_prefill_chunks(chunks, tokens_per_tile=inputs.tile_len)
            tiles = PrefillChunks.from_arrays(send(torch.from_numpy(tiles_W4), self._device), chunks)
        places_C = None if places is None else send(torch.tensor(places), self._device)
        return self._forward(prompts.end, rows_S, tiles, batches, places_C)


class MaskedStep:
    """A step whose forward was launched: it is sampled once the masks of its rows are filled.

    `run_smaller` runs it in halves where there is no memory to sample it; `is_on_host`: the host samples it.
    """

    def __init__(
        self,
        plan: StepPlan,
        sample: Sample,
        masks: DeviceMasks,
        *,
        wait_for_steps: Callable[[], None],
        run_smaller: Callable[[torch.OutOfMemoryError], WaitForStep],
        is_on_host: bool,
    ) -> None:
        self._plan, self._sample, self._masks = plan, sample, masks
        self._wait_for_steps, self._run_smaller, self._is_on_host = wait_for_steps, run_smaller, is_on_host
        self._masks_KW = np.empty((0, 0), dtype=np.int32)

    def masks(self, num_rows: int) -> np.ndarray:
        """Pinned memory for so many masks: int32 [num_rows, ceil(vocabulary / 32)].

        The steps before it are waited for, whose sampler fetches the same lines; the engine has read them.
        """
        try:
            self._wait_for_steps()
        except torch.AcceleratorError as error:
            raise DeviceLost(f"the device failed before step {self._plan.step}") from error
        self._masks_KW = self._masks.take(num_rows)
        return self._masks_KW

    def sample(self, numbers: Sequence[int]) -> WaitForStep:
        """Launch the sampler: mask k is that of the chunk `numbers[k]`, and other chunks have none."""
        plan, rows = self._plan, self._plan.chunks.rows

        def keep_masks(lines_KW: np.ndarray) -> None:  # for the host, which samples now or a part at a time
            plan.masks = dict(zip(plan.chunks.seq_ids[numbers].tolist(), lines_KW, strict=True))

        try:
            try:
                if self._is_on_host:
                    keep_masks(self._masks_KW)
                self._masks.send(rows if len(numbers) == len(rows) else rows[numbers])
                return self._sample()
            except torch.OutOfMemoryError as error:
                keep_masks(self._masks_KW.copy())
                return self._run_smaller(error)
        except torch.AcceleratorError as error:
            raise DeviceLost(f"the device failed in step {plan.step}") from error


def _launch_masked(step: UnsampledStep, plan: StepPlan) -> WaitForStep:
    """Sample a step that was begun under the masks that its plan has: a part of a larger one."""
    masks = plan.masks
    seq_ids = plan.chunks.seq_ids.tolist()
    numbers = [number for number, seq_id in enumerate(seq_ids) if seq_id in masks]
    lines_KW = step.masks(len(numbers))
    for line_W, number in zip(lines_KW, numbers, strict=True):
        line_W[:] = masks[seq_ids[number]]
    return step.sample(numbers)


def _nothing_of(plan: StepPlan) -> WaitForStep:
    """The result of a plan that samples nothing."""
    result = StepResult([()] * len(plan.chunks), [()] * len(plan.chunks), {})
    return lambda: result
