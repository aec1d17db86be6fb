"""Many callers, one engine thread: every caller gets its own tokens, and leaving frees what it held."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from infer.cache.paged_pool import PagedKVCachePool
from infer.client import subscribers
from infer.client.client import InProcessClient
from infer.config.defaults import SIMULATED_STEPS
from infer.config.resolve import resolve_scheduler
from infer.config.settings import EngineConfig
from infer.engine.engine import Engine
from infer.errors import DeviceLost, EngineStopped, QueueFull, RequestError
from infer.execution.runner import StepResult
from infer.sampling.params import RowLogprobs, SamplingParams
from infer.scheduling.batch_state import BatchState
from infer.scheduling.plan import StepPlan
from infer.scheduling.request import Request, StepOutput
from infer.scheduling.scheduler import Scheduler
from infer.scheduling.sequence import Sequence as TokenSequence
from tests.support.oracle import VOCAB_SIZE, OracleRunner, expected_output


class GatedRunner(OracleRunner):
    """Runs a step only when the test lets it."""

    def __init__(self, pool: PagedKVCachePool, state: BatchState) -> None:
        super().__init__(pool, state)
        self.gate = threading.Semaphore(0)

    def run(self, plan: StepPlan, sequences: Sequence[TokenSequence]) -> StepResult:
        assert self.gate.acquire(timeout=30), "the test never opened the gate"
        return super().run(plan, sequences)


class GatedEmbedder:
    """Embeds only when the test lets it, and remembers whom it embedded."""

    def __init__(self) -> None:
        self.gate = threading.Semaphore(0)
        self.prompts: list[tuple[int, ...]] = []

    def __call__(self, prompt: Sequence[int], pooling: str) -> list[float]:
        self.prompts.append(tuple(prompt))
        assert self.gate.acquire(timeout=30), "the test never opened the gate"
        return [float(prompt[0])]


def make_client(
    num_blocks: int = 64,
    runner_type: type[OracleRunner] = OracleRunner,
    embedder: GatedEmbedder | None = None,
    max_queue: int | None = None,
) -> tuple[InProcessClient, Engine]:
    pool = PagedKVCachePool(num_blocks, 4)
    config = EngineConfig.from_knobs(max_batch_size=16, max_queue=max_queue)
    scheduler = Scheduler(pool, resolve_scheduler(config, 256, SIMULATED_STEPS))
    runner = runner_type(pool, scheduler.state)
    engine = Engine(scheduler, runner, context_len=200, vocab_size=VOCAB_SIZE, embedder=embedder)
    return InProcessClient(engine), engine


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


def test_cancelled_callers_disturb_nobody() -> None:
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
        client, engine = make_client(runner_type=GatedRunner)
        gate = engine._runner.gate  # type: ignore[attr-defined]
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
        client, engine = make_client(runner_type=GatedRunner)
        gate = engine._runner.gate  # type: ignore[attr-defined]
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


def test_closing_tells_everybody_who_waits() -> None:
    async def main() -> None:
        client, engine = make_client(runner_type=GatedRunner)
        gate = engine._runner.gate  # type: ignore[attr-defined]
        task = asyncio.create_task(collect(client, make_request(1, max_tokens=190)))
        await until(lambda: engine.has_work)
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0)
        gate.release(2)  # at most the step in flight and one more: far from 190
        await closing
        with pytest.raises(EngineStopped):
            await task
        with pytest.raises(EngineStopped):
            await collect(client, make_request(2))

    asyncio.run(main())


def test_a_loop_that_dies_tells_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_lost_device_ends_the_loop_and_tells_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every later step would fail as well: the engine must not pretend to be alive."""

    async def main() -> None:
        client, engine = make_client()

        def lose(plan: StepPlan, sequences: Sequence[TokenSequence]) -> StepResult:
            raise DeviceLost("the device failed in step 1")

        monkeypatch.setattr(engine._runner, "run", lose)
        with pytest.raises(EngineStopped, match="DeviceLost"):
            await collect(client, make_request(1))
        with pytest.raises(EngineStopped):
            client.check_health()

    asyncio.run(main())


# -- embeddings -----------------------------------------------------------------------------------


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():
            await asyncio.sleep(0.001)


def test_generation_goes_on_between_embeddings() -> None:
    async def main() -> None:
        embedder = GatedEmbedder()
        client, engine = make_client(embedder=embedder)
        embeds = [asyncio.create_task(client.embed((i,), "last")) for i in range(3)]
        await until(lambda: len(embedder.prompts) == 1)
        outputs = client.generate(make_request(1, max_tokens=150))
        first = asyncio.ensure_future(anext(outputs))
        await asyncio.sleep(0)
        embedder.gate.release()  # one embedding is made, then the request has its step
        await first
        assert not all(embed.done() for embed in embeds)
        embedder.gate.release(2)
        assert await asyncio.gather(*embeds) == [[0.0], [1.0], [2.0]]
        await outputs.aclose()
        await client.close()

    asyncio.run(main())


def test_an_embedding_whose_caller_left_is_never_made() -> None:
    async def main() -> None:
        embedder = GatedEmbedder()
        client, _ = make_client(embedder=embedder)
        first = asyncio.create_task(client.embed((0,), "last"))
        await until(lambda: len(embedder.prompts) == 1)
        others = [asyncio.create_task(client.embed((i,), "last")) for i in range(1, 6)]
        await asyncio.sleep(0)
        for other in others[:-1]:
            other.cancel()
        await asyncio.sleep(0)
        embedder.gate.release(10)
        assert await first == [0.0]
        assert await others[-1] == [5.0]
        assert embedder.prompts == [(0,), (5,)]
        assert client._subscribers.waiting_embeds() == []
        await client.close()

    asyncio.run(main())


def test_embeddings_count_as_waiting() -> None:
    async def main() -> None:
        embedder = GatedEmbedder()
        client, _ = make_client(embedder=embedder, max_queue=2)
        first = asyncio.create_task(client.embed((0,), "last"))
        await until(lambda: len(embedder.prompts) == 1)
        others = [asyncio.create_task(client.embed((i,), "last")) for i in range(1, 4)]
        refused = asyncio.create_task(collect(client, make_request(1)))
        await asyncio.sleep(0)
        embedder.gate.release()  # the turn ends, and the engine sees who came meanwhile
        assert await first == [0.0]
        with pytest.raises(QueueFull, match="max_queue is 2"):
            await others[2]
        with pytest.raises(QueueFull, match="max_queue is 2"):
            await refused
        embedder.gate.release(2)
        assert await asyncio.gather(*others[:2]) == [[1.0], [2.0]]
        await client.close()

    asyncio.run(main())


def test_closing_tells_embeddings_that_wait() -> None:
    async def main() -> None:
        embedder = GatedEmbedder()
        client, _ = make_client(embedder=embedder)
        embeds = [asyncio.create_task(client.embed((i,), "last")) for i in range(3)]
        await until(lambda: len(embedder.prompts) == 1)
        closing = asyncio.create_task(client.close())
        await until(lambda: client._is_closing)
        embedder.gate.release(3)
        await closing
        results = await asyncio.gather(*embeds, return_exceptions=True)
        assert results[0] == [0.0]
        assert all(isinstance(result, EngineStopped) for result in results[1:])

    asyncio.run(main())


# -- readers that do not read ---------------------------------------------------------------------


def test_an_answer_nobody_reads_ends_and_frees_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
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
