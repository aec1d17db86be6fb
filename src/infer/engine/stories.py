"""The history of each request in numbers, kept for running requests and the last ones that ended.

`GET /explain/{id}` turns these numbers into text (server/explain/). They are recorded at events of a request,
not for every token:

    accept   it joins the queue          admit    it is admitted, for the first time or again
    chunk    a part of its prompt        preempt  it is preempted
    first    its first token             end      its last token

Why a request waits is a fact about the queue: its first sequence waits for one reason at a time
(scheduling/watch.py). So the seconds of each reason are summed for the whole queue. A request takes the sums
when it arrives and subtracts them when it is admitted:

    sums      batch full 4.0 s   cache full 0.5 s      a request arrives
              batch full 6.5 s   cache full 0.5 s      it is admitted: it waited 2.5 s for a full batch

The size of a record does not depend on the request's length: counts, times, and the first and last MAX_EVENTS
events. Prompts, outputs and salts are never kept.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np

from infer.engine.stats import Histogram
from infer.finish_reason import FinishReason
from infer.scheduling.request import Request
from infer.scheduling.scheduler import Scheduler
from infer.scheduling.sequence import Sequence, SequenceGroup
from infer.scheduling.watch import HOLDS, NEXT_STEP

MAX_EVENTS = 12  # events kept from the beginning of a story, and as many from its end
MAX_ERROR = 300  # characters of an error message
EVENT_NAMES: Final = ("chunk", "preempted", "swapped out", "returned")
CHUNK, PREEMPTED, SWAPPED_OUT, RETURNED = range(len(EVENT_NAMES))
MEMORY = 0.95  # weight of earlier prompts in the moving average


class StoryEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Something that happened to a request."""

    kind: int  # an index of EVENT_NAMES
    step: int
    at: float  # perf_counter seconds
    num_tokens: int  # tokens computed by a chunk, lost or swapped out by a preemption, or kept on a return
    num_running: int  # running sequences


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of an engine that may explain a story."""

    max_batch_size: int = 0
    max_num_batched_tokens: int = 0
    prefill_chunk_size: int = 0
    prefill_tokens_while_decoding: int | None = None
    scheduler_policy: str = "fcfs"
    max_wait_steps: int = 0
    num_blocks: int = 0
    block_size: int = 0
    caches_prefixes: bool = True
    num_host_blocks: int = 0


class EngineStory(msgspec.Struct, kw_only=True):
    """The engine's record of a request. Times are perf_counter seconds; 0: not reached yet."""

    request_id: str
    now: float = 0.0  # time of the query
    added_at: float = 0.0
    accepted_at: float = 0.0  # time at which it joined the queue, its constraint compiled
    begun_at: float = 0.0  # time of its first admission
    first_at: float = 0.0
    ended_at: float = 0.0
    waited_steps: int = 0  # steps before its first admission
    finish_reason: FinishReason | None = None  # None: it has not ended
    error: str | None = None
    num_prompt: int = 0
    num_output: int = 0
    num_sequences: int = 1
    priority: int = 0
    is_structured: bool = False
    held_s: tuple[float, ...] = ()  # seconds of its first wait by reason: one for each of HOLDS
    num_ahead: int = 0  # sequences that waited when it arrived
    num_running: int = 0  # sequences that ran when it arrived
    num_overtakers: int = 0  # later requests that were admitted before it (a lower bound)
    num_cached: int = 0  # prompt tokens found in the prefix cache
    num_from_host: int = 0  # prompt tokens found in host memory
    prefill_s: float = 0.0  # recent average of the seconds per prompt token; 0: unknown
    num_chunks: int = 0
    num_computed: int = 0  # tokens of these chunks
    most_beside: int = 0  # most other running sequences in a step with one of its chunks
    num_preemptions: int = 0
    num_swaps: int = 0  # preemptions that moved blocks to host memory
    num_moved: int = 0  # blocks moved to host memory
    num_recomputed: int = 0  # tokens
    away_s: float = 0.0  # seconds of waiting after preemptions
    away_first_s: float = 0.0  # seconds of this before its first token
    is_away: bool = False
    num_draft_steps: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    mask_s: float = 0.0  # seconds that steps waited for masks of any request while it ran
    num_jumped: int = 0  # forced tokens that were appended without a step for each
    num_steps: int = 0  # steps after its first token, without those while it was away
    num_step_tokens: int = 0  # tokens of all requests in these steps
    num_prompts_beside: int = 0  # tokens of others' prompts in these steps
    events: list[StoryEvent] = []
    num_omitted: int = 0  # events between the first and the last kept ones
    limits: EngineLimits = EngineLimits()


