"""The event loop belongs to everybody: large pieces of work leave it, long runs of small ones let it breathe.

A loop that is busy for a tenth of a second stops every stream of the server for that long. Work in a thread
takes turns with the loop every few milliseconds; for small work the way to a thread and back costs more
than the work, so small work stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

LARGE = 2_000  # tokens or logprobs to spell: some milliseconds
RUN_LEN = 16  # pieces of work that may follow each other without a pause


async def off_loop_if_large(size: int, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Do some work of a known size, here or in a thread."""
    if size < LARGE:
        return work(*args, **options)
    return await asyncio.to_thread(work, *args, **options)


class Breather:
    """Lets others run after every few pieces of work that nobody had to wait for."""

    def __init__(self) -> None:
        self._num_done = 0

    async def pause(self) -> None:
        """Call after each piece."""
        self._num_done += 1
        if self._num_done % RUN_LEN == 0:
            await asyncio.sleep(0)
