"""Programs of benchmarks/ run as their docstrings say, and refuse to report what has no commit."""

from __future__ import annotations

import argparse
import ast
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import cpu_peers, front_overhead, machine
from benchmarks.kernels import run_all
from infer.bench import report

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def programs() -> list[str]:
    """Every module with a command line; `ipc_engine` is started by the program around it."""
    found = []
    for file in sorted(BENCHMARKS.rglob("*.py")):
        if "__main__" in file.read_text(encoding="utf-8") and file.stem != "ipc_engine":
            found.append(".".join(file.relative_to(BENCHMARKS.parent).with_suffix("").parts))
    return found


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("name", programs())
def test_a_benchmark_has_help_and_says_how_it_is_run(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = BENCHMARKS.parent / Path(*name.split(".")).with_suffix(".py")
    said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    assert f"python -m {name}" in said and f"python {name.replace('.', '/')}.py" not in said
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    assert not ended.value.code
    assert "usage:" in capsys.readouterr().out


def test_a_benchmark_finds_its_own_modules() -> None:
    """In a process of its own, as a reader starts it."""
    command = [sys.executable, "-m", "benchmarks.cpu_peers", "--help"]
    done = subprocess.run(command, cwd=BENCHMARKS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ("kill -ILL $$", "stopped by SIGILL; its last words: reserve took 8 ms"),
        ("exit 1", "reserve took 8 ms"),
    ],
)
def test_a_peer_that_stops_says_why(
    ends: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A native library that dies leaves only its own log on stderr, whose last line explains nothing."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho reserve took 8 ms >&2\n{ends}\n", encoding="utf-8")
    python.chmod(0o755)
    work = cpu_peers.Work(threads=1, long=0, repeats=1)
    assert cpu_peers.run_elsewhere(str(python), "llama.cpp Q4_0", tmp_path / "m.gguf", work) is None
    assert capsys.readouterr().err == f"llama.cpp Q4_0: {said}\n"


def test_a_server_that_is_compared_with_replicas_has_a_session_of_its_own_as_they_have() -> None:
    """Linux shares a busy machine out by session, so one in the session of the asking process is faster."""
    with front_overhead.started("this") as (process, _):
        assert os.getsid(process.pid) == process.pid


def test_all_kernels_are_run() -> None:
    files = {file.stem for file in (BENCHMARKS / "kernels").glob("*.py")}
    assert files == {*run_all.CASES, *run_all.PROGRAMS, *run_all.PARTS}


def test_a_report_of_a_dirty_tree_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "r" / "x.json")]
    monkeypatch.setattr(machine, "commit", lambda: "abc-dirty")
    with pytest.raises(SystemExit):
        machine.parse(argparse.ArgumentParser(), out)
    assert "the tree has uncommitted changes" in capsys.readouterr().err
    assert machine.parse(argparse.ArgumentParser(), []).out is None  # figures alone may be of any tree
    args = machine.parse(argparse.ArgumentParser(), [*out, "--allow-dirty"])
    machine.write({"a": 1}, args.out)
    assert json.loads(args.out.read_text()) == {"a": 1}
    monkeypatch.setattr(machine, "commit", lambda: "abc")
    assert machine.parse(argparse.ArgumentParser(), out).out == args.out


def test_code_makes_a_tree_dirty_and_reports_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*command: str) -> None:
        identity = ("-c", "user.name=n", "-c", "user.email=e")
        subprocess.run(["git", *identity, *command], cwd=tmp_path, check=True, capture_output=True)

    for name in ("src/infer/bench/report.py", "benchmarks/reports/r.json", "docs/page.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n")
    monkeypatch.setattr(report, "__file__", str(tmp_path / "src" / "infer" / "bench" / "report.py"))
    git("init")
    git("add", ".")
    git("commit", "-m", "m")
    clean = report.commit()
    assert len(clean) == 12
    (tmp_path / "benchmarks/reports/r.json").write_text("2\n")
    (tmp_path / "docs/page.md").write_text("2\n")
    assert report.commit() == clean
    (tmp_path / "src/infer/bench/report.py").write_text("2\n")
    assert report.commit() == f"{clean}-dirty"


def test_no_committed_report_is_of_a_dirty_tree() -> None:
    dirty = {path.name for path in (BENCHMARKS / "reports").glob("*.json") if "-dirty" in path.read_text()}
    assert not dirty, "make them again from a commit"