class _Life:
    """A request that has not ended: its story so far, and the engine's sums at its start."""

    __slots__ = (
        "accepted_step", "away_since", "begun_before", "group", "held_then", "last_events", "masks_then",
        "num_lost", "story", "work",
    )  # fmt: skip

    def __init__(self, request: Request, added_at: float) -> None:
        params = request.params
        self.story = EngineStory(
            request_id=request.request_id,
            added_at=added_at,
            num_prompt=len(request.prompt),
            num_sequences=params.num_sequences,
            priority=request.priority,
            is_structured=params.structured is not None,
        )
        self.group: SequenceGroup | None = None
        self.accepted_step = self.begun_before = 0
        self.held_then: tuple[float, ...] = ()
        self.masks_then = self.away_since = 0.0
        self.work = np.zeros(3, np.int64)  # `_work` of its own steps; while it runs, less the sums so far
        self.num_lost = 0  # tokens that its preempted sequence had computed
        self.last_events: deque[StoryEvent] | None = None

    def note(self, kind: int, step: int, at: float, num_tokens: int, num_running: int) -> None:
        """Keep an event if it is among the first or the last MAX_EVENTS."""
        event, story = StoryEvent(kind, step, at, num_tokens, num_running), self.story
        if len(story.events) < MAX_EVENTS:
            story.events.append(event)
            return
        if self.last_events is None:
            self.last_events = deque(maxlen=MAX_EVENTS)
        story.num_omitted += len(self.last_events) == MAX_EVENTS
        self.last_events.append(event)


