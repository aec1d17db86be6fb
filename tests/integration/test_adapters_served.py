"""LoRA adapters of a live server: named as models on every API, loaded and unloaded at run time.

The oracle is an `LLM` of a checkpoint into which the adapter was merged. The server has two API processes,
each of which must know what the other was told.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from infer.cli.main import main
from infer.errors import UnknownModel
from infer.frontend.llm import LLM
from infer.sampling.params import SamplingParams
from tests.support.adapters import make_adapter, merge
from tests.support.server_process import ServerProcess, start_server, wait_until

ADMIN = {"authorization": "Bearer root"}
PROMPT = "The quick brown fox"
MESSAGES = [{"role": "user", "content": PROMPT}]
KNOBS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_threads": 1, "num_blocks": 64}


class World(NamedTuple):
    server: ServerProcess
    paths: dict[str, Path]
    texts: dict[str, tuple[str, str]]  # a completion and an answer by adapter, "" is the base model's


@pytest.fixture(scope="module")
def world(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root, params = tmp_path_factory.mktemp("served"), SamplingParams(temperature=0, max_tokens=8)
    paths = {
        name: make_adapter(root / name, Path(checkpoint), seed=n) for n, name in enumerate(("sql", "law"))
    }
    texts = {}
    for name in ("", *paths):
        path = merge(root / f"{name}-merged", Path(checkpoint), paths[name]) if name else checkpoint
        with LLM(path, **KNOBS) as llm:
            texts[name] = llm.generate(PROMPT, params)[0].text, llm.chat(MESSAGES, params)[0].text
    flags = (f"--{key.replace('_', '-')}={value}" for key, value in KNOBS.items())
    lora = ("--lora-modules", f"sql={paths['sql']}", "--max-loras", "3", "--admin-key", "root")
    arguments = (f"tiny={checkpoint}", *flags, "--api-processes", "2", *lora)
    with start_server(root, *arguments) as running:
        yield World(running, paths, texts)


def post(world: World, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    """One request over a connection of its own: either API process may get it."""
    return httpx.post(f"{world.server.url}{path}", json=body, headers=headers, timeout=120)


def complete(world: World, model: str) -> str:
    answer = post(
        world, "/v1/completions", {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == answer.headers["x-infer-model"] == model
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_model_name_chooses_the_adapter_on_every_api(world: World) -> None:
    assert world.texts[""] != world.texts["sql"] != world.texts["law"]
    for model, (text, said) in {"tiny": world.texts[""], "sql": world.texts["sql"]}.items():
        assert complete(world, model) == text
        ask = partial(post, world)
        chat = ask(
            "/v1/chat/completions", {"model": model, "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
        )
        assert chat.json()["choices"][0]["message"]["content"] == said
        claude = ask(
            "/v1/messages", {"model": model, "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
        )
        assert claude.json()["content"][0]["text"] == said
        response = ask(
            "/v1/responses", {"model": model, "input": PROMPT, "max_output_tokens": 8, "temperature": 0}
        )
        assert response.json()["output"][0]["content"][0]["text"] == said
        options = {"num_predict": 8, "temperature": 0}
        ollama = ask("/api/chat", {"model": model, "messages": MESSAGES, "stream": False, "options": options})
        assert ollama.json()["message"]["content"] == said
    vectors = [
        post(world, "/v1/embeddings", {"model": model, "input": PROMPT}).json()["data"][0]["embedding"]
        for model in ("tiny", "sql")
    ]
    assert vectors[0] != vectors[1]


def test_adapters_are_listed_with_their_parent(world: World) -> None:
    cards = {card["id"]: card for card in httpx.get(f"{world.server.url}/v1/models").json()["data"]}
    assert cards["tiny"]["parent"] is None and cards["sql"]["parent"] == "tiny"
    tags = httpx.get(f"{world.server.url}/api/tags").json()["models"]
    parents = {tag["name"]: tag["details"]["parent_model"] for tag in tags}
    assert parents["tiny:latest"] == "" and parents["sql:latest"] == "tiny:latest"


@pytest.mark.parametrize("spelling", ["vllm", "admin"])
def test_load_and_unload_at_run_time(world: World, spelling: str) -> None:
    load = {"lora_name": "law", "lora_path": str(world.paths["law"])}
    routes, unload = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), {"lora_name": "law"}
    if spelling == "admin":
        load = {"name": "law", "path": str(world.paths["law"])}
        routes, unload = ("/admin/adapters/load", "/admin/adapters/unload"), {"name": "law"}
    asked = {"model": "law", "messages": MESSAGES}
    assert post(world, "/v1/chat/completions", asked).status_code == 404
    assert post(world, routes[0], load).status_code == 401
    loaded = post(world, routes[0], load, **ADMIN)
    assert loaded.status_code == 200, loaded.text
    for _ in range(4):
        assert complete(world, "law") == world.texts["law"][0]
    assert post(world, routes[0], load, **ADMIN).status_code == 409
    assert post(world, routes[1], unload).status_code == 401
    assert post(world, routes[1], unload, **ADMIN).status_code == 200
    assert post(world, routes[1], unload, **ADMIN).status_code == 404
    for _ in range(4):
        assert post(world, "/v1/chat/completions", asked).status_code == 404
    assert complete(world, "sql") == world.texts["sql"][0]


def test_adapter_is_replaced_in_place(world: World) -> None:
    for name in ("law", "sql"):
        body = {"lora_name": "law", "lora_path": str(world.paths[name]), "load_inplace": True}
        assert post(world, "/v1/load_lora_adapter", body, **ADMIN).status_code == 200
        assert complete(world, "law") == world.texts[name][0]
    bad = {"lora_name": "law", "lora_path": str(world.paths["law"].parent), "load_inplace": True}
    assert post(world, "/v1/load_lora_adapter", bad, **ADMIN).status_code == 400
    assert complete(world, "law") == world.texts["sql"][0]
    assert post(world, "/v1/unload_lora_adapter", {"lora_name": "law"}, **ADMIN).status_code == 200


def test_bad_loads_are_refused_and_change_nothing(world: World, tmp_path: Path) -> None:
    base = world.paths["sql"]
    for body, status in (
        ({"name": "x", "path": str(tmp_path / "nowhere")}, 400),
        ({"name": "tiny", "path": str(base)}, 409),
        ({"name": "x", "path": str(base), "model": "nobody"}, 404),
        ({"name": "x"}, 400),
    ):
        answer = post(world, "/admin/adapters/load", body, **ADMIN)
        assert answer.status_code == status, answer.text
    for name, path, field in (("tiny", str(base), "lora_name"), ("x", str(tmp_path), "lora_path")):
        answer = post(world, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}, **ADMIN)
        assert answer.json()["error"]["param"] == field
    assert post(world, "/admin/models/alias", {"alias": "sql", "name": "tiny"}, **ADMIN).status_code == 409
    names = {card["id"] for card in httpx.get(f"{world.server.url}/v1/models").json()["data"]}
    assert names == {"tiny", "sql"}


def test_unloading_lets_a_running_request_end(world: World) -> None:
    load = {"lora_name": "law", "lora_path": str(world.paths["law"])}
    assert post(world, "/v1/load_lora_adapter", load, **ADMIN).status_code == 200
    body = {"model": "law", "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    whole = post(world, "/v1/completions", body).json()["choices"][0]["text"]
    with contextlib.ExitStack() as stack:
        streamed = stack.enter_context(
            httpx.stream(
                "POST", f"{world.server.url}/v1/completions", json=body | {"stream": True}, timeout=120
            )
        )
        lines = (line.removeprefix("data: ") for line in streamed.iter_lines() if line.startswith("data: {"))
        pieces = [next(lines)]
        assert post(world, "/v1/unload_lora_adapter", {"lora_name": "law"}, **ADMIN).status_code == 200
        pieces += lines
    texts = [httpx.Response(200, content=piece).json()["choices"] for piece in pieces]
    assert "".join(choices[0]["text"] for choices in texts if choices) == whole


def test_library_and_commands_answer_with_an_adapter(
    world: World, checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM(checkpoint, enable_lora=True, max_loras=1, **KNOBS) as llm:
        llm.load_adapter("law", world.paths["law"])
        assert llm.generate(PROMPT, params, adapter="law")[0].text == world.texts["law"][0]
        assert llm.chat(MESSAGES, params, adapter="law")[0].text == world.texts["law"][1]
        assert llm.generate(PROMPT, params)[0].text == world.texts[""][0]
        with pytest.raises(UnknownModel, match="no adapter 'lwa' is loaded; loaded: law"):
            llm.generate(PROMPT, params, adapter="lwa")
        llm.unload_adapter("law")
        with pytest.raises(UnknownModel):
            llm.generate(PROMPT, params, adapter="law")
    model = ("--model", checkpoint, "--dtype", "float32", "--device", "cpu", "--num-blocks", "64")
    asked = ("generate", "--raw", "--temperature", "0", "--max-tokens", "8", PROMPT, *model)
    capsys.readouterr()
    assert main([*asked, "--lora", str(world.paths["law"])]) == 0
    assert capsys.readouterr().out.strip() == world.texts["law"][0].strip()
    both = [f"{name}={path}" for name, path in world.paths.items()]
    assert main([*asked, "--lora-modules", *both]) == 2
    assert "this command uses one; give one" in capsys.readouterr().err
    assert main([*asked, "--lora", str(world.paths["law"]), "--record", str(tmp_path / "run")]) != 0
    assert "cannot be recorded" in capsys.readouterr().err
    assert main(["plan", *model, "--json", "--lora-modules", *both]) == 0
    planned = json.loads(capsys.readouterr().out)
    with LLM(checkpoint, lora_modules=world.paths, **KNOBS) as llm:
        bank = llm.engine.adapters._bank
        kept = sum(stack.a.nbytes + stack.b.nbytes for stack in bank.stacks.values())
    assert planned["adapters"] == kept > 0
    assert main(["plan", *model, "--lora-modules", *both]) == 0
    assert "room for 8 LoRA adapters" in capsys.readouterr().out


def test_engine_that_is_started_again_gets_its_adapters_back(world: World, tmp_path: Path) -> None:
    """An adapter whose files are gone answers with that, and can be loaded again."""
    shutil.copytree(world.paths["sql"], tmp_path / "gone")
    for name, path in (("law", world.paths["law"]), ("gone", tmp_path / "gone")):
        load = {"lora_name": name, "lora_path": str(path)}
        assert post(world, "/v1/load_lora_adapter", load, **ADMIN).status_code == 200
    shutil.rmtree(tmp_path / "gone")
    engines = [
        child
        for child in world.server.children()
        if b"infer.client.process" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    assert len(engines) == 1
    os.kill(engines[0], signal.SIGKILL)
    asked = {"model": "law", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    wait_until(lambda: post(world, "/v1/completions", asked).status_code == 200, 120)
    assert complete(world, "law") == world.texts["law"][0]
    assert complete(world, "sql") == world.texts["sql"][0]
    assert complete(world, "tiny") == world.texts[""][0]
    answer = post(world, "/v1/completions", asked | {"model": "gone"})
    assert answer.status_code == 500 and "adapter 'gone' could not be loaded" in answer.text, answer.text
    again = {"name": "gone", "path": str(world.paths["sql"]), "replace": True}
    assert post(world, "/admin/adapters/load", again, **ADMIN).status_code == 200
    assert complete(world, "gone") == world.texts["sql"][0]
