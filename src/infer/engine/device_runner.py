"""Run plans on a GPU: state stays there, steps are launched and waited for later.

    launch   transfers, differences of state, then one of
               decode    every chunk is one token, sampled on the device: a CUDA graph       (graphs.py)
               ragged    prompts among them: the same kernels, launched one by one
             and a copy of the sampled ids to pinned memory, with an event behind it
    wait     for that event; ids become a `StepResult`

No launch reads anything back, so the engine may plan and launch the next step before it waits for this
one: the tokens it continues with are on the device. Rows whose sampling needs the host (penalties,
logprobs, beams) take the sampler of the CPU path; the engine does not overlap steps while there are any.

On a CPU the same code runs on the kernels' references, which is how it is tested without a GPU.

Shapes:  T tokens, S rows that decode, C tokens of prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from infer.cache.kv_pool import KVCachePool
from infer.cache.kv_store import KVStore
from infer.engine.device_rows import NO_POSITION, DeviceRows, send
from infer.engine.device_step import DeviceStep
from infer.engine.graphs import DecodeGraphs
from infer.engine.plan import StepPlan
from infer.engine.runner import ModelRunner, StepResult, sequence_seed
from infer.engine.sequence import Sequence as TokenSequence
from infer.errors import DeviceLost
from infer.kernels.attention_decode import DecodeWork
from infer.kernels.attention_prefill import Chunk as PrefillChunk
from infer.kernels.attention_prefill import PrefillChunks, build_prefill_chunks, tokens_per_tile
from infer.kernels.sample_rows import SampleScratch, sample_rows
from infer.kernels.step_state import StepInputs, advance_rows, gather_step
from infer.models.model import Model

_IN_FLIGHT = 3  # result buffers: one step under way, one being read, one spare


class _Results:
    """Pinned memory for the ids of the last few steps, and the events that say they have arrived."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._buffers = [
            torch.zeros(max_rows, dtype=torch.int64, pin_memory=self._is_cuda) for _ in range(_IN_FLIGHT)
        ]
        self._events = [_event() for _ in range(_IN_FLIGHT)] if self._is_cuda else []
        self._next = 0

    def take(self, ids_S: torch.Tensor) -> Callable[[], list[int]]:
        """Begin to copy ids to the host; call the result to wait for them."""
        number = self._next
        self._next = (number + 1) % _IN_FLIGHT
        buffer = self._buffers[number][: len(ids_S)]
        buffer.copy_(ids_S, non_blocking=True)
        if not self._is_cuda:
            ids: list[int] = buffer.tolist()
            return lambda: ids
        event = self._events[number]
        event.record()

        def wait() -> list[int]:
            event.synchronize()
            arrived: list[int] = buffer.tolist()
            return arrived

        return wait


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


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
    ) -> None:
        super().__init__(model, store, pool, max_batch_size=max_batch_size, attention_backend="triton")
        config, device = model.config, store.device
        max_blocks = -(-max_seq_len // pool.block_size)
        self._device = device
        self._state = DeviceRows(2 * max_batch_size, max_blocks, device)
        self._windows = tuple(dict.fromkeys(config.window(layer) for layer in range(config.num_layers)))
        self._work = DecodeWork(
            max_rows=max_batch_size,
            max_len=max_seq_len,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            device=device,
        )
        self._tile_len = tokens_per_tile(config.num_heads, config.num_kv_heads)
        self._scratch = SampleScratch(max_batch_size, config.vocab_size, device)
        self._results = _Results(max_batch_size, device)
        self._rows_S = torch.full((max_batch_size,), -1, dtype=torch.int32, device=device)
        self._rows_sent: list[int] = []
        # tokens, positions and slots of a step: decode rows first, then the tokens of prompts
        self._table_3T = torch.zeros((3, max(max_tokens, max_batch_size)), dtype=torch.int64, device=device)
        self._lens_S = torch.zeros(max_batch_size, dtype=torch.int32, device=device)
        tokens_T, positions_T, slots_T = self._table_3T.unbind()
        self._inputs = StepInputs(tokens_T, positions_T, slots_T, self._lens_S)
        self._graphs = DecodeGraphs(self._decode, self._rows_S, max_batch_size, is_enabled=use_cuda_graphs)

    def forget(self, seq_id: int) -> None:
        """Free the row of a sequence that has left."""
        self._state.forget(seq_id)

    @torch.inference_mode()
    def prepare(self) -> bool:
        """Do one piece of the work that makes later steps quicker; False: nothing is left to do."""
        self._rows_sent = []
        return self._graphs.prepare()

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
            self._state.forget(seq_id)
        self._store.transfer(plan.transfers)
        if not plan.chunks:  # beams coming back compute their next tokens together, once all are here
            return lambda: StepResult([], [], {})
        rows, is_decode = self._sync(plan, sequences)
        self._state.flush()
        if is_decode:
            return self._launch_decode(rows)
        return self._launch_ragged(plan, sequences, rows)

    def _sync(self, plan: StepPlan, sequences: Sequence[TokenSequence]) -> tuple[list[int], bool]:
        """Bring the rows of a plan up to date; whether it is a plain decode step."""
        state, by_seq, next_token = self._state, self._state.by_seq, self._state.next_token
        mask, has_moved = self._pool.block_size - 1, bool(plan.transfers)
        block_table = self._pool.block_table
        rows: list[int] = []
        is_decode = True
        for (seq_id, start, stop, num_samples), seq in zip(plan.chunks, sequences, strict=True):
            row = by_seq.get(seq_id)
            if row is None:
                row = state.enter(seq, sequence_seed(seq.group.seed, seq.index))
                state.sync_table(row, block_table(seq_id), 0)
            elif has_moved or not start & mask or stop - start > 1:
                state.sync_table(row, block_table(seq_id), start // (mask + 1))
            rows.append(row)
            samples_here = num_samples == 1 and not seq.group.samples_on_host
            if stop - start > 1 or not samples_here:
                is_decode = False
            if stop - start == 1 and next_token[row] != start:
                state.send_token(row, seq.tokens[start], start)
        return rows, is_decode

    # -- decode -----------------------------------------------------------------------------------

    def _launch_decode(self, rows: list[int]) -> Callable[[], StepResult]:
        bucket = self._graphs.bucket(len(rows))
        padded = rows + [-1] * (bucket - len(rows))
        if padded != self._rows_sent:
            self._rows_S[:bucket].copy_(send(torch.tensor(padded, dtype=torch.int32), self._device))
            self._rows_sent = padded
        self._graphs.run(bucket)
        next_token = self._state.next_token
        for row in rows:
            next_token[row] += 1
        wait = self._results.take(self._scratch.ids_S[: len(rows)])

        def result() -> StepResult:
            return StepResult([(token,) for token in wait()], [(None,)] * len(rows), {})

        return result

    def _decode(self, num_rows: int) -> None:
        """One token for each of the first rows: everything is read from the device and advanced there."""
        rows_S, state = self._rows_S[:num_rows], self._state
        inputs = self._inputs.first(num_rows)
        gather_step(
            rows_S, state.last_token_R, state.position_R, state.tables_RB,
            block_size=self._pool.block_size, out=inputs,
        )  # fmt: skip
        step = DeviceStep(
            self._store, state.tables_RB, self._work, block_size=self._pool.block_size,
            positions_T=inputs.positions_S, slots_T=inputs.slots_S, rows_S=rows_S, lens_S=inputs.lens_S,
            windows=self._windows,
        )  # fmt: skip
        logits_SV = self._model.logits(self._model(inputs.tokens_S, step))
        # the sampled token's place is the one after its input's
        ids_S = sample_rows(logits_SV, state.sampling, rows_S, inputs.positions_S + 1, self._scratch)
        advance_rows(rows_S, ids_S, state.last_token_R, state.position_R)

    # -- prompts ----------------------------------------------------------------------------------

    def _launch_ragged(
        self, plan: StepPlan, sequences: Sequence[TokenSequence], rows: list[int]
    ) -> Callable[[], StepResult]:
        last_rows, hidden_TD = self._hidden_of(plan, sequences, rows)
        prompt_logprobs = self._prompt_logprobs(plan, sequences, last_rows, hidden_TD)
        num_sampled = sum(chunk.num_samples for chunk in plan.chunks)
        on_host = num_sampled > len(plan.chunks) or any(
            chunk.num_samples > 1 or (chunk.num_samples and seq.group.samples_on_host)
            for chunk, seq in zip(plan.chunks, sequences, strict=True)
        )
        next_token = self._state.next_token
        for row, chunk in zip(rows, plan.chunks, strict=True):
            next_token[row] = chunk.stop if chunk.num_samples and not on_host else NO_POSITION
        if on_host or not num_sampled:
            ids, logprobs = self._sample(plan, sequences, last_rows, hidden_TD)
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
        places, rows_S, positions_S = send(torch.from_numpy(packed), self._device).unbind()
        logits_SV = self._model.logits(hidden_TD[places])
        ids_S = sample_rows(logits_SV, self._state.sampling, rows_S.int(), positions_S, self._scratch)
        self._state.last_token_R.index_copy_(0, rows_S, ids_S.clamp(min=0))
        self._state.position_R.index_copy_(0, rows_S, positions_S)
        wait = self._results.take(ids_S)

        def result() -> StepResult:
            ids: list[tuple[int, ...]] = [()] * len(plan.chunks)
            for number, token in zip(sampling, wait(), strict=True):
                ids[number] = (token,)
            return StepResult(ids, [(None,) * len(row) for row in ids], prompt_logprobs)

        return result

    def _hidden_of(
        self, plan: StepPlan, sequences: Sequence[TokenSequence], rows: list[int]
    ) -> tuple[list[int], torch.Tensor]:
        """Hidden states of a ragged step, and the place of each chunk's last token in them."""
        block_size, state = self._pool.block_size, self._state
        decoding = [n for n, chunk in enumerate(plan.chunks) if chunk.stop - chunk.start == 1]
        prompts = [n for n, chunk in enumerate(plan.chunks) if chunk.stop - chunk.start > 1]
        last_rows = [0] * len(plan.chunks)
        for place, number in enumerate(decoding):
            last_rows[number] = place
        num_rows = place = len(decoding)
        tokens: list[int] = []
        positions: list[np.ndarray] = []
        slots: list[np.ndarray] = []
        chunks: list[PrefillChunk] = []
        for number in prompts:
            seq_id, start, stop, _ = plan.chunks[number]
            tokens += sequences[number].tokens[start:stop]
            where = np.arange(start, stop)
            table = np.array(self._pool.block_table(seq_id)[: -(-stop // block_size)])
            positions.append(where)
            slots.append(table[where // block_size] * block_size + where % block_size)
            chunks.append(PrefillChunk(place, stop - start, rows[number], start))
            place += stop - start
            last_rows[number] = place - 1
        rows_S = self._rows_S[:0]
        if decoding:
            rows_S = send(torch.tensor([rows[n] for n in decoding], dtype=torch.int32), self._device)
            gather_step(
                rows_S, state.last_token_R, state.position_R, state.tables_RB,
                block_size=block_size, out=self._inputs.first(num_rows),
            )  # fmt: skip
        tiles: PrefillChunks | None = None
        if prompts:
            prompt_3C = np.stack([np.array(tokens), np.concatenate(positions), np.concatenate(slots)])
            self._table_3T[:, num_rows:place].copy_(send(torch.from_numpy(prompt_3C), self._device))
            tiles_W4 = build_prefill_chunks(chunks, tokens_per_tile=self._tile_len)
            tiles = PrefillChunks.from_arrays(send(torch.from_numpy(tiles_W4), self._device), chunks)
        step = DeviceStep(
            self._store, state.tables_RB, self._work, block_size=block_size,
            positions_T=self._table_3T[1, :place], slots_T=self._table_3T[2, :place],
            rows_S=rows_S, lens_S=self._lens_S[:num_rows], chunks=tiles, windows=self._windows,
        )  # fmt: skip
        hidden_TD: torch.Tensor = self._model(self._table_3T[0, :place], step)
        return last_rows, hidden_TD
