"""Many callers, one engine thread: every caller gets its own tokens, and leaving frees what it held."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from infer.cache.paged_pool import PagedKVCachePool
from infer.client import client as client_module
from infer.client import subscribers
from infer.client.client import InProcessClient, embed
from infer.config.defaults import SIMULATED_STEPS
from infer.config.resolve import resolve_scheduler
from infer.config.settings import EngineConfig
from infer.engine.engine import Engine
from infer.engine.prefixes import prefix_hashes
from infer.errors import DeviceLost, EngineError, EngineStopped, QueueFull, RequestError
from infer.execution.device import PendingStep, StepResult
from infer.execution.order import StepMasks, StepOrder
from infer.sampling.params import RowLogprobs, SamplingParams
from infer.scheduling.batch_state import BatchState
from infer.scheduling.request import Request, StepOutput
from infer.scheduling.scheduler import Scheduler
from tests.support.oracle import VOCAB_SIZE, OracleDevice, expected_embedding, expected_output


class GatedDevice(OracleDevice):
    """Runs a step only when the test lets it."""

    def __init__(self, pool: PagedKVCachePool, state: BatchState) -> None:
        super().__init__(pool, state)
        self.gate = threading.Semaphore(0)

    def compute(self, order: StepOrder, masks: StepMasks) -> StepResult:
        assert self.gate.acquire(timeout=30), "the test never opened the gate"
        return super().compute(order, masks)


def make_client(
    num_blocks: int = 64,
    device_type: type[OracleDevice] = OracleDevice,
    prepare: Callable[[], bool] = lambda: False,
    *,
    has_replicas: bool = False,
    **knobs: Any,
) -> tuple[InProcessClient, Engine]:
    engine = make_engine(num_blocks, device_type, prepare, **knobs)
    return InProcessClient(engine, has_replicas=has_replicas), engine


def make_engine(
    num_blocks: int = 64,
    device_type: type[OracleDevice] = OracleDevice,
    prepare: Callable[[], bool] = lambda: False,
    **knobs: Any,
) -> Engine:
    pool = PagedKVCachePool(num_blocks, 4)
    config = EngineConfig.from_knobs(**({"max_batch_size": 16} | knobs))
    scheduler = Scheduler(pool, resolve_scheduler(config, 256, SIMULATED_STEPS))
    device = device_type(pool, scheduler.state)
    return Engine(scheduler, device, context_len=200, vocab_size=VOCAB_SIZE, prepare=prepare)


def make_request(number: int, *, max_tokens: int = 12, n: int = 1) -> Request:
    prompt = tuple((number * 31 + i) % VOCAB_SIZE for i in range(1 + number % 9))
    params = SamplingParams(max_tokens=max_tokens, seed=number, n=n)
    return Request(request_id=f"r{number}", prompt=prompt, params=params)


async def collect(client: InProcessClient, request: Request) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    async for output in client.generate(request):
        tokens.setdefault(output.index, []).extend(output.token_ids)
    return tokens


async def until_idle(engine: Engine) -> None:
    for _ in range(500):
        if not engine.has_work:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"still at work: {engine.scheduler.sequences()}")


def test_every_caller_gets_its_own_tokens() -> None:
    async def main() -> None:
        client, engine = make_client()
        requests = [make_request(i, n=1 + i % 3) for i in range(60)]
        answers = await asyncio.gather(*(collect(client, request) for request in requests))
        for number, (request, answer) in enumerate(zip(requests, answers, strict=True)):
            for index in range(request.params.n):
                assert answer[index] == expected_output(request.prompt, 12, seed=number, index=index)
        await client.close()
        assert engine.scheduler.pool.audit_blocks() == []

    asyncio.run(main())


def test_an_engine_with_replicas_tells_what_it_has_cached_and_how_fast_it_is() -> None:
    async def main() -> None:
        client, engine = make_client(has_replicas=True)
        request = replace(make_request(8), prompt=tuple(range(40)), cache_salt="salt")
        assert not client.prefixes
        await collect(client, request)
        await until_idle(engine)
        hashes = prefix_hashes(request, 4, 512)
        for _ in range(500):
            if client.prefixes.issuperset(hashes):
                break
            await asyncio.sleep(0.01)
        assert client.prefixes.issuperset(hashes)
        assert client.prefixes.isdisjoint(prefix_hashes(replace(request, cache_salt=""), 4, 512))
        stats = client.stats()
        assert stats.token_s > 0 and stats.row_s > 0 and stats.num_queued_tokens == 0
        await client.reset_prefix_cache()
        for _ in range(500):
            if not client.prefixes:
                break
            await asyncio.sleep(0.01)
        assert not client.prefixes
        await client.close()

    asyncio.run(main())


def test_prompts_that_wait_are_counted_by_their_tokens() -> None:
    engine = make_engine(max_num_batched_tokens=16)
    for number in range(3):
        engine.add(replace(make_request(number), prompt=tuple(range(number, number + 50))))
    assert engine.stats().num_queued_tokens >= 140
    while engine.has_work:
        engine.step()
    assert engine.stats().num_queued_tokens == 0


def test_leaving_an_iterator_frees_its_blocks() -> None:
    async def main() -> None:
        client, engine = make_client()
        outputs = client.generate(make_request(1, max_tokens=150))
        await anext(outputs)
        await outputs.aclose()
        await until_idle(engine)
        assert engine.scheduler.pool.usage().num_used == 0
        await client.close()

    asyncio.run(main())


def test_cancelled_calls_disturb_no_other() -> None:
    async def main() -> None:
        client, engine = make_client(num_blocks=48)
        rng = random.Random(0)
        requests = [make_request(i, max_tokens=40) for i in range(80)]
        tasks = [asyncio.create_task(collect(client, request)) for request in requests]
        for number in range(0, 80, 3):
            await asyncio.sleep(rng.random() * 0.003)
            tasks[number].cancel()
        for number, task in enumerate(tasks):
            with contextlib.suppress(asyncio.CancelledError):
                assert (await task)[0] == expected_output(requests[number].prompt, 40, seed=number)
        await until_idle(engine)
        assert engine.scheduler.pool.usage().num_used == 0
        assert engine.scheduler.pool.audit_blocks() == []
        await client.close()

    asyncio.run(main())


def test_an_abort_reaches_the_one_who_iterates() -> None:
    async def main() -> None:
        client, engine = make_client(device_type=GatedDevice)
        gate = engine._device.gate  # type: ignore[attr-defined]
        request = make_request(3, max_tokens=150)
        outputs = client.generate(request)
        gate.release()
        assert (await anext(outputs)).finish_reason is None
        client.abort(request.request_id)  # before the second step: its gate is still closed
        gate.release(200)
        reasons = [output.finish_reason async for output in outputs]
        assert reasons[-1] == "abort"
        assert len(reasons) <= 2  # the step that was waiting at the gate may still deliver
        await client.close()

    asyncio.run(main())


def test_an_abort_before_the_fork_ends_all_n_iterations() -> None:
    async def main() -> None:
        client, engine = make_client(device_type=GatedDevice)
        gate = engine._device.gate  # type: ignore[attr-defined]
        blocker = asyncio.create_task(collect(client, make_request(8, max_tokens=5)))
        waiting = make_request(7, max_tokens=7, n=3)
        task = asyncio.create_task(collect(client, waiting))
        await asyncio.sleep(0)
        client.abort(waiting.request_id)  # nothing has run yet, so nothing has forked
        gate.release(200)
        answers, _ = await asyncio.wait_for(asyncio.gather(task, blocker), timeout=10)
        assert answers == {0: [], 1: [], 2: []} or all(len(tokens) == 1 for tokens in answers.values())
        await client.close()

    asyncio.run(main())


def test_an_impossible_request_is_told_so_and_the_others_go_on() -> None:
    async def main() -> None:
        client, _ = make_client()
        good = asyncio.create_task(collect(client, make_request(1)))
        with pytest.raises(RequestError, match="no tokens"):
            await collect(client, Request(request_id="bad", prompt=()))
        assert await good
        await client.close()

    asyncio.run(main())


def test_closing_tells_all_that_wait() -> None:
    async def main() -> None:
        client, engine = make_client(device_type=GatedDevice)
        gate = engine._device.gate  # type: ignore[attr-defined]
        task = asyncio.create_task(collect(client, make_request(1, max_tokens=190)))
        await until(lambda: engine.has_work)
        closing = asyncio.create_task(client.close("it is late"))
        await asyncio.sleep(0)
        gate.release(2)  # at most the step in flight and one more: far from 190
        await closing
        with pytest.raises(EngineStopped, match="it is late"):
            await task
        with pytest.raises(EngineStopped, match="it is late"):
            await collect(client, make_request(2))

    asyncio.run(main())


def test_a_loop_that_dies_tells_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        client, engine = make_client()

        def die() -> None:
            raise MemoryError("no more")

        monkeypatch.setattr(engine, "step", die)
        with pytest.raises(EngineStopped, match="MemoryError"):
            await collect(client, make_request(1))

    asyncio.run(main())


def test_an_idle_engine_costs_no_cpu() -> None:
    async def main() -> None:
        client, _ = make_client()
        await collect(client, make_request(1))
        before = time.process_time()
        await asyncio.sleep(0.3)  # what is measured is this time
        assert time.process_time() - before < 0.05
        await client.close()

    asyncio.run(main())


def test_a_lost_device_ends_the_loop_and_tells_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every later step would fail as well: the engine must not pretend to be alive."""

    async def main() -> None:
        client, engine = make_client()

        def lose(order: StepOrder) -> PendingStep:
            raise DeviceLost("the device failed in step 1")

        monkeypatch.setattr(engine._device, "run", lose)
        with pytest.raises(EngineStopped, match="the engine loop died: the device failed in step 1"):
            await collect(client, make_request(1))
        assert isinstance(client.failure, EngineStopped)

    asyncio.run(main())


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():
            await asyncio.sleep(0.001)


