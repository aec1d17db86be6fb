from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from infer.cache import prefix_tree
from infer.cache.block_allocator import PREFIX_TREE, BlockAllocator
from infer.cache.prefix_tree import NO_BLOCK, ROOT, PrefixTree, chain_hashes
from infer.engine.prefixes import update_prefixes
from infer.errors import EngineError
from tests.support.books import check_books, depth_of

THE_CAT, SAT_ON, RAN_TO, THE_MAT = [1, 2], [3, 4], [5, 6], [1, 7]


def make_tree(
    num_blocks: int = 8, windows: tuple[int | None, ...] = (None,)
) -> tuple[BlockAllocator, PrefixTree]:
    allocator = BlockAllocator(num_blocks)
    return allocator, PrefixTree(allocator, block_size=2, windows=windows)


def cache(
    allocator: BlockAllocator, tree: PrefixTree, tokens: list[int], owner: int, salt: str | None = None
) -> list[int]:
    """Compute a prompt from nothing, as a sequence that saw no cache would, and insert it."""
    blocks = allocator.take(len(tokens) // 2, owner)
    tree.insert(tokens, [blocks], len(blocks), salt=salt)
    check_books(tree)
    return blocks


def match(tree: PrefixTree, tokens: Sequence[int], salt: str | None = None) -> list[int]:
    """The blocks of the longest cached prefix in the first table."""
    return [node.blocks[0] for node in tree.match(tokens, salt)]


def test_the_longest_cached_prefix_is_found_block_by_block() -> None:
    allocator, tree = make_tree()
    blocks = cache(allocator, tree, THE_CAT + SAT_ON + THE_MAT, owner=1)
    assert match(tree, THE_CAT + SAT_ON + THE_MAT) == blocks
    assert match(tree, THE_CAT + SAT_ON + RAN_TO) == blocks[:2]
    assert match(tree, THE_CAT + SAT_ON + [1]) == blocks[:2]
    assert match(tree, THE_CAT + [3]) == blocks[:1]
    assert match(tree, [1]) == match(tree, []) == match(tree, SAT_ON) == []


def test_two_prompts_share_a_path_as_long_as_they_agree() -> None:
    allocator, tree = make_tree()
    sat = cache(allocator, tree, THE_CAT + SAT_ON, owner=1)
    allocator.share(sat[:1], 2)
    (ran,) = allocator.take(1, 2)
    (cat,) = tree.match(THE_CAT)
    number = tree.insert(THE_CAT + RAN_TO, [[sat[0], ran]], 2, after=cat.number)
    assert depth_of(tree, number) == 2
    assert match(tree, THE_CAT + RAN_TO) == [sat[0], ran]
    assert tree.num_cached_blocks == 3
    check_books(tree)


class Clashing(bytes):
    """A label that has the hash of every other."""

    def __hash__(self) -> int:
        return 1

    def __getitem__(self, key: Any) -> Any:
        part = super().__getitem__(key)
        return Clashing(part) if isinstance(part, bytes) else part


class ClashingIds(array):  # type: ignore[type-arg]
    """Ids whose bytes all have one hash."""

    def tobytes(self) -> bytes:
        return Clashing(super().tobytes())


def test_equal_hashes_do_not_make_equal_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_tree, "array", ClashingIds)
    allocator, tree = make_tree()
    labels = tree._labels
    monkeypatch.setattr(tree, "_labels", lambda tokens: [Clashing(label) for label in labels(tokens)])
    blocks = cache(allocator, tree, THE_CAT + SAT_ON, owner=1)
    assert match(tree, THE_CAT + SAT_ON) == blocks
    assert match(tree, THE_CAT + RAN_TO) == blocks[:1]
    assert match(tree, RAN_TO + SAT_ON) == []


