from __future__ import annotations

from array import array
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from infer.cache import prefix_tree
from infer.cache.block_allocator import PREFIX_TREE, BlockAllocator
from infer.cache.prefix_tree import Insertion, PrefixTree
from infer.errors import EngineError

THE_CAT, SAT_ON, RAN_TO, THE_MAT = [1, 2], [3, 4], [5, 6], [1, 7]


def make_tree(num_blocks: int = 8) -> tuple[BlockAllocator, PrefixTree]:
    allocator = BlockAllocator(num_blocks)
    return allocator, PrefixTree(allocator, block_size=2)


def cache(
    allocator: BlockAllocator, tree: PrefixTree, tokens: list[int], owner: int, salt: str | None = None
) -> list[int]:
    """Compute a prompt from nothing, as a sequence that saw no cache would, and insert it."""
    blocks = allocator.take(len(tokens) // 2, owner)
    tree.insert(tokens, blocks, owner, salt=salt)
    tree.check()
    return blocks


def test_the_longest_cached_prefix_is_found_block_by_block() -> None:
    allocator, tree = make_tree()
    blocks = cache(allocator, tree, THE_CAT + SAT_ON + THE_MAT, owner=1)
    assert tree.match(THE_CAT + SAT_ON + THE_MAT) == blocks
    assert tree.match(THE_CAT + SAT_ON + RAN_TO) == blocks[:2]
    assert tree.match(THE_CAT + SAT_ON + [1]) == blocks[:2]
    assert tree.match(THE_CAT + [3]) == blocks[:1]
    assert tree.match([1]) == tree.match([]) == tree.match(SAT_ON) == []


def test_two_prompts_share_a_path_as_long_as_they_agree() -> None:
    allocator, tree = make_tree()
    sat = cache(allocator, tree, THE_CAT + SAT_ON, owner=1)
    allocator.share(sat[:1], 2)
    (ran,) = allocator.take(1, 2)
    entered = tree.insert(THE_CAT + RAN_TO, [ran], 2, after=sat[0])
    assert entered == Insertion(ran, 1, [])
    assert tree.match(THE_CAT + RAN_TO) == [sat[0], ran]
    assert tree.num_cached_blocks == 3
    assert (tree.parent(ran), tree.parent(sat[1]), tree.parent(sat[0])) == (sat[0], sat[0], None)


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
    assert tree.match(THE_CAT + SAT_ON) == blocks
    assert tree.match(THE_CAT + RAN_TO) == blocks[:1]
    assert tree.match(RAN_TO + SAT_ON) == []


@pytest.mark.parametrize("place", range(4))
def test_ids_that_differ_in_any_bit_are_another_prefix(place: int) -> None:
    allocator, tree = make_tree()
    blocks = cache(allocator, tree, THE_CAT + SAT_ON, owner=1)
    for bit in range(32):
        tokens = THE_CAT + SAT_ON
        tokens[place] ^= 1 << bit
        assert tree.match(tokens) == blocks[: place // 2]


def test_one_block_behind_a_path_is_found_like_many() -> None:
    """The labels are the same, whatever kind of sequence the ids come in."""
    allocator, tree = make_tree()
    tokens = THE_CAT + SAT_ON + THE_MAT
    blocks = allocator.take(3, 1)
    tree.insert(tokens, blocks[:1], 1)
    tree.insert(tokens, blocks[1:2], 1, after=blocks[0])
    tree.insert(array("I", tokens), blocks[2:], 1, after=blocks[1])
    for same in (tokens, tuple(tokens), array("I", tokens)):
        assert tree.match(same) == blocks
    tree.check()


def test_a_salt_is_a_world_of_its_own() -> None:
    allocator, tree = make_tree()
    plain = cache(allocator, tree, THE_CAT + SAT_ON, owner=1)
    salted = cache(allocator, tree, THE_CAT + SAT_ON, owner=2, salt="tenant")
    assert set(plain).isdisjoint(salted)
    assert tree.match(THE_CAT + SAT_ON) == plain
    assert tree.match(THE_CAT + SAT_ON, "tenant") == salted
    assert tree.match(THE_CAT + SAT_ON, "other") == tree.match(THE_CAT + SAT_ON, "") == []


def test_a_duplicate_stays_its_owners_who_also_holds_the_cached_twin() -> None:
    allocator, tree = make_tree()
    first = cache(allocator, tree, THE_CAT + SAT_ON, owner=1)
    second = allocator.take(3, 2)

    entered = tree.insert(THE_CAT + SAT_ON + RAN_TO, second, 2)

    assert entered.twins == [(second[0], first[0]), (second[1], first[1])]
    assert (entered.cursor, entered.num_entered) == (second[2], 3)
    assert tree.match(THE_CAT + SAT_ON + RAN_TO) == [*first, second[2]]
    assert allocator.owners_of(first[0]) == [1, PREFIX_TREE, 2]
    allocator.drop([second[2], first[1], second[1], first[0], second[0]], 2)
    allocator.drop(first[::-1], 1)
    assert allocator.num_free == 5
    assert tree.evict(99) == 3
    assert allocator.num_free == 8


def test_inserting_the_same_blocks_again_changes_nothing() -> None:
    allocator, tree = make_tree()
    blocks = cache(allocator, tree, THE_CAT + SAT_ON, owner=1)
    assert tree.insert(THE_CAT + SAT_ON, blocks, 1) == Insertion(blocks[1], 2, [])
    assert tree.num_cached_blocks == 2
    assert allocator.ref_count(blocks[0]) == 2


def test_a_block_shared_with_another_sequence_is_not_entered() -> None:
    allocator, tree = make_tree()
    blocks = allocator.take(3, 1)
    allocator.share([blocks[1]], 2)
    assert tree.insert(THE_CAT + SAT_ON + THE_MAT, blocks, 1) == Insertion(blocks[0], 1, [])
    assert tree.match(THE_CAT + SAT_ON + THE_MAT) == blocks[:1]
    tree.check()


def test_blocks_come_one_by_one_beside_others() -> None:
    allocator, tree = make_tree()
    (root,) = cache(allocator, tree, THE_CAT, owner=1)
    (sat,) = allocator.take(1, 1)
    assert tree.insert(THE_CAT + SAT_ON, [sat], 1, after=root) == Insertion(sat, 1, [])
    (ran,) = allocator.take(1, 1)
    assert tree.insert(THE_CAT + RAN_TO, [ran], 1, after=root) == Insertion(ran, 1, []), "beside another"
    assert tree.match(THE_CAT + SAT_ON) == [root, sat]
    assert tree.match(THE_CAT + RAN_TO) == [root, ran]
    assert tree.parent(sat) == tree.parent(ran) == root
    tree.check()


def test_an_insertion_needs_its_tokens_and_its_path() -> None:
    allocator, tree = make_tree()
    blocks = cache(allocator, tree, THE_CAT, owner=1)
    more = allocator.take(1, 2)
    with pytest.raises(EngineError, match="caches blocks of 4 tokens but has only 3"):
        tree.insert([1, 2, 3], more, 2, after=blocks[0])
    with pytest.raises(EngineError, match=f"path through block {blocks[0]}, which it does not hold"):
        tree.insert(THE_CAT + SAT_ON, more, 2, after=blocks[0])
    with pytest.raises(EngineError, match=f"path through block {more[0]}, which it does not hold"):
        tree.insert(THE_CAT + SAT_ON, more, 1, after=blocks[0])


def test_the_least_recently_used_leaf_goes_first() -> None:
    allocator, tree = make_tree()
    cat = cache(allocator, tree, THE_CAT + SAT_ON, owner=1)
    mat = cache(allocator, tree, THE_MAT + SAT_ON, owner=2)
    allocator.drop(mat[::-1], 2)
    allocator.drop(cat[::-1], 1)
    assert allocator.num_idle == 4

    used_again = tree.match(THE_MAT)
    allocator.share(used_again, 3)
    allocator.drop(used_again, 3)

    for expected in (mat[1], cat[1], cat[0], mat[0]):
        assert tree.evict(1) == 1
        assert allocator.ref_count(expected) == 0
        tree.check()
    assert tree.evict(1) == 0
    assert tree.num_evicted_blocks == 4


def test_a_block_that_a_sequence_holds_is_never_evicted() -> None:
    allocator, tree = make_tree()
    blocks = cache(allocator, tree, THE_CAT + SAT_ON + THE_MAT, owner=1)
    allocator.drop(blocks[:0:-1], 1)
    assert allocator.num_idle == 2
    assert tree.evict(99) == 2
    assert tree.match(THE_CAT + SAT_ON) == blocks[:1]


def test_eviction_copes_with_blocks_dropped_in_the_wrong_order() -> None:
    allocator, tree = make_tree()
    blocks = cache(allocator, tree, THE_CAT + SAT_ON + THE_MAT, owner=1)
    allocator.drop(blocks, 1)  # root first: the oldest idle block is not a leaf
    assert tree.evict(2) == 2
    tree.check()
    assert tree.match(THE_CAT + SAT_ON) == blocks[:1]
    assert tree.evict(2) == 1


def test_a_duplicate_can_take_the_place_of_the_cached_block() -> None:
    allocator, tree = make_tree()
    old = cache(allocator, tree, THE_CAT + SAT_ON, owner=1)
    (new,) = allocator.take(1, 1)
    tree.exchange(old[0], new)
    allocator.drop([old[0]], 1)
    tree.check()
    assert tree.match(THE_CAT + SAT_ON) == [new, old[1]]
    assert allocator.ref_count(old[0]) == 0


def test_a_reset_forgets_all_and_leaves_sequences_their_blocks() -> None:
    allocator, tree = make_tree()
    kept = cache(allocator, tree, THE_CAT, owner=1)
    gone = cache(allocator, tree, THE_MAT, owner=2)
    allocator.drop(gone, 2)
    assert tree.reset() == 2
    assert (tree.num_cached_blocks, allocator.num_idle) == (0, 0)
    assert tree.match(THE_CAT) == []
    assert (allocator.owners_of(kept[0]), allocator.num_free) == ([1], 7)


prompts = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=4).map(
    lambda pairs: [token for pair in pairs for token in pair]
)
salts = st.sampled_from([None, None, "tenant"])


class TreeAgainstADict(RuleBasedStateMachine):
    """The reference: a dict of every cached prefix in full, and a list of idle blocks in order."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator, self.tree = make_tree(num_blocks=10)
        self.cached: dict[tuple[str | None, tuple[int, ...]], int] = {}
        self.paths: dict[int, list[int]] = {}  # by owner: everything it holds, root first
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
        found = self.tree.match(tokens, salt) if looks_first else []
        count = len(tokens) // 2 - len(found)
        if count > self.allocator.num_free:
            return
        owner, self.next_owner = self.next_owner, self.next_owner + 1
        self.allocator.share(found, owner)
        blocks = self.allocator.take(count, owner)
        after = found[-1] if found else None
        entered = self.tree.insert(tokens, blocks, owner, salt=salt, after=after)

        twins: list[tuple[int, int]] = []
        path = list(found)
        for i, block in enumerate(blocks, start=len(found)):
            known = self.cached.setdefault((salt, tuple(tokens[: 2 * i + 2])), block)
            if known != block:
                twins.append((block, known))
                path.append(known)
            path.append(block)
        assert entered.twins == twins
        self.paths[owner] = path
        self.idle = [block for block in self.idle if block not in path]

    @rule(tokens=prompts, salt=salts)
    def match(self, tokens: list[int], salt: str | None) -> None:
        assert self.tree.match([*tokens, 0], salt) == self.longest([*tokens, 0], salt)

    @precondition(lambda self: self.paths)
    @rule(pick=st.integers(0, 99))
    def finish(self, pick: int) -> None:
        owner = sorted(self.paths)[pick % len(self.paths)]
        path = self.paths.pop(owner)
        self.allocator.drop(path[::-1], owner)
        in_use = {block for other in self.paths.values() for block in other}
        self.idle += [b for b in path[::-1] if b not in in_use and b in self.cached.values()]

    @rule(count=st.integers(1, 4))
    def evict(self, count: int) -> None:
        victims, self.idle = self.idle[:count], self.idle[count:]
        assert self.tree.evict(count) == len(victims)
        self.cached = {prefix: block for prefix, block in self.cached.items() if block not in victims}

    @invariant()
    def agree(self) -> None:
        self.allocator.check()
        self.tree.check()
        held = {block for path in self.paths.values() for block in path} | set(self.cached.values())
        assert self.tree.num_cached_blocks == len(self.cached)
        assert self.allocator.num_idle == len(self.idle)
        assert self.allocator.num_free == 10 - len(held)
        for (salt, tokens), block in self.cached.items():
            assert self.tree.match(tokens, salt)[-1] == block


TestTreeAgainstADict = TreeAgainstADict.TestCase
TestTreeAgainstADict.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None, derandomize=True, database=None
)
