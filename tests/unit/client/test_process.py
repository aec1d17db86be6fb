"""The loop of the engine process, without a process: what one turn does, and what it says afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from infer.cache.paged_pool import PagedKVCachePool
from infer.client import engine_server, process_client, supervisor
from infer.client.client import embed as embed_prompt
from infer.client.engine_server import EngineServer
from infer.client.messages import (
    Add,
    Answer,
    Command,
    Failure,
    LiveReport,
    Ping,
    Ready,
    StepReport,
    Stop,
    Unsubscribe,
    Watch,
    decode_message,
    encode,
)
from infer.client.process_client import ProcessClient
from infer.client.supervisor import EngineProcess, ProcessOptions
from infer.config.defaults import SIMULATED_STEPS
from infer.config.resolve import resolve_scheduler
from infer.config.settings import EngineConfig
from infer.constraints.description import Structured
from infer.engine.engine import Engine
from infer.engine.stats import EngineStats
from infer.errors import EngineError, EngineLost, EngineStopped, QueueFull
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request, StepOutput
from infer.scheduling.scheduler import Scheduler
from infer.tools.record import Recorder
from tests.support.guided import GuidedWorld
from tests.support.oracle import VOCAB_SIZE, OracleDevice


class ScriptedLink:
    """The server's end of the socket: commands by turn, `Stop` when all are taken; keeps the reports."""

    def __init__(self, *turns: Sequence[Command]) -> None:
        self._turns = deque(deque(turn) for turn in turns)
        self.reports: list[StepReport] = []
        self.sights: list[LiveReport] = []
        self._is_awaited = False
        self._readable = os.open("/dev/zero", os.O_RDONLY)

    def fileno(self) -> int:
        """What is asked for when the engine sleeps until there is a command: there is one at once."""
        self._is_awaited = True
        return self._readable

    @property
    def has_turns(self) -> bool:
        return bool(self._turns)

    def poll(self, timeout: int) -> int:
        return zmq.POLLIN  # there is always a command, or the end

    def recv(self, flags: int = 0) -> bytes:
        is_awaited, self._is_awaited = self._is_awaited, False
        if self._turns and self._turns[0]:
            return encode(self._turns[0].popleft())
        if is_awaited:
            return encode(Stop())
        if self._turns:
            self._turns.popleft()
        raise zmq.Again

    def send(self, data: bytes) -> None:
        message = decode_message(data)
        if isinstance(message, LiveReport):
            self.sights.append(message)
            return
        assert isinstance(message, StepReport)
        self.reports.append(message)


def serve(*turns: Sequence[Command], max_queue: int | None = None) -> list[StepReport]:
    """Run the loop over these commands until it would sleep, in an engine of one place; the reports."""
    link = ScriptedLink(*turns)
    EngineServer(make_engine(max_queue), [cast("zmq.Socket[bytes]", cast(Any, link))]).run()
    return link.reports


def make_engine(max_queue: int | None = None) -> Engine:
    pool = PagedKVCachePool(64, 4)
    knobs = EngineConfig.from_knobs(max_queue=max_queue, max_batch_size=1, max_num_batched_tokens=4)
    scheduler = Scheduler(pool, resolve_scheduler(knobs, 256, SIMULATED_STEPS))
    runner = OracleDevice(pool, scheduler.state)
    return Engine(scheduler, runner, context_len=200, vocab_size=VOCAB_SIZE)


def make_request(name: str) -> Request:
    return Request(request_id=name, prompt=(1, 2), params=SamplingParams(max_tokens=5))


def in_pairs(report: StepReport) -> list[tuple[int, StepOutput]]:
    return list(zip(report.tickets, report.outputs, strict=True))


def add(ticket: int, max_tokens: int = 5) -> Add:
    return Add(
        ticket,
        Request(request_id=f"r{ticket}", prompt=(1, 2), params=SamplingParams(max_tokens=max_tokens)),
    )


def embed(ticket: int, length: int = 1) -> Add:
    return Add(ticket, Request(request_id=f"e{ticket}", prompt=(ticket,) * length, pooling="last"))


def test_every_chunk_of_a_long_embedding_is_a_report_of_work_done() -> None:
    reports = serve([embed(1, 19)])
    taken, *reports = reports
    assert (taken.num_commands, taken.stats.num_step_tokens, taken.tickets) == (1, 0, []), (
        "told before the step"
    )
    assert [report.stats.num_step_tokens for report in reports] == [4, 8, 12, 16, 19]
    assert [report.tickets for report in reports] == [[], [], [], [], [1]]
    assert all(report.stats.num_running for report in reports[:-1]), "an answer is owed"


