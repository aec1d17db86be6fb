"""The counts that an engine reports at any moment, for metrics, health and the router.

Counters only grow, gauges are as of now. An engine that is started again begins at zero; its client
keeps the last snapshot of each life, and `add_counters` makes one story of them.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, fields, replace
from typing import Any

from infer.scheduling.plan import Chunks

STEP_TOKENS = (1.0, *(float(2**power) for power in range(3, 15)))  # bounds for the size of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineForm:
    """The number formats of an engine and what computes them: facts that stay as long as it lives."""

    dtype: str = ""  # number format of the activations
    weights: str = ""  # their form: int8, int4, int4+int8, fp32, bf16, or "as stored"
    kv_cache_dtype: str = ""  # number format of keys and values
    products: str = ""  # rounding of a CPU's integer products: exact or fast; none: weights are not integers
    gpu: str = ""  # the name (UUID) of the GPU that computes it; none: a CPU, or one without a name


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats(EngineForm):
    """A snapshot after a step."""

    num_steps: int = 0  # counter: plans that a device ran
    num_running: int = 0  # sequences
    num_waiting: int = 0
    num_queued_tokens: int = 0  # prompt tokens that are not computed yet
    token_s: float = 0.0  # seconds of a prompt token and of a row that decodes, as lately; 0: not known
    row_s: float = 0.0
    max_batch_size: int = 0  # sequences that may run
    num_preemptions: int = 0  # counter
    num_prompt_tokens: int = 0  # counter: computed or found in the cache
    num_output_tokens: int = 0  # counter
    num_step_tokens: int = 0  # counter: tokens the model has seen
    step_sizes: tuple[int, ...] = ()  # counters: steps by tokens, one per bucket of STEP_TOKENS
    num_queried_tokens: int = 0  # counter: prompt tokens looked up in the prefix cache
    num_hit_tokens: int = 0  # counter: tokens of these that were found
    num_host_hit_tokens: int = 0  # counter: tokens of these that were in host memory
    host_bytes_out: int = 0  # counter: bytes of blocks that went to host memory
    host_bytes_in: int = 0  # counter: bytes of blocks that came from there
    num_restarts: int = 0  # counter: times it was started again, counted by its client
    num_grammar_failures: int = 0  # counter: constraints that could not be compiled
    grammar_s: float = 0.0  # counter: seconds of compiling, and
    grammar_times: tuple[int, ...] = ()  # counters: how often, one per bucket of GRAMMAR_SECONDS
    num_draft_windows: int = 0  # counter: sequences' steps with drafts
    num_draft_tokens: int = 0  # counter: drafts that steps have judged
    num_accepted_tokens: int = 0  # counter: drafts of these that were kept
    accepted_by_position: tuple[int, ...] = ()  # counters: kept at each position of a window
    draft_saved_s: float = 0.0  # seconds saved in all, estimated; falls where drafts are wrong
    rank_step_s: float = 0.0  # counter: seconds of steps that several ranks compute, as rank 0 sees them
    rank_wait_s: tuple[float, ...] = ()  # counters: seconds that each rank has waited, by RANK_WAITS
    block_size: int = 0  # tokens
    num_blocks: int = 0
    num_used_blocks: int = 0  # held by sequences
    num_cached_blocks: int = 0  # held by the prefix tree
    num_host_blocks: int = 0  # blocks in host memory
    num_used_host_blocks: int = 0  # host blocks that hold something


RANK_WAITS = ("sum", "stage", "order")  # what a rank waits for: sums of others, another stage, rank 0

PACE_WEIGHT = 0.1  # weight of the last step

GRAMMAR_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # bounds for compiling a constraint

GAUGES = (
    "num_running", "num_waiting", "max_batch_size", "block_size", "num_blocks", "num_used_blocks",
    "num_cached_blocks", "num_host_blocks", "num_used_host_blocks", "num_queued_tokens", "token_s", "row_s",
)  # fmt: skip


def add_counters(now: EngineStats, past: EngineStats) -> EngineStats:
    """The snapshot `now` of an engine whose earlier lives counted `past`."""
    counted: dict[str, Any] = {}
    for name in {field.name for field in fields(EngineStats)} - {field.name for field in fields(EngineForm)}:
        new, old = getattr(now, name), getattr(past, name)
        if isinstance(new, tuple):  # counters of buckets
            counted[name] = tuple(map(sum, zip(new, old, strict=True))) if new and old else new or old
        elif name not in GAUGES:
            counted[name] = new + old
    return replace(now, **counted)


def is_progress(before: EngineStats, after: EngineStats) -> bool:
    """True if an engine has done something between two snapshots: computed tokens, or had nothing to do.

    Outputs do not count, for a chunk of a long prompt makes none; nor do turns of the loop without a step.
    """
    was_idle = not (before.num_running or before.num_waiting)
    is_idle = not (after.num_running or after.num_waiting)
    return was_idle or is_idle or after.num_step_tokens > before.num_step_tokens


class StepPace:
    """The time that a prompt token and a decoding row take, on average over the last steps."""

    __slots__ = ("row_s", "token_s")

    def __init__(self) -> None:
        self.token_s = self.row_s = 0.0

    def observe(self, chunks: Chunks, seconds: float) -> None:
        """Take a step that has ended, unless it has drafts; more tokens than rows mean prompts."""
        num_rows = num_tokens = len(chunks)
        if chunks.num_drafts or not num_rows:
            return
        if not chunks.is_repeated:
            num_tokens = int((chunks.stops - chunks.starts).sum())
        if num_tokens > num_rows:
            self.token_s = _lean(self.token_s, seconds / num_tokens)
        else:
            self.row_s = _lean(self.row_s, seconds / num_rows)


def _lean(mean: float, value: float) -> float:
    """The mean, a little nearer to a new value; the first value is taken as it is."""
    return mean + PACE_WEIGHT * (value - mean) if mean else value


class Histogram:
    """Counts of values by bucket: `observe` is a search among a few numbers and two additions."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last is beyond all bounds
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value in the first bucket whose bound is not below it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Prometheus' buckets: how many values are not above each bound."""
        rows, running = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            rows.append((bound, float(running)))
        return rows
