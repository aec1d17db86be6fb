"""Which cached blocks hold the start of this prompt?

A radix tree over whole blocks. An edge is labelled with the `block_size` tokens of one block, so two
prompts share a path for as many blocks as they share tokens (block_size 2 below):

    root ── (the cat)→ block 7 ── (sat on)→ block 3 ── (the mat)→ block 5
                               └─ (ran to)→ block 9

Edges are found through a dict whose keys are the token ids themselves, written one after the other in
four bytes each: a hash decides where to look, the ids decide what matches, so no collision can hand one
prompt the cache of another. (As bytes, because a block then is one object to compare, and because Python
keys the hash of bytes with a secret: no client can choose prompts that all fall into one place.) A request's
`salt` is part of the label of its first edge: different salts never share a node.

The tree is one more owner of its blocks: it holds one reference on each, a sequence that uses them
adds its own, and a block that only the tree holds (*idle*) may be evicted. There is no lock and no pin.
One rule keeps eviction simple: **a sequence holds every node from the root down to its cursor**, the
deepest node it has matched or inserted. So below an idle node everything is idle, and since a sequence
lets go of its deepest block first, the block that has been idle for longest is a leaf. To keep the rule
true, only a block that its sequence holds alone is inserted: another holder might not hold the path.

Two sequences may compute the same tokens side by side. The first to finish a block puts it into the
tree; the other finds a node there already. It keeps its own block in its table and also holds the
cached one, its *twin*, because its path leads through it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from infer.cache.block_allocator import PREFIX_TREE, BlockAllocator, Owner
from infer.errors import EngineError

Label = bytes | tuple[str | None, bytes]  # of a first edge: the salt and the ids

ROOT: Final = -1  # where others have a block
ID_TYPE: Final = "I"  # of the ids in a label: 32 bits
ID_BYTES: Final = array(ID_TYPE).itemsize


class _Node(msgspec.Struct, eq=False, gc=False):  # no circles: the collector need not look at them
    block: int
    label: Label  # the tokens of the edge that leads here
    parent: int  # its block
    depth: int  # blocks from the root to here
    children: dict[Label, _Node] = msgspec.field(default_factory=dict)


class Insertion(msgspec.Struct, frozen=True, gc=False):
    """What became of the blocks given to `PrefixTree.insert`."""

    cursor: int | None  # the deepest cached block of the path; None: the root
    num_entered: int  # of the blocks given: fewer than all when one was shared with another sequence
    twins: list[tuple[int, int]]  # (a duplicate, the cached block the owner holds from here on as well)


class PrefixTree:
    """Prefix to blocks, least recently used out first; one engine thread uses it."""

    def __init__(self, allocator: BlockAllocator, block_size: int) -> None:
        self.block_size = block_size
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_evicted_blocks = 0
        self._allocator = allocator
        self._label_type = np.dtype((np.void, block_size * ID_BYTES))
        self._root = _Node(ROOT, b"", ROOT, 0)
        self._nodes: dict[int, _Node] = {}  # by block

    @property
    def num_cached_blocks(self) -> int:
        """How many blocks the tree holds, alone or with sequences."""
        return len(self._nodes)

    def __contains__(self, block: int) -> bool:
        return block in self._nodes

    def match(self, tokens: Sequence[int], salt: str | None = None) -> list[int]:
        """The blocks of the longest cached prefix, in order; changes nothing and holds nothing."""
        size = self.block_size
        node = None
        for label in self._labels(tokens[:size]):  # a prompt shorter than a block has none
            node = self._root.children.get((salt, label))
        if node is None:
            return []
        blocks = [node.block]
        for label in self._labels(tokens[size:]):
            node = node.children.get(label)
            if node is None:
                break
            blocks.append(node.block)
        return blocks

    def _labels(self, tokens: Sequence[int]) -> list[bytes]:
        """The ids of one block after the other, never of a part."""
        num_blocks = len(tokens) // self.block_size
        if not num_blocks:
            return []
        labels: list[bytes] = np.frombuffer(array(ID_TYPE, tokens), self._label_type, num_blocks).tolist()
        return labels

    def parent(self, block: int) -> int | None:
        """The cached block before this one; None for the first of a prefix."""
        parent = self._nodes[block].parent
        return None if parent == ROOT else parent

    def insert(
        self,
        tokens: Sequence[int],
        blocks: Sequence[int],
        owner: Owner,
        salt: str | None = None,
        after: int | None = None,
    ) -> Insertion:
        """Cache full blocks of `owner`, which hold the tokens that follow the cached block `after`.

        `tokens` is the whole sequence; it is read only where `blocks` lie. Where the tree has a block
        for these tokens already, that one stays, and `owner` gets a reference to it. The insertion ends
        early at a block that `owner` does not hold alone.
        """
        allocator, nodes, size = self._allocator, self._nodes, self.block_size
        node = self._root if after is None else nodes[after]
        depth, num_ids, label_size = node.depth, len(blocks) * size, size * ID_BYTES
        first = depth * size
        part = tokens[first : first + num_ids]
        ids = (part if isinstance(part, array) else array(ID_TYPE, part)).tobytes()
        if len(ids) < num_ids * ID_BYTES or not allocator.holds(owner, blocks, after):
            raise self._wrong_insertion(node, tokens, blocks, owner)
        twins: list[tuple[int, int]] = []
        place = 0
        for block in blocks:
            ids_of_block = ids[place : place + label_size]
            label: Label = ids_of_block if depth else (salt, ids_of_block)
            child = node.children.get(label)
            if child is None:
                if not allocator.adopt(block):
                    break
                node.children[label] = nodes[block] = child = _Node(block, label, node.block, depth + 1)
            elif child.block != block:
                twins.append((block, child.block))
            node = child
            depth += 1
            place += label_size
        if twins:
            allocator.share([cached for _, cached in twins], owner)
        return Insertion(node.block if depth else None, place // label_size, twins)

    def exchange(self, cached: int, duplicate: int) -> None:
        """Let a duplicate stand in for a cached block; the tree's reference moves to it."""
        node = self._nodes[cached]
        self._allocator.share([duplicate], PREFIX_TREE)
        self._allocator.drop([cached], PREFIX_TREE)
        del self._nodes[cached]
        node.block = duplicate
        self._nodes[duplicate] = node
        for child in node.children.values():
            child.parent = duplicate

    def evict(self, count: int) -> int:
        """Free up to `count` blocks that only the tree holds, least recently used first; returns how many."""
        allocator = self._allocator
        num_evicted = num_skipped = 0
        while num_evicted < count and (block := allocator.oldest_idle()) is not None:
            if self._nodes[block].children:
                # Its last owner let go of it before its children: they queue behind it, so it steps back.
                allocator.requeue_idle(block)
                num_skipped += 1
                if num_skipped > allocator.num_idle:
                    raise EngineError(f"no idle block of {allocator.num_idle} is a leaf of the prefix tree")
                continue
            self.forget(block)
            num_evicted += 1
            num_skipped = 0
        self.num_evicted_blocks += num_evicted
        return num_evicted

    def forget(self, block: int) -> None:
        """Take a leaf out of the tree, whether or not sequences hold its block."""
        node = self._nodes[block]
        assert not node.children, f"cached block {block} is not a leaf"
        del self._parent_of(node).children[node.label]
        del self._nodes[block]
        self._allocator.drop([block], PREFIX_TREE)

    def reset(self) -> int:
        """Forget everything; blocks that sequences hold stay theirs. Returns how many were forgotten."""
        blocks = list(self._nodes)
        self._root.children.clear()
        self._nodes.clear()
        self._allocator.drop(blocks, PREFIX_TREE)
        return len(blocks)

    def record(self, num_queried: int, num_hit: int) -> None:
        """Count the tokens of one prompt, and how many of them the cache spared."""
        self.num_queried_tokens += num_queried
        self.num_hit_tokens += num_hit

    def check(self) -> None:
        """Raise EngineError unless nodes, references and the idle rule agree; walks over everything."""
        reached: dict[int, _Node] = {}
        stack = [self._root]
        while stack:
            node = stack.pop()
            for label, child in node.children.items():
                ids = label if isinstance(label, bytes) else label[1]
                if child.label != label or child.parent != node.block or child.depth != node.depth + 1:
                    raise EngineError(f"cached block {child.block} is linked wrongly in the prefix tree")
                if len(ids) != self.block_size * ID_BYTES or isinstance(label, bytes) == (child.depth == 1):
                    raise EngineError(
                        f"cached block {child.block} has a label of {len(ids)} bytes: {label!r}"
                    )
                is_idle = self._allocator.ref_count(child.block) == 1
                if node is not self._root and self._allocator.ref_count(node.block) == 1 and not is_idle:
                    raise EngineError(f"idle block {node.block} has a child, {child.block}, that is in use")
                reached[child.block] = child
                stack.append(child)
        if reached != self._nodes or frozenset(reached) != self._allocator.blocks_of(PREFIX_TREE):
            raise EngineError("the prefix tree's nodes are not the blocks it holds")

    def _parent_of(self, node: _Node) -> _Node:
        return self._root if node.parent == ROOT else self._nodes[node.parent]

    def _wrong_insertion(
        self, node: _Node, tokens: Sequence[int], blocks: Sequence[int], owner: Owner
    ) -> EngineError:
        num_needed = (node.depth + len(blocks)) * self.block_size
        if len(tokens) < num_needed:
            return EngineError(f"{owner!r} caches blocks of {num_needed} tokens but has only {len(tokens)}")
        path = blocks if node is self._root else (node.block, *blocks)
        held = self._allocator.blocks_of(owner)
        block = next(block for block in path if block not in held)
        return EngineError(f"{owner!r} caches a path through block {block}, which it does not hold")