# -- embeddings -----------------------------------------------------------------------------------


def embedding_of(number: int, *, length: int = 1, pooling: str = "last") -> Request:
    return Request(request_id=f"e{number}", prompt=tuple(range(number, number + length)), pooling=pooling)


def test_tokens_arrive_between_the_chunks_of_an_embedding() -> None:
    async def main() -> None:
        client, engine = make_client(device_type=GatedDevice, max_num_batched_tokens=8)
        gate = engine._device.gate  # type: ignore[attr-defined]
        long = embedding_of(1, length=190, pooling="mean")
        outputs = client.generate(make_request(2, max_tokens=5))
        gate.release()
        await anext(outputs)
        task = asyncio.create_task(embed(client, long))
        await asyncio.sleep(0)
        gate.release(3)
        await anext(outputs)
        assert not task.done()
        gate.release(100)
        assert tuple(await task) == expected_embedding(long.prompt, "mean")
        await outputs.aclose()
        await client.close()

    asyncio.run(main())


def test_an_embedding_whose_caller_left_frees_what_it_held() -> None:
    async def main() -> None:
        client, engine = make_client(device_type=GatedDevice, max_num_batched_tokens=8)
        task = asyncio.create_task(embed(client, embedding_of(1, length=190)))
        await until(lambda: engine.has_work)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        engine._device.gate.release(5)  # type: ignore[attr-defined]
        await until_idle(engine)
        assert engine.scheduler.pool.usage().num_used == 0
        await client.close()

    asyncio.run(main())


