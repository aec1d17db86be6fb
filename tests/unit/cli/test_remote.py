"""`--url` and servers that are not what they should be: one line says so, never a traceback."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

Infer = Callable[..., Any]

ONE_MODEL = b'{"data": [{"id": "m"}]}'
PIECE = b'data: {"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": %s}]}\n\n'


@contextmanager
def server(
    models: bytes,
    answer: bytes = b"",
    status: int = 200,
    num_refused: int = 0,
    bodies: list[dict[str, Any]] | None = None,
) -> Iterator[str]:
    """Answers every GET with `models` and every POST with `answer`, the first of these with a 503.

    What was posted is put into `bodies`.
    """
    posted: list[dict[str, Any]] = [] if bodies is None else bodies
    refusals = [b'{"error": {"message": "the queue is full"}}'] * num_refused

    class Speaker(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say(models)

        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            if refusals:
                self._say(refusals.pop(), 503)
            else:
                self._say(answer)

        def _say(self, body: bytes, status: int = status) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    listening = HTTPServer(("127.0.0.1", 0), Speaker)
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}"
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


@pytest.mark.parametrize(
    "models",
    [b"{}", b"[]", b"null", b"<html>", b'{"data": [{}]}', b'{"data": [{"id": 1, "max_model_len": "x"}]}'],
)
def test_an_answer_that_lists_no_models_is_no_server_of_this_kind(infer: Infer, models: bytes) -> None:
    with server(models) as url:
        outcome = infer("generate", "hi", "--url", url)
    assert outcome.code == 2
    assert outcome.err == (
        f"infer: error: {url}/v1/models does not list models; is this an OpenAI-compatible server?\n"
    )


def test_a_page_that_is_not_there_asks_for_another_address(infer: Infer) -> None:
    with server(b"<html>\n<p>not here", status=404) as url:
        outcome = infer("generate", "hi", "--url", url)
    assert outcome.err == (
        f"infer: error: {url}/v1/models answered 404; is this an OpenAI-compatible server?\n"
    )


def test_a_server_without_a_model_is_told_apart(infer: Infer) -> None:
    with server(b'{"data": []}') as url:
        outcome = infer("chat", "--url", url, stdin="hi\n")
    assert (outcome.code, outcome.err) == (2, f"infer: error: {url} serves no model at the moment\n")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "the server's answer broke off: the connection ended before it\n"),
        (PIECE % b"null", "the server's answer broke off: the connection ended before it\n"),
        (b"data: {}\n\n", "the server's answer broke off: its event has no 'choices'\n"),
        (b"data: []\n\n", "the server's answer broke off"),
        (b"data: xx\n\n", "the server's answer broke off"),
    ],
)
def test_half_an_answer_is_an_error(infer: Infer, answer: bytes, message: str) -> None:
    with server(ONE_MODEL, answer) as url:
        outcome = infer("generate", "hi", "--url", url)
    assert outcome.code == 2
    assert message in outcome.err and "Traceback" not in outcome.err


@pytest.mark.parametrize("end", [b"", b"data: [DONE]\n\n"])
def test_an_answer_is_whole_when_it_says_why_it_ended(infer: Infer, end: bytes) -> None:
    with server(ONE_MODEL, PIECE % b'"stop"' + end) as url:
        outcome = infer("generate", "hi", "--url", url)
    assert (outcome.code, outcome.out, outcome.err) == (0, "hi\n", "")


def test_a_server_that_goes_away_leaves_the_conversation(infer: Infer) -> None:
    """So that it can be saved, or go on when the server is back."""
    with server(ONE_MODEL, PIECE % b"null") as url:
        outcome = infer("chat", "--url", url, stdin="one\ntwo\n", is_typed=True)
    assert outcome.code == 0
    assert outcome.err.count("infer: error: the server's answer broke off") == 2


@pytest.mark.parametrize(("num_refused", "code"), [(2, 0), (9, 1)])
def test_the_lines_of_a_file_wait_for_a_server_that_is_full(
    infer: Infer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_refused: int, code: int
) -> None:
    monkeypatch.setattr("infer.cli.remote.PAUSES_S", (0.0,) * 4)
    (tmp_path / "p.txt").write_text("only\n")
    with server(ONE_MODEL, PIECE % b'"stop"', num_refused=num_refused) as url:
        outcome = infer("generate", "--prompts-file", str(tmp_path / "p.txt"), "--url", url)
    assert outcome.code == code
    assert ("line 1: the server answered 503: the queue is full" in outcome.err) is (code == 1)


def test_whoever_looks_on_is_told_at_once_that_a_server_is_full(infer: Infer) -> None:
    with server(ONE_MODEL, PIECE % b'"stop"', num_refused=1) as url:
        outcome = infer("generate", "hi", "--url", url)
    assert outcome.err == "infer: error: the server answered 503: the queue is full\n"


def test_a_conversation_over_the_wire_draws_as_one_held_here_does(infer: Infer) -> None:
    talk = "hi\n/reset\nhi\n"
    bodies: list[dict[str, Any]] = []
    with server(ONE_MODEL, PIECE % b'"stop"', bodies=bodies) as url:
        infer("chat", "--url", url, "--seed", "7", stdin=talk)
        infer("chat", "--url", url, stdin=talk)
    sent = [body["seed"] for body in bodies]
    assert sent[:2] == [params.seed for params in infer("chat", "--seed", "7", stdin=talk).llm.params]
    assert len(set(sent)) == 4
