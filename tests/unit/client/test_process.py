"""The loop of the engine process, without a process: what one turn does, and what it says afterwards."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import zmq

from infer.cache.paged_pool import PagedKVCachePool
from infer.client import process
from infer.client.messages import (
    Add,
    Command,
    Embed,
    Ready,
    StepReport,
    Stop,
    Withdraw,
    decode_message,
    encode,
)
from infer.client.process import EngineServer
from infer.client.process_client import ProcessClient
from infer.client.supervisor import EngineProcess, RestartPolicy
from infer.config.defaults import SIMULATED_STEPS
from infer.config.resolve import resolve_scheduler
from infer.config.settings import EngineConfig
from infer.engine.engine import Engine
from infer.engine.stats import EngineStats
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request, StepOutput
from infer.scheduling.scheduler import Scheduler
from tests.support.oracle import VOCAB_SIZE, OracleRunner


class ScriptedLink:
    """The server's end of the socket: commands by turn, `Stop` when all are taken; keeps the reports."""

    def __init__(self, *turns: Sequence[Command]) -> None:
        self._turns = deque(deque(turn) for turn in turns)
        self.reports: list[StepReport] = []

    @property
    def has_turns(self) -> bool:
        return bool(self._turns)

    def poll(self, timeout: int) -> int:
        return zmq.POLLIN  # there is always a command, or the end

    def recv(self, flags: int = 0) -> bytes:
        if self._turns and self._turns[0]:
            return encode(self._turns[0].popleft())
        if flags == zmq.NOBLOCK:
            if self._turns:
                self._turns.popleft()
            raise zmq.Again
        return encode(self._turns[0].popleft() if self._turns and self._turns[0] else Stop())

    def send(self, data: bytes) -> None:
        message = decode_message(data)
        assert isinstance(message, StepReport)
        self.reports.append(message)


def serve(*turns: Sequence[Command], max_queue: int | None = None) -> tuple[list[StepReport], list[int]]:
    """Run the loop over these commands until it would sleep; the reports, and who was embedded."""
    embedded: list[int] = []

    def embed(prompt: Sequence[int], pooling: str) -> list[float]:
        embedded.append(prompt[0])
        if pooling == "mean":
            raise ZeroDivisionError
        return [float(prompt[0])]

    link = ScriptedLink(*turns)
    EngineServer(make_engine(max_queue, embed), [cast("zmq.Socket[bytes]", cast(Any, link))]).run()
    return link.reports, embedded


def make_engine(
    max_queue: int | None = None, embed: Callable[[Sequence[int], str], list[float]] | None = None
) -> Engine:
    pool = PagedKVCachePool(64, 4)
    scheduler = Scheduler(
        pool, resolve_scheduler(EngineConfig.from_knobs(max_queue=max_queue), 256, SIMULATED_STEPS)
    )
    runner = OracleRunner(pool, scheduler.state)
    return Engine(scheduler, runner, context_len=200, vocab_size=VOCAB_SIZE, embedder=embed)


def make_request(name: str) -> Request:
    return Request(request_id=name, prompt=(1, 2), params=SamplingParams(max_tokens=5))


def in_pairs(report: StepReport) -> list[tuple[int, StepOutput]]:
    return list(zip(report.tickets, report.outputs, strict=True))


def add(ticket: int, max_tokens: int = 5) -> Add:
    return Add(
        ticket,
        Request(request_id=f"r{ticket}", prompt=(1, 2), params=SamplingParams(max_tokens=max_tokens)),
    )


def test_every_embedding_has_a_report_of_its_own_and_steps_go_on_between() -> None:
    reports, _ = serve([*(Embed(i, (i,), "last") for i in range(1, 5)), add(9)])
    made = ["step" if report.outputs else [answer.ticket for answer in report.answers] for report in reports]
    assert made[:8] == ["step", [1], "step", [2], "step", [3], "step", [4]]
    waiting = [report.stats.num_waiting for report in reports]
    assert waiting[:8] == [4, 3, 3, 2, 2, 1, 1, 0], "whoever watches sees that an answer is owed"


def test_a_failed_embedding_is_its_callers_alone() -> None:
    reports, _ = serve([Embed(1, (1,), "mean"), Embed(2, (2,), "last")])
    answers = [answer for report in reports for answer in report.answers]
    assert answers[0].failure is not None
    assert answers[0].failure.message == "ZeroDivisionError in the engine"
    assert answers[1].result == [2.0]


def test_an_embedding_that_was_withdrawn_is_never_made() -> None:
    embeds = [Embed(i, (i,), "last") for i in range(1, 4)]
    commands: list[Command] = [*embeds, Withdraw(2), Withdraw(77)]
    reports, embedded = serve(commands)
    assert embedded == [1, 3]
    assert [answer.ticket for report in reports for answer in report.answers] == [1, 3]


def test_embeddings_and_requests_share_the_places_to_wait() -> None:
    reports, embedded = serve([*(Embed(i, (i,), "last") for i in range(1, 4)), add(9)], max_queue=2)
    refused = [answer for report in reports for answer in report.answers if answer.failure is not None]
    assert [(answer.ticket, answer.failure and answer.failure.kind) for answer in refused] == [
        (3, "QueueFull"),
        (9, "QueueFull"),
    ]
    assert embedded == [1, 2]


def test_api_processes_share_one_queue_and_get_their_own_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both use ticket 1; of four requests two find a place to wait, in the order in which they came."""
    links = [
        ScriptedLink([add(1), Add(2, make_request("a"))], [], [], []),
        ScriptedLink([Add(1, make_request("b")), Add(2, make_request("c"))], [], [], []),
    ]

    def poll(timeout: int | None) -> bool:
        if timeout is None and not any(link.has_turns for link in links):
            raise StopIteration  # all is said and done
        return True

    monkeypatch.setattr(process, "_poll_all", lambda sockets: poll)
    with pytest.raises(StopIteration):
        EngineServer(make_engine(max_queue=2), cast("Any", links)).run()
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


class SilentProcess:
    """An engine process that takes commands and never answers."""

    pid = 0

    def __init__(self) -> None:
        self.sent: list[Command] = []
        self.exited = asyncio.Event()

    def listen(self, on_message: object) -> None: ...

    def send(self, command: Command) -> None:
        self.sent.append(command)

    async def close(self, *, timeout: float = 0.0) -> None: ...


def test_the_client_withdraws_an_embedding_whose_caller_leaves() -> None:
    async def main() -> None:
        process = SilentProcess()
        client = ProcessClient(
            cast(EngineProcess, process),
            Ready(EngineStats()),
            stuck_timeout=0.0,
            start_again=None,
            policy=RestartPolicy(),
        )
        call = asyncio.create_task(client.embed((1, 2), "last"))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert process.sent == [Embed(1, (1, 2), "last"), Withdraw(1)]
        await client.close()

    asyncio.run(main())
