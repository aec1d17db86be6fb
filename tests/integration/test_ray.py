"""`infer serve --cluster ray` on a real Ray cluster of four nodes on loopback; skipped without Ray."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from infer import LLM, SamplingParams
from tests.support.server_process import KNOBS, ROOT, is_alive, wait_until

pytest.importorskip("ray")

PATIENCE_S = 240.0
ALONE = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # keeps every node on the loopback interface
}
SERVES = re.compile(r"replica serves number=(\d+) url=(\S+) pid=(\d+) node=(\S+)")


@dataclass(slots=True)
class Site:
    """A front, its log, and the cluster under it."""

    url: str
    log: Path
    cluster: Any
    nodes: dict[str, Any]  # by the beginning of their ids

    def lives(self) -> list[tuple[int, str, int, str]]:
        """Every time that a replica began to serve: its number, URL, process and node."""
        rows = SERVES.findall(self.log.read_text())
        return [(int(number), url, int(pid), node) for number, url, pid, node in rows]

    def serving(self) -> dict[int, tuple[int, str]]:
        """The process and the node of each replica that lives."""
        return {number: (pid, node) for number, _, pid, node in self.lives() if is_alive(pid)}

    def ask(self, prompt: str = "Once", num_tokens: int = 8) -> httpx.Response:
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)


HERE: dict[str, Any] = {"node_ip_address": "127.0.0.1"}


@pytest.fixture(scope="module")
def site(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    scaling = ["--replicas", "2", "--max-replicas", "3", "--target-queue-time", "0.2"]
    flags = ["--max-batch-size", "1", *scaling, "--scale-down-after", "4"]
    with open_site(checkpoint, tmp_path_factory.mktemp("front") / "log", 3, *flags) as made:
        wait_until(lambda: len(made.serving()) == 2, PATIENCE_S)
        yield made


@contextmanager
def open_site(checkpoint: str, log: Path, num_nodes: int, *flags: str) -> Iterator[Site]:
    """A front on a cluster of nodes with one CPU each; both end with the context."""
    os.environ |= ALONE
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **HERE}
    )
    process: subprocess.Popen[str] | None = None
    try:
        nodes = [cluster.add_node(num_cpus=1, **HERE) for _ in range(num_nodes)]
        arguments = ["serve", f"tiny={checkpoint}", *KNOBS, "--num-blocks", "256"]
        cluster_flags = ["--cluster", "ray", "--ray-address", cluster.address]
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "infer", *arguments, *cluster_flags, *flags, "--port", "0"],
                stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready: "), log.read_text()
        made = Site(line.removeprefix("ready: ").strip(), log, cluster, {n.node_id[:8]: n for n in nodes})
        yield made
        pids = [pid for pid, _ in made.serving().values()]
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
        assert "SIGTERM received" not in log.read_text()  # Ray's handler, which aborts a drain after 3 s
        wait_until(lambda: not any(map(is_alive, pids)), PATIENCE_S)
    finally:
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()
        if process is not None and process.stdout is not None:
            process.stdout.close()
        cluster.shutdown()


SERVE = """
import sys
import ray
from ray import serve
from infer.ray import app

ray.init(num_cpus=3, include_dashboard=False, _node_ip_address="127.0.0.1")
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[2])})
knobs = {"dtype": "float32", "device": "cpu", "num_threads": 1, "block_size": 4, "num_blocks": 256}
names = {"model": sys.argv[1], "served_model_name": "tiny", "api_key": ["k"]}
serve.run(app({**names, **knobs, "deployment": {"num_replicas": 1}}), route_prefix="/")
print("up", flush=True)
sys.stdin.read()
serve.shutdown()
ray.shutdown()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_application_of_ray_serve_answers_and_streams(checkpoint: str, tmp_path: Path) -> None:
    port = free_port()
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE, checkpoint, str(port)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT,
            env=os.environ | ALONE | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    try:
        lines = iter(process.stdout.readline, "")
        assert any(line.strip() == "up" for line in lines), (tmp_path / "log").read_text()
        url, headers = f"http://127.0.0.1:{port}", {"authorization": "Bearer k"}
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        assert httpx.get(f"{url}/v1/models", timeout=60).status_code == 401
        body = {"model": "tiny", "prompt": "Once", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        whole = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60).json()
        streamed = httpx.post(
            f"{url}/v1/completions", json=body | {"stream": True}, headers=headers, timeout=60
        ).text
        events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()


def test_replicas_are_on_nodes_of_their_own_and_answer_alike(site: Site) -> None:
    assert len({node for _, node in site.serving().values()}) == 2
    answers = {site.ask().json()["choices"][0]["text"] for _ in range(6)}
    assert len(answers) == 1
    assert httpx.get(f"{site.url}/health").status_code == 200
    page = httpx.get(f"{site.url}/metrics").text
    assert 'infer_num_requests_running{replica="0"' in page and 'replica="1"' in page


