"""Scripted lives of requests, and the sentences that explain them; each step of the engine takes a second."""

from __future__ import annotations

import re
import threading
from typing import Any

import msgspec
import pytest

from infer.constraints.description import Structured
from infer.engine.stories import MAX_EVENTS, EngineStory
from infer.finish_reason import FinishReason
from infer.scheduling.preemption import PreemptionCost
from infer.server.explain.advice import NOTHING, Case, advise
from infer.server.explain.served import ServedPart, ServedRequest
from infer.server.explain.words import bar, sentences, spell_s, stages, state_of
from tests.support.guided import GuidedWorld
from tests.support.oracle import OracleWorld, prompt_of
from tests.support.oracle_drafts import speculation_of


class Clock:
    """A clock that a test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Lives(OracleWorld):
    """An engine that keeps stories; each of its steps takes a second."""

    def __init__(self, **knobs: Any) -> None:
        self.clock = Clock()
        defaults: dict[str, Any] = {"num_stories": 16, "clock": self.clock, "num_blocks": 64}
        super().__init__(**(defaults | knobs))

    def step(self) -> Any:
        made = super().step()
        self.clock.now += 1.0
        return made

    def story(self, request_id: str) -> EngineStory:
        story = self.engine.explain(request_id)
        assert story is not None
        return story

    def said(self, request_id: str) -> str:
        return " ".join(sentences(self.story(request_id)))

    def advice(self, request_id: str, alike: tuple[int, ...] = ()) -> str:
        story = self.story(request_id)
        return " | ".join(advise(Case(story, stages(story), alike)))


def test_a_request_that_met_an_idle_engine_did_not_wait() -> None:
    world = Lives()
    world.add("a", prompt_of(10), max_tokens=4)
    world.run()
    assert world.said("a") == (
        "It did not have to wait in the queue: the next step started it, 0.0 ms later. "
        "The prefix cache had none of the 10 tokens of its prompt. "
        "10 tokens of its prompt were computed in 1 chunk, 0.0 ms up to its first token. "
        "It has generated 4 tokens in 3 steps after the first, 1.0 s a token, steps of 1.0 tokens on average."
        " It ended with length: max_tokens or the end of the context was reached."
    )
    assert world.advice("a") == NOTHING


def test_a_full_batch_is_why_a_request_waited() -> None:
    world = Lives(max_batch_size=2)
    for name in "abcd":
        world.add(name, prompt_of(5), max_tokens=6)
    world.run()
    assert (
        "It waited 6.0 s in the queue (7 steps) because the batch was full (max_batch_size 2); when it came, "
        "3 sequences waited before it and 0 ran."
    ) in world.said("d")
    assert "waited 6.0 s in the queue: max_batch_size 2 was reached" in world.advice("d")
    assert "max_batch_size" not in world.advice("a")


def test_a_full_cache_is_why_a_request_waited() -> None:
    world = Lives(num_blocks=8, use_prefix_caching=False)
    world.add("a", prompt_of(20), max_tokens=8)
    world.add("b", prompt_of(20, start=3), max_tokens=4)
    world.run()
    said = r"It waited 8\.0 s .* because all 8 blocks of the cache were in use \(num_blocks\)"
    assert re.search(said, world.said("b"))
    assert "waited 8.0 s for room in the cache of 8 blocks: more num_blocks" in world.advice("b")
    assert "Prefixes are not cached" in world.said("b")


def test_tokens_that_others_had_are_why_a_request_waited() -> None:
    world = Lives(max_num_batched_tokens=4, max_batch_size=4, num_blocks=200)
    for name in "abc":
        world.add(name, prompt_of(20, start=ord(name)), max_tokens=2)
    world.run()
    assert "because other requests used all tokens of the step" in world.said("c")
    assert "because other requests used all tokens of each step: a larger" in world.advice("c")


def test_a_static_batch_is_why_a_request_waited() -> None:
    world = Lives(batching_mode="static", max_batch_size=2)
    world.add("a", prompt_of(5), max_tokens=9)
    world.step()
    world.step()
    world.add("late", prompt_of(5, start=2), max_tokens=2)
    world.run()
    assert "because a static batch had to end first" in world.said("late")
    assert "for a static batch to end: batching_mode=continuous" in world.advice("late")


def test_a_request_that_others_overtook_is_told_so() -> None:
    world = Lives(max_batch_size=1, scheduler_policy="priority", num_blocks=200)
    world.add("first", prompt_of(4), max_tokens=3)
    world.add("humble", prompt_of(4, start=1), max_tokens=3, request={"priority": 5})
    for number in range(3):
        world.add(f"urgent{number}", prompt_of(4, start=2 + number), max_tokens=3)
    world.run()
    assert (
        "At least 3 requests that came later went before it (scheduler_policy priority, its priority is 5)."
    ) in world.said("humble")
    assert "at least 3 later requests went before it under scheduler_policy priority" in world.advice(
        "humble"
    )
    assert "later" not in world.said("urgent2")


def preempted(**knobs: Any) -> Lives:
    """Two requests that grew until one of them had to go."""
    world = growing(**knobs)
    world.run()
    return world


def growing(**knobs: Any) -> Lives:
    """Two requests that will not both fit."""
    world = Lives(num_blocks=10, use_prefix_caching=False, **knobs)
    world.add("a", prompt_of(12), max_tokens=16)
    world.add("b", prompt_of(12, start=3), max_tokens=16)
    return world


def test_what_was_preempted_and_computed_again_says_what_it_cost() -> None:
    world = preempted(preemption="recompute")
    story = world.story("b")
    assert story.num_preemptions == 1 and not story.num_swaps and story.num_recomputed > 12
    assert re.search(
        r"It was preempted once because the cache was full: \d+ tokens had to be recomputed, it was out "
        r"for \d+(\.0)? s\.",
        world.said("b"),
    )
    assert "preempted once: the KV cache is full; more num_blocks, or a smaller max_batch_size" in (
        said := world.advice("b")
    )
    assert f"with swap_blocks its {story.num_recomputed} tokens would not be recomputed" in said
    assert "preempted" not in world.said("a")
    assert stages(story)["blocked"] == story.away_s > 0


def test_what_was_swapped_says_how_many_blocks_moved() -> None:
    world = preempted(preemption="swap", num_host_blocks=20, cost=PreemptionCost())
    story = world.story("b")
    assert story.num_swaps == 1 and story.num_moved > 2 and not story.num_recomputed
    moved = f"{story.num_moved} blocks went to host memory and back (1 swap)"
    assert f"It was preempted once because the cache was full: {moved}, it was out for" in world.said("b")
    assert [event.kind for event in story.events] == [0, 2, 3]
    assert "swap_blocks" not in world.advice("b")


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize(
    "knobs",
    [{"preemption": "recompute"}, {"preemption": "swap", "num_host_blocks": 20, "cost": PreemptionCost()}],
)
def test_a_preempted_request_counts_only_the_steps_it_was_in(knobs: dict[str, Any], steps_ahead: int) -> None:
    world = preempted(steps_ahead=steps_ahead, **knobs)
    story, ids = world.story("b"), [chunk.seq_id for chunk in world.plans[0].chunks]
    own = [plan for plan in world.plans if ids[1] in [chunk.seq_id for chunk in plan.chunks]]
    own = own[1 + steps_ahead :]  # less those that ran before its first token was read
    assert story.num_preemptions and len(own) < len(world.plans) - 3
    assert story.num_steps == len(own)
    assert story.num_step_tokens == sum(plan.chunks.num_tokens for plan in own)
    assert f"It has generated 16 tokens in {len(own)} steps after the first" in world.said("b")


def test_the_steps_of_a_request_do_not_grow_while_it_is_out() -> None:
    world, seen = growing(), set()
    while world.engine.has_work:
        world.step()
        story = world.story("b")
        seen |= {(story.num_steps, story.num_step_tokens)} if story.is_away else set()
    assert len(seen) == 1 and world.story("b").num_preemptions == 1


def test_a_cached_prefix_says_what_it_saved() -> None:
    world = Lives(prefill_chunk_size=4)
    world.add("a", prompt_of(16), max_tokens=2)
    world.run()
    world.add("b", prompt_of(16), max_tokens=2)
    world.run()
    story = world.story("b")
    assert story.num_cached == 15
    # before it, 17 tokens of prompts took 3 seconds; 15 of them as long as that, with more weight on itself
    assert "The prefix cache had 15 of the 16 tokens of its prompt (94%), which saved about 2.6 s." in (
        world.said("b")
    )


def test_a_salt_of_its_own_is_why_nothing_was_shared() -> None:
    world = Lives()
    world.add("a", prompt_of(16), max_tokens=2, request={"cache_salt": "x"})
    world.run()
    world.add("b", prompt_of(16), max_tokens=2, request={"cache_salt": "y"})
    world.run()
    assert "The prefix cache had none of the 16 tokens" in world.said("b")
    said = world.advice("b", alike=(31, 2))
    assert "its first 256 tokens are shared with 2 others, but cache_salt differs" in said
    assert "shared with 31 others" in world.advice("b", alike=(31, 0))
    assert "cache_salt" not in world.advice("b", alike=(0, 0))


def test_a_prompt_in_many_chunks_says_what_it_was_computed_next_to() -> None:
    world = Lives(prefill_tokens_while_decoding=3, num_blocks=200)
    world.add("old", prompt_of(5), max_tokens=40)
    world.step()
    world.add("long", prompt_of(30, start=7), max_tokens=2)
    world.run()
    assert "30 tokens of its prompt were computed in 10 chunks next to up to 1 other sequence" in (
        world.said("long")
    )
    assert "the prompt was cut in 10 chunks while one other sequence ran: a larger" in world.advice("long")
    assert "prefill_tokens_while_decoding (3)" in world.advice("long")
    assert "30 tokens of prompts were computed in these steps" in world.said("old")


def test_a_long_story_keeps_its_first_and_its_last_events() -> None:
    world = Lives(prefill_chunk_size=2, num_blocks=200, context_len=200)
    world.add("a", prompt_of(100), max_tokens=2)
    world.run()
    story = world.story("a")
    assert story.num_chunks == 50 and len(story.events) == 2 * MAX_EVENTS
    assert story.num_omitted == 50 - 2 * MAX_EVENTS
    assert [event.step for event in story.events] == [*range(1, 13), *range(39, 51)]
    assert len(msgspec.msgpack.encode(story)) < 3000


def test_accepted_drafts_are_counted() -> None:
    world = Lives(speculation=speculation_of("proposer", share=1.0, is_adaptive=False), num_blocks=200)
    world.add("a", prompt_of(6), max_tokens=24)
    world.run()
    story = world.story("a")
    assert story.num_drafts > 0
    share = f"{story.num_accepted} of {story.num_drafts} drafts were accepted"
    assert share in world.said("a")


def test_drafts_that_were_refused_are_advised_against() -> None:
    world = Lives()
    world.add("a", prompt_of(6), max_tokens=2)
    world.run()
    poor = msgspec.structs.replace(world.story("a"), num_drafts=40, num_accepted=4, num_draft_steps=10)
    assert "4 of 40 drafts were accepted (10%), in 10 steps." in sentences(poor)
    assert "only 10% of its drafts were accepted" in " ".join(advise(Case(poor, stages(poor))))


def test_a_request_that_was_aborted_while_it_waited() -> None:
    world = Lives(max_batch_size=1)
    world.add("a", prompt_of(5), max_tokens=9)
    world.add("b", prompt_of(5, start=2), max_tokens=9)
    for _ in range(4):
        world.step()
    assert state_of(world.story("b")) == "waiting" and state_of(world.story("a")) == "decoding"
    assert "It has been waiting 4.0 s in the queue" in world.said("b")
    world.abort("b")
    assert "It waited 4.0 s in the queue" in world.said("b")
    assert world.said("b").endswith("It was aborted before its end.")
    gone = ServedRequest(
        request_id="r", owner="", path="/", arrived_at=100.0, arrived=0.0, key="k", marks=[], is_gone=True
    )
    assert [*sentences(world.story("b"), gone)][-1] == "It was aborted: its client left before the end."


def test_a_request_that_failed_says_why() -> None:
    world = Lives()
    world.runner.fail_at = 3
    world.add("a", prompt_of(5), max_tokens=9)
    world.run()
    assert world.said("a").endswith("It ended with an error: RuntimeError in step 3.")


def test_a_stop_string_is_the_servers_to_tell() -> None:
    world = Lives()
    world.add("a", prompt_of(5), max_tokens=9)
    world.step()
    world.abort("a", 0)
    part = ServedPart(engine_id="a", model="m", engine="0", submitted_at=0.0, finish_reason=FinishReason.STOP)
    assert [*sentences(world.story("a"), None, part)][-1].startswith("It ended with stop")


def test_a_running_request_is_told_as_far_as_it_is() -> None:
    world = Lives(prefill_chunk_size=4)
    world.add("a", prompt_of(16), max_tokens=9)
    world.step()
    world.step()
    assert state_of(world.story("a")) == "prefilling"
    assert "Its prompt is being computed: 8 tokens in 2 chunks so far, 2.0 s." in world.said("a")
    world.step()
    world.step()
    before = world.story("a")
    assert state_of(before) == "decoding" and before.num_output == 1
    assert world.story("a") == before, "to be asked changes nothing"
    assert world.said("a").endswith("It is still decoding.")


def test_constraints_are_compiled_masked_and_jumped() -> None:
    world = GuidedWorld(num_blocks=100, num_stories=4, always_jumps=True)
    world.add("a", [5], structured=Structured.regex("hello there[0-9]{3}"), max_tokens=30)
    world.run()
    story = world.engine.explain("a")
    assert story is not None and story.num_jumped > 0 and story.mask_s > 0
    said = " ".join(sentences(story))
    assert re.search(r"Its constraint was compiled in [\d.]+ m?s, before it joined the queue\.", said)
    assert f"{story.num_jumped} tokens were the only ones allowed and were appended without a step" in said
    assert re.search(r"Its steps waited [\d.]+ m?s for the masks", said)
    assert story.finish_reason == "stop"
    slow = msgspec.structs.replace(story, added_at=story.accepted_at - 9.0)
    assert "its constraint took 9.0 s to compile" in " ".join(advise(Case(slow, stages(slow))))


def test_a_constraint_is_being_compiled_and_fails() -> None:
    world = GuidedWorld(num_blocks=100, num_stories=4)
    woken = threading.Semaphore(0)
    world.engine.compile_aside(woken.release)
    world.add("a", [5], structured=Structured(kind="regex", text="(", param="guided_regex"))
    story = world.engine.explain("a")
    assert story is not None and state_of(story) == "compiling"
    assert [*sentences(story)][0].startswith("Its constraint is being compiled, for ")
    assert woken.acquire(timeout=60)
    world.engine.step()
    story = world.engine.explain("a")
    assert story is not None and story.finish_reason == "error"
    assert [*sentences(story)][0].startswith("Its constraint could not be compiled, which took ")


def test_only_the_last_stories_are_kept_and_none_where_they_are_off() -> None:
    world = Lives(num_stories=2)
    for name in "abc":
        world.add(name, prompt_of(4), max_tokens=2)
        world.run()
    assert world.engine.explain("a") is None
    assert world.engine.explain("b") is not None and world.engine.explain("c") is not None
    off = Lives(num_stories=0)
    off.add("a", prompt_of(4), max_tokens=2)
    assert off.scheduler.watch is None and off.engine.explain("a") is None


@pytest.mark.parametrize("params", [{"n": 3}, {"use_beam_search": True, "temperature": 0.0, "n": 3}])
def test_several_outputs_are_one_story(params: dict[str, Any]) -> None:
    world = Lives()
    world.add("a", prompt_of(6), max_tokens=4, **params)
    world.run()
    story = world.story("a")
    assert story.num_sequences == 3 and story.num_output >= 9 and story.finish_reason is not None
    assert world.said("a")


def test_the_bar_shows_each_stage_that_took_time() -> None:
    lines = bar({"API": 0.1, "compile": 0.0, "queue": 3.0, "decode": 6.9})
    assert [line.split()[0] for line in lines] == ["API", "queue", "decode"]
    assert lines[1] == f"queue       3.0 s   30%  {'#' * 12}"
    assert [spell_s(value) for value in (0.0004, 0.0123, 1.26, 12.6)] == ["0.4 ms", "12 ms", "1.3 s", "13 s"]


def test_a_step_that_was_under_way_is_no_fault_of_the_server() -> None:
    world = Lives()
    world.clock.now = 105.0
    world.add("a", prompt_of(5), max_tokens=9)
    world.run()
    story = world.story("a")
    served = ServedRequest(
        request_id="r", owner="", path="/", arrived_at=100.0, arrived=0.0, key="k",
        marks=[("parse", 100.1), ("tokenize", 100.4), ("load", 101.9), ("submit", 102.0)], ended_at=115.0,
    )  # fmt: skip
    part = ServedPart(engine_id="a", model="m", engine="0", submitted_at=102.0)
    assert [*sentences(story, served, part)][:2] == [
        "The server had it for 2.0 s before it went to the engine (reading the body 100 ms, tokenizing "
        "300 ms, loading the model 1.5 s, picking an engine 100 ms).",
        "The engine, which accepts requests between two steps, received it 3.0 s later.",
    ]
    seconds = stages(story, served, part)
    assert seconds == {
        "API": 2.0, "compile": 0.0, "queue": 3.0, "prefill": 0.0, "decode": 8.0, "blocked": 0.0, "out": 2.0,
    }  # fmt: skip
    said = " | ".join(advise(Case(story, seconds, taken_s=3.0)))
    assert "waited 3.0 s for a running step to end" in said
    assert "the server took 2.0 s before it went to the engine" in said
    assert "its last bytes left 2.0 s after its last token: the client reads slowly" in said
