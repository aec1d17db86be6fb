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
from infer.frontend.prompts import open_model
from infer.loader.find import default_model
from infer.loader.find.source import resolve_model
from infer.loader.load import read_headers
from scripts.make_checkpoint import make_checkpoint
from tests.support.fetched import fetched_model
from tests.support.wire import Wire, make_state

ADVICE = {"temperature": 1.5, "top_k": 1}
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


def test_the_default_model_has_the_advice_of_its_authors_wherever_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_model, "FILE_SIZE", 4)
    for name, content, expected in [
        (default_model.FILE, b"GGUF", {"temperature": 0.2, "top_p": 0.9}),
        (default_model.FILE, b"GGUF and more", {}),
        ("other.gguf", b"GGUF", {}),
    ]:
        (tmp_path / name).write_bytes(content)
        assert default_model.sampling_of(tmp_path / name) == expected


def test_the_default_model_is_read_with_that_advice() -> None:
    path = fetched_model()
    for model in (None, str(path)):
        assert read_headers(resolve_model(model)).defaults.sampling == {"temperature": 0.2, "top_p": 0.9}
