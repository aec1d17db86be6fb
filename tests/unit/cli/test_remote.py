"""`--url` and servers that are not what they should be: one line says so, never a traceback."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import quote

import pytest

from infer.cli.remote import RemoteStream
from infer.dialects.events import TextDelta
from infer.errors import EngineError, RequestError
from infer.server.protocol.translate import check_has_template

Infer = Callable[..., Any]

ONE_MODEL = b'{"data": [{"id": "m"}]}'
PIECE = b'data: {"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": %s}]}\n\n'
FULL = (503, b'{"error": {"message": "the queue is full"}}')
BROKEN = b'5\r\n{"err\r\n'  # a chunk, and no other after it


class Impatient(Queue[Any]):
    """A queue whose reader gives up in the end, where a test would otherwise hang."""

    def get(self, block: bool = True, timeout: float | None = 60) -> Any:
        return super().get(block, timeout)


@contextmanager
def server(
    models: bytes,
    answer: bytes = b"",
    status: int = 200,
    num_refused: int = 0,
    bodies: list[dict[str, Any]] | None = None,
    refusal: tuple[int, bytes] = FULL,
    retry_after: str | None = None,
    path: Path | None = None,
) -> Iterator[str]:
    """Answers every GET with `models` and every POST with `answer`, the first of these with a `refusal`.

    What was posted is put into `bodies`; every answer says `retry_after`. With a `path` it listens there.
    """
    posted: list[dict[str, Any]] = [] if bodies is None else bodies
    refusals = [refusal] * num_refused

    class Speaker(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say(models)

        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            if refusals:
                code, body = refusals.pop()
                self._say(body, code)
            else:
                self._say(answer)

        def _say(self, body: bytes, status: int = status) -> None:
            self.send_response(status)
            if body == BROKEN:
                self.send_header("transfer-encoding", "chunked")
            if retry_after is not None:
                self.send_header("retry-after", retry_after)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    if path is None:
        listening = HTTPServer(("127.0.0.1", 0), Speaker)
        url = f"http://127.0.0.1:{listening.server_port}"
    else:
        listening = HTTPServer(("", 0), Speaker, bind_and_activate=False)
        listening.socket.close()
        listening.socket = socket.socket(socket.AF_UNIX)
        listening.socket.bind(str(path))
        listening.server_activate()
        url = f"unix://{quote(str(path))}"
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield url
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


@pytest.mark.parametrize(
    "models",
    [
        b"{}",
        b"[]",
        b"null",
        b"<html>",
        b'{"data": [{}]}',
        b'{"data": [{"id": 1, "max_model_len": "x"}]}',
        b'{"data": [{"id": 1, "max_model_len": Infinity}]}',
        b"[" * 100_000,
    ],
    ids=lambda models: models[:50],
)
def test_an_answer_that_lists_no_models_is_no_server_of_this_kind(infer: Infer, models: bytes) -> None:
    with server(models) as url:
        outcome = infer("generate", "hi", "--url", url)
    assert outcome.code == 2
    assert outcome.err == (
        f"infer: error: {url}/v1/models does not list models; is this an OpenAI-compatible server?\n"
    )


def test_a_list_of_models_that_breaks_off_is_an_error(infer: Infer) -> None:
    with server(BROKEN) as url:
        outcome = infer("generate", "hi", "--url", url)
    assert (outcome.code, outcome.err) == (
        2,
        f"infer: error: the answer of {url}/v1/models broke off: IncompleteRead(5 bytes read); try again\n",
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


def test_at_a_terminal_it_is_said_at_once_that_a_server_is_full(infer: Infer) -> None:
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


@pytest.mark.parametrize("arguments", [(), ("--raw",)])
def test_max_tokens_and_a_seed_are_sent_even_if_not_given(infer: Infer, arguments: tuple[str, ...]) -> None:
    bodies: list[dict[str, Any]] = []
    with server(ONE_MODEL, PIECE % b'"stop"', bodies=bodies) as url:
        infer("generate", "--url", url, "hi", *arguments)
    prompt = "prompt" if arguments else "messages"
    assert set(bodies[0]) - {"stream_options"} == {"model", "stream", prompt, "max_tokens", "seed"}
    assert bodies[0]["max_tokens"] == 512
    assert "with its defaults except --max-tokens;" in " ".join(infer("generate", "--help").out.split())


def test_a_setting_is_sent_from_then_on(infer: Infer) -> None:
    bodies: list[dict[str, Any]] = []
    with server(ONE_MODEL, PIECE % b'"stop"', bodies=bodies) as url:
        talk = "a\n/set temperature 0.5\nb\n/set temperature default\nc\n/set top_p\n"
        outcome = infer("chat", "--url", url, stdin=talk)
    assert [body.get("temperature") for body in bodies] == [None, 0.5, None]
    assert "  top_p                      the server's " in outcome.err


def test_another_model_of_the_server_goes_on_with_the_conversation(infer: Infer) -> None:
    bodies: list[dict[str, Any]] = []
    two = b'{"data": [{"id": "m"}, {"id": "n", "max_model_len": 99}]}'
    with server(two, PIECE % b'"stop"', bodies=bodies) as url:
        talk = "a\n/model x\nb\n/model n\nc\n/model\n"
        outcome = infer("chat", "--url", url, stdin=talk)
    assert [(body["model"], len(body["messages"])) for body in bodies] == [("m", 1), ("m", 3), ("n", 5)]
    assert "serves m, n, not 'x'" in outcome.err
    assert "[n, context of 99 tokens]" in outcome.err and "  n; others: m\n" in outcome.err


def test_the_lines_of_a_file_are_sent_with_the_seeds_they_would_have_here(
    infer: Infer, tmp_path: Path
) -> None:
    file = tmp_path / "p.txt"
    file.write_text("same\nsame\n")
    arguments = ("generate", "--prompts-file", str(file), "--json", "--seed", "7")
    bodies: list[dict[str, Any]] = []
    with server(ONE_MODEL, PIECE % b'"stop"', bodies=bodies) as url:
        outcome = infer(*arguments, "--url", url)
    seeds = [json.loads(line)["seed"] for line in outcome.out.splitlines()]
    assert seeds == [json.loads(line)["seed"] for line in infer(*arguments).out.splitlines()]
    assert sorted(body["seed"] for body in bodies) == sorted(seeds)  # they arrive as they like
    assert len(set(seeds)) == 2


@pytest.fixture
def pauses_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What `infer` would have slept, in seconds, if it had."""
    slept: list[float] = []
    monkeypatch.setattr("infer.cli.remote.sleep", slept.append)
    return slept


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("said", [FULL[1], b"<html>", BROKEN], ids=["ours", "a proxy's", "broken"])
def test_a_server_may_say_in_several_ways_that_it_is_full(
    infer: Infer, tmp_path: Path, pauses_s: list[float], status: int, said: bytes
) -> None:
    (tmp_path / "p.txt").write_text("only\n")
    with server(ONE_MODEL, PIECE % b'"stop"', num_refused=3, refusal=(status, said)) as url:
        outcome = infer("generate", "--prompts-file", str(tmp_path / "p.txt"), "--url", url)
    assert (outcome.code, outcome.out, pauses_s) == (0, "hi\n", [1.0, 2.0, 4.0])