def test_an_embedding_whose_step_fails_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        client, engine = make_client()
        monkeypatch.setattr(engine._device, "fail_at", 1)
        with pytest.raises(EngineError, match="RuntimeError in step 1"):
            await embed(client, embedding_of(1))
        assert tuple(await embed(client, embedding_of(2))) == expected_embedding((2,), "last")
        await client.close()

    asyncio.run(main())


# -- bursts and progress --------------------------------------------------------------------------


def test_a_burst_fills_the_places_and_the_queue_and_the_rest_is_refused_at_once() -> None:
    async def main() -> None:
        client, engine = make_client(256, GatedDevice, max_queue=32)  # 16 places
        tasks = [asyncio.create_task(collect(client, make_request(i))) for i in range(300)]
        await asyncio.sleep(0)  # each has handed its request in
        # all but what can be served are answered before a second step
        engine._device.gate.release()  # type: ignore[attr-defined]
        await until(lambda: sum(task.done() for task in tasks) == 300 - 48)
        assert all(isinstance(task.exception(), QueueFull) for task in tasks if task.done())
        assert engine.num_requests == 48
        engine._device.gate.release(200)  # type: ignore[attr-defined]
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(answer, dict) for answer in done) == 48
        await client.close()

    asyncio.run(main())


def test_a_step_that_hangs_is_no_progress_and_idle_time_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: now))

    async def main() -> None:
        nonlocal now
        client, engine = make_client(device_type=GatedDevice, max_num_batched_tokens=8)
        gate = engine._device.gate  # type: ignore[attr-defined]
        now += 500.0
        assert client.failure is None
        task = asyncio.create_task(embed(client, embedding_of(1, length=40)))
        for step in range(1, 5):  # chunks of a long prompt: no output, but work
            await until(lambda step=step: engine.scheduler.step == step)  # type: ignore[misc]
            now += 100.0
            assert client.failure is None
            gate.release()
        await until(lambda: engine.scheduler.step == 5)
        now += 121.0
        assert isinstance(client.failure, EngineError) and "no progress for 121 s" in str(client.failure)
        gate.release(5)
        await task
        await client.close()

    asyncio.run(main())


