"""Turn a pickle of tensors into safetensors: SqueezeLLM's `.pt` files, old `pytorch_model.bin` files.

    python scripts/unpickle.py model.pt CHECKPOINT_DIR

A pickle is a program that builds its objects, and `infer` never opens one. Here PyTorch reads it with
`weights_only`, which refuses everything but tensors and plain containers. Tensors that share memory (tied
heads) are written once each; the config and the tokenizer must be put beside the result.
"""

from __future__ import annotations

import argparse
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from infer.loader.formats.checkpoint import write_safetensors


def main(argv: Sequence[str] | None = None) -> int:
    """Convert one file; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pickle", type=Path)
    parser.add_argument("out_dir", type=Path)
    args = parser.parse_args(argv)
    out = args.out_dir / "model.safetensors"
    if out.exists():
        parser.error(f"{out} exists; delete it or choose another directory")
    try:
        loaded = torch.load(args.pickle, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        parser.error(f"{args.pickle} is not a pickle of tensors alone: {str(error).splitlines()[0]}")
    state = loaded.get("state_dict", loaded) if isinstance(loaded, dict) else None
    if not isinstance(state, dict) or not state:
        parser.error(f"{args.pickle} holds a {type(loaded).__name__}, a dict of tensors is needed")
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    args.out_dir.mkdir(parents=True, exist_ok=True)
    write_safetensors(out, tensors)
    print(f"{out}: {len(tensors)} tensors, {len(state) - len(tensors)} other values left out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
