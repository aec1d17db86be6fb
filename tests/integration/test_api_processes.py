"""Several API processes on one port are one server: same answers, one count, one drain, one end."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import le
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.faulty_server import ABSENT, ENDLESS, SLOW, STUCK
from tests.support.server_process import ServerProcess, is_alive, start_server, wait_until

NUM = 3
WITHOUT_TORCH = "tests.support.faulty_server"  # what several processes share asks for no model
KEY, ROOT = {"authorization": "Bearer k"}, {"authorization": "Bearer root"}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "seed": 7}  # the oracle draws by the seed


@pytest.fixture(scope="module")
def server(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    limits = ("--num-blocks", "256", "--max-batch-size", "4")
    keys = ("--api-key", "k", "--admin-key", "root")
    logs = tmp_path_factory.mktemp("logs")
    (logs / "chat.jinja").write_text("{% for message in messages %}{{ message.content }}\n{% endfor %}")
    chat = ("--chat-template", str(logs / "chat.jinja"))
    arguments = (f"tiny={checkpoint}", *limits, *keys, *chat, "--api-processes", str(NUM))
    with start_server(logs, *arguments, module=WITHOUT_TORCH) as running:
        yield running


@pytest.fixture(scope="module")
def clients(server: ServerProcess) -> Iterator[list[httpx.Client]]:
    with connected(server) as found:
        yield found


@contextmanager
def connected(server: ServerProcess, number: int = NUM) -> Iterator[list[httpx.Client]]:
    """A client with an open connection to each API process, process 0 first."""
    with ExitStack() as stack:
        found: dict[int, httpx.Client] = {}
        for _ in range(100):
            client = stack.enter_context(httpx.Client(base_url=server.url, timeout=60, headers=KEY))
            assert client.get("/version").status_code == 200
            found.setdefault(process_of(client, server), client)
            if len(found) == number:
                yield [found[pid] for pid in sorted(found, key=lambda pid: pid != server.process.pid)]
                return
        pytest.fail(f"100 connections went to {len(found)} of {number} processes")


def process_of(client: httpx.Client, server: ServerProcess) -> int:
    """The process that holds the other end of a client's connection, as the kernel tells."""
    (connection,) = client._transport._pool.connections  # type: ignore[attr-defined]
    stream = connection._connection._network_stream
    port = stream.get_extra_info("client_addr")[1]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[2].split(":")[1], 16) == port and fields[9] != "0":  # 0: closed, and waiting to be gone
            inode = fields[9]
            break
    else:
        pytest.fail(f"no socket is connected to port {port}")
    for pid in [server.process.pid, *server.children()]:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            if fd.is_symlink() and os.readlink(fd) == f"socket:[{inode}]":
                return pid
    pytest.fail(f"no process holds socket {inode}")


def complete(client: httpx.Client, prompt: str, num_tokens: int) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": num_tokens, **GREEDY}
    return client.post("/v1/completions", json=body)


def pages(clients: list[httpx.Client], path: str) -> list[str]:
    return [client.get(path).text for client in clients]


