"""Random life on the C kernels: int8 weights, a cache far too small, arrivals, forks, aborts at any moment.

A real model this time. Its integer products do not round, so what was not aborted must have the tokens it
has alone, and what was has the first of them.
"""

from __future__ import annotations

import functools
import random
from collections import defaultdict
from typing import Any

import pytest

from infer.kernels.cpu.library import library
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request
from tests.integration.test_cpu_weights import make_engine
from tests.support.books import check_books
from tests.support.thinned import thinned
from tests.support.tiny import drain, random_prompts, run_engine

pytestmark = pytest.mark.skipif(library() is None, reason="needs a C compiler")

NUM_KINDS = 12
PROMPTS = random_prompts(NUM_KINDS, seed=5, longest=30)
KNOBS: tuple[dict[str, Any], ...] = (
    {},
    {"record_cpu_step": False},
    {"use_prefix_caching": False},
    {"kv_cache_dtype": "fp8"},
    {"kv_cache_dtype": "int8", "preemption": "swap", "swap_blocks": 12},
)
SMALL: dict[str, Any] = {"block_size": 4, "num_blocks": 20, "max_batch_size": 6, "max_num_batched_tokens": 24}


def params_of(kind: int) -> SamplingParams:
    """Some greedy, some drawn, some of two sequences."""
    return SamplingParams(
        n=2 if kind % 4 == 3 else 1,
        temperature=0.0 if kind % 3 == 0 else 0.8,
        seed=kind,
        max_tokens=4 + kind,
        ignore_eos=True,
    )


@functools.cache
def alone(family: str, kind: int, kv_cache_dtype: str) -> list[list[int]]:
    engine = make_engine(family, max_batch_size=2, use_prefix_caching=False, kv_cache_dtype=kv_cache_dtype)
    return run_engine(engine, [(PROMPTS[kind], params_of(kind))])[0]


@pytest.mark.parametrize(("family", "knobs"), thinned(("llama", "gemma3", "gpt2"), KNOBS, keep=2))
def test_every_request_has_the_tokens_it_has_alone(family: str, knobs: dict[str, Any]) -> None:
    rng, engine = random.Random(f"{family} {knobs}"), make_engine(family, **SMALL, **knobs)
    kinds: dict[str, int] = {}
    aborted: set[str] = set()
    made: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    while len(kinds) < 40 or engine.has_work:
        if len(kinds) < 40 and rng.random() < 0.5:
            name, kind = str(len(kinds)), rng.randrange(NUM_KINDS)
            engine.add(Request(request_id=name, prompt=tuple(PROMPTS[kind]), params=params_of(kind)))
            kinds[name] = kind
        live = [name for name in kinds if engine.is_serving(name)]
        if live and rng.random() < 0.1:
            aborted.add(name := rng.choice(live))
            engine.abort(name)
        for output in engine.step():
            assert output.finish_reason != "error", output
            made[output.request_id, output.index] += output.token_ids
        check_books(engine.scheduler.pool)
    drain(engine)
    assert engine.scheduler.num_preemptions > 0 and aborted
    for name, kind in kinds.items():
        for index, expected in enumerate(alone(family, kind, knobs.get("kv_cache_dtype", "auto"))):
            tokens = made[name, index]
            assert tokens == (expected[: len(tokens)] if name in aborted else expected), (name, kind, index)
