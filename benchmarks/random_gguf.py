"""A GGUF file of random Q4_0 weights in the shape of a larger Llama, for our engine and for llama.cpp.

    python -m benchmarks.random_gguf SOURCE.gguf OUT.gguf                28 layers of 3072, 2.9e9 weights
    python -m benchmarks.random_gguf SOURCE.gguf OUT.gguf --layers 22 --hidden 2048 --inner 5632 --heads 32 4

Tokenizer and settings are those of SOURCE, a GGUF of the llama family; its weights are not used. What it
says is noise, and it takes the time of a trained model: `python -m benchmarks.cpu_peers --model OUT.gguf`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

GROUP, GROUP_BYTES = 32, 18  # of Q4_0: a scale in 16 bits, and 32 integers of 4 bits
NEW_KEYS = ("block_count", "embedding_length", "feed_forward_length", "rope.dimension_count")


def random_q4_0(rng: np.random.Generator, rows: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Random integers under one scale, so that the products keep the size of what they multiply."""
    packed = rng.integers(0, 256, (rows, size // GROUP, GROUP_BYTES), dtype=np.uint8)
    deviation = 4.6  # of an integer from -8 to 7
    packed[:, :, :2] = np.frombuffer(np.float16(1 / (deviation * size**0.5)).tobytes(), np.uint8)
    return packed.reshape(rows, -1)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden", type=int, default=3072)
    parser.add_argument("--inner", type=int, default=8192)
    parser.add_argument("--heads", type=int, nargs=2, default=(24, 8), help="query heads and kv heads")
    args = parser.parse_args()

    import gguf

    source, writer = gguf.GGUFReader(args.source), gguf.GGUFWriter(args.out, "llama")
    for key, field in source.fields.items():
        name = key.removeprefix("llama.")
        if (
            key == "general.architecture"
            or key.startswith("GGUF.")
            or name in NEW_KEYS
            or "head_count" in key
        ):
            continue
        inner = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(key, field.contents(), field.types[0], sub_type=inner)
    (N, G), head = args.heads, args.hidden // args.heads[0]
    writer.add_block_count(args.layers)
    writer.add_embedding_length(args.hidden)
    writer.add_feed_forward_length(args.inner)
    writer.add_rope_dimension_count(head)
    writer.add_head_count(N)
    writer.add_head_count_kv(G)

    rng = np.random.default_rng(0)
    vocab = len(source.fields["tokenizer.ggml.tokens"].data)
    shapes = {"token_embd": (vocab, args.hidden), "output": (vocab, args.hidden)}
    for layer in range(args.layers):
        blk = f"blk.{layer}"
        shapes |= {f"{blk}.attn_q": (N * head, args.hidden), f"{blk}.attn_output": (args.hidden, N * head)}
        shapes |= {f"{blk}.attn_{kv}": (G * head, args.hidden) for kv in "kv"}
        shapes |= {f"{blk}.ffn_{side}": (args.inner, args.hidden) for side in ("gate", "up")}
        shapes |= {f"{blk}.ffn_down": (args.hidden, args.inner)}
    for name, (rows, size) in shapes.items():
        kind = gguf.GGMLQuantizationType.Q4_0
        writer.add_tensor(f"{name}.weight", random_q4_0(rng, rows, size), raw_dtype=kind)
    norms = [f"blk.{layer}.{name}_norm" for layer in range(args.layers) for name in ("attn", "ffn")]
    for name in [*norms, "output_norm"]:
        writer.add_tensor(f"{name}.weight", np.ones(args.hidden, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