def figure(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def test_every_process_gives_the_same_answer(server: ServerProcess, clients: list[httpx.Client]) -> None:
    answers = [complete(client, "The river", 12) for client in clients]
    assert {answer.status_code for answer in answers} == {200}
    (text,) = {answer.json()["choices"][0]["text"] for answer in answers}
    assert text and text != complete(clients[0], "The sea", 12).json()["choices"][0]["text"]
    log = server.log.read_text()
    assert log.count("listening on") == log.count("model loaded") == 1


def test_every_process_refuses_what_has_no_key(server: ServerProcess, clients: list[httpx.Client]) -> None:
    for client in clients:
        assert client.get("/v1/models", headers={"authorization": "Bearer x"}).status_code == 401
        assert client.post("/admin/drain", json={}).status_code == 401, "not the admin's key"


def test_health_and_models_are_the_same_everywhere(clients: list[httpx.Client]) -> None:
    assert set(pages(clients, "/health")) == {'{"status":"ok"}'}
    assert len(set(pages(clients, "/v1/models"))) == 1


def test_any_process_explains_what_another_has_served(clients: list[httpx.Client]) -> None:
    ids = list(range(7, 80))
    for number, client in enumerate(clients):
        body = {"model": "tiny", "prompt": ids, "max_tokens": 3, "cache_salt": f"s{number}", **GREEDY}
        answer = client.post("/v1/completions", json=body, headers={"x-request-id": f"by{number}"})
        assert answer.status_code == 200, answer.text
    for number in range(NUM):
        stories = [client.get(f"/explain/by{number}") for client in clients]
        assert {story.status_code for story in stories} == {200}
        told = [story.json() for story in stories]
        assert all(story == told[0] for story in told)
        assert told[0]["id"] == f"by{number}" and told[0]["prompts"][0]["output_tokens"] == 3
        assert f"shared with {NUM - 1} others, but cache_salt differs" in " ".join(told[0]["advice"])
        assert clients[0].get(f"/explain/by{number}", headers=ROOT).json() == told[0]
    for client in clients:
        assert client.get("/explain/by7").status_code == 404
        assert client.get("/explain/by0", headers={"authorization": "Bearer x"}).status_code == 401


def test_a_scrape_of_any_process_counts_all_of_them(clients: list[httpx.Client]) -> None:
    name = 'infer_http_requests_total{method="POST",route="/v1/completions",status="200"}'
    before, tokens = figure(clients[0], name), figure(clients[0], "infer_generation_tokens_total")
    for client in clients:
        assert complete(client, "count me", 5).status_code == 200
    for client in clients:
        assert figure(client, name) == before + NUM
        assert figure(client, "infer_generation_tokens_total") == tokens + 5 * NUM
        assert figure(client, 'infer_request_success_total{engine="0",finished_reason="length"') >= NUM
    counted = figure(clients[1], 'infer_http_requests_total{method="GET",route="/metrics"')
    assert figure(clients[2], 'infer_http_requests_total{method="GET",route="/metrics"') == counted + 1


def test_every_request_has_one_line_in_the_log(server: ServerProcess, clients: list[httpx.Client]) -> None:
    for number, client in enumerate(clients):
        client.get("/v1/models", headers={"x-request-id": f"once-{number}"})
        client.post("/admin/reset_prefix_cache", json={}, headers=ROOT | {"x-request-id": f"admin-{number}"})
    for number in range(NUM):
        wait_until(partial(logged, server, f"request_id=admin-{number}"))
        assert server.log.read_text().count(f"request_id=once-{number}") == 1
        assert server.log.read_text().count(f"request_id=admin-{number}") == 1


def test_every_process_shows_the_engine_at_work(clients: list[httpx.Client]) -> None:
    for client in clients:
        assert client.get("/admin/live").status_code == 401, "not the admin's key"
        with client.stream("GET", "/admin/live?model=tiny&replica=0", headers=ROOT) as stream:
            event = next(line for line in stream.iter_lines() if line.startswith("data: "))
        sight = json.loads(event.removeprefix("data: "))
        assert sight["models"] == {"tiny": 1} and sum(sight["counts"]) == sight["num_blocks"] == 256


def test_a_response_stored_by_one_process_is_continued_by_all(clients: list[httpx.Client]) -> None:
    body: dict[str, Any] = {"model": "tiny", "input": "hi", "max_output_tokens": 3}
    made, ids = None, []
    for client in [*clients, *clients]:
        answer = client.post("/v1/responses", json=body | {"previous_response_id": made})
        assert answer.status_code == 200, answer.text
        made = answer.json()["id"]
        ids.append(made)
        for other in clients:
            assert other.get(f"/v1/responses/{made}").json() == answer.json()
    lists = pages(clients, f"/v1/responses/{made}/input_items")
    assert len(set(lists)) == 1
    assert len(json.loads(lists[0])["data"]) > len(clients)
    for client, each in zip([*clients, *clients], ids, strict=True):
        assert client.delete(f"/v1/responses/{each}").json()["deleted"] is True
        assert {other.get(f"/v1/responses/{each}").status_code for other in clients} == {404}


def test_an_alias_set_at_one_process_is_known_to_all(clients: list[httpx.Client]) -> None:
    answer = clients[1].post("/admin/models/alias", json={"alias": "gpt", "name": "tiny"}, headers=ROOT)
    assert answer.status_code == 200, answer.text
    for client in clients:
        wait_until(partial(has_model, client, "gpt"))


def test_a_model_loaded_at_one_process_is_served_and_unloaded_by_all(
    clients: list[httpx.Client], checkpoint: str
) -> None:
    knobs = {"num_blocks": 64, "dtype": "float32", "device": "cpu", "num_threads": 1}
    body = {"name": "more", "model": checkpoint, "knobs": knobs}
    assert clients[2].post("/admin/models/load", json=body, headers=ROOT).status_code == 200
    for client in clients:
        ask = {"model": "more", "prompt": "a", "max_tokens": 2}
        assert client.post("/v1/completions", json=ask).status_code == 200
    shares = {"alias": "both", "models": {"tiny": 1, "more": 1}}
    assert clients[1].post("/admin/models/alias", json=shares, headers=ROOT).status_code == 200
    found = set()
    for user in map(str, range(8)):
        ask = {"model": "both", "prompt": "a", "max_tokens": 1, "user": user}
        models = set()
        for client in clients:
            wait_until(partial(has_model, client, "both"))
            models.add(client.post("/v1/completions", json=ask).headers["x-infer-model"])
        assert len(models) == 1, "every process sends a user to the same model"
        found |= models
    assert found == {"tiny", "more"}
    assert clients[1].post("/admin/models/unload", json={"name": "more"}, headers=ROOT).status_code == 200
    assert all(client.get("/v1/models/more").status_code == 404 for client in clients)


def test_a_model_is_replaced_in_all_processes_without_dropping_a_stream(
    clients: list[httpx.Client], checkpoint: str
) -> None:
    knobs = {"num_blocks": 256, "dtype": "float32", "device": "cpu", "num_threads": 1}
    body = {"name": "more", "model": checkpoint, "knobs": knobs}
    assert clients[0].post("/admin/models/load", json=body, headers=ROOT).status_code == 200
    ask = {"model": "more", "prompt": "a", "max_tokens": 200, "stream": True, **GREEDY}
    with clients[1].stream("POST", "/v1/completions", json=ask) as stream:
        lines = stream.iter_lines()
        next(lines)
        replace = body | {"replace": True}
        assert clients[2].post("/admin/models/load", json=replace, headers=ROOT).status_code == 200
        for client in (clients[0], clients[2]):
            assert client.post("/v1/completions", json=ask | {"stream": False}).status_code == 200
        rest = [line for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]" and not any("error" in line for line in rest)
    for client in clients:
        assert client.post("/v1/completions", json=ask | {"stream": False}).status_code == 200
    assert clients[1].post("/admin/models/unload", json={"name": "more"}, headers=ROOT).status_code == 200
    assert all(client.get("/v1/models/more").status_code == 404 for client in clients)


def test_a_load_that_fails_leaves_nothing_in_any_process(
    server: ServerProcess, clients: list[httpx.Client], checkpoint: str
) -> None:
    before = files_of_workers(server)
    body = {"name": "broken", "model": checkpoint, "knobs": {"device": ABSENT}}
    answer = clients[1].post("/admin/models/load", json=body, headers=ROOT)
    assert answer.status_code == 400, answer.text
    wait_until(lambda: all(map(le, files_of_workers(server), before)))  # an idle connection may end meanwhile


def test_a_load_ends_when_its_client_leaves_any_process(server: ServerProcess, checkpoint: str) -> None:
    before = server.children()
    body = {"name": "left", "model": checkpoint, "knobs": {"device": ENDLESS}}
    seen: set[int] = set()
    end = time.monotonic() + 60  # a process that an earlier test has ended may still be starting again
    while time.monotonic() < end:
        with httpx.Client(base_url=server.url, timeout=60, headers=ROOT) as client:
            assert client.get("/version", headers=KEY).status_code == 200
            if (pid := process_of(client, server)) in seen:
                continue
            seen.add(pid)
            with pytest.raises(httpx.TimeoutException):
                client.post("/admin/models/load", json=body, timeout=0.3)
        wait_until(lambda: server.log.read_text().count("its caller has left") == len(seen))
        wait_until(lambda: server.children() == before)
        if len(seen) == NUM:
            return
    pytest.fail(f"connections went to {len(seen)} of {NUM} processes")


def test_a_process_that_hangs_bounds_the_operators_calls_and_follows_when_it_is_back(
    server: ServerProcess, checkpoint: str
) -> None:
    with connected(
        server
    ) as clients:  # anew: idle connections end, and another may lead to the one that hangs
        hanging = process_of(clients[1], server)

        def operate(path: str, body: dict[str, Any]) -> httpx.Response:
            return clients[0].post(f"/admin/models/{path}", json=body, headers=ROOT)

        load = {"name": "more", "model": checkpoint, "knobs": {"num_blocks": 64}}
        assert operate("load", load).status_code == 200
        os.kill(hanging, signal.SIGSTOP)
        try:
            for answer in (operate("unload", {"name": "more"}), operate("load", load | {"name": "other"})):
                assert answer.status_code == 503, answer.text
                assert f"(pid {hanging}) has not answered" in answer.json()["error"]["message"]
            assert operate("alias", {"alias": "late", "name": "tiny"}).status_code == 200
            for client in (clients[0], clients[2]):
                assert not has_model(client, "more") and not has_model(client, "other")
        finally:
            os.kill(hanging, signal.SIGCONT)
        for client in clients:
            wait_until(partial(has_model, client, "late"))
            for name in ("more", "other"):
                ask = {"model": name, "prompt": "a", "max_tokens": 1}
                assert client.post("/v1/completions", json=ask).status_code == 422
        assert operate("load", load).status_code == 200
        assert all(has_model(client, "more") and is_served(client) for client in clients)
        assert operate("unload", {"name": "more"}).status_code == 200


def test_draining_one_drains_all(clients: list[httpx.Client]) -> None:
    assert clients[1].post("/admin/drain", json={}, headers=ROOT).json()["is_draining"]
    for client in clients:
        assert complete(client, "a", 1).status_code == 503
        assert client.get("/health").status_code == 503
    assert not clients[2].post("/admin/drain", json={"drain": False}, headers=ROOT).json()["is_draining"]
    assert all(complete(client, "a", 1).status_code == 200 for client in clients)


def test_an_engine_that_dies_is_down_and_back_for_all(
    server: ServerProcess, clients: list[httpx.Client]
) -> None:
    (engine,) = (pid for pid in server.children() if "processes.worker" not in cmdline(pid))
    os.kill(engine, signal.SIGKILL)
    wait_until(lambda: clients[1].get("/health").status_code == 503)
    wait_until(lambda: clients[1].get("/health").status_code == 200, 60)
    for client in clients:
        wait_until(partial(is_served, client))
        assert figure(client, "infer_engine_restarts_total") == 1


def test_sigterm_lets_all_processes_finish_what_they_serve(
    server: ServerProcess, clients: list[httpx.Client]
) -> None:
    children = server.children()
    body = {"model": "tiny", "prompt": "last", "max_tokens": 200, "stream": True, **GREEDY}
    with ExitStack() as stack:
        lines = [
            stack.enter_context(client.stream("POST", "/v1/completions", json=body)).iter_lines()
            for client in clients
        ]
        assert all(next(each).startswith("data: {") for each in lines)
        server.process.terminate()
        for each in lines:
            rest = [line for line in each if line]
            assert len(rest) == 200 and rest[-1] == "data: [DONE]"
    assert server.process.wait(30) == 0
    assert not any(map(is_alive, children))
    assert server.log.read_text().endswith("stopped\n") and "Traceback" not in server.log.read_text()


def test_a_process_that_dies_ends_the_server_with_a_line(checkpoint: str, tmp_path: Path) -> None:
    arguments = (checkpoint, "--api-processes", "2")
    with start_server(tmp_path, *arguments, module=WITHOUT_TORCH) as server:
        children = server.children()
        os.kill(next(pid for pid in children if "processes.worker" in cmdline(pid)), signal.SIGKILL)
        assert server.process.wait(30) == 1
        assert "API process 1 ended with signal 9" in server.log.read_text()
        wait_until(lambda: not any(map(is_alive, children)))


def test_an_engine_that_dies_in_a_drain_is_not_said_to_be_restarted(checkpoint: str, tmp_path: Path) -> None:
    arguments = (f"tiny={checkpoint}", "--api-processes", "2", "--api-key", "k")
    body = {"model": "tiny", "prompt": [SLOW], "max_tokens": 380, "stream": True, **GREEDY}
    with (
        start_server(tmp_path, *arguments, module=WITHOUT_TORCH) as server,
        connected(server, 2) as clients,
        ExitStack() as stack,
    ):
        streams = [
            stack.enter_context(client.stream("POST", "/v1/completions", json=body)) for client in clients
        ]
        lines = [stream.iter_lines() for stream in streams]
        assert all(next(each).startswith("data: {") for each in lines)
        (engine,) = (pid for pid in server.children() if "processes.worker" not in cmdline(pid))
        server.process.terminate()
        wait_until(lambda: logged(server, "draining requests=2"))
        os.kill(engine, signal.SIGKILL)
        for each in lines:
            told = "".join(each)
            assert "signal 9" in told and "the server stops, so it is not restarted" in told, told[-300:]
        assert server.process.wait(30) == 0


def test_a_process_that_dies_in_a_drain_is_named_and_not_waited_for(checkpoint: str, tmp_path: Path) -> None:
    arguments = (f"tiny={checkpoint}", "--api-processes", "2", "--drain-timeout", "100")
    with (
        start_server(tmp_path, *arguments, module=WITHOUT_TORCH) as server,
        ExitStack() as stack,
    ):
        (worker,) = (pid for pid in server.children() if "processes.worker" in cmdline(pid))
        for _ in range(100):
            client = stack.enter_context(httpx.Client(base_url=server.url, timeout=60))
            client.get("/version")
            if process_of(client, server) == worker:
                break
        body = {"model": "tiny", "prompt": [STUCK], "max_tokens": 9}
        asking = threading.Thread(target=lambda: lost(client, body))
        asking.start()
        time.sleep(1.0)  # until it is inside, which "draining requests=1" proves
        server.process.terminate()
        wait_until(lambda: logged(server, "draining requests=1"))
        os.kill(worker, signal.SIGKILL)
        assert server.process.wait(30) == 1
        asking.join()
        assert "server ends error=API process 1 ended with signal 9" in server.log.read_text()


def lost(client: httpx.Client, body: dict[str, Any]) -> None:
    """Ask for what never comes."""
    with pytest.raises(httpx.HTTPError):
        client.post("/v1/completions", json=body)


def test_processes_end_with_process_0_however_that_ends(checkpoint: str, tmp_path: Path) -> None:
    arguments = (checkpoint, "--api-processes", "2")
    with start_server(tmp_path, *arguments, module=WITHOUT_TORCH) as server:
        children = server.children()
        assert server.stop(signal.SIGKILL) == -signal.SIGKILL
        wait_until(lambda: not any(map(is_alive, children)))


def files_of_workers(server: ServerProcess) -> list[int]:
    """How many files each API process but process 0 has open."""
    workers = [pid for pid in server.children() if "processes.worker" in cmdline(pid)]
    return [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in workers]


def logged(server: ServerProcess, text: str) -> bool:
    return text in server.log.read_text()


def has_model(client: httpx.Client, name: str) -> bool:
    return client.get(f"/v1/models/{name}").status_code == 200


def is_served(client: httpx.Client) -> bool:
    return complete(client, "a", 3).status_code == 200


def cmdline(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
def test_a_terminal_that_closes_ends_the_server_and_leaves_nothing(
    number: int,
    checkpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """SIGHUP drains, as SIGTERM does; SIGQUIT (Ctrl-\\) ends it on the spot, and what it started follows."""
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))  # short: the paths of sockets are limited
    request.addfinalizer(lambda: shutil.rmtree(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    # tests that run in the background of a script, or under nohup, hand on that the signal is ignored
    request.addfinalizer(partial(signal.signal, number, signal.signal(number, signal.SIG_DFL)))
    arguments = (f"tiny={checkpoint}", "--api-processes", "2")
    with start_server(tmp_path, *arguments, module=WITHOUT_TORCH) as server:
        children = server.children()
        assert len(children) == 2 and list(temporary.glob("infer-run-*"))
        # SIGQUIT may write the whole memory of the process to a file first, for longer than this test waits
        resource.prlimit(server.process.pid, resource.RLIMIT_CORE, (0, 0))
        for pid in children:  # as a service manager does that signals a whole group
            if number == signal.SIGHUP:
                os.kill(pid, number)
        assert server.stop(number) == (0 if number == signal.SIGHUP else -number)
        wait_until(lambda: not any(map(is_alive, children)))
        wait_until(lambda: not list(temporary.glob("infer-run-*")))
        assert logged(server, "draining requests=0") == (number == signal.SIGHUP)
        assert logged(server, "stopped") == (number == signal.SIGHUP)
        assert "Traceback" not in server.log.read_text()
