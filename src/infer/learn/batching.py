"""Lesson 3: sequences join and leave a batch at every step."""

from __future__ import annotations

import random

from infer.learn.student import Student, Wrong, expect, expect_int, expect_ints

TITLE = "Continuous batching"
STARTER = '''\
"""Lesson 3: who is in the next step?"""


def next_batch(running, waiting, max_batch_size):
    """Return the names of the requests that take part in the next step.

    running: names of the requests of the last step that have not finished, in order of arrival.
    waiting: names of the requests that wait, in order of arrival. A name is a number.
    Every running request stays, and no place stays empty while a request waits.
    """
    raise NotImplementedError
'''


def check(student: Student) -> None:
    """Run loads step by step, and compare the number of steps with the minimum."""
    next_batch, rng = student.get("next_batch"), random.Random(0)
    for size in (1, 2, 4, 7):
        lengths = {name: rng.randint(1, 30) for name in range(40)}
        steps = _run(student, next_batch, lengths, size)
        right = _fewest(lengths, size)
        expect(
            steps == right,
            f"40 requests in batches of {size} took {steps} steps; {right} are enough if places are "
            "filled as soon as they are free",
        )


def _run(student: Student, next_batch: object, lengths: dict[int, int], size: int) -> int:
    assert callable(next_batch)
    left, waiting, running, steps = dict(lengths), list(lengths), list[int](), 0
    while left:
        student.doing = f"calling next_batch({running}, {waiting[:3]}..., {size})"
        batch = expect_ints(next_batch(list(running), list(waiting), size), "the batch")
        expect(len(batch) <= size, f"the batch has {len(batch)} requests, and max_batch_size is {size}")
        expect(len(set(batch)) == len(batch), f"a request is twice in the batch {batch}")
        if unknown := [name for name in batch if name not in left]:
            raise Wrong(f"request {unknown[0]} is in the batch {batch}, but neither runs nor waits")
        if dropped := [name for name in running if name not in batch]:
            raise Wrong(f"request {dropped[0]} is running, but is left out of the batch {batch}")
        joined = [name for name in batch if name not in running]
        expect(
            joined == waiting[: len(joined)],
            f"{joined} join, but {waiting[: len(joined)]} have waited for longer",
        )
        expect(bool(batch), f"the batch is empty while {len(left)} requests are left")
        waiting = waiting[len(joined) :]
        steps += 1
        for name in batch:
            left[expect_int(name, "a name")] -= 1
        running = [name for name in batch if left[name]]
        left = {name: count for name, count in left.items() if count}
    return steps


def _fewest(lengths: dict[int, int], size: int) -> int:
    """Return the steps of a run in which each request takes the first place that becomes free."""
    ends = [0] * size
    for length in lengths.values():
        place = ends.index(min(ends))
        ends[place] += length
    return max(ends)
