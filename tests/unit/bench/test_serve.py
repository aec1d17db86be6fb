"""The parts around the load: several processes, the server's own counters, the report at the end."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infer.bench import scrape
from infer.bench.load import num_processes, run_load, split
from infer.bench.metrics import Slo
from infer.bench.render import terminal
from infer.bench.report import read_report, write_report
from infer.bench.serve import Plan, ask_server, bench_server
from infer.bench.sse_client import Endpoint
from infer.bench.workloads import Arrival, RandomLoad, Session, Turn, Workload, make_workload, read_names
from infer.errors import ConfigError
from tests.unit.bench.fake_server import FakeServer, Script, Wire, steady

METRICS = """\
# HELP infer_num_preemptions_total x
infer_num_preemptions_total{model_name="m"} %d
infer_request_queue_time_seconds_sum{model_name="m"} %f
infer_request_queue_time_seconds_count{model_name="m"} %d
infer_cache_config_info{block_size="16",kv_cache_backend="paged"} 1
"""


class ThreadServer:
    """The fake server on a real clock in a thread: for code that brings its own event loop."""

    def __init__(self, directory: Path, script: Script | None = None) -> None:
        self.num_scrapes = 0
        self.pages: dict[bytes, tuple[int, str]] = {
            b"/v1/models": (200, json.dumps({"data": [{"id": "m", "max_model_len": 4096}]})),
            b"/version": (200, json.dumps({"version": "7.1"})),
        }
        self.has_metrics = True
        path = str(directory / "s")
        self._fake = FakeServer(script or steady(0.0, 0.0), path)
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
        status, body = self.pages.get(path, (404, "not here"))
        if path == b"/metrics" and self.has_metrics:
            self.num_scrapes += 1
            status = 200
            body = METRICS % (self.num_scrapes, 0.5 * self.num_scrapes, 2 * self.num_scrapes)
        head = f"HTTP/1.1 {status} X\r\ncontent-type: text/plain\r\ncontent-length: {len(body)}\r\n\r\n"
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
    endpoint = Endpoint(url=server.url, extra={"temperature": 0.6, "ignore_eos": True})
    report = bench_server(endpoint, plan, tell=lines.append)
    baseline = report.rows[0]
    assert (report.kind, report.repeats, report.model["name"]) == ("serve", 2, "m")
    assert report.config["kv_cache_backend"] == "paged"
    assert report.versions["server"] == "7.1"
    assert baseline.settings["arrival"] == "closed loop, 1 at once"
    figures = baseline.figures
    assert figures["num_errors"].values == [0, 0]
    assert figures["num_output_tokens"].values == [480, 480]
    assert figures["goodput_share"].median == 1
    assert "goodput and in SLO count requests within ttft=60 (seconds)" in report.notes
    assert report.config["slo"] == {"ttft": 60.0, "tpot": None, "e2e": None}
    assert figures["queue_mean_s"].median == pytest.approx(0.25)
    assert figures["num_preemptions"].median == 1
    assert figures["client_cpu_share"].median > 0
    assert figures["cached_share"].values == [0, 0]
    assert [line.partition(":")[0] for line in lines[:2]] == ["baseline 1/2", "baseline 2/2"]
    prompts = [
        tuple(body["prompt"]) for body in server.bodies if "prompt" in body and len(body["prompt"]) == 128
    ]
    assert len(set(prompts)) == len(prompts) == 20  # no repeat is in the cache
    assert all(body["ignore_eos"] and body["stream_options"]["include_usage"] for body in server.bodies)


def test_a_server_that_tells_the_form_of_its_weights_has_it_in_the_report(server: ThreadServer) -> None:
    card = {"id": "m", "max_model_len": 4096}
    assert ask_server(Endpoint(url=server.url)).form == {}
    for told in ({"dtype": "float32", "weights": "int8"}, {"dtype": "bfloat16", "weights": None}):
        server.pages[b"/v1/models"] = (200, json.dumps({"data": [card | told]}))
        form = {name: value for name, value in told.items() if value}
        assert ask_server(Endpoint(url=server.url)).form == form
        report = bench_server(Endpoint(url=server.url), Plan(workloads=["w1_single"], warmup=0))
        assert report.model == {"name": "m", "context_len": 4096} | form


def test_a_workload_that_is_shortened_for_the_context_says_so(server: ThreadServer) -> None:
    card = {"id": "m", "max_model_len": 100}
    server.pages[b"/v1/models"] = (200, json.dumps({"data": [card]}))
    load, lines = RandomLoad(num_prompts=2, input_len=180, output_len=20), list[str]()
    plan = Plan(workloads=["random", "baseline"], random=load, warmup=0)
    report = bench_server(Endpoint(url=server.url), plan, tell=lines.append)
    said = "random is shortened: a request of up to 200 tokens does not fit the context; it now has up to 100"
    assert [said in line for line in lines[:2]] == [True, False] and "baseline" in lines[1]
    assert any(note.startswith(said) for note in report.notes)
    assert max(len(body["prompt"]) for body in server.bodies) == 90


def test_text_can_stand_for_ids(server: ThreadServer) -> None:
    bench_server(Endpoint(url=server.url), Plan(workloads=["w1_single"], as_text=True, warmup=0))
    assert len(server.bodies[0]["prompt"].split()) == 256


def picky(most: int) -> Script:
    """A server that refuses token ids of `most` and more, as a small vocabulary does; 0: all of them."""
    answer = steady(0.0, 0.0)

    async def script(wire: Wire, body: Mapping[str, Any]) -> None:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and max(prompt) >= most:
            wire.raw(b"HTTP/1.1 400 X\r\ncontent-length: 20\r\n\r\n" + b'{"error": "bad ids"}')
            return
        await answer(wire, body)

    return script


@pytest.mark.parametrize(("most", "said"), [(700, "all are below 625"), (0, "prompts are words")])
def test_a_server_is_asked_which_token_ids_it_takes(tmp_path: Path, most: int, said: str) -> None:
    server = ThreadServer(tmp_path, picky(most))
    try:
        report = bench_server(Endpoint(url=server.url), Plan(workloads=["w1_single"], warmup=0))
    finally:
        server.close()
    assert report.rows[0].figures["num_errors"].median == 0
    assert said in report.notes[0] and "HTTP 400" in report.notes[0]


def test_every_workload_runs_against_a_server_that_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No metrics, no version, no context length; the arrivals are not waited for."""

    def at_once(name: str, **options: Any) -> Workload:
        made = make_workload(name, **options)
        return replace(made, sessions=tuple(replace(session, start_s=0.0) for session in made.sessions))

    monkeypatch.setattr("infer.bench.serve.make_workload", at_once)
    server = ThreadServer(tmp_path, steady(0.0, 0.0, per_frame=16))
    server.has_metrics, server.pages = False, {b"/v1/models": (200, '{"data": [{"id": "other"}]}')}
    try:
        report = bench_server(Endpoint(url=server.url), Plan(workloads=read_names("all", group="serving")))
    finally:
        server.close()
    assert len(report.rows) == 10
    assert all(row.figures["num_errors"].median == 0 for row in report.rows), report.notes
    assert "server" not in report.versions and not report.is_partial
    write_report(report, tmp_path / "r.json")  # checks it
    assert terminal(read_report(tmp_path / "r.json")).count("not told") == 10


