"""What an engine can say about itself at any moment: counts for metrics, health and the router."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot after a step. Counters only grow; gauges are as of now."""

    num_steps: int = 0
    num_running: int = 0  # sequences
    num_waiting: int = 0
    num_preemptions: int = 0  # counter
    num_prompt_tokens: int = 0  # counter: computed or found in the cache
    num_output_tokens: int = 0  # counter
    num_queried_tokens: int = 0  # counter: prompt tokens looked up in the prefix cache
    num_hit_tokens: int = 0  # counter: of these, found
    num_blocks: int = 0
    num_used_blocks: int = 0  # held by sequences
    num_cached_blocks: int = 0  # held by the prefix tree