@pytest.mark.parametrize("place", range(4))
def test_ids_that_differ_in_any_bit_are_another_prefix(place: int) -> None:
    allocator, tree = make_tree()
    blocks = cache(allocator, tree, THE_CAT + SAT_ON, owner=1)
    for bit in range(32):
        tokens = THE_CAT + SAT_ON
        tokens[place] ^= 1 << bit
        assert match(tree, tokens) == blocks[: place // 2]


def test_one_block_behind_a_path_is_found_like_many() -> None:
    """The labels are the same, whatever kind of sequence the ids come in."""
    allocator, tree = make_tree()
    tokens = THE_CAT + SAT_ON + THE_MAT
    tables = [allocator.take(3, 1)]
    first = tree.insert(tokens, tables, 1)
    second = tree.insert(tokens, tables, 2, after=first)
    tree.insert(array("I", tokens), tables, 3, after=second)
    for same in (tokens, tuple(tokens), array("I", tokens)):
        assert match(tree, same) == tables[0]
    check_books(tree)


def test_a_salt_is_a_world_of_its_own() -> None:
    allocator, tree = make_tree()
    plain = cache(allocator, tree, THE_CAT + SAT_ON, owner=1)
    salted = cache(allocator, tree, THE_CAT + SAT_ON, owner=2, salt="tenant")
    assert set(plain).isdisjoint(salted)
    assert match(tree, THE_CAT + SAT_ON) == plain
    assert match(tree, THE_CAT + SAT_ON, "tenant") == salted
    assert match(tree, THE_CAT + SAT_ON, "other") == match(tree, THE_CAT + SAT_ON, "") == []


def test_a_duplicate_stays_its_owners_and_what_follows_hangs_below_the_cached_one() -> None:
    allocator, tree = make_tree()
    first = cache(allocator, tree, THE_CAT + SAT_ON, owner=1)
    second = allocator.take(3, 2)

    tree.insert(THE_CAT + SAT_ON + RAN_TO, [second], 3)

    assert match(tree, THE_CAT + SAT_ON + RAN_TO) == [*first, second[2]]
    assert allocator.owners_of(first[0]) == [1, PREFIX_TREE]
    assert allocator.owners_of(second[0]) == [2]
    allocator.drop(second[::-1], 2)
    allocator.drop(first[::-1], 1)
    assert allocator.num_free == 5
    assert tree.evict(99) == 3
    assert allocator.num_free == 8


def test_inserting_the_same_blocks_again_changes_nothing() -> None:
    allocator, tree = make_tree()
    blocks = cache(allocator, tree, THE_CAT + SAT_ON, owner=1)
    assert depth_of(tree, tree.insert(THE_CAT + SAT_ON, [blocks], 2)) == 2
    assert tree.num_cached_blocks == 2
    assert allocator.ref_count(blocks[0]) == 2


def test_a_gap_is_filled_by_the_next_that_computes_it() -> None:
    """The start of a prefix may go while another sequence that computed it as well is further ahead."""
    allocator, tree = make_tree()
    first = cache(allocator, tree, THE_CAT + SAT_ON, owner=1)
    second = allocator.take(3, 2)
    tree.insert(THE_CAT + SAT_ON + RAN_TO, [second], 3)
    allocator.drop(first[::-1], 1)
    assert tree.evict(2) == 2
    check_books(tree)
    assert match(tree, THE_CAT + SAT_ON + RAN_TO) == [], "without its start the rest is of no use"

    third = cache(allocator, tree, THE_CAT + SAT_ON, owner=3)

    assert match(tree, THE_CAT + SAT_ON + RAN_TO) == [*third, second[2]]


def test_a_path_whose_end_is_gone_is_entered_anew() -> None:
    allocator, tree = make_tree()
    first = cache(allocator, tree, THE_CAT, owner=1)
    second = allocator.take(2, 2)
    number = tree.insert(THE_CAT + SAT_ON, [second], 1)
    allocator.drop(first, 1)
    assert tree.evict(1) == 1
    assert depth_of(tree, number) is None
    tree.insert(THE_CAT + SAT_ON, [second], 2, after=number)
    check_books(tree)
    assert match(tree, THE_CAT + SAT_ON) == second


def test_blocks_come_one_by_one_beside_others() -> None:
    allocator, tree = make_tree()
    (root,) = cache(allocator, tree, THE_CAT, owner=1)
    (number,) = [node.number for node in tree.match(THE_CAT)]
    (sat,) = allocator.take(1, 1)
    tree.insert(THE_CAT + SAT_ON, [[root, sat]], 2, after=number)
    (ran,) = allocator.take(1, 1)
    tree.insert(THE_CAT + RAN_TO, [[root, ran]], 2, after=number)
    assert match(tree, THE_CAT + SAT_ON) == [root, sat]
    assert match(tree, THE_CAT + RAN_TO) == [root, ran]
    check_books(tree)


def test_an_insertion_needs_its_tokens() -> None:
    allocator, tree = make_tree()
    blocks = allocator.take(2, 1)
    with pytest.raises(EngineError, match="blocks of 4 tokens are cached, but there are only 3"):
        tree.insert([1, 2, 3], [blocks], 2)


def test_the_blocks_of_a_group_go_together_and_the_node_stays_for_the_others() -> None:
    """Tables: one that sees everything, two with one window."""
    allocator, tree = make_tree(9, (None, 4, 4))
    tables = [allocator.take(3, 1) for _ in range(3)]
    number = tree.insert(THE_CAT + SAT_ON + THE_MAT, tables, 3)
    allocator.drop([tables[1][0], tables[2][0]], 1)  # behind the window
    assert tree.evict(1) == 2
    check_books(tree)
    assert [node.blocks for node in tree.match(THE_CAT + SAT_ON)] == [
        (tables[0][0], NO_BLOCK, NO_BLOCK),
        (tables[0][1], tables[1][1], tables[2][1]),
    ]
    allocator.drop([*tables[1][1:], *tables[2][1:], *tables[0][::-1]], 1)
    assert tree.evict(99) == 7
    assert (depth_of(tree, number), tree.num_cached_blocks) == (None, 0)
    check_books(tree)


def test_a_block_behind_a_window_goes_first_though_others_follow_it() -> None:
    allocator, tree = make_tree(3, (4,))
    blocks = allocator.take(3, 1)
    tree.insert(THE_CAT + SAT_ON + THE_MAT, [blocks], 3)
    allocator.drop(blocks[:1], 1)
    allocator.drop(blocks[:0:-1], 1)
    assert tree.evict(1) == 1
    assert [node.blocks[0] for node in tree.match(THE_CAT + SAT_ON + THE_MAT)] == [NO_BLOCK, *blocks[1:]]


def test_nothing_is_left_of_a_block_that_was_let_go_of_before_it_was_entered() -> None:
    allocator, tree = make_tree(3, (1,))
    (block,) = allocator.take(1, 1)
    number = tree.insert(THE_CAT + SAT_ON, [[block, NO_BLOCK]], 2)
    assert depth_of(tree, number) is None
    check_books(tree)
    assert [node.blocks for node in tree.match(THE_CAT + SAT_ON)] == [(block,)]
    assert tree.insert(THE_CAT, [[NO_BLOCK]], 1, salt="other") != ROOT
    check_books(tree)
    assert tree.match(THE_CAT, "other") == []


def test_the_least_recently_used_leaf_goes_first() -> None:
    allocator, tree = make_tree()
    cat = cache(allocator, tree, THE_CAT + SAT_ON, owner=1)
    mat = cache(allocator, tree, THE_MAT + SAT_ON, owner=2)
    allocator.drop(mat[::-1], 2)
    allocator.drop(cat[::-1], 1)
    assert allocator.num_idle == 4

    used_again = match(tree, THE_MAT)
    allocator.share(used_again, 3)
    allocator.drop(used_again, 3)

    for expected in (mat[1], cat[1], cat[0], mat[0]):
        assert tree.evict(1) == 1
        assert allocator.ref_count(expected) == 0
        check_books(tree)
    assert tree.evict(1) == 0
    assert tree.num_evicted_blocks == 4


def test_a_block_that_a_sequence_holds_is_never_evicted() -> None:
    allocator, tree = make_tree()
    blocks = cache(allocator, tree, THE_CAT + SAT_ON + THE_MAT, owner=1)
    allocator.drop(blocks[:0:-1], 1)
    assert allocator.num_idle == 2
    assert tree.evict(99) == 2
    assert match(tree, THE_CAT + SAT_ON) == blocks[:1]


def test_eviction_copes_with_blocks_dropped_in_the_wrong_order() -> None:
    allocator, tree = make_tree()
    blocks = cache(allocator, tree, THE_CAT + SAT_ON + THE_MAT, owner=1)
    allocator.drop(blocks, 1)  # root first: the oldest idle block is not a leaf
    assert tree.evict(2) == 2
    check_books(tree)
    assert match(tree, THE_CAT + SAT_ON) == blocks[:1]
    assert tree.evict(2) == 1


def test_a_reset_forgets_all_and_leaves_sequences_their_blocks() -> None:
    allocator, tree = make_tree()
    kept = cache(allocator, tree, THE_CAT, owner=1)
    gone = cache(allocator, tree, THE_MAT, owner=2)
    allocator.drop(gone, 2)
    assert tree.reset() == 2
    assert (tree.num_cached_blocks, allocator.num_idle) == (0, 0)
    assert match(tree, THE_CAT) == []
    assert (allocator.owners_of(kept[0]), allocator.num_free) == ([1], 7)


def test_a_reset_counts_a_block_with_a_copy_in_the_host_once() -> None:
    allocator = BlockAllocator(8)
    tree = PrefixTree(allocator, block_size=2, host=BlockAllocator(4, place="host"))
    tree.keeps_evicted = True
    allocator.drop(cache(allocator, tree, THE_CAT + SAT_ON, owner=1), 1)
    tree.evict(2)
    cache(allocator, tree, THE_CAT, owner=2)  # computed again: it is in both tiers now
    assert (tree.num_cached_blocks, tree.num_host_blocks) == (1, 2)
    assert tree.reset() == 2


prompts = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=4).map(
    lambda pairs: [token for pair in pairs for token in pair]
)
salts = st.sampled_from([None, None, "tenant"])


