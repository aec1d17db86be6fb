"""A knob that the start line calls without effect has none, for every two knobs; the others are taken."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest

from infer.config.resolve import resolve_scheduler
from infer.config.settings import EngineConfig, knob_table
from infer.config.unused import rules, unused_knobs
from infer.errors import ConfigError
from infer.scheduling.plan import StepPlan
from tests.support.oracle import OracleWorld, prompt_of
from tests.support.thinned import thinned

VALUES: dict[str, tuple[Any, ...]] = {
    "kv_cache_backend": ("contiguous", "naive"),
    "swap_blocks": (12,),
    "batching_mode": ("static",),
    "scheduler_policy": ("prefill_first", "decode_round_robin", "priority", "deadline"),
    "max_batch_size": (16,),
    "max_num_batched_tokens": (4,),
    "use_chunked_prefill": (False,),
    "prefill_chunk_size": (3,),
    "prefill_tokens_while_decoding": (2,),
    "max_prefill_chunks_per_step": (1,),
    "use_prefix_caching": (False,),
    "preemption": ("recompute", "swap"),
    "max_wait_steps": (3,),
    "max_decode_gap": (1,),
}
SETTINGS = [(name, value) for name, values in VALUES.items() for value in values]
PAIRS = [dict(pair) for pair in itertools.combinations(SETTINGS, 2) if pair[0][0] != pair[1][0]]
SMALL_STEPS = {"max_batch_size": 6, "max_num_batched_tokens": 64}


def unused(knobs: dict[str, Any]) -> dict[str, str]:
    config = EngineConfig.from_knobs(**(SMALL_STEPS | knobs))
    scheduler = resolve_scheduler(config, 60)
    decided = {name: getattr(scheduler, name) for name in ("max_batch_size", "max_num_batched_tokens")}
    return unused_knobs(config, decided)


@functools.cache  # pairs of knobs share a half
def plans(**knobs: Any) -> list[StepPlan]:
    """The plans of a load with long and short prompts, forks, priorities and too little cache."""
    settings = SMALL_STEPS | knobs
    world = OracleWorld(num_host_blocks=settings.pop("swap_blocks", 0), num_blocks=20, **settings)
    for number in range(10):
        fields = {"priority": number % 3, "deadline": 100.0 - number}
        world.add(str(number), prompt_of(4 + 17 * (number % 2), number), request=fields, n=1 + number % 3)
        world.step()
    world.run()
    assert world.verify() == 10
    return world.plans


@pytest.mark.parametrize(
    "knobs", thinned(PAIRS, keep=3), ids=lambda knobs: "-".join(f"{k}={v}" for k, v in knobs.items())
)
def test_a_knob_said_to_have_no_effect_has_none(knobs: dict[str, Any]) -> None:
    try:
        found = unused(knobs)
    except ConfigError as error:
        assert ";" in str(error), "a refusal says what to do"
        return
    for name in found:
        default = {} if knob_table()[name].default is None else {name: knob_table()[name].default}
        assert plans(**knobs) == plans(**{k: v for k, v in knobs.items() if k != name} | default), found


@pytest.mark.parametrize(
    ("knobs", "name"),
    [
        ({"prefill_chunk_size": 64, "use_chunked_prefill": False}, "prefill_chunk_size"),
        ({"swap_blocks": 8, "preemption": "recompute", "use_prefix_caching": False}, "swap_blocks"),
        ({"swap_space": "1GiB", "preemption": "recompute", "kv_cache_backend": "contiguous"}, "swap_space"),
        ({"swap_blocks": 8, "kv_cache_backend": "naive"}, "swap_blocks"),
        ({"max_decode_gap": 2}, "max_decode_gap"),
        ({"prefill_tokens_while_decoding": 9, "batching_mode": "static"}, "prefill_tokens_while_decoding"),
        ({"scheduler_policy": "decode_round_robin"}, "scheduler_policy"),
        *(
            ({"speculative_decoding": False, name: value}, name)
            for name, value in {
                "speculative_method": "ngram",
                "num_speculative_tokens": 4,
                "draft_model": "small",
                "prompt_lookup_max": 4,
                "prompt_lookup_min": 3,
                "suffix_max_answers": 4,
                "adaptive_speculation": False,
                "synthetic_acceptance": 0.7,
            }.items()
        ),
        ({"speculative_method": "suffix", "prompt_lookup_max": 4}, "prompt_lookup_max"),
        ({"speculative_method": "suffix", "prompt_lookup_min": 4}, "prompt_lookup_min"),
        ({"draft_model": "small", "prompt_lookup_max": 4}, "prompt_lookup_max"),
        ({"draft_model": "small", "suffix_max_answers": 4}, "suffix_max_answers"),
        ({"speculative_method": "ngram", "suffix_max_answers": 4}, "suffix_max_answers"),
    ],
)
def test_what_has_no_effect_is_named(knobs: dict[str, Any], name: str) -> None:
    assert list(unused(knobs)) == [name]


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"prefill_chunk_size": 64},
        {"swap_blocks": 8},
        {"swap_blocks": 8, "preemption": "recompute"},
        {"max_decode_gap": 2, "scheduler_policy": "prefill_first"},
        {"max_decode_gap": 2, "max_num_batched_tokens": 4},
        {"max_decode_gap": 8},  # the default
        {"scheduler_policy": "decode_round_robin", "max_num_batched_tokens": 4},
        {"speculative_decoding": True, "adaptive_speculation": False, "prompt_lookup_min": 3},
        {"speculative_method": "suffix", "suffix_max_answers": 4},
        {"speculative_decoding": True, "suffix_max_answers": 4},
        {"suffix_max_answers": 4},
        {"prompt_lookup_max": 4},
        {"prompt_lookup_min": 3},
        {"num_speculative_tokens": 4, "synthetic_acceptance": 0.7},
        {"num_speculative_tokens": 0},  # it turns the drafts off
    ],
)
def test_what_has_an_effect_is_not_named(knobs: dict[str, Any]) -> None:
    assert unused(knobs) == {}


def test_the_table_names_knobs() -> None:
    assert {rule.name for rule in rules(EngineConfig(), SMALL_STEPS)} <= set(knob_table())


@pytest.mark.parametrize("size", [{"num_blocks": 8}, {"kv_cache_memory": "1MiB"}])
def test_two_sizes_of_one_cache_are_refused(size: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="and kv_cache_share both size the KV cache; give one of them"):
        EngineConfig.from_knobs(kv_cache_share=0.5, **size)
