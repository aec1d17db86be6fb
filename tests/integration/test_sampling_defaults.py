"""A model's own sampling defaults hold in the library, on the command line and over HTTP; a given value wins.

The model here advises `top_k=1`, so that its defaults give the greedy text and nothing else does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infer import LLM, SamplingParams
from infer.cli.main import main
from infer.client.client import InProcessClient
from infer.engine.build import build_engine
from infer.frontend.open_model import open_model
from infer.loader.find import default_model
from infer.loader.find.source import resolve_model
from infer.loader.headers import read_headers
from scripts.make_checkpoint import make_checkpoint
from tests.support.fetched import fetched_model
from tests.support.wire import Wire, make_state

ADVICE = {"temperature": 1.5, "top_k": 1}
GREEDY = {"temperature": 0.0, "top_p": 0.9}  # sampling defaults of the packaged default model
WILD = {"temperature": 2.0, "top_k": 0, "seed": 7}
PROMPT = "once upon"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("advised") / "llama"
    make_checkpoint("llama", directory)
    path = directory / "generation_config.json"
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(config | {"do_sample": True} | ADVICE))
    return str(directory)


@pytest.fixture(scope="module")
def llm(model: str) -> LLM:
    return LLM(model, device="cpu")


@pytest.fixture(scope="module")
def greedy(llm: LLM) -> str:
    return llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12))[0].text


@pytest.fixture(scope="module")
def wire(llm: LLM) -> Iterator[Wire]:
    _, loaded = open_model(llm.config, show_progress=False)
    client = InProcessClient(build_engine(llm.config, loaded))
    yield Wire(make_state(llm.encoder, client))
    asyncio.run(client.close())


def test_the_library_samples_as_the_model_advises(llm: LLM, greedy: str) -> None:
    assert llm.sampling_params(max_tokens=12) == SamplingParams(max_tokens=12, **ADVICE)  # type: ignore[arg-type]
    for given in ({}, {"temperature": None}):
        assert llm.generate(PROMPT, llm.sampling_params(max_tokens=12, **given))[0].text == greedy
    assert llm.generate(PROMPT)[0].text.startswith(greedy)
    assert llm.generate(PROMPT, llm.sampling_params(max_tokens=12, **WILD))[0].text != greedy


def test_the_command_line_samples_as_the_model_advises(
    model: str, greedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", PROMPT, "--model", model, "--device", "cpu", "--max-tokens", "12", "--raw"]
    assert main(command) == 0
    assert capsys.readouterr().out == f"{greedy}\n"
    assert main([*command, "--temperature", "2", "--top-k", "0", "--seed", "7"]) == 0
    assert capsys.readouterr().out != f"{greedy}\n"


def test_a_server_samples_as_the_model_advises_and_says_so(wire: Wire, greedy: str) -> None:
    def text(**fields: Any) -> str:
        body = {"prompt": PROMPT, "max_tokens": 12} | fields
        answer: str = wire.ok("/v1/completions", body)["choices"][0]["text"]
        return answer

    assert text() == text(temperature=None, top_k=None) == greedy
    assert text(**WILD) != greedy
    (card,) = wire.get("/v1/models").json()["data"]
    assert card["default_sampling_params"] == ADVICE


def test_the_default_model_is_greedy_wherever_its_file_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_model, "FILE_SIZE", 4)
    for name, content, expected in [
        (default_model.FILE, b"GGUF", GREEDY),
        (default_model.FILE, b"GGUF and more", {}),
        ("other.gguf", b"GGUF", {}),
    ]:
        (tmp_path / name).write_bytes(content)
        assert default_model.sampling_of(tmp_path / name) == expected


def test_the_default_model_is_read_with_these_defaults() -> None:
    path = fetched_model()
    for model in (None, str(path)):
        assert read_headers(resolve_model(model)).defaults.sampling == GREEDY


def test_the_default_model_answers_greedily_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    fetched_model()
    llm = LLM(device="cpu", num_threads=1, num_blocks=64)
    question, most = "What is the capital of France?", 12
    messages = [{"role": "user", "content": question}]
    greedy = llm.chat(messages, SamplingParams(temperature=0, max_tokens=most))[0].text
    assert llm.sampling_params(max_tokens=most) == SamplingParams(max_tokens=most, **GREEDY)  # type: ignore[arg-type]
    assert llm.chat(messages, llm.sampling_params(max_tokens=most))[0].text == greedy
    assert llm.chat(messages)[0].text.startswith(greedy)
    assert main(["generate", question, "--device", "cpu", "--max-tokens", str(most)]) == 0
    assert capsys.readouterr().out == f"{greedy}\n"

    client = InProcessClient(llm.engine)
    wire = Wire(make_state(llm.encoder, client))
    (card,) = wire.get("/v1/models").json()["data"]
    assert card["default_sampling_params"] == GREEDY
    asked = {"messages": messages, "max_tokens": most}
    chat = wire.ok("/v1/chat/completions", asked)
    assert chat["choices"][0]["message"]["content"] == greedy
    assert wire.ok("/v1/messages", asked)["content"][0]["text"] == greedy
    response = wire.ok("/v1/responses", {"input": question, "max_output_tokens": most})
    assert response["output"][0]["content"][0]["text"] == greedy
    assert response["temperature"] == 0
    hot = wire.ok("/v1/chat/completions", asked | {"temperature": 2, "top_p": 1, "seed": 7})
    assert hot["choices"][0]["message"]["content"] != greedy
    response = wire.ok("/v1/responses", {"input": question, "max_output_tokens": 1, "temperature": 0.7})
    assert (response["temperature"], response["top_p"]) == (0.7, 0.9)
    asyncio.run(client.close())
