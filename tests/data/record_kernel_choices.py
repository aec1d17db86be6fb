"""Writes kernel_choices.txt: the kernels of several models on several GPUs, as their profiles choose them.

    python -m tests.data.record_kernel_choices

A change of a choice then is a line of the diff, and so is a change for a GPU that nobody here has.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infer.config.profiles.find import KNOWN_GPUS
from infer.config.settings import EngineConfig
from infer.tools.kernel_report import Choice, explain_kernels
from infer.tools.memory_needs import find_headers

FILE = Path(__file__).with_name("kernel_choices.txt")
GPUS = ("a100", "l4", "h100-pcie", "h200", "rtx5090")  # sm_80, sm_89, a part of sm_90, all of it, sm_120
SIZES = {"num_hidden_layers": 2, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
COMMON: dict[str, Any] = SIZES | {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "torch_dtype": "bfloat16"}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
        "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
        "num_key_value_heads": 8, "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32,
        "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
    },
}  # fmt: skip
FORMS = ("none", "fp8", "int4")
CACHES = {"none": "none", "fp8": "fp8", "int4": "none"}  # form of keys and values, by that of the weights


def lines() -> Iterator[str]:
    """A line for each operation, with the kernels of all sizes."""
    with tempfile.TemporaryDirectory() as folder:
        for model, shape in MODELS.items():
            path = Path(folder) / model / "config.json"
            path.parent.mkdir()
            path.write_text(json.dumps(COMMON | shape | {"hidden_act": "silu"}))
            headers = find_headers(str(path), revision=None, show_progress=False)
            for gpu in GPUS:
                for form in FORMS:
                    knobs = {"quantization": form, "kv_cache_dtype": CACHES[form]}
                    yield f"\n{model}, {form}, {gpu}"
                    for operation in explain_kernels(
                        EngineConfig.from_knobs(**knobs), headers, KNOWN_GPUS[gpu]
                    ):
                        yield f"  {operation.name}: {spell(operation.choices)}"


def spell(choices: tuple[Choice, ...]) -> str:
    """The kernels of an operation; neighbours that differ in reasons alone are one."""
    parts: list[tuple[int, str]] = []
    for _, last, kernel, _ in choices:
        if parts and parts[-1][1] == kernel:
            parts.pop()
        parts.append((last, kernel))
    return "; ".join(f"to {last} {kernel}" for last, kernel in parts)


if __name__ == "__main__":
    FILE.write_text("\n".join(lines()).lstrip() + "\n")
