"""Advice on what would have made a request faster: rules that turn numbers into a sentence.

A rule applies only if there is something to gain: at least SHARE of the request's total time, and MIN_S.
Rules are in the order in which a reader should try them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from infer.engine.stories import EngineStory
from infer.scheduling.watch import BATCH_CLOSED, BATCH_FULL, CACHE_FULL, NO_TOKENS
from infer.server.explain.served import PREFIX_TOKENS
from infer.server.explain.words import spell_count, spell_s

SHARE = 0.1  # share of the total time
MIN_S = 0.02
MIN_CHUNKS = 4
MIN_DRAFTS = 20
POOR_ACCEPTANCE = 0.3
MANY_RECOMPUTED = 0.2  # share of the prompt's and output's tokens
NOTHING = "Nothing stands out: the time went where the work is."


class Case(NamedTuple):
    """A story, and other facts that rules need."""

    story: EngineStory
    seconds: Mapping[str, float]  # seconds by stage
    alike: Sequence[int] = ()  # same owner's prompts with other salts, by shared prefix
    taken_s: float = 0.0  # seconds until its engine received it
    load_s: float = 0.0  # seconds until its model was loaded

    def counts(self, value_s: float) -> bool:
        """Return True if these seconds are worth mentioning."""
        return value_s >= max(MIN_S, SHARE * sum(self.seconds.values()))

    def held(self, hold: int) -> float:
        """Return the seconds that the request waited for one reason; 0 if not worth mentioning."""
        held_s = self.story.held_s[hold] if hold < len(self.story.held_s) else 0.0
        return held_s if self.counts(held_s) else 0.0


def advise(case: Case) -> list[str]:
    """Return the sentences of all rules that apply; NOTHING if none does."""
    rules = (_about_waiting, _about_prompt, _about_output, _around_engine)
    return [said for rule in rules for said in rule(case)] or [NOTHING]


def _about_waiting(case: Case) -> Iterator[str]:
    """Yield advice to begin sooner and avoid preemption."""
    story, limits = case.story, case.story.limits
    if case.counts(case.taken_s):
        yield (
            f"waited {spell_s(case.taken_s)} for a running step to end: shorter steps admit new requests "
            f"sooner (max_num_batched_tokens {limits.max_num_batched_tokens}), or another replica"
        )
    if held_s := case.held(BATCH_FULL):
        yield (
            f"waited {spell_s(held_s)} in the queue: max_batch_size {limits.max_batch_size} was "
            "reached; a larger one, where the cache has room for it, or more replicas"
        )
    if held_s := case.held(CACHE_FULL):
        yield (
            f"waited {spell_s(held_s)} for room in the cache of {limits.num_blocks} blocks: more num_blocks "
            "(or kv_cache_memory), a kv_cache_dtype of 8 bits, or a smaller max_tokens"
        )
    if held_s := case.held(NO_TOKENS):
        limit = limits.prefill_tokens_while_decoding
        knob = f"max_num_batched_tokens {limits.max_num_batched_tokens}"
        if limit is not None and limit < limits.max_num_batched_tokens:
            knob = f"prefill_tokens_while_decoding {limit}, or {knob}"
        yield f"waited {spell_s(held_s)} because other requests used all tokens of each step: a larger {knob}"
    if held_s := case.held(BATCH_CLOSED):
        yield f"waited {spell_s(held_s)} for a static batch to end: batching_mode=continuous"
    if story.num_overtakers and case.counts(case.seconds["queue"]):
        is_priority = limits.scheduler_policy == "priority"
        yield (
            f"at least {spell_count(story.num_overtakers, 'later request')} went before it under "
            f"scheduler_policy {limits.scheduler_policy}: "
            f"{'give it a smaller priority number' if is_priority else 'use fcfs'}, or lower max_wait_steps "
            f"({limits.max_wait_steps}), after which it goes first whatever the policy says"
        )
    if story.num_preemptions:
        times = {1: "once", 2: "twice"}.get(story.num_preemptions, f"{story.num_preemptions} times")
        said = f"preempted {times}: the KV cache is full; more num_blocks, or a smaller max_batch_size"
        lost = story.num_recomputed / max(story.num_prompt + story.num_output, 1)
        if lost >= MANY_RECOMPUTED and not limits.num_host_blocks:
            said += f"; with swap_blocks its {story.num_recomputed:,} tokens would not be recomputed"
        yield said


def _about_prompt(case: Case) -> Iterator[str]:
    """Yield advice to compute the prompt faster."""
    story, limits = case.story, case.story.limits
    shared = [
        (num_alike, size)
        for num_alike, size in zip(case.alike, PREFIX_TOKENS, strict=False)
        if num_alike and story.num_cached < size
    ]
    if shared:
        num_alike, size = shared[-1]
        others = "one other" if num_alike == 1 else f"{num_alike} others"
        yield (
            f"its first {size:,} tokens are shared with {others}, but cache_salt differs: requests that "
            "trust each other share a prefix under one salt"
        )
    if story.num_chunks >= MIN_CHUNKS and case.counts(case.seconds["prefill"]):
        cut = f"the prompt was cut in {story.num_chunks} chunks"
        if story.most_beside:
            limit = limits.prefill_tokens_while_decoding or limits.max_num_batched_tokens
            beside = "one" if story.most_beside == 1 else story.most_beside
            yield (
                f"{cut} while {beside} other sequence{'s' * (story.most_beside > 1)} ran: a larger "
                f"prefill_tokens_while_decoding ({limit}) computes it sooner, and slows their tokens down"
            )
        else:
            knob = f"prefill_chunk_size ({limits.prefill_chunk_size})"
            yield f"{cut} with no other sequence there: a larger {knob}"


def _about_output(case: Case) -> Iterator[str]:
    """Yield advice to produce tokens faster."""
    story = case.story
    if case.counts(case.seconds["compile"]):
        yield (
            f"its constraint took {spell_s(case.seconds['compile'])} to compile: the same one is cached when "
            "it comes again; a simpler schema compiles sooner"
        )
    if case.counts(story.mask_s):
        yield f"steps waited {spell_s(story.mask_s)} for masks: a simpler constraint"
    if story.num_drafts >= MIN_DRAFTS and story.num_accepted < POOR_ACCEPTANCE * story.num_drafts:
        yield (
            f"only {story.num_accepted / story.num_drafts:.0%} of its drafts were accepted: "
            "num_speculative_tokens 0 in its body turns them off"
        )
    if case.counts(case.seconds["decode"]) and story.num_prompts_beside >= 16 * max(story.num_output, 1):
        yield (
            f"{story.num_prompts_beside:,} tokens of others' prompts were computed between its "
            f"{story.num_output:,} tokens: itl_target_ms, or a smaller prefill_tokens_while_decoding"
        )


def _around_engine(case: Case) -> Iterator[str]:
    """Yield advice to save time before and after the engine."""
    if case.counts(case.load_s):
        yield (
            f"its model was loaded first, which took {spell_s(case.load_s)}: a larger max_loaded_models, "
            "loaded_memory or idle_unload keeps models loaded, and without on_demand all are"
        )
    if case.counts(api_s := case.seconds["API"] - case.load_s):
        yield (
            f"the server took {spell_s(api_s)} before it went to the engine: more api_processes, "
            "or prompts as token ids"
        )
    if case.counts(out_s := case.seconds["out"]):
        yield f"its last bytes left {spell_s(out_s)} after its last token: the client reads slowly"
