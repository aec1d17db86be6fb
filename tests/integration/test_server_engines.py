"""A live server whose engine crashes and hangs when it is told to: clean errors, then service again.

The engine is the oracle (tests/support/faulty_server.py), so that a step costs nothing and an answer is
known; processes, sockets, supervision and the wire are the real ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.faulty_server import CRASH, MAX_RESTARTS, STUCK, THIS
from tests.support.server_process import ServerProcess, is_alive, start_server, wait_until

STUCK_S = 1.5


@pytest.fixture(scope="module")
def server(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    logs = tmp_path_factory.mktemp("logs")
    with start_server(
        logs, checkpoint, "--stuck-timeout", str(STUCK_S), "--drain-timeout", "1", module=THIS
    ) as running:
        yield running


def ask(server: ServerProcess, prompt: list[int], max_tokens: int = 6, **fields: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": max_tokens, "seed": 1} | fields
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def health(server: ServerProcess) -> int:
    return httpx.get(f"{server.url}/health", timeout=30).status_code


def is_clean(answer: httpx.Response) -> bool:
    return set(answer.json()["error"]) == {"message", "type", "param", "code"}


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def resident_kib(pid: int) -> int:
    (line,) = [row for row in Path(f"/proc/{pid}/status").read_text().splitlines() if row.startswith("VmRSS")]
    return int(line.split()[1])


def test_a_stuck_engine_is_unwell_its_waiters_are_told_and_it_is_replaced(server: ServerProcess) -> None:
    before = ask(server, [5, 6, 7]).json()["choices"][0]["text"]
    (stuck,) = server.children()
    with ThreadPoolExecutor(4) as pool:
        waiters: list[Future[httpx.Response]] = [pool.submit(ask, server, [STUCK, 5])]
        waiters += [pool.submit(ask, server, [5, number], stream=number == 8) for number in (7, 8, 9)]
        wait_until(lambda: health(server) == 503)
        answers = [waiter.result() for waiter in waiters]
    for answer in answers:
        if answer.status_code != 200:  # a waiter may have been served before the order came
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1 and is_clean(answer)
    assert answers[0].status_code == 503
    wait_until(lambda: health(server) == 200)
    assert not is_alive(stuck)
    assert ask(server, [5, 6, 7]).json()["choices"][0]["text"] == before
    metrics = server.metrics()
    assert metrics["infer_engine_restarts_total"] == 1
    assert metrics["infer_num_requests_running"] == metrics["infer_num_requests_waiting"] == 0


def test_after_the_last_restart_the_server_ends_and_says_why(server: ServerProcess) -> None:
    """And until then, neither memory nor open files grow from one death to the next."""
    files, sizes = [], []
    while server.metrics()["infer_engine_restarts_total"] < MAX_RESTARTS:
        assert ask(server, [CRASH, 5]).status_code in (500, 503)
        wait_until(lambda: health(server) == 200)
        assert ask(server, [5, 6, 7]).status_code == 200
        files.append(open_files(server.process.pid))
        sizes.append(resident_kib(server.process.pid))
    assert max(files[1:]) <= files[0] + 2, "a keep-alive connection or two may be open"
    assert max(sizes[1:]) <= sizes[0] + 8 * 1024
    assert ask(server, [CRASH, 9]).status_code in (500, 503)
    assert server.process.wait(30) == 1
    log = server.log.read_text()
    assert "server ends error=no engine is left" in log and f"after {MAX_RESTARTS} restarts" in log
    assert "Traceback" not in log