def test_a_thread_that_hangs_while_idle_is_noticed_once_it_owes_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, hangs = 1000.0, threading.Semaphore(0)
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: now))

    async def main() -> None:
        nonlocal now
        client, _ = make_client(prepare=lambda: hangs.acquire(timeout=30) and False)
        task = asyncio.create_task(collect(client, make_request(3)))
        await asyncio.sleep(0)
        now += 121.0
        assert isinstance(client.failure, EngineError) and "no progress" in str(client.failure)
        hangs.release(100)
        await task
        await client.close()

    asyncio.run(main())


# -- readers that do not read ---------------------------------------------------------------------


def test_an_answer_without_a_reader_ends_and_frees_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscribers, "MAX_UNREAD", 20)

    async def main() -> None:
        client, engine = make_client()
        outputs = client.generate(make_request(1, max_tokens=150))
        with pytest.raises(RequestError, match="at most 20 may wait"):
            while True:  # the engine may have made all it may before the first of these returns
                await anext(outputs)
                await until(lambda: not engine.has_work)  # without a single read
        await until(lambda: not engine.has_work)
        assert engine.scheduler.pool.usage().num_used == 0
        monkeypatch.undo()
        assert (await collect(client, make_request(2)))[0] == expected_output(
            make_request(2).prompt, 12, seed=2
        ), "the others go on"
        await client.close()

    asyncio.run(main())


def test_logprobs_count_as_unread_and_one_output_may_be_of_any_size() -> None:
    async def main() -> None:
        row = RowLogprobs(1, -1.0, 1, tuple((i, -1.0) for i in range(20)))
        large = StepOutput(request_id="r", index=0, token_ids=(1,), prompt_logprobs=(row,) * 4000)
        queue = subscribers.OutputQueue()
        queue.put_nowait(large)
        assert await queue.get() is large
        small = StepOutput(request_id="r", index=0, token_ids=(1,), logprobs=(row,))
        for _ in range(subscribers.MAX_UNREAD // 20):
            queue.put_nowait(small)
        assert isinstance(await queue.get(), RequestError)

    asyncio.run(main())


def test_a_look_is_taken_between_two_steps() -> None:
    async def main() -> None:
        client, engine = make_client()
        first = await client.look()
        assert first.num_blocks == sum(first.counts) == 64
        async for _ in client.generate(make_request(1)):
            pass
        engine._live._next_at = 0.0
        snapshot = await client.look()
        assert snapshot.number == first.number + 1 and snapshot.steps and snapshot.counts[1] > 0
        await client.close()
        with pytest.raises(EngineStopped):
            await client.look()

    asyncio.run(main())
