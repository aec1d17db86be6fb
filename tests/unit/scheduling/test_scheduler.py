"""Plans, step by step: who runs, how much of it, and who has to yield.

Most tests read the plan as {request: (start, stop)}. The sequences are driven by a real engine with a
token oracle, because a plan only means something together with what follows from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from infer.config.profiles.generic import GENERIC
from infer.scheduling.policies import POLICIES
from infer.scheduling.preemption import PreemptionCost
from infer.scheduling.waiting_queue import RETRY_STEPS
from tests.support.oracle import OracleWorld, prompt_of
from tests.support.thinned import thinned

Ranges = dict[str, tuple[int, int]]


def make_world(tuned: Mapping[str, int] | None = None, **knobs: Any) -> OracleWorld:
    defaults: dict[str, Any] = {"num_blocks": 100, "preemption": "recompute"}
    return OracleWorld(profile=replace(GENERIC.scheduling, **(tuned or {})), **(defaults | knobs))


def step(world: OracleWorld) -> Ranges:
    """One step; what it computed of each request (of the last of its sequences, where there are several)."""
    names = {seq.seq_id: seq.group.request.request_id for seq in world.scheduler.sequences()}
    num_plans = len(world.plans)
    world.step()
    if len(world.plans) == num_plans:
        return {}
    return {names[chunk.seq_id]: (chunk.start, chunk.stop) for chunk in world.plans[-1].chunks}


def test_a_prompt_is_computed_in_chunks_and_then_a_token_at_a_time() -> None:
    world = make_world(prefill_chunk_size=4)
    world.add("a", prompt_of(10), max_tokens=3)
    ranges = [step(world)["a"] for _ in range(5)]
    assert ranges == [(0, 4), (4, 8), (8, 10), (10, 11), (11, 12)]
    assert not world.engine.has_work, "the last token is sampled and never computed"


def test_only_the_chunk_that_ends_a_prompt_samples() -> None:
    world = make_world(prefill_chunk_size=4)
    world.add("a", prompt_of(10), max_tokens=2)
    world.run()
    assert [plan.chunks[0].num_samples for plan in world.plans] == [0, 0, 1, 1]


def test_prompts_come_in_small_pieces_while_others_decode() -> None:
    world = make_world(prefill_tokens_while_decoding=4, max_batch_size=8, max_num_batched_tokens=64)
    world.add("a", prompt_of(20), max_tokens=30)
    assert step(world) == {"a": (0, 20)}, "none decodes: none would wait"
    world.add("b", prompt_of(20, start=50))
    assert step(world) == {"a": (20, 21), "b": (0, 4)}
    assert step(world) == {"a": (21, 22), "b": (4, 8)}


def test_one_long_prompt_is_no_backlog() -> None:
    world = make_world(
        {"backlog_tokens": 30}, prefill_tokens_while_decoding=2, max_batch_size=8, max_num_batched_tokens=64
    )
    world.add("a", prompt_of(2), max_tokens=30)
    step(world)
    world.add("b", prompt_of(50, start=50))
    assert step(world) == {"a": (2, 3), "b": (0, 2)}, "long, but none waits behind it"
    assert step(world) == {"a": (3, 4), "b": (2, 4)}
    world.add("c", prompt_of(20, start=200))
    assert step(world) == {"a": (4, 5), "b": (4, 6)}


def test_a_long_backlog_is_computed_at_full_speed() -> None:
    world = make_world(
        {"backlog_tokens": 64}, prefill_tokens_while_decoding=4, max_batch_size=8, max_num_batched_tokens=64
    )
    world.add("a", prompt_of(2), max_tokens=30)
    step(world)
    for name in "bcde":
        world.add(name, prompt_of(40, start=ord(name)))
    assert step(world) == {"a": (2, 3), "b": (0, 40), "c": (0, 23)}, "160 tokens are a backlog"


def test_a_latency_target_is_kept_however_many_prompts_wait() -> None:
    world = make_world(
        {"backlog_tokens": 16},
        prefill_tokens_while_decoding=4,
        itl_target_ms=5.0,
        max_batch_size=8,
        max_num_batched_tokens=64,
    )
    world.add("a", prompt_of(2), max_tokens=30)
    step(world)
    for name in "bcde":
        world.add(name, prompt_of(40, start=ord(name)))
    assert step(world) == {"a": (2, 3), "b": (0, 4)}


def test_a_hurried_step_is_shorter_than_one_that_none_waits_for() -> None:
    world = make_world(
        {"backlog_tokens": 16, "hurried_tokens": 30},
        prefill_tokens_while_decoding=1,
        max_batch_size=8,
        max_num_batched_tokens=64,
    )
    for name in "bcde":
        world.add(name, prompt_of(40, start=ord(name)))
    assert step(world) == {"b": (0, 40), "c": (0, 24)}
    assert step(world) == {"b": (40, 41), "c": (24, 40), "d": (0, 14)}, "30 tokens, and one that b waits for"


def test_a_backlog_never_makes_a_step_shorter() -> None:
    world = make_world(
        {"backlog_tokens": 16, "hurried_tokens": 2},
        prefill_tokens_while_decoding=4,
        max_batch_size=8,
        max_num_batched_tokens=64,
    )
    world.add("a", prompt_of(2), max_tokens=30)
    step(world)
    for name in "bcde":
        world.add(name, prompt_of(40, start=ord(name)))
    assert step(world) == {"a": (2, 3), "b": (0, 4)}


def test_many_short_prompts_are_packed_into_steps_of_one_launch() -> None:
    world = make_world({"short_prompt": 12}, max_batch_size=8, max_num_batched_tokens=64)
    world.scheduler.config = replace(world.scheduler.config, packed_step_tokens=20)
    world.add("a", prompt_of(30), max_tokens=1)
    assert step(world) == {"a": (0, 30)}, "one alone is computed as fast as it can be"
    for name in "bcd":
        world.add(name, prompt_of(12, start=ord(name)), max_tokens=30)
    assert step(world) == {"b": (0, 12), "c": (0, 8)}, "though none decodes"
    assert step(world) == {"b": (12, 13), "c": (8, 12), "d": (0, 12)}, "20 tokens beside those that decode"
    for name in "ef":
        world.add(name, prompt_of(30, start=ord(name)), max_tokens=1)
    planned = step(world)
    assert planned["e"] == (0, 30) and planned["f"][1] > 20, "long ones are not"


BUSY = {
    "backlog_tokens": 16,
    "hurried_tokens": 40,
    "recent_steps": 4,
    "rare": 8,
    "often": 1,
    "row_padding": 1,
}


def make_busy_world(**tuned: int) -> OracleWorld:
    """Three sequences decode, and 40 tokens of prompts have just been computed next to them."""
    world = make_world(
        BUSY | tuned, prefill_tokens_while_decoding=2, max_batch_size=16, max_num_batched_tokens=64
    )
    world.scheduler.config = replace(world.scheduler.config, busy_step_tokens=16)
    for name in "abc":
        world.add(name, prompt_of(2, start=ord(name)), max_tokens=30)
    step(world)
    for name in "de":
        world.add(name, prompt_of(20, start=ord(name)), max_tokens=30)
    decoding = dict.fromkeys("abc", (2, 3))
    assert step(world) == decoding | {"d": (0, 20), "e": (0, 20)}, "a backlog, and the first of its kind"
    return world


def prompts_of(ranges: Ranges, names: str) -> Ranges:
    return {name: ranges[name] for name in names if name in ranges}


def test_where_hurried_steps_would_be_frequent_steps_are_short() -> None:
    world = make_busy_world()
    for name in "fghi":
        world.add(name, prompt_of(10, start=ord(name)), max_tokens=30)
    assert prompts_of(step(world), "fghi") == {"f": (0, 10), "g": (0, 1)}, "16 tokens, of which five decode"
    assert prompts_of(step(world), "ghi") == {"g": (1, 10), "h": (0, 1)}, "and now six"


def test_short_steps_are_not_for_prompts_that_are_long_many_or_all_there_is() -> None:
    world = make_busy_world()
    for name in "fghijk":
        world.add(name, prompt_of(10, start=ord(name)), max_tokens=30)
    assert prompts_of(step(world), "fghijk") == dict.fromkeys("fghi", (0, 10)), "six wait for five"

    world = make_busy_world()
    for name in "fgh":
        world.add(name, prompt_of(14, start=ord(name)), max_tokens=30)
    hurried = {"f": (0, 14), "g": (0, 14), "h": (0, 12)}
    assert prompts_of(step(world), "fgh") == hurried, "each is longer than a short step"

    world = make_busy_world(often=6)
    for name in "fghi":
        world.add(name, prompt_of(10, start=ord(name)), max_tokens=30)
    assert prompts_of(step(world), "fghi") == dict.fromkeys("fghi", (0, 10)), "prompts are the load"


def test_hurried_steps_come_back_when_prompts_have_become_rare() -> None:
    world = make_busy_world()
    for _ in range(8):
        step(world)
    for name in "fghi":
        world.add(name, prompt_of(10, start=ord(name)), max_tokens=30)
    assert prompts_of(step(world), "fghi") == dict.fromkeys("fghi", (0, 10))


def test_decoding_goes_on_while_a_prompt_fills_what_is_left_of_the_budget() -> None:
    world = make_world(max_num_batched_tokens=8)
    for name in "ab":
        world.add(name, prompt_of(3, start=ord(name)))
    step(world)
    world.add("c", prompt_of(20))
    assert step(world) == {"a": (3, 4), "b": (3, 4), "c": (0, 6)}
    assert step(world) == {"a": (4, 5), "b": (4, 5), "c": (6, 12)}


def test_prefill_first_turns_that_round_but_none_waits_longer_than_the_gap() -> None:
    world = make_world(scheduler_policy="prefill_first", max_num_batched_tokens=8, max_decode_gap=3)
    world.add("a", prompt_of(3))
    step(world)
    world.add("c", prompt_of(55), max_tokens=2)
    served = ["a" in step(world) for _ in range(8)]
    assert served == [False, False, False, True, False, False, False, True]


def test_without_chunking_a_prompt_waits_for_a_step_that_holds_all_of_it() -> None:
    world = make_world(use_chunked_prefill=False, max_num_batched_tokens=12)
    world.add("a", prompt_of(8))
    world.add("b", prompt_of(8, start=2))
    assert step(world) == {"a": (0, 8)}
    assert step(world) == {"a": (8, 9), "b": (0, 8)}


def test_newcomers_are_let_in_strictly_in_order() -> None:
    """A small one does not slip past a large one that is waiting for room."""
    world = make_world(num_blocks=6, block_size=4)
    world.add("a", prompt_of(12), max_tokens=6)
    step(world)
    world.add("large", prompt_of(16, start=2), max_tokens=2)
    world.add("small", prompt_of(2, start=3), max_tokens=2)
    assert set(step(world)) == {"a"}
    assert [seq.state for name in ("large", "small") for seq in world.seqs(name)] == ["WAITING"] * 2
    world.run()
    assert world.verify() == 3


def test_places_are_counted_with_the_sequences_a_request_will_fork_into() -> None:
    world = make_world(max_batch_size=4)
    world.add("a", prompt_of(4), n=3)
    world.add("b", prompt_of(4, start=2), n=2)
    world.add("c", prompt_of(4, start=3))
    assert set(step(world)) == {"a"}, "b would make it five, and c waits behind b"
    world.run()
    assert world.verify() == 3


def test_the_youngest_is_preempted_when_the_cache_is_full() -> None:
    world = make_world(num_blocks=5, block_size=4, use_prefix_caching=False)
    for name in "ab":
        world.add(name, prompt_of(8, start=ord(name)), max_tokens=6)
    step(world)
    assert set(step(world)) == {"a"}, "a takes the last block, so b must yield"
    assert world.plans[-1].preempted == (world.seq("b").seq_id,)
    world.run()
    assert world.verify() == 2


def test_the_least_urgent_is_preempted_under_priorities() -> None:
    world = make_world(num_blocks=5, block_size=4, use_prefix_caching=False, scheduler_policy="priority")
    world.add("late but urgent", prompt_of(8, start=1), request={"priority": 0})
    world.add("early", prompt_of(8, start=2), request={"priority": 5})
    step(world)
    assert set(step(world)) == {"late but urgent"}
    assert world.seq("early").state == "WAITING"


def test_no_sequence_comes_in_while_one_is_preempted() -> None:
    world = make_world(num_blocks=5, block_size=4, use_prefix_caching=False)
    for name in "ab":
        world.add(name, prompt_of(8, start=ord(name)), max_tokens=6)
    step(world)
    world.add("tiny", prompt_of(1))
    step(world)
    assert world.plans[-1].preempted
    assert world.seq("tiny").state == "WAITING"


def test_preempted_sequences_keep_their_place_in_the_queue() -> None:
    world = make_world(num_blocks=5, block_size=4, use_prefix_caching=False)
    for name in "ab":
        world.add(name, prompt_of(8, start=ord(name)), max_tokens=6)
    step(world)
    world.add("c", prompt_of(8, start=77), max_tokens=6)
    world.run()
    order = [output.request_id for output in world.finished.values()]
    assert order == ["a", "b", "c"]


def test_a_recomputed_sequence_starts_over_and_a_swapped_one_goes_on() -> None:
    for mode, start in (("recompute", 0), ("swap", 8)):
        world = make_world(
            num_blocks=5, block_size=4, num_host_blocks=8, preemption=mode, use_prefix_caching=False
        )
        for name in "ab":
            world.add(name, prompt_of(8, start=ord(name)), max_tokens=6)
        step(world)
        step(world)
        while "b" not in (ranges := step(world)):
            pass
        assert ranges["b"] == (start, 9)


def test_only_what_was_cached_when_it_came_counts_as_cached() -> None:
    """Its own blocks, found again after a preemption or by an attempt that found no room, do not."""
    world = make_world(num_blocks=5, block_size=4)
    for name in "ab":
        world.add(name, prompt_of(8, start=ord(name)), max_tokens=6)
    step(world)
    step(world)
    assert world.seq("b").state == "WAITING"
    world.run()
    assert world.scheduler.num_preemptions > 0
    assert [world.finished[name, 0].num_cached for name in "ab"] == [0, 0]
    world.add("again", prompt_of(8, start=ord("b")), n=2)
    world.run()
    assert [world.finished["again", index].num_cached for index in (0, 1)] == [7, 7]


def test_auto_preemption_takes_the_cheaper_way() -> None:
    assert PreemptionCost(swap_seconds=1, recompute_seconds=3).prefers_swap("auto", 5)
    assert not PreemptionCost(swap_seconds=2, recompute_seconds=3).prefers_swap("auto", 5)
    assert not PreemptionCost(swap_seconds=1, recompute_seconds=3).prefers_swap("auto", 0), "nothing to move"
    assert not PreemptionCost(swap_seconds=1, recompute_seconds=9).prefers_swap("recompute", 5)
    assert PreemptionCost(swap_seconds=9, recompute_seconds=1).prefers_swap("swap", 5)


def test_a_static_batch_computes_its_prompts_then_decodes_to_the_last() -> None:
    world = make_world(batching_mode="static", max_batch_size=2, prefill_chunk_size=6)
    world.add("a", prompt_of(4), max_tokens=2)
    world.add("b", prompt_of(8, start=2), max_tokens=4)
    world.add("c", prompt_of(4, start=3), max_tokens=2)
    assert step(world) == {"a": (0, 4), "b": (0, 6)}
    assert step(world) == {"b": (6, 8)}, "a waits for the prompts of its batch"
    assert step(world) == {"a": (4, 5), "b": (8, 9)}
    assert step(world) == {"b": (9, 10)}, "a is done; c does not take its place"
    assert step(world) == {"b": (10, 11)}
    assert step(world) == {"c": (0, 4)}
    world.run()
    assert world.verify() == 3


def test_a_continuous_batch_refills_at_once() -> None:
    world = make_world(max_batch_size=2)
    for name, max_tokens in (("a", 2), ("b", 6), ("c", 2)):
        world.add(name, prompt_of(4, start=ord(name)), max_tokens=max_tokens)
    step(world)
    step(world)
    assert step(world) == {"b": (5, 6), "c": (0, 4)}


def test_the_naive_baseline_computes_every_token_again_in_every_step() -> None:
    world = make_world(kv_cache_backend="naive")
    world.add("a", prompt_of(4), max_tokens=3)
    assert [step(world)["a"] for _ in range(3)] == [(0, 4), (0, 5), (0, 6)]
    assert world.verify() == 1


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "prefill_first"])
def test_a_sequence_one_behind_is_served_in_every_step(policy: str) -> None:
    """The budget holds a token of every sequence that may run, whatever prompts are waiting for the rest."""
    world = make_world(scheduler_policy=policy, max_batch_size=4, max_num_batched_tokens=4)
    for number in range(4):
        world.add(str(number), prompt_of(6, start=number), max_tokens=9)
    for _ in range(30):
        one_behind = {seq.group.request.request_id for seq in world.scheduler.running if seq.num_pending == 1}
        assert one_behind <= set(step(world))
    assert world.verify() == 4


def test_aborted_sequences_leave_no_trace_in_the_queue() -> None:
    world = make_world(max_batch_size=1)
    for number in range(50):
        world.add(str(number), prompt_of(3, start=number), max_tokens=2)
    for number in range(1, 49):
        world.abort(str(number))
    assert world.scheduler.num_waiting == 2
    assert num_entries(world) <= 2 * 2 + 64
    world.run(max_steps=6)
    assert world.verify() == 2
    assert num_entries(world) == 0


def num_entries(world: OracleWorld) -> int:
    waiting = world.scheduler._waiting
    return max(len(waiting._by_key), len(waiting._by_age))


def test_the_queue_forgets_those_who_left_it_waiting() -> None:
    """Requests that come and go while none is let in, beside some that stay."""
    world = make_world(max_batch_size=1)
    for number in range(200):
        world.add(str(number), prompt_of(3, start=number), max_tokens=2)
        world.abort(str(number))
        assert num_entries(world) == 0
    for number in range(400):
        world.add(f"b{number}", prompt_of(3, start=number), max_tokens=2)
        if number % 100:
            world.abort(f"b{number}")
        assert num_entries(world) <= 2 * world.scheduler.num_waiting + 64
    world.run()
    assert list(world.finished) == [(f"b{number}", 0) for number in (0, 100, 200, 300)]
    assert num_entries(world) == 0


def test_a_head_of_the_queue_without_room_is_not_looked_up_in_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = make_world(num_blocks=17, block_size=4, context_len=80)
    world.add("running", prompt_of(8), max_tokens=60)
    step(world)
    world.add("large", prompt_of(60, start=2), max_tokens=2)
    lookups: list[int] = []
    match = world.pool.match_prefix

    def count(seq_id: int, *known: Any) -> int:
        lookups.append(seq_id)
        return match(seq_id, *known)

    monkeypatch.setattr(world.pool, "match_prefix", count)
    for _ in range(40):
        step(world)
    assert world.seq("large").state == "WAITING"
    assert len(lookups) <= 2 + 40 // RETRY_STEPS
    world.abort("running")
    assert "large" in step(world), "as soon as blocks come free"
    world.run()
    assert world.verify() == 1


def test_a_sequence_that_found_no_blocks_is_not_about_to_come_in() -> None:
    """Steps may have drafts meanwhile; only one that may come in with the next plan would wait for them."""
    world = make_world(num_blocks=17, block_size=4, context_len=80)
    scheduler = world.scheduler
    world.add("running", prompt_of(8), max_tokens=60)
    assert scheduler.may_admit and "running" in step(world) and not scheduler.may_admit
    world.add("large", prompt_of(60, start=2), max_tokens=2)
    assert scheduler.may_admit
    seen = [scheduler.may_admit for _ in range(40) if "large" not in step(world)]
    assert scheduler.num_waiting and scheduler.num_free_places, "it waits for blocks alone"
    assert len(seen) == 40 and sum(seen) <= 1 + 40 // RETRY_STEPS, "prefixes may be found now and then"
    world.abort("running")
    assert scheduler.may_admit, "blocks came free"
    assert "large" in step(world) and not scheduler.may_admit
    world.run()
    assert world.verify() == 1


def test_a_head_of_the_queue_comes_in_when_others_have_computed_its_prompt() -> None:
    """No block comes free, but it needs fewer of its own."""
    world = make_world(num_blocks=14, block_size=4, prefill_chunk_size=4)
    for name in "ab":
        world.add(name, prompt_of(40), max_tokens=16)
    while world.seq("b").state == "WAITING":
        assert world.scheduler.step < 10 + RETRY_STEPS
        step(world)
    assert world.seq("a").is_running
    world.run()
    assert world.verify() == 2


# -- no sequence waits for ever --------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("batching_mode", ["continuous", "static"])
def test_no_sequence_starves_under_adversarial_arrivals(policy: str, batching_mode: str) -> None:
    """All that come later are more urgent, and the cache is always full."""
    max_wait_steps, life = 20, 8
    world = make_world(
        scheduler_policy=policy,
        batching_mode=batching_mode,
        max_wait_steps=max_wait_steps,
        max_batch_size=2,
        num_blocks=8,
        block_size=4,
    )
    fields = {"priority": 9, "deadline": 1e9}
    world.add("victim", prompt_of(6, start=500), request=fields, max_tokens=4)
    for number in range(120):
        if ("victim", 0) in world.finished:
            break
        urgent = {"priority": -number, "deadline": 1e6 - number}
        world.add(f"u{number}", prompt_of(6, start=number), request=urgent, max_tokens=life)
        world.step()
    # it is promoted after max_wait_steps, then those that run end, then it runs itself
    assert ("victim", 0) in world.finished
    assert world.scheduler.step <= max_wait_steps + 4 * life
    world.run()
    assert world.verify() == len(world.requests)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_who_is_let_in_and_preempted_in_turn_is_promoted_in_the_end(preemption: str) -> None:
    """Between two urgent requests it begins its prompt, and never comes to its first token."""
    world = make_world(
        scheduler_policy="priority",
        max_wait_steps=40,
        num_blocks=20,
        num_host_blocks=1,
        context_len=80,
        prefill_chunk_size=2,
        max_num_batched_tokens=16,
        use_prefix_caching=False,
        preemption=preemption,
    )
    world.add("meek", prompt_of(56, start=500), request={"priority": 9}, max_tokens=4)
    for number in range(200):
        if ("meek", 0) in world.finished:
            break
        if not any(seq.group.request.priority < 0 for seq in world.scheduler.sequences()):
            world.add(str(number), prompt_of(8, start=number), request={"priority": -1}, max_tokens=36)
        world.step()
    assert world.scheduler.num_preemptions >= 1
    assert ("meek", 0) in world.finished
    world.run()
    assert world.verify() == len(world.requests)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_longest_wait_is_bounded_for_all(policy: str) -> None:
    """Arrivals at half of what the engine can do, each more urgent than all before."""
    world = make_world(scheduler_policy=policy, max_wait_steps=15, max_batch_size=4, num_blocks=12)
    first_seen: dict[str, int] = {}
    waits: dict[str, int] = {}
    for number in range(300):
        if number < 200 and number % 4 == 0:
            fields = {"priority": -number, "deadline": 1e6 - number}
            world.add(str(number), prompt_of(5, start=number), request=fields, max_tokens=6)
            first_seen[str(number)] = number
        for output in world.step():
            waits.setdefault(output.request_id, number - first_seen[output.request_id])
    assert len(waits) == 50
    assert max(waits.values()) <= 15 + 2 * 6
    assert world.verify() == 50


@pytest.mark.parametrize(("policy", "max_decode_gap"), thinned(POLICIES, (1, 4), keep=2))
def test_a_sequence_that_decodes_is_served_within_the_gap(policy: str, max_decode_gap: int) -> None:
    """A flood of prompts, enough memory: no sequence that has begun waits more than max_decode_gap steps."""
    world = make_world(
        scheduler_policy=policy,
        max_decode_gap=max_decode_gap,
        max_num_batched_tokens=8,
        max_batch_size=8,
        num_blocks=400,
    )
    last_served: dict[str, int] = {}
    gaps: list[int] = []
    for number in range(150):
        if number < 60:
            world.add(str(number), prompt_of(9, start=number), max_tokens=6)
        for output in world.step():
            gaps.append(number - last_served.get(output.request_id, number))
            last_served[output.request_id] = number
    assert max(gaps) <= max_decode_gap + 1
    world.run()
    assert world.verify() == 60


def test_a_promoted_sequence_is_the_last_to_be_preempted() -> None:
    world = make_world(scheduler_policy="priority", max_wait_steps=2, max_batch_size=1, num_blocks=8)
    world.add("running", prompt_of(6), request={"priority": 0}, max_tokens=8)
    step(world)
    world.add("meek", prompt_of(6, start=2), request={"priority": 9}, max_tokens=8)
    for _ in range(4):
        step(world)
        world.add(f"pushy {world.scheduler.step}", prompt_of(6, start=3), request={"priority": -1})
    while world.seq("meek").state == "WAITING":
        step(world)
    assert world.scheduler.running[0] is world.seq("meek")
    world.run()
    assert world.verify() == len(world.requests)


@pytest.mark.parametrize("limit", [1, 2])
def test_a_step_takes_no_more_chunks_of_prompts_than_it_may(limit: int) -> None:
    world = make_world(max_prefill_chunks_per_step=limit, max_num_batched_tokens=64, prefill_chunk_size=4)
    for number, name in enumerate("abcd"):
        world.add(name, prompt_of(6, start=20 * number), max_tokens=8)
    sizes = [[stop - start for start, stop in step(world).values()] for _ in range(8 // limit)]
    assert all(sum(size > 1 for size in each) <= limit for each in sizes)
    assert sizes[0] == [4] * limit and sizes[1] == [2] * limit, "budget is left, and is not used"
    assert len(sizes[-1]) == 4, "those before decode beside it"


@pytest.mark.parametrize("policy", ["fcfs", "prefill_first", "priority", "deadline"])
@pytest.mark.parametrize("mode", ["continuous", "static"])
def test_a_limit_of_one_chunk_changes_no_token(policy: str, mode: str) -> None:
    world = make_world(
        max_prefill_chunks_per_step=1,
        scheduler_policy=policy,
        batching_mode=mode,
        num_blocks=16,
        block_size=4,
        prefill_chunk_size=3,
    )
    for number in range(5):
        world.add(str(number), prompt_of(7, start=20 * number), max_tokens=9)
    world.run()
    assert world.verify() == 5


@pytest.mark.parametrize("is_aborted", [False, True])
def test_an_idle_engine_keeps_nothing_of_its_last_batch(is_aborted: bool) -> None:
    world = make_world()
    world.add("a", prompt_of(6), max_tokens=4)
    world.step()
    if is_aborted:
        world.abort("a")
    world.run()
    assert world.scheduler.state._layout is None and not world.engine._flights


@pytest.mark.parametrize(("policy", "is_beam"), thinned(POLICIES, (False, True), keep=2))
def test_who_was_preempted_comes_back_whole_without_chunks(policy: str, is_beam: bool) -> None:
    """A step then has room for max_seq_len tokens (config/resolve.py), so any text can be recomputed."""
    world = make_world(
        num_blocks=20,
        context_len=60,
        max_num_batched_tokens=60,
        use_chunked_prefill=False,
        use_prefix_caching=False,
        scheduler_policy=policy,
    )
    search = {"n": 2, "use_beam_search": True, "temperature": 0.0, "max_tokens": 28}
    for number in range(4):
        world.add(str(number), prompt_of(9, number), **(search if is_beam else {"max_tokens": 51}))
    world.run()
    assert world.verify() == 4 and world.scheduler.num_preemptions > 0
