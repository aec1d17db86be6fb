"""Records without text: what is in them, how they are bounded, and what reads them."""

from __future__ import annotations

import json
import os
import random
import resource
import stat
from pathlib import Path
from typing import Any

import pytest

from infer.bench.simulated import simulate
from infer.bench.traces import read_trace, to_workload
from infer.config.server import ServerConfig
from infer.config.settings import EngineConfig
from infer.errors import ConfigError
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request
from infer.tools.record import Record, Recorder, TraceRecorder
from infer.tools.record_files import RecordPaths, aside
from infer.tools.replay import Replay
from infer.tools.step_cost import StepCost
from tests.unit.tools.recorded_runs import make_engine, make_facts, make_request


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def record(recorder: TraceRecorder | Recorder, *requests: Request) -> None:
    """Serve the requests to their end."""
    recorder.on_start(make_facts())
    engine = make_engine(recorder)
    for request in requests:
        engine.add(request)
        engine.step()
    while engine.has_work:
        engine.step()


def test_lengths_times_and_shared_blocks_are_written_and_nothing_that_was_said(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    start = (101, 102, 103, 104, 105, 106, 107, 108)
    params = SamplingParams(
        max_tokens=3, stop=("halt",), logit_bias={41: -1.0}, stop_token_ids=(42,), seed=77
    )
    with TraceRecorder(path) as recorder:
        record(
            recorder,
            Request(request_id="mine", prompt=(*start, 109), params=params, cache_salt="tenant"),
            Request(request_id="yours", prompt=(*start, 110, 111), params=params, cache_salt="tenant"),
            Request(request_id="theirs", prompt=(*start, 110), params=params, cache_salt="other"),
        )
    header, *lines = lines_of(path)
    assert (header["kind"], header["text"]) == ("header", False)
    assert [line["prompt_len"] for line in lines] == [9, 10, 9]
    assert all(line["output_len"] == 3 and line["finish_reason"] == "length" for line in lines)
    first, second, third = (line["blocks"] for line in lines)
    assert first == second and len(first) == 2 and not set(first) & set(third)
    for word in ("mine", "yours", "theirs", "halt", "tenant", "other", "seed"):
        assert word.encode() not in path.read_bytes().split(b"\n", 1)[1]
    numbers = [json.dumps(line | {"arrival": 0, "blocks": []}) for line in lines]  # times hold any digits
    for token_id in (*start, 109, 110, 111, 41, 42, 77):
        assert not any(str(token_id) in line for line in numbers)
    assert set(lines[0]) == {
        "arrival", "prompt_len", "output_len", "priority", "params", "block_size", "blocks", "finish_reason",
    }  # fmt: skip
    assert set(lines[0]["params"]) == {
        "n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "structured",
    }  # fmt: skip


def test_the_same_prompts_have_other_hashes_in_another_run(tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        with TraceRecorder(tmp_path / name) as recorder:
            record(
                recorder, Request(request_id="x", prompt=(1, 2, 3, 4), params=SamplingParams(max_tokens=1))
            )
        found.append(lines_of(tmp_path / name)[1]["blocks"])
    assert found[0] != found[1]


def test_outputs_of_one_request_and_aborted_ones_have_a_line_each(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with TraceRecorder(path) as recorder:
        recorder.on_start(make_facts())
        engine = make_engine(recorder)
        engine.add(Request(request_id="two", prompt=(1, 2), params=SamplingParams(n=2, max_tokens=4)))
        params = SamplingParams(max_tokens=9)
        engine.add(Request(request_id="left", prompt=(3,), params=params, priority=1 << 40))
        engine.step()
        engine.abort("left")
        while engine.has_work:
            engine.step()
    lines = lines_of(path)[1:]
    assert [line["finish_reason"] for line in lines] == ["abort", "length", "length"]
    assert [line["output_len"] for line in lines] == [1, 4, 4]
    assert read_trace(path)[0].arrival == 0.0


def test_a_full_file_is_set_aside_and_both_are_traces(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    rng = random.Random(0)
    with TraceRecorder(path, max_bytes=6000) as recorder:
        record(recorder, *(make_request(number, rng) for number in range(60)))
    assert sorted(tmp_path.iterdir()) == [path, aside(path)]
    for each in (path, aside(path)):
        assert each.stat().st_size <= 6000
        assert stat.S_IMODE(each.stat().st_mode) == 0o600
        assert min(item.arrival for item in read_trace(each)) == 0.0
    assert lines_of(path)[0] == lines_of(aside(path))[0]


def test_a_file_that_took_its_place_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "r.jsonl"
    with TraceRecorder(path, max_bytes=6000) as recorder:
        recorder.on_start(make_facts())
        path.unlink()
        path.write_text("another engine's")
        record_more = make_engine(recorder)
        for number in range(60):
            record_more.add(make_request(number, random.Random(number)))
            while record_more.has_work:
                record_more.step()
    assert path.read_text() == "another engine's" and not aside(path).exists()
    [warning] = [entry.message for entry in caplog.records if "recording" in entry.message]
    assert "another file is in its place; the engine continues" in warning


def test_a_full_record_of_a_whole_run_waits_for_the_next_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "r.jsonl"
    with Recorder(path, max_bytes=6000) as recorder:
        recorder.goes_on = True
        assert not recorder.wants_new_engine
        record(recorder, *(make_request(number, random.Random(number)) for number in range(20)))
        assert recorder.wants_new_engine
        assert path.stat().st_size <= 6000 and not aside(path).exists()
        assert Record(path).num_steps > 0  # whole lines
        [warning] = [entry.message for entry in caplog.records if "record" in entry.message]
        assert "r.jsonl is full (" in warning and "until then nothing is written" in warning
        record(recorder, make_request(0, random.Random(0)))
        assert not recorder.wants_new_engine
    for each in (path, aside(path)):
        assert stat.S_IMODE(each.stat().st_mode) == 0o600
        replay = Replay(Record(each), make_engine)
        assert replay.run().difference is None and replay.num_steps


def test_a_full_record_of_an_engine_that_is_not_built_again_ends_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "r.jsonl"
    with Recorder(path, max_bytes=6000) as recorder:
        record(recorder, *(make_request(number, random.Random(number)) for number in range(20)))
    assert path.stat().st_size <= 6000 and not aside(path).exists()
    [warning] = [entry.message for entry in caplog.records if "recording" in entry.message]
    assert "its 6000 bytes are full; the engine continues" in warning


def test_a_full_disk_at_a_later_start_stops_no_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with TraceRecorder(tmp_path / "r.jsonl", max_bytes=1 << 20) as recorder:
            record(recorder, Request(request_id="a", prompt=(1, 2), params=SamplingParams(max_tokens=2)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "r.jsonl").stat().st_size == 0
    assert len([entry for entry in caplog.records if "the engine continues" in entry.message]) == 1


def test_a_replay_says_what_a_record_without_text_is_for(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with TraceRecorder(path) as recorder:
        record(recorder, Request(request_id="a", prompt=(1, 2), params=SamplingParams(max_tokens=2)))
    with pytest.raises(ConfigError, match=r"without text.*infer simulate --trace .*--record-text"):
        Record(path)
    with Recorder(tmp_path / "whole.jsonl") as recorder:
        recorder.on_start(make_facts())
    with pytest.raises(ConfigError, match="record of a whole run, for 'infer replay' and --cost"):
        read_trace(tmp_path / "whole.jsonl")


def test_a_simulation_finds_the_shared_blocks_in_its_cache(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    start = tuple(range(16))
    with TraceRecorder(path) as recorder:
        record(
            recorder,
            *(
                Request(request_id=str(n), prompt=(*start, 20 + n), params=SamplingParams(max_tokens=4))
                for n in range(4)
            ),
        )
    workload = to_workload("recorded", read_trace(path))
    assert [len(session.turns[0].ids) for session in workload.sessions] == [17] * 4
    config = EngineConfig.from_knobs(num_blocks=64, block_size=4, max_batch_size=1)
    assert simulate(workload, config, StepCost())["cache_hit_rate"] == pytest.approx(48 / 68)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": ["a", "b"], "block_size": 8}, "2 blocks of 8 tokens do not fit a prompt of 9"),
        ({"blocks": ["a"]}, "1 blocks of 0 tokens do not fit"),
        ({"blocks": ["a"], "block_size": 4, "prefix_id": "p", "prefix_len": 2}, "give one of them"),
    ],
)
def test_a_trace_whose_blocks_cannot_be_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"arrival": 0, "prompt_len": 9, "output_len": 1} | change))
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def test_every_engine_of_a_server_has_a_file_of_its_own(tmp_path: Path) -> None:
    paths = RecordPaths(tmp_path / "run.jsonl", num_replicas=2, may_replace=False)
    assert [path.name for path in paths.of("a")] == ["run.jsonl", "run-1.jsonl"]
    assert [path.name for path in paths.of("b")] == ["run-2.jsonl", "run-3.jsonl"]
    (tmp_path / "run.jsonl").write_text("of its own engine")
    assert paths.of("a")[0].read_text() == "of its own engine"  # which is set aside by the next one
    assert stat.S_IMODE((tmp_path / "run-3.jsonl").stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.1"])
def test_a_file_that_was_there_is_replaced_only_on_demand(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("old")
    (tmp_path / name).chmod(0o644)
    with pytest.raises(ConfigError, match=f"{name} is there already; .* --overwrite"):
        RecordPaths(tmp_path / "run.jsonl", num_replicas=1, may_replace=False).of("")
    [path] = RecordPaths(tmp_path / "run.jsonl", num_replicas=1, may_replace=True).of("")
    assert (path.stat().st_size, stat.S_IMODE(path.stat().st_mode)) == (0, 0o600)
    assert not aside(path).exists()


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (Path("/"), tmp_path, tmp_path / "fifo"):
        with pytest.raises(ConfigError, match="it is not a plain file"):
            RecordPaths(path, num_replicas=2, may_replace=True).of("")
    with pytest.raises(ConfigError, match="cannot record to .*: No such file"):
        RecordPaths(tmp_path / "absent" / "r.jsonl", num_replicas=1, may_replace=False).of("")


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        (
            {"record_text": True},
            "record_text has no effect without record; leave out record_text, or give record",
        ),
        ({"overwrite": True}, "overwrite has no effect without record"),
        ({"record": "r", "record_bytes": "4KiB"}, "record_bytes must be at least 1MiB, got 4KiB"),
        ({"record": "r", "in_process": True}, "leave out record, or in_process"),
        ({"record": "r", "cluster": "ray"}, "record cannot be used with --cluster ray"),
    ],
)
def test_settings_that_could_not_be_kept_are_refused(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**knobs)