@pytest.mark.parametrize(
    ("key", "page", "message"),
    [
        (None, (401, "{}"), "HTTP 401.*; give the server's key with --api-key"),
        ("wrong", (401, "{}"), "HTTP 401.*; is this key right"),
        (None, (404, "gone"), "HTTP 404.*; is this an OpenAI-compatible server"),
        (None, (200, "<html>"), "holds no list of models; is this an OpenAI-compatible server"),
        (None, (200, '{"data": [3]}'), "holds no list of models"),
        (None, (200, '{"data": []}'), "serves no model"),
    ],
)
def test_a_server_that_will_not_do_is_explained(
    server: ThreadServer, key: str | None, page: tuple[int, str], message: str
) -> None:
    server.pages[b"/v1/models"] = page
    with pytest.raises(ConfigError, match=message):
        bench_server(Endpoint(url=server.url, api_key=key), Plan(workloads=["baseline"]))


def test_a_server_that_is_starting_is_waited_for(
    server: ThreadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, slept = server.pages[b"/v1/models"], []
    server.pages[b"/v1/models"] = (503, "starting")

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            server.pages[b"/v1/models"] = ready

    monkeypatch.setattr("infer.bench.serve.time.sleep", sleep)
    with pytest.raises(ConfigError, match="HTTP 503: starting"):
        ask_server(Endpoint(url=server.url))
    assert not slept
    assert ask_server(Endpoint(url=server.url), wait_s=60).model == "m"
    assert len(slept) == 3
    server.pages[b"/v1/models"] = (401, "{}")
    with pytest.raises(ConfigError, match="--api-key"):  # which waiting does not change
        ask_server(Endpoint(url=server.url), wait_s=60)


@pytest.mark.parametrize(
    ("url", "is_here"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://localhost:8000/v1", True),
        ("http://[::1]:8000", True),
        ("unix:///tmp/s", True),
        ("http://10.0.0.7:8000", False),
        ("https://localhost.example.com", False),
    ],
)
def test_a_server_elsewhere_is_not_this_machine(url: str, is_here: bool) -> None:
    assert Endpoint(url=url).is_here is is_here


def test_ctrl_c_leaves_a_partial_report(tmp_path: Path) -> None:
    """The whole command: one workload is done, the next one hangs, the user has had enough."""
    answer, is_stuck = steady(0.0, 0.0), threading.Event()

    async def script(wire: Wire, body: Mapping[str, Any]) -> None:
        if body["max_tokens"] == 256:  # w1_single
            is_stuck.set()
            await asyncio.sleep(600)
        await answer(wire, body)

    server = ThreadServer(tmp_path, script)
    path = tmp_path / "r.json"
    command = [sys.executable, "-m", "infer", "bench", "serve", "--url", server.url, "--out", str(path)]
    command += ["--workload", "baseline,w1_single,w2_mixed", "--warmup", "0", "--api-key", "secret"]
    usual = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell may have it off, for children too
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            signal.signal(signal.SIGINT, usual)
            assert is_stuck.wait(180)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=180)
    finally:
        server.close()
    assert process.returncode == 130, err
    assert b"interrupted: this report is not complete" in out and b"Traceback" not in err
    report = read_report(path)
    assert report.is_partial
    assert [bool(row.figures) for row in report.rows] == [True, False, False]
    assert report.rows[2].skipped == "interrupted"
    assert "secret" not in path.read_text() + path.with_suffix(".md").read_text()


