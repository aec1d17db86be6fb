"""A live server of several API processes whose models are loaded when they are asked for.

Its engines are the token oracle: a dozen of them come and go, and each starts without PyTorch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.server_process import ServerProcess, start_server, wait_until

ENGINES = "tests.support.faulty_server"
LONG: dict[str, Any] = {"model": "a", "prompt": "a", "max_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ("--on-demand", "--api-processes", "2", "--admin-key", "root", "--num-blocks", "256")
    directory = tmp_path_factory.mktemp("logs")
    models = ("--model", f"a={checkpoint}", "--model", f"b={checkpoint}")
    with start_server(directory, *models, *flags, module=ENGINES) as running:
        yield running


def ask(server: ServerProcess, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": "a", "max_tokens": 2, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)


def engines(server: ServerProcess) -> int:
    commands = []
    for child in server.children():
        try:
            commands.append(Path(f"/proc/{child}/cmdline").read_bytes())
        except OSError:  # it has ended
            continue
    return sum(ENGINES.encode() in command for command in commands)


def loaded(server: ServerProcess) -> list[str]:
    cards = httpx.get(f"{server.url}/v1/models").json()["data"]
    return [card["id"] for card in cards if card["loaded"]]


def test_models_come_and_go_as_they_are_asked_for(server: ServerProcess) -> None:
    assert engines(server) == 0 and loaded(server) == []
    assert httpx.get(f"{server.url}/health").status_code == 200
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: ask(server, "a"), range(8)))
    assert {answer.status_code for answer in answers} == {200}, answers[0].text
    assert engines(server) == 1 and loaded(server) == ["a"], "all processes have shared one load"
    assert server.log.read_text().count("model loaded model=a") == 1
    with ThreadPoolExecutor(8) as pool:
        names = ["b", "a", "b", "a", "b"]
        answers = list(pool.map(lambda name: ask(server, name), names))
    assert [answer.headers["x-infer-model"] for answer in answers] == names
    wait_until(lambda: engines(server) == 1)


def test_a_stream_keeps_its_model_while_another_is_asked_for(server: ServerProcess) -> None:
    assert ask(server, "a").status_code == 200
    with (
        ThreadPoolExecutor(1) as pool,
        httpx.stream(
            "POST", f"{server.url}/v1/completions", json=LONG | {"stream": True}, timeout=120
        ) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        other = pool.submit(ask, server, "b")
        rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"
        assert all("error" not in json.loads(line.removeprefix("data: ")) for line in rest[:-1])
        assert other.result().status_code == 200
    assert loaded(server) == ["b"]


def test_keep_alive_unloads_a_model_whichever_process_is_told(server: ServerProcess) -> None:
    for _ in range(3):
        assert ask(server, "a").status_code == 200
        body = {"model": "a", "keep_alive": 0}
        answer = httpx.post(f"{server.url}/api/generate", json=body, timeout=120)
        assert answer.json()["done_reason"] == "unload"
        wait_until(lambda: engines(server) == 0)
    assert loaded(server) == []


def test_the_server_ends_cleanly_with_a_model_on_demand(server: ServerProcess) -> None:
    assert ask(server, "b").status_code == 200
    assert server.stop() == 0
    assert "Traceback" not in server.log.read_text()
