"""A process that uses each feature for the first time while a neighbour holds all other memory of the GPU.

    python -m tests.support.first_uses MODEL_DIR '{"dtype": "bfloat16"}'

CUDA loads kernels when they are first launched. A process in which tests have run has loaded most of them, so
this has a process of its own. It prints the features that failed; the exit code is 1 if there are any.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.memory import neighbour
from infer import LLM

PROMPTS = ["moon", "the star " * 10, "a tree by the river " * 40]
SCHEMA = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.9, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    "logprobs": {"logprobs": 3},
    "logprobs of prompts": {"prompt_logprobs": 3},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.3, "min_tokens": 3},
    "biases": {"logit_bias": {5: 2.0}, "allowed_token_ids": [4, 5, 6, 7]},
    "regex": {"structured": {"regex": "[a-f]{4,20}"}},
    "schema": {"structured": {"json_schema": SCHEMA}},
    "several outputs": {"n": 3, "best_of": 4},
    "beams": {"use_beam_search": True, "n": 3, "temperature": 0},
}


def features(llm: LLM) -> dict[str, Callable[[], object]]:
    """Calls that use a feature each, by name; the last has more sequences than the cache has room for."""

    def generate(asked: dict[str, Any]) -> object:
        return llm.generate(PROMPTS, llm.sampling_params(**asked, max_tokens=20))

    calls: dict[str, Callable[[], object]] = {name: partial(generate, asked) for name, asked in ASKED.items()}
    crowd = [f"{number} {PROMPTS[2]}" for number in range(40)]
    return {
        "embeddings": lambda: llm.embed(PROMPTS),
        **calls,
        "a crowd": lambda: llm.generate(crowd, llm.sampling_params(max_tokens=40)),
    }


def main(model: str, knobs: dict[str, Any]) -> int:
    """Start an engine, let a neighbour take all other memory, and use each feature."""
    llm = LLM(model, device="cuda", **knobs)
    while llm.engine.prepare():
        pass
    failed = 0
    with neighbour("0B"):
        print(f"left: {torch.cuda.mem_get_info()[0] >> 20} MiB", flush=True)
        for name, use in features(llm).items():
            try:
                use()
            except Exception:
                failed += 1
                print(f"{name} failed: {traceback.format_exc()}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], json.loads(sys.argv[2])))