@pytest.mark.parametrize(
    ("retry_after", "expected"),
    [
        (" 5 ", [5.0, 5.0, 5.0, 8.0, 8.0, 8.0]),  # a pause that grows may be longer than what was asked for
        ("0", [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]),
        ("86400", [60.0] * 6),
    ],
)
def test_a_server_that_says_when_to_come_back_is_asked_then(
    infer: Infer, tmp_path: Path, pauses_s: list[float], retry_after: str, expected: list[float]
) -> None:
    (tmp_path / "p.txt").write_text("only\n")
    with server(ONE_MODEL, PIECE % b'"stop"', num_refused=6, retry_after=retry_after) as url:
        outcome = infer("generate", "--prompts-file", str(tmp_path / "p.txt"), "--url", url)
    assert (outcome.code, outcome.out, pauses_s) == (0, "hi\n", expected)


@pytest.mark.parametrize("retry_after", [None, "Fri, 31 Dec 1999 23:59:59 GMT", "soon", "nan", "-1"])
def test_a_server_that_is_full_and_says_no_more_is_given_up(
    infer: Infer, tmp_path: Path, pauses_s: list[float], retry_after: str | None
) -> None:
    (tmp_path / "p.txt").write_text("only\n")
    with server(ONE_MODEL, num_refused=5, retry_after=retry_after) as url:
        outcome = infer("generate", "--prompts-file", str(tmp_path / "p.txt"), "--url", url)
    assert "line 1: the server answered 503: the queue is full" in outcome.err
    assert pauses_s == [1.0, 2.0, 4.0, 8.0]


@pytest.mark.parametrize(("retry_after", "num_pauses"), [("60", 10), ("0", 78)])
def test_patience_with_a_server_that_stays_full_ends(
    infer: Infer, tmp_path: Path, pauses_s: list[float], retry_after: str, num_pauses: int
) -> None:
    (tmp_path / "p.txt").write_text("only\n")
    with server(ONE_MODEL, num_refused=100, retry_after=retry_after) as url:
        outcome = infer("generate", "--prompts-file", str(tmp_path / "p.txt"), "--url", url)
    assert outcome.code == 1 and "line 1: the server answered 503: the queue is full" in outcome.err
    assert len(pauses_s) == num_pauses and 600 <= sum(pauses_s) < 660


