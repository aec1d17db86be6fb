"""An engine in its own process: the same answers, and no request is left waiting when it dies.

Most tests run the real process, loop and sockets around the oracle (tests/support/faulty_engine.py), which
crashes or hangs when a prompt orders it to; a few run a tiny real model.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infer import LLM, SamplingParams
from infer.client.client import embed
from infer.client.messages import Replica
from infer.client.process_client import ProcessClient
from infer.client.spawn import spawn
from infer.client.supervisor import EngineProcess, ProcessOptions, RestartPolicy
from infer.config.settings import EngineConfig
from infer.engine.prefixes import prefix_hashes
from infer.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    EngineLost,
    EngineStopped,
    QueueFull,
    RequestError,
)
from infer.finish_reason import FinishReason
from infer.scheduling.request import Request
from tests.support.faulty_engine import CRASH, FORKED, RAISE, STUCK
from tests.support.oracle import VOCAB_SIZE, expected_output
from tests.support.server_process import is_alive, wait_until

ROOT = Path(__file__).parents[2]
FAULTY = "tests.support.faulty_engine"
PATIENCE_S = 4.0  # with a busy machine; less than the 5 seconds after which an engine that hangs is killed


def make_request(number: int, *, max_tokens: int = 12, n: int = 1, first: int | None = None) -> Request:
    prompt = tuple((number * 31 + i) % (VOCAB_SIZE - 10) for i in range(1 + number % 9))
    return Request(
        request_id=f"r{number}",
        prompt=prompt if first is None else (first, *prompt),
        params=SamplingParams(max_tokens=max_tokens, seed=number, n=n),
    )


@contextlib.asynccontextmanager
async def running(
    *, module: str = FAULTY, knobs: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[ProcessClient]:
    sys.path[:0] = [path for path in (str(ROOT),) if path not in sys.path]  # the child imports what we can
    options = {"policy": RestartPolicy(first_delay=0.05)} | options
    client = await ProcessClient.start(
        EngineConfig.from_knobs(**(knobs or {})), ProcessOptions(module=module, **options)
    )
    try:
        yield client
    finally:
        await client.close()


async def collect(client: ProcessClient, request: Request) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    async for output in client.generate(request):
        tokens.setdefault(output.index, []).extend(output.token_ids)
    return tokens


async def until(is_so: Callable[[], bool], *, timeout: float = 60.0) -> None:
    async with asyncio.timeout(timeout):
        while not is_so():
            await asyncio.sleep(0.01)


def is_healthy(client: ProcessClient) -> bool:
    return client.failure is None


def is_idle(client: ProcessClient) -> bool:
    stats = client.stats()
    return stats.num_running == stats.num_waiting == stats.num_used_blocks == 0


def run(main: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(180):
            await main

    asyncio.run(bounded())


# -- the same answers -----------------------------------------------------------------------------


def test_a_real_model_answers_as_it_does_offline(checkpoint: str) -> None:
    knobs: dict[str, Any] = {"dtype": "float32", "num_blocks": 64, "block_size": 4, "num_threads": 1}
    llm = LLM(checkpoint, **knobs)
    asked = [
        SamplingParams(temperature=0.8, seed=7, max_tokens=20, logit_bias={5: 2.0}, stop_token_ids=(9,)),
        SamplingParams(temperature=0.0, max_tokens=12, logprobs=3, prompt_logprobs=2),
        SamplingParams(temperature=0.9, seed=1, max_tokens=8, n=3, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=6, n=2, use_beam_search=True),
    ]
    prompts = [tuple(range(5 + i, 15 + i)) for i in range(len(asked))]

    async def main() -> None:
        async with running(module="infer.client.process", knobs=knobs | {"model": checkpoint}) as client:
            for number, (prompt, params) in enumerate(zip(prompts, asked, strict=True)):
                offline = llm.generate([list(prompt)], params)[0]
                request = Request(request_id=str(number), prompt=prompt, params=params)
                outputs = [output async for output in client.generate(request)]
                for line in offline.outputs:
                    mine = [output for output in outputs if output.index == line.index]
                    assert [i for output in mine for i in output.token_ids] == line.token_ids
                    assert mine[-1].finish_reason == line.finish_reason
                    if line.logprobs is not None:
                        assert [row for output in mine for row in output.logprobs] == line.logprobs
                if offline.prompt_logprobs is not None:
                    assert list(outputs[0].prompt_logprobs or ()) == offline.prompt_logprobs
            embedding = await embed(client, Request(request_id="e", prompt=(5, 6, 7), pooling="mean"))
            assert [embedding] == llm.embed([5, 6, 7], pooling="mean", normalize=False)
            snapshot = await client.look()
            assert sum(snapshot.counts) == snapshot.num_blocks and snapshot.counts[1] > 0
            assert await client.reset_prefix_cache() > 0
            assert client.stats().num_cached_blocks == 0

    run(main())


def test_an_engine_with_replicas_tells_what_it_caches_and_starts_again_with_nothing() -> None:
    request = make_request(8)
    request = replace(request, prompt=tuple(range(40)), cache_salt="salt")

    async def main() -> None:
        async with running(replica=Replica(number=0, count=2)) as client:
            await collect(client, request)
            hashes = prefix_hashes(request, client.stats().block_size, 512)
            assert hashes
            await until(lambda: client.prefixes.issuperset(hashes))
            await client.reset_prefix_cache()
            await until(lambda: not client.prefixes)
            await collect(client, request)
            await until(lambda: client.prefixes.issuperset(hashes))
            pid = client.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await until(lambda: client.pid not in (None, pid))
            assert not client.prefixes
        async with running() as alone:
            await collect(alone, request)
            await until(lambda: is_idle(alone))
            assert not alone.prefixes, "nobody asks"

    run(main())


def test_a_third_of_200_callers_leave_and_the_books_balance() -> None:
    async def main() -> None:
        knobs = {"num_blocks": 96, "max_batch_size": 16}
        async with running(knobs=knobs) as client:
            rng = random.Random(0)
            requests = [make_request(i, max_tokens=30, n=1 + i % 2) for i in range(200)]
            tasks = [asyncio.create_task(collect(client, request)) for request in requests]
            for number in rng.sample(range(200), 67):
                await asyncio.sleep(rng.random() * 0.004)
                tasks[number].cancel()
            num_answered = 0
            for number, task in enumerate(tasks):
                with contextlib.suppress(asyncio.CancelledError):
                    for index, tokens in (await task).items():
                        assert tokens == expected_output(
                            requests[number].prompt, 30, seed=number, index=index
                        )
                    num_answered += 1
            assert 133 <= num_answered < 200
            await until(lambda: is_idle(client))
            assert client._readers == {}

    run(main())


# -- refusals -------------------------------------------------------------------------------------


def test_refusals_keep_their_class_their_words_and_their_field() -> None:
    async def main() -> None:
        async with running(knobs={"max_queue": 1, "max_batch_size": 1}) as client:
            with pytest.raises(RequestError, match="no tokens") as caught:
                await collect(client, Request(request_id="empty", prompt=()))
            assert caught.value.param == "prompt"
            too_long = Request(request_id="long", prompt=(1,) * 500)
            with pytest.raises(RequestError, match="context length is 400"):
                await collect(client, too_long)
            with pytest.raises(RequestError, match="64 bits"):
                await collect(client, Request(request_id="huge", prompt=(2**64,)))
            odd: Any = 1.5
            with pytest.raises(RequestError, match="wrong type.*priority"):
                await collect(client, Request(request_id="odd", prompt=(1,), priority=odd))
            with pytest.raises(RequestError, match="pooling must be one of"):
                await embed(client, Request(request_id="e", prompt=(1,), pooling="median"))

            tasks = [asyncio.create_task(collect(client, make_request(i, max_tokens=300))) for i in range(6)]
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert any(isinstance(error, QueueFull) for error in done)
            assert any(isinstance(answer, dict) for answer in done)
            assert is_healthy(client)

    run(main())


def test_a_request_id_in_use_is_refused_and_its_first_owner_served() -> None:
    async def main() -> None:
        async with running() as client:
            request = make_request(1, max_tokens=200)
            first = client.generate(request)
            begun = asyncio.ensure_future(anext(first))
            await asyncio.sleep(0)  # it is on its way, and not yet done
            with pytest.raises(RequestError, match="already being served"):
                await collect(client, request)
            tokens = list((await begun).token_ids)
            tokens += [i async for output in first for i in output.token_ids]
            assert tokens == expected_output(request.prompt, 200, seed=1)

    run(main())


def test_an_id_used_again_at_once_gets_none_of_the_first_ones_tokens() -> None:
    async def main() -> None:
        async with running() as client:
            for seed in range(40):
                prompt = (seed, 1, 2)
                params = SamplingParams(max_tokens=20, seed=seed)
                outputs = client.generate(Request(request_id="same", prompt=prompt, params=params))
                if seed % 2:
                    await anext(outputs)
                    await outputs.aclose()
                else:
                    tokens = [i async for output in outputs for i in output.token_ids]
                    assert tokens == expected_output(prompt, 20, seed=seed)

    run(main())


def test_an_abort_reaches_the_reader_and_an_impossible_one_harms_none() -> None:
    async def main() -> None:
        async with running() as client:
            request = make_request(3, max_tokens=300, n=2)
            client.abort("nobody")
            outputs = client.generate(request)
            await anext(outputs)
            client.abort(request.request_id, 7)
            client.abort(request.request_id)
            reasons = [output.finish_reason async for output in outputs]
            assert reasons.count(FinishReason.ABORT) == 2
            assert await collect(client, make_request(4))

    run(main())


# -- death ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "reason"), [(CRASH, "signal 9"), (RAISE, "KeyboardInterrupt"), (FORKED, "signal 9")]
)
def test_when_the_engine_dies_all_requests_are_told_and_a_new_one_serves(order: int, reason: str) -> None:
    async def main() -> None:
        async with running() as client:
            first_pid = client.pid
            others = [asyncio.create_task(collect(client, make_request(i, max_tokens=380))) for i in range(5)]
            await asyncio.sleep(0)  # they are on their way, and not yet done
            num_counted = client.stats().num_output_tokens
            start = time.monotonic()
            with pytest.raises(EngineStopped, match=reason):
                await collect(client, make_request(9, first=order))
            for task in others:
                with pytest.raises(EngineStopped, match="restarted"):
                    await task
            assert time.monotonic() - start < PATIENCE_S
            assert isinstance(client.failure, EngineStopped)
            with pytest.raises(EngineStopped):
                await collect(client, make_request(1))
            with pytest.raises(EngineStopped):
                await embed(client, Request(request_id="e", prompt=(1,), pooling="last"))
            assert is_idle(client)

            await until(lambda: is_healthy(client))
            assert client.pid not in (None, first_pid)
            assert (await collect(client, make_request(2)))[0] == expected_output(
                make_request(2).prompt, 12, seed=2
            )
            assert client.stats().num_output_tokens >= num_counted

    run(main())


def test_killed_between_requests_it_comes_back() -> None:
    async def main() -> None:
        async with running() as client:
            assert client.pid is not None
            os.kill(client.pid, signal.SIGKILL)
            await until(lambda: not is_healthy(client))
            await until(lambda: is_healthy(client))
            assert await collect(client, make_request(2))

    run(main())


def test_a_death_that_is_not_yet_known_raises_the_same() -> None:
    async def main() -> None:
        async with running() as client:
            leaving = client.generate(make_request(1, max_tokens=380))
            await anext(leaving)
            assert client.pid is not None
            os.kill(pid := client.pid, signal.SIGKILL)
            wait_until(lambda: not is_alive(pid))  # the event loop hears of nothing meanwhile
            await leaving.aclose()
            with pytest.raises(EngineStopped):
                await collect(client, make_request(2))

    run(main())


def test_without_restart_it_stays_down() -> None:
    async def main() -> None:
        async with running(restart=False) as client:
            with pytest.raises(EngineStopped, match="signal 9"):
                await collect(client, make_request(1, first=CRASH))
            await asyncio.sleep(0.3)  # nothing happens, and nothing tells that it never will
            assert isinstance(client.failure, EngineStopped) and "signal 9" in str(client.failure)

    run(main())


def test_it_stays_down_after_too_many_failed_starts(tmp_path: Path) -> None:
    async def main() -> None:
        switch = tmp_path / "gone"
        policy = RestartPolicy(max_restarts=2, first_delay=0.01)
        async with running(knobs={"model": str(switch)}, policy=policy) as client:
            switch.touch()
            assert client.pid is not None
            os.kill(client.pid, signal.SIGKILL)
            await until(lambda: "stays down after 2 restarts" in reason_of(client))
            assert str(tmp_path) not in reason_of(client)

    run(main())


@pytest.mark.parametrize(("stops", "is_told"), [(False, False), (True, False), (False, True)])
def test_open_requests_are_told_of_a_restart_only_if_there_is_one(stops: bool, is_told: bool) -> None:
    async def main() -> None:
        policy = RestartPolicy(max_restarts=1 if stops or is_told else 0, first_delay=0.01)
        async with running(policy=policy) as client:
            if stops:
                client.stop_restarts()
            with pytest.raises(EngineStopped, match="signal 9") as caught:
                await collect(client, make_request(1, first=CRASH))
            assert ("it is being restarted" in str(caught.value)) == is_told
            assert ("the server stops, so it is not restarted" in str(caught.value)) == stops
            await until(lambda: is_healthy(client) if is_told else isinstance(client.failure, EngineLost))

    run(main())


def reason_of(client: ProcessClient) -> str:
    return str(client.failure or "")


def test_a_stuck_engine_is_reported() -> None:
    async def main() -> None:
        async with running(stuck_timeout=0.3, restart=False) as client:
            await asyncio.sleep(0.5)  # longer than work may take
            assert is_healthy(client)  # silence without work is health
            task = asyncio.create_task(collect(client, make_request(1, first=STUCK)))
            await until(lambda: "no progress" in reason_of(client))
            assert type(client.failure) is EngineError
            task.cancel()

    run(main())


def test_a_stuck_engine_is_replaced() -> None:
    async def main() -> None:
        async with running(stuck_timeout=1.5) as client:
            with pytest.raises(EngineStopped, match="no progress"):
                await collect(client, make_request(1, first=STUCK))
            await until(lambda: is_healthy(client))
            assert await collect(client, make_request(2))

    run(main())


def test_an_engine_that_a_signal_stops_under_a_request_is_replaced_at_once() -> None:
    async def main() -> None:
        async with running(stuck_timeout=600.0) as client:
            task = asyncio.create_task(collect(client, make_request(1, first=STUCK)))
            await asyncio.sleep(0.5)
            assert client.pid is not None
            os.kill(client.pid, signal.SIGSTOP)
            with pytest.raises(EngineStopped, match="the engine was stopped by a signal and was ended"):
                await task
            await until(lambda: is_healthy(client))
            assert await collect(client, make_request(2))

    run(main())


def test_an_engine_frozen_while_idle_is_noticed_and_replaced() -> None:
    async def main() -> None:
        async with running(stuck_timeout=0.4) as client:
            assert await collect(client, make_request(1))
            pid = client.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)  # no request is open: only a ping can tell
            await until(lambda: "stopped by a signal" in reason_of(client))
            await until(lambda: is_healthy(client))
            assert client.pid != pid
            assert await collect(client, make_request(2))

    run(main())


def test_an_engine_that_a_signal_stops_while_it_starts_is_replaced() -> None:
    started: list[int] = []

    def start(module: str) -> subprocess.Popen[bytes]:
        process = spawn(module)
        started.append(process.pid)
        if len(started) % 2 == 0:
            os.kill(process.pid, signal.SIGSTOP)
        return process

    async def main() -> None:
        async with running(spawn=start) as client:
            os.kill(started[0], signal.SIGKILL)
            await until(lambda: len(started) == 3 and is_healthy(client))
            assert await collect(client, make_request(2))
            assert not is_alive(started[1])
        with pytest.raises(EngineStopped, match="while it started, the engine was stopped by a signal"):
            async with running(spawn=start):
                pass
        assert not is_alive(started[3])

    run(main())


# -- start and end --------------------------------------------------------------------------------


def test_what_stops_the_start_is_raised_as_what_it_is(checkpoint: str) -> None:
    async def main() -> None:
        with pytest.raises(CheckpointError, match="the weights are broken"):
            async with running(knobs={"model": "broken"}):
                pass
        with pytest.raises(ConfigError, match="device"):
            knobs = {"model": checkpoint, "device": "cuda:99"}
            async with running(module="infer.client.process", knobs=knobs):
                pass
        lines: list[str] = []
        with pytest.raises(EngineError, match="ZeroDivisionError: a bug"):
            async with running(knobs={"model": "unexpected"}, on_log=lines.append):
                pass
        assert "something on standard output" in lines
        with pytest.raises(EngineError, match="No module named"):
            async with running(module="infer.engine.no_such_module", on_log=lines.append):
                pass

    run(main())


def test_closing_tells_all_requests_and_leaves_nothing_behind() -> None:
    def descriptors() -> set[str]:
        found = set()
        for fd in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(f"{fd.name} {os.readlink(fd)}")
        return found

    async def main() -> None:
        async with running() as client:  # once before counting: the first use of zmq opens things for good
            pass
        before = descriptors()
        async with running() as client:
            assert client.pid is not None
            pid = client.pid
            assert isinstance(client._process, EngineProcess)
            directory = Path(client._process.directory)
            assert directory.stat().st_mode & 0o777 == 0o700
            task = asyncio.create_task(collect(client, make_request(1, max_tokens=380)))
            await asyncio.sleep(0)  # it is on its way, and not yet done
            await client.close()
            with pytest.raises(EngineStopped, match="closed"):
                await task
            with pytest.raises(EngineStopped, match="closed"):
                await collect(client, make_request(2))
        assert not Path(f"/proc/{pid}").exists()  # not even a zombie
        assert not directory.exists()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert descriptors() == before

    asyncio.run(main())


def test_closing_while_it_restarts_or_hangs_ends_soon() -> None:
    async def main() -> None:
        async with running() as client:
            with pytest.raises(EngineStopped):
                await collect(client, make_request(1, first=CRASH))
            await until(lambda: not is_healthy(client))
            start = time.monotonic()
            await client.close()
            assert time.monotonic() - start < PATIENCE_S

    run(main())


def test_a_signal_to_the_group_does_not_end_the_engine_before_the_server() -> None:
    async def main() -> None:
        async with running() as client:
            assert client.pid is not None
            os.kill(client.pid, signal.SIGTERM)
            os.kill(client.pid, signal.SIGINT)
            assert await collect(client, make_request(2))
            assert os.getpgid(client.pid) != os.getpgid(0)

    run(main())


ORPHAN = """
import asyncio, sys
sys.path[:0] = {path!r}
from infer.config.settings import EngineConfig
from infer.client.process_client import ProcessClient
from infer.client.spawn import spawn
from infer.client.supervisor import ProcessOptions
async def main():
    client = await ProcessClient.start(EngineConfig(), ProcessOptions(module={module!r}))
    print(client.pid, client._process.directory, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def test_when_the_server_is_killed_the_engine_goes_too() -> None:
    script = ORPHAN.format(path=[str(ROOT), str(ROOT / "src")], module=FAULTY)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        number, directory = server.stdout.readline().split()
        pid = int(number)
        assert is_alive(pid) and Path(directory).is_dir()
        server.kill()
        wait_until(lambda: not is_alive(pid))
    assert not Path(directory).exists()


def test_an_idle_engine_costs_no_cpu() -> None:
    def cpu_s(pid: int) -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def main() -> None:
        async with running() as client:
            assert await collect(client, make_request(1))
            assert client.pid is not None
            before, own = cpu_s(client.pid), time.process_time()
            await asyncio.sleep(1.0)  # what is measured is this second
            assert cpu_s(client.pid) - before <= 0.05  # ticks are 10 ms
            assert time.process_time() - own <= 0.05

    run(main())


def test_restarts_slow_down_and_end() -> None:
    policy = RestartPolicy(max_restarts=4, window=100.0, first_delay=1.0, max_delay=5.0)
    assert [policy.next_delay(now) for now in (0.0, 1.0, 2.0, 3.0, 4.0)] == [1.0, 2.0, 4.0, 5.0, None]
    assert policy.next_delay(101.5) == 4.0  # two of the four are out of the window


def test_a_thousand_restarts_wait_the_longest_delay() -> None:
    policy = RestartPolicy(max_restarts=2000, max_delay=5.0)
    assert [policy.next_delay(0.0) for _ in range(1500)][-1] == 5.0
