"""Fetch a model from the Hugging Face hub: weights, config and tokenizer, nothing that can run.

`huggingface_hub` does the work (cache, resume, parallel files, progress bars, tokens, mirrors by
HF_ENDPOINT). This file chooses the files, pins the revision and turns that library's many exceptions
into clear messages. A branch name is resolved to one commit before the first file is fetched, so the
files always belong together even if the branch moves meanwhile.
"""

from __future__ import annotations

import errno
import logging
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path

from infer.errors import ModelSourceError
from infer.loader.find.default_model import is_offline

# Nearly all needed files are at the root of a repository; other folders hold other formats (onnx, original).
FOLDERS = ("1_Pooling", "1_LogitScore", "additional_chat_templates")
WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
REACH_S = 5.0  # timeout of the hub's answer, in seconds


def _in_other_folders() -> Iterator[str]:
    """Yield patterns for the files of all folders but FOLDERS: by where their names part, and shorter ones.

    The library's patterns have no "not this word", and their `*` matches slashes as well.
    """
    for start in sorted({name[:length] for name in FOLDERS for length in range(len(name) + 1)}):
        following = {name[len(start) :][:1] or "/" for name in FOLDERS if name.startswith(start)}
        yield f"{start}[!{''.join(sorted(following))}]*/*"
        if start not in ("", *FOLDERS):
            yield f"{start}/*"


# consolidated.safetensors: the same weights again, in another layout
UNWANTED = [*_in_other_folders(), "consolidated*"]


def fetch_repository(repo: str, *, revision: str | None, show_progress: bool) -> Path:
    """Return the local snapshot of `repo` at one commit, downloading files that are not cached."""
    from huggingface_hub import snapshot_download

    with _sentences(repo, revision), _progress_bars(show_progress):
        is_local = _is_out_of_reach(repo, says_so=show_progress)
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=WANTED,
                ignore_patterns=UNWANTED,
                local_files_only=is_local,
            )
        )


def fetch_file(repo: str, name: str, *, revision: str | None, show_progress: bool) -> Path:
    """Return the local copy of one file of `repo`."""
    from huggingface_hub import hf_hub_download

    with _sentences(repo, revision, name), _progress_bars(show_progress):
        is_local = _is_out_of_reach(repo, says_so=show_progress)
        return Path(hf_hub_download(repo, name, revision=revision, local_files_only=is_local))


def check_file(repo: str, name: str, *, revision: str | None) -> None:
    """Raise the error that `fetch_file` would; asks the hub once, or not at all if the file is cached."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import LocalEntryNotFoundError

    with _sentences(repo, revision, name):
        if not isinstance(try_to_load_from_cache(repo, name, revision=revision), str):
            if _is_out_of_reach(repo, says_so=True):
                raise LocalEntryNotFoundError(repo)
            get_hf_file_metadata(hf_hub_url(repo, name, revision=revision))


def _is_out_of_reach(repo: str, *, says_so: bool) -> bool:
    """Return True if the hub does not answer; its library would retry for half a minute."""
    from huggingface_hub.constants import ENDPOINT

    if is_offline():
        return False  # the library handles offline mode and reports it
    if says_so:
        print(f"asking {ENDPOINT} for {repo}", file=sys.stderr, flush=True)
    return not is_reachable(ENDPOINT)


def is_reachable(endpoint: str) -> bool:
    """Return True if a server answers within seconds, with any status; proxies are used as usual."""
    answers: list[bool] = []

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=REACH_S).close()
        except (OSError, HTTPException) as error:
            answers.append(isinstance(error, urllib.error.HTTPError))
        else:
            answers.append(True)

    asking = threading.Thread(target=ask, daemon=True)  # a thread: DNS lookups ignore the timeout
    asking.start()
    asking.join(REACH_S)
    return answers == [True]


@contextmanager
def _progress_bars(show: bool) -> Iterator[None]:
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if show or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


_HTTP_LIBRARIES = ("httpx", "httpcore", "requests", "urllib3")
_NOT_CACHED = "{what} is not in the local hub cache and {reason}, or give a local directory"
_SENTENCES = {  # message by the class name of an exception; the first entry that fits is used
    "GatedRepoError": "{repo} is gated: accept its licence on the hub's page of the model, then log in with "
    "`hf auth login` or set HF_TOKEN",
    "RepositoryNotFoundError": "the hub knows no public model {repo!r}; check the spelling (org/name), or "
    "log in with `hf auth login` if it is private; there is no local directory of that name either",
    "RevisionNotFoundError": "{repo} has no revision {revision!r}; give a branch, tag or commit that exists",
    "LocalEntryNotFoundError": _NOT_CACHED,  # not cached, and the network is missing or not allowed
    "EntryNotFoundError": "{what} has no file {file!r}; look at the file list on the hub",
    "HFValidationError": "{repo!r} is not a hub id of the form org/name: {error}",
    "OfflineModeIsEnabled": _NOT_CACHED,
    "HfHubHTTPError": "the hub refused to give {what}: {first_line}; try again later",
    "OSError": "cannot fetch {what}: {error}; check the network and the cache directory (HF_HOME)",
}
_DISK_FULL = "the disk is full while fetching {what}; free some space or set HF_HOME to another disk"
_NO_NETWORK = "cannot fetch {what}: {error}; check the network and proxy"


@contextmanager
def _sentences(repo: str, revision: str | None, file: str | None = None) -> Iterator[None]:
    """Turn the hub library's exceptions into a `ModelSourceError`."""
    quiet = logging.getLogger("huggingface_hub")
    level = quiet.level
    quiet.setLevel(logging.ERROR)  # its warnings repeat what the message says
    try:
        yield
    except Exception as error:
        names = {kind.__name__ for kind in type(error).__mro__}
        sentence = next((said for name, said in _SENTENCES.items() if name in names), None)
        if sentence is None and type(error).__module__.startswith(_HTTP_LIBRARIES):
            sentence = _NO_NETWORK
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            sentence = _DISK_FULL
        if sentence is None:
            raise
        facts = {"repo": repo, "revision": revision, "file": file, "error": error}
        facts["what"] = f"{repo} at revision {revision}" if revision else repo
        facts["first_line"] = str(error).partition("\n")[0]
        facts["reason"] = "the hub cannot be reached; check the network and proxy"
        if is_offline():
            facts["reason"] = "HF_HUB_OFFLINE is set; unset it once to download the model"
        raise ModelSourceError(sentence.format(**facts)) from None
    finally:
        quiet.setLevel(level)
