"""Explain a request by its id, with data from all API processes and the engines that served it.

    id, owner ──► requests that any API process has served (served.py)      ──► the newest of them
              ──► the story of each of its prompts, from its engine         ──► words and advice

An engine answers between two steps. If it does not answer in time, was restarted or has forgotten the
request, its part of the story is missing, and the explanation says so.
"""

from __future__ import annotations

import asyncio
from typing import Any

from infer.engine.stories import EngineStory
from infer.errors import EngineError
from infer.server.explain import words
from infer.server.explain.advice import Case, advise
from infer.server.explain.served import PREFIX_TOKENS, ServedPart, ServedRequest
from infer.server.fleet.fleet import Fleet
from infer.server.processes.messages import CountAlike, FindServed

ENGINE_TIMEOUT_S = 5.0
FORGOTTEN = (
    "Its engine has no record of it: it does not answer, was restarted, or has forgotten the request "
    "after many others (explain_requests)."
)


async def explain(fleet: Fleet, name: str, owner: str | None) -> dict[str, Any] | None:
    """Return the explanation of the newest request with this id that `owner` may see; None: there is none."""
    found = fleet.state.stories.find(name, owner)
    for others in await fleet.ask_processes(FindServed(name, owner)):
        found += others
    if not found:
        return None
    served = max(found, key=lambda each: each.arrived_at)
    prompts = await asyncio.gather(*(_explain_part(fleet, served, part) for part in served.parts))
    slowest = max(prompts, key=lambda each: float(each["total_ms"]))
    return {
        "id": served.request_id,
        "object": "explanation",
        "path": served.path,
        "model": served.parts[0].model,
        "created": int(served.arrived),
        "status": served.status or None,
        "state": "ended" if served.ended_at else slowest["state"],
        **{key: slowest[key] for key in ("total_ms", "milliseconds", "sentences", "advice")},
        "num_prompts": served.num_parts,
        "prompts": prompts,
    }


def as_text(explanation: dict[str, Any]) -> str:
    """Format an explanation as plain text, prompt by prompt."""
    prompts, texts = explanation["prompts"], []
    for number, prompt in enumerate(prompts):
        which = f", prompt {number} of {explanation['num_prompts']}" if len(prompts) > 1 else ""
        title = (
            f"{explanation['id']} {explanation['path']}{which}: model {explanation['model']}, engine "
            f"{prompt['engine']}, {prompt['state']}, {words.spell_s(prompt['total_ms'] / 1000)}"
        )
        seconds = {stage: value / 1000 for stage, value in prompt["milliseconds"].items()}
        texts.append(words.to_text(title, seconds, prompt["sentences"], prompt["advice"]))
    return "\n".join(texts)


async def _explain_part(fleet: Fleet, served: ServedRequest, part: ServedPart) -> dict[str, Any]:
    story = await _ask_engine(fleet, part)
    if story is None:
        return _without_engine(served, part)
    alike = await _count_alike(fleet, served, part) if story.num_cached < PREFIX_TOKENS[-1] else []
    return to_json(story, served, part, alike)


async def _ask_engine(fleet: Fleet, part: ServedPart) -> EngineStory | None:
    engine = next((m for m in fleet.metrics.meters if m.labels == (part.model, part.engine)), None)
    if engine is None:  # its model is no longer served
        return None
    try:
        async with asyncio.timeout(ENGINE_TIMEOUT_S):
            return await engine.explain(part.engine_id)
    except (TimeoutError, EngineError):
        return None


async def _count_alike(fleet: Fleet, served: ServedRequest, part: ServedPart) -> list[int]:
    """Count the same owner's prompts that share a prefix but not the salt, by length of the prefix."""
    if not part.prefixes:
        return []
    counts = fleet.state.stories.count_alike(served.owner, part.prefixes, part.salt)
    for others in await fleet.ask_processes(CountAlike(served.owner, list(part.prefixes), part.salt)):
        counts = [a + b for a, b in zip(counts, others, strict=True)]
    return counts


def _without_engine(served: ServedRequest, part: ServedPart) -> dict[str, Any]:
    """Return the story of a request without its engine's part."""
    first = part.first_at or served.ended_at or part.submitted_at
    seconds = {"API": part.submitted_at - served.arrived_at, "engine": first - part.submitted_at}
    if part.last_at:
        seconds |= {"decode": part.last_at - first, "out": max(served.ended_at - part.last_at, 0.0)}
    said = [FORGOTTEN]
    if served.error is not None and not part.first_at:
        said = ["It was rejected, or failed before its first token."]
    story = EngineStory(
        request_id=part.engine_id, added_at=part.submitted_at, first_at=part.first_at, ended_at=part.last_at,
        finish_reason=part.finish_reason, error=served.error, num_output=part.num_tokens,
    )  # fmt: skip
    if part.finish_reason is not None:
        said += words.sentences(story, served, part)
    return {
        "engine_id": part.engine_id,
        "engine": part.engine,
        "state": "ended" if part.finish_reason is not None else "unknown",
        "finish_reason": part.finish_reason,
        "error": served.error,
        "output_tokens": part.num_tokens,
        "total_ms": words.to_ms(sum(seconds.values())),
        "milliseconds": {stage: words.to_ms(value) for stage, value in seconds.items()},
        "sentences": said,
        "advice": [],
    }


def to_json(story: EngineStory, served: ServedRequest, part: ServedPart, alike: list[int]) -> dict[str, Any]:
    """Return the explanation of one prompt: numbers, sentences and advice."""
    seconds = words.stages(story, served, part)
    saved = words.saved_s(story)
    constraint = {
        "compile_ms": words.to_ms(seconds["compile"]),
        "mask_ms": words.to_ms(story.mask_s),
        "jumped_tokens": story.num_jumped,
    }
    return {
        "engine_id": part.engine_id,
        "engine": part.engine,
        "state": words.state_of(story),
        "finish_reason": part.finish_reason or story.finish_reason,
        "error": story.error,
        "prompt_tokens": story.num_prompt,
        "output_tokens": story.num_output,
        "first_token_ms": words.to_ms(story.first_at - served.arrived_at) if story.first_at else None,
        "longest_gap_ms": words.to_ms(part.longest_gap_s),
        "total_ms": words.to_ms(sum(seconds.values())),
        "milliseconds": {stage: words.to_ms(value) for stage, value in seconds.items()},
        "sentences": [*words.sentences(story, served, part)],
        "advice": advise(Case(story, seconds, alike, words.taken_s(story, part), words.load_s(served))),
        "queue": {
            "steps": story.waited_steps,
            "by_reason_ms": words.held_ms(story),
            "waiting_before": story.num_ahead,
            "running_then": story.num_running,
            "overtaken_by": story.num_overtakers,
        },
        "cache": {
            "tokens": story.num_cached,
            "from_host": story.num_from_host,
            "saved_ms": None if saved is None else words.to_ms(saved),
        },
        "chunks": {"count": story.num_chunks, "tokens": story.num_computed, "beside": story.most_beside},
        "preemptions": {
            "count": story.num_preemptions,
            "swaps": story.num_swaps,
            "blocks_moved": story.num_moved,
            "tokens_recomputed": story.num_recomputed,
            "ms": words.to_ms(story.away_s),
        },
        "drafts": {
            "proposed": story.num_drafts,
            "accepted": story.num_accepted,
            "steps": story.num_draft_steps,
        },
        "constraint": constraint if story.is_structured else None,
        "events": words.event_lines(story),
        "events_omitted": story.num_omitted,
    }
