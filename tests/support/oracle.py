"""A model whose next token is a hash of everything it can see through the cache.

`OracleDevice` is a device half that keeps token ids where a real one keeps keys and values. Like a real one
it is told orders and nothing else: it keeps the rows' block tables and last tokens as orders change them,
writes each row's tokens to their slots, then reads the whole sequence back through its tables, each as far as
its window reaches, and hashes what it finds. Of a row with drafts it says how many are right: the ids of a
step are those and one token more. A block mixed up, a copy forgotten, a position off by one, a stale swap, a
difference of state that no order said: each shows as a wrong token. What was not written holds POISON, and
reading it raises. Each place also knows the slot of the LoRA adapter that wrote it: reading another's raises.

`OracleWorld` is a real engine around it. Its `step` looks into every book after each step, and it
knows, without any cache, what each request must get.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from time import perf_counter
from typing import Any, cast

import numpy as np

from infer.cache.layout import STATE
from infer.cache.paged_pool import PagedKVCachePool
from infer.config.defaults import SIMULATED_STEPS
from infer.config.profiles.generic import GENERIC
from infer.config.profiles.profile import SchedulingProfile
from infer.config.resolve import resolve_scheduler
from infer.config.settings import CacheConfig, EngineConfig, SchedulerConfig
from infer.engine.adapters import Adapters
from infer.engine.device_build import shape_of
from infer.engine.engine import Engine
from infer.engine.observer import EngineObserver
from infer.engine.speculation import Speculation
from infer.execution.device import StepResult, SyncDevice
from infer.execution.host_sampling import drafts_of, given_tokens, num_kept
from infer.execution.layout import HostRows, TokenLayout, lay_out
from infer.execution.order import NONE, TRANSFERS, StepMasks, StepOrder
from infer.execution.row_book import RowBook
from infer.kernels.delta.reference import pieces_of
from infer.sampling.params import RowLogprobs, SamplingParams, sequence_seed
from infer.scheduling.batch_state import BatchState
from infer.scheduling.plan import StepPlan
from infer.scheduling.preemption import PreemptionCost
from infer.scheduling.request import Request, StepOutput
from infer.scheduling.scheduler import Scheduler
from infer.scheduling.sequence import Sequence
from tests.support.books import check_books
from tests.support.oracle_text import VOCAB_SIZE as VOCAB_SIZE
from tests.support.oracle_text import expected_output as expected_output
from tests.support.oracle_text import extend_hash, hash_of
from tests.support.oracle_text import next_token as next_token
from tests.support.oracle_text import offers as offers
from tests.support.simple_beams import Hypothesis, beam_search

POISON = -1


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


class OracleDevice(SyncDevice):
    """A device half over a fake store of token ids."""

    can_embed = True
    vocab_size = VOCAB_SIZE

    def __init__(self, pool: PagedKVCachePool, state: BatchState, num_host_blocks: int = 0) -> None:
        self.pool = pool
        self._state = state  # asked for what no table can tell, and for what orders should have said
        self.rows, self.book = HostRows(shape_of(state)), RowBook()
        self.device = np.full((pool.num_blocks, pool.block_size), POISON, dtype=np.int64)
        self.host = np.full((num_host_blocks, pool.block_size), POISON, dtype=np.int64)
        self.adapters = np.zeros_like(self.device), np.zeros_like(self.host)  # slot that wrote each place
        self.num_steps = 0
        self.num_tokens = 0
        self.num_transfers = dict.fromkeys(TRANSFERS, 0)
        self.fail_at: int | None = None  # raise at this step, once
        self.fails_early = False  # raise before any block was moved

    def compute(self, order: StepOrder, masks: StepMasks) -> StepResult:
        """Move, write, read back, hash."""
        return self.draw(order, self.forward(order), masks)

    def forward(self, order: StepOrder) -> list[list[int]]:
        """Write each row's tokens to the cache; what its last token sees."""
        self.num_steps += 1
        self.num_tokens += order.num_tokens
        is_failing = self.num_steps == self.fail_at
        if is_failing and self.fails_early:
            raise RuntimeError("the oracle was told to fail")
        self._transfer(order)
        if is_failing:
            raise RuntimeError("the oracle was told to fail")
        self.rows.apply(order)
        self.book.enter(order)
        self.device[self.pool._device.free] = POISON
        layout, size = lay_out(order, self.rows), self.pool.block_size
        self._check_slots(order, layout)
        for table, (window, slots) in enumerate(zip(self.pool.windows, layout.slots, strict=True)):
            if window == STATE:
                self._advance_states(order, layout, self.rows.tables[table])
            else:
                self.device[slots // size, slots % size] = layout.tokens
                self.adapters[0][slots // size, slots % size] = order.adapters.repeat(order.counts)
        return [self._read(order, number) for number in range(order.num_rows)]

    def _advance_states(self, order: StepOrder, layout: TokenLayout, tables: np.ndarray) -> None:
        """Let the states of all rows go on: a block's first two numbers are a hash and the tokens in it."""
        size = self.pool.block_size
        for row, start, stop, end in zip(order.rows, order.starts, order.stops, layout.ends, strict=True):
            for first, last in pieces_of(int(start), int(stop), size):
                state = hash_of((), 0)
                if first:
                    state, num_tokens = self.device[tables[row, (first - 1) // size], :2].tolist()
                    assert num_tokens == first, (
                        f"row {row} reads the state after {num_tokens} tokens at {first}"
                    )
                for token in layout.tokens[end - (stop - first) : end - (stop - last)].tolist():
                    state = extend_hash(state, token)
                self.device[tables[row, first // size], :2] = state, last

    def draw(self, order: StepOrder, seen: list[list[int]], masks: StepMasks) -> StepResult:
        """The ids of a step whose rows see this."""
        masked = masks.by_place().items()
        allowed = {place: bits_of(mask_W, self.vocab_size) for place, mask_W in masked}
        drafts = drafts_of(order)
        ids: list[tuple[int, ...]] = []
        logprobs: list[tuple[RowLogprobs | None, ...]] = []
        for number, entry in enumerate(self.book.entries(order.rows)):
            stop, num_sampled = len(seen[number]), int(order.num_sampled[number])
            drawn, lengths = list[int](), list[int]()
            for length in range(stop - num_sampled + 1, stop + 1):
                for index in range(int(order.num_draws[number])):
                    seed = sequence_seed(entry.line.seed, index)
                    drawn.append(self.choose(seen[number][:length], seed, allowed.get((number, length))))
                    lengths.append(length)
            if number in drafts:
                drawn = drawn[: num_kept(drawn, drafts[number])]
            if drawn:
                self.rows.last_token[order.rows[number]] = drawn[-1]
            ids.append(tuple(drawn))
            logprobs.append(
                tuple(
                    None
                    if entry.num_logprobs is None
                    else RowLogprobs(
                        token, -1.0 - token / VOCAB_SIZE, 1, offers(seen[number][:length], entry.num_logprobs)
                    )
                    for length, token in zip(lengths, drawn, strict=False)
                )
            )
        return StepResult(ids, logprobs, self._prompt_logprobs(order), pooled=self._pooled(order, seen))

    def choose(self, seen: Seq[int], seed: int, allowed: np.ndarray | None) -> int:
        """What comes next; `allowed`: among these ids."""
        assert allowed is None, "this oracle draws what it likes"
        return next_token(seen, seed)

    def _pooled(self, order: StepOrder, seen: list[list[int]]) -> dict[int, np.ndarray]:
        """Two numbers for a chunk of an embedding: of the last token a hash, of many the sum of their ids."""
        found: dict[int, np.ndarray] = {}
        for number, entry in enumerate(self.book.entries(order.rows)):
            start, stop = int(order.starts[number]), len(seen[number])
            if entry.pooling == "mean":
                found[number] = np.array([sum(seen[number][start:]), stop - start], dtype=float)
            elif entry.pooling == "last" and stop == entry.facts.num_prompt:
                found[number] = np.array([next_token(seen[number], 0), stop], dtype=float)
        return found

    def _prompt_logprobs(self, order: StepOrder) -> dict[int, list[RowLogprobs]]:
        """For each prompt token that follows one of this step: minus its position."""
        found: dict[int, list[RowLogprobs]] = {}
        for number, tokens in given_tokens(order).items() if len(order.next_tokens) else ():
            facts, start = self.book[int(order.rows[number])].facts, int(order.starts[number])
            following = [*tokens[1:].tolist(), int(order.next_tokens[number])][: facts.num_prompt - 1 - start]
            if facts.prompt_logprobs != NONE and following:
                places = enumerate(following, start + 1)
                found[number] = [RowLogprobs(token, float(-place), 1, ()) for place, token in places]
        return found

    def _sequence(self, row: int) -> Sequence:
        """The sequence that a row belongs to."""
        return next(seq for seq in self._state.sequences if seq.row == row)

    def _read(self, order: StepOrder, number: int) -> list[int]:
        """What a row's tokens can see; of what no layer can, what it is known to be."""
        row, start, stop = int(order.rows[number]), int(order.starts[number]), int(order.stops[number])
        seen: list[int] = []
        for table, window in zip(self.rows.tables[:, row], self.pool.windows, strict=True):
            if window == STATE:
                seen = seen or [*self._sequence(row).tokens[:stop]]
                state = self.device[table[(stop - 1) // self.pool.block_size], 0]
                assert state == hash_of(seen, 0), f"row {row} has the state of another text"
                continue
            first = 0 if window is None else max(start - window + 1, 0)
            if not seen:
                known = self._sequence(row).tokens[:first] if first else ()
                seen = [*known, *[POISON] * (stop - first)]
            blocks = table[: -(-stop // self.pool.block_size)]
            found = self.device[blocks].reshape(-1)[first:stop].tolist()
            assert POISON not in found, (
                f"row {row} reads a slot that was not written, from {first} on: {found}"
            )
            by = set(self.adapters[0][blocks].reshape(-1)[first:stop].tolist())
            assert by == {int(order.adapters[number])}, f"row {row} reads what adapters {by} have written"
            assert seen[first] == POISON or seen[first:] == found, f"the tables of row {row} do not agree"
            seen[first:] = found
        return seen

    def _check_slots(self, order: StepOrder, layout: TokenLayout) -> None:
        """Raise unless slots and tokens of an order are those of the scheduler's own books."""
        rows = order.rows.repeat(order.counts)
        assert (layout.slots == self.rows.slots(rows, layout.positions)).all()
        assert (self.rows.tables[:, order.rows, 0] == self._state.tables[:, order.rows, 0]).all()
        for row, position, token in zip(rows, layout.positions, layout.tokens, strict=True):
            tokens = self._sequence(row).tokens
            assert position >= len(tokens) or tokens[position] == token, f"row {row} at {position}"

    def _transfer(self, order: StepOrder) -> None:
        device, host = self.device, self.host
        sides = {"copy": (device, device), "swap_out": (device, host), "swap_in": (host, device)}
        on_device, on_host = self.adapters
        written = {
            "copy": (on_device, on_device),
            "swap_out": (on_device, on_host),
            "swap_in": (on_host, on_device),
        }
        for kind, source, destination in order.moves():
            sides[kind][1][destination] = sides[kind][0][source]
            written[kind][1][destination] = written[kind][0][source]
            self.num_transfers[kind] += 1


def bits_of(mask_W: np.ndarray, vocab_size: int) -> np.ndarray:
    """The ids of a vocabulary that a mask allows."""
    return np.unpackbits(mask_W.view(np.uint8), bitorder="little")[:vocab_size].nonzero()[0]


def first_tokens(order: StepOrder) -> set[int]:
    """The first tokens of the prompts that begin in a step."""
    given = given_tokens(order)
    firsts = {int(tokens[0]) for number, tokens in given.items() if order.starts[number] == 0}
    return firsts | {token for _, token, position in order.known.T.tolist() if position == 0}


def expected_embedding(prompt: Seq[int], pooling: str) -> tuple[float, ...]:
    """What the oracle's engine must answer."""
    if pooling == "mean":
        return (float(np.float32(sum(prompt) / len(prompt))), 1.0)  # an engine rounds once, at the end
    return (float(next_token(prompt, 0)), float(len(prompt)))


class PlanList(EngineObserver):
    """Remembers every plan that ran."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def on_step(self, plan: StepPlan, ids: Seq[tuple[int, ...]]) -> None:
        """Keep it."""
        self.plans.append(plan)


class SaltedSlots:
    """What an engine asks its adapters when a request enters."""

    def __init__(self, names: Seq[str]) -> None:
        self._slots = {name: slot for slot, name in enumerate(names, 1)}

    def enter(self, request: Request) -> tuple[Request, int]:
        """The request with a salt of its adapter, and the adapter's slot."""
        salt = f"{request.adapter}/{request.cache_salt}"
        return replace(request, cache_salt=salt), self._slots[request.adapter]


class OracleWorld:
    """A real engine with an oracle for a model.

    Every `audit_every` steps every book is checked; what each token sees is checked in all of them.
    """

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
        speculation: Callable[[Scheduler], Speculation] | None = None,
        num_stories: int = 0,
        clock: Callable[[], float] = perf_counter,
        adapters: Seq[str] = (),
        audit_every: int = 1,
        **scheduler_knobs: Any,
    ) -> None:
        self._audit_every, self._num_steps = audit_every, 0
        self.adapters = adapters  # their names
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
        self.runner = OracleDevice(self.pool, self.scheduler.state, num_host_blocks)
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
            speculation=None if speculation is None else speculation(self.scheduler),
            clock=clock,
            adapters=cast(Adapters, SaltedSlots(adapters)) if adapters else None,
        )
        self.engine.keep_stories(num_stories)
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
        self._num_steps += 1
        if self._num_steps % self._audit_every == 0:
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
        assert usage.num_free_host_blocks + usage.num_cached_host == len(self.runner.host)
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
