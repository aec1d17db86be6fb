"""Find the files of a model that the user names, fetching them if needed.

    None, or its name           the default model, fetched once        default_model.py
    path of a directory         config.json + *.safetensors            used where it lies
    path of a file              GGUF                                   used where it lies
    org/name                    a hub repository, all of it            hub.py
    org/name:file.gguf          one GGUF file of a hub repository      hub.py

A path on disk takes precedence: `org/name` is only looked up on the hub if there is no such directory. Pickle
files (`*.bin`, `*.pt`) are never downloaded and never opened, because opening a pickle can run code in it.

`check_model` makes the same checks without fetching anything, so that a server can refuse a wrong name before
it binds a port.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from infer.errors import ConfigError, ModelSourceError, closest
from infer.loader.find import default_model

GGUF_MAGIC = b"GGUF"

_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w][\w.-]*)(?::(?P<file>[^:]+\.gguf))?", re.ASCII)
_COMMIT = re.compile("[0-9a-f]{40}")
_FILES = (".gguf", ".json", ".safetensors")  # a name with one of these endings is a file, not a repository
_READ = (*_FILES, ".jinja", ".txt")  # files of a model directory that are opened
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model that is on this disk: a checkpoint directory or one GGUF file."""

    path: Path
    name: str  # its name in the API and in messages
    is_gguf: bool
    sha256: str = ""  # hash of the file, if it was checked

    @property
    def revision(self) -> str | None:
        """The commit of a hub's snapshot, or the hash of the default model; None: unknown."""
        folder, _, inner = self.path.as_posix().rpartition("/snapshots/")
        commit = inner.partition("/")[0]
        if folder and _COMMIT.fullmatch(commit):
            return commit
        return f"sha256:{self.sha256}" if self.sha256 else None

    @property
    def weight_files(self) -> list[Path]:
        """The files of its weights, in the order in which they are loaded."""
        return [self.path] if self.is_gguf else sorted(self.path.glob("*.safetensors"))


def resolve_model(
    model: str | None, *, revision: str | None = None, show_progress: bool = True
) -> ModelSource:
    """Find `model` on disk, or download it; every failure is a `ModelSourceError` that says what to do."""
    if _is_default(model):
        _refuse_revision(revision, "the default model has only one")
        file = default_model.default_model_file(show_progress=show_progress)
        sha256 = default_model.FILE_SHA256
        return ModelSource(path=file, name=default_model.NAME, is_gguf=True, sha256=sha256)
    assert model is not None
    found = _find(model, revision)
    if isinstance(found, ModelSource):
        return found

    from infer.loader.find import hub

    repo, file_name = found
    if file_name is not None:
        file = hub.fetch_file(repo, file_name, revision=revision, show_progress=show_progress)
        return ModelSource(path=_checked_gguf(file), name=repo, is_gguf=True)
    directory = hub.fetch_repository(repo, revision=revision, show_progress=show_progress)
    return ModelSource(path=_checked_directory(directory, repo), name=repo, is_gguf=False)


def check_model(model: str | None, *, revision: str | None = None) -> None:
    """Refuse a model that `resolve_model` would not find; asks a hub at most once, and fetches nothing."""
    if _is_default(model):
        _refuse_revision(revision, "the default model has only one")
        return
    assert model is not None
    found = _find(model, revision)
    if not isinstance(found, ModelSource):
        from infer.loader.find import hub

        repo, file_name = found
        hub.check_file(repo, file_name or "config.json", revision=revision)


def _is_default(model: str | None) -> bool:
    """Return True if the default model is meant: no name, or its own name where no such file exists."""
    return model is None or (model == default_model.NAME and not _exists(Path(model)))


def _find(model: str, revision: str | None) -> ModelSource | tuple[str, str | None]:
    """Return the model on this disk, or a hub repository and the one file of it that is wanted."""
    if not model.strip() or "\0" in model:
        raise ModelSourceError(f"model must be a path or a hub id (org/name), got {model!r}")
    path = Path(os.path.expanduser(model))
    if _exists(path):
        _refuse_revision(revision, f"{model!r} is a local path")
        return _local(path)
    hub_id = read_hub_id(model)
    if hub_id is None:
        raise _no_such_path(model, path)
    return hub_id


