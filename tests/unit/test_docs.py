"""The docs are true: links lead somewhere, generated pages are fresh, code in the README runs."""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest

import infer
from infer.cli.main import build_parser
from infer.sampling.params import SamplingParams

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def pages() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def links(page: Path) -> Iterator[str]:
    """The relative links of a page, without those in code."""
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))
    for target in LINK.findall(text):
        if not re.match(r"[a-z]+:", target):
            yield target


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as links spell them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for link in links(page):
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_named_in_the_docs_exists(page: Path) -> None:
    named = re.findall(r"`((?:src|tests|scripts|benchmarks|docs)/[\w./-]+\.\w+)`", page.read_text("utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_generated_pages_are_fresh() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/docs.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_python_in_the_docs_compiles(page: Path) -> None:
    for language, code in FENCE.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            compile(inspect.cleandoc(code), str(page), "exec")


def test_python_in_the_readme_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against a stand-in with the signatures of the real LLM and the real result types."""
    from infer.frontend.llm import LLM, CompletionOutput, RequestOutput, TextDelta

    output = create_autospec(RequestOutput, instance=True, text="whole text")
    output.outputs = [create_autospec(CompletionOutput, instance=True, finish_reason="stop")]
    fake: Any = create_autospec(LLM)
    fake.return_value.generate.side_effect = lambda prompts, params: [output for _ in prompts]
    fake.return_value.chat.return_value = [output]
    fake.return_value.stream_chat.return_value = [TextDelta(text="piece", token_ids=(1,), finish_reason=None)]
    monkeypatch.setattr(infer, "LLM", fake, raising=False)
    blocks = [
        code
        for language, code in FENCE.findall((ROOT / "README.md").read_text("utf-8"))
        if language == "python"
    ]
    assert blocks
    for code in blocks:
        exec(compile(code, "README.md", "exec"), {})
    prompts, params = fake.return_value.generate.call_args.args
    assert isinstance(params, SamplingParams)
    assert capsys.readouterr().out.count("whole text") == len(prompts) + 1


def test_commands_in_the_readme_are_understood_by_the_parser() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^\.venv/bin/infer (.*)$", text, re.MULTILINE)
    assert len(commands) >= 3
    for command in commands:
        build_parser().parse_args(shlex.split(command, comments=True))


def test_commands_in_the_docs_can_be_typed_as_they_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    parser, num_commands = build_parser(), 0
    for page in pages():
        blocks = FENCE.findall(page.read_text(encoding="utf-8"))
        lines = [
            line
            for language, code in blocks
            if language in ("", "sh")
            for line in code.replace("\\\n", "").splitlines()
        ]
        for line in lines:
            words = shlex.split(line, comments=True) if re.match(r"infer [a-z]", line) else []
            end = next((place for place, word in enumerate(words) if word in ("|", ">", "<", "&")), None)
            try:
                parser.parse_args(words[1:end])
            except SystemExit as refused:
                assert refused.code == 0, f"{page.name}: {line}: {capsys.readouterr().err}"
            num_commands += bool(words)
    assert num_commands > 100


def test_make_targets_in_the_docs_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in pages():
        named = set(re.findall(r"`make ([a-z-]+)`|^make ([a-z-]+)", page.read_text("utf-8"), re.MULTILINE))
        assert {name for pair in named for name in pair if name} <= targets


def test_every_page_of_a_feature_is_linked_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    features = sorted((ROOT / "docs" / "features").glob("*.md"))
    assert [page.name for page in features if f"(docs/features/{page.name}" not in text] == []


def test_status_422_is_named_only_where_the_completions_are() -> None:
    """Every other route answers 400; Ollama's page says that it has no 422 of its own."""
    for page in sorted((ROOT / "docs" / "features").glob("*.md")):
        if page.name in ("gpu.md", "quantization.md", "ollama-api.md"):  # tokens per second; no 422
            continue
        for line in page.read_text(encoding="utf-8").splitlines():
            in_column = page.name == "openai-api.md" and line.startswith("|")  # the completions' own
            if re.search(r"\b422\b", line) and not in_column:
                assert "/v1/completions" in line, f"{page.name}: {line[:120]}"
