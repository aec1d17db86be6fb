"""A wheel of the package, installed where nothing of the repository is: all its files, and no tests."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "infer"

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that `pip wheel` makes of the files that git knows."""
    made = tmp_path_factory.mktemp("wheel")
    tracked = run("git", "ls-files", "-z", "--", "src", "pyproject.toml", "README.md", "LICENSE", cwd=ROOT)
    for name in filter(None, tracked.split("\0")):
        copy = made / "source" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    run(*pip, "--wheel-dir", made, made / "source", cwd=made)
    [found] = made.glob("infer-*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin directory of an environment with the wheel alone; what it depends on is found beside it."""
    home = tmp_path_factory.mktemp("home")
    run(sys.executable, "-m", "venv", home / "venv", cwd=home)
    python = home / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=home)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip()
    # A path in a .pth file comes behind the environment's own, and the .pth files in it are not read: the
    # dependencies are found, an editable installation of this repository is not.
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python.parent


def test_every_file_that_the_package_needs_is_inside(wheel: Path) -> None:
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    tracked = run("git", "ls-files", "-z", "--", "src/infer", cwd=ROOT).split("\0")
    missing = {name.removeprefix("src/") for name in filter(None, tracked)} - inside
    assert not {name for name in missing if not name.endswith(".md")}
    for kind in ("models/templates/", "server/ui/", "server/api_docs/", "kernels/cpu/csrc/", "py.typed"):
        assert any(name.startswith(f"infer/{kind}") for name in inside), kind


def test_nothing_but_the_package_is_inside(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"infer"}


def test_the_metadata_names_the_versions_of_python_and_the_licence(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    [name] = [name for name in archive.namelist() if name.endswith("dist-info/METADATA")]
    metadata = archive.read(name).decode()
    assert "Requires-Python: >=3.11" in metadata and "License-Expression: Apache-2.0" in metadata
    for minor in (11, 12, 13):
        assert f"Classifier: Programming Language :: Python :: 3.{minor}\n" in metadata


def test_it_runs_where_nothing_of_the_repository_is(installed: Path, tmp_path: Path) -> None:
    where = run(installed / "python", "-c", "import infer; print(infer.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)
    assert "usage: infer COMMAND" in run(installed / "infer", "--help", cwd=tmp_path)
    assert "torch" in run(installed / "infer", "doctor", cwd=tmp_path)


def test_its_server_has_its_pages(installed: Path, tmp_path: Path) -> None:
    code = (
        "import infer, pathlib\n"
        "root = pathlib.Path(infer.__file__).parent / 'server'\n"
        "print(len(list((root / 'ui').iterdir())), len(list((root / 'api_docs').iterdir())))"
    )
    assert all(int(count) > 0 for count in run(installed / "python", "-c", code, cwd=tmp_path).split())
