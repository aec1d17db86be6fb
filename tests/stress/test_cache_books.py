"""Random life in caches far too small: every operation at any moment, every book verified after each."""

from __future__ import annotations

from typing import Any

import pytest

from infer.cache.paged_pool import PagedKVCachePool
from tests.unit.cache.traffic import RandomTraffic


def make_pool(kind: str, seed: int) -> PagedKVCachePool:
    if kind == "slotted":
        whole: dict[str, Any] = {"use_prefix_caching": False, "max_blocks_per_sequence": 1}
        return PagedKVCachePool(4, 12, **whole, num_host_blocks=2, placement_seed=seed)
    if kind == "uncached":
        return PagedKVCachePool(9, 4, use_prefix_caching=False, num_host_blocks=6)
    if kind == "blocks of one":
        return PagedKVCachePool(14, 1, num_host_blocks=8)
    if kind == "no host":
        return PagedKVCachePool(9, 2, placement_seed=seed)
    pool = PagedKVCachePool(8, 4, num_host_blocks=10, placement_seed=seed)
    pool.keep_evicted(kind == "host tier")
    return pool


@pytest.mark.parametrize("kind", ["paged", "host tier", "blocks of one", "no host", "uncached", "slotted"])
@pytest.mark.parametrize("seed", range(4))
def test_no_sequence_reads_a_wrong_token_and_no_block_leaks(kind: str, seed: int) -> None:
    pool = make_pool(kind, seed)
    life = RandomTraffic(pool, f"{kind} {seed}")

    life.run(num_ops=600)

    assert min(life.counts[op] for op in ("admit", "decode", "step", "fork", "release")) > 10, life.counts
    assert life.traffic.num_refused > 10, "the cache was not too small"
    assert (pool.usage().num_host_hit_tokens > 100) == (kind == "host tier"), pool.usage()
    life.finish()
    assert pool.num_free_blocks == pool.num_blocks
    pool.reset_prefix_cache()
    usage = pool.usage()
    assert (usage.num_free, usage.num_cached, usage.num_used) == (pool.num_blocks, 0, 0)
