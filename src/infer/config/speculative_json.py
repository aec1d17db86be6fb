"""vLLM's `--speculative-config`: one JSON object that stands for the knobs of speculative decoding.

    {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
         │                     └──────────────┬────────────────┘
         └─ speculative_method                └─ knobs of the same names

A key stands for a knob, or is accepted with vLLM's default value, which asks for nothing, or is refused by
name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from infer.errors import ConfigError, nearest

KNOBS: Final[Mapping[str, str]] = {  # key: knob
    "method": "speculative_method",
    "model": "draft_model",
    "num_speculative_tokens": "num_speculative_tokens",
    "prompt_lookup_max": "prompt_lookup_max",
    "prompt_lookup_min": "prompt_lookup_min",
    "suffix_decoding_max_cached_requests": "suffix_max_answers",
}

_ADAPTIVE = "the number of drafts adapts to the load; leave it out, or use adaptive_speculation"
_DRAFTED = "a draft model is loaded with the model's settings; leave it out"
_EXACT = "drafts are kept where the model draws the same token; leave it out"
_SYNTHETIC = "use synthetic_acceptance, the probability that a draft is kept"
_SUFFIX = "the bounds of suffix drafts are fixed; leave it out"

NEUTRAL: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {  # key: values that ask for nothing, advice
    "draft_tensor_parallel_size": ((1,), "a draft model is on one device"),
    "disable_by_batch_size": ((), _ADAPTIVE),
    "num_speculative_tokens_per_batch_size": ((), _ADAPTIVE),
    "disable_padded_drafter_batch": ((False, True), _DRAFTED),
    "enforce_eager": ((False,), f"{_DRAFTED}; use_cuda_graphs is for both"),
    "max_model_len": ((), _DRAFTED),
    "quantization": ((), _DRAFTED),
    "revision": ((), "name a directory in model, or fetch the revision first"),
    "parallel_drafting": ((False,), "drafts are made one after the other; leave it out"),
    "rejection_sample_method": (("strict", "standard", "probabilistic", "block"), _EXACT),
    "draft_sample_method": (("greedy", "gumbel", "probabilistic"), _EXACT),
    "synthetic_acceptance_rate": ((), _SYNTHETIC),
    "synthetic_acceptance_rates": ((), _SYNTHETIC),
    "speculative_token_tree": ((), "the method tree makes its own tree; leave it out"),
    "suffix_decoding_max_tree_depth": ((24,), _SUFFIX),
    "suffix_decoding_max_spec_factor": ((1, 1.5), _SUFFIX),
    "suffix_decoding_min_token_prob": ((0.1,), _SUFFIX),
}

METHODS: Final[Mapping[str, str]] = {  # names of a method in other engines, besides its own
    "ngram_gpu": "ngram",
    "NGRAM": "ngram",
    "STANDALONE": "draft_model",
    "EAGLE3": "eagle3",
}


def read_speculative_config(text: str) -> dict[str, Any]:
    """Return the knobs that a JSON object of vLLM stands for, each under its own name."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"speculative_config must be a JSON object, got {text!r}: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError(
            f'speculative_config must be a JSON object such as {{"method": "ngram"}}, got {text}'
        )
    knobs: dict[str, Any] = {}
    for key, value in given.items():
        if key not in KNOBS and key not in NEUTRAL:
            found = nearest(key, [*KNOBS, *NEUTRAL])
            hint = f" (did you mean {found}?)" if found else ""
            known = ", ".join(KNOBS)
            raise ConfigError(f"speculative_config has the unknown key {key!r}{hint}; it may have {known}")
        if value is None:
            continue
        if key in KNOBS:
            knobs[KNOBS[key]] = value
        elif value not in NEUTRAL[key][0]:
            raise ConfigError(f"speculative_config asks for {key}={value!r}: {NEUTRAL[key][1]}")
    if knobs.get("draft_model") in ("ngram", "[ngram]"):  # a method's name in place of a model's
        del knobs["draft_model"]
        knobs.setdefault("speculative_method", "ngram")
    return knobs
