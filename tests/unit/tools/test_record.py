from __future__ import annotations

import json
import os
import resource
import stat
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import pytest

from infer.config.settings import EngineConfig
from infer.constraints.description import Structured
from infer.engine.run_manifest import fingerprint
from infer.errors import ConfigError
from infer.frontend.llm import LLM
from infer.models.config import ModelConfig
from infer.sampling.params import SamplingParams
from infer.scheduling.plan import Chunk
from infer.scheduling.request import Request
from infer.tools.record import Aborted, Added, Failed, Ran, Record, Recorder
from scripts.make_checkpoint import make_checkpoint
from tests.unit.tools.recorded_runs import CONFIG, SIZE, make_engine, make_facts, record_run


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_a_record_reads_back_as_it_was_written(tmp_path: Path) -> None:
    request = Request(
        request_id="a",
        prompt=(1, 2, 3),
        params=SamplingParams(max_tokens=2, logit_bias={4: -1.5}, stop=("x",), seed=-3, top_p=0.1 + 0.2),
        priority=-2,
        deadline=1.25,
    )
    with Recorder(tmp_path / "r.jsonl") as recorder:
        recorder.on_start(make_facts())
        engine = make_engine(recorder)
        engine.add(request)
        engine.step()
        engine.abort("a")
    record = Record(tmp_path / "r.jsonl")
    assert record.facts == make_facts()
    added, ran, aborted = record.events()
    assert isinstance(added, Added)
    assert added.request == request
    assert isinstance(ran, Ran)
    assert ran.plan.chunks == (Chunk(0, 0, 3, 1),)
    assert isinstance(aborted, Aborted)
    assert (aborted.step, aborted.request_id, aborted.index) == (1, "a", None)
    assert 0 <= added.seconds <= ran.seconds <= aborted.seconds


