"""The counts that an engine reports for metrics, health and the router.

Counters only grow; gauges are current values. A restarted engine begins at zero. Its client keeps the last
snapshot of each engine process, and `add_counters` adds them up.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, fields, replace
from typing import Any

from infer.scheduling.plan import Chunks

STEP_TOKENS = (1.0, *(float(2**power) for power in range(3, 15)))  # bucket bounds: tokens of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineForm:
    """The number formats of an engine and its device: facts that never change while it runs."""

    dtype: str = ""  # number format of the activations
    weights: str = ""  # form of the weights: int8, int4, int4+int8, fp32, bf16, or "as stored"
    kv_cache_dtype: str = ""  # number format of keys and values
    products: str = ""  # rounding of a CPU's integer products: exact or fast; empty: weights are not integers
    gpu: str = ""  # UUID of its GPU; empty: a CPU, or a GPU without a UUID


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats(EngineForm):
    """A snapshot after a step."""

    num_steps: int = 0  # counter: plans that a device ran
    num_running: int = 0  # sequences
    num_waiting: int = 0
    num_queued_tokens: int = 0  # prompt tokens that are not computed yet
    token_s: float = 0.0  # recent average of the seconds per prompt token; 0: unknown
    row_s: float = 0.0  # recent average of the seconds per decoding row; 0: unknown
    max_batch_size: int = 0  # most sequences that may run
    num_preemptions: int = 0  # counter
    num_prompt_tokens: int = 0  # counter: prompt tokens computed or found in the cache
    num_output_tokens: int = 0  # counter
    num_step_tokens: int = 0  # counter: tokens that the model has computed
    step_sizes: tuple[int, ...] = ()  # counters: steps by tokens, one per bucket of STEP_TOKENS
    num_queried_tokens: int = 0  # counter: prompt tokens looked up in the prefix cache
    num_hit_tokens: int = 0  # counter: queried tokens that were found
    num_host_hit_tokens: int = 0  # counter: queried tokens that were found in host memory
    host_bytes_out: int = 0  # counter: bytes of blocks copied to host memory
    host_bytes_in: int = 0  # counter: bytes of blocks copied from host memory
    num_restarts: int = 0  # counter: restarts of the engine, counted by its client
    num_grammar_failures: int = 0  # counter: constraints that could not be compiled
    grammar_s: float = 0.0  # counter: seconds of compiling constraints
    grammar_times: tuple[int, ...] = ()  # counters: compiled constraints, one per bucket of GRAMMAR_SECONDS
    num_draft_windows: int = 0  # counter: steps of a sequence with drafts
    num_draft_tokens: int = 0  # counter: verified drafts
    num_accepted_tokens: int = 0  # counter: accepted drafts
    accepted_by_position: tuple[int, ...] = ()  # counters: accepted drafts at each position of a window
    draft_saved_s: float = 0.0  # estimated seconds saved in total; falls when drafts are rejected
    rank_step_s: float = 0.0  # counter: seconds of steps that several ranks compute, measured by rank 0
    rank_wait_s: tuple[float, ...] = ()  # counters: seconds that each rank has waited, by RANK_WAITS
    block_size: int = 0  # tokens
    num_blocks: int = 0
    num_used_blocks: int = 0  # blocks held by sequences
    num_cached_blocks: int = 0  # blocks held by the prefix tree
    num_host_blocks: int = 0  # blocks in host memory
    num_used_host_blocks: int = 0  # host blocks in use


RANK_WAITS = ("sum", "stage", "order")  # causes of waiting: all-reduce, another stage, an order from rank 0

PACE_WEIGHT = 0.1  # weight of the last step in a moving average

GRAMMAR_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # bucket bounds: seconds to compile a constraint

GAUGES = (
    "num_running", "num_waiting", "max_batch_size", "block_size", "num_blocks", "num_used_blocks",
    "num_cached_blocks", "num_host_blocks", "num_used_host_blocks", "num_queued_tokens", "token_s", "row_s",
)  # fmt: skip


def add_counters(now: EngineStats, past: EngineStats) -> EngineStats:
    """Return the snapshot `now`, with the counters of earlier engine processes (`past`) added."""
    counted: dict[str, Any] = {}
    for name in {field.name for field in fields(EngineStats)} - {field.name for field in fields(EngineForm)}:
        new, old = getattr(now, name), getattr(past, name)
        if isinstance(new, tuple):  # bucket counters
            counted[name] = tuple(map(sum, zip(new, old, strict=True))) if new and old else new or old
        elif name not in GAUGES:
            counted[name] = new + old
    return replace(now, **counted)


def is_progress(before: EngineStats, after: EngineStats) -> bool:
    """True if an engine computed tokens between two snapshots, or was idle at one of them.

    Outputs do not count, because a chunk of a long prompt makes none; neither do loop turns without a step.
    """
    was_idle = not (before.num_running or before.num_waiting)
    is_idle = not (after.num_running or after.num_waiting)
    return was_idle or is_idle or after.num_step_tokens > before.num_step_tokens


class StepPace:
    """Moving averages of the seconds per prompt token and per decoding row."""

    __slots__ = ("row_s", "token_s")

    def __init__(self) -> None:
        self.token_s = self.row_s = 0.0

    def observe(self, chunks: Chunks, seconds: float) -> None:
        """Add a step that has ended, unless it has drafts; more tokens than rows mean prompts."""
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
    """Return the moving average with a new value; the first value is taken as it is."""
    return mean + PACE_WEIGHT * (value - mean) if mean else value


class Histogram:
    """Counts of values by bucket; `observe` costs a binary search and two additions."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last bucket is above all bounds
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value in the first bucket whose bound is not below it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Return Prometheus buckets: the number of values up to each bound."""
        rows, running = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            rows.append((bound, float(running)))
        return rows
