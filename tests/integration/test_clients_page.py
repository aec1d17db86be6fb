"""The Python of docs/clients.md runs, as it stands there, against a live server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.make_checkpoint import make_checkpoint
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
    "openai-agents": "agents",
}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory = tmp_path_factory.mktemp("tiny-llama")
    make_checkpoint("llama", directory, max_position_embeddings=2048)  # tools take a long prompt
    with serve_model(directory) as server:
        yield server


def test_every_snippet_is_known_here() -> None:
    assert set(SECTIONS) == set(PACKAGES)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:pydantic.*")
@pytest.mark.parametrize("section", PACKAGES)
def test_a_snippet_prints_an_answer(
    live: LiveServer, section: str, capsys: pytest.CaptureFixture[str]
) -> None:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # read when it is imported: no network
    package = pytest.importorskip(PACKAGES[section])
    if section == "openai-agents":
        try:
            package.Usage()
        except ValueError as error:  # it makes records of the openai package, which asks for more by now
            pytest.skip(f"this openai-agents does not fit this openai: {error!s:.80}")
    code = SECTIONS[section]
    assert "http://127.0.0.1:8000" in code
    code = code.replace("http://127.0.0.1:8000", live.url).replace("my-model", live.model)
    exec(compile(code, str(PAGE), "exec"), {})
    assert len(capsys.readouterr().out.strip()) > 10
