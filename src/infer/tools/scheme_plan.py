"""Compare the forms that a model's weights could have on a machine: bytes, cache size, speed.

Each token of a sequence reads every matrix once, but only the experts that it is routed to. So the
memory bandwidth divided by these bytes is an upper bound of one sequence's tokens per second:

    tokens per second  <=  bandwidth / (bytes of the layers' matrices + bytes of the head)
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

from infer.config.settings import EngineConfig
from infer.errors import ConfigError
from infer.layers.linear import ExpertLinear, Projected
from infer.loader.headers import ModelHeaders
from infer.loader.weight_plan import kept_bytes
from infer.models.model import Model
from infer.tools.memory_needs import MachineMemory, choose_load, weight_bytes
from infer.tools.memory_plan import plan_memory

FORMS = {"gpu": ("auto", "none", "fp8", "int8", "int4"), "cpu": ("auto", "none", "int8", "int4")}


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemePlan:
    """One form of the weights on a machine."""

    quantization: str
    kept_as: str  # meaning of this value there: a scheme, "as stored", or the dtype
    is_chosen: bool  # True for the form that the settings select
    weights: int  # bytes of all weights
    bytes_per_token: int  # bytes that one sequence reads for one token
    num_cache_tokens: int | None  # None: the weights do not fit

    def tokens_per_second(self, bandwidth: float) -> float:
        """Return the most tokens per second of one sequence at a memory bandwidth in bytes per second."""
        return bandwidth / self.bytes_per_token


def compare_schemes(config: EngineConfig, headers: ModelHeaders, machine: MachineMemory) -> list[SchemePlan]:
    """Return every form that the model can have there, and the selected one, in the knob's order."""
    found: list[SchemePlan] = []
    for name in dict.fromkeys((*FORMS[machine.kind], config.load.quantization)):
        asked = replace(config, load=replace(config.load, quantization=name))
        try:
            choice = choose_load(asked, headers, machine)
        except ConfigError:  # the form is not possible with this file or on this machine
            continue
        tokens = None
        with contextlib.suppress(ConfigError):  # does not fit, which the row shows
            plan = plan_memory(asked, headers, machine, choice=choice, advises=False)
            tokens = plan.cache.num_tokens
        row = SchemePlan(
            quantization=name,
            kept_as=choice.weights,
            is_chosen=name == config.load.quantization,
            weights=weight_bytes(choice.plan),
            bytes_per_token=bytes_per_token(choice.plan.skeleton),
            num_cache_tokens=tokens,
        )
        found.append(row)
    return found


def bytes_per_token(model: Model) -> int:
    """Return the bytes of the matrices that one token reads; for models with foreign code, of all weights."""
    if model.config.impl != "infer":
        return kept_bytes(model)
    layers = [module for module in model.modules() if isinstance(module, Projected)]
    total = 0.0
    for layer in layers:
        share = 1.0
        if isinstance(layer, ExpertLinear) and model.config.experts is not None:
            share = model.config.experts.num_choices / layer.num_experts
        total += layer.stored.num_bytes() * share
    return round(total)