def test_news_are_of_blocks_that_see_everything_where_there_are_such() -> None:
    allocator, tree = make_tree(windows=(None, 2))
    tree.watch()
    blocks = [allocator.take(2, 1), allocator.take(2, 1)]
    tree.insert(THE_CAT + SAT_ON, blocks, 2)
    prefixes = list(chain_hashes(THE_CAT + SAT_ON, 2, None))
    assert tree.take_news() == dict.fromkeys(prefixes, True) and tree.take_news() == {}
    tree.forget(blocks[1][0])
    assert tree.take_news() == {}, "it fell behind the window, and can be continued from"
    tree.forget(blocks[0][1])
    assert tree.take_news() == {prefixes[1]: False}
    tree.insert(THE_CAT + SAT_ON, [[blocks[0][0], *allocator.take(1, 1)], [NO_BLOCK, blocks[1][1]]], 2)
    assert tree.take_news() == {prefixes[1]: True}


def test_news_of_a_cache_with_windows_alone() -> None:
    allocator, tree = make_tree(windows=(2,))
    tree.watch()
    blocks = allocator.take(2, 1)
    tree.insert(THE_CAT + SAT_ON, [blocks], 2)
    tree.take_news()
    tree.forget(blocks[1])
    assert tree.take_news() == {list(chain_hashes(THE_CAT + SAT_ON, 2, None))[1]: False}