def test_every_event_is_in_the_file_as_soon_as_it_has_happened(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with Recorder(path) as recorder:
        recorder.on_start(make_facts())
        engine = make_engine(recorder)
        engine.add(Request(request_id="a", prompt=(1,), params=SamplingParams(max_tokens=3)))
        for num_steps in range(1, 4):
            engine.step()
            assert len(lines_of(path)) == 2 + num_steps


def test_places_and_salts_stay_out_of_a_record(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    config = EngineConfig.from_knobs(
        model="/home/me/secret", tokenizer="/home/me/t", chat_template="/x.jinja"
    )
    with Recorder(path) as recorder:
        recorder.on_start(make_facts(config))
        for number, salt in enumerate(["tenant-7", "tenant-7", "tenant-8", ""]):
            recorder.on_add(0, Request(request_id=str(number), prompt=(1,), cache_salt=salt))
    text = path.read_text("utf-8")
    assert "/home/me" not in text
    assert "x.jinja" not in text
    assert "tenant" not in text
    salts = [line["request"]["cache_salt"] for line in lines_of(path)[1:]]
    assert salts[0] == salts[1] != salts[2]
    assert salts[3] == ""
    with Recorder(tmp_path / "again.jsonl") as recorder:
        recorder.on_start(make_facts(config))
        recorder.on_add(0, Request(request_id="0", prompt=(1,), cache_salt="tenant-7"))
    assert lines_of(tmp_path / "again.jsonl")[1]["request"]["cache_salt"] != salts[0]  # another key


def test_a_record_is_for_its_owner_alone(tmp_path: Path) -> None:
    Recorder(tmp_path / "r.jsonl").close()
    assert stat.S_IMODE(os.stat(tmp_path / "r.jsonl").st_mode) & 0o077 == 0


def test_a_file_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot record to .*: No such file"):
        Recorder(tmp_path / "absent" / "r.jsonl")
    with pytest.raises(ConfigError, match="cannot record to .*: Is a directory"):
        Recorder(tmp_path)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_an_error_at_the_start() -> None:
    recorder = Recorder(Path("/dev/full"))
    with pytest.raises(ConfigError, match="cannot record to /dev/full"):
        recorder.on_start(make_facts())


def test_a_disk_that_fills_up_ends_the_recording_and_not_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel refuses to let the file grow past a limit, in the middle of a line."""
    path = tmp_path / "r.jsonl"
    with Recorder(path) as recorder:
        recorder.on_start(make_facts())
        engine = make_engine(recorder)
        engine.add(Request(request_id="a", prompt=(1, 2), params=SamplingParams(max_tokens=20)))
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 300, before[1]))
        try:
            outputs = [output for _ in range(20) for output in engine.step()]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(outputs) == 20
    assert not engine.has_work
    record = Record(path)  # whole lines only
    assert 0 < record.num_steps < 20
    [warning] = [entry.message for entry in caplog.records if "recording" in entry.message]
    assert "File too large; the engine continues" in warning


def test_a_failed_step_is_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record_run(tmp_path / "r.jsonl", fail_at=5)
    failed = [event for event in Record(tmp_path / "r.jsonl").events() if isinstance(event, Failed)]
    assert [event.error for event in failed] == [f"RuntimeError in step {failed[0].step}"]


@pytest.mark.parametrize(
    ("number", "change", "message"),
    [
        (1, {"version": 3}, "line 1: the record is of version 3, and this release reads versions 1 to 2"),
        (1, {"version": "2"}, "line 1: the record is of version 2, and this release reads versions 1 to 2"),
        (1, {"kind": "step"}, "line 1: a record begins with a header line"),
        (1, {"cache": 3}, "line 1: 'cache' is 3, expected `object`, got `int`"),
        (1, {"steps_ahead": 10**6}, "line 1: 'steps_ahead' is 1000000, expected `int` <= 64"),
        (2, {"kind": "joke"}, "line 2: 'kind' is \"joke\", expected one of add, abort, reset, step, failure"),
        (2, {"step": True}, "line 2: 'step' is true, expected `int`, got `bool`"),
        (2, {"step": -1}, "goes from step 0 to -1"),
        (2, {"request": {}}, "line 2: 'request.request_id' is missing"),
        (2, {"params": {"top_p": 7}}, "line 2: its sampling parameters are not possible: top_p"),
        (2, {"params": {"warmth": 7}}, "line 2: unknown sampling parameters warmth"),
        (3, {"chunks": [[1, 2]]}, "line 3: 'chunks[0]' is [1, 2], expected `array` of length 4"),
        (3, {"ids": []}, "line 3: it has 1 chunks but the ids of 0"),
        (
            3,
            {"transfers": [["eval", 1, 2]]},
            "line 3: 'transfers[0][0]' is \"eval\", invalid enum value",
        ),
        (3, {"step": 10**15}, "goes from step 0 to 1000000000000000"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, number: int, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "r.jsonl"
    with Recorder(path) as recorder:
        recorder.on_start(make_facts())
        engine = make_engine(recorder)
        engine.add(Request(request_id="a", prompt=(1, 2), params=SamplingParams(max_tokens=2)))
        engine.step()
    lines = lines_of(path)
    part = lines[number - 1]["request"] if "params" in change else lines[number - 1]
    part |= change
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ConfigError) as caught:
        Record(path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; a record begins with a header line"),
        ("{}\n", "line 1: a record begins with a header line"),
        ('{"model_type": "llama"}', "header line; this is not a record of 'infer generate --record'"),
        ('{\n"a": 1}\n', "line 1 is not JSON.*; this is not a record of 'infer generate --record'"),
        ('{"kind": "header"', "line 1 is cut short"),
        ("[1]\n", "line 1: expected `object`, got `array`"),
        ("cos\nsystem\n", "line 1 is not JSON"),
        ("[" * 100_000 + "\n", "line 1: expected `object`, got `array`"),
        ('{"a": ' + "[" * 100_000 + "\n", "line 1 is not JSON"),
        ("1" * 10_000 + "\n", "line 1: number out of range"),
    ],
)
def test_what_is_not_a_record_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        Record(path)


def test_a_missing_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*: No such file"):
        Record(tmp_path / "absent.jsonl")


def test_the_fingerprint_changes_with_the_network_and_not_with_the_order_of_its_ends() -> None:
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
    facts: dict[str, Any] = dict.fromkeys((*sizes, "head_dim", "context_len"), 8)
    facts |= {"family": "llama", "norm_eps": 1e-5, "activation": "silu", "tie_embeddings": False}
    config = ModelConfig(**facts)
    assert fingerprint(config, (1, 2)) == fingerprint(ModelConfig(**facts), (2, 1))
    assert fingerprint(config, (1,)) != fingerprint(config, (1, 2))
    assert fingerprint(ModelConfig(**facts | {"num_layers": 2}), (1,)) != fingerprint(config, (1,))


def test_a_model_with_states_is_recorded(tmp_path: Path) -> None:
    make_checkpoint("qwen3_next", tmp_path / "model")
    path = tmp_path / "run.jsonl"
    with Recorder(path) as recorder, LLM(str(tmp_path / "model"), device="cpu", observer=recorder) as llm:
        llm.generate("one two", SamplingParams(max_tokens=2))
    assert len(Record(path).facts.fingerprint) == 16


def test_the_header_tells_the_knobs_and_the_size_of_the_cache(tmp_path: Path) -> None:
    record_run(tmp_path / "r.jsonl", num_requests=1)
    header = lines_of(tmp_path / "r.jsonl")[0]
    assert header["knobs"]["prefill_chunk_size"] == CONFIG.scheduler.prefill_chunk_size
    assert header["cache"] == {
        "num_blocks": SIZE.num_blocks, "block_size": 4, "bytes_per_token": 8, "num_tables": 1,
        "num_host_blocks": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ({"steps_ahead": 3}, 3),
        ({"device": "cuda"}, 1),  # written before records said how many
        ({"device": "cuda", "knobs": {"use_overlap": False}}, 0),
        ({"device": "cpu"}, 0),
    ],
)
def test_a_record_knows_how_many_steps_were_ahead(
    tmp_path: Path, header: dict[str, Any], expected: int
) -> None:
    path = tmp_path / "r.jsonl"
    record_run(path, num_requests=1)
    lines = lines_of(path)
    del lines[0]["steps_ahead"]
    lines[0] |= header
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert Record(path).facts.steps_ahead == expected


def test_a_file_that_was_there_becomes_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("older")
    path.chmod(0o644)
    Recorder(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_recorded_grammar_of_tools_is_read_as_it_was_accepted() -> None:
    form = Structured(kind="grammar", text='start: %json {"x-guidance": {"lenient": true}, "not": {}}')
    params = {"structured": asdict(form)}
    request: dict[str, Any] = {
        "request_id": "a",
        "prompt": [1],
        "params": params,
        "priority": 0,
        "deadline": None,
    }
    request["cache_salt"] = ""
    event = {"kind": "add", "step": 0, "t": 0.0, "request": request}
    assert msgspec.convert(event, Added).request.params.structured == form


def test_a_record_is_checked_where_assertions_are_not(tmp_path: Path) -> None:
    """`python -O` leaves out what `assert` computes."""
    code = (
        "import msgspec; from infer.tools.record import Added; "
        "written = {'request_id': 'a', 'prompt': [1], 'params': {'top_p': 9.0}, 'priority': 0}\n"
        "written |= {'deadline': None, 'cache_salt': ''}\n"
        "try: msgspec.convert({'kind': 'add', 'step': 0, 't': 0.0, 'request': written}, Added)\n"
        "except ValueError as error: print(error)"
    )
    ran = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True)
    assert "its sampling parameters are not possible: top_p" in ran.stdout
