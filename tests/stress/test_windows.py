"""Random life with sliding windows: every layer group has its own tables, and every token is checked.

The oracle reads each table as far as its window reaches (tests/support/oracle.py) and blocks that nothing
holds are poisoned before every step, so a block that is let go of too early shows at once. The pool's own
check says that none is kept too long.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from infer.cache.layout import COPY, STATE, SWAP_IN, SWAP_OUT
from infer.cache.paged_pool import PagedKVCachePool
from tests.stress.test_token_oracle import EOS_IDS, SWAPPING_IS_CHEAP, Traffic
from tests.support.oracle import OracleWorld
from tests.support.thinned import thinned
from tests.unit.cache.traffic import RandomTraffic

WINDOWS: dict[str, tuple[int | None, ...]] = {
    "all layers alike": (7,),
    "local and global": (None, 6, 6),
    "two windows": (5, 12),
    "shorter than a block": (None, None, 1),
    "states and global": (None, STATE, STATE),
    "states, local and global": (None, STATE, 6),
}
SQUEEZES: dict[str, dict[str, Any]] = {
    "recompute": {"preemption": "recompute", "prefill_chunk_size": 5},
    "swap": {"preemption": "swap", "num_host_blocks": 40, "prefill_chunk_size": 6},
    "swap, little host memory": {"preemption": "swap", "num_host_blocks": 6},
    "nothing cached": {"use_prefix_caching": False, "prefill_chunk_size": 3},
    "whole prompts": {"use_chunked_prefill": False},
}


def make_world(windows: str, squeeze: str, **knobs: Any) -> OracleWorld:
    return OracleWorld(
        eos_ids=EOS_IDS, cost=SWAPPING_IS_CHEAP, windows=WINDOWS[windows], block_size=4,
        num_blocks=20 * len(WINDOWS[windows]), **(SQUEEZES[squeeze] | knobs),
    )  # fmt: skip


@pytest.mark.parametrize(("windows", "squeeze", "steps_ahead"), thinned(WINDOWS, SQUEEZES, (0, 2), keep=3))
def test_every_request_gets_its_own_tokens(windows: str, squeeze: str, steps_ahead: int) -> None:
    world = make_world(windows, squeeze, steps_ahead=steps_ahead)
    Traffic(world, f"{windows} {squeeze}", num_requests=40, plain_share=0.8 if steps_ahead else 0.0).run()
    assert world.verify() > 20
    world.check_idle()


def test_they_meet_every_event() -> None:
    events: Counter[str] = Counter()
    for windows in WINDOWS:
        for squeeze in ("recompute", "swap"):
            world = make_world(windows, squeeze)
            Traffic(world, f"{windows} {squeeze}", num_requests=40).run()
            usage = world.pool.usage()
            events["preempted"] += world.scheduler.num_preemptions
            events["hit tokens"] += usage.num_hit_tokens
            events["hit tokens in host memory"] += usage.num_host_hit_tokens
            events["evicted"] += usage.num_evicted_blocks
            events["beam searches"] += sum(r.params.use_beam_search for r in world.requests.values())
            events.update(world.runner.num_transfers)
    assert {COPY, SWAP_OUT, SWAP_IN} < set(events)
    assert min(events.values()) > 20, events


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("seed", range(3))
def test_no_sequence_reads_a_wrong_token_and_no_block_leaks(windows: str, seed: int) -> None:
    pool = PagedKVCachePool(
        10 * len(WINDOWS[windows]), 4, num_host_blocks=20, windows=WINDOWS[windows], placement_seed=seed
    )
    pool.keep_evicted(seed > 0)
    life = RandomTraffic(pool, f"{windows} {seed}")
    life.run(num_ops=400)
    assert (pool.usage().num_host_hit_tokens > 20) == (seed > 0), pool.usage()
    assert min(life.counts[op] for op in ("admit", "decode", "step", "fork", "release")) > 5, life.counts
    life.finish()
    assert pool.num_free_blocks == pool.num_blocks
    pool.reset_prefix_cache()
    usage = pool.usage()
    assert (usage.num_free, usage.num_cached, usage.num_used) == (pool.num_blocks, 0, 0)
