"""A model whose next token is a hash of everything it can see through the cache.

`OracleRunner` keeps token ids where a real runner keeps keys and values. It writes each chunk's tokens
to their slots, then reads the whole sequence back through the block tables that the batch state keeps for
real runners, each as far as its window reaches, and hashes what it finds. Of a sequence with drafts it says
how many are right, as a runner that verifies them will: the ids of a step are those and one token more.
A block mixed up, a copy forgotten, a position off by one, a stale swap: each shows as a wrong token.
What was not written holds POISON, and reading it raises.

`OracleWorld` is a real engine around it. Its `step` looks into every book after each step, and it
knows, without any cache, what each request must get.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from infer.cache.paged_pool import PagedKVCachePool
from infer.config.defaults import SIMULATED_STEPS
from infer.config.profiles.generic import GENERIC
from infer.config.profiles.profile import SchedulingProfile
from infer.config.resolve import resolve_scheduler
from infer.config.settings import CacheConfig, EngineConfig, SchedulerConfig
from infer.engine.engine import Engine
from infer.engine.observer import EngineObserver
from infer.execution.runner import StepResult, SyncRunner
from infer.sampling.params import RowLogprobs, SamplingParams, sequence_seed
from infer.scheduling.batch_state import BatchState
from infer.scheduling.beam import num_logprobs
from infer.scheduling.plan import COPY, SWAP_IN, SWAP_OUT, StepPlan
from infer.scheduling.preemption import PreemptionCost
from infer.scheduling.request import Request, StepOutput
from infer.scheduling.scheduler import Scheduler
from infer.scheduling.sequence import Sequence
from tests.support.books import check_books
from tests.support.simple_beams import Hypothesis, beam_search

POISON = -1
VOCAB_SIZE = 997


def next_token(tokens: Seq[int], seed: int) -> int:
    """The oracle: what follows these tokens in a sequence seeded like this."""
    return (_hash(tokens, seed) >> 7) % VOCAB_SIZE


def offers(tokens: Seq[int], count: int) -> tuple[tuple[int, float], ...]:
    """The oracle for beams: the likeliest next tokens with their logprobs, no two sums of them alike."""
    state = _hash(tokens, 0)
    found = []
    logprob = -0.05
    for rank in range(count):
        found.append(((state * 7 + rank * 13) % VOCAB_SIZE, logprob))
        state_of_rank = (state * 0x9E3779B1 + rank * 0x85EBCA6B) & 0xFFFFFFFF
        logprob -= 0.01 + (state_of_rank >> 8) / 2**24
    return tuple(found)


def expected_output(
    prompt: Seq[int], num_tokens: int, *, seed: int = 0, index: int = 0, stop_ids: Iterable[int] = ()
) -> list[int]:
    """What a request must get, made without any cache."""
    stops, own_seed = frozenset(stop_ids), sequence_seed(seed, index)
    state, output = _hash(prompt, own_seed), list[int]()
    while len(output) < num_tokens and not (output and output[-1] in stops):
        output.append((state >> 7) % VOCAB_SIZE)
        state = _extend(state, output[-1])
    return output


def expected_beams(
    prompt: Seq[int], params: SamplingParams, stop_ids: Iterable[int] = ()
) -> list[Hypothesis]:
    """What a beam search must get, made without any cache."""
    assert params.max_tokens is not None
    stop_ids = frozenset(stop_ids)
    num_offers = 2 * params.num_sequences + len(stop_ids)  # more than enough
    return beam_search(
        lambda tokens: offers(tokens, num_offers),
        prompt,
        width=params.num_sequences,
        max_tokens=params.max_tokens,
        stop_ids=stop_ids,
    )[: params.n]


def _hash(tokens: Seq[int], seed: int) -> int:
    state = (seed * 31 + 7) & 0xFFFFFFFF
    for token in tokens:
        state = _extend(state, token)
    return state


def _extend(state: int, token: int) -> int:
    return (state * 1_000_003 ^ (int(token) + 1)) & 0xFFFFFFFF


class OracleRunner(SyncRunner):
    """A `Runner` over a fake store of token ids."""

    can_embed = True

    def __init__(self, pool: PagedKVCachePool, state: BatchState, num_host_blocks: int = 0) -> None:
        self.pool = pool
        self.state = state
        self.device = np.full((pool.num_blocks, pool.block_size), POISON, dtype=np.int64)
        self.host = np.full((num_host_blocks, pool.block_size), POISON, dtype=np.int64)
        self._latest: dict[int, tuple[int, int]] = {}  # seq_id -> (position, id) of what it drew last
        self.num_steps = 0
        self.num_tokens = 0
        self.num_transfers = {COPY: 0, SWAP_OUT: 0, SWAP_IN: 0}
        self.fail_at: int | None = None  # raise at this step, once
        self.fails_early = False  # raise before any block was moved

    def run(self, plan: StepPlan) -> StepResult:
        """Move, write, read back, hash."""
        self.num_steps += 1
        self.num_tokens += plan.num_tokens
        is_failing = self.num_steps == self.fail_at
        if is_failing and self.fails_early:
            raise RuntimeError("the oracle was told to fail")
        self._transfer(plan)
        if is_failing:
            raise RuntimeError("the oracle was told to fail")
        assert isinstance(self.pool, PagedKVCachePool)
        self.device[self.pool._device.free] = POISON
        size = self.pool.block_size
        tables = [
            self.state.tables[:, row, : -(-stop // size)]
            for row, stop in zip(plan.chunks.rows.tolist(), plan.chunks.stops.tolist(), strict=True)
        ]
        for chunk, seq, table in zip(plan.chunks, plan.chunks.sequences, tables, strict=True):
            for position in range(chunk.start, chunk.stop):
                self.device[table[:, position // size], position % size] = self._token(seq, position)
        ids: list[tuple[int, ...]] = []
        logprobs: list[tuple[RowLogprobs | None, ...]] = []
        for chunk, seq, table in zip(plan.chunks, plan.chunks.sequences, tables, strict=True):
            seen = self._read(seq, table, chunk.start, chunk.stop)
            seeds = [sequence_seed(seq.group.seed, seq.index + i) for i in range(chunk.num_samples)]
            lengths = [chunk.stop] * len(seeds)
            for place in range(chunk.stop - len(seq.drafts), chunk.stop):  # drafts: how many are right?
                if seen[place] == next_token(seen[:place], seeds[0]):
                    seeds.append(seeds[0])
                    lengths.insert(-1, place)
                else:
                    lengths[-1] = place
                    break
            drawn = [next_token(seen[:length], seed) for length, seed in zip(lengths, seeds, strict=True)]
            if len(drawn) == 1:
                self._latest[seq.seq_id] = (lengths[0], drawn[0])
            ids.append(tuple(drawn))
            num_top = num_logprobs(seq.group)
            logprobs.append(
                tuple(
                    None
                    if num_top is None
                    else RowLogprobs(token, -1.0 - token / VOCAB_SIZE, 1, offers(seen[:length], num_top))
                    for length, token in zip(lengths, drawn, strict=True)
                )
            )
        return StepResult(ids, logprobs, _prompt_logprobs(plan), pooled=self._pooled(plan, tables))

    def _pooled(self, plan: StepPlan, tables: Seq[np.ndarray]) -> dict[int, np.ndarray]:
        """Two numbers for a chunk of an embedding: of the last token a hash, of many the sum of their ids."""
        found: dict[int, np.ndarray] = {}
        for chunk, seq, table in zip(plan.chunks, plan.chunks.sequences, tables, strict=True):
            pooling = seq.group.request.pooling
            if pooling is None:
                continue
            seen = self._read(seq, table, chunk.start, chunk.stop)
            if pooling == "mean":
                found[seq.seq_id] = np.array(
                    [sum(seen[chunk.start :]), chunk.stop - chunk.start], dtype=float
                )
            elif pooling == "last" and chunk.stop == seq.num_prompt:
                found[seq.seq_id] = np.array([next_token(seen, 0), chunk.stop], dtype=float)
        return found

    def _read(self, seq: Sequence, tables: np.ndarray, start: int, stop: int) -> list[int]:
        """What the tokens from `start` on can see; of what no layer can, what it is known to be."""
        seen: list[int] = []
        for table, window in zip(tables, self.pool.windows, strict=True):
            first = 0 if window is None else max(start - window + 1, 0)
            if not seen:
                seen = [*seq.tokens[:first], *[POISON] * (stop - first)]
            found = self.device[table].reshape(-1)[first:stop].tolist()
            assert POISON not in found, f"{seq} reads a slot that was not written, from {first} on: {found}"
            assert seen[first] == POISON or seen[first:] == found, f"the tables of {seq} do not agree"
            seen[first:] = found
        return seen

    def _token(self, seq: Sequence, position: int) -> int:
        """An input token; one that was drawn in the step before may not have been reported yet."""
        if position < len(seq.tokens):
            return seq.tokens[position]
        if seq.drafts:
            return seq.drafts[position - len(seq.tokens)]
        drawn_at, token = self._latest[seq.seq_id]
        assert drawn_at == position, f"{seq} needs token {position} but drew token {drawn_at} last"
        return token

    def _transfer(self, plan: StepPlan) -> None:
        device, host = self.device, self.host
        sides = {COPY: (device, device), SWAP_OUT: (device, host), SWAP_IN: (host, device)}
        for kind, source, destination in plan.transfers:
            sides[kind][1][destination] = sides[kind][0][source]
            self.num_transfers[kind] += 1


def _prompt_logprobs(plan: StepPlan) -> dict[int, list[RowLogprobs]]:
    """For each prompt token that follows one of this step: minus its position."""
    found: dict[int, list[RowLogprobs]] = {}
    for chunk, seq in zip(plan.chunks, plan.chunks.sequences, strict=True):
        followers = range(chunk.start + 1, min(chunk.stop + 1, seq.num_prompt))
        if seq.group.request.params.prompt_logprobs is not None and followers:
            found[seq.seq_id] = [RowLogprobs(seq.tokens[p], float(-p), 1, ()) for p in followers]
    return found


def expected_embedding(prompt: Seq[int], pooling: str) -> tuple[float, ...]:
    """What the oracle's engine must answer."""
    if pooling == "mean":
        return (sum(prompt) / len(prompt), 1.0)
    return (float(next_token(prompt, 0)), float(len(prompt)))


