"""`infer chat --url`: a conversation with the model of a server, over the wire."""

from __future__ import annotations

import io
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
        (["--url", "{url}", "--api-key", "secret", "--block-size", "8"], "block_size"),
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
    answer.close()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="serves"):
        RemoteModel(server.url, model="none", api_key="secret")