def test_an_embedding_that_was_withdrawn_is_never_made() -> None:
    reports = serve([embed(1), embed(2), Unsubscribe(2, "e2"), embed(3)])
    assert [ticket for report in reports for ticket in report.tickets] == [1, 3]


def test_embeddings_and_requests_share_the_places_to_wait() -> None:
    reports = serve([*map(embed, range(1, 5)), add(9)], max_queue=2)  # one place, and two to wait
    refused = [answer for report in reports for answer in report.answers if answer.failure is not None]
    assert [(answer.ticket, answer.failure and answer.failure.kind) for answer in refused] == [
        (4, "QueueFull"),
        (9, "QueueFull"),
    ]
    assert [ticket for report in reports for ticket in report.tickets] == [1, 2, 3]


def test_a_ping_is_answered_by_a_report() -> None:
    (report,) = serve([Ping()])
    assert report.num_commands == 1


def test_a_look_is_answered_with_what_the_engine_does() -> None:
    link = ScriptedLink([Watch(7), add(1)], [Watch(8)])
    EngineServer(make_engine(), [cast("zmq.Socket[bytes]", cast(Any, link))]).run()
    (first, second) = link.sights
    assert (first.ticket, second.ticket) == (7, 8)
    assert first.snapshot.num_blocks == sum(first.snapshot.counts) == 64


def test_a_snapshot_that_fails_is_an_answer_and_no_request_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Engine) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(Engine, "look", fail)
    reports = serve([Watch(7), add(1)])
    (answer,) = [answer for report in reports for answer in report.answers]
    assert answer.ticket == 7 and answer.failure is not None and answer.failure.kind == "EngineError"
    assert [ticket for report in reports for ticket in report.tickets] == [1] * 5


def test_api_processes_share_one_queue_and_get_their_own_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both use ticket 1; of four requests two find a place to wait, in the order in which they came."""
    links = [
        ScriptedLink([add(1), Add(2, make_request("a"))], [], [], []),
        ScriptedLink([Add(1, make_request("b")), Add(2, make_request("c"))], [], [], []),
    ]

    def poll(timeout: int | None) -> bool:
        if not any(link.has_turns for link in links):
            raise StopIteration  # all is said and done
        return True

    monkeypatch.setattr(engine_server, "_poll_all", lambda sockets: poll)
    with pytest.raises(StopIteration):
        EngineServer(make_engine(max_queue=1), cast("Any", links)).run()
    outputs = [
        [(ticket, output.request_id) for report in link.reports for ticket, output in in_pairs(report)]
        for link in links
    ]
    assert set(outputs[0]) == {(1, "r1"), (2, "a")} and outputs[1] == []
    refused = [answer for report in links[1].reports for answer in report.answers]
    assert [answer.ticket for answer in refused] == [1, 2]
    assert all(answer.failure is not None and answer.failure.kind == "QueueFull" for answer in refused)
    assert len(links[1].reports) < len(links[0].reports), "counts alone are sent now and then"
    assert [link.reports[-1].stats.num_running for link in links] == [0, 0], "both learn that it is idle"
    assert [link.reports[-1].num_commands for link in links] == [2, 2]


def test_an_idle_engine_is_woken_when_a_constraint_is_compiled() -> None:
    """Real sockets: the loop sleeps in them while a thread compiles, and no command comes to wake it."""
    context: zmq.Context[Any] = zmq.Context.instance()
    ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    ours.bind("inproc://constraints")
    theirs.connect("inproc://constraints")
    ours.rcvtimeo = 60_000
    server = EngineServer(GuidedWorld(num_blocks=100).engine, [theirs])
    loop = threading.Thread(target=server.run)
    loop.start()
    try:
        for ticket, text in ((1, "[0-9]{7}"), (2, "(")):
            structured = Structured(kind="regex", text=text, param="guided_regex")
            params = SamplingParams(structured=structured, max_tokens=9)
            ours.send(encode(Add(ticket, Request(request_id=f"r{ticket}", prompt=(5,), params=params))))
            last: StepOutput | None = None
            while last is None or last.finish_reason is None:
                report = decode_message(ours.recv())
                assert isinstance(report, StepReport)
                assert set(report.tickets) <= {ticket}
                last = report.outputs[-1] if report.outputs else last
            assert (last.finish_reason, last.param) == (("stop", None), ("error", "guided_regex"))[ticket - 1]
    finally:
        ours.send(encode(Stop()))
        loop.join(60)
        ours.close(0)
        theirs.close(0)


def test_the_vocabulary_is_read_by_an_engine_that_is_idle_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Read at once, it would share its core with the first request."""
    engine, waits = make_engine(), list[int | None]()
    read: list[int] = []
    monkeypatch.setattr(engine, "use_idle_time", lambda: read.append(len(waits)))

    def poll(timeout_ms: int | None) -> bool:
        waits.append(timeout_ms)
        if len(waits) == 4:
            raise StopIteration
        return len(waits) != 2  # the second wait ends without a command

    monkeypatch.setattr(engine_server, "_poll_all", lambda sockets: poll)
    link = ScriptedLink([Add(1, make_request("r1"))], *[[]] * 20)
    with pytest.raises(StopIteration):
        EngineServer(engine, [cast("zmq.Socket[bytes]", cast(Any, link))]).run()
    assert read == [2] and waits == [1000, 1000, None, None]


