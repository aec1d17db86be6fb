"""Many clients that read hardly anything, handshakes without end, processes that the kernel kills.

The server is the real one, `python -m infer.server`. SIGKILL is what the kernel sends when memory runs out,
so a process that is killed here ends as one that has taken too much.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from infer.cache.host_bytes import resident_bytes
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.support.server_process import ServerProcess, is_alive, start_server, wait_until

pytestmark = pytest.mark.slow

NUM_SLOW = 40
NUM_STREAMS = 12
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with room for long answers."""
    directory: Path = tmp_path_factory.mktemp("long") / "llama"
    make_checkpoint("llama", directory, sizes=Sizes(context_len=4096))
    return str(directory)


def num_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def complete(url: str, prompt: str, num_tokens: int = 12, **options: Any) -> str:
    body = {"prompt": prompt, "max_tokens": num_tokens, **GREEDY}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120, **options)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_readers_of_a_byte_per_second_disturb_nobody(long_model: str, tmp_path: Path) -> None:
    arguments = (
        f"tiny={long_model}",
        "--num-blocks",
        "1024",
        "--max-batch-size",
        "64",
        "--request-timeout",
        "60",
    )
    with start_server(tmp_path, *arguments) as server:
        expected = complete(server.url, "The river")
        (engine,) = server.children()
        before = resident_bytes(server.process.pid), resident_bytes(engine)
        files = num_files(server.process.pid)
        with ExitStack() as stack:
            slow = [stack.enter_context(slow_reader(server.url)) for _ in range(NUM_SLOW)]
            highest = [0, 0]
            for _ in range(15):
                for reader in slow:
                    reader.recv(1)
                assert complete(server.url, "The river") == expected
                now = resident_bytes(server.process.pid), resident_bytes(engine)
                highest = [max(pair) for pair in zip(highest, now, strict=True)]
                time.sleep(0.5)
            grown = [high - low for high, low in zip(highest, before, strict=True)]
        assert grown[0] < NUM_SLOW * (4 << 20), f"the API process took {grown[0] >> 20} MiB more"
        assert grown[1] < 64 << 20, f"the engine took {grown[1] >> 20} MiB more"
        wait_until(lambda: num_files(server.process.pid) <= files, 60)
        wait_until(lambda: server.metrics()["infer_num_requests_running"] == 0, 60)
        assert complete(server.url, "The river") == expected
        assert server.stop() == 0
        assert "Traceback" not in server.log.read_text()


def slow_reader(url: str) -> socket.socket:
    """A client that has asked for a long stream with many logprobs, and has a small window."""
    host, port = url.removeprefix("http://").split(":")
    body = httpx.Request(
        "POST",
        f"{url}/v1/completions",
        json={"prompt": "The sea", "max_tokens": 1000, "logprobs": 5, "stream": True, **GREEDY},
    ).read()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(60)
    connection.connect((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def test_no_client_of_tls_can_ask_for_another_handshake(checkpoint: str, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    make = "openssl req -x509 -newkey rsa:2048 -nodes -keyout key -out cert -days 3 -subj /CN=localhost"
    subprocess.run(make.split(), cwd=tmp_path, check=True, capture_output=True)
    tls = ("--tls-cert", str(tmp_path / "cert"), "--tls-key", str(tmp_path / "key"))
    with start_server(tmp_path, f"tiny={checkpoint}", "--num-blocks", "64", *tls) as server:
        address = server.url.removeprefix("https://")
        asked = subprocess.run(
            ["openssl", "s_client", "-tls1_2", "-connect", address],
            input=b"R\n" * 20 + b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n",
            capture_output=True, timeout=60,
        )  # fmt: skip
        said = (asked.stdout + asked.stderr).lower()
        assert b"no renegotiation" in said and b"http/1.1 200" not in said
        trusting = ssl.create_default_context(cafile=str(tmp_path / "cert"))
        trusting.check_hostname = False
        assert complete(server.url, "a", verify=trusting)
        assert server.stop() == 0
        assert "Traceback" not in server.log.read_text()


def test_an_engine_that_runs_out_of_memory_ends_its_requests_and_is_replaced(
    long_model: str, tmp_path: Path
) -> None:
    with start_server(tmp_path, f"tiny={long_model}", "--num-blocks", "1024") as server:
        expected = complete(server.url, "The river")
        files = num_files(server.process.pid)
        for number in range(3):
            wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 200, 60)
            (engine,) = server.children()
            endings = ask_while(server, lambda pid=engine: os.kill(pid, signal.SIGKILL))
            assert len(endings) == NUM_STREAMS
            for ending in endings:
                assert "the engine process ended with signal 9 (Killed)" in ending, ending
            wait_until(lambda: is_served(server.url), 60)
            assert complete(server.url, "The river") == expected
            assert server.metrics()["infer_engine_restarts_total"] == number + 1
            assert not is_alive(engine)
        wait_until(lambda: num_files(server.process.pid) <= files, 30)
        log = server.log.read_text()
        assert log.count("engine down reason=") == 3 and "signal 9 (Killed)" in log and "Traceback" not in log
        assert server.stop() == 0


def test_an_api_process_that_runs_out_of_memory_ends_the_server_with_a_line(
    long_model: str, tmp_path: Path
) -> None:
    """As documented: a service manager starts the server again. No client is left waiting."""
    arguments = (f"tiny={long_model}", "--num-blocks", "1024", "--api-processes", "2")
    with start_server(tmp_path, *arguments) as server:
        children = server.children()
        (worker,) = (
            pid for pid in children if "processes.worker" in Path(f"/proc/{pid}/cmdline").read_text()
        )
        endings = ask_while(server, lambda: os.kill(worker, signal.SIGKILL))
        assert len(endings) == NUM_STREAMS and not any('"finish_reason":"' in ending for ending in endings)
        assert server.process.wait(60) == 1
        assert "API process 1 ended with signal 9" in server.log.read_text()
        wait_until(lambda: not any(map(is_alive, children)))


def ask_while(server: ServerProcess, act: Any) -> list[str]:
    """Open long streams, act when all of them have begun, and return how each of them ended."""
    endings: list[str] = []
    begun = threading.Barrier(NUM_STREAMS + 1)

    def ask(number: int) -> None:
        body = {"prompt": f"number {number}", "max_tokens": 3000, "stream": True, **GREEDY}
        said: deque[str] = deque(maxlen=2)  # an error, and the end of the stream
        try:
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as answer:
                lines = (line for line in answer.iter_lines() if line)
                said.append(next(lines))
                begun.wait(60)
                said.extend(lines)
        except httpx.HTTPError as error:
            said.append(repr(error))
        endings.append("\n".join(said))

    threads = [threading.Thread(target=ask, args=[number]) for number in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    begun.wait(60)
    act()
    for thread in threads:
        thread.join(60)
    return endings


def is_served(url: str) -> bool:
    body = {"prompt": "a", "max_tokens": 1, **GREEDY}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
