"""A cache with contents, so that a mixed-up block shows as a wrong token.

The pool under test keeps books only. Here a fake memory stands behind it: every slot remembers the whole
history (salt and tokens up to and including its own) that was written into it. Transfers are carried out
in the order in which the pool returns them, chunks are written through the block tables, and after each
the sequence must read back its own history at every position that a window still reaches. A block that was
freed too early, shared while written, copied too late or matched wrongly makes one sequence read
the history of another.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from infer.cache.layout import STATE_WINDOW
from infer.cache.paged_pool import PagedKVCachePool
from infer.cache.prefix_tree import NO_BLOCK
from tests.support.books import check_books

History = tuple[str | None, tuple[int, ...]]
Memory = dict[int, dict[int, History]]  # block, offset in it


@dataclass
class FakeSequence:
    tokens: list[int]
    salt: str | None
    num_computed: int = 0
    is_swapped: bool = False

    def history(self, position: int) -> History:
        return self.salt, tuple(self.tokens[: position + 1])


class Traffic:
    """Drives a pool as an engine would and verifies what each sequence would read.

    A step is planned with any number of `plan`, `swap_out`, `swap_in` and `release` calls and ended with
    `finish_step`, which only then carries out the transfers and writes the tokens, as a device would.
    """

    def __init__(self, pool: PagedKVCachePool) -> None:
        self.pool = pool
        self.sequences: dict[int, FakeSequence] = {}
        self.num_refused = 0
        self._next_id = 0
        self._device: Memory = {}
        self._host: Memory = {}
        self._transfers: list[tuple[Memory, int, Memory, int]] = []
        self._chunks: dict[int, int] = {}  # sequence id to where its chunk stops

    def enter(self, tokens: list[int], salt: str | None = None) -> int:
        """Bring a prompt in and check the cached part of it."""
        seq_id, seq = self._next_id, FakeSequence(tokens, salt)
        self._next_id += 1
        seq.num_computed = self.pool.match_prefix(seq_id, tokens, salt)
        assert seq.num_computed < len(tokens), "a prompt must leave at least one token to compute"
        self.sequences[seq_id] = seq
        self.verify_reads(seq_id)
        return seq_id

    def admit(self, tokens: list[int], salt: str | None = None, chunk_len: int = 10**9) -> int | None:
        """Enter a prompt and compute its first chunk at once; None when the pool has no room for it."""
        seq_id = self.enter(tokens, salt)
        if not self.run(seq_id, chunk_len):
            self.release(seq_id)
            return None
        return seq_id

    def plan(self, seq_id: int, chunk_len: int) -> bool:
        """Reserve room for the next tokens of a sequence; False when the pool has none."""
        seq = self.sequences[seq_id]
        stop = min(len(seq.tokens), seq.num_computed + chunk_len)
        num_free = self.pool.num_free_blocks
        lengths = [len(table) for table in self.pool.block_tables(seq_id)]
        copies = self.pool.reserve(seq_id, stop, seq.num_computed)
        self._take_moves()
        if copies is None:
            self.num_refused += 1
            table_len = -(-stop // self.pool.block_size)
            num_new = sum(max(0, table_len - length) for length in lengths)
            num_new += len(self.pool._sequences[seq_id].incoming)
            assert num_free < num_new + len(lengths) or not self.pool.can_ever_fit(stop), (
                "refused although there is room"
            )
            if all(other.is_swapped for i, other in self.sequences.items() if i != seq_id):
                assert not self.pool.can_ever_fit(stop), "a sequence alone in the cache must fit"
            return False
        self._transfers += [(self._device, source, self._device, target) for source, target in copies]
        self._chunks[seq_id] = stop
        return True

    def _take_moves(self) -> None:
        """Let what was evicted or found in host memory be transferred before all that comes next."""
        for kind, source, target in self.pool.take_moves():
            memories = (self._device, self._host) if kind == "swap_out" else (self._host, self._device)
            self._transfers.append((memories[0], source, memories[1], target))

    def finish_step(self) -> None:
        """Carry out the transfers in order, write every planned chunk, read everything back, commit."""
        self._take_moves()
        for source, from_block, target, to_block in self._transfers:
            target[to_block] = dict(source.get(from_block, {}))
        self._transfers.clear()
        chunks, self._chunks = self._chunks, {}
        for seq_id, stop in chunks.items():
            for position in range(self.sequences[seq_id].num_computed, stop):
                self._write(seq_id, position)
        for seq_id, stop in chunks.items():
            self.sequences[seq_id].num_computed = stop
            self.verify_reads(seq_id)
        for seq_id, stop in chunks.items():
            self.pool.commit(seq_id, self.sequences[seq_id].tokens, stop)

    def run(self, seq_id: int, chunk_len: int) -> bool:
        """A step of this sequence alone; False when the pool has no room."""
        is_planned = self.plan(seq_id, chunk_len)
        self.finish_step()
        return is_planned

    def decode(self, seq_id: int, token: int) -> bool:
        """Append one token and compute it; without room the sequence stays one behind."""
        seq = self.sequences[seq_id]
        if seq.num_computed == len(seq.tokens):
            seq.tokens.append(token)
        return self.run(seq_id, 1)

    def fork(self, parent_id: int) -> int:
        parent, child_id = self.sequences[parent_id], self._next_id
        self._next_id += 1
        self.pool.fork(parent_id, child_id, parent.num_computed)
        self.sequences[child_id] = FakeSequence(list(parent.tokens), parent.salt, parent.num_computed)
        self.verify_reads(child_id)
        return child_id

    def release(self, seq_id: int) -> FakeSequence:
        self.pool.release(seq_id)
        self._chunks.pop(seq_id, None)
        return self.sequences.pop(seq_id)

    def swap_out(self, seq_id: int) -> bool:
        self._take_moves()
        pairs = self.pool.swap_out(seq_id, self.sequences[seq_id].num_computed)
        if pairs is None:
            return False
        self._transfers += [(self._device, block, self._host, host) for block, host in pairs]
        self._chunks.pop(seq_id, None)
        self.sequences[seq_id].is_swapped = True
        return True

    def swap_in(self, seq_id: int) -> bool:
        pairs = self.pool.swap_in(seq_id)
        self._take_moves()
        if pairs is None:
            return False
        self._transfers += [(self._host, host, self._device, block) for host, block in pairs]
        self.sequences[seq_id].is_swapped = False
        return True

    def evict(self, count: int) -> int:
        num_evicted = self.pool.tree.evict(count)
        self._take_moves()
        return num_evicted

    def verify_reads(self, seq_id: int) -> None:
        """Every computed token must be read back through the table as what it was written."""
        seq, size, tables = self.sequences[seq_id], self.pool.block_size, self.pool.block_tables(seq_id)
        for table, window in zip(tables, self.pool.windows, strict=True):
            first = 0 if window is None else max(seq.num_computed - (window or STATE_WINDOW) + 1, 0)
            for position in range(first, seq.num_computed):
                if table[position // size] == NO_BLOCK:  # in host memory, until `reserve` brings it in
                    assert self.pool._sequences[seq_id].incoming
                    continue
                found = self._device.get(table[position // size], {}).get(position % size)
                assert found == seq.history(position), f"sequence {seq_id} reads {found} at {position}"

    def verify_all(self) -> None:
        """The pool's own check, then the reads of all sequences."""
        check_books(self.pool)
        assert self.pool.audit_blocks() == []
        for seq_id, seq in self.sequences.items():
            if not seq.is_swapped:
                self.verify_reads(seq_id)

    def _write(self, seq_id: int, position: int) -> None:
        seq, size = self.sequences[seq_id], self.pool.block_size
        others = {i: sum(self.pool.block_tables(i), []) for i in self.sequences if i != seq_id}
        for table in self.pool.block_tables(seq_id):
            block = table[position // size]
            sharers = [i for i, blocks in others.items() if block in blocks]
            assert not sharers, f"sequence {seq_id} writes block {block}, which {sharers} read"
            assert block not in self.pool.tree, f"sequence {seq_id} writes the cached block {block}"
            self._device.setdefault(block, {})[position % size] = seq.history(position)


class RandomTraffic:
    """Anything an engine may do, in any order; prompts come from few documents, so many start alike."""

    def __init__(self, pool: PagedKVCachePool, seed: str, num_documents: int = 3) -> None:
        self.traffic = Traffic(pool)
        self.counts: dict[str, int] = {}  # how often each operation succeeded
        self._rng = random.Random(seed)
        self._max_len = min(pool.longest(), pool.num_blocks * pool.block_size)
        self._documents = [
            [self._rng.randrange(3) for _ in range(self._max_len + 2)] for _ in range(num_documents)
        ]

    def run(self, num_ops: int) -> None:
        """Do `num_ops` operations and verify everything after each."""
        for _ in range(num_ops):
            name, op = self._choose()
            outcome = op()
            self.counts[name] = self.counts.get(name, 0) + (outcome is not False and outcome is not None)
            self.traffic.verify_all()

    def finish(self) -> None:
        """Release all sequences."""
        for seq_id in list(self.traffic.sequences):
            self.traffic.release(seq_id)
        self.traffic.verify_all()

    def _ids(self, *, is_swapped: bool) -> list[int]:
        return [i for i, seq in self.traffic.sequences.items() if seq.is_swapped == is_swapped]

    def _choose(self) -> tuple[str, Callable[[], object]]:
        rng, traffic, resident = self._rng, self.traffic, self._ids(is_swapped=False)
        roll = rng.random()
        if not resident or roll < 0.15:
            tokens, salt = self._prompt()
            return "admit", lambda: traffic.admit(tokens, salt, rng.choice([1, 3, 10**9]))
        seq_id = rng.choice(resident)
        seq = traffic.sequences[seq_id]
        if roll < 0.45 and seq.num_computed < len(seq.tokens) - 1:
            return "chunk", lambda: traffic.run(seq_id, rng.randint(1, 6))
        if roll < 0.45:
            return "decode", lambda: traffic.decode(seq_id, self._next_token(seq.tokens))
        if roll < 0.70:
            return "step", self._mixed_step
        if roll < 0.75:
            return "fork", lambda: traffic.fork(seq_id)
        if roll < 0.77:
            return "evict", lambda: traffic.evict(rng.randint(1, 3))
        if roll < 0.775:
            return "reset", traffic.pool.reset_prefix_cache
        victim = rng.choice(list(traffic.sequences))
        return "release", lambda: traffic.release(victim)

    def _prompt(self) -> tuple[list[int], str | None]:
        rng, size = self._rng, self.traffic.pool.block_size
        num_tokens = rng.randint(1, self._max_len + 2)
        if rng.random() < 0.5:  # whole blocks: the fully cached prompt is the awkward one
            num_tokens = min(self._max_len, -(-num_tokens // size) * size)
        salt = "tenant" if rng.random() < 0.1 else None
        return rng.choice(self._documents)[:num_tokens], salt

    def _next_token(self, tokens: list[int]) -> int:
        """Mostly the document goes on, so that two sequences compute the same block side by side."""
        for document in self._documents:
            if len(tokens) < len(document) and document[: len(tokens)] == tokens:
                return document[len(tokens)] if self._rng.random() < 0.9 else self._rng.randrange(3)
        return self._rng.randrange(3)

    def _mixed_step(self) -> bool:
        """Plan swaps, aborts, chunks and a newcomer together, in any order, then run them as one step."""
        rng, traffic = self._rng, self.traffic
        kinds = [
            rng.choice(["run", "run", "run", "swap_out", "swap_in", "release", "enter"]) for _ in range(6)
        ]
        for kind in kinds:
            resident, swapped = self._ids(is_swapped=False), self._ids(is_swapped=True)
            if kind == "run" and resident:
                seq_id = rng.choice(resident)
                seq = traffic.sequences[seq_id]
                if seq.num_computed == len(seq.tokens):
                    seq.tokens.append(self._next_token(seq.tokens))
                traffic.plan(seq_id, rng.choice([1, 3, 10**9]))
            elif kind == "swap_out" and resident and traffic.swap_out(rng.choice(resident)):
                self.counts["swap_out"] = self.counts.get("swap_out", 0) + 1
            elif kind == "swap_in" and swapped and traffic.swap_in(rng.choice(swapped)):
                self.counts["swap_in"] = self.counts.get("swap_in", 0) + 1
            elif kind == "release" and resident:
                traffic.release(rng.choice(resident))
            elif kind == "enter":
                seq_id = traffic.enter(*self._prompt())
                if not traffic.plan(seq_id, rng.choice([1, 3, 10**9])):
                    traffic.release(seq_id)
            check_books(traffic.pool)
        traffic.finish_step()
        return True
