"""Run a `StepPlan` on one device: copy blocks, run the model, sample.

    transfers ── the store moves blocks the books have already moved
    batch     ── the plan's integers become tensors                          (execution/batch.py)
    model     ── hidden states of the tokens that anybody reads: behind the last attention there are no others
    logits    ── only of the rows that sample, or whose logprobs were asked for
    sample    ── one token per sampling row, several for a chunk about to fork

The runner owns tensors and no decisions; the engine can hand it any plan twice and get the same ids.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from infer.cache.kv_pool import KVCachePool
from infer.cache.kv_store import KVStore
from infer.errors import DeviceLost
from infer.execution.batch import BlockRows, PagedStep, StepBatch, reads_prompt, wanted
from infer.execution.cpu_step import CpuSteps, can_run
from infer.kernels.attention.reference import attend_sdpa
from infer.kernels.cpu.library import library
from infer.kernels.runtime.torch_threads import threads_for
from infer.layers.whole_sequence import WholeSequence
from infer.models.model import Model
from infer.sampling.logprobs import top_logprobs
from infer.sampling.params import RowLogprobs
from infer.sampling.sampler import SampleRow, sample
from infer.scheduling.beam import num_offers
from infer.scheduling.plan import StepPlan
from infer.scheduling.sequence import Sequence as TokenSequence

POOLINGS = ("last", "mean")
EMBED_CHUNK = 512  # tokens of a prompt to embed that are computed at once
LOGPROB_ROWS = 64  # rows of logits held at once for prompt logprobs: 64 * 150k * 4 bytes = 38 MB


class StepResult(NamedTuple):
    """What a step produced, chunk by chunk of its plan."""

    ids: list[tuple[int, ...]]  # the sampled ids; empty where the chunk samples nothing
    logprobs: list[tuple[RowLogprobs | None, ...]]
    prompt_logprobs: dict[int, list[RowLogprobs]]  # by seq_id: of the prompt tokens after this chunk's own
    is_whole: bool = False  # True: the runner has seen to it that none of the ids is NO_TOKEN


class Runner(Protocol):
    """Whoever can execute plans: a model on a device, or a stand-in for tests and simulations."""

    def launch(self, plan: StepPlan, sequences: Sequence[TokenSequence]) -> Callable[[], StepResult]:
        """Begin a plan whose chunks belong to `sequences`, in order; call what it returns to wait for it."""
        ...

    def forget(self, seq_id: int) -> None:
        """Drop whatever is kept for a sequence that has left."""
        ...


class SyncRunner(ABC):
    """A runner that is done when it returns."""

    @abstractmethod
    def run(self, plan: StepPlan, sequences: Sequence[TokenSequence]) -> StepResult:
        """Execute a plan."""

    def launch(self, plan: StepPlan, sequences: Sequence[TokenSequence]) -> Callable[[], StepResult]:
        """Execute the plan at once; nothing is left to wait for."""
        result = self.run(plan, sequences)
        return lambda: result


class ModelRunner(SyncRunner):
    """The real one: a model, a store, and one device."""

    def __init__(
        self,
        model: Model,
        store: KVStore,
        pool: KVCachePool,
        *,
        max_batch_size: int,
        attention_backend: str,
        use_cpu_program: bool = True,
    ) -> None:
        self._model = model
        self._store = store
        self._pool = pool
        self._use_reference = attention_backend == "naive"
        max_blocks = -(-model.config.context_len // pool.block_size)
        # twice: a sequence may be preempted and another admitted within one plan
        self._rows = BlockRows(2 * max_batch_size, max_blocks)
        self._cpu: CpuSteps | None = None
        if attention_backend == "auto" and can_run(model, store) and (c := library()):
            self._cpu = CpuSteps(
                c, model, store, pool, self._rows, max_batch_size, use_program=use_cpu_program
            )

    def forget(self, seq_id: int) -> None:
        """Free the row of a sequence that has left."""
        self._rows.forget(seq_id)

    def prepare(self) -> bool:
        """Do one piece of the work that makes later steps quicker; False: nothing is left to do."""
        return False

    def run(self, plan: StepPlan, sequences: Sequence[TokenSequence]) -> StepResult:
        """Execute the plan; see the module's docstring for the order."""
        try:
            with torch.inference_mode():
                return self._run(plan, sequences)
        except torch.AcceleratorError as error:
            raise DeviceLost(f"the device failed in step {plan.step}") from error

    def _run(self, plan: StepPlan, sequences: Sequence[TokenSequence]) -> StepResult:
        for seq_id in plan.preempted:
            self._rows.forget(seq_id)
        self._store.transfer(plan.transfers)
        if not plan.chunks:  # beams coming back compute their next tokens together, once all are here
            return StepResult([], [], {})
        hidden_TD, last_rows = self._hidden(plan, sequences)
        ids, logprobs = self._sample(plan, sequences, last_rows, hidden_TD)
        return StepResult(ids, logprobs, self._prompt_logprobs(plan, sequences, last_rows, hidden_TD))

    def _hidden(self, plan: StepPlan, sequences: Sequence[TokenSequence]) -> tuple[torch.Tensor, list[int]]:
        """Hidden states of the tokens that are wanted, and where the last one of each chunk is among them."""
        if self._cpu is not None:
            return self._cpu.run(plan, sequences)
        batch = StepBatch(plan, sequences, self._rows, self._pool, self._store.device)
        step = PagedStep(batch, self._store, use_reference=self._use_reference)
        places, last_rows = wanted(plan, sequences, batch.last_rows)
        step.logit_indices = None if places is None else torch.tensor(places, device=self._store.device)
        return self._model(batch.tokens_T, step), last_rows

    @torch.inference_mode()
    def embed(self, prompt: Sequence[int], pooling: str) -> list[float]:
        """Run a prompt beside the cache, in chunks and pool its hidden states."""
        step = WholeSequence(attend_sdpa, self._store.device)
        sum_D = last_D = torch.zeros(self._model.config.hidden_size, device=self._store.device)
        for first in range(0, len(prompt), EMBED_CHUNK):
            tokens_T = torch.tensor(prompt[first : first + EMBED_CHUNK], device=self._store.device)
            step.advance(len(tokens_T))
            hidden_TD = self._model(tokens_T, step).float()
            sum_D, last_D = sum_D + hidden_TD.sum(dim=0), hidden_TD[-1]
        pooled_D = last_D if pooling == "last" else sum_D / len(prompt)
        embedding: list[float] = pooled_D.tolist()
        return embedding

    def _sample(
        self,
        plan: StepPlan,
        sequences: Sequence[TokenSequence],
        last_rows: list[int],
        hidden_TD: torch.Tensor,
    ) -> tuple[list[tuple[int, ...]], list[tuple[RowLogprobs | None, ...]]]:
        places: list[int] = []
        rows: list[SampleRow] = []
        for chunk, seq, last_row in zip(plan.chunks, sequences, last_rows, strict=True):
            for index in range(chunk.num_samples):
                places.append(last_row)
                rows.append(sample_row(seq, seq.index + index))
        ids: list[tuple[int, ...]] = [()] * len(plan.chunks)
        logprobs: list[tuple[RowLogprobs | None, ...]] = [()] * len(plan.chunks)
        if not rows:
            return ids, logprobs
        # Decoding: every token is its chunk's last. Equal counts alone could be one chunk about to fork.
        all_sample = len(places) == hidden_TD.shape[0] and places == list(range(len(places)))
        logits_SV = self._model.logits(hidden_TD if all_sample else hidden_TD[places])
        with threads_for(len(rows)):
            samples = sample(logits_SV, rows)
        first = 0
        for number, chunk in enumerate(plan.chunks):
            last = first + chunk.num_samples
            ids[number] = tuple(samples.ids[first:last])
            logprobs[number] = tuple(samples.logprobs[first:last])
            first = last
        return ids, logprobs

    def _prompt_logprobs(
        self,
        plan: StepPlan,
        sequences: Sequence[TokenSequence],
        last_rows: list[int],
        hidden_TD: torch.Tensor,
    ) -> dict[int, list[RowLogprobs]]:
        """Logprobs of the prompt tokens that follow this step's tokens, a few rows of logits at a time."""
        found: dict[int, list[RowLogprobs]] = {}
        for chunk, seq, last_row in zip(plan.chunks, sequences, last_rows, strict=True):
            count = seq.group.request.params.prompt_logprobs
            if count is None or not reads_prompt(chunk, seq):
                continue
            stop = min(chunk.stop, seq.num_prompt - 1)
            place = last_row + 1 - (chunk.stop - chunk.start) - chunk.start  # of position 0, were it here
            rows: list[RowLogprobs] = []
            for first in range(chunk.start, stop, LOGPROB_ROWS):
                last = min(first + LOGPROB_ROWS, stop)
                logits = self._model.logits(hidden_TD[place + first : place + last])
                chosen = seq.tokens[first + 1 : last + 1]
                rows += [
                    row for row in top_logprobs(logits, chosen, [count] * len(chosen)) if row is not None
                ]
            found[seq.seq_id] = rows
        return found


def sample_row(seq: TokenSequence, index: int) -> SampleRow:
    """How to sample the next token of a sequence, or of the `index`-th sequence it is about to become."""
    params = seq.group.request.params
    num_logprobs = params.logprobs
    if params.use_beam_search:
        num_logprobs = num_offers(seq.group)
    elif num_logprobs is None and params.num_sequences > params.n:
        num_logprobs = 0  # ranking needs the chosen token's logprob
    return SampleRow(
        params=params,
        seed=sequence_seed(seq.group.seed, index),
        position=seq.num_tokens,
        num_prompt=seq.num_prompt,
        tokens=seq.tokens,
        banned=seq.group.stop_ids if seq.num_output < params.min_tokens else (),
        num_logprobs=num_logprobs,
    )


def sequence_seed(seed: int, index: int) -> int:
    """The seed of a request's `index`-th sequence; the first one has the request's own."""
    return seed + index * 0x5851F42D4C957F2D