class Stories:
    """The stories of running requests and of the last `limit` that ended. One thread owns it."""

    def __init__(
        self, limit: int, scheduler: Scheduler, step_tokens: Histogram, clock: Callable[[], float]
    ) -> None:
        self._limit = limit
        self._scheduler, self._step_tokens, self._clock = scheduler, step_tokens, clock
        self._live: dict[str, _Life] = {}
        self._ended: OrderedDict[str, EngineStory] = OrderedDict()
        self.hold = NEXT_STEP  # the current reason for waiting
        self._held_since = clock()
        self._held_s = [0.0] * len(HOLDS)  # seconds of each reason until `_held_since`
        self._num_begun = 0
        self._chunk_tokens = 0  # tokens of all requests' chunks
        self._prefill_s = self._prefill_tokens = 0.0  # decaying sums over recent prompts
        self.mask_s = 0.0  # seconds in which steps waited for masks
        scheduler.watch = self

    # -- the queue --------------------------------------------------------------------------------

    def turn(self, hold: int) -> None:
        """Change the reason for which the queue waits."""
        now = self._clock()
        self._held_s[self.hold] += now - self._held_since
        self.hold, self._held_since = hold, now

    def _sums(self, now: float) -> tuple[float, ...]:
        sums = self._held_s.copy()
        sums[self.hold] += now - self._held_since
        return tuple(sums)

    def _work(self) -> np.ndarray:
        """Return the number of steps so far, of their tokens, and of their prompt tokens."""
        steps = self._step_tokens
        return np.array([sum(steps.counts), steps.total, self._chunk_tokens], np.int64)

    # -- events of a request ----------------------------------------------------------------------

    def add(self, request: Request, added_at: float) -> None:
        """Begin the story of a request that waits for its constraint."""
        self._live[request.request_id] = _Life(request, added_at)

    def accept(self, group: SequenceGroup) -> None:
        """Note that a request has joined the queue."""
        request, scheduler, now = group.request, self._scheduler, self._clock()
        life = self._live.get(request.request_id)
        if life is None:
            life = self._live[request.request_id] = _Life(request, group.added_at)
        life.group, life.accepted_step = group, scheduler.step
        life.held_then, life.begun_before = self._sums(now), self._num_begun
        story = life.story
        story.accepted_at = now
        story.num_running, story.num_ahead = len(scheduler.running), scheduler.num_waiting - 1

    def on_admit(self, seq: Sequence) -> None:
        """Note that a sequence was admitted, for the first time or again."""
        life = self._live.get(seq.request_id)
        if life is None:
            return
        now, story = self._clock(), life.story
        if story.begun_at:
            story.num_recomputed += max(life.num_lost - seq.num_computed, 0)
            life.num_lost = 0
            if life.away_since:
                story.away_s += now - life.away_since
                life.away_since = 0.0
                life.work -= self._work()
            life.note(RETURNED, self._scheduler.step, now, seq.num_computed, len(self._scheduler.running))
            return
        self._end_wait(life, story, now)
        story.begun_at = now
        story.num_cached, story.num_from_host = seq.num_computed, seq.num_from_host
        life.masks_then = self.mask_s
        self._num_begun += 1

    def _end_wait(self, life: _Life, story: EngineStory, now: float) -> None:
        """Record the seconds that a request has waited for each reason since it was accepted."""
        pairs = zip(self._sums(now), life.held_then, strict=True)
        story.held_s = tuple(after - before for after, before in pairs)
        story.waited_steps = self._scheduler.step - life.accepted_step
        story.num_overtakers = max(self._num_begun - life.begun_before - story.num_ahead, 0)

    def on_chunk(self, seq: Sequence, num_tokens: int, num_running: int) -> None:
        """Note a chunk of a prompt; chunks computed again after the first token only count as tokens."""
        self._chunk_tokens += num_tokens
        life = self._live.get(seq.request_id)
        if life is None:
            return
        if life.story.first_at:
            life.work[-1] -= num_tokens  # `num_prompts_beside` must not count its own tokens
            return
        story = life.story
        story.num_chunks += 1
        story.num_computed += num_tokens
        story.most_beside = max(story.most_beside, num_running - 1)
        life.note(CHUNK, self._scheduler.step, self._clock(), num_tokens, num_running)

    def on_preempt(self, seq: Sequence, num_computed: int, num_planned: int, num_moved: int) -> None:
        """Note that a sequence was preempted and lost the chunk planned for it."""
        life = self._live.get(seq.request_id)
        if life is None:
            return
        now, story = self._clock(), life.story
        if num_planned and not story.first_at:
            story.num_chunks -= 1
            story.num_computed -= num_planned
        story.num_preemptions += 1
        story.num_swaps += num_moved > 0
        story.num_moved += num_moved
        life.num_lost = 0 if num_moved else num_computed
        if not life.away_since:
            life.away_since, life.work = now, life.work + self._work()
        kind = SWAPPED_OUT if num_moved else PREEMPTED
        life.note(kind, self._scheduler.step, now, num_computed, len(self._scheduler.running))

    def jump(self, request_id: str, num_tokens: int) -> None:
        """Note forced tokens that were appended without a step for each."""
        if (life := self._live.get(request_id)) is not None:
            life.story.num_jumped += num_tokens

    def first(self, request_id: str) -> None:
        """Note the first token of a request."""
        life = self._live.get(request_id)
        if life is None or life.story.first_at:
            return
        story = life.story
        story.first_at, story.away_first_s = self._clock(), story.away_s
        life.work = np.zeros(3, np.int64) if life.away_since else -self._work()
        if story.num_computed and not story.num_preemptions:
            self._prefill_s = MEMORY * self._prefill_s + story.first_at - story.begun_at
            self._prefill_tokens = MEMORY * self._prefill_tokens + story.num_computed

    def end(self, request_id: str, reason: FinishReason, error: str | None = None) -> None:
        """End the story of a request; it may never have begun to run."""
        life = self._live.get(request_id)
        if life is None:
            return
        story = life.story
        story.ended_at = self._clock()
        story.finish_reason, story.error = reason, None if error is None else error[:MAX_ERROR]
        self._complete(life, story, story.ended_at)
        del self._live[request_id]
        self._ended.pop(request_id, None)
        self._ended[request_id] = story
        while len(self._ended) > self._limit:
            self._ended.popitem(last=False)

    # -- queries ----------------------------------------------------------------------------------

    def tell(self, request_id: str) -> EngineStory | None:
        """Return the current story of a request; None: it is unknown, or forgotten."""
        now = self._clock()
        if (life := self._live.get(request_id)) is not None:
            story = msgspec.structs.replace(life.story, events=life.story.events.copy())
            self._complete(life, story, now)
        elif (ended := self._ended.get(request_id)) is not None:
            story = ended
        else:
            return None
        return msgspec.structs.replace(story, now=now, limits=self._limits())

    def _complete(self, life: _Life, story: EngineStory, now: float) -> None:
        """Fill the fields that are computed only at the end, or for a query."""
        if life.group is not None and not story.begun_at:
            self._end_wait(life, story, now)
        if life.away_since:
            story.away_s += now - life.away_since
            story.is_away = story.finish_reason is None
            if not story.first_at:
                story.away_first_s = story.away_s
        if self._prefill_tokens:
            story.prefill_s = self._prefill_s / self._prefill_tokens
        if life.last_events is not None:
            story.events = [*story.events, *life.last_events]
        if story.begun_at and story.is_structured:
            story.mask_s = self.mask_s - life.masks_then
        if story.first_at:
            work = life.work if life.away_since else life.work + self._work()
            story.num_steps, story.num_step_tokens, story.num_prompts_beside = work.tolist()
        for seq in () if life.group is None else life.group.sequences:
            if seq.finish_reason != FinishReason.DROPPED:
                story.num_output += max(len(seq.tokens) - seq.num_prompt, 0)
            if (drafts := seq.draft_counts) is not None:
                story.num_draft_steps += drafts.num_windows
                story.num_drafts += drafts.num_drafts
                story.num_accepted += drafts.num_accepted

    def _limits(self) -> EngineLimits:
        config, pool = self._scheduler.config, self._scheduler.pool
        return EngineLimits(
            max_batch_size=config.max_batch_size,
            max_num_batched_tokens=config.max_num_batched_tokens,
            prefill_chunk_size=config.prefill_chunk_size if config.use_chunked_prefill else 0,
            prefill_tokens_while_decoding=config.prefill_tokens_while_decoding,
            scheduler_policy=config.scheduler_policy,
            max_wait_steps=config.max_wait_steps,
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            caches_prefixes=pool.caches_prefixes,
            num_host_blocks=pool.num_host_blocks,
        )
