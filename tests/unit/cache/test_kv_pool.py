from __future__ import annotations

import random

import pytest

from infer.cache.kv_pool import blocks_for
from infer.cache.sequence_books import SequenceBooks
from infer.errors import ConfigError, EngineError
from tests.unit.cache.counting_pool import CountingPool, CountingSlottedPool
from tests.unit.cache.traffic import RandomTraffic, Traffic

PROMPT = list(range(100, 112))  # three blocks of four


def make_pool(num_blocks: int = 8, num_host_blocks: int = 0) -> CountingPool:
    return CountingPool(num_blocks, 4, num_host_blocks=num_host_blocks)


def compute(pool: CountingPool, seq_id: int, tokens: list[int], salt: str | None = None) -> int:
    """Admit a prompt and compute all of it; returns how many tokens were cached."""
    num_cached = pool.match_prefix(seq_id, tokens, salt)
    assert pool.reserve(seq_id, len(tokens)) is not None
    pool.commit(seq_id, tokens, len(tokens))
    pool.check()
    return num_cached


def test_a_prompt_gets_the_blocks_it_needs_and_gives_them_back() -> None:
    pool = make_pool()
    assert pool.match_prefix(1, PROMPT[:9]) == 0
    assert pool.reserve(1, 9) == []
    assert len(pool.block_table(1)) == 3
    pool.release(1)
    assert pool.usage().num_free == 8
    assert pool.audit_blocks() == []


def test_a_decode_step_takes_a_block_only_at_a_boundary() -> None:
    pool = make_pool()
    compute(pool, 1, PROMPT[:5])
    table = list(pool.block_table(1))
    for num_tokens in (6, 7, 8):
        assert pool.reserve(1, num_tokens) == []
        assert pool.block_table(1) == table
    assert pool.reserve(1, 9) == []
    assert pool.block_table(1)[:2] == table
    assert len(pool.block_table(1)) == 3


def test_a_second_prompt_starts_after_the_blocks_it_shares() -> None:
    pool = make_pool()
    compute(pool, 1, PROMPT)
    assert compute(pool, 2, PROMPT[:8] + [1, 2, 3]) == 8
    assert pool.block_table(2)[:2] == pool.block_table(1)[:2]
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

    assert copies == [(pool.block_table(1)[-1], pool.block_table(2)[-1])]
    assert pool.block_table(2)[:-1] == pool.block_table(1)[:-1]
    assert pool.block_table(2)[-1] not in pool.block_table(1)
    pool.commit(2, tokens, num_tokens)
    pool.check()


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
    pool.check()
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
    pool.check()


def test_salts_do_not_share() -> None:
    pool = make_pool()
    compute(pool, 1, PROMPT, salt="a")
    assert pool.match_prefix(2, PROMPT, "b") == 0
    assert pool.match_prefix(3, PROMPT, "a") == 11


def test_reserving_evicts_cached_blocks_that_nobody_uses_oldest_first() -> None:
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
    assert (pool.block_table(2), pool.num_free_blocks) == ([], 1)
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
    assert pool.block_table(2) == pool.block_table(1)
    shared = list(pool.block_table(1))

    assert pool.reserve(2, 7) == [(shared[1], pool.block_table(2)[1])]
    assert pool.block_table(1) == shared
    assert pool.block_table(2)[0] == shared[0]
    assert pool.reserve(1, 7) == [], "after the copy the first one is alone again"
    pool.check()


def test_a_fork_at_a_block_boundary_needs_no_copy() -> None:
    pool = make_pool()
    compute(pool, 1, PROMPT[:8])
    pool.reserve(1, 12)
    pool.fork(1, 2)
    assert len(pool.block_table(2)) == 2, "room that the parent reserved is not shared"
    assert pool.reserve(1, 9) == pool.reserve(2, 9) == []
    assert pool.block_table(1)[2] != pool.block_table(2)[2]


def test_a_child_outlives_its_parent() -> None:
    pool = make_pool()
    compute(pool, 1, PROMPT[:6])
    pool.fork(1, 2)
    pool.release(1)
    assert pool.reserve(2, 7) == []
    pool.commit(2, PROMPT, 7)
    pool.check()
    pool.release(2)
    assert pool.num_free_blocks == 8


def test_of_two_equal_prompts_computed_together_one_is_cached_and_both_can_go_on() -> None:
    pool = make_pool()
    for seq_id in (1, 2):
        pool.match_prefix(seq_id, PROMPT[:8])
        pool.reserve(seq_id, 8)
    for seq_id in (1, 2):
        pool.commit(seq_id, PROMPT, 8)
    pool.check()
    assert pool.usage().num_cached == 2

    pool.reserve(2, 12)
    pool.commit(2, PROMPT, 12)
    pool.check()
    pool.release(1)
    pool.release(2)
    assert pool.match_prefix(3, [*PROMPT, 0]) == 12, "what the second added hangs below the first's blocks"


