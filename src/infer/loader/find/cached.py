"""The models that were downloaded to this disk: the default model, and those in the hub library's cache.

`huggingface_hub` knows its cache: which repositories are in it, at which commits, and which blobs can be
deleted with a commit. Models that other programs have downloaded are listed too; they share the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from infer.errors import ModelSourceError, closest
from infer.loader.find import default_model

if TYPE_CHECKING:
    from huggingface_hub import HFCacheInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel:
    """One model, or one commit of it."""

    name: str
    revision: str | None  # commit; None: the default model, which has only one
    refs: tuple[str, ...]  # branches and tags of this commit
    num_bytes: int
    downloaded: float  # seconds since 1970
    path: Path


def cached_models() -> list[CachedModel]:
    """Return the cached models by name, for each name the commit downloaded last first."""
    models = [*_default(), *_of_hub(_scan())]
    return sorted(models, key=lambda model: (model.name.casefold(), -model.downloaded))


def find_cached(name: str, revision: str | None = None) -> list[CachedModel]:
    """Return a model's cached commits, or the one that `revision` names; raises an error if there is none."""
    models = cached_models()
    found = [model for model in models if model.name == name]
    if not found:
        known = dict.fromkeys(model.name for model in models)
        hint = closest(name, known, listed="cached are") if known else "; the cache is empty"
        raise ModelSourceError(f"no model {name!r} is cached{hint}")
    if revision is None:
        return found
    chosen = [
        model for model in found if revision in model.refs or (model.revision or "").startswith(revision)
    ]
    if len(chosen) != 1:
        listed = ", ".join(_spell(model) for model in found)
        raise ModelSourceError(f"{name} has no one cached revision {revision!r}; cached are {listed}")
    return chosen


def remove_cached(models: Sequence[CachedModel]) -> int:
    """Delete these models from the cache, and return the number of bytes freed."""
    freed = 0
    for model in models:
        if model.revision is None:
            try:
                model.path.unlink()
            except OSError as error:
                raise ModelSourceError(f"cannot remove {model.path}: {error.strerror}") from None
            freed += model.num_bytes
    cache = _scan() if any(model.revision is not None for model in models) else None
    for repo in () if cache is None else cache.repos:  # one at a time: commits may occur in several
        commits = [model.revision for model in models if model.name == repo.repo_id and model.revision]
        if cache is not None and repo.repo_type == "model" and commits:
            strategy = replace(cache, repos=frozenset({repo})).delete_revisions(*commits)
            strategy.execute()
            freed += strategy.expected_freed_size
    return freed


def _spell(model: CachedModel) -> str:
    return " or ".join([*model.refs, (model.revision or "")[:8]])


def _default() -> list[CachedModel]:
    path = default_model.models_dir() / default_model.FILE
    if not path.is_file():
        return []
    facts = path.stat()
    name, at = default_model.NAME, facts.st_mtime
    return [CachedModel(name=name, revision=None, refs=(), num_bytes=facts.st_size, downloaded=at, path=path)]


def _scan() -> HFCacheInfo | None:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return scan_cache_dir()
    except CacheNotFound:
        return None


def _of_hub(cache: HFCacheInfo | None) -> list[CachedModel]:
    repositories = [] if cache is None else [repo for repo in cache.repos if repo.repo_type == "model"]
    return [
        CachedModel(
            name=repo.repo_id,
            revision=commit.commit_hash,
            refs=tuple(sorted(commit.refs)),
            num_bytes=commit.size_on_disk,
            downloaded=commit.last_modified,
            path=commit.snapshot_path,
        )
        for repo in repositories
        for commit in repo.revisions
    ]
