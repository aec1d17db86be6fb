"""The token oracle behind an engine that speculates: over every policy, cache and kind of preemption.

Unlike in test_drafts.py the engine decides by itself who gets drafts and when, and steps overlap while none
has any. After every step every book is checked, and every token must be the oracle's.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from infer.cache.layout import COPY, SWAP_IN, SWAP_OUT
from infer.engine.speculation import Speculation
from tests.stress.test_token_oracle import EOS_IDS, SQUEEZED, Traffic, make_world
from tests.support.oracle import OracleWorld
from tests.support.oracle_drafts import KINDS, speculation_of
from tests.support.thinned import thinned
from tests.support.toggles import pairwise_rows

ROWS = pairwise_rows()


def speculation(world: OracleWorld) -> Speculation:
    """What gives the sequences of a world drafts."""
    assert world.engine.speculation is not None
    return world.engine.speculation


def check_forgotten(world: OracleWorld) -> None:
    """Raise if anything is known of sequences that have ended."""
    assert not (speculation(world)._limits or speculation(world)._lengths._known)
    world.check_idle()


@pytest.mark.parametrize(("number", "squeeze"), thinned(range(len(ROWS)), ({}, SQUEEZED), keep=2))
def test_speculation_changes_no_token(number: int, squeeze: dict[str, Any]) -> None:
    turn = number + len(squeeze)
    make = speculation_of(
        KINDS[turn % len(KINDS)], seed=number, is_adaptive=turn // 4 % 2 == 0, max_drafts=1 + number % 7
    )
    world = make_world(ROWS[number] | squeeze, speculation=make, steps_ahead=number % 4)
    Traffic(world, f"speculation {number}", num_requests=30, plain_share=0.8, pace=0.15).run()

    assert world.verify() > 5
    check_forgotten(world)


@pytest.mark.parametrize(("kind", "is_adaptive"), thinned(KINDS, (True, False), keep=2))
def test_speculation_meets_every_event(kind: str, is_adaptive: bool) -> None:
    """What the test above claims is worth something only if the rare things do happen in it."""
    events: Counter[str] = Counter()
    for seed in range(4):
        swaps: dict[str, Any] = {"preemption": "swap", "num_host_blocks": 20} if seed % 2 else {}
        make = speculation_of(kind, seed=seed, is_adaptive=is_adaptive)
        world = OracleWorld(
            block_size=2, num_blocks=30, eos_ids=EOS_IDS, steps_ahead=seed % 4, speculation=make, **swaps
        )
        Traffic(world, f"speculated {seed}", num_requests=60, plain_share=0.7, pace=0.15).run()
        world.verify()
        check_forgotten(world)
        totals, usage = speculation(world).totals, world.pool.usage()
        events.update(world.runner.num_transfers)
        events.update({"drafts": totals.num_drafts, "kept": totals.num_accepted})
        events["refused"] += totals.num_drafts - totals.num_accepted
        events["preempted"] += world.scheduler.num_preemptions
        events["hit tokens"] += usage.num_hit_tokens
        events["aborted"] += len(world.aborted)
        events["forked"] += sum(request.params.n > 1 for request in world.requests.values())
        events["late"] += world.most_late > 1
    names = ("drafts", "refused", "preempted", "hit tokens", "aborted", "forked", COPY, SWAP_OUT, SWAP_IN)
    assert min(events[name] for name in names) > 5 and events["late"] > 0, events
    assert kind == "ngram" or events["kept"] > 50, "the oracle hardly ever repeats itself"


@pytest.mark.parametrize("steps_ahead", [0, 2])
def test_a_draft_model_that_raises_ends_the_requests_of_its_step_only(steps_ahead: int) -> None:
    world = OracleWorld(
        block_size=2, num_blocks=40, steps_ahead=steps_ahead, speculation=speculation_of("drafter")
    )
    drafter: Any = speculation(world)._drafter
    drafter.fails = 0.1
    failed, step = set[str](), world.engine.step

    def step_and_note_failures() -> list[Any]:
        outputs = step()
        failed.update(output.request_id for output in outputs if output.finish_reason == "error")
        return outputs

    world.engine.step = step_and_note_failures  # type: ignore[method-assign]
    Traffic(world, "failing drafts", num_requests=80, plain_share=0.8, pace=0.2).run()

    assert failed
    world.aborted |= failed  # they have no tokens to check
    assert world.verify() > 20
    check_forgotten(world)


@pytest.mark.parametrize(
    ("windows", "preemption"),
    thinned(((7,), (None, 6, 6), (5, 12), (None, None, 1)), ("recompute", "swap"), keep=2),
)
def test_speculation_in_windows_of_attention(windows: tuple[int | None, ...], preemption: str) -> None:
    world = OracleWorld(
        windows=windows, block_size=2, num_blocks=24 * len(windows), preemption=preemption, eos_ids=EOS_IDS,
        num_host_blocks=30, speculation=speculation_of("proposer", share=0.9, max_drafts=16), steps_ahead=2,
    )  # fmt: skip
    Traffic(world, f"speculated windows {windows}", num_requests=40, plain_share=0.6, pace=0.2).run()

    assert world.verify() > 5
    assert speculation(world).totals.num_accepted > 0
    check_forgotten(world)
