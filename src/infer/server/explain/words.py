"""A request's story in sentences: each is made from numbers, by its own function.

    where     seconds of each stage: API, compile, queue, prefill, decode, blocked, out          `stages`
    what      a sentence for each thing that happened to the request                             `sentences`
    advice    what would have made it faster                                                     advice.py

A sentence with nothing to report is left out, except that a request did not wait: that is worth reporting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from infer.engine.stories import EVENT_NAMES, EngineStory
from infer.finish_reason import FinishReason
from infer.scheduling.watch import BATCH_CLOSED, BATCH_FULL, CACHE_FULL, HOLDS, NEXT_STEP, NO_TOKENS
from infer.server.explain.served import ServedPart, ServedRequest

STAGES = ("API", "compile", "queue", "prefill", "decode", "blocked", "out")
STAGE_WORDS = {  # marks of a request's record (state.py)
    "parse": "reading the body",
    "load": "loading the model",
    "tokenize": "tokenizing",
    "submit": "picking an engine",
}
BAR_WIDTH = 40
MIN_SAID_S = 0.0005  # shorter waits are left out


def spell_s(seconds: float) -> str:
    """Format seconds for people: 3.2 s, 41 ms, 0.6 ms."""
    if seconds >= 10:
        return f"{seconds:.0f} s"
    if seconds >= 1:
        return f"{seconds:.1f} s"
    ms = 1000 * max(seconds, 0.0)
    return f"{ms:.0f} ms" if ms >= 10 else f"{ms:.1f} ms"


def to_ms(seconds: float) -> float:
    """Convert seconds to milliseconds, for JSON."""
    return round(1000 * seconds, 3)


def spell_count(count: int, noun: str) -> str:
    """Return a number with its noun, singular or plural."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def stages(
    story: EngineStory, served: ServedRequest | None = None, part: ServedPart | None = None
) -> dict[str, float]:
    """Return the seconds of each stage so far; the wait until the engine received it counts as queue."""
    now = story.ended_at or story.now
    accepted = story.accepted_at or now
    begun = story.begun_at or now
    first = story.first_at or now
    seconds = dict.fromkeys(STAGES, 0.0)
    seconds["compile" if story.is_structured else "queue"] = accepted - story.added_at
    seconds["queue"] += begun - accepted + taken_s(story, part)
    seconds["prefill"] = first - begun - story.away_first_s
    seconds["decode"] = now - first - (story.away_s - story.away_first_s)
    seconds["blocked"] = story.away_s
    if served is not None:
        seconds["API"] = story.added_at - served.arrived_at - taken_s(story, part)
        if story.ended_at:
            seconds["out"] = (served.ended_at or story.now) - story.ended_at
    return {stage: max(value, 0.0) for stage, value in seconds.items()}


def taken_s(story: EngineStory, part: ServedPart | None) -> float:
    """Return the seconds until the engine received a request, which happens between two steps."""
    return 0.0 if part is None else max(story.added_at - part.submitted_at, 0.0)


def state_of(story: EngineStory) -> str:
    """Return the state of a request in one word."""
    if story.finish_reason is not None:
        return "ended"
    if not story.accepted_at:
        return "compiling"
    if not story.begun_at:
        return "waiting"
    if story.is_away:
        return "preempted"
    return "decoding" if story.first_at else "prefilling"


def sentences(
    story: EngineStory, served: ServedRequest | None = None, part: ServedPart | None = None
) -> Iterator[str]:
    """Yield the sentences of a request's story."""
    seconds = stages(story, served, part)
    if served is not None:
        yield _api(seconds["API"], served)
    if (waited := taken_s(story, part)) >= MIN_SAID_S:
        yield f"The engine, which accepts requests between two steps, received it {spell_s(waited)} later."
    if story.is_structured:
        yield _compile(story, seconds["compile"])
    if story.accepted_at:
        yield _queue(story, seconds["queue"] - waited)
    if story.num_overtakers:
        yield (
            f"At least {spell_count(story.num_overtakers, 'request')} that came later went before it "
            f"(scheduler_policy {story.limits.scheduler_policy}, its priority is {story.priority})."
        )
    if story.begun_at:
        yield _cache(story)
        yield _prefill(story, seconds["prefill"])
    if story.num_preemptions:
        yield _preemptions(story)
    if story.first_at:
        yield _decode(story, seconds["decode"])
    if part is not None and part.longest_gap_s > 0:
        yield f"The longest pause between two of its tokens was {spell_s(part.longest_gap_s)}."
    if story.num_drafts:
        yield (
            f"{story.num_accepted} of {spell_count(story.num_drafts, 'draft')} were accepted "
            f"({story.num_accepted / story.num_drafts:.0%}), in {spell_count(story.num_draft_steps, 'step')}."
        )
    if story.is_structured and story.begun_at:
        yield f"Its steps waited {spell_s(story.mask_s)} for the masks of allowed tokens."
    if story.num_jumped:
        yield (
            f"{spell_count(story.num_jumped, 'token')} were the only ones allowed and were appended without "
            "a step for each."
        )
    yield _end(story, served, part)