def test_duplicates_give_way_when_memory_is_short() -> None:
    pool = make_pool(num_blocks=5)
    for seq_id in (1, 2):
        pool.match_prefix(seq_id, PROMPT[:8])
        pool.reserve(seq_id, 8)
    for seq_id in (1, 2):
        pool.commit(seq_id, PROMPT, 8)
    pool.release(1)
    assert pool.reserve(2, 12) == []
    pool.commit(2, PROMPT, 12)
    assert pool.num_free_blocks == 0, "two blocks of the first are held as twins"

    assert pool.reserve(2, 20) == [], "alone in the cache, a sequence gets all of it"

    pool.check()
    pool.commit(2, [*PROMPT, 1, 2, 3, 4, 5, 6, 7, 8], 20)
    assert pool.usage().num_cached == 5


def test_a_duplicate_that_a_fork_shares_does_not_enter_the_tree() -> None:
    """The fork may have given up its path to that block, and whoever holds a cached block holds its path."""
    pool = make_pool(num_blocks=9)
    for seq_id in (1, 2):
        pool.match_prefix(seq_id, PROMPT)
        pool.reserve(seq_id, 12)
    for seq_id in (1, 2):
        pool.commit(seq_id, PROMPT, 12)
    pool.fork(2, 3)
    pool.reserve(3, 16)
    pool.commit(3, [*PROMPT, 1, 2, 3, 4], 16)
    assert pool.match_prefix(4, [*PROMPT[:8], 0]) == 8
    pool.match_prefix(9, [0] * 36)
    assert pool.reserve(9, 36) is None, "sequence 2 gives up its twins, 3 cannot"
    pool.release(1)
    assert pool.reserve(9, 36) is None, "now nobody but 3 needs the third cached block"
    pool.release(4)
    pool.release(3)
    pool.check()


def test_a_swapped_sequence_comes_back_in_other_blocks_and_is_cached_again() -> None:
    pool = make_pool(num_host_blocks=4)
    compute(pool, 1, PROMPT[:6])
    device = list(pool.block_table(1))

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
    assert pool.block_table(1) == [target for _, target in back]
    assert pool.reserve(1, 8) == []
    pool.commit(1, PROMPT, 8)
    pool.check()
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
        assert len(pool.block_table(1)) == 3
    small.release(1)
    compute(small, 2, [1] * 8)
    assert small.swap_out(2) is not None
    compute(small, 3, PROMPT)
    assert small.swap_in(2) is None
    small.check()
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
    pool.check()
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
    assert pool.usage().num_unfilled_slots == 2, "a fully cached block is full, whoever looks at it"


def test_mistakes_are_named() -> None:
    pool = make_pool()
    pool.match_prefix(1, PROMPT)
    with pytest.raises(EngineError, match="sequence 1 is in the cache already"):
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
    pool.check()


def test_a_leak_is_named() -> None:
    pool = make_pool(num_host_blocks=2)
    compute(pool, 1, PROMPT)
    blocks = list(pool.block_table(1))
    del pool._sequences[1]

    leaks = pool.audit_blocks()

    assert sorted((leak.block, leak.owner, leak.ref_count) for leak in leaks) == [
        (block, 1, 2) for block in sorted(blocks)
    ]


def test_the_slotted_pool_gives_each_sequence_one_long_block() -> None:
    pool = CountingSlottedPool(2, 10, num_host_sequences=1)
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
    pool.check()


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
    source = pool.block_table(again)[1]
    assert traffic.plan(again, 1)
    other = traffic.enter([1, 2, 3, 4])
    assert traffic.plan(other, 4)
    third = traffic.enter([5, 6, 7])
    traffic.plan(third, 3)
    assert source in pool.block_table(other) + pool.block_table(third)
    traffic.finish_step()
    traffic.verify_all()


@pytest.mark.parametrize("placement_seed", [None, 1])
def test_random_traffic_keeps_every_book_right(placement_seed: int | None) -> None:
    """A short version of tests/stress/test_cache_books.py."""
    life = RandomTraffic(CountingPool(7, 2, num_host_blocks=5, placement_seed=placement_seed), "short")
    life.run(200)
    life.finish()
    assert life.traffic.pool.num_free_blocks == 7


@pytest.mark.parametrize("with_twin", [[], [0], [5], [0, 5], [2, 3], [0, 1, 2, 3, 4, 5]], ids=str)
def test_a_sequence_names_its_deepest_block_first_and_each_twin_behind_its_own(with_twin: list[int]) -> None:
    twins = [(10 + place, 20 + place) for place in with_twin]
    blocks = [10, 11, 12, 13, 14, 15]
    books = SequenceBooks(seq_id=1, salt=None, blocks=blocks, enters_tree=True, twins=twins)
    expected = []
    for place in reversed(range(6)):
        expected += [10 + place, 20 + place] if place in with_twin else [10 + place]
    assert books.holdings() == expected
    assert blocks == [10, 11, 12, 13, 14, 15]


def test_blocks_are_counted_upwards() -> None:
    assert [blocks_for(n, 4) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]
