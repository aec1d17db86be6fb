"""Loads of a live server that are ended early: by a signal, by their client, by an unload, by a death.

Each gets 503 in our JSON, and the name can be used again.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.server_process import ServerProcess, start_server, wait_until

ADMIN = {"authorization": "Bearer root"}
WITHOUT_TORCH = "tests.support.faulty_server"  # a server whose engines are the oracle


@pytest.fixture(scope="module")
def server(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    logs = tmp_path_factory.mktemp("logs")
    arguments = (checkpoint, "--admin-key", "root", "--drain-timeout", "1")
    with start_server(logs, *arguments, module=WITHOUT_TORCH) as running:
        yield running


def post(server: ServerProcess, path: str, timeout: float = 60.0, **body: str) -> httpx.Response:
    return httpx.post(f"{server.url}/admin/models/{path}", json=body, headers=ADMIN, timeout=timeout)


def new_child(server: ServerProcess, before: list[int]) -> int:
    wait_until(lambda: set(server.children()) - set(before))
    (child,) = set(server.children()) - set(before)
    # a child that is stopped before it runs its own program stops its parent, which waits for that
    wait_until(lambda: Path(f"/proc/{child}/cmdline").read_text().endswith(f"{WITHOUT_TORCH}\0"))
    return child


def check_ended(answer: httpx.Response, word: str) -> None:
    assert answer.status_code == 503, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert word in answer.json()["error"]["message"] and "\n" not in answer.json()["error"]["message"]


def test_a_load_that_ends_early_is_503_and_its_name_is_free(server: ServerProcess, checkpoint: str) -> None:
    before = server.children()
    with ThreadPoolExecutor(1) as pool:

        def begin() -> tuple[Future[httpx.Response], int]:
            loading = pool.submit(post, server, "load", name="b", model=checkpoint)
            child = new_child(server, before)
            os.kill(child, signal.SIGSTOP)  # it will never be ready
            return loading, child

        loading, child = begin()
        assert post(server, "load", name="b", model=checkpoint).status_code == 409
        os.kill(child, signal.SIGKILL)
        check_ended(loading.result(), "signal 9")

        loading, child = begin()
        assert post(server, "unload", name="b").status_code == 200
        check_ended(loading.result(), "the model was unloaded")
        assert server.children() == before

        with contextlib.suppress(httpx.TimeoutException):
            post(server, "load", timeout=0.3, name="b", model=checkpoint)
        wait_until(lambda: post(server, "unload", name="b").status_code == 404)
        wait_until(lambda: server.children() == before)

    assert post(server, "load", name="b", model=checkpoint).status_code == 200
    assert post(server, "unload", name="b").status_code == 200


def test_sigterm_ends_a_load(server: ServerProcess, checkpoint: str) -> None:
    before = server.children()
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(post, server, "load", name="b", model=checkpoint)
        os.kill(new_child(server, before), signal.SIGSTOP)
        assert server.stop() == 0
        check_ended(loading.result(), "shutting down")
    assert "Traceback" not in Path(server.log).read_text()
