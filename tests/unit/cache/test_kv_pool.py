from __future__ import annotations

import random
from typing import Any

import pytest

from infer.cache.paged_pool import blocks_for
from infer.cache.prefix_tree import NO_BLOCK
from infer.errors import ConfigError, EngineError
from tests.support.books import check_books
from tests.unit.cache.counting_pool import CountingPool
from tests.unit.cache.traffic import RandomTraffic, Traffic

PROMPT = list(range(100, 112))  # three blocks of four


def make_pool(num_blocks: int = 8, num_host_blocks: int = 0) -> CountingPool:
    return CountingPool(num_blocks, 4, num_host_blocks=num_host_blocks)


def compute(pool: CountingPool, seq_id: int, tokens: list[int], salt: str | None = None) -> int:
    """Admit a prompt and compute all of it; returns how many tokens were cached."""
    num_cached = pool.match_prefix(seq_id, tokens, salt)
    assert pool.reserve(seq_id, len(tokens)) is not None
    pool.commit(seq_id, tokens, len(tokens))
    check_books(pool)
    return num_cached


def test_a_prompt_gets_the_blocks_it_needs_and_gives_them_back() -> None:
    pool = make_pool()
    assert pool.match_prefix(1, PROMPT[:9]) == 0
    assert pool.reserve(1, 9) == []
    assert len(pool.block_tables(1)[0]) == 3
    pool.release(1)
    assert pool.usage().num_free == 8
    assert pool.audit_blocks() == []


def test_a_decode_step_takes_a_block_only_at_a_boundary() -> None:
    pool = make_pool()
    compute(pool, 1, PROMPT[:5])
    table = list(pool.block_tables(1)[0])
    for num_tokens in (6, 7, 8):
        assert pool.reserve(1, num_tokens) == []
        assert pool.block_tables(1)[0] == table
    assert pool.reserve(1, 9) == []
    assert pool.block_tables(1)[0][:2] == table
    assert len(pool.block_tables(1)[0]) == 3


def test_a_second_prompt_starts_after_the_blocks_it_shares() -> None:
    pool = make_pool()
    compute(pool, 1, PROMPT)
    assert compute(pool, 2, PROMPT[:8] + [1, 2, 3]) == 8
    assert pool.block_tables(2)[0][:2] == pool.block_tables(1)[0][:2]
    usage = pool.usage()
    assert (usage.num_used, usage.num_cached, usage.num_idle) == (4, 3, 0)
    assert (usage.num_hit_tokens, usage.num_queried_tokens) == (8, 12 + 11)


def test_a_block_is_visible_to_others_only_once_it_is_full_and_committed() -> None:
    pool = make_pool()
    pool.match_prefix(1, PROMPT)
    pool.reserve(1, 12)
    assert pool.match_prefix(2, PROMPT) == 0
    pool.commit(1, PROMPT, 7)
    assert pool.match_prefix(3, PROMPT) == 4
    pool.commit(1, PROMPT, 8)
    assert pool.match_prefix(4, PROMPT) == 8


@pytest.mark.parametrize("num_tokens", [4, 8, 12])
def test_a_fully_cached_prompt_computes_one_token_in_a_private_copy(num_tokens: int) -> None:
    pool = make_pool()
    tokens = PROMPT[:num_tokens]
    compute(pool, 1, tokens)

    assert pool.match_prefix(2, tokens) == num_tokens - 1
    copies = pool.reserve(2, num_tokens)

    assert copies == [(pool.block_tables(1)[0][-1], pool.block_tables(2)[0][-1])]
    assert pool.block_tables(2)[0][:-1] == pool.block_tables(1)[0][:-1]
    assert pool.block_tables(2)[0][-1] not in pool.block_tables(1)[0]
    pool.commit(2, tokens, num_tokens)
    check_books(pool)


def test_a_fully_cached_prompt_with_a_tail_needs_no_copy() -> None:
    pool = make_pool()
    compute(pool, 1, PROMPT)
    assert pool.match_prefix(2, [*PROMPT, 7]) == 12
    assert pool.reserve(2, 13) == []