def _api(seconds: float, served: ServedRequest) -> str:
    before, said = served.arrived_at, []
    for stage, at in served.marks:
        if stage in STAGE_WORDS and at - before >= MIN_SAID_S:
            said.append(f"{STAGE_WORDS[stage]} {spell_s(at - before)}")
        before = max(before, at)
    detail = f" ({', '.join(said)})" if said else ""
    return f"The server had it for {spell_s(seconds)} before it went to the engine{detail}."


def load_s(served: ServedRequest | None) -> float:
    """Return the seconds that a request waited for its model to be loaded on demand."""
    before, seconds = 0.0, 0.0
    for stage, at in () if served is None else (("", served.arrived_at), *served.marks):
        seconds += at - before if stage == "load" else 0.0
        before = max(before, at)
    return seconds


def _compile(story: EngineStory, seconds: float) -> str:
    if story.accepted_at:
        return f"Its constraint was compiled in {spell_s(seconds)}, before it joined the queue."
    if story.finish_reason == FinishReason.ERROR:
        return f"Its constraint could not be compiled, which took {spell_s(seconds)} to find out."
    return f"Its constraint is being compiled, for {spell_s(seconds)} so far."


def hold_words(story: EngineStory) -> dict[int, str]:
    """Return the reasons why a request waits in the queue, by number."""
    limits = story.limits
    return {
        NEXT_STEP: "until the next step could take it",
        BATCH_FULL: f"because the batch was full (max_batch_size {limits.max_batch_size})",
        NO_TOKENS: "because other requests used all tokens of the step",
        CACHE_FULL: f"because all {limits.num_blocks} blocks of the cache were in use (num_blocks)",
        BATCH_CLOSED: "because a static batch had to end first",
    }


def _queue(story: EngineStory, seconds: float) -> str:
    words = hold_words(story)
    held = [(held_s, words[hold]) for hold, held_s in enumerate(story.held_s) if held_s >= MIN_SAID_S]
    if story.begun_at and not any(story.held_s[NEXT_STEP + 1 :]):
        return f"It did not have to wait in the queue: the next step started it, {spell_s(seconds)} later."
    verb = "It waited" if story.begun_at or story.finish_reason else "It has been waiting"
    others = f"{spell_count(story.num_ahead, 'sequence')} waited before it and {story.num_running} ran"
    steps = spell_count(story.waited_steps, "step")
    parts = ", ".join(f"{spell_s(held_s)} {why}" for held_s, why in sorted(held, reverse=True))
    detail = f" {held[0][1]}" if len(held) == 1 else f": {parts}" if parts else ""
    return f"{verb} {spell_s(seconds)} in the queue ({steps}){detail}; when it came, {others}."


def saved_s(story: EngineStory) -> float | None:
    """Estimate the seconds that the prefix cache saved; None if nothing was computed to compare with."""
    own = story.num_computed >= 64 and story.first_at and not story.num_preemptions
    per_token = (story.first_at - story.begun_at) / story.num_computed if own else story.prefill_s
    return per_token * story.num_cached if per_token else None


def _cache(story: EngineStory) -> str:
    if not story.limits.caches_prefixes:
        return "Prefixes are not cached (use_prefix_caching is off, or the cache is not paged)."
    if not story.num_cached:
        return f"The prefix cache had none of the {story.num_prompt:,} tokens of its prompt."
    saved = saved_s(story)
    gain = "" if saved is None else f", which saved about {spell_s(saved)}"
    share = f"{story.num_cached / story.num_prompt:.0%}"
    if story.num_from_host:
        share += f", {story.num_from_host:,} of them from host memory"
    return (
        f"The prefix cache had {story.num_cached:,} of the {story.num_prompt:,} tokens of its prompt "
        f"({share}){gain}."
    )