def test_work_between_two_idle_pieces_makes_the_next_wait_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, waits = make_engine(), list[int | None]()
    monkeypatch.setattr(engine, "use_idle_time", lambda: 0.0)  # there are more pieces

    def poll(timeout_ms: int | None) -> bool:
        waits.append(timeout_ms)
        if len(waits) == 5:
            raise StopIteration
        return len(waits) == 3  # a command comes after two pieces

    monkeypatch.setattr(engine_server, "_poll_all", lambda sockets: poll)
    link = ScriptedLink([Add(1, make_request("r1"))], *[[]] * 20)
    with pytest.raises(StopIteration):
        EngineServer(engine, [cast("zmq.Socket[bytes]", cast(Any, link))]).run()
    assert waits[:4] == [1000, 0, 0, 1000]


class SilentProcess:
    """An engine process that takes commands and never answers."""

    pid = 0
    exit_reason = "the engine process ended with signal 9 (Killed)"

    def __init__(self) -> None:
        self.sent: list[Command] = []
        self.exited = asyncio.Event()

    def listen(self, on_message: object) -> None: ...

    def receive_all(self) -> None: ...

    def send(self, command: Command) -> None:
        self.sent.append(command)

    async def close(self, *, timeout: float = 0.0) -> None: ...


async def silent_client(
    stuck_timeout: float, *, max_batch_size: int = 0, max_queue: int | None = None
) -> tuple[SilentProcess, ProcessClient]:
    process = SilentProcess()
    options = ProcessOptions(stuck_timeout=stuck_timeout)
    ready = Ready(EngineStats(max_batch_size=max_batch_size), max_queue=max_queue)
    client = ProcessClient(cast(EngineProcess, process), ready, options, None)
    return process, client


def test_the_client_withdraws_an_embedding_whose_caller_leaves() -> None:
    async def main() -> None:
        process, client = await silent_client(0.0)
        request = Request(request_id="e", prompt=(1, 2), pooling="last")
        call = asyncio.create_task(embed_prompt(client, request))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert process.sent == [Add(1, request), Unsubscribe(1, "e")]
        await client.close()

    asyncio.run(main())


def test_work_done_is_progress_and_a_turn_without_work_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(process_client, "time", SimpleNamespace(monotonic=lambda: now))

    async def main() -> None:
        nonlocal now
        process, client = await silent_client(10.0)

        def report(num_step_tokens: int) -> None:
            stats = EngineStats(num_step_tokens=num_step_tokens, num_running=1)
            client._take(StepReport(len(process.sent), stats, [], []))

        reader = asyncio.create_task(anext(client.generate(add(1).request)))
        await asyncio.sleep(0)
        for num_tokens in range(512, 5 * 512, 512):  # chunks of a long prompt: no output, but work
            now += 9.0
            report(num_tokens)
            assert client.failure is None
        for _ in range(2):
            now += 9.0
            report(num_tokens)  # the loop turns and computes nothing
        assert isinstance(client.failure, EngineError) and "no progress for 18 s" in str(client.failure)
        report(num_tokens + 1)
        assert client.failure is None
        now += 11.0
        assert isinstance(client.failure, EngineError) and "no progress for 11 s" in str(client.failure)
        reader.cancel()
        await client.close()

    asyncio.run(main())


