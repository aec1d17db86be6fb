"""Settings that have no effect because of other settings: one table, and one rule for all of them.

    two knobs decide the same thing differently     refused, where the section is made (settings.py)
    another knob leaves a knob nothing to decide    named in the start line, with the reason: this table

A knob counts as given when its value is not its default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, NamedTuple

from infer.config.settings import EngineConfig, knob_table
from infer.config.speculation import SpeculationConfig


class UnusedKnob(NamedTuple):
    """A knob, when it has no effect, and why; `knobs` holds every knob with its final value."""

    name: str
    is_unused: Callable[[dict[str, Any]], bool]
    reason: str


SWITCHES = (
    "speculative_decoding",
    "speculative_config",
)  # they turn drafts on, and all others are about them
ABOUT_DRAFTS = [field.name for field in fields(SpeculationConfig) if field.name not in SWITCHES]


def _serves_all(knobs: dict[str, Any]) -> bool:
    """Return True if every sequence that decodes has room in every step."""
    return bool(knobs["max_batch_size"] <= knobs["max_num_batched_tokens"])


def _is_naive(knobs: dict[str, Any]) -> bool:
    return bool(knobs["kv_cache_backend"] == "naive")


def _never_swaps(knobs: dict[str, Any]) -> bool:
    caches = knobs["use_prefix_caching"] and knobs["kv_cache_backend"] == "paged"
    return bool(knobs["preemption"] == "recompute" and not caches)


def _speculation(knobs: dict[str, Any]) -> SpeculationConfig:
    return SpeculationConfig(**{field.name: knobs[field.name] for field in fields(SpeculationConfig)})


def _has_no_drafts(knobs: dict[str, Any]) -> bool:
    return not _speculation(knobs).is_on


def _not_by(method: str) -> Callable[[dict[str, Any]], bool]:
    """Return a test for whether a method other than this one proposes drafts."""
    return lambda knobs: _speculation(knobs).method != method


UNUSED = (
    UnusedKnob("use_chunked_prefill", _is_naive, "kv_cache_backend is naive, which computes prompts whole"),
    UnusedKnob("prefill_chunk_size", _is_naive, "kv_cache_backend is naive, which computes prompts whole"),
    UnusedKnob("prefill_chunk_size", lambda k: not k["use_chunked_prefill"], "use_chunked_prefill is off"),
    *(
        UnusedKnob(name, test, why)
        for name in ("swap_blocks", "swap_space")
        for test, why in (
            (_never_swaps, "preemption is recompute, and no prefixes are cached"),
            (_is_naive, "kv_cache_backend is naive, which has nothing to swap"),
        )
    ),
    UnusedKnob("preemption", _is_naive, "kv_cache_backend is naive, which always recomputes"),
    UnusedKnob(
        "max_decode_gap",
        lambda k: (
            _serves_all(k) and (k["scheduler_policy"], k["batching_mode"]) != ("prefill_first", "continuous")
        ),
        "every step has room for all sequences that decode, and only prefill_first in continuous batching "
        "puts prompts before them",
    ),
    UnusedKnob(
        "prefill_tokens_while_decoding",
        lambda k: bool(k["batching_mode"] == "static"),
        "batching_mode is static, which decodes after its prompts",
    ),
    UnusedKnob(
        "scheduler_policy",
        lambda k: k["scheduler_policy"] == "decode_round_robin" and _serves_all(k),
        "a step has room for all sequences that decode, and this is fcfs then",
    ),
    UnusedKnob(
        "scheduler_policy",
        lambda k: k["scheduler_policy"] == "prefill_first" and k["batching_mode"] == "static",
        "batching_mode is static, which puts prompts first under every policy",
    ),
    *(UnusedKnob(name, _has_no_drafts, "speculative decoding is off") for name in ABOUT_DRAFTS),
    UnusedKnob("prompt_lookup_max", _not_by("ngram"), "the speculative method is not ngram"),
    UnusedKnob("prompt_lookup_min", _not_by("ngram"), "the speculative method is not ngram"),
    UnusedKnob("suffix_max_answers", _not_by("suffix"), "the speculative method is not suffix"),
)


def unused_knobs(config: EngineConfig, decided: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each knob that was given and has no effect, with the reason; `decided`: values of open knobs."""
    table, asked = knob_table(), config.knobs()
    seen: set[str] = set()
    for name, is_unused, reason in UNUSED:
        if asked[name] != table[name].default and name not in seen and is_unused(asked | decided):
            seen.add(name)
            yield name, reason
