"""PyTorch without its shapes of operations: what an engine does works, and the rest comes when asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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


def test_an_import_that_fails_late_says_so_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails_late.py").write_text("raise RuntimeError('broken')")
    monkeypatch.syspath_prepend(str(tmp_path))
    put_off("fails_late")
    module = sys.modules["fails_late"]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            _ = module.anything
    assert "fails_late" not in sys.modules
