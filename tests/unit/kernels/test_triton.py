"""The Triton kernels, run by Triton's interpreter in a process of their own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.kernels.interpreter import assert_passes_interpreted

HERE = Path(__file__).parent


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_triton_kernels_keep_their_contract_under_the_interpreter() -> None:
    assert_passes_interpreted("interpreted.py")


def test_importing_the_kernels_needs_no_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"  # makes `import triton` fail
        "import torch\n"
        "from infer.kernels.attention import decode, prefill, reference\n"
        "from infer.kernels.elementwise import gated_activation, heads, rope\n"
        "from infer.kernels.linear import small\n"
        "from infer.kernels.sampling import sample_rows\n"
        "from infer.kernels.elementwise.rms_norm import rms_norm\n"
        "print(rms_norm(torch.full((1, 4), 3.0), torch.ones(4), eps=0.0).tolist())"
    )
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE.parents[2] / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[[1.0, 1.0, 1.0, 1.0]]"
