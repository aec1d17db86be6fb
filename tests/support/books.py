"""Whether the books of blocks and sequences balance: what every test may ask after every step.

    check_books(allocator)    owners' holdings add up to the reference counts, free + held == num_blocks
    check_books(tree)         nodes, labels and references agree
    check_books(pool)         both allocators, the tree, and what each sequence holds
    check_books(scheduler)    the pool, and the counts and rows of the batch beside it

Each walks over everything and raises an EngineError that names what is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import singledispatch

from infer.cache.block_allocator import PREFIX_TREE, BlockAllocator
from infer.cache.paged_pool import PagedKVCachePool, blocks_for
from infer.cache.prefix_tree import ID_BYTES, NO_BLOCK, ROOT, PrefixNode, PrefixTree
from infer.cache.sequence_books import SequenceBooks
from infer.errors import EngineError
from infer.scheduling.batch_state import BatchState
from infer.scheduling.scheduler import Scheduler


@singledispatch
def check_books(books: object) -> None:
    """Raise EngineError unless these books balance."""
    raise TypeError(f"{books!r} keeps no books")


def _require(subject: str, claims: Mapping[str, bool], of: object = "") -> None:
    for claim, is_true in claims.items():
        if not is_true:
            raise EngineError(f"{subject}{of} are wrong: not so that {claim}")


@check_books.register
def _(allocator: BlockAllocator) -> None:
    counted = [0] * allocator.num_blocks
    for held in allocator._held.values():
        for block in held:
            counted[block] += 1
    free = set(allocator.free)
    num_held = sum(1 for refs in allocator._ref_counts if refs)
    cached = allocator.blocks_of(PREFIX_TREE)
    claims = {
        "the holdings of all owners add up to the reference counts": counted == allocator._ref_counts,
        "no block is free twice": len(free) == len(allocator.free),
        "a free block has no owner": not any(counted[block] for block in free),
        "free + held == num_blocks": len(free) + num_held == allocator.num_blocks,
        "an owner without blocks is forgotten": all(allocator._held.values()),
        "idle means that only the prefix tree holds it": set(allocator._idle)
        == {block for block in cached if counted[block] == 1},
    }
    _require(f"the books of the {allocator.place} blocks", claims)


@check_books.register
def _(tree: PrefixTree) -> None:
    reached = {ROOT: tree._root}
    by_block: dict[int, PrefixNode] = {}
    by_copy: dict[int, PrefixNode] = {}
    stack = [tree._root]
    num_bytes, is_in_groups = tree.block_size * ID_BYTES, len(tree._nothing) > 1
    while stack:
        node = stack.pop()
        number, depth = node.number, node.depth + 1
        for label, child in node.children.items():
            ids, blocks = label if isinstance(label, bytes) else label[1], child.blocks
            if child.label != label or child.parent != number or child.depth != depth:
                raise EngineError(f"{blocks} are linked wrongly in the prefix tree")
            if len(ids) != num_bytes or (ids is label) == (depth == 1):
                raise EngineError(f"cached {blocks} have a wrong label: {label!r}")
            if child.children:
                stack.append(child)
            elif blocks == tree._nothing == child.host:
                raise EngineError(f"nothing is left of node {child.number} of the prefix tree")
            for held in (blocks, child.host) if is_in_groups else ():
                if any(len({block < 0 for block in held[part]}) > 1 for part in tree._groups):
                    raise EngineError(f"of a group only a part is cached: {held}")
            reached[child.number] = child
            by_block |= {block: child for block in blocks if block >= 0}
            by_copy |= {block: child for block in child.host if block >= 0}
    if reached != tree._nodes or by_block != tree._by_block or by_copy != tree._host.nodes:
        raise EngineError("the prefix tree's nodes are not those that its root leads to")
    for tier, nodes in ((tree._device, by_block), (tree._host, by_copy)):
        if nodes.keys() != tier.allocator.blocks_of(PREFIX_TREE):
            raise EngineError(f"the prefix tree's nodes are not the {tier.allocator.place} blocks it holds")


@check_books.register
def _(pool: PagedKVCachePool) -> None:
    for books in (pool._device, pool._host, pool.tree):
        check_books(books)
    for sequence in pool._sequences.values():
        _check_sequence(sequence, pool)


@check_books.register
def _(scheduler: Scheduler) -> None:
    check_books(scheduler.pool)
    check_state(scheduler.state, scheduler.pool)


def depth_of(tree: PrefixTree, number: int) -> int | None:
    """How many blocks lie on the way to a node; None: it is gone."""
    node = tree._nodes.get(number)
    return None if node is None else node.depth


def _check_sequence(books: SequenceBooks, pool: PagedKVCachePool) -> None:
    """These books agree with the allocators, the tree and the windows."""
    holdings, host_holdings = books.holdings(), books.host_holdings()
    tables = list(zip(books.tables, books.starts, strict=True))
    claims = {
        "it holds its tables, each block once": len(holdings) == len(set(holdings)),
        "it holds nothing else": pool._device.blocks_of(books.seq_id) == frozenset(holdings),
        "its host blocks are in its name": pool._host.blocks_of(books.seq_id) == frozenset(host_holdings),
        "its tables have blocks from their starts on": all(
            set(table[:start]) <= {NO_BLOCK}
            and {index for index in range(start, len(table)) if table[index] == NO_BLOCK}
            == {index for which, index, _ in books.incoming if which == number}
            for number, (table, start) in enumerate(tables)
        ),
        "it holds no more than its windows need": all(
            len(table) - start <= most for (table, start), most in zip(tables, pool._most_held, strict=True)
        ),
        "its cursor is where its next block goes": depth_of(pool.tree, books.cursor)
        in (None, books.num_entered),
    }
    _require(f"the books of sequence {books.seq_id}", claims)


def check_state(state: BatchState, pool: PagedKVCachePool) -> None:
    """Raise EngineError unless rows, counts and tables are what the sequences and the pool say."""
    rows = state.row.tolist()
    num_rows = len(rows) + len(state._free_rows)
    if not len({*rows, *state._free_rows}) == num_rows == state.tables.shape[1]:
        raise EngineError("a row of block tables is in use twice, or lost")
    for place, seq in enumerate(state.sequences):
        blocks_of_tables = pool.block_tables(seq.seq_id)
        num_slots = min(map(len, blocks_of_tables)) * state.block_size
        num_reserved = int(state.num_reserved[place])
        num_blocks = blocks_for(num_reserved, state.block_size)
        claims = {
            "its column is its own": seq.place == place and bool(state.seq_id[place] == seq.seq_id),
            "its computed tokens have a place": seq.num_computed <= num_slots,
            "its tables have what is reserved": num_reserved <= num_slots,
            "its row holds its tables": all(
                here == there * state.spans[number] or there < 0
                for number, blocks in enumerate(blocks_of_tables)
                for here, there in zip(
                    state.tables[number, seq.row, :num_blocks].tolist(), blocks[:num_blocks], strict=False
                )
            ),
            "nothing else holds a block that it may write": num_reserved <= seq.num_computed
            or not _is_shared(pool, seq.seq_id, seq.num_computed, num_reserved),
        }
        _require("the counts of ", claims, seq)


def _is_shared(pool: PagedKVCachePool, seq_id: int, start: int, stop: int) -> bool:
    """Whether a block that holds one of the tokens `start` to `stop` has another owner as well."""
    indices = slice(start // pool.block_size, blocks_for(stop, pool.block_size))
    tables = pool.block_tables(seq_id)
    return any(pool._device.ref_count(block) > 1 for table in tables for block in table[indices])
