"""Run plans on a GPU: state stays there, steps are launched and waited for later.

    launch   transfers, differences of state, then one of
               sized     rows that decode and few tokens of prompts, padded: a CUDA graph    (graphs.py)
               ragged    anything else: the same kernels, launched one by one
             and a copy of the sampled ids to pinned memory, with an event behind it
    wait     for that event; ids become a `StepResult`

No launch reads anything back, so the engine may plan and launch the next steps before it waits for this
one: the tokens they continue with are on the device. Rows whose sampling needs the host (penalties,
logprobs, beams) take the sampler of the CPU path; the engine does not overlap steps while there are any.

On a CPU the same code runs on the kernels' references, which is how it is tested without a GPU.

Shapes:  T tokens, S rows that decode, C tokens whose hidden states are wanted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from infer.cache.kv_pool import KVCachePool
from infer.cache.kv_store import KVStore
from infer.errors import DeviceLost
from infer.execution.batch import reads_prompt, wanted
from infer.execution.gpu.graphs import StepGraphs, StepSize, most_tokens
from infer.execution.gpu.readback import Results, to_result
from infer.execution.gpu.rows import NO_POSITION, DeviceRows, send
from infer.execution.gpu.step import DeviceStep, prepare_backend
from infer.execution.gpu.step_inputs import MAX_CHUNKS, DeviceInputs, Prompts
from infer.execution.runner import ModelRunner, StepResult, sequence_seed
from infer.kernels.attention.decode_work import DecodeWork
from infer.kernels.attention.dense import Batch, DenseAttention
from infer.kernels.attention.prefill import PrefillChunk, PrefillChunks, build_prefill_chunks, tokens_per_tile
from infer.kernels.elementwise.step_state import StepInputs, advance_rows, gather_step
from infer.kernels.sampling.sample_rows import SampleScratch, compile_sample_rows, sample_rows
from infer.models.model import Model
from infer.sampling.sampler import NO_TOKEN
from infer.scheduling.plan import StepPlan
from infer.scheduling.sequence import Sequence as TokenSequence

logger = logging.getLogger(__name__)

_PADDING_STEP = 1024  # tokens: many, for every kernel that chooses by their number


def _needs_the_host(plan: StepPlan, sequences: Sequence[TokenSequence]) -> bool:
    """Whether a chunk of the plan is sampled on the host, or its logits are needed there."""
    return any(
        chunk.num_samples > 1 or seq.group.samples_on_host or reads_prompt(chunk, seq)
        for chunk, seq in zip(plan.chunks, sequences, strict=True)
    )


class _Decoded(NamedTuple):
    """A step that decoded and did nothing else: the next is often the same, one token on."""

    sequences: Sequence[TokenSequence]
    rows: list[int]
    size: StepSize


class DeviceRunner(ModelRunner):
    """A model whose decode state lives beside it."""

    def __init__(
        self,
        model: Model,
        store: KVStore,
        pool: KVCachePool,
        *,
        max_batch_size: int,
        max_tokens: int,
        max_seq_len: int,
        use_cuda_graphs: bool,
        attention_backend: str = "triton",
        steps_ahead: int = 1,
    ) -> None:
        super().__init__(model, store, pool, max_batch_size=max_batch_size, attention_backend="triton")
        config, device = model.config, store.device
        max_blocks = -(-max_seq_len // pool.block_size)
        self._device = device
        self._state = DeviceRows(2 * max_batch_size, max_blocks, device)
        self._scratch = SampleScratch(max_batch_size + MAX_CHUNKS, config.vocab_size, device)
        self._backend = prepare_backend(attention_backend, config, store, pool.block_size, max_batch_size)
        compile_sample_rows(self._state.sampling, self._scratch, store.keys[0].dtype)  # beside what follows
        self._windows = tuple(dict.fromkeys(config.window(layer) for layer in range(config.num_layers)))
        self._work = DecodeWork(
            max_rows=max_batch_size,
            max_len=max_seq_len,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            device=device,
            backend=self._backend,
        )
        tile_len = tokens_per_tile(config.num_heads, config.num_kv_heads)
        max_graph_tokens = most_tokens(config, max_tokens) if use_cuda_graphs else 0
        self._inputs = DeviceInputs(max_batch_size, max_tokens, max_graph_tokens, tile_len, device)
        self._results = Results(max_batch_size + MAX_CHUNKS, device, steps_ahead=steps_ahead)
        self._last: _Decoded | None = None  # as long as all of its sequences keep their rows
        self._dense: DenseAttention | None = None
        if attention_backend == "auto" and self._windows == (None,):
            self._dense = DenseAttention(
                num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
                scale=config.scale, dtype=store.keys[0].dtype, device=device, max_tokens=max_tokens,
            )  # fmt: skip
        self._pads, self._max_tokens = device.type == "cuda" and self._backend != "flash", max_tokens
        self._padded: set[int] = set()  # numbers of tokens
        self._host_chunks: tuple[PrefillChunk, ...] = ()  # for the reference of prefill attention alone
        self._graphs = StepGraphs(
            self._launch_kernels,
            self._inputs.blank,
            max_rows=max_batch_size,
            max_tokens=max_graph_tokens,
            captures=use_cuda_graphs and device.type == "cuda",
        )

    def forget(self, seq_id: int) -> None:
        """Free the row of a sequence that has left."""
        self._state.forget(seq_id)
        self._last = None

    @torch.inference_mode()
    def prepare(self) -> bool:
        """Do one piece of the work that makes later steps quicker; False: nothing is left to do."""
        return (
            self._run_padding(min(_PADDING_STEP, self._max_tokens))
            or self._graphs.prepare()
            or (self._dense is not None and self._dense.prepare())
            or self._run_padding(self._max_tokens)
        )

    def _run_padding(self, num_tokens: int) -> bool:
        """A ragged step of padding, which writes nothing; False: there has been one of this size.

        Of many tokens, for their kernels, which no graph has; of the most there can be, for their memory.
        """
        if not self._pads or num_tokens in self._padded:
            return False
        self._padded.add(num_tokens)
        self._inputs.blank()
        batches = self._dense.split([PrefillChunk(0, num_tokens, 0, 0)])[0] if self._dense else []
        tiles_W4 = torch.zeros((1, 4), dtype=torch.int32, device=self._device)
        tiles = PrefillChunks.from_arrays(tiles_W4, [PrefillChunk(0, 0, 0, 0)])
        try:
            self._forward(num_tokens, self._inputs.rows_S[:0], tiles, batches)
        except torch.AcceleratorError:
            raise
        except Exception:  # out of memory, say: a prompt may still find room
            logger.exception("what steps of %d tokens need is made when the first one comes", num_tokens)
        return True

    def run(self, plan: StepPlan, sequences: Sequence[TokenSequence]) -> StepResult:
        """Launch and wait."""
        return self.launch(plan, sequences)()

    def launch(self, plan: StepPlan, sequences: Sequence[TokenSequence]) -> Callable[[], StepResult]:
        """Begin a plan; see the module's docstring for the order."""
        try:
            with torch.inference_mode():
                wait = self._launch(plan, sequences)
        except torch.AcceleratorError as error:
            raise DeviceLost(f"the device failed in step {plan.step}") from error

        def wait_or_say_why() -> StepResult:
            try:
                return wait()
            except torch.AcceleratorError as error:
                raise DeviceLost(f"the device failed in step {plan.step}") from error

        return wait_or_say_why

    def _launch(self, plan: StepPlan, sequences: Sequence[TokenSequence]) -> Callable[[], StepResult]:
        for seq_id in plan.preempted:
            self.forget(seq_id)
        self._store.transfer(plan.transfers)
        if not plan.chunks:  # beams coming back compute their next tokens together, once all are here
            return lambda: StepResult([], [], {})
        last, self._last = self._last, None
        if last is not None and self._go_on(plan, sequences, last):
            self._state.flush()
            return self._launch_decode(last)
        rows, size = self._sync(plan, sequences)
        self._state.flush()
        if size is None or (self._state.on_host and _needs_the_host(plan, sequences)):
            return self._launch_ragged(plan, sequences, rows)
        if size.num_tokens:
            return self._launch_mixed(plan, sequences, rows, size)
        return self._launch_decode(_Decoded(sequences, rows, size))

    def _go_on(self, plan: StepPlan, sequences: Sequence[TokenSequence], last: _Decoded) -> bool:
        """Bring tables up to date if this is the last step, one token on; False: it is another."""
        if sequences != last.sequences or plan.transfers:
            return False
        if not self._state.is_decoding(last.rows[0], plan.chunks[0].start):
            return False  # without a cache everybody starts over in every step: the first tells for all
        by_seq, block_table = self._state.by_seq, self._pool.block_table
        for seq_id in plan.grown:
            blocks = block_table(seq_id)
            self._state.sync_table(by_seq[seq_id], blocks, len(blocks) - 1)
        return True

    def _sync(self, plan: StepPlan, sequences: Sequence[TokenSequence]) -> tuple[list[int], StepSize | None]:
        """Bring the rows of a plan up to date; they, and the size with room for the step if there is one."""
        state, by_seq, next_token = self._state, self._state.by_seq, self._state.next_token
        block_size, has_moved = self._pool.block_size, bool(plan.transfers)
        block_table = self._pool.block_table
        rows: list[int] = []
        num_prompts = num_prompt_tokens = 0
        is_odd = False
        for chunk, seq in zip(plan.chunks, sequences, strict=True):
            seq_id, start = chunk.seq_id, chunk.start
            row = by_seq.get(seq_id)
            num_tokens = chunk.stop - start
            if row is None:
                row = state.enter(seq, sequence_seed(seq.group.seed, seq.index))
                state.sync_table(row, block_table(seq_id), 0)
            elif has_moved or num_tokens > 1 or not start % block_size:
                state.sync_table(row, block_table(seq_id), start // block_size)
            rows.append(row)
            if num_tokens > 1:
                num_prompts += 1
                num_prompt_tokens += num_tokens
            elif next_token[row] != start:  # else it goes on where it was
                state.send_token(row, seq.tokens[start], start)
                # one token of a prompt that goes on is neither a row that decodes nor worth a size of its own
                is_odd = is_odd or not chunk.num_samples
        if is_odd or num_prompts > MAX_CHUNKS:
            return rows, None
        return rows, self._graphs.size_for(len(rows) - num_prompts, num_prompt_tokens)

    # -- steps of a size that is, or could be, a graph ------------------------------------------------

    def _launch_decode(self, step: _Decoded) -> Callable[[], StepResult]:
        """Rows that decode and nothing else, which is what most steps are."""
        self._graphs.ensure(step.size)
        self._inputs.send_rows(step.rows, step.size.num_rows)
        self._state.decode(step.rows)
        self._graphs.run(step.size)
        self._last = step
        wait = self._results.take(self._scratch.ids_S[: len(step.rows)])

        def result() -> StepResult:
            ids = wait()
            return StepResult(list(zip(ids)), [(None,)] * len(ids), {}, is_whole=NO_TOKEN not in ids)

        return result

    def _launch_mixed(
        self, plan: StepPlan, sequences: Sequence[TokenSequence], rows: list[int], size: StepSize
    ) -> Callable[[], StepResult]:
        """Few tokens of prompts beside the rows that decode."""
        inputs, next_token = self._inputs, self._state.next_token
        self._graphs.ensure(size)
        prompts = Prompts(plan, sequences, rows, self._pool, first=size.num_rows)
        inputs.send_rows([rows[n] for n in prompts.decoding], size.num_rows)
        inputs.send_prompts(prompts, size.num_tokens)
        # decode rows are sampled where they stand, prompts behind them
        sampling = prompts.decoding + [n for n in prompts.numbers if plan.chunks[n].num_samples]
        num_prompts = len(sampling) - len(prompts.decoding)
        where = [*range(len(prompts.decoding)), *range(size.num_rows, size.num_rows + num_prompts)]
        inputs.send_samples(
            where,
            [prompts.last_places[n] for n in sampling],
            [rows[n] for n in sampling],
            [plan.chunks[n].stop for n in sampling],
            size.num_rows + MAX_CHUNKS,
        )
        if self._device.type != "cuda":
            self._host_chunks = tuple(prompts.chunks)
        for row, chunk in zip(rows, plan.chunks, strict=True):
            next_token[row] = chunk.stop if chunk.num_samples else NO_POSITION
        self._graphs.run(size)
        wait = self._results.take(self._scratch.ids_S[: where[-1] + 1 if where else 0])

        def result() -> StepResult:
            drawn = wait()
            return to_result(len(plan.chunks), sampling, [drawn[place] for place in where], {})

        return result

    def _launch_kernels(self, size: StepSize) -> None:
        """All kernels of a step of this size: everything is read from the device and advanced there."""
        inputs, num_rows = self._inputs, size.num_rows
        rows_S, num_tokens = inputs.rows_S[:num_rows], num_rows + size.num_tokens
        decode = self._gather(rows_S)
        if not size.num_tokens:
            hidden_SD = self._forward(num_tokens, rows_S, None)
            # the sampled token's place is the one after its input's
            positions_S = decode.positions_S + 1
        else:
            num_tiles = inputs.num_tiles(size.num_tokens)
            tiles = PrefillChunks.from_arrays(inputs.tiles_W4[:num_tiles], self._host_chunks)
            samples_3C = inputs.samples_3C[:, : num_rows + MAX_CHUNKS]
            hidden_SD = self._forward(num_tokens, rows_S, tiles, (), samples_3C[0])
            _, rows_S, positions_S = samples_3C.unbind()
        self._draw(self._model.logits(hidden_SD), rows_S, positions_S)

    def _gather(self, rows_S: torch.Tensor) -> StepInputs:
        """Tokens, positions, slots and lengths of rows that decode, from their state."""
        state, decode = self._state, self._inputs.decode(len(rows_S))
        if len(rows_S):
            gather_step(
                rows_S, state.last_token_R, state.position_R, state.tables_RB,
                block_size=self._pool.block_size, out=decode,
            )  # fmt: skip
        return decode

    def _draw(self, logits_SV: torch.Tensor, rows_S: torch.Tensor, positions_S: torch.Tensor) -> torch.Tensor:
        """Sample a token for each row at its position; the rows' state goes on from there."""
        state, rows_S, positions_S = self._state, rows_S.int(), positions_S.contiguous()
        ids_S = sample_rows(logits_SV, state.sampling, rows_S, positions_S, self._scratch)
        advance_rows(rows_S, ids_S, positions_S, state.last_token_R, state.position_R)
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
        table_3T = self._inputs.table_3T
        step = DeviceStep(
            self._store, self._state.tables_RB, self._work, block_size=self._pool.block_size,
            positions_T=table_3T[1, :num_tokens], slots_T=table_3T[2, :num_tokens],
            rows_S=rows_S, lens_S=self._inputs.lens_S[: len(rows_S)], chunks=tiles, windows=self._windows,
            dense=(self._dense, batches) if self._dense and batches else None, backend=self._backend,
        )  # fmt: skip
        step.logit_indices = places_C
        hidden_CD: torch.Tensor = self._model(table_3T[0, :num_tokens], step)
        return hidden_CD

    # -- any other step -----------------------------------------------------------------------------

    def _launch_ragged(
        self, plan: StepPlan, sequences: Sequence[TokenSequence], rows: list[int]
    ) -> Callable[[], StepResult]:
        prompts = Prompts(plan, sequences, rows, self._pool)
        places, last_rows = wanted(plan, sequences, prompts.last_places)
        hidden_CD = self._hidden_of(prompts, rows, places)
        prompt_logprobs = self._prompt_logprobs(plan, sequences, last_rows, hidden_CD)
        num_sampled = sum(chunk.num_samples for chunk in plan.chunks)
        on_host = num_sampled > len(plan.chunks) or any(
            chunk.num_samples > 1 or (chunk.num_samples and seq.group.samples_on_host)
            for chunk, seq in zip(plan.chunks, sequences, strict=True)
        )
        next_token = self._state.next_token
        for row, chunk in zip(rows, plan.chunks, strict=True):
            next_token[row] = chunk.stop if chunk.num_samples and not on_host else NO_POSITION
        if on_host or not num_sampled:
            ids, logprobs = self._sample(plan, sequences, last_rows, hidden_CD)
            return lambda: StepResult(ids, logprobs, prompt_logprobs)

        sampling = [number for number, chunk in enumerate(plan.chunks) if chunk.num_samples]
        packed = np.array(
            [
                [last_rows[number] for number in sampling],
                [rows[number] for number in sampling],
                [plan.chunks[number].stop for number in sampling],
            ],
            dtype=np.int64,
        )
        last_S, rows_S, positions_S = send(torch.from_numpy(packed), self._device).unbind()
        hidden_SD = hidden_CD[last_S] if places is None else hidden_CD
        wait = self._results.take(self._draw(self._model.logits(hidden_SD), rows_S, positions_S))

        return lambda: to_result(len(plan.chunks), sampling, wait(), prompt_logprobs)

    def _hidden_of(self, prompts: Prompts, rows: list[int], places: list[int] | None) -> torch.Tensor:
        """Hidden states of a ragged step: of all tokens, or of those at `places`."""
        inputs = self._inputs
        rows_S = inputs.rows_S[:0]
        if prompts.decoding:
            rows_S = send(torch.tensor([rows[n] for n in prompts.decoding], dtype=torch.int32), self._device)
            self._gather(rows_S)
        batches, chunks = self._dense.split(prompts.chunks) if self._dense else ([], prompts.chunks)
        tiles: PrefillChunks | None = None
        if prompts.numbers:
            inputs.table_3T[:, prompts.first : prompts.end].copy_(
                send(torch.from_numpy(prompts.table_3P), self._device)
            )
        if chunks:
            tiles_W4 = build_prefill_chunks(chunks, tokens_per_tile=inputs.tile_len)
            tiles = PrefillChunks.from_arrays(send(torch.from_numpy(tiles_W4), self._device), chunks)
        places_C = None if places is None else send(torch.tensor(places), self._device)
        return self._forward(prompts.end, rows_S, tiles, batches, places_C)
