"""PyTorch without its shapes of operations: what an engine does works, and the rest comes when asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from infer import __version__
from infer.client.imports import put_off

ENGINE = """
import sys
from infer.client.imports import quick_imports
with quick_imports():
    import torch
name = "torch._meta_registrations"
late = sys.modules[name]
with torch.device("meta"):  # what loaders and plans do: allocate, view, cast and count
    layer = torch.nn.Linear(64, 32, dtype=torch.bfloat16)
    room = torch.empty(7, 128, dtype=torch.uint8)
assert layer.weight.nbytes == 4096 and room.view(torch.int8)[1:3].t().shape == (128, 2)
assert torch.empty_like(room, dtype=torch.float16).nbytes == 2 * room.nbytes
assert layer.to_empty(device="cpu").weight.device.type == "cpu"
assert sys.modules[name] is late and "meta_mm" not in vars(late)
from torch._meta_registrations import meta_mm  # asked for, it comes
assert sys.modules[name] is not late and late.meta_mm is meta_mm
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    x = torch.empty(3, 4)
    assert (x @ x.t())[torch.tensor([0, 2])].shape == (2, 3)
"""


def test_an_engine_needs_none_of_it_and_a_compiler_gets_all_of_it() -> None:
    done = subprocess.run([sys.executable, "-c", ENGINE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


RANDOM = """
from infer.client.imports import quick_imports
with quick_imports():
    from infer.loader.random_weights import make_generator
import torch
assert torch.equal(*(torch.rand(4, generator=make_generator("cpu", 1)) for _ in range(2)))
"""


def test_random_weights_can_be_made_where_pytorch_was_imported_quickly() -> None:
    done = subprocess.run([sys.executable, "-c", RANDOM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_nothing_of_pytorch_is_left_where_it_was_not_imported() -> None:
    code = """
import sys
from infer.client.imports import quick_imports
with quick_imports():
    import json
assert not [name for name in sys.modules if name.startswith("torch")]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_import_that_fails_late_says_so_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails_late.py").write_text("raise RuntimeError('broken')")
    monkeypatch.syspath_prepend(str(tmp_path))
    put_off("fails_late")
    module = sys.modules["fails_late"]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            _ = module.anything
    assert "fails_late" not in sys.modules


LARGE = """
import os, subprocess, sys
from infer.client.imports import keep_bytecode
os.geteuid = lambda: int(sys.argv[2])
keep_bytecode("large")
assert "torch" not in sys.modules
import large
assert large.__cached__ == sys.argv[1], large.__cached__
child = [sys.executable, "-c", "import large; print(large.__cached__)"]
assert subprocess.run(child, capture_output=True, text=True).stdout.strip() == sys.argv[1]
"""


CASES = ["none is written", "there is some", "the user's folder"]
CASES += ["others may read", "a link", "another's", "no home can be made"]


@pytest.mark.parametrize("case", CASES)
def test_bytecode_is_kept_where_python_keeps_none(case: str, tmp_path: Path) -> None:
    """A package without bytecode, in a process that writes none: as in many containers."""
    package = tmp_path / "large"
    package.mkdir()
    (package / "__init__.py").write_text("")
    name = f"__init__.{sys.implementation.cache_tag}.pyc"
    beside = package / "__pycache__" / name
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    env |= {"XDG_CACHE_HOME": str(tmp_path / "home"), "PYTHONDONTWRITEBYTECODE": "1"}
    python = ".".join(map(str, sys.version_info[:3]))
    versions = f"python-{python}-torch-{version('torch')}-infer-{__version__}"
    folder = tmp_path / "home" / "infer" / "bytecode" / versions
    kept = folder / package.relative_to("/") / name
    if case == "there is some":
        beside.parent.mkdir()
        beside.write_bytes(b"")
        kept = beside
    if case == "the user's folder":
        env["PYTHONPYCACHEPREFIX"] = str(tmp_path / "named")
        kept = tmp_path / "named" / package.relative_to("/") / name
    if case == "others may read":
        folder.mkdir(parents=True)
        folder.chmod(0o755)
    if case == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.parent.mkdir(parents=True)
        folder.symlink_to(tmp_path / "elsewhere")
    if case == "no home can be made":
        (tmp_path / "home").write_text("a file")
    is_refused = case in CASES[3:]
    kept = beside if is_refused else kept
    user = os.geteuid() + (case == "another's")
    done = subprocess.run(
        [sys.executable, "-c", LARGE, str(kept), str(user)], capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr
    is_there = case in ("none is written", "there is some")
    assert (kept.exists(), kept.parent.exists()) == (is_there, is_there)
    if case == "none is written":
        assert folder.stat().st_mode & 0o777 == 0o700