LOST_REASON = "the server answered 500 (its reason broke off: IncompleteRead(5 bytes read))\n"


def test_a_refusal_whose_reason_breaks_off_is_still_an_answer(infer: Infer) -> None:
    with server(ONE_MODEL, num_refused=3, refusal=(500, BROKEN)) as url:
        generated = infer("generate", "hi", "--url", url)
        chatted = infer("chat", "--url", url, stdin="one\ntwo\n", is_typed=True)
    assert (generated.code, generated.err) == (2, f"infer: error: {LOST_REASON}")
    assert chatted.code == 0 and chatted.err.count(f"infer: error: {LOST_REASON}") == 2


def test_each_line_of_a_file_is_told_of_a_reason_that_breaks_off(
    infer: Infer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infer.cli.remote.SimpleQueue", Impatient)
    (tmp_path / "p.txt").write_text("one\ntwo\n")
    with server(ONE_MODEL, num_refused=2, refusal=(500, BROKEN)) as url:
        outcome = infer("generate", "--prompts-file", str(tmp_path / "p.txt"), "--url", url)
    assert outcome.code == 1
    assert f"line 1: {LOST_REASON}" in outcome.err and f"line 2: {LOST_REASON}" in outcome.err


class Breaking(RemoteStream):
    """An answer that ends in an error of no known kind."""

    def _read(self, *asked: Any) -> Generator[TextDelta, None, None]:
        yield TextDelta(text="hi", token_ids=(1,))
        raise LookupError("what now")


def test_a_reader_of_pieces_hears_of_every_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.cli.remote.SimpleQueue", Impatient)
    pieces = Breaking(cast(Any, None), "/completions", {})
    assert next(pieces).text == "hi"
    with pytest.raises(EngineError, match="the server's answer broke off: LookupError: what now"):
        next(pieces)
    assert list(pieces) == []


@pytest.mark.parametrize("answer", [b"[" * 100_000, b'{"choices": [{"text": 5, "finish_reason": null}]}'])
def test_an_event_that_cannot_be_read_is_an_error(infer: Infer, answer: bytes) -> None:
    with server(ONE_MODEL, b"data: " + answer + b"\n\n") as url:
        outcome = infer("generate", "--raw", "hi", "--url", url)
    assert outcome.code == 2
    assert outcome.err.startswith("infer: error: the server's answer broke off")
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize("url", ["http://[", "http://127.0.0.1:1/\xe9", "http://\xe9..b:1"])
def test_an_address_that_is_none_is_not_reached(infer: Infer, url: str) -> None:
    outcome = infer("generate", "hi", "--url", url)
    assert outcome.code == 2 and outcome.err.startswith(f"infer: error: cannot reach {url}: ")


def test_a_server_is_asked_through_its_unix_socket_past_any_proxy(
    infer: Infer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    path = tmp_path / "a socket"
    with server(ONE_MODEL, PIECE % b'"stop"', path=path) as url:
        assert infer("generate", "hi", "--url", url).out == "hi\n"
        assert infer("chat", "--url", url, stdin="hi\n").out == "hi\n"
        assert "data" in infer("explain", "req-1", "--url", url).out
    path.unlink()
    gone = infer("generate", "hi", "--url", url)
    assert gone.code == 2
    assert f"cannot reach {url}: [Errno 2] No such file or directory; is the server running?" in gone.err


def test_a_certificate_that_is_not_trusted_is_not_blamed_on_the_server(
    infer: Infer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ssl.SSLCertVerificationError("self-signed certificate")

    monkeypatch.setattr("http.client.HTTPSConnection.connect", refuse)
    assert "; SSL_CERT_FILE=" in infer("generate", "hi", "--url", "https://127.0.0.1:1").err


@pytest.mark.parametrize("key", ["a\nb", "\u043a\u043b\u044e\u0447"])
def test_a_key_that_no_header_can_carry_is_not_shown(infer: Infer, key: str) -> None:
    outcome = infer("generate", "hi", "--url", "http://127.0.0.1:1", "--api-key", key)
    assert outcome.code == 2
    assert outcome.err == "infer: error: --api-key must be printable ASCII characters, without a line break\n"


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_model_without_a_chat_template_is_answered_with_a_flag_and_not_with_a_route(
    infer: Infer, command: str
) -> None:
    without_template: Any = SimpleNamespace(has_chat_template=False)
    with pytest.raises(RequestError) as caught:
        check_has_template(without_template)
    refusal = json.dumps({"error": {"message": str(caught.value), "param": caught.value.param}}).encode()
    with server(ONE_MODEL, num_refused=1, refusal=(422, refusal)) as url:
        outcome = infer(command, *(["hi"] if command == "generate" else []), "--url", url, stdin="hi\n")
    assert outcome.err == (
        "infer: error: the server's model has no chat template; "
        "use 'infer generate --raw', or serve it with --chat-template FILE\n"
    )


def event(delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return b"data: %s\n\n" % json.dumps({"choices": [choice]}).encode()


def call_piece(**function: str) -> dict[str, Any]:
    return {"index": 0, "function": function}


def start(index: int | None, call_id: str | None, **function: str) -> dict[str, Any]:
    return {"index": index, "id": call_id, "type": "function", "function": function}


@pytest.mark.parametrize("reasoning", ["reasoning_content", "reasoning"])
def test_reasoning_and_calls_of_a_server_are_those_of_an_engine_here(
    infer: Infer, tmp_path: Path, reasoning: str
) -> None:
    (tmp_path / "tools.py").write_text("def add(a: int) -> int:\n    return a + 1\n")
    bodies: list[dict[str, Any]] = []
    answer = b"".join(
        [
            event({"role": "assistant", "content": None}),
            event({reasoning: "Let me "}),
            event({reasoning: "think."}),
            event({"tool_calls": [start(0, "call_a", name="add", arguments="")]}),
            event({"tool_calls": [call_piece(arguments='{"a"')]}),
            event({"tool_calls": [call_piece(arguments=": 1}")]}),
            event({"tool_calls": [start(1, "call_b", name="add", arguments='{"a": 2}')]}),
            event({}, "tool_calls"),
            b"data: [DONE]\n\n",
        ]
    )
    with server(ONE_MODEL, answer, bodies=bodies) as url:
        tools = ["--tools", str(tmp_path / "tools.py"), "--yes-to-tools", "--tool-choice", "required"]
        outcome = infer("chat", "--url", url, *tools, "--max-reasoning-tokens", "9", stdin="go\n")
    assert outcome.code == 0, outcome.err
    assert [body["max_reasoning_tokens"] for body in bodies[:2]] == [9, 9]
    assert "13 characters of reasoning" in outcome.err
    assert bodies[0]["tool_choice"] == "required"
    assert "tool_choice" not in bodies[1]
    assert bodies[1]["tools"] == bodies[0]["tools"]
    asked, *results = bodies[1]["messages"][1:]
    assert asked["reasoning_content"] == "Let me think."
    assert [call["function"]["arguments"] for call in asked["tool_calls"]] == ['{"a": 1}', '{"a": 2}']
    assert results == [
        {"role": "tool", "tool_call_id": "call_a", "content": "2"},
        {"role": "tool", "tool_call_id": "call_b", "content": "3"},
    ]


@pytest.mark.parametrize(
    "calls",
    [
        [start(None, None, name="add", arguments='{"a": 1}')],  # neither numbered nor named
        [call_piece(arguments="{}"), start(0, "x", name="add", arguments='{"a": 1}')],  # a piece of nothing
        [start(0, "x", name="add", arguments='{"a": '), start(0, "x", name="add", arguments="1}")],
    ],
)
def test_a_server_may_be_careless_about_its_calls(
    infer: Infer, tmp_path: Path, calls: list[dict[str, Any]]
) -> None:
    (tmp_path / "tools.py").write_text("def add(a: int) -> int:\n    return a + 1\n")
    bodies: list[dict[str, Any]] = []
    answer = b"".join(event({"tool_calls": [call]}) for call in calls) + event({}, "tool_calls")
    with server(ONE_MODEL, answer, bodies=bodies) as url:
        tools = ["--tools", str(tmp_path / "tools.py"), "--yes-to-tools"]
        assert infer("chat", "--url", url, *tools, stdin="go\n").code == 0
    assert bodies[1]["messages"][-1]["content"] == "2"


@pytest.mark.parametrize("calls", [[1], [{"index": "x"}]])
def test_calls_that_are_none_break_an_answer_off(infer: Infer, calls: Any) -> None:
    with server(ONE_MODEL, event({"tool_calls": calls}) + event({}, "stop")) as url:
        outcome = infer("chat", "--url", url, stdin="go\n")
    assert outcome.code == 2
    assert outcome.err.startswith("infer: error: the server's answer broke off: ")


def test_an_answer_cut_by_a_server_is_said_to_be_cut_without_a_count_of_tokens(infer: Infer) -> None:
    """A chunk may hold several tokens, so how many there were is not known here."""
    with server(ONE_MODEL, event({"content": "so"}) + event({}, "length")) as url:
        outcome = infer("chat", "--url", url, "--max-tokens", "3", stdin="go\n")
    assert outcome.err == "[cut: --max-tokens or the context allows no more]\n"
