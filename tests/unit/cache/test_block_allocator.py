from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from infer.cache.block_allocator import PREFIX_TREE, BlockAllocator, Leak
from infer.errors import EngineError, OutOfBlocks
from tests.support.books import check_books


def test_blocks_are_handed_out_in_a_fixed_order_most_recently_freed_first() -> None:
    allocator = BlockAllocator(4)
    assert allocator.take(3, 1) == [0, 1, 2]
    allocator.drop([1], 1)
    assert allocator.take(2, 2) == [1, 3]


def test_a_placement_seed_scatters_blocks_and_repeats_itself() -> None:
    orders = [BlockAllocator(64, placement_seed=seed).take(64, 1) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != list(range(64))
    assert sorted(orders[0]) == list(range(64))


def test_taking_too_many_takes_none() -> None:
    allocator = BlockAllocator(3)
    allocator.take(1, 1)
    with pytest.raises(OutOfBlocks, match="need 3 device blocks, 2 of 3 are free"):
        allocator.take(3, 2)
    assert allocator.num_free == 2
    assert allocator.blocks_of(2) == frozenset()


@pytest.mark.parametrize("seed", [None, 3])
def test_one_block_at_a_time_is_the_same_as_many(seed: int | None) -> None:
    one, many = BlockAllocator(5, placement_seed=seed), BlockAllocator(5, placement_seed=seed)
    assert [one.take(1, 1)[0] for _ in range(5)] == many.take(5, 1)
    assert one.blocks_of(1) == many.blocks_of(1)
    check_books(one)


def test_the_tree_adopts_a_block_beside_all_its_owners() -> None:
    allocator = BlockAllocator(2)
    (block,) = allocator.take(1, 1)
    allocator.share([block], 2)
    allocator.adopt(block)
    assert allocator.owners_of(block) == [1, 2, PREFIX_TREE]
    allocator.drop([block], 1)
    assert not allocator.is_idle(block)
    allocator.drop([block], 2)
    assert allocator.is_idle(block)
    check_books(allocator)


def test_a_block_is_free_when_its_last_owner_drops_it() -> None:
    allocator = BlockAllocator(2)
    (block,) = allocator.take(1, "a")
    allocator.share([block], "b")
    assert allocator.ref_count(block) == 2
    allocator.drop([block], "a")
    assert (allocator.ref_count(block), allocator.num_free) == (1, 1)
    allocator.drop([block], "b")
    assert (allocator.ref_count(block), allocator.num_free) == (0, 2)


def test_a_double_free_names_block_and_owner_and_changes_nothing() -> None:
    allocator = BlockAllocator(4)
    blocks = allocator.take(3, 7)
    allocator.share([blocks[1]], 8)
    allocator.drop([blocks[1]], 7)
    with pytest.raises(EngineError, match=r"7 drops device block 1 more often .* held by 8"):
        allocator.drop([blocks[0], blocks[1]], 7)
    with pytest.raises(EngineError, match=r"7 drops device block 0 more often"):
        allocator.drop([blocks[0], blocks[0]], 7)
    with pytest.raises(EngineError, match=r"9 drops device block 0 more often"):
        allocator.drop([blocks[0]], 9)
    assert allocator.blocks_of(7) == {blocks[0], blocks[2]}
    check_books(allocator)


@pytest.mark.parametrize("block", [-1, 3, 99])
def test_a_block_without_an_owner_cannot_be_shared(block: int) -> None:
    allocator = BlockAllocator(4)
    allocator.take(3, 1)
    with pytest.raises(EngineError, match=f"2 cannot share device block {block}"):
        allocator.share([0, block], 2)
    assert allocator.ref_count(0) == 1
    check_books(allocator)


def test_an_owner_holds_a_block_only_once() -> None:
    allocator = BlockAllocator(4)
    allocator.take(2, 1)
    with pytest.raises(EngineError, match="1 already holds device block 1"):
        allocator.share([1], 1)
    with pytest.raises(EngineError, match="2 already holds device block 0"):
        allocator.share([0, 0], 2)
    check_books(allocator)


def test_a_block_is_idle_exactly_while_only_the_prefix_tree_holds_it() -> None:
    allocator = BlockAllocator(3)
    (block,) = allocator.take(1, 1)
    allocator.share([block], PREFIX_TREE)
    assert allocator.num_idle == 0
    allocator.drop([block], 1)
    assert (allocator.num_idle, allocator.oldest_idle()) == (1, block)
    allocator.share([block], 2)
    assert (allocator.num_idle, allocator.oldest_idle()) == (0, None)
    allocator.drop([block], PREFIX_TREE)
    assert (allocator.num_idle, allocator.ref_count(block)) == (0, 1)


def test_the_audit_names_blocks_of_owners_that_are_gone() -> None:
    allocator = BlockAllocator(5, place="host")
    allocator.take(1, "alive")
    lost = allocator.take(2, "lost")
    allocator.share([lost[0]], "alive")

    leaks = allocator.audit_blocks({"alive"})

    assert leaks == [
        Leak(place="host", block=lost[0], owner="lost", ref_count=2),
        Leak(place="host", block=lost[1], owner="lost", ref_count=1),
    ]
    assert allocator.audit_blocks({"alive", "lost"}) == []


def test_the_check_notices_a_count_that_is_off() -> None:
    allocator = BlockAllocator(3)
    allocator.take(2, 1)
    check_books(allocator)
    allocator._ref_counts[0] += 1
    with pytest.raises(EngineError, match="add up"):
        check_books(allocator)


OWNERS = [1, 2, "three", PREFIX_TREE]


class AllocatorAgainstADict(RuleBasedStateMachine):
    """The reference: a dict from (block, owner) pairs, counted afresh each time."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(6, placement_seed=3)
        self.held: set[tuple[int, object]] = set()
        self.idle: list[int] = []

    def owners(self, block: int) -> set[object]:
        return {owner for held, owner in self.held if held == block}

    @rule(count=st.integers(0, 7), owner=st.sampled_from(OWNERS))
    def take(self, count: int, owner: int | str) -> None:
        free = [block for block in range(6) if not self.owners(block)]
        if count > len(free):
            with pytest.raises(OutOfBlocks):
                self.allocator.take(count, owner)
            return
        blocks = self.allocator.take(count, owner)
        assert len(set(blocks)) == count and set(blocks) <= set(free)
        self.held |= {(block, owner) for block in blocks}
        if owner == PREFIX_TREE:  # the tree never takes: it is given blocks by sequences
            self.allocator.drop(blocks, owner)
            self.held -= {(block, owner) for block in blocks}

    @rule(blocks=st.lists(st.integers(0, 5), max_size=4), owner=st.sampled_from(OWNERS))
    def share(self, blocks: list[int], owner: int | str) -> None:
        is_allowed = len(set(blocks)) == len(blocks) and all(
            self.owners(block) and owner not in self.owners(block) for block in blocks
        )
        if not is_allowed:
            with pytest.raises(EngineError):
                self.allocator.share(blocks, owner)
            return
        self.allocator.share(blocks, owner)
        self.held |= {(block, owner) for block in blocks}
        self.idle = [block for block in self.idle if block not in blocks]

    @rule(blocks=st.lists(st.integers(0, 5), max_size=4), owner=st.sampled_from(OWNERS))
    def drop(self, blocks: list[int], owner: int | str) -> None:
        if len(set(blocks)) != len(blocks) or not all((block, owner) in self.held for block in blocks):
            with pytest.raises(EngineError):
                self.allocator.drop(blocks, owner)
            return
        self.allocator.drop(blocks, owner)
        for block in blocks:
            self.held.discard((block, owner))
            if self.owners(block) == {PREFIX_TREE}:
                self.idle.append(block)
        self.idle = [block for block in self.idle if self.owners(block)]

    @invariant()
    def agree(self) -> None:
        check_books(self.allocator)
        for block in range(6):
            assert self.allocator.ref_count(block) == len(self.owners(block))
            assert set(self.allocator.owners_of(block)) == self.owners(block)
        assert self.allocator.num_free == sum(not self.owners(block) for block in range(6))
        assert list(self.allocator._idle) == self.idle


TestAllocatorAgainstADict = AllocatorAgainstADict.TestCase
TestAllocatorAgainstADict.settings = settings(stateful_step_count=25, database=None)
