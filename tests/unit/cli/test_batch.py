"""`infer batch`: its two files, what is asked, and what is left after a run that ended early."""

from __future__ import annotations

import codecs
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from infer.cli import batch
from infer.cli.batch_lines import BatchLine
from infer.cli.main import main
from scripts.make_checkpoint import make_checkpoint
from tests.support.live_server import serve_model
from tests.unit.cli.terminal import infer_command

Infer = Callable[..., Any]
COMPLETIONS = "/v1/completions"
TINY = ["--dtype", "float32", "--num-blocks", "64", "--log-level", "error"]


def asked(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    given = {"prompt": "the river", "max_tokens": 4, "temperature": 0, "ignore_eos": True} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": given}


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read(path: Path) -> dict[str, Any]:
    """The lines of an output by custom_id; none comes twice."""
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


class Puppet:
    """Stands in for the application: answers what it is told to, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.statuses: dict[str, list[int]] = {}
        self.before: Callable[[BatchLine], None] = lambda line: None

    async def ask(self, line: BatchLine) -> batch.LineAnswer:
        self.before(line)
        self.asked.append(line.custom_id)
        left = self.statuses.get(line.custom_id, [])
        status = left.pop(0) if left else 200
        body = {"ok": line.body} if status == 200 else {"error": {"message": "no"}}
        return batch.LineAnswer(status, json.dumps(body).encode(), f"req-{line.custom_id}")


@pytest.fixture
def puppet(monkeypatch: pytest.MonkeyPatch) -> Puppet:
    made = Puppet()

    @asynccontextmanager
    async def asking(*_: object) -> AsyncIterator[batch.Ask]:
        yield made.ask

    monkeypatch.setattr(batch, "_asking_here", asking)
    monkeypatch.setattr(batch, "PAUSES_S", (0.0,))
    return made


def test_every_line_gets_a_line_in_openais_format(infer: Infer, puppet: Puppet, tmp_path: Path) -> None:
    source, output = write(tmp_path / "in", [asked("a"), "", asked("b")]), tmp_path / "out"
    outcome = infer("batch", str(source), str(output))
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "")
    line = read(output)["a"]
    assert line.pop("id").startswith("batch_req_")
    body = {"ok": asked("a")["body"]}
    response = {"status_code": 200, "request_id": "req-a", "body": body}
    assert line == {"custom_id": "a", "response": response, "error": None}


def test_a_byte_order_mark_is_not_part_of_the_first_line(
    infer: Infer, puppet: Puppet, tmp_path: Path
) -> None:
    source = write(tmp_path / "in.jsonl", [asked("a")])
    source.write_bytes(codecs.BOM_UTF8 + source.read_bytes())
    assert infer("batch", str(source), str(tmp_path / "out.jsonl")).code == 0
    assert read(tmp_path / "out.jsonl").keys() == {"a"}


def test_what_has_an_answer_is_not_asked_again(infer: Infer, puppet: Puppet, tmp_path: Path) -> None:
    source, output = write(tmp_path / "in", [asked("a"), asked("b")]), tmp_path / "out"
    puppet.statuses["b"] = [400]
    outcome = infer("batch", str(source), str(output))
    assert outcome.code == 1
    assert outcome.err.startswith("infer: error: 1 of 2 lines have an error in place of an answer")
    assert read(output)["b"]["response"]["body"] == {"error": {"message": "no"}}
    write(source, [asked("a"), asked("b"), asked("c")])
    outcome = infer("batch", str(source), str(output))
    assert outcome.code == 1 and outcome.err.startswith("[2 of 3 lines have an answer already]")
    assert puppet.asked == ["a", "b", "c"]
    outcome = infer("batch", str(source), str(output), "--retry-failed")
    assert outcome.code == 0 and "[1 of the lines failed before and are asked again]" in outcome.err
    assert puppet.asked == ["a", "b", "c", "b"]
    assert {line["response"]["status_code"] for line in read(output).values()} == {200}


@pytest.mark.parametrize("num_lost", [1, 9])
def test_a_last_line_that_was_cut_off_is_asked_again(
    infer: Infer, puppet: Puppet, tmp_path: Path, num_lost: int
) -> None:
    source, output = write(tmp_path / "in", [asked("a"), asked("b")]), tmp_path / "out"
    assert infer("batch", str(source), str(output), "--concurrency", "1").code == 0
    whole = output.read_bytes()
    output.write_bytes(whole[:-num_lost])
    outcome = infer("batch", str(source), str(output))
    assert outcome.code == 0 and "was cut off and is asked again" in outcome.err
    assert puppet.asked == ["a", "b", "b"]
    assert read(output).keys() == {"a", "b"}


def test_ctrl_c_leaves_whole_lines_and_says_how_to_go_on(
    infer: Infer, puppet: Puppet, tmp_path: Path
) -> None:
    source, output = write(tmp_path / "in", [asked(str(n)) for n in range(9)]), tmp_path / "out"

    def interrupt(line: BatchLine) -> None:
        if line.custom_id == "4":
            os.kill(os.getpid(), signal.SIGINT)

    puppet.before = interrupt
    outcome = infer("batch", str(source), str(output), "--concurrency", "1")
    assert outcome.code == 130
    num_done = len(read(output))
    assert f"interrupted: {output} has {num_done} of 9 lines; run the same command to continue" in outcome.err
    puppet.before = lambda line: None
    assert infer("batch", str(source), str(output)).code == 0
    assert read(output).keys() == {str(n) for n in range(9)}


def test_a_full_server_is_asked_again(infer: Infer, puppet: Puppet, tmp_path: Path) -> None:
    source, output = write(tmp_path / "in", [asked("a")]), tmp_path / "out"
    puppet.statuses["a"] = [503, 429, 200]
    assert infer("batch", str(source), str(output)).code == 0
    assert puppet.asked == ["a"] * 3


def test_no_more_requests_than_allowed_are_under_way(
    infer: Infer, puppet: Puppet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio

    running, most = 0, 0
    plain = puppet.ask

    async def ask(line: BatchLine) -> batch.LineAnswer:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(3):
            await asyncio.sleep(0)
        running -= 1
        return await plain(line)

    monkeypatch.setattr(puppet, "ask", ask)
    source = write(tmp_path / "in", [asked(str(n)) for n in range(12)])
    assert infer("batch", str(source), str(tmp_path / "out"), "--concurrency", "3").code == 0
    assert most == 3


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "IN holds no request; write one JSON object per line"),
        (["{"], "IN, line 1: not JSON: "),
        (["[1]"], "IN, line 1: a JSON object is expected, got [1]"),
        (
            [asked("a"), asked("b"), asked("a")],
            'IN, line 3: custom_id "a" is already used in line 1; each line needs',
        ),
        ([asked("")], 'IN, line 1: custom_id must be a non-empty string, got ""'),
        ([{"custom_id": "a"}], "IN, line 1: url must be one of /v1/chat/completions, /v1/completions, "),
        ([asked("a") | {"method": "GET"}], 'IN, line 1: method must be "POST", got "GET"'),
        ([asked("a", "/v1/rerank")], "IN, line 1: url must be one of "),
        ([asked("a") | {"body": 3}], "IN, line 1: body must be an object, got 3"),
        ([asked("a", stream=True)], "IN, line 1: an answer in a file is not streamed"),
        (['{"custom_id": NaN}'], "IN, line 1: not JSON: "),
    ],
)
def test_an_input_that_cannot_be_used_is_refused_before_anything_is_asked(
    infer: Infer, puppet: Puppet, tmp_path: Path, lines: list[Any], message: str
) -> None:
    source, output = write(tmp_path / "in", lines), tmp_path / "out"
    outcome = infer("batch", str(source), str(output))
    assert outcome.code == 2
    assert outcome.err.startswith(f"infer: error: {message.replace('IN', str(source), 1)}")
    assert not output.exists() and not puppet.asked


def test_files_that_do_not_belong_together_are_refused(infer: Infer, puppet: Puppet, tmp_path: Path) -> None:
    source, output = write(tmp_path / "in", [asked("a")]), tmp_path / "out"
    assert infer("batch", str(source), str(source)).err.endswith("give the answers a file of their own\n")
    assert infer("batch", str(source), str(output)).code == 0
    write(source, [asked("b")])
    outcome = infer("batch", str(source), str(output))
    assert outcome.code == 2 and 'has an answer to custom_id "a", which' in outcome.err
    write(output, [{"other": 1}])
    before = output.read_bytes()
    outcome = infer("batch", str(source), str(output))
    assert outcome.code == 2 and "'infer batch' did not write this line" in outcome.err
    assert output.read_bytes() == before
    assert infer("batch", str(tmp_path / "absent"), str(output)).err.startswith("infer: error: cannot read ")
    outcome = infer("batch", str(source), str(tmp_path / "no" / "out"))
    assert outcome.err.startswith("infer: error: cannot write ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--api-key", "k"], "--api-key is for the server that --url names"),
        (
            ["--url", "http://x", "--block-size", "4"],
            "--url leaves the engine to the server, so --block-size",
        ),
        (["--url", "ftp://x"], "--url must start with http://"),
        (["--url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(
    infer: Infer, tmp_path: Path, words: list[str], message: str
) -> None:
    source = write(tmp_path / "in", [asked("a")])
    outcome = infer("batch", str(source), str(tmp_path / "out"), *words)
    assert outcome.code == 2 and outcome.err.startswith(f"infer: error: {message}")


def test_a_line_that_cannot_be_written_ends_the_run(
    infer: Infer, puppet: Puppet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = write(tmp_path / "in", [asked(str(n)) for n in range(4)]), tmp_path / "out"
    real, num_left = os.write, 2

    def write_until_full(file: int, data: Any) -> int:
        nonlocal num_left
        if num_left == 0:
            raise OSError(28, "No space left on device")
        num_left -= 1
        return real(file, data)

    monkeypatch.setattr("infer.cli.batch_lines.os.write", write_until_full)
    outcome = infer("batch", str(source), str(output), "--concurrency", "1")
    assert outcome.code == 2
    assert outcome.err == (
        f"infer: error: cannot write {output}: No space left on device; run the same command to continue\n"
    )
    assert len(read(output)) == 2


# -- with a model -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("tiny") / "tiny-qwen3"
    make_checkpoint("qwen3", folder)
    yield folder


LINES = [
    asked("text"),
    asked("wrong", temperature=-3),
    {"custom_id": "vector", "method": "POST", "url": "/v1/embeddings", "body": {"input": "the river"}},
    {
        "custom_id": "chat",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0},
    },
    {
        "custom_id": "response",
        "url": "/v1/responses",
        "body": {"input": "hi", "max_output_tokens": 3, "temperature": 0},
    },
    asked("stranger", model="gpt-4o"),
]


def without_times(line: dict[str, Any]) -> dict[str, Any]:
    """What two runs of the same line have in common."""
    body = line["response"]["body"]
    names = ("choices", "error", "status", "model")
    vectors = [len(each["embedding"]) for each in body.get("data", ())]
    common = {name: body.get(name) for name in names}
    return common | {"status_code": line["response"]["status_code"], "vectors": vectors}


def test_a_model_here_and_a_server_answer_alike(model: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in", LINES)
    here, there = tmp_path / "here", tmp_path / "there"
    words = ["--model", str(model), "--served-model-name", "tiny", *TINY]
    assert main(["batch", str(source), str(here), *words]) == 1
    with serve_model(model) as live:
        assert main(["batch", str(source), str(there), "--url", live.url, "--log-level", "error"]) == 1
    ours, theirs = read(here), read(there)
    assert {name: line["response"]["status_code"] for name, line in ours.items()} == {
        "text": 200, "wrong": 422, "vector": 200, "chat": 200, "response": 200, "stranger": 422,
    }  # fmt: skip
    assert ours["wrong"]["response"]["body"]["error"]["param"] == "temperature"
    assert {name: without_times(line) for name, line in ours.items()} == {
        name: without_times(line) for name, line in theirs.items()
    }


def test_a_killed_run_goes_on_where_it_ended(model: Path, tmp_path: Path) -> None:
    names = [str(number) for number in range(120)]
    source = write(tmp_path / "in", [asked(name, max_tokens=8) for name in names])
    output = tmp_path / "out"
    words = ["batch", str(source), str(output), "--model", str(model), *TINY]
    process = subprocess.Popen(infer_command(*words, "--concurrency", "2"), stderr=subprocess.PIPE)
    try:
        ends = time.monotonic() + 180
        while not (output.exists() and output.read_bytes().count(b"\n") >= 3):
            assert process.poll() is None and time.monotonic() < ends
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.wait(180) in (0, 130)  # 0: it was faster
    finally:
        process.kill()
        process.communicate()
    num_done = len(read(output))
    assert num_done >= 3
    assert main(words) == 0
    assert read(output).keys() == set(names)
