"""Lesson 4: memory in blocks that are allocated, shared and freed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infer.cache.block_allocator import BlockAllocator, Owner
from infer.learn.student import Student, Wrong, expect, expect_int, expect_ints
from infer.learn.world import World

TITLE = "Paged memory"
STARTER = '''\
"""Lesson 4: the blocks of a KV cache."""


class Blocks:
    """Counts references to blocks 0 .. num_blocks - 1. At first all are free."""

    def __init__(self, num_blocks):
        raise NotImplementedError

    def num_free(self):
        """Return the number of free blocks."""
        raise NotImplementedError

    def take(self, count):
        """Allocate count free blocks, each with one reference, and return them."""
        raise NotImplementedError

    def share(self, blocks):
        """Add one reference to each of these blocks, which are already in use."""
        raise NotImplementedError

    def drop(self, blocks):
        """Remove one reference from each of these blocks; a block without references is free."""
        raise NotImplementedError
'''


def check(student: Student) -> None:
    """Let the engine use the student's allocator in parallel with its own."""
    make = student.get("Blocks")

    class Checked(BlockAllocator):
        """The engine's allocator, which allocates the student's choice of blocks and compares counts."""

        def __init__(
            self, num_blocks: int, *, place: str = "device", placement_seed: int | None = None
        ) -> None:
            super().__init__(num_blocks, place=place, placement_seed=placement_seed)
            student.doing = f"making Blocks({num_blocks})"
            self._theirs: Any = make(num_blocks)

        def take(self, count: int, owner: Owner) -> list[int]:
            student.doing = f"taking {count} blocks while {self.num_free} are free"
            blocks = expect_ints(self._theirs.take(count), "what take returned")
            expect(len(blocks) == count, f"take({count}) returned {len(blocks)} blocks")
            expect(len(set(blocks)) == count, f"take({count}) returned a block twice: {blocks}")
            for block in blocks:
                if block not in self.free:
                    raise Wrong(
                        f"take({count}) handed out block {block}, which is in use: {self.ref_count(block)} "
                        "references"
                        if 0 <= block < self.num_blocks
                        else f"take({count}) handed out block {block}; there are 0 to {self.num_blocks - 1}"
                    )
            chosen = set(blocks)
            self.free[:] = [block for block in self.free if block not in chosen] + blocks[::-1]
            taken = super().take(count, owner)
            self._compare(f"take({count})")
            return taken

        def adopt(self, block: int) -> None:
            super().adopt(block)
            self._tell("share", [block])

        def share(self, blocks: Sequence[int], owner: Owner) -> None:
            super().share(blocks, owner)
            self._tell("share", blocks)

        def drop(self, blocks: Sequence[int], owner: Owner) -> None:
            super().drop(blocks, owner)
            self._tell("drop", blocks)

        def _tell(self, name: str, blocks: Sequence[int]) -> None:
            student.doing = f"calling {name}({list(blocks)})"
            getattr(self._theirs, name)(list(blocks))
            self._compare(student.doing.removeprefix("calling "))

        def _compare(self, call: str) -> None:
            theirs = expect_int(self._theirs.num_free(), "what num_free returned")
            if theirs != self.num_free:
                raise Wrong(
                    f"after {call} num_free() is {theirs}, and {self.num_free} blocks are free: a reference "
                    "was counted wrongly"
                )

    world = World(num_blocks=20, allocator=Checked)
    start = list(range(100, 112))
    for number in range(30):  # some share a prefix, some do not; the cache is too small for all
        world.ask((start if number % 3 else []) + [number] * (1 + number % 9), 3 + number % 7)
        world.step()
    world.finish()