def test_an_engine_that_falls_asleep_or_wakes_is_not_stuck_and_has_no_prefixes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(process_client, "time", SimpleNamespace(monotonic=lambda: now))

    async def main() -> None:
        nonlocal now
        process, client = await silent_client(10.0)
        client.prefixes.update({1, 2})
        for number, turn in enumerate((client.sleep(100), client.wake()), 1):
            turning = asyncio.create_task(turn)
            await asyncio.sleep(0)
            now += 1000.0  # copies, and an engine that is built
            assert client.failure is None
            client._take(StepReport(number, EngineStats(), [], [], [Answer(number, 60 + number, None)]))
            assert await turning == 60 + number
            assert client.prefixes == set()
        reader = asyncio.create_task(anext(client.generate(add(1).request)))
        await asyncio.sleep(0)
        now += 11.0
        assert client.failure is not None, "it is awake, and owes an answer"
        reader.cancel()
        await client.close()

    asyncio.run(main())


@pytest.mark.parametrize("dies_in", ["sleep", "wake"])
def test_an_engine_that_dies_as_it_falls_asleep_or_wakes_is_not_restarted(dies_in: str) -> None:
    """The fleet loads the model from its files instead: a restarted engine would serve no request."""

    async def main() -> None:
        restarts: list[int] = []

        async def start_again() -> tuple[EngineProcess, Ready]:
            restarts.append(1)
            return cast(EngineProcess, SilentProcess()), Ready(EngineStats())

        process, options = SilentProcess(), ProcessOptions(restart=True)
        client = ProcessClient(cast(EngineProcess, process), Ready(EngineStats()), options, start_again)
        turning = asyncio.create_task(client.sleep(100))
        await asyncio.sleep(0)
        if dies_in == "wake":
            client._take(StepReport(1, EngineStats(), [], [], [Answer(1, 60, None)]))
            await turning
            turning = asyncio.create_task(client.wake())
            await asyncio.sleep(0)
        process.exited.set()
        with pytest.raises(EngineStopped) as told:
            await turning
        assert "restarted" not in str(told.value)
        await asyncio.wait([client._supervisor], timeout=30)
        assert isinstance(client.failure, EngineLost) and restarts == []
        await client.close()

    asyncio.run(main())


def test_an_engine_that_hangs_is_stuck_while_it_should_free_its_pinned_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(process_client, "time", SimpleNamespace(monotonic=lambda: now))

    async def main() -> None:
        nonlocal now
        _, client = await silent_client(10.0)
        dropping = asyncio.create_task(client.drop_pinned())
        await asyncio.sleep(0)
        now += 11.0
        assert isinstance(client.failure, EngineError), "it serves meanwhile, so it is watched"
        await client.close()
        with pytest.raises(EngineStopped):
            await dropping

    asyncio.run(main())


def test_a_full_queue_is_told_without_asking_the_engine() -> None:
    """It takes commands between steps alone, and a step may take seconds."""

    async def main() -> None:
        process, client = await silent_client(0.0, max_batch_size=2, max_queue=3)
        readers: list[asyncio.Task[StepOutput]] = []

        async def submit() -> int:
            """Returns how many of ten requests were sent."""
            num_sent = len(process.sent)
            for _ in range(10):
                request = make_request(f"r{len(readers)}")
                readers.append(asyncio.create_task(anext(client.generate(request))))
            await asyncio.sleep(0)
            for reader in readers[-10:]:
                if reader.done():
                    assert isinstance(reader.exception(), QueueFull)
            return len(process.sent) - num_sent

        def report(num_running: int, num_waiting: int, num_taken: int | None = None) -> None:
            stats = EngineStats(num_running=num_running, num_waiting=num_waiting, max_batch_size=2)
            client._take(StepReport(len(process.sent) if num_taken is None else num_taken, stats, [], []))

        assert await submit() == 5, "two run, three wait"
        assert "3 sequences are waiting and max_queue is 3" in str(readers[5].exception())
        assert await submit() == 0
        report(2, 1, num_taken=3)
        assert await submit() == 0, "two are on their way"
        report(2, 1)
        assert await submit() == 2
        report(2, 3)
        for reader in readers[:2]:
            reader.cancel()
        await asyncio.sleep(0)
        assert await submit() == 2, "two have left"
        report(0, 0)
        assert await submit() == 5
        for reader in readers:
            reader.cancel()
        await client.close()
        await asyncio.gather(*readers, return_exceptions=True)

    asyncio.run(main())


