"""Random life in caches far too small, over every pair of toggles; every token is checked.

Rows with one sequence at a time, or with room for all, never preempt; so every row also runs
squeezed: paged, eight sequences, and a cache that holds two.

Requests come at random, some alike, some forking, some searching with beams, some for an embedding; some
are aborted at a random moment; once in a while everything cached is forgotten. The model is the token oracle,
so whatever goes wrong with a block, a copy or a position becomes a wrong token.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Container
from typing import Any

import pytest

from infer.cache.layout import SWAP_IN, SWAP_OUT
from infer.errors import RequestError
from infer.scheduling.batch_state import BatchState
from infer.scheduling.preemption import PreemptionCost
from tests.support.oracle import VOCAB_SIZE, OracleWorld, SaltedSlots
from tests.support.thinned import thinned
from tests.support.toggles import CONTEXT_LEN, engine_knobs, pairwise_rows

EOS_IDS = tuple(range(0, VOCAB_SIZE, 40))  # one token in forty ends a sequence
SWAPPING_IS_CHEAP = PreemptionCost(swap_seconds=0.1, recompute_seconds=1.0)
SQUEEZED = {"kv_cache_backend": "paged", "cache_tokens": 64, "max_batch_size": 8}

rows = pytest.mark.parametrize("number", range(len(pairwise_rows())), ids=lambda number: f"row {number + 1}")


def rows_in_turns(
    names: str, combinations: dict[str, tuple[Any, ...]], keep: int = 1
) -> pytest.MarkDecorator:
    """Every `keep`-th row with one combination, the next of them with the next one; what is left is slow."""
    return pytest.mark.parametrize(
        f"number, {names}",
        [
            pytest.param(
                number,
                *values,
                id=f"row {number + 1}-{name}",
                marks=[pytest.mark.slow]
                if number % keep or (number // keep + place) % len(combinations)
                else [],
            )
            for place, (name, values) in enumerate(combinations.items())
            for number in range(len(pairwise_rows()))
        ],
    )


def make_world(row: dict[str, Any], **changes: Any) -> OracleWorld:
    knobs = engine_knobs(row) | {"context_len": CONTEXT_LEN, "cost": SWAPPING_IS_CHEAP}
    knobs |= {"audit_every": 3} | changes  # the slow runs audit every step
    del knobs["attention_backend"]  # an oracle does not attend
    knobs["num_host_blocks"] = knobs.pop("swap_blocks")
    return OracleWorld(eos_ids=EOS_IDS, **knobs)


class Traffic:
    """A random stream of requests and aborts for one world; the same seed sends the same."""

    def __init__(
        self,
        world: OracleWorld,
        seed: object,
        num_requests: int,
        *,
        plain_share: float = 0.0,
        pace: float = 0.4,
        without: Container[str] = (),
    ) -> None:
        self.world = world
        self.without = without  # features that no request uses: see _send and run
        self.plain_share = plain_share  # of the requests: nothing that switches the overlap off
        self.pace = pace  # how likely another one comes before a step
        self.num_requests = num_requests
        self.num_sent = self.num_refused = 0
        self._rng = random.Random(str(seed))
        self._starts = [[self._token() for _ in range(30)] for _ in range(3)]

    def run(self) -> None:
        """Send, abort and step until everything is answered."""
        rng, world = self._rng, self.world
        for _ in range(20_000):
            while self.num_sent < self.num_requests and rng.random() < self.pace:
                self._send()
            is_abort = rng.random() < 0.03 and "aborts" not in self.without
            if is_abort and (live := world.scheduler.sequences()):
                self._abort(rng.choice(live).group.request.request_id)
            if rng.random() < 0.01 and "resets" not in self.without:
                world.pool.reset_prefix_cache()
            world.step()
            if self.num_sent == self.num_requests and not world.engine.has_work:
                return
        raise AssertionError(f"still {world.engine.num_requests} requests after 20,000 steps")

    def _send(self) -> None:
        rng, world = self._rng, self.world
        prompt = rng.choice(self._starts)[: rng.randrange(25)] + [
            self._token() for _ in range(rng.randrange(1, 12))
        ]
        params: dict[str, Any] = {
            "n": rng.choice((1, 1, 1, 2, 3)),
            "seed": self.num_sent,
            "max_tokens": rng.randrange(1, 20),
            "ignore_eos": rng.random() < 0.5,
        }
        is_plain = rng.random() < self.plain_share if self.plain_share else False
        if is_plain:
            params["n"] = 1
        elif rng.random() < 0.2:
            params["best_of"] = params["n"] + 1
        if "forks" in self.without:
            params["n"] = 1
            params.pop("best_of", None)
        can_search = world.scheduler.keeps_cache and "beams" not in self.without
        if rng.random() < 0.2 and can_search and not is_plain:
            params |= {"use_beam_search": True, "temperature": 0.0}
        fields: dict[str, Any] = {
            "priority": rng.randrange(3),
            "deadline": rng.choice((None, rng.random())),
            "cache_salt": rng.choice(("", "", "a")),
        }
        if world.adapters:
            fields["adapter"] = rng.choice(("", *world.adapters))
        if "priorities" in self.without:
            fields |= {"priority": 0, "deadline": None}
        if "salts" in self.without:
            fields["cache_salt"] = ""
        can_embed = params["n"] == 1 and len(params) == 4 and "embeddings" not in self.without
        if can_embed and rng.random() < 0.1:
            fields["pooling"] = rng.choice(("last", "mean"))
        self.num_sent += 1
        try:
            world.add(str(self.num_sent), prompt, request=fields, **params)
        except RequestError:  # too wide or too long for this world, said at once
            self.num_refused += 1

    def _abort(self, request_id: str) -> None:
        """The whole request, or one of its sequences once there are several."""
        seqs = self.world.seqs(request_id)
        has_forked = len(seqs) > 1 and not seqs[0].is_beam
        self.world.abort(request_id, self._rng.choice(seqs).index if has_forked else None)

    def _token(self) -> int:
        return self._rng.randrange(VOCAB_SIZE)


@rows_in_turns("squeeze", {"as it is": ({},), "squeezed": (SQUEEZED,)})
def test_every_request_gets_its_own_tokens(number: int, squeeze: dict[str, Any]) -> None:
    world = make_world(pairwise_rows()[number] | squeeze)
    traffic = Traffic(world, f"row {number}", num_requests=40)

    traffic.run()

    assert world.verify() > 6
    assert traffic.num_refused < traffic.num_requests * 3 // 4  # max_batch_size=1 takes no n > 1
    world.check_idle()


@rows_in_turns("squeeze", {"as it is": ({},), "squeezed": (SQUEEZED,)}, keep=2)
def test_no_adapter_reads_what_another_has_cached(number: int, squeeze: dict[str, Any]) -> None:
    world = make_world(pairwise_rows()[number] | squeeze, adapters=("a", "b"))
    Traffic(world, f"adapters {number}", num_requests=40).run()
    assert world.verify() > 3  # max_batch_size=1 takes no n > 1
    world.check_idle()


def test_the_oracle_sees_adapters_that_share_a_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    enter = SaltedSlots.enter
    monkeypatch.setattr(SaltedSlots, "enter", lambda slots, asked: (asked, enter(slots, asked)[1]))
    world = OracleWorld(adapters=("a", "b"))
    for name in world.adapters:
        world.add(name, range(20), request={"adapter": name})
        world.run()
    reasons = [output.finish_reason for output in world.finished.values()]
    assert reasons == ["length", "error"]


@rows_in_turns(
    "plain_share, steps_ahead",
    {
        "one step ahead all the way": (1.0, 1),
        "one step ahead on and off": (0.95, 1),
        "three steps ahead all the way": (1.0, 3),
        "three steps ahead on and off": (0.95, 3),
    },
)
def test_overlap_changes_no_token(number: int, plain_share: float, steps_ahead: int) -> None:
    """Ids come some steps late in a cache too small: aborts, stops and preemptions hit steps in flight."""
    world = make_world(pairwise_rows()[number] | SQUEEZED, steps_ahead=steps_ahead)
    pace = 0.4 if steps_ahead == 1 else 0.1  # several are under way only while none waits
    traffic = Traffic(world, f"overlap {number}", num_requests=50, plain_share=plain_share, pace=pace)

    traffic.run()

    assert world.verify() > 15
    assert min(steps_ahead, 2) <= world.most_late <= steps_ahead
    world.check_idle()


def test_several_steps_ahead_meet_every_event() -> None:
    """Requests that are preempted, aborted or stopped by an id while more than one step is under way."""
    events: Counter[str] = Counter()

    class Noting(OracleWorld):
        def step(self) -> list[Any]:
            is_deep, num_preemptions = len(self.engine._flights) > 1, self.scheduler.num_preemptions
            outputs = super().step()
            events["repeated"] += self.scheduler.state.num_steady > 0
            if is_deep:
                events["preempted"] += self.scheduler.num_preemptions - num_preemptions
                events.update(str(output.finish_reason) for output in outputs)
            return outputs

        def abort(self, request_id: str, index: int | None = None) -> None:
            events["aborted"] += len(self.engine._flights) > 1
            super().abort(request_id, index)

    for seed in range(6):
        swaps: dict[str, Any] = {"preemption": "swap", "num_host_blocks": 20} if seed % 2 else {}
        world = Noting(block_size=2, num_blocks=24, eos_ids=EOS_IDS, steps_ahead=3, **swaps)
        Traffic(world, f"deep {seed}", num_requests=60, plain_share=0.95, pace=0.15).run()
        world.verify()
        events.update(world.runner.num_transfers)
        events["hit tokens"] += world.pool.usage().num_hit_tokens
    for name in ("repeated", "preempted", "aborted", "stop", "length", SWAP_OUT, SWAP_IN, "hit tokens"):
        assert events[name] > 5, events


def test_the_squeezed_rows_meet_every_event() -> None:
    """What the test above claims is worth something only if the rare things do happen in it."""
    events: Counter[str] = Counter()
    for number in range(0, len(pairwise_rows()), 3):
        world = make_world(pairwise_rows()[number] | SQUEEZED)
        Traffic(world, f"events {number}", num_requests=50).run()
        usage = world.pool.usage()
        events["preempted"] += world.scheduler.num_preemptions
        events["hit tokens"] += usage.num_hit_tokens
        events["evicted"] += usage.num_evicted_blocks
        events["beam searches"] += sum(r.params.use_beam_search for r in world.requests.values())
        events.update(world.runner.num_transfers)
    assert len(events) == 7
    assert min(events.values()) > 20, events


@pytest.mark.parametrize("seed", range(2))
def test_where_blocks_lie_makes_no_difference(seed: int) -> None:
    """Blocks handed out in random order: the same traffic, the same plans, the same tokens."""
    row: dict[str, Any] = {"block_size": 2, "num_blocks": 40, "num_host_blocks": 20, "preemption": "swap"}
    worlds = [OracleWorld(eos_ids=EOS_IDS, placement_seed=placement, **row) for placement in (None, 1, 2)]
    for world in worlds:
        Traffic(world, f"placement {seed}", num_requests=40).run()
        world.verify()

    first, *others = worlds
    assert first.scheduler.num_preemptions > 0
    for other in others:
        assert other.tokens == first.tokens
        assert [plan.chunks for plan in other.plans] == [plan.chunks for plan in first.plans]
    assert others[0].plans != first.plans, "the transfers name other blocks"


@pytest.mark.parametrize("number", thinned(range(len(pairwise_rows())), keep=4))
def test_the_same_queue_gives_the_same_plans_twice(number: int) -> None:
    once, again = (make_world(pairwise_rows()[number] | SQUEEZED) for _ in range(2))
    for world in (once, again):
        Traffic(world, f"twice {number}", num_requests=25).run()
    assert once.plans == again.plans
    assert once.tokens == again.tokens
    assert once.engine.stats().num_step_tokens == once.runner.num_tokens, "the plans' own tokens"


@rows_in_turns(
    "steps_ahead, limit",
    {
        "few blocks": (0, SQUEEZED),
        "few places": (0, {"max_batch_size": 2}),
        "few blocks, three steps ahead": (3, SQUEEZED),
        "few places, three steps ahead": (3, {"max_batch_size": 2}),
    },
    keep=2,
)
def test_to_repeat_plans_changes_none_of_them(
    number: int, steps_ahead: int, limit: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan is repeated whenever it can be, whatever the number of sequences, or never."""
    worlds = {}
    for settle in (BatchState.settle, lambda state: None):
        monkeypatch.setattr(BatchState, "settle", settle)
        world = worlds[settle] = make_world(pairwise_rows()[number] | limit, steps_ahead=steps_ahead)
        Traffic(world, f"repeated {number}", num_requests=20, plain_share=0.95, pace=0.1).run()
    with_it, without = worlds.values()
    assert with_it.verify() == without.verify() > 0
    assert with_it.plans == without.plans
    assert with_it.tokens == without.tokens
    assert with_it.pool.usage() == without.pool.usage()


