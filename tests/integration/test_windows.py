"""Sequences far longer than the windows of their layers get the tokens of `transformers`.

Every greedy output is checked by one forward pass of the reference over prompt and output, without a cache.
The store is full of NaN at first, so whatever is read and was not written shows.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest

from infer.cache.paged_pool import PagedKVCachePool
from infer.engine import machine
from infer.engine.engine import Engine
from infer.execution.gpu.device import GpuDevice
from infer.loader.load import LoadedModel
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request
from tests.support.books import check_books
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.referenced import check_output, engine_of_nan, load_pair, serve_checked
from tests.support.thinned import thinned
from tests.support.tiny import greedy, run_engine

WINDOW, CONTEXT_LEN, BLOCK_SIZE, CHUNK, NUM_OUT = 12, 320, 4, 16, 24
FAMILIES = ["mistral", "gemma2", "gemma3"]
WINDOW_BLOCKS = (WINDOW - 1 + CHUNK) // BLOCK_SIZE + 2  # of one table, at most


@functools.cache
def models(family: str) -> tuple[Any, LoadedModel]:
    return load_pair(family, sliding_window=WINDOW, max_position_embeddings=CONTEXT_LEN)


def make_engine(family: str, **knobs: Any) -> Engine:
    plain = {"block_size": BLOCK_SIZE, "num_blocks": 200, "prefill_chunk_size": CHUNK, "max_batch_size": 4}
    return engine_of_nan(models(family)[1], **(plain | knobs))


def make_requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts of many windows; three of them begin alike, beyond the window too."""
    rng = random.Random(3)
    start = [rng.randrange(3, VOCAB_SIZE) for _ in range(150)]
    parts = [(150, 60), (0, 230), (101, 30), (150, 1), (20, 7), (0, 3)]
    prompts = [start[:cut] + [rng.randrange(3, VOCAB_SIZE) for _ in range(more)] for cut, more in parts]
    return [(prompt, greedy(NUM_OUT)) for prompt in prompts]


REQUESTS = make_requests()
GROWING = [(prompt[-3:], greedy(60)) for prompt, _ in REQUESTS]  # admitted together, they outgrow the cache
SMALL = {"mistral": 12, "gemma2": 20, "gemma3": 20}  # blocks, for these


def serve(engine: Engine, family: str, requests: list[tuple[list[int], SamplingParams]] = REQUESTS) -> None:
    serve_checked(engine, models(family)[0], requests)


WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "nothing cached": {"use_prefix_caching": False},
    "whole prompts": {"use_chunked_prefill": False},
    "plain PyTorch": {"attention_backend": "sdpa"},
    "one table for all layers": {"kv_cache_backend": "contiguous", "num_blocks": 400},
}


@pytest.mark.parametrize(("family", "way"), thinned(FAMILIES, WAYS, keep=2))
def test_the_tokens_are_those_of_transformers(family: str, way: str) -> None:
    engine = make_engine(family, **WAYS[way])
    serve(engine, family)
    if way == "as it is":
        serve(engine, family)  # now with all that is cached
        assert engine.scheduler.usage().num_hit_tokens > 500


@pytest.mark.parametrize(("family", "swap_blocks"), thinned(FAMILIES, (0, 80), keep=2))
def test_preemption_changes_no_token(family: str, swap_blocks: int) -> None:
    preemption = "swap" if swap_blocks else "recompute"
    engine = make_engine(family, preemption=preemption, swap_blocks=swap_blocks, num_blocks=SMALL[family])
    serve(engine, family, GROWING)
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("family", thinned(FAMILIES, keep=2))
def test_so_are_those_of_a_gpus_device_half(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_gpu_kernels", lambda device: True)
    serve(make_engine(family), family)
    engine = make_engine(family, preemption="recompute", num_blocks=SMALL[family])
    assert isinstance(engine._device, GpuDevice)
    serve(engine, family, GROWING)
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_forks_and_beams_share_what_their_windows_reach(family: str) -> None:
    params = SamplingParams(temperature=0.0, n=3, max_tokens=30, ignore_eos=True)
    beams = SamplingParams(temperature=0.0, use_beam_search=True, n=2, max_tokens=30, ignore_eos=True)
    prompt = REQUESTS[0][0]
    forked, found = run_engine(make_engine(family), [(prompt, params), (prompt, beams)])
    for output in forked:
        check_output(models(family)[0], prompt, output)
    ((alone, _),) = run_engine(make_engine(family, kv_cache_backend="contiguous"), [(prompt, beams)])
    assert found[0] == alone


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_sequence_holds_only_its_windows_and_fits_a_small_cache(family: str) -> None:
    """Gemma's layers that see everything need all of it; of the others a window is enough."""
    prompt = REQUESTS[1][0]
    tables = {"mistral": (WINDOW,), "gemma2": (None, WINDOW), "gemma3": (None, WINDOW, WINDOW, WINDOW)}[
        family
    ]
    table_len = -(-(len(prompt) + NUM_OUT - 1) // BLOCK_SIZE)
    most = sum(table_len if window is None else WINDOW_BLOCKS for window in tables)
    engine = make_engine(family, num_blocks=-(-most // len(tables)), use_prefix_caching=False)
    pool = engine.scheduler.pool
    assert isinstance(pool, PagedKVCachePool) and pool.windows == tables
    assert pool.num_blocks < 0.6 * table_len * len(tables), "full attention would not fit"
    engine.add(Request(request_id="long", prompt=tuple(prompt), params=greedy(NUM_OUT)))
    output: list[int] = []
    while engine.has_work:
        for step in engine.step():
            output += step.token_ids
        check_books(engine.scheduler)
        assert pool.usage().num_used <= most
        for seq in engine.scheduler.running:
            if seq.num_tokens > len(prompt) + 8:  # it decodes
                held = [len([b for b in table if b >= 0]) for table in pool.block_tables(seq.seq_id)]
                assert all(n <= WINDOW // BLOCK_SIZE + 2 for n, w in zip(held, tables, strict=True) if w)
    check_output(models(family)[0], prompt, output)
