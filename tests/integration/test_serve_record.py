"""`infer serve --record`: a server's run is written down, read as a trace, and run again."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from infer.bench.traces import read_trace
from infer.cli.main import main
from infer.errors import ConfigError
from infer.tools.record import Added, Record
from infer.tools.record_files import aside
from infer.tools.replay import replay_model
from tests.support.server_process import KNOBS, ServerProcess, start_server, wait_until

SECRET = "an unmistakable prompt about rivers"


def ask(server: ServerProcess, **body: Any) -> httpx.Response:
    given = {"prompt": SECRET, "max_tokens": 24, "ignore_eos": True} | body
    return httpx.post(f"{server.url}/v1/completions", json=given, timeout=60)


def leave_early(server: ServerProcess) -> None:
    """Read the first piece of a long answer and hang up."""
    body = {"prompt": "The sea", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        next(response.iter_lines())


def num_lines(path: Path) -> int:
    return len(path.read_bytes().splitlines())


def test_a_whole_run_of_a_server_comes_out_again_bit_for_bit(checkpoint: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    arguments = (f"tiny={checkpoint}", "--num-blocks", "64", "--max-batch-size", "3", "--record", str(path))
    with start_server(tmp_path, *arguments, "--record-text") as server, ThreadPoolExecutor(8) as threads:
        bodies: list[dict[str, Any]] = [
            {},
            {"temperature": 0},
            {"seed": 4, "n": 2},
            {"stop": ["e", "a"]},
            {"structured_outputs": {"choice": ["river", "rivers"]}, "ignore_eos": False},
            {"structured_outputs": {"regex": "[a-c]{3,9}"}, "ignore_eos": False},
        ]
        asked = [threads.submit(ask, server, **body) for body in bodies]
        left = [threads.submit(leave_early, server) for _ in range(2)]
        assert [each.result().status_code for each in asked] == [200] * len(bodies)
        for each in left:
            each.result()
        assert server.stop() == 0
        assert f"recording model=tiny engine=0 text=True file={path}" in server.log.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    record = Record(path)
    assert sum(isinstance(event, Added) for event in record.events()) == 8
    report = replay_model(record, checkpoint, device=None, show_progress=False).run()
    assert (report.difference, report.is_whole) == (None, True)
    assert report.num_steps == record.num_steps > 24


def test_a_full_record_with_text_is_set_aside_by_an_idle_engine_and_both_replay(
    checkpoint: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    knobs = ("--num-blocks", "64", "--record", str(path), "--record-bytes", "1MiB", "--record-text")
    bias = {str(token_id): 0.123456789012345 for token_id in range(200)}  # a long line
    with start_server(tmp_path, f"tiny={checkpoint}", *knobs) as server:
        while path.stat().st_size <= 384 << 10:
            assert ask(server, max_tokens=2, logit_bias=bias).status_code == 200
        wait_until(lambda: aside(path).exists() and num_lines(path) == 1, timeout_s=60)
        assert ask(server).status_code == 200
        assert server.stop() == 0
    for each in (path, aside(path)):
        assert stat.S_IMODE(each.stat().st_mode) == 0o600 and each.stat().st_size <= 512 << 10
        report = replay_model(Record(each), checkpoint, device=None, show_progress=False).run()
        assert (report.difference, report.is_whole) == (None, True) and report.num_steps


def test_a_record_without_text_is_a_trace_and_is_set_aside_by_the_next_engine(
    checkpoint: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    knobs = ("--num-blocks", "64", "--replicas", "2", "--record", str(path))
    with start_server(tmp_path, f"tiny={checkpoint}", *knobs) as server:
        files = [path, tmp_path / "run-1.jsonl"]
        answers = [ask(server, stop=["qqq"], user="somebody") for _ in range(3)]
        texts = [answer.json()["choices"][0]["text"] for answer in answers]
        wait_until(lambda: sum(map(num_lines, files)) == 2 + 3)
        written = b"".join(file.read_bytes() for file in files).decode()
        for word in (SECRET, "unmistakable", "qqq", "somebody", *(answer.json()["id"] for answer in answers)):
            assert word not in written
        assert not any(len(text) > 8 and text in written for text in texts)
        requests = [item for file in files if num_lines(file) > 1 for item in read_trace(file)]
        assert [item.output_len for item in requests] == [24] * 3
        assert len({item.blocks for item in requests}) == (1 if num_lines(path) in (1, 4) else 2)
        with pytest.raises(ConfigError, match="recorded without text"):
            Record(path)
        engines = [int(pid) for pid in server.children() if _records_to(int(pid), path)]
        for pid in engines:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: aside(path).exists() and num_lines(path) == 1, timeout_s=60)
        assert ask(server).status_code == 200
        assert server.stop() == 0


def _records_to(pid: int, path: Path) -> bool:
    found = Path(f"/proc/{pid}/fd").iterdir()
    return any(os.path.realpath(descriptor) == str(path) for descriptor in found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--record", "absent/run.jsonl"), "cannot record to .*absent/run.jsonl: No such file"),
        (("--record", "there.jsonl"), "there.jsonl is there already; .* --overwrite"),
    ],
)
def test_what_cannot_be_recorded_is_an_error_before_a_model_is_loaded(
    checkpoint: str,
    tmp_path: Path,
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "there.jsonl").write_text(json.dumps({"old": True}))
    monkeypatch.chdir(tmp_path)
    code = main(["serve", *KNOBS, "--port", "0", checkpoint, *arguments])
    written = capsys.readouterr().err
    assert code == 2
    assert re.search(message, written), written
    assert "model loaded" not in written and "listening" not in written
    assert json.loads((tmp_path / "there.jsonl").read_text()) == {"old": True}