def test_a_fully_cached_prompt_as_large_as_the_cache_is_computed_in_place() -> None:
    pool = make_pool(num_blocks=3)
    compute(pool, 1, PROMPT)
    pool.release(1)
    assert pool.match_prefix(2, PROMPT) == 11
    assert pool.reserve(2, 12) == []
    pool.commit(2, PROMPT, 12)
    check_books(pool)
    pool.release(2)
    assert pool.usage().num_cached == 3


def test_blocks_of_one_token_leave_the_last_token_out_of_the_match() -> None:
    pool = CountingPool(8, 1)
    compute(pool, 1, [5, 6, 7])
    assert pool.match_prefix(2, [5, 6, 7]) == 2
    assert pool.match_prefix(3, [5]) == 0
    assert pool.reserve(2, 3) == []


def test_an_empty_prompt_matches_nothing() -> None:
    pool = make_pool()
    assert pool.match_prefix(1, []) == 0
    check_books(pool)


def test_salts_do_not_share() -> None:
    pool = make_pool()
    compute(pool, 1, PROMPT, salt="a")
    assert pool.match_prefix(2, PROMPT, "b") == 0
    assert pool.match_prefix(3, PROMPT, "a") == 11


def test_reserving_evicts_cached_blocks_that_no_sequence_uses_oldest_first() -> None:
    pool = make_pool(num_blocks=4)
    compute(pool, 1, PROMPT[:8])
    pool.release(1)
    assert (pool.usage().num_free, pool.num_free_blocks) == (2, 4)
    compute(pool, 2, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert pool.usage().num_evicted_blocks == 1
    pool.release(2)
    assert pool.match_prefix(3, PROMPT) == 4, "the first block outlives the second"


def test_a_prompt_used_long_ago_goes_entirely_before_one_used_later() -> None:
    pool = make_pool(num_blocks=4)
    compute(pool, 1, PROMPT)
    compute(pool, 2, [1, 2, 3, 4])
    pool.release(1)
    pool.release(2)
    compute(pool, 3, [9] * 12)
    assert pool.match_prefix(4, PROMPT) == 0
    assert pool.match_prefix(5, [1, 2, 3, 4, 5]) == 4


def test_without_room_nothing_changes() -> None:
    pool = make_pool(num_blocks=3)
    compute(pool, 1, PROMPT[:8])
    pool.match_prefix(2, [1] * 9)
    assert pool.reserve(2, 9) is None
    assert (pool.block_tables(2)[0], pool.num_free_blocks) == ([], 1)
    assert pool.reserve(2, 4) == []


def test_a_sequence_longer_than_the_cache_can_never_fit() -> None:
    pool = make_pool(num_blocks=3)
    assert pool.can_ever_fit(12)
    assert not pool.can_ever_fit(13)
    pool.match_prefix(1, [1] * 13)
    assert pool.reserve(1, 13) is None


def test_a_fork_shares_full_blocks_and_copies_the_one_it_writes() -> None:
    pool = make_pool()
    compute(pool, 1, PROMPT[:6])
    pool.fork(1, 2)
    assert pool.block_tables(2)[0] == pool.block_tables(1)[0]
    shared = list(pool.block_tables(1)[0])

    assert pool.reserve(2, 7) == [(shared[1], pool.block_tables(2)[0][1])]
    assert pool.block_tables(1)[0] == shared
    assert pool.block_tables(2)[0][0] == shared[0]
    assert pool.reserve(1, 7) == [], "after the copy the first one is alone again"
    check_books(pool)


def test_a_fork_at_a_block_boundary_needs_no_copy() -> None:
    pool = make_pool()
    compute(pool, 1, PROMPT[:8])
    pool.reserve(1, 12)
    pool.fork(1, 2)
    assert len(pool.block_tables(2)[0]) == 2, "room that the parent reserved is not shared"
    assert pool.reserve(1, 9) == pool.reserve(2, 9) == []
    assert pool.block_tables(1)[0][2] != pool.block_tables(2)[0][2]


def test_a_child_outlives_its_parent() -> None:
    pool = make_pool()
    compute(pool, 1, PROMPT[:6])
    pool.fork(1, 2)
    pool.release(1)
    assert pool.reserve(2, 7) == []
    pool.commit(2, PROMPT, 7)
    check_books(pool)
    pool.release(2)
    assert pool.num_free_blocks == 8


def test_of_two_equal_prompts_computed_together_one_is_cached_and_both_can_go_on() -> None:
    pool = make_pool()
    for seq_id in (1, 2):
        pool.match_prefix(seq_id, PROMPT[:8])
        pool.reserve(seq_id, 8)
    for seq_id in (1, 2):
        pool.commit(seq_id, PROMPT, 8)
    check_books(pool)
    assert pool.usage().num_cached == 2

    pool.reserve(2, 12)
    pool.commit(2, PROMPT, 12)
    check_books(pool)
    pool.release(1)
    pool.release(2)
    assert pool.match_prefix(3, [*PROMPT, 0]) == 12, "what the second added hangs below the first's blocks"


def test_what_another_computed_as_well_gives_way_when_memory_is_short() -> None:
    pool = make_pool(num_blocks=5)
    for seq_id in (1, 2):
        pool.match_prefix(seq_id, PROMPT[:8])
        pool.reserve(seq_id, 8)
    for seq_id in (1, 2):
        pool.commit(seq_id, PROMPT, 8)
    pool.release(1)
    assert pool.reserve(2, 12) == []
    pool.commit(2, PROMPT, 12)
    assert pool.num_free_blocks == 2, "the two blocks of the first, which are cached"

    assert pool.reserve(2, 20) == [], "alone in the cache, a sequence gets all of it"

    check_books(pool)
    pool.commit(2, [*PROMPT, 1, 2, 3, 4, 5, 6, 7, 8], 20)
    check_books(pool)
    pool.release(2)
    assert compute(pool, 3, PROMPT) == 0, "the start is gone"
    assert compute(pool, 4, PROMPT) == 11, "and has been computed again"


def test_a_block_that_a_fork_shares_is_cached_like_any_other() -> None:
    pool = make_pool(num_blocks=9)
    compute(pool, 1, PROMPT[:7])
    pool.fork(1, 2)
    pool.reserve(1, 8)
    for seq_id in (1, 2):
        pool.commit(seq_id, PROMPT, 7)
    pool.commit(1, PROMPT, 8)
    check_books(pool)
    assert pool.match_prefix(3, [*PROMPT[:8], 0]) == 8
    for seq_id in (3, 2, 1):
        pool.release(seq_id)
        check_books(pool)
    assert pool.num_free_blocks == 9


def test_a_swapped_sequence_comes_back_in_other_blocks_and_is_cached_again() -> None:
    pool = make_pool(num_host_blocks=4)
    compute(pool, 1, PROMPT[:6])
    device = list(pool.block_tables(1)[0])

    out = pool.swap_out(1)

    assert out is not None and [source for source, _ in out] == device
    assert pool.usage().num_used == 0
    with pytest.raises(EngineError, match="sequence 1 is swapped out"):
        pool.reserve(1, 7)
    with pytest.raises(EngineError, match="sequence 1 is swapped out"):
        pool.commit(1, PROMPT, 7)
    with pytest.raises(EngineError, match="sequence 1 is swapped out"):
        pool.fork(1, 2)
    back = pool.swap_in(1)
    assert back is not None and [source for source, _ in back] == [target for _, target in out]
    assert pool.block_tables(1)[0] == [target for _, target in back]
    assert pool.reserve(1, 8) == []
    pool.commit(1, PROMPT, 8)
    check_books(pool)
    assert pool.usage().num_cached == 2
    with pytest.raises(EngineError, match="not swapped out"):
        pool.swap_in(1)


def test_only_blocks_with_computed_tokens_are_swapped() -> None:
    pool = make_pool(num_host_blocks=1)
    pool.match_prefix(1, PROMPT)
    pool.reserve(1, 12)
    pool.commit(1, PROMPT, 3)
    out = pool.swap_out(1)
    assert out is not None and len(out) == 1


def test_swapping_without_room_changes_nothing() -> None:
    off, small = make_pool(), make_pool(num_blocks=3, num_host_blocks=2)
    for pool in (off, small):
        compute(pool, 1, PROMPT)
        assert pool.swap_out(1) is None
        assert len(pool.block_tables(1)[0]) == 3
    small.release(1)
    compute(small, 2, [1] * 8)
    assert small.swap_out(2) is not None
    compute(small, 3, PROMPT)
    assert small.swap_in(2) is None
    check_books(small)
    small.release(2)
    assert small.usage().num_free_host_blocks == 2


def test_a_reset_hides_running_prefixes_too_and_they_stay_hidden() -> None:
    pool = make_pool(num_host_blocks=4)
    compute(pool, 1, PROMPT[:8])
    compute(pool, 2, [1] * 8)
    assert pool.swap_out(2) is not None
    assert pool.reset_prefix_cache() == 4
    pool.reserve(1, 12)
    pool.commit(1, PROMPT, 12)
    assert pool.swap_in(2) is not None
    pool.reserve(2, 12)
    pool.commit(2, [1] * 12, 12)
    check_books(pool)
    assert pool.usage().num_cached == 0
    assert pool.match_prefix(3, PROMPT) == 0


def test_without_prefix_caching_nothing_is_kept() -> None:
    pool = CountingPool(8, 4, use_prefix_caching=False)
    compute(pool, 1, PROMPT)
    assert compute(pool, 2, PROMPT) == 0
    pool.release(1)
    usage = pool.usage()
    assert (usage.num_cached, usage.num_free, usage.num_queried_tokens) == (0, 5, 0)


def test_a_prompt_turned_away_at_the_door_is_not_counted_as_a_hit() -> None:
    pool = make_pool(num_blocks=3)
    compute(pool, 1, PROMPT[:8])
    for _ in range(3):
        assert pool.match_prefix(2, PROMPT + PROMPT) == 8
        assert pool.reserve(2, 17) is None
        pool.release(2)
    assert pool.usage().num_hit_tokens == 0


def test_fragmentation_counts_the_unfilled_slots_of_sequences_once() -> None:
    pool = make_pool()
    compute(pool, 1, PROMPT[:6])
    pool.fork(1, 2)
    usage = pool.usage()
    assert (usage.num_used, usage.num_unfilled_slots, usage.fragmentation) == (2, 2, 0.25)
    compute(pool, 3, PROMPT[:4])
    assert pool.usage().num_unfilled_slots == 2, "a fully cached block is full for every sequence"


def test_mistakes_are_named() -> None:
    pool = make_pool()
    pool.match_prefix(1, PROMPT)
    with pytest.raises(EngineError, match="sequence 1 is already in the cache"):
        pool.match_prefix(1, PROMPT)
    with pytest.raises(EngineError, match="sequence 2 is not in the cache"):
        pool.reserve(2, 1)
    with pytest.raises(EngineError, match="sequence 2 is not in the cache"):
        pool.commit(2, PROMPT, 1)
    with pytest.raises(EngineError, match="commits 8 tokens but has room for 0"):
        pool.commit(1, PROMPT, 8)
    with pytest.raises(ConfigError, match="block_size=0"):
        CountingPool(4, 0)
    pool.release(2)
    check_books(pool)


def test_a_leak_is_named() -> None:
    pool = make_pool(num_host_blocks=2)
    compute(pool, 1, PROMPT)
    blocks = list(pool.block_tables(1)[0])
    del pool._sequences[1]

    leaks = pool.audit_blocks()

    assert sorted((leak.block, leak.owner, leak.ref_count) for leak in leaks) == [
        (block, 1, 2) for block in sorted(blocks)
    ]


def test_the_slotted_pool_gives_each_sequence_one_long_block() -> None:
    pool = CountingPool(2, 10, use_prefix_caching=False, max_blocks_per_sequence=1, num_host_blocks=1)
    assert (pool.num_blocks, pool.block_size) == (2, 10)
    assert compute(pool, 1, PROMPT[:5]) == compute(pool, 2, PROMPT[:5]) == 0
    assert pool.can_ever_fit(10) and not pool.can_ever_fit(11)
    assert pool.reserve(1, 10) == []
    assert pool.reserve(1, 11) is None
    pool.match_prefix(3, PROMPT[:2])
    assert pool.reserve(3, 2) is None
    pool.release(2)
    assert pool.reserve(3, 2) == []
    assert pool.swap_out(1) is not None
    pool.fork(3, 4)
    pool.commit(3, PROMPT, 2)
    assert pool.reserve(3, 3) == [], "nothing was computed at the fork, so nothing is shared"
    check_books(pool)


def test_a_hit_is_exactly_the_longest_prefix_ever_committed() -> None:
    """Against a set of all prefixes in full; the cache is large, so nothing is evicted."""
    rng = random.Random(5)
    pool = CountingPool(2000, 4)
    prefixes: set[tuple[str | None, tuple[int, ...]]] = set()
    for seq_id in range(200):
        tokens = [rng.randrange(2) for _ in range(rng.randint(1, 24))]
        salt = rng.choice([None, "tenant"])
        longest = max((n for n in range(0, 25, 4) if (salt, tuple(tokens[:n])) in prefixes), default=0)
        expected = min(longest, len(tokens) - 1)
        assert compute(pool, seq_id, tokens, salt) == expected
        prefixes |= {(salt, tuple(tokens[:n])) for n in range(4, len(tokens) + 1, 4)}
        if rng.random() < 0.7:
            pool.release(seq_id)


def test_a_step_that_frees_a_copys_source_still_reads_right() -> None:
    """The source of a copy is evicted and written within the same step; order makes that safe."""
    pool = make_pool(num_blocks=4)
    traffic = Traffic(pool)
    first = traffic.admit(PROMPT[:8])
    assert first is not None
    traffic.release(first)
    again = traffic.enter(PROMPT[:8])
    source = pool.block_tables(again)[0][1]
    assert traffic.plan(again, 1)
    other = traffic.enter([1, 2, 3, 4])
    assert traffic.plan(other, 4)
    third = traffic.enter([5, 6, 7])
    traffic.plan(third, 3)
    assert source in pool.block_tables(other)[0] + pool.block_tables(third)[0]
    traffic.finish_step()
    traffic.verify_all()


@pytest.mark.parametrize("placement_seed", [None, 1])
def test_random_traffic_keeps_every_book_right(placement_seed: int | None) -> None:
    """A short version of tests/stress/test_cache_books.py."""
    life = RandomTraffic(CountingPool(7, 2, num_host_blocks=5, placement_seed=placement_seed), "short")
    life.run(200)
    life.finish()
    assert life.traffic.pool.num_free_blocks == 7


WINDOW = 6  # of four layers to a block, so a token sees itself and five more


def make_sliding(
    num_blocks: int = 12, windows: tuple[int | None, ...] = (WINDOW,), **options: Any
) -> CountingPool:
    return CountingPool(num_blocks, 4, windows=windows, max_chunk=4, **options)


@pytest.mark.parametrize("windows", [(WINDOW,), (None, WINDOW, WINDOW)], ids=str)
def test_a_long_sequence_holds_no_more_than_its_windows(windows: tuple[int | None, ...]) -> None:
    """Chunks of four tokens, then one by one: three blocks for 6 + 4 tokens, and one that they share."""
    pool = make_sliding(200, windows)
    tokens = list(range(300))
    pool.match_prefix(1, tokens)
    stops = [*range(4, 101, 4), *range(101, 301)]
    for stop in stops:
        assert pool.reserve(1, stop) == []
        pool.commit(1, tokens, stop)
        check_books(pool)
        for table, window in zip(pool.block_tables(1), windows, strict=True):
            held = [block for block in table if block != NO_BLOCK]
            first = 0 if window is None else max(pool.computed[1] - window + 1, 0) // 4
            assert len(held) <= (blocks_for(stop, 4) if window is None else 4)
            assert set(table[first : blocks_for(stop, 4)]) <= set(held), "what is seen is there"
    assert pool.blocks_of(300) == 75 * windows.count(None) + 4 * windows.count(WINDOW)
    pool.release(1)
    pool.reset_prefix_cache()
    assert pool.num_free_blocks == 200


def test_a_cache_far_too_small_for_full_attention_serves_a_long_sequence() -> None:
    pool, full = make_sliding(4), make_pool(4)
    assert pool.can_ever_fit(10_000) and not full.can_ever_fit(17)
    assert pool.longest() > 10**9 and full.longest() == 16
    tokens = list(range(400))
    traffic = Traffic(pool)
    seq_id = traffic.admit(tokens, chunk_len=4)
    assert seq_id is not None
    while traffic.sequences[seq_id].num_computed < 400:
        assert traffic.run(seq_id, 4)
        traffic.verify_all()


def test_a_prompt_goes_on_only_from_where_its_windows_are_whole() -> None:
    pool = make_sliding(40, (None, WINDOW))
    tokens = list(range(40))
    for seq_id in (1, 2):
        pool.match_prefix(seq_id, tokens if seq_id == 1 else tokens[:20])
        for stop in range(4, 41 if seq_id == 1 else 21, 4):
            pool.reserve(seq_id, stop)
            pool.commit(seq_id, tokens, stop)
    assert pool.match_prefix(3, [*tokens[:12], 99]) == 12, "nothing has been evicted"
    pool.release(3)
    pool.release(2)
    behind = len([block for block in pool.block_tables(1)[1] if block == NO_BLOCK])
    assert behind == 7 and pool.tree.evict(behind) == behind
    assert pool.match_prefix(4, [*tokens[:12], 99]) == 0, "the last six tokens before it are gone"
    assert pool.match_prefix(5, [*tokens, 99]) == 40
    assert pool.block_tables(5)[0][:10] == pool.block_tables(1)[0], "all there are of layers without a window"
    assert pool.block_tables(5)[1] == [*[NO_BLOCK] * 8, *pool.block_tables(1)[1][8:]]
    check_books(pool)


def test_only_what_a_window_reaches_is_swapped() -> None:
    pool = make_sliding(12, (None, WINDOW), num_host_blocks=9)
    tokens = list(range(28))
    pool.match_prefix(1, tokens)
    for stop in range(4, 29, 4):
        pool.reserve(1, stop)
        pool.commit(1, tokens, stop)
    out = pool.swap_out(1)
    assert out is not None and len(out) == 7 + 2
    check_books(pool)
    assert pool.swap_in(1) is not None
    assert [len([b for b in table if b != NO_BLOCK]) for table in pool.block_tables(1)] == [7, 2]
    assert pool.reserve(1, 29) == []
    check_books(pool)


def test_a_fork_shares_what_its_windows_reach_and_copies_in_every_table() -> None:
    pool = make_sliding(20, (None, WINDOW))
    tokens = list(range(18))
    pool.match_prefix(1, tokens)
    for stop in (4, 8, 12, 16, 18):
        pool.reserve(1, stop)
        pool.commit(1, tokens, stop)
    pool.fork(1, 2)
    before = [list(table) for table in pool.block_tables(1)]
    assert pool.reserve(2, 19) == [
        (before[0][4], pool.block_tables(2)[0][4]),
        (before[1][4], pool.block_tables(2)[1][4]),
    ]
    assert pool.block_tables(1) == before
    check_books(pool)


def test_blocks_are_counted_upwards() -> None:
    assert [blocks_for(n, 4) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]
