"""Run a `StepPlan` in plain PyTorch, or with the C kernels of a CPU: copy blocks, run the model, sample.

transfers ── the store moves blocks the books have already moved
batch     ── the plan's integers become tensors                          (execution/batch.py)
model     ── hidden states of the tokens that are read: behind the last attention there are no others
logits    ── only of the rows that sample, or whose logprobs were asked for
sample    ── one token per sampling row, several for a chunk about to fork (execution/host_sampling.py)
pool      ── hidden states of the chunks of embeddings                   (execution/embedding.py)

Where rows that decode and prompts have different backends, the step is split into one for each
(execution/split_step.py).
"""

from __future__ import annotations

import torch

from infer.cache.kv_store import KVStore
from infer.config.backends import REFERENCE
from infer.errors import DeviceLost
from infer.execution.batch import PagedStep, has_embeddings, needed_tokens
from infer.execution.cpu_step import CpuSteps, attention_library
from infer.execution.embedding import pool_hidden
from infer.execution.halves import SmallerSteps
from infer.execution.host_sampling import HostSampler
from infer.execution.runner import StepResult, SyncRunner
from infer.execution.split_step import split_step
from infer.layers.attention import StepContext
from infer.models.model import Model
from infer.scheduling.batch_state import BatchState
from infer.scheduling.plan import StepPlan


class ModelRunner(SyncRunner):
    """A model, a store, and one device that is waited for."""

    can_embed = True

    def __init__(
        self,
        model: Model,
        store: KVStore,
        state: BatchState,
        *,
        max_batch_size: int,
        attention_backend: str,
        decode_attention_backend: str | None = None,
        record_cpu_step: bool = True,
    ) -> None:
        self._model = model
        self.vocab_size = model.config.vocab_size
        self._store = store
        self._state = state
        self._smaller = SmallerSteps(self.run)
        self.arena: object = None  # what holds the memory of its steps, if anything does
        self._backend, self._decode_backend = attention_backend, decode_attention_backend or attention_backend
        self._is_split = self._backend != self._decode_backend
        self._cpu: CpuSteps | None = None
        if "c" in (self._backend, self._decode_backend):
            c = attention_library(store.device, store.dtype, model.config.head_dim)
            assert c is not None, "resolve.py has asked whether the C kernel can"
            records = record_cpu_step and not self._is_split
            self._cpu = CpuSteps(c, model, store, state, max_batch_size, record=records)
        logits = None if self._cpu is None else self._cpu.logits
        self._sampler = HostSampler(model, logits=logits)

    @property
    def attention(self) -> tuple[str, str]:
        """What computes attention of prompts, and of rows that decode."""
        return self._backend, self._decode_backend

    def prepare(self) -> bool:
        """Do one piece of the work that makes later steps quicker; False: nothing is left to do."""
        return False

    def run(self, plan: StepPlan) -> StepResult:
        """Execute the plan; see the module's docstring for the order."""
        try:
            with torch.inference_mode():
                self._store.transfer(plan.transfers)
                if not plan.chunks:  # beams coming back compute their next tokens together, once all are here
                    return StepResult([], [], {})
                try:
                    return self._compute(plan)
                except torch.OutOfMemoryError as error:
                    return self._smaller.run(plan, error)
        except torch.AcceleratorError as error:
            raise DeviceLost(f"the device failed in step {plan.step}") from error

    def _compute(self, plan: StepPlan) -> StepResult:
        hidden_TD, last_rows = self._hidden(plan)
        result = self._sampler.sample(plan, last_rows, hidden_TD)
        if not has_embeddings(plan):
            return result
        return result._replace(pooled=pool_hidden(plan, last_rows, hidden_TD).by_sequence())

    def _hidden(self, plan: StepPlan) -> tuple[torch.Tensor, list[int]]:
        """Hidden states of the needed tokens, and where the last one of each chunk is among them."""
        if self._cpu is not None and not self._is_split:
            return self._cpu.run(plan)
        paged = self._paged(plan, self._backend)
        step: StepContext = paged
        if self._is_split:
            backends = self._decode_backend, self._backend
            step = split_step(plan, paged.positions, self._context, backends)
        places, last_rows = needed_tokens(plan, paged.last_rows)
        step.logit_indices = None if places is None else torch.tensor(places, device=self._store.device)
        return self._model(paged.tokens_T, step), last_rows

    def _paged(self, plan: StepPlan, backend: str) -> PagedStep:
        """The step of some chunks in plain PyTorch."""
        return PagedStep(plan, self._state, self._store, use_reference=backend == REFERENCE)

    def _context(self, plan: StepPlan, backend: str) -> StepContext:
        """The step of some of a plan's chunks, with one backend for all of them."""
        if backend == "c":
            assert self._cpu is not None
            return self._cpu.context(plan)
        return self._paged(plan, backend)
