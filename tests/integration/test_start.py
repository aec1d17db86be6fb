"""What the start of an engine process leaves out: the parts of PyTorch that no engine needs."""

from __future__ import annotations

import subprocess
import sys

IMPORTS = """
import sys
from infer.client.process import import_engine, load_engine
from infer.config.settings import EngineConfig

import_engine()
engine = load_engine(EngineConfig.from_knobs(model=sys.argv[1], quantization="int8"))
assert engine.context_len
print(*{"torch._decomp", "torch._refs", "torch._dynamo", "sympy", "llguidance"} & set(sys.modules))

import torch

assert callable(torch._meta_registrations.register_meta)  # what asks for it gets it after all
assert "torch._decomp" in sys.modules
assert torch.zeros(2, 3, device="meta").diagonal().shape == (2,)
"""


def test_an_engine_is_loaded_without_the_compilers_half_of_pytorch(checkpoint: str) -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS, checkpoint], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