class TreeAgainstADict(RuleBasedStateMachine):
    """The reference: a dict of every cached prefix in full, and a list of idle blocks in order."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator, self.tree = make_tree(num_blocks=10)
        self.tree.watch()
        self.told: set[int] = set()  # prefixes, by hash
        self.cached: dict[tuple[str | None, tuple[int, ...]], int] = {}
        self.held: dict[int, list[int]] = {}  # by owner: everything it holds, root first
        self.idle: list[int] = []
        self.next_owner = 0

    def longest(self, tokens: list[int], salt: str | None) -> list[int]:
        blocks = []
        for stop in range(2, len(tokens) + 1, 2):
            if (salt, tuple(tokens[:stop])) not in self.cached:
                break
            blocks.append(self.cached[salt, tuple(tokens[:stop])])
        return blocks

    @rule(tokens=prompts, salt=salts, looks_first=st.booleans())
    def run(self, tokens: list[int], salt: str | None, looks_first: bool) -> None:
        """A sequence computes a prompt, with the cached start or, racing with others, without."""
        path = self.tree.match(tokens, salt) if looks_first else []
        found = [node.blocks[0] for node in path]
        count = len(tokens) // 2 - len(found)
        if count > self.allocator.num_free:
            return
        owner, self.next_owner = self.next_owner, self.next_owner + 1
        self.allocator.share(found, owner)
        blocks = found + self.allocator.take(count, owner)
        after = path[-1].number if path else ROOT
        self.tree.insert(tokens, [blocks], len(blocks), salt=salt, after=after)
        for i, block in enumerate(blocks):
            self.cached.setdefault((salt, tuple(tokens[: 2 * i + 2])), block)
        self.held[owner] = blocks
        self.idle = [block for block in self.idle if block not in blocks]

    @rule(tokens=prompts, salt=salts)
    def match(self, tokens: list[int], salt: str | None) -> None:
        assert match(self.tree, [*tokens, 0], salt) == self.longest([*tokens, 0], salt)

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 99))
    def finish(self, pick: int) -> None:
        owner = sorted(self.held)[pick % len(self.held)]
        blocks = self.held.pop(owner)
        self.allocator.drop(blocks[::-1], owner)
        in_use = {block for other in self.held.values() for block in other}
        self.idle += [b for b in blocks[::-1] if b not in in_use and b in self.cached.values()]

    @rule(count=st.integers(1, 4))
    def evict(self, count: int) -> None:
        num_evicted = 0
        while num_evicted < count and self.idle:
            block = self.idle.pop(0)
            ((salt, tokens),) = [prefix for prefix, cached in self.cached.items() if cached == block]
            if any(
                own_salt == salt and others[:-2] == tokens and other in self.idle
                for (own_salt, others), other in self.cached.items()
            ):
                self.idle.append(block)
            else:
                del self.cached[salt, tokens]
                num_evicted += 1
        assert self.tree.evict(count) == num_evicted

    @rule()
    def reset(self) -> None:
        self.tree.reset()
        self.cached, self.idle = {}, []

    @rule()
    def take_news(self) -> None:
        """Whoever listens knows what is cached, evictions and salts included."""
        update_prefixes(self.told, self.tree.take_news())
        prefixes = [list(chain_hashes(tokens, 2, salt))[-1] for salt, tokens in self.cached]
        assert self.told == set(prefixes) and len(prefixes) == len(self.told)

    @invariant()
    def agree(self) -> None:
        check_books(self.allocator)
        check_books(self.tree)
        held = {block for blocks in self.held.values() for block in blocks} | set(self.cached.values())
        assert self.tree.num_cached_blocks == len(self.cached)
        assert self.allocator.num_idle == len(self.idle)
        assert self.allocator.num_free == 10 - len(held)


TestTreeAgainstADict = TreeAgainstADict.TestCase
TestTreeAgainstADict.settings = settings(stateful_step_count=30, database=None)
