"""The prefix tree: finds the cached blocks that hold the start of a prompt.

A radix tree over whole blocks. An edge is labelled with the `block_size` tokens of one block, so two prompts
share the path of their common whole blocks (block_size 2 below):

    root ── (the cat)→ block 7 ── (sat on)→ block 3 ── (the mat)→ block 5
                               └─ (ran to)→ block 9

Edges are found through a dict whose keys are the token ids themselves, four bytes each. Keys are compared by
their ids, not only by hash, so a hash collision can never give a prompt the cache of another. (The keys are
bytes because a block is then one object to compare, and because Python hashes bytes with a secret seed, so
no client can choose prompts whose hashes collide.) A request's `salt` is part of the label of its first edge,
so different salts never share a node.

A node has a block for every table of the cache (cache/layout.py), or NO_BLOCK if the block was evicted:
blocks outside a window are evicted long before blocks of layers without a window. The blocks of one group are
added and evicted together. The pool decides from which token a prompt can be continued.

The tree is one more owner of its blocks: it holds one reference to each, a sequence that uses them adds its
own, and a block that only the tree holds (*idle*) may be evicted. There is no lock and no pin. The block that
has been idle for longest is evicted first. In a group without a window, a block is never evicted before an
idle block that follows it, because the rest of a prefix is useless without its start.

With a `host` allocator the tree has a second tier: an evicted block leaves a copy in host memory, from where
the least recently used copy is evicted. A node then has blocks on the device, on the host or on both, and
exists as long as it has any. A block that is copied back first belongs to a sequence, and enters the tree
like any other block that the sequence fills. The copy stays, so evicting the block again needs no copy.

Two sequences may compute the same tokens at the same time. The first to finish a block puts it into the tree;
the other finds it there and keeps its own block private. A sequence remembers the deepest node of its path by
number. If that node was removed before its next block is full, the path is inserted again from the root.

For a router that chooses engines by their caches, the tree keeps *news*: the prefixes added and evicted since
the last report. A prefix is reported as a hash of its salt and all its tokens (`chain_hashes`). The hash is
only a hint: a collision costs time, but never gives a request the cache of another.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import groupby, islice
from typing import Final, Literal, NamedTuple

import msgspec
import numpy as np

from infer.cache.block_allocator import PREFIX_TREE, BlockAllocator
from infer.cache.layout import SWAP_OUT, Transfer
from infer.errors import EngineError

Label = bytes | tuple[str | None, bytes]  # token ids; for a first edge the salt and the token ids
Blocks = tuple[int, ...]  # a block for each table, or NO_BLOCK

ROOT: Final = 0  # the number of the root
NO_BLOCK: Final = -1
NO_BRANCH: Final = -1
MAX_CHILDREN: Final = 4096  # children of one node that `hottest` looks at
ID_TYPE: Final = "I"  # type code of the ids in a label: 32 bits
ID_BYTES: Final = array(ID_TYPE).itemsize
CHAIN_BYTES: Final = 8
EVICTION: Final = "eviction"  # temporary owner of a host block, until the tree adopts it


def chain_hashes(tokens: Sequence[int], block_size: int, salt: str | None) -> Iterator[int]:
    """Yield the hash of every prefix of whole blocks, the shortest first; each hash includes the previous."""
    ids, size = array(ID_TYPE, tokens).tobytes(), block_size * ID_BYTES
    chain = _first_chain(salt)
    for start in range(0, len(tokens) // block_size * size, size):
        chain = _next_chain(chain, ids[start : start + size])
        yield int.from_bytes(chain, "big")


def _first_chain(salt: str | None) -> bytes:
    return hashlib.blake2b((salt or "").encode("utf-8", "surrogatepass"), digest_size=CHAIN_BYTES).digest()


def _next_chain(chain: bytes, ids: bytes) -> bytes:
    return hashlib.blake2b(ids, digest_size=CHAIN_BYTES, key=chain).digest()


class PrefixNode(msgspec.Struct, eq=False, gc=False):  # gc=False: nodes form no reference cycles
    """The end of a cached prefix."""

    number: int  # unique, never reused
    blocks: Blocks
    host: Blocks  # copies in host memory
    label: Label  # label of the edge from the parent
    parent: int  # number of the parent
    depth: int  # number of blocks from the root
    num_hits: int = 0  # admitted prompts that found this prefix cached
    children: dict[Label, PrefixNode] = msgspec.field(default_factory=dict)
    chain: bytes = b""  # hash of the prefix, if news are kept


class Branch(NamedTuple):
    """A run of cached blocks with the same hits."""

    parent: int  # index of the branch it continues, in the same list; NO_BRANCH: it begins at the root
    start: int  # depth in blocks at which it begins
    stop: int  # depth in blocks at which it ends
    num_hits: int
    num_children: int  # children of its last node


class _Tier:
    """The device or the host: its allocator, the nodes by block, and the field of a node for its blocks."""

    def __init__(self, allocator: BlockAllocator, field: Literal["blocks", "host"]) -> None:
        self.allocator = allocator
        self.nodes: dict[int, PrefixNode] = {}
        self.field = field

    def blocks_of(self, node: PrefixNode) -> Blocks:
        """Return the blocks of a node in this tier."""
        return node.blocks if self.field == "blocks" else node.host


class PrefixTree:
    """Finds blocks by prefix and evicts the least recently used; one engine thread uses it.

    With `keeps_evicted`, evicted blocks leave a copy on the host. `moves` lists the blocks to be copied, in
    order, until the pool takes them.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        block_size: int,
        windows: Sequence[int | None] = (None,),
        host: BlockAllocator | None = None,
    ) -> None:
        self.block_size = block_size
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_host_hit_tokens = 0
        self.num_evicted_blocks = 0
        self.keeps_evicted = False
        self.moves: list[Transfer] = []
        self._allocator = allocator
        self._device = _Tier(allocator, "blocks")
        self._host = _Tier(host or BlockAllocator(0, place="host"), "host")
        self._label_type = np.dtype((np.void, block_size * ID_BYTES))
        self._sees_all = windows[0] is None  # True: some layers have no window (their tables come first)
        self._groups = _groups_of(windows)
        self._nothing: Blocks = (NO_BLOCK,) * len(windows)
        self._root = PrefixNode(ROOT, self._nothing, self._nothing, b"", ROOT, 0)
        self._nodes = {ROOT: self._root}  # nodes by number
        self._by_block = self._device.nodes
        self._last_number = ROOT
        # changed prefixes by hash, True: cached now; None: no news are kept
        self._news: dict[int, bool] | None = None

    def watch(self) -> None:
        """Keep news of prefixes from now on; the tree must be empty."""
        assert not self._by_block, "the tree must be empty: its prefixes have no hashes"
        self._news = {}

    def take_news(self) -> dict[int, bool]:
        """Return the prefixes added (True) or evicted (False) since the last call, by hash."""
        if not self._news:
            return {}
        news, self._news = self._news, {}
        return news

    def _note(self, node: PrefixNode, *, is_there: bool) -> None:
        if self._news is not None:
            self._news[int.from_bytes(node.chain, "big")] = is_there

    @property
    def num_cached_blocks(self) -> int:
        """The number of blocks that the tree holds, alone or with sequences."""
        return len(self._by_block)

    @property
    def num_host_blocks(self) -> int:
        """The number of the tree's copies in host memory."""
        return len(self._host.nodes)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def match(self, tokens: Sequence[int], salt: str | None = None) -> list[PrefixNode]:
        """Return the nodes of the longest cached prefix, in order; takes no references.

        In each node, layers without a window have a block or a copy; other layers may have none.
        """
        size, sees_all = self.block_size, self._sees_all
        node: PrefixNode | None = None
        for label in self._labels(tokens[:size]):  # one label; none if the prompt is shorter
            node = self._root.children.get((salt, label))
        if node is None or (sees_all and node.blocks[0] < 0 and node.host[0] < 0):
            return []
        path = [node]
        for label in self._labels(tokens[size:]):
            node = node.children.get(label)
            if node is None or (sees_all and node.blocks[0] < 0 and node.host[0] < 0):
                break
            path.append(node)
        return path

    def _labels(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the ids of each whole block, as bytes."""
        num_blocks = len(tokens) // self.block_size
        if not num_blocks:
            return []
        labels: list[bytes] = np.frombuffer(array(ID_TYPE, tokens), self._label_type, num_blocks).tolist()
        return labels

    def insert(
        self,
        tokens: Sequence[int],
        tables: Sequence[Sequence[int]],
        stop: int,
        salt: str | None = None,
        after: int = ROOT,
    ) -> int:
        """Add the blocks up to index `stop` of a sequence's tables, continuing from the node `after`.

        `tokens` is the whole sequence; only tokens of new blocks are read. Blocks that are already in the
        tree stay. Returns the number of the deepest node.
        """
        nodes, size, label_size = self._nodes, self.block_size, self._label_type.itemsize
        node = nodes.get(after) or self._root
        depth = node.depth
        part = tokens[depth * size : stop * size]
        ids = part.tobytes() if isinstance(part, array) else array(ID_TYPE, part).tobytes()
        if len(ids) < (stop - depth) * label_size:
            raise EngineError(f"blocks of {stop * size} tokens are cached, but there are only {len(tokens)}")
        adopt, by_block, place = self._allocator.adopt, self._by_block, 0
        while depth < stop:
            blocks = tuple([table[depth] for table in tables])
            ids_of_block = ids[place : place + label_size]
            label: Label = ids_of_block if depth else (salt, ids_of_block)
            child = node.children.get(label)
            depth += 1
            if child is None:
                self._last_number = number = self._last_number + 1
                child = PrefixNode(number, blocks, self._nothing, label, node.number, depth)
                node.children[label] = nodes[number] = child
                if self._news is not None:
                    child.chain = _next_chain(node.chain if depth > 1 else _first_chain(salt), ids_of_block)
                    self._note(child, is_there=not self._sees_all or blocks[0] >= 0)
                for block in blocks:
                    if block >= 0:
                        adopt(block)
                        by_block[block] = child
            elif child.blocks != blocks:
                self._complete(child, blocks)
            node = child
            place += label_size
        if node.blocks == self._nothing:  # all its blocks left their windows before they were added
            self._prune(node)
        return node.number

    def _complete(self, node: PrefixNode, blocks: Blocks) -> None:
        """Add the blocks that a node is missing."""
        pairs = list(zip(node.blocks, blocks, strict=True))
        node.blocks = tuple([new if kept < 0 else kept for kept, new in pairs])
        for kept, new in pairs:
            if kept < 0 <= new:
                self._allocator.adopt(new)
                self._by_block[new] = node
        if self._sees_all and pairs[0][0] < 0 <= pairs[0][1]:
            self._note(node, is_there=True)

    def evict(self, count: int) -> int:
        """Evict about `count` idle blocks, least recently used first; returns the number.

        The blocks of a group are evicted together, so there may be a few more than `count`.
        """
        num_evicted = 0
        while num_evicted < count and (block := self._next_victim(self._device)) is not None:
            if self.keeps_evicted:
                self._copy_to_host(block)
            num_evicted += self.forget(block)
        self.num_evicted_blocks += num_evicted
        return num_evicted

    def make_host_room(self, count: int) -> bool:
        """Evict idle copies until `count` host blocks are free; False: there are too few."""
        host = self._host.allocator
        if count > host.num_free + host.num_idle:
            return False
        while host.num_free < count and (block := self._next_victim(self._host)) is not None:
            self._forget(block, self._host)
        return True

    def forget_copies(self, blocks: Iterable[int]) -> None:
        """Remove the copies among these host blocks, which were never written."""
        for block in blocks:
            if block in self._host.nodes:
                self._forget(block, self._host)

    def _copy_to_host(self, block: int) -> None:
        """Copy a block, and the others of its group, to host memory if there is room."""
        node, host = self._by_block[block], self._host.allocator
        group = self._groups[node.blocks.index(block)]
        sources, copies = node.blocks[group], node.host[group]
        if copies[0] >= 0:  # the copy exists already
            for copy in filter(host.is_idle, copies):
                host.requeue_idle(copy)
        elif self.make_host_room(len(sources)):
            copies = tuple(host.take(len(sources), EVICTION))
            for copy in copies:
                host.adopt(copy)
                self._host.nodes[copy] = node
            host.drop(copies, EVICTION)
            node.host = (*node.host[: group.start], *copies, *node.host[group.stop :])
            self.moves += [Transfer(SWAP_OUT, *pair) for pair in zip(sources, copies, strict=True)]

    def _next_victim(self, tier: _Tier) -> int | None:
        """Return the block to evict next: idle for longest, and not needed by a later idle block."""
        while (block := tier.allocator.oldest_idle()) is not None:
            node = tier.nodes[block]
            if not (node.children and self._has_idle_after(node, block, tier)):
                return block
            tier.allocator.requeue_idle(block)  # later blocks of the prefix became idle after this one
        return None

    def _has_idle_after(self, node: PrefixNode, block: int, tier: _Tier) -> bool:
        """Return True if an idle block follows this one in its prefix and would be useless without it."""
        table = tier.blocks_of(node).index(block)
        if not self._sees_all or self._groups[table].start:
            return False
        is_idle = tier.allocator.is_idle
        return any(is_idle(tier.blocks_of(child)[table]) for child in node.children.values())

    def forget(self, block: int) -> int:
        """Remove a block and the others of its group from the tree; sequences keep theirs.

        Returns the number of blocks.
        """
        return self._forget(block, self._device)

    def _forget(self, block: int, tier: _Tier) -> int:
        node = tier.nodes[block]
        blocks = tier.blocks_of(node)
        group = self._groups[blocks.index(block)]
        gone = blocks[group]
        for each in gone:
            del tier.nodes[each]
        setattr(node, tier.field, (*blocks[: group.start], *self._nothing[group], *blocks[group.stop :]))
        tier.allocator.drop(gone, PREFIX_TREE)
        if self._sees_all and group.start == 0 and node.blocks[0] < 0 and node.host[0] < 0:
            self._note(node, is_there=False)
        self._prune(node)
        return len(gone)

    def _prune(self, node: PrefixNode) -> None:
        """Remove a node without blocks and children, and its ancestors that become empty by this."""
        nothing = self._nothing
        while node.number != ROOT and not node.children and node.blocks == nothing == node.host:
            parent = self._nodes[node.parent]
            del parent.children[node.label]
            del self._nodes[node.number]
            if not self._sees_all:
                self._note(node, is_there=False)
            node = parent

    def reset(self) -> int:
        """Remove everything; sequences keep the blocks that they hold.

        Returns the number of removed blocks; a block with a host copy counts once.
        """
        pairs = (pair for node in self._nodes.values() for pair in zip(node.blocks, node.host, strict=True))
        num_blocks = sum(max(pair) >= 0 for pair in pairs)
        self._root.children.clear()
        self._nodes = {ROOT: self._root}
        for tier in (self._device, self._host):
            for node in tier.nodes.values() if self._news is not None else ():
                self._note(node, is_there=False)
            blocks = list(tier.nodes)
            tier.nodes.clear()
            tier.allocator.drop(blocks, PREFIX_TREE)
        return num_blocks

    def record(self, num_queried: int, path: Sequence[PrefixNode], num_hit: int, num_host: int = 0) -> None:
        """Count a prompt's tokens, cached tokens, tokens found on the host, and a hit for each node."""
        self.num_queried_tokens += num_queried
        self.num_hit_tokens += num_hit
        self.num_host_hit_tokens += num_host
        for node in path:
            node.num_hits += 1

    def hottest(self, limit: int) -> list[Branch]:
        """Return the branches with the most hits, at most `limit`; each comes after its parent branch.

        A branch is a run of blocks with the same hits. Only the first MAX_CHILDREN children of a node are
        visited, so that the cost stays small in a wide tree.
        """
        found: list[Branch] = []
        # negative hits, number, node, index of the parent branch
        heap: list[tuple[int, int, PrefixNode, int]] = []

        def look(node: PrefixNode, place: int) -> None:
            for child in islice(node.children.values(), MAX_CHILDREN):
                if child.num_hits:
                    heappush(heap, (-child.num_hits, child.number, child, place))

        look(self._root, NO_BRANCH)
        while heap and len(found) < limit:
            _, _, first, parent = heappop(heap)
            last = first
            while (next_node := _only_heir(last)) is not None:
                last = next_node
            found.append(Branch(parent, first.depth - 1, last.depth, first.num_hits, len(last.children)))
            look(last, len(found) - 1)
        return found


def _only_heir(node: PrefixNode) -> PrefixNode | None:
    """Return the child with as many hits as the node; None: some prompts ended or diverged here."""
    for child in islice(node.children.values(), MAX_CHILDREN):
        if child.num_hits == node.num_hits:
            return child
    return None


def _groups_of(windows: Sequence[int | None]) -> list[slice]:
    """Return, for each table, the slice of the tables in its group of layers."""
    groups: list[slice] = []
    for _, tables in groupby(windows):
        size = len(list(tables))
        groups += [slice(len(groups), len(groups) + size)] * size
    return groups
