"""What the hub library raises becomes one sentence, and only safe files are asked for."""

from __future__ import annotations

import errno
import fnmatch
import importlib
import logging
import socket
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors
from huggingface_hub.utils.tqdm import are_progress_bars_disabled

from infer.errors import ModelSourceError
from infer.loader.find import hub
from infer.loader.find.hub import UNWANTED, WANTED, check_file, fetch_file, fetch_repository
from infer.tokenizer.directory_vocab import TOOL_TEMPLATE

# The HTTP client of the installed hub library, whichever it is.
http = importlib.import_module(errors.HfHubHTTPError.__mro__[1].__module__.partition(".")[0])
RESPONSE = http.Response(404, request=http.Request("GET", "https://hub.test/x"))


@pytest.fixture(autouse=True)
def _reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "is_reachable", lambda endpoint: True)


@pytest.mark.parametrize("ask", [fetch_repository, fetch_file, check_file])
def test_a_hub_out_of_reach_is_said_at_once_and_the_cache_is_all_that_is_asked(
    ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with socket.socket() as closed:  # bound, and nobody listens
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
        arguments = ("org/name",) if ask is fetch_repository else ("org/name", "config.json")
        progress = {} if ask is check_file else {"show_progress": True}
        with pytest.raises(
            ModelSourceError, match="not in the local hub cache and the hub cannot be reached"
        ):
            ask(*arguments, revision=None, **progress)
    assert capsys.readouterr().err == f"asking {endpoint} for org/name\n"


def is_wanted(name: str) -> bool:
    return any(fnmatch.fnmatch(name, p) for p in WANTED) and not any(
        fnmatch.fnmatch(name, p) for p in UNWANTED
    )


def test_weights_config_and_tokenizer_are_wanted_and_nothing_that_can_run() -> None:
    for name in ("config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        assert is_wanted(name)
    for name in ("tokenizer.json", "tokenizer.model", "generation_config.json", "chat_template.jinja"):
        assert is_wanted(name)
    assert is_wanted("modules.json") and is_wanted("1_Pooling/config.json") and is_wanted(TOOL_TEMPLATE)
    for name in (
        "pytorch_model.bin",
        "model.pt",
        "modeling_custom.py",
        "m.gguf",
        "onnx/config.json",
        "1_Dense/model.safetensors",
        "10/config.json",
        "2_Dense/model.safetensors",
        "original/1_Pooling/config.json",
        "adapter/adapter_config.json",
        "a/config.json",
        "ad/config.json",
        "add_ons/config.json",
        "additional_chat_templates_old/tool_use.jinja",
        "1/config.json",
        "1_Pool/config.json",
        "awq/model.safetensors",
        "a.msgpack",
    ):
        assert not is_wanted(name)
    assert not is_wanted("consolidated.safetensors")  # the same weights twice


@pytest.mark.parametrize(
    ("error", "complaint"),
    [
        (errors.GatedRepoError("gated", response=RESPONSE), "org/name is gated: accept its licence"),
        (errors.RepositoryNotFoundError("404", response=RESPONSE), "knows no public model 'org/name'"),
        (errors.RevisionNotFoundError("404", response=RESPONSE), "has no revision 'v9'"),
        (errors.RemoteEntryNotFoundError("404", response=RESPONSE), "at revision v9 has no file"),
        (errors.LocalEntryNotFoundError("not cached"), "the hub cannot be reached"),
        (errors.HFValidationError("bad id"), "is not a hub id"),
        (
            errors.HfHubHTTPError("500 broken\nmore", response=RESPONSE),
            "refused to give .*: 500 broken; try again",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full .*HF_HOME"),
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied.*HF_HOME"),
        (http.ConnectError("no route"), "no route; check the network"),
    ],
)
def test_a_failed_fetch_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, error: Exception, complaint: str
) -> None:
    def fail(*args: Any, **knobs: Any) -> str:
        raise error

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    level = logging.getLogger("huggingface_hub").level
    with pytest.raises(ModelSourceError, match=complaint):
        fetch_file("org/name", "m.gguf", revision="v9", show_progress=False)
    assert logging.getLogger("huggingface_hub").level == level


def test_offline_is_blamed_when_the_user_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **knobs: Any) -> str:
        raise errors.OfflineModeIsEnabled("offline")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelSourceError, match="not in the local hub cache and HF_HUB_OFFLINE is set"):
        fetch_repository("org/name", revision=None, show_progress=False)


def test_a_bug_is_not_dressed_up_as_a_network_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **knobs: Any) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ZeroDivisionError):
        fetch_repository("org/name", revision=None, show_progress=False)


@pytest.mark.parametrize("show", [True, False])
def test_progress_bars_are_switched_for_the_time_of_the_download(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, show: bool
) -> None:
    seen: list[bool] = []

    def download(repo: str, **knobs: Any) -> str:
        seen.append(not are_progress_bars_disabled())
        patterns = {"allow_patterns": WANTED, "ignore_patterns": UNWANTED}
        assert knobs == {"revision": "v1", "local_files_only": False, **patterns}
        return str(tmp_path)

    before = are_progress_bars_disabled()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub.fetch_repository("org/name", revision="v1", show_progress=show) == tmp_path
    assert seen == [show and not before]
    assert are_progress_bars_disabled() == before


def test_a_hub_is_asked_about_a_file_that_is_not_cached_and_nothing_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached: list[object] = [
        str(tmp_path / "config.json"),
        None,
        object(),
    ]  # here, unknown, known to be missing
    asked: list[str] = []

    def answer(url: str) -> None:
        asked.append(url)
        raise errors.RepositoryNotFoundError("404", response=RESPONSE)

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args, **knobs: cached.pop(0))
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", answer)
    check_file("org/name", "config.json", revision="v1")
    assert asked == []
    for _ in range(2):
        with pytest.raises(ModelSourceError, match="knows no public model 'org/name'"):
            check_file("org/name", "config.json", revision="v1")
    assert len(asked) == 2
    assert asked[0].endswith("/org/name/resolve/v1/config.json")
