"""Loading a GGUF file for the CPU: packed a few rows at a time, and nothing else stays in memory."""

from __future__ import annotations

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

HIDDEN, INNER, NUM_LAYERS, VOCAB = 1024, 4096, 4, 512
SHAPES = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (HIDDEN, HIDDEN), "attn_v": (HIDDEN, HIDDEN)}
SHAPES |= {"attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN)}
SHAPES |= {"ffn_down": (HIDDEN, INNER)}
KINDS = {"ffn_gate": "Q4_K", "ffn_down": "BF16"}  # of the others, Q8_0, the integers are kept

# A process of its own: the peak of one that ran other tests says nothing. (And not getrusage's: it counts
# what the parent had when it forked.)
MEASURE = """
import pathlib, re, sys
from infer.kernels.cpu.library import library
from infer.loader.load import load_model
from infer.loader.find.source import resolve_model

def peak() -> int:
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1])

library()
before = peak()
loaded = load_model(resolve_model(sys.argv[1], show_progress=False), device="cpu", cpu_weights="int8")
print(peak() - before)
"""


def write_zeros(path: Path) -> int:
    """Write a model whose weights are all zero; returns how many of them are in matrices."""
    writer = gguf.GGUFWriter(path, "llama")
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=16,
        vocab_size=VOCAB,
    )
    add_metadata(writer, config, "llama")

    def add(name: str, rows: int, size: int, kind: str) -> int:
        block_len, block_bytes = BLOCK[GGMLType[kind]]
        packed = np.zeros((rows, size // block_len * block_bytes), dtype=np.uint8)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType[kind])
        return rows * size

    num_weights = add("token_embd", VOCAB, HIDDEN, "Q8_0")
    for layer in range(NUM_LAYERS):
        for name, (rows, size) in SHAPES.items():
            num_weights += add(f"blk.{layer}.{name}", rows, size, KINDS.get(name, "Q8_0"))
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.zeros(HIDDEN, dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.zeros(HIDDEN, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return num_weights


def test_packing_needs_little_more_memory_than_the_packed_weights(tmp_path: Path) -> None:
    """No copy in float32 (270 MB here), and no pages of the file that were read already (80 MB)."""
    if library() is None or not Path("/proc/self/status").exists():
        pytest.skip("needs the C kernels, and Linux's books")
    path = tmp_path / "model.gguf"
    packed_bytes = write_zeros(path) * 34 // 32  # int8, and two bytes of scale for 32 of them
    command = [sys.executable, "-c", MEASURE, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert packed_bytes < int(done.stdout) < 1.3 * packed_bytes + (32 << 20)
