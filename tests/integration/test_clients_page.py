"""The Python of docs/clients.md runs, as it stands there, against a live server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.make_checkpoint import make_checkpoint
from tests.integration.test_responses_sdk import import_agents, play
from tests.support.actor import Actor, read_encoder, serve_actor
from tests.support.live_server import LiveServer, serve_model

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
SECTIONS = {
    section.partition("\n")[0]: section.partition("```python\n")[2].partition("```")[0]
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")
    if "```python" in section
}
PACKAGES = {
    "openai": "openai",
    "LangChain": "langchain_openai",
    "LiteLLM": "litellm",
    "anthropic": "anthropic",
    "ollama": "ollama",
}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:pydantic.*")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory = tmp_path_factory.mktemp("tiny-llama")
    make_checkpoint("llama", directory, max_position_embeddings=2048)  # tools take a long prompt
    with serve_model(directory) as server:
        yield server


def run_snippet(section: str, url: str, model: str) -> None:
    code = SECTIONS[section]
    assert "http://127.0.0.1:8000" in code
    code = code.replace("http://127.0.0.1:8000", url).replace("my-model", model)
    exec(compile(code, str(PAGE), "exec"), {})


def test_every_snippet_is_known_here() -> None:
    assert set(SECTIONS) == {*PACKAGES, "openai-agents"}


@pytest.mark.parametrize("section", PACKAGES)
def test_a_snippet_prints_an_answer(
    live: LiveServer, section: str, capsys: pytest.CaptureFixture[str]
) -> None:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # read when it is imported: no network
    pytest.importorskip(PACKAGES[section])
    run_snippet(section, live.url, live.model)
    assert len(capsys.readouterr().out.strip()) > 10


def test_snippet_of_agents_says_what_its_tool_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import_agents()
    encoder = read_encoder("qwen3", tmp_path / "qwen3")
    actor = Actor(encoder, lambda prompt: play(prompt).replace("So.", "So. " * 200))  # a long thought
    with serve_actor(actor, encoder) as url:
        run_snippet("openai-agents", url, "fake")
    assert capsys.readouterr().out.strip() == "It rains in Rome."
