"""Models on demand whose weights stay in host memory: the same process answers again, and as before."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from infer.client.process_client import ProcessClient
from infer.config.server import ServerConfig
from infer.config.settings import EngineConfig
from infer.errors import ConfigError
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request
from tests.support.server_process import ServerProcess, start_server, wait_until


def ask(server: ServerProcess, model: str) -> str:
    body = {"model": model, "prompt": "a b c", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def engines(server: ServerProcess) -> set[int]:
    found = set()
    for child in server.children():
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:  # it has ended
            continue
        found |= {child} if b"infer.client.process" in command else set()
    return found


def test_a_model_comes_back_in_the_process_that_kept_its_weights(checkpoint: str, tmp_path: Path) -> None:
    models = ("--model", f"a={checkpoint}", "--model", f"b={checkpoint}")
    flags = ("--on-demand", "--model-memory", "4GiB", "--admin-key", "root", "--num-blocks", "256")
    with start_server(tmp_path, *models, *flags) as server:
        first = ask(server, "a")
        (pid,) = engines(server)
        assert ask(server, "b") == first
        both = engines(server)
        assert len(both) == 2 and pid in both
        for name in ("a", "b", "a"):
            assert ask(server, name) == first
        assert engines(server) == both
        log = server.log.read_text()
        assert log.count("weights=kept") == 4 and log.count("model loaded model=a") == 3
        again = [line for line in log.splitlines() if "model loaded" in line and "from=host_memory" in line]
        assert len(again) == 3 and not any("load_weights_s" in line for line in again)
        cards = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert {card["id"]: card["state"] for card in cards} == {"a": "loaded", "b": "asleep"}
        page = httpx.get(f"{server.url}/metrics").text
        assert 'infer_model_state{model_name="b",state="asleep"} 1.0' in page
        assert 'infer_model_state{model_name="a",state="asleep"} 0.0' in page
        assert 'infer_model_host_bytes{model_name="b"}' in page
        # a process that ends while asleep is not restarted, and the model is reloaded
        (sleeping,) = both - {pid}
        os.kill(sleeping, signal.SIGKILL)
        wait_until(lambda: engines(server) == {pid})
        assert ask(server, "b") == first
        assert "model reloaded model=b" in server.log.read_text()
        # an unload by the operator forgets the weights, too
        url, key = f"{server.url}/admin/models/unload", {"authorization": "Bearer root"}
        answer = httpx.post(url, json={"name": "a"}, headers=key, timeout=60)
        assert answer.status_code == 200, answer.text
        wait_until(lambda: len(engines(server)) == 1)
        (last,) = engines(server)
    wait_until(lambda: not Path(f"/proc/{last}").exists())


def test_an_engine_that_woke_answers_while_it_frees_its_pinned_memory(checkpoint: str) -> None:
    async def main() -> None:
        client = await ProcessClient.start(EngineConfig.from_knobs(model=checkpoint, num_blocks=256))

        async def answer(request_id: str) -> list[int]:
            params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
            request = Request(request_id=request_id, prompt=(5, 6, 7), params=params)
            return [token async for output in client.generate(request) for token in output.token_ids]

        try:
            first = await answer("a")
            assert len(first) == 16 and await client.sleep(1 << 40) > 0
            assert await client.wake() == 0, "on a CPU the weights stay where they are"
            again, _ = await asyncio.gather(answer("b"), client.drop_pinned())
            assert again == first
        finally:
            await client.close()

    asyncio.run(main())


@pytest.mark.slow  # tests/unit/server/test_on_demand.py has the rules, with scripted engines
def test_models_are_loaded_within_a_budget_of_bytes(checkpoint: str, tmp_path: Path) -> None:
    models = ("--model", f"a={checkpoint}", "--model", f"b={checkpoint}")
    flags = ("--on-demand", "--loaded-memory", "64MiB", "--admin-key", "root", "--num-blocks", "256")
    with start_server(tmp_path, *models, *flags) as server:
        assert ask(server, "a") == ask(server, "b")
        assert len(engines(server)) == 2
        url, key = f"{server.url}/admin/models/load", {"authorization": "Bearer root"}
        body = {"name": "c", "model": checkpoint, "knobs": {"num_blocks": 65536}}
        answer = httpx.post(url, json=body, headers=key, timeout=60)
        assert answer.status_code == 400 and "and loaded_memory is 64MiB" in answer.text, answer.text
        assert len(engines(server)) == 2


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"model_memory": "1GiB"}, "or give on_demand"),
        ({"model_memory": "much", "on_demand": True}, "model_memory must be a size"),
        ({"model_memory": "1KiB", "on_demand": True}, "must be at least 1MiB, got 1KiB"),
        ({"model_memory": "1GiB", "on_demand": True, "in_process": True}, "leave out in_process"),
        ({"model_memory": "1GiB", "on_demand": True, "api_processes": 2}, "leave out api_processes"),
    ],
)
def test_what_cannot_keep_weights_is_refused(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**knobs)
