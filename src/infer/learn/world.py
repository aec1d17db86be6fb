"""A real engine around a model that can be wrong in only one way: by reading the wrong memory.

`HashModel` stores token ids where a model stores keys and values. For each row it writes the step's tokens
into their slots, reads the whole sequence back through the row's block table, and computes the next token
from it. A block that two sequences use by mistake, or that was freed too early, shows as a wrong token.

The scheduler, the cache's bookkeeping and the requests are the engine's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from infer.cache.block_allocator import BlockAllocator
from infer.cache.paged_pool import PagedKVCachePool
from infer.config.defaults import SIMULATED_STEPS
from infer.config.resolve import resolve_scheduler
from infer.config.settings import CacheConfig, EngineConfig, SchedulerConfig
from infer.engine.device_build import shape_of
from infer.engine.engine import Engine
from infer.engine.speculation import Speculation
from infer.execution.device import StepResult, SyncDevice
from infer.execution.host_sampling import drafts_of, num_kept
from infer.execution.layout import HostRows, lay_out
from infer.execution.order import StepMasks, StepOrder
from infer.learn.student import Wrong
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request
from infer.scheduling.scheduler import Scheduler

VOCAB_SIZE = 997
NEVER_WRITTEN = -1

NextToken = Callable[[Sequence[int]], int]


def hashed(tokens: Sequence[int]) -> int:
    """Return the next token after these tokens."""
    state = 7
    for token in tokens:
        state = (state * 1_000_003 ^ (token + 1)) & 0xFFFFFFFF
    return (state >> 7) % VOCAB_SIZE


def text_after(prompt: Sequence[int], num_tokens: int, next_token: NextToken = hashed) -> list[int]:
    """Return the tokens that a request must get, computed without a cache."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class HashModel(SyncDevice):
    """A device half that executes orders on a store of token ids."""

    vocab_size = VOCAB_SIZE

    def __init__(self, scheduler: Scheduler, next_token: NextToken) -> None:
        pool = scheduler.pool
        self._rows, self._next_token = HostRows(shape_of(scheduler.state)), next_token
        self._slots = np.full(pool.num_blocks * pool.block_size, NEVER_WRITTEN, dtype=np.int64)
        self._block_size = pool.block_size
        self.fault = ""  # the fault found while reading memory

    def compute(self, order: StepOrder, masks: StepMasks) -> StepResult:
        """Copy blocks, write tokens, read everything back, and compute the next tokens."""
        blocks = self._slots.reshape(-1, self._block_size)
        for _, source, destination in order.moves():
            blocks[destination] = blocks[source]
        self._rows.apply(order)
        layout = lay_out(order, self._rows)
        self._slots[layout.slots[0]] = layout.tokens
        drafts, ids = drafts_of(order), list[tuple[int, ...]]()
        for number, row in enumerate(order.rows.tolist()):
            seen = self._read(row, int(order.stops[number]))
            num_sampled = int(order.num_sampled[number])
            drawn = [self._next_token(seen[: len(seen) - back]) for back in range(num_sampled - 1, -1, -1)]
            if number in drafts:
                drawn = drawn[: num_kept(drawn, drafts[number])]
            if drawn:
                self._rows.last_token[row] = drawn[-1]
            ids.append(tuple(drawn))
        return StepResult(ids, [(None,) * len(row) for row in ids], {})

    def _read(self, row: int, stop: int) -> list[int]:
        positions = np.arange(stop)
        seen: list[int] = self._slots[self._rows.slots(np.full(stop, row), positions)[0]].tolist()
        if NEVER_WRITTEN in seen:
            self.fault = (
                f"a sequence of {stop} tokens reads position {seen.index(NEVER_WRITTEN)} from a block that "
                "nothing was written to: its block table names a block that is not its own"
            )
        return seen


class World:
    """An engine with a `HashModel`, which serves requests and checks their outputs."""

    def __init__(
        self,
        *,
        num_blocks: int = 24,
        block_size: int = 4,
        max_batch_size: int = 4,
        allocator: type[BlockAllocator] = BlockAllocator,
        next_token: NextToken = hashed,
        speculation: Callable[[Scheduler], Speculation] | None = None,
    ) -> None:
        settings = SchedulerConfig(max_batch_size=max_batch_size, max_num_batched_tokens=32)
        config = EngineConfig(
            scheduler=settings, cache=CacheConfig(num_blocks=num_blocks, block_size=block_size)
        )
        resolved = resolve_scheduler(config, 1, SIMULATED_STEPS)
        self.pool = PagedKVCachePool(
            num_blocks, block_size, max_chunk=resolved.max_chunk, allocator=allocator
        )
        self.context_len = num_blocks * block_size // 2
        scheduler = Scheduler(self.pool, resolved, keeps_cache=True, max_seq_len=self.context_len)
        self.speculation = None if speculation is None else speculation(scheduler)
        self._model = HashModel(scheduler, next_token)
        self.engine = Engine(
            scheduler,
            self._model,
            context_len=self.context_len,
            vocab_size=VOCAB_SIZE,
            speculation=self.speculation,
        )
        self._next_token, self._texts = next_token, dict[str, tuple[list[int], int]]()
        self._outputs: dict[str, list[int]] = {}
        self.num_steps = 0

    def ask(self, prompt: Sequence[int], max_tokens: int) -> None:
        """Add a request."""
        name = f"request {len(self._texts)}"
        self._texts[name], self._outputs[name] = (list(prompt), max_tokens), []
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self.engine.add(Request(request_id=name, prompt=tuple(prompt), params=params))

    def step(self) -> None:
        """Run one step."""
        self.num_steps += 1
        for output in self.engine.step():
            self._outputs[output.request_id] += output.token_ids
            if output.error is not None:
                raise Wrong(f"step {self.num_steps} of the engine failed: {output.error}")
        if self._model.fault:
            raise Wrong(self._model.fault)

    def finish(self) -> None:
        """Run until no request is left, and check every output."""
        while self.engine.has_work:
            self.step()
        for name, (prompt, num_tokens) in self._texts.items():
            right, got = text_after(prompt, num_tokens, self._next_token), self._outputs[name]
            if got != right:
                place = next(
                    (i for i, (a, b) in enumerate(zip(got, right, strict=False)) if a != b), len(got)
                )
                raise Wrong(
                    f"{name} (a prompt of {len(prompt)} tokens) gets a wrong token at place {place} of its "
                    f"output: {got[place : place + 1]} instead of {right[place : place + 1]}. It has read "
                    "memory that is not its own"
                )
