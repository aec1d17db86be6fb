from __future__ import annotations

import argparse
import functools
import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from infer.cli import asking
from infer.cli import main as command_line
from infer.cli.flags import knobs_from
from infer.cli.main import build_parser, main
from tests.unit.cli.fake_llm import FakeLLM


@pytest.fixture(autouse=True, scope="session")
def _parsers_built_once() -> Iterator[None]:
    """Let the runs of one command share its parser: building it takes longer than most of them."""

    @functools.cache
    def build(commands: tuple[str, ...]) -> argparse.ArgumentParser:
        return build_parser(commands)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command_line, "build_parser", lambda commands: build(tuple(commands)))
        yield


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str
    llm: FakeLLM


class Typed(io.StringIO):
    """Standard input that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def infer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run `infer ARGUMENTS` in this process on a fake model; `stdin` is piped in, or typed."""

    def run(*arguments: str, stdin: str | bytes = "", is_typed: bool = False, **fake: Any) -> Outcome:
        llm = fake.pop("llm", None) or FakeLLM(**fake)

        def open_fake(args: Any, observer: Any = None) -> FakeLLM:
            llm.knobs = knobs_from(args)
            return llm

        monkeypatch.setattr(asking, "open_llm", open_fake)
        piped = stdin if isinstance(stdin, bytes) else stdin.encode()  # decoded as in the locale C.UTF-8
        source = io.TextIOWrapper(io.BytesIO(piped), encoding="utf-8", errors="surrogateescape", newline="\n")
        monkeypatch.setattr(sys, "stdin", Typed(str(stdin)) if is_typed else source)
        capsys.readouterr()
        try:
            code = main(arguments)
        except SystemExit as leave:  # argparse leaves by itself
            code = int(leave.code or 0)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err, llm)

    return run
