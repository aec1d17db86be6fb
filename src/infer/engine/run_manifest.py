"""The facts that a run depends on besides its requests.

    facts + requests, each at its step  ──►  the same plans and the same ids, every time

Knobs that hold a path or a name of this machine are left out, so that facts can be written into a file
that is handed around. The model is known by its name and by a fingerprint: a hash of its config and of
the ids that end an answer. Two checkpoints with one config have one fingerprint; their ids differ.
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
)  # knobs that say where something lies


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Everything that decides a run and is not a request."""

    version: str  # version of this package
    model: str
    fingerprint: str
    dtype: str  # the dtype that was chosen, never "auto"
    device: str
    num_threads: int  # the order of a sum, and so its last bit, may depend on it
    context_len: int
    knobs: Mapping[str, Any]
    cache: CacheSize
    cost: PreemptionCost
    step_costs: StepCosts | None = None  # seconds of steps, where sequences get drafts
    draft_model: str = ""  # the name of the model that drafts; none: none does
    draft_fingerprint: str = ""
    steps_ahead: int  # steps launched before one is read: a stopped sequence is in that many more plans


def shareable_knobs(config: EngineConfig) -> dict[str, Any]:
    """Return every knob except names of places on this machine."""
    return {name: value for name, value in config.knobs().items() if name not in PLACES}


def fingerprint(config: ModelConfig, eos_ids: tuple[int, ...]) -> str:
    """Return sixteen hexadecimal digits that change with any fact of the network."""
    facts = {"config": asdict(config), "eos_ids": sorted(eos_ids)}
    text = json.dumps(facts, sort_keys=True, default=sorted)  # a set, such as the layers that keep a state
    return hashlib.sha256(text.encode()).hexdigest()[:16]
