"""`infer list` and `infer rm`, on a cache of the hub's library made by hand."""

from __future__ import annotations

import builtins
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infer.loader.find import default_model
from infer.loader.find.source import resolve_model

Infer = Callable[..., Any]
OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a repository with two commits that share a blob; the default one is cached too."""
    cache = tmp_path / "hub"
    repository = cache / "models--org--name"
    for commit, blobs in ((OLD, {"config.json": "c"}), (NEW, {"config.json": "c", "model.safetensors": "w"})):
        for file, blob in blobs.items():
            (repository / "blobs").mkdir(parents=True, exist_ok=True)
            (repository / "blobs" / blob).write_bytes(b"x" * (2000 if blob == "w" else 500))
            (repository / "snapshots" / commit).mkdir(parents=True, exist_ok=True)
            (repository / "snapshots" / commit / file).symlink_to(f"../../blobs/{blob}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(NEW)
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    models = tmp_path / "infer" / "models"
    models.mkdir(parents=True)
    (models / default_model.FILE).write_bytes(b"GGUF" * 300)
    return repository


def test_list_shows_every_cached_revision(infer: Infer, hub: Path) -> None:
    outcome = infer("list")
    assert (outcome.code, outcome.err) == (0, "")
    header, *rows = outcome.out.splitlines()
    assert header.split() == ["NAME", "REVISION", "SIZE", "DOWNLOADED", "PATH"]
    cells = {tuple(row.split()[:3]) for row in rows}
    assert cells == {
        ("org/name", "main", "bbbbbbbb"),
        ("org/name", "aaaaaaaa", "500"),
        ("SmolLM2-135M-Instruct", "-", "1.2"),
    }
    assert all(row.split()[-1].startswith(str(hub.parents[1])) for row in rows)


def test_list_shows_when_a_model_was_downloaded_not_when_its_files_were_read(infer: Infer, hub: Path) -> None:
    for file in (hub / "blobs" / "c", hub / "blobs" / "w", default_model.models_dir() / default_model.FILE):
        os.utime(file, (2e9, 1e9))
    rows = [json.loads(line) for line in infer("list", "--json").out.splitlines()]
    assert [row["downloaded"] for row in rows] == [1e9, 1e9, 1e9]


def test_list_prints_json(infer: Infer, hub: Path) -> None:
    rows = [json.loads(line) for line in infer("list", "--json").out.splitlines()]
    newest = next(row for row in rows if row["revision"] == NEW)
    assert newest.pop("downloaded") > 0
    assert newest == {
        "name": "org/name",
        "revision": NEW,
        "refs": ["main"],
        "num_bytes": 2500,
        "path": str(hub / "snapshots" / NEW),
    }


def test_an_empty_cache_is_said_to_be_empty(
    infer: Infer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path / "none"))
    outcome = infer("list")
    assert (outcome.code, outcome.out) == (0, "") and "no model is cached" in outcome.err
    assert infer("list", "--json").out == ""
    outcome = infer("rm", "org/name", "--yes")
    assert outcome.code == 2 and "no model 'org/name' is cached; the cache is empty" in outcome.err


def test_rm_removes_one_revision_or_all(infer: Infer, hub: Path) -> None:
    outcome = infer("rm", "org/name", "--revision", "main", "--yes")
    assert (outcome.code, outcome.err) == (0, "removed org/name: 2.0 KiB freed\n"), "a shared blob stays"
    assert (hub / "snapshots" / OLD / "config.json").read_bytes() == b"x" * 500
    assert infer("rm", "org/name", "--yes").code == 0
    assert not hub.exists() and hub.parent.exists()
    assert "org/name" not in infer("list").out


def test_rm_removes_the_default_model(infer: Infer, hub: Path) -> None:
    assert "1.2 KiB freed" in infer("rm", default_model.NAME, "--yes").err
    assert not (default_model.models_dir() / default_model.FILE).exists()
    assert (hub / "snapshots" / NEW).is_dir()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["org/nam", "--yes"], "no model 'org/nam' is cached; did you mean 'org/name'?"),
        (["../../hub", "--yes"], "no model '../../hub' is cached; cached are: "),
        (["org/name", "--revision", "v9", "--yes"], "org/name has no one cached revision 'v9'; cached are "),
        (["org/name"], "to remove org/name without a terminal to ask at, add --yes"),
    ],
)
def test_rm_refuses(infer: Infer, hub: Path, arguments: list[str], said: str) -> None:
    outcome = infer("rm", *arguments)
    assert outcome.code == 2 and said in outcome.err
    assert len(infer("list").out.splitlines()) == 4


@pytest.mark.parametrize(("answer", "is_removed"), [("y", True), ("", False), ("no", False)])
def test_rm_asks(
    infer: Infer, hub: Path, monkeypatch: pytest.MonkeyPatch, answer: str, is_removed: bool
) -> None:
    asked: list[str] = []

    def say(question: str) -> str:
        asked.append(question)
        return answer

    monkeypatch.setattr(builtins, "input", say)
    assert infer("rm", "org/name", is_typed=True).code == 0
    assert asked[0].startswith("remove org/name (2 revisions, 2.9 KiB) from ")
    assert hub.exists() != is_removed


def test_the_default_model_answers_to_the_name_that_list_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(default_model, "default_model_file", lambda show_progress: tmp_path / "there")
    assert resolve_model(default_model.NAME).path == tmp_path / "there"
