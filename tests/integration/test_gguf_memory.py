"""Loading a GGUF file for the CPU: packed a few rows at a time, and nothing else stays in memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from transformers import LlamaConfig

from infer.kernels.cpu.library import library
from infer.loader.formats.gguf import BLOCK, GGMLType
from tests.unit.loader.tiny_files import add_metadata

VOCAB = 512
KINDS = {"ffn_gate": "Q4_K", "ffn_down": "BF16"}  # of the others, Q8_0, the integers are kept

# A process of its own: the peak of one that ran other tests says nothing. (And not getrusage's: it counts
# what the parent had when it forked.) What is not the loader's is kept out of the measure, since it differs
# between machines: code of PyTorch's that a first load reads from disk, by loading a small model before;
# pages of 2 MB for whatever is allocated, which some systems give to all (41: PR_SET_THP_DISABLE).
MEASURE = """
import ctypes, pathlib, re, sys
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)
from infer.loader.load import load_model
from infer.loader.find.source import resolve_model

def memory(key):
    return 1024 * int(re.search(key + r":\\s*(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1])

def load(path):
    return load_model(resolve_model(path, show_progress=False), device="cpu", quantization="int8")

first = load(sys.argv[1])
before = memory("VmRSS")
loaded = load(sys.argv[2])
print(memory("VmHWM") - before)
"""
# Freed memory goes back to the system at once, and from one heap: what malloc keeps for later depends on
# its version, on the number of processors and on the order of calls.
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "262144", "OMP_NUM_THREADS": "2"}


def write_zeros(path: Path, *, hidden: int, inner: int, num_layers: int) -> int:
    """Write a model whose weights are all zero; returns how many of them are in matrices."""
    shapes = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (hidden, hidden))
    shapes |= {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
    writer = gguf.GGUFWriter(path, "llama")
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        vocab_size=VOCAB,
    )
    add_metadata(writer, config, "llama")

    def add(name: str, rows: int, size: int, kind: str) -> int:
        block_len, block_bytes = BLOCK[GGMLType[kind]]
        packed = np.zeros((rows, size // block_len * block_bytes), dtype=np.uint8)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType[kind])
        return rows * size

    num_weights = add("token_embd", VOCAB, hidden, "Q8_0")
    for layer in range(num_layers):
        for name, (rows, size) in shapes.items():
            num_weights += add(f"blk.{layer}.{name}", rows, size, KINDS.get(name, "Q8_0"))
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.zeros(hidden, dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.zeros(hidden, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return num_weights


def test_packing_needs_little_more_memory_than_the_packed_weights(tmp_path: Path) -> None:
    """No copy in float32 (270 MB here), and no pages of the file that were read already (80 MB)."""
    if library() is None or not Path("/proc/self/status").exists():
        pytest.skip("needs the C kernels, and Linux's books")
    small, large = tmp_path / "small.gguf", tmp_path / "large.gguf"
    write_zeros(small, hidden=256, inner=512, num_layers=1)
    num_weights = write_zeros(large, hidden=1024, inner=4096, num_layers=4)
    packed_bytes = num_weights * 34 // 32  # int8, and two bytes of scale for 32 of them
    command = [sys.executable, "-c", MEASURE, str(small), str(large)]
    done = subprocess.run(command, env=os.environ | MALLOC, capture_output=True, text=True, check=True)
    assert packed_bytes < int(done.stdout) < 1.3 * packed_bytes + (32 << 20)
