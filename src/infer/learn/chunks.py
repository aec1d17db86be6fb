"""Lesson 6: long prompts are computed in pieces, so that other requests do not wait."""

from __future__ import annotations

import random

from infer.learn.student import Student, expect, expect_ints

TITLE = "Chunked prefill"
STARTER = '''\
"""Lesson 6: how much of each prompt does the next step compute?"""


def chunks(prompts, num_decoding, budget):
    """Return, for each prompt, how many of its tokens the next step computes.

    prompts: number of tokens of each prompt that are not computed yet, in order of arrival.
    num_decoding: number of decoding sequences, each of which gets its one token first.
    budget: the most tokens that the step computes in all. Prompts share the rest in their order, and nothing
    is left over while a prompt needs it.
    """
    raise NotImplementedError
'''


def check(student: Student) -> None:
    """Compare single steps with the rule, then compute long prompts step by step to the end."""
    chunks, rng = student.get("chunks"), random.Random(1)
    for _ in range(300):
        prompts = [rng.randint(1, 200) for _ in range(rng.randint(0, 6))]
        budget = rng.randint(1, 128)
        num_decoding = rng.randint(0, budget)
        _one_step(student, chunks, prompts, num_decoding, budget)
    prompts, num_decoding, steps = [500, 30, 700, 1], 3, 0
    while any(prompts):
        steps += 1
        made = _one_step(student, chunks, prompts, num_decoding, 64)
        num_decoding += sum(count == left and left > 0 for count, left in zip(made, prompts, strict=True))
        prompts = [left - count for count, left in zip(made, prompts, strict=True)]
        expect(steps < 100, "after 100 steps of 64 tokens 1,231 prompt tokens are still not computed")


def _one_step(
    student: Student, chunks: object, prompts: list[int], num_decoding: int, budget: int
) -> list[int]:
    assert callable(chunks)
    call = f"chunks({prompts}, {num_decoding}, {budget})"
    student.doing = f"calling {call}"
    got = expect_ints(chunks(list(prompts), num_decoding, budget), "the list of chunks")
    expect(len(got) == len(prompts), f"{call} returned {len(got)} numbers for {len(prompts)} prompts")
    room = budget - num_decoding
    expect(
        sum(got) <= room,
        f"{call} returned {got}: {sum(got)} tokens of prompts, but {num_decoding} sequences decode first and "
        f"leave {room}",
    )
    right: list[int] = []
    for left in prompts:
        right.append(min(left, room - sum(right)))
    expect(got == right, f"{call} returned {got}; in their order and as many as fit would be {right}")
    return got
