"""The parts around the load: several processes, the server's own counters, the report at the end."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from infer.bench import scrape
from infer.bench.load import Target
from infer.bench.metrics import Slo
from infer.bench.processes import num_processes, run_load, split
from infer.bench.serve import Plan, bench_server
from infer.bench.workloads import Arrival, Session, Turn, Workload, make_workload
from infer.errors import ConfigError
from tests.unit.bench.fake_server import FakeServer, steady

METRICS = """\
# HELP infer_num_preemptions_total x
infer_num_preemptions_total{model_name="m"} %d
infer_request_queue_time_seconds_sum{model_name="m"} %f
infer_request_queue_time_seconds_count{model_name="m"} %d
infer_cache_config_info{block_size="16",kv_cache_backend="paged"} 1
"""


class ThreadServer:
    """The fake server on a real clock in a thread: for code that brings its own event loop."""

    def __init__(self, directory: Path) -> None:
        self.num_scrapes = 0
        path = str(directory / "s")
        self._fake = FakeServer(steady(0.0, 0.0), path)
        self.url = self._fake.url
        self._loop = asyncio.new_event_loop()
        self._listening = self._loop.run_until_complete(asyncio.start_unix_server(self._serve, path))
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return self._fake.bodies

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        start = await reader.read(4)
        if start != b"GET ":
            pushed = asyncio.StreamReader(limit=1 << 24)
            pushed.feed_data(start)
            pump = asyncio.ensure_future(self._pump(reader, pushed))
            await self._fake.serve(pushed, writer)
            pump.cancel()
            return
        path = (await reader.readuntil(b"\r\n\r\n")).split()[0]
        if path == b"/v1/models":
            body = json.dumps({"data": [{"id": "m", "max_model_len": 4096}]})
        else:
            self.num_scrapes += 1
            body = METRICS % (self.num_scrapes, 0.5 * self.num_scrapes, 2 * self.num_scrapes)
        head = f"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write((head + body).encode())
        await writer.drain()
        writer.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamReader) -> None:
        while data := await source.read(1 << 16):
            sink.feed_data(data)
        sink.feed_eof()

    def close(self) -> None:
        async def stop() -> None:
            self._listening.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0.01)  # for the transports that were closed to end

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ThreadServer]:
    made = ThreadServer(tmp_path)
    yield made
    made.close()


def test_a_server_is_benchmarked_into_a_report(server: ThreadServer) -> None:
    plan = Plan(workloads=["baseline", "agent_session"], repeats=2, warmup=2, slo=Slo(ttft=60.0))
    lines: list[str] = []
    target = Target(url=server.url, extra={"temperature": 0.6, "ignore_eos": True})
    report = bench_server(target, plan, tell=lines.append)
    baseline = report.rows[0]
    assert (report.kind, report.repeats, report.model["name"]) == ("serve", 2, "m")
    assert report.config["kv_cache_backend"] == "paged"
    assert baseline.settings["arrival"] == "closed loop, 1 at once"
    figures = baseline.figures
    assert figures["num_errors"].values == [0, 0]
    assert figures["num_output_tokens"].values == [480, 480]
    assert figures["goodput_share"].median == 1
    assert figures["queue_mean_s"].median == pytest.approx(0.25)
    assert figures["num_preemptions"].median == 1
    assert figures["client_cpu_share"].median > 0
    assert [line.partition(":")[0] for line in lines[:2]] == ["baseline 1/2", "baseline 2/2"]
    prompts = [
        tuple(body["prompt"]) for body in server.bodies if "prompt" in body and len(body["prompt"]) == 128
    ]
    assert len(set(prompts)) == len(prompts) == 20  # no repeat is in the cache
    assert all(body["ignore_eos"] and body["stream_options"]["include_usage"] for body in server.bodies)


def test_text_can_stand_for_ids(server: ThreadServer) -> None:
    bench_server(Target(url=server.url), Plan(workloads=["w1_single"], as_text=True, warmup=0))
    assert len(server.bodies[0]["prompt"].split()) == 256


def test_a_wrong_model_is_said_at_once(server: ThreadServer) -> None:
    with pytest.raises(ConfigError, match="serves m, not 'other'"):
        bench_server(Target(url=server.url, model="other"), Plan(workloads=["baseline"]))
    with pytest.raises(ConfigError, match="is the server running"):
        bench_server(Target(url=server.url + "x"), Plan(workloads=["baseline"]))
    with pytest.raises(ConfigError, match="must start with http://"):
        Target(url="localhost:8000")


def test_two_processes_share_the_work(server: ThreadServer) -> None:
    sessions = tuple(Session(turns=(Turn(ids=(number,), max_tokens=3),)) for number in range(7))
    workload = Workload(name="w", about="", arrival=Arrival(kind="closed", concurrency=4), sessions=sessions)
    done: list[int] = []
    result = run_load(Target(url=server.url, model="m"), workload, processes=2, on_done=done.append)
    assert sum(done) == 7
    assert sorted(trace.session for trace in result.traces) == list(range(7))
    assert [trace.error for trace in result.traces] == [None] * 7
    assert result.cpu_share > 0


def test_a_split_workload_is_the_whole_one() -> None:
    workload = make_workload("w2_mixed:64")
    parts = split(workload, 3)
    assert sum(part.arrival.concurrency for part in parts) == 64
    assert {session for part in parts for session in part.sessions} == set(workload.sessions)
    assert num_processes(workload) == 1


def test_counters_of_any_server_are_read() -> None:
    page = (
        'vllm:num_preemptions_total{engine="0"} 2\nvllm:num_preemptions_total{engine="1"} 3.0\nbad_total x\n'
    )
    assert scrape.read_counters(page) == {"num_preemptions": 5.0}
    assert scrape.figures({"num_preemptions": 1.0}, {"num_preemptions": 5.0}) == {"num_preemptions": 4.0}
    assert scrape.figures({}, {"num_preemptions": 5.0}) == {}
    before = {"num_queried": 10.0, "num_hits": 0.0}
    assert scrape.figures(before, {"num_queried": 110.0, "num_hits": 25.0}) == {"cache_hit_share": 0.25}


def test_an_independent_client_sees_the_same(server: ThreadServer) -> None:
    """A client of the standard library, written without any of ours, counts the same tokens and frames."""

    def by_hand(body: Mapping[str, Any]) -> tuple[int, int]:
        import socket

        payload = json.dumps(body).encode()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(server.url.removeprefix("unix://"))
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(payload)}\r\n\r\n"
            connection.sendall(head.encode() + payload)
            data = b""
            while b"0\r\n\r\n" not in data:
                data += connection.recv(1 << 16)
        events = [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]
        frames = sum(bool(event["choices"]) for event in events)
        return frames, events[-1]["usage"]["completion_tokens"]

    workload = make_workload("baseline")
    result = run_load(Target(url=server.url, model="m"), workload)
    ours = [(len(trace.chunks), trace.num_output) for trace in result.traces]
    theirs = [by_hand(body) for body in list(server.bodies)]
    assert ours == theirs
