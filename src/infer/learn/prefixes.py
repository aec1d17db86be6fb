"""Lesson 5: prompts with a common prefix share blocks, and blocks are evicted when memory is full."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from infer.cache.block_allocator import BlockAllocator, Owner
from infer.learn.student import Student, Wrong, expect, expect_int
from infer.learn.world import World

TITLE = "Prefix caching"
STARTER = '''\
"""Lesson 5: which cached block is evicted when memory is full?"""


def victim(idle):
    """Return the number of the block to evict.

    idle: the cached blocks of earlier prompts that no request uses now, each with
        block   its number
        since   the time when its last user left (a counter that grows)
        uses    the number of requests that have used it
    """
    raise NotImplementedError
'''

GOOD_ENOUGH = 0.9  # required share of the cached tokens that the engine's own rule finds


class IdleBlock(NamedTuple):
    """A cached block without users, as a rule sees it."""

    block: int
    since: int
    uses: int


def check(student: Student) -> None:
    """Serve a load with a cache that is too small, with the student's rule and with the engine's."""
    victim = student.get("victim")

    class Ruled(BlockAllocator):
        """The engine's allocator, with idle blocks evicted in the order of a rule."""

        def __init__(
            self, num_blocks: int, *, place: str = "device", placement_seed: int | None = None
        ) -> None:
            super().__init__(num_blocks, place=place, placement_seed=placement_seed)
            self._uses: Counter[int] = Counter()
            self._since: dict[int, int] = {}
            self._needed: set[int] = set()  # blocks on which later cached blocks depend
            self._clock = 0

        def share(self, blocks: Sequence[int], owner: Owner) -> None:
            super().share(blocks, owner)
            self._uses.update(blocks)

        def drop(self, blocks: Sequence[int], owner: Owner) -> None:
            super().drop(blocks, owner)
            self._clock += 1
            self._since.update(dict.fromkeys(blocks, self._clock))
            self._needed.clear()
            for block in blocks:
                if not self.ref_count(block):
                    del self._uses[block]

        def oldest_idle(self) -> int | None:
            asked = [
                IdleBlock(block, self._since.get(block, 0), self._uses[block])
                for block in self.idle
                if block not in self._needed
            ]
            if not asked:
                return None
            student.doing = f"choosing one of {len(asked)} idle blocks"
            chosen = expect_int(victim(list(asked)), "what victim returned")
            if chosen not in {each.block for each in asked}:
                raise Wrong(f"victim returned block {chosen}, which is not among the {len(asked)} idle ones")
            return chosen

        def requeue_idle(self, block: int) -> None:
            self._needed.add(block)

    right = _hits(BlockAllocator)
    got = _hits(Ruled)
    expect(
        got >= GOOD_ENOUGH * right,
        f"with this rule {got} prompt tokens are found in the cache; the engine's own rule finds {right}. "
        "Which blocks are likely to be needed again?",
    )


def _hits(allocator: type[BlockAllocator] | Callable[..., Any]) -> int:
    """Return the prompt tokens found in the cache under a load in which only a few prefixes are popular."""
    world, rng = World(num_blocks=24, max_batch_size=2, allocator=allocator), random.Random(5)  # type: ignore[arg-type]  # a class is made in a function
    for number in range(120):
        subject = rng.choice((1, 1, 1, 2, 2, 3)) if number % 2 else 100 + number
        world.ask([subject] * 8 + [number % 7, number], 2)
        while world.engine.has_work:
            world.step()
    world.finish()
    return world.pool.usage().num_hit_tokens