class PlanList(EngineObserver):
    """Remembers every plan that ran."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def on_step(self, plan: StepPlan, ids: Seq[tuple[int, ...]]) -> None:
        """Keep it."""
        self.plans.append(plan)


class OracleWorld:
    """A real engine with an oracle for a model; after every step every book is checked."""

    def __init__(
        self,
        *,
        kv_cache_backend: str = "paged",
        block_size: int = 4,
        num_blocks: int = 24,
        num_host_blocks: int = 0,
        use_prefix_caching: bool = True,
        context_len: int = 60,
        eos_ids: tuple[int, ...] = (),
        placement_seed: int | None = None,
        cost: PreemptionCost | None = None,
        steps_ahead: int = 0,
        windows: tuple[int | None, ...] = (None,),
        profile: SchedulingProfile = GENERIC.scheduling,
        **scheduler_knobs: Any,
    ) -> None:
        settings = SchedulerConfig(**({"max_batch_size": 8, "max_num_batched_tokens": 64} | scheduler_knobs))
        config = resolve_scheduler(
            EngineConfig(scheduler=settings, cache=CacheConfig(swap_blocks=num_host_blocks)),
            1,
            SIMULATED_STEPS,
            profile,
        )
        self.pool: PagedKVCachePool
        if kv_cache_backend == "contiguous":
            self.pool = PagedKVCachePool(
                max(1, num_blocks * block_size // context_len),
                context_len,
                num_host_blocks=num_host_blocks,
                use_prefix_caching=False,
                max_blocks_per_sequence=1,
                placement_seed=placement_seed,
            )
        else:
            self.pool = PagedKVCachePool(
                num_blocks,
                block_size,
                use_prefix_caching=use_prefix_caching and kv_cache_backend == "paged",
                num_host_blocks=num_host_blocks,
                placement_seed=placement_seed,
                windows=windows,
                max_chunk=config.max_chunk,
            )
        keeps_cache = kv_cache_backend != "naive"
        self.scheduler = Scheduler(
            self.pool, config, cost=cost, keeps_cache=keeps_cache, max_seq_len=context_len
        )
        self.runner = OracleRunner(self.pool, self.scheduler.state, num_host_blocks)
        self.observer = PlanList()
        self.eos_ids = eos_ids
        self.engine = Engine(
            self.scheduler,
            self.runner,
            context_len=context_len,
            vocab_size=VOCAB_SIZE,
            eos_ids=eos_ids,
            observer=self.observer,
            steps_ahead=steps_ahead,
        )
        self.requests: dict[str, Request] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.finished: dict[tuple[str, int], StepOutput] = {}
        self.aborted: set[str] = set()
        self.most_late = 0  # steps that were still under way after one

    @property
    def plans(self) -> list[StepPlan]:
        """Every plan that has run."""
        return self.observer.plans

    def add(
        self, request_id: str, prompt: Seq[int], *, request: dict[str, Any] | None = None, **params: Any
    ) -> None:
        """Send a request; `request` holds fields of the Request, `params` those of its SamplingParams."""
        made = Request(
            request_id=request_id,
            prompt=tuple(prompt),
            params=SamplingParams(**({"seed": 0, "max_tokens": 8} | params)),
            **(request or {}),
        )
        self.engine.add(made)
        self.requests[request_id] = made

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request from outside."""
        self.engine.abort(request_id, index)
        self.aborted.add(request_id)
        self.check_books()

    def step(self) -> list[StepOutput]:
        """One step of the engine, then all the books."""
        outputs = self.engine.step()
        self.most_late = max(self.most_late, self.runner.num_steps - len(self.plans))
        for output in outputs:
            key = output.request_id, output.index
            assert key not in self.finished, f"{key} goes on after its end"
            self.tokens.setdefault(key, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.finished[key] = output
        self.check_books()
        return outputs

    def run(self, max_steps: int = 3000) -> None:
        """Step until nothing is left to do."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"not done after {max_steps} steps: {self.scheduler.sequences()}")

    def seqs(self, request_id: str) -> list[Sequence]:
        """The live sequences of a request, oldest first."""
        return [s for s in self.scheduler.sequences() if s.group.request.request_id == request_id]

    def seq(self, request_id: str) -> Sequence:
        """The only live sequence of a request."""
        (only,) = self.seqs(request_id)
        return only

    def check_books(self) -> None:
        """Raise unless pool, scheduler and engine agree on who lives, runs, waits and holds what."""
        check_books(self.scheduler)  # and the pool's own
        assert self.pool.audit_blocks() == []
        scheduler, live = self.scheduler, self.scheduler.sequences()
        assert scheduler.running == sorted((s for s in live if s.is_running), key=lambda s: s.sort_key)
        assert scheduler.num_waiting == sum(not s.is_running for s in live)
        num_slots = sum(seq.num_slots for seq in scheduler.running)
        assert scheduler._slots_used == num_slots <= scheduler.config.max_batch_size
        for seq in live:
            assert seq.finish_reason is None
            num_late = seq.num_tokens - len(seq.tokens) - len(seq.drafts)
            assert 0 <= num_late <= len(self.engine._flights), f"{seq} waits for {num_late} tokens"
            is_read = bool(self.engine._flights) and seq.group.request.pooling is not None
            assert 0 <= seq.num_computed < seq.num_tokens + is_read
            assert not (seq.is_running and seq.is_swapped)
        served = {seq.group.request.request_id for seq in live}
        assert self.engine.num_requests == len(served) + len(self.engine._compiling)
        if not live:
            self.check_idle()

    def check_idle(self) -> None:
        """Raise unless the prefix tree is the only owner of blocks."""
        usage = self.pool.usage()
        assert usage.num_used == 0
        assert usage.num_free_host_blocks == len(self.runner.host)
        assert self.pool.num_free_blocks == self.pool.num_blocks

    def verify(self) -> int:
        """Raise unless every request that was not aborted got what it must; returns how many were checked."""
        num_checked = 0
        for request_id, request in self.requests.items():
            params = request.params
            if request_id in self.aborted:
                continue
            num_checked += 1
            if request.pooling is not None:
                output = self.finished[request_id, 0]
                assert output.finish_reason == "stop" and not self.tokens[request_id, 0], output
                assert output.embedding == expected_embedding(request.prompt, request.pooling)
                continue
            stop_ids = params.stop_token_ids if params.ignore_eos else (*self.eos_ids, *params.stop_token_ids)
            if params.use_beam_search:
                self._verify_beams(request, expected_beams(request.prompt, params, stop_ids))
                continue
            assert params.seed is not None
            assert params.max_tokens is not None
            for index in range(params.num_sequences):
                key, limit = (request_id, index), params.max_tokens
                wanted = expected_output(
                    request.prompt, limit, seed=params.seed, index=index, stop_ids=stop_ids
                )
                assert self.tokens[key] == wanted, key
                reason = "stop" if wanted[-1] in stop_ids else "length"
                assert self.finished[key].finish_reason == reason, key
        return num_checked

    def _verify_beams(self, request: Request, wanted: list[Hypothesis]) -> None:
        assert len(wanted) == request.params.n
        for index, beam in enumerate(wanted):
            key = request.request_id, index
            assert tuple(self.tokens[key]) == beam.output, key
            assert self.finished[key].finish_reason == beam.finish_reason, key
            assert abs(self.finished[key].cumulative_logprob - beam.total) < 1e-9, key


def prompt_of(length: int, start: int = 1) -> list[int]:
    """A prompt that shares nothing with one that starts elsewhere."""
    return [(start * 101 + i * 7) % VOCAB_SIZE for i in range(length)]
