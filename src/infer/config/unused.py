"""Settings that have no effect because of other settings, as one list of rules.

    two knobs contradict each other             refused when the settings are made (settings.py)
    a knob has no effect because of another     a warning when the engine is built: these rules

A knob counts as given when its value is not its default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from infer.config.settings import EngineConfig, knob_table
from infer.config.speculation import ASKS_FOR


class UnusedKnob(NamedTuple):
    """A knob, True if it has no effect, and why."""

    name: str
    is_unused: bool
    reason: str


def rules(config: EngineConfig, decided: Mapping[str, Any]) -> Iterator[UnusedKnob]:
    """Yield the conditions under which a knob has no effect; `decided`: values of open knobs."""
    cache, scheduler, drafts = config.cache, config.scheduler, config.speculation
    is_naive, is_static = not cache.keeps_cache, scheduler.batching_mode == "static"
    policy, is_alone = scheduler.scheduler_policy, config.load.nnodes == 1
    yield UnusedKnob("master_addr", is_alone, "nnodes is 1")
    yield UnusedKnob("master_port", is_alone, "nnodes is 1")
    whole = "kv_cache_backend is naive, which computes prompts whole"
    yield UnusedKnob("use_chunked_prefill", is_naive, whole)
    yield UnusedKnob("prefill_chunk_size", is_naive, whole)
    yield UnusedKnob("prefill_chunk_size", not scheduler.use_chunked_prefill, "use_chunked_prefill is off")
    never_swaps = scheduler.preemption == "recompute" and not cache.caches_prefixes
    for name in ("swap_blocks", "swap_space"):
        yield UnusedKnob(name, never_swaps, "preemption is recompute, and no prefixes are cached")
        yield UnusedKnob(name, is_naive, "kv_cache_backend is naive, which has nothing to swap")
    yield UnusedKnob("preemption", is_naive, "kv_cache_backend is naive, which always recomputes")
    serves_all = decided["max_batch_size"] <= decided["max_num_batched_tokens"]  # all sequences that decode
    yield UnusedKnob(
        "max_decode_gap",
        serves_all and (policy != "prefill_first" or is_static),
        "every step has room for all decoding sequences, and only prefill_first in continuous batching "
        "puts prompts before them",
    )
    after = "batching_mode is static, which decodes after its prompts"
    yield UnusedKnob("prefill_tokens_while_decoding", is_static, after)
    as_fcfs = "a step has room for all decoding sequences, so it is the same as fcfs"
    yield UnusedKnob("scheduler_policy", policy == "decode_round_robin" and serves_all, as_fcfs)
    first = "batching_mode is static, which puts prompts first under every policy"
    yield UnusedKnob("scheduler_policy", policy == "prefill_first" and is_static, first)
    for field in fields(drafts):
        if field.name not in ("speculative_decoding", "speculative_config"):  # these turn drafts on or off
            is_switch = field.name == "num_speculative_tokens" and drafts.num_speculative_tokens == 0
            yield UnusedKnob(field.name, not (drafts.is_on or is_switch), "speculative decoding is off")
    for name, method in ASKS_FOR.items():
        yield UnusedKnob(name, drafts.method != method, f"the speculative method is not {method}")


def unused_knobs(config: EngineConfig, decided: Mapping[str, Any]) -> dict[str, str]:
    """The knobs that were given and have no effect, each with the first reason; `decided`: open knobs."""
    table, asked, found = knob_table(), config.knobs(), dict[str, str]()
    for name, is_unused, reason in rules(config, decided):
        if is_unused and asked[name] != table[name].default:
            found.setdefault(name, reason)
    return found