def test_a_replica_has_the_priority_of_its_node(site: Site) -> None:
    """Ray runs its workers at niceness 15, and what they start inherits that."""
    for pid, _ in site.serving().values():
        assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0)


def test_a_replica_is_closed_to_those_who_do_not_have_the_fronts_key(site: Site) -> None:
    _, url, _, _ = site.lives()[0]
    assert httpx.get(f"{url}/v1/models").status_code == 401


def test_a_killed_replica_costs_the_streams_it_had_and_nothing_else(site: Site) -> None:
    before = site.serving()
    body = {"model": "tiny", "prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
    number_of_lives = len(site.lives())
    with httpx.stream("POST", f"{site.url}/v1/completions", json=body, timeout=120) as stream:
        lines = stream.iter_lines()
        next(lines)
        for pid, _ in before.values():  # both: the stream is on one of them
            os.killpg(pid, signal.SIGKILL)
        rest = [line for line in lines if line.startswith("data: {")]
    ended = json.loads(rest[-1].removeprefix("data: ")) if rest else {}
    assert "error" in ended or ended["choices"][0]["finish_reason"] == "length"  # it may have been quicker
    wait_until(lambda: len(site.lives()) >= number_of_lives + 2 and len(site.serving()) == 2, PATIENCE_S)
    wait_until(lambda: site.ask().status_code == 200, PATIENCE_S)


def test_requests_that_have_not_begun_survive_the_death_of_a_replica(site: Site) -> None:
    number_of_lives = len(site.lives())
    number, (victim, _) = next(iter(site.serving().items()))
    is_busy = re.compile(rf'^infer_num_requests_running\{{replica="{number}".*\}} 1\.0$', re.MULTILINE)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(site.ask, f"{n}", 240) for n in range(16)]
        wait_until(lambda: is_busy.search(httpx.get(f"{site.url}/metrics").text), PATIENCE_S)
        os.killpg(victim, signal.SIGKILL)
        statuses = [each.result().status_code for each in asked]
    assert statuses == [200] * 16
    assert f"replica gone number={number} began=False" in site.log.read_text()
    wait_until(lambda: len(site.lives()) > number_of_lives and len(site.serving()) == 2, PATIENCE_S)


def test_a_queue_adds_a_replica_and_calm_takes_it_away(site: Site) -> None:
    stop = threading.Event()

    def load(number: int) -> None:
        while not stop.is_set():
            site.ask(f"{number}", 200)

    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(load, n) for n in range(12)]
        try:
            wait_until(lambda: len(site.serving()) == 3, PATIENCE_S)
        finally:
            stop.set()
        for each in asked:
            each.result()
    assert "replicas=2 wanted=3" in site.log.read_text()
    wait_until(lambda: len(site.serving()) == 2, PATIENCE_S)
    assert "replicas=3 wanted=2" in site.log.read_text()
    assert site.ask().status_code == 200


def test_a_node_that_is_gone_is_replaced_by_another(site: Site) -> None:
    number, (pid, node) = next(iter(site.serving().items()))
    number_of_lives = len(site.lives())
    site.cluster.remove_node(site.nodes[node], allow_graceful=False)
    wait_until(lambda: len(site.lives()) > number_of_lives, PATIENCE_S)
    again, _, _, elsewhere = site.lives()[-1]
    assert again == number and elsewhere != node
    assert site.ask().status_code == 200
    wait_until(lambda: not is_alive(pid), PATIENCE_S)  # it noticed that its actor is gone


def test_a_group_of_ranks_is_on_several_nodes_until_one_is_large_enough(
    checkpoint: str, tmp_path: Path
) -> None:
    def nodes_of_groups() -> list[str]:
        return re.findall(r"replica serves .* nodes=(\d)", made.log.read_text())

    with LLM(checkpoint, device="cpu", dtype="float32", block_size=4, num_blocks=256) as llm:
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        alone = llm.generate("Once", params)[0].outputs[0].text
    flags = ["--tensor-parallel-size", "2", "--quantization", "fp32"]
    with open_site(checkpoint, tmp_path / "log", 2, *flags) as made:
        assert nodes_of_groups() == ["2"]
        assert made.ask().json()["choices"][0]["text"] == alone
        wait_until(lambda: "all nodes have joined nodes=2" in made.log.read_text(), PATIENCE_S)
        made.cluster.add_node(num_cpus=2, **HERE)
        made.cluster.remove_node(next(iter(made.nodes.values())), allow_graceful=False)
        wait_until(lambda: nodes_of_groups() == ["2", "1"], PATIENCE_S)  # all of it, on the large node
        wait_until(lambda: made.ask().status_code == 200, PATIENCE_S)
        assert made.ask().json()["choices"][0]["text"] == alone
