"""`infer chat --url` and `infer generate --url`: the model of a server, over the wire."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from infer.cli.main import main
from infer.cli.remote import RemoteModel
from infer.errors import ConfigError, ContextOverflow
from infer.sampling.params import SamplingParams
from scripts.make_checkpoint import make_checkpoint
from tests.support.live_server import LiveServer, serve_model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory: Path = tmp_path_factory.mktemp("model") / "qwen2"
    make_checkpoint("qwen2", directory)
    with serve_model(directory, api_key=("secret",)) as live:
        yield live


def chat(monkeypatch: pytest.MonkeyPatch, lines: str, *arguments: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return main(["chat", *arguments])


def test_a_conversation_goes_over_the_wire(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--temperature", "0", "--max-tokens", "12", "--ignore-eos"]
    assert chat(monkeypatch, "hello\n", "--url", server.url, "--api-key", "secret", *flags) == 0
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    [expected] = server.oracle.chat([{"role": "user", "content": "hello"}], params)
    assert capsys.readouterr().out.rstrip("\n") == expected.text.rstrip("\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "{url}"], "--api-key"),
        (["--url", "{url}", "--api-key", "secret", "--model", "other"], "not 'other'"),
        (["--url", "{url}", "--api-key", "secret", "--block-size", "8"], "--block-size cannot be set here"),
        (["--url", "localhost:1"], "http://"),
        (["--url", "http://127.0.0.1:1"], "cannot reach"),
    ],
)
def test_what_cannot_work_is_said(
    server: LiveServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert chat(monkeypatch, "hello\n", *(argument.format(url=server.url) for argument in arguments)) == 2
    assert message in capsys.readouterr().err


def test_a_prompt_too_long_is_the_error_it_would_be_here(server: LiveServer) -> None:
    remote = RemoteModel(server.url + "/v1", api_key="secret")
    message = {"role": "user", "content": "word " * 2 * remote.context_len}
    with pytest.raises(ContextOverflow, match="context"):
        next(remote.stream_chat([message], SamplingParams(max_tokens=4)))


def test_leaving_an_answer_hangs_up(server: LiveServer) -> None:
    remote = RemoteModel(server.url, api_key="secret", sampling=["ignore_eos"])
    answer = remote.stream_chat(
        [{"role": "user", "content": "hi"}], SamplingParams(max_tokens=40, ignore_eos=True)
    )
    next(answer)
    answer.close()
    with pytest.raises(ConfigError, match="serves"):
        RemoteModel(server.url, model="none", api_key="secret")


FLAGS = ["--temperature", "0", "--max-tokens", "12", "--ignore-eos"]


def generate(monkeypatch: pytest.MonkeyPatch, server: LiveServer, *arguments: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    return main(["generate", *arguments, "--url", server.url, "--api-key", "secret"])


@pytest.mark.parametrize("is_raw", [True, False])
def test_a_prompt_goes_over_the_wire(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_raw: bool
) -> None:
    assert generate(monkeypatch, server, "hello", *FLAGS, *(["--raw"] if is_raw else [])) == 0
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    llm = server.oracle
    [expected] = llm.generate("hello", params) if is_raw else llm.chat("hello", params)
    assert capsys.readouterr().out == expected.text + "\n"


def test_the_lines_of_a_file_are_with_the_server_together_and_answered_in_order(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prompts = [f"number {i}" for i in range(20)]
    prompts[7] = "word " * 5000
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(prompts))
    assert generate(monkeypatch, server, "--prompts-file", str(file), "--json", "--raw", *FLAGS) == 1
    told = capsys.readouterr()
    answers = [json.loads(line) for line in told.out.splitlines()]
    assert [answer["prompt"] for answer in answers] == prompts
    assert "context length" in answers.pop(7)["error"] and "line 8: " in told.err
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = server.oracle.generate([*prompts[:7], *prompts[8:]], params)
    assert [answer["text"] for answer in answers] == [each.text for each in expected]
    for answer, own in zip(answers, expected, strict=True):
        assert answer["usage"]["prompt_tokens"] == len(own.prompt_token_ids)
        assert answer["usage"]["completion_tokens"] == 12
        assert answer["token_ids"] is None, "a server sends text"


def test_the_seed_that_is_printed_is_the_one_that_was_used(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free = ["--raw", "--json", "--temperature", "1", "--max-tokens", "12", "--ignore-eos"]
    assert generate(monkeypatch, server, "hello", *free) == 0
    first = json.loads(capsys.readouterr().out)
    assert generate(monkeypatch, server, "hello", *free, "--seed", str(first["seed"])) == 0
    assert json.loads(capsys.readouterr().out)["text"] == first["text"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "{url}"], "give it with --api-key"),
        (["--url", "{url}", "--api-key", "secret", "--block-size", "8"], "--block-size cannot be set here"),
        (["--url", "{url}", "--api-key", "secret", "--record", "r.jsonl"], "--record needs an engine here"),
        (["--api-key", "secret"], "--api-key is for the server that --url names"),
        (["--url", "http://127.0.0.1:1"], "cannot reach"),
    ],
)
def test_what_means_nothing_to_a_server_is_refused(
    server: LiveServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    words = [argument.format(url=server.url) for argument in arguments]
    assert main(["generate", "hello", *words]) == 2
    assert message in capsys.readouterr().err
