"""A server's life as its operator sees it: start, answer, lose an engine, drain, stop."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from infer.cli.main import main
from infer.client.subscribers import SHUTTING_DOWN
from infer.frontend.llm import LLM
from infer.sampling.params import SamplingParams
from tests.support.faulty_server import SLOW
from tests.support.server_process import (
    KNOBS,
    ServerProcess,
    command,
    cpu_seconds,
    is_alive,
    start_server,
    wait_until,
)

LENGTH = 150
GREEDY = {"temperature": 0, "ignore_eos": True}
WITHOUT_TORCH = "tests.support.faulty_server"  # a server whose engine is the oracle


@pytest.fixture(scope="module")
def oracle(checkpoint: str) -> LLM:
    return LLM(checkpoint, dtype="float32", num_threads=1, num_blocks=256)


@pytest.fixture(scope="module")
def server(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    arguments = (f"tiny={checkpoint}", "--num-blocks", "256", "--api-key", "k", "--admin-key", "root")
    with start_server(tmp_path_factory.mktemp("logs"), *arguments) as running:
        yield running


def offline(oracle: LLM, num_tokens: int, *prompts: str) -> list[str]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return [answer.text for answer in oracle.generate(list(prompts), params)]


def ask(url: str, prompt: str | list[int], num_tokens: int, key: str = "k") -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": num_tokens, **GREEDY}
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def test_answers_over_the_wire_are_the_offline_answers(server: ServerProcess, oracle: LLM) -> None:
    assert [text_of(ask(server.url, "The river", 16))] == offline(oracle, 16, "The river")


def test_the_log_has_a_timeline_and_the_requests_but_no_prompt_and_no_key(server: ServerProcess) -> None:
    ask(server.url, "an unmistakable prompt", 2)
    wait_until(lambda: "output_tokens=2 " in server.log.read_text())  # the line follows the answer
    log = server.log.read_text()
    assert 'path="/v1/completions" status=200' in log
    assert "listening on" in log and "model loaded model=tiny engines=1" in log
    assert log.count(" engine built model=") == 1 and "ready" not in log
    assert "unmistakable" not in log and "Bearer" not in log


def test_a_second_server_on_the_port_fails_at_once_and_says_so(
    server: ServerProcess, checkpoint: str
) -> None:
    port = server.url.rsplit(":", 1)[1]
    done = subprocess.run([*command(checkpoint), "--port", port], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "cannot listen on 127.0.0.1" in done.stderr and "Traceback" not in done.stderr


def uses_torch(pid: int) -> bool:
    return "/libtorch" in Path(f"/proc/{pid}/maps").read_text()


def test_only_the_engine_has_torch_in_memory(server: ServerProcess) -> None:
    assert ask(server.url, "The river", 2).status_code == 200
    body = {"model": "tiny", "input": "The river"}
    embedded = httpx.post(f"{server.url}/v1/embeddings", json=body, headers={"authorization": "Bearer k"})
    assert embedded.status_code == 200
    pair = {"model": "tiny", "query": "The river", "documents": ["a clock"]}
    ranked = httpx.post(f"{server.url}/v1/rerank", json=pair, headers={"authorization": "Bearer k"})
    assert ranked.status_code == 400 and "cannot score texts" in ranked.text
    (engine,) = server.children()
    assert uses_torch(engine) and not uses_torch(server.process.pid)


def test_an_idle_server_sleeps(server: ServerProcess) -> None:
    pids = [server.process.pid, *server.children()]
    assert len(pids) >= 2, "the engine has a process of its own"
    before = sum(map(cpu_seconds, pids))
    time.sleep(3)  # what is measured are these seconds
    assert (sum(map(cpu_seconds, pids)) - before) / 3 < 0.02  # ticks are 10 ms: 1 % would be 3 of them


def test_an_engine_killed_in_the_middle_is_replaced(server: ServerProcess, oracle: LLM) -> None:
    """Clients that wait are told, health says so, and later service resumes by itself."""
    (engine,) = server.children()
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask, server.url, f"number {i}", 240) for i in range(4)]
        wait_until(lambda: server.metrics("k")["infer_num_requests_running"] > 0)
        os.kill(engine, signal.SIGKILL)
        responses = [answer.result() for answer in answers]
    for response in responses:
        if response.status_code == 200:  # it was done before the kill
            continue
        assert response.status_code in (500, 503)
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert any(response.status_code != 200 for response in responses)
    refused = ask(server.url, "too early", 2)
    if refused.status_code != 200:
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        assert httpx.get(f"{server.url}/health").status_code == 503
    wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 200, 60)
    assert [text_of(ask(server.url, "The river", 16))] == offline(oracle, 16, "The river")
    wait_until(lambda: server.metrics("k")["infer_engine_restarts_total"] == 1)


def test_sigterm_under_load_finishes_what_runs_and_refuses_what_comes(
    checkpoint: str, oracle: LLM, tmp_path: Path
) -> None:
    arguments = (f"tiny={checkpoint}", "--num-blocks", "256", "--max-batch-size", "2")
    prompts = [f"question {i}" for i in range(10)]
    with start_server(tmp_path, *arguments) as server, ThreadPoolExecutor(len(prompts)) as pool:
        engines = server.children()
        answers = [pool.submit(ask, server.url, prompt, LENGTH) for prompt in prompts]
        wait_until(lambda: server.metrics()["infer_num_requests_waiting"] >= 6)
        server.process.terminate()
        wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 503)
        late = ask(server.url, "too late", 2)
        assert late.status_code == 503 and int(late.headers["retry-after"]) > 0
        accepted = [
            pair for pair in zip(prompts, answers, strict=True) if pair[1].result().status_code != 503
        ]
        assert len(accepted) >= 6, "what waited when the signal came is finished"
        answered = [text_of(answer.result()) for _, answer in accepted]
        assert answered == offline(oracle, LENGTH, *(prompt for prompt, _ in accepted))
        assert server.process.wait(30) == 0
        assert not any(is_alive(pid) for pid in engines)
        assert "Traceback" not in server.log.read_text()
        assert server.log.read_text().endswith("stopped\n")


@pytest.mark.parametrize("num_processes", ["1", "2"])
def test_what_does_not_finish_in_time_is_cut_off_with_an_error(
    checkpoint: str, tmp_path: Path, num_processes: str
) -> None:
    arguments = (
        f"tiny={checkpoint}",
        "--num-blocks",
        "256",
        "--drain-timeout",
        "0.1",
        "--max-batch-size",
        "1",
        "--api-processes",
        num_processes,
    )
    body: dict[str, Any] = {"prompt": [SLOW], "max_tokens": 240, "stream": True, "n": 1, **GREEDY}
    with start_server(tmp_path, *arguments, module=WITHOUT_TORCH) as server, ThreadPoolExecutor(8) as pool:

        def stream() -> str:
            return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).text

        streams = [pool.submit(stream) for _ in range(8)]
        wait_until(lambda: server.metrics()["infer_num_requests_waiting"] >= 4)
        assert server.stop(signal.SIGINT) == 0
        texts = [each.result() for each in streams]
        errors = [text for text in texts if '"error"' in text]
        cut_off = [text for text in errors if f'"message":"{SHUTTING_DOWN}"' in text]
        assert cut_off and all(text.startswith("{") for text in set(errors) - set(cut_off)), (
            errors
        )  # too late
        assert SHUTTING_DOWN in server.log.read_text()
        assert all(text.endswith("data: [DONE]\n\n") or text.startswith("{") for text in texts)


def test_a_second_signal_exits_at_once(checkpoint: str, tmp_path: Path) -> None:
    arguments = (f"tiny={checkpoint}", "--num-blocks", "256", "--max-batch-size", "1")
    with start_server(tmp_path, *arguments, module=WITHOUT_TORCH) as server, ThreadPoolExecutor(16) as pool:
        engines = server.children()
        asked = [pool.submit(ask, server.url, [SLOW, i], 240) for i in range(12)]
        body = {"prompt": [SLOW], "max_tokens": 240, "stream": True, **GREEDY}
        post = partial(httpx.post, f"{server.url}/v1/completions", json=body, timeout=60)
        streams = [pool.submit(lambda: post().text) for _ in range(4)]
        wait_until(lambda: server.metrics()["infer_num_requests_waiting"] >= 12)
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 503)
        assert server.stop(signal.SIGINT, timeout_s=5) == 130
        assert re.search(r"second signal ended_requests=\d+\n", server.log.read_text())
        assert server.log.read_text().endswith("stopped\n")
        wait_until(lambda: not any(is_alive(pid) for pid in engines))
        for each in asked:
            assert each.exception() is not None or each.result().status_code in (200, 503)
        texts = [each.result() for each in streams]
        assert any(SHUTTING_DOWN in text for text in texts), "open streams are told"
        assert all(text.endswith("data: [DONE]\n\n") or text.startswith("{") for text in texts)


def test_a_unix_socket_is_private_and_removed_at_the_end(checkpoint: str, tmp_path: Path) -> None:
    path = tmp_path / "infer.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))  # what a server that crashed leaves behind
    with start_server(tmp_path, checkpoint, "--uds", str(path), module=WITHOUT_TORCH) as server:
        assert server.url == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x") as client:
            assert client.get("/health").status_code == 200
        assert server.stop() == 0
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/no/such/model"], "does not exist"),
        (["--model", "=x"], "NAME=MODEL"),
        (["a=x", "--model", "a=y"], "name of its own"),
        (["a=x", "--served-model-name", "b"], "two names"),
        (["--tls-cert", "missing.pem"], "belong together"),
        (["--api-key", ""], "empty key"),
        (["--prot", "1"], "--prot"),
    ],
)
def test_a_mistake_ends_with_one_line_and_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["serve", *KNOBS, "--port", "0", *arguments])
    except SystemExit as end:  # from the parser
        code = end.code  # type: ignore[assignment]
    written = capsys.readouterr().err
    assert code == 2, written
    assert message in written and "Traceback" not in written


def test_an_engine_that_is_killed_while_it_starts_is_no_wrong_setting(
    checkpoint: str, tmp_path: Path
) -> None:
    """Memory may have run out: a service manager tries again after code 1, and never after code 2."""
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command(checkpoint), stdout=log, stderr=subprocess.PIPE, text=True)
    server = ServerProcess(process, "", tmp_path / "log")
    wait_until(server.children)
    os.kill(server.children()[0], signal.SIGKILL)
    _, written = process.communicate(timeout=60)
    assert process.returncode == 1, written
    assert (
        "while it started, the engine process ended with signal 9" in written and "Traceback" not in written
    )


def test_what_the_device_cannot_do_ends_with_one_line_and_code_2_too(checkpoint: str) -> None:
    """The engine finds it out, in a process of its own; the server says it as its own mistake."""
    arguments = (checkpoint, "--use-overlap", "--log-level", "error")
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    says = "use_overlap needs the kernels of a GPU, and the model is on cpu; leave it out"
    assert done.stderr == f"infer: error: {says}\n"
