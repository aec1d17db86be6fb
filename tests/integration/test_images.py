"""The steps of a Dockerfile, done without a container engine: files, wheel, server and health check."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
import pytest

from infer.kernels.cpu.build import build_library
from infer.kernels.cpu.library import library
from tests.support.images import ROOT, exec_form, health_command, is_sent, read_dockerfile
from tests.support.server_process import KNOBS, wait_until

DOCKERFILES = ("Dockerfile.cpu", "Dockerfile.cuda")


@pytest.mark.slow
@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_files_that_are_copied_make_a_wheel(name: str, tmp_path: Path) -> None:
    build, _ = read_dockerfile(name)
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [path for path in filter(None, tracked.stdout.split("\0")) if is_sent(path)]
    source = tmp_path / "source"
    for sources, target in build.copies():
        for path in files:
            for wanted in sources:
                inside = Path(path).is_relative_to(wanted)
                if inside:
                    whole = source / target / (Path(path).relative_to(wanted) if path != wanted else wanted)
                    whole.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(ROOT / path, whole)
    [command] = [text for text in build.all("RUN") if "pip wheel" in text]
    words = shlex.split(command.replace("/wheels", str(tmp_path / "wheels")))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *words[1:]], cwd=source, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    [wheel] = (tmp_path / "wheels").glob("infer-*.whl")
    inside_wheel = zipfile.ZipFile(wheel).namelist()
    assert "infer/server/serve.py" in inside_wheel and "infer/kernels/cpu/csrc" in " ".join(inside_wheel)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_list_of_dependencies_is_that_of_the_package(name: str, tmp_path: Path) -> None:
    build, _ = read_dockerfile(name)
    [command] = [text for text in build.all("RUN") if "tomllib" in text]
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shell = command.replace("python -c", f"{sys.executable} -c")
    subprocess.run(shell, shell=True, cwd=tmp_path, check=True)
    listed = (tmp_path / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert "torch>=2.11" in listed and len(listed) > 10
    [install] = [text for text in build.all("RUN") if "--requirement" in text]
    assert "--constraint constraints.txt" in install


def test_the_entry_point_serves_writes_to_its_volumes_alone_and_ends_at_sigterm(
    checkpoint: str, tmp_path: Path
) -> None:
    """The server as the image starts it, with the image's variables moved below a temporary directory."""
    _, final = read_dockerfile("Dockerfile.cuda")
    home, volume, scratch = tmp_path / "home", tmp_path / "cache", tmp_path / "tmp"
    for folder in (home, volume, scratch):
        folder.mkdir()
    inside = {
        key: value.replace(final.one("VOLUME"), str(volume), 1)
        for key, value in final.environment().items()
        if key.endswith(("HOME", "_DIR"))
    }
    environment = os.environ | inside | {"HOME": str(home), "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"}
    if (
        library() is not None
    ):  # C kernels that this machine has compiled: compiling them takes a quarter minute
        kernels = Path(environment["XDG_CACHE_HOME"], "infer", "kernels")
        kernels.mkdir(parents=True)
        shutil.copy(build_library(), kernels)
    words = exec_form(final.one("ENTRYPOINT"))
    arguments = [*words[1:], f"tiny={checkpoint}", *KNOBS, "--num-blocks", "256", "--api-key", "k"]
    arguments[arguments.index("0.0.0.0")] = "127.0.0.1"  # a test opens nothing to the network
    log = tmp_path / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "infer", *arguments, "--port", "0"],
            stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment, cwd=ROOT,
        )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready: "), log.read_text()
        url = line.removeprefix("ready: ").strip()
        check = [
            word.replace("http://127.0.0.1:8000", url).replace("timeout=4", "timeout=30")
            for word in health_command(final)
        ]
        assert subprocess.run([sys.executable, *check[1:]]).returncode == 0
        body = {"model": "tiny", "prompt": "Once", "max_tokens": 4}
        answer = httpx.post(
            f"{url}/v1/completions", json=body, headers={"authorization": "Bearer k"}, timeout=60
        )
        assert answer.status_code == 200, answer.text
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert subprocess.run([sys.executable, *check[1:]], stderr=subprocess.DEVNULL).returncode != 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()
    assert list(home.iterdir()) == []
    wait_until(lambda: not list(scratch.glob("infer-run-*")))