def test_without_a_limit_the_queue_is_never_full() -> None:
    async def main() -> None:
        process, client = await silent_client(0.0, max_batch_size=1)
        readers = [asyncio.create_task(anext(client.generate(make_request(f"r{i}")))) for i in range(50)]
        await asyncio.sleep(0)
        assert len(process.sent) == 50
        await client.close()
        await asyncio.gather(*readers, return_exceptions=True)

    asyncio.run(main())


@pytest.mark.parametrize("stuck_timeout", [0.0, 120.0])
def test_an_idle_engine_that_does_not_answer_its_ping_is_silent(
    stuck_timeout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in an API process that does not decide when it is stuck."""
    monkeypatch.setattr(process_client, "CHECK_INTERVAL", 0.01)
    monkeypatch.setattr(process_client, "PING_INTERVAL", 0.05)

    async def main() -> None:
        process, client = await silent_client(stuck_timeout)
        async with asyncio.timeout(5):
            while not process.sent:
                assert client.silent_s == 0.0
                await asyncio.sleep(0.01)
            assert process.sent == [Ping()]
            while client.silent_s < 0.1:
                await asyncio.sleep(0.01)
        assert client.failure is None and process.sent == [Ping()]
        client._take(StepReport(1, EngineStats(), [], []))
        assert client.silent_s == 0.0
        await client.close()

    asyncio.run(main())


def test_directories_of_killed_servers_are_removed_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_directory_base", lambda: str(tmp_path))
    with contextlib.ExitStack() as alive:
        held = Path(supervisor._private_directory(alive))
        stale, begun, other = (tmp_path / name for name in ("infer-run-a", "infer-run-b", "else"))
        for directory in (held, stale, other):
            directory.mkdir(exist_ok=True)
            (directory / "engine-0").touch()
        begun.mkdir()
        (tmp_path / "infer-run-link").symlink_to(other)
        (tmp_path / "infer-run-file").touch()
        supervisor.remove_stale_directories()
        assert (held / "engine-0").exists() and (other / "engine-0").exists() and begun.exists()
        assert not stale.exists()
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        stale.mkdir()
        (stale / "engine-0").touch()
        supervisor.remove_stale_directories()
        assert stale.exists(), "another user's"
    assert not held.exists()


def test_clients_are_told_which_rank_ended_the_engine() -> None:
    ended: Any = EngineProcess.__new__(EngineProcess)
    ended._exit_code, ended.last_words = 1, Failure("DeviceLost", "rank 1 ended with signal 9 (Killed)")
    assert ended.exit_reason == "the engine process died: rank 1 ended with signal 9 (Killed)"


@pytest.mark.parametrize(
    ("code", "said", "names_memory"),
    [(4, "exit code 4", False), (-15, "signal 15 (Terminated)", False), (-9, "signal 9 (Killed)", True)],
)
def test_a_killed_process_is_said_to_have_run_out_of_memory(code: int, said: str, names_memory: bool) -> None:
    ended: Any = EngineProcess.__new__(EngineProcess)
    ended._exit_code, ended.last_words, ended._last_lines = code, None, ["its last line"]
    assert ended.exit_reason.startswith(f"the engine process ended with {said}")
    assert ("which the system also sends when memory runs out" in ended.exit_reason) == names_memory
    assert str(ended._start_error()).startswith(f"while it started, the engine process ended with {said}")


class FullRecord(Recorder):
    """A record that wants one new engine."""

    def __init__(self) -> None:
        self.is_full = True

    @property
    def wants_new_engine(self) -> bool:
        return self.is_full


def test_counts_go_on_in_an_engine_that_is_built_again_for_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, recorder, num_waits = make_engine(), FullRecord(), 0

    def remake() -> Engine:
        recorder.is_full = False
        return make_engine()

    engine.remake = remake

    def poll(timeout_ms: int | None) -> bool:
        nonlocal num_waits
        num_waits += 1
        if num_waits == 4:
            raise StopIteration
        return num_waits != 2  # the second wait ends without a command, and the engine is built again

    monkeypatch.setattr(engine_server, "_poll_all", lambda sockets: poll)
    link = ScriptedLink([Add(1, make_request("r1"))], *[[]] * 20)
    server = EngineServer(engine, [cast("zmq.Socket[bytes]", cast(Any, link))], recorder=recorder)
    del engine
    with pytest.raises(StopIteration):
        server.run()
    assert not recorder.is_full, "it was built again"
    counts = [report.stats.num_step_tokens for report in link.reports]
    assert counts[-1] > 0 and counts == sorted(counts)