def _prefill(story: EngineStory, seconds: float) -> str:
    beside = f" next to up to {spell_count(story.most_beside, 'other sequence')}" if story.most_beside else ""
    chunks = spell_count(story.num_chunks, "chunk")
    if not story.first_at and story.finish_reason is None:
        return (
            f"Its prompt is being computed{beside}: {story.num_computed:,} tokens in {chunks} so far, "
            f"{spell_s(seconds)}."
        )
    after = f", {spell_s(seconds)} up to its first token" if story.first_at else ""
    return (
        f"{spell_count(story.num_computed, 'token')} of its prompt were computed in {chunks}{beside}{after}."
    )


def _preemptions(story: EngineStory) -> str:
    times = "once" if story.num_preemptions == 1 else f"{story.num_preemptions} times"
    costs = []
    if story.num_swaps:
        blocks = spell_count(story.num_moved, "block")
        costs.append(f"{blocks} went to host memory and back ({spell_count(story.num_swaps, 'swap')})")
    if story.num_recomputed:
        costs.append(f"{spell_count(story.num_recomputed, 'token')} had to be recomputed")
    costs.append(f"it was out for {spell_s(story.away_s)}" + (" so far" if story.is_away else ""))
    return f"It was preempted {times} because the cache was full: {', '.join(costs)}."


def _decode(story: EngineStory, seconds: float) -> str:
    tokens = spell_count(story.num_output, "token")
    if story.num_output < 2:
        return f"It has generated {tokens}."
    pace = f"{spell_s(seconds / (story.num_output - 1))} a token"
    beside = ""
    if story.num_prompts_beside:
        beside = f"; {story.num_prompts_beside:,} tokens of prompts were computed in these steps"
    steps = f" in {spell_count(story.num_steps, 'step')} after the first" if story.num_steps else ""
    size = f", steps of {story.num_step_tokens / story.num_steps:.1f} tokens on average" if steps else ""
    return f"It has generated {tokens}{steps}, {pace}{size}{beside}."


def _end(story: EngineStory, served: ServedRequest | None, part: ServedPart | None) -> str:
    reason = story.finish_reason
    if reason is None:
        return f"It is still {state_of(story)}."
    if part is not None and part.finish_reason is not None:
        reason = part.finish_reason  # only the server knows stop strings
    if reason == FinishReason.ERROR:
        return f"It ended with an error: {story.error or 'none was given'}."
    if reason == FinishReason.ABORT:
        if served is not None and served.is_gone:
            return "It was aborted: its client left before the end."
        if served is not None and served.error is not None:
            return f"It was aborted: {served.error}."
        return "It was aborted before its end."
    if reason == FinishReason.LENGTH:
        return "It ended with length: max_tokens or the end of the context was reached."
    if not story.num_output:
        return "It ended with stop: it requested no text."
    return "It ended with stop: at the model's end of text, a stop token or a stop string."


def bar(seconds: Mapping[str, float]) -> list[str]:
    """Return a bar chart: a line for each stage that took time, as long as its share of the total."""
    total = sum(seconds.values())
    lines = []
    for stage, value in seconds.items():
        if value < MIN_SAID_S and value < 0.005 * total:
            continue
        share = value / total if total else 0.0
        lines.append(
            f"{stage:<8} {spell_s(value):>8} {share:>5.0%}  {'#' * round(BAR_WIDTH * share)}".rstrip()
        )
    return lines


def event_lines(story: EngineStory) -> list[dict[str, Any]]:
    """Return the recorded events, for JSON."""
    return [
        {
            "event": EVENT_NAMES[event.kind],
            "step": event.step,
            "ms": to_ms(event.at - story.added_at),
            "tokens": event.num_tokens,
            "running": event.num_running,
        }
        for event in story.events
    ]


def held_ms(story: EngineStory) -> dict[str, float]:
    """Return the milliseconds of the first wait, by reason."""
    return {
        name.replace(" ", "_"): to_ms(held_s)
        for name, held_s in zip(HOLDS, story.held_s, strict=False)
        if held_s > 0
    }


def to_text(title: str, seconds: Mapping[str, float], said: Sequence[str], advice: Sequence[str]) -> str:
    """Format the whole story as plain text."""
    lines = [title, "", *bar(seconds), "", *said]
    if advice:
        lines += ["", "What would have made it faster:", *(f"- {each}" for each in advice)]
    return "\n".join(lines) + "\n"
