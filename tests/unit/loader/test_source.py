"""From what the user typed to files on disk, and what is said when there are none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from infer.errors import ConfigError, InferError, ModelSourceError
from infer.loader.find import hub
from infer.loader.find.source import ModelSource, check_model, resolve_model


def make_directory(path: Path, *files: str) -> Path:
    path.mkdir(parents=True)
    for name in files:
        (path / name).write_text("{}")
    return path


def make_gguf(path: Path) -> Path:
    path.write_bytes(b"GGUF rest")
    return path


def refusal(model: str | None, **knobs: Any) -> str:
    with pytest.raises(ModelSourceError) as caught:
        resolve_model(model, show_progress=False, **knobs)
    message = str(caught.value)
    assert not message.endswith(".")
    return message


def test_a_pipe_or_a_device_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "model.gguf"
    os.mkfifo(pipe)
    both_ends = os.open(pipe, os.O_RDWR)
    os.write(both_ends, b"GGUF rest")  # who would read it need not wait
    assert refusal(str(pipe)) == (
        f"{pipe} is a pipe, a socket or a device; give a model directory or a GGUF file"
    )
    os.close(both_ends)
    assert "is a pipe, a socket or a device" in refusal("/dev/zero")


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model-2.safetensors", "chat_template.jinja"]
)
@pytest.mark.parametrize("is_device", [False, True])
def test_a_pipe_or_a_device_inside_a_directory_is_refused_too(
    tmp_path: Path, name: str, is_device: bool
) -> None:
    for each in ("config.json", "model.safetensors"):
        (tmp_path / each).write_text("{}")
    (tmp_path / name).unlink(missing_ok=True)
    if is_device:
        (tmp_path / name).symlink_to("/dev/zero")
    else:
        os.mkfifo(tmp_path / name)
    assert refusal(str(tmp_path)).startswith(
        f"{tmp_path / name} is a pipe, a socket or a device; the files of"
    )


def test_a_directory_is_used_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_directory(tmp_path / "org" / "tiny-llama", "config.json", "model.safetensors")
    assert resolve_model(str(path)) == ModelSource(path=path, name="tiny-llama", is_gguf=False)
    monkeypatch.chdir(tmp_path)  # what exists on disk wins over a hub id of the same spelling
    assert resolve_model("org/tiny-llama").path == Path("org/tiny-llama")
    monkeypatch.chdir(path)
    assert resolve_model(".").name == "tiny-llama"


def test_a_file_is_gguf_by_what_it_holds_not_by_its_name(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "blob")
    assert resolve_model(str(path)) == ModelSource(path=path, name="blob", is_gguf=True)
    (tmp_path / "fake.gguf").write_text("hello")
    assert "not a GGUF file: it begins with b'hell'" in refusal(str(tmp_path / "fake.gguf"))


def test_a_home_directory_may_be_written_as_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    make_gguf(tmp_path / "m.gguf")
    assert resolve_model("~/m.gguf").path == tmp_path / "m.gguf"


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ((), "has no config.json"),
        (("model.safetensors",), "has no config.json"),
        (("m.gguf",), "to run the GGUF file in it, give"),
        (("config.json",), "a config.json but no weights"),
        (("config.json", "pytorch_model.bin"), "only pickle files (*.bin)"),
        (("config.json", "a.pt", "b.ckpt"), "only pickle files (*.pt, *.ckpt)"),
    ],
)
def test_a_directory_that_is_no_checkpoint_is_refused(
    tmp_path: Path, files: tuple[str, ...], complaint: str
) -> None:
    assert complaint in refusal(str(make_directory(tmp_path / "m", *files)))


def test_a_file_of_a_checkpoint_is_not_the_checkpoint(tmp_path: Path) -> None:
    path = make_directory(tmp_path / "m", "config.json", "model.safetensors", "x.bin")
    assert f"give its directory, {path}" in refusal(str(path / "model.safetensors"))
    assert f"give its directory, {path}" in refusal(str(path / "config.json"))
    assert "is a pickle" in refusal(str(path / "x.bin"))


def test_a_misspelt_path_is_answered_with_the_nearest_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_gguf(tmp_path / "smollm.gguf")
    make_directory(tmp_path / "models")
    message = refusal(str(tmp_path / "smolm.gguf"))
    assert "does not look like a hub id" in message
    assert f"did you mean 'smollm.gguf'? (in {tmp_path})" in message
    monkeypatch.chdir(tmp_path)
    assert "did you mean 'models'?" in refusal("model")
    assert "a hub id has the form org/name" in refusal("gpt2")
    assert "the directory /no/such does not exist either" in refusal("/no/such/dir")


@pytest.mark.parametrize(
    "model",
    ["nope/config.json", "nope/a.gguf", "nope/a.safetensors", "./nope", "../nope/x", "/nope", "~/nope"],
)
def test_the_name_of_a_file_is_no_hub_id(model: str) -> None:
    assert (
        f"model {model!r}: there is no such file or directory, and it does not look like a hub id"
        in refusal(model)
    )


@pytest.mark.parametrize("model", ["", "  ", "a\0b"])
def test_nothing_is_not_a_model(model: str) -> None:
    assert "must be a path or a hub id" in refusal(model)


def test_a_path_too_long_to_exist_is_refused() -> None:
    assert "File name too long" in refusal("x" * 5000)


def test_a_revision_needs_a_hub_id(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "m.gguf")
    for model in (str(path), None):
        with pytest.raises(ConfigError, match="belongs to a hub id"):
            resolve_model(model, revision="main")


def test_a_hub_id_is_fetched_at_its_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = make_directory(tmp_path / "abc123", "config.json", "model.safetensors")
    asked: list[Any] = []

    def fetch(repo: str, **knobs: Any) -> Path:
        asked.append((repo, knobs))
        return snapshot

    monkeypatch.setattr(hub, "fetch_repository", fetch)
    monkeypatch.chdir(tmp_path)
    source = resolve_model("org/name.v2", revision="v1.0", show_progress=False)
    assert source == ModelSource(path=snapshot, name="org/name.v2", is_gguf=False)
    assert asked == [("org/name.v2", {"revision": "v1.0", "show_progress": False})]


def test_a_hub_repository_without_safetensors_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = make_directory(tmp_path / "snapshot", "config.json")
    monkeypatch.setattr(hub, "fetch_repository", lambda repo, **knobs: snapshot)
    monkeypatch.chdir(tmp_path)
    assert "org/name holds a config.json but no weights" in refusal("org/name")


def test_one_gguf_file_of_a_hub_repository_can_be_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_gguf(tmp_path / "m-Q4_K.gguf")
    monkeypatch.setattr(hub, "fetch_file", lambda repo, name, **knobs: tmp_path / name)
    monkeypatch.chdir(tmp_path)
    source = resolve_model("org/name:m-Q4_K.gguf", show_progress=False)
    assert source == ModelSource(path=path, name="org/name", is_gguf=True)


def test_a_model_is_checked_without_being_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(hub, "check_file", lambda *args, **knobs: asked.append((*args, knobs)))
    monkeypatch.chdir(tmp_path)
    check_model(None)
    check_model(str(make_gguf(tmp_path / "m.gguf")))
    assert asked == []
    check_model("org/name", revision="v1")
    check_model("org/name:a.gguf")
    assert asked == [
        ("org/name", "config.json", {"revision": "v1"}),
        ("org/name", "a.gguf", {"revision": None}),
    ]
    for model, revision in (("nope", None), ("./m.gguf", "v1"), (None, "v1"), ("", None)):
        with pytest.raises(InferError) as checked:
            check_model(model, revision=revision)
        with pytest.raises(InferError) as resolved:
            resolve_model(model, revision=revision)
        assert str(checked.value) == str(resolved.value)
    assert refusal("nope").endswith("; check the spelling, or leave it out")


def test_a_snapshot_of_a_hub_has_the_commit_as_its_revision(tmp_path: Path) -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    for path, revision in [
        (tmp_path / "models--org--name" / "snapshots" / commit, commit),
        (tmp_path / "models--org--name" / "snapshots" / commit / "model.gguf", commit),
        (tmp_path / "snapshots" / "main", None),
        (tmp_path / commit, None),
    ]:
        assert ModelSource(path=path, name="org/name", is_gguf=False).revision == revision
    assert ModelSource(path=tmp_path, name="m", is_gguf=True, sha256="ab").revision == "sha256:ab"
