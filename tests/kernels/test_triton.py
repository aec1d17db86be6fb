"""The kernels without Triton, and what they say of themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


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
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE.parents[1] / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[[1.0, 1.0, 1.0, 1.0]]"