def test_a_wrong_model_is_said_at_once(server: ThreadServer) -> None:
    with pytest.raises(ConfigError, match="serves m, not 'other'"):
        bench_server(Endpoint(url=server.url, model="other"), Plan(workloads=["baseline"]))
    with pytest.raises(ConfigError, match="is the server running"):
        bench_server(Endpoint(url=server.url + "x"), Plan(workloads=["baseline"]))
    with pytest.raises(ConfigError, match="must start with http://"):
        Endpoint(url="localhost:8000")


def test_two_processes_share_the_work(server: ThreadServer) -> None:
    sessions = tuple(Session(turns=(Turn(ids=(number,), max_tokens=3),)) for number in range(7))
    workload = Workload(name="w", about="", arrival=Arrival(kind="closed", concurrency=4), sessions=sessions)
    done: list[int] = []
    result = run_load(Endpoint(url=server.url, model="m"), workload, processes=2, on_done=done.append)
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
    drafts = {"num_drafts": 0.0, "num_kept": 0.0}
    assert scrape.figures(drafts, {"num_drafts": 10.0, "num_kept": 7.0}) == {"draft_share": 0.7}


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
    result = run_load(Endpoint(url=server.url, model="m"), workload)
    ours = [(len(trace.chunks), trace.num_output) for trace in result.traces]
    theirs = [by_hand(body) for body in list(server.bodies)]
    assert ours == theirs