@pytest.mark.parametrize(
    ("number", "fails_early"), thinned(range(0, len(pairwise_rows()), 3), (False, True), keep=2)
)
def test_a_step_that_raises_ends_its_own_requests_only(number: int, fails_early: bool) -> None:
    world = make_world(pairwise_rows()[number] | SQUEEZED)
    world.runner.fails_early = fails_early
    traffic = Traffic(world, f"faults {number}", num_requests=60)
    failed: set[str] = set()
    step = world.engine.step

    def step_and_note_failures() -> list[Any]:
        if world.runner.num_steps % 17 == 5:
            world.runner.fail_at = world.runner.num_steps + 1
        outputs = step()
        failed.update(output.request_id for output in outputs if output.finish_reason == "error")
        return outputs

    world.engine.step = step_and_note_failures  # type: ignore[method-assign]
    traffic.run()

    assert failed
    world.aborted |= failed  # they have no tokens to check
    assert world.verify() > 5
    world.check_idle()


NUM_LONG = int(os.environ.get("NUM_LONG_RUNS", "1"))  # of every row: a second and a half each; more by hand


@pytest.mark.slow
@rows
def test_thousands_of_requests_get_their_own_tokens(number: int) -> None:
    """Runs many times as long as those above, every second one squeezed, with blocks that lie elsewhere."""
    for seed in range(number, number + NUM_LONG):
        squeeze = SQUEEZED if seed % 2 else {}
        world = make_world(pairwise_rows()[number] | squeeze, placement_seed=seed, audit_every=1)
        Traffic(world, f"long {number} {seed}", num_requests=300).run()
        world.verify()
        world.check_idle()
