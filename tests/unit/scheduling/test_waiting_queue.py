"""The queue of waiting sequences keeps nothing of those that have left."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from infer.scheduling.waiting_queue import MAX_STALE, WaitingQueue

NUM_WAITING = 32


def make_sequence(number: int, num_tokens: int) -> Any:
    return SimpleNamespace(
        arrival=number, sort_key=(0.0, number), num_tokens=num_tokens, num_tokens_then=-1, waiting_since=0,
        ticket=0, num_computed=0,
    )  # fmt: skip


@pytest.mark.parametrize("asks", [False, True])
def test_a_queue_that_is_never_empty_forgets_what_has_left(asks: bool) -> None:
    queue, source = WaitingQueue(10**9), random.Random(0)
    for number in range(NUM_WAITING):
        queue.push(make_sequence(number, source.randrange(10, 4000)), 0)
    for number in range(NUM_WAITING, 2000):
        queue.push(make_sequence(number, source.randrange(10, 4000)), number)
        if asks:
            queue.shortest()
        queue.remove(queue.first(number))
        longest = max(map(len, (queue._by_key, queue._by_age, queue._by_len)))
        assert longest <= 2 * len(queue) + MAX_STALE + 1
    assert len(queue) == NUM_WAITING
