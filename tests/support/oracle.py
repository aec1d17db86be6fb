"""A model whose next token is a hash of everything it can see through the cache.

`OracleRunner` keeps token ids where a real runner keeps keys and values. It writes each chunk's tokens
to their slots, then reads the whole sequence back through the block table and hashes what it finds.
A block mixed up, a copy forgotten, a position off by one, a stale swap: each shows as a wrong token.
What nobody wrote holds POISON, and reading it raises.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from infer.cache.kv_pool import KVCachePool
from infer.engine.plan import COPY, SWAP_IN, SWAP_OUT, StepPlan
from infer.engine.runner import StepResult, sample_row, sequence_seed
from infer.engine.sequence import Sequence
from infer.sampling.params import RowLogprobs

POISON = -1
VOCAB_SIZE = 997


def next_token(tokens: Seq[int], seed: int) -> int:
    """The oracle: what follows these tokens in a sequence seeded like this."""
    state = (seed * 31 + 7) & 0xFFFFFFFF
    for token in tokens:
        state = (state * 1_000_003 ^ (int(token) + 1)) & 0xFFFFFFFF
    return (state >> 7) % VOCAB_SIZE


def offers(tokens: Seq[int], count: int) -> tuple[tuple[int, float], ...]:
    """The oracle for beams: the likeliest next tokens with their logprobs."""
    first = next_token(tokens, 0)
    picks = [(first * 7 + rank * 13) % VOCAB_SIZE for rank in range(count)]
    spread = 0.1 + (first % 17) / 10
    return tuple((pick, -0.05 - spread * rank) for rank, pick in enumerate(picks))


def expected_output(prompt: Seq[int], num_tokens: int, *, seed: int = 0, index: int = 0) -> list[int]:
    """What a request must get, made without any cache."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, sequence_seed(seed, index)))
    return tokens[len(prompt) :]


class OracleRunner:
    """A `Runner` over a fake store of token ids."""

    def __init__(self, pool: KVCachePool, num_host_blocks: int = 0) -> None:
        self.pool = pool
        self.device = np.full((pool.num_blocks, pool.block_size), POISON, dtype=np.int64)
        self.host = np.full((num_host_blocks, pool.block_size), POISON, dtype=np.int64)
        self.num_steps = 0
        self.num_tokens = 0
        self.fail_at: int | None = None  # raise at this step, once

    def forget(self, seq_id: int) -> None:
        pass

    def run(self, plan: StepPlan, sequences: Seq[Sequence]) -> StepResult:
        self.num_steps += 1
        self.num_tokens += plan.num_tokens
        sides = {COPY: (self.device, self.device), SWAP_OUT: (self.device, self.host), SWAP_IN: (self.host, self.device)}
        for kind, source, destination in plan.transfers:
            sides[kind][1][destination] = sides[kind][0][source]
        if self.num_steps == self.fail_at:
            raise RuntimeError("the oracle was told to fail")
        size = self.pool.block_size
        for chunk, seq in zip(plan.chunks, sequences, strict=True):
            table = self.pool.block_table(chunk.seq_id)
            for position in range(chunk.start, chunk.stop):
                self.device[table[position // size], position % size] = seq.tokens[position]
        ids: list[tuple[int, ...]] = []
        logprobs: list[tuple[RowLogprobs | None, ...]] = []
        for chunk, seq in zip(plan.chunks, sequences, strict=True):
            seen = self.device[self.pool.block_table(chunk.seq_id)].reshape(-1)[: chunk.stop].tolist()
            assert POISON not in seen, f"{seq} reads a slot nobody wrote: {seen}"
            rows = [sample_row(seq, seq.index + i) for i in range(chunk.num_samples)]
            drawn = [next_token(seen, row.seed) for row in rows]
            ids.append(tuple(drawn))
            logprobs.append(
                tuple(
                    None
                    if row.num_logprobs is None
                    else RowLogprobs(token, -1.0, 1, offers(seen, row.num_logprobs))
                    for row, token in zip(rows, drawn, strict=True)
                )
            )
        return StepResult(ids, logprobs, {})
