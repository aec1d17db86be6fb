"""Advice on what would have made a request faster: a list of rules that read numbers and say a sentence.

A rule speaks only where there is something to gain: SHARE of the request's whole time, and MIN_S at least.
Rules come in the order in which a reader should try them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from infer.engine.stories import EngineStory
from infer.scheduling.watch import BATCH_CLOSED, BATCH_FULL, CACHE_FULL, NO_TOKENS
from infer.server.explain.served import PREFIX_TOKENS
from infer.server.explain.words import spell_count, spell_s

SHARE = 0.1  # share of the whole time
MIN_S = 0.02
MIN_CHUNKS = 4
MIN_DRAFTS = 20
POOR_ACCEPTANCE = 0.3
MANY_RECOMPUTED = 0.2  # share of the prompt's and the output's tokens
NOTHING = "Nothing stands out: the time went where the work is."


class Case(NamedTuple):
    """A story, and the other facts that the rules need."""

    story: EngineStory
    seconds: Mapping[str, float]  # seconds by stage
    alike: Sequence[int] = ()  # prompts of the same owner under other salts, by length of the shared prefix
    taken_s: float = 0.0  # seconds until its engine took it
    load_s: float = 0.0  # seconds until its model was loaded

    def counts(self, value_s: float) -> bool:
        """True if these seconds are worth a word."""
        return value_s >= max(MIN_S, SHARE * sum(self.seconds.values()))

    def held(self, hold: int) -> float:
        """The seconds that the request waited for one reason."""
        return self.story.held_s[hold] if hold < len(self.story.held_s) else 0.0


def _long_step(case: Case) -> str | None:
    if not case.counts(case.taken_s):
        return None
    limits = case.story.limits
    return (
        f"waited {spell_s(case.taken_s)} for a step of others to end: shorter steps take newcomers sooner "
        f"(max_num_batched_tokens {limits.max_num_batched_tokens}), or another replica"
    )


def _full_batch(case: Case) -> str | None:
    held_s = case.held(BATCH_FULL)
    if not case.counts(held_s):
        return None
    return (
        f"waited {spell_s(held_s)} in the queue: max_batch_size {case.story.limits.max_batch_size} was "
        "reached; a larger one, where the cache has room for it, or more replicas"
    )


def _full_cache(case: Case) -> str | None:
    held_s = case.held(CACHE_FULL)
    if not case.counts(held_s):
        return None
    limits = case.story.limits
    return (
        f"waited {spell_s(held_s)} for room in the cache of {limits.num_blocks} blocks: more num_blocks (or "
        "kv_cache_memory), a kv_cache_dtype of 8 bits, or a smaller max_tokens"
    )


def _no_tokens(case: Case) -> str | None:
    held_s, limits = case.held(NO_TOKENS), case.story.limits
    if not case.counts(held_s):
        return None
    limit = limits.prefill_tokens_while_decoding
    knob = f"max_num_batched_tokens {limits.max_num_batched_tokens}"
    if limit is not None and limit < limits.max_num_batched_tokens:
        knob = f"prefill_tokens_while_decoding {limit}, or {knob}"
    return f"waited {spell_s(held_s)} because others had the tokens of each step: a larger {knob}"


def _closed_batch(case: Case) -> str | None:
    if not case.counts(held_s := case.held(BATCH_CLOSED)):
        return None
    return f"waited {spell_s(held_s)} for a static batch to end: batching_mode=continuous"


def _policy(case: Case) -> str | None:
    story = case.story
    if not story.num_overtakers or not case.counts(case.seconds["queue"]):
        return None
    limits = story.limits
    advice = "give it a smaller priority number" if limits.scheduler_policy == "priority" else "use fcfs"
    return (
        f"at least {spell_count(story.num_overtakers, 'later request')} went before it under "
        f"scheduler_policy {limits.scheduler_policy}: {advice}, or lower max_wait_steps "
        f"({limits.max_wait_steps}), after which it goes first whatever the policy says"
    )


def _preempted(case: Case) -> str | None:
    story = case.story
    if not story.num_preemptions:
        return None
    times = {1: "once", 2: "twice"}.get(story.num_preemptions, f"{story.num_preemptions} times")
    said = f"preempted {times}: the KV cache is full; more num_blocks, or a smaller max_batch_size"
    lost = story.num_recomputed / max(story.num_prompt + story.num_output, 1)
    if lost >= MANY_RECOMPUTED and not story.limits.num_host_blocks:
        said += f"; with swap_blocks its {story.num_recomputed:,} tokens would not be computed again"
    return said


def _salted(case: Case) -> str | None:
    story, sizes = case.story, PREFIX_TOKENS[: len(case.alike)]
    for num_alike, size in reversed(list(zip(case.alike, sizes, strict=True))):
        if num_alike and story.num_cached < size:
            others = "one other" if num_alike == 1 else f"{num_alike} others"
            return (
                f"its first {size:,} tokens are shared with {others}, but cache_salt differs: requests that "
                "trust each other share a prefix under one salt"
            )
    return None


def _chunks(case: Case) -> str | None:
    story, limits = case.story, case.story.limits
    if story.num_chunks < MIN_CHUNKS or not case.counts(case.seconds["prefill"]):
        return None
    if story.most_beside:
        limit = limits.prefill_tokens_while_decoding or limits.max_num_batched_tokens
        others = "one other sequence" if story.most_beside == 1 else f"{story.most_beside} other sequences"
        return (
            f"the prompt was cut in {story.num_chunks} chunks while {others} ran: a larger "
            f"prefill_tokens_while_decoding ({limit}) computes it sooner, and slows their tokens down"
        )
    return (
        f"the prompt was cut in {story.num_chunks} chunks with no other sequence there: a larger "
        f"prefill_chunk_size ({limits.prefill_chunk_size})"
    )


def _compiling(case: Case) -> str | None:
    if not case.counts(case.seconds["compile"]):
        return None
    return (
        f"its constraint took {spell_s(case.seconds['compile'])} to compile: the same one is cached when it "
        "comes again; a simpler schema compiles sooner"
    )


def _masks(case: Case) -> str | None:
    if not case.counts(case.story.mask_s):
        return None
    return f"steps waited {spell_s(case.story.mask_s)} for masks: a simpler constraint"


def _drafts(case: Case) -> str | None:
    story = case.story
    if story.num_drafts < MIN_DRAFTS or story.num_accepted >= POOR_ACCEPTANCE * story.num_drafts:
        return None
    return (
        f"only {story.num_accepted / story.num_drafts:.0%} of its drafts were accepted: "
        "num_speculative_tokens 0 in its body turns them off"
    )


def _prompts_beside(case: Case) -> str | None:
    story = case.story
    if not case.counts(case.seconds["decode"]) or story.num_prompts_beside < 16 * max(story.num_output, 1):
        return None
    return (
        f"{story.num_prompts_beside:,} tokens of others' prompts were computed between its "
        f"{story.num_output:,} tokens: itl_target_ms, or a smaller prefill_tokens_while_decoding"
    )


def _load(case: Case) -> str | None:
    if not case.counts(case.load_s):
        return None
    return (
        f"its model was loaded first, which took {spell_s(case.load_s)}: a larger max_loaded_models, "
        "loaded_memory or idle_unload keeps models loaded, and without on_demand all are"
    )


def _api(case: Case) -> str | None:
    seconds = case.seconds["API"] - case.load_s
    if not case.counts(seconds):
        return None
    return (
        f"the server took {spell_s(seconds)} before it went to the engine: more api_processes, "
        "or prompts as token ids"
    )


def _slow_reader(case: Case) -> str | None:
    if not case.counts(case.seconds["out"]):
        return None
    return f"its last bytes left {spell_s(case.seconds['out'])} after its last token: the client reads slowly"


RULES: Sequence[Callable[[Case], str | None]] = (
    _long_step, _full_batch, _full_cache, _no_tokens, _closed_batch, _policy, _preempted, _salted, _chunks,
    _compiling, _masks, _drafts, _prompts_beside, _load, _api, _slow_reader,
)  # fmt: skip


def advise(
    story: EngineStory,
    seconds: Mapping[str, float],
    alike: Sequence[int] = (),
    taken_s: float = 0.0,
    load_s: float = 0.0,
) -> list[str]:
    """The sentences of all rules about a story; one sentence if none has anything to say."""
    case = Case(story, seconds, alike, taken_s, load_s)
    return [said for rule in RULES if (said := rule(case)) is not None] or [NOTHING]