def read_hub_id(model: str) -> tuple[str, str | None] | None:
    """Return the repository that a name means, and the file if it names one; None: it can only be a path."""
    match = _HUB_ID.fullmatch(model)
    if match is None or (match["file"] is None and model.endswith(_FILES)):
        return None
    return match["repo"], match["file"]


def _refuse_revision(revision: str | None, reason: str) -> None:
    if revision is not None:
        raise ConfigError(f"revision is {revision!r}, but {reason}; it belongs to a hub id (org/name)")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:  # the name is too long, or a directory is not accessible
        raise ModelSourceError(f"cannot access {path}: {error.strerror}") from None


def _local(path: Path) -> ModelSource:
    if path.is_dir():
        name = path.resolve().name or str(path)
        return ModelSource(path=_checked_directory(path, str(path)), name=name, is_gguf=False)
    if not path.is_file():  # reading from a pipe would block until there is a writer
        raise ModelSourceError(
            f"{path} is a pipe, a socket or a device; give a model directory or a GGUF file"
        )
    return ModelSource(path=_checked_gguf(path), name=path.stem, is_gguf=True)


def _checked_directory(path: Path, shown: str) -> Path:
    """Refuse a directory that cannot be a checkpoint, with a message about what it seems to be instead."""
    try:
        entries = sorted(path.iterdir())
    except OSError as error:
        raise ModelSourceError(f"cannot read the model directory {shown}: {error.strerror}") from None
    names = [entry.name for entry in entries]
    for entry in entries:  # reading from a pipe would block until there is a writer
        if entry.suffix in _READ and not entry.is_dir() and entry.exists() and not entry.is_file():
            raise ModelSourceError(
                f"{entry} is a pipe, a socket or a device; the files of a model directory must be plain files"
            )
    ggufs = [name for name in names if name.endswith(".gguf")]
    if "config.json" not in names:
        advice = f"; to run the GGUF file in it, give {path / ggufs[0]}" if ggufs else ""
        raise ModelSourceError(f"{shown} has no config.json, so it is not a model directory{advice}")
    if not any(name.endswith(".safetensors") for name in names):
        pickles = [pattern for pattern in _PICKLES if any(path.glob(pattern))]
        reason = (
            f"only pickle files ({', '.join(pickles)}), which can run code when opened and are refused "
            "(scripts/unpickle.py converts tensors alone)"
            if pickles
            else "a config.json but no weights"
        )
        raise ModelSourceError(f"{shown} holds {reason}; a model directory needs *.safetensors files")
    return path


def _checked_gguf(path: Path) -> Path:
    """Refuse a file that does not begin like a GGUF file; its contents are checked when it is read."""
    try:
        with open(path, "rb") as handle:
            magic = handle.read(4)
    except OSError as error:
        raise ModelSourceError(f"cannot read {path}: {error.strerror}") from None
    if magic == GGUF_MAGIC:
        return path
    if path.suffix == ".safetensors" or path.name == "config.json":
        raise ModelSourceError(f"{path} is one file of a model directory; give its directory, {path.parent}")
    if any(path.match(pattern) for pattern in _PICKLES):
        raise ModelSourceError(
            f"{path} is a pickle file, which can run code when opened; safetensors is needed "
            "(scripts/unpickle.py converts tensors alone)"
        )
    raise ModelSourceError(f"{path} is not a GGUF file: it begins with {magic!r}, not with {GGUF_MAGIC!r}")


def _no_such_path(model: str, path: Path) -> ModelSourceError:
    is_bare = "/" not in model and not model.endswith(_FILES)
    reason = (
        "a hub id has the form org/name"
        if is_bare
        else "it does not look like a hub id (org/name or org/name:file.gguf)"
    )
    advice = nearest_sibling(path) or "; check the spelling, or leave it out"
    return ModelSourceError(f"model {model!r}: there is no such file or directory, and {reason}{advice}")


def nearest_sibling(path: Path) -> str:
    """Return the end of a message about a missing path: the closest existing name, or the missing parent."""
    try:
        siblings = [entry.name for entry in path.parent.iterdir() if not entry.name.startswith(".")]
    except OSError:
        return f"; the directory {path.parent} does not exist either"
    match = closest(path.name, siblings)
    return match and f"{match} (in {path.parent.resolve()})"
