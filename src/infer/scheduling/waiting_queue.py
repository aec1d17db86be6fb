"""The queue of waiting sequences: finds the next, the oldest and the shortest sequence.

Three heaps contain the same sequences, by the policy's key, by age and by length. Removing a sequence from
the middle of a heap would need a search, so entries are left in place. Each waiting sequence has a *ticket*:

    by key    (key 3, ticket 7, C)   (key 5, ticket 4, A)   (key 9, ticket 6, B)
    by age    (step 2, ticket 4, A)  (step 8, ticket 6, B)  (step 9, ticket 7, C)
    by length (9 tokens, ticket 6, B)  (40, ticket 4, A)  (512, ticket 7, C)

    A leaves:  A.ticket = 0, so its three entries are stale: they are skipped, and swept when there are many

A sequence that has waited `max_wait_steps` for its next token, including preemptions, is promoted: its key
precedes all others. It keeps this key while it runs, so it is also the last to be preempted.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence as Seq
from typing import Any

from infer.scheduling.sequence import Sequence

RETRY_STEPS = 16  # steps after which a sequence that found no room tries again even if no block was freed
MAX_STALE = 64  # stale entries allowed in a heap, in addition to one per waiting sequence

Heap = list[tuple[Any, int, Sequence]]  # entries: (sort value, ticket, sequence)


class WaitingQueue:
    """Waiting sequences by key, age and length; adding, removing and finding the next cost O(log n)."""

    def __init__(self, max_wait_steps: int) -> None:
        self.num_tokens = 0  # tokens of all waiting sequences
        self._max_wait_steps = max_wait_steps
        self._by_key: Heap = []  # heap of sort_key
        self._by_age: Heap = []  # heap of waiting_since
        self._by_len: Heap = []  # heap of num_tokens
        self._num_waiting = 0
        self._last_ticket = 0
        self._refusal = (0, 0, 0)  # the last refusal for lack of blocks: ticket, free blocks, step

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, seq: Sequence, step: int) -> None:
        """Add a sequence that waits from this step on."""
        self._last_ticket += 1
        seq.ticket = self._last_ticket
        if seq.num_tokens != seq.num_tokens_then:  # equal: it was preempted before its next token
            seq.waiting_since, seq.num_tokens_then = step, seq.num_tokens
        heapq.heappush(self._by_key, (seq.sort_key, seq.ticket, seq))
        heapq.heappush(self._by_age, (seq.waiting_since, seq.ticket, seq))
        heapq.heappush(self._by_len, (seq.num_tokens, seq.ticket, seq))
        self._num_waiting += 1
        self.num_tokens += seq.num_tokens

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that is admitted, or has ended."""
        seq.ticket = 0
        self._num_waiting -= 1
        self.num_tokens -= seq.num_tokens
        for heap in (self._by_key, self._by_age, self._by_len):
            if not self._num_waiting:
                heap.clear()
            elif len(heap) > 2 * self._num_waiting + MAX_STALE:
                heap[:] = [entry for entry in heap if entry[1] == entry[2].ticket]
                heapq.heapify(heap)

    def refuse(self, seq: Sequence, num_free: int, step: int) -> None:
        """Remember that the next sequence found no room in `num_free` blocks."""
        self._refusal = (seq.ticket, num_free, step)

    def is_refused(self, seq: Sequence, num_free: int, step: int) -> bool:
        """Return True if looking up the prefix of a prompt again would probably find no room.

        It is retried after RETRY_STEPS, because running sequences may have computed a part of the prompt.
        """
        ticket, num_free_then, refused_at = self._refusal
        return seq.ticket == ticket and num_free <= num_free_then and step - refused_at < RETRY_STEPS

    def backlog(self, begun: Seq[Sequence], step: int) -> int:
        """Return the number of tokens that wait after the current prompt; prompts in `begun` come first."""
        behind = sum([seq.num_tokens - seq.num_computed for seq in begun[1:]])
        is_next = not begun and self._num_waiting
        return self.num_tokens + behind - (self.first(step).num_tokens if is_next else 0)

    def shortest(self) -> Sequence:
        """Return the sequence with the fewest tokens; the queue must not be empty."""
        return _top(self._by_len)

    def first(self, step: int) -> Sequence:
        """Return the next sequence of a non-empty queue; promotes the oldest if it has waited too long."""
        oldest = _top(self._by_age)
        if step - oldest.waiting_since >= self._max_wait_steps and oldest.sort_key[0] != -math.inf:
            oldest.sort_key = (-math.inf, oldest.arrival)
            # the entry with the old key sorts after this one, and becomes stale together with it
            heapq.heappush(self._by_key, (oldest.sort_key, oldest.ticket, oldest))
        return _top(self._by_key)


def _top(heap: Heap) -> Sequence:
    """Return the first sequence of a heap, after dropping stale entries; there must be one."""
    while heap[0][1] != heap[0][2].ticket:
        heapq.heappop(heap)
    return heap[0][2]
