"""`infer quantize` that is cut short: no part of a model is left, and what was there before is."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import infer.tools.gguf_writer
import infer.tools.quantize
from infer.cli.main import main

OUTS = {"fp8-block": "out", "gguf-q8_0": "deep/out.gguf"}


def cut_short(monkeypatch: pytest.MonkeyPatch, after: int, how: Any) -> None:
    """Let `how` happen when the writer comes to its matrix number `after`."""
    for module, name in (
        (infer.tools.quantize, "quantize_matrix"),
        (infer.tools.gguf_writer, "round_to_blocks"),
    ):
        real, numbers = getattr(module, name), iter(range(1_000))

        def write(*args: Any, real: Any = real, numbers: Any = numbers) -> Any:
            if next(numbers) == after:
                how()
            return real(*args)

        monkeypatch.setattr(module, name, write)


def quantize(*words: str) -> int | str | None:
    """The exit code of the command."""
    try:
        return main(["quantize", *words])
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize("scheme", OUTS)
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_leaves_nothing(
    checkpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scheme: str,
    number: signal.Signals,
    code: int,
) -> None:
    monkeypatch.setattr(infer.tools.quantize, "SHARD_BYTES", 10_000)  # some are written before it ends
    cut_short(monkeypatch, 5, lambda: os.kill(os.getpid(), number))
    before = signal.getsignal(number)
    assert quantize(checkpoint, str(tmp_path / OUTS[scheme]), "--scheme", scheme) == code
    assert not [path for path in tmp_path.rglob("*") if path.name != "deep"]
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("scheme", OUTS)
def test_a_full_disk_leaves_nothing_and_says_so(
    checkpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    scheme: str,
) -> None:
    def fill() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "somewhere")

    cut_short(monkeypatch, 3, fill)
    out = tmp_path / OUTS[scheme]
    assert quantize(checkpoint, str(out), "--scheme", scheme) == 2
    assert f"infer: error: cannot write {out}: No space left on device" in capsys.readouterr().err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()] and not out.exists()


def test_an_empty_directory_of_the_user_stays(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        cut_short(patch, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
        assert quantize(checkpoint, ".", "--scheme", "fp8-block") == 130
        assert tmp_path.is_dir() and not list(tmp_path.iterdir())
    assert quantize(checkpoint, ".", "--scheme", "fp8-block") == 0
    names = {path.name for path in tmp_path.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names and ".unfinished" not in names
