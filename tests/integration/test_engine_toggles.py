"""Every toggle, every family: other timing, the same tokens as one sequence alone in the simplest loop.

float32 on the CPU, so rounding is no excuse. The cache is filled with NaN first: a sequence that
reads a slot not written before gets no token at all.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from infer.config.resolve import resolve_scheduler
from infer.config.settings import EngineConfig
from infer.engine.build import build_engine
from infer.errors import ConfigError
from infer.sampling.params import SamplingParams, sequence_seed
from infer.scheduling.preemption import PreemptionCost
from tests.support.checkpoints import FAMILIES
from tests.support.simple_loop import generate_greedy, generate_sampled
from tests.support.thinned import thinned
from tests.support.tiny import make_engine, random_prompts, run_engine, tiny_model
from tests.support.toggles import (
    CONTEXT_LEN,
    PAGE,
    TOGGLES,
    all_pairs,
    engine_knobs,
    page,
    pairs_of,
    pairwise_rows,
)

NUM_PROMPTS = 10
Outputs = list[list[list[int]]]

all_families = pytest.mark.parametrize("family", FAMILIES)


def make_params(number: int) -> SamplingParams:
    """Two of three are greedy; the third is drawn, with a seed of its own."""
    if number % 3 < 2:
        return SamplingParams(temperature=0.0, max_tokens=6 + number, ignore_eos=True)
    return SamplingParams(temperature=0.9, top_p=0.95, seed=number, max_tokens=8, ignore_eos=True)


REQUESTS = [(prompt, make_params(number)) for number, prompt in enumerate(random_prompts(NUM_PROMPTS))]


@functools.cache
def expected(family: str) -> Outputs:
    """Each request alone, in the simplest loop."""
    model = tiny_model(family).model
    outputs = []
    for prompt, params in REQUESTS:
        if params.is_greedy:
            assert params.max_tokens is not None
            outputs.append([generate_greedy(model, prompt, params.max_tokens)])
        else:
            assert params.seed is not None
            outputs.append([generate_sampled(model, prompt, params, seed=sequence_seed(params.seed, 0))])
    return outputs


def run_row(family: str, number: int) -> Outputs:
    return run_engine(make_engine(family, **engine_knobs(pairwise_rows()[number])), REQUESTS)


@all_families
def test_the_defaults_give_the_tokens_of_the_simple_loop(family: str) -> None:
    assert run_engine(make_engine(family), REQUESTS) == expected(family)


@pytest.mark.parametrize(("half", "number"), thinned((0, 1), range(len(pairwise_rows())), keep=2))
def test_no_toggle_changes_a_token(number: int, half: int) -> None:
    """Two families per row, in turns: no toggle asks which family it runs, and each meets many rows."""
    family = FAMILIES[(number + half * len(FAMILIES) // 2) % len(FAMILIES)]
    assert run_row(family, number) == expected(family)


SQUEEZES: dict[str, dict[str, Any]] = {
    "recompute": {"preemption": "recompute"},
    "swap": {"preemption": "swap", "swap_blocks": 40},
    "swap, little host memory": {"preemption": "swap", "swap_blocks": 5},
    "recompute, nothing cached": {"preemption": "recompute", "use_prefix_caching": False},
    "reference attention": {"preemption": "recompute", "attention_backend": "naive"},
}


@pytest.mark.parametrize(("family", "squeeze"), thinned(FAMILIES, SQUEEZES, keep=3))
def test_preemption_changes_no_token(family: str, squeeze: str) -> None:
    engine = make_engine(family, block_size=2, num_blocks=26, prefill_chunk_size=5, **SQUEEZES[squeeze])
    assert run_engine(engine, REQUESTS) == expected(family)
    assert engine.scheduler.num_preemptions > 0


def test_auto_preemption_swaps_where_that_is_cheaper() -> None:
    config = EngineConfig.from_knobs(num_blocks=30, block_size=2, swap_blocks=40)
    cost = PreemptionCost(swap_seconds=0.1, recompute_seconds=1.0)
    engine = build_engine(config, tiny_model("llama"), cost=cost)
    assert run_engine(engine, REQUESTS) == expected("llama")
    assert engine.scheduler.num_preemptions > 0
    measured = build_engine(config, tiny_model("llama")).scheduler.cost
    assert measured.swap_seconds > 0
    assert measured.recompute_seconds > 0


def test_every_pair_of_settings_is_in_some_row() -> None:
    covered = set().union(*map(pairs_of, pairwise_rows()))
    assert set(all_pairs()) <= covered
    for name, values in TOGGLES.items():
        assert {row[name] for row in pairwise_rows()} == set(values)
    assert len(pairwise_rows()) < 40


def test_every_row_is_a_configuration_that_is_accepted() -> None:
    for row in pairwise_rows():
        resolve_scheduler(EngineConfig.from_knobs(**engine_knobs(row)), CONTEXT_LEN)


def test_the_published_matrix_is_the_one_that_runs() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "stale: run python -m tests.support.toggles"


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"kv_cache_backend": "naive", "batching_mode": "static"}, "use batching_mode=continuous"),
        ({"preemption": "swap"}, "set swap_blocks or swap_space, or use preemption=recompute"),
        ({"use_chunked_prefill": False, "max_num_batched_tokens": 64 - 5}, "turn use_chunked_prefill on"),
        ({"kv_cache_backend": "contiguous", "num_blocks": 3}, "lower max_seq_len"),
    ],
)
def test_impossible_settings_are_refused_with_the_way_out(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_engine(EngineConfig.from_knobs(**({"max_batch_size": 4} | knobs)), tiny_model("llama"))
