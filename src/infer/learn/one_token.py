"""Lesson 1: a model predicts how likely each next token is; a loop turns that into text."""

from __future__ import annotations

from infer.learn.student import Student, expect, expect_ints
from infer.learn.world import VOCAB_SIZE, World, hashed, text_after

TITLE = "One token at a time"
STARTER = '''\
"""Lesson 1: the loop around a model."""


def generate(next_logits, prompt, max_tokens, eos_id):
    """Return the output of a greedy run: at most max_tokens ids; eos_id, if it comes, is the last one.

    next_logits(tokens) returns a list with one number for each id of the vocabulary. The largest wins; among
    equal ones, the smallest id.
    """
    raise NotImplementedError
'''

NO_TOKEN = -1


def check(student: Student) -> None:
    """Compare the loop's output with the engine's texts, and check its calls of the model."""
    generate = student.get("generate")
    prompts = [[5, 6, 7], [11], list(range(40))]
    for prompt in prompts:
        asked: list[list[int]] = []

        def next_logits(tokens: list[int], asked: list[list[int]] = asked) -> list[float]:
            asked.append(list(tokens))
            logits = [0.0] * VOCAB_SIZE
            logits[hashed(tokens)] = 1.0
            return logits

        right = text_after(prompt, 8)
        student.doing = f"calling generate(next_logits, {prompt[:3]}{'...' * (len(prompt) > 3)}, 8, -1)"
        got = expect_ints(generate(next_logits, list(prompt), 8, NO_TOKEN), "the output")
        expect(got != prompt + right, "generate returns prompt and output; return the output alone")
        expect(len(got) == 8, f"max_tokens is 8, and generate returned {len(got)} tokens")
        wrong = next((place for place, (a, b) in enumerate(zip(got, right, strict=True)) if a != b), None)
        if wrong is not None:
            seen = asked[wrong] if wrong < len(asked) else []
            expect(
                seen == prompt + right[:wrong],
                f"for token {wrong} the model must see prompt and output so far "
                f"({len(prompt) + wrong} tokens); it was given {len(seen)}",
            )
            expect(False, f"token {wrong} is {got[wrong]}, but token {right[wrong]} has the largest logit")
        student.doing = "stopping at eos_id"
        stopped = expect_ints(generate(next_logits, list(prompt), 8, right[3]), "the output")
        end = right.index(right[3]) + 1
        expect(
            stopped == right[:end], f"eos_id comes as token {end - 1}: the output ends with it, got {stopped}"
        )
    student.doing = "choosing among equal logits"
    tie = expect_ints(generate(lambda tokens: [0.0, 2.0, 2.0, 1.0], [0], 1, NO_TOKEN), "the output")
    expect(tie == [1], f"ids 1 and 2 have the largest logit; the smaller one wins, got {tie}")
    world = World(num_blocks=64)
    for prompt in prompts:
        world.ask(prompt, 8)
    world.finish()  # compares the same texts with the engine's
