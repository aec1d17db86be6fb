"""The facts that a run depends on, apart from its requests.

    facts + requests, each at its step  ──►  the same plans and the same ids, every time

Knobs with a path or a name on this machine are left out, so that the facts can be shared in a file. The model
is identified by its name and a fingerprint: a hash of its config and of its end-of-text ids. Two checkpoints
with the same config have the same fingerprint, but generate different ids.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from infer.cache.memory import CacheSize
from infer.config.settings import EngineConfig
from infer.models.config import ModelConfig
from infer.scheduling.preemption import PreemptionCost
from infer.speculative.adaptive import StepCosts

PLACES = (
    "model",
    "revision",
    "tokenizer",
    "chat_template",
    "draft_model",
    "lora_modules",
    "master_addr",
)  # knobs with a path or a place


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Everything that decides a run, apart from its requests."""

    version: str  # version of this package
    model: str
    fingerprint: str
    dtype: str  # the dtype that was chosen, never "auto"
    device: str
    num_threads: int  # the order of summation, and so rounding, may depend on it
    context_len: int
    knobs: Mapping[str, Any]
    cache: CacheSize
    cost: PreemptionCost
    step_costs: StepCosts | None = None  # seconds of steps; None: no speculative decoding
    draft_model: str = ""  # name of the draft model; empty: there is none
    draft_fingerprint: str = ""
    steps_ahead: int  # steps launched before one is read; a stopped sequence stays in that many more plans


def shareable_knobs(config: EngineConfig) -> dict[str, Any]:
    """Return every knob except those in PLACES."""
    return {name: value for name, value in config.knobs().items() if name not in PLACES}


def fingerprint(config: ModelConfig, eos_ids: tuple[int, ...]) -> str:
    """Return sixteen hexadecimal digits that change with any field of the config or the eos ids."""
    facts = {"config": asdict(config), "eos_ids": sorted(eos_ids)}
    text = json.dumps(facts, sort_keys=True, default=sorted)  # sets become sorted lists
    return hashlib.sha256(text.encode()).hexdigest()[:16]
