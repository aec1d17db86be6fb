"""Constrained and free sequences side by side in caches far too small; every output is checked.

The model is the token oracle, which draws among what a mask allows. Whatever goes wrong with a block, a copy,
a mask or the place of a token becomes another token than a loop without cache, batch or engine draws. That
loop shows every output to a guide that has seen nothing else.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from infer.constraints.description import Reasoning, Structured
from infer.errors import RequestError
from infer.scheduling.preemption import PreemptionCost
from tests.support.guided import GuidedWorld
from tests.support.words import THINK_END, VOCAB_SIZE, ids_of, token_of

PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["ab", "yes"]}, "age": {"type": "integer", "maximum": 9999}, "items": {}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CONSTRAINTS = [
    Structured.json_schema(PERSON),
    Structured.json_schema(PERSON, whitespace=" "),
    Structured.json_object(),
    Structured.regex("(ab|no)+[0-9]{2}"),
    Structured.choice(["yes", "no", "abc12"]),
    Structured.grammar('start: "abc" ("12" | "no")*'),
    Structured.regex("[0-9]{2}", triggers=("a", "no")),  # letters that the oracle often draws
]
SWAPS = PreemptionCost(swap_seconds=0.1, recompute_seconds=1.0)


def random_params(rng: random.Random, number: int) -> dict[str, Any]:
    params: dict[str, Any] = {
        "n": rng.choice((1, 1, 1, 2, 3)),
        "seed": number,
        "max_tokens": rng.randrange(1, 24),
    }
    if rng.random() < 0.2:
        params["best_of"] = params["n"] + 1
    if rng.random() < 0.2:
        params["logprobs"] = 1
    if rng.random() < 0.6:
        params["structured"] = rng.choice(CONSTRAINTS)
    if rng.random() < 0.3:
        limit = rng.choice((None, 0, 1, 4))
        forced = rng.choice(((), (*ids_of("no"), THINK_END), (THINK_END, token_of("a"))))
        params["reasoning"] = Reasoning(end_id=THINK_END, max_tokens=limit, forced=forced)
    return params


def send_and_run(world: GuidedWorld, seed: object, num_requests: int) -> Counter[str]:
    """Random requests and aborts until all is answered; counts of what happened."""
    rng, counts = random.Random(f"{seed}"), Counter[str]()
    starts = [[rng.randrange(4, VOCAB_SIZE) for _ in range(30)] for _ in range(2)]
    num_sent = 0
    for _ in range(20_000):
        while num_sent < num_requests and rng.random() < 0.4:
            num_sent += 1
            own = [rng.randrange(4, VOCAB_SIZE) for _ in range(rng.randrange(1, 10))]
            try:
                params = random_params(rng, num_sent)
                world.add(str(num_sent), rng.choice(starts)[: rng.randrange(20)] + own, **params)
            except RequestError:
                counts["refused"] += 1
        live = world.scheduler.sequences()
        if live and rng.random() < 0.02:
            world.abort(rng.choice(live).group.request.request_id)
        if rng.random() < 0.01:
            world.pool.reset_prefix_cache()
        world.step()
        if num_sent == num_requests and not world.engine.has_work:
            break
    else:
        raise AssertionError("not done after 20,000 steps")
    counts["preempted"] = world.scheduler.num_preemptions
    counts["checked"] = world.verify()
    return counts


WORLDS: dict[str, dict[str, Any]] = {
    "roomy": {"num_blocks": 200},
    "squeezed, recomputing": {"num_blocks": 24, "preemption": "recompute"},
    "squeezed, swapping": {
        "num_blocks": 24,
        "num_host_blocks": 40,
        "preemption": "swap",
        "cost": SWAPS,
    },
    "small steps": {"num_blocks": 40, "max_num_batched_tokens": 7, "prefill_chunk_size": 3},
    "no chunks": {"num_blocks": 40, "use_chunked_prefill": False},
    "no prefix cache": {"num_blocks": 40, "use_prefix_caching": False},
    "prompts first": {"num_blocks": 40, "scheduler_policy": "prefill_first"},
    "static batches": {"num_blocks": 40, "batching_mode": "static"},
    "no cache": {"num_blocks": 200, "kv_cache_backend": "naive"},
}


@pytest.mark.parametrize(
    ("name", "steps_ahead"),
    [(name, steps) for name in WORLDS for steps in (0, 1)]
    + [("roomy", 3), ("squeezed, swapping", 3), ("small steps", 2)],
)
def test_every_sequence_gets_what_its_constraint_and_the_model_say(name: str, steps_ahead: int) -> None:
    """What is appended without a step is what steps would have drawn, so both are compared with one loop."""
    kind = (len(name) + steps_ahead) % 3
    jumping = {"jumps": kind > 0, "always_jumps": kind > 1}
    world = GuidedWorld(steps_ahead=steps_ahead, **jumping, **WORLDS[name])
    counts = send_and_run(world, f"{name} {steps_ahead}", 20)
    assert counts["checked"] > 15
    if name.startswith("squeezed"):
        assert counts["preempted"] > 1


def test_jumps_save_steps() -> None:
    num_steps = []
    for jumps in (True, False):
        world = GuidedWorld(num_blocks=200, jumps=jumps)
        world.add("a", [5], structured=CONSTRAINTS[1], max_tokens=50)
        world.run()
        world.verify()
        num_steps.append(world.runner.num_steps)
    assert num_steps[0] < num_steps[1] * 0.8


def test_the_first_step_that_fails_ends_its_requests_and_no_others() -> None:
    world = GuidedWorld(num_blocks=200, steps_ahead=1)
    world.add("a", [5], structured=CONSTRAINTS[0], max_tokens=40)
    world.step()
    world.runner.fail_at = world.runner.num_steps + 1
    world.step()
    world.run()
    assert world.finished["a", 0].finish_reason == "error"
    world.add("b", [5], structured=CONSTRAINTS[0], max_tokens=40)
    world.run()
    assert world.finished["b", 0].finish_reason in ("stop", "length")
